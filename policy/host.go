package policy

import (
	"fmt"
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

// MakeDir makes a directory and its parents, mode 0755. One that is there is no
// error.
func MakeDir(path string) error { return os.MkdirAll(path, 0o755) }

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
