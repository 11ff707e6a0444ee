package docker

import (
	"testing"

	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/runtimetest"
	"github.com/bermhq/berm/runtime/runtimetest/check"
	"github.com/bermhq/berm/runtime/runtimetest/engine"
)

const testImage = "berm.local/dockertest:latest"

var shared = engine.Shared[*engine.Docker]{Kind: "docker", Start: engine.StartDocker, Options: engine.Options{Image: testImage}}

func TestMain(m *testing.M) { shared.Main(m) }

func newRuntime(t testing.TB, host string) *Runtime {
	t.Helper()
	return newRuntimeWith(t, Options{Host: host})
}

func newRuntimeWith(t testing.TB, opts Options) *Runtime {
	t.Helper()
	r, err := New(opts)
	must(t, err)
	t.Cleanup(func() { _ = r.Close() })
	return r
}

// connected returns a Runtime on the shared engine, and its session.
func connected(t *testing.T) (*Runtime, *session) {
	t.Helper()
	r := newRuntime(t, shared.Get(t).Host())
	s, err := r.connect(t.Context())
	must(t, err)
	return r, s
}

// sandbox makes a container for one test.
func sandbox(t testing.TB, r *Runtime, change func(*runtime.Spec)) runtime.Container {
	t.Helper()
	spec := runtime.Spec{Image: testImage}
	if change != nil {
		change(&spec)
	}
	return runtimetest.Sandbox(t, r, spec)
}

var must = check.Must // ends a test if a step of its own fails
