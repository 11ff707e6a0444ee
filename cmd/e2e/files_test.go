package e2e

import (
	"context"
	"errors"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/bermhq/berm/proxy/apitype"
	"github.com/bermhq/berm/proxy/client"
)

// Files are written, watched and read in a real sandbox, and what listens in it is
// reached though it has no network.
func TestFilesAndPorts(t *testing.T) {
	t.Parallel()
	e := commonEngine(t, "docker")
	server := newServer(t, e, e.dir(t), testImage)
	c := server.start(t)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	if _, err := c.Create(ctx, "k", apitype.SandboxRequest{}); err != nil {
		t.Fatal(err)
	}

	const odd = "/tmp/www/caf\xe9"
	content := strings.Repeat("0123456789abcdef", 1<<16) // 1 MiB
	if _, err := c.WriteFile(ctx, "k", odd, strings.NewReader(content), client.WriteOptions{Mkdir: true, Mode: 0o640}); err != nil {
		t.Fatal(err)
	}
	for _, part := range []struct{ offset, length int64 }{{0, 0}, {1 << 19, 100}} {
		r, err := c.ReadFile(ctx, "k", odd, part.offset, part.length)
		if err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(r)
		_ = r.Close()
		want := content[part.offset:]
		if part.length > 0 {
			want = want[:part.length]
		}
		if err != nil || string(got) != want {
			t.Errorf("from %d came %d bytes, %v", part.offset, len(got), err)
		}
	}
	res, err := c.Exec(ctx, "k", apitype.ExecRequest{Command: apitype.Command{"sh", "-c", "stat -c %a:%s /tmp/www/caf*"}})
	if err != nil || res.Stdout != "640:1048576\n" {
		t.Errorf("the sandbox sees %+v, %v", res, err)
	}
	_, err = c.StatFile(ctx, "k", "/tmp/none")
	wantCode(t, err, "file_not_found")
	_, err = c.ReadFile(ctx, "k", "/tmp", 0, 0)
	wantCode(t, err, "validation")
	_, err = c.WriteFile(ctx, "k", odd, strings.NewReader(""), client.WriteOptions{NoClash: true})
	wantCode(t, err, "precondition_failed")
	_, err = c.WriteFile(ctx, "k", "/etc/x", strings.NewReader(""), client.WriteOptions{})
	if err == nil {
		t.Error("a read-only root was written")
	}
	if r, err := c.ReadFile(ctx, "k", "/proc/self/status", 0, 0); err != nil {
		t.Error(err)
	} else {
		got, err := io.ReadAll(r)
		if _ = r.Close(); err != nil || !strings.Contains(string(got), "Name:") {
			t.Errorf("a file of /proc has %q, %v", got, err)
		}
	}
	for ev, err := range c.WatchFiles(ctx, "k", "/tmp/www", true) {
		if err != nil {
			t.Fatal(err)
		}
		if ev.Type == "ready" {
			if _, err := c.Exec(ctx, "k", apitype.ExecRequest{Command: apitype.Command{"sh", "-c", "echo hello > /tmp/www/index.html"}}); err != nil {
				t.Fatal(err)
			}
		}
		if ev.Path == "/tmp/www/index.html" {
			break
		}
	}
	list, err := c.GlobFiles(ctx, "k", "/tmp", "**/*.html", 0)
	if err != nil || len(list.Files) != 1 || list.Files[0].Path != "/tmp/www/index.html" {
		t.Errorf("found %+v, %v", list, err)
	}
	archive, err := c.ReadTar(ctx, "k", "/tmp/www")
	if err != nil {
		t.Fatal(err)
	}
	err = errors.Join(c.Mkdir(ctx, "k", "/tmp/copy", 0, false), c.WriteTar(ctx, "k", "/tmp/copy", archive), archive.Close())
	if err != nil {
		t.Error(err)
	}
	found, err := c.SearchFiles(ctx, "k", "/tmp/copy", client.SearchOptions{Pattern: "^hel+o$"})
	if err != nil || len(found.Matches) != 1 || found.Matches[0].Path != "/tmp/copy/www/index.html" {
		t.Errorf("found %+v, %v", found, err)
	}

	if _, err := c.StartExec(ctx, "k", apitype.ExecRequest{Command: apitype.Command{"httpd", "-f", "-p", "127.0.0.1:8000", "-h", "/tmp/www"}}); err != nil {
		t.Fatal(err)
	}
	page := func(get func() (*http.Response, error)) (int, string) {
		t.Helper()
		resp, err := get()
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = resp.Body.Close() }()
		b, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		return resp.StatusCode, string(b)
	}
	if status, body := page(func() (*http.Response, error) { return c.Port("k", 8001).Get("http://localhost/") }); status != http.StatusBadGateway {
		t.Errorf("where nobody listens, the answer is %d %s", status, body)
	}
	get := func() (*http.Response, error) { return c.Port("k", 8000).Get("http://localhost/index.html") }
	for status, _ := page(get); status == http.StatusBadGateway && ctx.Err() == nil; status, _ = page(get) {
		time.Sleep(10 * time.Millisecond) // until it listens
	}
	if status, body := page(get); status != 200 || body != "hello\n" {
		t.Errorf("the port answered %d %q", status, body)
	}
	u, err := c.PortURL(ctx, "k", 8000, time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	signed := func() (*http.Response, error) { return http.Get(server.url + u.Path + "index.html") }
	if status, body := page(signed); status != 200 || body != "hello\n" {
		t.Errorf("by its signed URL, it answered %d %q", status, body)
	}
	if _, err := c.Delete(ctx, "k"); err != nil {
		t.Error(err)
	}
	if status, _ := page(signed); status != http.StatusGone {
		t.Errorf("of a sandbox that is gone, a signed URL answered %d", status)
	}
}

// wantCode checks the code of an answer that says no.
func wantCode(t *testing.T, err error, codes ...string) {
	t.Helper()
	var e *client.Error
	if !errors.As(err, &e) || !slices.Contains(codes, e.Code) {
		t.Errorf("got %v, want %s", err, strings.Join(codes, " or "))
	}
}
