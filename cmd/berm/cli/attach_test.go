package cli

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/coder/websocket"

	"github.com/bermhq/berm/cmd/berm/config"
	"github.com/bermhq/berm/proxy/apitype"
	"github.com/bermhq/berm/proxy/client"
	"github.com/bermhq/berm/runtime/runtimetest/pty"
)

// farEnd is the other side of a WebSocket.
type farEnd struct {
	*websocket.Conn
	t *testing.T
}

func (p farEnd) send(messages ...string) {
	for _, m := range messages {
		kind := websocket.MessageText
		if m == "" || m[0] < ' ' {
			kind = websocket.MessageBinary
		}
		if err := p.Write(context.Background(), kind, []byte(m)); err != nil {
			p.t.Error(err)
		}
	}
}

// wants reads a message.
func (p farEnd) wants(want string) {
	_, got, err := p.Read(context.Background())
	if err != nil || string(got) != want {
		p.t.Errorf("the server was sent %q, %v, want %q", got, err, want)
	}
}

func (p farEnd) end(reason string) { _ = p.Close(websocket.StatusNormalClosure, reason) }

// attachTo makes a session on a server, that answers a connection.
func attachTo(t *testing.T, answer func(p farEnd)) *session {
	t.Helper()
	var handlers sync.WaitGroup // as the server's Close waits for no WebSocket
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		handlers.Add(1)
		defer handlers.Done()
		if r.URL.Path != "/attach" || r.Header.Get("Authorization") != "Bearer secret" {
			t.Errorf("the request is for %s, with %v", r.URL, r.Header)
		}
		ws, err := websocket.Accept(w, r, nil)
		if err != nil {
			t.Error(err)
			return
		}
		defer func() { _ = ws.CloseNow() }()
		answer(farEnd{ws, t})
	}))
	t.Cleanup(func() {
		server.Close()
		handlers.Wait()
	})
	s := &session{stdout: &bytes.Buffer{}, stderr: &bytes.Buffer{}}
	s.attach = func(ctx context.Context) (connection, error) {
		to := client.Handshake{URL: server.URL + "/attach", Header: http.Header{"Authorization": {"Bearer secret"}}}
		return attach(ctx, to, func(text string) { _, _ = fmt.Fprintln(s.stderr, text) })
	}
	return s
}

const ended = `{"exit_code":7,"status":"completed"}`

// wantEnd runs a session to its end, with exit code 7.
func (s *session) wantEnd(t *testing.T, stdout, stderr string) {
	t.Helper()
	end, err := s.run(t.Context())
	if err != nil || end.ExitCode == nil || *end.ExitCode != 7 {
		t.Errorf("%+v, %v", end, err)
	}
	if out, errs := s.stdout.(*bytes.Buffer).String(), s.stderr.(*bytes.Buffer).String(); out != stdout || errs != stderr {
		t.Errorf("stdout %q, want %q; stderr %q, want %q", out, stdout, errs, stderr)
	}
}

func TestSession(t *testing.T) {
	s := attachTo(t, func(p farEnd) {
		p.send(`{"seq":0}`, "\x01out", "\x02err", "\x01", "\x01put", `{"error":{"code":"x","detail":"no such signal"}}`)
		p.end(ended)
	})
	s.wantEnd(t, "output", "errno such signal\n")
}

func TestSessionInput(t *testing.T) {
	long := strings.Repeat("x", inputSize)
	s := attachTo(t, func(p farEnd) {
		p.SetReadLimit(maxMessage)
		p.wants(long)
		p.wants("rest")
		p.wants(`{"close_stdin":true}`)
		p.send("\x01done")
		p.end(ended)
	})
	s.in = io.MultiReader(strings.NewReader(long), strings.NewReader("rest"))
	s.wantEnd(t, "done", "")
}

func TestSessionCutOff(t *testing.T) {
	s := attachTo(t, func(p farEnd) {
		p.wants("typed")
		p.send(`{"seq":0}`, "\x01out")
	})
	in, typed := io.Pipe()
	defer func() { _ = typed.Close() }()
	go func() { _, _ = io.WriteString(typed, "typed") }()
	s.in = in
	if _, err := s.run(t.Context()); !errors.Is(err, errCutOff) {
		t.Errorf("error %v, want %v", err, errCutOff)
	}
}

func TestSessionFails(t *testing.T) {
	for name, tt := range map[string]struct {
		answer func(p farEnd)
		want   string
	}{
		"taken over":      {func(p farEnd) { _ = p.Close(4001, "another has taken over") }, "another has taken over (4001)"},
		"no reason":       {func(p farEnd) { _ = p.Close(websocket.StatusInternalError, "") }, "no reason"},
		"an end as none":  {func(p farEnd) { p.end("bye") }, "bye (1000)"},
		"a third stream":  {func(p farEnd) { p.send("\x03abc") }, "no known stream"},
		"an empty stream": {func(p farEnd) { p.send("") }, "no known stream"},
		"no JSON":         {func(p farEnd) { p.send("{") }, "isn't JSON"},
		"a huge message":  {func(p farEnd) { p.send("\x01" + strings.Repeat("x", maxMessage)) }, "read limited"},
	} {
		t.Run(name, func(t *testing.T) {
			s := attachTo(t, func(p farEnd) {
				tt.answer(p)
				_, _, _ = p.Read(context.Background()) // until the other side is gone
			})
			if _, err := s.run(t.Context()); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error %v, want %q", err, tt.want)
			}
		})
	}
}

func TestSessionRefused(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/problem+json")
		w.WriteHeader(http.StatusConflict)
		_, _ = io.WriteString(w, `{"code":"process_conflict","detail":"somebody is attached"}`)
	}))
	defer server.Close()
	_, err := attach(t.Context(), client.Handshake{URL: server.URL}, nil)
	var answer *client.Error
	if !errors.As(err, &answer) || answer.Status != http.StatusConflict || answer.Code != "process_conflict" || answer.Problem.Detail != "somebody is attached" {
		t.Errorf("error %v", err)
	}
}

// writerFunc is a writer.
type writerFunc func(p []byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

// When nobody reads the output any more, the command ends.
func TestSessionBrokenPipe(t *testing.T) {
	s := attachTo(t, func(p farEnd) {
		p.send(`{"seq":0}`, "\x01out")
		_, _, _ = p.Read(context.Background())
	})
	s.stdout = writerFunc(func([]byte) (int, error) { return 0, syscall.EPIPE })
	killed := false
	s.kill = func() { killed = true }
	_, err := s.run(t.Context())
	var exit *config.ExitError
	if !errors.As(err, &exit) || exit.Code != 141 || exit.Err != nil || !killed {
		t.Errorf("error %v, killed: %t", err, killed)
	}
}

func TestSessionSignals(t *testing.T) {
	self := func(s syscall.Signal) {
		if err := syscall.Kill(os.Getpid(), s); err != nil {
			t.Error(err)
		}
	}
	s := attachTo(t, func(p farEnd) {
		p.wants("ready")
		self(syscall.SIGUSR1)
		p.wants(`{"signal":10}`)
		self(syscall.SIGINT)
		p.wants(`{"signal":2}`)
		p.end(ended)
	})
	in, typed := io.Pipe()
	defer func() { _ = typed.Close() }()
	go func() { _, _ = io.WriteString(typed, "ready") }()
	s.in = in
	s.wantEnd(t, "", "")

	s = attachTo(t, func(p farEnd) {
		p.wants("ready")
		self(syscall.SIGINT)
		_, _, _ = p.Read(context.Background())
	})
	in, typed = io.Pipe()
	defer func() { _ = typed.Close() }()
	go func() { _, _ = io.WriteString(typed, "ready") }()
	s.in, s.detach = in, true
	if _, err := s.run(t.Context()); !errors.Is(err, errDetached) {
		t.Errorf("error %v, want %v", err, errDetached)
	}
}

// Keys go through a raw terminal as they are, its size goes along, and two keys detach.
func TestSessionTerminal(t *testing.T) {
	keyboard, tty := pty.Open(t)
	term, err := terminalOf(tty, tty)
	if err != nil {
		t.Fatal(err)
	}
	var shown string
	s := attachTo(t, func(p farEnd) {
		p.wants(`{"resize":{"rows":33,"cols":77}}`)
		_, _ = keyboard.WriteString("a\x03\r") // nothing of which is for this terminal
		p.wants("a\x03\r")
		pty.SetSize(t, tty, 40, 100)
		if err := syscall.Kill(os.Getpid(), syscall.SIGWINCH); err != nil {
			t.Error(err)
		}
		p.wants(`{"resize":{"rows":40,"cols":100}}`)
		p.send(`{"seq":0}`, "\x01line\n")
		buf := make([]byte, 100) // before the keys, after which what comes is for nobody
		n, _ := keyboard.Read(buf)
		shown = string(buf[:n])
		_, _ = keyboard.WriteString("b\x10\x11")
		p.wants("b")
		_, _, _ = p.Read(context.Background())
	})
	s.in, s.stdout, s.terminal = tty, tty, term
	if _, err := s.run(t.Context()); !errors.Is(err, errDetached) {
		t.Errorf("error %v, want %v", err, errDetached)
	}
	if !pty.Echoes(t, tty) {
		t.Error("the terminal is still raw")
	}
	if shown != "line\n" { // a raw terminal adds no return
		t.Errorf("the terminal shows %q", shown)
	}
}

func TestEndCode(t *testing.T) {
	three, killed := 3, 137
	for _, tt := range []struct {
		end  apitype.AttachEnd
		code int
		said string
	}{
		{apitype.AttachEnd{Status: "completed", ExitCode: new(int)}, 0, ""},
		{apitype.AttachEnd{Status: "completed", ExitCode: &three}, 3, ""},
		{apitype.AttachEnd{Status: "exited", ExitCode: &three}, 3, ""},
		{apitype.AttachEnd{Status: "completed", ExitCode: &killed, Signal: 9}, 137, ""},
		{apitype.AttachEnd{Status: "completed", Signal: 15}, 143, ""},
		{apitype.AttachEnd{Status: "timed_out", Signal: 9}, 124, "killed after 3s"},
		{apitype.AttachEnd{Status: "oom_killed", Signal: 9}, 137, "want of memory"},
		{apitype.AttachEnd{Status: "killed"}, 137, "was ended: killed"},
	} {
		code, err := endCode(tt.end, 3*time.Second)
		if code != tt.code || (err != nil) != (tt.said != "") || err != nil && !strings.Contains(err.Error(), tt.said) {
			t.Errorf("%+v is %d, %v", tt.end, code, err)
		}
	}
}
