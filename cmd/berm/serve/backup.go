package serve

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"github.com/bermhq/berm/cmd/berm/config"
	"github.com/bermhq/berm/lifecycle/store"
)

// Backup describes a backup: a copy of the database with a table that says what it is of.
type Backup struct {
	store.Origin
	store.Report
}

func (b Backup) String() string {
	return fmt.Sprintf("a backup of %s, by berm %s, of instance %s", b.Created.Format(time.RFC3339), b.Berm, b.Instance)
}

// MakeBackup copies a server's store, also while the server runs, and calls put with the
// path of the backup, which is gone afterwards.
func MakeBackup(ctx context.Context, cfg *config.Config, put func(path string) error) (b Backup, err error) {
	dir := cfg.StateDir
	if b.Instance, err = knownInstance(cfg); err != nil {
		return b, err
	}
	if err := errors.Join(noRestorePending(dir), ownState(dir)); err != nil {
		return b, err
	}
	work, err := openScratch(dir)
	if err != nil {
		return b, err
	}
	defer func() { err = errors.Join(err, work.Close()) }()
	key, err := SealKey(dir)
	if err != nil {
		return b, err
	}
	b.SealKey, b.Berm, b.Created = hex.EncodeToString(key), config.Version, time.Now().UTC()
	copied := filepath.Join(work.dir, StateStore)
	if err := store.Snapshot(ctx, filepath.Join(dir, StateStore), copied); err != nil {
		return b, err
	}
	if b.Report, err = store.Check(ctx, copied, work.dir); err != nil {
		return b, fmt.Errorf("the store isn't sound, so there is no backup: %w", err)
	}
	if err := store.PutOrigin(ctx, copied, b.Origin); err != nil {
		return b, err
	}
	if err := put(copied); err != nil {
		return b, fmt.Errorf("write the backup: %w", err)
	}
	return b, nil
}

// CheckStore checks a server's store, also while the server runs, and changes nothing.
func CheckStore(ctx context.Context, cfg *config.Config) (instance string, r store.Report, err error) {
	if err := errors.Join(noRestorePending(cfg.StateDir), ownState(cfg.StateDir)); err != nil {
		return "", r, err
	}
	instance, instanceErr := knownInstance(cfg)
	r, err = store.Check(ctx, filepath.Join(cfg.StateDir, StateStore), "")
	return instance, r, errors.Join(instanceErr, err)
}

// knownInstance returns the ID of the instance whose state directory it is.
func knownInstance(cfg *config.Config) (string, error) {
	instance, err := Instance(cfg.StateDir, cfg.Engine.Instance)
	if err == nil && instance == "" {
		err = fmt.Errorf("%s has no instance id, and engine.instance isn't set: is it the server's state directory, and the server's configuration?", cfg.StateDir)
	}
	return instance, err
}

// ReadBackup checks a backup and leaves its store in the directory dir.
func ReadBackup(ctx context.Context, r io.Reader, dir string) (b Backup, err error) {
	path := filepath.Join(dir, StateStore)
	if b.Origin, err = extractBackup(ctx, r, path); err != nil {
		return b, fmt.Errorf("read the backup: %w", err)
	}
	if _, err := parseSealKey(b.SealKey); b.SealKey != "" && err != nil {
		return b, fmt.Errorf("read the backup: %w", err)
	}
	b.Report, err = store.Check(ctx, path, dir)
	return b, err
}

func extractBackup(ctx context.Context, r io.Reader, path string) (o store.Origin, err error) {
	r, stop := interruptible(ctx, r)
	defer stop()
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return o, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	if _, err := io.Copy(f, r); err != nil {
		return o, err
	}
	return store.TakeOrigin(ctx, path)
}

// interruptible is a reader that ends with the context, also while it waits for input. A
// read that nothing answers is left behind then.
func interruptible(ctx context.Context, r io.Reader) (_ io.Reader, stop func()) {
	out, in := io.Pipe()
	go func() {
		_, err := io.Copy(in, r)
		_ = in.CloseWithError(err) // never fails
	}()
	forget := context.AfterFunc(ctx, func() { _ = in.CloseWithError(context.Cause(ctx)) })
	return out, func() {
		forget()
		_ = out.Close()
	}
}
