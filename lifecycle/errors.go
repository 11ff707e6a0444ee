package lifecycle

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/runtime"
)

// InvalidError is a malformed request.
type InvalidError struct {
	Field   string // as in the request; may be empty
	Message string
}

// Error returns the field and what is wrong with it.
func (e *InvalidError) Error() string {
	if e.Field == "" {
		return e.Message
	}
	return e.Field + ": " + e.Message
}

// InvalidParameter puts the error into errdefs' InvalidArgument class.
func (*InvalidError) InvalidParameter() {}

// NotFoundError says that the tenant has no sandbox under the key.
type NotFoundError struct{ Key string }

// Error names the key.
func (e *NotFoundError) Error() string { return fmt.Sprintf("there is no sandbox %q", e.Key) }

// NotFound puts the error into errdefs' NotFound class.
func (*NotFoundError) NotFound() {}

// ConflictError says that the key has a live sandbox of another spec.
type ConflictError struct {
	Key         string
	SessionID   string              // of the sandbox that is there
	ContainerID string              // likewise; empty while it is being made
	Differences []policy.Difference // never empty
}

// Error names the fields that differ.
func (e *ConflictError) Error() string {
	d := make([]string, len(e.Differences))
	for i, x := range e.Differences {
		d[i] = x.String()
	}
	return fmt.Sprintf("sandbox %q exists with another spec (%s)", e.Key, strings.Join(d, "; "))
}

// Conflict puts the error into errdefs' Conflict class.
func (*ConflictError) Conflict() {}

// CapacityError says that a cap is reached.
type CapacityError struct {
	Message    string
	RetryAfter time.Duration
}

// Error returns the cap in words.
func (e *CapacityError) Error() string { return e.Message }

// ResourceExhausted puts the error into errdefs' ResourceExhausted class.
func (*CapacityError) ResourceExhausted() {}

// PullingError says that the sandbox is being made and waits for its image.
type PullingError struct {
	Sandbox    Sandbox
	Progress   runtime.PullProgress
	RetryAfter time.Duration
}

// Error names the image.
func (e *PullingError) Error() string {
	return fmt.Sprintf("sandbox %q waits for its image %s to be pulled", e.Sandbox.Key, e.Sandbox.Spec.Image)
}

// StateError says that the sandbox isn't in a state that allows the call.
type StateError struct {
	Key    string
	Status Status
	Want   string // what would be needed, in words
	died   bool   // the container ended before the sandbox could be used
}

// Error returns both states.
func (e *StateError) Error() string {
	return fmt.Sprintf("sandbox %q is %s: %s", e.Key, e.Status, e.Want)
}

// FailedPrecondition puts the error into errdefs' FailedPrecondition class.
func (*StateError) FailedPrecondition() {}

// Is reports whether target is errDied, and the container died.
func (e *StateError) Is(target error) bool { return e.died && target == errDied }

// errDied says that the container of a sandbox ended before the sandbox could be used.
var errDied = errors.New("the sandbox's container is dead")

// UnsupportedError says that the sandbox can't do what was asked: it has no agent, or one that
// is too old.
type UnsupportedError struct {
	Key string
	Err error // the cause
}

// Error names the sandbox.
func (e *UnsupportedError) Error() string {
	return fmt.Sprintf("sandbox %q has no agent that could do this; recreate it", e.Key)
}

// Unwrap returns the cause.
func (e *UnsupportedError) Unwrap() error { return e.Err }

// NotImplemented puts the error into errdefs' NotImplemented class.
func (*UnsupportedError) NotImplemented() {}

// QuotaError says that a workspace is over its quota.
type QuotaError struct {
	UsedBytes, QuotaBytes int64
}

// Error returns both figures.
func (e *QuotaError) Error() string {
	return fmt.Sprintf("workspace quota exceeded: %d of %d bytes are used; free some space first", e.UsedBytes, e.QuotaBytes)
}

// ResourceExhausted puts the error into errdefs' ResourceExhausted class.
func (*QuotaError) ResourceExhausted() {}

// StartError says that the sandbox could not be made.
type StartError struct{ Err error }

// Error returns the cause.
func (e *StartError) Error() string { return "sandbox could not be started: " + e.Err.Error() }

// Unwrap returns the cause.
func (e *StartError) Unwrap() error { return e.Err }

// PullError says that an image could not be pulled. It has the class of its cause.
type PullError struct {
	Image string
	Err   error // may have secrets
}

// Error names the image and the cause.
func (e *PullError) Error() string { return "pull image " + e.Image + ": " + e.Err.Error() }

// Unwrap returns the cause.
func (e *PullError) Unwrap() error { return e.Err }

// UnavailableError says that the engine or the store can't be used now. It is in errdefs'
// Unavailable class.
type UnavailableError struct {
	Err     error
	Message string // for callers: which engine, and for how long; empty if it isn't the engine
}

// Error returns the cause.
func (e *UnavailableError) Error() string { return "no backend available: " + e.Err.Error() }

// Unwrap returns the cause.
func (e *UnavailableError) Unwrap() error { return e.Err }

// Unavailable puts the error into errdefs' Unavailable class.
func (*UnavailableError) Unavailable() {}
