package main

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/runtime/agent/wire"
)

func writeFile(c *conn, f *wire.File) (any, error) {
	t, err := findTarget(f)
	if err != nil {
		return nil, err
	}
	up, err := c.upload()
	if err != nil {
		return nil, err
	}
	if f.Parents {
		if err := makeParents(t.dir); err != nil {
			return nil, err
		}
	}
	if f.Append {
		err = t.extend(up)
	} else {
		err = t.replace(up)
	}
	if err != nil {
		return nil, err
	}
	st, err := statAt(unix.AT_FDCWD, t.path, t.path, 0)
	if err != nil {
		return nil, err
	}
	return infoOf(string(f.Path), &st), nil
}

// target is a file that is to be written.
type target struct {
	path      string // no link any more
	dir, base string
	there     bool
	st        unix.Stat_t // if it is there
	mode      uint32      // permissions that it is to have
	noClash   bool
}

// findTarget follows links, and says what can be known to be in the way.
func findTarget(f *wire.File) (*target, error) {
	name := string(f.Path)
	t := &target{path: name, noClash: f.NoClash, mode: f.Mode & 0o777}
	if t.mode == 0 {
		t.mode = 0o644
	}
	for hops := 0; ; hops++ {
		var err error
		t.dir, t.base = split(trim(t.path))
		if t.path != trim(t.path) || t.base == "." || t.base == ".." {
			return nil, failed(wire.ClassInvalid, t.path, "it is a directory's name, not a file's")
		}
		t.st, err = statAt(unix.AT_FDCWD, t.path, t.path, unix.AT_SYMLINK_NOFOLLOW)
		if missing(err) {
			if hops > 0 {
				return nil, failed(wire.ClassNotFound, name, "it is a symbolic link to %s, which isn't there", quote(t.path))
			}
			return t, t.checkNew(f)
		}
		if err != nil {
			return nil, err
		}
		if f.NoClash {
			return nil, failed(wire.ClassExists, name, "it is there already, as %s", kindOf(t.st.Mode))
		}
		if !is(&t.st, unix.S_IFLNK) {
			t.there = true
			return t, t.checkThere(f)
		}
		const most = 40 // as the kernel has it
		if hops == most {
			return nil, at(name, unix.ELOOP)
		}
		link, err := readLink(unix.AT_FDCWD, t.path, t.path)
		if err != nil {
			return nil, err
		}
		if !strings.HasPrefix(link, "/") {
			link = join(t.dir, link)
		}
		t.path = link
	}
}

func (t *target) checkNew(f *wire.File) error {
	if len(t.base) > maxName {
		return at(t.path, unix.ENAMETOOLONG)
	}
	st, err := statAt(unix.AT_FDCWD, t.dir, t.dir, 0)
	switch {
	case missing(err) && f.Parents:
		return nil
	case err != nil:
		return err
	case !is(&st, unix.S_IFDIR):
		return failed(wire.ClassInvalid, t.dir, "it is %s, not a directory", kindOf(st.Mode))
	}
	return t.checkDir()
}

func (t *target) checkThere(f *wire.File) error {
	if err := regular(t.path, &t.st); err != nil {
		return err
	}
	// A file that may not be written isn't replaced either, though its directory allows it.
	if err := again(func() error { return unix.Access(t.path, unix.W_OK) }); err != nil {
		return at(t.path, err)
	}
	if f.Append {
		return nil
	}
	t.mode = t.st.Mode & 0o777 // the kernel, too, takes the other bits off what is written
	return t.checkDir()
}

func (t *target) checkDir() error {
	err := again(func() error { return unix.Access(t.dir, unix.W_OK|unix.X_OK) })
	if err != nil && failureOf(err).Class == wire.ClassPermission {
		return failed(wire.ClassPermission, t.path, "its directory can't be written (%s), and a file is written beside its place first", reason(err))
	}
	return at(t.dir, err)
}

// extend appends.
func (t *target) extend(up *upload) error {
	flags := unix.O_WRONLY | unix.O_APPEND | unix.O_NOFOLLOW
	fd, err := openAt(unix.AT_FDCWD, t.path, t.path, flags|unix.O_CREAT|unix.O_EXCL, 0o600)
	made := err == nil
	if errors.Is(err, unix.EEXIST) && !t.noClash {
		fd, err = openAt(unix.AT_FDCWD, t.path, t.path, flags, 0)
	}
	if err != nil {
		return err
	}
	defer fd.close()
	st, err := fd.stat(t.path)
	if err == nil {
		err = regular(t.path, &st)
	}
	if err == nil && fd.virtual() { // this process' own, maybe
		err = failed(wire.ClassInvalid, t.path, "it is the kernel's: it can't be written from outside")
	}
	if err == nil && made {
		err = at(t.path, again(func() error { return unix.Fchmod(int(fd), t.mode) }))
	}
	if err != nil {
		return err
	}
	return about(t.path, up.into(fd))
}

// into writes all that comes.
func (u *upload) into(w io.Writer) error {
	for {
		b, err := u.next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err == nil {
			_, err = w.Write(b)
		}
		if err != nil {
			return err
		}
	}
}

// replace writes a file beside the target, and then puts it there.
func (t *target) replace(up *upload) error {
	dir, err := openAt(unix.AT_FDCWD, t.dir, t.dir, pathOnly, 0)
	if err != nil {
		return err
	}
	defer dir.close()
	sweep(dir, t.dir)
	f, err := newTemp(dir, t.path)
	if err != nil {
		return err
	}
	defer f.drop()
	if err := up.into(f.fd); err != nil {
		return about(t.path, err)
	}
	if t.there {
		f.own(int(t.st.Uid), int(t.st.Gid))
	}
	return f.put(t.base, t.mode, !t.noClash)
}

// temp is a file that isn't in its place yet.
type temp struct {
	dir  fileDesc
	fd   fileDesc
	name string
	full string // the place, for errors
}

// newTemp makes one. Its lock says that it is being written.
func newTemp(dir fileDesc, full string) (*temp, error) {
	f := &temp{dir: dir, name: tempName(), full: full}
	var err error
	f.fd, err = openAt(int(dir), f.name, full, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, err
	}
	_ = again(func() error { return unix.Flock(int(f.fd), unix.LOCK_EX|unix.LOCK_NB) }) // only sweep asks, and not before an hour has gone
	return f, nil
}

// own gives the file to an owner and a group, as far as this user may.
func (f *temp) own(uid, gid int) {
	if uid == os.Getuid() && gid == os.Getgid() {
		return
	}
	if again(func() error { return unix.Fchown(int(f.fd), uid, gid) }) != nil {
		_ = again(func() error { return unix.Fchown(int(f.fd), -1, gid) })
	}
}

// put ends the file, and gives it its name.
func (f *temp) put(base string, mode uint32, replace bool) error {
	err := again(func() error { return unix.Fchmod(int(f.fd), mode) })
	fd := f.fd
	f.fd = -1
	if closed := disk.do(func() error { return unix.Close(int(fd)) }); err == nil && !errors.Is(closed, unix.EINTR) {
		err = closed
	}
	if err == nil {
		err = rename(f.dir, f.name, f.dir, base, replace)
	}
	if err == nil {
		f.name = ""
	}
	return at(f.full, err)
}

// drop removes it, unless it was put.
func (f *temp) drop() {
	if f.fd >= 0 {
		f.fd.close()
	}
	if f.name != "" {
		_ = again(func() error { return unix.Unlinkat(int(f.dir), f.name, 0) })
	}
}

// rename gives a file another name, and only if told so that of another file.
func rename(fromDir fileDesc, from string, toDir fileDesc, to string, replace bool) error {
	if replace {
		return again(func() error { return unix.Renameat(int(fromDir), from, int(toDir), to) })
	}
	err := again(func() error {
		return unix.Renameat2(int(fromDir), from, int(toDir), to, unix.RENAME_NOREPLACE)
	})
	if !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOSYS) {
		return err
	}
	// A file system that can't, a network's for one.
	if again(func() error { return unix.Linkat(int(fromDir), from, int(toDir), to, 0) }) == nil {
		return again(func() error { return unix.Unlinkat(int(fromDir), from, 0) })
	}
	if _, err := statAt(int(toDir), to, to, unix.AT_SYMLINK_NOFOLLOW); err == nil {
		return unix.EEXIST
	}
	return again(func() error { return unix.Renameat(int(fromDir), from, int(toDir), to) })
}

const tempPrefix = ".berm-"

func tempName() string { return fmt.Sprintf("%s%016x", tempPrefix, rand.Uint64()) }

func isTempName(name string) bool {
	digits, ok := strings.CutPrefix(name, tempPrefix)
	return ok && len(digits) == 16 && strings.Trim(digits, "0123456789abcdef") == ""
}

// swept are the directories in which sweep has been.
var swept struct {
	sync.Mutex
	dirs map[[2]uint64]bool
}

const staleAfter = time.Hour

// sweep removes files that a program like this one was killed over, from a directory it
// hasn't been in yet. It looks at the first names only.
func sweep(dir fileDesc, full string) {
	const mostDirs, mostNames = 256, 1024
	st, err := dir.stat(full)
	if err != nil {
		return
	}
	swept.Lock()
	key := [2]uint64{st.Dev, st.Ino}
	known := swept.dirs[key]
	if len(swept.dirs) >= mostDirs || swept.dirs == nil {
		swept.dirs = make(map[[2]uint64]bool)
	}
	swept.dirs[key] = true
	swept.Unlock()
	if known {
		return
	}
	fd, err := openAt(int(dir), ".", full, dirFlags, 0)
	if err != nil {
		return
	}
	defer fd.close()
	names, _ := readNames(fd, full, mostNames) // the first are there even if it has more
	for _, name := range names {
		if isTempName(name) {
			removeStale(dir, name)
		}
	}
}

func removeStale(dir fileDesc, name string) {
	fd, st, err := openRegular(int(dir), name, name, unix.O_NOFOLLOW)
	if err != nil {
		return
	}
	defer fd.close()
	if int(st.Uid) == os.Getuid() && time.Since(time.Unix(st.Mtim.Unix())) > staleAfter && again(func() error { return unix.Flock(int(fd), unix.LOCK_EX|unix.LOCK_NB) }) == nil {
		_ = again(func() error { return unix.Unlinkat(int(dir), name, 0) })
	}
}

func missing(err error) bool { return errors.Is(err, fs.ErrNotExist) }

// makeParents makes a directory and those above it that are missing.
func makeParents(dir string) error {
	err := again(func() error { return os.MkdirAll(dir, 0o755) })
	if errors.Is(err, unix.ENOTDIR) || errors.Is(err, fs.ErrExist) {
		return failed(wire.ClassInvalid, dir, "something in it isn't a directory")
	}
	return err
}
