package hostdir

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// maxHeaders bounds the headers of one file in an archive, in bytes.
const maxHeaders = 4 << 20

// maxName is how long an element of a path may be, in bytes.
const maxName = 255

// ArchiveError says why an archive can't be unpacked.
type ArchiveError struct{ Message string }

// Error gives the reason.
func (e *ArchiveError) Error() string { return e.Message }

// InvalidParameter puts the error into errdefs' InvalidArgument class.
func (*ArchiveError) InvalidParameter() {}

// UntarOptions say how an archive is unpacked. All are mandatory.
type UntarOptions struct {
	// Grow is called before a file or link is written. Total is the size of all files and
	// link targets with it. More is its own size, some of which may replace other bytes. An
	// error ends Untar.
	Grow func(total, more int64) error
	// Give gives a new file to its owner.
	Give func(f *os.File) error
	// Check returns an error for a path that must not be unpacked. Kind is the file's type
	// flag in the archive.
	Check func(elements []string, kind byte) error
}

// Untar unpacks a tar archive into an empty directory that nobody else changes. It unpacks
// directories (mode 0755), regular files (0755 if anybody may execute them, else 0644) and
// symbolic links. A later file replaces an earlier one of the same name, unless one of them is
// a directory. Untar drops owners, times and extended attributes. It never goes through a
// link. On success, all is on the disk.
//
// The error is an *ArchiveError for an archive that is broken or cut off, or has other types
// of files, and a *FileError without space. Errors of r and of the options are returned
// unchanged.
func Untar(ctx context.Context, r io.Reader, into *os.Root, o UntarOptions) error {
	return With(into, func(top *os.File) error {
		in := &metered{r: r}
		u := &unpacker{UntarOptions: o, in: in, tr: tar.NewReader(in), top: top, buf: make([]byte, copyBuffer)}
		if err := u.all(); err != nil {
			return err
		}
		return syncTree(ctx, top)
	})
}

type unpacker struct {
	UntarOptions
	in      *metered
	tr      *tar.Reader
	top     *os.File
	buf     []byte
	total   int64
	entries int
}

func refuse(format string, args ...any) error {
	return &ArchiveError{Message: fmt.Sprintf(format, args...)}
}

// short cuts a name for an error.
func short(name string) string {
	const most = 255
	if len(name) > most {
		return name[:most] + "…"
	}
	return name
}

func (u *unpacker) all() error {
	for {
		u.in.left = maxHeaders
		h, err := u.tr.Next()
		if errors.Is(err, io.EOF) && !u.in.ended { // there were the two blocks of zeros
			return nil
		}
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		if err != nil {
			return u.broken(err)
		}
		if err := u.count(); err != nil {
			return err
		}
		if h.Typeflag == tar.TypeXGlobalHeader { // belongs to no file
			continue
		}
		if err := u.entry(h); err != nil {
			return err
		}
	}
}

// broken returns the reader's own error, or else an *ArchiveError.
func (u *unpacker) broken(err error) error {
	if u.in.err != nil {
		return u.in.err
	}
	return refuse("the archive is broken: %s", err)
}

func (u *unpacker) count() error {
	if u.entries++; u.entries > MaxEntries {
		return refuse("the archive has more than %d files and directories", MaxEntries)
	}
	return nil
}

func (u *unpacker) entry(h *tar.Header) error {
	elements, err := split(h.Name)
	if err != nil {
		return err
	}
	if len(elements) > 0 {
		if err := u.Check(elements, h.Typeflag); err != nil {
			return err
		}
	}
	if h.Typeflag == tar.TypeDir {
		return u.into(elements, func(*os.File) error { return nil })
	}
	last := len(elements) - 1
	if last < 0 || strings.HasSuffix(h.Name, "/") || strings.HasSuffix(h.Name, "/.") {
		return refuse("%q in the archive is the name of a directory, but not one", short(h.Name))
	}
	var put func(dir *os.File, name string, h *tar.Header) error
	switch h.Typeflag {
	case tar.TypeReg:
		for key := range h.PAXRecords {
			if strings.HasPrefix(key, "GNU.sparse.") {
				return refuse("%q is sparse in the archive", short(h.Name))
			}
		}
		put = u.regular
	case tar.TypeSymlink:
		put = u.link
	default:
		return refuse("%q is of type %q in the archive: only regular files, directories and symbolic links can be unpacked", short(h.Name), h.Typeflag)
	}
	return u.into(elements[:last], func(dir *os.File) error { return OfSpace(short(h.Name), put(dir, elements[last], h)) })
}

// split checks a path in an archive and returns its elements; none for the top.
func split(path string) ([]string, error) {
	switch {
	case path == "":
		return nil, refuse("a name in the archive is empty")
	case path[0] == '/':
		return nil, refuse("%q in the archive is an absolute name", short(path))
	case strings.IndexByte(path, 0) >= 0:
		return nil, refuse("%q in the archive has a NUL in it", short(path))
	}
	var elements []string
	for element := range strings.SplitSeq(path, "/") {
		switch {
		case element == "" || element == ".":
			continue
		case element == "..":
			return nil, refuse("%q in the archive leads out of it", short(path))
		case len(element) > maxName:
			return nil, refuse("%q in the archive has an element of more than %d bytes", short(path), maxName)
		case len(elements) == maxDepth:
			return nil, refuse("%q in the archive is more than %d directories deep", short(path), maxDepth)
		}
		elements = append(elements, element)
	}
	return elements, nil
}

// into calls f with a directory. It makes the directory, and those above it, if missing.
func (u *unpacker) into(elements []string, f func(dir *os.File) error) error {
	dir := u.top
	for _, element := range elements {
		next, err := u.child(dir, element)
		if dir != u.top {
			_ = dir.Close()
		}
		if notDir(err) {
			return refuse("%q in the archive is a directory and something else", short(strings.Join(elements, "/")))
		}
		if err != nil {
			return OfSpace(strings.Join(elements, "/"), err)
		}
		dir = next
	}
	if dir != u.top {
		defer dir.Close()
	}
	return f(dir)
}

func (u *unpacker) child(parent *os.File, name string) (*os.File, error) {
	dir, err := openDirAt(parent, name)
	if !missing(err) {
		return dir, err
	}
	if err := u.count(); err != nil {
		return nil, err
	}
	if err := retry(func() error { return unix.Mkdirat(int(parent.Fd()), name, 0o700) }); err != nil {
		return nil, &os.PathError{Op: "mkdir", Path: name, Err: err}
	}
	dir, err = openDirAt(parent, name)
	if err != nil {
		return nil, err
	}
	err = dir.Chmod(0o755) // while it is Berm's own
	if err == nil {
		err = u.Give(dir)
	}
	if err != nil {
		_ = dir.Close()
		return nil, err
	}
	return dir, nil
}

// room removes an earlier file of the name, and adds the new size to the total.
func (u *unpacker) room(dir *os.File, name, path string, size int64) error {
	st, err := lstatAt(dir, name)
	switch {
	case missing(err):
	case err != nil:
		return err
	case isKind(&st, unix.S_IFDIR):
		return refuse("%q in the archive is a directory and something else", short(path))
	default:
		if err := unlinkAt(dir, name, 0); err != nil {
			return err
		}
		u.total -= st.Size
	}
	if size < 0 || size > math.MaxInt64-u.total {
		return refuse("%q in the archive can't be %d bytes large", short(path), size)
	}
	u.total += size
	return u.Grow(u.total, size)
}

func (u *unpacker) regular(dir *os.File, name string, h *tar.Header) error {
	if err := u.room(dir, name, h.Name, h.Size); err != nil {
		return err
	}
	f, err := openAt(int(dir.Fd()), name, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return err
	}
	err = u.fill(f, h)
	if e := f.Close(); err == nil {
		err = e
	}
	return err
}

func (u *unpacker) fill(f *os.File, h *tar.Header) error {
	mode := os.FileMode(0o644)
	if h.Mode&0o111 != 0 {
		mode = 0o755
	}
	if err := f.Chmod(mode); err != nil {
		return err
	}
	if err := u.Give(f); err != nil {
		return err
	}
	u.in.left = h.Size
	from := &source{r: u.tr}
	// Without the wrappers the copy would have buffers of its own.
	_, err := io.CopyBuffer(struct{ io.Writer }{f}, from, u.buf)
	if from.err != nil {
		return u.broken(from.err)
	}
	if err != nil {
		return err
	}
	// Let the kernel begin to write, so that the sync at the end is short.
	_ = unix.SyncFileRange(int(f.Fd()), 0, 0, unix.SYNC_FILE_RANGE_WRITE)
	return nil
}

func (u *unpacker) link(dir *os.File, name string, h *tar.Header) error {
	if h.Linkname == "" || len(h.Linkname) > maxTarget || strings.IndexByte(h.Linkname, 0) >= 0 {
		return refuse("%q in the archive is a symbolic link to a name that can't be", short(h.Name))
	}
	if err := u.room(dir, name, h.Name, int64(len(h.Linkname))); err != nil {
		return err
	}
	err := retry(func() error { return unix.Symlinkat(h.Linkname, int(dir.Fd()), name) })
	if errors.Is(err, unix.ENAMETOOLONG) { // for this file system
		return refuse("%q in the archive is a symbolic link to a name that can't be", short(h.Name))
	}
	if err == nil {
		var link *os.File
		if link, err = openAt(int(dir.Fd()), name, unix.O_PATH|unix.O_NOFOLLOW, 0); err == nil {
			err = errors.Join(u.Give(link), link.Close())
		}
	}
	if err != nil {
		return &os.PathError{Op: "symlink", Path: name, Err: err}
	}
	return nil
}

// source records an error of reading the archive, to tell it from one of writing the file.
type source struct {
	r   io.Reader
	err error
}

func (s *source) Read(p []byte) (int, error) {
	n, err := s.r.Read(p)
	if err != nil && err != io.EOF {
		s.err = err
	}
	return n, err
}

var errHeaders = fmt.Errorf("what is told of one file is more than %d bytes long", maxHeaders)

// metered bounds how many bytes of an archive are read.
type metered struct {
	r     io.Reader
	left  int64
	ended bool  // a read at the end of r has returned no bytes
	err   error // an error of r
}

func (m *metered) Read(p []byte) (int, error) {
	if m.left <= 0 {
		return 0, errHeaders
	}
	n, err := m.r.Read(p[:min(int64(len(p)), m.left)])
	m.left -= int64(n)
	switch {
	case err == io.EOF:
		m.ended = n == 0
	case err != nil:
		m.err = err
	}
	return n, err
}

// syncTree brings all below an open directory, and itself, to the disk.
func syncTree(ctx context.Context, top *os.File) error {
	b := usual
	b.entries, b.time = math.MaxInt, 0
	w := &walk{bounds: b}
	w.Directory = func(fd int, _ string) error { return unix.Fsync(fd) }
	w.File = func(e *Entry) error {
		if !isKind(&e.Stat, unix.S_IFREG) {
			return nil
		}
		f, _, err := e.Open()
		if err != nil {
			return err
		}
		return OfSpace(e.Name, errors.Join(f.Sync(), f.Close()))
	}
	return w.whole(ctx, top)
}
