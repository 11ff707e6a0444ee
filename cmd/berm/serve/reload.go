package serve

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"log/slog"
	"os"
	"slices"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/bermhq/berm/cmd/berm/config"
	"github.com/bermhq/berm/policy"
)

// policyPoll is how often the policy file is read. A change is taken over once two reads in a
// row agree on it, as the first may see half of it.
const policyPoll = time.Second

// policyKeeperOptions say what a policyKeeper keeps.
type policyKeeperOptions struct {
	Path     string                     // empty: the built-in policy
	Parse    policy.Options             // what it is parsed with
	Check    func(*policy.Policy) error // refuses what can't be had here; nil refuses nothing
	Logger   *slog.Logger               // mandatory
	Registry prometheus.Registerer      // mandatory
}

// policyKeeper holds the policy in force, and replaces it when its file changes.
type policyKeeper struct {
	opts    policyKeeperOptions
	reloads *prometheus.CounterVec

	current atomic.Pointer[policy.Policy]
	tried   policyFile // what was last loaded, good or bad
	seen    policyFile // what was last read
}

// policyFile is what a read of the policy file came to.
type policyFile struct{ data, err string }

// newPolicyKeeper loads the policy; the first one has to be good.
func newPolicyKeeper(opts policyKeeperOptions) (*policyKeeper, error) {
	k := &policyKeeper{opts: opts, reloads: countReloads(opts.Registry, "policy")}
	k.tried = k.read()
	return k, k.load(k.tried)
}

// countReloads counts by result, from 0.
func countReloads(registry prometheus.Registerer, what string) *prometheus.CounterVec {
	opts := prometheus.CounterOpts{Name: "berm_" + what + "_reloads_total", Help: "Attempts to reload the " + what + ", by result (success, failure)."}
	reloads := prometheus.NewCounterVec(opts, []string{"result"})
	reloads.WithLabelValues("success")
	reloads.WithLabelValues("failure")
	registry.MustRegister(reloads)
	return reloads
}

// Policy is the policy in force.
func (k *policyKeeper) Policy() *policy.Policy { return k.current.Load() }

func (k *policyKeeper) read() policyFile {
	if k.opts.Path == "" {
		return policyFile{}
	}
	data, err := os.ReadFile(k.opts.Path)
	if err != nil {
		return policyFile{err: err.Error()}
	}
	return policyFile{data: string(data)}
}

func (k *policyKeeper) load(file policyFile) error {
	if file.err != "" {
		return errors.New("read the policy: " + file.err)
	}
	p, err := policy.Parse([]byte(file.data), k.opts.Parse)
	if err != nil {
		return err
	}
	if k.opts.Check != nil {
		if err := k.opts.Check(p); err != nil {
			return err
		}
	}
	k.current.Store(p)
	return nil
}

// poll reloads the file if it has changed and settled.
func (k *policyKeeper) poll(ctx context.Context) {
	file := k.read()
	settled := file == k.seen
	k.seen = file
	if settled && file != k.tried {
		k.reload(ctx, file)
	}
}

// reload takes over what was read, also secrets that changed. A broken file is reported, and the
// old policy stays.
func (k *policyKeeper) reload(ctx context.Context, file policyFile) {
	k.tried = file
	if err := k.load(file); err != nil {
		k.reloads.WithLabelValues("failure").Inc()
		k.opts.Logger.ErrorContext(ctx, "policy_reload_failed", "file", k.opts.Path, "error", err.Error())
		return
	}
	sum := sha256.Sum256([]byte(file.data))
	k.reloads.WithLabelValues("success").Inc()
	k.opts.Logger.InfoContext(ctx, "policy_reloaded", "file", k.opts.Path, "sha256", hex.EncodeToString(sum[:]))
}

// reload takes over what has changed, until ctx ends: the policy when its file has changed,
// and on each SIGHUP the policy and the settings.
func (s *server) reload(ctx context.Context) error {
	tick := time.NewTicker(policyPoll)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-s.hup:
			s.systemd.reloading(ctx, func() {
				s.policies.reload(ctx, s.policies.read())
				s.reloadSettings(ctx)
			})
		case <-tick.C:
			s.policies.poll(ctx)
		}
	}
}

// reloadSettings reads the settings again. It takes over the log's level, and names what else
// has changed, which is for the next start. It leaves all as it is when anything is wrong.
func (s *server) reloadSettings(ctx context.Context) {
	next, err := s.read()
	if err != nil {
		s.settingsReloads.WithLabelValues("failure").Inc()
		s.log.ErrorContext(ctx, "settings_reload_failed", "error", err.Error())
		return
	}
	s.settingsReloads.WithLabelValues("success").Inc()
	level := next.Logging.SlogLevel()
	if before := s.tel.level.Level(); level != before {
		s.tel.level.Set(min(level, before, slog.LevelInfo)) // so that it is seen
		s.log.InfoContext(ctx, "log_level_changed", "from", before.String(), "to", level.String())
		s.tel.level.Set(level)
	}
	waiting := slices.DeleteFunc(config.Changed(s.asRead, next), func(key string) bool { return key == "logging.level" })
	if len(waiting) > 0 {
		s.log.WarnContext(ctx, "settings_need_restart", "keys", waiting)
	}
}
