package reaper_test

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/lifecycle/mountpin/mountpintest"
	"github.com/bermhq/berm/lifecycle/quota"
	"github.com/bermhq/berm/lifecycle/reaper"
	"github.com/bermhq/berm/lifecycle/store"
	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/runtimetest"
)

// start runs a manager on a fake engine, with a real store.
func start(t testing.TB, fake *runtimetest.Fake) *lifecycle.Service {
	t.Helper()
	return startWith(t, fake, nil)
}

func startWith(t testing.TB, fake *runtimetest.Fake, quotas lifecycle.Quotas) *lifecycle.Service {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	st, err := store.Open(ctx, store.Options{Path: filepath.Join(t.TempDir(), "berm.db")})
	must(t, err)
	pol, err := policy.Parse(nil, policy.Options{DefaultImage: runtimetest.DefaultImage})
	must(t, err)
	sealer, err := lifecycle.NewSealer(ctx, lifecycle.SealerOptions{Owner: "owner", Store: st})
	must(t, err)
	if quotas == nil {
		quotas, err = quota.New(ctx, quota.Options{Store: st, Off: true})
		must(t, err)
	}
	m, err := lifecycle.New(lifecycle.Options{
		Runtime: fake, Collector: fake, Policy: func() *policy.Policy { return pol }, Store: st, Holder: mountpintest.Holder{}, Owner: "owner",
		Quotas: quotas, Sealer: sealer,
	})
	must(t, err)
	done := make(chan error, 1)
	go func() { done <- m.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := errors.Join(<-done, st.Close()); err != nil {
			t.Error(err)
		}
	})
	for m.Ready(ctx) != nil {
		time.Sleep(time.Millisecond)
	}
	return m
}

func create(t testing.TB, m *lifecycle.Service, key string, ttl time.Duration) {
	t.Helper()
	if _, err := m.Create(context.Background(), lifecycle.CreateRequest{
		Tenant: "a", Key: key, Request: policy.Request{TTL: &ttl},
	}); err != nil {
		t.Fatal(err)
	}
}

func TestNew(t *testing.T) {
	if _, err := reaper.New(reaper.Options{}); err == nil {
		t.Error("no manager was taken")
	}
	if _, err := reaper.New(reaper.Options{Manager: &lifecycle.Service{}, Interval: -1}); err == nil {
		t.Error("a negative interval was taken")
	}
}

func TestSweepTellsWhatItDid(t *testing.T) {
	var broken atomic.Bool
	fake := runtimetest.NewFake(runtimetest.FakeOptions{Fail: func(op, _ string) error {
		if op == "remove" && broken.Load() {
			return errors.New("broken")
		}
		return nil
	}})
	m := start(t, fake)
	spans := tracetest.NewSpanRecorder()
	reg := prometheus.NewPedanticRegistry()
	r, err := reaper.New(reaper.Options{
		Manager: m, Registry: reg, Tracer: sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(spans)),
	})
	must(t, err)
	create(t, m, "ended", time.Second)
	create(t, m, "live", time.Hour)
	time.Sleep(1100 * time.Millisecond) // the store's clock is the real one
	broken.Store(true)
	swept, err := r.Sweep(context.Background())
	if err == nil || swept.Expired != 1 || swept.Errors != 1 || swept.Cleaned != 0 {
		t.Errorf("with a broken engine: %+v, %v", swept, err)
	}
	broken.Store(false)
	swept, err = r.Sweep(context.Background())
	if err != nil || swept.Expired != 1 || swept.Cleaned != 1 || swept.Errors != 0 {
		t.Errorf("afterwards: %+v, %v", swept, err)
	}
	if swept, err = r.Sweep(context.Background()); err != nil || swept != (reaper.Swept{}) {
		t.Errorf("with nothing to do: %+v, %v", swept, err)
	}
	if err := testutil.GatherAndCompare(reg, strings.NewReader(`
# HELP berm_sandbox_cleanup_errors_total Failed collections, by error type.
# TYPE berm_sandbox_cleanup_errors_total counter
berm_sandbox_cleanup_errors_total{error_type="internal"} 1
# HELP berm_sandbox_cleanups_total Sandboxes and orphans that sweeps tried to collect, by what came of it.
# TYPE berm_sandbox_cleanups_total counter
berm_sandbox_cleanups_total{result="deleted"} 1
berm_sandbox_cleanups_total{result="error"} 1
`), "berm_sandbox_cleanup_errors_total", "berm_sandbox_cleanups_total"); err != nil {
		t.Error(err)
	}
	names := map[string]int{}
	for _, s := range spans.Ended() {
		names[s.Name()]++
		if s.Name() == "sweep" && s.Parent().IsValid() {
			t.Error("a sweep has a parent")
		}
	}
	if names["sweep"] != 3 || names["sweep.sandbox"] != 2 {
		t.Errorf("spans: %v", names)
	}
}

// Containers go before the networks and volumes that they use, in one sweep.
func TestSweepCollectsObjects(t *testing.T) {
	var broken atomic.Bool
	fake := runtimetest.NewFake(runtimetest.FakeOptions{Fail: func(op, _ string) error {
		if op == "remove_volume" && broken.Load() {
			return errors.New("broken")
		}
		return nil
	}})
	past := time.Now().UTC().Add(-time.Second).Format(time.RFC3339Nano)
	labels := map[string]string{
		lifecycle.LabelOwner: "owner", lifecycle.LabelDoor: lifecycle.DoorEngine, lifecycle.LabelTenant: "a",
		lifecycle.LabelExpiresAt: past, lifecycle.LabelDeadline: past,
	}
	ctx := context.Background()
	must(t, fake.EnsureNetwork(ctx, runtime.Network{Name: "n", Labels: labels}))
	c, err := fake.Create(ctx, runtime.Spec{Name: "c", Image: runtimetest.DefaultImage, Network: "n", Labels: labels})
	must(t, err)
	fake.AddVolume(runtime.Volume{Name: "v", Labels: labels}, c.ID)
	m := start(t, fake) // seals what an earlier version has made
	reg := prometheus.NewPedanticRegistry()
	r, err := reaper.New(reaper.Options{Manager: m, Registry: reg})
	must(t, err)
	broken.Store(true)
	if swept, err := r.Sweep(ctx); err == nil || swept != (reaper.Swept{Objects: 2, Errors: 1}) {
		t.Errorf("with a broken engine: %+v, %v", swept, err)
	}
	broken.Store(false)
	if swept, err := r.Sweep(ctx); err != nil || swept != (reaper.Swept{Objects: 1}) {
		t.Errorf("afterwards: %+v, %v", swept, err)
	}
	if err := testutil.GatherAndCompare(reg, strings.NewReader(`
# HELP berm_engine_api_cleanups_total Containers, networks and volumes of the engine's own API that sweeps tried to collect, by kind and what came of it.
# TYPE berm_engine_api_cleanups_total counter
berm_engine_api_cleanups_total{kind="container",result="deleted"} 1
berm_engine_api_cleanups_total{kind="container",result="error"} 0
berm_engine_api_cleanups_total{kind="network",result="deleted"} 1
berm_engine_api_cleanups_total{kind="network",result="error"} 0
berm_engine_api_cleanups_total{kind="volume",result="deleted"} 1
berm_engine_api_cleanups_total{kind="volume",result="error"} 1
`), "berm_engine_api_cleanups_total"); err != nil {
		t.Error(err)
	}
}

// endless are Quotas with a tree that a sweep doesn't come to the end of.
type endless struct {
	lifecycle.Quotas
	sweeping chan struct{}
}

func (endless) Attach(context.Context, lifecycle.Subject) (string, error) {
	return "", nil
}

func (endless) Detach(string) {}

func (endless) Enforcement(lifecycle.Subject) string { return "" }

func (e endless) Sweep(ctx context.Context) error {
	select {
	case e.sweeping <- struct{}{}:
	case <-ctx.Done():
	}
	<-ctx.Done()
	return ctx.Err()
}

func TestRunSweepsUntilItsEnd(t *testing.T) {
	fake := runtimetest.NewFake(runtimetest.FakeOptions{})
	quotas := endless{sweeping: make(chan struct{})}
	m := startWith(t, fake, quotas)
	create(t, m, "ended", time.Second)
	r, err := reaper.New(reaper.Options{Manager: m, Interval: 10 * time.Millisecond})
	must(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	<-quotas.sweeping
	for deadline := time.Now().Add(10 * time.Second); len(fake.Containers()) > 0; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("it was never swept")
		}
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

func TestRunWaitsBetweenSweeps(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		// A manager that never ran answers Unavailable, which must not end Run.
		pol, err := policy.Parse(nil, policy.Options{})
		must(t, err)
		m, err := lifecycle.New(lifecycle.Options{
			Runtime: runtimetest.NewFake(runtimetest.FakeOptions{}), Policy: func() *policy.Policy { return pol },
			Store: noStore{}, Quotas: struct{ lifecycle.Quotas }{}, Holder: mountpintest.Holder{}, Owner: "owner",
		})
		must(t, err)
		spans := tracetest.NewSpanRecorder()
		r, err := reaper.New(reaper.Options{Manager: m, Tracer: sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(spans))})
		must(t, err)
		ctx, cancel := context.WithTimeout(context.Background(), 100*time.Second)
		defer cancel()
		if err := r.Run(ctx); err != nil {
			t.Error(err)
		}
		if n := len(spans.Ended()); n != 3 {
			t.Errorf("%d sweeps in 100 s at every 30 s", n)
		}
	})
}

type noStore struct{ lifecycle.Store }

// BenchmarkSweep is a sweep over 10,000 records, none of which has ended.
func BenchmarkSweep(b *testing.B) {
	fake := runtimetest.NewFake(runtimetest.FakeOptions{})
	m := start(b, fake)
	for i := range 10_000 {
		create(b, m, fmt.Sprintf("k%d", i), time.Hour)
	}
	r, err := reaper.New(reaper.Options{Manager: m})
	if err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		if swept, err := r.Sweep(context.Background()); err != nil || swept.Expired != 0 {
			b.Fatal(swept, err)
		}
	}
	b.ReportMetric(float64(b.Elapsed().Milliseconds())/float64(b.N), "ms/sweep")
}

// must fails the test at once if anything has failed.
func must(t testing.TB, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}
