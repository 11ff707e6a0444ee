package client_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/coder/websocket"

	"github.com/bermhq/berm/proxy/apitype"
	"github.com/bermhq/berm/proxy/client"
	"github.com/bermhq/berm/runtime/runtimetest"
)

// collect runs a sequence to its end.
func collect(seq iter.Seq2[apitype.StreamEvent, error]) (stdout, stderr string, kinds []string, exit *apitype.Exit, err error) {
	for ev, err := range seq {
		if err != nil {
			return stdout, stderr, kinds, exit, err
		}
		kinds = append(kinds, ev.Event)
		switch ev.Event {
		case apitype.EventStdout:
			stdout += ev.Data + string(ev.DataBase64)
		case apitype.EventStderr:
			stderr += ev.Data + string(ev.DataBase64)
		case apitype.EventExit:
			exit = ev.Exit
		}
	}
	return stdout, stderr, kinds, exit, nil
}

func TestExecStream(t *testing.T) {
	b := newBerm(t, runtimetest.FakeOptions{})
	ctx := t.Context()
	_, _, _, _, err := collect(b.ExecStream(ctx, "nothing", apitype.ExecRequest{Command: apitype.Command{"true"}}))
	wantCode(t, err, "not_found")
	for name, req := range map[string]apitype.ExecRequest{
		"text":    {Command: apitype.Command{"sh", "-c", "echo out; echo err >&2; exit 3"}, Sandbox: &apitype.SandboxRequest{}},
		"raw":     {Command: apitype.Command{"sh", "-c", "echo out; echo err >&2; exit 3"}, Raw: true},
		"with ID": {Command: apitype.Command{"sh", "-c", "echo out; echo err >&2; exit 3"}, ExecID: "job-1"},
		"again":   {Command: apitype.Command{"sh", "-c", "echo out; echo err >&2; exit 3"}, ExecID: "job-1"},
	} {
		stdout, stderr, kinds, exit, err := collect(b.ExecStream(ctx, "k", withSandbox(req)))
		if stdout != "out\n" || stderr != "err\n" || err != nil || exit == nil || exit.ExitCode == nil || *exit.ExitCode != 3 || kinds[0] != apitype.EventStart {
			t.Errorf("%s: got %q, %q, %v, %+v, %v", name, stdout, stderr, kinds, exit, err)
		}
	}
	stdout, _, _, exit, err := collect(b.ExecStream(ctx, "k", apitype.ExecRequest{Command: apitype.Command{"cat"}, Stdin: ptr("input")}))
	if stdout != "input" || err != nil || exit == nil {
		t.Errorf("got %q, %v", stdout, err)
	}
}

func withSandbox(req apitype.ExecRequest) apitype.ExecRequest {
	req.Sandbox = &apitype.SandboxRequest{}
	return req
}

func TestExecLeft(t *testing.T) {
	b := newBerm(t, runtimetest.FakeOptions{})
	ctx := t.Context()
	left := ""
	for ev, err := range b.ExecStream(ctx, "k", withSandbox(apitype.ExecRequest{Command: apitype.Command{"sleep", "1000"}})) {
		must(t, err)
		left = ev.Execution.ExecID
		break
	}
	eventually(t, "killed", func() bool {
		x, err := b.Execution(ctx, "k", left)
		return err == nil && x.Status == "killed"
	})
}

func TestStartedExec(t *testing.T) {
	b := newBerm(t, runtimetest.FakeOptions{})
	ctx := t.Context()
	req := withSandbox(apitype.ExecRequest{Command: apitype.Command{"cat"}, StdinOpen: true, ExecID: "job-1"})
	x, err := b.StartExec(ctx, "k", req)
	if err != nil || x.Status != "running" || x.Existing || !x.Created {
		t.Fatalf("got %+v, %v", x, err)
	}
	if x, err = b.StartExec(ctx, "k", req); err != nil || !x.Existing {
		t.Errorf("got %+v, %v", x, err)
	}
	req.Command = apitype.Command{"true"}
	_, err = b.StartExec(ctx, "k", req)
	wantCode(t, err, "process_conflict")
	if all, err := b.Executions(ctx, "k"); err != nil || len(all) != 1 || all[0].ExecID != "job-1" {
		t.Errorf("got %+v, %v", all, err)
	}
	if n, err := b.WriteExec(ctx, "k", "job-1", strings.NewReader("one\n"), false); n != 4 || err != nil {
		t.Errorf("got %d, %v", n, err)
	}
	if n, err := b.WriteExec(ctx, "k", "job-1", strings.NewReader("two\n"), true); n != 4 || err != nil {
		t.Errorf("got %d, %v", n, err)
	}
	stdout, _, _, exit, err := collect(b.FollowExec(ctx, "k", "job-1", client.StreamOptions{}))
	if stdout != "one\ntwo\n" || exit == nil || exit.Status != "completed" || err != nil {
		t.Errorf("got %q, %+v, %v", stdout, exit, err)
	}
	stdout, _, _, _, err = collect(b.FollowExec(ctx, "k", "job-1", client.StreamOptions{After: ptr[int64](4), Raw: true}))
	if stdout != "two\n" || err != nil {
		t.Errorf("got %q, %v", stdout, err)
	}
	_, _, _, _, err = collect(b.FollowExec(ctx, "k", "job-1", client.StreamOptions{After: ptr[int64](99)}))
	if e := wantCode(t, err, "output_gone"); e.Status != 410 || e.Problem.FirstSeq == nil {
		t.Errorf("got %+v", e.Problem)
	}
	_, err = b.SignalExec(ctx, "k", "job-1", 15)
	wantCode(t, err, "process_ended")
	_, err = b.Execution(ctx, "k", "job-2")
	wantCode(t, err, "process_not_found")

	if _, err := b.StartExec(ctx, "k", apitype.ExecRequest{Command: apitype.Command{"sleep", "1000"}, ExecID: "job-3", TTY: true}); err != nil {
		t.Fatal(err)
	}
	if _, err := b.ResizeExec(ctx, "k", "job-3", 40, 120); err != nil {
		t.Error(err)
	}
	if x, err := b.KillExec(ctx, "k", "job-3"); err != nil || x.Status != "killed" {
		t.Errorf("got %+v, %v", x, err)
	}
}

func TestProcess(t *testing.T) {
	b := newBerm(t, runtimetest.FakeOptions{})
	ctx := t.Context()
	req := apitype.ProcessRequest{ProcessID: "tools", Command: "cat", Sandbox: &apitype.SandboxRequest{}}
	p, err := b.StartProcess(ctx, "k", req)
	if err != nil || p.State != "running" {
		t.Fatalf("got %+v, %v", p, err)
	}
	_, err = b.StartProcess(ctx, "k", req)
	wantCode(t, err, "process_conflict")
	if all, err := b.Processes(ctx, "k"); err != nil || len(all) != 1 {
		t.Errorf("got %+v, %v", all, err)
	}
	if p, err = b.WaitProcess(ctx, "k", "tools", 10*time.Millisecond); err != nil || p.State != "running" {
		t.Errorf("got %+v, %v", p, err)
	}

	h := b.AttachProcess("k", "tools", client.AttachOptions{Lines: true})
	c, _, err := websocket.Dial(ctx, h.URL, &websocket.DialOptions{HTTPClient: h.HTTPClient, HTTPHeader: h.Header})
	must(t, err)
	defer func() { _ = c.CloseNow() }()
	must(t, c.Write(ctx, websocket.MessageText, []byte("hello")))
	if _, got, err := c.Read(ctx); err != nil || string(got) != `{"stream":"stdout","seq":6,"line":"hello"}` {
		t.Errorf("got %s, %v", got, err)
	}
	if p, err = b.Process(ctx, "k", "tools"); err != nil || !p.Attached {
		t.Errorf("got %+v, %v", p, err)
	}
	stdout, _, kinds, exit, err := collect(b.ProcessLogs(ctx, "k", "tools", client.StreamOptions{}))
	if stdout != "hello\n" || exit != nil || err != nil {
		t.Errorf("got %q, %v, %v", stdout, kinds, err)
	}
	followed := make(chan error, 1)
	go func() {
		stdout, _, _, exit, err := collect(b.FollowProcess(ctx, "k", "tools", client.StreamOptions{After: ptr[int64](0)}))
		if stdout != "hello\n" || exit == nil || exit.Status != "exited" {
			err = fmt.Errorf("got %q, %+v, %w", stdout, exit, err)
		}
		followed <- err
	}()
	if p, err = b.StopProcess(ctx, "k", "tools"); err != nil || p.State != "exited" {
		t.Errorf("got %+v, %v", p, err)
	}
	if err := <-followed; err != nil {
		t.Error(err)
	}
	_, _, err = c.Read(ctx)
	if ce := (websocket.CloseError{}); !errors.As(err, &ce) || ce.Code != websocket.StatusNormalClosure || !strings.Contains(ce.Reason, `"exited"`) {
		t.Errorf("got %v", err)
	}
	_, err = b.SignalProcess(ctx, "k", "tools", 1)
	wantCode(t, err, "process_ended")
	_, err = b.ResizeProcess(ctx, "k", "none", 1, 1)
	wantCode(t, err, "process_not_found")
	if stdout, _, _, exit, err := collect(b.ProcessLogs(ctx, "k", "tools", client.StreamOptions{})); stdout != "hello\n" || exit == nil || err != nil {
		t.Errorf("got %q, %+v, %v", stdout, exit, err)
	}
}

// cutting breaks every answer off after so many bytes.
type cutting struct {
	next  http.RoundTripper
	after int
	calls int
}

func (c *cutting) RoundTrip(r *http.Request) (*http.Response, error) {
	c.calls++
	resp, err := c.next.RoundTrip(r)
	if err == nil {
		resp.Body = &cutBody{ReadCloser: resp.Body, left: c.after}
	}
	return resp, err
}

type cutBody struct {
	io.ReadCloser
	left int
}

func (b *cutBody) Read(p []byte) (int, error) {
	if b.left == 0 {
		return 0, io.ErrUnexpectedEOF
	}
	n, err := b.ReadCloser.Read(p[:min(len(p), b.left)])
	b.left -= n
	return n, err
}

func TestStreamTries(t *testing.T) {
	const start, exit = `{"event":"start","seq":0}` + "\n", `{"event":"exit","seq":9,"status":"completed","exit_code":0}` + "\n"
	line := func(seq int) string { return fmt.Sprintf(`{"event":"stdout","seq":%d,"data":"x"}`+"\n", seq) }
	for name, tt := range map[string]struct {
		bodies  []string // the last one is repeated
		calls   int
		out     string
		wantErr string
	}{
		"whole":               {[]string{start + line(1) + exit}, 1, "x", ""},
		"in two parts":        {[]string{start + line(1), start + line(2) + exit}, 2, "xx", ""},
		"cut within a line":   {[]string{start + line(1) + line(2)[:10], start + line(2) + exit}, 2, "xx", ""},
		"every one goes on":   {[]string{start + line(1), line(2), line(3), line(4), line(5), line(6), line(7), exit}, 8, "xxxxxxx", ""},
		"none goes on":        {[]string{start}, 5, "", "broke off"},
		"not even begun":      {[]string{""}, 1, "", "broke off"},
		"only heartbeats":     {[]string{start + `{"event":"heartbeat","seq":0}` + "\n", exit}, 2, "", ""},
		"going down":          {[]string{start + line(1) + `{"event":"going_down","seq":1}` + "\n", start + line(2) + exit}, 2, "xx", ""},
		"gone":                {[]string{start + `{"event":"going_down","seq":0}` + "\n"}, 5, "", "the server is going down"},
		"taken over":          {[]string{start + line(1) + `{"event":"taken_over","seq":1}` + "\n"}, 1, "x", client.ErrTakenOver.Error()},
		"not of our protocol": {[]string{start + "<html>\n"}, 5, "", "decode event"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				calls := 0
				c := answered(t, 0, func(r *http.Request) *http.Response {
					if r.Header.Get("Accept") != "application/x-ndjson" || calls > 0 && !r.URL.Query().Has("after") {
						t.Errorf("call %d: %s, Accept %s", calls, r.URL, r.Header.Get("Accept"))
					}
					a := answer(200, "", tt.bodies[min(calls, len(tt.bodies)-1)])
					calls++
					return a
				})
				out, _, _, _, err := collect(c.FollowExec(t.Context(), "k", "job", client.StreamOptions{}))
				if out != tt.out || calls != tt.calls || (err == nil) != (tt.wantErr == "") || err != nil && !strings.Contains(err.Error(), tt.wantErr) {
					t.Errorf("got %q, %v after %d calls", out, err, calls)
				}
			})
		})
	}
}

// A connection over which nothing comes, not even a heartbeat, is given up.
func TestStreamSilence(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		calls := 0
		c := answered(t, 0, func(*http.Request) *http.Response {
			calls++
			again := calls > 1
			a := answer(200, "", "")
			r, w := io.Pipe()
			a.Body = r
			go func() {
				if _, err := io.WriteString(w, `{"event":"start","seq":0}`+"\n"); err == nil && again {
					_, _ = io.WriteString(w, `{"event":"exit","seq":0,"status":"completed"}`+"\n")
				}
			}()
			return a
		})
		begin := time.Now()
		_, _, _, exit, err := collect(c.FollowExec(t.Context(), "k", "job", client.StreamOptions{}))
		if exit == nil || err != nil || calls != 2 || time.Since(begin) < time.Minute {
			t.Errorf("got %+v, %v after %d calls and %v", exit, err, calls, time.Since(begin))
		}
	})
}

func TestStreamContext(t *testing.T) {
	b := newBerm(t, runtimetest.FakeOptions{})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	for ev, err := range b.ExecStream(ctx, "k", withSandbox(apitype.ExecRequest{Command: apitype.Command{"sleep", "1000"}, ExecID: "job-1"})) {
		if ev.Event == apitype.EventStart {
			cancel()
			continue
		}
		if !errors.Is(err, context.Canceled) {
			t.Errorf("got %+v, %v", ev, err)
		}
	}
	x, err := b.Execution(t.Context(), "k", "job-1")
	if err != nil || x.Status != "running" {
		t.Errorf("got %+v, %v", x, err)
	}
}

// A stream of bytes that breaks off again and again still gives everything, once.
func TestRawTakenUpAgain(t *testing.T) {
	b := newBerm(t, runtimetest.FakeOptions{})
	ctx := t.Context()
	req := withSandbox(apitype.ExecRequest{Command: apitype.Command{"sh", "-c", strings.Repeat("echo 0123456789; echo end >&2; ", 40)}, ExecID: "job-1", Raw: true})
	cut := &cutting{next: b.http.Transport, after: 3000}
	c, err := client.New(client.Options{BaseURL: b.url, Token: red, HTTPClient: &http.Client{Transport: cut}})
	must(t, err)
	var at int64
	n := 0
	for ev, err := range c.ExecStream(ctx, "k", req) {
		must(t, err)
		switch ev.Event {
		case apitype.EventStart:
			if n++; n > 1 || len(ev.Execution.Command) != 3 || ev.Execution.ExecID != "job-1" {
				t.Errorf("start %d: %+v", n, ev.Execution)
			}
		case apitype.EventStdout, apitype.EventStderr:
			if at += int64(len(ev.DataBase64)); ev.Seq != at {
				t.Errorf("%d bytes up to %d", at, ev.Seq)
			}
		case apitype.EventExit:
			if *ev.ExitCode != 0 || ev.Seq != at || at != 40*(11+4) {
				t.Errorf("after %d: %+v", at, ev)
			}
		}
	}
	if cut.calls < 2 {
		t.Errorf("%d calls", cut.calls)
	}
}
