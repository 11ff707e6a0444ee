package proxy_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"go.opentelemetry.io/otel/propagation"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/runtime/runtimetest/check"
)

// writeFault is the simplest shape that a door can give its errors.
func writeFault(w http.ResponseWriter, _ *http.Request, f proxy.Fault) {
	w.WriteHeader(f.Status)
	_, _ = io.WriteString(w, f.Code)
}

// newDoor has one handler under /x, which needs the scope sandboxes:read.
func newDoor(t *testing.T, opts proxy.GateOptions, h proxy.Handler) (*proxy.Gate, http.Handler) {
	t.Helper()
	opts.Fail = writeFault
	g, err := proxy.NewGate(opts)
	must(t, err)
	mux := http.NewServeMux()
	mux.Handle("/x", g.Handle(proxy.Route{Name: "/x", Scope: proxy.ScopeSandboxesRead}, h))
	mux.Handle("/", g.Refuse(&proxy.Fault{Status: http.StatusNotFound, Code: "no_route"}))
	return g, g.Wrap(mux)
}

func fine(w http.ResponseWriter, _ *http.Request) error {
	_, err := io.WriteString(w, "fine")
	return err
}

// ask sends a request that is all right but for what change does to it.
func ask(h http.Handler, change func(*http.Request)) *httptest.ResponseRecorder {
	r := httptest.NewRequest(http.MethodGet, "http://localhost/x", nil)
	if change != nil {
		change(r)
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	return w
}

func TestNewGateRefuses(t *testing.T) {
	if _, err := proxy.NewGate(proxy.GateOptions{}); err == nil {
		t.Error("a gate without Fail was made")
	}
	for _, header := range []string{"Authorization", "X Token", "X-Token:"} {
		if _, err := proxy.NewGate(proxy.GateOptions{Fail: writeFault, TokenHeader: header}); err == nil {
			t.Errorf("the header %q was taken", header)
		}
	}
	reg := prometheus.NewRegistry()
	reg.MustRegister(prometheus.NewGauge(prometheus.GaugeOpts{Name: "berm_http_request_duration_seconds", Help: "another's"}))
	if _, err := proxy.NewGate(proxy.GateOptions{Fail: writeFault, Registry: reg}); err == nil {
		t.Error("a gate whose metric's name is another's was made")
	}
}

// Each door has a Gate, and all count on one registry.
func TestGatesShareARegistry(t *testing.T) {
	reg := prometheus.NewRegistry()
	for range 2 {
		g, err := proxy.NewGate(proxy.GateOptions{Fail: writeFault, Registry: reg})
		must(t, err)
		ask(g.Wrap(g.Refuse(errors.New("x"))), nil)
	}
	families, err := reg.Gather()
	if err != nil || len(families) != 2 || families[1].GetMetric()[0].GetHistogram().GetSampleCount() != 2 {
		t.Errorf("gathered %v, %v", families, err)
	}
}

func TestGateAuthentication(t *testing.T) {
	tokens, err := proxy.ParseTokens([]byte(fmt.Sprintf(
		"tokens: [{name: reader, token: %s, tenant: red, scopes: [sandboxes:read]}, {name: writer, token: %s, scopes: [sandboxes:write]}]", secretA, secretB)))
	must(t, err)
	_, h := newDoor(t, proxy.GateOptions{Tokens: tokens}, func(w http.ResponseWriter, r *http.Request) error {
		c := proxy.ExchangeOf(r.Context()).Caller
		_, err := io.WriteString(w, c.Name+"@"+c.Tenant)
		return err
	})
	for name, tt := range map[string]struct {
		header http.Header
		status int
		body   string
	}{
		"none":              {nil, 401, "unauthorized"},
		"own header":        {http.Header{"X-Api-Token": {secretA}}, 200, "reader@red"},
		"bearer":            {http.Header{"Authorization": {"Bearer " + secretA}}, 200, "reader@red"},
		"bearer, lower":     {http.Header{"Authorization": {"bearer " + secretA}}, 200, "reader@red"},
		"both alike":        {http.Header{"Authorization": {"Bearer " + secretA}, "X-Api-Token": {secretA}}, 200, "reader@red"},
		"both, not alike":   {http.Header{"Authorization": {"Bearer " + secretA}, "X-Api-Token": {secretB}}, 401, "unauthorized"},
		"twice, not alike":  {http.Header{"X-Api-Token": {secretA, secretB}}, 401, "unauthorized"},
		"unknown":           {http.Header{"X-Api-Token": {secretA + "x"}}, 401, "unauthorized"},
		"empty":             {http.Header{"X-Api-Token": {""}}, 401, "unauthorized"},
		"basic":             {http.Header{"Authorization": {"Basic " + secretA}}, 401, "unauthorized"},
		"bare":              {http.Header{"Authorization": {secretA}}, 401, "unauthorized"},
		"hash for token":    {http.Header{"X-Api-Token": {hashOf(secretA)}}, 401, "unauthorized"},
		"scope is missing":  {http.Header{"X-Api-Token": {secretB}}, 403, "forbidden"},
		"a list in the one": {http.Header{"X-Api-Token": {secretA + ", " + secretB}}, 401, "unauthorized"},
	} {
		t.Run(name, func(t *testing.T) {
			w := ask(h, func(r *http.Request) { r.Header = tt.header })
			if w.Code != tt.status || w.Body.String() != tt.body {
				t.Errorf("got %d %s, want %d %s", w.Code, w.Body, tt.status, tt.body)
			}
			if got := w.Header().Get("WWW-Authenticate"); (got == "Bearer") != (tt.status == 401) {
				t.Errorf("WWW-Authenticate is %q", got)
			}
		})
	}
	t.Run("other header", func(t *testing.T) {
		_, h := newDoor(t, proxy.GateOptions{Tokens: tokens, TokenHeader: "X-Key"}, fine)
		if w := ask(h, func(r *http.Request) { r.Header.Set("X-Key", secretA) }); w.Code != 200 {
			t.Errorf("got %d", w.Code)
		}
		if w := ask(h, func(r *http.Request) { r.Header.Set("X-API-Token", secretA) }); w.Code != 401 {
			t.Errorf("the usual header: got %d", w.Code)
		}
	})
	t.Run("no tokens", func(t *testing.T) {
		_, h := newDoor(t, proxy.GateOptions{}, fine)
		if w := ask(h, nil); w.Code != 200 {
			t.Errorf("got %d", w.Code)
		}
	})
}

func TestGateHostAndOrigin(t *testing.T) {
	_, h := newDoor(t, proxy.GateOptions{Hosts: []string{"Berm.example"}, Origins: []string{"https://ui.example"}}, fine)
	tcp := &net.TCPAddr{IP: net.IPv4(192, 0, 2, 7), Port: 80}
	unix := &net.UnixAddr{Name: "/run/berm.sock", Net: "unix"}
	for name, tt := range map[string]struct {
		host   string
		local  net.Addr
		origin []string
		status int
	}{
		"localhost":            {"localhost:8080", tcp, nil, 200},
		"loopback":             {"127.0.0.1:8080", tcp, nil, 200},
		"loopback 6":           {"[::1]:8080", tcp, nil, 200},
		"loopback 6, no port":  {"[::1]", tcp, nil, 200},
		"own address":          {"192.0.2.7:80", tcp, nil, 200},
		"configured":           {"berm.example", tcp, nil, 200},
		"configured, in caps":  {"BERM.EXAMPLE:443", tcp, nil, 200},
		"other address":        {"192.0.2.8", tcp, nil, 421},
		"other name":           {"evil.example", tcp, nil, 421},
		"localhost as a label": {"localhost.evil.example", tcp, nil, 421},
		"empty":                {"", tcp, nil, 421},
		"unknown connection":   {"192.0.2.7", nil, nil, 421},
		"unix":                 {"whatever", unix, nil, 200},
		"origin":               {"localhost", tcp, []string{"https://ui.example"}, 200},
		"strange origin":       {"localhost", tcp, []string{"https://evil.example"}, 403},
		"origin of no one":     {"localhost", tcp, []string{"null"}, 403},
		"own origin":           {"localhost", tcp, []string{"http://localhost"}, 403},
		"two origins":          {"localhost", tcp, []string{"https://ui.example", "https://evil.example"}, 403},
		"empty origin":         {"localhost", tcp, []string{""}, 403},
		"origin over unix":     {"localhost", unix, []string{"https://evil.example"}, 403},
	} {
		t.Run(name, func(t *testing.T) {
			w := ask(h, func(r *http.Request) {
				r.Host = tt.host
				r.Header["Origin"] = tt.origin
				if tt.origin == nil {
					r.Header.Del("Origin")
				}
				*r = *r.WithContext(context.WithValue(r.Context(), http.LocalAddrContextKey, tt.local))
			})
			if w.Code != tt.status {
				t.Errorf("got %d, want %d", w.Code, tt.status)
			}
		})
	}
}

func TestGateRequestID(t *testing.T) {
	_, h := newDoor(t, proxy.GateOptions{}, fine)
	for in, keeps := range map[string]bool{
		"abc-123": true, "a/b+c=": true, "": false, "a b": false, "a\x01": false, "<script>": false,
		strings.Repeat("x", 128): true, strings.Repeat("x", 129): false,
	} {
		got := ask(h, func(r *http.Request) { r.Header.Set("X-Request-Id", in) }).Header().Get("X-Request-Id")
		if got == "" || (got == in) != keeps {
			t.Errorf("%q: got %q", in, got)
		}
	}
	a, b := ask(h, nil), ask(h, nil)
	if a.Header().Get("X-Request-Id") == b.Header().Get("X-Request-Id") {
		t.Error("two requests have the same id")
	}
}

func TestGateContinuesTraces(t *testing.T) {
	const parent = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"
	tests := map[string]struct{ parent, state, want, wantState string }{
		"none":            {},
		"a state alone":   {state: "a=1"},
		"malformed":       {parent: "00-0-0-01", state: "a=1"},
		"a newline":       {parent: parent + "\n00", state: "a=1"},
		"all":             {parent: parent, state: "a=1,b=2", want: parent, wantState: "a=1,b=2"},
		"malformed state": {parent: parent, state: "a=1,=", want: parent},
		"the longest":     {parent: parent, state: "a=" + strings.Repeat("x", 250) + ",b=" + strings.Repeat("x", 257), want: parent},
		"long":            {parent: parent, state: "a=" + strings.Repeat("x", 253) + ",b=" + strings.Repeat("x", 254), want: parent, wantState: "a=" + strings.Repeat("x", 253) + ",b=" + strings.Repeat("x", 254)},
		"too long":        {parent: parent, state: "a=" + strings.Repeat("x", 254) + ",b=" + strings.Repeat("x", 254), want: parent},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			got := propagation.MapCarrier{}
			_, h := newDoor(t, proxy.GateOptions{}, func(_ http.ResponseWriter, r *http.Request) error {
				propagation.TraceContext{}.Inject(r.Context(), got)
				return nil
			})
			ask(h, func(r *http.Request) {
				r.Header.Set("Traceparent", tt.parent)
				r.Header.Set("Tracestate", tt.state)
			})
			if got["traceparent"] != tt.want || got["tracestate"] != tt.wantState {
				t.Errorf("got %q", got)
			}
		})
	}
}

func TestGateTellsOfRequests(t *testing.T) {
	tokens, err := proxy.ParseTokens([]byte(secretA))
	must(t, err)
	var logs bytes.Buffer
	reg := prometheus.NewRegistry()
	spans := tracetest.NewSpanRecorder()
	_, h := newDoor(t, proxy.GateOptions{
		Tokens: tokens, Registry: reg, Logger: slog.New(slog.NewJSONHandler(&logs, nil)),
		Tracer: sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(spans)),
	}, func(_ http.ResponseWriter, r *http.Request) error {
		ex := proxy.ExchangeOf(r.Context())
		ex.Key, ex.SessionID, ex.ContainerID = "k", "s", "c"
		return errors.New("engine said no")
	})
	w := ask(h, func(r *http.Request) {
		r.Header.Set("X-API-Token", secretA)
		r.Header.Set("X-Request-Id", "req-1")
		r.Header.Set("Traceparent", "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01")
	})
	ask(h, func(r *http.Request) { r.URL.Path, r.Method = "/secret/path", "BREW" })
	if w.Code != 500 || strings.Contains(w.Body.String(), "engine") {
		t.Errorf("got %d %s", w.Code, w.Body)
	}

	var line map[string]any
	must(t, json.NewDecoder(strings.NewReader(logs.String())).Decode(&line))
	for _, k := range []string{"time", "duration_ms", "remote"} {
		if line[k] == nil {
			t.Errorf("%s is missing in the log line", k)
		}
		delete(line, k)
	}
	want := map[string]any{
		"level": "ERROR", "msg": "http_request", "request_id": "req-1", "method": "GET", "route": "/x", "status": 500.0, "tenant": "default",
		"token_name": "default", "key": "k", "session_id": "s", "container_id": "c", "code": "internal", "error": "engine said no",
	}
	if diff := cmp.Diff(want, line); diff != "" {
		t.Error(diff)
	}
	if strings.Contains(logs.String(), secretA) || strings.Contains(logs.String(), "secret/path") {
		t.Errorf("the log tells too much: %s", logs.String())
	}

	families, err := reg.Gather()
	if err != nil || len(families) != 2 || families[1].GetName() != "berm_http_request_duration_seconds" {
		t.Fatalf("got %v, %v", families, err)
	}
	families = families[1:]
	var got []string
	for _, m := range families[0].GetMetric() {
		s := fmt.Sprint(m.GetHistogram().GetSampleCount())
		for _, l := range m.GetLabel() {
			s += " " + l.GetName() + "=" + l.GetValue()
		}
		got = append(got, s)
	}
	wantSamples := []string{"1 method=GET route=/x status=500", "1 method=OTHER route=unmatched status=404"}
	if diff := cmp.Diff(wantSamples, got); diff != "" {
		t.Error(diff)
	}

	span := spans.Ended()[0]
	if span.Name() != "GET /x" || span.Parent().TraceID().String() != "0123456789abcdef0123456789abcdef" {
		t.Errorf("span %q with parent %v", span.Name(), span.Parent().TraceID())
	}
}

func TestGatePanics(t *testing.T) {
	var logs bytes.Buffer
	log := slog.New(slog.NewJSONHandler(&logs, nil))
	t.Run("before the answer", func(t *testing.T) {
		_, h := newDoor(t, proxy.GateOptions{Logger: log}, func(http.ResponseWriter, *http.Request) error { panic("boo") })
		if w := ask(h, nil); w.Code != 500 || w.Body.String() != "internal" {
			t.Errorf("got %d %s", w.Code, w.Body)
		}
		if !strings.Contains(logs.String(), `"panic":"boo"`) {
			t.Errorf("the log doesn't tell: %s", logs.String())
		}
	})
	t.Run("in mid-answer", func(t *testing.T) {
		_, h := newDoor(t, proxy.GateOptions{Logger: log}, func(w http.ResponseWriter, _ *http.Request) error {
			_ = fine(w, nil)
			panic("boo")
		})
		defer func() {
			if err, ok := recover().(error); !ok || !errors.Is(err, http.ErrAbortHandler) {
				t.Errorf("the connection isn't broken off: %v", err)
			}
		}()
		ask(h, nil)
	})
}

// A panic in another goroutine of the request is as one in its own.
func TestGateTaskPanics(t *testing.T) {
	var logs bytes.Buffer
	reg := prometheus.NewRegistry()
	opts := proxy.GateOptions{Logger: slog.New(slog.NewJSONHandler(&logs, nil)), Registry: reg}
	_, h := newDoor(t, opts, func(http.ResponseWriter, *http.Request) error {
		stopped := make(chan struct{})
		tasks := proxy.Tasks{Abort: func() { close(stopped) }}
		tasks.Go(func() { <-stopped })
		tasks.Go(func() { panic("boo") })
		tasks.Wait()
		return nil
	})
	if w := ask(h, nil); w.Code != 500 || w.Body.String() != "internal" {
		t.Errorf("got %d %s", w.Code, w.Body)
	}
	if s := logs.String(); !strings.Contains(s, `"panic":"boo"`) || !strings.Contains(s, "TestGateTaskPanics.func1.3") {
		t.Errorf("the log lacks the panic or its stack: %s", s)
	}
	if err := testutil.GatherAndCompare(reg, strings.NewReader(`# HELP berm_http_panics_total Requests that a panic ended.
# TYPE berm_http_panics_total counter
berm_http_panics_total 1
`), "berm_http_panics_total"); err != nil {
		t.Error(err)
	}
}

func TestGateRecentErrors(t *testing.T) {
	tokens, err := proxy.ParseTokens([]byte(fmt.Sprintf(
		"tokens: [{name: a, token: %s, tenant: red}, {name: b, token: %s, tenant: blue}]", secretA, secretB)))
	must(t, err)
	g, h := newDoor(t, proxy.GateOptions{Tokens: tokens}, func(_ http.ResponseWriter, r *http.Request) error {
		return &proxy.Fault{Status: 404, Code: "not_found", Detail: r.URL.RawQuery}
	})
	for i := range 60 {
		ask(h, func(r *http.Request) {
			r.URL.RawQuery = fmt.Sprint(i)
			r.Header.Set("X-API-Token", secretA)
			r.Header.Set("X-Request-Id", fmt.Sprint("r", i))
		})
	}
	ask(h, nil)                                                            // nobody's
	ask(h, func(r *http.Request) { r.Header.Set("X-API-Token", secretB) }) // the other tenant's
	gone, cancel := context.WithCancel(context.Background())
	cancel()
	if w := ask(h, func(r *http.Request) { // of a caller that has gone
		r.Header.Set("X-API-Token", secretB)
		*r = *r.WithContext(gone)
	}); w.Code != proxy.StatusClientClosed {
		t.Errorf("a caller that has gone: got %d", w.Code)
	}
	signed := g.Wrap(g.Handle(proxy.Route{Name: "/signed"}, func(_ http.ResponseWriter, r *http.Request) error {
		proxy.ExchangeOf(r.Context()).Caller.Tenant = "blue"
		return &proxy.Fault{Status: 410, Code: "url_expired", Detail: strings.Repeat("x", 1<<20)}
	}))
	for range 100 {
		ask(signed, nil)
	}
	red, blue := g.RecentErrors("red"), g.RecentErrors("blue")
	if len(blue) != 11 || blue[10].Code != "not_found" || len(blue[0].Message) > 8<<10 {
		t.Errorf("beside a signed URL's: %d", len(blue))
	}
	blue = blue[10:]
	if len(red) != 50 || len(blue) != 1 || len(g.RecentErrors("")) != 0 {
		t.Fatalf("got %d and %d", len(red), len(blue))
	}
	for i, e := range red {
		if want := fmt.Sprint(59 - i); e.Message != want || e.RequestID != "r"+want || e.Code != "not_found" || e.Route != "/x" || e.Time.IsZero() {
			t.Errorf("entry %d is %+v", i, e)
		}
	}
}

func TestGateOverUnixSocket(t *testing.T) {
	_, h := newDoor(t, proxy.GateOptions{}, fine)
	path := filepath.Join(t.TempDir(), "s")
	l, err := proxy.Listen(t.Context(), "unix://"+path, 0o600)
	must(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- proxy.Serve(ctx, l, h, proxy.ServeOptions{}) }()
	c := http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", path)
	}}}
	resp, err := c.Get("http://any.name/x")
	must(t, err)
	_ = resp.Body.Close()
	if resp.StatusCode != 200 {
		t.Errorf("got %d", resp.StatusCode)
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// TestGateAmbiguousLength sends a request of which two readers could see different ends.
func TestGateAmbiguousLength(t *testing.T) {
	_, h := newDoor(t, proxy.GateOptions{}, fine)
	srv := httptest.NewServer(h)
	defer srv.Close()
	const next = "GET /x HTTP/1.1\r\nHost: localhost\r\n\r\n"
	for name, tt := range map[string]struct {
		request string
		answers int
	}{
		"chunked and a length":   {"POST /x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + next, 1},
		"a length and chunked":   {"POST /x HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\nContent-Length: 60\r\n\r\n2\r\n{}\r\n0\r\n\r\n" + next, 1},
		"refused":                {"POST /none HTTP/1.1\r\nHost: elsewhere\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + next, 1},
		"an old client's chunks": {"POST /x HTTP/1.0\r\nHost: localhost\r\nConnection: keep-alive\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + next, 1},
		"a length":               {"POST /x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}" + strings.Replace(next, "\r\n\r\n", "\r\nConnection: close\r\n\r\n", 1), 2},
	} {
		conn, err := net.Dial("tcp", srv.Listener.Addr().String())
		must(t, err)
		_ = conn.SetReadDeadline(time.Now().Add(20 * time.Second)) // or a failure would hang
		if _, err := io.WriteString(conn, tt.request); err != nil {
			t.Fatal(err)
		}
		all, _ := io.ReadAll(conn) // an early end may be a reset
		_ = conn.Close()
		if n := bytes.Count(all, []byte("HTTP/1.")); n != tt.answers {
			t.Errorf("%s: %d answers, want %d: %q", name, n, tt.answers, all)
		}
	}
}

var must = check.Must // ends a test if a step of its own fails
