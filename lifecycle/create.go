package lifecycle

import (
	"context"
	"errors"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"
)

// Create returns the tenant's sandbox for a key, and makes it if there is none.
//
// Errors: *InvalidError, *policy.DeniedError, *ConflictError, *CapacityError, *PullingError
// (unless Patient), *StartError (errors.As finds the engine's cause), *UnavailableError.
func (r *Registry) Create(ctx context.Context, req CreateRequest) (CreateResult, error) {
	ctx, span := r.tracer.Start(ctx, "sandbox.create", trace.WithAttributes(attribute.String("berm.key", req.Key)))
	defer span.End()
	res, err := r.create(ctx, req)
	var conflict *ConflictError
	var pulling *PullingError
	switch {
	case err == nil:
		span.SetAttributes(
			attribute.String("berm.session_id", res.Sandbox.SessionID),
			attribute.String("container.id", res.Sandbox.ContainerID),
			attribute.String("berm.result", string(res.Result)))
		if res.Result == ResultReused { // runPending counts the others
			r.metrics.creates.WithLabelValues(string(ResultReused)).Inc()
			r.log.InfoContext(ctx, "sandbox_reused", sandboxAttrs(res.Sandbox)...)
		}
	case errors.As(err, &pulling):
		r.log.InfoContext(ctx, "sandbox_pulling", sandboxAttrs(pulling.Sandbox)...)
	case errors.As(err, &conflict):
		failSpan(span, err)
		r.metrics.creates.WithLabelValues(string(ResultConflict)).Inc()
		r.log.WarnContext(ctx, "sandbox_conflict", "tenant", req.Tenant, "key", conflict.Key,
			"session_id", conflict.SessionID, "container_id", conflict.ContainerID, "differences", conflict.Differences)
	default:
		failSpan(span, err)
		r.metrics.creates.WithLabelValues(string(ResultError)).Inc()
		r.log.WarnContext(ctx, "sandbox_create_failed", "tenant", req.Tenant, "key", req.Key, "error", err)
	}
	return res, err
}

func (r *Registry) create(ctx context.Context, req CreateRequest) (CreateResult, error) {
	want, err := r.creator.judge(req)
	if err != nil {
		return CreateResult{}, err
	}
	if err := r.available(); err != nil {
		return CreateResult{}, err
	}
	unlock, p, err := r.lockOrJoin(ctx, want.keyID())
	if err != nil {
		return CreateResult{}, err
	}
	joined := p != nil
	if joined {
		if d := want.differences(p.starting, false); len(d) > 0 {
			return CreateResult{}, &ConflictError{Key: want.Key, SessionID: p.starting.SessionID, Differences: d}
		}
	} else {
		var reused *Sandbox
		if p, reused, err = r.reuseOrLaunch(ctx, want, unlock); p == nil {
			unlock()
		}
		if err != nil {
			return CreateResult{}, err
		}
		if reused != nil {
			reused.Overridden = want.Overridden
			return CreateResult{Sandbox: *reused, Result: ResultReused}, nil
		}
	}
	res, err := r.await(ctx, p, joined, req.Patient)
	if pulling, ok := errors.AsType[*PullingError](err); ok {
		pulling.Sandbox.Overridden = want.Overridden
	}
	res.Sandbox.Overridden = want.Overridden // of this request, even if another made the sandbox
	return res, err
}

// reuseOrLaunch returns the live sandbox of a key that the caller holds, if it matches want. If
// there is none, it launches a create, which unlocks the key.
func (r *Registry) reuseOrLaunch(ctx context.Context, want *desired, unlock func()) (*pendingCreate, *Sandbox, error) {
	now := time.Now()
	old, sb := r.recordOf(want.keyID())
	if old != nil && !sb.Expired(now) {
		if d := want.differences(sb, old.adopted); len(d) > 0 {
			return nil, nil, &ConflictError{
				Key: want.Key, SessionID: sb.SessionID, ContainerID: sb.ContainerID, Differences: d,
			}
		}
		if sb.Status != StatusStopped {
			return nil, &sb, nil
		}
		if err := want.keep(sb, r.opts.Policy()); err != nil {
			return nil, nil, err
		}
	}
	if err := r.takeFailure(want, now); err != nil {
		return nil, nil, err
	}
	p, err := r.launch(ctx, want, old, unlock)
	return p, nil, err
}

// awake returns the sandbox of a key for use. If its container died, awake makes it again. Made is
// true if this call did that.
func (r *Registry) awake(ctx context.Context, id keyID) (rec *record, made bool, err error) {
	rec, sb, err := r.recordSoon(ctx, id)
	if err != nil {
		return nil, false, err
	}
	switch sb.Status {
	case StatusExpired:
		return nil, false, &NotFoundError{Key: id.key}
	case StatusStopped:
		if made, err = r.remake(ctx, id); err != nil {
			return nil, false, err
		}
		if rec, _ = r.recordOf(id); rec == nil {
			return nil, made, &NotFoundError{Key: id.key}
		}
	}
	return rec, made, nil
}

// recordSoon is recordOf, but waits while the sandbox is being made. It fails with a
// *NotFoundError if there is none.
func (r *Registry) recordSoon(ctx context.Context, id keyID) (*record, Sandbox, error) {
	var p *pendingCreate
	r.mu.Lock()
	if s := r.slots[id]; s != nil && s.record == nil {
		p = s.pending
	}
	r.mu.Unlock()
	if p != nil {
		if _, err := r.await(ctx, p, true, true); err != nil {
			return nil, Sandbox{}, err
		}
	}
	rec, sb := r.recordOf(id)
	if rec == nil {
		return nil, Sandbox{}, &NotFoundError{Key: id.key}
	}
	return rec, sb, nil
}

// remake makes a sandbox with the same spec again after its container died, if the policy in
// force still allows that. It returns true if this call did that.
func (r *Registry) remake(ctx context.Context, id keyID) (bool, error) {
	unlock, p, err := r.lockOrJoin(ctx, id)
	if err != nil {
		return false, err
	}
	joined := p != nil
	if !joined {
		if p, err = r.relaunch(ctx, id, unlock); p == nil {
			unlock()
			return false, err
		}
	}
	if _, err := r.await(ctx, p, joined, true); err != nil {
		return false, err
	}
	r.log.InfoContext(ctx, "sandbox_recreated", sandboxAttrs(p.result.Sandbox)...)
	return true, nil
}

// relaunch launches the create that makes a dead sandbox again. It returns nil if the sandbox
// isn't dead.
func (r *Registry) relaunch(ctx context.Context, id keyID, unlock func()) (*pendingCreate, error) {
	rec, dead := r.recordOf(id)
	if dead.Status != StatusStopped {
		return nil, nil
	}
	want, err := r.creator.judgeAgain(dead, rec.adopted)
	if err != nil {
		return nil, err
	}
	return r.launch(ctx, want, rec, unlock)
}
