package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
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
	{"stop", processStop("default")},
	{"stop by the engine", processStop("plain")},
	{"spec", processSpec},
	{"state", processState},
	{"several, and conflicts", processConflict},
	{"replace", processReplace},
	{"bytes", processBytes},
	{"lines", processLines},
	{"replay", processReplay},
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

func processConflict(r *boxRow) {
	r.start("one", "cat; exit 1")
	r.start("two", "cat; exit 2")
	_, err := r.c.StartProcess(r.ctx, r.key, apitype.ProcessRequest{ProcessID: "one", Command: "touch", Args: []string{"/tmp/ran"}})
	r.wantError(err, http.StatusConflict, "process_conflict")
	all, err := r.c.Processes(r.ctx, r.key)
	if err != nil || len(all) != 2 || all[0].ProcessID != "one" || all[1].ProcessID != "two" || all[0].State != "running" || exists(r.inside("/tmp/ran")) {
		r.Errorf("%+v, %v", all, err)
	}
	_, err = r.c.Process(r.ctx, r.key, "three")
	r.wantError(err, http.StatusNotFound, "process_not_found")
	if p, err := r.c.StopProcess(r.ctx, r.key, "one"); err != nil || p.State != "exited" {
		r.Errorf("%+v, %v", p, err)
	}
	r.start("one", "exit 3") // the name of one that has ended is free
	if p := r.wait("one"); *p.ExitCode != 3 {
		r.Errorf("%+v", p)
	}
	if p := r.process("two"); p.State != "running" {
		r.Errorf("%+v", p)
	}
}

func processReplace(r *boxRow) {
	r.start("p", "trap 'echo old >> /tmp/order; exit' TERM; touch /tmp/on; while :; do sleep 0.1; done")
	r.await("it to run", func() bool { return exists(r.inside("/tmp/on")) })
	p, err := r.c.StartProcess(r.ctx, r.key, apitype.ProcessRequest{
		ProcessID: "p", Command: "sh", Args: []string{"-c", "echo new >> /tmp/order; cat"}, Replace: true,
	})
	if err != nil || p.State != "running" {
		r.Fatalf("%+v, %v", p, err)
	}
	r.await("the new one to run", func() bool { return strings.Contains(r.sh("cat /tmp/order"), "new") })
	if got := r.sh("cat /tmp/order; ps -o args"); !strings.HasPrefix(got, "old\nnew\n") || strings.Contains(got, "sleep 0.1") {
		r.Errorf("%s", got)
	}
}

// A stop closes the input, sends TERM to the group, and kills what is left after 5 s.
func processStop(profile string) func(r *boxRow) {
	return func(r *boxRow) { stopsProcesses(r, profile) }
}

func stopsProcesses(r *boxRow, profile string) {
	mark := map[string]string{"BOX_MARK": r.key}
	start := func(id, script string) {
		r.Helper()
		if _, err := r.c.StartProcess(r.ctx, r.key, apitype.ProcessRequest{ProcessID: id, Command: "sh", Args: []string{"-c", script}, Env: mark}); err != nil {
			r.Fatal(err)
		}
		r.await("it to run", func() bool { return exists(r.inside("/tmp/" + id)) })
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
	r.create(apitype.SandboxRequest{Profile: &profile})
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

func processLines(r *boxRow) {
	r.start("p", "while read line; do echo \"out $line\"; echo \"err $line\" >&2; sleep 0.1; done; exit 8")
	ws := r.attach(r.boxSandbox, "p", client.AttachOptions{Lines: true})
	got := map[string][]string{}
	for i := range 3 {
		ws.send(fmt.Sprint("line ", i))
		for range 2 {
			l := ws.line()
			got[l.Stream] = append(got[l.Stream], l.Line)
		}
	}
	for stream, word := range map[string]string{"stdout": "out", "stderr": "err"} {
		if want := []string{word + " line 0", word + " line 1", word + " line 2"}; !slices.Equal(got[stream], want) {
			r.Errorf("%s: %q", stream, got[stream])
		}
	}
	go func() { _, _ = r.c.SignalProcess(r.ctx, r.key, "p", 9) }()
	if end := ws.end(); end.Signal != 9 || end.ExitCode == nil || *end.ExitCode != 137 {
		r.Errorf("%+v", end)
	}
}

// What is printed while nobody is attached comes later, as far as it is kept.
func processReplay(r *boxRow) {
	r.start("p", "i=0; while test $i -lt 20; do echo $i; i=$((i+1)); done; read line; yes 0123456789abcde | head -n 65536; echo last; read line")
	r.await("its output", func() bool { return r.process("p").NextSeq == 50 })
	var seqs []int64
	ws := r.attach(r.boxSandbox, "p", client.AttachOptions{Lines: true})
	for i := range 20 {
		l := ws.line()
		if seqs = append(seqs, l.Seq); l.Line != fmt.Sprint(i) {
			r.Fatalf("%d: %+v", i, l)
		}
	}
	if seqs[0] != 2 || seqs[19] != 50 {
		r.Errorf("sequence numbers %v", seqs)
	}
	_ = ws.Close(websocket.StatusNormalClosure, "")
	r.await("the place to be free", func() bool { return !r.process("p").Attached })
	ws = r.attach(r.boxSandbox, "p", client.AttachOptions{Lines: true, After: &seqs[14]})
	for i := 15; i < 20; i++ {
		if l := ws.line(); l.Line != fmt.Sprint(i) || l.Seq != seqs[i] {
			r.Errorf("after %d: %+v", seqs[14], l)
		}
	}
	ws.send("much")
	_ = ws.Close(websocket.StatusNormalClosure, "")

	// 1 MiB while nobody reads: the process goes on, and the ring keeps the end of it.
	const all = 50 + 65536*16 + 5
	r.await("its output", func() bool { return r.process("p").NextSeq == all })
	p := r.process("p")
	if kept := p.NextSeq - p.FirstSeq; kept < 64<<10 || kept > 1<<19 {
		r.Errorf("kept are %d bytes", kept)
	}
	_, err := r.dial("p", client.AttachOptions{Lines: true, After: &seqs[19]})
	if gone := r.wantError(err, http.StatusGone, "output_gone"); gone.FirstSeq == nil || *gone.FirstSeq != p.FirstSeq {
		r.Errorf("%+v", gone)
	}
	ws = r.attach(r.boxSandbox, "p", client.AttachOptions{Lines: true})
	for l := ws.line(); l.Line != "last"; l = ws.line() {
		if l.Seq <= p.FirstSeq || !strings.HasSuffix("0123456789abcde", l.Line) {
			r.Fatalf("%+v", l)
		}
	}
}
