package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/runtime/agent/wire"
)

func TestFailureOf(t *testing.T) {
	at := func(err error) error { return &fs.PathError{Op: "open", Path: "/a", Err: err} }
	_, match := path.Match("[", "a")
	for _, tt := range []struct {
		err     error
		class   wire.Class
		message string
	}{
		{at(unix.ENOENT), wire.ClassNotFound, `"/a": no such file or directory`},
		{at(unix.EEXIST), wire.ClassExists, `"/a": file exists`},
		{at(unix.EACCES), wire.ClassPermission, `"/a": permission denied`},
		{at(unix.EPERM), wire.ClassPermission, `"/a": operation not permitted`},
		{at(unix.EROFS), wire.ClassPermission, `"/a": read-only file system`},
		{at(unix.ENOSPC), wire.ClassExhausted, `"/a": no space left on device`},
		{at(unix.EDQUOT), wire.ClassExhausted, `"/a": disk quota exceeded`},
		{at(unix.EMFILE), wire.ClassExhausted, `"/a": too many open files`},
		{at(unix.ENOTDIR), wire.ClassInvalid, `"/a": not a directory`},
		{at(unix.EISDIR), wire.ClassInvalid, `"/a": is a directory`},
		{at(unix.ELOOP), wire.ClassInvalid, `"/a": too many levels of symbolic links`},
		{at(unix.ENAMETOOLONG), wire.ClassInvalid, `"/a": file name too long`},
		{at(unix.ENOTEMPTY), wire.ClassPrecondition, `"/a": directory not empty`},
		{at(unix.EIO), wire.ClassInternal, `"/a": input/output error`},
		{&os.LinkError{Op: "rename", Old: "/a", New: "/b", Err: unix.EXDEV}, wire.ClassInternal, `"/a" to "/b": it is on another file system`},
		{unix.ECONNRESET, wire.ClassAborted, "connection reset by peer"},
		{unix.ENOMEM, wire.ClassExhausted, "cannot allocate memory"},
		{match, wire.ClassInvalid, "syntax error in pattern"},
		{errors.New("what else"), wire.ClassInternal, "what else"},
		{fmt.Errorf("wrapped: %w", invalid("no %d", 1)), wire.ClassInvalid, "no 1"},
		{failed(wire.ClassExists, "/a\n\xff", "is %s", "there"), wire.ClassExists, `"/a\n\xff": is there`},
		{failed(wire.ClassExists, strings.Repeat("x", 5000), "long"), wire.ClassExists, `"` + strings.Repeat("x", 256) + `"…: long`},
	} {
		if got := failureOf(tt.err); got.Class != tt.class || got.Message != tt.message {
			t.Errorf("%v: %s, %s; want %s, %s", tt.err, got.Class, got.Message, tt.class, tt.message)
		}
	}
}
