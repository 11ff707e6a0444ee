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

// CheckMerge reports whether all that from holds can take its place in to. If something
// can't, it is a *FileError: a directory in to isn't replaced by a file, nor anything else
// by a directory. No link is followed.
func CheckMerge(from, to *os.Root) error {
	return both(from, to, func(from, to *os.File) error { return checkDirs(from, to, "") })
}

// Merge moves all that from holds, which nobody else changes, into to, which a sandbox may
// be changing. Files take the place of files, links and special files; directories that
// are in to already are kept, and others moved as they are, with owner and mode. It goes
// by handles and single names and follows no link, so that nothing is ever put outside.
//
// It may be ended at any instant, and called again: what was moved isn't in from any more,
// and what isn't in from any more is on the disk in to. When it has gone well, from is
// empty. If something in to is in the way it is a *FileError, and the rest is still in
// from.
func Merge(from, to *os.Root) error {
	return both(from, to, (&merger{turns: maxTurns}).dirs)
}

func both(from, to *os.Root, f func(from, to *os.File) error) error {
	return With(from, func(a *os.File) error {
		return With(to, func(b *os.File) error { return f(a, b) })
	})
}

// InWayOfFile is the FileError's message for a directory where a file is to be.
const InWayOfFile = "is a directory, and can't be replaced by a file"

const inWayOfDir = "is no directory, and can't be replaced by one"

func checkDirs(from, to *os.File, path string) error {
	return Each(from, func(name string) error {
		ours, err := lstatAt(from, name)
		if err != nil {
			return unlessMissing(err)
		}
		theirs, err := lstatAt(to, name)
		if err != nil {
			return unlessMissing(err)
		}
		if !isKind(&ours, unix.S_IFDIR) {
			if isKind(&theirs, unix.S_IFDIR) {
				return WrongKind(path+name, InWayOfFile)
			}
			return nil
		}
		err = in(from, to, name, func(from, to *os.File) error { return checkDirs(from, to, path+name+"/") })
		if notDir(err) {
			return WrongKind(path+name, inWayOfDir)
		}
		return unlessMissing(err)
	})
}

// in calls f with the directories of a name in both. If that in to can't be opened, it is
// an error of openDirAt's.
func in(from, to *os.File, name string, f func(from, to *os.File) error) error {
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
	return f(a, b)
}

type merger struct{ turns int }

// dirs empties from, and then has on the disk what it has put into to.
func (m *merger) dirs(from, to *os.File) error { return m.below(from, to, "") }

func (m *merger) below(from, to *os.File, path string) error {
	for some := true; some; {
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
			return mergeFile(from, to, name, path)
		})
		if err != nil {
			return err
		}
	}
	return to.Sync()
}

// mergeFile moves what isn't a directory.
func mergeFile(from, to *os.File, name, path string) error {
	err := move(from, to, name, 0)
	switch {
	case errors.Is(err, unix.EISDIR), errors.Is(err, unix.ENOTEMPTY), errors.Is(err, unix.EEXIST):
		return WrongKind(path+name, InWayOfFile)
	case err != nil:
		return OfSpace(path+name, err)
	}
	// Of two names of one file, which a crash can leave, a rename removes neither.
	return unlessMissing(unlinkAt(from, name, 0))
}

// directory moves a directory, or what is in it if there is one in to.
func (m *merger) directory(from, to *os.File, name, path string) error {
	for ; m.turns > 0; m.turns-- {
		err := move(from, to, name, unix.RENAME_NOREPLACE)
		if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOSYS) { // not on this file system
			err = move(from, to, name, 0) // over an empty one too
		}
		if !errors.Is(err, unix.EEXIST) && !errors.Is(err, unix.ENOTEMPTY) && !notDir(err) {
			return OfSpace(path+name, err)
		}
		err = in(from, to, name, func(from, to *os.File) error { return m.below(from, to, path+name+"/") })
		switch {
		case err == nil:
			return unlinkAt(from, name, unix.AT_REMOVEDIR)
		case notDir(err):
			return WrongKind(path+name, inWayOfDir)
		case !missing(err):
			return err
		}
		// It isn't there any more.
	}
	return WrongKind(path+name, "keeps changing")
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
