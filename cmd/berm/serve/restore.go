package serve

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/google/uuid"

	"github.com/bermhq/berm/cmd/berm/config"
	"github.com/bermhq/berm/lifecycle/store"
	"github.com/bermhq/berm/runtime/atomicfile"
)

// Names in the state directory.
const (
	StateStore    = "berm.db"
	StateInstance = "instance"
	StateSealKey  = "seal.key"
	stateScratch  = "scratch"   // directory in which backups and restores work
	statePending  = "restore"   // directory of a verified restore; the files that it replaces move there
	stateReplaced = "replaced-" // begins the name of statePending once the restore is done
	pendingNew    = "new"       // directory in statePending with the restored files
)

// storeSuffixes are the suffixes of a database's files.
var storeSuffixes = []string{"", "-wal", "-shm"}

// rename is the type of os.Rename. Tests have their own.
type rename func(from, to string) error

// Restoration is a restore that has been done.
type Restoration struct {
	Backup
	Kept    string // directory with the replaced files; empty if there were none
	Earlier string // says that an earlier restore, which was cut off, was finished; empty without one
}

// Restore replaces a server's store by a backup. It changes nothing unless the backup is sound.
// Only with force does it replace a store that isn't empty, or that of another instance.
func Restore(ctx context.Context, cfg *config.Config, backup io.Reader, force bool) (Restoration, error) {
	return restore(ctx, cfg.StateDir, cfg.Engine.Instance, backup, force, os.Rename)
}

func restore(ctx context.Context, dir, configured string, backup io.Reader, force bool, rename rename) (r Restoration, err error) {
	if err := ownState(dir); err != nil {
		return r, err
	}
	st, err := openState(dir)
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, st.Close()) }()
	r.Earlier = st.finished()
	defer func() {
		if err != nil && r.Earlier != "" {
			err = fmt.Errorf("%s; another one: %w", r.Earlier, err)
		}
	}()
	work, err := openScratch(dir)
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, work.Close()) }()
	if r.Backup, err = ReadBackup(ctx, backup, work.dir); err != nil {
		return r, err
	}
	instance, err := restoredInstance(dir, configured, r.Instance, force)
	if err != nil {
		return r, err
	}
	if !force {
		if err := wantEmptyStore(ctx, filepath.Join(dir, StateStore), work.dir); err != nil {
			return r, err
		}
	}
	if err := ctx.Err(); err != nil {
		return r, context.Cause(ctx)
	}
	fresh := filepath.Join(work.dir, statePending, pendingNew)
	if err := os.MkdirAll(fresh, 0o700); err != nil {
		return r, err
	}
	for name, text := range map[string]string{StateInstance: instance, StateSealKey: r.SealKey} { // an earlier version's backup has no key
		if text == "" {
			continue
		}
		if err := atomicfile.WriteString(filepath.Join(fresh, name), 0o600, text+"\n"); err != nil {
			return r, err
		}
	}
	if err := os.Rename(filepath.Join(work.dir, StateStore), filepath.Join(fresh, StateStore)); err != nil {
		return r, err
	}
	for _, path := range []string{filepath.Join(fresh, StateStore), fresh, filepath.Dir(fresh)} {
		if err := atomicfile.Sync(path); err != nil {
			return r, err
		}
	}
	// After this rename the restore is certain: this process finishes it, or else the next process
	// that locks the state directory.
	if err := rename(filepath.Dir(fresh), filepath.Join(dir, statePending)); err != nil {
		return r, err
	}
	if r.Kept, err = finishRestore(dir, rename); err != nil {
		return r, fmt.Errorf("the backup is verified, but isn't in its place yet: the next start of the server, or the next restore, puts it there first: %w", err)
	}
	return r, nil
}

// restoredInstance returns the instance ID to write into the state directory, or "" if the file
// stays as it is.
func restoredInstance(dir, configured, backed string, force bool) (string, error) {
	if configured != "" {
		if configured != backed {
			return "", fmt.Errorf("the backup is of instance %s, and engine.instance is %s: what the one made isn't the other's", backed, configured)
		}
		return "", nil
	}
	if _, err := uuid.Parse(backed); err != nil {
		return "", fmt.Errorf("the backup is of instance %s, which was configured: set engine.instance to it", backed)
	}
	switch there, err := Instance(dir, ""); {
	case there == backed:
		return "", nil
	case (there != "" || err != nil) && !force:
		return "", errors.Join(fmt.Errorf("the backup is of instance %s, and %s is of another, whose sandboxes nobody would find any more; --force restores it nevertheless", backed, dir), err)
	}
	return backed, nil
}

// wantEmptyStore refuses a store that has records, or that can't be read.
func wantEmptyStore(ctx context.Context, path, scratch string) error {
	_, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	report, err := store.Check(ctx, path, scratch)
	if err == nil && report.Empty() {
		return nil
	}
	return errors.Join(fmt.Errorf("%s isn't empty; --force replaces it, and keeps it beside", path), err)
}

// restorePending reports whether a verified restore isn't finished yet.
func restorePending(dir string) (bool, error) {
	_, err := os.Lstat(filepath.Join(dir, statePending))
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil, err
}

// finishRestore moves a pending restore into its place, and returns the directory that
// keeps what it replaced. The caller holds the lock of the state directory.
func finishRestore(dir string, rename rename) (kept string, err error) {
	pending := filepath.Join(dir, statePending)
	move := func(from, to, name string) error {
		err := rename(filepath.Join(from, name), filepath.Join(to, name))
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		return err
	}
	fresh := filepath.Join(pending, pendingNew)
	for _, part := range []struct {
		name     string
		suffixes []string
	}{{StateInstance, []string{""}}, {StateSealKey, []string{""}}, {StateStore, storeSuffixes}} {
		if _, err := os.Lstat(filepath.Join(fresh, part.name)); errors.Is(err, fs.ErrNotExist) {
			continue // the restore doesn't bring this file, or has put it in its place already
		}
		for _, suffix := range part.suffixes {
			if err := move(dir, pending, part.name+suffix); err != nil {
				return "", err
			}
		}
		// The new file must not appear beside files of the old store.
		if err := errors.Join(atomicfile.Sync(pending), atomicfile.Sync(dir)); err != nil {
			return "", err
		}
		if err := move(fresh, dir, part.name); err != nil {
			return "", err
		}
		if err := errors.Join(atomicfile.Sync(dir), atomicfile.Sync(fresh)); err != nil {
			return "", err
		}
	}
	if err := os.Remove(fresh); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return "", err
	}
	entries, err := os.ReadDir(pending)
	if err != nil {
		return "", err
	}
	if len(entries) == 0 {
		return "", errors.Join(os.Remove(pending), atomicfile.Sync(dir))
	}
	kept = filepath.Join(dir, stateReplaced+time.Now().UTC().Format("20060102T150405.000Z"))
	if err := rename(pending, kept); err != nil {
		return "", err
	}
	return kept, atomicfile.Sync(dir)
}

// scratch is the locked working directory of a backup or restore.
type scratch struct {
	dir  string
	lock *os.File
}

// openScratch makes and locks the working directory in a state directory. It removes files that
// a killed process has left there.
func openScratch(state string) (*scratch, error) {
	s := &scratch{dir: filepath.Join(state, stateScratch)}
	if err := os.Mkdir(s.dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, err
	}
	var err error
	if s.lock, err = lockFile(s.dir, os.O_RDONLY); err != nil {
		if errors.Is(err, errLocked) {
			err = fmt.Errorf("another backup or restore of %s is under way", state)
		}
		return nil, err
	}
	if err := s.clear(); err != nil {
		return nil, errors.Join(err, unlockFile(s.lock))
	}
	return s, nil
}

func (s *scratch) clear() error {
	entries, err := os.ReadDir(s.dir)
	for _, e := range entries {
		err = errors.Join(err, os.RemoveAll(filepath.Join(s.dir, e.Name())))
	}
	return err
}

// Close empties and unlocks the directory.
func (s *scratch) Close() error { return errors.Join(s.clear(), unlockFile(s.lock)) }

// noRestorePending fails if a restore of the state directory isn't finished.
func noRestorePending(dir string) error {
	pending, err := restorePending(dir)
	if !pending && err == nil {
		return nil
	}
	return errors.Join(fmt.Errorf("a restore of %s was cut off: the next start of the server, or the next restore, finishes it", dir), err)
}
