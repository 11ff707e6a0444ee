package serve

import (
	"bytes"
	"log/slog"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/bermhq/berm/cmd/berm/config"
	"github.com/bermhq/berm/runtime/runtimetest/check"
)

func TestNothingIsSentWithoutEndpoint(t *testing.T) {
	tel := check.Value(newTelemetry(t.Context(), config.Default(), nil, "me", new(bytes.Buffer)))(t)
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
