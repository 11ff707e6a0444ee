package serve

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
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
	if err := os.Rename(path+".new", path); err != nil {
		t.Fatal(err)
	}
}

// keep runs a keeper until the test ends.
func keep(t *testing.T, path string) (*policyKeeper, messages, chan<- os.Signal) {
	t.Helper()
	log := make(messages, 100)
	k, err := newPolicyKeeper(policyKeeperOptions{
		Path: path, Logger: slog.New(log), Registry: prometheus.NewRegistry(),
		OnSignal: func(_ context.Context, reload func()) { reload() },
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	hup, done := make(chan os.Signal), make(chan struct{})
	go func() {
		defer close(done)
		if err := k.Run(ctx, hup); err != nil {
			t.Error(err)
		}
	}()
	t.Cleanup(func() {
		cancel()
		<-done
	})
	return k, log, hup
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
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
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
