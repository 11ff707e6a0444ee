package engine

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/runtime/runtimetest/check"
)

// outcome notes how a test would have ended.
type outcome struct {
	testing.TB
	failed, skipped bool
}

func (*outcome) Helper()                 {}
func (o *outcome) Fatalf(string, ...any) { o.failed = true }
func (o *outcome) Skipf(string, ...any)  { o.skipped = !o.failed } // Fatalf returns, here

func TestLacking(t *testing.T) {
	for _, tt := range []struct {
		require string
		fails   bool
	}{{"", false}, {"docker", true}, {"containerd", false}, {"containerd,docker", true}, {"dockers", false}} {
		t.Setenv("BERM_REQUIRE", tt.require)
		o := &outcome{TB: t}
		Lacking(o, "docker", errors.New("none"))
		if o.failed != tt.fails || o.skipped == tt.fails {
			t.Errorf("BERM_REQUIRE=%q: failed %t, skipped %t", tt.require, o.failed, o.skipped)
		}
	}
}

func TestCheckUnknownKind(t *testing.T) {
	if err := Check("nothing"); !errdefs.IsInvalidArgument(err) {
		t.Errorf("Check of an unknown kind: %v", err)
	}
}

func TestCheckPlugins(t *testing.T) {
	saved := pluginDirs
	t.Cleanup(func() { pluginDirs = saved })
	pluginDirs = []string{t.TempDir()}
	if err := findPlugins(); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("without plug-ins: %v", err)
	}
	if err := Check("containerd"); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("Check without plug-ins: %v", err)
	}
	if missing := missingPackages("containerd"); !slices.Contains(missing, "containernetworking-plugins") {
		t.Errorf("missing packages: %v", missing)
	}
	if missing := missingPackages("docker"); slices.Contains(missing, "containernetworking-plugins") {
		t.Errorf("missing packages for Docker: %v", missing)
	}
	for _, name := range []string{"bridge", "host-local", "loopback", "portmap"} {
		must(t, os.WriteFile(filepath.Join(pluginDirs[0], name), nil, 0o755))
	}
	if err := findPlugins(); err != nil {
		t.Errorf("with all plug-ins: %v", err)
	}
}

var must = check.Must // ends a test if a step of its own fails
