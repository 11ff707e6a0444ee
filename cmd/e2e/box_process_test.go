package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/coder/websocket"

	"github.com/bermhq/berm/proxy/apitype"
	"github.com/bermhq/berm/proxy/client"
)

// Processes that run for long.
var boxProcesses = []boxCase{
	{"stop", processStop},
	{"spec", processSpec},
	{"state", processState},
	{"bytes", processBytes},
}

// start starts a process of a shell.
func (x boxSandbox) start(id, script string) *apitype.Process {
	x.t.Helper()
	p, err := x.c.StartProcess(x.ctx, x.key, apitype.ProcessRequest{ProcessID: id, Command: "sh", Args: []string{"-c", script}, Sandbox: &apitype.SandboxRequest{}})
	if err != nil {
		x.t.Fatalf("start %s: %v", script, err)
	}
	return p
}

func (x boxSandbox) process(id string) *apitype.Process {
	x.t.Helper()
	p, err := x.c.Process(x.ctx, x.key, id)
	if err != nil {
		x.t.Fatalf("process %s: %v", id, err)
	}
	return p
}

func (x boxSandbox) wait(id string) *apitype.Process {
	x.t.Helper()
	p, err := x.c.WaitProcess(x.ctx, x.key, id, 2*time.Minute)
	if err != nil || p.State != "exited" {
		x.t.Fatalf("wait for %s: %+v, %v", id, p, err)
	}
	return p
}

func processSpec(r *boxRow) {
	dir := r.makeDir(r, "roots", "root", r.key)
	p, err := r.c.StartProcess(r.ctx, r.key, apitype.ProcessRequest{
		Command: "sh", Args: []string{"-c", `echo "$0 $1 $WHOSE $PWD" > /workspace/seen`, "a b", "c"}, Env: map[string]string{"WHOSE": "mine"},
		Cwd: "/workspace/new", Sandbox: &apitype.SandboxRequest{HostPath: &dir},
	})
	if err != nil || p.ProcessID != "default" || !slices.Equal(p.Command[:2], []string{"sh", "-c"}) || p.SessionID != r.get().SessionID {
		r.Fatalf("%+v, %v", p, err)
	}
	if p = r.wait("default"); p.ExitCode == nil || *p.ExitCode != 0 || readString(r.T, dir+"/seen") != "a b c mine /workspace/new" {
		r.Errorf("%+v", p)
	}
	for _, body := range []string{`{}`, `{"command": ""}`, `{"command": ["sh"]}`, `{"command": "true", "process_id": "a/b"}`, `{"command": "true", "process_id": "-"}`, `{"command": "true", "env": {"1": "x"}}`} {
		if status, answer := r.raw(http.MethodPost, r.key+"/processes", body); status != http.StatusUnprocessableEntity {
			r.Errorf("%s: %d %v", body, status, answer)
		}
	}
}

func processState(r *boxRow) {
	p := r.start("p", "read line; head -c 100000 /dev/zero | tr '\\0' y >&2; echo end >&2; exit 7")
	if p.State != "running" || p.ExitCode != nil || p.EndedAt != nil || p.StartedAt.IsZero() || p.Stderr != "" {
		r.Errorf("%+v", p)
	}
	if status := r.status(r.c); status.RunningProcesses == 0 {
		r.Errorf("%+v", status)
	}
	ws := r.attach(r.boxSandbox, "p", client.AttachOptions{Lines: true})
	ws.send("go on")
	ws.end()
	r.wait("p")
	p = r.process("p")
	if p.State != "exited" || p.ExitCode == nil || *p.ExitCode != 7 || p.EndedAt == nil || p.EndedAt.Before(p.StartedAt) {
		r.Errorf("%+v", p)
	}
	if want := strings.Repeat("y", 64<<10-4) + "end\n"; p.Stderr != want {
		r.Errorf("%d bytes of stderr, want the last %d", len(p.Stderr), len(want))
	}
	r.start("killed", "kill -9 $$")
	if p := r.wait("killed"); p.Signal != 9 || p.ExitCode == nil || *p.ExitCode != 137 {
		r.Errorf("%+v", p)
	}
}

// A stop closes the input, sends TERM to the group, and kills what is left after 5 s.
func processStop(r *boxRow) {
	mark := map[string]string{"BOX_MARK": r.key}
	start := func(id, script string) {
		r.Helper()
		if _, err := r.c.StartProcess(r.ctx, r.key, apitype.ProcessRequest{ProcessID: id, Command: "sh", Args: []string{"-c", script}, Env: mark}); err != nil {
			r.Fatal(err)
		}
		until(r, "it to run", func() bool { return exists(r.inside("/tmp/" + id)) })
	}
	stop := func(id string) *apitype.Process {
		r.Helper()
		p, err := r.c.StopProcess(r.ctx, r.key, id)
		if err != nil || p.State != "exited" {
			r.Fatalf("%+v, %v", p, err)
		}
		if got := r.marked("BOX_MARK", r.key); len(got) > 0 {
			r.Errorf("of %s are left: %v", id, got)
		}
		return p
	}
	r.create(apitype.SandboxRequest{})
	// The input is closed first: it is over before the signal, or with it.
	start("input", "trap 'echo signal >> /tmp/how' TERM; touch /tmp/input; cat; echo closed >> /tmp/how; exit 4")
	if p := stop("input"); p.ExitCode == nil || *p.ExitCode != 4 || !strings.Contains(r.sh("cat /tmp/how"), "closed") {
		r.Errorf("%+v: %s", p, r.sh("cat /tmp/how"))
	}
	// All of the group get the signal.
	start("group", `trap 'wait; exit 6' TERM; sh -c "trap 'touch /tmp/child; exit' TERM; touch /tmp/group; while :; do sleep 0.1; done" & while :; do sleep 0.1; done`)
	if p := stop("group"); p.ExitCode == nil || *p.ExitCode != 6 || !exists(r.inside("/tmp/child")) {
		r.Errorf("%+v", p)
	}
	// Who doesn't mind it is killed, with all descendants, but not before.
	start("deaf", `trap '' TERM; (setsid sleep 301 &); sleep 302 & touch /tmp/deaf; while :; do sleep 0.1; done`)
	begun := time.Now()
	if p := stop("deaf"); p.Signal != 9 {
		r.Errorf("%+v", p)
	}
	if took := time.Since(begun); took < 5*time.Second {
		r.Errorf("it was killed after %s", took)
	}
	if got := r.sh("ps -o args"); strings.Contains(got, "sleep 30") {
		r.Errorf("still there:\n%s", got)
	}
	stop("deaf") // once more is no error
}

// attached is a WebSocket to a process.
type attached struct {
	*websocket.Conn
	x     boxSandbox
	pings atomic.Int32
}

func (r *boxRow) attach(x boxSandbox, id string, opts client.AttachOptions) *attached {
	r.Helper()
	ws, err := x.dial(id, opts)
	if err != nil {
		r.Fatalf("attach to %s: %v", id, err)
	}
	r.Cleanup(func() { _ = ws.CloseNow() })
	return ws
}

func (x boxSandbox) dial(id string, opts client.AttachOptions) (*attached, error) {
	to := x.c.AttachProcess(x.key, id, opts)
	a := &attached{x: x}
	ws, resp, err := websocket.Dial(x.ctx, to.URL, &websocket.DialOptions{HTTPHeader: to.Header, OnPingReceived: func(context.Context, []byte) bool {
		a.pings.Add(1)
		return true
	}})
	if err != nil && resp != nil {
		refused := &client.Error{Status: resp.StatusCode}
		if json.NewDecoder(resp.Body).Decode(&refused.Problem) == nil {
			refused.Code = refused.Problem.Code
		}
		return nil, refused
	}
	if err != nil {
		return nil, err
	}
	ws.SetReadLimit(1 << 20)
	a.Conn = ws
	return a, nil
}

func (a *attached) send(text string) {
	a.x.t.Helper()
	if err := a.Write(a.x.ctx, websocket.MessageText, []byte(text)); err != nil {
		a.x.t.Error(err)
	}
}

// line reads a message in lines.
func (a *attached) line() (l apitype.AttachLine) {
	a.x.t.Helper()
	kind, data, err := a.Read(a.x.ctx)
	if err != nil || kind != websocket.MessageText || json.Unmarshal(data, &l) != nil {
		a.x.t.Fatalf("read %q, %v", data, err)
	}
	return l
}

// end reads to the end, and gives what the close frame says.
func (a *attached) end() (end apitype.AttachEnd) {
	a.x.t.Helper()
	for {
		if _, _, err := a.Read(a.x.ctx); err != nil {
			var closed websocket.CloseError
			if !errors.As(err, &closed) || closed.Code != websocket.StatusNormalClosure || json.Unmarshal([]byte(closed.Reason), &end) != nil || end.Status == "" {
				a.x.t.Error(err)
			}
			return end
		}
	}
}

func processBytes(r *boxRow) {
	r.start("p", "echo out; sleep 0.2; echo err >&2; read line; echo got $line; cat; exit 9")
	ws := r.attach(r.boxSandbox, "p", client.AttachOptions{})
	var start apitype.AttachStart
	if kind, data, err := ws.Read(r.ctx); err != nil || kind != websocket.MessageText || json.Unmarshal(data, &start) != nil || start.Seq != 0 {
		r.Fatalf("the first message: %q, %v", data, err)
	}
	for _, input := range []string{"some", "thing\nraw\x00\xff"} {
		if err := ws.Write(r.ctx, websocket.MessageBinary, []byte(input)); err != nil {
			r.Fatal(err)
		}
	}
	got := map[byte]string{}
	for got[1] != "out\ngot something\nraw\x00\xff" || got[2] != "err\n" {
		kind, data, err := ws.Read(r.ctx)
		if err != nil || kind != websocket.MessageBinary || len(data) < 2 {
			r.Fatalf("so far %q; read %q, %v", got, data, err)
		}
		got[data[0]] += string(data[1:])
	}
	ws.send(`{"close_stdin": true}`)
	if end := ws.end(); end.ExitCode == nil || *end.ExitCode != 9 || end.Status != "exited" {
		r.Errorf("%+v", end)
	}
}
