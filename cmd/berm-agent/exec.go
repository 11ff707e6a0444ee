package main

import (
	"errors"
	"io/fs"
	"os"
	"strings"
	"syscall"
)

// The exit codes that a shell uses.
const (
	exitNotExecutable = 126
	exitNotFound      = 127
)

// enter changes to a directory, which it creates if it is missing.
func enter(dir string) error {
	err := os.Chdir(dir)
	if errors.Is(err, fs.ErrNotExist) && os.MkdirAll(dir, 0o755) == nil {
		err = os.Chdir(dir)
	}
	return err
}

// setHome sets HOME to "/" if it is empty. Every OCI runtime but crun does so for a user who isn't in
// the container's files.
func setHome() {
	if os.Getenv("HOME") == "" {
		_ = os.Setenv("HOME", "/") // can't fail
	}
}

// lookUp finds a program as execvp(3) does, but never in the current directory
// because of an empty entry.
func lookUp(name string) (string, error) { return lookUpFrom("", os.Getenv("PATH"), name) }

// lookUpFrom is lookUp in the PATH list, with relative paths from a directory. An empty from is the
// current directory. The result may be relative to from.
func lookUpFrom(from, list, name string) (string, error) {
	if name == "" {
		return "", syscall.ENOENT
	}
	absolute := func(path string) string {
		if from == "" || path[0] == '/' {
			return path
		}
		return from + "/" + path
	}
	if strings.Contains(name, "/") {
		return name, executable(absolute(name))
	}
	var failed error = syscall.ENOENT
	for dir := range strings.SplitSeq(list, ":") {
		if dir == "" {
			continue
		}
		path := dir + "/" + name
		err := executable(absolute(path))
		if err == nil {
			return path, nil
		}
		if errors.Is(err, fs.ErrPermission) { // tells more than ENOENT
			failed = err
		}
	}
	return "", failed
}

// executable returns an error if path can't be executed or is a directory. execve's is less clear.
func executable(path string) error {
	var info fs.FileInfo
	err := again(func() (err error) { info, err = os.Stat(path); return err })
	switch {
	case errors.Is(err, syscall.ENOTDIR):
		return syscall.ENOENT
	case err != nil:
		return err
	case info.IsDir():
		return syscall.EISDIR
	case info.Mode()&0o111 == 0:
		return syscall.EACCES
	}
	return nil
}

// complain prints text to standard error, and returns code.
func complain(text string, code int) int {
	_, _ = os.Stderr.WriteString("berm-agent: " + text + "\n")
	return code
}
