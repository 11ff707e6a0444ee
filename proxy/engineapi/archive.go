package engineapi

import (
	"bufio"
	"bytes"
	"io"
	"net/http"
	"net/url"
	"regexp"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/bermhq/berm/policy"
)

var signalName = regexp.MustCompile(`^(SIG)?[A-Z0-9+-]{1,12}$`)

const tarBlock = 512

// archivable gives the container of a call that reads or writes its files, and the path.
func (c *call) archivable() (id string, query url.Values, err error) {
	if err := c.operation(policy.OpArchive); err != nil {
		return "", nil, err
	}
	path := c.query.Get("path")
	if c.route.segments[2] == "archive" && (path == "" || len(path) > 4096 || !utf8.ValidString(path) || strings.ContainsFunc(path, unicode.IsControl)) {
		return "", nil, malformed("the path is missing, or is none")
	}
	if id, err = c.containerID(c.name); err == nil {
		err = c.confined()
	}
	return id, url.Values{"path": {path}}, err
}

func (c *call) statArchive() error {
	id, query, err := c.archivable()
	if err != nil {
		return err
	}
	release, err := c.holdFor(id)
	if err != nil {
		return err
	}
	defer release()
	resp, err := c.ask(ask{path: "/containers/" + id + "/archive", query: query})
	if err != nil {
		return err
	}
	if resp.StatusCode >= 400 {
		return failure(resp)
	}
	_ = resp.Body.Close()
	c.head(resp)
	return nil
}

func (c *call) getArchive() error {
	id, query, err := c.archivable()
	if err != nil {
		return err
	}
	return c.transfer(id, func(io.Reader) error {
		release, err := c.holdFor(id)
		if err != nil {
			return err
		}
		defer release()
		return c.forward(ask{path: "/containers/" + id + "/archive", query: query}, false)
	})
}

func (c *call) exportContainer() error {
	id, _, err := c.archivable()
	if err != nil {
		return err
	}
	return c.transfer(id, func(io.Reader) error {
		return c.forward(ask{path: "/containers/" + id + "/export"}, false)
	})
}

// putArchive takes plain tar only: what is compressed, some engines have unpacked by
// programs that they find in the container.
func (c *call) putArchive() error {
	id, query, err := c.archivable()
	if err != nil {
		return err
	}
	for _, name := range []string{"noOverwriteDirNonDir", "copyUIDGID"} {
		if c.flag(name) {
			query.Set(name, "1")
		}
	}
	return c.transfer(id, func(r io.Reader) error {
		body, err := plainTar(r)
		if err != nil {
			return err
		}
		release, err := c.holdFor(id)
		if err != nil {
			return err
		}
		defer release()
		c.close(nil) // now, as it may take long
		return c.forward(ask{
			path: "/containers/" + id + "/archive", query: query, body: body, length: c.r.ContentLength,
			header: http.Header{"Content-Type": {"application/x-tar"}},
		}, false)
	})
}

// compressed are how the archives begin that engines unpack by themselves.
var compressed = [][]byte{
	{0x1f, 0x8b, 0x08}, []byte("BZh"), {0xfd, '7', 'z', 'X', 'Z', 0}, {0x28, 0xb5, 0x2f, 0xfd},
}

// plainTar looks at how an archive begins. Its first block has to be the header of a
// file, or zeros, and nothing that an engine could take for a compressed archive.
func plainTar(r io.Reader) (io.Reader, error) {
	br := bufio.NewReaderSize(r, bufferSize)
	first, err := br.Peek(tarBlock)
	if err != nil {
		return nil, malformed("the body is not a tar archive")
	}
	refuse := denied("archive.plain", "", "the body is not a plain tar archive", "tar without compression")
	for _, magic := range compressed {
		if bytes.HasPrefix(first, magic) {
			return nil, refuse
		}
	}
	if bytes.Equal(first[1:4], []byte{0x2a, 0x4d, 0x18}) && first[0]&0xf0 == 0x50 { // skippable frames of zstd
		return nil, refuse
	}
	if !bytes.Equal(first, make([]byte, tarBlock)) && !tarHeader(first) {
		return nil, refuse
	}
	return br, nil
}

// tarHeader tells whether a block's checksum is that of a header.
func tarHeader(block []byte) bool {
	var sum, want int64
	for i, b := range block {
		if i >= 148 && i < 156 {
			b = ' '
		}
		sum += int64(b)
	}
	digits := strings.Trim(string(block[148:156]), " \x00")
	if digits == "" {
		return false
	}
	for _, d := range []byte(digits) {
		if d < '0' || d > '7' {
			return false
		}
		want = want<<3 | int64(d-'0')
	}
	return sum == want
}
