package lifecycle_test

import (
	"bytes"
	"context"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/bermhq/berm/runtime/runtimetest"
)

// The engine's remains are removed before anything else at each stretch of a
// reachable engine, and in every sweep after the containers and before the networks.
func TestEngineSweepHasItsPlace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		var ops []string
		w := newWorld(t, setup{
			policy: "version: 1\nnetworks: {on: {engine_network: n}}\n",
			fake: runtimetest.FakeOptions{Fail: func(op, _ string) error {
				mu.Lock()
				defer mu.Unlock()
				ops = append(ops, op)
				return nil
			}},
		})
		// check compares what was done since the last time with what should have been.
		check := func(when string, want ...string) {
			t.Helper()
			mu.Lock()
			defer mu.Unlock()
			ops = slices.DeleteFunc(ops, func(op string) bool { return !slices.Contains(want, op) })
			if got := slices.Compact(ops); !slices.Equal(got, want) {
				t.Errorf("%s: %v, want %v", when, got, want)
			}
			ops = nil
		}
		check("at the start", "sweep", "ensure_network", "list")
		w.createFor("k", time.Minute)
		time.Sleep(time.Minute)
		w.sweep()
		check("in a sweep", "create", "remove", "sweep", "networks")
		w.fake.SetDown(true)
		w.eventually("it is down", func() bool { return w.Ready(context.Background()) != nil })
		calls := w.fake.Calls("sweep")
		w.sweep()
		if got := w.fake.Calls("sweep"); got != calls {
			t.Error("an engine that is away was swept")
		}
		w.fake.SetDown(false)
		w.ready()
		check("when the engine is back", "sweep", "ensure_network", "list")
	})
}

// A failed sweep is told, and keeps nothing else from being done.
func TestEngineSweepFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		fake, _ := breaking("sweep")
		w := newWorld(t, setup{logger: slog.New(slog.NewTextHandler(&log, nil)), fake: fake})
		w.createFor("k", time.Minute)
		time.Sleep(time.Minute)
		if swept := w.sweep(); swept.Cleaned != 1 || swept.Errors != 0 {
			t.Errorf("swept %+v", swept)
		}
		w.stop()
		if n := strings.Count(log.String(), "level=WARN msg=engine_sweep_failed error=broken"); n != 2 {
			t.Errorf("%d warnings, want one for the start and one for the sweep:\n%s", n, &log)
		}
		if got := w.metric("berm_runtime_errors_total{operation=sweep}"); got != 2 {
			t.Errorf("%v are counted", got)
		}
	})
}
