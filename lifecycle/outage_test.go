package lifecycle_test

import (
	"context"
	"errors"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/runtimetest"
)

// unnamed is an engine that never says what it is.
type unnamed struct{ *runtimetest.Fake }

func (unnamed) Info(ctx context.Context) (runtime.Info, error) {
	<-ctx.Done()
	return runtime.Info{}, ctx.Err()
}

// Callers are told which engine doesn't answer, since when and why.
func TestOutage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx := context.Background()
		w := newWorld(t, setup{name: "the Docker Engine at unix:///e"})
		message := func(err error) string {
			t.Helper()
			u, ok := errors.AsType[*lifecycle.UnavailableError](err)
			if !ok {
				t.Fatalf("it is no UnavailableError: %v", err)
			}
			return u.Message
		}
		const refused = " (connection refused); requests are refused until it does"
		if got := message(w.Unreachable(syscall.ECONNREFUSED)); got != "the Docker Engine at unix:///e doesn't answer"+refused {
			t.Errorf("at first: %s", got)
		}
		w.fake.SetDown(true)
		for range 2 { // the second time, an outage begins anew
			w.eventually("it is seen", func() bool { return w.Ready(ctx) != nil })
			time.Sleep(12 * time.Second)
			_, err := w.Create(ctx, request("k"))
			if got := message(err); got != "the Docker Engine at unix:///e has not answered for 12s"+refused {
				t.Errorf("while it is down: %s", got)
			}
			if got := w.Status(ctx, "a").Reason; got != message(err) {
				t.Errorf("status: %s", got)
			}
			w.fake.SetDown(false)
			w.ready()
			w.fake.SetDown(true)
		}
		w.fake.SetDown(false)
		w.ready()
		w.stop()
	})
}

// What Berm hasn't seen yet is no outage, and what it doesn't know is nobody's fault.
func TestOutageUnknown(t *testing.T) {
	w := newWorld(t, setup{wait: true, name: "containerd at /c", wrap: func(f *runtimetest.Fake) runtime.AgentRuntime { return unnamed{f} }})
	u, ok := errors.AsType[*lifecycle.UnavailableError](w.Ready(context.Background()))
	if want := "Berm has just started and is asking containerd at /c what is there; requests are refused until it knows"; !ok || u.Message != want {
		t.Errorf("at the start: %+v", u)
	}
	u, ok = errors.AsType[*lifecycle.UnavailableError](w.Unreachable(errors.New("password=hunter2")))
	if want := "containerd at /c can't be used, as Berm's log tells; requests are refused until it can"; !ok || u.Message != want {
		t.Errorf("for an unknown reason: %+v", u)
	}
}
