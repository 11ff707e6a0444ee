package runtimetest

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/runtime"
)

func sweeperCases() []contractCase {
	return []contractCase{{"sweep/busy engine", testSweepBusy}, {"sweep/canceled", testSweepCanceled}}
}

// testSweepBusy sweeps while containers and networks come and go. A sweep mustn't remove what
// is in use or being made.
func testSweepBusy(t *testing.T, b *fixture) {
	kept := b.spec()
	kept.Network = b.name
	must(t, b.rt.EnsureNetwork(b.ctx, runtime.Network{Name: b.name, Labels: b.labels}))
	c := b.create(t, kept)
	underWay := b.underWay(b.ctx, t, c.ID)

	over := make(chan struct{})
	var sweeping, working sync.WaitGroup
	for _, sweep := range []func(context.Context) error{b.rt.Sweep, b.New(t).Sweep} {
		sweeping.Go(func() {
			for {
				if err := sweep(b.ctx); err != nil {
					t.Errorf("sweep: %v", err)
				}
				select {
				case <-over:
					return
				case <-time.After(10 * time.Millisecond): // the others need the machine, too
				}
			}
		})
	}
	for i := range 3 {
		working.Go(func() {
			for j := range 3 {
				spec := b.spec()
				if j%2 == 0 {
					spec.Network = fmt.Sprintf("%s-%d", b.name, i)
					if err := b.rt.EnsureNetwork(b.ctx, runtime.Network{Name: spec.Network, Labels: b.labels}); err != nil {
						t.Errorf("network: %v", err)
						return
					}
				}
				made, err := b.rt.Create(b.ctx, spec)
				if err != nil {
					t.Errorf("create: %v", err)
					return
				}
				out := newSignalWriter("up\n")
				if _, err := b.rt.Exec(b.ctx, made.ID, runtime.Exec{Command: []string{"echo", "up"}, Stdout: out}); err != nil || !out.done {
					t.Errorf("exec: %q, %v", out.buf, err)
				}
				if got, err := b.rt.Inspect(b.ctx, made.ID); err != nil || got.State != runtime.StateRunning || got.IP != made.IP {
					t.Errorf("%+v, %v", got, err)
				}
				if err := b.rt.Remove(b.ctx, made.ID); err != nil {
					t.Errorf("remove: %v", err)
				}
				if spec.Network != "" {
					if err := b.rt.RemoveNetwork(b.ctx, spec.Network); err != nil {
						t.Errorf("remove network: %v", err)
					}
				}
			}
		})
	}
	working.Wait()
	close(over)
	sweeping.Wait()

	select {
	case err := <-underWay:
		t.Errorf("a command that was under way: %v", err)
	default:
	}
	if got := b.inspect(t, c.ID); got.State != runtime.StateRunning || got.IP != c.IP {
		t.Errorf("%+v, was %+v", got, c)
	}
	b.alive(t, c.ID)
	must(t, b.rt.Remove(b.ctx, c.ID))
	interrupted(t, "the command that was under way", <-underWay)
	if cs := b.list(t); len(cs) != 0 {
		t.Errorf("left behind: %+v", cs)
	}
}

// testSweepCanceled ends the context at many stages of a sweep.
func testSweepCanceled(t *testing.T, b *fixture) {
	c := b.create(t, b.spec())
	for delay := time.Millisecond; delay < 100*time.Millisecond; delay *= 2 {
		ctx, cancel := context.WithTimeout(b.ctx, delay)
		err := b.rt.Sweep(ctx)
		cancel()
		if err != nil && !errdefs.IsDeadlineExceeded(err) {
			t.Errorf("sweep ended after %s: %v", delay, err)
		}
	}
	must(t, b.rt.Sweep(b.ctx))
	b.alive(t, c.ID)
}
