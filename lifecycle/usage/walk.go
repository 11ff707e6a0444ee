package usage

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// dirFlags open a directory, or nothing: not what has taken its place, be it a link or a
// fifo.
const dirFlags = unix.O_DIRECTORY | unix.O_NOFOLLOW | unix.O_NONBLOCK | unix.O_CLOEXEC

// errMoved says that a directory was moved while the walk was far below it.
var errMoved = errors.New("a directory was moved meanwhile")

// walk goes through trees depth first. It belongs to one goroutine.
type walk struct {
	bounds
	Visitor
	room  func(*unix.Stat_t) int64
	until time.Time

	entries, steps int // of all trees

	used   int64
	linked map[file]struct{}
	path   []level   // from the root to where it is
	closed int       // levels of it that have no handle, all of them at its beginning
	spare  []*handle // that aren't in use
}

// file is what links lead to.
type file struct{ dev, ino uint64 }

// level is a directory on the way. Without a handle, it is found again from the one
// below it, if that is still where it was.
type level struct {
	*handle
	file        // known only without a handle
	after int64 // where in the directory to go on
}

// handle is an open directory.
type handle struct {
	fd   int
	rest []byte // of buf, not looked at yet
	buf  [8 << 10]byte
}

// whole goes through the tree below an open directory, until nothing is moved meanwhile.
func (w *walk) whole(ctx context.Context, dir *os.File) (err error) {
	w.until = time.Now().Add(w.time)
	for range w.walks {
		if err = w.tree(ctx, int(dir.Fd())); !errors.Is(err, errMoved) {
			return err
		}
	}
	return fmt.Errorf("%w: %w", ErrUnbounded, err)
}

// tree goes through the tree below an open directory.
func (w *walk) tree(ctx context.Context, root int) error {
	w.used, w.linked = 0, nil
	defer func() {
		for len(w.path) > 0 {
			w.pop()
		}
	}()
	if err := w.push(root, "."); err != nil {
		return err
	}
	for len(w.path) > 0 {
		if err := w.check(ctx); err != nil {
			return err
		}
		name, err := w.path[len(w.path)-1].next()
		switch {
		case err != nil:
		case name != "":
			err = w.entry(name)
		default:
			err = w.leave()
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// check looks at the clock, and whether anybody still waits, now and then.
func (w *walk) check(ctx context.Context) error {
	w.steps++
	switch {
	case w.steps%w.pace != 0 && w.steps != 1:
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case time.Now().After(w.until):
		return ErrUnbounded
	}
	return nil
}

// entry counts a file, or goes into a directory.
func (w *walk) entry(name string) error {
	if w.entries++; w.entries > w.bounds.entries {
		return ErrUnbounded
	}
	dir := w.path[len(w.path)-1].fd
	var st unix.Stat_t
	err := again(func() error { return unix.Fstatat(dir, name, &st, unix.AT_SYMLINK_NOFOLLOW) })
	if err == nil {
		switch st.Mode & unix.S_IFMT {
		case unix.S_IFREG, unix.S_IFLNK:
			err = w.File(dir, name, &st)
		case unix.S_IFDIR:
			err = w.push(dir, name)
		}
	}
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP) {
		return nil // it has vanished, or is something else by now
	}
	return err
}

func (w *walk) count(st *unix.Stat_t) {
	if st.Nlink > 1 {
		f := file{st.Dev, st.Ino}
		if _, seen := w.linked[f]; seen {
			return
		}
		if w.linked == nil {
			w.linked = map[file]struct{}{}
		}
		if len(w.linked) < w.bounds.linked {
			w.linked[f] = struct{}{}
		}
	}
	if room := w.room(st); room > math.MaxInt64-w.used {
		w.used = math.MaxInt64
	} else {
		w.used += room
	}
}

// push goes into a directory.
func (w *walk) push(at int, name string) error {
	if len(w.path) >= w.depth {
		return ErrUnbounded
	}
	fd, err := openDir(at, name)
	if err != nil {
		return err
	}
	w.path = append(w.path, level{handle: w.hold(fd)})
	if w.Directory != nil {
		if err := w.Directory(fd); err != nil {
			return err
		}
	}
	if len(w.path)-w.closed <= w.handles {
		return nil
	}
	top := &w.path[w.closed]
	if top.file, err = identify(top.fd); err != nil {
		return err
	}
	w.drop(top)
	w.closed++
	return nil
}

// leave goes back to the directory above, which is opened again if need be.
func (w *walk) leave() error {
	last := len(w.path) - 1
	if last == 0 || w.closed < last {
		w.pop()
		return nil
	}
	fd, err := openDir(w.path[last].fd, "..")
	switch {
	case errors.Is(err, unix.ENOENT):
		return errMoved
	case err != nil:
		return err
	}
	w.pop()
	above := &w.path[last-1]
	above.handle = w.hold(fd)
	w.closed--
	if is, err := identify(fd); err != nil || is != above.file {
		return cmp.Or(err, errMoved)
	}
	if again(func() error { _, err := unix.Seek(fd, above.after, unix.SEEK_SET); return err }) != nil {
		return errMoved // it has been removed
	}
	return nil
}

// pop ends the last directory.
func (w *walk) pop() {
	last := len(w.path) - 1
	w.drop(&w.path[last])
	w.path = w.path[:last]
	w.closed = min(w.closed, last)
}

func (w *walk) hold(fd int) *handle {
	h := &handle{}
	if last := len(w.spare) - 1; last >= 0 {
		h, w.spare = w.spare[last], w.spare[:last]
	}
	h.fd, h.rest = fd, nil
	return h
}

func (w *walk) drop(l *level) {
	if l.handle != nil {
		_ = unix.Close(l.fd)
		w.spare = append(w.spare, l.handle)
		l.handle = nil
	}
}

// next answers a directory's next name, empty at its end.
func (l *level) next() (string, error) {
	for {
		if len(l.rest) == 0 {
			var n int
			err := again(func() (err error) { n, err = unix.ReadDirent(l.fd, l.buf[:]); return err })
			if errors.Is(err, unix.ENOENT) { // somebody has removed it
				return "", nil
			}
			if err != nil || n <= 0 {
				return "", err
			}
			l.rest = l.buf[:n]
		}
		// struct linux_dirent64 of getdents64(2): inode, offset of the next, size of this,
		// type, and the name up to a NUL.
		const offset, size, text = 8, 16, 19
		var n int
		if len(l.rest) > text {
			n = int(binary.NativeEndian.Uint16(l.rest[size:]))
		}
		if n <= text || n > len(l.rest) {
			return "", errors.New("the file system's list of a directory makes no sense")
		}
		l.after = int64(binary.NativeEndian.Uint64(l.rest[offset:]))
		name, _, _ := bytes.Cut(l.rest[text:n], []byte{0})
		l.rest = l.rest[n:]
		if s := string(name); s != "." && s != ".." && s != "" {
			return s, nil
		}
	}
}

func openDir(at int, name string) (fd int, err error) {
	err = again(func() (err error) { fd, err = unix.Openat(at, name, unix.O_RDONLY|dirFlags, 0); return err })
	return fd, err
}

func identify(fd int) (file, error) {
	var st unix.Stat_t
	err := again(func() error { return unix.Fstat(fd, &st) })
	return file{st.Dev, st.Ino}, err
}

// again does a system call until no signal interrupts it.
func again(f func() error) error {
	for {
		if err := f(); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// unreadable has what may not be looked at count as what can't be measured.
func unreadable(err error) error {
	if errors.Is(err, fs.ErrPermission) {
		return fmt.Errorf("%w: %w", ErrUnbounded, err)
	}
	return err
}
