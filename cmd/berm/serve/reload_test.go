package serve

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/bermhq/berm/cmd/berm/config"
	"github.com/bermhq/berm/runtime/runtimetest/check"
)

// messages is a log handler that hands on what is said.
type messages chan string

func (messages) Enabled(context.Context, slog.Level) bool { return true }

func (m messages) Handle(_ context.Context, r slog.Record) error {
	m <- r.Message
	return nil
}

func (m messages) WithAttrs([]slog.Attr) slog.Handler { return m }
func (m messages) WithGroup(string) slog.Handler      { return m }

// want waits for a message.
func (m messages) want(t *testing.T, message string) {
	t.Helper()
	select {
	case got := <-m:
		if got != message {
			t.Fatalf("the log says %q, want %q", got, message)
		}
	case <-time.After(10 * time.Second):
		t.Fatalf("the log doesn't say %q", message)
	}
}

const (
	policyA = "version: 1\nprofiles: {a: {extends: default}}\n"
	policyB = "version: 1\nprofiles: {b: {extends: default}}\n"
	broken  = "version: 1\nprofiles: {c: {extends: nothing}}\n"
)

// replace swaps a file for another as editors do.
func replace(t *testing.T, path, content string) {
	t.Helper()
	write(t, path+".new", content)
	must(t, os.Rename(path+".new", path))
}

// keep reloads a policy until the test ends.
func keep(t *testing.T, path string) (*policyKeeper, messages, chan<- os.Signal) {
	t.Helper()
	log := make(messages, 100)
	k := check.Value(newPolicyKeeper(policyKeeperOptions{Path: path, Logger: slog.New(log), Registry: prometheus.NewRegistry()}))(t)
	s := &server{policies: k, hup: make(chan os.Signal), systemd: &notifier{}, tel: &telemetry{level: new(slog.LevelVar)}, asRead: config.Default()}
	s.read, s.settingsReloads = func() (*config.Config, error) { return config.Default(), nil }, countReloads(prometheus.NewRegistry(), "settings")
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := s.reload(ctx); err != nil {
			t.Error(err)
		}
	}()
	t.Cleanup(func() {
		cancel()
		<-done
	})
	return k, log, s.hup
}

func wantProfile(t *testing.T, k *policyKeeper, name string) {
	t.Helper()
	if got := k.Policy().Profiles(); !slices.Contains(got, name) {
		t.Errorf("profiles in force are %q, want %q among them", got, name)
	}
}

func TestReloadOnChange(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "policy.yaml")
		write(t, path, policyA)
		k, log, _ := keep(t, path)
		wantProfile(t, k, "a")

		replace(t, path, policyB)
		log.want(t, "policy_reloaded")
		wantProfile(t, k, "b")

		write(t, path, policyA) // in place
		log.want(t, "policy_reloaded")
		wantProfile(t, k, "a")
	})
}

// A file that is seen while it is written isn't taken for the whole.
func TestReloadWaitsForTheRest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "policy.yaml")
		write(t, path, policyA)
		k, log, _ := keep(t, path)
		for _, content := range []string{"version: 1\n", "version: 1\nprofiles:\n", policyB} {
			write(t, path, content)
			time.Sleep(policyPoll) // the bubble's
			synctest.Wait()
			wantProfile(t, k, "a")
		}
		log.want(t, "policy_reloaded")
		wantProfile(t, k, "b")
	})
}

func TestBrokenPolicyStaysOut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "policy.yaml")
		write(t, path, policyA)
		k, log, hup := keep(t, path)
		before := k.Policy()

		replace(t, path, broken)
		log.want(t, "policy_reload_failed")
		if k.Policy() != before {
			t.Error("a broken policy replaced the one in force")
		}
		must(t, os.Remove(path))
		hup <- syscall.SIGHUP
		log.want(t, "policy_reload_failed")
		if k.Policy() != before {
			t.Error("a missing policy replaced the one in force")
		}
		if got := testutil.ToFloat64(k.reloads.WithLabelValues("failure")); got < 2 {
			t.Errorf("%v failures counted, want 2 at least", got)
		}
	})
}

func TestReloadOnSignal(t *testing.T) {
	dir := t.TempDir()
	secret := filepath.Join(dir, "secret")
	path := filepath.Join(dir, "policy.yaml")
	write(t, secret, "one")
	write(t, path, "version: 1\nenv: {inject: {KEY: {file: "+secret+"}}}\n")
	k, log, hup := keep(t, path)

	// The policy file is the same; a secret that it names is not.
	write(t, secret, "two")
	hup <- syscall.SIGHUP
	log.want(t, "policy_reloaded")
	if got := k.Policy().InjectedEnv(); !slices.Contains(got, "KEY=two") {
		t.Errorf("injected are %q", got)
	}
}

func TestFirstPolicyHasToBeGood(t *testing.T) {
	path := filepath.Join(t.TempDir(), "policy.yaml")
	for _, content := range []string{broken, ""} {
		if content != "" {
			write(t, path, content)
		}
		if _, err := newPolicyKeeper(policyKeeperOptions{Path: path, Logger: slog.New(slog.DiscardHandler), Registry: prometheus.NewRegistry()}); err == nil {
			t.Errorf("no error with the policy %q", content)
		}
		_ = os.Remove(path)
	}
}

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
		"not valid": {func(c *config.Config) error { c.Logging.Level = "debug"; return errors.New("line 7") }, slog.LevelInfo,
			[]string{"level=ERROR msg=settings_reload_failed error=\"line 7\""}, 1, slog.LevelInfo},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			var out bytes.Buffer
			level := new(slog.LevelVar)
			level.Set(tt.before)
			reloads := countReloads(prometheus.NewRegistry(), "settings")
			s := server{asRead: config.Default(), tel: &telemetry{level: level}, log: localLogger(&out, "text", level), settingsReloads: reloads}
			s.read = func() (*config.Config, error) {
				c := config.Default()
				return c, tt.change(c)
			}
			s.reloadSettings(t.Context())
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
			if got := testutil.ToFloat64(reloads.WithLabelValues("failure")); got != tt.failed {
				t.Errorf("%v failures are counted", got)
			}
		})
	}
}
