package e2e

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/bermhq/berm/proxy/client"
)

// bareFiles is the environment variable that makes this test binary a server of the files
// in the directory that it names, with nothing but the standard library's handlers.
const bareFiles = "SERVE_BARE_FILES"

// serveBareFiles tells its address on standard output.
func serveBareFiles(dir string) error {
	files := http.FileServer(http.Dir(dir))
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	fmt.Println(listener.Addr())
	return http.Serve(listener, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { //nolint:gosec // for this machine only
		if r.Method != http.MethodPut {
			files.ServeHTTP(w, r)
			return
		}
		f, err := os.Create(filepath.Join(dir, filepath.Base(r.URL.Path)))
		if err == nil {
			_, err = io.Copy(f, r.Body)
			if err == nil && r.URL.Query().Has("sync") {
				err = f.Sync()
			}
			err = errors.Join(err, f.Close())
		}
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
		}
	}))
}

// startBareFiles runs such a server, and answers its base URL.
func startBareFiles(b *testing.B, dir string) string {
	b.Helper()
	self, err := os.Executable()
	if err != nil {
		b.Fatal(err)
	}
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), bareFiles+"="+dir)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	var address string
	if _, err := fmt.Fscanln(out, &address); err != nil {
		b.Fatal(err)
	}
	return "http://" + address + "/"
}

// repeated is a stream of n bytes.
func repeated(n int64) io.Reader {
	block := bytes.Repeat([]byte("0123456789abcdef"), 1<<12)
	return io.LimitReader(&endless{block: block}, n)
}

type endless struct{ block []byte }

func (e *endless) Read(p []byte) (int, error) { return copy(p, e.block), nil }

// BenchmarkStorage moves a file of 1 GiB into a chat and out of it, against the standard
// library's handlers in a process of their own, interleaved. Files on disk are those that
// a stop of the machine leaves: the bare copy is measured with and without that.
func BenchmarkStorage(b *testing.B) {
	const size = 1 << 30
	e := commonEngine(b, "docker")
	dir := e.dir(b)
	bareDir := filepath.Join(dir, "bare")
	if err := os.Mkdir(bareDir, 0o755); err != nil {
		b.Fatal(err)
	}
	server := newServer(b, e, dir, testImage)
	server.env = append(server.env, "BERM_SANDBOX_CHATS_ROOT="+filepath.Join(dir, "chats"), "BERM_SANDBOX_CREATE_ROOTS=true")
	c := server.start(b)
	w, err := c.EnsureWorkspace(b.Context(), "somebody")
	if err != nil {
		b.Fatal(err)
	}
	if _, err := c.EnsureChat(b.Context(), "bench", w.WorkspaceID); err != nil {
		b.Fatal(err)
	}
	berm, bare := server.url+"/api/v1/chats/bench/files/", startBareFiles(b, bareDir)
	call := func(method, url string, body io.Reader) error {
		req, err := http.NewRequestWithContext(b.Context(), method, url, body)
		if err != nil {
			return err
		}
		if body != nil {
			req.ContentLength = size
		}
		req.Header.Set("Authorization", "Bearer "+server.token)
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			return err
		}
		defer func() { _ = resp.Body.Close() }()
		n, err := io.Copy(io.Discard, resp.Body)
		if err == nil && (resp.StatusCode/100 != 2 || method == http.MethodGet && n != size) {
			err = fmt.Errorf("%s %s: %s with %d bytes", method, url, resp.Status, n)
		}
		return err
	}
	up := func(url string) func() error {
		return func() error { return call(http.MethodPut, url, repeated(size)) }
	}
	down := func(url string) func() error {
		return func() error { return call(http.MethodGet, url, nil) }
	}
	mib := per(size>>20, "MiB")
	pid := server.cmd.Process.Pid
	b.Run("1 GiB up", func(b *testing.B) {
		forgetPeak(b, pid)
		turns(b, []way{{"berm", whole(up(berm + "up"))}, {"bare and synced", whole(up(bare + "up?sync"))}}, mib)
		b.Logf("the server's peak: %s", peak(b, pid))
	})
	b.Run("1 GiB up, bare not synced", func(b *testing.B) {
		turns(b, []way{{"berm", whole(up(berm + "up"))}, {"bare", whole(up(bare + "up"))}}, mib)
	})
	b.Run("1 GiB down", func(b *testing.B) {
		if err := errors.Join(up(berm+"down")(), up(bare+"down")()); err != nil {
			b.Fatal(err)
		}
		forgetPeak(b, pid)
		turns(b, []way{{"berm", whole(down(berm + "down"))}, {"bare", whole(down(bare + "down"))}}, mib)
		b.Logf("the server's peak: %s", peak(b, pid))
	})
	b.Run("a page of 1,000 of 10,000 files", func(b *testing.B) {
		for i := range 10_000 {
			if _, err := c.PutChatFile(b.Context(), "bench", fmt.Sprintf("small-%05d", i), strings.NewReader("x"), client.PutChatFileOptions{}); err != nil {
				b.Fatal(err)
			}
		}
		turns(b, []way{{"page", whole(func() error {
			n := 0
			for _, err := range c.ChatFiles(b.Context(), "bench", 1000) {
				if n++; err != nil || n == 1000 {
					return err
				}
			}
			return nil
		})}}, noUnit)
	})
}
