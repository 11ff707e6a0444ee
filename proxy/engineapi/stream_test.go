package engineapi

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/iotest"
	"time"

	"github.com/docker/docker/api/types/container"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/proxy/engineapi/upstream"
	"github.com/bermhq/berm/runtime/runtimetest/check"
	"github.com/bermhq/berm/runtime/runtimetest/pipes"
)

// standIn is an engine with one container, of which a test says itself what its
// connections do.
type standIn struct {
	t       testing.TB
	door    func() *Proxy
	hijack  func(conn net.Conn, buffered *bufio.Reader, greeting string)
	handler http.HandlerFunc // of what isn't told below
}

var standInID = strings.Repeat("ab", 32)

const standInTenant = "piped"

func (s *standIn) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Api-Version", "1.41")
	switch strings.TrimPrefix(r.URL.Path, "/v1.41") {
	case "/_ping":
	case "/containers/" + standInID + "/json":
		_, _ = fmt.Fprintf(w, `{"Id":%q,"HostConfig":{},"State":{},"Config":{"Labels":%s}}`, standInID, s.door().sealed(lifecycle.ObjectContainer, standInTenant, lifecycle.LabelSessionID, "s"))
	case "/containers/json":
		_, _ = fmt.Fprintf(w, `[{"Id":%q,"Labels":%s}]`, standInID, s.door().sealed(lifecycle.ObjectContainer, standInTenant, lifecycle.LabelSessionID, "s"))
	case "/exec/" + standInID + "/json":
		_, _ = fmt.Fprintf(w, `{"ContainerID":%q}`, standInID)
	case "/containers/" + standInID + "/attach", "/exec/" + standInID + "/start":
		if r.ContentLength != 0 && strings.HasSuffix(r.URL.Path, "/start") {
			_, _ = io.Copy(io.Discard, r.Body)
		}
		conn, rw, err := http.NewResponseController(w).Hijack()
		if err != nil {
			s.t.Error(err)
			return
		}
		defer func() { _ = conn.Close() }()
		s.hijack(conn, rw.Reader, "HTTP/1.1 101 UPGRADED\r\nContent-Type: application/vnd.docker.raw-stream\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n\r\n")
	default:
		s.handler(w, r)
	}
}

// standInDoor is a door before a stand-in.
func standInDoor(t *testing.T, s *standIn) *testDoor { return doorBefore(t, s, "") }

// doorBefore is standInDoor with a policy.
func doorBefore(t *testing.T, s *standIn, rules string) *testDoor {
	t.Helper()
	s.t = t
	d := doorTo(t, serveEngine(t, s.ServeHTTP), rules)
	s.door = func() *Proxy { return d.Proxy }
	return d
}

// listenOn serves the stand-in's tenant on a listener, and gives what ends it.
func (d *testDoor) listenOn(l net.Listener, drain time.Duration) (end func()) {
	return d.serve(l, Callers{Any: &Caller{Name: standInTenant, Tenant: standInTenant}}, drain)
}

// streams is how many the door has open for the stand-in's tenant.
func (d *testDoor) streams() int64 { return d.making("streams " + standInTenant) }

// dialers connect with a door in every way that there is.
func dialers(t *testing.T, d *testDoor) map[string]func() upstream.Half {
	t.Helper()
	var lc net.ListenConfig
	unixL, err1 := proxy.Listen(t.Context(), "unix://"+filepath.Join(d.dir, "d.sock"), 0o600)
	tcpL, err2 := lc.Listen(t.Context(), "tcp", "127.0.0.1:0")
	tlsL, err3 := lc.Listen(t.Context(), "tcp", "127.0.0.1:0")
	must(t, errors.Join(err1, err2, err3))
	certs := httptest.NewUnstartedServer(nil)
	certs.StartTLS()
	config := certs.TLS.Clone()
	config.NextProtos = []string{"http/1.1"}
	certs.Close()
	d.listenOn(unixL, time.Second)
	d.listenOn(tcpL, time.Second)
	d.listenOn(tls.NewListener(tlsL, config), time.Second)
	dial := func(network, address string, secure bool) func() upstream.Half {
		return func() upstream.Half {
			t.Helper()
			conn := check.Value((&net.Dialer{}).DialContext(t.Context(), network, address))(t)
			if secure {
				conn = tls.Client(conn, &tls.Config{InsecureSkipVerify: true}) //nolint:gosec // it's a test's own
			}
			t.Cleanup(func() { _ = conn.Close() })
			return conn.(upstream.Half)
		}
	}
	return map[string]func() upstream.Half{
		"unix": dial("unix", filepath.Join(d.dir, "d.sock"), false),
		"tcp":  dial("tcp", tcpL.Addr().String(), false),
		"tls":  dial("tcp", tlsL.Addr().String(), true),
	}
}

const attachRequest = "POST /v1.41/containers/%s/attach?stream=1&stdin=1&stdout=1 HTTP/1.1\r\nHost: localhost\r\n%s\r\n"

// attachTo attaches over a connection, with more said at once, and gives the status and
// what the engine says.
func attachTo(t *testing.T, conn net.Conn, headers, more string) (int, io.Reader) {
	t.Helper()
	check.Value(io.WriteString(conn, fmt.Sprintf(attachRequest, standInID, headers)+more))(t)
	br := bufio.NewReader(conn)
	resp := check.Value(http.ReadResponse(br, nil))(t)
	return resp.StatusCode, br
}

const upgradeHeaders = "Connection: Upgrade\r\nUpgrade: tcp\r\n"

// What is said along with the request and with the answer's header is kept, and the end of
// the caller's input isn't the end of what it hears.
func TestPipeHalfClose(t *testing.T) {
	d := standInDoor(t, &standIn{hijack: func(conn net.Conn, br *bufio.Reader, greeting string) {
		_, _ = io.WriteString(conn, greeting+"first,")
		// Past what is buffered, the server's reader ends with the request.
		rest, _ := br.Peek(br.Buffered())
		in, err := io.ReadAll(io.MultiReader(bytes.NewReader(rest), conn))
		_, _ = fmt.Fprintf(conn, "%s,%v", in, err)
	}})
	attach := strings.Replace(attachRequest, "%s\r\n", "", 1)
	exec := "POST /v1.41/exec/%s/start HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n"
	for name, dial := range dialers(t, d) {
		for request, want := range map[string]int{attach + upgradeHeaders + "\r\n": 101, attach + "\r\n": 200, exec + upgradeHeaders + "\r\nc\r\n{\"Tty\":true}\r\n0\r\n\r\n": 101} {
			t.Run(fmt.Sprint(name, " ", request[:20], want), func(t *testing.T) {
				conn := dial()
				check.Value(fmt.Fprintf(conn, request+"early,", standInID))(t)
				r := bufio.NewReader(conn)
				if resp := check.Value(http.ReadResponse(r, nil))(t); resp.StatusCode != want {
					t.Errorf("status %d", resp.StatusCode)
				}
				_, err := io.WriteString(conn, "late")
				must(t, errors.Join(err, conn.CloseWrite()))
				if got, err := io.ReadAll(r); err != nil || string(got) != "first,early,late,<nil>" {
					t.Errorf("it heard %q, %v", got, err)
				}
				eventually(t, func() bool { return d.streams() == 0 })
			})
		}
	}
}

// A caller that vanishes is the end of the connection to the engine, whatever it left
// behind and whether or not the engine takes it.
func TestPipeCallerVanishes(t *testing.T) {
	type engineSide struct {
		conn net.Conn
		done chan struct{}
	}
	engines := make(chan engineSide)
	d := standInDoor(t, &standIn{hijack: func(conn net.Conn, _ *bufio.Reader, greeting string) {
		_, _ = io.WriteString(conn, greeting+"x")
		e := engineSide{conn, make(chan struct{})}
		engines <- e
		<-e.done
	}})
	ways := dialers(t, d)
	for name, tt := range map[string]struct {
		way    string
		before func(t *testing.T, conn upstream.Half)
		taking bool // the engine takes the input
		engine string
	}{
		"unix":                    {way: "unix", taking: true},
		"unix, after its input":   {way: "unix", taking: true, before: endInput},
		"unix, behind its input":  {way: "unix", before: stuff},
		"tls":                     {way: "tls", taking: true},
		"tls, after its input":    {way: "tls", taking: true, before: endInput},
		"tcp, with the engine's":  {way: "tcp", taking: true, engine: "more"},
		"tcp, with unread output": {way: "tcp", taking: true, before: unread},
	} {
		t.Run(name, func(t *testing.T) {
			conn := ways[tt.way]()
			if tt.way == "tcp" && tt.before != nil {
				check.Value(fmt.Fprintf(conn, attachRequest, standInID, upgradeHeaders))(t)
			} else if _, r := attachTo(t, conn, upgradeHeaders, ""); r != nil {
				check.Value(io.ReadFull(r, make([]byte, 1)))(t)
			}
			e := <-engines
			defer close(e.done)
			if tt.before != nil {
				tt.before(t, conn)
			}
			start := time.Now()
			_ = conn.Close()
			if tt.engine != "" {
				eventually(t, func() bool { _, err := io.WriteString(e.conn, tt.engine); return err != nil })
			}
			if tt.taking {
				_, _ = io.Copy(io.Discard, e.conn)
			}
			eventually(t, func() bool { return d.streams() == 0 })
			t.Logf("noticed after %s", time.Since(start).Round(time.Millisecond))
		})
	}
}

func endInput(t *testing.T, conn upstream.Half) {
	t.Helper()
	must(t, conn.CloseWrite())
}

// stuff says more than anybody on the way can hold.
func stuff(t *testing.T, conn upstream.Half) {
	t.Helper()
	for err := error(nil); err == nil; {
		_ = conn.SetWriteDeadline(time.Now().Add(300 * time.Millisecond))
		_, err = conn.Write(make([]byte, 64<<10))
	}
}

// unread waits until there is something that the caller hasn't read.
func unread(t *testing.T, _ upstream.Half) {
	t.Helper()
	time.Sleep(100 * time.Millisecond)
}

// What a caller said before it left reaches the engine.
func TestPipeLastWords(t *testing.T) {
	const size = 300_000 // more than there is room for before an engine that doesn't read
	type hearing struct{ left, heard chan int64 }
	engines := make(chan hearing)
	d := standInDoor(t, &standIn{hijack: func(conn net.Conn, _ *bufio.Reader, greeting string) {
		_, _ = io.WriteString(conn, greeting)
		h := hearing{make(chan int64), make(chan int64, 1)}
		engines <- h
		<-h.left
		n, _ := io.Copy(io.Discard, conn)
		h.heard <- n
	}})
	d.hangupGrace = time.Minute // on a busy machine half a second may be too little
	for name, dial := range dialers(t, d) {
		t.Run(name, func(t *testing.T) {
			conn := dial()
			attachTo(t, conn, upgradeHeaders, "")
			h := <-engines
			check.Value(conn.Write(make([]byte, size)))(t)
			_ = conn.Close()
			time.Sleep(2 * hangupPoll) // so that the door has seen it
			close(h.left)
			if n := <-h.heard; n != size {
				t.Errorf("%d bytes of %d", n, size)
			}
		})
	}
}

// The engine's end is the caller's, who hears all that was said before: also one that
// reads slowly, and still says something that nobody takes.
func TestPipeEngineEnds(t *testing.T) {
	said := make([]byte, 1<<20)
	_, _ = rand.Read(said)
	for name, hijack := range map[string]func(conn net.Conn){
		"closed": func(conn net.Conn) { _, _ = conn.Write(said) },
		"deaf": func(conn net.Conn) {
			_, _ = conn.Write(said)
			_ = conn.(upstream.Half).CloseWrite()
			<-t.Context().Done() // it stays open, and full
		},
	} {
		d := standInDoor(t, &standIn{hijack: func(conn net.Conn, _ *bufio.Reader, greeting string) {
			_, _ = io.WriteString(conn, greeting)
			hijack(conn)
		}})
		for way, dial := range dialers(t, d) {
			t.Run(name+" "+way, func(t *testing.T) {
				conn := dial()
				_, r := attachTo(t, conn, upgradeHeaders, "")
				var wg sync.WaitGroup
				wg.Go(func() {
					for err := error(nil); err == nil; {
						_, err = conn.Write(make([]byte, 64<<10))
					}
				})
				time.Sleep(200 * time.Millisecond)
				got, err := io.ReadAll(r)
				if err != nil || !bytes.Equal(got, said) {
					t.Errorf("%d of %d bytes, %v", len(got), len(said), err)
				}
				_ = conn.Close()
				wg.Wait()
				eventually(t, func() bool { return d.streams() == 0 })
			})
		}
	}
}

// The server's drain ends what hasn't ended by its timeout, and says so.
func TestPipeDrain(t *testing.T) {
	const said = "\x01\x00\x00\x00\x00\x00\x00\x02hi"
	engineEnded := make(chan struct{})
	d := standInDoor(t, &standIn{hijack: func(conn net.Conn, _ *bufio.Reader, greeting string) {
		_, _ = io.WriteString(conn, greeting+said)
		_, _ = io.Copy(io.Discard, conn)
		close(engineEnded)
	}})
	path := filepath.Join(d.dir, "drain.sock")
	l := check.Value(proxy.Listen(t.Context(), "unix://"+path, 0o600))(t)
	end := d.listenOn(l, 100*time.Millisecond)
	conn := check.Value((&net.Dialer{}).DialContext(t.Context(), "unix", path))(t)
	defer func() { _ = conn.Close() }()
	_, r := attachTo(t, conn, upgradeHeaders, "")
	check.Value(io.ReadFull(r, make([]byte, len(said))))(t)
	end()
	if got, err := io.ReadAll(r); err != nil || string(got) != "\x02\x00\x00\x00\x00\x00\x00\x1fberm: the server is going down\n" {
		t.Errorf("the last word is %q, %v", got, err)
	}
	<-engineEnded
	eventually(t, func() bool { return d.streams() == 0 })
}

// A tenant can't keep more than so many streams open.
func TestPipeCap(t *testing.T) {
	d := standInDoor(t, &standIn{hijack: func(conn net.Conn, _ *bufio.Reader, greeting string) {
		_, _ = io.WriteString(conn, greeting)
		_, _ = io.Copy(io.Discard, conn)
	}, handler: func(w http.ResponseWriter, r *http.Request) {
		_ = http.NewResponseController(w).Flush()
		<-r.Context().Done()
	}})
	dial := dialers(t, d)["unix"]
	conns := make([]upstream.Half, maxStreams)
	for i := range conns {
		conns[i] = dial()
		if status, _ := attachTo(t, conns[i], upgradeHeaders, ""); status != http.StatusSwitchingProtocols {
			t.Fatalf("number %d: %d", i, status)
		}
	}
	if status, _ := attachTo(t, dial(), upgradeHeaders, ""); status != http.StatusTooManyRequests {
		t.Errorf("one too many: %d", status)
	}
	c := newClient(t, "unix://"+filepath.Join(d.dir, "d.sock"))
	logs := container.LogsOptions{ShowStdout: true, Follow: true}
	if _, err := c.ContainerLogs(t.Context(), standInID, logs); err == nil || !strings.Contains(err.Error(), "256 streams") {
		t.Errorf("one too many: %v", err)
	}
	eventually(t, func() bool { // and each is written down while it is open
		log := readFile(t, d.audit)
		return bytes.Count(log, []byte(`"route":"/containers/{id}/attach","api_version":"1.41","verdict":"allowed"`)) == maxStreams
	})
	_ = conns[0].Close()
	eventually(t, func() bool { return d.streams() == maxStreams-1 })
	r := check.Value(c.ContainerLogs(t.Context(), standInID, logs))(t)
	_ = r.Close()
	eventually(t, func() bool { return d.streams() == maxStreams-1 })
}

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
			if got := string(p.word(farewell)); got != tt.want {
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
		l := check.Value(proxy.Listen(t.Context(), "unix://"+path, 0o600))(t)
		end := d.listenOn(l, tt.drain)
		method, target, _ := strings.Cut(call, " ")
		req := check.Value(http.NewRequestWithContext(t.Context(), method, "http://localhost"+target, nil))(t)
		resp := check.Value(raw("unix://" + path).Do(req))(t)
		body := bufio.NewReader(resp.Body)
		if strings.Contains(call, "/logs") {
			check.Value(body.Discard(8))(t)
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
	l := pipes.Listen()
	end := d.listenOn(l, time.Hour)
	conn := l.Dial()
	defer func() { _ = conn.Close() }()
	check.Value(io.WriteString(conn, "GET /v1.41/containers/"+standInID+"/logs?follow=1&stdout=1 HTTP/1.1\r\nHost: localhost\r\n\r\n"))(t)
	check.Value(io.ReadFull(conn, make([]byte, 1000)))(t)
	ended := make(chan struct{})
	go func() { end(); close(ended) }()
	select {
	case <-ended:
	case <-time.After(30 * time.Second):
		t.Error("the server waits for who doesn't read")
		_ = conn.Close()
	}
}
