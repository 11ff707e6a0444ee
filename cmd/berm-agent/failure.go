package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/runtime/agent/wire"
)

// failureOf is an error as Berm is told of it: a class, what it was about, and why.
func failureOf(err error) *wire.Failure {
	var failure *wire.Failure
	if errors.As(err, &failure) {
		return failure
	}
	text := reason(err)
	var number syscall.Errno
	if errors.As(err, &number) && number == unix.EXDEV {
		text = "it is on another file system"
	}
	var of *fs.PathError
	var link *os.LinkError
	switch {
	case errors.As(err, &of):
		text = quote(of.Path) + ": " + text
	case errors.As(err, &link):
		text = quote(link.Old) + " to " + quote(link.New) + ": " + text
	}
	return &wire.Failure{Class: classOf(err), Message: text}
}

// classOf is the class of a system call's error.
func classOf(err error) wire.Class {
	if errors.Is(err, path.ErrBadPattern) {
		return wire.ClassInvalid
	}
	var number syscall.Errno
	if !errors.As(err, &number) {
		return wire.ClassInternal
	}
	switch number {
	case unix.ENOENT:
		return wire.ClassNotFound
	case unix.EEXIST:
		return wire.ClassExists
	case unix.EACCES, unix.EPERM, unix.EROFS:
		return wire.ClassPermission
	case unix.ENOSPC, unix.EDQUOT, unix.EMFILE, unix.ENFILE, unix.ENOMEM, unix.EFBIG, unix.EMLINK, unix.EAGAIN:
		return wire.ClassExhausted
	case unix.ENOTDIR, unix.EISDIR, unix.EINVAL, unix.ELOOP, unix.ENAMETOOLONG, unix.ENXIO:
		return wire.ClassInvalid
	case unix.ENOTEMPTY, unix.EBUSY, unix.ETXTBSY, unix.ECONNREFUSED:
		return wire.ClassPrecondition
	case unix.ECONNRESET, unix.ECONNABORTED, unix.EPIPE:
		return wire.ClassAborted
	}
	return wire.ClassInternal
}

// failed is a failure about a path.
func failed(class wire.Class, name, format string, args ...any) *wire.Failure {
	return &wire.Failure{Class: class, Message: quote(name) + ": " + fmt.Sprintf(format, args...)}
}

// invalid is a failure of a request that makes no sense.
func invalid(format string, args ...any) *wire.Failure {
	return &wire.Failure{Class: wire.ClassInvalid, Message: fmt.Sprintf(format, args...)}
}

// quote makes any bytes readable, and no longer than a message may be.
func quote(name string) string {
	const most = 256
	if len(name) > most {
		return fmt.Sprintf("%q…", name[:most])
	}
	return fmt.Sprintf("%q", name)
}
