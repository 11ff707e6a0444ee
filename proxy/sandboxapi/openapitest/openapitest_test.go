package openapitest_test

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/bermhq/berm/proxy/sandboxapi/openapitest"
)

// recorder is a test that may fail without harm.
type recorder struct {
	testing.TB
	failures []string
}

func (r *recorder) Errorf(format string, args ...any) {
	r.failures = append(r.failures, fmt.Sprintf(format, args...))
}

type transport func(*http.Request) (*http.Response, error)

func (f transport) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

func TestChecker(t *testing.T) {
	const (
		health  = `{"status":"ok","version":"1"}`
		deleted = `{"chat_id":"k","result":"deleted","session_id":null,"container_id":null}`
		problem = `{"type":"about:blank","title":"t","status":404,"detail":"d","instance":"/","code":"not_found","request_id":"r"}`
	)
	for name, tt := range map[string]struct {
		method, path, send string
		status             int
		contentType, body  string
		header             http.Header
		want               string // part of the only failure; empty is none
	}{
		"fine":                    {"GET", "/healthz", "", 200, "application/json", health, nil, ""},
		"charset":                 {"GET", "/healthz", "", 200, "application/json; charset=utf-8", health, nil, ""},
		"undocumented status":     {"GET", "/healthz", "", 204, "application/json", health, nil, "status isn't documented"},
		"undocumented media type": {"GET", "/healthz", "", 200, "text/plain", health, nil, "isn't documented"},
		"unknown field":           {"GET", "/healthz", "", 200, "application/json", `{"status":"ok","version":"1","x":1}`, nil, "additional properties"},
		"missing field":           {"GET", "/healthz", "", 200, "application/json", `{"status":"ok"}`, nil, "missing property"},
		"wrong value":             {"GET", "/healthz", "", 200, "application/json", `{"status":"well","version":"1"}`, nil, "one of"},
		"not JSON":                {"GET", "/healthz", "", 200, "application/json", `ok`, nil, "invalid character"},
		"no request id":           {"GET", "/healthz", "", 200, "application/json", health, http.Header{"X-Request-Id": nil}, "without X-Request-Id"},
		"bad query, refused":      {"GET", "/api/v1/sandboxes?limit=0", "", 404, "application/problem+json", problem, nil, "status isn't documented"},
		"bad query, accepted":     {"GET", "/api/v1/sandboxes?limit=0", "", 200, "application/json", `{"sandboxes":[]}`, nil, "accepted a request"},
		"unknown query, accepted": {"GET", "/api/v1/sandboxes?x=0", "", 200, "application/json", `{"sandboxes":[]}`, nil, "accepted a request"},
		"good query":              {"GET", "/api/v1/sandboxes?limit=1&metadata.a=b", "", 200, "application/json", `{"sandboxes":[]}`, nil, ""},
		"bad key, accepted":       {"DELETE", "/api/v1/sandboxes/-k", "", 200, "application/json", deleted, nil, "accepted a request"},
		"bad body, accepted":      {"POST", "/api/v1/sandboxes/k/exec", `{"command":[]}`, 200, "application/json", "{}", nil, "accepted a request"},
		"missing header":          {"GET", "/api/v1/sandboxes", "", 401, "application/problem+json", problem, nil, "WWW-Authenticate is missing"},
		"bad header": {"GET", "/readyz", "", 503, "application/problem+json", problem, http.Header{"Retry-After": {"soon"}},
			"header Retry-After"},
		"unknown path":            {"GET", "/x", "", 404, "application/problem+json", problem, nil, ""},
		"unknown path, accepted":  {"GET", "/x", "", 200, "application/json", health, nil, "want 404"},
		"unknown method":          {"PATCH", "/healthz", "", 405, "application/problem+json", problem, nil, ""},
		"unknown method, no body": {"PATCH", "/healthz", "", 405, "application/problem+json", "", nil, "EOF"},
		"lines":                   {"GET", "/api/v1/sandboxes/k/logs", "", 200, "application/x-ndjson", `{"stream":"stdout","data":"x"}` + "\n", nil, ""},
		"bad line":                {"GET", "/api/v1/sandboxes/k/logs", "", 200, "application/x-ndjson", `{"stream":"stdin","data":"x"}` + "\n", nil, "one of"},
	} {
		t.Run(name, func(t *testing.T) {
			rec := &recorder{TB: t}
			c := openapitest.New(rec)
			hc := http.Client{Transport: c.Transport(transport(func(*http.Request) (*http.Response, error) {
				h := http.Header{"Content-Type": {tt.contentType}, "X-Request-Id": {"r"}}
				for k, v := range tt.header {
					h[k] = v
				}
				return &http.Response{StatusCode: tt.status, Header: h, Body: io.NopCloser(strings.NewReader(tt.body))}, nil
			}))}
			r, err := http.NewRequestWithContext(t.Context(), tt.method, "http://localhost"+tt.path, strings.NewReader(tt.send))
			if err != nil {
				t.Fatal(err)
			}
			r.Header.Set("Content-Type", "application/json")
			resp, err := hc.Do(r)
			if err != nil {
				t.Fatal(err)
			}
			got, err := io.ReadAll(resp.Body)
			_ = resp.Body.Close()
			if string(got) != tt.body || err != nil {
				t.Errorf("the body came through as %q, %v", got, err)
			}
			if all := strings.Join(rec.failures, "\n"); tt.want == "" && all != "" || !strings.Contains(all, tt.want) {
				t.Errorf("got %q, want %q", all, tt.want)
			}
		})
	}
}

func TestUnseen(t *testing.T) {
	c := openapitest.New(t)
	before := len(c.Unseen())
	hc := http.Client{Transport: c.Transport(transport(func(*http.Request) (*http.Response, error) {
		return &http.Response{
			StatusCode: 200, Header: http.Header{"Content-Type": {"application/json"}, "X-Request-Id": {"r"}},
			Body: io.NopCloser(strings.NewReader(`{"status":"ok","version":"1"}`)),
		}, nil
	}))}
	for range 2 {
		resp, err := hc.Get("http://localhost/healthz")
		if err != nil {
			t.Fatal(err)
		}
		_ = resp.Body.Close()
	}
	if got := len(c.Unseen()); got != before-1 {
		t.Errorf("%d of %d are unseen", got, before)
	}
}
