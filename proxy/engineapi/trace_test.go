package engineapi

import (
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
)

// The engine is told which trace a caller's request belongs to, and nothing else of it.
func TestTraceGoesToTheEngine(t *testing.T) {
	const parent, state = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01", "a=1"
	var mu sync.Mutex
	got := map[string][]string{} // both headers by path
	engine := serveEngine(t, func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		got[r.URL.Path] = append(got[r.URL.Path], r.Header.Get("Traceparent")+" "+r.Header.Get("Tracestate")+" "+r.Header.Get("Baggage"))
		w.Header().Set("Api-Version", "1.41")
		_, _ = io.WriteString(w, `{"ApiVersion": "1.41"}`)
	})
	c := raw(doorTo(t, engine, "").listen(Caller{Name: "a", Tenant: "a"}))
	for _, traced := range []bool{true, false} {
		req := must(http.NewRequestWithContext(t.Context(), http.MethodGet, "http://localhost/v1.41/info", nil))(t)
		if traced {
			req.Header.Set("Traceparent", parent)
			req.Header.Set("Tracestate", state)
			req.Header.Set("Baggage", "secret=1")
		}
		resp := must(c.Do(req))(t)
		_ = resp.Body.Close()
	}
	mu.Lock()
	defer mu.Unlock()
	if told := got["/v1.41/info"]; len(told) != 2 || told[0] != parent+" "+state+" " || strings.TrimSpace(told[1]) != "" {
		t.Errorf("the engine was told %q", got)
	}
}
