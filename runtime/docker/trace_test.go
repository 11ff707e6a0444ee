package docker

import (
	"context"
	"net/http"
	"sync/atomic"
	"testing"
	"time"

	"go.opentelemetry.io/otel/propagation"
)

func TestTraceGoesToTheEngine(t *testing.T) {
	fields := propagation.MapCarrier{"traceparent": "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01", "tracestate": "a=1"}
	traced := propagation.TraceContext{}.Extract(context.Background(), fields)
	f := newFakeEngine(t)
	var got atomic.Pointer[http.Header]
	f.on("DELETE /containers/c", func(w http.ResponseWriter, r *http.Request) {
		got.Store(&r.Header)
		w.WriteHeader(http.StatusNoContent)
	})
	r := f.runtime(t, time.Minute)
	for ctx, want := range map[context.Context]propagation.MapCarrier{traced: fields, context.Background(): {}} {
		must(t, r.Remove(ctx, "c"))
		for _, name := range []string{"traceparent", "tracestate"} {
			if h := got.Load().Get(name); h != want[name] {
				t.Errorf("%s: %q, want %q", name, h, want[name])
			}
		}
	}
}
