package chat

import (
	"archive/tar"
	"bufio"
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
	maxDepth    = 100       // elements of a path
	maxArchived = 1_000_000 // files and directories that an archive is made of
	maxEntries  = 100_000   // and that one is unpacked to
	maxTarget   = 4095      // bytes of a symbolic link
	copyBuffer  = 256 << 10 // bytes
)

// archive writes a tar archive, in the PAX format, of all regular files, directories and
// symbolic links below root. Other kinds are left out. No link is followed, and no more
// than a handle for each level of directories is open. A file that shrinks meanwhile is
// filled up with zeros, and one that grows is cut off. Each name of a file with several
// has the content.
//
// It is a *TooLargeError, before anything is written, if files' sizes make more than limit
// bytes together (0: none), or the tree is deeper or wider than can be archived; also
// later on, if a sandbox has it grow meanwhile.
func archive(root *os.Root, w io.Writer, limit int64) error {
	top, err := openTop(root)
	if err != nil {
		return err
	}
	defer top.Close()
	if err := (&packer{limit: limit}).below(top, "", 1); err != nil {
		return err
	}
	buffered := bufio.NewWriterSize(w, 64<<10)
	p := &packer{limit: limit, tw: tar.NewWriter(buffered), buf: make([]byte, copyBuffer)}
	if err := p.below(top, "", 1); err != nil {
		return err
	}
	if err := p.tw.Close(); err != nil {
		return err
	}
	return buffered.Flush()
}

// packer adds up what is to be archived, and archives it.
type packer struct {
	limit   int64
	tw      *tar.Writer // nil: to add up only
	buf     []byte
	total   int64 // bytes of files
	entries int
}

// below takes all that is in a directory. Path is empty or ends in a slash.
func (p *packer) below(dir *os.File, path string, depth int) error {
	return eachName(dir, func(name string) error { return p.entry(dir, name, path+name, depth) })
}

// entry takes one file. What has vanished by now, or become another kind, isn't taken.
func (p *packer) entry(dir *os.File, name, path string, depth int) error {
	if depth > maxDepth {
		return tooLarge(path, maxDepth, "has directories in it that are more than %d deep")
	}
	if p.entries++; p.entries > maxArchived {
		return tooLarge(path, maxArchived, "is one of more than %d files and directories, which can't be archived together")
	}
	st, err := lstatAt(dir, name)
	if err != nil {
		return unlessMissing(err)
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFDIR:
		return p.directory(dir, name, path, depth)
	case unix.S_IFLNK:
		return p.link(dir, name, path, &st)
	case unix.S_IFREG:
		return p.regular(dir, name, path, st.Size)
	}
	return nil
}

// tooLarge names what is at the top, as the path may be very long.
func tooLarge(path string, limit int64, format string) error {
	name, _, _ := strings.Cut(path, "/")
	return &TooLargeError{Limit: limit, Message: fmt.Sprintf("%q "+format, name, limit)}
}

func unlessMissing(err error) error {
	if missing(err) {
		return nil
	}
	return err
}

func (p *packer) directory(parent *os.File, name, path string, depth int) error {
	dir, err := openDirAt(parent, name)
	if notDir(err) {
		return nil
	}
	if err != nil {
		return unlessMissing(err)
	}
	defer dir.Close()
	if p.tw != nil {
		fi, err := dir.Stat()
		if err != nil {
			return err
		}
		if err := p.header(tar.Header{Typeflag: tar.TypeDir, Name: path + "/"}, fi.Mode(), fi.ModTime()); err != nil {
			return err
		}
	}
	return p.below(dir, path+"/", depth+1)
}

func (p *packer) link(dir *os.File, name, path string, st *unix.Stat_t) error {
	if p.tw == nil {
		return nil
	}
	target := make([]byte, maxTarget+1)
	var n int
	err := retry(func() (err error) {
		n, err = unix.Readlinkat(int(dir.Fd()), name, target)
		return err
	})
	if errors.Is(err, unix.EINVAL) || missing(err) {
		return nil
	}
	if err != nil {
		return &os.PathError{Op: "readlink", Path: name, Err: err}
	}
	return p.header(tar.Header{Typeflag: tar.TypeSymlink, Name: path, Linkname: string(target[:n])}, 0o777, time.Unix(st.Mtim.Unix()))
}

func (p *packer) regular(dir *os.File, name, path string, size int64) error {
	if p.tw == nil {
		return p.add(path, size)
	}
	handle, err := openAt(dir, name, unix.O_PATH|unix.O_NOFOLLOW, 0)
	if err != nil {
		return unlessMissing(err)
	}
	defer handle.Close()
	if fi, err := handle.Stat(); err != nil || !fi.Mode().IsRegular() {
		return err
	}
	f, fi, err := reopen(handle, path)
	if err != nil {
		return err
	}
	defer f.Close()
	size = fi.Size()
	if err := p.add(path, size); err != nil {
		return err
	}
	if err := p.header(tar.Header{Typeflag: tar.TypeReg, Name: path, Size: size}, fi.Mode(), fi.ModTime()); err != nil {
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
func (p *packer) add(path string, size int64) error {
	limit := p.limit
	if limit <= 0 {
		limit = math.MaxInt64
	}
	if size > limit-p.total {
		return tooLarge(path, limit, "makes the archive larger than %d bytes, the most there may be")
	}
	p.total += size
	return nil
}

func (p *packer) header(h tar.Header, mode os.FileMode, modified time.Time) error {
	h.Format = tar.FormatPAX
	h.Mode = int64(mode.Perm())
	h.ModTime = time.Unix(modified.Unix(), 0) // a fraction would take another 1,024 bytes
	return p.tw.WriteHeader(&h)
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}
