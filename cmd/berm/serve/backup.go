package serve

import (
	"archive/tar"
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"github.com/bermhq/berm/cmd/berm/config"
	"github.com/bermhq/berm/lifecycle/store"
)

// Backup describes a backup, which is a copy of the database with a further table for the
// Origin.
type Backup struct {
	store.Origin
	store.Report
}

func (b Backup) String() string {
	return fmt.Sprintf("a backup of %s, by berm %s, of instance %s", b.Created.Format(time.RFC3339), b.Berm, b.Instance)
}

// MakeBackup copies a server's store, and calls put with the path of the copy. The server may
// run. MakeBackup removes the copy once put has returned.
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

// CheckStore checks a server's store without changing it. The server may run.
func CheckStore(ctx context.Context, cfg *config.Config) (instance string, r store.Report, err error) {
	if err := errors.Join(noRestorePending(cfg.StateDir), ownState(cfg.StateDir)); err != nil {
		return "", r, err
	}
	instance, instanceErr := knownInstance(cfg)
	r, err = store.Check(ctx, filepath.Join(cfg.StateDir, StateStore), "")
	return instance, r, errors.Join(instanceErr, err)
}

// knownInstance returns the instance ID of the configuration or its state directory. It fails if
// there is none.
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
	in := bufio.NewReader(r)
	if head, _ := in.Peek(len(manifestName) + 1); string(head) == manifestName+"\x00" { // Peek may return less
		return untar(in, f)
	}
	if _, err := io.Copy(f, in); err != nil {
		return o, err
	}
	return store.TakeOrigin(ctx, path)
}

// manifestName is the first member of a tar, as earlier versions wrote backups. The
// second is the database.
const manifestName = "manifest.json"

func untar(r io.Reader, db io.Writer) (o store.Origin, err error) {
	t := tar.NewReader(r)
	next := func(name string, most int64) (io.Reader, error) {
		h, err := t.Next()
		if err == nil && (h.Name != name || h.Typeflag != tar.TypeReg || len(h.PAXRecords) > 0 || h.Size > most) { // one with holes fills a disk
			err = errors.New("it isn't the member of a backup")
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		return t, nil
	}
	head, err := next(manifestName, 64<<10)
	if err != nil {
		return o, err
	}
	var m struct {
		Format         int
		Berm, Instance string
		SealKey        string `json:"seal_key"`
		Created        time.Time
		Members        []struct {
			Size   int64
			SHA256 string
		}
	}
	if err := json.NewDecoder(head).Decode(&m); err != nil || len(m.Members) != 1 || m.Format != 1 && m.Format != 2 || (m.SealKey == "") != (m.Format == 1) {
		return o, errors.Join(errors.New("its manifest isn't one of a backup"), err)
	}
	body, err := next(StateStore, m.Members[0].Size)
	if err != nil {
		return o, err
	}
	sum := sha256.New()
	if _, err := io.Copy(io.MultiWriter(db, sum), body); err != nil {
		return o, fmt.Errorf("%s: %w", StateStore, err)
	}
	if hex.EncodeToString(sum.Sum(nil)) != m.Members[0].SHA256 {
		return o, fmt.Errorf("%s isn't what was backed up: its SHA-256 is another", StateStore)
	}
	if rest, err := io.ReadAll(io.LimitReader(r, 1<<20)); err != nil || len(bytes.Trim(rest, "\x00")) > 0 { // a tar is filled up with zeros
		return o, errors.Join(errors.New("there is more in it than there should be"), err)
	}
	o = store.Origin{Instance: m.Instance, SealKey: m.SealKey, Berm: m.Berm, Created: m.Created}
	return o, o.Valid()
}

// interruptible returns a reader that ends with ctx, also while it waits for input. Its goroutine
// stays in a read of r that never returns.
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
