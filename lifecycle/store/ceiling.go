package store

import (
	"context"
	"database/sql"

	"github.com/bermhq/berm/lifecycle/ceiling"
)

var _ ceiling.Store = (*Store)(nil)

const ceilingColumns = "project, session_id, dir"

func scanCeiling(row scanner) (c ceiling.Ceiling, err error) {
	err = row.Scan(&c.Project, &c.SessionID, &c.Dir)
	return c, err
}

// Ceilings is ceiling.Store's.
func (s *Store) Ceilings(ctx context.Context) ([]ceiling.Ceiling, error) {
	return list(ctx, s.db, scanCeiling, "SELECT "+ceilingColumns+" FROM ceilings ORDER BY project")
}

// AddCeiling is ceiling.Store's. Of errdefs' AlreadyExists class if the directory has one.
func (s *Store) AddCeiling(ctx context.Context, sessionID, dir string) (c ceiling.Ceiling, err error) {
	err = s.durably(ctx, func(tx *sql.Tx) error {
		c, err = scanCeiling(tx.QueryRowContext(ctx, "INSERT INTO ceilings (session_id, dir) VALUES (?, ?) RETURNING "+ceilingColumns, sessionID, dir))
		return err
	})
	return c, err
}

// PassCeiling is ceiling.Store's.
func (s *Store) PassCeiling(ctx context.Context, project uint32, sessionID string) error {
	return s.durably(ctx, func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, "UPDATE ceilings SET session_id = ? WHERE project = ?", sessionID, project)
		return err
	})
}

// DeleteCeiling is ceiling.Store's.
func (s *Store) DeleteCeiling(ctx context.Context, project uint32) error {
	return s.durably(ctx, func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, "DELETE FROM ceilings WHERE project = ?", project)
		return err
	})
}
