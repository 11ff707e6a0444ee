package hostdir

import (
	"errors"
	"fmt"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"
)

// maxTurns is how often a merge takes a directory up again that a sandbox has moved away.
const maxTurns = 100

// InWayOfFile is the FileError's message for a directory where a file is to be.
const InWayOfFile = "is a directory, and can't be replaced by a file"

const inWayOfDir = "is no directory, and can't be replaced by one"

// CheckMerge reports whether Merge can move all that from holds. If something can't be
// moved, it is a *FileError. No link is followed.
func CheckMerge(from, to *os.Root) error { return (&merger{dry: true, turns: maxTurns}).both(from, to) }

// Merge moves all that from holds, which nobody else changes, into to, which a sandbox may
// be changing. Files take the place of files, links and special files, but not of
// directories. Directories that are in to already are kept; others are moved as they are,
// with owner and mode, but not over anything else. Merge goes by handles and single names
// and follows no link, so that it puts nothing outside.
//
// When it has gone well, from is empty, and all is on the disk. If something in to is in the way it is a
// *FileError. Each file is moved or not, whenever it ends.
func Merge(from, to *os.Root) error { return (&merger{turns: maxTurns}).both(from, to) }

type merger struct {
	dry   bool // only find out whether something is in the way
	turns int
}

func (m *merger) both(from, to *os.Root) error {
	return With(from, func(a *os.File) error {
		return With(to, func(b *os.File) error { return m.below(a, b, "") })
	})
}

// below moves all that is in from. A directory that is emptied while it is read may not
// show all at once.
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
	// Of two names of one file, a rename removes neither.
	return unlessMissing(unlinkAt(from, name, 0))
}

// directory moves a directory, or what is in it if there is one in to.
func (m *merger) directory(from, to *os.File, name, path string) error {
	for ; m.turns > 0; m.turns-- {
		if !m.dry {
			err := move(from, to, name, unix.RENAME_NOREPLACE)
			if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOSYS) { // not on this file system
				err = move(from, to, name, 0) // over an empty one too
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
		// It isn't there any more.
	}
	return WrongKind(path+name, "keeps changing")
}

// in moves what is in the directories of a name in both. If that in to can't be opened, it
// is an error of openDirAt's.
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

// move renames a single name from one directory into another. To is one that has been
// removed if the error says that something is missing.
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
