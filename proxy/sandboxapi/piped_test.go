package sandboxapi_test

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/coder/websocket"

	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/proxy/sandboxapi"
	"github.com/bermhq/berm/runtime/runtimetest/pipes"
)

// piped is the API behind pipes, so that it can run on a clock of its own.
type piped struct {
	caller
	streams *streams
	manager *scripted
}

func newPiped(t *testing.T, change ...func(*sandboxapi.Options)) *piped {
	t.Helper()
	d := &piped{caller: caller{t: t, url: "http://localhost"}, streams: newStreams()}
	d.manager = &scripted{streams: d.streams}
	pol, err := policy.Parse(nil, policy.Options{})
	must(t, err)
	opts := sandboxapi.Options{Manager: d.manager, Policy: func() *policy.Policy { return pol }}
	for _, f := range change {
		f(&opts)
	}
	h, err := sandboxapi.New(opts)
	must(t, err)
	l := pipes.Listen()
	srv := &http.Server{Handler: h, ReadHeaderTimeout: time.Minute}
	served := make(chan error, 1)
	go func() { served <- srv.Serve(l) }()
	tr := &http.Transport{DialContext: func(context.Context, string, string) (net.Conn, error) {
		return &sending{Conn: l.Dial()}, nil
	}}
	d.client = &http.Client{Transport: tr}
	t.Cleanup(func() {
		tr.CloseIdleConnections()
		_ = srv.Close()
		if err := <-served; !errors.Is(err, http.ErrServerClosed) {
			t.Error(err)
		}
	})
	return d
}

// sending is a caller's end that takes what its peer won't read any more, as a kernel does
// for a while: a pipe would have the caller see that before the answer.
type sending struct {
	net.Conn
	closed atomic.Bool
}

func (s *sending) Write(b []byte) (int, error) {
	n, err := s.Conn.Write(b)
	if errors.Is(err, io.ErrClosedPipe) && !s.closed.Load() {
		return len(b), nil
	}
	return n, err
}

func (s *sending) Close() error {
	s.closed.Store(true)
	return s.Conn.Close()
}

// A caller is waited for whose pong can't be seen behind input that the process doesn't
// take, but not one who is gone.
func TestAttachDeadBehindInput(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newPiped(t)
		tape := d.streams.tape
		tape.change(func() { tape.stuck = true })
		c, _, err := websocket.Dial(t.Context(), "http://localhost"+attachPath, &websocket.DialOptions{
			HTTPClient: d.client, OnPingReceived: func(context.Context, []byte) bool { return false },
		})
		must(t, err)
		must(t, c.Write(t.Context(), websocket.MessageBinary, []byte("x")))
		c.CloseRead(t.Context())
		time.Sleep(5 * time.Minute)
		if tape.idle() {
			t.Error("it was let go though its caller is there")
		}
		_ = c.CloseNow()
		time.Sleep(2 * time.Minute)
		if !tape.idle() {
			t.Error("it wasn't let go though its caller is gone")
		}
		tape.change(func() { tape.stuck = false })
	})
}

// Nobody waits for longer than an hour in one call.
func TestWaitProcessIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newPiped(t)
		for query, want := range map[string]time.Duration{"": time.Hour, "?timeout=2h": time.Hour, "?timeout=90s": 90 * time.Second} {
			start := time.Now()
			if body := d.want(200, "", "POST", processesPath+"/tools/wait"+query, "").body; !strings.Contains(body, `"state":"running"`) {
				t.Errorf("%q: %s", query, body)
			}
			if took := time.Since(start); took != want {
				t.Errorf("%q: it took %s", query, took)
			}
		}
	})
}
