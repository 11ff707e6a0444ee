package sandboxapi_test

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/coder/websocket"
	"github.com/google/go-cmp/cmp"

	"github.com/bermhq/berm/proxy/apitype"
	"github.com/bermhq/berm/proxy/sandboxapi"
	rt "github.com/bermhq/berm/runtime"
)

const (
	attachPath     = "/api/v1/sandboxes/k/processes/tools/attach"
	execAttachPath = execsPath + "/job-1/attach"
)

// dial attaches.
func (d *door) dial(path string) *websocket.Conn {
	d.t.Helper()
	ctx, cancel := context.WithTimeout(d.t.Context(), 30*time.Second)
	defer cancel()
	c, _, err := websocket.Dial(ctx, d.url+path, &websocket.DialOptions{HTTPClient: d.client, HTTPHeader: http.Header{"X-API-Token": {master}}})
	must(d.t, err)
	c.SetReadLimit(1 << 20)
	d.t.Cleanup(func() { _ = c.CloseNow() })
	return c
}

// receive reads one message: "text: …" or "binary: …".
func receive(t *testing.T, c *websocket.Conn) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	typ, b, err := c.Read(ctx)
	must(t, err)
	return map[websocket.MessageType]string{websocket.MessageText: "text: ", websocket.MessageBinary: "binary: "}[typ] + string(b)
}

func send(t *testing.T, c *websocket.Conn, typ websocket.MessageType, s string) {
	t.Helper()
	must(t, c.Write(t.Context(), typ, []byte(s)))
}

// closed reads until the other side closes, and answers how.
func closed(t *testing.T, c *websocket.Conn) websocket.CloseError {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	for {
		_, _, err := c.Read(ctx)
		var ce websocket.CloseError
		if errors.As(err, &ce) {
			return ce
		}
		must(t, err)
	}
}

func expect(t *testing.T, c *websocket.Conn, want ...string) {
	t.Helper()
	for _, w := range want {
		if got := receive(t, c); got != w {
			t.Errorf("got %q, want %q", got, w)
		}
	}
}

func TestAttachBytes(t *testing.T) {
	for _, path := range []string{attachPath, attachPath + "?frames=bytes", execAttachPath} {
		d := newDoor(t)
		tape := d.running()
		tape.print(false, "be\xff")
		c := d.dial(path)
		expect(t, c, `text: {"seq":0}`, "binary: \x01be\xff")
		tape.print(true, "err")
		expect(t, c, "binary: \x02err")
		send(t, c, websocket.MessageBinary, "in\x00\xff")
		send(t, c, websocket.MessageText, `{"resize":{"rows":40,"cols":120}}`)
		send(t, c, websocket.MessageText, `{"signal":"INT"}`)
		send(t, c, websocket.MessageText, `{"signal":9}`)
		send(t, c, websocket.MessageText, `{"close_stdin":true}`)
		eventually(t, "all of it came", func() (done bool) {
			tape.read(func() { done = tape.closed })
			return done
		})
		s := d.manager.streams
		if got := tape.input.String(); got != "in\x00\xff" {
			t.Errorf("the input is %q", got)
		}
		if diff := cmp.Diff([]any{[]int{2, 9}, [][2]int{{40, 120}}}, []any{s.signals, s.sizes}); diff != "" {
			t.Error(diff)
		}
		send(t, c, websocket.MessageBinary, "more")
		expect(t, c, `text: {"error":{"code":"process_ended","detail":"its input is closed"}}`)
		tape.finish(io.EOF)
		status := map[bool]string{true: "completed", false: "exited"}[path == execAttachPath]
		want := websocket.CloseError{Code: websocket.StatusNormalClosure, Reason: `{"exit_code":0,"status":"` + status + `"}`}
		if ce := closed(t, c); ce != want {
			t.Errorf("closed with %v", ce)
		}
		eventually(t, "it is let go", tape.idle)
	}
}

func TestAttachControl(t *testing.T) {
	d := newDoor(t)
	d.running()
	c := d.dial(attachPath)
	for message, code := range map[string]string{
		``: "malformed", `x`: "malformed", `{}`: "validation", `[]`: "validation", `{"signal":"NONE"}`: "validation", `{"signal":65}`: "validation",
		`{"signal":1,"close_stdin":true}`: "validation", `{"stdin":"x"}`: "malformed", `{"close_stdin":false}`: "validation",
		strings.Repeat(" ", 5000): "too_large",
	} {
		send(t, c, websocket.MessageText, message)
		var got apitype.AttachError
		if err := json.Unmarshal([]byte(strings.TrimPrefix(receive(t, c), "text: ")), &got); err != nil || got.Error.Code != code || got.Error.Detail == "" {
			t.Errorf("%.40q: got %+v, %v; want %s", message, got, err, code)
		}
	}
	d.manager.err = cant.err
	send(t, c, websocket.MessageText, `{"signal":"TERM"}`)
	if got := receive(t, c); !strings.Contains(got, `"not_supported"`) {
		t.Errorf("got %q", got)
	}
}

func TestAttachLines(t *testing.T) {
	d := newDoor(t)
	tape := d.running()
	c := d.dial(attachPath + "?frames=lines")
	tape.print(false, "one\ntw")
	expect(t, c, `text: {"stream":"stdout","seq":4,"line":"one"}`)
	tape.print(true, "e<1>\n\n")
	expect(t, c, `text: {"stream":"stderr","seq":11,"line":"e\u003c1\u003e","resume":"4,11"}`, `text: {"stream":"stderr","seq":12,"line":"","resume":"4,12"}`)
	tape.print(false, "o\xc3")
	tape.print(false, "\xbc\nrest")
	expect(t, c, `text: {"stream":"stdout","seq":16,"line":"twoü"}`)
	send(t, c, websocket.MessageText, "in")
	send(t, c, websocket.MessageText, "")
	eventually(t, "the input came", func() (done bool) {
		tape.read(func() { done = tape.input.String() == "in\n\n" })
		return done
	})
	tape.print(true, "\xffx")
	tape.finish(io.EOF)
	expect(t, c, `text: {"stream":"stdout","seq":22,"line":"rest","partial":true,"resume":"22,20"}`, `text: {"stream":"stderr","seq":22,"line":"`+"\ufffd"+`x","partial":true}`)
	if ce := closed(t, c); ce.Code != websocket.StatusNormalClosure {
		t.Errorf("closed with %v", ce)
	}

	c = d.dial(attachPath + "?frames=lines&after=4")
	expect(t, c, `text: {"stream":"stderr","seq":11,"line":"e\u003c1\u003e","resume":"4,11"}`)
	_ = c.CloseNow()
	d.want(422, "validation", "GET", attachPath+"?after=4,11", "", handshake)

	d.running()
	c = d.dial(attachPath + "?frames=lines")
	send(t, c, websocket.MessageBinary, "x")
	if ce := closed(t, c); ce.Code != websocket.StatusUnsupportedData {
		t.Errorf("closed with %v", ce)
	}
}

func TestAttachResumesExactly(t *testing.T) {
	d := newDoor(t)
	tape := d.running()
	for _, h := range halves {
		tape.print(h.stderr, h.text)
	}
	tape.finish(io.EOF)
	resumesExactly(t, func(after string) (out []told) {
		c := d.dial(attachPath + "?frames=lines&after=" + after)
		defer func() { _ = c.CloseNow() }()
		for {
			_, b, err := c.Read(t.Context())
			if err != nil {
				return out
			}
			var l apitype.AttachLine
			must(t, json.Unmarshal(b, &l))
			e := told{place: placeOf(l.Seq, l.Resume)}
			if l.Stream == "stderr" {
				e.stderr = l.Line + "|"
			} else {
				e.stdout = l.Line + "|"
			}
			out = append(out, e)
		}
	})
}

func TestAttachTakeOver(t *testing.T) {
	d := newDoor(t)
	tape := d.running()
	tape.print(false, "x")
	first := d.dial(attachPath)
	expect(t, first, `text: {"seq":0}`, "binary: \x01x")
	d.want(409, "process_conflict", "GET", attachPath, "", handshake)
	d.want(426, "upgrade_required", "GET", attachPath+"?take_over=true", "") // doesn't take over
	second := d.dial(attachPath + "?take_over=true&after=1")
	if ce := closed(t, first); ce.Code != 4001 {
		t.Errorf("the first was closed with %v", ce)
	}
	tape.print(false, "y")
	expect(t, second, `text: {"seq":1}`, "binary: \x01y")
	_ = second.Close(websocket.StatusNormalClosure, "")
	eventually(t, "it is let go", tape.idle)
	third := d.dial(attachPath)
	expect(t, third, `text: {"seq":0}`, "binary: \x01x", "binary: \x01y")
}

func TestAttachRefuses(t *testing.T) {
	d := newDoor(t)
	d.running()
	for _, q := range []string{"?frames=words", "?frames=", "?after=-1", "?take_over=1"} {
		d.want(422, "validation", "GET", attachPath+q, "", handshake)
	}
	d.want(400, "malformed", "GET", execAttachPath+"?take_over=true", "", handshake)
	d.want(426, "upgrade_required", "GET", attachPath, "", handshake, withHeader("Sec-WebSocket-Version", "8"))
	d.want(426, "upgrade_required", "GET", attachPath, "", handshake, withHeader("Connection", "keep-alive"))
	d.want(403, "origin_refused", "GET", attachPath, "", handshake, withHeader("Origin", "https://evil.example"))
	d.want(421, "host_refused", "GET", attachPath, "", handshake, withHost("evil.example"))
	d.want(401, "unauthorized", "GET", attachPath, "", handshake, withToken(""))

	c := d.dial(attachPath)
	send(t, c, websocket.MessageBinary, strings.Repeat("x", 1<<20))
	send(t, c, websocket.MessageBinary, strings.Repeat("x", 1<<20+1))
	if ce := closed(t, c); ce.Code != websocket.StatusMessageTooBig {
		t.Errorf("closed with %v", ce)
	}
}

func TestAttachPings(t *testing.T) {
	d := newDoor(t, func(o *sandboxapi.Options) { o.Heartbeat, o.Gate.Tokens = 5*time.Millisecond, nil })
	tape := d.running()
	pings := make(chan struct{}, 100)
	c, _, err := websocket.Dial(t.Context(), d.url+attachPath, &websocket.DialOptions{OnPingReceived: func(context.Context, []byte) bool {
		select {
		case pings <- struct{}{}:
		default:
		}
		return true
	}})
	must(t, err)
	read := c.CloseRead(t.Context())
	for range 5 {
		select {
		case <-pings:
		case <-read.Done():
			t.Fatal("the connection is gone")
		}
	}
	_ = c.CloseNow()
	eventually(t, "it is let go", tape.idle)
}

// A process that takes no input, and one whose output nobody reads, hold up the other
// side, and neither keeps an attachment from ending.
func TestAttachBackpressure(t *testing.T) {
	d := newDoor(t)
	tape := d.running()
	tape.change(func() { tape.stuck = true })
	c := d.dial(attachPath)
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	written := make(chan error, 1)
	go func() {
		for {
			if err := c.Write(ctx, websocket.MessageBinary, make([]byte, 1<<20)); err != nil {
				written <- err
				return
			}
		}
	}()
	tape.print(false, "x")
	expect(t, c, `text: {"seq":0}`, "binary: \x01x") // output goes on
	tape.finish(io.EOF)
	if ce := closed(t, c); ce.Code != websocket.StatusNormalClosure {
		t.Errorf("closed with %v", ce)
	}
	if err := <-written; ctx.Err() != nil {
		t.Errorf("the writer was stuck: %v", err)
	}
	eventually(t, "it is let go", tape.idle)

	tape = d.running()
	text := make([]byte, 64<<10)
	tape.endless = func(int64) rt.Chunk { return rt.Chunk{Data: text} }
	c = d.dial(attachPath)
	var last int64
	played := func() (n int64) {
		tape.read(func() { n = tape.played })
		return n
	}
	eventually(t, "the process has to wait", func() bool { // when the kernel's buffers are full
		now := played()
		same := now == last && now > 0
		last = now
		time.Sleep(20 * time.Millisecond)
		return same
	})
	_ = c.CloseNow()
	eventually(t, "it is let go", tape.idle)
}
