package engineapi

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/bermhq/berm/proxy/engineapi/upstream"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/client"
	"github.com/docker/docker/pkg/stdcopy"
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
}

// In mode audit what would be denied is let through, and written down.
func TestExecInModeAudit(t *testing.T) {
	d, direct := engineDoor(t, execRules)
	c := newClient(t, d.listen(Caller{Name: "watched", Tenant: "watched", Audit: true}))
	id := d.made(direct, "watched", "exec-watched", container.Config{Env: []string{"GIVEN=1"}})
	options := container.ExecOptions{Cmd: []string{"sh", "-c", "echo $SECRET_A ${GIVEN-unset}; id -u"}, Env: []string{"SECRET_A=x", "GIVEN"}, User: "0"}
	if out, errs, _, err := runExec(t, c, id, options, nil); err != nil || string(out) != "x unset\n0\n" {
		t.Errorf("it said %q, %q, %v", out, errs, err)
	}
	if log := readFile(t, d.audit); !bytes.Contains(log, []byte(VerdictWouldDeny)) || !bytes.Contains(log, []byte("env.deny")) || !bytes.Contains(log, []byte("containers.user")) {
		t.Errorf("the audit log: %s", log)
	}
}

// Bodies that no client sends are refused, those of every client that there is aren't.
func TestExecBodies(t *testing.T) {
	d, direct := engineDoor(t, "")
	address := d.listen(Caller{Name: "bodies", Tenant: "bodies"})
	id := d.made(direct, "bodies", "exec-bodies", container.Config{})
	for name, tt := range map[string]struct {
		body string
		want int
	}{
		"CLI 20.10":     {`{"User":"","Privileged":false,"Tty":false,"AttachStdin":false,"AttachStderr":true,"AttachStdout":true,"Detach":false,"DetachKeys":"","Env":null,"WorkingDir":"","Cmd":["true"]}`, 201},
		"CLI 28":        {`{"User":"","Privileged":false,"Tty":true,"ConsoleSize":[24,80],"AttachStdin":true,"AttachStderr":true,"AttachStdout":true,"DetachKeys":"","Env":null,"WorkingDir":"","Cmd":["true"]}`, 201},
		"Python":        {`{"Container":"` + id + `","User":"","Privileged":false,"Tty":false,"AttachStdin":false,"AttachStdout":true,"AttachStderr":true,"Cmd":["true"],"Env":null}`, 201},
		"Python, keys":  {`{"Container":"` + id + `","Cmd":["true"],"detachKeys":"ctrl-a"}`, 201},
		"another case":  {`{"cmd":["true"]}`, 400},
		"folding":       {`{"Cmd":["true"],"Privi\u200bleged":true}`, 400},
		"long s":        {`{"Cmd":["true"],"U` + "\u017f" + `er":"0"}`, 400},
		"twice":         {`{"Cmd":["true"],"User":"1","User":"0"}`, 400},
		"escaped twice": {`{"Cmd":["true"],"User":"1","Use\u0072":"0"}`, 400},
		"trailing":      {`{"Cmd":["true"]}{"Privileged":true}`, 400},
		"unknown":       {`{"Cmd":["true"],"HostConfig":{}}`, 400},
		"no command":    {`{"Cmd":[]}`, 400},
		"null":          {`null`, 400},
		"nothing":       {``, 400},
		"relative":      {`{"Cmd":["true"],"WorkingDir":"../x"}`, 400},
		"a descriptor":  {`{"Cmd":["true"],"WorkingDir":"/x/../proc/self/fd/7"}`, 400},
		"keys":          {`{"Cmd":["true"],"DetachKeys":"a\nb"}`, 400},
		"no text":       {`{"Cmd":"true"}`, 400},
		"too long":      {`{"Cmd":["` + strings.Repeat("x", 1<<20) + `"]}`, 413},
		"NUL in env":    {`{"Cmd":["true"],"Env":["A=\u0000"]}`, 400},
		"no env name":   {`{"Cmd":["true"],"Env":["=x"]}`, 400},
	} {
		t.Run(name, func(t *testing.T) {
			status, body := say(t, address, http.MethodPost, "/v1.41/containers/"+id+"/exec", tt.body)
			if status != tt.want && !(tt.want == 400 && status == 415) {
				t.Errorf("%d %s, want %d", status, body, tt.want)
			}
		})
	}
	status, body := say(t, address, http.MethodPost, "/v1.41/containers/"+id+"/exec", `{"Cmd":["true"],"AttachStdout":true}`)
	var made struct{ ID string }
	if err := json.Unmarshal([]byte(body), &made); err != nil || status != 201 {
		t.Fatal(status, body, err)
	}
	for name, body := range map[string]string{
		"unknown": `{"Detach":true,"Env":["A=1"]}`, "another case": `{"detach":true}`, "twice": `{"Detach":true,"Detach":false}`, "nothing": "",
	} {
		if status, answer := say(t, address, http.MethodPost, "/v1.41/exec/"+made.ID+"/start", body); status/100 != 4 {
			t.Errorf("start, %s: %d %s", name, status, answer)
		}
	}
	// A body in chunks, and input right behind it.
	conn := must((&net.Dialer{}).DialContext(t.Context(), "unix", strings.TrimPrefix(address, "unix://")))(t)
	defer func() { _ = conn.Close() }()
	_, body = say(t, address, http.MethodPost, "/v1.41/containers/"+id+"/exec", `{"Cmd":["cat"],"AttachStdin":true,"AttachStdout":true}`)
	var cat struct{ ID string }
	if err := json.Unmarshal([]byte(body), &cat); err != nil {
		t.Fatal(body, err)
	}
	must(io.WriteString(conn, "POST /v1.41/exec/"+cat.ID+"/start HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nContent-Type: application/json\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n\r\n2\r\n{}\r\n0\r\n\r\nearly"))(t)
	br := bufio.NewReader(conn)
	if resp, err := http.ReadResponse(br, nil); err != nil || resp.StatusCode != http.StatusSwitchingProtocols {
		t.Fatal(resp, err)
	}
	noError(t, conn.(upstream.Half).CloseWrite())
	if got := readStream(t, br); got != "early" {
		t.Errorf("a command heard %q", got)
	}
	if status, answer := say(t, address, http.MethodPost, "/v1.41/exec/"+made.ID+"/start", `{"Detach":true,"Tty":false,"ConsoleSize":[1,2]}`); status != 200 {
		t.Errorf("start: %d %s", status, answer)
	}
}

// Nothing of an exec is shown that the policy would hide.
func TestExecShowsNoEnv(t *testing.T) {
	d, direct := engineDoor(t, "")
	address := d.listen(Caller{Name: "shown", Tenant: "shown"})
	c := newClient(t, address)
	id := d.made(direct, "shown", "exec-shown", container.Config{Env: []string{"IN_CONTAINER=hidden-1"}})
	made := must(c.ContainerExecCreate(t.Context(), id, container.ExecOptions{Cmd: []string{"true"}, Env: []string{"IN_EXEC=hidden-2"}}))(t)
	for _, version := range []string{"", "/v1.24", "/v1.41"} {
		status, body := say(t, address, http.MethodGet, version+"/exec/"+made.ID+"/json", "")
		if status != 200 || strings.Contains(body, "hidden") || !strings.Contains(body, `"ProcessConfig"`) {
			t.Errorf("%q: %d %s", version, status, body)
		}
	}
}

// A profile without exec has none, made before or by whomever.
func TestExecSwitchedOff(t *testing.T) {
	d, direct := engineDoor(t, execRules)
	id := d.made(direct, "off", "exec-off", container.Config{})
	made := must(d.client("off").ContainerExecCreate(t.Context(), id, container.ExecOptions{Cmd: []string{"touch", "/ran"}}))(t)
	still := newClient(t, d.listen(Caller{Name: "still", Tenant: "off", Profile: "still"}))
	_, err := still.ContainerExecCreate(t.Context(), id, container.ExecOptions{Cmd: []string{"true"}})
	if err == nil || !strings.Contains(err.Error(), "engine_api.exec") {
		t.Errorf("create: %v", err)
	}
	if err := still.ContainerExecStart(t.Context(), made.ID, container.ExecStartOptions{Detach: true}); err == nil || !strings.Contains(err.Error(), "engine_api.exec") {
		t.Errorf("start: %v", err)
	}
	if conn, err := still.ContainerExecAttach(t.Context(), made.ID, container.ExecAttachOptions{}); err == nil {
		conn.Close()
		t.Error("it could be attached to")
	}
	changes, err := direct.ContainerDiff(t.Context(), id)
	if err != nil || slices.ContainsFunc(changes, func(c container.FilesystemChange) bool { return c.Path == "/ran" }) {
		t.Errorf("it ran: %v, %v", changes, err)
	}
}

// What is somebody else's isn't there, in the words for what isn't.
func TestForeignStreams(t *testing.T) {
	d, direct := engineDoor(t, "")
	foreign := d.made(direct, "theirs", "streams-theirs", container.Config{})
	theirs := must(d.client("theirs").ContainerExecCreate(t.Context(), foreign, container.ExecOptions{Cmd: []string{"true"}}))(t)
	address := d.listen(Caller{Name: "mine", Tenant: "mine"})
	missing := strings.Repeat("0123456789abcdef", 4)
	for _, tt := range []struct{ method, path, body string }{
		{"POST", "/containers/%s/exec", `{"Cmd":["true"]}`},
		{"POST", "/containers/%s/attach?stream=1&stdout=1", ""},
		{"GET", "/containers/%s/attach/ws?stream=1&stdout=1", ""},
		{"GET", "/containers/%s/logs?stdout=1", ""},
		{"GET", "/containers/%s/stats?stream=0", ""},
		{"GET", "/containers/%s/top", ""},
		{"GET", "/containers/%s/changes", ""},
		{"POST", "/containers/%s/wait", ""},
		{"POST", "/containers/%s/resize?h=1&w=1", ""},
		{"POST", "/exec/%s/start", `{"Detach":true}`},
		{"POST", "/exec/%s/start", `{"Detach":false}`},
		{"POST", "/exec/%s/resize?h=1&w=1", ""},
		{"GET", "/exec/%s/json", ""},
		{"GET", "/containers/%s/json", ""},
		{"GET", "/containers/%s/export", ""},
		{"GET", "/containers/%s/archive?path=/etc/passwd", ""},
		{"HEAD", "/containers/%s/archive?path=/etc", ""},
		{"PUT", "/containers/%s/archive?path=/", strings.Repeat("\x00", 1024)},
		{"POST", "/containers/%s/stop", ""},
		{"POST", "/containers/%s/kill", ""},
		{"POST", "/containers/%s/pause", ""},
		{"POST", "/containers/%s/unpause", ""},
		{"POST", "/containers/%s/rename?name=stolen", ""},
		{"DELETE", "/containers/%s?force=1", ""},
	} {
		refs := []string{foreign, foreign[:12], foreign[:3], "streams-theirs"}
		if strings.HasPrefix(tt.path, "/exec") {
			refs = []string{theirs.ID, theirs.ID[:12]}
		}
		ask := func(address, ref string) string {
			req := must(http.NewRequestWithContext(t.Context(), tt.method, "http://localhost/v1.41"+fmt.Sprintf(tt.path, ref), strings.NewReader(tt.body)))(t)
			if tt.body != "" {
				req.Header.Set("Content-Type", "application/json")
			}
			if strings.Contains(tt.path, "/ws") {
				for name, value := range map[string]string{"Connection": "Upgrade", "Upgrade": "websocket", "Sec-Websocket-Version": "13", "Sec-Websocket-Key": "MDEyMzQ1Njc4OWFiY2RlZg=="} {
					req.Header.Set(name, value)
				}
			}
			resp := must(raw(address).Do(req))(t)
			defer func() { _ = resp.Body.Close() }()
			b := must(io.ReadAll(resp.Body))(t)
			var told struct{ Message string }
			if json.Unmarshal(b, &told) != nil {
				told.Message = string(b) // as the engine does before it would take a connection over
			}
			return fmt.Sprintf("%d %s", resp.StatusCode, strings.ReplaceAll(strings.TrimSpace(told.Message), ref, "REF"))
		}
		want := ask(d.host, missing)
		if !strings.Contains(tt.path, "/ws") && !strings.HasPrefix(want, "404 ") {
			t.Errorf("%s: of what isn't there the engine says %s", tt.path, want)
		}
		// Where it is known for a verb, the engine says which.
		if got := ask(address, missing); got != want && !strings.Contains(tt.path, "/ws") && !strings.HasSuffix(want, ": "+strings.TrimPrefix(got, "404 ")) {
			t.Errorf("%s: of what isn't there the door says %s, the engine %s", tt.path, got, want)
		}
		for _, ref := range refs {
			if got := ask(address, ref); got != ask(address, missing[:len(ref)]) || !strings.HasPrefix(got, "404 ") {
				t.Errorf("%s of %s: %s", tt.path, ref, got)
			}
		}
	}
	if ct := inspect(t, direct, foreign); !ct.State.Running || ct.State.Paused {
		t.Errorf("the foreign container was reached: %+v", ct.State)
	}
}
