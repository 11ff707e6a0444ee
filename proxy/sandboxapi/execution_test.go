package sandboxapi_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/coder/websocket"
	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/proxy/apitype"
	rt "github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/runtimetest/pipes"
)

const processesPath = "/api/v1/sandboxes/k/processes"

func TestStartExecTranslates(t *testing.T) {
	d := newDoor(t)
	for name, tt := range map[string]struct {
		body string
		want lifecycle.StartRequest
	}{
		"least": {`{"command":["true"]}`, lifecycle.StartRequest{ExecRequest: lifecycle.ExecRequest{Command: []string{"true"}}}},
		"most": {`{"command":"cat","env":{"A":"b"},"cwd":"/w","timeout":9,"stdin":"in","stdin_open":true,"tty":true,"rows":1,"cols":4096,
			"keep_bytes":4194304,"exec_id":"a.b:c","serialize":true,"raw":true,"sandbox":{}}`,
			lifecycle.StartRequest{
				ExecRequest: lifecycle.ExecRequest{
					Command: []string{"/bin/sh", "-c", "cat"}, Env: map[string]string{"A": "b"}, WorkingDir: "/w", Timeout: ptr[int64](9),
					Stdin: []byte("in"), Serialize: true, Create: &lifecycle.CreateRequest{Tenant: "red", Key: "k", MaxSandboxes: 7},
				},
				ID: "a.b:c", OpenStdin: true, TTY: true, Rows: 1, Cols: 4096, KeepBytes: 4 << 20,
			}},
	} {
		t.Run(name, func(t *testing.T) {
			tt.want.Tenant, tt.want.Key = "red", "k"
			a := d.want(201, "", "POST", execsPath, tt.body)
			if diff := cmp.Diff(tt.want, d.manager.streams.started, cmpopts.IgnoreFields(lifecycle.StartRequest{}, "Taken")); diff != "" {
				t.Error(diff)
			}
			if a.Header.Get("Location") != execsPath+"/job-1" {
				t.Errorf("Location is %q", a.Header.Get("Location"))
			}
			tt.want.Follow = true
			for _, path := range []string{execPath, execsPath} {
				d.want(200, "", "POST", path, tt.body, asSSE)
				tt.want.Once = path == execPath && tt.want.ID == ""
				tt.want.NewID = tt.want.Once
				if started := &d.manager.streams.started; tt.want.Once {
					if started.ID == "" {
						t.Error("it can't be killed before its start is answered")
					}
					started.ID = ""
				}
				if diff := cmp.Diff(tt.want, d.manager.streams.started, cmpopts.IgnoreFields(lifecycle.StartRequest{}, "Taken")); diff != "" {
					t.Errorf("%s: %s", path, diff)
				}
			}
		})
	}
	d.want(200, "", "POST", execPath, `{"command":["a"],"serialize":true}`)
	if !d.manager.execed.Serialize {
		t.Error("serialize was lost")
	}
}

func TestStartExecInvalid(t *testing.T) {
	d := newDoor(t)
	d.want(422, "validation", "POST", execsPath, `{"command":["a"],"output_limit":1}`)
	d.want(422, "validation", "POST", execPath, `{"command":["a"],"output_limit":1}`, asSSE)
	for _, field := range []string{`"exec_id":"a"`, `"stdin_open":true`, `"tty":true`, `"rows":1`, `"cols":1`, `"keep_bytes":1`} {
		d.want(422, "validation", "POST", execPath, `{"command":["a"],`+field+`}`)
	}
	d.want(422, "validation", "POST", execsPath+"?stream=1", `{"command":["a"]}`)
	d.want(422, "validation", "POST", execsPath+"?stream=true&raw=1", `{"command":["a"]}`)
	if d.manager.streams.started.Key != "" {
		t.Error("one of them reached the manager")
	}
}

// A stream that can't be had at once leaves no command behind.
func TestExecStreamedNotFollowed(t *testing.T) {
	d := newDoor(t)
	d.running().change(func() { d.manager.streams.tape.first = 5 })
	d.manager.streams.tape.end = io.EOF
	d.want(200, "", "POST", execPath, `{"command":["a"]}`, asSSE) // with what there is
	d.manager.execErr = capacity.err
	d.want(429, "capacity", "POST", execPath, `{"command":["a"]}`, asSSE)
	if d.manager.streams.killed != 0 {
		t.Error("a command that never started was killed")
	}
}

func TestExecAnswers(t *testing.T) {
	d := newDoor(t)
	var list apitype.ExecutionList
	d.want(200, "", "GET", execsPath, "").decode(t, &list)
	if len(list.Execs) != 1 || list.Execs[0].ExecID != "job-1" {
		t.Errorf("got %+v", list)
	}
	code := 137
	x := &d.manager.streams.execution
	x.ExitCode, x.Status, x.Signal, x.EndedAt, x.FirstSeq, x.NextSeq = &code, lifecycle.ExecKilled, 9, x.StartedAt.Add(time.Minute), 3, 9
	x.Command = nil
	var got apitype.Execution
	a := d.want(200, "", "DELETE", execsPath+"/job-1", "")
	a.decode(t, &got)
	if got.Status != "killed" || *got.ExitCode != 137 || got.Signal != 9 || got.DurationMS != 60_000 || got.EndedAt == nil || got.FirstSeq != 3 ||
		!strings.Contains(a.body, `"command":[]`) {
		t.Errorf("got %s", a.body)
	}
	for body, want := range map[string]int{`{"signal":"TERM"}`: 15, `{"signal":"sigusr1"}`: 10, `{"signal":"2"}`: 2, `{"signal":64}`: 64} {
		d.want(200, "", "POST", execsPath+"/job-1/signal", body)
		if n := d.manager.streams.signals; n[len(n)-1] != want {
			t.Errorf("%s: got %d", body, n)
		}
	}
	for _, body := range []string{`{"signal":0}`, `{"signal":65}`, `{"signal":"SIG"}`, `{"signal":null}`, `{"signal":""}`, `{"signal":1.5}`} {
		d.want(422, "validation", "POST", execsPath+"/job-1/signal", body)
		d.want(422, "validation", "POST", processesPath+"/tools/signal", body)
	}
	d.want(200, "", "POST", processesPath+"/tools/resize", `{"rows":2,"cols":3}`)
	if diff := cmp.Diff([][2]int{{2, 3}}, d.manager.streams.sizes); diff != "" {
		t.Error(diff)
	}
}

func TestExecStdin(t *testing.T) {
	d := newDoor(t)
	tape := d.running()
	d.client = &http.Client{} // the checker would read the body first
	first, body := io.Pipe()
	answered := make(chan answer, 1)
	go func() {
		answered <- d.send("PUT", execsPath+"/job-1/stdin", "", func(r *http.Request) { r.Body, r.ContentLength = first, -1 })
	}()
	has := func(want string) {
		t.Helper()
		eventually(t, "the input is "+want, func() (done bool) {
			tape.read(func() { done = tape.input.String() == want })
			return done
		})
	}
	for i, part := range []string{"one\n", "\x00\xff"} { // each comes as soon as it is sent
		if _, err := io.WriteString(body, part); err != nil {
			t.Fatal(err)
		}
		has([]string{"one\n", "one\n\x00\xff"}[i])
	}
	_ = body.Close()
	if a := <-answered; a.StatusCode != 200 || a.body != `{"bytes":6}`+"\n" {
		t.Errorf("got %d %s", a.StatusCode, a.body)
	}
	if tape.closed {
		t.Error("the input was closed")
	}
	octets := withHeader("Content-Type", "application/octet-stream")
	d.want(200, "", "POST", execsPath+"/job-1/stdin?close=true", "end", octets)
	has("one\n\x00\xffend")
	if !tape.closed {
		t.Error("the input wasn't closed")
	}
	d.want(409, "process_ended", "POST", execsPath+"/job-1/stdin", "more", octets)
	d.want(422, "validation", "POST", execsPath+"/job-1/stdin?close=1", "more", octets)
	eventually(t, "it is let go", tape.idle)
}

func TestStartProcess(t *testing.T) {
	d := newDoor(t)
	for name, tt := range map[string]struct {
		body string
		want lifecycle.StartRequest
	}{
		"least": {`{"command":"a"}`, lifecycle.StartRequest{ExecRequest: lifecycle.ExecRequest{Command: []string{"a"}}}},
		"most": {`{"process_id":"tools","command":"a","args":["b",""],"env":{"A":"b"},"cwd":"/w","replace":true,"tty":true,"rows":1,"cols":2,
			"ready":{"port":80,"line":"up","timeout":"5s"},"sandbox":{}}`, lifecycle.StartRequest{
			ID: "tools", Replace: true, TTY: true, Rows: 1, Cols: 2, Ready: &lifecycle.Readiness{Port: 80, Line: "up", Timeout: 5 * time.Second},
			ExecRequest: lifecycle.ExecRequest{
				Command: []string{"a", "b", ""}, Env: map[string]string{"A": "b"}, WorkingDir: "/w",
				Create: &lifecycle.CreateRequest{Tenant: "red", Key: "k", MaxSandboxes: 7},
			},
		}},
		"ready": {`{"command":"a","ready":{"line":"x"}}`, lifecycle.StartRequest{
			ExecRequest: lifecycle.ExecRequest{Command: []string{"a"}}, Ready: &lifecycle.Readiness{Line: "x"},
		}},
	} {
		t.Run(name, func(t *testing.T) {
			a := d.want(201, "", "POST", processesPath, tt.body)
			tt.want.Tenant, tt.want.Key, tt.want.Kind = "red", "k", lifecycle.KindManaged
			if diff := cmp.Diff(tt.want, d.manager.streams.asked); diff != "" {
				t.Error(diff)
			}
			if a.Header.Get("Location") != processesPath+"/tools" {
				t.Errorf("Location is %q", a.Header.Get("Location"))
			}
		})
	}
	d.manager.streams.asked = lifecycle.StartRequest{}
	for _, body := range []string{
		`{"command":["a"]}`, `{"command":"a","ready":{"line":"x","timeout":0}}`,
	} {
		d.want(422, "validation", "POST", processesPath, body)
	}
	if d.manager.streams.asked.Command != nil {
		t.Error("one of them reached the manager")
	}
}

func TestWaitProcess(t *testing.T) {
	d := newDoor(t)
	tape := d.running()
	var p apitype.Process
	d.want(200, "", "POST", processesPath+"/tools/wait?timeout=10ms", "").decode(t, &p)
	if p.State != "running" || p.ExitCode != nil {
		t.Errorf("got %+v", p)
	}
	for _, bad := range []string{"0", "-1s", "x", ""} {
		d.want(422, "validation", "POST", processesPath+"/tools/wait?timeout="+bad, "")
	}
	answered := make(chan answer)
	go func() { answered <- d.send("POST", processesPath+"/tools/wait?timeout=1h", "") }()
	tape.finish(io.EOF)
	(<-answered).decode(t, &p)
	if p.State != "exited" || p.ExitCode == nil {
		t.Errorf("got %+v", p)
	}
}

// A body that nobody needs doesn't hide that its caller has left.
func TestCallerGoneBehindBody(t *testing.T) {
	for name, tt := range map[string]struct{ method, path string }{
		"wait":         {"POST", processesPath + "/tools/wait"},
		"command":      {"GET", streamPath},
		"process' log": {"GET", logsOfPath + "?follow=true"},
		"sandbox' log": {"GET", "/api/v1/sandboxes/k/logs?follow=true"},
	} {
		t.Run(name, func(t *testing.T) {
			d := newDoor(t)
			d.client = &http.Client{} // the checker knows that there is no body
			tape, s := d.running(), d.manager.streams
			defer tape.finish(io.EOF)
			d.manager.followLogs = true
			busy := func() (n int) {
				s.note(func() { n = s.waiting })
				tape.read(func() { n += tape.playing })
				return n
			}
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			r := d.request(tt.method, tt.path, strings.NewReader("{}")).WithContext(ctx)
			gone := make(chan struct{})
			go func() {
				defer close(gone)
				if resp, err := d.client.Do(r); err == nil {
					_, _ = io.Copy(io.Discard, resp.Body)
					_ = resp.Body.Close()
				}
			}()
			eventually(t, "it is waited for", func() bool { return busy() == 1 })
			cancel()
			<-gone
			eventually(t, "it is let go", func() bool { return busy() == 0 })
			d.want(400, "malformed", tt.method, tt.path, strings.Repeat("x", 5000))
		})
	}
}

func TestProcessLogs(t *testing.T) {
	d := newDoor(t)
	tape := d.running()
	tape.print(false, "a\xc3") // whose rest never came
	tape.print(true, "b")
	d.manager.streams.process.NextSeq = 3
	// It runs, and isn't waited for.
	got := short(events(t, d.want(200, "", "GET", logsOfPath, "", asNDJSON).body))
	if diff := cmp.Diff([]string{"0 start ", "2 stdout a\ufffd", "3 stderr b"}, got); diff != "" {
		t.Error(diff)
	}
	got = short(events(t, d.want(200, "", "GET", logsOfPath+"?after=3&follow=false", "", asNDJSON).body))
	if diff := cmp.Diff([]string{"3 start "}, got); diff != "" {
		t.Error(diff)
	}
	c := d.dial(attachPath)
	expect(t, c, `text: {"seq":0}`)
	d.want(200, "", "GET", logsOfPath, "") // beside who is attached
	tape.finish(io.EOF)
	d.manager.streams.process = d.manager.streams.processEnded
	got = short(events(t, d.want(200, "", "GET", logsOfPath+"?after=2", "", asNDJSON).body))
	if diff := cmp.Diff([]string{"2 start ", "3 stderr b", "3 exit "}, got); diff != "" {
		t.Error(diff)
	}
}

// A server that goes down lets go of who follows and who is attached.
func TestStreamsDrain(t *testing.T) {
	d := newDoor(t)
	tape := d.running()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	served := make(chan error, 1)
	asked := make(chan struct{})
	handler := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/readyz" { // is answered when it isn't any more
			close(asked)
			<-ctx.Done()
		}
		d.handler.ServeHTTP(w, r)
	})
	go func() { served <- proxy.Serve(ctx, l, handler, proxy.ServeOptions{}) }()
	d.url = "http://" + l.Addr().String()

	followed := d.open(t.Context(), "GET", streamPath, "", asNDJSON)
	lines := bufio.NewReader(followed.Body)
	if _, err := lines.ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	d.manager.followLogs = true
	logs := d.open(t.Context(), "GET", logsPath+"?follow=true", "", asNDJSON)
	c := d.dial(attachPath)
	tape.print(false, "x")
	expect(t, c, `text: {"seq":0}`, "binary: \x01x")
	var answered sync.WaitGroup
	answered.Go(func() { d.want(http.StatusServiceUnavailable, "going_down", "GET", "/readyz", "") })
	<-asked
	cancel()
	rest, err := io.ReadAll(lines)
	if err == nil || !strings.HasSuffix(string(rest), `{"event":"going_down","seq":1}`+"\n") {
		t.Errorf("the stream's end is %v after %q", err, rest)
	}
	if got, err := io.ReadAll(logs.Body); err == nil || string(got) != `{"stream":"going_down","data":""}`+"\n" {
		t.Errorf("the log's end is %v after %q", err, got)
	}
	if ce := closed(t, c); ce.Code != websocket.StatusGoingAway {
		t.Errorf("closed with %v", ce)
	}
	answered.Wait()
	if err := <-served; err != nil {
		t.Error(err)
	}
	eventually(t, "all are let go", tape.idle)
}

func TestSignal(t *testing.T) {
	for in, want := range map[string]apitype.Signal{`15`: 15, `"15"`: 15, `"TERM"`: 15, `"SIGTERM"`: 15, `"sighup"`: 1, `"SYS"`: 31, `64`: 64} {
		var s apitype.Signal
		if err := json.Unmarshal([]byte(in), &s); err != nil || s != want {
			t.Errorf("%s: got %d, %v", in, s, err)
		}
	}
	for _, in := range []string{`0`, `-1`, `65`, `""`, `"SIG"`, `"SIGSIGTERM"`, `"x"`, `{}`, `1.0`, `true`} {
		var s apitype.Signal
		if err := json.Unmarshal([]byte(in), &s); err == nil {
			t.Errorf("%s: got %d", in, s)
		}
	}
}

// Nor is it held up by who follows and doesn't read.
func TestStreamsDrainUnread(t *testing.T) {
	d := newDoor(t)
	text := bytes.Repeat([]byte("x"), 1000)
	d.running().endless = func(int64) rt.Chunk { return rt.Chunk{Data: text} }
	d.manager.logs = func(stdout, _ io.Writer) error {
		for {
			if _, err := stdout.Write(text); err != nil {
				return err
			}
		}
	}
	drainUnread(t, d.handler, streamPath, logsOfPath+"?follow=true", logsPath+"?follow=true")
}

// drainUnread has a server go down that is asked for all paths by who doesn't read.
func drainUnread(t *testing.T, handler http.Handler, paths ...string) {
	t.Helper()
	l := pipes.Listen()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	served := make(chan error, 1)
	go func() { served <- proxy.Serve(ctx, l, handler, proxy.ServeOptions{DrainTimeout: time.Hour}) }()
	for _, path := range paths {
		client := l.Dial()
		defer func() { _ = client.Close() }()
		if _, err := io.WriteString(client, "GET "+path+" HTTP/1.1\r\nHost: localhost\r\nX-API-Token: "+master+"\r\n\r\n"); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(client, make([]byte, 10)); err != nil {
			t.Fatal(err)
		}
	}
	cancel()
	select {
	case err := <-served:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(30 * time.Second): // of a minute that each write has otherwise
		t.Error("the server waits for who doesn't read")
	}
}
