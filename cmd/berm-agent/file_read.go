package main

import (
	"errors"
	"io"
	"math"

	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/runtime/agent/wire"
)

func readFile(c *conn, f *wire.File) (any, error) {
	name := string(f.Path)
	if f.Offset < 0 || f.Length < -1 {
		return nil, failed(wire.ClassInvalid, name, "from %d, %d bytes: neither is negative, but a length of -1", f.Offset, f.Length)
	}
	fd, st, err := openRegular(unix.AT_FDCWD, name, name, 0)
	if err != nil {
		return nil, err
	}
	defer fd.close()
	left := extent(fd, &st)
	if f.Offset > left {
		return nil, failed(wire.ClassOutOfRange, name, "it ends at %d, before %d", left, f.Offset)
	}
	if left -= f.Offset; f.Length >= 0 {
		left = min(left, f.Length)
	}
	if f.Offset > 0 {
		if err := again(func() error { _, err := unix.Seek(int(fd), f.Offset, unix.SEEK_SET); return err }); err != nil {
			return nil, at(name, err)
		}
	}
	if err := c.ready(); err != nil {
		return nil, err
	}
	if err := c.item(infoOf(name, &st)); err != nil {
		return nil, err
	}
	_, err = pump(download{c}, fd, left)
	return nil, about(name, err)
}

// extent is how much of a file is to be read: what it has now, so that one that grows
// has an end, and all of what hasn't got a size.
func extent(fd fileDesc, st *unix.Stat_t) int64 {
	if fd.virtual() {
		return math.MaxInt64
	}
	return st.Size
}

// pump copies up to so many bytes, fewer if there aren't more.
func pump(w io.Writer, r io.Reader, left int64) (done int64, err error) {
	buf := buffers.Get().(*[wire.MaxData]byte)
	defer buffers.Put(buf)
	for done < left {
		n, err := r.Read(buf[:min(left-done, int64(len(buf)))])
		if n > 0 {
			if _, err := w.Write(buf[:n]); err != nil {
				return done, err
			}
			done += int64(n)
		}
		if errors.Is(err, io.EOF) {
			return done, nil
		}
		if err != nil {
			return done, err
		}
	}
	return done, nil
}

// about is at, but for what isn't about the file.
func about(name string, err error) error {
	if errors.Is(err, errGone) {
		return errGone
	}
	return at(name, err)
}
