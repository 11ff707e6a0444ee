package store

import (
	"context"

	"github.com/bermhq/berm/lifecycle/restart"
)

var _ restart.Store = (*Store)(nil)

const restartColumns = "container_id, policy, max_retries, count, stopped, exit_at, backoff, next_at"

func scanRestart(row scanner) (r restart.Row, err error) {
	var exit, next int64
	err = row.Scan(&r.ContainerID, &r.Name, &r.MaxRetries, &r.Count, &r.Stopped, &exit, &r.Backoff, &next)
	r.Exit, r.Next = instant(exit), instant(next)
	return r, err
}

// Restarts implements restart.Store.
func (s *Store) Restarts(ctx context.Context) ([]restart.Row, error) { return restarts(ctx, s.db) }

func restarts(ctx context.Context, q querier) ([]restart.Row, error) {
	return list(ctx, q, scanRestart, "SELECT "+restartColumns+" FROM restarts ORDER BY container_id")
}

// ReadRestarts returns the rows of the database at path, which may be in use by another
// process and isn't changed. One with a schema older than restarts has none.
func ReadRestarts(ctx context.Context, path string) ([]restart.Row, error) {
	db, err := openReadOnly(path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = db.Close() }() // nothing was written
	tables, err := one(ctx, db, value[int], "SELECT COUNT(*) FROM sqlite_schema WHERE name = 'restarts'")
	if err != nil || tables == 0 {
		return nil, err
	}
	return restarts(ctx, db)
}

// PutRestart implements restart.Store.
func (s *Store) PutRestart(ctx context.Context, r restart.Row) error {
	return s.durably(ctx, run(ctx, "INSERT OR REPLACE INTO restarts ("+restartColumns+") VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
		r.ContainerID, r.Name, r.MaxRetries, r.Count, r.Stopped, nanos(r.Exit), int64(r.Backoff), nanos(r.Next)))
}

// DeleteRestart implements restart.Store.
func (s *Store) DeleteRestart(ctx context.Context, containerID string) error {
	_, err := s.db.ExecContext(ctx, "DELETE FROM restarts WHERE container_id = ?", containerID)
	return failed("write", err)
}
