package main

import (
	"bytes"
	"log/slog"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/bermhq/berm/cmd/berm/config"
)

// filled is a registry of which each vector has a child, or nothing of it would be sent.
// The labels' values are their names.
type filled struct{ *prometheus.Registry }

func (f filled) Register(c prometheus.Collector) error {
	desc := make(chan *prometheus.Desc, 16)
	c.Describe(desc)
	labels := strings.Split(metricLabels.FindStringSubmatch((<-desc).String())[1], ",")
	switch vec := c.(type) {
	case *prometheus.CounterVec:
		vec.WithLabelValues(labels...).Inc()
	case *prometheus.GaugeVec:
		vec.WithLabelValues(labels...).Inc()
	case *prometheus.HistogramVec:
		vec.WithLabelValues(labels...).Observe(1)
	}
	return f.Registry.Register(c)
}

func (f filled) MustRegister(cs ...prometheus.Collector) {
	for _, c := range cs {
		if err := f.Register(c); err != nil {
			panic(err)
		}
	}
}

// Everything that docs/observability.md lists arrives at a receiver of OTLP, as it says there.
func TestTelemetryGoesToTheCollector(t *testing.T) {
	c := newCollector(t)
	headers := filepath.Join(t.TempDir(), "headers")
	write(t, headers, "X-Key=hush\n")
	cfg := config.Default()
	cfg.Otel.Endpoint, cfg.Otel.HeadersFile = c.URL, headers
	var stderr bytes.Buffer
	tel, err := newTelemetry(t.Context(), cfg, "me", &stderr)
	if err != nil {
		t.Fatal(err)
	}
	wantLogs, wantMetrics, wantSpans := map[string]string{}, map[string]string{}, map[string]bool{}
	for _, row := range section(t, "Logs") {
		level, _, _ := strings.Cut(row[1], " ") // the usual one of several
		level = strings.ToUpper(strings.TrimSuffix(level, ";"))
		var l slog.Level
		if err := l.UnmarshalText([]byte(level)); err != nil {
			t.Fatal(err)
		}
		tel.logger.Log(t.Context(), l, row[0], "key", "k") //nolint:sloglint // the messages are the table's
		if l >= slog.LevelInfo {
			wantLogs[row[0]] = level
		}
	}
	registerAll(t, filled{tel.registry})
	for _, row := range section(t, "Metrics") {
		labels := slices.DeleteFunc(strings.Split(strings.ReplaceAll(row[2], " ", ""), ","), func(l string) bool { return l == "" })
		slices.Sort(labels)
		wantMetrics[row[0]] = row[1] + " " + strings.Join(labels, ",")
	}
	for _, row := range section(t, "Spans") {
		_, span := tel.tracer.Tracer("test").Start(t.Context(), row[0])
		span.End()
		wantSpans[row[0]] = true
	}
	if err := tel.Close(t.Context()); err != nil {
		t.Fatal(err)
	}

	got := c.got(t, "me")
	if diff := cmp.Diff(wantLogs, got.logs); diff != "" {
		t.Errorf("logs (-want +got):\n%s", diff)
	}
	maps.DeleteFunc(got.metrics, func(name, _ string) bool {
		return strings.HasPrefix(name, "go_") || strings.HasPrefix(name, "process_")
	})
	if diff := cmp.Diff(wantMetrics, got.metrics); diff != "" {
		t.Errorf("metrics (-want +got):\n%s", diff)
	}
	for name := range wantSpans {
		if _, ok := got.spans[name]; !ok {
			t.Errorf("the span %s is missing", name)
		}
	}
	for _, key := range got.keys {
		if key != "hush" {
			t.Errorf("a request had the key %q", key)
		}
	}
	if out := stderr.String(); !strings.Contains(out, "msg=serving") || strings.Contains(out, "msg=agent_refused") || strings.Contains(out, "hush") {
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
	log := localLogger(&out, "json", slog.LevelWarn)
	log.Info("quiet")
	log.Warn("loud")
	if got := out.String(); strings.Contains(got, "quiet") || !strings.Contains(got, `"msg":"loud"`) {
		t.Errorf("got %q", got)
	}
}
