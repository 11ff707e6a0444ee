package main

import (
	"errors"
	"io/fs"
	"os"
	"strings"
	"syscall"
)

// As a shell has it.
const (
	exitNotExecutable = 126
	exitNotFound      = 127
)

// enter changes to a directory, which it makes if it is missing.
func enter(dir string) error {
	err := os.Chdir(dir)
	if errors.Is(err, fs.ErrNotExist) && os.MkdirAll(dir, 0o755) == nil {
		err = os.Chdir(dir)
	}
	return err
}

// setHome sees to it that there is a home, as every OCI runtime but crun does for a user
// whom the container's files don't know.
func setHome() {
	if os.Getenv("HOME") == "" {
		_ = os.Setenv("HOME", "/") // can't fail
	}
}

// lookUp finds a program as execvp(3) does, but never in the current directory
// because of an empty entry.
func lookUp(name string) (string, error) { return lookUpFrom("", os.Getenv("PATH"), name) }

// lookUpFrom does so from a directory, empty for the current one, to which what it
// answers is relative.
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
		if errors.Is(err, fs.ErrPermission) { // a better answer than that it isn't there
			failed = err
		}
	}
	return "", failed
}

// executable looks for what the kernel would say less clearly, or take a directory for.
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

// complain says what is wrong, and answers the exit code.
func complain(text string, code int) int {
	_, _ = os.Stderr.WriteString("berm-agent: " + text + "\n")
	return code
}
