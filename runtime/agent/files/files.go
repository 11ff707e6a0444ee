// Package files does the operations on files inside a container: in the container, with its
// own paths, and for the fake engine below a directory.
//
// A path is resolved once, to an open directory and a name in it. From there on nothing is
// reached by a path again, and no link is followed, so that whoever changes the files
// meanwhile can't lead an operation elsewhere.
package files

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/runtime/agent/wire"
)

// Peer is who asked for an operation.
type Peer interface {
	// Locker is held while the operation works, which bounds how many use the file system
	// at once. The other methods are called with it, and leave it while they wait.
	sync.Locker
	// Ready begins the operation, which has changed nothing before.
	Ready() error
	// Item sends a *wire.FileInfo, *wire.FileMatch or *wire.FileEvent.
	Item(v any) error
	// Write sends content.
	io.Writer
	// Read receives content.
	io.Reader
	// Alive lets others work, and returns an error if the peer has hung up. It isn't called
	// during a Read.
	Alive() error
}

// OwnRoot is the root directory of this process.
const OwnRoot = unix.AT_FDCWD

// ops does the operations. A function calls Ready once it has checked the request, and sets
// job.result if there is one.
var ops = map[wire.Op]func(*job) error{
	wire.OpStat: (*job).stat, wire.OpRead: (*job).read, wire.OpWrite: (*job).write, wire.OpDir: (*job).list, wire.OpMkdir: (*job).mkdir,
	wire.OpMove: (*job).move, wire.OpCopy: (*job).copy, wire.OpRemove: (*job).remove, wire.OpGlob: (*job).glob, wire.OpSearch: (*job).search,
	wire.OpTarRead: (*job).pack, wire.OpTarWrit: (*job).unpack, wire.OpWatch: (*job).watch,
}

// Does reports whether Do knows an operation.
func Does(op wire.Op) bool { return ops[op] != nil }

// Do does an operation that runtime.FileOp has checked, and returns its result, nil for none.
// Root is a directory's handle: the operation's paths, and links, begin there and don't lead
// out of it; or OwnRoot, without which there is no watch. Failure says what an error means.
func Do(root int, peer Peer, op wire.Op, f *wire.File) (any, error) {
	if f == nil {
		return nil, Invalid("the request has no path")
	}
	if err := checkPath(f.Path); err != nil {
		return nil, err
	}
	peer.Lock()
	defer peer.Unlock()
	j := &job{Peer: peer, File: f, name: trim(string(f.Path)), root: root}
	err := ops[op](j)
	return j.result, err
}

const maxPath = 4096 // bytes; the kernel takes one less

// checkPath leaves a NUL to the kernel.
func checkPath(path []byte) error {
	switch {
	case !strings.HasPrefix(string(path), "/"):
		return Invalid("the path %s isn't absolute", Quote(string(path)))
	case len(path) >= maxPath:
		return failed(wire.ClassInvalid, string(path), "it has %d bytes, at most %d", len(path), maxPath-1)
	}
	return nil
}

// job is an operation under way.
type job struct {
	Peer
	*wire.File
	name   string // Path without slashes at its end
	root   int
	result any
	beats  int
	deaf   bool // another goroutine reads from the peer
}

// beat is called for each small step. Every so often it looks whether the peer is alive.
func (j *job) beat() error {
	if j.beats++; j.beats%256 != 0 || j.deaf {
		return nil
	}
	return j.Alive()
}

// buffers are for content on its way: there may be many operations, and little memory.
var buffers = sync.Pool{New: func() any { return new([wire.MaxData]byte) }}

// pump copies at most so many bytes, and returns how many there were.
func (j *job) pump(w io.Writer, r io.Reader, left int64) (done int64, err error) {
	buf := buffers.Get().(*[wire.MaxData]byte)
	defer buffers.Put(buf)
	for done < left {
		n, err := r.Read(buf[:min(left-done, int64(len(buf)))])
		if n > 0 {
			if _, err := w.Write(buf[:n]); err != nil {
				return done, err
			}
			done += int64(n)
		}
		if errors.Is(err, io.EOF) {
			return done, nil
		}
		if err == nil {
			err = j.beat()
		}
		if err != nil {
			return done, err
		}
	}
	return done, nil
}

// trim takes the slashes off the end of a path.
func trim(name string) string {
	if short := strings.TrimRight(name, "/"); short != "" {
		return short
	}
	return "/"
}

// split takes the last element off a trimmed path; that of the root is ".".
func split(name string) (dir, base string) {
	i := strings.LastIndexByte(name, '/')
	if base = name[i+1:]; base == "" {
		base = "."
	}
	return trim(name[:i+1]), base
}

func join(dir, name string) string {
	if dir == "/" {
		return dir + name
	}
	return dir + "/" + name
}

// Failure returns what the peer is sent of an error: a class, what it was about, and why.
func Failure(err error) *wire.Failure {
	if failure, ok := errors.AsType[*wire.Failure](err); ok {
		return failure
	}
	text := Reason(err)
	switch {
	case errors.Is(err, unix.EXDEV):
		text = "it is on another file system"
	case errors.Is(err, unix.EBUSY):
		text = "it is in use, or a file system is mounted there"
	}
	if of, ok := errors.AsType[*fs.PathError](err); ok {
		text = Quote(of.Path) + ": " + text
	} else if link, ok := errors.AsType[*os.LinkError](err); ok {
		text = Quote(link.Old) + " to " + Quote(link.New) + ": " + text
	}
	return &wire.Failure{Class: classOf(err), Message: text}
}

// Reason returns an error's text without the names in it.
func Reason(err error) string {
	if number, ok := errors.AsType[syscall.Errno](err); ok {
		return number.Error()
	}
	return err.Error()
}

// classes are those of system calls' errors.
var classes = map[syscall.Errno]wire.Class{
	unix.ENOENT: wire.ClassNotFound, unix.EEXIST: wire.ClassExists,
	unix.EACCES: wire.ClassPermission, unix.EPERM: wire.ClassPermission, unix.EROFS: wire.ClassPermission,
	unix.ENOSPC: wire.ClassExhausted, unix.EDQUOT: wire.ClassExhausted, unix.EMFILE: wire.ClassExhausted, unix.ENFILE: wire.ClassExhausted,
	unix.ENOMEM: wire.ClassExhausted, unix.EFBIG: wire.ClassExhausted, unix.EMLINK: wire.ClassExhausted, unix.EAGAIN: wire.ClassExhausted,
	unix.ENOTDIR: wire.ClassInvalid, unix.EISDIR: wire.ClassInvalid, unix.EINVAL: wire.ClassInvalid,
	unix.ELOOP: wire.ClassInvalid, unix.ENAMETOOLONG: wire.ClassInvalid, unix.ENXIO: wire.ClassInvalid,
	unix.ENOTEMPTY: wire.ClassPrecondition, unix.EBUSY: wire.ClassPrecondition, unix.ETXTBSY: wire.ClassPrecondition, unix.ECONNREFUSED: wire.ClassPrecondition,
	unix.ECONNRESET: wire.ClassAborted, unix.ECONNABORTED: wire.ClassAborted, unix.EPIPE: wire.ClassAborted,
}

func classOf(err error) wire.Class {
	if errors.Is(err, path.ErrBadPattern) {
		return wire.ClassInvalid
	}
	if number, ok := errors.AsType[syscall.Errno](err); ok && classes[number] != "" {
		return classes[number]
	}
	return wire.ClassInternal
}

// failed returns a failure about a path.
func failed(class wire.Class, name, format string, args ...any) *wire.Failure {
	return &wire.Failure{Class: class, Message: Quote(name) + ": " + fmt.Sprintf(format, args...)}
}

// Invalid returns the failure of a request that makes no sense.
func Invalid(format string, args ...any) *wire.Failure {
	return &wire.Failure{Class: wire.ClassInvalid, Message: fmt.Sprintf(format, args...)}
}

// Quote makes any bytes readable, and no longer than a message may be.
func Quote(name string) string {
	const most = 256
	if len(name) > most {
		return fmt.Sprintf("%q…", name[:most])
	}
	return fmt.Sprintf("%q", name)
}
