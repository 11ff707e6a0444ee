package containerd

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/runtimetest"
	"github.com/bermhq/berm/runtime/runtimetest/engine"
)

const (
	testImage       = "berm.local/containerdtest:latest"
	configuredImage = "berm.local/configured:latest"
)

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

func TestContract(t *testing.T) { testContract(t, "", false) }

// TestUserNSContract runs the contract with user namespaces, if the engine has them.
func TestUserNSContract(t *testing.T) {
	engine.RequireUserNS(t, newRuntime(t, testEngine(t)))
	testContract(t, "", true)
}

// TestSoakContractCrun runs what of the contract an OCI runtime has a part in with crun.
func TestSoakContractCrun(t *testing.T) {
	testContract(t, "crun", false, "create/", "exec/", "list", "pause", "remove", "stats", "watch/", "client restart", "engine killed")
}

func testContract(t *testing.T, class string, userNS bool, only ...string) {
	c := testEngine(t)
	requireClass(t, class)
	shop := startRegistry(t, engine.RegistryOptions{})
	if err := shop.Push(t.Context(), "contract:latest"); err != nil {
		t.Fatal(err)
	}
	if err := c.ImportBusybox(t.Context(), configuredImage, runtimetest.ConfiguredChanges()...); err != nil {
		t.Fatal(err)
	}
	agent, err := engine.PutAgent(t.Context(), t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	runtimetest.Run(t, runtimetest.Harness{
		New:           func(t *testing.T) runtime.Runtime { return newRuntime(t, c) },
		Image:         testImage,
		Configured:    configuredImage,
		Agent:         agent,
		Class:         class,
		UserNS:        userNS,
		Only:          only,
		DeepMounts:    runtimeClasses[class].deep || userNS,
		Real:          true,
		Engine:        c,
		Registry:      shop.Host(),
		LocalNetworks: true,
		Terminals:     maxTerminals,
		Outside:       c.Outside(),
		Hang: func(t *testing.T) (runtime.Runtime, func()) {
			opts := testOptions(t, c)
			opts.CallTimeout = time.Second
			impatient := newRuntimeWith(t, opts)
			thaw, err := engine.Freeze(c.Pid())
			if err != nil {
				t.Fatal(errors.Join(err, thaw()))
			}
			return impatient, func() {
				if err := thaw(); err != nil {
					t.Error(err)
				}
			}
		},
	})
	wantNothingLeft(t, c)
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
