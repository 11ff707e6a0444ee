package containerd

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/bermhq/berm/runtime"
)

// A container that is settled has its processes taken from the engine, which says
// that they have ended then, too: that isn't told twice.
func TestWatchSettled(t *testing.T) {
	r := newRuntime(t, shared.Get(t))
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	labels := map[string]string{"watched": "settled"}
	events, ready, done := make(chan runtime.Event, 100), make(chan struct{}), make(chan error, 1)
	go func() {
		done <- r.Watch(ctx, labels, func() { close(ready) }, func(e runtime.Event) { events <- e })
	}()
	select {
	case <-ready:
	case err := <-done:
		t.Fatal(err)
	}
	next := func(want string) {
		t.Helper()
		select {
		case e := <-events:
			if got := fmt.Sprint(e.Type, " ", e.ExitCode, " ", e.Labels); got != want {
				t.Errorf("%s, want %s", got, want)
			}
		case err := <-done:
			t.Fatal(err)
		case <-ctx.Done():
			t.Fatalf("waited in vain for %s", want)
		}
	}
	for range 3 {
		c, err := r.Create(ctx, runtime.Spec{
			Name: "watched", Image: testImage, Command: []string{"sh", "-c", "exit 3"}, Labels: labels,
		})
		must(t, err)
		next("start 0 map[watched:settled]")
		next("exit 3 map[watched:settled]")
		must(t, r.settle(ctx, c.ID))
		if got, err := r.Inspect(ctx, c.ID); err != nil || got.State != runtime.StateExited || got.ExitCode != 3 {
			t.Errorf("settled: %+v, %v", got, err)
		}
		must(t, r.Remove(ctx, c.ID))
		next("removed 0 map[watched:settled]")
	}
	cancel()
	if err := <-done; err != nil {
		t.Errorf("ended by its context: %v", err)
	}
	if len(events) != 0 {
		t.Errorf("%d events more", len(events))
	}
}
