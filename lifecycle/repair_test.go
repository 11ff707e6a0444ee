package lifecycle_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/runtime/runtimetest"
)

// What a start makes up for a lost store, the start after it finds.
func TestLostStoreIsWrittenAnew(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx := context.Background()
		w := newWorld(t, setup{})
		req := request("k")
		req.Request.TTL = ptr(time.Minute)
		w.create(req)
		time.Sleep(50 * time.Second)
		if _, err := w.Renew(ctx, "a", "k", 0); err != nil {
			t.Fatal(err)
		}
		w.stop()
		lost := newStore()
		lost.fresh = true
		w = newWorld(t, setup{engine: w.fake, store: lost})
		w.stop()
		time.Sleep(30 * time.Second) // past what the label says
		lost.fresh = false
		w = newWorld(t, setup{engine: w.fake, store: lost})
		if swept := w.sweep(); swept.Cleaned != 0 || w.status("k") != lifecycle.StatusRunning {
			t.Errorf("%+v", swept)
		}
		w.stop()
	})
}

// A delete that fails half-way may have killed the container, and then no create
// may answer it as if it ran.
func TestFailedRemovalThatKilled(t *testing.T) {
	var w *world
	var broken atomic.Bool
	w = newWorld(t, setup{fake: runtimetest.FakeOptions{Fail: func(op, id string) error {
		if op != "remove" || !broken.Load() {
			return nil
		}
		w.fake.Kill(id)
		for range 1000 { // until the news is here
			if sb, err := w.Get(context.Background(), "a", "k"); err != nil || sb.Status != lifecycle.StatusStopping {
				break
			}
			time.Sleep(time.Millisecond)
		}
		return errBroken
	}}})
	w.create(request("k"))
	broken.Store(true)
	if _, err := w.Delete(context.Background(), "a", "k"); !errors.Is(err, errBroken) {
		t.Fatalf("delete: %v", err)
	}
	if got := w.status("k"); got != lifecycle.StatusStopped {
		t.Errorf("afterwards it is %s", got)
	}
	broken.Store(false)
	if res := w.create(request("k")); !res.Recreated {
		t.Errorf("create: %+v", res)
	}
}

// A container that refuses a command because it is paused must not be taken for
// dead, and made anew.
func TestExecInAPausedContainer(t *testing.T) {
	var w *world
	w = newWorld(t, setup{fake: runtimetest.FakeOptions{Fail: func(op, id string) error {
		if op == "exec" { // behind the manager's back, at the very moment of the command
			return w.fake.Pause(context.Background(), id)
		}
		return nil
	}}})
	sb := w.create(request("k")).Sandbox
	_, err := w.Exec(context.Background(), lifecycle.ExecRequest{Tenant: "a", Key: "k", Command: []string{"true"}})
	var state *lifecycle.StateError
	if !errors.As(err, &state) || state.Status != lifecycle.StatusPaused {
		t.Errorf("exec: %v", err)
	}
	if got, err := w.Get(context.Background(), "a", "k"); err != nil || got.ContainerID != sb.ContainerID || got.Status != lifecycle.StatusPaused {
		t.Errorf("afterwards: %+v, %v", got, err)
	}
}
