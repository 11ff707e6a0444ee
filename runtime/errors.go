package runtime

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"strings"

	"github.com/containerd/errdefs"
)

// classedError is of class, and of nothing that err may be besides.
type classedError struct{ class, err error }

func (e *classedError) Error() string { return e.err.Error() }
func (e *classedError) Unwrap() error { return e.class }

// WithClass makes of err one that says the same, but belongs to the given class of
// errdefs and to no other. It is for backends: an engine's client may class its
// errors otherwise than Runtime promises.
func WithClass(class, err error) error { return &classedError{class, err} }

// HasClass reports whether an error got its class from WithClass.
func HasClass(err error) bool {
	_, has := errors.AsType[*classedError](err)
	return has
}

// Unavailable makes an error of this class that says what err says.
func Unavailable(err error) error { return WithClass(errdefs.ErrUnavailable, err) }

// Invalid makes an InvalidArgument.
func Invalid(format string, args ...any) error {
	return WithClass(errdefs.ErrInvalidArgument, fmt.Errorf(format, args...))
}

// Precondition makes a FailedPrecondition.
func Precondition(format string, args ...any) error {
	return WithClass(errdefs.ErrFailedPrecondition, fmt.Errorf(format, args...))
}

// Ended is the error of a call whose caller's context is over: it says what the
// cause says, and is of the context's own class.
func Ended(ctx context.Context) error {
	return WithClass(errors.Join(ctx.Err(), context.Cause(ctx)), context.Cause(ctx))
}

// outages are the words for why an engine doesn't answer, by what its errors contain.
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
// so. It returns none of err's own words, as they may have secrets. It goes by the text: an
// engine's client keeps nothing else of a cause.
func OutageReason(err error) string {
	for _, o := range outages {
		if strings.Contains(err.Error(), o.text) {
			return o.reason
		}
	}
	return ""
}

var userInfo = regexp.MustCompile(`(\w://)[^/\s]\S*@`)

// WithoutUser removes from all addresses in a text what precedes the host, where a password
// may be.
func WithoutUser(text string) string { return userInfo.ReplaceAllString(text, "$1") }
