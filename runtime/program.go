package runtime

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// PutProgram makes sure that a program which containers are given is in a directory,
// that nobody else can change it, and answers its path, which its content decides.
func PutProgram(dir string, program []byte) (string, error) {
	sum := sha256.Sum256(program)
	path := filepath.Join(dir, "berm-agent-"+hex.EncodeToString(sum[:])[:12])
	if err := putProgram(path, program); err != nil {
		return "", fmt.Errorf("put the agent's program in place: %w", err)
	}
	return path, nil
}

// putProgram does so at a path.
func putProgram(path string, program []byte) error {
	dir := filepath.Dir(path)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	info, err := os.Lstat(dir)
	if err != nil {
		return err
	}
	if !info.IsDir() || !ours(info) {
		return fmt.Errorf("%s isn't a directory that only this user can change", dir)
	}
	same, err := holds(path, program)
	if same || err != nil {
		return err
	}
	return writeProgram(path, program)
}

// ours tells whether only this process's user can change a file.
func ours(info fs.FileInfo) bool {
	stat, ok := info.Sys().(*syscall.Stat_t)
	return ok && int(stat.Uid) == os.Geteuid() && info.Mode().Perm()&0o022 == 0
}

// holds tells whether a file is this program, and can be executed.
func holds(path string, program []byte) (bool, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ELOOP) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	defer func() { _ = f.Close() }()
	info, err := f.Stat()
	if err != nil {
		return false, err
	}
	if !info.Mode().IsRegular() || !ours(info) || info.Mode().Perm() != 0o755 || info.Size() != int64(len(program)) {
		return false, nil
	}
	content, err := io.ReadAll(io.LimitReader(f, int64(len(program))+1))
	return bytes.Equal(content, program), err
}

const (
	programTemp = "new-"
	staleAfter  = time.Hour // far longer than a write takes
)

// writeProgram writes the file beside its place and moves it there, so that at any
// moment a path leads to the whole program or to nothing.
func writeProgram(path string, program []byte) (err error) {
	dir := filepath.Dir(path)
	removeStale(dir)
	f, err := os.CreateTemp(dir, programTemp)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.Remove(f.Name()))
		}
	}()
	_, err = f.Write(program)
	if err == nil {
		err = f.Chmod(0o755)
	}
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	if err := os.Rename(f.Name(), path); err != nil {
		return err
	}
	return syncDir(dir)
}

// removeStale removes what a process left that ended while it wrote.
func removeStale(dir string) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return
	}
	for _, e := range entries {
		info, err := e.Info()
		if err == nil && strings.HasPrefix(e.Name(), programTemp) && time.Since(info.ModTime()) > staleAfter {
			_ = os.Remove(filepath.Join(dir, e.Name())) // the next one tries again
		}
	}
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
