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
	seals, err = list(ctx, s.db, value[string], "SELECT seal FROM seals")
	return seals, slices.Contains(seals, openSeals), err
}

// CloseSeals implements lifecycle.SealStore.
func (s *Store) CloseSeals(ctx context.Context, seals []string) error {
	return s.durably(ctx, func(tx *sql.Tx) error {
		err := runEach(ctx, "INSERT OR IGNORE INTO seals (seal) VALUES (?)", seals, func(seal string) []any { return []any{seal} })(tx)
		if err != nil {
			return err
		}
		return run(ctx, "DELETE FROM seals WHERE seal = ?", openSeals)(tx)
	})
}
