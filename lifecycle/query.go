package lifecycle

import (
	"cmp"
	"context"
	"errors"
	"io"
	"slices"
	"strings"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"

	"github.com/bermhq/berm/runtime"
)

// Get returns the sandbox of a key. It fails with a *NotFoundError if there is none, and with an
// *UnavailableError until that is known.
func (r *Registry) Get(_ context.Context, tenant, key string) (Sandbox, error) {
	id, err := parseID(tenant, key)
	if err != nil {
		return Sandbox{}, err
	}
	unknown := r.engine.reconciled() // read first: records are published before this becomes nil
	r.mu.Lock()
	defer r.mu.Unlock()
	if s := r.slots[id]; s != nil {
		if sb, ok := s.snapshotLocked(time.Now()); ok {
			return sb, nil
		}
	}
	if unknown != nil {
		return Sandbox{}, unknown
	}
	return Sandbox{}, &NotFoundError{Key: id.key}
}

// List returns the tenant's sandboxes in the order of their keys, and the last key if there are
// more. It fails with an *UnavailableError until they are known.
func (r *Registry) List(_ context.Context, tenant string, opts ListOptions) ([]Sandbox, string, error) {
	if opts.Limit < 0 || opts.Limit > 100 {
		return nil, "", &InvalidError{Field: "limit", Message: "must be from 1 to 100"}
	}
	opts.Limit = cmp.Or(opts.Limit, 100)
	if err := r.engine.reconciled(); err != nil {
		return nil, "", err
	}
	now := time.Now()
	var found []Sandbox
	r.mu.Lock()
	for id, s := range r.slots {
		if id.tenant != tenant || id.key <= opts.After {
			continue
		}
		if sb, ok := s.snapshotLocked(now); ok && matches(sb, opts) {
			found = append(found, sb)
		}
	}
	r.mu.Unlock()
	slices.SortFunc(found, func(a, b Sandbox) int { return strings.Compare(a.Key, b.Key) })
	if len(found) <= opts.Limit {
		return found, "", nil
	}
	found = found[:opts.Limit]
	return found, found[opts.Limit-1].Key, nil
}

func matches(sb Sandbox, opts ListOptions) bool {
	if opts.Status != "" && sb.Status != opts.Status {
		return false
	}
	for name, want := range opts.Metadata {
		if got, ok := sb.Metadata[name]; !ok || got != want {
			return false
		}
	}
	return true
}

// Delete removes the sandbox of a key. It is no error if there is none. Delete cancels a create
// that waits for its image.
func (r *Registry) Delete(ctx context.Context, tenant, key string) (DeleteResult, error) {
	ctx, span := r.tracer.Start(ctx, "sandbox.delete", trace.WithAttributes(attribute.String("berm.key", key)))
	defer span.End()
	res, err := r.delete(ctx, tenant, key)
	attrs := []any{"tenant", tenant, "key", key, "session_id", res.SessionID, "container_id", res.ContainerID}
	switch {
	case err != nil:
		failSpan(span, err)
		r.metrics.deletes.WithLabelValues(string(ResultError)).Inc()
		r.log.WarnContext(ctx, "sandbox_delete_failed", append(attrs, "error", err)...)
	case res.Result == ResultNotFound:
		r.metrics.deletes.WithLabelValues(string(ResultNotFound)).Inc()
		r.log.InfoContext(ctx, "sandbox_delete_not_found", attrs...)
	default:
		span.SetAttributes(attribute.String("berm.session_id", res.SessionID), attribute.String("container.id", res.ContainerID))
		r.metrics.deletes.WithLabelValues(string(ResultDeleted)).Inc()
		r.log.InfoContext(ctx, "sandbox_deleted", attrs...)
	}
	return res, err
}

func (r *Registry) delete(ctx context.Context, tenant, key string) (DeleteResult, error) {
	id, err := r.open(tenant, key)
	if err != nil {
		return DeleteResult{}, err
	}
	r.mu.Lock()
	if s := r.slots[id]; s != nil && s.pending != nil {
		s.pending.giveUp(errors.New("it was deleted before its image was there"))
	}
	r.mu.Unlock()
	unlock, err := r.keys.Lock(ctx, id)
	if err != nil {
		return DeleteResult{}, err
	}
	defer unlock()
	r.informed(id)
	rec, sb := r.recordOf(id)
	if rec == nil {
		return DeleteResult{Result: ResultNotFound}, nil
	}
	res := DeleteResult{SessionID: sb.SessionID, ContainerID: sb.ContainerID}
	if err := r.clear(ctx, id, rec); err != nil {
		return res, err
	}
	res.Result = ResultDeleted
	return res, nil
}

// change locks a key and passes its live record, which hasn't expired, to f.
func (r *Registry) change(ctx context.Context, tenant, key string, f func(*record, Sandbox) error) (Sandbox, error) {
	id, err := r.open(tenant, key)
	if err != nil {
		return Sandbox{}, err
	}
	unlock, err := r.keys.Lock(ctx, id)
	if err != nil {
		return Sandbox{}, err
	}
	defer unlock()
	rec, sb := r.recordOf(id)
	if rec == nil || sb.Status == StatusExpired {
		return Sandbox{}, &NotFoundError{Key: id.key}
	}
	if err := f(rec, sb); err != nil {
		return Sandbox{}, err
	}
	return r.snapshot(rec), nil
}

// Renew moves the expiry to ttl from now (0: the sandbox's own TTL), never past
// the deadline, and restarts the idle time.
func (r *Registry) Renew(ctx context.Context, tenant, key string, ttl time.Duration) (Sandbox, error) {
	if ttl < 0 {
		return Sandbox{}, &InvalidError{Field: "ttl", Message: "must not be negative"}
	}
	return r.change(ctx, tenant, key, func(rec *record, sb Sandbox) error {
		if ttl == 0 {
			ttl = sb.Spec.TTL
		}
		sb.LastUsedAt = time.Now().UTC()
		sb.ExpiresAt = earlier(sb.LastUsedAt.Add(ttl), sb.Deadline)
		if err := r.opts.Store.Put(ctx, sb); err != nil {
			return &UnavailableError{Err: err}
		}
		r.mu.Lock()
		defer r.mu.Unlock()
		rec.sb.ExpiresAt = sb.ExpiresAt
		if sb.LastUsedAt.After(rec.sb.LastUsedAt) { // else a command has ended meanwhile
			rec.sb.LastUsedAt = sb.LastUsedAt
		}
		r.log.InfoContext(ctx, "sandbox_renewed", append(sandboxAttrs(sb), "expires_at", sb.ExpiresAt)...)
		return nil
	})
}

// Pause freezes the processes of a sandbox. Its TTL and its idle time go on. It is no error if the
// sandbox is paused already.
func (r *Registry) Pause(ctx context.Context, tenant, key string) (Sandbox, error) {
	return r.freeze(ctx, tenant, key, "pause", StatusRunning, StatusPaused, r.opts.Runtime.Pause)
}

// Resume undoes Pause.
func (r *Registry) Resume(ctx context.Context, tenant, key string) (Sandbox, error) {
	return r.freeze(ctx, tenant, key, "resume", StatusPaused, StatusRunning, r.opts.Runtime.Resume)
}

func (r *Registry) freeze(ctx context.Context, tenant, key, op string, from, to Status,
	f func(context.Context, string) error,
) (Sandbox, error) {
	return r.change(ctx, tenant, key, func(rec *record, sb Sandbox) error {
		switch {
		case sb.Status == to:
			return nil
		case sb.Status != from:
			return &StateError{Key: sb.Key, Status: sb.Status, Want: "it must be " + string(from) + " for that"}
		}
		err := r.engine.call(ctx, op, func(ctx context.Context) error { return f(ctx, sb.ContainerID) })
		if err != nil {
			return err
		}
		r.changeStatus(rec, from, to)
		if to == StatusPaused {
			r.log.InfoContext(ctx, "sandbox_paused", sandboxAttrs(sb)...)
		} else {
			r.log.InfoContext(ctx, "sandbox_resumed", sandboxAttrs(sb)...)
		}
		return nil
	})
}

// Logs copies the output of a sandbox's main process.
func (r *Registry) Logs(ctx context.Context, tenant, key string, opts runtime.LogOptions, stdout, stderr io.Writer) error {
	sb, err := r.live(ctx, tenant, key)
	if err != nil {
		return err
	}
	return r.engine.call(ctx, "logs", func(ctx context.Context) error {
		return r.opts.Runtime.Logs(ctx, sb.ContainerID, opts, stdout, stderr)
	})
}

// Stats returns a sandbox's use of resources.
func (r *Registry) Stats(ctx context.Context, tenant, key string) (runtime.Stats, error) {
	sb, err := r.live(ctx, tenant, key)
	if err != nil {
		return runtime.Stats{}, err
	}
	return ask(ctx, r.engine, "stats", func(ctx context.Context) (runtime.Stats, error) { return r.opts.Runtime.Stats(ctx, sb.ContainerID) })
}

// live returns a sandbox that has a container, dead or alive.
func (r *Registry) live(ctx context.Context, tenant, key string) (Sandbox, error) {
	sb, err := r.Get(ctx, tenant, key)
	if err != nil {
		return Sandbox{}, err
	}
	if err := r.available(); err != nil {
		return Sandbox{}, err
	}
	if sb.ContainerID == "" {
		return Sandbox{}, &StateError{Key: sb.Key, Status: sb.Status, Want: "it has no container"}
	}
	return sb, nil
}
