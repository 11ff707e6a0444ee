package e2e

import (
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
	caller := &http.Client{Transport: s.checker.Transport(nil)}
	// wait asks as often as the server says, until it has another answer.
	wait := func(key string) (status int, body string) {
		began := time.Now()
		for calls := 0; ; calls++ {
			resp, body, err := exchange(ctx, caller, http.MethodPut, server.url+"/api/v1/sandboxes/"+key, `{"image":"`+repo+`:1"}`, "X-API-Token", server.token)
			if err != nil {
				t.Fatal(err)
			}
			if resp.StatusCode != http.StatusAccepted {
				if calls == 0 {
					t.Errorf("the first answer is %s", resp.Status)
				}
				return resp.StatusCode, body
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
	if status, body := wait("stranger"); status < 400 {
		t.Errorf("without credentials: %d\n%s", status, body)
	}
	// The next pull takes what the file says by then.
	write(t, e.config.RegistryAuthFile, `{"auths": {"`+shop.Host()+`": {"username": "puller", "password": "p4ssw0rd"}}}`)
	if status, body := wait("puller"); status != http.StatusCreated && status != http.StatusOK {
		t.Fatalf("with credentials: %d\n%s", status, body)
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
