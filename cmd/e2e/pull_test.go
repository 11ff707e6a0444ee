package e2e

import (
	"net/http"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/bermhq/berm/proxy/sandboxapi/openapitest"
	"github.com/bermhq/berm/runtime/runtimetest/check"
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
	shop := check.Value(engine.StartRegistry(ctx, opts))(t)
	t.Cleanup(func() {
		if err := shop.Close(); err != nil {
			t.Error(err)
		}
	})
	must(t, shop.Push(ctx, "team/tool:1"))
	e.config.RegistryAuthFile = filepath.Join(t.TempDir(), "config.json")
	write(t, e.config.RegistryAuthFile, `{"auths": {}}`)
	repo := shop.Host() + "/team/tool"

	server, s := newServer(t, e, e.dir(t), testImage), &storm{t: t, e: e, checker: openapitest.New(t)}
	server.policy(t, "images: {allow: ["+repo+", \"127.0.0.1:1/x\"]}\n")
	s.start(server)
	caller := &http.Client{Transport: s.checker.Transport(nil)}
	// wait asks as often as the server says, until it has another answer.
	wait := func(key, image string) (status int, body string) {
		began := time.Now()
		for calls := 0; ; calls++ {
			resp, body, err := exchange(ctx, caller, http.MethodPut, server.url+"/api/v1/sandboxes/"+key, `{"image":"`+image+`"}`, "X-API-Token", server.token)
			must(t, err)
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
	fails := func(key, image string, why ...string) {
		t.Helper()
		status, body := wait(key, image)
		told := strings.Contains(body, "the image "+image+" can't be pulled: ") && slices.ContainsFunc(why, func(s string) bool { return strings.Contains(body, s) })
		if status != http.StatusServiceUnavailable || !strings.Contains(body, `"code":"sandbox_start_failed"`) || !told || strings.Contains(body, opts.Password) {
			t.Errorf("%s: %d\n%s", key, status, body)
		}
	}
	fails("stranger", repo+":1", "authorization", "unauthorized", "no basic auth credentials", "401")
	fails("nowhere", "127.0.0.1:1/x:1", "connection refused")
	// The next pull takes what the file says by then.
	write(t, e.config.RegistryAuthFile, `{"auths": {"`+shop.Host()+`": {"username": "puller", "password": "p4ssw0rd"}}}`)
	fails("missing", repo+":2", "not found", "unknown")
	if status, body := wait("puller", repo+":1"); status != http.StatusCreated && status != http.StatusOK {
		t.Fatalf("with credentials: %d\n%s", status, body)
	}
	for _, key := range []string{"stranger", "nowhere", "missing", "puller"} {
		must(t, second(s.client.Delete(ctx, key)))
	}
	server.stop()
	if log := server.log.String(); log == "" || strings.Contains(log, opts.Password) {
		t.Errorf("the log tells the password, or nothing: %s", log)
	}
	wantNothing(t, e, server)
}
