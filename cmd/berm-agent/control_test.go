package main

import (
	"testing"

	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/runtime/agent/wire"
)

// control asks for something without an answer while a process is followed.
func (k *talk) control(req *wire.Request) {
	k.t.Helper()
	if err := k.w.SendJSON(wire.KindRequest, req); err != nil {
		k.t.Fatal(err)
	}
}

// over follows an operation to its end; each Ready on the way is counted.
func (k *talk) over(a *outcome) (ready int) {
	k.t.Helper()
	for {
		kind, payload, err := k.r.Next()
		switch {
		case err != nil:
			k.t.Fatal(err)
		case kind == wire.KindReady:
			ready++
		case kind == wire.KindResult:
			if err := wire.Decode(payload, &a.info); err != nil {
				k.t.Fatal(err)
			}
			return ready
		case kind == wire.KindOutput:
			o, err := wire.ParseOutput(payload)
			if err != nil {
				k.t.Fatal(err)
			}
			a.stdout.Write(o.Data)
		default:
			k.t.Fatalf("a frame of kind %d: %s", kind, payload)
		}
	}
}

func TestControl(t *testing.T) {
	signal := func(id string, sig unix.Signal) *wire.Request {
		return &wire.Request{Op: wire.OpSignal, Process: &wire.Process{ID: id, Signal: int(sig)}}
	}
	begin := func(t *testing.T, s wire.Start) (*talk, *outcome) {
		t.Helper()
		k, _ := serveStdio(t)
		s.ID, s.Control = "x", true
		a, ok := k.begin(&wire.Request{Op: wire.OpRun, Start: &s})
		if !ok {
			t.Fatal(a.failure)
		}
		return k, a
	}
	t.Run("input", func(t *testing.T) {
		k, a := begin(t, wire.Start{Command: []string{"sh", "-c", "read x; echo $x; read x; echo $x; cat"}, Stdin: true})
		for _, line := range []string{"one\n", "two\n"} {
			if err := k.w.Send(wire.KindData, []byte(line)); err != nil {
				t.Fatal(err)
			}
			for kind := wire.Kind(0); kind != wire.KindReady; {
				var err error
				if kind, _, err = k.r.Next(); err != nil || kind != wire.KindOutput && kind != wire.KindReady {
					t.Fatal(kind, err)
				}
			}
		}
		k.end()
		if ready := k.over(a); ready != 0 || a.info.ExitCode != 0 {
			t.Errorf("%d more times ready, %+v", ready, a.info)
		}
	})
	t.Run("signal past input that isn't taken", func(t *testing.T) {
		k, a := begin(t, wire.Start{Command: []string{"sleep", "1000"}, Stdin: true})
		if err := k.w.Send(wire.KindData, make([]byte, wire.MaxData)); err != nil {
			t.Fatal(err)
		}
		if kind, _, err := k.r.Next(); err != nil || kind != wire.KindReady {
			t.Fatal(kind, err)
		}
		if err := k.w.Send(wire.KindData, make([]byte, wire.MaxData)); err != nil {
			t.Fatal(err)
		}
		k.control(signal("x", unix.SIGTERM)) // the pipe is full
		k.over(a)
		if a.info.Signal != int(unix.SIGTERM) {
			t.Errorf("%+v", a.info)
		}
	})
	t.Run("resize", func(t *testing.T) {
		k, a := begin(t, wire.Start{Command: []string{"sh", "-c", "trap 'stty size; exit 3' WINCH; echo; while :; do sleep 0.1; done"}, TTY: true})
		if kind, _, err := k.r.Next(); err != nil || kind != wire.KindOutput {
			t.Fatal(kind, err)
		}
		k.control(&wire.Request{Op: wire.OpResize, Process: &wire.Process{ID: "x", Rows: 11, Cols: 22}})
		k.over(a)
		if a.stdout.String() != "11 22\r\n" || a.info.ExitCode != 3 {
			t.Errorf("%q, %+v", &a.stdout, a.info)
		}
	})
	for name, req := range map[string]*wire.Request{
		"another's": signal("y", unix.SIGHUP), "no signal": signal("x", 65), "no process": {Op: wire.OpSignal},
		"too large":         {Op: wire.OpResize, Process: &wire.Process{ID: "x", Rows: 1 << 16}},
		"another operation": {Op: wire.OpRun, Start: &wire.Start{ID: "x", Command: []string{"true"}}},
	} {
		t.Run(name, func(t *testing.T) {
			k, _ := begin(t, wire.Start{Command: []string{"sleep", "1000"}})
			k.control(req)
			if kind, _, err := k.r.Next(); err == nil {
				t.Errorf("a frame of kind %d", kind)
			}
		})
	}
}
