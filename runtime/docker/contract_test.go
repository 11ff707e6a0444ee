package docker

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/volume"
	"github.com/docker/docker/client"

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

// makeVolume makes a volume, and if it is to be used a container that has it.
func makeVolume(t *testing.T, host, name string, labels map[string]string, used bool) {
	t.Helper()
	c, err := client.NewClientWithOpts(client.WithHost(host), client.WithAPIVersionNegotiation())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	if _, err := c.VolumeCreate(t.Context(), volume.CreateOptions{Name: name, Labels: labels}); err != nil {
		t.Fatal(err)
	}
	if !used {
		return
	}
	_, err = c.ContainerCreate(t.Context(), &container.Config{Image: testImage, Labels: labels, Cmd: []string{"true"}},
		&container.HostConfig{Binds: []string{name + ":/v"}}, nil, nil, name)
	if err != nil {
		t.Fatal(err)
	}
}

func TestContract(t *testing.T) {
	d := testEngine(t)
	shop, err := engine.StartRegistry(t.Context(), engine.RegistryOptions{Netns: d.Netns()}) // where the engine reaches it
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := shop.Close(); err != nil {
			t.Error(err)
		}
	})
	if err := shop.Push(t.Context(), "contract:latest"); err != nil {
		t.Fatal(err)
	}
	if err := d.ImportBusybox(t.Context(), configuredImage, runtimetest.ConfiguredChanges()...); err != nil {
		t.Fatal(err)
	}
	agent, err := engine.PutAgent(t.Context(), t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	runtimetest.Run(t, runtimetest.Harness{
		New:        func(t *testing.T) runtime.Runtime { return newRuntime(t, d.Host()) },
		Image:      testImage,
		Configured: configuredImage,
		Agent:      agent,
		Real:       true,
		Engine:     d,
		Registry:   shop.Host(),
		Outside:    d.Outside(),
		MakeVolume: func(t *testing.T, name string, labels map[string]string, used bool) {
			makeVolume(t, d.Host(), name, labels, used)
		},
		Hang: func(t *testing.T) (runtime.Runtime, func()) {
			impatient, err := New(Options{Host: d.Host(), CallTimeout: time.Second})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = impatient.Close() })
			thaw, err := engine.Freeze(d.Pid())
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
}
