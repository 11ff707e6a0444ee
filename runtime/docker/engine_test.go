package docker

import (
	"context"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/runtimetest"
	"github.com/bermhq/berm/runtime/runtimetest/engine"
)

const (
	testImage       = "berm.local/dockertest:latest"
	configuredImage = "berm.local/configured:latest"
)

// shared is the engine of all tests that don't need one of their own.
var shared struct {
	once sync.Once
	d    *engine.Docker
	err  error
}

func TestMain(m *testing.M) {
	code := m.Run()
	if shared.d != nil {
		if err := shared.d.Close(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	os.Exit(code)
}

func startEngine(ctx context.Context, opts engine.Options) (*engine.Docker, error) {
	d, err := engine.StartDocker(ctx, opts)
	if err != nil {
		return nil, err
	}
	if err := d.ImportBusybox(ctx, testImage); err != nil {
		_ = d.Close()
		return nil, err
	}
	return d, nil
}

// testEngine gives the shared engine, with the test image in it.
func testEngine(t testing.TB) *engine.Docker {
	t.Helper()
	engine.Require(t, "docker")
	shared.once.Do(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		shared.d, shared.err = startEngine(ctx, engine.Options{})
	})
	if shared.err != nil {
		engine.Lacking(t, "docker", shared.err)
	}
	return shared.d
}

func newRuntime(t testing.TB, host string) *Runtime {
	t.Helper()
	r, err := New(Options{Host: host})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = r.Close() })
	return r
}

// sandbox makes a container for one test.
func sandbox(t testing.TB, r *Runtime, change func(*runtime.Spec)) runtime.Container {
	t.Helper()
	spec := runtime.Spec{
		Name:    "berm-test-" + strings.ToLower(strings.NewReplacer("/", "-", "#", "-").Replace(t.Name())),
		Image:   testImage,
		Command: []string{"sleep", "100000"},
	}
	if change != nil {
		change(&spec)
	}
	c, err := r.Create(t.Context(), spec)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := r.Remove(context.Background(), c.ID); err != nil {
			t.Error(err)
		}
	})
	return c
}

func sh(t testing.TB, r *Runtime, id, script string) (stdout, stderr string, code int) {
	t.Helper()
	stdout, stderr, code, err := runtimetest.Output(t.Context(), r, id, "", "/bin/sh", "-c", script)
	if err != nil {
		t.Fatalf("%s: %v", script, err)
	}
	return stdout, stderr, code
}
