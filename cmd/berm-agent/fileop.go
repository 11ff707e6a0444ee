package main

import (
	"errors"
	"io"
	"io/fs"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/runtime/agent/wire"
)

// fileOps does the operations on files.
var fileOps = map[wire.Op]func(*conn, *wire.File) (any, error){
	wire.OpStat: statFile, wire.OpRead: readFile, wire.OpWrite: writeFile, wire.OpDir: listDir, wire.OpMkdir: makeDir,
	wire.OpMove: moveFile, wire.OpCopy: copyFile, wire.OpRemove: removeFile, wire.OpGlob: globFiles, wire.OpSearch: searchFiles,
	wire.OpTarRead: readTar, wire.OpTarWrit: writeTar, wire.OpWatch: watchFiles,
}

// fileHandler returns the handler of an operation on files or ports, nil if it is neither.
func fileHandler(op wire.Op) handler {
	if op == wire.OpDial {
		return dialPort
	}
	do := fileOps[op]
	if do == nil {
		return nil
	}
	return func(c *conn, req *wire.Request) (any, error) {
		if req.File == nil {
			return nil, invalid("the request has no path")
		}
		if err := checkPath(req.File.Path); err != nil {
			return nil, err
		}
		return do(c, req.File)
	}
}

// Bytes; of a path, the kernel takes one less.
const (
	maxPath = 4096
	maxName = 255
)

func checkPath(name []byte) error {
	switch {
	case len(name) == 0 || name[0] != '/':
		return invalid("the path %s isn't absolute", quote(string(name)))
	case len(name) > maxPath:
		return failed(wire.ClassInvalid, string(name), "%d bytes, at most %d", len(name), maxPath)
	case strings.IndexByte(string(name), 0) >= 0:
		return failed(wire.ClassInvalid, string(name), "a path has no NUL")
	}
	return nil
}

func statFile(c *conn, f *wire.File) (any, error) {
	name := string(f.Path)
	st, err := statAt(unix.AT_FDCWD, name, name, 0)
	if err != nil {
		return nil, err
	}
	if err := c.ready(); err != nil {
		return nil, err
	}
	return infoOf(trim(name), &st), nil
}

func makeDir(c *conn, f *wire.File) (any, error) {
	name := trim(string(f.Path))
	mode := f.Mode & 0o1777
	if mode == 0 {
		mode = 0o755
	}
	st, err := statAt(unix.AT_FDCWD, name, name, 0)
	if missing(err) { // a link that leads nowhere is there, too
		st, err = statAt(unix.AT_FDCWD, name, name, unix.AT_SYMLINK_NOFOLLOW)
	}
	switch {
	case err == nil && (!f.Parents || !is(&st, unix.S_IFDIR)):
		return nil, failed(wire.ClassExists, name, "it is there already, as %s", kindOf(st.Mode))
	case err != nil && !missing(err):
		return nil, err
	}
	if !f.Parents {
		dir, _ := split(name)
		if _, err := statAt(unix.AT_FDCWD, dir, dir, 0); err != nil {
			return nil, err
		}
	}
	if err := c.ready(); err != nil {
		return nil, err
	}
	if f.Parents {
		dir, _ := split(name)
		if err := makeParents(dir); err != nil {
			return nil, err
		}
	}
	err = again(func() error { return unix.Mkdir(name, mode) })
	if errors.Is(err, unix.EEXIST) && f.Parents {
		st, err := statAt(unix.AT_FDCWD, name, name, 0)
		if err != nil || !is(&st, unix.S_IFDIR) {
			return nil, at(name, unix.EEXIST)
		}
		return nil, nil
	}
	if err == nil {
		err = again(func() error { return unix.Chmod(name, mode) }) // whatever the umask
	}
	return nil, at(name, err)
}

// buffers are for what is on its way: many operations can be, and memory is scarce.
var buffers = sync.Pool{New: func() any { return new([wire.MaxData]byte) }}

// upload is the Data that comes with an operation. Its errors are errGone and, after
// End, io.EOF.
type upload struct {
	c    *conn
	rest []byte
}

// upload begins an operation that takes Data.
func (c *conn) upload() (*upload, error) {
	if err := c.ready(); err != nil {
		return nil, err
	}
	c.input = true
	return &upload{c: c}, nil
}

// next gives some bytes, good until the next call.
func (u *upload) next() ([]byte, error) {
	if !u.c.input {
		return nil, io.EOF
	}
	switch kind, payload, err := u.c.r.Next(); {
	case err == nil && kind == wire.KindData:
		return payload, nil
	case err == nil && kind == wire.KindEnd:
		u.c.input = false
		return nil, io.EOF
	}
	return nil, errGone
}

func (u *upload) Read(p []byte) (int, error) {
	for len(u.rest) == 0 {
		var err error
		if u.rest, err = u.next(); err != nil {
			return 0, err
		}
	}
	n := copy(p, u.rest)
	u.rest = u.rest[n:]
	return n, nil
}

// download sends Data.
type download struct{ c *conn }

func (d download) Write(p []byte) (int, error) {
	for done := 0; done < len(p); {
		n := min(len(p)-done, wire.MaxData)
		if d.c.w.Send(wire.KindData, p[done:done+n]) != nil {
			return done, errGone
		}
		done += n
	}
	return len(p), nil
}

// item sends one of many answers.
func (c *conn) item(v any) error {
	if c.w.SendJSON(wire.KindItem, v) != nil {
		return errGone
	}
	return nil
}

// last ends an operation of which a goroutine still reads: the connection can't be used
// for another. It answers errGone.
func (c *conn) last(err error) error {
	if !errors.Is(err, errGone) {
		_ = c.w.SendJSON(wire.KindFailure, failureOf(err)) // there is nobody else to tell
	}
	return errGone
}

// pulse lets what goes on for long without a word to Berm end when Berm has hung up.
type pulse struct {
	c     *conn
	beats int
}

// beat is errGone then, every so often.
func (p *pulse) beat() error {
	if p.beats++; p.beats%256 == 0 && p.c.gone() {
		return errGone
	}
	return nil
}

// fileDesc is an open file, read without waiting for what isn't there yet.
type fileDesc int

func (fd fileDesc) Read(p []byte) (n int, err error) {
	if len(p) == 0 {
		return 0, nil
	}
	err = again(func() error { n, err = unix.Read(int(fd), p); return err })
	if n <= 0 && (err == nil || errors.Is(err, unix.EAGAIN)) {
		return 0, io.EOF
	}
	return max(n, 0), err
}

func (fd fileDesc) Write(p []byte) (int, error) {
	for done := 0; done < len(p); {
		var n int
		err := again(func() (err error) { n, err = unix.Write(int(fd), p[done:]); return err })
		if err == nil && n == 0 {
			err = io.ErrShortWrite
		}
		if err != nil {
			return done, err
		}
		done += n
	}
	return len(p), nil
}

func (fd fileDesc) close() { _ = disk.do(func() error { return unix.Close(int(fd)) }) }

// openAt opens a file in a directory, never for a program that is started meanwhile to
// inherit, as a terminal of this process, or waiting for another.
func openAt(dir int, name, full string, flags int, mode uint32) (fileDesc, error) {
	fd := -1
	err := again(func() (err error) {
		fd, err = unix.Openat(dir, name, flags|unix.O_CLOEXEC|unix.O_NOCTTY|unix.O_NONBLOCK, mode)
		return err
	})
	return fileDesc(fd), at(full, err)
}

const (
	dirFlags = unix.O_RDONLY | unix.O_DIRECTORY | unix.O_NOFOLLOW
	pathOnly = unix.O_PATH | unix.O_DIRECTORY
)

// openRegular opens a regular file for reading, and nothing else even for a moment.
func openRegular(dir int, name, full string, flags int) (fileDesc, unix.Stat_t, error) {
	follow := 0
	if flags&unix.O_NOFOLLOW != 0 {
		follow = unix.AT_SYMLINK_NOFOLLOW
	}
	st, err := statAt(dir, name, full, follow)
	if err == nil {
		err = regular(full, &st)
	}
	if err != nil {
		return -1, st, err
	}
	fd, err := openAt(dir, name, full, unix.O_RDONLY|flags, 0)
	if err != nil {
		return -1, st, err
	}
	if st, err = fd.stat(full); err == nil {
		err = regular(full, &st) // it may be another by now
	}
	if err != nil {
		fd.close()
		return -1, st, err
	}
	return fd, st, nil
}

func (fd fileDesc) stat(full string) (st unix.Stat_t, err error) {
	err = again(func() error { return unix.Fstat(int(fd), &st) })
	return st, at(full, err)
}

func statAt(dir int, name, full string, flags int) (st unix.Stat_t, err error) {
	err = again(func() error { return unix.Fstatat(dir, name, &st, flags) })
	return st, at(full, err)
}

func readLink(dir int, name, full string) (string, error) {
	buf := make([]byte, maxPath)
	var n int
	err := again(func() (err error) { n, err = unix.Readlinkat(dir, name, buf); return err })
	return string(buf[:max(n, 0)]), at(full, err)
}

// virtual is whether a file is made up by the kernel as it is read.
func (fd fileDesc) virtual() bool {
	var st unix.Statfs_t
	if again(func() error { return unix.Fstatfs(int(fd), &st) }) != nil {
		return false
	}
	switch st.Type {
	case unix.PROC_SUPER_MAGIC, unix.SYSFS_MAGIC, unix.CGROUP_SUPER_MAGIC, unix.CGROUP2_SUPER_MAGIC,
		unix.DEBUGFS_MAGIC, unix.TRACEFS_MAGIC, unix.SECURITYFS_MAGIC:
		return true
	}
	return false
}

// again makes a system call about files until no signal interrupts it.
func again(call func() error) error {
	for {
		if err := disk.do(call); err != unix.EINTR { //nolint:errorlint // system calls give nothing else
			return err
		}
	}
}

// at is an error about a file, nil for none.
func at(name string, err error) error {
	if err == nil {
		return nil
	}
	return &fs.PathError{Op: "access", Path: name, Err: err}
}

func is(st *unix.Stat_t, kind uint32) bool { return st.Mode&unix.S_IFMT == kind }

func regular(name string, st *unix.Stat_t) error {
	if is(st, unix.S_IFREG) {
		return nil
	}
	return failed(wire.ClassInvalid, name, "it is %s, not a regular file", kindOf(st.Mode))
}

func kindOf(mode uint32) string {
	switch mode & unix.S_IFMT {
	case unix.S_IFREG:
		return "a regular file"
	case unix.S_IFDIR:
		return "a directory"
	case unix.S_IFLNK:
		return "a symbolic link"
	case unix.S_IFIFO:
		return "a pipe"
	case unix.S_IFSOCK:
		return "a socket"
	}
	return "a device"
}

func infoOf(name string, st *unix.Stat_t) *wire.FileInfo {
	return &wire.FileInfo{
		Path: []byte(name), Size: st.Size, Mode: st.Mode, ModTime: st.Mtim.Nano(), UID: int(st.Uid), GID: int(st.Gid),
	}
}

// trim takes the slashes off the end.
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
