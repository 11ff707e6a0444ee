package files

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/runtime/agent/wire"
)

func (j *job) stat() error {
	f, err := j.open(string(j.Path), unix.O_PATH)
	if err != nil {
		return err
	}
	defer f.close()
	j.result = infoOf(j.name, &f.st)
	return j.Ready()
}

func (j *job) read() error {
	name := string(j.Path)
	f, err := j.openRegular(name)
	if err != nil {
		return err
	}
	defer f.close()
	left := f.extent()
	if j.Offset > left {
		return failed(wire.ClassOutOfRange, name, "it ends at %d, before %d", left, j.Offset)
	}
	if left -= j.Offset; j.Length >= 0 {
		left = min(left, j.Length)
	}
	if j.Offset != 0 {
		if err := f.seek(j.Offset); err != nil {
			return err
		}
	}
	if err := j.Ready(); err != nil {
		return err
	}
	if err := j.Item(infoOf(name, &f.st)); err != nil {
		return err
	}
	_, err = j.pump(j, f, left)
	return err
}

// extent returns how many bytes to read: the size when the file was opened, so that a growing file has
// an end. A virtual file has no size, and is read to its end.
func (f *file) extent() int64 {
	if f.virtual() {
		return math.MaxInt64
	}
	return f.st.Size
}

func (j *job) mkdir() error {
	mode := j.Mode & 0o1777
	if mode == 0 {
		mode = 0o755
	}
	e, err := j.find(j.name)
	defer func() { e.close() }()
	there := err == nil
	switch {
	case there && !(j.Parents && j.isDir(j.name)):
		return e.isThere()
	case !there && !(missing(err) && (e != nil || j.Parents)):
		return err
	}
	if err := j.Ready(); err != nil || there {
		return err
	}
	if e, err = j.withParents(e); err != nil {
		return err
	}
	err = e.mkdir(0o700)
	if errors.Is(err, unix.EEXIST) && j.Parents && j.isDir(j.name) {
		return nil
	}
	if err != nil {
		return err
	}
	dir, err := e.open(dirFlags, 0)
	if err != nil {
		return err
	}
	defer dir.close()
	return dir.chmod(mode) // whatever the umask
}

// isDir reports whether a path leads to a directory.
func (j *job) isDir(path string) bool {
	f, err := j.open(path, pathOnly)
	if err != nil {
		return false
	}
	f.close()
	return true
}

// withParents returns e. If e is nil, it makes the directory of the operation's path, and returns the
// entry of that path.
func (j *job) withParents(e *entry) (*entry, error) {
	if e != nil {
		return e, nil
	}
	dir, base := split(j.name)
	above, err := j.makeDir(dir)
	if err != nil {
		return nil, err
	}
	return above.at(base), nil
}

// makeDir opens a directory, and makes it and those above it if they are missing.
func (j *job) makeDir(path string) (*file, error) {
	f, err := j.open(path, pathOnly)
	if !missing(err) {
		return f, err
	}
	dir, base := split(path)
	above, err := j.makeDir(dir)
	if err != nil {
		return nil, err
	}
	defer above.close()
	if err := above.at(base).mkdir(0o755); err != nil && !errors.Is(err, unix.EEXIST) {
		return nil, err
	}
	if f, err = j.open(path, pathOnly); missing(err) {
		err = failed(wire.ClassInvalid, path, "it is no directory, but a link that leads nowhere")
	}
	return f, err
}

func (j *job) write() error {
	e, there, err := j.target()
	defer func() { e.close() }()
	if err != nil {
		return err
	}
	if err := j.Ready(); err != nil {
		return err
	}
	if e, err = j.withParents(e); err != nil {
		return err
	}
	mode := j.Mode & 0o777
	switch {
	case there: // a write clears the other bits in the kernel, too
		mode = e.st.Mode & 0o777
	case mode == 0:
		mode = 0o644
	}
	if j.Append {
		err = j.extend(e, mode)
	} else {
		e.dir.sweep()
		err = j.whole(e, mode, !j.NoClash, func(t *entry, f *file) error {
			if _, err := j.pump(f, j, math.MaxInt64); err != nil || !there {
				return err
			}
			t.chown(int(e.st.Uid), int(e.st.Gid))
			return nil
		})
	}
	if err == nil {
		err = e.stat()
	}
	j.result = infoOf(string(j.Path), &e.st)
	return err
}

// target returns the entry to write, and whether it exists. It follows links, and returns an error for
// obstacles that it can see beforehand. The entry is nil if its directory must be made.
func (j *job) target() (e *entry, there bool, err error) {
	path := string(j.Path)
	for hops := 0; ; hops++ {
		if _, base := split(trim(path)); path != trim(path) || base == "." || base == ".." {
			return nil, false, failed(wire.ClassInvalid, path, "it is a directory's name, not a file's")
		}
		e, err = j.find(path)
		switch {
		case missing(err) && hops > 0:
			return e, false, failed(wire.ClassNotFound, string(j.Path), "it is a symbolic link to %s, which isn't there", Quote(path))
		case missing(err) && e != nil:
			return e, false, e.dirWritable()
		case missing(err) && j.Parents:
			return nil, false, nil
		case err != nil:
			return e, false, err
		case j.NoClash:
			return e, true, e.isThere()
		case !is(&e.st, unix.S_IFLNK):
			return e, true, j.replaceable(e)
		case hops == 40: // as the kernel has it
			return e, true, e.failed(unix.ELOOP)
		}
		link, err := e.readlink()
		if err != nil {
			return e, true, err
		}
		if !strings.HasPrefix(link, "/") {
			link = join(e.dir.path, link)
		}
		e.close()
		path = link
	}
}

// replaceable returns an error if an existing file may not be written.
func (j *job) replaceable(e *entry) error {
	if err := regular(e.path, &e.st); err != nil {
		return err
	}
	// A read-only file isn't replaced either, though its directory would allow that.
	err := e.do(func(dir int, name string) error { return unix.Faccessat(dir, name, unix.W_OK, 0) })
	if err != nil || j.Append {
		return err
	}
	return e.dirWritable()
}

// dirWritable returns an error if nothing can be made in the entry's directory.
func (e *entry) dirWritable() error {
	err := again(e.dir.path, func() error { return unix.Faccessat(e.dir.fd, ".", unix.W_OK|unix.X_OK, 0) })
	if err != nil && classOf(err) == wire.ClassPermission {
		return failed(wire.ClassPermission, e.path, "its directory can't be written (%s), and a file is written beside its place first", Reason(err))
	}
	return err
}

// extend appends the upload.
func (j *job) extend(e *entry, mode uint32) error {
	const flags = unix.O_WRONLY | unix.O_APPEND
	f, err := onlyRegular(e.open(flags|unix.O_CREAT|unix.O_EXCL, 0o600))
	made := err == nil
	if errors.Is(err, unix.EEXIST) && !j.NoClash {
		f, err = onlyRegular(e.open(flags, 0))
	}
	if err != nil {
		return err
	}
	defer f.close()
	if f.virtual() { // it may be this process's own
		return failed(wire.ClassInvalid, e.path, "it is the kernel's: it can't be written from outside")
	}
	if made {
		if err := f.chmod(mode); err != nil {
			return err
		}
	}
	_, err = j.pump(f, j, math.MaxInt64)
	return err
}

func (f *file) chmod(mode uint32) error {
	return again(f.path, func() error { return unix.Fchmod(f.fd, mode) })
}

// whole writes a file through put, and locks it meanwhile.
func (j *job) whole(e *entry, mode uint32, replace bool, fill func(*entry, *file) error) error {
	return j.put(e, replace, func(t *entry) error {
		return t.create(func(f *file) error {
			_ = f.lock() // sweep alone checks the lock, after staleAfter
			if err := fill(t, f); err != nil {
				return err
			}
			return f.chmod(mode)
		})
	})
}

// put makes a file or tree under a temporary name, and then renames it to e. If either fails, put
// removes the temporary file or tree.
func (j *job) put(e *entry, replace bool, make func(*entry) error) error {
	t := &entry{dir: e.dir, name: fmt.Sprintf("%s%016x", tempPrefix, rand.Uint64()), path: e.path}
	err := make(t)
	if err == nil {
		err = t.rename(e, replace)
	}
	if err != nil {
		_ = j.removeTree(t, true) // the error that led here says more
		return err
	}
	_ = t.remove() // rename(2) does nothing if both names are of one file
	return nil
}

// create makes a file, fills and closes it.
func (e *entry) create(fill func(*file) error) error {
	f, err := e.open(unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	err = fill(f)
	if closed := f.close(); err == nil {
		err = closed
	}
	return err
}

func (f *file) lock() error {
	return again(f.path, func() error { return unix.Flock(f.fd, unix.LOCK_EX|unix.LOCK_NB) })
}

// chown gives the file to an owner and a group, as far as this user may.
func (e *entry) chown(uid, gid int) {
	for _, uid := range []int{uid, -1} {
		if e.do(func(dir int, name string) error { return unix.Fchownat(dir, name, uid, gid, unix.AT_SYMLINK_NOFOLLOW) }) == nil {
			return
		}
	}
}

const tempPrefix = ".berm-"

func isTempName(name string) bool {
	digits, ok := strings.CutPrefix(name, tempPrefix)
	return ok && len(digits) == 16 && strings.Trim(digits, "0123456789abcdef") == ""
}

// swept holds the directories that sweep has visited.
var swept struct {
	sync.Mutex
	dirs map[[2]uint64]bool
}

const staleAfter = time.Hour

// sweep removes temporary files that a killed program left in a directory. It visits a directory once,
// and looks at the first names only.
func (f *file) sweep() {
	const mostDirs, mostNames = 256, 1024
	swept.Lock()
	key := [2]uint64{f.st.Dev, f.st.Ino}
	known := swept.dirs[key]
	if len(swept.dirs) >= mostDirs || swept.dirs == nil {
		swept.dirs = make(map[[2]uint64]bool)
	}
	swept.dirs[key] = true
	swept.Unlock()
	if known {
		return
	}
	dir, err := f.at(".").open(dirFlags, 0)
	if err != nil {
		return
	}
	defer dir.close()
	names, _ := dir.names(mostNames) // it returns the first names even with an error
	for _, name := range names {
		if isTempName(name) {
			dir.at(name).removeStale()
		}
	}
}

func (e *entry) removeStale() {
	if e.stat() != nil {
		return
	}
	f, err := e.openRegular()
	if err != nil {
		return
	}
	defer f.close()
	if int(f.st.Uid) == os.Getuid() && time.Since(time.Unix(f.st.Mtim.Unix())) > staleAfter && f.lock() == nil {
		_ = e.remove()
	}
}
