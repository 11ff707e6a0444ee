package docker

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"

	"github.com/containerd/errdefs"
	"github.com/docker/docker/client"

	"github.com/bermhq/berm/runtime"
)

var errReplaced = runtime.Unavailable(errors.New("the engine was replaced by another version"))

// statusError is an answer from a proxy in front of the engine.
type statusError struct{ code int }

func (e *statusError) Error() string { return "answer " + http.StatusText(e.code) }

// Unavailable is errdefs' class of the error.
func (*statusError) Unavailable() {}

// failure puts an error of the client into the class that runtime.Runtime promises,
// and ends the session if the engine is gone.
func (r *Runtime) failure(ctx context.Context, s *session, op string, err error) error {
	if err == nil {
		return nil
	}
	err = classify(ctx, err)
	r.forget(s, err)
	return fmt.Errorf("%s: %w", op, err)
}

// forget ends the session if its engine is gone.
func (r *Runtime) forget(s *session, err error) {
	if s != nil && errdefs.IsUnavailable(err) {
		r.session.CompareAndSwap(s, nil)
	}
}

// classify gives an error its class. Ctx is the caller's own.
func classify(ctx context.Context, err error) error {
	switch {
	case errdefs.IsConflict(err), errdefs.IsNotModified(err), errdefs.IsPermissionDenied(err):
		return runtime.WithClass(errdefs.ErrFailedPrecondition, err)
	case answered(err), errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled):
	case cut(err):
		err = runtime.Unavailable(err)
	}
	return runtime.Classify(ctx, err)
}

// answered reports whether the engine heard the call, refused it, and did nothing.
func answered(err error) bool {
	return errdefs.IsNotFound(err) || errdefs.IsAlreadyExists(err) || errdefs.IsInvalidArgument(err) ||
		errdefs.IsConflict(err) || errdefs.IsFailedPrecondition(err) || errdefs.IsPermissionDenied(err) ||
		errdefs.IsUnauthorized(err) || errdefs.IsNotModified(err) || errdefs.IsNotImplemented(err) ||
		errdefs.IsInternal(err)
}

// cut reports whether the engine couldn't be reached, or went away in mid-answer.
func cut(err error) bool {
	_, network := errors.AsType[net.Error](err)
	return network || errdefs.IsUnavailable(err) || client.IsErrConnectionFailed(err) ||
		errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF)
}
