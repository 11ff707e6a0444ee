// Package reaper collects what has ended. It keeps nothing in memory: each sweep
// looks at what is there and acts on it, so that a sweep that failed, or a process
// that died in one, is made up for by the next.
package reaper

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	goruntime "runtime"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"

	"github.com/bermhq/berm/lifecycle"
)

// Options configure a Reaper.
type Options struct {
	Manager  *lifecycle.Service    // mandatory
	Interval time.Duration         // between sweeps; 0 is 30 s
	Logger   *slog.Logger          // nil discards
	Registry prometheus.Registerer // nil: metrics are kept but not exported
	Tracer   trace.TracerProvider  // nil: no spans
}

// Reaper sweeps.
type Reaper struct {
	manager  *lifecycle.Service
	interval time.Duration
	log      *slog.Logger
	metrics  *metrics
	tracer   trace.Tracer
}

// New checks the options and returns a Reaper that does nothing until Run.
func New(opts Options) (*Reaper, error) {
	if opts.Manager == nil {
		return nil, errors.New("reaper: Manager is mandatory")
	}
	if opts.Interval < 0 {
		return nil, errors.New("reaper: Interval must not be negative")
	}
	return &Reaper{
		manager:  opts.Manager,
		interval: cmp.Or(opts.Interval, 30*time.Second),
		log:      cmp.Or(opts.Logger, slog.New(slog.DiscardHandler)),
		metrics:  newMetrics(opts.Registry),
		tracer:   cmp.Or[trace.TracerProvider](opts.Tracer, noop.NewTracerProvider()).Tracer("github.com/bermhq/berm/lifecycle/reaper"),
	}, nil
}

// Run sweeps every interval until ctx ends. Failures are logged and counted, and
// left to the next sweep. Apart from that, the limits of workspaces whose sandboxes are
// gone are undone, which may take long.
func (r *Reaper) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() { r.every(ctx, r.manager.SweepQuotas) })
	r.every(ctx, func(ctx context.Context) error {
		_, err := r.Sweep(ctx)
		return err
	})
	return nil
}

// every sweeps every interval until ctx ends.
func (r *Reaper) every(ctx context.Context, sweep func(context.Context) error) {
	tick := time.NewTicker(r.interval)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		if err := sweep(ctx); err != nil && ctx.Err() == nil {
			r.log.WarnContext(ctx, "sweep_incomplete", "error", err)
		}
	}
}

// Swept is what a sweep did.
type Swept struct {
	Expired  int // sandboxes that had ended
	Cleaned  int // of those, and of orphans, the ones removed
	Orphans  int // containers that no record knew
	Networks int // networks removed
	Objects  int // containers, networks and volumes of the engine's own API that had ended, removed
	Errors   int // failed removals
}

// Sweep collects all that has ended by now: sandboxes past their end, this
// instance's containers that no record knows, what the engine has of neither, then
// its stray networks, and what callers of the engine's own API made. One failure doesn't
// keep the others from being swept.
func (r *Reaper) Sweep(ctx context.Context) (swept Swept, err error) {
	ctx, span := r.tracer.Start(ctx, "sweep", trace.WithNewRoot())
	defer func() {
		span.SetAttributes(attribute.Int("berm.expired", swept.Expired),
			attribute.Int("berm.cleaned", swept.Cleaned), attribute.Int("berm.errors", swept.Errors))
		if err != nil {
			span.SetStatus(codes.Error, lifecycle.ErrorType(err))
		}
		span.End()
	}()
	began := time.Now()
	var b batch
	ended := r.manager.Ended(began)
	swept.Expired = len(ended)
	for _, sb := range ended {
		b.do(func() (bool, error) { return r.collect(ctx, sb) })
	}
	orphans, lerr := r.manager.Orphans(ctx, began)
	swept.Orphans = len(orphans)
	for _, c := range orphans {
		b.do(func() (bool, error) {
			err := r.manager.CollectOrphan(ctx, c)
			r.tell(ctx, err, "key", c.Labels[lifecycle.LabelKey], "tenant", c.Labels[lifecycle.LabelTenant],
				"session_id", c.Labels[lifecycle.LabelSessionID], "container_id", c.ID, "orphan", true)
			return err == nil, err
		})
	}
	b.wait()
	swept.Cleaned = b.done
	r.manager.SweepEngine(ctx) // before the networks, which what it removes may be using
	if lerr == nil {
		swept.Networks, lerr = r.manager.CollectNetworks(ctx)
	}
	errs := append(b.errs, lerr)
	swept.Errors = len(b.errs)
	for _, kind := range lifecycle.ObjectKinds() {
		of, err := r.objects(ctx, kind, began)
		swept.Objects += of.done
		swept.Errors += len(of.errs)
		errs = append(append(errs, of.errs...), err)
	}
	return swept, errors.Join(errs...)
}

// objects removes what has ended of one kind. The error is that it can't be told.
func (r *Reaper) objects(ctx context.Context, kind lifecycle.ObjectKind, now time.Time) (*batch, error) {
	b := &batch{}
	ended, err := r.manager.EndedObjects(ctx, kind, now)
	if err != nil {
		return b, err
	}
	for _, o := range ended {
		b.do(func() (bool, error) {
			removed, err := r.manager.CollectObject(ctx, o)
			switch {
			case err != nil:
				r.metrics.objects.WithLabelValues(string(kind), string(lifecycle.ResultError)).Inc()
				r.log.WarnContext(ctx, "object_clean_failed", "kind", string(kind), "id", o.ID, "tenant", o.Tenant, "error", err)
			case removed:
				r.metrics.objects.WithLabelValues(string(kind), string(lifecycle.ResultDeleted)).Inc()
				r.log.InfoContext(ctx, "object_cleaned", "kind", string(kind), "id", o.ID, "tenant", o.Tenant, "expires_at", o.Ends)
			}
			return removed, err
		})
	}
	b.wait()
	return b, nil
}

// collect removes one ended sandbox.
func (r *Reaper) collect(ctx context.Context, sb lifecycle.Sandbox) (bool, error) {
	ctx, span := r.tracer.Start(ctx, "sweep.sandbox", trace.WithAttributes(
		attribute.String("berm.key", sb.Key), attribute.String("berm.session_id", sb.SessionID),
		attribute.String("container.id", sb.ContainerID)))
	defer span.End()
	collected, err := r.manager.Collect(ctx, sb)
	if err != nil {
		span.SetStatus(codes.Error, lifecycle.ErrorType(err))
		err = fmt.Errorf("collect sandbox %s: %w", sb.Key, err)
	}
	if collected || err != nil {
		r.tell(ctx, err, "tenant", sb.Tenant, "key", sb.Key, "session_id", sb.SessionID,
			"container_id", sb.ContainerID, "expires_at", sb.Ends())
	}
	return collected, err
}

// tell logs and counts one removal.
func (r *Reaper) tell(ctx context.Context, err error, attrs ...any) {
	if err != nil {
		r.metrics.cleanups.WithLabelValues(string(lifecycle.ResultError)).Inc()
		r.metrics.errors.WithLabelValues(lifecycle.ErrorType(err)).Inc()
		r.log.WarnContext(ctx, "sandbox_clean_failed", append(attrs, "error", err)...)
		return
	}
	r.metrics.cleanups.WithLabelValues(string(lifecycle.ResultDeleted)).Inc()
	r.log.InfoContext(ctx, "sandbox_cleaned", attrs...)
}

// batch does removals side by side, as many as the manager lets through.
type batch struct {
	wg   sync.WaitGroup
	sem  chan struct{}
	mu   sync.Mutex
	done int
	errs []error
}

func (b *batch) do(f func() (bool, error)) {
	if b.sem == nil {
		b.sem = make(chan struct{}, 2*goruntime.NumCPU())
	}
	b.sem <- struct{}{}
	b.wg.Go(func() {
		defer func() { <-b.sem }()
		ok, err := f()
		b.mu.Lock()
		defer b.mu.Unlock()
		if err != nil {
			b.errs = append(b.errs, err)
		} else if ok {
			b.done++
		}
	})
}

func (b *batch) wait() { b.wg.Wait() }

type metrics struct {
	cleanups *prometheus.CounterVec
	objects  *prometheus.CounterVec
	errors   *prometheus.CounterVec
}

func newMetrics(reg prometheus.Registerer) *metrics {
	with := promauto.With(reg) // which may be nil
	m := &metrics{
		cleanups: with.NewCounterVec(prometheus.CounterOpts{
			Name: "berm_sandbox_cleanups_total", Help: "Sandboxes and orphans that sweeps tried to collect, by what came of it.",
		}, []string{"result"}),
		objects: with.NewCounterVec(prometheus.CounterOpts{
			Name: "berm_engine_api_cleanups_total", Help: "Containers, networks and volumes of the engine's own API that sweeps tried to collect, by kind and what came of it.",
		}, []string{"kind", "result"}),
		errors: with.NewCounterVec(prometheus.CounterOpts{
			Name: "berm_sandbox_cleanup_errors_total", Help: "Failed collections, by error type.",
		}, []string{"error_type"}),
	}
	// A counter is exported from the start, so that its first rate is right.
	m.cleanups.WithLabelValues(string(lifecycle.ResultDeleted))
	m.cleanups.WithLabelValues(string(lifecycle.ResultError))
	for _, kind := range lifecycle.ObjectKinds() {
		m.objects.WithLabelValues(string(kind), string(lifecycle.ResultDeleted))
		m.objects.WithLabelValues(string(kind), string(lifecycle.ResultError))
	}
	return m
}
