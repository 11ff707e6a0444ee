package engineapi

import (
	"bufio"
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"github.com/bermhq/berm/proxy"
)

func TestParting(t *testing.T) {
	const (
		hi    = "\x01\x00\x00\x00\x00\x00\x00\x02hi"
		over  = "\x02\x00\x00\x00\x00\x00\x00\x1fberm: the server is going down\n"
		typed = "\r\nberm: the server is going down\r\n"
		flaw  = `{"error":"berm: the server is going down","errorDetail":{"message":"berm: the server is going down"}}` + "\n"
	)
	tests := map[string]struct {
		p    *closeMessage
		said string
		want string
	}{
		"nobody's":            {nil, "x", ""},
		"frames":              {&closeMessage{}, hi + hi, over},
		"frames, none so far": {&closeMessage{form: framed}, "", over},
		"who knows":           {&closeMessage{}, "", ""},
		"a frame's head":      {&closeMessage{}, hi + hi[:5], ""},
		"amid a frame":        {&closeMessage{}, hi + hi[:9], ""},
		"a terminal":          {&closeMessage{}, "a prompt> ", typed},
		"a terminal, known":   {&closeMessage{form: terminal}, hi[:4], typed},
		"an answer to be":     {&closeMessage{form: textLine}, "", "berm: the server is going down\n"},
		"messages":            {&closeMessage{form: jsonLines}, "{}\r\n", flaw},
		"amid a message":      {&closeMessage{form: jsonLines}, "{}\r\n{", ""},
	}
	for name, tt := range tests {
		for _, step := range []int{1, 3, 1000} {
			p := tt.p
			if p != nil {
				again := *p
				p = &again
			}
			for b := []byte(tt.said); len(b) > 0; {
				n := min(step, len(b))
				if got, err := p.Write(b[:n]); got != n || err != nil {
					t.Fatalf("%s: %d, %v", name, got, err)
				}
				b = b[n:]
			}
			if got := string(p.word()); got != tt.want {
				t.Errorf("%s, by %d: %q, want %q", name, step, got, tt.want)
			}
		}
	}
}

func TestBuildDrain(t *testing.T) {
	ctx, end := context.WithCancelCause(t.Context())
	end(proxy.ErrGoingDown)
	w := httptest.NewRecorder()
	c := call{w: w, ctx: ctx}
	if id := relayBuild(&c, iotest.ErrReader(ctx.Err())); id != "" || !strings.Contains(w.Body.String(), `"error":"berm: the server is going down"`) {
		t.Errorf("%q, and %s", id, w.Body)
	}
}

// What can be asked for again ends as soon as the server drains, what can't when it has to,
// and neither looks whole.
func TestFollowersDrain(t *testing.T) {
	d := standInDoor(t, &standIn{handler: func(w http.ResponseWriter, r *http.Request) {
		if strings.HasSuffix(r.URL.Path, "/logs") {
			_, _ = io.WriteString(w, "\x01\x00\x00\x00\x00\x00\x00\x02hi")
		}
		_ = http.NewResponseController(w).Flush()
		<-r.Context().Done()
	}})
	const one = "/v1.41/containers/"
	for call, tt := range map[string]struct {
		drain time.Duration
		want  string
	}{
		"GET " + one + standInID + "/logs?follow=1&stdout=1": {time.Hour, "hi\x02\x00\x00\x00\x00\x00\x00\x1fberm: the server is going down\n"},
		"GET " + one + standInID + "/stats":                  {time.Hour, ""},
		"POST " + one + standInID + "/wait":                  {50 * time.Millisecond, "berm: the server is going down\n"},
	} {
		path := filepath.Join(d.dir, "f.sock")
		l := must(proxy.Listen(t.Context(), "unix://"+path, 0o600))(t)
		end := d.listenOn(l, tt.drain)
		method, target, _ := strings.Cut(call, " ")
		req := must(http.NewRequestWithContext(t.Context(), method, "http://localhost"+target, nil))(t)
		resp := must(raw("unix://" + path).Do(req))(t)
		body := bufio.NewReader(resp.Body)
		if strings.Contains(call, "/logs") {
			must(body.Discard(8))(t)
		}
		end()
		if got, err := io.ReadAll(body); err == nil || string(got) != tt.want {
			t.Errorf("%s: %q, %v", call, got, err)
		}
		_ = resp.Body.Close()
	}
}

// Nobody holds the server up by not reading.
func TestUnreadDrain(t *testing.T) {
	d := standInDoor(t, &standIn{handler: func(w http.ResponseWriter, _ *http.Request) {
		for err := error(nil); err == nil; {
			_, err = io.WriteString(w, strings.Repeat("x", 4<<10))
		}
	}})
	l := newPipes()
	end := d.listenOn(l, time.Hour)
	conn := l.dial()
	defer func() { _ = conn.Close() }()
	must(io.WriteString(conn, "GET /v1.41/containers/"+standInID+"/logs?follow=1&stdout=1 HTTP/1.1\r\nHost: localhost\r\n\r\n"))(t)
	must(io.ReadFull(conn, make([]byte, 1000)))(t)
	ended := make(chan struct{})
	go func() { end(); close(ended) }()
	select {
	case <-ended:
	case <-time.After(30 * time.Second):
		t.Error("the server waits for who doesn't read")
		_ = conn.Close()
	}
}
