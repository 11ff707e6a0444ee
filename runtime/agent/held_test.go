package agent

import (
	"context"
	"testing"

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
