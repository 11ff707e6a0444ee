package sandboxapi_test

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/iotest"
	"time"

	"github.com/bermhq/berm/proxy/apitype"
	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/runtimetest"
)

// odd is an engine whose files are as a test says, also what is written unless that is nil, and whose functions are changed with
// set only: a broken answer's handler may still be at it.
type odd struct {
	*runtimetest.Fake
	mu    sync.Mutex
	read  func(open func(runtime.FileInfo) error, w io.Writer) error
	tar   func(w io.Writer) error
	list  func(f func(runtime.FileInfo) error) error
	write func(r io.Reader) (int64, error)
}

func (o *odd) set(f func()) {
	o.mu.Lock()
	defer o.mu.Unlock()
	f()
}

// as gives a function of the moment.
func as[F any](o *odd, f *F) F {
	o.mu.Lock()
	defer o.mu.Unlock()
	return *f
}

func (o *odd) File(ctx context.Context, id string, op runtime.FileOp, fio runtime.FileIO) error {
	switch op.Verb {
	case runtime.FileRead:
		return as(o, &o.read)(fio.Info, fio.Out)
	case runtime.FileTarRead:
		return as(o, &o.tar)(fio.Out)
	case runtime.FileList:
		return as(o, &o.list)(fio.Info)
	case runtime.FileWrite:
		if write := as(o, &o.write); write != nil {
			n, err := write(fio.In)
			if err != nil {
				return err
			}
			return fio.Info(runtime.FileInfo{Path: op.Path, Size: n})
		}
	}
	return o.Fake.File(ctx, id, op, fio)
}

// TestBrokenAnswers checks that no part is taken for the whole.
func TestBrokenAnswers(t *testing.T) {
	o := &odd{}
	h := newHouse(t, func(f *runtimetest.Fake) runtime.AgentRuntime { o.Fake = f; return o })
	boo := errors.New("boo")
	say := func(size int64, text string, err error) func(func(runtime.FileInfo) error, io.Writer) error {
		return func(open func(runtime.FileInfo) error, w io.Writer) error {
			if err := open(runtime.FileInfo{Path: "/f", Size: size, Mode: 0o644, ModTime: time.Now()}); err != nil {
				return err
			}
			if _, err := io.WriteString(w, text); err != nil {
				return err
			}
			return err
		}
	}
	get := func(path string, change ...func(*http.Request)) (status int, body string, err error) {
		resp, err := h.client.Do(h.request("GET", path, nil, change...))
		if err != nil {
			return 0, "", err
		}
		defer func() { _ = resp.Body.Close() }()
		b, err := io.ReadAll(resp.Body)
		return resp.StatusCode, string(b), err
	}
	for _, tt := range []struct {
		name   string
		read   func(func(runtime.FileInfo) error, io.Writer) error
		body   string
		broken bool
	}{
		{"whole", say(10, "0123456789", nil), "0123456789", false},
		{"grown", say(10, "0123456789abc", nil), "0123456789", false},
		{"shrunk", say(10, "0123", nil), "0123", true},
		{"failed", say(10, "0123", boo), "0123", true},
		{"of /proc", say(0, "0123", nil), "0123", false},
		{"of /proc, failed", say(0, "0123", boo), "0123", true},
	} {
		o.set(func() { o.read = tt.read })
		status, body, err := get(at("", "/f"))
		// A connection that is broken off at once may not even show the header.
		if (err != nil) != tt.broken || !tt.broken && (status != 200 || body != tt.body) {
			t.Errorf("%s: got %d, %q, %v", tt.name, status, body, err)
		}
	}
	o.set(func() { o.read = func(func(runtime.FileInfo) error, io.Writer) error { return boo } })
	h.want(500, "internal", "GET", at("", "/f"), "")
	o.set(func() { o.read = func(func(runtime.FileInfo) error, io.Writer) error { return nil } })
	h.want(500, "internal", "GET", at("", "/f"), "")

	// As long as nothing was sent, an error is answered like any other.
	h.put("/workspace/r", "0123456789")
	for _, tt := range []struct {
		name, code string
		status     int
		read       func(func(runtime.FileInfo) error, io.Writer) error
	}{
		{"failed at once", "internal", 500, say(10, "", boo)},
		{"of /proc, failed at once", "internal", 500, say(0, "", boo)},
		{"shrunk to nothing", "file_wrong_kind", 409, say(10, "", nil)},
	} {
		o.set(func() { o.read = tt.read })
		for _, header := range []string{"", "bytes=2-8"} {
			if tt.name == "of /proc, failed at once" && header != "" {
				continue // it has no range
			}
			a := h.want(tt.status, tt.code, "GET", at("", "/workspace/r"), "", withHeader("Range", header))
			if ct := a.Header.Get("Content-Type"); ct != "application/problem+json" || a.ContentLength != int64(len(a.body)) {
				t.Errorf("%s, %s: %s of %d bytes", tt.name, header, ct, a.ContentLength)
			}
			for _, name := range []string{"ETag", "Last-Modified", "Content-Disposition", "Content-Range", "Accept-Ranges"} {
				if v := a.Header.Get(name); v != "" {
					t.Errorf("%s, %s: %s is %q", tt.name, header, name, v)
				}
			}
		}
	}
	o.set(func() { o.read = say(0, "", nil) })
	if a := h.want(200, "", "GET", at("", "/workspace/r"), ""); a.body != "" || a.Header.Get("ETag") == "" {
		t.Errorf("an empty file: %q, %v", a.body, a.Header)
	}
	o.set(func() { o.read = say(4, "0", nil) }) // shorter by the time it is read
	h.want(409, "file_wrong_kind", "GET", at("", "/workspace/r"), "", withHeader("Range", "bytes=2-8"))

	o.set(func() { o.tar = func(w io.Writer) error { _, _ = w.Write([]byte("part")); return boo } })
	if _, _, err := get(at("/tar", "/d")); err == nil {
		t.Error("half an archive was taken for the whole")
	}
	o.set(func() {
		o.list = func(f func(runtime.FileInfo) error) error { _ = f(runtime.FileInfo{Path: "/f"}); return boo }
	})
	if _, _, err := get(at("/list", "/d"), withHeader("Accept", "application/x-ndjson")); err == nil {
		t.Error("half a list was taken for the whole")
	}
	h.want(500, "internal", "GET", at("/list", "/d"), "")
	// However long the names are, an answer isn't.
	o.set(func() {
		o.list = func(f func(runtime.FileInfo) error) error {
			for {
				if err := f(runtime.FileInfo{Path: "/" + strings.Repeat("\x01", 4000)}); err != nil {
					return err
				}
			}
		}
	})
	a := h.want(200, "", "GET", at("/list", "/d", "limit", "10000"), "")
	if len(a.body) > 17<<20 || !strings.HasSuffix(a.body, `"truncated":true}`+"\n") {
		t.Errorf("got %d bytes, …%s", len(a.body), a.body[max(0, len(a.body)-20):])
	}

	// What a caller breaks off isn't written.
	var got error
	done := make(chan struct{})
	o.set(func() {
		o.write = func(r io.Reader) (int64, error) {
			defer close(done)
			var n int64
			n, got = io.Copy(io.Discard, r)
			return n, got
		}
	})
	r := h.request("PUT", at("", "/f"), io.MultiReader(strings.NewReader("some"), iotest.ErrReader(boo)))
	if resp, err := h.client.Do(r); err == nil {
		_ = resp.Body.Close()
		t.Error("half a request was sent")
	}
	<-done
	if got == nil {
		t.Error("half a file was taken for the whole")
	}
}

// TestLongUpload writes more than a body could otherwise have.
func TestLongUpload(t *testing.T) {
	const size = 64 << 20
	o := &odd{}
	h := newHouse(t, func(f *runtimetest.Fake) runtime.AgentRuntime { o.Fake = f; return o })
	o.set(func() { o.write = func(r io.Reader) (int64, error) { return io.Copy(io.Discard, r) } })
	resp, err := h.client.Do(h.request("PUT", at("", "/f"), io.LimitReader(zeros{}, size)))
	must(t, err)
	defer func() { _ = resp.Body.Close() }()
	var info apitype.FileInfo
	if err := json.NewDecoder(resp.Body).Decode(&info); err != nil || info.Size != size {
		t.Errorf("got %+v, %v", info, err)
	}
}

type zeros struct{}

func (zeros) Read(b []byte) (int, error) { clear(b); return len(b), nil }
