package store

import (
	"context"
	"database/sql"
	"slices"

	"github.com/bermhq/berm/lifecycle"
)

var _ lifecycle.SealStore = (*Store)(nil)

// openSeals is the row of a store that hasn't been given any seals.
const openSeals = "open"

// Seals implements lifecycle.SealStore.
func (s *Store) Seals(ctx context.Context) (seals []string, open bool, err error) {
	seals, err = list(ctx, s.db, func(row scanner) (seal string, err error) { return seal, row.Scan(&seal) }, "SELECT seal FROM seals")
	return seals, slices.Contains(seals, openSeals), err
}

// CloseSeals implements lifecycle.SealStore.
func (s *Store) CloseSeals(ctx context.Context, seals []string) error {
	return s.durably(ctx, func(tx *sql.Tx) error {
		for _, seal := range seals {
			if _, err := tx.ExecContext(ctx, "INSERT OR IGNORE INTO seals (seal) VALUES (?)", seal); err != nil {
				return err
			}
		}
		_, err := tx.ExecContext(ctx, "DELETE FROM seals WHERE seal = ?", openSeals)
		return err
	})
}
