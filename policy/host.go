package policy

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
)

// ResolveDir gives a path with every symbolic link resolved. What it leads to
// must exist and be a directory.
func ResolveDir(path string) (string, error) {
	resolved, err := filepath.EvalSymlinks(path)
	if err != nil {
		return "", err
	}
	fi, err := os.Stat(resolved)
	if err != nil {
		return "", err
	}
	if !fi.IsDir() {
		return "", &os.PathError{Op: "resolve", Path: path, Err: syscall.ENOTDIR}
	}
	return resolved, nil
}

// MakeDir makes the directories of rel that are missing below dir, mode 0755, and gives them
// to the owner. It doesn't leave dir.
func MakeDir(dir, rel string, owner *Owner) error {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer func() { _ = root.Close() }()
	made := ""
	for name := range strings.SplitSeq(rel, "/") {
		made = filepath.Join(made, name)
		err := root.Mkdir(made, 0o755)
		if errors.Is(err, fs.ErrExist) {
			continue
		}
		if err == nil && owner != nil {
			if err = giveEmpty(root, made, owner); err != nil {
				_ = root.Remove(made) // or the next call takes it as it is
			}
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// giveEmpty gives away a new directory. A sandbox that can write to the parent may have put
// another one in its place.
func giveEmpty(root *os.Root, name string, owner *Owner) error {
	dir, err := root.OpenFile(name, os.O_RDONLY|syscall.O_DIRECTORY, 0) // of a pipe an open would wait
	if err != nil {
		return err
	}
	defer func() { _ = dir.Close() }()
	opened, err := dir.Stat()
	if err != nil {
		return err
	}
	if there, err := root.Lstat(name); err != nil || !os.SameFile(opened, there) { // it was opened through a link
		return cmp.Or(err, error(&os.PathError{Op: "make", Path: dir.Name(), Err: syscall.ELOOP}))
	}
	if _, err := dir.Readdirnames(1); err != io.EOF {
		return cmp.Or(err, error(&os.PathError{Op: "make", Path: dir.Name(), Err: syscall.ENOTEMPTY}))
	}
	return owner.Give(dir)
}

// OnRootFS tells whether a path lies on the file system that this process has at /.
func OnRootFS(path string) (bool, error) {
	var root, st syscall.Stat_t
	if err := syscall.Stat("/", &root); err != nil {
		return false, &os.PathError{Op: "stat", Path: "/", Err: err}
	}
	if err := syscall.Stat(path, &st); err != nil {
		return false, &os.PathError{Op: "stat", Path: path, Err: err}
	}
	return st.Dev == root.Dev, nil
}

// ReadSecret reads a secret from where it lies. One newline at a file's end is
// not part of the secret. A missing environment variable is an error.
func ReadSecret(s SecretSource) (string, error) {
	if s.File == "" {
		v, ok := os.LookupEnv(s.Env)
		if !ok {
			return "", fmt.Errorf("environment variable %s is not set", s.Env)
		}
		return v, nil
	}
	data, err := os.ReadFile(s.File)
	if err != nil {
		return "", err
	}
	return strings.TrimSuffix(strings.TrimSuffix(string(data), "\n"), "\r"), nil
}
