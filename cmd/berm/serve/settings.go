package serve

import (
	"context"
	"log/slog"
	"slices"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/bermhq/berm/cmd/berm/config"
)

// settingsKeeper reads the settings again. The log's level is taken over; what else has
// changed is for the next start, and named.
type settingsKeeper struct {
	inForce *config.Config                 // as it was read at the start
	read    func() (*config.Config, error) // once more, from the same sources
	tel     *telemetry
	reloads *prometheus.CounterVec
}

func newSettingsKeeper(cfg *config.Config, read func() (*config.Config, error), tel *telemetry, registry prometheus.Registerer) (*settingsKeeper, error) {
	reloads, err := countReloads(registry, "berm_settings_reloads_total", "Attempts to read the settings again, by result (success, failure).")
	return &settingsKeeper{inForce: cfg, read: read, tel: tel, reloads: reloads}, err
}

// reload leaves everything as it is when anything is wrong.
func (k *settingsKeeper) reload(ctx context.Context) {
	next, err := k.read()
	var level slog.Level
	if err == nil {
		level, err = next.Logging.SlogLevel()
	}
	if err != nil {
		k.reloads.WithLabelValues("failure").Inc()
		k.tel.logger.ErrorContext(ctx, "settings_reload_failed", "error", err.Error())
		return
	}
	k.reloads.WithLabelValues("success").Inc()
	if before := k.tel.level.Level(); level != before {
		k.tel.level.Set(min(level, before, slog.LevelInfo)) // so that it is seen
		k.tel.logger.InfoContext(ctx, "log_level_changed", "from", before.String(), "to", level.String())
		k.tel.level.Set(level)
	}
	waiting := slices.DeleteFunc(config.Changed(k.inForce, next), func(key string) bool { return key == "logging.level" })
	if len(waiting) > 0 {
		k.tel.logger.WarnContext(ctx, "settings_need_restart", "keys", waiting)
	}
}
