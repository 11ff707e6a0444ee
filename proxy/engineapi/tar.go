package engineapi

import (
	"archive/tar"
	"bufio"
	"bytes"
	"compress/bzip2"
	"compress/gzip"
	"errors"
	"fmt"
	"hash/maphash"
	"io"
	"math"
	"path"
	"slices"
	"strings"
	"sync/atomic"

	"github.com/klauspost/compress/zstd"
	"github.com/xi2/xz"

	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/proxy/engineapi/body"
	"github.com/bermhq/berm/proxy/engineapi/upstream"
)

const (
	maxTarEntries = 1 << 18 // of one archive; the table of their names takes 9 MiB
	maxTarName    = 4096    // bytes of a name or of a link's target
	tarXattr      = "SCHILY.xattr."
)

// tarFilter judges every header of a tar archive. Its reads return the archive that Berm writes
// instead: a plain one, with relative names and only judged headers. It ends at the first header
// that it refuses.
type tarFilter struct {
	*bufio.Reader
	io.Closer
	entries int
	seed    maphash.Seed
	kinds   map[uint64]byte // types of the entries so far, by the hash of their name
	// closed refuses entries whose parent isn't a directory of the archive itself. The
	// engine follows a symbolic link that the container has there.
	closed  bool
	refusal atomic.Pointer[error] // why reading ended early; nil at the archive's end and after Close
}

// newTarFilter judges the first header too.
func newTarFilter(from io.Reader, closed bool) (*tarFilter, error) {
	r, w := io.Pipe()
	f := &tarFilter{Reader: bufio.NewReaderSize(r, upstream.BufferSize), Closer: r, seed: maphash.MakeSeed(), kinds: map[uint64]byte{}, closed: closed}
	go func() {
		err := f.copy(tar.NewWriter(&plainWriter{Writer: w}), tar.NewReader(from))
		if err != nil && !errors.Is(err, io.ErrClosedPipe) {
			f.refusal.Store(&err)
		}
		_ = w.CloseWithError(err)
	}()
	_, err := f.Peek(1)
	return f, err
}

// copy copies the entries that judge lets through, and ends the archive.
func (f *tarFilter) copy(to *tar.Writer, from *tar.Reader) error {
	for {
		h, err := from.Next()
		switch {
		case errors.Is(err, io.EOF):
			return to.Close()
		case err != nil:
			return tarError(err)
		case h.Typeflag == tar.TypeXGlobalHeader:
			continue // git archive writes one; the engine ignores it
		}
		if f.entries++; f.entries > maxTarEntries {
			return denied("archive.entries", "", fmt.Sprintf("the archive has more than %d entries", maxTarEntries), "several archives")
		}
		clean, err := f.judge(h)
		if err != nil {
			return err
		}
		if err := to.WriteHeader(clean); err != nil {
			return denied("archive.entry", "", fmt.Sprintf("the header of %q can't be written: %v", body.Shorten(h.Name), err), "another header")
		}
		if _, err := copyPooled(to, from); err != nil {
			return tarError(err)
		}
	}
}

// tarError distinguishes a body that isn't an archive from one that can't be read.
func tarError(err error) error {
	switch {
	case errors.Is(err, tar.ErrHeader), errors.Is(err, tar.ErrFieldTooLong):
		return denied("archive.plain", "", "the body is not a plain tar archive", "tar, as it is or compressed once by gzip, bzip2, xz or zstd")
	case errors.Is(err, io.ErrUnexpectedEOF):
		return proxy.Malformed("the tar archive is cut off")
	}
	return err
}

// judge returns the header that Berm writes in place of the caller's.
func (f *tarFilter) judge(h *tar.Header) (*tar.Header, error) {
	refuse := func(rule, reason, allowed string) (*tar.Header, error) {
		return nil, denied(rule, "", fmt.Sprintf("archive entry %q is refused: %s", body.Shorten(h.Name), reason), allowed)
	}
	name := path.Clean(strings.TrimLeft(h.Name, "/")) // engines strip the slashes too
	components := strings.Split(h.Name, "/")
	switch {
	case h.Name == "" || len(h.Name) > maxTarName || strings.Contains(h.Name, "\x00"):
		return refuse("archive.name", "its name is empty or too long", fmt.Sprintf("names of 1 to %d bytes", maxTarName))
	case slices.Contains(components, ".."):
		return refuse("archive.name", `its name has ".."`, "names that lead downwards")
	case slices.ContainsFunc(components, func(s string) bool { return strings.HasPrefix(s, ".wh..wh.") }):
		return refuse("archive.name", "layers of images reserve its name", `names that don't begin with ".wh..wh."`)
	case h.Uid < 0 || h.Gid < 0 || int64(h.Uid) >= math.MaxUint32 || int64(h.Gid) >= math.MaxUint32:
		return refuse("archive.entry", "its owner is no user or group", "numbers from 0 to 4294967294")
	}
	out := &tar.Header{Typeflag: h.Typeflag, Name: "./" + name, Mode: h.Mode & 0o777, Uid: h.Uid, Gid: h.Gid, ModTime: h.ModTime, Format: tar.FormatPAX}
	switch h.Typeflag {
	case tar.TypeReg:
		if h.Mode&0o6000 != 0 {
			return refuse("archive.setuid", "it is a setuid or setgid file", "files without these bits, or chmod inside the container")
		}
		out.Size = h.Size
	case tar.TypeDir: // loses setuid and setgid, which ordinary trees have on directories
		out.Mode = h.Mode & 0o1777
		out.Name += "/"
	case tar.TypeSymlink:
		out.Linkname = h.Linkname
	case tar.TypeLink:
		if f.kind(h.Linkname) != tar.TypeReg {
			return refuse("archive.link", fmt.Sprintf("it is a hard link to %q, which isn't a file before it in the archive", body.Shorten(h.Linkname)), "hard links to files of the same archive")
		}
		out.Linkname = "./" + path.Clean(h.Linkname)
	case tar.TypeBlock, tar.TypeChar, tar.TypeFifo:
		return refuse("archive.device", "it is a device or a named pipe", "files, directories and links")
	default:
		return refuse("archive.entry", "its type is none that can be unpacked alike everywhere", "files, directories and links, without sparse files")
	}
	if len(out.Linkname) > maxTarName || strings.Contains(out.Linkname, "\x00") || h.Typeflag == tar.TypeSymlink && out.Linkname == "" {
		return refuse("archive.name", "its target is empty or too long", fmt.Sprintf("targets of 1 to %d bytes", maxTarName))
	}
	if name == "." && h.Typeflag != tar.TypeDir {
		return refuse("archive.name", "only a directory can have this name", "another name")
	}
	if !f.parents(name) {
		if f.closed {
			return refuse("archive.parent", "the container's root is read-only, and a parent of the entry isn't a directory of the archive", "archives that hold the parents of their entries")
		}
		return refuse("archive.parent", "it lies below a file or a link of the archive", "entries below directories")
	}
	for record, value := range h.PAXRecords {
		attribute, ok := strings.CutPrefix(record, tarXattr)
		switch {
		case strings.HasPrefix(record, "GNU.sparse."):
			return refuse("archive.entry", "it is a sparse file", "tar without --sparse")
		case !ok: // the header's own fields, and what engines ignore
		case !strings.HasPrefix(attribute, "user.") || strings.HasPrefix(attribute, "user.overlay."):
			return refuse("archive.xattr", fmt.Sprintf("it has the extended attribute %q", body.Shorten(attribute)), "attributes of users, as user.comment")
		default:
			if out.PAXRecords == nil {
				out.PAXRecords = map[string]string{}
			}
			out.PAXRecords[record] = value
		}
	}
	f.kinds[maphash.String(f.seed, name)] = h.Typeflag
	return out, nil
}

// kind returns the type of the last entry with a name, or 0 if there is none.
func (f *tarFilter) kind(name string) byte {
	if path.IsAbs(name) || slices.Contains(strings.Split(name, "/"), "..") {
		return 0
	}
	return f.kinds[maphash.String(f.seed, path.Clean(name))]
}

// parents reports whether all parents of an entry are directories in the archive. Unless the filter is
// closed, they may also be missing there.
func (f *tarFilter) parents(name string) bool {
	var h maphash.Hash
	h.SetSeed(f.seed)
	components := strings.Split(name, "/")
	for i, component := range components[:len(components)-1] {
		if i > 0 {
			_ = h.WriteByte('/')
		}
		_, _ = h.WriteString(component)
		if kind := f.kinds[h.Sum64()]; kind != tar.TypeDir && (kind != 0 || f.closed) {
			return false
		}
	}
	return true
}

const (
	maxWindow   = 8 << 20 // bytes of memory that decompression takes: xz -6 and zstd -19 need them
	maxInflated = 1 << 30 // bytes of a compressed archive for a container
)

// compressed are the first bytes of compressed archives that engines decompress.
var compressed = [][]byte{
	{0x1f, 0x8b, 0x08}, []byte("BZh"), {0xfd, '7', 'z', 'X', 'Z', 0}, {0x28, 0xb5, 0x2f, 0xfd},
}

// isCompressed reports whether engines take an archive with these first bytes for a compressed one.
func isCompressed(first []byte) bool {
	skippable := len(first) > 3 && first[0]&0xf0 == 0x50 && bytes.Equal(first[1:4], []byte{0x2a, 0x4d, 0x18}) // frames of zstd
	return skippable || slices.ContainsFunc(compressed, func(magic []byte) bool { return bytes.HasPrefix(first, magic) })
}

// decompressor returns a decompressing reader of r, whose first bytes isCompressed has accepted.
func decompressor(r io.Reader, first []byte) (io.Reader, error) {
	switch first[0] {
	case 0x1f:
		return gzip.NewReader(r)
	case 'B':
		return bzip2.NewReader(r), nil
	case 0xfd:
		return xz.NewReader(r, maxWindow)
	}
	// With a concurrency of 1, the decoder starts no goroutines that it would have to end.
	return zstd.NewReader(r, zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true), zstd.WithDecoderMaxWindow(maxWindow))
}

// inflate decompresses a compressed body once, up to most bytes. It passes on any other body, however
// large it is.
func inflate(r io.Reader, most int64) (io.Reader, error) {
	in := &source{Reader: r}
	br := bufio.NewReaderSize(in, upstream.BufferSize)
	first, _ := br.Peek(tarBlock) // the error comes again with the next read
	if !isCompressed(first) {
		return br, nil
	}
	out := &inflated{in: in, most: most, left: most}
	return out, out.guard(func() (err error) {
		out.Reader, err = decompressor(br, first)
		return err
	})
}

// source keeps the error that ended reading, unless it is io.EOF.
type source struct {
	io.Reader
	err error
}

func (s *source) Read(b []byte) (int, error) {
	n, err := s.Reader.Read(b)
	if err != nil && !errors.Is(err, io.EOF) {
		s.err = err
	}
	return n, err
}

// inflated reads decompressed bytes, and fails once there are more than most.
type inflated struct {
	io.Reader
	in         *source
	most, left int64
}

func (r *inflated) Read(b []byte) (n int, err error) {
	err = r.guard(func() (err error) {
		n, err = r.Reader.Read(b)
		return err
	})
	if r.left -= int64(n); r.left < 0 {
		return 0, tooLarge(r.most)
	}
	return n, err
}

// guard distinguishes a body that can't be decompressed from one that can't be read. It turns a
// decoder's panic into an error, since the body may be read in a goroutine without a recover.
func (r *inflated) guard(decode func() error) (err error) {
	defer func() {
		if v := recover(); v != nil {
			err = fmt.Errorf("panic: %v", v)
		}
		switch {
		case err == nil || errors.Is(err, io.EOF):
		case r.in.err != nil:
			err = r.in.err
		default:
			err = proxy.Malformed("the archive can't be decompressed: " + body.Shorten(err.Error()))
		}
	}()
	return decode()
}
