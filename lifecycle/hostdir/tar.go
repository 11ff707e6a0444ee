package hostdir

import (
	"archive/tar"
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Bounds of archives.
const (
	MaxEntries  = 100_000   // files and directories that an archive is unpacked to
	maxDepth    = 100       // elements of a path
	maxArchived = 1_000_000 // files and directories that an archive is made of
	maxTarget   = 4095      // bytes of a symbolic link
	copyBuffer  = 256 << 10 // bytes
)

// TooLargeError says that a file, a tree or an archive is larger than allowed.
type TooLargeError struct {
	Limit   int64  // bytes; of an archive also directories, in depth, or files
	Message string // of an archive; else empty
}

// Error gives the limit.
func (e *TooLargeError) Error() string {
	if e.Message != "" {
		return e.Message
	}
	return fmt.Sprintf("it is larger than %d bytes, which is the most", e.Limit)
}

// Tar writes a tar archive, in the PAX format, of all regular files, directories and symbolic
// links below root. It leaves out other kinds. It fills a file that shrinks meanwhile with zeros,
// and cuts off one that grows. A file with several names is archived once for each.
//
// The error is a *TooLargeError if the files' sizes exceed limit bytes together (0: any), or the
// tree is too deep or too wide. Tar checks this before it writes anything, and again while it
// writes, since a sandbox may make the tree grow.
func Tar(ctx context.Context, root *os.Root, w io.Writer, limit int64) error {
	if limit <= 0 {
		limit = math.MaxInt64
	}
	return With(root, func(top *os.File) error {
		if err := (&packer{limit: limit}).all(ctx, top); err != nil {
			return err
		}
		buffered := bufio.NewWriterSize(w, 64<<10)
		p := &packer{limit: limit, tw: tar.NewWriter(buffered), buf: make([]byte, copyBuffer)}
		if err := p.all(ctx, top); err != nil {
			return err
		}
		if err := p.tw.Close(); err != nil {
			return err
		}
		return buffered.Flush()
	})
}

// packer adds up the sizes of a tree, or archives the tree.
type packer struct {
	limit int64
	tw    *tar.Writer // nil: add up only
	buf   []byte
	total int64    // bytes of files
	path  []string // names of the directories from the top
}

func (p *packer) all(ctx context.Context, top *os.File) error {
	b := usual
	// With a handle for each directory of a path, the walk never opens one again.
	b.entries, b.time, b.depth, b.handles = maxArchived, 0, maxDepth+2, maxDepth+2
	w := &walk{bounds: b, Visitor: Visitor{Directory: p.directory, File: p.file, Leave: p.leave}}
	err := w.whole(ctx, top)
	if errors.Is(err, ErrUnbounded) {
		return &TooLargeError{Limit: maxArchived, Message: fmt.Sprintf("there are more than %d files and directories, which can't be archived together", maxArchived)}
	}
	return err
}

func (p *packer) directory(fd int, name string) error {
	p.path = append(p.path, name)
	if len(p.path) == 1 { // the top
		return nil
	}
	if err := p.checkDepth(len(p.path) - 1); err != nil || p.tw == nil {
		return err
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return err
	}
	return p.header(tar.Header{Typeflag: tar.TypeDir, Name: p.below("")}, &st)
}

func (p *packer) leave() { p.path = p.path[:len(p.path)-1] }

// below is the path of a name in the current directory.
func (p *packer) below(name string) string { return strings.Join(append(p.path[1:], name), "/") }

func (p *packer) checkDepth(elements int) error {
	if elements > maxDepth {
		return p.tooLarge("", maxDepth, "has directories in it that are more than %d deep")
	}
	return nil
}

// tooLarge names only the path's entry at the top, since the path may be very long.
func (p *packer) tooLarge(name string, limit int64, format string) error {
	top, _, _ := strings.Cut(p.below(name), "/")
	return &TooLargeError{Limit: limit, Message: fmt.Sprintf("%q "+format, top, limit)}
}

func (p *packer) file(e *Entry) error {
	switch err := p.checkDepth(len(p.path)); {
	case err != nil:
		return err
	case isKind(&e.Stat, unix.S_IFLNK):
		return p.link(e)
	case p.tw == nil:
		return p.add(e.Name, e.Stat.Size)
	}
	return p.regular(e)
}

func (p *packer) link(e *Entry) error {
	if p.tw == nil {
		return nil
	}
	target := make([]byte, maxTarget+1)
	var n int
	err := retry(func() (err error) {
		n, err = unix.Readlinkat(e.Dir, e.Name, target)
		return err
	})
	if errors.Is(err, unix.EINVAL) { // it is no link any more
		return nil
	}
	if err != nil {
		return &os.PathError{Op: "readlink", Path: e.Name, Err: err}
	}
	return p.header(tar.Header{Typeflag: tar.TypeSymlink, Name: p.below(e.Name), Linkname: string(target[:n])}, &e.Stat)
}

func (p *packer) regular(e *Entry) error {
	f, fi, err := e.Open()
	if err != nil {
		return err
	}
	defer f.Close()
	size := fi.Size()
	if err := p.add(e.Name, size); err != nil {
		return err
	}
	if err := unix.Fstat(int(f.Fd()), &e.Stat); err != nil {
		return err
	}
	if err := p.header(tar.Header{Typeflag: tar.TypeReg, Name: p.below(e.Name), Size: size}, &e.Stat); err != nil {
		return err
	}
	// Without the wrappers the copy would have buffers of its own.
	to := struct{ io.Writer }{p.tw}
	n, err := io.CopyBuffer(to, struct{ io.Reader }{io.LimitReader(f, size)}, p.buf)
	if err == nil && n < size {
		_, err = io.CopyBuffer(to, io.LimitReader(zeros{}, size-n), p.buf)
	}
	return err
}

// add counts a file's size.
func (p *packer) add(name string, size int64) error {
	if size > p.limit-p.total {
		return p.tooLarge(name, p.limit, "makes the archive larger than %d bytes, the most there may be")
	}
	p.total += size
	return nil
}

func (p *packer) header(h tar.Header, st *unix.Stat_t) error {
	h.Format = tar.FormatPAX
	h.Mode = int64(st.Mode & 0o777)
	h.ModTime = time.Unix(st.Mtim.Sec, 0) // a fraction would take another 1,024 bytes
	return p.tw.WriteHeader(&h)
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}
