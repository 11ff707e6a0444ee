package lifecycle

import (
	"context"
	"fmt"
	"time"

	"github.com/google/uuid"
	"go.opentelemetry.io/otel/trace"
)

// launch starts the create of a key that the caller holds. If it succeeds, the create holds the
// key and unlocks it. Old is the record that it replaces, or nil. Of ctx, only the trace
// reaches the create.
func (r *Registry) launch(ctx context.Context, want *desired, old *record, unlock func()) (*pendingCreate, error) {
	now := time.Now().UTC()
	p := &pendingCreate{
		unlock:   unlock,
		pulling:  make(chan struct{}),
		done:     make(chan struct{}),
		starting: want.Sandbox,
	}
	p.starting.SessionID, p.starting.Status = uuid.NewString(), StatusStarting
	p.starting.CreatedAt, p.starting.LastUsedAt = now, now
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closing {
		return nil, errClosing
	}
	if err := r.capacityLocked(want, old, r.opts.Settings.MaxSandboxes); err != nil {
		return nil, err
	}
	r.making[p.starting.SessionID] = struct{}{}
	s := r.slotLocked(want.keyID())
	s.pending = p
	for _, wake := range s.joining {
		wake()
	}
	if old != nil && !old.snapshotLocked(now).Expired(now) {
		p.dead = old.sb.SessionID
	}
	ctx = trace.ContextWithSpanContext(r.base, trace.SpanContextFromContext(ctx))
	ctx, p.cancel = context.WithCancelCause(ctx)
	r.tasks.Go(func() {
		defer p.cancel(nil)
		r.runPending(ctx, p, old)
	})
	return p, nil
}

// runPending makes the sandbox and publishes it, or its error.
func (r *Registry) runPending(ctx context.Context, p *pendingCreate, old *record) {
	var sb Sandbox
	err := r.engine.guard("create", func() (err error) { sb, err = r.replace(ctx, p, old); return err })
	r.mu.Lock()
	s := r.slots[p.starting.keyID()]
	delete(r.making, p.starting.SessionID)
	if err != nil {
		p.err = &StartError{Err: err}
		select {
		case <-p.pulling: // its callers were answered "pulling"; their next call gets the error
			failed := p.starting
			failed.Status, failed.Error = StatusFailed, err.Error()
			s.failure = &failure{sb: failed, err: p.err, at: time.Now()}
			r.dropFailuresLocked(p.starting.Tenant)
		default:
		}
	} else {
		if _, gone := r.ended[sb.ContainerID]; gone {
			sb.Status = StatusStopped
		}
		rec := &record{sb: sb}
		r.publishLocked(rec)
		p.result = CreateResult{Sandbox: rec.snapshotLocked(time.Now()), Result: ResultCreated}
		if old != nil {
			p.result.Result, p.result.Recreated = ResultReplaced, p.dead != ""
		}
	}
	r.forgetEndedLocked()
	s.pending = nil
	r.freeLocked(p.starting.keyID(), s)
	r.mu.Unlock()
	if err == nil { // here rather than in Create, because its callers may have left
		r.metrics.creates.WithLabelValues(string(p.result.Result)).Inc()
		if attrs := sandboxAttrs(p.result.Sandbox); p.result.Result == ResultReplaced {
			r.log.InfoContext(ctx, "sandbox_replaced", attrs...)
		} else {
			r.log.InfoContext(ctx, "sandbox_created", attrs...)
		}
	}
	p.unlock() // before done, so that the callers find the key free
	close(p.done)
}

// replace removes the old sandbox, which has ended, and makes the new one. If the old one died and
// is made again, its record stays until the new one exists, so that a failure loses nothing.
func (r *Registry) replace(ctx context.Context, p *pendingCreate, old *record) (Sandbox, error) {
	mounts, err := r.creator.mounts(p.starting)
	if err != nil {
		return Sandbox{}, err
	}
	switch {
	case old == nil:
	case p.dead != "":
		err = r.engine.remove(ctx, r.snapshot(old).ContainerID)
	default:
		err = r.clear(ctx, p.starting.keyID(), old)
	}
	if err != nil {
		return Sandbox{}, fmt.Errorf("remove the old sandbox: %w", err)
	}
	return r.creator.create(ctx, p, mounts)
}

// await waits for a create to end. Unless patient, it returns early if the image must be pulled.
func (t *records) await(ctx context.Context, p *pendingCreate, joined, patient bool) (CreateResult, error) {
	pulling := p.pulling
	if patient {
		pulling = nil
	}
	select {
	case <-p.done:
	case <-pulling:
		select {
		case <-p.done: // if both have happened, the end is the better answer
		default:
			return CreateResult{}, p.pullingError()
		}
	case <-ctx.Done():
		return CreateResult{}, fmt.Errorf("create sandbox %s: %w", p.starting.Key, context.Cause(ctx))
	}
	if p.err != nil {
		t.informed(p.starting.keyID())
		return CreateResult{}, p.err
	}
	res := p.result
	if joined {
		res.Result, res.Recreated = ResultReused, false
	}
	return res, nil
}
