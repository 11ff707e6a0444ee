package agent

import (
	"context"
	"errors"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/agent/wire"
)

func (b *bed) hold(t testing.TB, id string, p runtime.Process) {
	t.Helper()
	p.ID, p.Command = "p", []string{"x"}
	if _, err := b.Start(t.Context(), id, p); err != nil {
		t.Fatal(err)
	}
}

func (b *bed) over(t testing.TB, id string) func() bool {
	return func() bool {
		info, err := b.Process(t.Context(), id, "p")
		if err != nil {
			t.Fatal(err)
		}
		return !info.Running
	}
}

// A process whose program says what can't be is lost, although its engine's exec ends
// only when all that it says has been taken.
func TestHeldGarbage(t *testing.T) {
	b, id := started(t, func(_ context.Context, p *program) {
		p.endless(func() error { return p.w.SendJSON(wire.KindItem, aFile) })
	})
	b.hold(t, id, runtime.Process{})
	await(t, "the process to end", b.over(t, id))
	if err := b.Kill(t.Context(), id, "p"); err != nil {
		t.Error(err)
	}
	a, err := b.Attach(t.Context(), id, "p", -1)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := a.Next(); err == nil || errdefs.IsAborted(err) {
		t.Error(err)
	}
}

// A panic over what a program says ends its process and nothing else.
func TestHeldPanics(t *testing.T) {
	bad := make(chan struct{})
	b, id := started(t, func(ctx context.Context, p *program) {
		select {
		case <-bad:
			p.output(5, "hello")
		case <-ctx.Done():
		}
		<-ctx.Done()
	})
	b.hold(t, id, runtime.Process{})
	h := b.known(id).held.m["p"]
	h.mu.Lock()
	h.keep = -1 // no slice has such a length
	h.mu.Unlock()
	close(bad)
	await(t, "the process to end", b.over(t, id))
}

// closes tells that Close waits for nobody who doesn't read.
func (b *bed) closes(t testing.TB) {
	t.Helper()
	closed := make(chan error, 1)
	go func() { closed <- b.Close() }()
	select {
	case err := <-closed:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(20 * time.Second):
		t.Fatal("the Runtime doesn't close")
	}
}

func TestUnreadAttachment(t *testing.T) {
	for name, end := range map[string]func(*bed, string) error{
		"closed":  func(*bed, string) error { return nil },
		"removed": func(b *bed, id string) error { return b.Remove(context.Background(), id) },
		"swept": func(b *bed, id string) error {
			if err := b.engine.Remove(context.Background(), id); err != nil {
				return err
			}
			return b.Sweep(context.Background())
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			full := make(chan struct{})
			b, id := started(t, func(_ context.Context, p *program) {
				for n := range int64(4) {
					p.output((n+1)*wire.MaxData, strings.Repeat("x", wire.MaxData))
					if n == 1 {
						close(full)
					}
				}
			})
			b.hold(t, id, runtime.Process{Hold: true})
			a, err := b.Attach(t.Context(), id, "p", 0)
			if err != nil {
				t.Fatal(err)
			}
			<-full
			if err := end(b, id); err != nil {
				t.Error(err)
			}
			b.closes(t)
			_ = a.Close()
		})
	}
}

func TestUnreadPort(t *testing.T) {
	b, id := answers(t, func(p *program) { p.endless(func() error { return p.w.Send(wire.KindData, []byte("x")) }) })
	nc, err := b.Dial(t.Context(), id, 80)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := nc.Read(make([]byte, 1)); err != nil {
		t.Error(err)
	}
	b.closes(t)
	if _, err := nc.Read(make([]byte, 1)); err == nil {
		t.Error("it can be read after its Runtime was closed")
	}
	_ = nc.Close()
}

// While the program of a container with a socket is silent, its processes aren't known,
// and none is started beside it.
func TestSilentProgram(t *testing.T) {
	b := newBed(t)
	b.engine.exec = func(context.Context, runtime.Exec) (runtime.ExecResult, error) {
		t.Error("the engine was asked to start a program")
		return runtime.ExecResult{ExitCode: 127}, nil
	}
	id := b.create(t, "x")
	b.serve(t, "x", func(p *program, _ *wire.Request) { p.hungUp() })
	_, err := b.Start(t.Context(), id, runtime.Process{ID: "p", Command: []string{"x"}})
	if !errdefs.IsUnavailable(err) {
		t.Errorf("start: %v", err)
	}
	if _, err := b.ListProcesses(t.Context(), id); !errdefs.IsUnavailable(err) {
		t.Errorf("list: %v", err)
	}
	if err := b.Kill(t.Context(), id, "p"); !errdefs.IsUnavailable(err) {
		t.Errorf("kill: %v", err)
	}
}

// A Write that the process doesn't take ends with its attachment, holds the next one up
// no more than it must, and cuts no frame.
func TestHeldInput(t *testing.T) {
	read, got := make(chan struct{}), make(chan string, 1)
	b, id := started(t, func(_ context.Context, p *program) {
		<-read
		var all strings.Builder
		for {
			kind, data, err := p.r.Next()
			if err != nil || kind != wire.KindData {
				got <- all.String()
				p.json(wire.KindResult, wire.ProcessInfo{ID: "p"})
				return
			}
			all.Write(data)
		}
	})
	b.hold(t, id, runtime.Process{Stdin: true})
	attach := func() (runtime.Attachment, chan error) {
		a, err := b.Attach(t.Context(), id, "p", 0)
		if err != nil {
			t.Fatal(err)
		}
		written := make(chan error, 1)
		go func() {
			_, err := io.WriteString(a, strings.Repeat("x", 3*wire.MaxData))
			written <- err
		}()
		return a, written
	}
	ends := func(what string, written chan error, is func(error) bool) {
		t.Helper()
		select {
		case err := <-written:
			if !is(err) {
				t.Errorf("%s: %v", what, err)
			}
		case <-time.After(20 * time.Second):
			t.Fatalf("%s: the write goes on", what)
		}
	}
	_, taken := attach()
	await(t, "some to be written", func() bool {
		h, err := b.known(id).find("p", errAbsent)
		if err != nil {
			t.Fatal(err)
		}
		h.mu.Lock()
		defer h.mu.Unlock()
		return len(h.input) > 0
	})
	closed, written := attach()
	ends("taken over", taken, errdefs.IsAborted)
	if err := closed.Close(); err != nil {
		t.Error(err)
	}
	ends("closed", written, func(err error) bool { return errors.Is(err, errDetached) })
	last, err := b.Attach(t.Context(), id, "p", 0)
	if err != nil {
		t.Fatal(err)
	}
	close(read)
	if _, err := io.WriteString(last, "last"); err != nil {
		t.Error(err)
	}
	if err := last.CloseWrite(); err != nil {
		t.Error(err)
	}
	if all := <-got; !strings.HasSuffix(all, "xlast") || len(all) >= 3*wire.MaxData {
		t.Errorf("%d bytes, the last %q", len(all), all[max(0, len(all)-8):])
	}
	await(t, "the process to end", b.over(t, id))
}
