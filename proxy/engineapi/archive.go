package engineapi

import (
	"bufio"
	"bytes"
	"io"
	"net/http"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/proxy/engineapi/upstream"

	"github.com/docker/docker/api/types/container"
)

const tarBlock = 512

// withArchive serves a call for a path inside a container of the caller's. Nothing starts meanwhile
// that could change what the engine mounts for the call, which it does also if the container
// runs. The container's binds are held.
func withArchive(c *call, id string, serve func(a upstream.Ask, ct *container.InspectResponse) error) error {
	name := c.query.Get("path")
	if name == "" || len(name) > maxTarName || !utf8.ValidString(name) || strings.ContainsFunc(name, unicode.IsControl) {
		return proxy.Malformed("the path is missing, or is none")
	}
	ct, err := inspectSlow(c, id)
	if err != nil {
		return err
	}
	if hasBinds(ct.Mounts) {
		over, err := c.startLocks.Lock(c.ctx, id) // before quiet, as a start does
		if err != nil {
			return err
		}
		defer over()
	}
	return quietly(c, ct, func(ct *container.InspectResponse) error {
		release, err := holdMade(c, ct)
		if err != nil {
			return err
		}
		defer release()
		c.passed.Set("path", name)
		return serve(c.askFor(id), ct)
	})
}

func statArchive(c *call, _ upstream.Ask, id string) error {
	return withArchive(c, id, func(a upstream.Ask, _ *container.InspectResponse) error {
		resp, err := c.open(a)
		if err != nil {
			return err
		}
		_ = resp.Body.Close()
		c.head(resp)
		return nil
	})
}

func getArchive(c *call, _ upstream.Ask, id string) error {
	return transfer(c, id, func(io.Reader) error {
		return withArchive(c, id, func(a upstream.Ask, _ *container.InspectResponse) error { return c.forward(a, false) })
	})
}

// exportContainer needs no quiet: for an export, and for a commit, the engine mounts the
// container's root alone.
func exportContainer(c *call, a upstream.Ask, id string) error {
	return transfer(c, id, func(io.Reader) error {
		return c.forward(a, false)
	})
}

// putArchive gives the engine an archive of Berm's own writing. It is plain, as some
// engines unpack compressed ones by programs that they find in the container. Entries
// before a refused one may have been unpacked.
func putArchive(c *call, _ upstream.Ask, id string) error {
	return transfer(c, id, func(r io.Reader) error {
		return withArchive(c, id, func(a upstream.Ask, ct *container.InspectResponse) error {
			plain, err := plainTar(r)
			if err != nil {
				return err
			}
			body, err := newTarFilter(plain, ct.HostConfig.ReadonlyRootfs)
			if err != nil {
				return err
			}
			a.Body, a.Length, a.Header = body, -1, http.Header{"Content-Type": {"application/x-tar"}}
			c.close(nil) // now, as it may take long
			err = c.forward(a, false)
			if why := body.refusal.Load(); err != nil && why != nil {
				c.written = false // the audit log has to have the refusal as well
				return *why
			}
			return err
		})
	})
}

// compressed are how the archives begin that engines unpack by themselves.
var compressed = [][]byte{
	{0x1f, 0x8b, 0x08}, []byte("BZh"), {0xfd, '7', 'z', 'X', 'Z', 0}, {0x28, 0xb5, 0x2f, 0xfd},
}

// plainTar looks at how an archive begins. Its first block has to be the header of a
// file, or zeros, and nothing that an engine could take for a compressed archive.
func plainTar(r io.Reader) (io.Reader, error) {
	br := bufio.NewReaderSize(r, upstream.BufferSize)
	first, err := br.Peek(tarBlock)
	if err != nil {
		return nil, proxy.Malformed("the body is not a tar archive")
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
