package engineapi

import (
	"bufio"
	"bytes"
	"compress/bzip2"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"slices"

	"github.com/klauspost/compress/zstd"
	"github.com/xi2/xz"

	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/proxy/engineapi/body"
	"github.com/bermhq/berm/proxy/engineapi/upstream"
)

const (
	maxWindow   = 8 << 20 // bytes of memory that decompression takes: xz -6 and zstd -19 need them
	maxInflated = 1 << 30 // bytes of a compressed archive for a container
)

// compressed are how the archives begin that engines unpack by themselves.
var compressed = [][]byte{
	{0x1f, 0x8b, 0x08}, []byte("BZh"), {0xfd, '7', 'z', 'X', 'Z', 0}, {0x28, 0xb5, 0x2f, 0xfd},
}

// isCompressed reports whether engines take what begins so for a compressed archive.
func isCompressed(first []byte) bool {
	skippable := len(first) > 3 && first[0]&0xf0 == 0x50 && bytes.Equal(first[1:4], []byte{0x2a, 0x4d, 0x18}) // frames of zstd
	return skippable || slices.ContainsFunc(compressed, func(magic []byte) bool { return bytes.HasPrefix(first, magic) })
}

// decompressor decompresses what isCompressed, which begins with first.
func decompressor(r io.Reader, first []byte) (io.Reader, error) {
	switch first[0] {
	case 0x1f:
		return gzip.NewReader(r)
	case 'B':
		return bzip2.NewReader(r), nil
	case 0xfd:
		return xz.NewReader(r, maxWindow)
	}
	// Without concurrency it has no goroutine that would have to be ended.
	return zstd.NewReader(r, zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true), zstd.WithDecoderMaxWindow(maxWindow))
}

// inflate decompresses a body that begins as a compressed one, once, up to most bytes.
// Others it passes through, however large they are.
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

// source keeps the error with which reading ended.
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

// inflated reads what is decompressed.
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

// guard tells a body that can't be decompressed from one that can't be read. A decoder's
// panic is an error too: the body may be read in a goroutine that nothing recovers.
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
