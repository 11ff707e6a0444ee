package files

import (
	"errors"
	"io"
	"io/fs"

	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/runtime/agent/wire"
)

// file is an open file.
type file struct {
	fd   int
	path string      // for errors
	st   unix.Stat_t // as it was when it was opened
}

// entry is a name in an open directory. Its methods don't follow a link that has the name.
type entry struct {
	dir   *file
	name  string
	path  string
	st    unix.Stat_t
	depth int // in a walk: 1 is in the first directory
}

func (f *file) at(name string) *entry { return &entry{dir: f, name: name, path: join(f.path, name)} }

// again makes a system call about a path until no signal interrupts it.
func again(path string, call func() error) error {
	err := call()
	for errors.Is(err, unix.EINTR) {
		err = call()
	}
	if err != nil {
		return &fs.PathError{Op: "access", Path: path, Err: err}
	}
	return nil
}

func missing(err error) bool { return errors.Is(err, fs.ErrNotExist) }

func unlessMissing(err error) error {
	if missing(err) {
		return nil
	}
	return err
}

// unlessVanished returns nil for an error that says that a file is gone or was replaced.
func unlessVanished(err error) error {
	_, irregular := errors.AsType[*wire.Failure](err)
	if irregular || errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP) {
		return nil
	}
	return unlessMissing(err)
}

const (
	dirFlags = unix.O_RDONLY | unix.O_DIRECTORY
	pathOnly = unix.O_PATH | unix.O_DIRECTORY
)

// openFile opens a file by a call, to which it passes more flags. Programs that are started
// don't inherit the file, it doesn't become a controlling terminal, and opening doesn't wait.
func openFile(path string, flags int, call func(flags int) (int, error)) (*file, error) {
	flags |= unix.O_CLOEXEC
	if flags&unix.O_PATH == 0 {
		flags |= unix.O_NOCTTY | unix.O_NONBLOCK
	}
	f := &file{path: path}
	if err := again(path, func() (err error) { f.fd, err = call(flags); return err }); err != nil {
		return nil, err
	}
	if err := f.stat(); err != nil {
		f.close()
		return nil, err
	}
	return f, nil
}

// open opens a file by its path.
func (j *job) open(path string, flags int) (*file, error) {
	return openFile(path, flags, func(flags int) (int, error) {
		if j.root == unix.AT_FDCWD {
			return unix.Openat(j.root, path, flags, 0)
		}
		return unix.Openat2(j.root, "."+path, &unix.OpenHow{Flags: uint64(flags), Resolve: unix.RESOLVE_IN_ROOT})
	})
}

// openRegular opens a regular file by its path for reading. It checks the file before it
// opens it, as opening a device may have effects, and again afterwards.
func (j *job) openRegular(path string) (*file, error) {
	f, err := onlyRegular(j.open(path, unix.O_PATH))
	if err != nil {
		return nil, err
	}
	_ = f.close()
	return onlyRegular(j.open(path, unix.O_RDONLY))
}

// find resolves a path, but doesn't follow a link at its end. The caller must close the
// entry. An error with an entry is about the last name alone.
func (j *job) find(path string) (*entry, error) {
	path = trim(path)
	dir, base := split(path)
	if base == "." || base == ".." {
		dir, base = path, "."
	}
	d, err := j.open(dir, pathOnly)
	if err != nil {
		return nil, err
	}
	e := &entry{dir: d, name: base, path: path}
	return e, e.stat()
}

// close closes the directory that find opened.
func (e *entry) close() {
	if e != nil {
		e.dir.close()
	}
}

func (e *entry) failed(err error) error { return &fs.PathError{Op: "access", Path: e.path, Err: err} }

func (e *entry) isThere() error {
	return failed(wire.ClassExists, e.path, "it is there already, as %s", kindOf(&e.st))
}

func (e *entry) do(call func(dir int, name string) error) error {
	return again(e.path, func() error { return call(e.dir.fd, e.name) })
}

func (e *entry) stat() error {
	return e.do(func(dir int, name string) error { return unix.Fstatat(dir, name, &e.st, unix.AT_SYMLINK_NOFOLLOW) })
}

func (e *entry) open(flags int, mode uint32) (*file, error) {
	return openFile(e.path, flags|unix.O_NOFOLLOW, func(flags int) (int, error) { return unix.Openat(e.dir.fd, e.name, flags, mode) })
}

// openRegular opens an entry for reading, if st says that it is a regular file.
func (e *entry) openRegular() (*file, error) {
	if err := regular(e.path, &e.st); err != nil {
		return nil, err
	}
	return onlyRegular(e.open(unix.O_RDONLY, 0))
}

func (e *entry) readlink() (string, error) {
	buf := make([]byte, maxPath)
	n := 0
	err := e.do(func(dir int, name string) (err error) { n, err = unix.Readlinkat(dir, name, buf); return err })
	return string(buf[:max(n, 0)]), err
}

// remove removes a file or an empty directory.
func (e *entry) remove() error {
	unlink := func(flags int) error {
		return e.do(func(dir int, name string) error { return unix.Unlinkat(dir, name, flags) })
	}
	err := unlink(0)
	if errors.Is(err, unix.EISDIR) || errors.Is(err, unix.EPERM) {
		if asDir := unlink(unix.AT_REMOVEDIR); !errors.Is(asDir, unix.ENOTDIR) {
			return asDir
		}
	}
	return err
}

// rename renames a file. It replaces an existing file only if replace is set.
func (e *entry) rename(to *entry, replace bool) error {
	call := func(flags uint) error {
		return again(to.path, func() error { return unix.Renameat2(e.dir.fd, e.name, to.dir.fd, to.name, flags) })
	}
	if replace {
		return call(0)
	}
	err := call(unix.RENAME_NOREPLACE)
	if !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOSYS) {
		return err
	}
	// The file system, such as a network's, doesn't support RENAME_NOREPLACE.
	if e.link(to) == nil {
		return e.remove()
	}
	if to.stat() == nil {
		return to.failed(unix.EEXIST)
	}
	return call(0)
}

func (e *entry) link(to *entry) error {
	return to.do(func(dir int, name string) error { return unix.Linkat(e.dir.fd, e.name, dir, name, 0) })
}

func (e *entry) symlink(target string) error {
	return e.do(func(dir int, name string) error { return unix.Symlinkat(target, dir, name) })
}

func (e *entry) mkdir(mode uint32) error {
	return e.do(func(dir int, name string) error { return unix.Mkdirat(dir, name, mode) })
}

// setTime sets when a file was modified.
func (e *entry) setTime(modified unix.Timespec) error {
	times := []unix.Timespec{{Nsec: unix.UTIME_OMIT}, modified}
	return e.do(func(dir int, name string) error { return unix.UtimesNanoAt(dir, name, times, unix.AT_SYMLINK_NOFOLLOW) })
}

func (e *entry) info() *wire.FileInfo {
	info := infoOf(e.path, &e.st)
	if is(&e.st, unix.S_IFLNK) {
		target, _ := e.readlink() // it may be gone
		info.Target = []byte(target)
	}
	return info
}

// onlyRegular passes on the result of an open. If the file isn't regular, it closes the file and
// returns an error.
func onlyRegular(f *file, err error) (*file, error) {
	if err != nil {
		return nil, err
	}
	if err := regular(f.path, &f.st); err != nil {
		f.close()
		return nil, err
	}
	return f, nil
}

func (f *file) stat() error { return again(f.path, func() error { return unix.Fstat(f.fd, &f.st) }) }

func (f *file) seek(to int64) error {
	return again(f.path, func() error { _, err := unix.Seek(f.fd, to, io.SeekStart); return err })
}

// close closes the file, even if it returns an error: the error is about what was written.
func (f *file) close() error {
	err := unix.Close(f.fd)
	if err == nil || errors.Is(err, unix.EINTR) {
		return nil
	}
	return &fs.PathError{Op: "close", Path: f.path, Err: err}
}

// Read reads without waiting. It returns io.EOF if no data is there yet.
func (f *file) Read(p []byte) (n int, err error) {
	err = again(f.path, func() error { n, err = unix.Read(f.fd, p); return err })
	if n <= 0 && len(p) > 0 && (err == nil || errors.Is(err, unix.EAGAIN)) {
		return 0, io.EOF
	}
	return max(n, 0), err
}

func (f *file) Write(p []byte) (int, error) {
	for done := 0; done < len(p); {
		n := 0
		err := again(f.path, func() (err error) { n, err = unix.Write(f.fd, p[done:]); return err })
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

// names reads the remaining names of a directory. If there are more than most, it returns
// that many and an error.
func (f *file) names(most int) (names []string, err error) {
	buf := buffers.Get().(*[wire.MaxData]byte)
	defer buffers.Put(buf)
	for {
		more, err := f.someNames(buf[:])
		if err != nil || more == nil {
			return names, err
		}
		if names = append(names, more...); len(names) > most {
			return names[:most], failed(wire.ClassExhausted, f.path, "it has too many files for one operation, which holds %d names", maxEntries)
		}
	}
}

// someNames reads the next names of a directory that fit into a buffer, nil at the end.
func (f *file) someNames(buf []byte) (names []string, err error) {
	for len(names) == 0 { // a signal cuts the answer short, maybe to . and ..
		n := 0
		err := again(f.path, func() (err error) { n, err = unix.ReadDirent(f.fd, buf); return err })
		if err != nil || n <= 0 {
			return nil, err
		}
		_, _, names = unix.ParseDirent(buf[:n], -1, nil)
	}
	return names, nil
}

// virtual reports whether a file is in a file system whose content the kernel generates.
func (f *file) virtual() bool {
	var st unix.Statfs_t
	if again(f.path, func() error { return unix.Fstatfs(f.fd, &st) }) != nil {
		return false
	}
	switch st.Type {
	case unix.PROC_SUPER_MAGIC, unix.SYSFS_MAGIC, unix.CGROUP_SUPER_MAGIC, unix.CGROUP2_SUPER_MAGIC,
		unix.DEBUGFS_MAGIC, unix.TRACEFS_MAGIC, unix.SECURITYFS_MAGIC:
		return true
	}
	return false
}

func is(st *unix.Stat_t, kind uint32) bool { return st.Mode&unix.S_IFMT == kind }

// regular returns an error unless st is that of a regular file.
func regular(path string, st *unix.Stat_t) error {
	if is(st, unix.S_IFREG) {
		return nil
	}
	return failed(wire.ClassInvalid, path, "it is %s, not a regular file", kindOf(st))
}

func kindOf(st *unix.Stat_t) string {
	kinds := map[uint32]string{
		unix.S_IFREG: "a regular file", unix.S_IFDIR: "a directory", unix.S_IFLNK: "a symbolic link", unix.S_IFIFO: "a pipe", unix.S_IFSOCK: "a socket",
	}
	if kind := kinds[st.Mode&unix.S_IFMT]; kind != "" {
		return kind
	}
	return "a device"
}

func infoOf(name string, st *unix.Stat_t) *wire.FileInfo {
	return &wire.FileInfo{
		Path: []byte(name), Size: st.Size, Mode: st.Mode, ModTime: st.Mtim.Nano(), UID: int(st.Uid), GID: int(st.Gid),
	}
}
