package e2e

import (
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/bermhq/berm/runtime/runtimetest/engine"
)

// A create that has to pull is answered 202, and made in the end; from a real
// registry that asks for a password, by a real engine.
func TestCreateThatPulls(t *testing.T) { onEachEngine(t, testCreateThatPulls) }

func testCreateThatPulls(t *testing.T, kind string) {
	t.Parallel() // much of its time it waits
	ctx := t.Context()
	e := commonEngine(t, kind)
	opts := engine.RegistryOptions{User: "puller", Password: "p4ssw0rd"}
	if kind == "docker" { // where it is the daemon that pulls
		opts.Netns = e.Netns()
	}
	shop, err := engine.StartRegistry(ctx, opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := shop.Close(); err != nil {
			t.Error(err)
		}
	})
	if err := shop.Push(ctx, "team/tool:1"); err != nil {
		t.Fatal(err)
	}
	e.config.RegistryAuthFile = filepath.Join(t.TempDir(), "config.json")
	write(t, e.config.RegistryAuthFile, `{"auths": {}}`)
	repo := shop.Host() + "/team/tool"

	s, server := newStorm(t, e)
	server.policy(t, "images: {allow: ["+repo+"]}\n")
	server.stop()
	s.start(server)
	create := func(key string) *http.Response {
		req, err := http.NewRequestWithContext(ctx, http.MethodPut, server.url+"/api/v1/sandboxes/"+key, strings.NewReader(`{"image":"`+repo+`:1"}`))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Content-Type", "application/json")
		req.Header.Set("X-API-Token", server.token)
		resp, err := (&http.Client{Transport: s.checker.Transport(nil)}).Do(req)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = resp.Body.Close() })
		return resp
	}
	// wait asks as often as the server says, until it has another answer.
	wait := func(key string) *http.Response {
		began := time.Now()
		for calls := 0; ; calls++ {
			resp := create(key)
			if resp.StatusCode != http.StatusAccepted {
				if calls == 0 {
					t.Errorf("the first answer is %s", resp.Status)
				}
				return resp
			}
			if location := resp.Header.Get("Location"); location != "/api/v1/sandboxes/"+key {
				t.Fatalf("Location %q", location)
			}
			seconds, err := strconv.Atoi(resp.Header.Get("Retry-After"))
			if err != nil || seconds < 1 {
				t.Fatalf("Retry-After %q", resp.Header.Get("Retry-After"))
			}
			if time.Since(began) > time.Minute {
				t.Fatal("it never got there")
			}
			time.Sleep(time.Duration(seconds) * time.Second)
		}
	}
	refused := wait("stranger")
	body, err := io.ReadAll(refused.Body)
	if err != nil || refused.StatusCode < 400 {
		t.Errorf("without credentials: %s, %v\n%s", refused.Status, err, body)
	}
	// The next pull takes what the file says by then.
	write(t, e.config.RegistryAuthFile, `{"auths": {"`+shop.Host()+`": {"username": "puller", "password": "p4ssw0rd"}}}`)
	if made := wait("puller"); made.StatusCode != http.StatusCreated && made.StatusCode != http.StatusOK {
		body, err := io.ReadAll(made.Body)
		t.Fatalf("with credentials: %s, %v\n%s", made.Status, err, body)
	}
	for _, key := range []string{"stranger", "puller"} {
		if _, err := s.client.Delete(ctx, key); err != nil {
			t.Error(err)
		}
	}
	server.stop()
	if log, err := os.ReadFile(server.logPath()); err != nil || strings.Contains(string(log), opts.Password) {
		t.Errorf("the log tells the password, or nothing: %v", err)
	}
	wantNothing(t, e, server)
}
