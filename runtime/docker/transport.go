package docker

import (
	"net/http"
	"sync/atomic"

	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
)

// roundTripper checks the responses of one session for facts that the client hides.
type roundTripper struct {
	base    http.RoundTripper
	server  atomic.Pointer[string] // the Server header of the first response
	changed func()                 // called when a response has another
}

// RoundTrip tells the engine which trace a call belongs to. It fails if only a proxy in front
// of the engine answered, and if the engine refuses a call as it has another version by now.
func (t *roundTripper) RoundTrip(req *http.Request) (*http.Response, error) {
	if trace.SpanContextFromContext(req.Context()).IsValid() {
		req = req.Clone(req.Context()) // a RoundTripper must not change its request
		propagation.TraceContext{}.Inject(req.Context(), propagation.HeaderCarrier(req.Header))
	}
	resp, err := t.base.RoundTrip(req)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode == http.StatusBadGateway || resp.StatusCode == http.StatusGatewayTimeout {
		_ = resp.Body.Close()
		return nil, &statusError{code: resp.StatusCode}
	}
	if now := resp.Header.Get("Server"); now != "" && !t.server.CompareAndSwap(nil, &now) && *t.server.Load() != now {
		t.changed()
		if resp.StatusCode == http.StatusBadRequest {
			_ = resp.Body.Close()
			return nil, errReplaced
		}
	}
	return resp, nil
}

// keeper keeps the error of its last request, as the client's own error leaves the cause out.
// It isn't safe for many goroutines.
type keeper struct {
	http.RoundTripper
	err error
}

func (k *keeper) RoundTrip(req *http.Request) (resp *http.Response, err error) {
	resp, k.err = k.RoundTripper.RoundTrip(req)
	return resp, k.err
}
