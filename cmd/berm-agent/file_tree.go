package main

import (
	"errors"

	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/runtime/agent/wire"
)

// place is a name in a directory.
type place struct {
	dir  fileDesc
	base string
	full string
	st   unix.Stat_t // of the file itself, if it is there
}

// findPlace is a path's place; it has to be closed. The error is of the directory, or
// of the name, if nothing is there or it can't be a file's.
func findPlace(path []byte) (*place, error) {
	full := trim(string(path))
	dir, base := split(full)
	switch base {
	case ".":
		if full == "/" {
			return nil, failed(wire.ClassInvalid, full, "the root itself can be neither removed, moved, copied nor replaced")
		}
		fallthrough
	case "..":
		return nil, failed(wire.ClassInvalid, full, "it has to end in a file's own name")
	}
	fd, err := openAt(unix.AT_FDCWD, dir, dir, pathOnly, 0)
	if err != nil {
		return nil, err
	}
	p := &place{dir: fd, base: base, full: full}
	p.st, err = statAt(int(fd), base, full, unix.AT_SYMLINK_NOFOLLOW)
	return p, err
}

func (p *place) close() {
	if p != nil {
		p.dir.close()
	}
}

// free is an error if a mount is there, with which nothing can be done.
func (p *place) free() error {
	if isMount(p.dir, p.base) {
		return failed(wire.ClassPrecondition, p.full, "a file system is mounted there: it can be neither removed nor moved")
	}
	return nil
}

func isMount(dir fileDesc, name string) bool {
	var st unix.Statx_t
	err := again(func() error {
		return unix.Statx(int(dir), name, unix.AT_SYMLINK_NOFOLLOW|unix.AT_NO_AUTOMOUNT, 0, &st)
	})
	return err == nil && st.Attributes&st.Attributes_mask&unix.STATX_ATTR_MOUNT_ROOT != 0
}

func removeFile(c *conn, f *wire.File) (any, error) {
	p, err := findPlace(f.Path)
	defer p.close()
	if err == nil {
		err = p.free()
	}
	if err != nil {
		return nil, err
	}
	if err := c.ready(); err != nil {
		return nil, err
	}
	switch {
	case !is(&p.st, unix.S_IFDIR):
		err = again(func() error { return unix.Unlinkat(int(p.dir), p.base, 0) })
	case !f.Recursive:
		err = again(func() error { return unix.Unlinkat(int(p.dir), p.base, unix.AT_REMOVEDIR) })
	default:
		r := &removal{pulse: pulse{c: c}}
		return nil, r.tree(p.dir, p.base, p.full)
	}
	return nil, at(p.full, err)
}

// removal removes a tree. It has two directories open, and no more memory than the
// names that lead to one, however deep and wide the tree.
type removal struct {
	pulse
	// own says that the tree is this program's own: what its permissions forbid is
	// done all the same, and nobody waits for it.
	own bool
}

// step is a directory's name in another, which has a number.
type step struct {
	name     string
	dev, ino uint64
}

func (r *removal) tree(parent fileDesc, base, full string) error {
	dir, err := r.enter(parent, base, full)
	if err != nil {
		return err
	}
	defer func() { dir.close() }()
	var steps []step
	where := func() string {
		name := full
		for _, s := range steps {
			if name = join(name, s.name); len(name) > maxPath {
				break
			}
		}
		return name
	}
	for {
		name, err := r.empty(dir)
		if err != nil {
			switch {
			case errors.Is(err, errGone):
				return errGone
			case name == "":
				return at(where(), err)
			case isMount(dir, name):
				return failed(wire.ClassPrecondition, join(where(), name), "a file system is mounted there: it can't be removed")
			}
			return at(join(where(), name), err)
		}
		if name == "" && len(steps) == 0 {
			break
		}
		st, err := dir.stat(full)
		if err != nil {
			return err
		}
		if name != "" {
			next, err := r.enter(dir, name, join(where(), name))
			if missing(err) {
				continue
			}
			if err != nil {
				return err
			}
			steps = append(steps, step{name, st.Dev, st.Ino})
			dir.close()
			dir = next
			continue
		}
		last := steps[len(steps)-1]
		above, err := openAt(int(dir), "..", where(), dirFlags, 0)
		if err != nil {
			return err
		}
		dir.close()
		dir = above
		if st, err = dir.stat(full); err != nil {
			return err
		}
		if st.Dev != last.dev || st.Ino != last.ino {
			return failed(wire.ClassPrecondition, where(), "it was moved while it was being removed")
		}
		// If it isn't empty after all, it is found again.
		_ = again(func() error { return unix.Unlinkat(int(dir), last.name, unix.AT_REMOVEDIR) })
		steps = steps[:len(steps)-1]
	}
	return at(full, again(func() error { return unix.Unlinkat(int(parent), base, unix.AT_REMOVEDIR) }))
}

func (r *removal) enter(parent fileDesc, name, full string) (fileDesc, error) {
	if r.own {
		_ = again(func() error { return unix.Fchmodat(int(parent), name, 0o700, 0) }) // opening it says what is wrong
	}
	return openAt(int(parent), name, full, dirFlags, 0)
}

// empty removes what is in a directory, up to one that isn't empty, the name of which
// it gives. An error is about that name.
func (r *removal) empty(dir fileDesc) (string, error) {
	buf := make([]byte, 4<<10) // small: it is read again after every directory in it
	for {
		if err := again(func() error { _, err := unix.Seek(int(dir), 0, unix.SEEK_SET); return err }); err != nil {
			return "", err
		}
		var names []string
		for len(names) == 0 { // a signal cuts the answer short, maybe to . and ..
			n := 0
			err := again(func() (err error) { n, err = unix.ReadDirent(int(dir), buf); return err })
			if err != nil && !missing(err) { // it is when somebody else has removed it
				return "", err
			}
			if n <= 0 {
				return "", nil
			}
			_, _, names = unix.ParseDirent(buf[:n], -1, nil)
		}
		for _, name := range names {
			if !r.own {
				if err := r.beat(); err != nil {
					return name, err
				}
			}
			switch err := unlink(dir, name); {
			case errors.Is(err, unix.ENOTEMPTY) || errors.Is(err, unix.EEXIST):
				return name, nil
			case err != nil && !missing(err):
				return name, err
			}
		}
	}
}

// unlink removes a file or an empty directory.
func unlink(dir fileDesc, name string) error {
	err := again(func() error { return unix.Unlinkat(int(dir), name, 0) })
	if errors.Is(err, unix.EISDIR) || errors.Is(err, unix.EPERM) {
		if asDir := again(func() error { return unix.Unlinkat(int(dir), name, unix.AT_REMOVEDIR) }); !errors.Is(asDir, unix.ENOTDIR) {
			return asDir
		}
	}
	return err
}

func moveFile(c *conn, f *wire.File) (any, error) { return nil, relocate(c, f, true) }
func copyFile(c *conn, f *wire.File) (any, error) { return nil, relocate(c, f, false) }

// relocate copies or moves.
func relocate(c *conn, f *wire.File, move bool) error {
	if err := checkPath(f.To); err != nil {
		return err
	}
	from, err := findPlace(f.Path)
	defer from.close()
	if err != nil {
		return err
	}
	to, err := findPlace(f.To)
	defer to.close()
	if err != nil && (to == nil || !missing(err)) {
		return err
	}
	if err := mayReplace(from, to, err == nil, f.Replace); err != nil {
		return err
	}
	if move {
		if err := from.free(); err != nil {
			return err
		}
	} else if err := copyable(from.full, &from.st); err != nil {
		return err
	}
	if err := c.ready(); err != nil {
		return err
	}
	if !move {
		return copyTo(c, from, to, f.Replace, false)
	}
	err = rename(from.dir, from.base, to.dir, to.base, f.Replace)
	if !errors.Is(err, unix.EXDEV) {
		return at(to.full, err)
	}
	// Another file system, or another layer of the container's own.
	if err := copyTo(c, from, to, f.Replace, true); err != nil {
		return err
	}
	if is(&from.st, unix.S_IFDIR) {
		r := &removal{pulse: pulse{c: c}}
		err = r.tree(from.dir, from.base, from.full)
	} else {
		err = at(from.full, unlink(from.dir, from.base))
	}
	if err != nil && !errors.Is(err, errGone) {
		why := failureOf(err)
		return failed(why.Class, to.full, "it is copied there, but not all of what was to be moved can be removed: %s", why.Message)
	}
	return err
}

// mayReplace is an error for what rename(2) refuses, or would do though it shouldn't.
func mayReplace(from, to *place, there, replace bool) error {
	fromDir, toDir := is(&from.st, unix.S_IFDIR), is(&to.st, unix.S_IFDIR)
	if fromDir {
		inside, err := isInside(to.dir, &from.st)
		if err != nil {
			return err
		}
		if inside {
			return failed(wire.ClassInvalid, to.full, "it is in the directory itself that is to be there, %s", quote(from.full))
		}
	}
	switch {
	case !there:
		if len(to.base) > maxName {
			return at(to.full, unix.ENAMETOOLONG)
		}
		return nil
	case !replace:
		return failed(wire.ClassExists, to.full, "it is there already, as %s", kindOf(to.st.Mode))
	case fromDir != toDir:
		return failed(wire.ClassInvalid, to.full, "it is %s, and %s can't replace it", kindOf(to.st.Mode), kindOf(from.st.Mode))
	case toDir:
		dir, err := openAt(int(to.dir), to.base, to.full, dirFlags, 0)
		if err != nil {
			return err
		}
		defer dir.close()
		if names, _ := readNames(dir, to.full, 1); len(names) > 0 {
			return at(to.full, unix.ENOTEMPTY)
		}
	}
	return to.free()
}

// isInside is whether a directory is another, or below it.
func isInside(dir fileDesc, other *unix.Stat_t) (bool, error) {
	fd, err := openAt(int(dir), ".", ".", pathOnly, 0)
	if err != nil {
		return false, err
	}
	defer func() { fd.close() }()
	for last := (unix.Stat_t{}); ; {
		st, err := fd.stat("..")
		if err != nil {
			return false, err
		}
		if st.Dev == other.Dev && st.Ino == other.Ino {
			return true, nil
		}
		if st.Dev == last.Dev && st.Ino == last.Ino { // the root is above itself
			return false, nil
		}
		above, err := openAt(int(fd), "..", "..", pathOnly, 0)
		if err != nil {
			return false, err
		}
		fd.close()
		fd, last = above, st
	}
}

func copyable(name string, st *unix.Stat_t) error {
	if is(st, unix.S_IFREG) || is(st, unix.S_IFDIR) || is(st, unix.S_IFLNK) {
		return nil
	}
	return failed(wire.ClassInvalid, name, "it is %s: only regular files, directories and symbolic links can be copied", kindOf(st.Mode))
}

// copyTo copies a file or tree beside its place, and then puts it there. Nothing is left
// of one that can't be copied whole.
func copyTo(c *conn, from, to *place, replace, owner bool) error {
	job := &copying{pulse: pulse{c: c}, owner: owner}
	name := tempName()
	err := job.file(from, &place{dir: to.dir, base: name, full: to.full}, from.st.Dev)
	if err == nil {
		err = at(to.full, rename(to.dir, name, to.dir, to.base, replace))
	}
	if err != nil && errors.Is(unlink(to.dir, name), unix.ENOTEMPTY) {
		r := &removal{own: true}
		_ = r.tree(to.dir, name, to.full) // the error that led here says more
	}
	return err
}

// copying is a copy under way.
type copying struct {
	pulse
	owner bool // is kept too, as far as this user may
	held  int  // names
}

// file copies a file, or all of a directory but those that the kernel makes up. The
// places have their directories and names.
func (j *copying) file(from, to *place, device uint64) error {
	if len(from.full) > maxPath {
		return at(from.full, unix.ENAMETOOLONG)
	}
	if err := j.beat(); err != nil {
		return err
	}
	st, err := statAt(int(from.dir), from.base, from.full, unix.AT_SYMLINK_NOFOLLOW)
	if err == nil {
		err = copyable(from.full, &st)
	}
	if err != nil {
		return err
	}
	switch {
	case is(&st, unix.S_IFDIR):
		err = j.dir(from, to, &st, device)
	case is(&st, unix.S_IFREG):
		err = j.content(from, to)
	default:
		var target string
		if target, err = readLink(int(from.dir), from.base, from.full); err == nil {
			err = at(to.full, again(func() error { return unix.Symlinkat(target, int(to.dir), to.base) }))
		}
	}
	if err != nil {
		return err
	}
	if j.owner {
		_ = again(func() error {
			return unix.Fchownat(int(to.dir), to.base, int(st.Uid), int(st.Gid), unix.AT_SYMLINK_NOFOLLOW)
		})
	}
	if !is(&st, unix.S_IFLNK) {
		err = again(func() error { return unix.Fchmodat(int(to.dir), to.base, st.Mode&0o1777, 0) })
	}
	if err == nil {
		err = setTime(to.dir, to.base, st.Mtim)
	}
	return at(to.full, err)
}

func setTime(dir fileDesc, name string, modified unix.Timespec) error {
	times := []unix.Timespec{{Nsec: unix.UTIME_OMIT}, modified}
	return again(func() error { return unix.UtimesNanoAt(int(dir), name, times, unix.AT_SYMLINK_NOFOLLOW) })
}

func (j *copying) dir(from, to *place, st *unix.Stat_t, device uint64) error {
	source, err := openAt(int(from.dir), from.base, from.full, dirFlags, 0)
	if err != nil {
		return err
	}
	defer source.close()
	if err := again(func() error { return unix.Mkdirat(int(to.dir), to.base, 0o700) }); err != nil {
		return at(to.full, err)
	}
	if st.Dev != device && source.virtual() {
		return nil
	}
	made, err := openAt(int(to.dir), to.base, to.full, dirFlags, 0)
	if err != nil {
		return err
	}
	defer made.close()
	names, err := readNames(source, from.full, maxEntries-j.held)
	if err != nil {
		return err
	}
	j.held += len(names)
	defer func() { j.held -= len(names) }()
	for _, name := range names {
		inner := &place{dir: source, base: name, full: join(from.full, name)}
		err := j.file(inner, &place{dir: made, base: name, full: join(to.full, name)}, st.Dev)
		if missing(err) && isGone(inner) {
			continue
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// isGone is whether a file has vanished.
func isGone(p *place) bool {
	_, err := statAt(int(p.dir), p.base, p.full, unix.AT_SYMLINK_NOFOLLOW)
	return missing(err)
}

func (j *copying) content(from, to *place) error {
	in, st, err := openRegular(int(from.dir), from.base, from.full, unix.O_NOFOLLOW)
	if err != nil {
		return err
	}
	defer in.close()
	out, err := openAt(int(to.dir), to.base, to.full, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return err
	}
	err = j.bytes(out, in, extent(in, &st))
	if closed := disk.do(func() error { return unix.Close(int(out)) }); err == nil && !errors.Is(closed, unix.EINTR) {
		err = closed
	}
	return about(to.full, err)
}

// bytes lets the kernel copy, where it can.
func (j *copying) bytes(out, in fileDesc, left int64) error {
	const most = 16 << 20 // then somebody may have hung up
	for done := false; left > 0 && !done; {
		var n int
		err := again(func() (err error) {
			n, err = unix.CopyFileRange(int(in), nil, int(out), nil, int(min(left, most)), 0)
			return err
		})
		switch {
		case err == nil && n > 0:
			left -= int64(n)
		case err == nil, errors.Is(err, unix.EXDEV), errors.Is(err, unix.EINVAL), errors.Is(err, unix.ENOSYS),
			errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.EPERM), errors.Is(err, unix.EBADF):
			// It can't, or says that there is nothing, as of files that the kernel makes up.
			moved, err := pump(out, in, min(left, most))
			if err != nil {
				return err
			}
			left -= moved
			done = moved == 0
		default:
			return err
		}
		if j.c.gone() {
			return errGone
		}
	}
	return nil
}
