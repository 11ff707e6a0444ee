package lifecycle

import (
	"context"
	"fmt"
	"time"
)

// Workspaces keeps the quotas of users' workspaces, which hold chats. A chat's
// directory is the one that the sandbox of the same key mounts. It must be safe for
// many goroutines.
type Workspaces interface {
	// Left is a *QuotaError when the workspace of the key's chat is over its quota, and
	// nil when the key is of no chat. With changed, the chat's directory is measured
	// anew: something in the sandbox may have written to it.
	Left(ctx context.Context, tenant, key string, changed bool) error
	// Enforcement is "hard" or "soft", as in Enforcement, or empty when the key is of no
	// chat, or its workspace has no quota.
	Enforcement(tenant, key string) string
	// Touched notes that a sandbox of the key has come, or has gone: it may have written to
	// its chat's directory, which is measured before it next counts. It measures nothing,
	// asks nobody and calls nothing of the Manager's, whose lock may be held.
	Touched(tenant, key string)
}

// ActiveError says that a key has a live sandbox, in the way of what was to be done.
type ActiveError struct {
	Key       string
	SessionID string // of the sandbox
}

// Error names the key.
func (e *ActiveError) Error() string {
	return fmt.Sprintf("%q has an active sandbox; delete that first", e.Key)
}

// FailedPrecondition puts the error into errdefs' FailedPrecondition class.
func (*ActiveError) FailedPrecondition() {}

// WithoutSandbox calls f while the key has no sandbox and none can be made. A sandbox
// that has expired is removed first. Errors: *ActiveError when there is one, or one is
// being made; *InvalidError, *UnavailableError, and f's own.
func (r *Registry) WithoutSandbox(ctx context.Context, tenant, key string, f func(context.Context) error) error {
	id, err := r.open(tenant, key)
	if err != nil {
		return err
	}
	unlock, pending, err := r.lockKey(ctx, id, true)
	if err != nil {
		return err
	}
	if pending != nil {
		return &ActiveError{Key: id.key, SessionID: pending.starting.SessionID}
	}
	defer unlock()
	if rec := r.recordOf(id); rec != nil {
		if sb := r.snapshot(rec); !sb.Expired(time.Now()) {
			return &ActiveError{Key: id.key, SessionID: sb.SessionID}
		}
		if err := r.clear(ctx, id, rec); err != nil {
			return err
		}
	}
	return f(ctx)
}

// HasSandbox reports whether the key has a sandbox, or one is being made: its directory may
// change at any time.
func (t *records) HasSandbox(tenant, key string) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	s := t.slots[keyID{tenant, key}]
	return s != nil && (s.record != nil || s.pending != nil)
}
