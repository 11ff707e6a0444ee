package hostdir

import (
	"errors"
	"fmt"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"
)

// maxTurns is how often a merge retries directories that a sandbox has moved away.
const maxTurns = 100

// InWayOfFile is the FileError's message for a directory at the path of a new file.
const InWayOfFile = "is a directory, and can't be replaced by a file"

const inWayOfDir = "is no directory, and can't be replaced by one"

// CheckMerge returns a *FileError if Merge can't move everything in from. It follows no link.
func CheckMerge(from, to *os.Root) error { return (&merger{dry: true, turns: maxTurns}).both(from, to) }

// Merge moves everything in from, which nobody else changes, into to, which a sandbox may be
// changing. Files replace files, links and special files, but not directories. Directories
// that exist in to are kept. Others are moved as they are, with owner and mode, and replace
// nothing. Merge uses handles and single names and follows no link, so that it writes nothing
// outside of to.
//
// On success, from is empty, and all is on the disk. If something in to is in the way, the
// error is a *FileError. After an error, each file is either moved or not.
func Merge(from, to *os.Root) error { return (&merger{turns: maxTurns}).both(from, to) }

type merger struct {
	dry   bool // only check that nothing is in the way
	turns int
}

func (m *merger) both(from, to *os.Root) error {
	return With(from, func(a *os.File) error {
		return With(to, func(b *os.File) error { return m.below(a, b, "") })
	})
}

// below moves everything in from. It reads the directory until it is empty, as a directory
// that is emptied while it is read may leave out entries.
func (m *merger) below(from, to *os.File, path string) error {
	for some := true; some; some = some && !m.dry {
		some = false
		err := Each(from, func(name string) error {
			some = true
			st, err := lstatAt(from, name)
			switch {
			case err != nil:
				return unlessMissing(err)
			case isKind(&st, unix.S_IFDIR):
				return m.directory(from, to, name, path)
			}
			return m.file(from, to, name, path)
		})
		if err != nil {
			return err
		}
	}
	if m.dry {
		return nil
	}
	return to.Sync()
}

// file moves what isn't a directory.
func (m *merger) file(from, to *os.File, name, path string) error {
	if m.dry {
		if st, err := lstatAt(to, name); err != nil || !isKind(&st, unix.S_IFDIR) {
			return unlessMissing(err)
		}
		return WrongKind(path+name, InWayOfFile)
	}
	err := move(from, to, name, 0)
	switch {
	case errors.Is(err, unix.EISDIR), errors.Is(err, unix.ENOTEMPTY), errors.Is(err, unix.EEXIST):
		return WrongKind(path+name, InWayOfFile)
	case err != nil:
		return OfSpace(path+name, err)
	}
	// If both names are of the same file, a rename does nothing.
	return unlessMissing(unlinkAt(from, name, 0))
}

// directory moves a directory. If to has one of that name, it moves the content instead.
func (m *merger) directory(from, to *os.File, name, path string) error {
	for ; m.turns > 0; m.turns-- {
		if !m.dry {
			err := move(from, to, name, unix.RENAME_NOREPLACE)
			if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOSYS) { // not on this file system
				err = move(from, to, name, 0) // may replace an empty directory
			}
			if !errors.Is(err, unix.EEXIST) && !errors.Is(err, unix.ENOTEMPTY) && !notDir(err) {
				return OfSpace(path+name, err)
			}
		}
		err := m.in(from, to, name, path+name+"/")
		switch {
		case notDir(err):
			return WrongKind(path+name, inWayOfDir)
		case m.dry:
			return unlessMissing(err)
		case err == nil:
			return unlinkAt(from, name, unix.AT_REMOVEDIR)
		case !missing(err):
			return err
		}
		// The directory in to is gone. Try again.
	}
	return WrongKind(path+name, "keeps changing")
}

// in moves the content of from's directory of a name into to's. If to's can't be opened, the
// error is openDirAt's.
func (m *merger) in(from, to *os.File, name, path string) error {
	b, err := openDirAt(to, name)
	if err != nil {
		return err
	}
	defer b.Close()
	a, err := openDirAt(from, name)
	if err != nil {
		return fmt.Errorf("open what is to be moved: %s", err.Error())
	}
	defer a.Close()
	return m.below(a, b, path)
}

// move moves a single name from one directory into another. If the error is ENOENT, to has
// been removed.
func move(from, to *os.File, name string, flags uint) error {
	err := retry(func() error {
		if flags == 0 {
			return unix.Renameat(int(from.Fd()), name, int(to.Fd()), name)
		}
		return unix.Renameat2(int(from.Fd()), name, int(to.Fd()), name, flags)
	})
	if err != nil {
		return &fs.PathError{Op: "move", Path: name, Err: err}
	}
	return nil
}
