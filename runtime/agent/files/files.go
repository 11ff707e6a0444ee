// Package files does the operations on files of a container. Berm's program runs it inside
// the container, and the fake engine runs it below a directory.
//
// An operation resolves a path once, to an open directory and a name in it. After that it
// uses no path and follows no link. So a process that changes the files meanwhile can't lead
// the operation elsewhere.
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

// Peer is the client of an operation.
type Peer interface {
	// Do holds the Locker while the operation works, which bounds how many operations use
	// the file system at once. The other methods are called with the Locker held, and
	// release it while they wait.
	sync.Locker
	// Ready begins the operation. Before that, the operation changes nothing.
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

// Do does an operation that runtime.FileOp has checked, and returns its result, or nil if it
// has none. Root is OwnRoot, or the descriptor of a directory. Paths and links then begin
// there and don't lead out of it, and OpWatch doesn't work. Failure converts an error.
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

// checkPath returns an error if a path is relative or too long. The kernel refuses a NUL.
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

// beat counts a small step of the operation. Every 256th time, it checks that the peer is
// alive.
func (j *job) beat() error {
	if j.beats++; j.beats%256 != 0 || j.deaf {
		return nil
	}
	return j.Alive()
}

// buffers are shared for copying content: there may be many operations, and little memory.
var buffers = sync.Pool{New: func() any { return new([wire.MaxData]byte) }}

// pump copies at most left bytes, and returns how many it copied.
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

// Failure returns the failure that the peer gets for an error. It has a class, and names the
// path and the reason.
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

// classes maps the errors of system calls.
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

// Invalid returns the failure of an invalid request.
func Invalid(format string, args ...any) *wire.Failure {
	return &wire.Failure{Class: wire.ClassInvalid, Message: fmt.Sprintf(format, args...)}
}

// Quote quotes a name, cut to 256 bytes.
func Quote(name string) string {
	const most = 256
	if len(name) > most {
		return fmt.Sprintf("%q…", name[:most])
	}
	return fmt.Sprintf("%q", name)
}
