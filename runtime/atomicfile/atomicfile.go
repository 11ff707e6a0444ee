// Package atomicfile writes files as a whole: a reader, or a crash, sees the old content or
// the new one.
package atomicfile

import (
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
)

// TempPrefix begins the names of the files that Write renames. One stays behind if the
// process ends during Write.
const TempPrefix = ".atomic-"

// Write replaces the file at path by the output of write, once that is on the disk. If write fails, the
// file stays as it was.
func Write(path string, mode fs.FileMode, write func(io.Writer) error) error {
	if info, err := os.Stat(path); err == nil && info.IsDir() {
		return &fs.PathError{Op: "write", Path: path, Err: syscall.EISDIR}
	}
	dir := filepath.Dir(path)
	f, err := os.CreateTemp(dir, TempPrefix)
	if err != nil {
		return err
	}
	if err = errors.Join(write(f), f.Chmod(mode), f.Sync(), f.Close()); err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	return Sync(dir)
}

// WriteString is Write for a text.
func WriteString(path string, mode fs.FileMode, text string) error {
	return Write(path, mode, func(w io.Writer) error {
		_, err := io.WriteString(w, text)
		return err
	})
}

// Sync makes a file, or the entries of a directory, survive a crash of the machine.
func Sync(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}
