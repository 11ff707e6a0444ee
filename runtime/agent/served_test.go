package agent

import (
	"context"
	"net"
	"testing"

	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/agent/wire"
)

// started has the engine start a program, whose end f is, for each operation in a
// container without a socket.
func started(t testing.TB, f func(context.Context, *program)) (*bed, string) {
	t.Helper()
	return startedAs(t, wire.Hello{Version: wire.Version}, f)
}

func startedAs(t testing.TB, hello wire.Hello, f func(context.Context, *program)) (*bed, string) {
	t.Helper()
	b := newBed(t)
	b.engine.exec = func(ctx context.Context, x runtime.Exec) (runtime.ExecResult, error) {
		nc := x.Stdin.(net.Conn)
		p := &program{t: t, nc: nc, r: wire.NewReader(nc), w: wire.NewWriter(nc)}
		p.json(wire.KindHello, hello)
		if p.next() != nil && p.ready() {
			f(ctx, p)
		}
		return runtime.ExecResult{}, ctx.Err()
	}
	c, err := b.Create(t.Context(), runtime.Spec{Name: "x", Image: "berm.local/busybox:latest", Agent: &runtime.Agent{}})
	if err != nil {
		t.Fatal(err)
	}
	return b, c.ID
}

// A program that the container has stopped doesn't stay.
func TestServedStopped(t *testing.T) {
	b, id := started(t, func(ctx context.Context, p *program) {
		p.json(wire.KindResult, aFile)
		<-ctx.Done()
	})
	if err := stat(t.Context(), b, id); err != nil {
		t.Fatal(err)
	}
	await(t, "the program to be killed", func() bool {
		b.mu.Lock()
		defer b.mu.Unlock()
		return len(b.served) == 0
	})
}
