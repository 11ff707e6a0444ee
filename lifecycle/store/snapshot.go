package store

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"

	jsonv2 "github.com/go-json-experiment/json"
	jsonv1 "github.com/go-json-experiment/json/v1"
	"github.com/google/uuid"

	"github.com/bermhq/berm/lifecycle"
)

// maxDefects is how many defects Check reports.
const maxDefects = 10

// unsynced is for copies, which the caller must sync.
const unsynced = "synchronous(OFF)"

// Report counts the records of a sound store.
type Report struct {
	Schema     int // the version of its schema
	Sandboxes  int
	Workspaces int
	Chats      int
	Files      int
}

// Empty reports whether there is nothing in the store.
func (r Report) Empty() bool { return r == Report{Schema: r.Schema} }

// Snapshot writes a copy of the database at path, as it is at one moment, into a new file. The
// database may be in use, also by another process, and isn't changed. The copy doesn't know
// what happens later. So its sandboxes have no last use, its content types hold for any file
// of the name, and it is fresh. It isn't synced to the disk.
func Snapshot(ctx context.Context, path, to string) error {
	if err := snapshot(ctx, path, to); err != nil {
		return fmt.Errorf("copy the store %s: %w", path, err)
	}
	return nil
}

func snapshot(ctx context.Context, path, to string) error {
	db, err := openReadOnly(path)
	if err != nil {
		return err
	}
	defer func() { _ = db.Close() }() // nothing was written
	f, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	if err := f.Close(); err != nil {
		return err
	}
	if _, err := db.ExecContext(ctx, "VACUUM INTO ?", to); err != nil {
		return err
	}
	copied, err := openFile(to, url.Values{}, unsynced)
	if err != nil {
		return err
	}
	_, err = copied.ExecContext(ctx, fmt.Sprintf("UPDATE sandboxes SET last_used_at = 0; PRAGMA application_id = %d", untaken))
	if err == nil {
		err = forgetInodes(ctx, copied)
	}
	return errors.Join(err, copied.Close())
}

// forgetInodes makes content types hold for any file of the name, as restored chats have other
// inodes.
func forgetInodes(ctx context.Context, db *sql.DB) error {
	columns, err := one(ctx, db, value[int], "SELECT COUNT(*) FROM pragma_table_info('files') WHERE name = 'inode'")
	if err != nil || columns == 0 { // an older schema has no such column
		return err
	}
	_, err = db.ExecContext(ctx, "UPDATE files SET inode = 0, old_type = '', old_inode = 0")
	return err
}

func openReadOnly(path string) (*sql.DB, error) {
	path, err := filepath.Abs(path)
	if err != nil {
		return nil, err
	}
	if _, err := os.Stat(path); err != nil { // SQLite's error says less
		return nil, err
	}
	// Reading a stopped store makes files beside it, which only a writer removes again. But a
	// writer would also merge an existing log into the database. So open for writing only if
	// there is no log.
	mode, sync := "rw", "synchronous(NORMAL)"
	for _, suffix := range []string{"-wal", "-journal"} {
		if _, err := os.Lstat(path + suffix); !errors.Is(err, fs.ErrNotExist) {
			mode, sync = "ro", unsynced
		}
	}
	return openFile(path, url.Values{"mode": {mode}}, "trusted_schema(0)", "cell_size_check(1)", sync)
}

// Check reads the whole database at path, and counts its records. The error says what is wrong.
// The database may be in use, and isn't changed. If its schema is older, Check makes a copy in
// the directory scratch, and migrates that. If scratch is empty, it uses a temporary directory
// below os.TempDir.
func Check(ctx context.Context, path, scratch string) (Report, error) {
	r, err := check(ctx, path, scratch)
	if err != nil {
		return Report{}, fmt.Errorf("check the store %s: %w", path, err)
	}
	return r, nil
}

func check(ctx context.Context, path, scratch string) (r Report, err error) {
	db, err := openReadOnly(path)
	if err != nil {
		return r, err
	}
	defer func() { _ = db.Close() }() // nothing was written
	names, err := migrationNames()
	if err != nil {
		return r, err
	}
	tx, err := db.BeginTx(ctx, nil) // so that all is of one moment
	if err != nil {
		return r, err
	}
	defer func() { _ = tx.Rollback() }() // nothing was written
	if r.Schema, err = versionOf(ctx, tx, len(names)); err != nil {
		return r, err
	}
	if r.Schema == 0 {
		return r, errors.New("there is no schema in it")
	}
	if err := errors.Join(checkFile(ctx, tx), checkSchema(ctx, tx, names[:r.Schema])); err != nil {
		return r, err
	}
	if r.Schema == len(names) {
		err = r.count(ctx, tx)
		return r, err
	}
	if scratch == "" {
		if scratch, err = os.MkdirTemp("", "berm-check-"); err != nil {
			return r, err
		}
		defer func() { err = errors.Join(err, os.RemoveAll(scratch)) }()
	}
	to := filepath.Join(scratch, "migrated.db")
	if err := snapshot(ctx, path, to); err != nil {
		return r, err
	}
	s, err := Open(ctx, Options{Path: to})
	if err != nil {
		return r, err
	}
	err = errors.Join(r.count(ctx, s.db), s.Close(), os.Remove(to))
	return r, err
}

// checkFile makes SQLite check every page, index and constraint.
func checkFile(ctx context.Context, q querier) error {
	found, err := list(ctx, q, value[string], fmt.Sprintf("PRAGMA integrity_check(%d)", maxDefects))
	if err != nil {
		return err
	}
	if !slices.Equal(found, []string{"ok"}) {
		return fmt.Errorf("it is damaged: %s", strings.Join(found, "; "))
	}
	found, err = list(ctx, q, value[string], `SELECT COUNT(*) || ' of ' || "table" || ' without ' || parent FROM pragma_foreign_key_check GROUP BY "table", parent`)
	if err == nil && len(found) > 0 {
		err = fmt.Errorf("it has rows that belong to nothing: %s", strings.Join(found, "; "))
	}
	return err
}

// checkSchema compares the schema with what the migrations make: there is no trigger or
// view that Berm didn't put there, and nothing is missing.
func checkSchema(ctx context.Context, q querier, names []string) error {
	db, err := sql.Open("sqlite", ":memory:")
	if err != nil {
		return err
	}
	defer func() { _ = db.Close() }() // nothing is kept
	db.SetMaxOpenConns(1)             // each connection has its own memory
	const query = "SELECT type || ' ' || name || ': ' || COALESCE(sql, '') FROM sqlite_schema ORDER BY 1"
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback() }() // nothing is kept
	if err := applyMigrations(ctx, tx, names, 0); err != nil {
		return err
	}
	want, err := list(ctx, tx, value[string], query)
	if err != nil {
		return err
	}
	got, err := list(ctx, q, value[string], query)
	if err == nil && !slices.Equal(got, want) {
		err = fmt.Errorf("its tables aren't those of schema version %d", len(names))
	}
	return err
}

// count reads every record, strictly.
func (r *Report) count(ctx context.Context, q querier) (err error) {
	rows := func(n *int, query string, scan func(scanner) error) {
		if err == nil {
			*n, err = eachRow(ctx, q, scan, query)
		}
	}
	records := recordScanner(func(data []byte, v any) error { // fields that this version doesn't know would be lost
		return jsonv2.Unmarshal(data, v, jsonv2.RejectUnknownMembers(true), jsonv1.FormatDurationAsNano(true))
	})
	rows(&r.Sandboxes, "SELECT "+columns+" FROM sandboxes", func(row scanner) error {
		rec, err := records(row)
		if err != nil {
			return err
		}
		if _, err := uuid.Parse(rec.SessionID); err != nil || rec.Tenant == "" {
			return fmt.Errorf("session %q of tenant %q: no such can be", rec.SessionID, rec.Tenant)
		}
		return canonical(rec.Key)
	})
	rows(&r.Workspaces, "SELECT "+workspaceColumns+" FROM workspaces w", func(row scanner) error {
		w, err := scanWorkspace(row)
		if err == nil && (w.Tenant == "" || w.ID == "" || w.UserID == "") {
			err = fmt.Errorf("workspace %q of user %q and tenant %q: no such can be", w.ID, w.UserID, w.Tenant)
		}
		return err
	})
	rows(&r.Chats, "SELECT "+chatColumns+" FROM chats", func(row scanner) error {
		c, err := scanChat(row)
		if err != nil {
			return err
		}
		return canonical(c.ID)
	})
	file := func(row scanner) error {
		f, err := scanFile(row)
		if err == nil && (f.ID == "" || f.Name == "" || strings.Contains(f.Name, "/")) {
			err = fmt.Errorf("file %q of chat %q: no such can be", f.Name, f.chatID)
		}
		return err
	}
	rows(&r.Files, "SELECT "+fileColumns+" FROM files", file)
	rows(new(int), "SELECT "+projectColumns+" FROM ceilings", func(row scanner) error {
		c, err := scanProject(row)
		if err == nil && !filepath.IsAbs(c.Dir) { // the session is nobody's once the directory is shared
			err = fmt.Errorf("a quota for the directory %q: no such can be", c.Dir)
		}
		return err
	})
	rows(new(int), "SELECT "+restartColumns+" FROM restarts", func(row scanner) error {
		r, err := scanRestart(row)
		if err == nil && (r.ContainerID == "" || r.MaxRetries < 0 || r.Count < 0 || r.Backoff < 0) {
			err = fmt.Errorf("restart policy of container %q: invalid", r.ContainerID)
		}
		return err
	})
	return err
}

// canonical returns an error unless key is a key in its canonical form.
func canonical(key string) error {
	if got, err := lifecycle.ParseKey(key); err != nil || got != key {
		return fmt.Errorf("%q is no key", key)
	}
	return nil
}
