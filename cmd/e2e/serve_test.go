package e2e

import (
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/bermhq/berm/cmd/e2e/program"
	"github.com/bermhq/berm/proxy/sandboxapi/openapitest"
	"github.com/bermhq/berm/runtime/runtimetest/check"
)

const (
	policyA = "version: 1\nprofiles: {a: {extends: default}}\n"
	policyB = "version: 1\nprofiles: {b: {extends: default}}\n"
	broken  = "version: 1\nprofiles: {c: {extends: nothing}}\n"
)

// child is a berm serve in a process of its own.
type child struct {
	*program.Child
	http http.Client // reaches it
	dir  string      // its state directory, and its socket beside it
}

// startChild starts a server on a unix socket whose engine isn't there.
func startChild(t testing.TB, dir string, args ...string) *child {
	t.Helper()
	return startChildWith(t, dir, nil, "serving", args...)
}

// startChildWith starts a server on a unix socket, and returns when its log has the
// message. A nil engine isn't there.
func startChildWith(t testing.TB, dir string, e *testEngine, message string, args ...string) *child {
	t.Helper()
	return startCommand(t, exec.CommandContext(t.Context(), bin), dir, e, message, args...)
}

// startCommand is startChildWith by a command that lacks the server's arguments. It waits for
// no message if that is empty.
func startCommand(t testing.TB, cmd *exec.Cmd, dir string, e *testEngine, message string, args ...string) *child {
	t.Helper()
	socket := filepath.Join(dir, "berm.sock")
	c := &child{dir: filepath.Join(dir, "state")}
	c.http.Transport = openapitest.New(t).Transport(through(socket))
	address := "unix://" + filepath.Join(dir, "no-engine.sock")
	if e != nil {
		address = e.config.Address
	}
	cmd.Args = append(cmd.Args, "serve", "--listen", "unix://"+socket, "--state-dir", c.dir, "--engine-address", address)
	cmd.Args = append(cmd.Args, args...)
	cmd.Env = append(os.Environ(), cmd.Env...)
	if e != nil {
		cmd.Env = append(cmd.Env, e.config.env()...)
	}
	var err error
	c.Child, err = program.Start(cmd, program.NewOutput())
	must(t, err)
	t.Cleanup(c.Kill)
	if message != "" {
		c.Log.Wait(t, "msg="+message+" ")
	}
	return c
}

func (c *child) get(t testing.TB, path string) (int, string) {
	t.Helper()
	resp, answer, err := exchange(t.Context(), &c.http, http.MethodGet, "http://localhost"+path, "")
	must(t, err)
	return resp.StatusCode, answer
}

func (c *child) signal(t testing.TB, s os.Signal) {
	t.Helper()
	must(t, c.Process.Signal(s))
}

// end has a signal end the server, which is no failure.
func (c *child) end(t testing.TB, s os.Signal) {
	t.Helper()
	c.signal(t, s)
	if err := c.Wait(); err != nil {
		t.Errorf("after %s: %v", s, err)
	}
}

func TestServeProcess(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	path := filepath.Join(dir, "policy.yaml")
	write(t, path, policyA)
	c := startChild(t, dir, "--policy", path)

	// Without its engine it is alive, not ready, and says why.
	if status, body := c.get(t, "/healthz"); status != http.StatusOK {
		t.Errorf("/healthz: %d %s", status, body)
	}
	if status, body := c.get(t, "/readyz"); status != http.StatusServiceUnavailable || !strings.Contains(body, "backend_unavailable") {
		t.Errorf("/readyz: %d %s", status, body)
	}
	if _, body := c.get(t, "/api/v1/status"); !strings.Contains(body, `"a"`) || !strings.Contains(body, `"available":false`) {
		t.Errorf("/api/v1/status: %s", body)
	}
	info := check.Value(os.Stat(filepath.Join(dir, "berm.sock")))(t)
	if got := info.Mode().Perm(); got != 0o660 {
		t.Errorf("the socket's mode is %o, want 660", got)
	}

	// The state directory is taken.
	_, stderr, code := berm(t, "", "serve", "--listen", "127.0.0.1:0", "--state-dir", c.dir)
	if code != 1 || !strings.Contains(stderr, "another berm uses the state directory "+c.dir) {
		t.Errorf("a second server: exit code %d, %q", code, stderr)
	}
	if got, err := os.ReadFile(filepath.Join(c.dir, "address")); err != nil || string(got) != "unix://"+dir+"/berm.sock\n" {
		t.Errorf("the address is %q, %v", got, err)
	}

	// A broken policy is refused, by signal as by change; a good one is taken.
	replace(t, path, broken)
	c.Log.Wait(t, "msg=policy_reload_failed")
	replace(t, path, policyB)
	c.Log.Wait(t, "msg=policy_reloaded")
	c.signal(t, syscall.SIGHUP)
	c.Log.Wait(t, "msg=policy_reloaded")
	if _, body := c.get(t, "/api/v1/status"); !strings.Contains(body, `"b"`) {
		t.Errorf("/api/v1/status: %s", body)
	}
	if _, body := c.get(t, "/metrics"); !strings.Contains(body, `berm_policy_reloads_total{result="failure"} 1`) ||
		!strings.Contains(body, `berm_policy_reloads_total{result="success"} 2`) {
		t.Error("/metrics doesn't count the reloads")
	}

	c.end(t, syscall.SIGTERM)
	for _, name := range []string{"berm.sock", "state/address"} {
		if _, err := os.Lstat(filepath.Join(dir, name)); !os.IsNotExist(err) {
			t.Errorf("%s is left: %v", name, err)
		}
	}
}

// A killed server's directory is the next one's.
func TestServeAfterKill(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	first := startChild(t, dir)
	first.Kill()
	id := readString(t, filepath.Join(first.dir, "instance"))
	second := startChild(t, dir)
	if !strings.Contains(second.Log.String(), "instance="+id) {
		t.Errorf("the instance isn't %s any more:\n%s", id, second.Log)
	}
	second.end(t, os.Interrupt)
}

// TestServeEndsClean ends a server whose collector is away. That is no failure.
func TestServeEndsClean(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	write(t, filepath.Join(dir, "berm.yaml"), "otel: {endpoint: 'http://127.0.0.1:9'}\n") // where nobody listens
	c := startChild(t, dir, "--config", filepath.Join(dir, "berm.yaml"))
	c.get(t, "/healthz")
	c.end(t, syscall.SIGTERM)
	c.Log.Wait(t, "msg=telemetry_failed")
}
