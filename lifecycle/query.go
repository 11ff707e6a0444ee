package lifecycle

import (
	"context"
	"errors"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"

	"github.com/bermhq/berm/runtime"
)

// Get answers the sandbox of a key; *NotFoundError if there is none, *UnavailableError
// as long as that isn't known.
func (m *Manager) Get(_ context.Context, tenant, key string) (Sandbox, error) {
	key, err := ParseKey(key)
	if err != nil {
		return Sandbox{}, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if s := m.slots[keyID{tenant, key}]; s != nil {
		if sb, ok := s.snapshotLocked(time.Now()); ok {
			return sb, nil
		}
	}
	if !m.known {
		return Sandbox{}, &UnavailableError{Err: m.down}
	}
	return Sandbox{}, &NotFoundError{Key: key}
}

// snapshotLocked answers what a slot shows: the sandbox on the way, or the one that
// is there, or the one that failed.
func (s *slot) snapshotLocked(now time.Time) (Sandbox, bool) {
	switch {
	case s.flight != nil:
		sb := s.flight.starting
		select {
		case <-s.flight.pulling:
			p := s.flight.progress()
			sb.Pull = &p
		default:
		}
		return sb, true
	case s.record != nil:
		return s.record.snapshotLocked(now), true
	case s.failure != nil && now.Sub(s.failure.at) <= failureKept:
		return s.failure.sb, true
	}
	return Sandbox{}, false
}

// List answers the tenant's sandboxes in the order of their keys, and the last
// key if there are more. *UnavailableError as long as they aren't known.
func (m *Manager) List(_ context.Context, tenant string, opts ListOptions) ([]Sandbox, string, error) {
	if opts.Limit < 0 || opts.Limit > 100 {
		return nil, "", &InvalidError{Field: "limit", Message: "must be from 1 to 100"}
	}
	if opts.Limit == 0 {
		opts.Limit = 100
	}
	now := time.Now()
	var found []Sandbox
	m.mu.Lock()
	if !m.known {
		defer m.mu.Unlock()
		return nil, "", &UnavailableError{Err: m.down}
	}
	for id, s := range m.slots {
		if id.tenant != tenant || id.key <= opts.After {
			continue
		}
		if sb, ok := s.snapshotLocked(now); ok && matches(sb, opts) {
			found = append(found, sb)
		}
	}
	m.mu.Unlock()
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

// Delete removes the sandbox of a key. One that isn't there is a result, not an
// error. A create that waits for its image is given up.
func (m *Manager) Delete(ctx context.Context, tenant, key string) (DeleteResult, error) {
	ctx, span := m.tracer.Start(ctx, "sandbox.delete", trace.WithAttributes(attribute.String("berm.key", key)))
	defer span.End()
	res, err := m.delete(ctx, tenant, key)
	attrs := []any{"tenant", tenant, "key", key, "session_id", res.SessionID, "container_id", res.ContainerID}
	switch {
	case err != nil:
		failSpan(span, err)
		m.metrics.deletes.WithLabelValues(string(ResultError)).Inc()
		m.log.WarnContext(ctx, "sandbox_delete_failed", append(attrs, "error", err)...)
	case res.Result == ResultNotFound:
		m.metrics.deletes.WithLabelValues(string(ResultNotFound)).Inc()
		m.log.InfoContext(ctx, "sandbox_delete_not_found", attrs...)
	default:
		span.SetAttributes(attribute.String("berm.session_id", res.SessionID), attribute.String("container.id", res.ContainerID))
		m.metrics.deletes.WithLabelValues(string(ResultDeleted)).Inc()
		m.log.InfoContext(ctx, "sandbox_deleted", attrs...)
	}
	return res, err
}

func (m *Manager) delete(ctx context.Context, tenant, key string) (DeleteResult, error) {
	key, err := ParseKey(key)
	if err != nil {
		return DeleteResult{}, err
	}
	if err := m.available(); err != nil {
		return DeleteResult{}, err
	}
	id := keyID{tenant, key}
	m.mu.Lock()
	if s := m.slots[id]; s != nil && s.flight != nil { // nobody waits for an image to delete what it is for
		s.flight.giveUp(errors.New("it was deleted before its image was there"))
	}
	m.mu.Unlock()
	if _, err := m.hold(ctx, id, false); err != nil {
		return DeleteResult{}, err
	}
	defer m.drop(id)
	m.mu.Lock()
	m.slots[id].failure = nil
	m.mu.Unlock()
	rec := m.recordOf(id)
	if rec == nil {
		return DeleteResult{Result: ResultNotFound}, nil
	}
	sb := m.snapshot(rec)
	if err := m.clear(ctx, id, rec); err != nil {
		return DeleteResult{SessionID: sb.SessionID, ContainerID: sb.ContainerID}, err
	}
	return DeleteResult{Result: ResultDeleted, SessionID: sb.SessionID, ContainerID: sb.ContainerID}, nil
}

// change holds a key and hands its live, unexpired record to f.
func (m *Manager) change(ctx context.Context, tenant, key string, f func(*record, Sandbox) error) (Sandbox, error) {
	key, err := ParseKey(key)
	if err != nil {
		return Sandbox{}, err
	}
	if err := m.available(); err != nil {
		return Sandbox{}, err
	}
	id := keyID{tenant, key}
	if _, err := m.hold(ctx, id, false); err != nil {
		return Sandbox{}, err
	}
	defer m.drop(id)
	rec := m.recordOf(id)
	if rec == nil {
		return Sandbox{}, &NotFoundError{Key: key}
	}
	sb := m.snapshot(rec)
	if sb.Status == StatusExpired {
		return Sandbox{}, &NotFoundError{Key: key}
	}
	if err := f(rec, sb); err != nil {
		return Sandbox{}, err
	}
	return m.snapshot(rec), nil
}

// Renew moves the expiry to ttl from now (0: the sandbox's own TTL), never past
// the deadline, and restarts the idle time.
func (m *Manager) Renew(ctx context.Context, tenant, key string, ttl time.Duration) (Sandbox, error) {
	if ttl < 0 {
		return Sandbox{}, &InvalidError{Field: "ttl", Message: "must not be negative"}
	}
	return m.change(ctx, tenant, key, func(rec *record, sb Sandbox) error {
		if ttl == 0 {
			ttl = sb.Spec.TTL
		}
		sb.LastUsedAt = time.Now().UTC()
		sb.ExpiresAt = earlier(sb.LastUsedAt.Add(ttl), sb.Deadline)
		if err := m.opts.Store.Put(ctx, storeRecord(sb)); err != nil {
			return &UnavailableError{Err: err}
		}
		m.mu.Lock()
		defer m.mu.Unlock()
		rec.sb.ExpiresAt = sb.ExpiresAt
		if sb.LastUsedAt.After(rec.sb.LastUsedAt) { // a command may have ended meanwhile
			rec.sb.LastUsedAt = sb.LastUsedAt
		}
		m.log.InfoContext(ctx, "sandbox_renewed", append(sandboxAttrs(sb), "expires_at", sb.ExpiresAt)...)
		return nil
	})
}

// Pause freezes the sandbox's processes; time goes on counting. Pausing a paused
// sandbox is no error.
func (m *Manager) Pause(ctx context.Context, tenant, key string) (Sandbox, error) {
	return m.freeze(ctx, tenant, key, "pause", StatusRunning, StatusPaused, runtime.Pauser.Pause)
}

// Resume is Pause's opposite.
func (m *Manager) Resume(ctx context.Context, tenant, key string) (Sandbox, error) {
	return m.freeze(ctx, tenant, key, "resume", StatusPaused, StatusRunning, runtime.Pauser.Resume)
}

func (m *Manager) freeze(ctx context.Context, tenant, key, op string, from, to Status,
	f func(runtime.Pauser, context.Context, string) error,
) (Sandbox, error) {
	return m.change(ctx, tenant, key, func(rec *record, sb Sandbox) error {
		p, ok := m.opts.Runtime.(runtime.Pauser)
		switch {
		case !ok:
			return errdefs.ErrNotImplemented.WithMessage("the backend can't " + op + " sandboxes")
		case sb.Status == to:
			return nil
		case sb.Status != from:
			return &StateError{Key: sb.Key, Status: sb.Status, Want: "it must be " + string(from) + " for that"}
		}
		err := m.call(ctx, op, func(ctx context.Context) error { return f(p, ctx, sb.ContainerID) })
		if err != nil {
			return err
		}
		m.changeStatus(rec, from, to)
		if to == StatusPaused {
			m.log.InfoContext(ctx, "sandbox_paused", sandboxAttrs(sb)...)
		} else {
			m.log.InfoContext(ctx, "sandbox_resumed", sandboxAttrs(sb)...)
		}
		return nil
	})
}

// Logs copies what the sandbox's main process printed.
func (m *Manager) Logs(ctx context.Context, tenant, key string, opts runtime.LogOptions, stdout, stderr io.Writer) error {
	sb, err := m.live(ctx, tenant, key)
	if err != nil {
		return err
	}
	l, ok := m.opts.Runtime.(runtime.Logger)
	if !ok {
		return errdefs.ErrNotImplemented.WithMessage("the backend keeps no logs")
	}
	return m.call(ctx, "logs", func(ctx context.Context) error {
		return l.Logs(ctx, sb.ContainerID, opts, stdout, stderr)
	})
}

// Stats measures the sandbox.
func (m *Manager) Stats(ctx context.Context, tenant, key string) (runtime.Stats, error) {
	sb, err := m.live(ctx, tenant, key)
	if err != nil {
		return runtime.Stats{}, err
	}
	s, ok := m.opts.Runtime.(runtime.Statser)
	if !ok {
		return runtime.Stats{}, errdefs.ErrNotImplemented.WithMessage("the backend measures nothing")
	}
	var stats runtime.Stats
	err = m.call(ctx, "stats", func(ctx context.Context) error {
		var err error
		stats, err = s.Stats(ctx, sb.ContainerID)
		return err
	})
	return stats, err
}

// live answers a sandbox that has a container, dead or alive.
func (m *Manager) live(ctx context.Context, tenant, key string) (Sandbox, error) {
	sb, err := m.Get(ctx, tenant, key)
	if err != nil {
		return Sandbox{}, err
	}
	if err := m.available(); err != nil {
		return Sandbox{}, err
	}
	if sb.ContainerID == "" {
		return Sandbox{}, &StateError{Key: sb.Key, Status: sb.Status, Want: "it has no container"}
	}
	return sb, nil
}
