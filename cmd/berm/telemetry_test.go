package main

import (
	"bytes"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/bermhq/berm/cmd/berm/config"
)

func TestTelemetryGoesToTheCollector(t *testing.T) {
	var mu sync.Mutex
	got := map[string]string{} // header by path
	collector := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		got[r.URL.Path] = r.Header.Get("X-Key")
	}))
	defer collector.Close()

	headers := filepath.Join(t.TempDir(), "headers")
	write(t, headers, "X-Key=hush\n")
	cfg := config.Default()
	cfg.Otel.Endpoint, cfg.Otel.HeadersFile = collector.URL, headers
	var stderr bytes.Buffer
	tel, err := newTelemetry(t.Context(), cfg, "me", &stderr)
	if err != nil {
		t.Fatal(err)
	}
	tel.logger.Info("said")
	tel.logger.Debug("whispered")
	_, span := tel.tracer.Tracer("test").Start(t.Context(), "work")
	span.End()
	if err := tel.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	mu.Lock()
	defer mu.Unlock()
	want := map[string]string{"/v1/logs": "hush", "/v1/metrics": "hush", "/v1/traces": "hush"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("what the collector got (-want +got):\n%s", diff)
	}
	if out := stderr.String(); !strings.Contains(out, "msg=said") || strings.Contains(out, "whispered") || strings.Contains(out, "hush") {
		t.Errorf("standard error got %q", out)
	}
}

func TestNothingIsSentWithoutEndpoint(t *testing.T) {
	tel, err := newTelemetry(t.Context(), config.Default(), "me", new(bytes.Buffer))
	if err != nil {
		t.Fatal(err)
	}
	if tel.tracer != nil || len(tel.closers) != 0 {
		t.Error("exporters were made")
	}
}

func TestOtelHeaders(t *testing.T) {
	file := filepath.Join(t.TempDir(), "headers")
	write(t, file, "A=1,\nB=x=y\n")
	tests := map[string]struct {
		cfg  config.Otel
		want map[string]string
	}{
		"none":    {config.Otel{}, map[string]string{}},
		"value":   {config.Otel{Headers: "A=1, B=2"}, map[string]string{"A": "1", "B": "2"}},
		"file":    {config.Otel{HeadersFile: file}, map[string]string{"A": "1", "B": "x=y"}},
		"bad":     {config.Otel{Headers: "hush"}, nil},
		"missing": {config.Otel{HeadersFile: file + ".none"}, nil},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			got, err := otelHeaders(tt.cfg)
			if (err != nil) != (tt.want == nil) {
				t.Fatalf("error %v", err)
			}
			if err != nil && strings.Contains(err.Error(), "hush") {
				t.Errorf("the error tells a secret: %v", err)
			}
			if diff := cmp.Diff(tt.want, got); err == nil && diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func TestJSONLogs(t *testing.T) {
	var out bytes.Buffer
	log, err := localLogger(&out, config.Logging{Level: "warn", Format: "json"})
	if err != nil {
		t.Fatal(err)
	}
	log.Info("quiet")
	log.Warn("loud")
	if got := out.String(); strings.Contains(got, "quiet") || !strings.Contains(got, `"msg":"loud"`) {
		t.Errorf("got %q", got)
	}
}
