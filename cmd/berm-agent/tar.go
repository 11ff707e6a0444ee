package main

import (
	"archive/tar"
	"bufio"
	"errors"
	"fmt"
	"io"
	"math"
	"path"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/runtime/agent/wire"
)

func readTar(c *conn, f *wire.File) (any, error) {
	name := trim(string(f.Path))
	st, err := statAt(unix.AT_FDCWD, name, name, unix.AT_SYMLINK_NOFOLLOW)
	if err == nil {
		err = copyable(name, &st)
	}
	if err != nil {
		return nil, err
	}
	dir, base := split(name)
	parent, err := openAt(unix.AT_FDCWD, dir, dir, pathOnly, 0)
	if err != nil {
		return nil, err
	}
	defer parent.close()
	if parent.virtual() {
		return nil, failed(wire.ClassInvalid, name, "the kernel makes up what is there as it is read: it can't be packed")
	}
	if err := c.ready(); err != nil {
		return nil, err
	}
	buffered := bufio.NewWriterSize(download{c}, wire.MaxData)
	p := &packing{
		w:      tar.NewWriter(buffered),
		prefix: path.Base(path.Clean(name)),
		root:   name,
		packed: make(map[inode]string),
	}
	if p.prefix == "/" {
		p.prefix = "."
	}
	err = p.add(&entry{dir: parent, name: base, path: name, st: st})
	if err == nil && is(&st, unix.S_IFDIR) {
		var root fileDesc
		if root, err = openAt(int(parent), base, name, dirFlags, 0); err == nil {
			defer root.close()
			w := &walk{pulse: pulse{c: c}, strict: true, visit: p.add}
			err = w.below(root, name)
		}
	}
	if err == nil {
		err = p.w.Close()
	}
	if err == nil {
		err = buffered.Flush()
	}
	return nil, err
}

// packing is an archive under way.
type packing struct {
	w      *tar.Writer
	root   string // path
	prefix string // its name in the archive
	packed map[inode]string
}

// inode is a file with several names.
type inode struct{ dev, ino uint64 }

const maxLinks = 1 << 16 // that are remembered; others are packed once more

// add packs a file. One that has vanished, and what is special, isn't packed.
func (p *packing) add(e *entry) error {
	h := &tar.Header{
		Name:    p.prefix + strings.TrimPrefix(e.path, strings.TrimSuffix(p.root, "/")),
		Mode:    int64(e.st.Mode & 0o7777),
		Uid:     int(e.st.Uid),
		Gid:     int(e.st.Gid),
		ModTime: time.Unix(e.st.Mtim.Sec, 0), // the archive has no more, and would round it up
	}
	if e.path == p.root {
		h.Name = p.prefix
	}
	switch {
	case is(&e.st, unix.S_IFDIR):
		h.Typeflag = tar.TypeDir
		h.Name += "/"
	case is(&e.st, unix.S_IFLNK):
		target, err := readLink(int(e.dir), e.name, e.path)
		if err != nil {
			return vanished(err)
		}
		h.Typeflag, h.Linkname = tar.TypeSymlink, target
	case is(&e.st, unix.S_IFREG):
		return p.regular(e, h)
	default:
		return nil
	}
	return p.head(e, h)
}

// vanished is nil for a file that isn't there any more, or another by now.
func vanished(err error) error {
	if missing(err) || errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ELOOP) {
		return nil
	}
	return err
}

func (p *packing) head(e *entry, h *tar.Header) error {
	err := p.w.WriteHeader(h)
	if errors.Is(err, errGone) {
		return errGone
	}
	if err != nil {
		return failed(wire.ClassInvalid, e.path, "it can't be packed: %s", err)
	}
	return nil
}

func (p *packing) regular(e *entry, h *tar.Header) error {
	id := inode{e.st.Dev, e.st.Ino}
	if first, ok := p.packed[id]; ok && e.st.Nlink > 1 {
		h.Typeflag, h.Linkname = tar.TypeLink, first
		return p.head(e, h)
	}
	fd, st, err := openRegular(int(e.dir), e.name, e.path, unix.O_NOFOLLOW)
	if err != nil {
		var failure *wire.Failure
		if errors.As(err, &failure) { // it isn't regular any more
			return nil
		}
		return vanished(err)
	}
	defer fd.close()
	h.Typeflag, h.Size = tar.TypeReg, st.Size
	if err := p.head(e, h); err != nil {
		return err
	}
	done, err := pump(p.w, fd, st.Size)
	if err == nil && done < st.Size { // it has shrunk: the archive says otherwise already
		_, err = pump(p.w, zeros{}, st.Size-done)
	}
	if err == nil && st.Nlink > 1 && len(p.packed) < maxLinks {
		p.packed[inode{st.Dev, st.Ino}] = h.Name
	}
	return about(e.path, err)
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}

func writeTar(c *conn, f *wire.File) (any, error) {
	name := trim(string(f.Path))
	root, err := openAt(unix.AT_FDCWD, name, name, pathOnly, 0)
	if err != nil {
		return nil, err
	}
	defer root.close()
	up, err := c.upload()
	if err != nil {
		return nil, err
	}
	u := &unpacking{r: tar.NewReader(up), root: root, path: name}
	err = u.all()
	if err == nil {
		err = up.into(io.Discard) // what follows the archive's end
	}
	return nil, err
}

// unpacking puts what is in an archive below a directory. It goes from one directory to
// the next by its name, and never through a link.
type unpacking struct {
	r       *tar.Reader
	root    fileDesc
	path    string // root's
	entries int
	dirs    []madeDir
}

// madeDir is a directory of the archive's that gets its permissions and time when all is
// in it.
type madeDir struct {
	name     string
	mode     uint32
	modified unix.Timespec
}

func (u *unpacking) all() error {
	for {
		h, err := u.r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return u.broken(err)
		}
		if err := u.count(); err != nil {
			return err
		}
		if h.Typeflag == tar.TypeXGlobalHeader {
			continue
		}
		if err := u.entry(h); err != nil {
			return err
		}
	}
	for i := len(u.dirs) - 1; i >= 0; i-- {
		if err := u.finish(u.dirs[i]); err != nil {
			return err
		}
	}
	return nil
}

// broken is an error of the archive's, or errGone.
func (u *unpacking) broken(err error) error {
	if errors.Is(err, errGone) {
		return errGone
	}
	return invalid("the archive is broken: %s", err)
}

func (u *unpacking) count() error {
	if u.entries++; u.entries > maxEntries {
		return &wire.Failure{Class: wire.ClassExhausted, Message: fmt.Sprintf("the archive has more than %d files and directories", maxEntries)}
	}
	return nil
}

func (u *unpacking) entry(h *tar.Header) error {
	name, err := u.inside(h.Name)
	if err != nil {
		return err
	}
	if name == "." { // the directory itself, which stays as it is
		return nil
	}
	dir, err := u.parent(name, true)
	if err != nil {
		return err
	}
	defer dir.close()
	base, full := path.Base(name), join(u.path, name)
	modified := unix.NsecToTimespec(nanoseconds(h.ModTime))
	switch h.Typeflag {
	case tar.TypeDir:
		return u.directory(dir, madeDir{name, uint32(h.Mode) & 0o1777, modified})
	case tar.TypeReg:
		if isSparse(h) {
			return failed(wire.ClassInvalid, full, "it is sparse in the archive: only whole files can be unpacked")
		}
		return u.regular(dir, base, full, uint32(h.Mode)&0o777, modified)
	case tar.TypeSymlink:
		return replaceWith(dir, base, full, func(temp string) error {
			return unix.Symlinkat(h.Linkname, int(dir), temp)
		})
	case tar.TypeLink:
		return u.link(dir, base, full, h.Linkname)
	}
	return failed(wire.ClassInvalid, full, "it is of type %q in the archive: only regular files, directories and links can be unpacked", h.Typeflag)
}

func nanoseconds(t time.Time) int64 {
	if s := t.Unix(); s < 0 || s > math.MaxInt64/int64(time.Second)-1 {
		return 0
	}
	return t.UnixNano()
}

// isSparse is whether a few bytes stand for many.
func isSparse(h *tar.Header) bool {
	for key := range h.PAXRecords {
		if strings.HasPrefix(key, "GNU.sparse.") {
			return true
		}
	}
	return false
}

// inside is a name in the archive as a clean path below the directory.
func (u *unpacking) inside(name string) (string, error) {
	switch {
	case name == "" || strings.HasPrefix(name, "/"):
		return "", failed(wire.ClassInvalid, name, "a name in the archive isn't relative")
	case len(name) > maxPath:
		return "", failed(wire.ClassInvalid, name, "a name in the archive has %d bytes, at most %d", len(name), maxPath)
	case strings.IndexByte(name, 0) >= 0:
		return "", failed(wire.ClassInvalid, name, "a name in the archive has a NUL")
	}
	for element := range strings.SplitSeq(name, "/") {
		if element == ".." {
			return "", failed(wire.ClassInvalid, name, "a name in the archive leads out of the directory")
		}
	}
	return path.Clean(name), nil
}

// parent opens the directory that a file is in, and makes it if told so.
func (u *unpacking) parent(name string, make bool) (fileDesc, error) {
	dir, err := openAt(int(u.root), ".", u.path, pathOnly, 0)
	if err != nil {
		return -1, err
	}
	elements := strings.Split(name, "/")
	for i, element := range elements[:len(elements)-1] {
		full := join(u.path, strings.Join(elements[:i+1], "/"))
		next, err := u.child(dir, element, full, make)
		dir.close()
		if err != nil {
			return -1, err
		}
		dir = next
	}
	return dir, nil
}

func (u *unpacking) child(dir fileDesc, name, full string, make bool) (fileDesc, error) {
	const flags = pathOnly | unix.O_NOFOLLOW
	fd, err := openAt(int(dir), name, full, flags, 0)
	if missing(err) && make {
		if err := u.count(); err != nil {
			return -1, err
		}
		err = again(func() error { return unix.Mkdirat(int(dir), name, 0o755) })
		if err != nil && !errors.Is(err, unix.EEXIST) {
			return -1, at(full, err)
		}
		fd, err = openAt(int(dir), name, full, flags, 0)
	}
	if errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP) {
		return -1, failed(wire.ClassInvalid, full, "it is no directory, but maybe a link to one, through which nothing is unpacked")
	}
	return fd, err
}

// directory makes a directory; one that is there stays as it is.
func (u *unpacking) directory(dir fileDesc, d madeDir) error {
	base, full := path.Base(d.name), join(u.path, d.name)
	err := again(func() error { return unix.Mkdirat(int(dir), base, 0o700) })
	if errors.Is(err, unix.EEXIST) {
		st, err := statAt(int(dir), base, full, unix.AT_SYMLINK_NOFOLLOW)
		if err == nil && !is(&st, unix.S_IFDIR) {
			err = failed(wire.ClassExists, full, "it is there already, as %s, and a directory in the archive", kindOf(st.Mode))
		}
		return err
	}
	if err == nil {
		u.dirs = append(u.dirs, d)
	}
	return at(full, err)
}

func (u *unpacking) finish(d madeDir) error {
	dir, err := u.parent(d.name, false)
	if err != nil {
		return err
	}
	defer dir.close()
	full := join(u.path, d.name)
	fd, err := openAt(int(dir), path.Base(d.name), full, dirFlags, 0)
	if err != nil {
		return err
	}
	defer fd.close()
	err = again(func() error { return unix.Fchmod(int(fd), d.mode) })
	if err == nil {
		err = setTime(dir, path.Base(d.name), d.modified)
	}
	return at(full, err)
}

func (u *unpacking) regular(dir fileDesc, base, full string, mode uint32, modified unix.Timespec) error {
	f, err := newTemp(dir, full)
	if err != nil {
		return err
	}
	defer f.drop()
	_, err = pump(f.fd, archived{u}, math.MaxInt64)
	if err == nil {
		err = setTime(dir, f.name, modified)
	}
	if err != nil {
		var failure *wire.Failure
		if errors.As(err, &failure) {
			return failure
		}
		return about(full, err)
	}
	return f.put(base, mode, true)
}

// archived is a file's content. Its errors are those of the archive.
type archived struct{ u *unpacking }

func (a archived) Read(p []byte) (int, error) {
	n, err := a.u.r.Read(p)
	if err != nil && !errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		err = a.u.broken(err)
	}
	return n, err
}

// link gives a file that was unpacked, or was there, another name.
func (u *unpacking) link(dir fileDesc, base, full, target string) error {
	name, err := u.inside(target)
	if err != nil {
		return err
	}
	if name == "." {
		return failed(wire.ClassInvalid, full, "it is a hard link to a directory in the archive")
	}
	from, err := u.parent(name, false)
	if err != nil {
		return err
	}
	defer from.close()
	targetBase, targetFull := path.Base(name), join(u.path, name)
	st, err := statAt(int(from), targetBase, targetFull, unix.AT_SYMLINK_NOFOLLOW)
	if err == nil {
		err = regular(targetFull, &st)
	}
	if err != nil {
		return err
	}
	return replaceWith(dir, base, full, func(temp string) error {
		return unix.Linkat(int(from), targetBase, int(dir), temp, 0)
	})
}

// replaceWith makes something under another name first, and then puts it in its place.
func replaceWith(dir fileDesc, base, full string, create func(temp string) error) error {
	temp := tempName()
	if err := again(func() error { return create(temp) }); err != nil {
		return at(full, err)
	}
	err := rename(dir, temp, dir, base, true)
	// Two names of one file: rename leaves both.
	_ = again(func() error { return unix.Unlinkat(int(dir), temp, 0) })
	return at(full, err)
}
