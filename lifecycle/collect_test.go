package lifecycle_test

import (
	"context"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/runtimetest"
)

func (w *world) sweep() lifecycle.Swept {
	w.t.Helper()
	swept, _ := w.Sweep(context.Background())
	return swept
}

// createFor makes a sandbox that ends after ttl.
func (w *world) createFor(key string, ttl time.Duration) {
	w.t.Helper()
	req := request(key)
	req.Request.TTL = &ttl
	w.create(req)
}

// Containers go before the networks and volumes that they use, in one sweep.
func TestSweepCollectsObjects(t *testing.T) {
	fake, breakOp := breaking("remove_volume")
	w := newWorld(t, setup{fake: fake})
	ctx := t.Context()
	must(t, w.fake.EnsureNetwork(ctx, runtime.Network{Name: "n", Labels: objectLabels(lifecycle.ObjectNetwork, -time.Second)}))
	c, err := w.fake.Create(ctx, runtime.Spec{Name: "c", Image: runtimetest.DefaultImage, Network: "n", Labels: objectLabels(lifecycle.ObjectContainer, -time.Second)})
	must(t, err)
	w.fake.AddVolume(runtime.Volume{Name: "v", Labels: objectLabels(lifecycle.ObjectVolume, -time.Second)}, c.ID)
	if swept, err := w.Sweep(ctx); err == nil || swept != (lifecycle.Swept{Objects: 2, Errors: 1}) {
		t.Errorf("with a broken engine: %+v, %v", swept, err)
	}
	breakOp("")
	if swept, err := w.Sweep(ctx); err != nil || swept != (lifecycle.Swept{Objects: 1}) {
		t.Errorf("afterwards: %+v, %v", swept, err)
	}
	if err := testutil.GatherAndCompare(w.reg, strings.NewReader(`
# HELP berm_engine_api_cleanups_total Containers, networks and volumes of the engine's own API that sweeps tried to collect, by kind and what came of it.
# TYPE berm_engine_api_cleanups_total counter
berm_engine_api_cleanups_total{kind="container",result="deleted"} 1
berm_engine_api_cleanups_total{kind="container",result="error"} 0
berm_engine_api_cleanups_total{kind="network",result="deleted"} 1
berm_engine_api_cleanups_total{kind="network",result="error"} 0
berm_engine_api_cleanups_total{kind="volume",result="deleted"} 1
berm_engine_api_cleanups_total{kind="volume",result="error"} 1
`), "berm_engine_api_cleanups_total", "berm_sandbox_cleanup_errors_total"); err != nil {
		t.Error(err)
	}
}

// endless are Quotas with a tree that a sweep doesn't come to the end of.
type endless struct {
	lifecycle.Quotas
	sweeping chan struct{}
}

func (e endless) Sweep(ctx context.Context) error {
	select {
	case e.sweeping <- struct{}{}:
	case <-ctx.Done():
	}
	<-ctx.Done()
	return ctx.Err()
}

// TestCollect has the engine be away at the first sweep.
func TestCollect(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		quotas := endless{softQuotas(), make(chan struct{})}
		w := newTraced(t, setup{quotas: quotas})
		w.createFor("ended", time.Second)
		w.fake.SetDown(true)
		time.Sleep(10 * time.Second)
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Second)
		defer cancel()
		done := later(func() error { return w.Collect(ctx) })
		time.Sleep(31 * time.Second)
		if n := len(w.fake.Containers()); n != 1 {
			t.Errorf("%d containers", n)
		}
		w.fake.SetDown(false)
		<-quotas.sweeping
		must(t, <-done)
		sweeps := 0
		for _, s := range w.spans.Ended() {
			if s.Name() == "sweep" {
				sweeps++
			}
		}
		if n := len(w.fake.Containers()); n != 0 || sweeps != 3 {
			t.Errorf("%d containers after %d sweeps in 100 s at every 30 s", n, sweeps)
		}
	})
}
