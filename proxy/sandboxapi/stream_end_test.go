package sandboxapi_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/google/go-cmp/cmp"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/proxy/apitype"
	rt "github.com/bermhq/berm/runtime"
)

// A caller who doesn't read holds up the process, and nothing piles up.
func TestStreamSlowReader(t *testing.T) {
	d := newDoor(t)
	tape := d.running()
	text := bytes.Repeat([]byte("x"), 1000)
	tape.endless = func(int64) rt.Chunk { return rt.Chunk{Data: text} }

	l := &pipeListener{conns: make(chan net.Conn), quit: make(chan struct{})}
	srv := &httptest.Server{Listener: l, Config: &http.Server{Handler: d.handler}}
	srv.Start()
	defer srv.Close()
	client, server := net.Pipe() // which holds nothing
	defer func() { _ = client.Close() }()
	l.conns <- server
	if _, err := io.WriteString(client, "GET "+streamPath+" HTTP/1.1\r\nHost: localhost\r\nX-API-Token: "+master+"\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(client, make([]byte, 500)); err != nil {
		t.Fatal(err)
	}
	played := func() (n int64) {
		tape.read(func() { n = tape.played })
		return n
	}
	const most = 1 << 20
	eventually(t, "some is read ahead", func() bool { return played() >= 128<<10 })
	for range 50 {
		runtime.Gosched()
		time.Sleep(time.Millisecond)
		if n := played(); n > most {
			t.Fatalf("%d bytes were read ahead", n)
		}
	}
	before := played()
	var got bytes.Buffer
	if _, err := io.CopyN(&got, client, 2<<20); err != nil {
		t.Fatal(err)
	}
	if !bytes.Contains(got.Bytes(), bytes.Repeat([]byte("x"), 60_000)) {
		t.Error("what piled up didn't come in larger events")
	}
	eventually(t, "it goes on", func() bool { return played() > before+1<<20 })
	if n := played(); n > before+2<<20+most {
		t.Errorf("%d bytes were read for 2 MiB", n-before)
	}
	_ = client.Close()
	eventually(t, "it is let go", func() bool { return tape.idle() })
}

// idle tells whether nobody follows the tape.
func (t *tape) idle() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.playing == 0
}

// pipeListener accepts what it is given.
type pipeListener struct {
	conns chan net.Conn
	quit  chan struct{}
	once  sync.Once
}

func (l *pipeListener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.quit:
		return nil, net.ErrClosed
	}
}

func (l *pipeListener) Close() error {
	l.once.Do(func() { close(l.quit) })
	return nil
}

func (l *pipeListener) Addr() net.Addr { return &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)} }

func TestStreamCallerGone(t *testing.T) {
	for name, tt := range map[string]struct {
		method, path, body string
		killed             int
	}{
		"exec":            {"POST", execPath, `{"command":["a"]}`, 1},
		"exec with an ID": {"POST", execPath, `{"command":["a"],"exec_id":"job-1"}`, 0},
		"start":           {"POST", execsPath, `{"command":["a"]}`, 0},
		"follow":          {"GET", streamPath, "", 0},
		"log":             {"GET", logsOfPath + "?follow=true", "", 0},
	} {
		t.Run(name, func(t *testing.T) {
			d := newDoor(t)
			tape := d.running()
			tape.print(false, "x")
			ctx, cancel := context.WithCancel(t.Context())
			resp := d.open(ctx, tt.method, tt.path, tt.body, asSSE)
			if _, err := bufio.NewReader(resp.Body).ReadString('\n'); err != nil {
				t.Fatal(err)
			}
			cancel()
			eventually(t, "it is let go", tape.idle)
			killed := func() (n int) {
				d.manager.streams.note(func() { n = d.manager.streams.killed })
				return n
			}
			eventually(t, "it is killed if it has to be", func() bool { return killed() == tt.killed })
			d.stop() // waits for the handler
			if killed() != tt.killed {
				t.Errorf("it was killed %d times, want %d", killed(), tt.killed)
			}
		})
	}
}

// A source that fails must not look as if it had ended.
func TestStreamBreaksOff(t *testing.T) {
	d := newDoor(t)
	tape := d.running()
	tape.print(false, "x")
	tape.finish(&lifecycle.UnavailableError{Err: io.ErrClosedPipe})
	resp := d.open(t.Context(), "GET", streamPath, "", asNDJSON)
	b, err := io.ReadAll(resp.Body)
	if err == nil || !strings.Contains(string(b), `"data":"x"`) || strings.Contains(string(b), `"event":"exit"`) {
		t.Errorf("got %q, %v", b, err)
	}
}

// Who follows learns that somebody else does now.
func TestStreamTakenOver(t *testing.T) {
	d := newDoor(t)
	tape := d.running()
	tape.print(false, "x")
	tape.finish(errdefs.ErrAborted)
	got := short(events(t, d.want(200, "", "GET", streamPath, "", asNDJSON).body))
	if diff := cmp.Diff([]string{"0 start ", "1 stdout x", "1 taken_over "}, got); diff != "" {
		t.Error(diff)
	}
	d.want(200, "", "POST", execPath, `{"command":["a"]}`, asSSE)
	if d.manager.streams.killed != 0 {
		t.Error("the command was killed though somebody follows it")
	}
}

// Much output comes through whole.
func TestStreamMuch(t *testing.T) {
	d := newDoor(t)
	d.client = &http.Client{} // to check so much against the document takes long
	tape := d.running()
	const chunks, size = 4_000, 1000
	text := bytes.Repeat([]byte("0123456789"), size/10)
	tape.endless = func(read int64) rt.Chunk {
		if read == chunks*size {
			return rt.Chunk{}
		}
		return rt.Chunk{Data: text, Stderr: read/size%1000 == 999}
	}
	resp := d.open(t.Context(), "GET", streamPath+"?raw=true", "", asNDJSON)
	dec := json.NewDecoder(resp.Body)
	var n int
	var last int64
	for {
		var ev apitype.StreamEvent
		if err := dec.Decode(&ev); err != nil {
			t.Fatal(err)
		}
		if ev.Event == apitype.EventExit {
			break
		}
		n += len(ev.DataBase64)
		if ev.Seq != int64(n) || ev.Seq < last || len(ev.DataBase64) > 64<<10 {
			t.Fatalf("seq is %d after %d bytes and %d, with %d", ev.Seq, n, last, len(ev.DataBase64))
		}
		last = ev.Seq
	}
	if n != chunks*size {
		t.Errorf("got %d bytes", n)
	}
}

func TestManyStreams(t *testing.T) {
	d := newDoor(t)
	tape := d.running()
	tape.print(false, "x")
	tape.finish(io.EOF)
	d.client = &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 8}}
	once := func() {
		d.want(200, "", "GET", streamPath, "", asSSE)
	}
	once()
	before := runtime.NumGoroutine()
	for range 1000 {
		once()
	}
	eventually(t, "all goroutines are gone", func() bool { return runtime.NumGoroutine() <= before+2 })
	if !tape.idle() {
		t.Error("a stream was left open")
	}
}
