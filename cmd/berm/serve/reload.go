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

// policyPoll is how often the policy file is read. A change takes effect once two reads in a row
// are equal, as the first may see a file that is being written.
const policyPoll = time.Second

// policyKeeperOptions say what a policyKeeper keeps.
type policyKeeperOptions struct {
	Path     string                     // empty: the built-in policy
	Parse    policy.Options             // for policy.Parse
	Check    func(*policy.Policy) error // refuses a policy that can't be enforced here; nil refuses none
	Logger   *slog.Logger               // mandatory
	Registry prometheus.Registerer      // mandatory
}

// policyKeeper holds the policy in force, and replaces it when its file changes.
type policyKeeper struct {
	opts    policyKeeperOptions
	reloads *prometheus.CounterVec

	current atomic.Pointer[policy.Policy]
	tried   policyFile // the last one that was loaded, valid or not
	seen    policyFile // the last one that was read
}

// policyFile is the result of reading the policy file.
type policyFile struct{ data, err string }

// newPolicyKeeper loads the policy. It fails if the policy is invalid.
func newPolicyKeeper(opts policyKeeperOptions) (*policyKeeper, error) {
	k := &policyKeeper{opts: opts, reloads: countReloads(opts.Registry, "policy")}
	k.tried = k.read()
	return k, k.load(k.tried)
}

// countReloads registers the counter of reloads by result. Both results begin at 0.
func countReloads(registry prometheus.Registerer, what string) *prometheus.CounterVec {
	opts := prometheus.CounterOpts{Name: "berm_" + what + "_reloads_total", Help: "Attempts to reload the " + what + ", by result (success, failure)."}
	reloads := prometheus.NewCounterVec(opts, []string{"result"})
	reloads.WithLabelValues("success")
	reloads.WithLabelValues("failure")
	registry.MustRegister(reloads)
	return reloads
}

// Policy returns the policy in force. It is safe for many goroutines.
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

// poll reads the file. It reloads a change once two reads in a row are equal.
func (k *policyKeeper) poll(ctx context.Context) {
	file := k.read()
	settled := file == k.seen
	k.seen = file
	if settled && file != k.tried {
		k.reload(ctx, file)
	}
}

// reload loads a file that was read, and the secrets that it names. If that fails, it logs the
// error and keeps the old policy.
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

// reload reloads the policy whenever its file changes, and the policy and the settings on each
// SIGHUP, until ctx ends.
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

// reloadSettings reads the settings again. It applies the log's level, and logs the other keys
// that have changed, which need a restart. It changes nothing if the settings are invalid.
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
		s.tel.level.Set(min(level, before, slog.LevelInfo)) // so that the next line is logged
		s.log.InfoContext(ctx, "log_level_changed", "from", before.String(), "to", level.String())
		s.tel.level.Set(level)
	}
	waiting := slices.DeleteFunc(config.Changed(s.asRead, next), func(key string) bool { return key == "logging.level" })
	if len(waiting) > 0 {
		s.log.WarnContext(ctx, "settings_need_restart", "keys", waiting)
	}
}
