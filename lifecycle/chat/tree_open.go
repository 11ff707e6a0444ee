package chat

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/lifecycle"
)

// batch is how many names of a directory are held at a time.
const batch = 256

// checkName is a *lifecycle.InvalidError for a name that no attachment can have.
func checkName(name string) error {
	var message string
	switch {
	case name == "" || name == "." || name == "..":
		message = "must be a file's name, and not empty, . or .."
	case len(name) > MaxName:
		message = fmt.Sprintf("must be at most %d bytes long", MaxName)
	case !utf8.ValidString(name):
		message = "must be valid UTF-8"
	case strings.ContainsAny(name, `/\`):
		message = `must not hold / or \`
	case strings.ContainsFunc(name, unicode.IsControl):
		message = "must not hold control characters"
	case name == HistoryName:
		message = fmt.Sprintf("must not be %s, which is the chat's history", HistoryName)
	default:
		return nil
	}
	return &lifecycle.InvalidError{Field: "name", Message: message}
}

// openRegular opens a regular file right in root for reading. Nothing else is opened, so
// that no fifo holds the caller up and no device notices, and no link is followed: what
// the name stands for is looked at through a handle that can't read, and that very file
// is opened then. A lease on it, which a sandbox can take, doesn't hold the caller up
// either. Errors: *FileNotFoundError, *FileError.
func openRegular(root *os.Root, name string) (*os.File, os.FileInfo, error) {
	// With a slash at its end os.Root would follow a link.
	if !single(name) {
		return nil, nil, &FileNotFoundError{Name: name}
	}
	// With O_PATH an open of a link itself succeeds, so that os.Root doesn't follow it.
	handle, err := root.OpenFile(name, unix.O_PATH|unix.O_NOFOLLOW, 0)
	if missing(err) || errors.Is(err, unix.ENAMETOOLONG) {
		return nil, nil, &FileNotFoundError{Name: name}
	}
	if err != nil {
		return nil, nil, err
	}
	defer handle.Close()
	return reopen(handle, name)
}

// reopen opens the file of an O_PATH handle for reading, if it is a regular one.
func reopen(handle *os.File, name string) (*os.File, os.FileInfo, error) {
	was, err := handle.Stat()
	if err != nil {
		return nil, nil, err
	}
	if !was.Mode().IsRegular() {
		return nil, nil, wrongKind(name, "is not a regular file")
	}
	var fd int
	err = retry(func() (err error) {
		fd, err = unix.Open("/proc/self/fd/"+strconv.Itoa(int(handle.Fd())), unix.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
		return err
	})
	switch {
	case errors.Is(err, unix.EAGAIN):
		return nil, nil, wrongKind(name, "is held by a program in the sandbox")
	case errors.Is(err, unix.EACCES):
		return nil, nil, wrongKind(name, "is not readable")
	case err != nil: // not wrapped: without /proc it would say that the file is missing
		return nil, nil, fmt.Errorf("open the handle of %q: %s", name, err.Error())
	}
	f := os.NewFile(uintptr(fd), name)
	fi, err := f.Stat()
	if err == nil && !os.SameFile(was, fi) { // whatever /proc is, it isn't the kernel's
		err = fmt.Errorf("open the handle of %q: another file was opened", name)
	}
	if err != nil {
		_ = f.Close()
		return nil, nil, err
	}
	return f, fi, nil
}

// wrongKind is the error for a file that is of another kind than it has to be.
func wrongKind(name, message string) error {
	return &FileError{Name: name, Class: errdefs.ErrFailedPrecondition, Message: message}
}

// ofSpace gives an error the class of those that say there is no space, if it is one.
func ofSpace(name string, err error) error {
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		return &FileError{Name: name, Class: errdefs.ErrResourceExhausted, Message: "can't be written: there is no space left"}
	}
	return err
}

// single tells whether a name leads from a directory to what is right in it.
func single(name string) bool {
	return name != "" && name != "." && name != ".." && !strings.ContainsAny(name, "/\x00")
}

func missing(err error) bool { return errors.Is(err, fs.ErrNotExist) }

// notDir tells that a directory can't be opened because it is something else, or a link.
func notDir(err error) bool { return errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP) }

// retry calls again what a signal interrupted.
func retry(f func() error) error {
	for {
		if err := f(); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// openTop opens root itself.
func openTop(root *os.Root) (*os.File, error) {
	return root.OpenFile(".", os.O_RDONLY|unix.O_DIRECTORY, 0)
}

// openAt opens a single name in a directory.
func openAt(dir *os.File, name string, flags int, mode uint32) (*os.File, error) {
	var fd int
	err := retry(func() (err error) {
		fd, err = unix.Openat(int(dir.Fd()), name, flags|unix.O_CLOEXEC, mode)
		return err
	})
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: name, Err: err}
	}
	return os.NewFile(uintptr(fd), name), nil
}

// openDirAt opens a directory in a directory, and never through a link.
func openDirAt(dir *os.File, name string) (*os.File, error) {
	return openAt(dir, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
}

// lstatAt tells what a single name in a directory stands for.
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

// isKind tells whether what was looked at is of a kind (unix.S_IFREG and such).
func isKind(st *unix.Stat_t, kind uint32) bool { return st.Mode&unix.S_IFMT == kind }

// eachName calls f with all that is in an open directory, from its start, until f fails.
func eachName(dir *os.File, f func(name string) error) error {
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
