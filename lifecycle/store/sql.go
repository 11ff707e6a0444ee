package store

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"github.com/containerd/errdefs"
	"modernc.org/sqlite"
	sqlite3 "modernc.org/sqlite/lib"
)

// scanner is a row of a query's result.
type scanner interface{ Scan(dest ...any) error }

// querier is the database, or a transaction.
type querier interface {
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
}

// value scans a row of one column.
func value[T any](row scanner) (v T, err error) {
	err = row.Scan(&v)
	return v, err
}

// one returns the row of a query. The error is in errdefs' NotFound class if there is none.
func one[T any](ctx context.Context, q querier, scan func(scanner) (T, error), query string, args ...any) (T, error) {
	v, err := scan(q.QueryRowContext(ctx, query, args...))
	if err != nil {
		var none T
		return none, failed("read", err)
	}
	return v, nil
}

// list returns all rows of a query.
func list[T any](ctx context.Context, q querier, scan func(scanner) (T, error), query string, args ...any) ([]T, error) {
	var all []T
	_, err := eachRow(ctx, q, func(row scanner) error {
		v, err := scan(row)
		all = append(all, v)
		return err
	}, query, args...)
	if err != nil {
		return nil, err
	}
	return all, nil
}

// eachRow calls f with every row of a query, until f fails. It returns for how many rows f
// succeeded.
func eachRow(ctx context.Context, q querier, f func(scanner) error, query string, args ...any) (n int, err error) {
	rows, err := q.QueryContext(ctx, query, args...)
	if err != nil {
		return 0, failed("read", err)
	}
	defer func() { _ = rows.Close() }() // rows.Err has all that can go wrong
	for rows.Next() {
		if err := f(rows); err != nil {
			return n, failed("read", err)
		}
		n++
	}
	return n, failed("read", rows.Err())
}

// ensure returns the row of a query for a key. If there is none, it inserts the row durably, and
// made is true.
func ensure[T any](ctx context.Context, s *Store, scan func(scanner) (T, error), query string, key []any, insert string, values ...any) (got T, made bool, err error) {
	got, err = one(ctx, s.db, scan, query, key...)
	if !errdefs.IsNotFound(err) {
		return got, false, err
	}
	err = s.durably(ctx, func(tx *sql.Tx) error {
		made, err = changed(tx.ExecContext(ctx, insert, values...))
		if err == nil {
			got, err = one(ctx, tx, scan, query, key...)
		}
		return err
	})
	if err != nil {
		var none T
		return none, false, err
	}
	return got, made, nil
}

// run returns a function for durably and inTx. It runs a statement once.
func run(ctx context.Context, query string, args ...any) func(*sql.Tx) error {
	return runEach(ctx, query, [][]any{args}, func(args []any) []any { return args })
}

// runEach is run for a statement that runs once for each value.
func runEach[T any](ctx context.Context, query string, values []T, args func(T) []any) func(*sql.Tx) error {
	return func(tx *sql.Tx) error {
		stmt, err := tx.PrepareContext(ctx, query)
		if err != nil {
			return err
		}
		defer func() { _ = stmt.Close() }() // goes with the transaction at the latest
		for _, v := range values {
			if _, err := stmt.ExecContext(ctx, args(v)...); err != nil {
				return err
			}
		}
		return nil
	}
}

// changed reports whether a statement changed anything.
func changed(res sql.Result, err error) (bool, error) {
	if err != nil {
		return false, err
	}
	n, err := res.RowsAffected()
	return n > 0, err
}

// durably is inTx that also syncs the commit, and all commits before it, to the disk. A crash of
// the machine doesn't undo them.
func (s *Store) durably(ctx context.Context, f func(*sql.Tx) error) error {
	conn, err := s.db.Conn(ctx)
	if err != nil {
		return failed("write", err)
	}
	defer func() { _ = conn.Close() }() // returns it to the pool
	if _, err := conn.ExecContext(ctx, "PRAGMA synchronous = FULL"); err != nil {
		return failed("write", err)
	}
	// If this fails, later commits only take longer.
	defer func() { _, _ = conn.ExecContext(context.WithoutCancel(ctx), "PRAGMA synchronous = NORMAL") }()
	return inTx(ctx, conn, f)
}

// inTx runs f in a transaction. If it fails, nothing has changed.
func inTx(ctx context.Context, db interface {
	BeginTx(ctx context.Context, opts *sql.TxOptions) (*sql.Tx, error)
}, f func(*sql.Tx) error) error {
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return failed("write", err)
	}
	defer func() { _ = tx.Rollback() }() // does nothing after the commit
	if err := f(tx); err != nil {
		return failed("write", err)
	}
	return failed("write", tx.Commit())
}

// failed wraps an error of SQLite in its errdefs class, with the operation that failed.
func failed(doing string, err error) error {
	if err == nil {
		return nil
	}
	var e *sqlite.Error
	switch {
	case errors.Is(err, sql.ErrNoRows):
		err = errdefs.ErrNotFound
	case !errors.As(err, &e):
	case e.Code() == sqlite3.SQLITE_CONSTRAINT_FOREIGNKEY: // the parent row is missing
		err = fmt.Errorf("%w: %w", errdefs.ErrNotFound, err)
	case e.Code() == sqlite3.SQLITE_CONSTRAINT_UNIQUE, e.Code() == sqlite3.SQLITE_CONSTRAINT_PRIMARYKEY:
		err = fmt.Errorf("%w: %w", errdefs.ErrAlreadyExists, err)
	}
	return fmt.Errorf("%s the store: %w", doing, err)
}
