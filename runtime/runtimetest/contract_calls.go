package runtimetest

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/runtime"
)

// calls are all methods of a runtime, by name, on one container.
func (b *fixture) calls(rt runtime.AgentRuntime, id string) map[string]func(context.Context) error {
	spec := b.spec()
	calls := map[string]func(context.Context) error{
		"info":    func(ctx context.Context) error { _, err := rt.Info(ctx); return err },
		"image":   func(ctx context.Context) error { _, err := rt.Image(ctx, b.Image); return err },
		"pull":    func(ctx context.Context) error { _, err := rt.Pull(ctx, b.Image, nil); return err },
		"create":  func(ctx context.Context) error { _, err := rt.Create(ctx, spec); return err },
		"inspect": func(ctx context.Context) error { _, err := rt.Inspect(ctx, id); return err },
		"list":    func(ctx context.Context) error { _, err := rt.List(ctx, nil); return err },
		"remove":  func(ctx context.Context) error { return rt.Remove(ctx, id) },
		"exec": func(ctx context.Context) error {
			_, err := rt.Exec(ctx, id, runtime.Exec{Command: []string{"true"}})
			return err
		},
		"ensure network": func(ctx context.Context) error {
			return rt.EnsureNetwork(ctx, runtime.Network{Name: b.name, Labels: b.labels})
		},
		"pause":          func(ctx context.Context) error { return rt.Pause(ctx, id) },
		"resume":         func(ctx context.Context) error { return rt.Resume(ctx, id) },
		"stats":          func(ctx context.Context) error { _, err := rt.Stats(ctx, id); return err },
		"sweep":          rt.Sweep,
		"networks":       func(ctx context.Context) error { _, err := rt.Networks(ctx, nil); return err },
		"remove network": func(ctx context.Context) error { return rt.RemoveNetwork(ctx, b.name) },
	}
	if c, ok := rt.(runtime.Collector); ok {
		calls["volumes"] = func(ctx context.Context) error { _, err := c.Volumes(ctx, nil); return err }
		calls["remove volume"] = func(ctx context.Context) error { return c.RemoveVolume(ctx, b.name) }
		calls["remove network by id"] = func(ctx context.Context) error { return c.RemoveNetworkID(ctx, noID) }
	}
	return calls
}

// answered says that a call needs no engine, and so has nothing to wait for.
func (b *fixture) answered(call string) bool {
	return b.LocalNetworks && slices.Contains([]string{"ensure network", "networks", "remove network"}, call)
}

func testContextEnded(t *testing.T, b *fixture) {
	c := b.create(t, b.spec())
	canceled, cancel := context.WithCancel(b.ctx)
	cancel()
	late, cancel := context.WithDeadline(b.ctx, time.Now().Add(-time.Second))
	defer cancel()
	for name, call := range b.calls(b.rt, c.ID) {
		class(t, name+" with a canceled context", call(canceled), errdefs.IsCanceled, "Canceled")
		class(t, name+" with a late context", call(late), errdefs.IsDeadlineExceeded, "DeadlineExceeded")
	}
	if cs := b.list(t); len(cs) != 1 || cs[0].State != runtime.StateRunning {
		t.Errorf("afterwards: %+v", cs)
	}
}

// testRemoveCanceled ends the context at many stages of a removal: the next one
// brings it to its end.
func testRemoveCanceled(t *testing.T, b *fixture) {
	removed := 0
	for delay := time.Millisecond; delay < 300*time.Millisecond && removed < 2; delay = delay*5/2 + time.Millisecond {
		c := b.create(t, b.spec())
		ctx, cancel := context.WithTimeout(b.ctx, delay)
		err := b.rt.Remove(ctx, c.ID)
		cancel()
		if err == nil { // a backend may bring to its end what it has begun
			removed++
			if cs := b.list(t); len(cs) != 0 {
				t.Errorf("removed within %s, but there is %+v", delay, cs)
			}
		} else {
			class(t, fmt.Sprintf("remove ended after %s", delay), err, errdefs.IsDeadlineExceeded, "DeadlineExceeded")
		}
		if err := b.rt.Remove(b.ctx, c.ID); err != nil {
			t.Errorf("remove after one that ended after %s: %v", delay, err)
		}
		if cs := b.list(t); len(cs) != 0 {
			t.Fatalf("remove after one that ended after %s left %+v", delay, cs)
		}
	}
}

// testRemoveWhileCreated removes containers as soon as they can be seen. Whatever
// Create says then, nothing is left, and the name is free.
func testRemoveWhileCreated(t *testing.T, b *fixture) {
	for range 3 {
		spec := b.spec()
		var made runtime.Container
		var failed error
		done := make(chan struct{})
		go func() {
			defer close(done)
			made, failed = b.rt.Create(b.ctx, spec)
		}()
		var seen []runtime.Container
		b.await(t, "the container to be seen", func() bool {
			seen = b.list(t)
			return len(seen) > 0 || isClosed(done)
		})
		for _, c := range seen {
			if err := b.rt.Remove(b.ctx, c.ID); err != nil {
				t.Errorf("remove: %v", err)
			}
		}
		<-done
		if failed == nil {
			if err := b.rt.Remove(b.ctx, made.ID); err != nil {
				t.Errorf("remove once more: %v", err)
			}
		}
		if cs := b.list(t); len(cs) != 0 {
			t.Fatalf("create said %v, and there is %+v", failed, cs)
		}
		if c, err := b.rt.Create(b.ctx, spec); err != nil {
			t.Errorf("the name isn't free: %v", err)
		} else if err := b.rt.Remove(b.ctx, c.ID); err != nil {
			t.Error(err)
		}
	}
}

// testHang checks that no call waits for longer than its caller, nor than a backend's
// own time, give or take what it needs to undo what it can't know.
func testHang(t *testing.T, b *fixture) {
	c := b.create(t, b.spec())
	impatient, resume := b.Hang(t)
	resume = sync.OnceFunc(resume)
	t.Cleanup(resume)
	b.await(t, "the engine to hang", func() bool {
		ctx, cancel := context.WithTimeout(b.ctx, 200*time.Millisecond)
		defer cancel()
		_, err := b.rt.Info(ctx)
		return err != nil
	})
	var wg sync.WaitGroup
	try := func(what string, call func(context.Context) error, timeout time.Duration, is func(error) bool, name string) {
		wg.Go(func() {
			ctx, cancel := context.WithTimeout(b.ctx, timeout)
			defer cancel()
			begun := time.Now()
			// One that the engine has no part in may be late all the same, as the machine is busy.
			if err := call(ctx); err != nil || !b.answered(what) {
				class(t, what+" of a hung engine", err, is, name)
			}
			if took := time.Since(begun); took > 20*time.Second {
				t.Errorf("%s of a hung engine took %s", what, took)
			}
		})
	}
	for what, call := range b.calls(b.rt, c.ID) {
		if what == "exec" && b.Real {
			continue
		}
		try(what, call, time.Second, errdefs.IsDeadlineExceeded, "DeadlineExceeded")
	}
	for what, call := range b.calls(impatient, c.ID) {
		if what != "exec" && what != "pull" { // these end with their caller only
			try(what, call, time.Minute, errdefs.IsUnavailable, "Unavailable")
		}
	}
	wg.Wait()
	resume()
	b.await(t, "the engine to answer", func() bool { _, err := b.rt.Info(b.ctx); return err == nil })
	made := b.create(t, b.spec())
	b.alive(t, made.ID)
}
