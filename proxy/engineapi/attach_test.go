package engineapi

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"runtime"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/coder/websocket"
	"github.com/docker/docker/api/types/container"

	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/proxy"
)

// Streams on which nothing is said for 15 minutes go on.
func TestIdleStreams(t *testing.T) {
	for _, path := range []string{"/logs?follow=1&stdout=1", "/stats", "/wait"} {
		t.Run(path, func(t *testing.T) { synctest.Test(t, func(t *testing.T) { idleStream(t, path) }) })
	}
}

func idleStream(t *testing.T, path string) {
	rules := must(policy.Parse([]byte(basePolicy), policy.Options{DefaultImage: testImage}))(t)
	const owner = "idle"
	front, back := newPipes(), newPipes()
	var d *Proxy
	engine := &http.Server{Handler: &standIn{t: t, door: func() *Proxy { return d }, handler: func(w http.ResponseWriter, _ *http.Request) {
		flusher := http.NewResponseController(w)
		_ = flusher.Flush()
		for range 3 {
			time.Sleep(15 * time.Minute)
			_, _ = io.WriteString(w, "x")
			_ = flusher.Flush()
		}
	}}}
	go func() { _ = engine.Serve(back) }()
	d = must(New(Options{Dial: func(context.Context) (net.Conn, error) { return back.dial(), nil }, Policy: func() *policy.Policy { return rules }, Owner: owner}))(t)
	ctx, cancel := context.WithCancel(t.Context())
	served := make(chan error, 1)
	go func() {
		served <- proxy.Serve(ctx, front, d.Handler(Callers{Any: &Caller{Name: "a", Tenant: standInTenant}}), proxy.ServeOptions{})
	}()
	transport := &http.Transport{DialContext: func(context.Context, string, string) (net.Conn, error) { return front.dial(), nil }}
	defer func() { // all goroutines have to end within the bubble
		transport.CloseIdleConnections()
		cancel()
		report(t, errors.Join(<-served, d.Close(), engine.Close()))
	}()
	method := http.MethodGet
	if path == "/wait" {
		method = http.MethodPost
	}
	start := time.Now()
	req := must(http.NewRequestWithContext(t.Context(), method, "http://localhost/v1.41/containers/"+standInID+path, nil))(t)
	resp := must(transport.RoundTrip(req))(t)
	defer func() { _ = resp.Body.Close() }()
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
				must(fmt.Fprintf(conn, line+" HTTP/1.1\r\nHost: localhost\r\n\r\n", "/v1.41/containers/"+standInID))(t)
				must(http.ReadResponse(bufio.NewReader(conn), nil))(t)
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

// A reader that pauses holds up the command that writes, and nothing piles up between.
func TestSlowReader(t *testing.T) {
	const size, most = 64 << 20, 8 << 20
	d, direct := engineDoor(t, "")
	address := d.listen(Caller{Name: "slow", Tenant: "slow"})
	c := newClient(t, address)
	id := d.made(direct, "slow", "slow", container.Config{Cmd: []string{"sh", "-c", "yes 0123456789012345678901234567890123456789012345678901234567890 | head -c 20000000; exec sleep 1000"}})
	heap := func() int64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	paused := func(t *testing.T, r io.Reader) {
		t.Helper()
		before := heap()
		must(io.CopyN(io.Discard, r, 1<<20))(t)
		var grown int64
		for range 20 {
			time.Sleep(50 * time.Millisecond)
			grown = max(grown, heap()-before)
		}
		t.Logf("the heap grew by %d KiB", grown>>10)
		if grown > most {
			t.Errorf("the heap grew by %d MiB", grown>>20)
		}
	}
	t.Run("exec", func(t *testing.T) {
		made := must(c.ContainerExecCreate(t.Context(), id, container.ExecOptions{Cmd: []string{"head", "-c", fmt.Sprint(size), "/dev/zero"}, AttachStdout: true, Tty: true}))(t)
		conn := must(c.ContainerExecAttach(t.Context(), made.ID, container.ExecAttachOptions{Tty: true}))(t)
		defer conn.Close()
		paused(t, conn.Reader)
		if n, err := io.Copy(io.Discard, conn.Reader); err != nil || n != size-1<<20 {
			t.Errorf("%d bytes more, %v", n, err)
		}
	})
	t.Run("logs", func(t *testing.T) {
		logs := must(c.ContainerLogs(t.Context(), id, container.LogsOptions{ShowStdout: true, Follow: true}))(t)
		defer func() { _ = logs.Close() }()
		paused(t, logs)
	})
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
		noError(t, conn.Write(t.Context(), websocket.MessageText, fmt.Appendf(nil, "line-%d\n", i)))
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
		req := must(http.NewRequestWithContext(t.Context(), http.MethodGet, "http://localhost/v1.41/containers/"+id+"/attach/ws?stream=1", nil))(t)
		req.Header = header
		resp := must(raw(address).Do(req))(t)
		_ = resp.Body.Close()
		if resp.StatusCode/100 != 4 {
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

// What older versions of the API don't know isn't sent in them.
func TestStreamsByVersion(t *testing.T) {
	d, direct := engineDoor(t, "")
	address := d.listen(Caller{Name: "versions", Tenant: "versions"})
	id := d.made(direct, "versions", "versions", container.Config{Cmd: []string{"sh", "-c", "echo hello; exec sleep 1000"}})
	for path, want := range map[string]int{
		"/v1.24/containers/%s/stats?stream=0":             200,
		"/v1.40/containers/%s/stats?stream=0&one-shot=1":  200,
		"/v1.41/containers/%s/stats?stream=0&one-shot=1":  200,
		"/v1.41/containers/%s/stats?one-shot=1&stream=no": 200,
		"/v1.24/containers/%s/logs?stdout=1&tail=all":     200,
		"/v1.41/containers/%s/logs?stdout=1&details=0":    200,
		"/v1.41/containers/%s/logs?stdout=1&details=1":    200,
		"/v1.41/containers/%s/logs?stdout=1&since=a%%20b": 400,
		"/v1.41/containers/%s/logs":                       400,
		"/v1.41/containers/%s/changes?x=1":                200,
		"/v1.24/containers/%s/changes":                    200,
	} {
		if status, body := say(t, address, http.MethodGet, fmt.Sprintf(path, id), ""); status != want {
			t.Errorf("%s: %d %s", path, status, body)
		}
	}
	for path, want := range map[string]int{
		"/v1.41/containers/%s/wait?condition=other":  400,
		"/v1.41/containers/%s/resize":                400,
		"/v1.41/containers/%s/resize?h=1":            400,
		"/v1.41/containers/%s/resize?h=65536&w=1":    400,
		"/v1.41/containers/%s/resize?h=-1&w=1":       400,
		"/v1.41/containers/%s/resize?h=1&w=1&h=2":    200,
		"/v1.41/containers/%s/resize?h=24&w=80":      200,
		"/v1.41/containers/%s/attach?detachKeys=a+b": 400,
	} {
		if status, body := say(t, address, http.MethodPost, fmt.Sprintf(path, id), ""); status != want {
			t.Errorf("%s: %d %s", path, status, body)
		}
	}
	noError(t, direct.ContainerKill(t.Context(), id, "KILL"))
	for _, version := range []string{"/v1.24", "/v1.29", "/v1.30", "/v1.41"} {
		status, body := say(t, address, http.MethodPost, version+"/containers/versions/wait?condition=not-running", "")
		if status != 200 || !strings.Contains(body, `"StatusCode":137`) {
			t.Errorf("wait %s: %d %s", version, status, body)
		}
	}
}
