package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/runtime/agent/wire"
)

// script is a stream on which Berm says the same whatever it is answered.
type script struct {
	io.Reader
	mu  sync.Mutex
	out bytes.Buffer
}

func (s *script) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.out.Write(p)
}

func (*script) Close() error { return nil }
func (*script) gone() bool   { return false }

// FuzzServe has the protocol, with processes that end at once or can't be started.
func FuzzServe(f *testing.F) {
	say := func(frames ...any) []byte {
		var b bytes.Buffer
		w := wire.NewWriter(&b)
		for _, frame := range frames {
			var err error
			switch frame := frame.(type) {
			case wire.Kind:
				err = w.Send(frame, nil)
			case string:
				err = w.Send(wire.KindData, []byte(frame))
			default:
				err = w.SendJSON(wire.KindRequest, frame)
			}
			must(f, err)
		}
		return b.Bytes()
	}
	start := &wire.Start{ID: "x", Label: "l", Command: []string{"cmd", "arg"}, Env: []string{"A=b"}, Dir: "/", TimeoutMS: 5, KeepBytes: 100}
	command := *start
	command.Exec, command.Follow = true, &wire.Follow{Lossless: true}
	there := &wire.Process{ID: "there", Follow: &wire.Follow{From: -1, TakeOver: true}, Signal: 9}
	f.Add(say(wire.Request{Op: wire.OpEvents}, wire.KindGo))
	f.Add(say(wire.Request{Op: wire.OpStart, Start: &command}, wire.KindGo, "input", wire.KindEnd))
	f.Add(say(wire.Request{Op: wire.OpStart, Start: start}, wire.KindGo))
	f.Add(say(wire.Request{Op: wire.OpStart, Start: &wire.Start{ID: "full", Command: []string{"x"}}}, wire.KindGo))
	for _, op := range []wire.Op{wire.OpFollow, wire.OpInput, wire.OpEvents, wire.OpProcess, wire.OpSignal, wire.OpKill, wire.OpResize, wire.OpForget} {
		f.Add(say(wire.Request{Op: op, Process: there}, wire.KindGo, wire.KindEnd))
	}
	f.Add([]byte("\x02\x00\x00\x00\x02{}"))
	f.Add([]byte("\x02\xff\xff\xff\xff"))
	f.Fuzz(func(t *testing.T, said []byte) {
		srv := &server{processes: newTable(), tidy: time.NewTimer(time.Hour), other: func(wire.Op) handler { return nil }}
		srv.launch = func(p *process, s *wire.Start) error {
			if p.id == "full" {
				return noRoom(unix.EAGAIN)
			}
			p.fail(unix.ENOENT, s)
			return nil
		}
		if _, _, err := srv.begin(newConn(new(script)), &wire.Start{ID: "there", Command: []string{"cmd"}}); err != nil {
			t.Fatal(err)
		}
		s := &script{Reader: bytes.NewReader(said)}
		c := newConn(s)
		payload, err := c.request()
		srv.talk(c, payload, err)
		// Whatever was said, what was answered is of the protocol.
		r := wire.NewReader(&s.out)
		for i := 0; ; i++ {
			kind, payload, err := r.Next()
			if errors.Is(err, io.EOF) {
				return
			}
			if err != nil {
				t.Fatalf("frame %d is of kind %d, %v", i, kind, err)
			}
			switch kind {
			case wire.KindOutput:
				if _, err := wire.ParseOutput(payload); err != nil {
					t.Fatal(err)
				}
			case wire.KindItem, wire.KindResult, wire.KindFailure:
				if !json.Valid(payload) {
					t.Fatalf("%q", payload)
				}
			case wire.KindReady:
			default:
				t.Fatalf("a frame of kind %d", kind)
			}
		}
	})
}

// The kernel's words hold a name that a process chooses.
func FuzzParseTask(f *testing.F) {
	f.Add("a b", 12, 1)
	f.Add(") Z 9 (", 7, 8)
	f.Fuzz(func(t *testing.T, name string, pid, parent int) {
		stat := fmt.Sprintf("%d (%s) S %d 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 3 0 4711 0 0", pid, name, parent)
		if got, ok := parseTask([]byte(stat)); !ok || got != (task{pid, parent, 'S', 3, 4711}) {
			t.Fatalf("%q: %+v", stat, got)
		}
	})
}
