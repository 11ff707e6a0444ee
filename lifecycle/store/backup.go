package store

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"strings"
	"time"
	"unicode"
)

// Origin names the server that made a backup. A backup is a snapshot with a table for its Origin.
type Origin struct {
	Instance string // the server's ID, which its objects carry in a label
	SealKey  string // of the labels' seals, in hexadecimal; empty if the server had none
	Berm     string // the version that made the backup
	Created  time.Time
}

// Valid returns an error unless o can be printed and says who made the backup, and when.
func (o Origin) Valid() error {
	if o.Instance == "" || o.Created.IsZero() || strings.ContainsFunc(o.Instance+o.Berm, unicode.IsControl) {
		return errors.New("it doesn't say which server it is of")
	}
	return nil
}

const originTable = "CREATE TABLE backup (instance TEXT NOT NULL, seal_key TEXT NOT NULL, berm TEXT NOT NULL, created_at INTEGER NOT NULL)"

// PutOrigin turns the snapshot at path into a backup. The file isn't synced to the disk.
func PutOrigin(ctx context.Context, path string, o Origin) error {
	db, err := openFile(path, url.Values{"mode": {"rw"}}, unsynced)
	if err != nil {
		return err
	}
	_, err = db.ExecContext(ctx, originTable+"; INSERT INTO backup VALUES (?, ?, ?, ?)", o.Instance, o.SealKey, o.Berm, o.Created.UnixMilli())
	return errors.Join(err, db.Close())
}

// TakeOrigin turns the backup at path into a store again. It fails if the file is no
// backup, and doesn't check the rest of it.
func TakeOrigin(ctx context.Context, path string) (o Origin, err error) {
	if _, err := Look(path); err != nil {
		return o, err
	}
	db, err := openFile(path, url.Values{"mode": {"rw"}}, "trusted_schema(0)", "cell_size_check(1)", "secure_delete(1)", unsynced)
	if err != nil {
		return o, err
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	var found string
	err = db.QueryRowContext(ctx, "SELECT COALESCE(group_concat(sql), '') FROM sqlite_schema WHERE tbl_name = 'backup'").Scan(&found)
	switch {
	case err != nil:
		return o, fmt.Errorf("it is damaged: %w", err)
	case found == "":
		return o, errors.New("it is a database, but no backup: it has no table backup")
	case found != originTable:
		return o, errors.New("its table backup isn't that of a backup")
	}
	var created int64
	if err := db.QueryRowContext(ctx, "SELECT instance, seal_key, berm, created_at FROM backup").Scan(&o.Instance, &o.SealKey, &o.Berm, &created); err != nil {
		return o, fmt.Errorf("read its table backup: %w", err)
	}
	o.Created = time.UnixMilli(created).UTC()
	if err := o.Valid(); err != nil {
		return o, err
	}
	_, err = db.ExecContext(ctx, "DROP TABLE backup")
	return o, err
}
