package lifecycle

import (
	"context"
	"fmt"
)

// ActiveError says that a call failed because the key has a live sandbox.
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

// WithoutSandbox calls f while the key has no sandbox and none can be made. It removes an expired
// sandbox first. It fails with an *ActiveError if there is a sandbox or one is being made. Other
// errors: *InvalidError, *UnavailableError, and those of f.
func (r *Registry) WithoutSandbox(ctx context.Context, tenant, key string, f func(context.Context) error) error {
	id, err := r.open(tenant, key)
	if err != nil {
		return err
	}
	unlock, pending, err := r.lockOrJoin(ctx, id)
	if err != nil {
		return err
	}
	if pending != nil {
		return &ActiveError{Key: id.key, SessionID: pending.starting.SessionID}
	}
	defer unlock()
	if rec, sb := r.recordOf(id); rec != nil {
		if sb.Status != StatusExpired {
			return &ActiveError{Key: id.key, SessionID: sb.SessionID}
		}
		if err := r.clear(ctx, id, rec); err != nil {
			return err
		}
	}
	return f(ctx)
}
