package e2e

import (
	"bufio"
	"errors"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/coder/websocket"

	"github.com/bermhq/berm/cmd/e2e/program"
	"github.com/bermhq/berm/runtime/runtimetest/check"
)

// A server that goes down lets what is in flight finish for a while, and then nobody goes
// without a word of why.
func TestDrain(t *testing.T) {
	t.Parallel()
	b := newClientFixture(t, "http: {drain_timeout: 6s}\n")
	cli, work := clis(t)[0], filepath.Join(b.dir, "work")
	transport := through(filepath.Join(b.dir, "berm.sock"))
	transport.DisableKeepAlives = true
	api := &http.Client{Transport: transport}
	ask := func(method, path, body, accept string) (*http.Response, error) {
		req, err := http.NewRequestWithContext(t.Context(), method, "http://localhost/api/v1/sandboxes/a"+path, strings.NewReader(body))
		if err != nil {
			return nil, err
		}
		req.Header.Set("Content-Type", "application/json")
		req.Header.Set("Accept", accept)
		return api.Do(req)
	}
	asked := func(method, path, body, accept string) *http.Response {
		t.Helper()
		resp, err := ask(method, path, body, accept)
		if err != nil || resp.StatusCode/100 != 2 {
			t.Fatalf("%s %s: %v, %v", method, path, resp, err)
		}
		t.Cleanup(func() { _ = resp.Body.Close() })
		return resp
	}
	there := func(name string) func() bool {
		return func() bool { _, err := os.Stat(filepath.Join(work, name)); return err == nil }
	}
	const untilTold = "; while [ ! -e go ]; do sleep 0.05; done; echo done"

	asked("PUT", "", `{"image": "`+testImage+`", "host_path": "`+work+`", "host_path_mode": "rw", "mount_path": "/workspace"}`, "")
	awaited := make(chan string, 1)
	go func() {
		resp, err := ask("POST", "/exec", `{"command": ["sh", "-c", "cd /workspace; touch exec`+untilTold+`"]}`, "")
		if err != nil {
			awaited <- err.Error()
			return
		}
		body, _ := io.ReadAll(resp.Body)
		_ = resp.Body.Close()
		awaited <- string(body)
	}()
	streamed := bufio.NewReader(asked("POST", "/exec", `{"command": ["sh", "-c", "echo begun; exec sleep 600"]}`, "application/x-ndjson").Body)
	asked("POST", "/processes", `{"process_id": "pty", "command": "sh", "tty": true}`, "")
	pty, _, err := websocket.Dial(t.Context(), "ws://localhost/api/v1/sandboxes/a/processes/pty/attach", &websocket.DialOptions{HTTPClient: api})
	must(t, err)
	defer func() { _ = pty.CloseNow() }()
	b.must(t, cli, "run", "-d", "--name", "one", "-v", work+":/x", "-w", "/x", testImage, "sh", "-c", "echo up; exec sleep 600")
	short := b.begin(t, cli, "exec", "one", "sh", "-c", "touch short"+untilTold)
	long := b.begin(t, cli, "exec", "one", "sh", "-c", "echo begun; exec sleep 600")
	logs := b.begin(t, cli, "logs", "-f", "one")
	until(t, "the awaited commands run", func() bool { return there("exec")() && there("short")() })
	for line := ""; !strings.Contains(line, "begun"); {
		if line, err = streamed.ReadString('\n'); err != nil {
			t.Fatal(err)
		}
	}
	long.Log.Wait(t, "begun\n")
	logs.Log.Wait(t, "up\n")

	b.signal(t, syscall.SIGTERM)
	wantFailure(t, logs, "berm: the server is going down")
	for err == nil {
		_, _, err = pty.Read(t.Context())
	}
	if websocket.CloseStatus(err) != websocket.StatusGoingAway {
		t.Errorf("the terminal's connection ended with %v", err)
	}
	write(t, filepath.Join(work, "go"), "")
	if got := <-awaited; !strings.Contains(got, `"stdout":"done\n"`) {
		t.Errorf("the command in flight: %s", got)
	}
	wantFailure(t, short, "done") // what it exited with, the client asks for later, in vain
	if rest, err := io.ReadAll(streamed); err == nil || !strings.Contains(string(rest), `"event":"going_down"`) {
		t.Errorf("the streamed command: %q, %v", rest, err)
	}
	wantFailure(t, long, "berm: the server is going down")
	if err := b.Wait(); err != nil {
		t.Errorf("after SIGTERM: %v", err)
	}
	b.Log.Wait(t, "msg=requests_broken_off")

	// A second signal doesn't wait for anything.
	b.start(t)
	b.must(t, cli, "rm", "-f", "one")
	begun := bufio.NewReader(asked("POST", "/exec", `{"command": ["sleep", "600"]}`, "application/x-ndjson").Body)
	if _, err := begun.ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- b.Wait() }()
	until(t, "the second signal ends it", func() bool {
		select {
		case err = <-ended:
			return true
		default:
			_ = b.Process.Signal(syscall.SIGTERM) // SIGINT is ignored in the background of a shell
			return false
		}
	})
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGTERM {
		t.Errorf("after the second signal: %v", err)
	}
	b.removeAll(t)
}

// begin runs a Docker client beside the test.
func (b *clientFixture) begin(t *testing.T, cli string, args ...string) *program.Child {
	t.Helper()
	cmd := exec.Command(cli, args...)
	cmd.Env = append(os.Environ(), dockerEnv("unix://"+b.dir+"/docker.sock", b.dir)...)
	c := check.Value(program.Start(cmd, program.NewOutput()))(t)
	t.Cleanup(c.Kill)
	return c
}

// wantFailure waits for a client to fail, and say so.
func wantFailure(t *testing.T, c *program.Child, says string) {
	t.Helper()
	if err := c.Wait(); err == nil || !strings.Contains(c.Log.String(), says) {
		t.Errorf("%v: %v, %s", c.Args, err, c.Log)
	}
}
