package agent

import (
	"context"
	"errors"
	"io"
	"strings"
	"testing"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/agent/wire"
)

// controlled is started with a program that can be asked for more while a process runs.
func controlled(t testing.TB, f func(context.Context, *program)) (*bed, string) {
	t.Helper()
	hello := wire.Hello{Version: wire.Version, Control: true}
	return startedAs(t, hello, f)
}

// Signals and sizes pass input that isn't taken, of which no more is sent.
func TestHeldAsked(t *testing.T) {
	got, taken := make(chan wire.Request, 8), make(chan int, 1)
	b, id := controlled(t, func(_ context.Context, p *program) {
		for data := 0; ; {
			kind, payload, err := p.r.Next()
			var req wire.Request
			switch {
			case err != nil:
				return
			case kind == wire.KindData:
				data += len(payload)
			case kind != wire.KindRequest || wire.Decode(payload, &req) != nil:
				t.Errorf("a frame of kind %d", kind)
			case req.Process.Signal == 15:
				taken <- data
				p.json(wire.KindResult, wire.ProcessInfo{ID: "p", Signal: 15, ExitCode: 143})
				return
			default:
				got <- req
			}
		}
	})
	b.hold(t, id, runtime.Process{Stdin: true, TTY: true})
	a, err := b.Attach(t.Context(), id, "p", 0)
	if err != nil {
		t.Fatal(err)
	}
	written := make(chan error, 1)
	go func() {
		_, err := io.WriteString(a, strings.Repeat("x", 3*wire.MaxData))
		written <- err
	}()
	if err := b.Signal(t.Context(), id, "p", 1); err != nil {
		t.Fatal(err)
	}
	if err := b.Resize(t.Context(), id, "p", 7, 8); err != nil {
		t.Fatal(err)
	}
	if req := <-got; req.Op != wire.OpSignal || *req.Process != (wire.Process{ID: "p", Signal: 1}) {
		t.Errorf("%+v", req)
	}
	if req := <-got; req.Op != wire.OpResize || *req.Process != (wire.Process{ID: "p", Rows: 7, Cols: 8}) {
		t.Errorf("%+v", req)
	}
	await(t, "input to be sent", func() bool {
		h, err := b.known(id).find("p", errAbsent)
		if err != nil {
			t.Fatal(err)
		}
		h.mu.Lock()
		defer h.mu.Unlock()
		return h.unready && len(h.input) == wire.MaxData
	})
	if err := b.Signal(t.Context(), id, "p", 15); err != nil {
		t.Fatal(err)
	}
	if n := <-taken; n != wire.MaxData {
		t.Errorf("%d bytes were sent", n)
	}
	if err := <-written; !errdefs.IsFailedPrecondition(err) {
		t.Errorf("written: %v", err)
	}
	await(t, "the process to end", b.over(t, id))
	for what, err := range map[string]error{"signal": b.Signal(t.Context(), id, "p", 1), "resize": b.Resize(t.Context(), id, "p", 1, 1)} {
		if !errdefs.IsFailedPrecondition(err) {
			t.Errorf("%s one that has ended: %v", what, err)
		}
	}
}

// Who asks a program that doesn't read waits no longer than its context, and is not heard
// later.
func TestHeldDeaf(t *testing.T) {
	b, id := controlled(t, func(ctx context.Context, _ *program) { <-ctx.Done() })
	b.hold(t, id, runtime.Process{})
	ctx, cancel := context.WithCancel(t.Context())
	asked := make(chan error, 2)
	for range 2 {
		go func() { asked <- b.Signal(ctx, id, "p", 15) }()
	}
	await(t, "both to ask", func() bool {
		h, err := b.known(id).find("p", errAbsent)
		if err != nil {
			t.Fatal(err)
		}
		h.mu.Lock()
		defer h.mu.Unlock()
		return h.wish != nil
	})
	cancel()
	for range 2 {
		if err := <-asked; !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	}
	if err := b.Kill(t.Context(), id, "p"); err != nil {
		t.Error(err)
	}
}

// A program that is ready for what it wasn't sent isn't believed; one of an older Berm is
// asked for nothing but to die.
func TestHeldUnasked(t *testing.T) {
	b, id := controlled(t, func(_ context.Context, p *program) {
		p.endless(func() error { return p.w.Send(wire.KindReady) })
	})
	b.hold(t, id, runtime.Process{Stdin: true})
	await(t, "the process to end", b.over(t, id))

	b, id = started(t, func(ctx context.Context, _ *program) { <-ctx.Done() })
	b.hold(t, id, runtime.Process{TTY: true})
	for what, err := range map[string]error{"signal": b.Signal(t.Context(), id, "p", 15), "resize": b.Resize(t.Context(), id, "p", 1, 1)} {
		if !errdefs.IsNotImplemented(err) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if err := b.Signal(t.Context(), id, "p", 9); err != nil {
		t.Error(err)
	}
	await(t, "the process to end", b.over(t, id))
}
