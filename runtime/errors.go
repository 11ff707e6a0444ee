package runtime

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"strings"

	"github.com/containerd/errdefs"
)

// classedError has the text of err and the class of class alone.
type classedError struct{ class, err error }

func (e *classedError) Error() string { return e.err.Error() }
func (e *classedError) Unwrap() error { return e.class }

// WithClass returns an error with err's text that belongs to the given class of errdefs
// and to no other. It is for backends: an engine's client may class its errors otherwise
// than Runtime promises.
func WithClass(class, err error) error { return &classedError{class, err} }

// HasClass reports whether an error got its class from WithClass.
func HasClass(err error) bool {
	_, has := errors.AsType[*classedError](err)
	return has
}

// Unavailable returns an error with err's text in the Unavailable class.
func Unavailable(err error) error { return WithClass(errdefs.ErrUnavailable, err) }

// Invalid returns an error in the InvalidArgument class.
func Invalid(format string, args ...any) error {
	return WithClass(errdefs.ErrInvalidArgument, fmt.Errorf(format, args...))
}

// Precondition returns an error in the FailedPrecondition class.
func Precondition(format string, args ...any) error {
	return WithClass(errdefs.ErrFailedPrecondition, fmt.Errorf(format, args...))
}

// Ended returns the error of a call whose context has ended. It has the text of the
// context's cause, and the classes of ctx.Err() and of the cause.
func Ended(ctx context.Context) error {
	return WithClass(errors.Join(ctx.Err(), context.Cause(ctx)), context.Cause(ctx))
}

// outages maps parts of an engine's errors to reasons why the engine doesn't answer.
var outages = []struct{ text, reason string }{
	{"x509:", "its TLS certificate isn't trusted"},
	{"tls:", "TLS handshake failed"},
	{"connection refused", "connection refused"},
	{"no such file or directory", "no such socket"},
	{"permission denied", "permission denied"},
	{"no such host", "no such host"},
	{"no route to host", "no route to host"},
	{"network is unreachable", "network is unreachable"},
	{"connection reset", "connection closed"},
	{"broken pipe", "connection closed"},
	{"EOF", "connection closed"},
	{"event stream ended", "connection closed"},
	{"timeout", "timeout"},
	{"in time", "timeout"},
	{"deadline exceeded", "timeout"},
}

// OutageReason returns in a few words why an engine doesn't answer, or "" if err doesn't say
// so. It returns none of err's own words, as they may have secrets. It searches err's text,
// because an engine's client keeps only the text of a cause.
func OutageReason(err error) string {
	for _, o := range outages {
		if strings.Contains(err.Error(), o.text) {
			return o.reason
		}
	}
	return ""
}

var userInfo = regexp.MustCompile(`(\w://)[^/\s]\S*@`)

// WithoutUser removes the user and password from all addresses in a text.
func WithoutUser(text string) string { return userInfo.ReplaceAllString(text, "$1") }
