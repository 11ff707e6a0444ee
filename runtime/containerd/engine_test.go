package containerd

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/runtimetest"
	"github.com/bermhq/berm/runtime/runtimetest/engine"
)

const testImage = "berm.local/containerdtest:latest"

// shared is the engine of all tests that don't need one of their own.
var shared struct {
	once sync.Once
	c    *engine.Containerd
	err  error
}

func TestMain(m *testing.M) {
	code := m.Run()
	if shared.c != nil {
		if err := shared.c.Close(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	os.Exit(code)
}

func startEngine(ctx context.Context, opts engine.Options) (*engine.Containerd, error) {
	c, err := engine.StartContainerd(ctx, opts)
	if err != nil {
		return nil, err
	}
	if err := c.ImportBusybox(ctx, testImage); err != nil {
		_ = c.Close()
		return nil, err
	}
	return c, nil
}

// testEngine gives the shared engine, with the test image in it.
func testEngine(t testing.TB) *engine.Containerd {
	t.Helper()
	engine.Require(t, "containerd")
	shared.once.Do(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		shared.c, shared.err = startEngine(ctx, engine.Options{})
	})
	if shared.err != nil {
		engine.Lacking(t, "containerd", shared.err)
	}
	return shared.c
}

// testOptions are those of every Runtime of an engine, so that each finds what another made.
func testOptions(t testing.TB, c *engine.Containerd) Options {
	t.Helper()
	agent, err := engine.BuildAgent(t.Context())
	if err != nil {
		t.Fatal(err)
	}
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
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = r.Close() })
	return r
}

// startRegistry starts a registry where this process, which pulls, reaches it.
func startRegistry(t testing.TB, opts engine.RegistryOptions) *engine.Registry {
	t.Helper()
	shop, err := engine.StartRegistry(t.Context(), opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := shop.Close(); err != nil {
			t.Error(err)
		}
	})
	return shop
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

// sandbox makes a container that sleeps, on an engine.
func sandbox(t *testing.T, r *Runtime) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	c, err := r.Create(ctx, runtime.Spec{
		Name: "exec-" + strings.ToLower(strings.NewReplacer("/", "-", " ", "-").Replace(t.Name())), Image: testImage,
		Command: []string{"sleep", "100000"},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if err := r.Remove(ctx, c.ID); err != nil {
			t.Error(err)
		}
	})
	for !slices.Contains(inside(t, c.ID), "sleep 100000") && ctx.Err() == nil { // the init process forks first, and executes it in a moment
		time.Sleep(time.Millisecond)
	}
	return c.ID
}

// shell runs a script to its end.
func shell(t *testing.T, r *Runtime, id, script string) (output string, code int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	out, _, code, err := runtimetest.Output(ctx, r, id, "", "/bin/sh", "-c", script)
	if err != nil {
		t.Fatalf("%s: %v", script, err)
	}
	return out, code
}

// inside lists the commands of the processes in a container, as the host sees them.
func inside(t *testing.T, id string) []string {
	t.Helper()
	all, err := processes()
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for pid, p := range all {
		cgroups, err := readLimited(fmt.Sprintf("/proc/%d/cgroup", pid), 64<<10)
		if err != nil || !strings.Contains(string(cgroups), id) || p.over() {
			continue
		}
		line, err := readLimited(fmt.Sprintf("/proc/%d/cmdline", pid), 1<<10)
		if err == nil {
			out = append(out, strings.Trim(strings.ReplaceAll(string(line), "\x00", " "), " "))
		}
	}
	slices.Sort(out)
	return out
}
