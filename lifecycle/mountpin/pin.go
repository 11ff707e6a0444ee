// Package mountpin makes sure that the engine mounts the directory or file that was judged.
//
// A path may lead elsewhere by the time the engine resolves it: anybody who can write to one of
// its parents can exchange a directory. A Pinner clones the judged directory's mount onto a
// path that nobody else can change, and the engine mounts that. A Trusted is for a process
// that can't clone mounts. It allows only paths that no sandbox can change.
package mountpin

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"

	"github.com/google/uuid"
	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/lifecycle/hostdir"
	"github.com/bermhq/berm/policy"
)

// Modes, as in lifecycle.Enforcement.
const (
	ModeHeld    = "held"
	ModeTrusted = "trusted"
)

// ErrExchanged says that a directory isn't the one that was judged.
var ErrExchanged = errors.New("the directory was exchanged")

// ErrLinked says that a file has several names, one of which may be elsewhere.
var ErrLinked = errors.New("the file has hard links")

// open opens the judged directory or file of m, with O_PATH. It returns ErrExchanged if a
// symbolic link or a file of another kind has replaced it.
func open(m policy.Mount) (*os.File, error) {
	f, err := hostdir.OpenAny(m.Local)
	if errors.Is(err, unix.ELOOP) || errors.Is(err, unix.ENOTDIR) {
		return nil, fmt.Errorf("%s: %w", m.Local, ErrExchanged)
	}
	if err != nil {
		return nil, err
	}
	kind := uint32(unix.S_IFDIR)
	switch {
	case m.File:
		kind = unix.S_IFREG
	case m.Socket:
		kind = unix.S_IFSOCK
	}
	var st unix.Stat_t
	err = unix.Fstat(int(f.Fd()), &st)
	switch {
	case err != nil:
	case st.Mode&unix.S_IFMT != kind:
		err = ErrExchanged
	case m.File && st.Nlink > 1:
		err = ErrLinked
	}
	if err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("%s: %w", m.Local, err)
	}
	return f, nil
}

// Pinner pins directories by cloning their mounts below a directory of its own.
// It needs CAP_SYS_ADMIN, and an engine that shares this process's mount namespace
// or receives its mounts. It is safe for many goroutines.
type Pinner struct {
	dir string
	// Mark, if not nil, is called with the mounts before they are held: see Trusted.Mark.
	Mark func(mounts []policy.Mount) error

	mu    sync.Mutex
	stale []string // directories of pins that couldn't be released yet
}

var _ lifecycle.Holder = (*Pinner)(nil)

// NewPinner makes dir, with mode 0700, and pins it as a test. The error says why this process
// can't pin. No other process may use dir.
func NewPinner(dir string) (*Pinner, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make the pin directory: %w", err)
	}
	if dir, err = filepath.EvalSymlinks(dir); err != nil {
		return nil, err
	}
	p := &Pinner{dir: dir}
	session := uuid.NewString()
	_, release, err := p.Hold(context.Background(), session, []policy.Mount{{Source: dir, Local: dir}})
	if err != nil {
		return nil, fmt.Errorf("pin a directory: %w", err)
	}
	return p, release()
}

// Mode returns ModeHeld.
func (*Pinner) Mode() string { return ModeHeld }

// Hold clones the mount of each directory or file, without mounts below it, onto the path
// <dir>/<name>/<index>. Two holds of one name can't overlap. Each Hold retries releases that
// failed before. It fails for a mount whose path differs between the engine and this process.
func (p *Pinner) Hold(_ context.Context, name string, mounts []policy.Mount) ([]string, func() error, error) {
	if p.Mark != nil {
		if err := p.Mark(mounts); err != nil {
			return nil, nil, err
		}
	}
	p.mu.Lock()
	p.stale = slices.DeleteFunc(p.stale, func(base string) bool { return clearPins(base) == nil })
	p.mu.Unlock()
	base := filepath.Join(p.dir, name)
	if err := os.Mkdir(base, 0o700); err != nil {
		return nil, nil, err
	}
	release := func() error {
		err := clearPins(base)
		if err != nil {
			p.mu.Lock()
			p.stale = append(p.stale, base)
			p.mu.Unlock()
		}
		return err
	}
	sources := make([]string, len(mounts))
	for i, m := range mounts {
		target := filepath.Join(base, strconv.Itoa(i))
		if err := pin(m, target); err != nil {
			return nil, nil, errors.Join(err, release())
		}
		sources[i] = target
	}
	return sources, release, nil
}

// pin mounts the directory or file of m's path at target.
func pin(m policy.Mount, target string) error {
	if m.Local != m.Source {
		return fmt.Errorf("%s is %s here: a mapped path can't be pinned", m.Source, m.Local)
	}
	f, err := open(m)
	if err != nil {
		return err
	}
	defer f.Close()
	tree, err := cloneTree(f)
	if err != nil {
		return err
	}
	defer unix.Close(tree)
	if m.File || m.Socket {
		err = os.WriteFile(target, nil, 0o600)
	} else {
		err = os.Mkdir(target, 0o700)
	}
	if err != nil {
		return err
	}
	if err := unix.MoveMount(tree, "", unix.AT_FDCWD, target, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return &fs.PathError{Op: "move_mount", Path: target, Err: err}
	}
	return nil
}

// OpenBelow opens the directory at rel below dir, or the regular file if file is true, with
// O_PATH. It follows no link below dir and enters no other mount. The error is
// fs.ErrNotExist if rel doesn't exist.
func OpenBelow(dir, rel string, file bool) (*os.File, error) {
	base, err := hostdir.OpenDir(dir)
	if err != nil {
		return nil, err
	}
	defer base.Close()
	flags := uint64(unix.O_PATH | unix.O_CLOEXEC)
	if !file {
		flags |= unix.O_DIRECTORY
	}
	fd, err := unix.Openat2(int(base.Fd()), rel, &unix.OpenHow{
		Flags: flags, Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS | unix.RESOLVE_NO_XDEV,
	})
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: rel, Err: err}
	}
	f := os.NewFile(uintptr(fd), rel)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil || file && st.Mode&unix.S_IFMT != unix.S_IFREG {
		_ = f.Close()
		return nil, cmp.Or(err, error(&fs.PathError{Op: "open", Path: rel, Err: ErrExchanged}))
	}
	return f, nil
}

// cloneTree clones the mount of an open directory or file. The kernel removes the clone once
// its descriptor is closed, unless it was attached.
func cloneTree(dir *os.File) (int, error) {
	tree, err := unix.OpenTree(int(dir.Fd()), "", unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_EMPTY_PATH)
	if err != nil {
		return -1, &fs.PathError{Op: "open_tree", Path: dir.Name(), Err: err}
	}
	return tree, nil
}

// Try clones the mount of an existing directory, without making anything. The error says why
// this process can't pin.
func Try(dir string) error {
	d, err := os.OpenFile(dir, unix.O_PATH|unix.O_DIRECTORY, 0)
	if err != nil {
		return err
	}
	defer d.Close()
	tree, err := cloneTree(d)
	if err != nil {
		return fmt.Errorf("pin a directory: %w", err)
	}
	return unix.Close(tree)
}

// clearPins unmounts and removes the pins below base, and base itself. A pin that isn't
// mounted is an empty directory or file.
func clearPins(base string) error {
	entries, err := os.ReadDir(base)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	errs := []error{err}
	for _, e := range entries {
		path := filepath.Join(base, e.Name())
		if err := unix.Unmount(path, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil && !errors.Is(err, unix.EINVAL) {
			errs = append(errs, &fs.PathError{Op: "unmount", Path: path, Err: err})
			continue
		}
		// Remove, never RemoveAll: what is still mounted must not be emptied.
		errs = append(errs, os.Remove(path))
	}
	return errors.Join(append(errs, os.Remove(base))...)
}

// Clean removes the pins of an earlier process. No Hold may be under way.
func (p *Pinner) Clean() error {
	entries, err := os.ReadDir(p.dir)
	errs := []error{err}
	for _, e := range entries {
		errs = append(errs, clearPins(filepath.Join(p.dir, e.Name())))
	}
	return errors.Join(errs...)
}
