package engineapi

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/coder/websocket"
	"github.com/docker/docker/api/types/container"

	"github.com/bermhq/berm/runtime/runtimetest/check"
)

// Streams on which nothing is said for 15 minutes go on.
func TestIdleStreams(t *testing.T) {
	for _, path := range []string{"/logs?follow=1&stdout=1", "/stats", "/wait"} {
		t.Run(path, func(t *testing.T) { synctest.Test(t, func(t *testing.T) { idleStream(t, path) }) })
	}
}

func idleStream(t *testing.T, path string) {
	var d *Proxy
	engine := &standIn{t: t, door: func() *Proxy { return d }, handler: func(w http.ResponseWriter, _ *http.Request) {
		flusher := http.NewResponseController(w)
		_ = flusher.Flush()
		for range 3 {
			time.Sleep(15 * time.Minute)
			_, _ = io.WriteString(w, "x")
			_ = flusher.Flush()
		}
	}}
	d, l := boundedDoor(t, Options{}, engine.ServeHTTP, standInTenant)
	conn := l[0].Dial()
	defer func() { _ = conn.Close() }()
	start := time.Now()
	method := map[bool]string{true: http.MethodPost, false: http.MethodGet}[path == "/wait"]
	check.Value(fmt.Fprintf(conn, "%s /v1.41/containers/%s%s HTTP/1.1\r\nHost: localhost\r\n\r\n", method, standInID, path))(t)
	resp := check.Value(http.ReadResponse(bufio.NewReader(conn), nil))(t)
	if took := time.Since(start); took != 0 {
		t.Errorf("the answer began after %s", took)
	}
	for i := range 3 {
		buf := make([]byte, 8)
		n, err := resp.Body.Read(buf)
		if n != 1 || time.Since(start) != time.Duration(i+1)*15*time.Minute {
			t.Fatalf("after %s: %q, %v", time.Since(start), buf[:n], err)
		}
	}
	if rest, err := io.ReadAll(resp.Body); err != nil || len(rest) != 0 {
		t.Errorf("in the end: %q, %v", rest, err)
	}
}

// A caller that leaves a stream is the end of the engine's call.
func TestStreamCallerVanishes(t *testing.T) {
	began, ended := make(chan struct{}), make(chan struct{})
	d := standInDoor(t, &standIn{handler: func(w http.ResponseWriter, r *http.Request) {
		_ = http.NewResponseController(w).Flush()
		began <- struct{}{}
		<-r.Context().Done()
		ended <- struct{}{}
	}})
	for way, dial := range dialers(t, d) {
		for _, line := range []string{"GET %s/logs?follow=1&stdout=1", "GET %s/stats", "POST %s/wait"} {
			t.Run(way+" "+line, func(t *testing.T) {
				conn := dial()
				check.Value(fmt.Fprintf(conn, line+" HTTP/1.1\r\nHost: localhost\r\n\r\n", "/v1.41/containers/"+standInID))(t)
				check.Value(http.ReadResponse(bufio.NewReader(conn), nil))(t)
				<-began
				start := time.Now()
				_ = conn.Close()
				<-ended
				t.Logf("noticed after %s", time.Since(start).Round(time.Millisecond))
				eventually(t, func() bool { return d.streams() == 0 })
			})
		}
	}
}

// A reader that pauses holds up what the engine sends, and nothing piles up between.
func TestSlowReader(t *testing.T) {
	const most = 4 << 20
	var sent atomic.Int64
	pour := func(w io.Writer) {
		for err := error(nil); err == nil; sent.Add(64 << 10) {
			_, err = w.Write(make([]byte, 64<<10))
		}
	}
	d := standInDoor(t, &standIn{handler: func(w http.ResponseWriter, _ *http.Request) { pour(w) }, hijack: func(conn net.Conn, _ *bufio.Reader, greeting string) {
		_, _ = io.WriteString(conn, greeting)
		pour(conn)
	}})
	dial := dialers(t, d)["unix"]
	for _, request := range []string{"GET /v1.41/containers/%s/logs?follow=1&stdout=1 HTTP/1.1\r\nHost: localhost\r\n\r\n", fmt.Sprintf(attachRequest, "%s", upgradeHeaders)} {
		sent.Store(0)
		conn := dial()
		check.Value(fmt.Fprintf(conn, request, standInID))(t)
		taken := check.Value(io.CopyN(io.Discard, conn, 1<<20))(t)
		for last := int64(-1); ; {
			eventually(t, func() bool { n := sent.Load(); still := n == last; last = n; return still })
			if held := last - taken; held > most {
				t.Errorf("%s: %d KiB are held", request, held>>10)
			}
			if taken > 8<<20 {
				break
			}
			taken += check.Value(io.CopyN(io.Discard, conn, 8<<20))(t) // it goes on
		}
		_ = conn.Close()
		eventually(t, func() bool { return d.streams() == 0 })
	}
}

// Over a WebSocket a container's terminal is spoken to.
func TestAttachWebSocket(t *testing.T) {
	d, direct := engineDoor(t, "")
	address := d.listen(Caller{Name: "ws", Tenant: "ws"})
	id := d.made(direct, "ws", "ws", container.Config{Cmd: []string{"sh", "-c", "stty -echo; while read x; do echo got $x; done"}, OpenStdin: true, Tty: true})
	options := &websocket.DialOptions{HTTPClient: raw(address)}
	conn, _, err := websocket.Dial(t.Context(), "http://localhost/v1.41/containers/ws/attach/ws?stream=1&stdin=1&stdout=1&stderr=1", options)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.CloseNow() }()
	var heard string
	for i := range 3 {
		must(t, conn.Write(t.Context(), websocket.MessageText, fmt.Appendf(nil, "line-%d\n", i)))
		for !strings.Contains(heard, fmt.Sprintf("got line-%d", i)) {
			_, b, err := conn.Read(t.Context())
			if err != nil {
				t.Fatal(heard, err)
			}
			heard += string(b)
		}
	}
	for what, header := range map[string]http.Header{
		"no upgrade":   {"Sec-Websocket-Version": {"13"}, "Sec-Websocket-Key": {"MDEyMzQ1Njc4OWFiY2RlZg=="}},
		"a short key":  {"Upgrade": {"websocket"}, "Connection": {"Upgrade"}, "Sec-Websocket-Version": {"13"}, "Sec-Websocket-Key": {"MDEy"}},
		"another page": {"Upgrade": {"websocket"}, "Connection": {"Upgrade"}, "Sec-Websocket-Version": {"13"}, "Sec-Websocket-Key": {"MDEyMzQ1Njc4OWFiY2RlZg=="}, "Origin": {"http://evil.example"}},
	} {
		if resp, _ := sayWith(t, address, http.MethodGet, "/v1.41/containers/"+id+"/attach/ws?stream=1", header, ""); resp.StatusCode/100 != 4 {
			t.Errorf("%s: %s", what, resp.Status)
		}
	}
}

// The engine's ps doesn't show what variables a process has.
func TestTopShowsNoEnv(t *testing.T) {
	d, direct := engineDoor(t, "")
	address := d.listen(Caller{Name: "top", Tenant: "top"})
	c := newClient(t, address)
	id := d.made(direct, "top", "top", container.Config{Env: []string{"MARK=hidden-here"}, Cmd: []string{"sleep", "1000"}})
	if got, err := direct.ContainerTop(t.Context(), id, []string{"axewww"}); err != nil || !strings.Contains(fmt.Sprint(got), "hidden-here") {
		t.Fatalf("the engine shows it no more: %v, %v", got, err)
	}
	columns := []string{"-o pid,args", "-o pid,cmd,user", "-eo pid,args", "-e -o pid,args", "-A -o pid,args", "axo pid,args", "-opid,args"}
	for _, args := range slices.Concat([]string{""}, psArgs, columns) {
		var fields []string
		if args != "" {
			fields = strings.Split(args, " ")
		}
		got, err := c.ContainerTop(t.Context(), id, fields)
		if err != nil {
			if _, there := direct.ContainerTop(t.Context(), id, fields); there == nil {
				t.Errorf("%q: %v", args, err)
			}
			continue
		}
		if said := fmt.Sprint(got); strings.Contains(said, "hidden-here") || len(got.Processes) != 1 {
			t.Errorf("%q: %s", args, said)
		}
	}
	for _, args := range []string{
		"axewww", "e", "eaux", "auxe", "-ef e", "-auxe", "-axe", "-ef -o pid,args", "-o pid,environ", "-o pid=PID", "-o ppid=PID,args", "E", "-C x e",
		"-ef\te", "-ef\ne", "aux e", "-u xe", "--version", "--help a", "-p 1 e", "-q 1", "-o pid -o environ", "-ewww e", "-eo pid,args e", "-e eo pid", "axeo pid,args", "axewo pid,args", "-eo pid,args,e",
	} {
		if got, err := c.ContainerTop(t.Context(), id, strings.Split(args, " ")); err == nil || !strings.Contains(err.Error(), "denied by policy") {
			t.Errorf("%q: %v, %v", args, got, err)
		}
	}
}
