package containerd

import (
	"fmt"
	"testing"

	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/runtimetest"
	"github.com/bermhq/berm/runtime/runtimetest/check"
	"github.com/bermhq/berm/runtime/runtimetest/engine"
)

const testImage = "berm.local/containerdtest:latest"

var shared = engine.Shared[*engine.Containerd]{
	Kind: "containerd", Start: engine.StartContainerd, Options: engine.Options{Image: testImage},
}

func TestMain(m *testing.M) { shared.Main(m) }

// testOptions are those of every Runtime of an engine, so that each finds what another made.
func testOptions(t testing.TB, c *engine.Containerd) Options {
	t.Helper()
	agent, err := engine.BuildAgent(t.Context())
	must(t, err)
	return Options{
		Address:      c.Address(),
		Namespace:    c.Namespace(),
		Root:         c.Root(),
		Agent:        agent,
		CgroupParent: c.CgroupParent(),
		Netns:        c.Netns(),
	}
}

func newRuntime(t testing.TB, c *engine.Containerd) *Runtime {
	t.Helper()
	return newRuntimeWith(t, testOptions(t, c))
}

func newRuntimeWith(t testing.TB, opts Options) *Runtime {
	t.Helper()
	r, err := New(opts)
	must(t, err)
	t.Cleanup(func() { _ = r.Close() })
	return r
}

// requireClass ends a test that needs a runtime class whose program isn't here.
func requireClass(t testing.TB, class string) {
	t.Helper()
	if needs := runtimeClasses[class].needs; !installed(needs) {
		engine.Lacking(t, "containerd", fmt.Errorf("%s isn't installed", needs))
	}
}

// wantNothingLeft checks that nothing of any container is left after sweeps: what an
// engine that was killed kept isn't found before.
func wantNothingLeft(t *testing.T, c *engine.Containerd) {
	t.Helper()
	left, err := c.Settled(t.Context(), c.Root(), newRuntime(t, c).Sweep)
	if err != nil || len(left) > 0 {
		t.Errorf("left: %q, %v", left, err)
	}
}

// sandbox makes a container that sleeps.
func sandbox(t *testing.T, r *Runtime) string {
	t.Helper()
	return runtimetest.Sandbox(t, r, runtime.Spec{Image: testImage}).ID
}

var must = check.Must // ends a test if a step of its own fails
