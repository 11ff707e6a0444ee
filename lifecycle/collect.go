package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"maps"
	goruntime "runtime"
	"sync"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"

	"github.com/bermhq/berm/runtime"
)

// collector removes sandboxes and objects that have ended. It keeps no state: each sweep reads
// what exists, and so repeats what an earlier one failed to do.
type collector struct {
	registry *Registry
	engine   *engine
}

// Collect sweeps every Options.SweepEvery until ctx ends. It logs and counts failures; the next
// sweep tries again. In parallel, it removes the quota limits of sandboxes that are gone, which
// may take long.
func (c *collector) Collect(ctx context.Context) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() { c.every(ctx, c.sweepQuotas) })
	c.every(ctx, func(ctx context.Context) error {
		_, err := c.Sweep(ctx)
		return err
	})
	return nil
}

func (c *collector) every(ctx context.Context, sweep func(context.Context) error) {
	tick := time.NewTicker(c.registry.opts.SweepEvery)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		if err := sweep(ctx); err != nil && ctx.Err() == nil {
			c.engine.log.WarnContext(ctx, "sweep_incomplete", "error", err)
		}
	}
}

// Swept counts what a sweep found and removed.
type Swept struct {
	Expired  int // sandboxes that had ended
	Cleaned  int // ended sandboxes and orphans removed
	Orphans  int // containers that no record knew
	Networks int // networks removed
	Objects  int // containers, networks and volumes of the engine's own API that had ended, removed
	Errors   int // failed removals
}

// Sweep removes everything that has ended: sandboxes past their end, this instance's containers
// without a record, parts of containers in the engine, stray networks, and objects that callers
// of the engine proxy made. It goes on after a failure.
func (c *collector) Sweep(ctx context.Context) (swept Swept, err error) {
	ctx, span := c.engine.tracer.Start(ctx, "sweep", trace.WithNewRoot())
	defer func() {
		span.SetAttributes(attribute.Int("berm.expired", swept.Expired),
			attribute.Int("berm.cleaned", swept.Cleaned), attribute.Int("berm.errors", swept.Errors))
		if err != nil {
			failSpan(span, err)
		}
		span.End()
	}()
	began := time.Now()
	b := &batch{report: c.reportSandbox}
	ended := c.ended(began)
	swept.Expired = len(ended)
	for _, sb := range ended {
		b.do(ctx, append(sandboxAttrs(sb), "expires_at", sb.Ends()), func(ctx context.Context) (bool, error) {
			return c.collect(ctx, sb)
		})
	}
	orphans, lerr := c.orphans(ctx, began)
	swept.Orphans = len(orphans)
	for _, x := range orphans {
		attrs := []any{
			"key", x.Labels[LabelKey], "tenant", x.Labels[LabelTenant],
			"session_id", x.Labels[LabelSessionID], "container_id", x.ID, "orphan", true,
		}
		b.do(ctx, attrs, func(ctx context.Context) (bool, error) { return true, c.engine.remove(ctx, x.ID) })
	}
	b.wg.Wait()
	swept.Cleaned = b.done
	if c.registry.available() == nil { // before the networks, which these objects may be using
		c.engine.sweep(ctx)
	}
	if lerr == nil {
		swept.Networks, lerr = c.engine.removeNetworks(ctx, c.engine.inPolicy)
	}
	errs := append(b.errs, lerr)
	swept.Errors = len(b.errs)
	for _, kind := range ObjectKinds() {
		of, err := c.sweepObjects(ctx, kind, began)
		swept.Objects += of.done
		swept.Errors += len(of.errs)
		errs = append(append(errs, of.errs...), err)
	}
	return swept, errors.Join(errs...)
}

// batch does removals concurrently, as many as the engine allows.
type batch struct {
	report func(ctx context.Context, err error, attrs []any)

	wg   sync.WaitGroup
	sem  chan struct{}
	mu   sync.Mutex
	done int
	errs []error
}

// do calls remove in a goroutine, and reports the result. Remove returns false if it left the
// object.
func (b *batch) do(ctx context.Context, attrs []any, remove func(context.Context) (bool, error)) {
	if b.sem == nil {
		b.sem = make(chan struct{}, 2*goruntime.NumCPU())
	}
	b.sem <- struct{}{}
	b.wg.Go(func() {
		defer func() { <-b.sem }()
		removed, err := remove(ctx)
		if removed || err != nil {
			b.report(ctx, err, attrs)
		}
		b.mu.Lock()
		defer b.mu.Unlock()
		if err != nil {
			b.errs = append(b.errs, err)
		} else if removed {
			b.done++
		}
	})
}

// reportSandbox logs and counts the removal of a sandbox or an orphan.
func (c *collector) reportSandbox(ctx context.Context, err error, attrs []any) {
	if err != nil {
		c.engine.metrics.cleanups.WithLabelValues(string(ResultError)).Inc()
		c.engine.metrics.cleanupErrors.WithLabelValues(ErrorType(err)).Inc()
		c.engine.log.WarnContext(ctx, "sandbox_clean_failed", append(attrs, "error", err)...)
		return
	}
	c.engine.metrics.cleanups.WithLabelValues(string(ResultDeleted)).Inc()
	c.engine.log.InfoContext(ctx, "sandbox_cleaned", attrs...)
}

// ended returns the sandboxes that have ended at now.
func (c *collector) ended(now time.Time) []Sandbox {
	r := c.registry
	r.mu.Lock()
	defer r.mu.Unlock()
	var ended []Sandbox
	for id, s := range r.slots {
		if s.failure != nil && now.Sub(s.failure.at) > failureKept {
			s.failure = nil
			r.freeLocked(id, s)
		}
		if s.record == nil {
			continue
		}
		if sb := s.record.snapshotLocked(now); sb.Status == StatusExpired {
			ended = append(ended, sb)
		}
	}
	return ended
}

// collect removes a sandbox that has ended. It checks again under the key's lock, and returns
// false if the sandbox was replaced, renewed or removed. It doesn't wait for a create, which
// removes the ended sandbox itself.
func (c *collector) collect(ctx context.Context, sb Sandbox) (removed bool, err error) {
	r := c.registry
	ctx, span := r.tracer.Start(ctx, "sweep.sandbox", trace.WithAttributes(
		attribute.String("berm.key", sb.Key), attribute.String("berm.session_id", sb.SessionID),
		attribute.String("container.id", sb.ContainerID)))
	defer func() {
		if err != nil {
			failSpan(span, err)
			err = fmt.Errorf("collect sandbox %s: %w", sb.Key, err)
		}
		span.End()
	}()
	if err := r.available(); err != nil {
		return false, err
	}
	unlock, pending, err := r.lockOrJoin(ctx, sb.keyID())
	if err != nil || pending != nil {
		return false, err
	}
	defer unlock()
	rec, now := r.recordOf(sb.keyID())
	if now.SessionID != sb.SessionID || now.Status != StatusExpired {
		return false, nil
	}
	return true, r.clear(ctx, sb.keyID(), rec)
}

// orphans returns this instance's containers that no record has and no create is making, such as
// what a failed create couldn't remove. It spares those made at before or later, and those with
// malformed labels, which can't be this instance's.
func (c *collector) orphans(ctx context.Context, before time.Time) ([]runtime.Container, error) {
	r := c.registry
	if err := r.available(); err != nil {
		return nil, err
	}
	// A container that is on record now may end while the engine lists. That makes it no orphan.
	r.mu.Lock()
	known, making := maps.Clone(r.containers), maps.Clone(r.making)
	r.mu.Unlock()
	listed, err := c.engine.list(ctx, c.engine.ownSelector())
	if err != nil {
		return nil, fmt.Errorf("list this instance's containers: %w", err)
	}
	before = before.Truncate(time.Second) // an engine's times may be whole seconds
	r.mu.Lock()
	defer r.mu.Unlock()
	var orphans []runtime.Container
	for _, x := range r.opts.Sealer.Genuine(listed, func(id string) bool { _, ok := known[id]; return ok }) {
		_, wasKnown := known[x.ID]
		_, wasMaking := making[x.Labels[LabelSessionID]]
		if wasKnown || wasMaking || !x.CreatedAt.Before(before) || !r.orphanLocked(x) {
			continue
		}
		if _, err := sandboxFromLabels(x.Labels, nil); err == nil {
			orphans = append(orphans, x)
		}
	}
	return orphans, nil
}

// sweepQuotas removes the quota limits of sandboxes that are gone.
func (c *collector) sweepQuotas(ctx context.Context) error {
	if c.registry.available() != nil {
		return nil
	}
	return c.registry.quotas.Sweep(ctx)
}
