package sandboxapi_test

import (
	"bufio"
	"bytes"
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/coder/websocket"
	"github.com/containerd/errdefs"
	"github.com/google/go-cmp/cmp"

	"github.com/bermhq/berm/lifecycle"
	rt "github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/runtimetest/pipes"
)

// A caller who doesn't read holds up the process, and nothing piles up.
func TestStreamSlowReader(t *testing.T) {
	d := newDoor(t)
	tape := d.running()
	text := bytes.Repeat([]byte("x"), 1000)
	tape.endless = func(int64) rt.Chunk { return rt.Chunk{Data: text} }

	l := pipes.Listen()
	srv := &httptest.Server{Listener: l, Config: &http.Server{Handler: d.handler}}
	srv.Start()
	defer srv.Close()
	client := l.Dial()
	defer func() { _ = client.Close() }()
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

// Neither streams nor attachments leave goroutines behind.
func TestStreamsLeaveNothing(t *testing.T) {
	d := newDoor(t)
	tape := d.running()
	tape.print(false, "x\n")
	tape.finish(io.EOF)
	d.client = &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 8}}
	for name, once := range map[string]func(i int){
		"stream": func(int) { d.want(200, "", "GET", streamPath, "", asSSE) },
		"attachment": func(i int) {
			c := d.dial(execAttachPath + "?frames=lines")
			expect(t, c, `text: {"stream":"stdout","seq":2,"line":"x"}`)
			if i%2 == 0 {
				_ = c.Close(websocket.StatusNormalClosure, "")
			} else {
				_ = c.CloseNow()
			}
		},
	} {
		once(0)
		eventually(t, "the "+name+" is let go", tape.idle)
		before := runtime.NumGoroutine()
		for i := range 100 {
			once(i)
		}
		eventually(t, "all goroutines of each "+name+" are gone", func() bool { return tape.idle() && runtime.NumGoroutine() <= before+2 })
	}
}
