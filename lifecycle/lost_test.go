package lifecycle_test

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/runtimetest"
)

// An engine that goes away under a command is no end of the sandbox, whatever
// became of the command's processes.
func TestEngineGoesAwayUnderACommand(t *testing.T) {
	for name, ended := range map[string]func(cause error) error{
		"cut off":    func(cause error) error { return cause },
		"not killed": func(cause error) error { return fmt.Errorf("%w: %w", runtime.ErrNotKilled, cause) },
	} {
		t.Run(name, func(t *testing.T) {
			ctx := context.Background()
			started := make(chan struct{})
			w := newWorld(t, setup{fake: runtimetest.FakeOptions{
				Exec: func(ctx context.Context, _ runtime.Container, e runtime.Exec) (runtime.ExecResult, error) {
					if e.Command[0] != "hang" {
						return runtime.ExecResult{}, errors.ErrUnsupported
					}
					close(started)
					<-ctx.Done()
					return runtime.ExecResult{}, ended(context.Cause(ctx))
				},
			}})
			sb := w.create(request("k")).Sandbox
			done := later(func() error {
				return second(w.Exec(ctx, lifecycle.ExecRequest{Tenant: "a", Key: "k", Command: []string{"hang"}}))
			})
			<-started
			w.fake.SetDown(true)
			if err := <-done; !errorIs[*lifecycle.UnavailableError](err) {
				t.Errorf("exec: %v", err)
			}
			if got, err := w.Get(ctx, "a", "k"); err != nil || got.SessionID != sb.SessionID || got.Status != lifecycle.StatusRunning {
				t.Errorf("meanwhile: %+v, %v", got, err)
			}
			w.eventually("it is seen", func() bool { return w.Ready(ctx) != nil })
			w.fake.SetDown(false)
			w.ready()
			if res := w.exec("k", "true"); !res.OK() || res.Recreated || res.SessionID != sb.SessionID {
				t.Errorf("afterwards: %+v", res)
			}
			if n := w.metric("berm_sandbox_commands_total{status=error}"); n != 1 || len(w.fake.Containers()) != 1 || !w.store.has(sb.SessionID) {
				t.Errorf("%v counted as failed; %d containers", n, len(w.fake.Containers()))
			}
		})
	}
}

// A sandbox that is deleted while the engine lists is no orphan.
func TestOrphansDuringADelete(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var w *world
		var armed atomic.Bool
		w = newWorld(t, setup{fake: runtimetest.FakeOptions{FailAfter: func(op, _ string) error {
			if op != "list" || !armed.Swap(false) {
				return nil
			}
			return second(w.Delete(context.Background(), "a", "k"))
		}}})
		w.create(request("k"))
		time.Sleep(2 * time.Second)
		armed.Store(true)
		if swept, err := w.Sweep(t.Context()); err != nil || swept != (lifecycle.Swept{}) || armed.Load() {
			t.Errorf("swept %+v, %v", swept, err)
		}
	})
}
