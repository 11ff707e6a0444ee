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

	"github.com/bermhq/berm/runtime/atomicfile"
)

// PutProgram writes a program for containers into a directory, unless it is there already,
// and returns its path. The program's content determines the path. PutProgram fails if
// another user can change the directory.
func PutProgram(dir string, program []byte) (string, error) {
	sum := sha256.Sum256(program)
	path := filepath.Join(dir, "berm-agent-"+hex.EncodeToString(sum[:])[:12])
	if err := putProgram(path, program); err != nil {
		return "", fmt.Errorf("put the agent's program in place: %w", err)
	}
	return path, nil
}

// putProgram writes the program to a path, unless the path has it already.
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
	removeStale(dir)
	return atomicfile.WriteString(path, 0o755, string(program))
}

// ours reports whether only this process's user can change a file.
func ours(info fs.FileInfo) bool {
	stat, ok := info.Sys().(*syscall.Stat_t)
	return ok && int(stat.Uid) == os.Geteuid() && info.Mode().Perm()&0o022 == 0
}

// holds reports whether a file is this program, and only this process's user can change it.
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

const staleAfter = time.Hour // far longer than a write takes

// removeStale removes the temporary files of processes that ended while they wrote.
func removeStale(dir string) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return
	}
	for _, e := range entries {
		info, err := e.Info()
		if err == nil && strings.HasPrefix(e.Name(), atomicfile.TempPrefix) && time.Since(info.ModTime()) > staleAfter {
			_ = os.Remove(filepath.Join(dir, e.Name())) // the next call tries again
		}
	}
}
