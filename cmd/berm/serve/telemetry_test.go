package serve

import (
	"bytes"
	"compress/gzip"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/bermhq/berm/cmd/berm/config"
)

// TestTelemetryGoesToTheCollector sends a log, a metric and a span to a receiver of OTLP.
func TestTelemetryGoesToTheCollector(t *testing.T) {
	var mu sync.Mutex
	got := map[string]string{}
	c := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		body := io.Reader(r.Body)
		if r.Header.Get("Content-Encoding") == "gzip" {
			var err error
			if body, err = gzip.NewReader(body); err != nil {
				t.Error(err)
				return
			}
		}
		data, err := io.ReadAll(body)
		if err != nil || r.Header.Get("X-Key") != "hush" {
			t.Errorf("%s with the key %q: %v", r.URL.Path, r.Header.Get("X-Key"), err)
		}
		mu.Lock()
		defer mu.Unlock()
		got[r.URL.Path] += string(data)
	}))
	defer c.Close()
	headers := filepath.Join(t.TempDir(), "headers")
	write(t, headers, "X-Key=hush\n")
	cfg := config.Default()
	cfg.Otel.Endpoint, cfg.Otel.HeadersFile = c.URL, headers
	var stderr bytes.Buffer
	tel, err := newTelemetry(t.Context(), cfg, map[string]string{"X-Key": "hush"}, "me", &stderr)
	if err != nil {
		t.Fatal(err)
	}
	tel.logger.Info("one_message")
	tel.logger.Debug("below_the_level")
	_, span := tel.tracer.Tracer("test").Start(t.Context(), "one_span")
	span.End()
	if err := tel.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]string{"/v1/logs": "one_message", "/v1/metrics": "go_goroutines", "/v1/traces": "one_span"} {
		if !strings.Contains(got[path], want) || !strings.Contains(got[path], "service.instance.id") {
			t.Errorf("%s got no %s: %q", path, want, got[path])
		}
	}
	if strings.Contains(got["/v1/logs"]+stderr.String(), "below_the_level") {
		t.Error("a message below the level was sent")
	}
	if out := stderr.String(); !strings.Contains(out, "msg=one_message") || strings.Contains(out, "hush") {
		t.Errorf("standard error got %q", out)
	}
}

func TestNothingIsSentWithoutEndpoint(t *testing.T) {
	tel, err := newTelemetry(t.Context(), config.Default(), nil, "me", new(bytes.Buffer))
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
	log := localLogger(&out, "json", slog.LevelWarn)
	log.Info("quiet")
	log.Warn("loud")
	if got := out.String(); strings.Contains(got, "quiet") || !strings.Contains(got, `"msg":"loud"`) {
		t.Errorf("got %q", got)
	}
}
