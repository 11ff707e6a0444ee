package hostdir

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"runtime"
	"time"

	"golang.org/x/sys/unix"
)

// ErrUnbounded says that a tree exceeds the bounds of a walk: it has too many entries, is too
// deep, takes too long, or is moved all the time. Measurements also return it for a directory
// that can't be read. A quota counts such a tree as too large.
var ErrUnbounded = errors.New("it can't be measured within bounds")

// bounds of one walk.
type bounds struct {
	entries int           // entries that are visited
	time    time.Duration // duration, apart from a system call that hangs; 0 is no limit
	depth   int           // depth of directories
	handles int           // directories that are open at once; at least 2
	linked  int           // files with several links that the walk remembers; it visits others once per link
	walks   int           // tries, if directories are moved meanwhile
	pace    int           // entries between two checks of the time and the context
}

// usual are the bounds of most walks, which use up to 16 MiB of memory then.
var usual = bounds{
	entries: 1_000_000, time: 10 * time.Second, depth: 1 << 17, handles: 64, linked: 1 << 18, walks: 3, pace: 128,
}

// Entry is a regular file or a symbolic link that Walk has found. The name may lead to another
// file by the time it is used.
type Entry struct {
	Dir  int // handle of its directory, valid during the call
	Name string
	Stat unix.Stat_t
}

// Open opens a regular file for reading. If it is no regular file any more, the error is
// ENOENT.
func (e *Entry) Open() (*os.File, os.FileInfo, error) {
	handle, err := openAt(e.Dir, e.Name, unix.O_PATH|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, nil, err
	}
	defer handle.Close()
	if fi, err := handle.Stat(); err == nil && !fi.Mode().IsRegular() {
		return nil, nil, &fs.PathError{Op: "open", Path: e.Name, Err: unix.ENOENT}
	}
	return reopen(handle, e.Name)
}

// Visitor has the functions that Walk calls. Their errors end the walk, except those of
// vanished files: ENOENT, ENOTDIR and ELOOP.
type Visitor struct {
	// Directory is called with the handle of every directory, the first one included, before
	// anything in it. The handle is valid during the call. Nil is skipped.
	Directory func(fd int, name string) error
	// File is called with every regular file and symbolic link. Mandatory.
	File func(e *Entry) error
	// Leave is called after each directory's content. Nil is skipped.
	Leave func()
}

// Walk visits the tree below an open directory for up to a minute. It starts again, at most
// twice, if a directory in it was moved. It follows no link, opens only directories, at most
// 64 at once, and skips files that vanish. It visits mounts below dir as well. The error is
// ErrUnbounded, the context's cause, the Visitor's, or the file system's. Walk is safe for
// concurrent use.
func Walk(ctx context.Context, dir *os.File, v Visitor) error {
	b := usual
	b.time = time.Minute
	return (&walk{bounds: b, Visitor: v}).whole(ctx, dir)
}

// errMoved says that a directory was moved while the walk was far below it.
var errMoved = errors.New("a directory was moved meanwhile")

// walk goes through trees depth first. It belongs to one goroutine.
type walk struct {
	bounds
	Visitor
	restart func() // called before each try, unless nil
	until   time.Time

	entries, steps int // of all tries

	path   []level   // from the root to the current directory
	closed int       // how many levels have no handle: the first ones
	spare  []*handle // unused handles
}

// inode identifies a file.
type inode struct{ dev, ino uint64 }

// level is a directory of the path. If it has no handle, the walk opens it again from the
// directory below it, unless that was moved.
type level struct {
	*handle
	inode       // known only without a handle
	after int64 // the offset in the directory to go on at
}

// handle is an open directory.
type handle struct {
	fd   int
	rest []byte // the part of buf that isn't read yet
	buf  [8 << 10]byte
}

// whole walks the tree below an open directory. It tries again if a directory was moved.
func (w *walk) whole(ctx context.Context, dir *os.File) (err error) {
	defer runtime.KeepAlive(dir)
	w.until = time.Now().Add(w.time)
	for range w.walks {
		if err = w.tree(ctx, int(dir.Fd())); !errors.Is(err, errMoved) {
			return err
		}
	}
	return fmt.Errorf("%w: %w", ErrUnbounded, err)
}

// tree walks the tree below an open directory once.
func (w *walk) tree(ctx context.Context, root int) error {
	if w.restart != nil {
		w.restart()
	}
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

// check checks the time and the context at the first step, and at every pace steps.
func (w *walk) check(ctx context.Context) error {
	w.steps++
	switch {
	case w.steps%w.pace != 0 && w.steps != 1:
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case w.time != 0 && time.Now().After(w.until):
		return ErrUnbounded
	}
	return nil
}

// entry visits a file, or enters a directory.
func (w *walk) entry(name string) error {
	if w.entries++; w.entries > w.bounds.entries {
		return ErrUnbounded
	}
	e := Entry{Dir: w.path[len(w.path)-1].fd, Name: name}
	err := retry(func() error { return unix.Fstatat(e.Dir, name, &e.Stat, unix.AT_SYMLINK_NOFOLLOW) })
	if err == nil {
		switch e.Stat.Mode & unix.S_IFMT {
		case unix.S_IFREG, unix.S_IFLNK:
			err = w.File(&e)
		case unix.S_IFDIR:
			err = w.push(e.Dir, name)
		}
	}
	if errors.Is(err, unix.ENOENT) || notDir(err) {
		return nil // it has vanished, or is something else by now
	}
	return err
}

// push enters a directory. If too many are open, it closes the topmost one.
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
		if err := w.Directory(fd, name); err != nil {
			return err
		}
	}
	if len(w.path)-w.closed <= w.handles {
		return nil
	}
	top := &w.path[w.closed]
	if top.inode, err = identify(top.fd); err != nil {
		return err
	}
	w.drop(top)
	w.closed++
	return nil
}

// leave returns to the directory above, and opens it again if it was closed.
func (w *walk) leave() error {
	if w.Leave != nil {
		w.Leave()
	}
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
	if is, err := identify(fd); err != nil || is != above.inode {
		return cmp.Or(err, errMoved)
	}
	if retry(func() error { _, err := unix.Seek(fd, above.after, unix.SEEK_SET); return err }) != nil {
		return errMoved // it has been removed
	}
	return nil
}

// pop removes the last directory from the path.
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

// next returns a directory's next name, or "" at its end.
func (l *level) next() (string, error) {
	for {
		if len(l.rest) == 0 {
			var n int
			err := retry(func() (err error) { n, err = unix.ReadDirent(l.fd, l.buf[:]); return err })
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
	err = retry(func() (err error) { fd, err = unix.Openat(at, name, dirFlags, 0); return err })
	return fd, err
}

func identify(fd int) (inode, error) {
	var st unix.Stat_t
	err := retry(func() error { return unix.Fstat(fd, &st) })
	return inode{st.Dev, st.Ino}, err
}
