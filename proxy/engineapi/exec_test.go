package engineapi

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/client"
	"github.com/docker/docker/pkg/stdcopy"

	"github.com/bermhq/berm/runtime/runtimetest/check"
)

// runExec runs a command through a client, to its end.
func runExec(t *testing.T, c *client.Client, id string, options container.ExecOptions, in []byte) (stdout, stderr []byte, code int, err error) {
	t.Helper()
	ctx := t.Context()
	options.AttachStdin, options.AttachStdout, options.AttachStderr = in != nil, true, true
	made, err := c.ContainerExecCreate(ctx, id, options)
	if err != nil {
		return nil, nil, 0, err
	}
	conn, err := c.ContainerExecAttach(ctx, made.ID, container.ExecAttachOptions{})
	if err != nil {
		return nil, nil, 0, err
	}
	defer conn.Close()
	stdout, stderr, err = talk(conn.Conn, conn.Reader, conn.CloseWrite, in)
	if err != nil {
		return nil, nil, 0, err
	}
	for {
		got, err := c.ContainerExecInspect(ctx, made.ID)
		if err != nil || !got.Running {
			return stdout, stderr, got.ExitCode, err
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// talk says in and hears both streams to their end.
func talk(w io.Writer, r io.Reader, closeWrite func() error, in []byte) ([]byte, []byte, error) {
	said := make(chan error, 1)
	go func() {
		_, err := w.Write(in)
		if err == nil {
			err = closeWrite()
		}
		said <- err
	}()
	var out, errs bytes.Buffer
	_, err := stdcopy.StdCopy(&out, &errs, r)
	if err == nil {
		err = <-said
	}
	return out.Bytes(), errs.Bytes(), err
}

// Of many streams at once, of execs and of attached containers, none loses a byte or an
// exit code.
func TestSoakStreams(t *testing.T) {
	const execs, attaches, workers, boxes = 460, 40, 24, 8
	d, direct := engineDoor(t, "")
	c := d.client("many")
	var ids []string
	for i := range boxes {
		ids = append(ids, d.made(direct, "many", fmt.Sprint("many-", i), container.Config{}))
	}
	payload := func(r *rand.Rand) []byte {
		b := make([]byte, r.IntN(128<<10))
		for i := range b {
			b[i] = byte(r.Uint32())
		}
		return b
	}
	check := func(what string, in, out, errs []byte, want, code int) {
		if !bytes.Equal(in, out) || !bytes.Equal(in, errs) || code != want {
			t.Errorf("%s: of %d bytes it said %d and %d, and ended with %d, not %d", what, len(in), len(out), len(errs), code, want)
		}
	}
	jobs := make(chan int)
	var wg sync.WaitGroup
	for range workers {
		wg.Go(func() {
			for i := range jobs {
				r := rand.New(rand.NewPCG(1, uint64(i))) //nolint:gosec // it's the same every time
				in, code := payload(r), r.IntN(120)
				cmd := []string{"sh", "-c", fmt.Sprintf("tee /proc/self/fd/2; exit %d", code)}
				if i%((execs+attaches)/attaches) == 0 {
					out, errs, got, err := runAttached(t.Context(), c, cmd, in)
					if err != nil {
						t.Errorf("attach %d: %v", i, err)
						continue
					}
					check(fmt.Sprint("attach ", i), in, out, errs, code, got)
					continue
				}
				out, errs, got, err := runExec(t, c, ids[i%boxes], container.ExecOptions{Cmd: cmd}, in)
				if err != nil {
					t.Errorf("exec %d: %v", i, err)
					continue
				}
				check(fmt.Sprint("exec ", i), in, out, errs, code, got)
			}
		})
	}
	start := time.Now()
	for i := range execs + attaches {
		jobs <- i
	}
	close(jobs)
	wg.Wait()
	t.Logf("%d streams, %d at once: %s", execs+attaches, workers, time.Since(start).Round(time.Millisecond))
}

// runAttached runs a container with its streams attached, as docker run does.
func runAttached(ctx context.Context, c *client.Client, cmd []string, in []byte) ([]byte, []byte, int, error) {
	made, err := c.ContainerCreate(ctx, &container.Config{Image: testImage, Cmd: cmd, OpenStdin: true, StdinOnce: true, AttachStdin: true, AttachStdout: true, AttachStderr: true}, nil, nil, nil, "")
	if err != nil {
		return nil, nil, 0, err
	}
	conn, err := c.ContainerAttach(ctx, made.ID, container.AttachOptions{Stream: true, Stdin: true, Stdout: true, Stderr: true})
	if err != nil {
		return nil, nil, 0, err
	}
	defer conn.Close()
	done, failed := c.ContainerWait(ctx, made.ID, container.WaitConditionNextExit)
	if err := c.ContainerStart(ctx, made.ID, container.StartOptions{}); err != nil {
		return nil, nil, 0, err
	}
	out, errs, err := talk(conn.Conn, conn.Reader, conn.CloseWrite, in)
	if err != nil {
		return nil, nil, 0, err
	}
	select {
	case r := <-done:
		return out, errs, int(r.StatusCode), c.ContainerRemove(ctx, made.ID, container.RemoveOptions{})
	case err := <-failed:
		return nil, nil, 0, err
	}
}

const execRules = basePolicy + `
env: {deny: ["SECRET*"], pin: {PINNED: "yes"}}
profiles:
  default: {engine_api: {users: non_root}}
  still: {engine_api: {exec: "off"}}
`

// What a command gets is judged as what its container got.
func TestExecIsJudged(t *testing.T) {
	d, direct := engineDoor(t, execRules)
	c := d.client("exec")
	id := d.made(direct, "exec", "exec-judged", container.Config{Env: []string{"GIVEN=1"}, User: "1000"})
	for name, tt := range map[string]struct {
		options container.ExecOptions
		out     string
		denied  string
	}{
		"plain":      {container.ExecOptions{Cmd: []string{"sh", "-c", "echo $GIVEN $PINNED; id -u; pwd"}}, "1 yes\n1000\n/\n", ""},
		"env":        {container.ExecOptions{Cmd: []string{"sh", "-c", "echo $A $GIVEN"}, Env: []string{"A=x=y", "GIVEN=2"}}, "x=y 2\n", ""},
		"last wins":  {container.ExecOptions{Cmd: []string{"sh", "-c", "echo $A"}, Env: []string{"A=1", "A=2"}}, "2\n", ""},
		"unset":      {container.ExecOptions{Cmd: []string{"sh", "-c", "echo ${GIVEN-unset}"}, Env: []string{"GIVEN"}}, "unset\n", ""},
		"pinned":     {container.ExecOptions{Cmd: []string{"sh", "-c", "echo $PINNED"}, Env: []string{"PINNED=no"}}, "yes\n", ""},
		"pin unset":  {container.ExecOptions{Cmd: []string{"sh", "-c", "echo $PINNED"}, Env: []string{"PINNED"}}, "yes\n", ""},
		"place":      {container.ExecOptions{Cmd: []string{"pwd"}, WorkingDir: "/tmp"}, "/tmp\n", ""},
		"keys":       {container.ExecOptions{Cmd: []string{"echo"}, DetachKeys: "ctrl-p,ctrl-q"}, "\n", ""},
		"user":       {container.ExecOptions{Cmd: []string{"id", "-u"}, User: "1001:1001"}, "1001\n", ""},
		"denied env": {container.ExecOptions{Cmd: []string{"true"}, Env: []string{"SECRET_A=1"}}, "", "env.deny"},
		"privileged": {container.ExecOptions{Cmd: []string{"true"}, Privileged: true}, "", "containers.privileged"},
		"root":       {container.ExecOptions{Cmd: []string{"true"}, User: "0"}, "", "containers.user"},
		"root, 00":   {container.ExecOptions{Cmd: []string{"true"}, User: "00"}, "", "containers.user"},
		"root, name": {container.ExecOptions{Cmd: []string{"true"}, User: "root"}, "", "containers.user"},
	} {
		t.Run(name, func(t *testing.T) {
			out, errs, _, err := runExec(t, c, id, tt.options, nil)
			if tt.denied != "" {
				if err == nil || !strings.Contains(err.Error(), "denied by policy") || !strings.Contains(err.Error(), tt.denied) {
					t.Errorf("%v, want rule %s", err, tt.denied)
				}
				return
			}
			if err != nil || string(out) != tt.out {
				t.Errorf("it said %q, %q, %v, want %q", out, errs, err, tt.out)
			}
		})
	}
	// In mode audit what would be denied is let through, and written down.
	audit := newClient(t, d.listen(Caller{Name: "watched", Tenant: "exec", Audit: true}))
	options := container.ExecOptions{Cmd: []string{"sh", "-c", "echo $SECRET_A ${GIVEN-unset}; id -u"}, Env: []string{"SECRET_A=x", "GIVEN"}, User: "0"}
	if out, errs, _, err := runExec(t, audit, id, options, nil); err != nil || string(out) != "x unset\n0\n" {
		t.Errorf("it said %q, %q, %v", out, errs, err)
	}
	if log := readFile(t, d.audit); !bytes.Contains(log, []byte(VerdictWouldDeny)) || !bytes.Contains(log, []byte("env.deny")) || !bytes.Contains(log, []byte("containers.user")) {
		t.Errorf("the audit log: %s", log)
	}
	// An exec's variables aren't shown, by no version.
	made := check.Value(c.ContainerExecCreate(t.Context(), id, container.ExecOptions{Cmd: []string{"true"}, Env: []string{"IN_EXEC=hidden"}}))(t)
	for _, version := range []string{"", "/v1.24", "/v1.41"} {
		status, body := say(t, "unix://"+d.dir+"/exec.sock", http.MethodGet, version+"/exec/"+made.ID+"/json", "")
		if status != 200 || strings.Contains(body, "hidden") || !strings.Contains(body, `"ProcessConfig"`) {
			t.Errorf("%q: %d %s", version, status, body)
		}
	}
}

// Bodies that no client sends are refused, those of every client that there is aren't.
func TestExecBodies(t *testing.T) {
	d, s, address := scripted(t, "1.41", "")
	s.ownContainerOf(d, "mine", mineID, "c")
	const id, ex = "c", "e3e3e3e3e3e3e3e3e3e3e3e3e3e3e3e3e3e3e3e3e3e3e3e3e3e3e3e3e3e3e3e3"
	s.answers["POST /containers/"+mineID+"/exec"], s.answers["GET /exec/"+ex+"/json"], s.answers["POST /exec/"+ex+"/start"] = `201 {"Id":"`+ex+`"}`, `{"ContainerID":"`+mineID+`"}`, ""
	for name, tt := range map[string]struct {
		body string
		want int
	}{
		"CLI 20.10":    {`{"User":"","Privileged":false,"Tty":false,"AttachStdin":false,"AttachStderr":true,"AttachStdout":true,"Detach":false,"DetachKeys":"","Env":null,"WorkingDir":"","Cmd":["true"]}`, 201},
		"CLI 28":       {`{"User":"","Privileged":false,"Tty":true,"ConsoleSize":[24,80],"AttachStdin":true,"AttachStderr":true,"AttachStdout":true,"DetachKeys":"","Env":null,"WorkingDir":"","Cmd":["true"]}`, 201},
		"Python":       {`{"Container":"` + id + `","User":"","Privileged":false,"Tty":false,"AttachStdin":false,"AttachStdout":true,"AttachStderr":true,"Cmd":["true"],"Env":null}`, 201},
		"Python, keys": {`{"Container":"` + id + `","Cmd":["true"],"detachKeys":"ctrl-a"}`, 201},
		"unknown":      {`{"Cmd":["true"],"HostConfig":{}}`, 400},
		"no command":   {`{"Cmd":[]}`, 400},
		"nothing":      {``, 400},
		"relative":     {`{"Cmd":["true"],"WorkingDir":"../x"}`, 400},
		"a descriptor": {`{"Cmd":["true"],"WorkingDir":"/x/../proc/self/fd/7"}`, 400},
		"keys":         {`{"Cmd":["true"],"DetachKeys":"a\nb"}`, 400},
		"no text":      {`{"Cmd":"true"}`, 400},
		"too long":     {`{"Cmd":["` + strings.Repeat("x", 1<<20) + `"]}`, 413},
		"NUL in env":   {`{"Cmd":["true"],"Env":["A=\u0000"]}`, 400},
		"no env name":  {`{"Cmd":["true"],"Env":["=x"]}`, 400},
	} {
		t.Run(name, func(t *testing.T) {
			status, body := say(t, address, http.MethodPost, "/v1.41/containers/"+id+"/exec", tt.body)
			if status != tt.want && !(tt.want == 400 && status == 415) {
				t.Errorf("%d %s, want %d", status, body, tt.want)
			}
		})
	}
	for name, body := range map[string]string{
		"unknown": `{"Detach":true,"Env":["A=1"]}`, "another case": `{"detach":true}`, "twice": `{"Detach":true,"Detach":false}`, "nothing": "",
	} {
		if status, answer := say(t, address, http.MethodPost, "/v1.41/exec/"+ex+"/start", body); status/100 != 4 || len(s.said("POST /exec")) > 0 {
			t.Errorf("start, %s: %d %s", name, status, answer)
		}
	}
	if status, answer := say(t, address, http.MethodPost, "/v1.41/exec/"+ex+"/start", `{"Detach":true,"Tty":false,"ConsoleSize":[1,2]}`); status != 200 {
		t.Errorf("start: %d %s", status, answer)
	}
}
