package files

import (
	"errors"

	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/runtime/agent/wire"
)

// findOwn is find for an entry that is to be removed, moved, copied or replaced.
func (j *job) findOwn(path []byte) (*entry, error) {
	full := trim(string(path))
	switch _, base := split(full); {
	case full == "/":
		return nil, failed(wire.ClassInvalid, full, "the root itself can be neither removed, moved, copied nor replaced")
	case base == "." || base == "..":
		return nil, failed(wire.ClassInvalid, full, "it has to end in a file's own name")
	}
	return j.find(full)
}

func (j *job) remove() error {
	e, err := j.findOwn(j.Path)
	defer e.close()
	if err == nil {
		err = j.Ready()
	}
	if err != nil {
		return err
	}
	if j.Recursive {
		return j.removeTree(e, false)
	}
	return e.remove()
}

// removal empties a directory. However deep and wide the tree, it has at most two directories
// open, and keeps only the names that lead to the current one.
type removal struct {
	*job
	dir   *file
	steps []step // to dir, from the first directory
	// own says that this program made the tree. The removal then overrides permissions, and
	// doesn't check that the peer is alive.
	own bool
}

// step leads from one directory to its subdirectory name.
type step struct {
	name     string
	dev, ino uint64 // of the first
	path     int    // length of its path
}

// removeTree removes a file, or a directory with its content. It fails if a file system is
// mounted there, and doesn't enter that.
func (j *job) removeTree(e *entry, own bool) error {
	err := e.remove()
	if !notEmpty(err) {
		return err
	}
	r := &removal{job: j, own: own}
	if r.dir, err = r.open(e); err != nil {
		return err
	}
	defer func() { _ = r.dir.close() }()
	for {
		name, err := r.files()
		switch {
		case err != nil:
		case name != "":
			err = r.down(name)
		case len(r.steps) > 0:
			err = r.up()
		default:
			return e.remove()
		}
		if err != nil {
			return err
		}
	}
}

func notEmpty(err error) bool { return errors.Is(err, unix.ENOTEMPTY) || errors.Is(err, unix.EEXIST) }

// files removes the files and empty directories in dir. It stops at a directory that isn't
// empty, and returns its name.
func (r *removal) files() (string, error) {
	buf := make([]byte, 4<<10) // small: the directory is read again after each directory in it
	for {
		if err := r.dir.seek(0); err != nil {
			return "", err
		}
		names, err := r.dir.someNames(buf)
		if missing(err) || err == nil && names == nil { // somebody else has removed it, or it is empty
			return "", nil
		}
		if err != nil {
			return "", err
		}
		for _, name := range names {
			if !r.own {
				if err := r.beat(); err != nil {
					return "", err
				}
			}
			switch err := r.dir.at(name).remove(); {
			case notEmpty(err):
				return name, nil
			case err != nil && !missing(err):
				return "", err
			}
		}
	}
}

func (r *removal) open(e *entry) (*file, error) {
	dir, err := e.open(dirFlags, 0)
	if err == nil && r.own {
		_ = dir.chmod(0o700) // on failure, removing its content returns an error
	}
	return dir, err
}

func (r *removal) down(name string) error {
	below, err := r.open(r.dir.at(name))
	if err != nil {
		return unlessMissing(err)
	}
	if len(below.path) > maxPath { // too long for an error
		below.path = r.dir.path
	}
	r.steps = append(r.steps, step{name, r.dir.st.Dev, r.dir.st.Ino, len(r.dir.path)})
	_ = r.dir.close()
	r.dir = below
	return nil
}

func (r *removal) up() error {
	last := r.steps[len(r.steps)-1]
	above, err := r.dir.at("..").open(dirFlags, 0)
	if err != nil {
		return err
	}
	path := r.dir.path
	_ = r.dir.close()
	r.dir, r.steps = above, r.steps[:len(r.steps)-1]
	if above.path = path[:last.path]; above.st.Dev != last.dev || above.st.Ino != last.ino {
		return failed(wire.ClassPrecondition, path, "it was moved while it was being removed")
	}
	_ = above.at(last.name).remove() // if it isn't empty, files finds it again
	return nil
}

func (j *job) move() error { return j.relocate(true) }
func (j *job) copy() error { return j.relocate(false) }

func (j *job) relocate(move bool) error {
	if err := checkPath(j.To); err != nil {
		return err
	}
	from, err := j.findOwn(j.Path)
	defer from.close()
	if err != nil {
		return err
	}
	to, err := j.findOwn(j.To)
	defer to.close()
	if err == nil {
		err = j.mayReplace(from, to)
	} else if to != nil {
		err = unlessMissing(err)
	}
	if err == nil && move && from.isMount() {
		err = from.failed(unix.EBUSY)
	}
	if err == nil && !move {
		err = copyable(from)
	}
	if err == nil {
		err = j.Ready()
	}
	if err != nil {
		return err
	}
	if move {
		err := from.rename(to, j.Replace)
		if errors.Is(err, unix.EINVAL) {
			return inItself(from, to)
		}
		if !errors.Is(err, unix.EXDEV) {
			return err
		}
		// Another file system, or another layer of the container's root.
	}
	if err := j.copyTo(from, to, move); err != nil || !move {
		return err
	}
	if err := j.removeTree(from, false); err != nil {
		why := Failure(err)
		return failed(why.Class, to.path, "it is copied there, but not all of what was to be moved can be removed: %s", why.Message)
	}
	return nil
}

// mayReplace returns an error if from must not replace to. It does so before anything is
// copied, and also in cases that rename(2) allows.
func (j *job) mayReplace(from, to *entry) error {
	toDir := is(&to.st, unix.S_IFDIR)
	switch {
	case !j.Replace:
		return to.isThere()
	case is(&from.st, unix.S_IFDIR) != toDir:
		return failed(wire.ClassInvalid, to.path, "it is %s, and %s can't replace it", kindOf(&to.st), kindOf(&from.st))
	case !toDir:
		return nil
	}
	dir, err := to.open(dirFlags, 0)
	if err != nil {
		return err
	}
	defer dir.close()
	if names, _ := dir.names(1); len(names) > 0 {
		return to.failed(unix.ENOTEMPTY)
	}
	return nil
}

func inItself(from, to *entry) error {
	return failed(wire.ClassInvalid, to.path, "it is in the directory itself that is to be there, %s", Quote(from.path))
}

func (e *entry) isMount() bool {
	var st unix.Statx_t
	err := e.do(func(dir int, name string) error {
		return unix.Statx(dir, name, unix.AT_SYMLINK_NOFOLLOW|unix.AT_NO_AUTOMOUNT, 0, &st)
	})
	return err == nil && st.Attributes&st.Attributes_mask&unix.STATX_ATTR_MOUNT_ROOT != 0
}

func copyable(e *entry) error {
	if is(&e.st, unix.S_IFREG) || is(&e.st, unix.S_IFDIR) || is(&e.st, unix.S_IFLNK) {
		return nil
	}
	return failed(wire.ClassInvalid, e.path, "it is %s: only regular files, directories and symbolic links can be copied", kindOf(&e.st))
}

// copyTo copies a file or tree.
func (j *job) copyTo(from, to *entry, owner bool) error {
	return j.put(to, j.Replace, func(t *entry) error {
		c := &copying{job: j, owner: owner, temp: t, dirs: []*file{to.dir}}
		w := &walk{job: j, visit: c.visit, leave: c.leave, strict: true}
		err := w.tree(from)
		for _, dir := range c.dirs[1:] {
			_ = dir.close()
		}
		return err
	})
}

// copying is a copy under way.
type copying struct {
	*job
	owner bool // keep the files' owners, as far as this user may
	temp  *entry
	dirs  []*file // the copy's directories, down to the one of the entry
}

// to returns the copy of an entry.
func (c *copying) to(e *entry) *entry {
	if e.depth == 0 {
		return c.temp
	}
	return c.dirs[e.depth].at(e.name)
}

// visit copies a file, or makes a directory.
func (c *copying) visit(e *entry) error {
	if err := copyable(e); err != nil {
		return err
	}
	to := c.to(e)
	switch {
	case is(&e.st, unix.S_IFDIR):
		if e.st.Dev == c.dirs[0].st.Dev && e.st.Ino == c.dirs[0].st.Ino {
			return inItself(e, to)
		}
		if err := to.mkdir(0o700); err != nil {
			return err
		}
		dir, err := to.open(dirFlags, 0)
		if err == nil {
			c.dirs = append(c.dirs, dir)
		}
		return err
	case is(&e.st, unix.S_IFREG):
		in, err := e.openRegular()
		if err != nil {
			return unlessVanished(err)
		}
		defer in.close()
		if err := to.create(func(out *file) error { return c.content(out, in, e.st.Mode) }); err != nil {
			return err
		}
	default:
		target, err := e.readlink()
		if err != nil {
			return unlessVanished(err)
		}
		if err := to.symlink(target); err != nil {
			return err
		}
	}
	return c.attributes(e, to)
}

// leave sets a directory's permissions and time, once it has its content.
func (c *copying) leave(e *entry) error {
	last := len(c.dirs) - 1
	dir := c.dirs[last]
	c.dirs = c.dirs[:last]
	defer dir.close()
	if err := dir.chmod(e.st.Mode & 0o1777); err != nil {
		return err
	}
	return c.attributes(e, c.to(e))
}

// attributes gives a copy its owner and time.
func (c *copying) attributes(e, to *entry) error {
	if c.owner {
		to.chown(int(e.st.Uid), int(e.st.Gid))
	}
	return to.setTime(e.st.Mtim)
}

// content copies a file's content and permissions. It lets the kernel copy, where it can.
func (c *copying) content(out, in *file, mode uint32) error {
	const most = 16 << 20 // bytes between two checks that the peer is alive
	left := in.extent()
	for left > 0 {
		n, err := unix.CopyFileRange(in.fd, nil, out.fd, nil, int(min(left, most)), 0)
		if err != nil || n <= 0 {
			break // not supported, or 0 as for virtual files
		}
		left -= int64(n)
		if err := c.Alive(); err != nil {
			return err
		}
	}
	if _, err := c.pump(out, in, left); err != nil {
		return err
	}
	return out.chmod(mode & 0o1777)
}
