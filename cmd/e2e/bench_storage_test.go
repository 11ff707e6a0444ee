package e2e

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/bermhq/berm/proxy/client"
	"github.com/bermhq/berm/runtime/runtimetest/check"
)

// bareFiles serves the files in a directory with nothing but the standard library's handlers.
func bareFiles(dir string) http.HandlerFunc {
	files := http.FileServer(http.Dir(dir))
	return func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodPut {
			files.ServeHTTP(w, r)
			return
		}
		f, err := os.Create(filepath.Join(dir, filepath.Base(r.URL.Path)))
		if err == nil {
			_, err = io.Copy(f, r.Body)
			err = errors.Join(err, f.Sync(), f.Close())
		}
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
		}
	}
}

// BenchmarkStorage moves a file of 1 GiB into a chat and out of it, against the standard
// library's handlers, interleaved. Both leave files that a stop of the machine leaves.
func BenchmarkStorage(b *testing.B) {
	const size = 1 << 30
	e := commonEngine(b, "docker")
	dir := e.dir(b)
	bareDir := makeDir(b, dir, "bare")
	server := newServer(b, e, dir, testImage)
	server.env = append(server.env, "BERM_SANDBOX_CHATS_ROOT="+filepath.Join(dir, "chats"), "BERM_SANDBOX_CREATE_ROOTS=true")
	c := server.start(b)
	w := check.Value(c.EnsureWorkspace(b.Context(), "somebody"))(b)
	must(b, second(c.EnsureChat(b.Context(), "bench", w.WorkspaceID)))
	other := httptest.NewServer(bareFiles(bareDir))
	b.Cleanup(other.Close)
	berm, bare := server.url+"/api/v1/chats/bench/files/", other.URL+"/"
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
		return func() error { return call(http.MethodPut, url, io.LimitReader(zeros{}, size)) }
	}
	down := func(url string) func() error {
		return func() error { return call(http.MethodGet, url, nil) }
	}
	mib := per(size>>20, "MiB")
	pid := server.Process.Pid
	b.Run("1 GiB up", func(b *testing.B) {
		forgetPeak(b, pid)
		turns(b, []way{{"berm", whole(up(berm + "up"))}, {"bare", whole(up(bare + "up"))}}, mib)
		b.Logf("the server's peak: %d kB", peak(b, pid))
	})
	b.Run("1 GiB down", func(b *testing.B) {
		must(b, up(berm+"down")(), up(bare+"down")())
		forgetPeak(b, pid)
		turns(b, []way{{"berm", whole(down(berm + "down"))}, {"bare", whole(down(bare + "down"))}}, mib)
		b.Logf("the server's peak: %d kB", peak(b, pid))
	})
	b.Run("a page of 1,000 of 10,000 files", func(b *testing.B) {
		for i := range 10_000 {
			must(b, second(c.PutChatFile(b.Context(), "bench", fmt.Sprintf("small-%05d", i), strings.NewReader("x"), client.PutChatFileOptions{})))
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
