package sandboxapi_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/coder/websocket"

	"github.com/bermhq/berm/proxy/sandboxapi"
	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/runtimetest"
)

func TestPortWebSocket(t *testing.T) {
	h := newHouse(t, nil)
	var origin string
	h.serve(8000, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		origin = r.Header.Get("Origin")
		c, err := websocket.Accept(w, r, nil)
		if err != nil {
			return
		}
		defer func() { _ = c.CloseNow() }()
		c.SetReadLimit(-1)
		for {
			kind, b, err := c.Read(r.Context())
			if err != nil {
				return
			}
			if string(b) == "bye" {
				_ = c.Close(4000, "as you wish")
				return
			}
			if err := c.Write(r.Context(), kind, b); err != nil {
				return
			}
		}
	}))
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	dial := func() *websocket.Conn {
		t.Helper()
		c, _, err := websocket.Dial(ctx, "ws"+strings.TrimPrefix(h.url, "http")+portPath+"/ws", &websocket.DialOptions{
			HTTPHeader: http.Header{"X-Api-Token": {master}},
		})
		must(t, err)
		c.SetReadLimit(2 << 20)
		return c
	}
	c := dial()
	for _, text := range []string{"hello", strings.Repeat("x", 1<<20)} {
		must(t, c.Write(ctx, websocket.MessageText, []byte(text)))
		if _, b, err := c.Read(ctx); err != nil || string(b) != text {
			t.Fatalf("got %d bytes, %v", len(b), err)
		}
	}
	must(t, c.Write(ctx, websocket.MessageText, []byte("bye")))
	if _, _, err := c.Read(ctx); websocket.CloseStatus(err) != 4000 {
		t.Errorf("it closed with %v", err)
	}
	if origin != "" {
		t.Errorf("an origin was made up: %s", origin)
	}
	c = dial()
	if _, err := h.Delete(ctx, "red", "k"); err != nil {
		t.Fatal(err)
	}
	if _, _, err := c.Read(ctx); err == nil || ctx.Err() != nil {
		t.Errorf("the sandbox is gone, and the connection isn't: %v", err)
	}
	_ = c.CloseNow()
}

// TestPortHalfClose checks that one side of a switched connection can end alone.
func TestPortHalfClose(t *testing.T) {
	h := newHouse(t, nil)
	h.switches(func(c net.Conn, r io.Reader) {
		b, err := io.ReadAll(r)
		_, _ = fmt.Fprintf(c, "%d bytes, %v", len(b), err)
	})
	c, r := h.switched()
	_, _ = io.WriteString(c, "hello")
	must(t, c.(*net.TCPConn).CloseWrite())
	if b, err := io.ReadAll(r); err != nil || string(b) != "5 bytes, <nil>" {
		t.Errorf("got %q, %v", b, err)
	}
}

// counted counts connections that are open.
type counted struct {
	*runtimetest.Fake
	open, all atomic.Int64
}

func (c *counted) Dial(ctx context.Context, id string, port int) (runtime.Conn, error) {
	conn, err := c.Fake.Dial(ctx, id, port)
	if err != nil {
		return nil, err
	}
	c.open.Add(1)
	c.all.Add(1)
	return &countedConn{conn, sync.OnceFunc(func() { c.open.Add(-1) })}, nil
}

type countedConn struct {
	runtime.Conn
	ended func()
}

func (c *countedConn) Close() error {
	c.ended()
	return c.Conn.Close()
}

// TestPortsLeaveNothing checks that no connection outlives its request.
func TestPortsLeaveNothing(t *testing.T) {
	var c counted
	h := newHouse(t, func(f *runtimetest.Fake) runtime.AgentRuntime { c.Fake = f; return &c })
	h.serve(8000, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/wait" {
			w.WriteHeader(200)
			_ = http.NewResponseController(w).Flush()
			<-r.Context().Done()
		}
	}))
	for range 20 {
		h.want(200, "", "GET", portPath+"/", "")
	}
	ctx, cancel := context.WithCancel(t.Context())
	resp, err := h.client.Do(h.request("GET", portPath+"/wait", nil).WithContext(ctx))
	must(t, err)
	cancel()
	_ = resp.Body.Close()
	eventually(t, "no connection is left", func() bool { return c.open.Load() == 0 })
}

// TestPortThatDoesntRead checks that such a one keeps no connection once its caller is
// gone, and that the caller who stays is told.
func TestPortThatDoesntRead(t *testing.T) {
	var c counted
	h := newHouse(t, func(f *runtimetest.Fake) runtime.AgentRuntime { c.Fake = f; return &c },
		func(o *sandboxapi.Options) { o.PortTimeout = 20 * time.Millisecond })
	over := make(chan struct{})
	defer close(over)
	h.fake.Listen(8000, func(c net.Conn) { <-over; _ = c.Close() })
	conn, err := net.Dial("tcp", strings.TrimPrefix(h.url, "http://"))
	must(t, err)
	_, _ = fmt.Fprintf(conn, "POST %s/ HTTP/1.1\r\nHost: localhost\r\nX-Api-Token: %s\r\nContent-Length: 1000000\r\n\r\n%s",
		portPath, master, strings.Repeat("x", 100_000))
	_ = conn.Close()
	eventually(t, "no connection is left", func() bool { return c.all.Load() == 1 && c.open.Load() == 0 })
	h.want(504, "port_timeout", "POST", portPath+"/", strings.Repeat("x", 1<<20))
}

// TestPatienceAfterSwitch checks that the limit of writes is one of requests alone.
func TestPatienceAfterSwitch(t *testing.T) {
	t.Parallel()
	const limit = time.Second
	h := newHouse(t, nil, func(o *sandboxapi.Options) { o.PortTimeout = limit })
	h.switches(func(c net.Conn, r io.Reader) {
		<-time.After(limit + limit/2) // all the while somebody writes
		n, err := io.CopyN(io.Discard, r, 200_000)
		_, _ = fmt.Fprintf(c, "%d bytes, %v", n, err)
	})
	c, r := h.switched()
	_, _ = io.WriteString(c, strings.Repeat("x", 200_000))
	if b, err := io.ReadAll(r); err != nil || string(b) != "200000 bytes, <nil>" {
		t.Errorf("got %q, %v", b, err)
	}
}

// TestSideThatStays checks that neither side of a switched connection keeps it once the
// other has gone.
func TestSideThatStays(t *testing.T) {
	var c counted
	h := newHouse(t, func(f *runtimetest.Fake) runtime.AgentRuntime { c.Fake = f; return &c },
		func(o *sandboxapi.Options) { o.PortTimeout = 100 * time.Millisecond })
	over := make(chan struct{})
	defer close(over)
	left := func(what string, n int64) {
		t.Helper()
		eventually(t, what, func() bool { return c.all.Load() == n && c.open.Load() == 0 })
	}
	dead := func(net.Conn, io.Reader) { <-over }
	h.switches(dead)
	conn, _ := h.switched()
	_ = conn.Close()
	left("a port that does nothing is left", 1)

	h.switches(dead)
	conn, _ = h.switched()
	_ = conn.SetWriteDeadline(time.Now().Add(200 * time.Millisecond))
	_, _ = conn.Write(make([]byte, 32<<20)) // more than fits in between
	_ = conn.Close()
	left("a port that doesn't read is left", 2)

	h.switches(func(net.Conn, io.Reader) {})
	conn, r := h.switched()
	if b, err := io.ReadAll(r); err != nil || len(b) > 0 {
		t.Errorf("got %q, %v", b, err)
	}
	left("a caller that does nothing is left", 3)
	_ = conn.Close()
}

// switches has port 8000 switch to a protocol of its own.
func (h *house) switches(then func(c net.Conn, r io.Reader)) {
	h.fake.Listen(8000, func(c net.Conn) {
		defer func() { _ = c.Close() }()
		r := bufio.NewReader(c)
		if _, err := http.ReadRequest(r); err != nil {
			return
		}
		_, _ = io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: own\r\n\r\n")
		then(c, r)
	})
}

// switched is a connection with port 8000 that has switched to a protocol of its own.
func (h *house) switched() (net.Conn, *bufio.Reader) {
	h.t.Helper()
	c, err := net.Dial("tcp", strings.TrimPrefix(h.url, "http://"))
	must(h.t, err)
	h.t.Cleanup(func() { _ = c.Close() })
	_, _ = fmt.Fprintf(c, "GET %s/ HTTP/1.1\r\nHost: localhost\r\nX-Api-Token: %s\r\nConnection: Upgrade\r\nUpgrade: own\r\n\r\n", portPath, master)
	r := bufio.NewReader(c)
	resp, err := http.ReadResponse(r, nil)
	if err != nil || resp.StatusCode != 101 {
		h.t.Fatalf("got %+v, %v", resp, err)
	}
	return c, r
}
