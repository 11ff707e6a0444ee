package sandboxapi

import (
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/bermhq/berm/proxy/apitype"
)

// TestSendFileStalls checks that who doesn't read is cut off, and who reads slowly isn't.
func TestSendFileStalls(t *testing.T) {
	t.Parallel()
	const size, within = 64 << 20, 300 * time.Millisecond // more than the buffers between the two hold
	f, err := os.Create(filepath.Join(t.TempDir(), "f"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	if err := f.Truncate(size); err != nil {
		t.Fatal(err)
	}
	sent := make(chan error, 1)
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Length", "67108864")
		_, err := f.Seek(0, io.SeekStart)
		sent <- errors.Join(err, sendFile(w, f, size, within))
	}))
	defer srv.Close()
	c, err := net.Dial("tcp", srv.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	if _, err := io.WriteString(c, "GET / HTTP/1.1\r\nHost: x\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-sent:
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("it ended with %v", err)
		}
	case <-time.After(time.Minute):
		t.Fatal("it goes on")
	}

	resp, err := http.Get(srv.URL)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	for start := time.Now(); time.Since(start) < 2*within; { // in all, not at a time; far from all of it
		if _, err := io.CopyN(io.Discard, resp.Body, 2<<20); err != nil {
			t.Fatal(err)
		}
		time.Sleep(within / 10)
	}
	if _, err := io.Copy(io.Discard, resp.Body); err != nil {
		t.Errorf("one who reads was cut off: %v", err)
	}
	if err := <-sent; err != nil {
		t.Error(err)
	}
}

func TestExecInput(t *testing.T) {
	t.Parallel()
	r := httptest.NewRequest(http.MethodPost, "/", nil)
	more, text := make([]byte, maxStdin+1), "x"
	for body, ok := range map[*apitype.ExecRequest]bool{
		{StdinBase64: more[:maxStdin]}: true, {StdinBase64: more}: false, {StdinBase64: more[:1], Stdin: &text}: false,
	} {
		if _, err := execRequest(r, *body); (err == nil) != ok {
			t.Errorf("%d bytes: %v", len(body.StdinBase64), err)
		}
	}
}
