package engineapi

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"strings"
	"testing"

	"github.com/klauspost/compress/zstd"

	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/runtime/runtimetest/check"
)

// TestRefusedUpload sends a body whole before it looks for the answer, as docker-py does.
func TestRefusedUpload(t *testing.T) {
	d := standInDoor(t, &standIn{handler: http.NotFound})
	address := d.listen(Caller{Name: "up", Tenant: standInTenant})
	const size = 8 << 20
	for _, line := range []string{"POST /v1.41/build", "PUT /v1.41/containers/nobody/archive?path=/", "PUT /v1.41/containers/" + standInID + "/archive?path=", "POST /v1.41/images/load"} {
		for name, length := range map[string]string{"length": fmt.Sprintf("Content-Length: %d", size), "chunks": "Transfer-Encoding: chunked", "close": fmt.Sprintf("Connection: close\r\nContent-Length: %d", size)} {
			conn := hold(t, address, line+" HTTP/1.1\r\nHost: docker\r\nContent-Type: application/x-tar\r\n"+length+"\r\n\r\n")
			body := bytes.Repeat([]byte("x"), size)
			if name == "chunks" {
				body = fmt.Appendf(nil, "%x\r\n%s\r\n0\r\n\r\n", size, body)
			}
			if _, err := conn.Write(body); err != nil {
				t.Errorf("%s by %s: %v", line, name, err)
				continue
			}
			resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
			if err != nil {
				t.Errorf("%s by %s: %v", line, name, err)
				continue
			}
			text, err := io.ReadAll(resp.Body)
			if resp.StatusCode < 400 || err != nil || !bytes.Contains(text, []byte(`{"message":"`)) {
				t.Errorf("%s by %s: %s %q, %v", line, name, resp.Status, text, err)
			}
		}
	}
}

// TestRefusedAtOnce looks for the answer before it has sent all.
func TestRefusedAtOnce(t *testing.T) {
	d := standInDoor(t, &standIn{handler: http.NotFound})
	conn := hold(t, d.listen(Caller{Name: "up", Tenant: standInTenant}), "POST /v1.41/build HTTP/1.1\r\nHost: docker\r\nContent-Length: 100000000\r\n\r\n")
	piece := bytes.Repeat([]byte("x"), 1<<20)
	check.Value(conn.Write(piece))(t)
	resp := check.Value(http.ReadResponse(bufio.NewReader(conn), nil))(t)
	if text := check.Value(io.ReadAll(resp.Body))(t); resp.StatusCode != http.StatusForbidden || !resp.Close {
		t.Errorf("%s %q", resp.Status, text)
	}
	if _, err := conn.Write(piece); err != nil {
		t.Errorf("after the answer: %v", err)
	}
}

// TestCompressedUploads bounds the archives of a tenant that are decompressed at once.
func TestCompressedUploads(t *testing.T) {
	d, s, address := scripted(t, "1.51", "")
	s.ownContainerOf(d, "mine", mineID, "c")
	noise := make([]byte, 4<<10)
	_, _ = rand.NewChaCha8([32]byte{}).Read(noise)
	body := squeezed(t, tarOf(t, "f", string(noise)))["gzip"][:2<<10]
	put := func(length int) string {
		return fmt.Sprintf("PUT /v1.51/containers/%s/archive?path=/ HTTP/1.1\r\nHost: docker\r\nContent-Type: application/x-tar\r\nContent-Length: %d\r\n\r\n%s", mineID, length, body)
	}
	for range maxCompressed {
		hold(t, address, put(1<<20))
	}
	eventually(t, func() bool { return d.making("compressed archives mine") == maxCompressed })
	resp := check.Value(http.ReadResponse(bufio.NewReader(hold(t, address, put(len(body)))), nil))(t)
	if resp.StatusCode != http.StatusTooManyRequests {
		t.Errorf("one more: %s", resp.Status)
	}
}

// squeezed are one archive in all forms, of which Go can't write two.
func squeezed(t testing.TB, plain []byte) map[string][]byte {
	t.Helper()
	var z bytes.Buffer
	w := gzip.NewWriter(&z)
	check.Value(w.Write(plain))(t)
	must(t, w.Close())
	enc := check.Value(zstd.NewWriter(nil))(t)
	return map[string][]byte{"plain": plain, "gzip": z.Bytes(), "zstd": enc.EncodeAll(plain, nil), "skippable zstd": append([]byte("\x50\x2a\x4d\x18\x02\x00\x00\x00xx"), enc.EncodeAll(plain, nil)...)}
}

// An empty archive, and what xz and bzip2 make of it.
var (
	emptyTar = make([]byte, 10240)
	emptyXZ  = "/Td6WFoAAATm1rRGAgAhARYAAAB0L+Wj4Cf/ACxdAABv/f//o7f/Rz5IFXI5YVG4kijmo4YH+e7kHoLTL8U6PAFLsX7JilwyG2QAAK8YErMvVcwzAAFIgFAAAADs47VascRn+wIAAAAABFla"
	emptyBZ  = "QlpoOTFBWSZTWVl7uOQAABRQAMAABAAACCAAMMwFKaYTYieLuSKcKEgsvdxyAA=="
)

func unbase64(t testing.TB, s string) []byte {
	return check.Value(base64.StdEncoding.DecodeString(s))(t)
}

func TestInflate(t *testing.T) {
	plain := tarOf(t, "f", strings.Repeat("content", 10000))
	for name, in := range squeezed(t, plain) {
		r, err := openTar(bytes.NewReader(in), maxInflated)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if got, err := io.ReadAll(r); err != nil || !bytes.Equal(got, plain) {
			t.Errorf("%s: %d bytes, %v", name, len(got), err)
		}
	}
	for name, in := range map[string]string{"xz": emptyXZ, "bzip2": emptyBZ} {
		r := check.Value(openTar(bytes.NewReader(unbase64(t, in)), maxInflated))(t)
		if got, err := io.ReadAll(r); err != nil || !bytes.Equal(got, emptyTar) {
			t.Errorf("%s: %d bytes, %v", name, len(got), err)
		}
	}
}

// hugeXZ is what xz made of an empty archive, with a dictionary that is larger than allowed.
func hugeXZ(t *testing.T) []byte {
	x := unbase64(t, emptyXZ)
	header := x[12 : 12+int(x[12]+1)*4]
	at := bytes.Index(header, []byte{0x21, 1}) // LZMA2, and one byte of properties
	header[at+2] = 40                          // 4 GiB
	binary.LittleEndian.PutUint32(header[len(header)-4:], crc32.ChecksumIEEE(header[:len(header)-4]))
	return x
}

func TestInflateRefuses(t *testing.T) {
	const most = 1 << 20
	noise := make([]byte, 4096) // so that what is compressed has a block to look at
	_, _ = rand.NewChaCha8([32]byte{}).Read(noise)
	plain, zeros := tarOf(t, "f", string(noise)), make([]byte, most+1)
	all, bombs := squeezed(t, plain), squeezed(t, zeros)
	window := check.Value(zstd.NewWriter(nil, zstd.WithWindowSize(2*maxWindow)))(t)
	var wide bytes.Buffer
	window.Reset(&wide)
	check.Value(window.ReadFrom(io.LimitReader(zeroes{}, 2*maxWindow)))(t)
	must(t, window.Close())
	for name, tt := range map[string]struct {
		in   []byte
		want string
	}{
		"gzip bomb":        {bombs["gzip"], "larger than"},
		"zstd bomb":        {bombs["zstd"], "larger than"},
		"gzip in gzip":     {squeezed(t, all["gzip"])["gzip"], "not a plain tar"},
		"gzip in zstd":     {squeezed(t, all["gzip"])["zstd"], "not a plain tar"},
		"zstd in gzip":     {squeezed(t, all["skippable zstd"])["gzip"], "not a plain tar"},
		"no tar":           {squeezed(t, bytes.Repeat([]byte("x"), 2048))["gzip"], "not a plain tar"},
		"cut gzip":         {all["gzip"][:len(all["gzip"])-9], "decompressed"},
		"broken bzip2":     {append([]byte("BZh91AY"), make([]byte, 1024)...), "decompressed"},
		"broken xz":        {append([]byte("\xfd7zXZ\x00"), make([]byte, 1024)...), "decompressed"},
		"dictionary":       {hugeXZ(t), "decompressed"},
		"window":           {wide.Bytes(), "decompressed"},
		"frames only":      {[]byte("\x50\x2a\x4d\x18\x02\x00\x00\x00xx"), "not a tar"},
		"a cut archive":    {all["plain"][:300], "not a tar"},
		"nothing":          {nil, "not a tar"},
		"text":             {bytes.Repeat([]byte("hello "), 200), "not a plain tar"},
		"a wrong sum":      {append([]byte{'X'}, all["plain"][1:]...), "not a plain tar"},
		"bzip2's name":     {tarOf(t, "BZhello", "x"), "decompressed"},
		"the same in gzip": {squeezed(t, tarOf(t, "BZhello", "x"))["gzip"], "not a plain tar"},
	} {
		r, err := openTar(bytes.NewReader(tt.in), most)
		if err == nil {
			_, err = io.Copy(io.Discard, r)
		}
		if f := proxy.FaultOf(err); err == nil || f.Status/100 != 4 || !strings.Contains(f.Detail, tt.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

type zeroes struct{}

func (zeroes) Read(b []byte) (int, error) {
	clear(b)
	return len(b), nil
}

// The error of a body that is cut off is the reader's, not the decompressor's.
func TestInflateCutOff(t *testing.T) {
	want := net.ErrClosed
	for name, in := range squeezed(t, tarOf(t, "f", strings.Repeat("content", 10000))) {
		half := io.MultiReader(bytes.NewReader(in[:len(in)/2]), errReader{want})
		r, err := inflate(half, maxInflated)
		if err == nil {
			_, err = io.Copy(io.Discard, r)
		}
		if !errors.Is(err, want) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

type errReader struct{ error }

func (r errReader) Read([]byte) (int, error) { return 0, r.error }
