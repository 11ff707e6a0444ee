// Package store keeps, in one SQLite file, what a container's labels can't hold: renewals, last
// uses, metadata, and what is needed to make a sandbox again. It also has the records of
// workspaces, chats and files. Without the file, no sandbox and no content is lost, but Berm no
// longer knows whose the content is. The file has environments, so only its owner may read it.
package store

import (
	"bytes"
	"context"
	"database/sql"
	"embed"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"math"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"time"

	_ "modernc.org/sqlite" // the driver, in pure Go: the binary stays static

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/runtime/atomicfile"
)

//go:embed migrations/*.sql
var migrations embed.FS

// busyTimeout is how long a call waits for another process that has locked the file.
const busyTimeout = 5 * time.Second

// Options say where the store is.
type Options struct {
	Path string // mandatory: the database file; made with mode 0600 if missing, its directory must exist
}

// untaken is the application_id of a new database, or of a snapshot, until TookOver. A database
// of an earlier version has no application_id, and counts as taken over.
const untaken = 0x6265726d

// Store is the database. It is safe for concurrent use.
type Store struct {
	db    *sql.DB
	fresh bool // it was untaken when it was opened
}

var _ lifecycle.Store = (*Store)(nil)

// Open opens the database, makes it if it is missing, and migrates an older one. It fails for a
// database of a newer version, and for a file that isn't a database, which it leaves as it is.
func Open(ctx context.Context, opts Options) (*Store, error) {
	if opts.Path == "" {
		return nil, errors.New("store: Path is mandatory")
	}
	path, err := filepath.Abs(opts.Path)
	if err != nil {
		return nil, err
	}
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open the store: %w", err)
	}
	if err := errors.Join(f.Close(), atomicfile.Sync(filepath.Dir(path))); err != nil {
		return nil, fmt.Errorf("open the store: %w", err)
	}
	// NORMAL loses nothing when this process dies, and at most the last commits when the
	// machine crashes. Labels make up for most of those. For others, durably syncs.
	db, err := openFile(path, url.Values{"_txlock": {"immediate"}}, "journal_mode(WAL)", "synchronous(NORMAL)", "foreign_keys(1)")
	if err != nil {
		return nil, fmt.Errorf("open the store: %w", err)
	}
	s := &Store{db: db}
	if err := s.migrate(ctx); err != nil {
		return nil, errors.Join(fmt.Errorf("open the store %s: %w (with the file moved away, berm starts without it: no sandbox is lost, but whose the chats are)", path, err), db.Close())
	}
	return s, nil
}

// openFile opens a file with SQLite by its absolute path, which may have any characters.
func openFile(path string, query url.Values, pragmas ...string) (*sql.DB, error) {
	query["_pragma"] = append(pragmas, fmt.Sprintf("busy_timeout(%d)", busyTimeout.Milliseconds()), "cache_size(-512)")
	db, err := sql.Open("sqlite", (&url.URL{Scheme: "file", OmitHost: true, Path: path, RawQuery: query.Encode()}).String())
	if err == nil {
		db.SetMaxOpenConns(1) // SQLite allows one writer at a time
	}
	return db, err
}

// Database is the result of Look.
type Database struct {
	Schema, Known int   // version of the schema, 0 without one; and the newest that Open knows
	Merging       bool  // a write-ahead log has changes that aren't in the file yet
	Size, Whole   int64 // size of the file in bytes, and the size that its header says; 0 if it doesn't say
}

// Look reads a database's header, without changing or locking the file. It doesn't see changes
// that are only in the write-ahead log. The error is fs.ErrNotExist if there is no file, and
// another one if the file is no database.
func Look(path string) (d Database, err error) {
	names, err := migrationNames()
	if err != nil {
		return d, err
	}
	d.Known = len(names)
	f, err := os.Open(path)
	if err != nil {
		return d, err
	}
	defer func() { _ = f.Close() }()
	var header [100]byte // https://www.sqlite.org/fileformat.html#the_database_header
	switch _, err := io.ReadFull(f, header[:]); {
	case errors.Is(err, io.EOF):
		return d, nil
	case err != nil && !errors.Is(err, io.ErrUnexpectedEOF):
		return d, fmt.Errorf("read %s: %w", path, err)
	case err != nil, !bytes.HasPrefix(header[:], []byte("SQLite format 3\x00")):
		return d, fmt.Errorf("%s is no database", path)
	}
	d.Schema = int(int32(binary.BigEndian.Uint32(header[60:])))
	if wal, err := os.Stat(path + "-wal"); err == nil {
		d.Merging = wal.Size() > 0
	}
	if page := int64(binary.BigEndian.Uint16(header[16:])); bytes.Equal(header[24:28], header[92:96]) {
		if page == 1 {
			page = 64 << 10
		}
		d.Whole = page * int64(binary.BigEndian.Uint32(header[28:]))
	}
	fi, err := f.Stat()
	if err == nil {
		d.Size = fi.Size()
	}
	return d, err
}

// migrate applies the migrations that the file's schema lacks, all or none.
func (s *Store) migrate(ctx context.Context) error {
	names, err := migrationNames()
	if err != nil {
		return err
	}
	tx, err := s.db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback() }() // does nothing after the commit
	version, err := versionOf(ctx, tx, len(names))
	if err != nil {
		return err
	}
	if version == 0 {
		if _, err := tx.ExecContext(ctx, fmt.Sprintf("PRAGMA application_id = %d", untaken)); err != nil {
			return err
		}
	}
	var mark int
	if err := tx.QueryRowContext(ctx, "PRAGMA application_id").Scan(&mark); err != nil {
		return err
	}
	s.fresh = mark == untaken
	if err := applyMigrations(ctx, tx, names, version); err != nil {
		return err
	}
	return tx.Commit()
}

func migrationNames() ([]string, error) { return fs.Glob(migrations, "migrations/*.sql") }

// versionOf returns the schema's version. It fails if that is above newest.
func versionOf(ctx context.Context, q querier, newest int) (version int, err error) {
	if err := q.QueryRowContext(ctx, "PRAGMA user_version").Scan(&version); err != nil {
		return 0, err
	}
	if version > newest {
		return 0, fmt.Errorf("its schema is version %d, and this berm knows %d: use the newer berm", version, newest)
	}
	return version, nil
}

// applyMigrations applies the migrations in names after a version.
func applyMigrations(ctx context.Context, tx *sql.Tx, names []string, version int) error {
	for _, name := range names[version:] {
		stmts, err := migrations.ReadFile(name)
		if err != nil {
			return err
		}
		if _, err := tx.ExecContext(ctx, string(stmts)); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	_, err := tx.ExecContext(ctx, fmt.Sprintf("PRAGMA user_version = %d", len(names)))
	return err
}

// Close closes the file.
func (s *Store) Close() error { return s.db.Close() }

// Fresh implements lifecycle.Store.
func (s *Store) Fresh() bool { return s.fresh }

// TookOver implements lifecycle.Store.
func (s *Store) TookOver(ctx context.Context) error {
	if !s.fresh {
		return nil
	}
	_, err := s.db.ExecContext(ctx, "PRAGMA application_id = 0")
	return failed("write", err)
}

// Ping returns nil if the store can be written.
func (s *Store) Ping(ctx context.Context) error {
	_, err := s.db.ExecContext(ctx, "UPDATE sandboxes SET last_used_at = last_used_at WHERE session_id = ''")
	return err
}

const columns = `session_id, tenant, key, container_id, created_at, expires_at, deadline, last_used_at,
	spec, env, agent_id, volume_path, metadata, overridden, enforcement`

// Records returns all records that were put and not deleted.
func (s *Store) Records(ctx context.Context) ([]lifecycle.Sandbox, error) {
	return list(ctx, s.db, recordScanner(json.Unmarshal), "SELECT "+columns+" FROM sandboxes")
}

// recordScanner returns a function that scans a record, and decodes its JSON with decode.
func recordScanner(decode func([]byte, any) error) func(scanner) (lifecycle.Sandbox, error) {
	return func(row scanner) (r lifecycle.Sandbox, err error) {
		var created, expires, deadline, used int64
		var spec, env, metadata, overridden, enforcement []byte
		if err := row.Scan(&r.SessionID, &r.Tenant, &r.Key, &r.ContainerID, &created, &expires, &deadline, &used,
			&spec, &env, &r.AgentID, &r.VolumePath, &metadata, &overridden, &enforcement); err != nil {
			return r, err
		}
		r.CreatedAt, r.ExpiresAt, r.Deadline, r.LastUsedAt = instant(created), instant(expires), instant(deadline), instant(used)
		if err := errors.Join(decode(spec, &r.Spec), decode(env, &r.Spec.Env), decode(metadata, &r.Metadata),
			decode(overridden, &r.Overridden), decode(enforcement, &r.Enforcement)); err != nil {
			return r, fmt.Errorf("session %s: %w", r.SessionID, err)
		}
		return r, nil
	}
}

// Put writes a record over the one of the same session, durably.
func (s *Store) Put(ctx context.Context, r lifecycle.Sandbox) error {
	var errs []error
	encode := func(v any) []byte {
		b, err := json.Marshal(v)
		errs = append(errs, err)
		return b
	}
	values := []any{
		r.SessionID, r.Tenant, r.Key, r.ContainerID,
		nanos(r.CreatedAt), nanos(r.ExpiresAt), nanos(r.Deadline), nanos(r.LastUsedAt),
		encode(r.Spec), encode(r.Spec.Env), r.AgentID, r.VolumePath, encode(r.Metadata), encode(r.Overridden), encode(r.Enforcement),
	}
	err := errors.Join(errs...)
	if err == nil {
		_, err = s.db.ExecContext(ctx, "INSERT OR REPLACE INTO sandboxes ("+columns+`)
			VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)`, values...)
	}
	if err != nil {
		return fmt.Errorf("write the store: session %s: %w", r.SessionID, err)
	}
	return nil
}

// Touch writes last uses, by session. It skips missing sessions.
func (s *Store) Touch(ctx context.Context, lastUsed map[string]time.Time) error {
	sessions := slices.Collect(maps.Keys(lastUsed))
	return inTx(ctx, s.db, runEach(ctx, "UPDATE sandboxes SET last_used_at = ? WHERE session_id = ?", sessions,
		func(id string) []any { return []any{nanos(lastUsed[id]), id} }))
}

// Delete removes records by session. Missing ones are no error.
func (s *Store) Delete(ctx context.Context, sessionIDs ...string) error {
	return inTx(ctx, s.db, runEach(ctx, "DELETE FROM sandboxes WHERE session_id = ?", sessionIDs, func(id string) []any { return []any{id} }))
}

// nanos returns a time as the store has it, in nanoseconds since 1970; the zero time is 0. It
// returns the last possible time for one after the year 2262, which would overflow.
func nanos(t time.Time) int64 {
	switch {
	case t.IsZero():
		return 0
	case t.After(time.Unix(0, math.MaxInt64)):
		return math.MaxInt64
	}
	return t.UnixNano()
}

// instant returns a time of the store's: nanoseconds since 1970, and 0 is the zero time.
func instant(ns int64) time.Time {
	if ns == 0 {
		return time.Time{}
	}
	return time.Unix(0, ns).UTC()
}
