package engineapi

import (
	"errors"
	"net/http"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/proxy/engineapi/upstream"
)

// TestBuildStatus has a build's client read the class of an error, and no cause.
func TestBuildStatus(t *testing.T) {
	secret := errors.New("secret")
	for _, tt := range []struct {
		err  error
		code codes.Code
		text string
	}{
		{denied("r", "F", "refused", "this"), codes.PermissionDenied, "denied by policy: F: refused; allowed: this (rule r)"},
		{full("no room"), codes.ResourceExhausted, "no room"}, {noImage("x"), codes.NotFound, "No such image: x:latest"}, {proxy.Unreadable("odd", secret), codes.InvalidArgument, "odd"},
		{&upstream.Error{Status: http.StatusNotFound, Message: "none"}, codes.NotFound, "none"}, {&upstream.Error{Status: http.StatusInternalServerError, Message: "broken"}, codes.Unknown, "broken"},
	} {
		if s := status.Convert(buildStatus(tt.err)); s.Code() != tt.code || s.Message() != tt.text {
			t.Errorf("%v: %v", tt.err, s)
		}
	}
	if s := status.Convert(buildStatus(secret)); s.Message() == secret.Error() {
		t.Error(s)
	}
}
