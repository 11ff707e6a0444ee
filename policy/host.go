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

	"golang.org/x/sys/unix"
)

// ResolveDir gives a path with every symbolic link resolved. What it leads to
// must exist and be a directory.
func ResolveDir(path string) (string, error) {
	return resolve(path, fs.FileMode.IsDir, syscall.ENOTDIR)
}

// ResolveFile is ResolveDir for a regular file.
func ResolveFile(path string) (string, error) {
	return resolve(path, fs.FileMode.IsRegular, syscall.EINVAL)
}

func resolve(path string, suits func(fs.FileMode) bool, why error) (string, error) {
	resolved, err := filepath.EvalSymlinks(path)
	if err != nil {
		return "", err
	}
	fi, err := os.Stat(resolved)
	if err != nil {
		return "", err
	}
	if !suits(fi.Mode()) {
		return "", &os.PathError{Op: "resolve", Path: path, Err: why}
	}
	return resolved, nil
}

// MakeDir makes the directories of rel that are missing below dir, mode 0755, and gives them
// to the owner. It follows no link, neither in dir nor below, and fails where there is one.
func MakeDir(dir, rel string, owner *Owner) error {
	fd, err := unix.Openat2(unix.AT_FDCWD, dir, &unix.OpenHow{
		Flags: unix.O_PATH | unix.O_DIRECTORY | unix.O_CLOEXEC, Resolve: unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS,
	})
	if err != nil {
		return &os.PathError{Op: "open", Path: dir, Err: err}
	}
	root, err := os.OpenRoot(fmt.Sprintf("/proc/self/fd/%d", fd))
	_ = unix.Close(fd)
	if err != nil {
		return err
	}
	defer func() { _ = root.Close() }()
	for name := range strings.SplitSeq(rel, "/") {
		next, err := makeIn(root, name, owner)
		if err != nil {
			return err
		}
		_ = root.Close()
		root = next
	}
	return nil
}

// makeIn makes a directory unless it is there, and opens it.
func makeIn(root *os.Root, name string, owner *Owner) (*os.Root, error) {
	err := root.Mkdir(name, 0o755)
	if err == nil && owner != nil {
		if err = giveEmpty(root, name, owner); err != nil {
			_ = root.Remove(name) // or the next call takes it as it is
		}
	}
	if err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, err
	}
	made, err := root.OpenRoot(name)
	if err != nil {
		return nil, err
	}
	opened, err := made.Stat(".")
	if there, lerr := root.Lstat(name); err != nil || lerr != nil || !os.SameFile(opened, there) { // it was opened through a link
		_ = made.Close()
		return nil, cmp.Or(err, lerr, error(&os.PathError{Op: "make", Path: name, Err: syscall.ELOOP}))
	}
	return made, nil
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
