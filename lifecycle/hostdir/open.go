// Package hostdir works on host directories while sandboxes may be changing them. It
// measures, walks, archives, fills, merges and removes them. It goes from one directory to the
// next by handles and single names, so that no link leads it out. It opens only directories
// and regular files, and its work is bounded.
package hostdir

import (
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"io/fs"
	"os"
	"strconv"
	"strings"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// batch is how many names of a directory are read at a time.
const batch = 256

// dirFlags open a directory, or fail. They don't follow a link, and don't wait for a fifo.
const dirFlags = unix.O_RDONLY | unix.O_DIRECTORY | unix.O_NOFOLLOW | unix.O_NONBLOCK | unix.O_CLOEXEC

// FileError says why a file can't be used.
type FileError struct {
	Name    string
	Class   error // of errdefs: AlreadyExists, FailedPrecondition (another kind) or ResourceExhausted (no space, or too many files)
	Message string
}

// Error names the file and gives the reason.
func (e *FileError) Error() string { return fmt.Sprintf("%q %s", e.Name, e.Message) }

// Unwrap returns the class.
func (e *FileError) Unwrap() error { return e.Class }

// NotFoundError says that a directory has no such file.
type NotFoundError struct{ Name string }

// Error names the file.
func (e *NotFoundError) Error() string { return fmt.Sprintf("there is no file %q", e.Name) }

// NotFound puts the error into errdefs' NotFound class.
func (*NotFoundError) NotFound() {}

// WrongKind returns the *FileError of a file that is of the wrong kind.
func WrongKind(name, message string) error {
	return &FileError{Name: name, Class: errdefs.ErrFailedPrecondition, Message: message}
}

// OfSpace returns a *FileError if err says that there is no space, and err itself otherwise.
func OfSpace(name string, err error) error {
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		return &FileError{Name: name, Class: errdefs.ErrResourceExhausted, Message: "can't be written: there is no space left"}
	}
	return err
}

// OpenDir opens a directory with O_PATH, by a path without symbolic links.
func OpenDir(path string) (*os.File, error) { return openPath(path, unix.O_DIRECTORY) }

// OpenAny is OpenDir for files of any kind.
func OpenAny(path string) (*os.File, error) { return openPath(path, 0) }

func openPath(path string, flags uint64) (*os.File, error) {
	fd, err := unix.Openat2(unix.AT_FDCWD, path, &unix.OpenHow{
		Flags:   flags | unix.O_PATH | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS,
	})
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: path, Err: err}
	}
	return os.NewFile(uintptr(fd), path), nil
}

// Inode identifies an open file on this host, as "device:inode".
func Inode(f *os.File) (string, error) {
	var st unix.Stat_t
	err := unix.Fstat(int(f.Fd()), &st)
	return fmt.Sprintf("%d:%d", st.Dev, st.Ino), err
}

// Identity returns a number that identifies a file in its file system. If the file system
// keeps birth times, a later file with the same inode has another identity. The file is name
// in dir, or dir itself if name is empty. Identity follows no link, and never returns 0
// without an error.
func Identity(dir *os.File, name string) (uint64, error) {
	var st unix.Statx_t
	err := retry(func() error {
		return unix.Statx(int(dir.Fd()), name, unix.AT_EMPTY_PATH|unix.AT_SYMLINK_NOFOLLOW, unix.STATX_INO|unix.STATX_BTIME, &st)
	})
	if err != nil {
		return 0, &fs.PathError{Op: "statx", Path: name, Err: err}
	}
	sum := fnv.New64a()
	_, _ = fmt.Fprint(sum, st.Ino, st.Btime.Sec, st.Btime.Nsec)
	return max(sum.Sum64(), 1), nil
}

// OpenRegular opens a regular file in root for reading, and returns its stat. Name is a single
// name. OpenRegular never opens a file of another kind: it opens the name with O_PATH, which
// follows no link, waits for no fifo and has no effect on a device, and then opens that same
// file. A lease that a sandbox holds on the file doesn't delay the caller. Errors are
// *NotFoundError, *FileError, and those of the file system.
func OpenRegular(root *os.Root, name string) (*os.File, os.FileInfo, error) {
	// With a slash at the end of the name, os.Root would follow a link.
	if !single(name) {
		return nil, nil, &NotFoundError{Name: name}
	}
	// With O_PATH an open of a link itself succeeds, so that os.Root doesn't follow it.
	handle, err := root.OpenFile(name, unix.O_PATH|unix.O_NOFOLLOW, 0)
	if missing(err) || errors.Is(err, unix.ENAMETOOLONG) {
		return nil, nil, &NotFoundError{Name: name}
	}
	if err != nil {
		return nil, nil, err
	}
	defer handle.Close()
	return reopen(handle, name)
}

// LstatRegular returns the stat of a regular file in root. Errors are as OpenRegular's.
func LstatRegular(root *os.Root, name string) (os.FileInfo, error) {
	if !single(name) {
		return nil, &NotFoundError{Name: name}
	}
	fi, err := root.Lstat(name)
	switch {
	case missing(err) || errors.Is(err, unix.ENAMETOOLONG):
		return nil, &NotFoundError{Name: name}
	case err != nil:
		return nil, err
	case !fi.Mode().IsRegular():
		return nil, WrongKind(name, notRegular)
	}
	return fi, nil
}

const notRegular = "is not a regular file"

// reopen opens the file of an O_PATH handle for reading, if it is a regular one.
func reopen(handle *os.File, name string) (*os.File, os.FileInfo, error) {
	was, err := handle.Stat()
	if err != nil {
		return nil, nil, err
	}
	if !was.Mode().IsRegular() {
		return nil, nil, WrongKind(name, notRegular)
	}
	var fd int
	err = retry(func() (err error) {
		fd, err = unix.Open("/proc/self/fd/"+strconv.Itoa(int(handle.Fd())), unix.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
		return err
	})
	switch {
	case errors.Is(err, unix.EAGAIN):
		return nil, nil, WrongKind(name, "is held by a program in the sandbox")
	case errors.Is(err, unix.EACCES):
		return nil, nil, WrongKind(name, "is not readable")
	case err != nil: // not wrapped: without /proc it would say that the file is missing
		return nil, nil, fmt.Errorf("open the handle of %q: %s", name, err.Error())
	}
	f := os.NewFile(uintptr(fd), name)
	is, err := f.Stat()
	if err == nil && !os.SameFile(was, is) { // /proc isn't the kernel's
		err = fmt.Errorf("open the handle of %q: another file was opened", name)
	}
	if err != nil {
		_ = f.Close()
		return nil, nil, err
	}
	return f, is, nil
}

// Unlink removes a file of any kind but a directory, for which it returns false. A missing
// file is no error.
func Unlink(dir *os.File, name string) (done bool, err error) {
	err = unlinkAt(dir, name, 0)
	switch {
	case err == nil || missing(err):
		return true, nil
	case errors.Is(err, unix.EISDIR):
		return false, nil
	case errors.Is(err, unix.EPERM): // some file systems' answer for a directory
		if st, e := lstatAt(dir, name); e == nil && isKind(&st, unix.S_IFDIR) {
			return false, nil
		}
	}
	return false, err
}

// Each calls f with the names in an open directory, from its start, until f fails.
func Each(dir *os.File, f func(name string) error) error {
	if _, err := dir.Seek(0, io.SeekStart); err != nil {
		return err
	}
	for {
		names, err := dir.Readdirnames(batch)
		for _, name := range names {
			if err := f(name); err != nil {
				return err
			}
		}
		if errors.Is(err, io.EOF) || missing(err) { // the directory itself has been removed
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// Top opens root itself.
func Top(root *os.Root) (*os.File, error) {
	return root.OpenFile(".", os.O_RDONLY|unix.O_DIRECTORY, 0)
}

// With calls f with root itself.
func With(root *os.Root, f func(*os.File) error) error {
	dir, err := Top(root)
	if err != nil {
		return err
	}
	return errors.Join(f(dir), dir.Close())
}

// single reports whether a name names an entry of a directory.
func single(name string) bool {
	return name != "" && name != "." && name != ".." && !strings.ContainsAny(name, "/\x00")
}

func missing(err error) bool { return errors.Is(err, fs.ErrNotExist) }

func unlessMissing(err error) error {
	if missing(err) {
		return nil
	}
	return err
}

// notDir reports whether a directory can't be opened because it is something else.
func notDir(err error) bool { return errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP) }

// retry repeats a system call that a signal interrupted.
func retry(f func() error) error {
	for {
		if err := f(); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// openAt opens a single name in a directory.
func openAt(dir int, name string, flags int, mode uint32) (*os.File, error) {
	var fd int
	err := retry(func() (err error) {
		fd, err = unix.Openat(dir, name, flags|unix.O_CLOEXEC, mode)
		return err
	})
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: name, Err: err}
	}
	return os.NewFile(uintptr(fd), name), nil
}

// openDirAt opens a directory in a directory, and never through a link.
func openDirAt(dir *os.File, name string) (*os.File, error) {
	return openAt(int(dir.Fd()), name, dirFlags, 0)
}

// lstatAt returns the stat of a single name in a directory. It follows no link.
func lstatAt(dir *os.File, name string) (st unix.Stat_t, err error) {
	err = retry(func() error { return unix.Fstatat(int(dir.Fd()), name, &st, unix.AT_SYMLINK_NOFOLLOW) })
	if err != nil {
		err = &fs.PathError{Op: "stat", Path: name, Err: err}
	}
	return st, err
}

func unlinkAt(dir *os.File, name string, flags int) error {
	err := retry(func() error { return unix.Unlinkat(int(dir.Fd()), name, flags) })
	if err != nil {
		err = &fs.PathError{Op: "remove", Path: name, Err: err}
	}
	return err
}

// isKind reports whether a file is of a kind (unix.S_IFREG and such).
func isKind(st *unix.Stat_t, kind uint32) bool { return st.Mode&unix.S_IFMT == kind }
