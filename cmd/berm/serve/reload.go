package serve

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"

	"github.com/fsnotify/fsnotify"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/bermhq/berm/policy"
)

// settle is how long a changed policy file has to be left alone before it is read.
const settle = 100 * time.Millisecond

// policyPoll is how often the policy file is read where it can't be watched.
const policyPoll = 2 * time.Second

// policyKeeperOptions say what a policyKeeper keeps.
type policyKeeperOptions struct {
	Path     string                     // empty: the built-in policy
	Parse    policy.Options             // what it is parsed with
	Check    func(*policy.Policy) error // refuses what can't be had here; nil refuses nothing
	Logger   *slog.Logger               // mandatory
	Registry prometheus.Registerer      // mandatory
	// OnSignal does what a signal asks for, with the policy's part of it. Nil does that alone.
	OnSignal func(ctx context.Context, reload func())
}

// policyKeeper holds the policy in force, and replaces it when its file changes.
type policyKeeper struct {
	opts    policyKeeperOptions
	reloads *prometheus.CounterVec

	current atomic.Pointer[policy.Policy]
	data    []byte // what was last read, good or bad

	newWatcher func() (*fsnotify.Watcher, error) // fsnotify.NewWatcher but in tests
}

// newPolicyKeeper loads the policy; the first one has to be good.
func newPolicyKeeper(opts policyKeeperOptions) (*policyKeeper, error) {
	reloads, err := countReloads(opts.Registry, "berm_policy_reloads_total", "Attempts to load a changed policy, by result (success, failure).")
	if err != nil {
		return nil, err
	}
	if opts.OnSignal == nil {
		opts.OnSignal = func(_ context.Context, reload func()) { reload() }
	}
	k := &policyKeeper{opts: opts, reloads: reloads, newWatcher: fsnotify.NewWatcher}
	data, err := k.read()
	if err != nil {
		return nil, err
	}
	return k, k.load(data)
}

// countReloads counts by result, from 0.
func countReloads(registry prometheus.Registerer, name, help string) (*prometheus.CounterVec, error) {
	reloads := prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, []string{"result"})
	reloads.WithLabelValues("success")
	reloads.WithLabelValues("failure")
	return reloads, registry.Register(reloads)
}

// Policy is the policy in force.
func (k *policyKeeper) Policy() *policy.Policy { return k.current.Load() }

func (k *policyKeeper) read() ([]byte, error) {
	if k.opts.Path == "" {
		return nil, nil
	}
	data, err := os.ReadFile(k.opts.Path)
	if err != nil {
		return nil, fmt.Errorf("read the policy: %w", err)
	}
	return data, nil
}

func (k *policyKeeper) load(data []byte) error {
	k.data = data
	p, err := policy.Parse(data, k.opts.Parse)
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

// reload reads the file again. A broken one is reported, and the old policy stays.
// Unless forced, an unchanged file is left alone; a forced reload also takes
// secrets that changed.
func (k *policyKeeper) reload(ctx context.Context, forced bool) {
	data, err := k.read()
	if err == nil && !forced && bytes.Equal(data, k.data) {
		return
	}
	if err == nil {
		err = k.load(data)
	}
	if err != nil {
		k.reloads.WithLabelValues("failure").Inc()
		k.opts.Logger.ErrorContext(ctx, "policy_reload_failed", "file", k.opts.Path, "error", err.Error())
		return
	}
	sum := sha256.Sum256(data)
	k.reloads.WithLabelValues("success").Inc()
	k.opts.Logger.InfoContext(ctx, "policy_reloaded", "file", k.opts.Path, "sha256", hex.EncodeToString(sum[:]))
}

// Run reloads the policy on each signal, and when its file changes, until ctx ends.
func (k *policyKeeper) Run(ctx context.Context, hup <-chan os.Signal) error {
	// A sandbox of Berm's own user can take all inotify instances that the user may have.
	watcher, err := k.newWatcher()
	if err == nil {
		defer func(w *fsnotify.Watcher) { _ = w.Close() }(watcher)
		err = k.watch(watcher)
	}
	poll := time.Duration(0)
	if err != nil {
		watcher = &fsnotify.Watcher{} // with channels on which nothing comes
		k.opts.Logger.WarnContext(ctx, "policy_watch_failed", "error", err.Error(), "poll", policyPoll.String())
		poll = policyPoll
	}
	timer := time.NewTimer(settle) // the file may have changed since it was first read
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-hup:
			k.opts.OnSignal(ctx, func() { k.reload(ctx, true) })
		case <-watcher.Events:
			timer.Reset(settle)
		case err := <-watcher.Errors:
			// An overflow lost events, so look.
			k.opts.Logger.WarnContext(ctx, "policy_watch_failed", "error", err.Error())
			timer.Reset(settle)
		case <-timer.C:
			if poll > 0 {
				timer.Reset(poll)
			} else if err := k.watch(watcher); err != nil {
				k.opts.Logger.WarnContext(ctx, "policy_watch_failed", "error", err.Error(), "poll", policyPoll.String())
				poll = policyPoll
				timer.Reset(poll)
			}
			k.reload(ctx, false)
		}
	}
}

// watch follows the directories rather than the file, which editors and
// orchestrators replace: the one that it is named in, and the one that it lies in,
// which differs when it is a symbolic link.
func (k *policyKeeper) watch(w *fsnotify.Watcher) error {
	if k.opts.Path == "" {
		return nil
	}
	dirs := []string{filepath.Dir(k.opts.Path)}
	if target, err := filepath.EvalSymlinks(k.opts.Path); err == nil {
		dirs = append(dirs, filepath.Dir(target))
	}
	var errs []error
	for _, dir := range dirs {
		if err := w.Add(dir); err != nil {
			errs = append(errs, fmt.Errorf("watch %s: %w", dir, err))
		}
	}
	return errors.Join(errs...)
}
