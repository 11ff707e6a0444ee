package engine

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/runtime"
)

// programs are what private engines need, by kind.
var programs = map[string][]string{
	"docker":     {"dockerd", "containerd", "runc", "iptables", "ip"},
	"containerd": {"containerd", "ctr", "runc", "iptables", "ip"},
}

// pluginDirs are where CNI plug-ins are looked for.
var pluginDirs = []string{"/opt/cni/bin", "/usr/lib/cni", "/usr/libexec/cni"}

// Check reports whether this machine and this user can have a private engine of a
// kind ("docker", "containerd"), as far as that shows without starting one. The
// error is FailedPrecondition and says what is missing.
func Check(kind string) error {
	if programs[kind] == nil {
		return fmt.Errorf("no engine is called %q: %w", kind, errdefs.ErrInvalidArgument)
	}
	for _, name := range programs[kind] {
		if _, err := find(name); err != nil {
			return err
		}
	}
	if _, err := findBusybox(); err != nil {
		return err
	}
	if kind == "containerd" {
		if err := findPlugins(); err != nil {
			return err
		}
	}
	if os.Geteuid() != 0 {
		return fmt.Errorf("a private engine needs root: %w", errdefs.ErrFailedPrecondition)
	}
	return nil
}

// findPlugins looks for the CNI plug-ins that networks on containerd are made with.
func findPlugins() error {
	for _, name := range []string{"bridge", "host-local", "loopback", "portmap"} {
		if !slices.ContainsFunc(pluginDirs, func(dir string) bool {
			return unix.Access(filepath.Join(dir, name), unix.X_OK) == nil
		}) {
			return fmt.Errorf("the CNI plug-in %s isn't installed: %w", name, errdefs.ErrFailedPrecondition)
		}
	}
	return nil
}

// Require ends a test that needs an engine of a kind when none can be had: it is
// skipped, or fails if the variable BERM_REQUIRE, a list with commas, names the kind.
func Require(t testing.TB, kind string) {
	t.Helper()
	if err := Check(kind); err != nil {
		Lacking(t, kind, err)
	}
}

// Lacking ends a test like Require, for a reason found out otherwise, such as the
// error of StartDocker.
func Lacking(t testing.TB, kind string, err error) {
	t.Helper()
	if slices.Contains(strings.Split(os.Getenv("BERM_REQUIRE"), ","), kind) {
		t.Fatalf("no %s engine, and BERM_REQUIRE demands one: %v", kind, err)
	}
	t.Skipf("no %s engine: %v", kind, err)
}

// RequireUserNS skips a test if the engine is too old to give containers user namespaces. With
// a newer one it fails the test if that can't be done.
func RequireUserNS(t testing.TB, r interface {
	Survey(ctx context.Context) (runtime.Survey, error)
},
) {
	t.Helper()
	survey, err := r.Survey(t.Context())
	switch {
	case err != nil:
		t.Fatal(err)
	case survey.NoUserNS != "" && strings.HasPrefix(strings.TrimPrefix(survey.Info.Version, "v"), "1."):
		t.Skip(survey.NoUserNS)
	case survey.NoUserNS != "":
		t.Fatal(survey.NoUserNS)
	}
}
