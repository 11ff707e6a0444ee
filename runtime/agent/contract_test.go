package agent_test

import (
	"context"
	"errors"
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/volume"
	"github.com/docker/docker/client"

	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/agent"
	"github.com/bermhq/berm/runtime/containerd"
	"github.com/bermhq/berm/runtime/docker"
	"github.com/bermhq/berm/runtime/runtimetest"
	"github.com/bermhq/berm/runtime/runtimetest/check"
	"github.com/bermhq/berm/runtime/runtimetest/engine"
)

const (
	testImage       = "berm.local/agenttest:latest"
	configuredImage = "berm.local/configured:latest"
)

func TestMain(m *testing.M) {
	flag.Parse()
	if err := flag.Set("test.parallel", "4"); err != nil { // many cases wait
		panic(err)
	}
	os.Exit(m.Run())
}

// importer is what a private engine has for images.
type importer interface {
	ImportBusybox(ctx context.Context, name string, changes ...string) error
}

// prepare gives a harness that lacks what is the engine's own.
func prepare(t *testing.T, e importer, registry engine.RegistryOptions) runtimetest.Harness {
	t.Helper()
	must(t, e.ImportBusybox(t.Context(), testImage))
	must(t, e.ImportBusybox(t.Context(), configuredImage, runtimetest.ConfiguredChanges()...))
	shop, err := engine.StartRegistry(t.Context(), registry)
	must(t, err)
	t.Cleanup(func() {
		must(t, shop.Close())
	})
	must(t, shop.Push(t.Context(), "contract:latest"))
	program, err := engine.PutAgent(t.Context(), t.TempDir())
	must(t, err)
	return runtimetest.Harness{
		Image: testImage, Configured: configuredImage, Agent: program, Real: true,
		Registry: shop.Host(),
	}
}

// wrap makes a Runtime with a root of its own, or one that is given.
func wrap(t testing.TB, backend agent.Engine, program, root string) *agent.Runtime {
	t.Helper()
	if root == "" {
		root = filepath.Join(t.TempDir(), "agents")
	}
	r, err := agent.New(agent.Options{Engine: backend, Program: program, Root: root})
	must(t, err)
	t.Cleanup(func() { _ = r.Close() })
	return r
}

// freeze makes an engine hear nothing until resume is called.
func freeze(t *testing.T, pid int) (resume func()) {
	t.Helper()
	thaw, err := engine.Freeze(pid)
	if err != nil {
		t.Fatal(errors.Join(err, thaw()))
	}
	return func() {
		must(t, thaw())
	}
}

func TestDockerContract(t *testing.T) {
	engine.Require(t, "docker")
	d, err := engine.StartDocker(t.Context(), engine.Options{})
	if err != nil {
		engine.Lacking(t, "docker", err)
	}
	closeAfter(t, d.Close)
	h := prepare(t, d, engine.RegistryOptions{Netns: d.Netns()})
	newBackend := func(t testing.TB, timeout time.Duration) *docker.Runtime {
		backend, err := docker.New(docker.Options{Host: d.Host(), CallTimeout: timeout})
		must(t, err)
		return backend
	}
	open := func(t testing.TB, root string, timeout time.Duration) *agent.Runtime {
		return wrap(t, newBackend(t, timeout), h.Agent, root)
	}
	backend := newBackend(t, 0)
	t.Cleanup(func() { _ = backend.Close() })
	h.Starter, h.Collector = backend, backend
	h.MakeVolume = func(t *testing.T, name string, labels map[string]string, used bool) {
		makeVolume(t, d.Host(), name, labels, used)
	}
	h.New = func(t *testing.T) runtime.AgentRuntime { return open(t, "", 0) }
	h.Reopen = func(t *testing.T, dir string) runtime.AgentRuntime { return open(t, filepath.Join(dir, "agents"), 0) }
	h.Engine, h.Outside = d, d.Outside()
	h.Hang = func(t *testing.T) (runtime.AgentRuntime, func()) { return open(t, "", time.Second), freeze(t, d.Pid()) }
	runtimetest.Run(t, h)
}

// makeVolume makes a volume, and if it is to be used a container that has it.
func makeVolume(t *testing.T, host, name string, labels map[string]string, used bool) {
	t.Helper()
	c, err := client.NewClientWithOpts(client.WithHost(host), client.WithAPIVersionNegotiation())
	must(t, err)
	defer func() { _ = c.Close() }()
	if _, err := c.VolumeCreate(t.Context(), volume.CreateOptions{Name: name, Labels: labels}); err != nil {
		t.Fatal(err)
	}
	if !used {
		return
	}
	_, err = c.ContainerCreate(t.Context(), &container.Config{Image: testImage, Labels: labels, Cmd: []string{"true"}},
		&container.HostConfig{Binds: []string{name + ":/v"}}, nil, nil, name)
	must(t, err)
}

func TestContainerdContract(t *testing.T) { testContainerd(t, "", false) }

// TestUserNSContract runs the contract with user namespaces, if the engine has them.
func TestUserNSContract(t *testing.T) { testContainerd(t, "", true) }

// TestSoakContractCrun runs the cases in which an OCI runtime has a part with crun.
func TestSoakContractCrun(t *testing.T) {
	if _, err := exec.LookPath("crun"); err != nil {
		engine.Lacking(t, "containerd", err)
	}
	testContainerd(t, "crun", false, "create/", "exec/", "start/", "list", "pause", "remove", "stats", "watch/", "client restart", "engine killed")
}

func testContainerd(t *testing.T, class string, userNS bool, only ...string) {
	engine.Require(t, "containerd")
	c, err := engine.StartContainerd(t.Context(), engine.Options{})
	if err != nil {
		engine.Lacking(t, "containerd", err)
	}
	closeAfter(t, c.Close)
	h := prepare(t, c, engine.RegistryOptions{})
	program, err := os.ReadFile(h.Agent)
	must(t, err)
	newBackend := func(t testing.TB, timeout time.Duration) *containerd.Runtime {
		backend, err := containerd.New(containerd.Options{
			Address: c.Address(), Namespace: c.Namespace(), Root: c.Root(), Agent: program,
			CgroupParent: c.CgroupParent(), Netns: c.Netns(), CallTimeout: timeout,
		})
		must(t, err)
		return backend
	}
	open := func(t testing.TB, root string, timeout time.Duration) *agent.Runtime {
		return wrap(t, newBackend(t, timeout), h.Agent, root)
	}
	h.Class, h.Only = class, only
	backend := newBackend(t, 0)
	t.Cleanup(func() { _ = backend.Close() })
	h.Starter = backend
	if h.UserNS = userNS; userNS {
		engine.RequireUserNS(t, newBackend(t, 0))
	}
	h.New = func(t *testing.T) runtime.AgentRuntime { return open(t, "", 0) }
	h.Reopen = func(t *testing.T, dir string) runtime.AgentRuntime { return open(t, filepath.Join(dir, "agents"), 0) }
	h.Engine, h.LocalNetworks, h.Outside, h.Terminals = c, true, c.Outside(), 64
	h.Hang = func(t *testing.T) (runtime.AgentRuntime, func()) { return open(t, "", time.Second), freeze(t, c.Pid()) }
	runtimetest.Run(t, h)
	left, err := c.Settled(t.Context(), c.Root(), open(t, "", 0).Sweep)
	if err != nil || len(left) > 0 {
		t.Errorf("left: %q, %v", left, err)
	}
}

// closeAfter closes an engine when all that uses it is closed.
func closeAfter(t *testing.T, f func() error) {
	t.Cleanup(func() {
		must(t, f())
	})
}

var must = check.Must // ends a test if a step of its own fails
