package files

import (
	"archive/tar"
	"bufio"
	"errors"
	"io"
	"math"
	"path"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/runtime/agent/wire"
)

func (j *job) pack() error {
	e, err := j.find(j.name)
	defer e.close()
	if err == nil {
		err = copyable(e)
	}
	if err != nil {
		return err
	}
	if e.dir.virtual() {
		return failed(wire.ClassInvalid, j.name, "the kernel makes up what is there as it is read: it can't be packed")
	}
	if err := j.Ready(); err != nil {
		return err
	}
	buffered := bufio.NewWriterSize(j, wire.MaxData)
	p := &packing{job: j, w: tar.NewWriter(buffered), prefix: path.Base(path.Clean(j.name)), packed: make(map[inode]string)}
	if p.prefix == "/" {
		p.prefix = "."
	}
	w := &walk{job: j, strict: true, visit: p.add}
	err = w.tree(e)
	if err == nil {
		err = p.w.Close()
	}
	if err == nil {
		err = buffered.Flush()
	}
	return err
}

// packing is an archive under way.
type packing struct {
	*job
	w      *tar.Writer
	prefix string           // the first name in the archive
	packed map[inode]string // names in the archive, of files with several names
}

// inode identifies a file.
type inode struct{ dev, ino uint64 }

const maxLinks = 1 << 16 // entries of packed; further links are packed as files

// add packs a file. It leaves out special files, and files that have vanished.
func (p *packing) add(e *entry) error {
	h := &tar.Header{
		Name:    p.prefix + strings.TrimPrefix(e.path, strings.TrimSuffix(p.name, "/")),
		Mode:    int64(e.st.Mode & 0o7777),
		Uid:     int(e.st.Uid),
		Gid:     int(e.st.Gid),
		ModTime: time.Unix(e.st.Mtim.Sec, 0), // the archive stores seconds, and would round up
	}
	if e.depth == 0 {
		h.Name = p.prefix
	}
	switch {
	case is(&e.st, unix.S_IFDIR):
		h.Typeflag = tar.TypeDir
		h.Name += "/"
	case is(&e.st, unix.S_IFLNK):
		target, err := e.readlink()
		if err != nil {
			return unlessVanished(err)
		}
		h.Typeflag, h.Linkname = tar.TypeSymlink, target
	case is(&e.st, unix.S_IFREG):
		return p.regular(e, h)
	default:
		return nil
	}
	return p.head(e, h)
}

func (p *packing) head(e *entry, h *tar.Header) error {
	if err := p.w.WriteHeader(h); err != nil {
		return failed(wire.ClassInvalid, e.path, "it can't be packed: %s", err)
	}
	return nil
}

func (p *packing) regular(e *entry, h *tar.Header) error {
	if first, ok := p.packed[inode{e.st.Dev, e.st.Ino}]; ok && e.st.Nlink > 1 {
		h.Typeflag, h.Linkname = tar.TypeLink, first
		return p.head(e, h)
	}
	f, err := e.openRegular()
	if err != nil {
		return unlessVanished(err)
	}
	defer f.close()
	h.Typeflag, h.Size = tar.TypeReg, f.st.Size
	if err := p.head(e, h); err != nil {
		return err
	}
	done, err := p.pump(p.w, f, f.st.Size)
	if err == nil && done < f.st.Size { // it has shrunk, but its header has the old size
		_, err = p.pump(p.w, zeros{}, f.st.Size-done)
	}
	if err == nil && f.st.Nlink > 1 && len(p.packed) < maxLinks {
		p.packed[inode{f.st.Dev, f.st.Ino}] = h.Name
	}
	return err
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}

func (j *job) unpack() error {
	root, err := j.open(j.name, pathOnly)
	if err != nil {
		return err
	}
	defer root.close()
	if err := j.Ready(); err != nil {
		return err
	}
	u := &unpacking{job: j, r: tar.NewReader(j), root: root}
	if err := u.all(); err != nil {
		return err
	}
	_, err = j.pump(io.Discard, j, math.MaxInt64) // what follows the archive's end
	return err
}

// unpacking unpacks an archive below a directory. It opens one directory after the other by name, and
// never follows a link.
type unpacking struct {
	*job
	r       *tar.Reader
	root    *file
	entries int
	dirs    []madeDir
}

// madeDir is a directory from the archive. It gets its permissions and time after its content.
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
			return broken(err)
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

func broken(err error) error { return Invalid("the archive is broken: %s", err) }

func (u *unpacking) count() error {
	if u.entries++; u.entries > maxEntries {
		return failed(wire.ClassExhausted, u.root.path, "the archive has more than %d files and directories", maxEntries)
	}
	return nil
}

func (u *unpacking) entry(h *tar.Header) error {
	name, err := inside(h.Name)
	if err != nil || name == "." { // the directory itself, which stays as it is
		return err
	}
	e, err := u.find(name, true)
	if err != nil {
		return err
	}
	defer e.close()
	modified, err := unix.TimeToTimespec(h.ModTime)
	if err != nil {
		return e.failed(err)
	}
	switch h.Typeflag {
	case tar.TypeDir:
		return u.directory(e, madeDir{name, uint32(h.Mode) & 0o1777, modified})
	case tar.TypeReg:
		if isSparse(h) {
			return failed(wire.ClassInvalid, e.path, "it is sparse in the archive: only whole files can be unpacked")
		}
		return u.whole(e, uint32(h.Mode)&0o777, true, func(t *entry, f *file) error {
			if _, err := u.pump(f, archived{u.r}, math.MaxInt64); err != nil {
				return err
			}
			return t.setTime(modified)
		})
	case tar.TypeSymlink:
		return u.put(e, true, func(t *entry) error { return t.symlink(h.Linkname) })
	case tar.TypeLink:
		return u.link(e, h.Linkname)
	}
	return failed(wire.ClassInvalid, e.path, "it is of type %q in the archive: only regular files, directories and links can be unpacked", h.Typeflag)
}

// archived reads a file's content. Its errors say that the archive is broken.
type archived struct{ r io.Reader }

func (a archived) Read(p []byte) (int, error) {
	n, err := a.r.Read(p)
	if err != nil && !errors.Is(err, io.EOF) {
		err = broken(err)
	}
	return n, err
}

// isSparse reports whether a file is sparse in the archive, so that few bytes stand for many.
func isSparse(h *tar.Header) bool {
	for key := range h.PAXRecords {
		if strings.HasPrefix(key, "GNU.sparse.") {
			return true
		}
	}
	return false
}

// inside returns a name in the archive as a clean path below the directory.
func inside(name string) (string, error) {
	switch {
	case name == "" || name[0] == '/':
		return "", failed(wire.ClassInvalid, name, "a name in the archive isn't relative")
	case len(name) > maxPath:
		return "", failed(wire.ClassInvalid, name, "a name in the archive has %d bytes, at most %d", len(name), maxPath)
	case slices.Contains(strings.Split(name, "/"), ".."):
		return "", failed(wire.ClassInvalid, name, "a name in the archive leads out of the directory")
	}
	return path.Clean(name), nil
}

// find opens the directory of a name, and makes missing directories if make is set. The caller must
// close the entry.
func (u *unpacking) find(name string, make bool) (*entry, error) {
	dir, err := u.root.at(".").open(pathOnly, 0)
	if err != nil {
		return nil, err
	}
	dir.path = u.root.path
	for {
		first, rest, more := strings.Cut(name, "/")
		e := dir.at(first)
		if !more {
			return e, nil
		}
		next, err := u.child(e, make)
		e.close()
		if err != nil {
			return nil, err
		}
		dir, name = next, rest
	}
}

func (u *unpacking) child(e *entry, make bool) (*file, error) {
	dir, err := e.open(pathOnly, 0)
	if missing(err) && make {
		if err := u.count(); err != nil {
			return nil, err
		}
		if err := e.mkdir(0o755); err != nil && !errors.Is(err, unix.EEXIST) {
			return nil, err
		}
		dir, err = e.open(pathOnly, 0)
	}
	if errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP) {
		return nil, failed(wire.ClassInvalid, e.path, "it is no directory, but maybe a link to one, through which nothing is unpacked")
	}
	return dir, err
}

// directory makes a directory, or leaves an existing one as it is.
func (u *unpacking) directory(e *entry, d madeDir) error {
	err := e.mkdir(0o700)
	if errors.Is(err, unix.EEXIST) {
		if err := e.stat(); err != nil || is(&e.st, unix.S_IFDIR) {
			return err
		}
		return e.isThere()
	}
	if err == nil {
		u.dirs = append(u.dirs, d)
	}
	return err
}

func (u *unpacking) finish(d madeDir) error {
	e, err := u.find(d.name, false)
	if err != nil {
		return err
	}
	defer e.close()
	dir, err := e.open(dirFlags, 0)
	if err != nil {
		return err
	}
	defer dir.close()
	if err := dir.chmod(d.mode); err != nil {
		return err
	}
	return e.setTime(d.modified)
}

// link makes a hard link to a file that was unpacked or existed before.
func (u *unpacking) link(e *entry, target string) error {
	name, err := inside(target)
	if err != nil {
		return err
	}
	if name == "." {
		return failed(wire.ClassInvalid, e.path, "it is a hard link to a directory in the archive")
	}
	from, err := u.find(name, false)
	if err != nil {
		return err
	}
	defer from.close()
	if err = from.stat(); err == nil {
		err = regular(from.path, &from.st)
	}
	if err != nil {
		return err
	}
	return u.put(e, true, from.link)
}
