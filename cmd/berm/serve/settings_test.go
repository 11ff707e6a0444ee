package serve

import (
	"bytes"
	"errors"
	"log/slog"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/bermhq/berm/cmd/berm/config"
)

func TestSettingsReload(t *testing.T) {
	tests := map[string]struct {
		change func(c *config.Config) error
		level  slog.Level
		want   []string // in the log
		failed float64
		before slog.Level
	}{
		"nothing": {func(*config.Config) error { return nil }, slog.LevelInfo, nil, 0, slog.LevelInfo},
		"louder": {func(c *config.Config) error { c.Logging.Level = "debug"; return nil }, slog.LevelDebug,
			[]string{"msg=log_level_changed from=INFO to=DEBUG"}, 0, slog.LevelInfo},
		"quieter": {func(c *config.Config) error { c.Logging.Level = "error"; return nil }, slog.LevelError,
			[]string{"msg=log_level_changed from=INFO to=ERROR"}, 0, slog.LevelInfo},
		"both quiet": {func(c *config.Config) error { c.Logging.Level = "warn"; return nil }, slog.LevelWarn,
			[]string{"msg=log_level_changed from=ERROR to=WARN"}, 0, slog.LevelError},
		"another": {func(c *config.Config) error { c.Security.Tokens, c.HTTP.Listen = "hush", "127.0.0.1:1"; return nil }, slog.LevelInfo,
			[]string{`level=WARN msg=settings_need_restart keys="[http.listen security.tokens]"`}, 0, slog.LevelInfo},
		"bad level": {func(c *config.Config) error { c.Logging.Level = "loud"; return nil }, slog.LevelInfo,
			[]string{"level=ERROR msg=settings_reload_failed"}, 1, slog.LevelInfo},
		"not valid": {func(c *config.Config) error { c.Logging.Level = "debug"; return errors.New("line 7") }, slog.LevelInfo,
			[]string{"level=ERROR msg=settings_reload_failed error=\"line 7\""}, 1, slog.LevelInfo},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			var out bytes.Buffer
			level := new(slog.LevelVar)
			level.Set(tt.before)
			k, err := newSettingsKeeper(config.Default(), func() (*config.Config, error) {
				c := config.Default()
				return c, tt.change(c)
			}, &telemetry{level: level, logger: localLogger(&out, "text", level)}, prometheus.NewRegistry())
			if err != nil {
				t.Fatal(err)
			}
			k.reload(t.Context())
			if level.Level() != tt.level {
				t.Errorf("the level is %s", level.Level())
			}
			if got := strings.Count(out.String(), "\n"); got != len(tt.want) || strings.Contains(out.String(), "hush") {
				t.Errorf("the log says %q", out.String())
			}
			for _, want := range tt.want {
				if !strings.Contains(out.String(), want) {
					t.Errorf("the log lacks %q: %q", want, out.String())
				}
			}
			if got := testutil.ToFloat64(k.reloads.WithLabelValues("failure")); got != tt.failed {
				t.Errorf("%v failures are counted", got)
			}
		})
	}
}
