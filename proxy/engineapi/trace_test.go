package engineapi

import (
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"sync"
	"testing"
)

// The engine is told which trace a caller's request belongs to, and nothing else of it.
func TestTraceGoesToTheEngine(t *testing.T) {
	const parent, state = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01", "a=1"
	var mu sync.Mutex
	got := map[string][]string{} // both headers by path
	socket := filepath.Join(t.TempDir(), "docker.sock")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	engine := &httptest.Server{Listener: l, Config: &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		got[r.URL.Path] = append(got[r.URL.Path], r.Header.Get("Traceparent")+" "+r.Header.Get("Tracestate")+" "+r.Header.Get("Baggage"))
		w.Header().Set("Api-Version", "1.41")
		_, _ = io.WriteString(w, `{"ApiVersion": "1.41"}`)
	})}}
	engine.Start()
	defer engine.Close()

	c := raw(doorTo(t, "unix://"+socket, "").listen(Caller{Name: "a", Tenant: "a"}))
	for _, traced := range []bool{true, false} {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://localhost/v1.41/info", nil)
		if err != nil {
			t.Fatal(err)
		}
		if traced {
			req.Header.Set("Traceparent", parent)
			req.Header.Set("Tracestate", state)
			req.Header.Set("Baggage", "secret=1")
		}
		resp, err := c.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		_ = resp.Body.Close()
	}
	mu.Lock()
	defer mu.Unlock()
	if told := got["/v1.41/info"]; len(told) != 2 || told[0] != parent+" "+state+" " || strings.TrimSpace(told[1]) != "" {
		t.Errorf("the engine was told %q", got)
	}
}
