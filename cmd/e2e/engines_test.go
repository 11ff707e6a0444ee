package e2e

import (
	"context"
	"os"
	"testing"
	"time"

	"github.com/bermhq/berm/cmd/berm/config"
	"github.com/bermhq/berm/cmd/berm/serve"
	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/runtimetest/engine"
)

const testImage = "berm.local/busybox:latest"

// daemon is a private engine of any kind.
type daemon interface {
	Pid() int
	Netns() string
	Kill()
	Start(ctx context.Context) error
	Close() error
	ImportBusybox(ctx context.Context, ref string, changes ...string) error
}

// testEngine is a private engine with an image of busybox.
type testEngine struct {
	daemon
	config config.Engine // leads to it
	env    []string      // has the engine's own clients, and the demo, find it

	containerd *engine.Containerd // nil of another kind
}

// onEachEngine runs a test on an engine of each kind.
func onEachEngine(t *testing.T, test func(t *testing.T, kind string)) {
	for _, kind := range []string{"docker", "containerd"} {
		t.Run(kind, func(t *testing.T) { test(t, kind) })
	}
}

func startEngine(t testing.TB, kind string) *testEngine {
	t.Helper()
	return startEngineWith(t, kind, engine.Options{})
}

func startEngineWith(t testing.TB, kind string, opts engine.Options) *testEngine {
	t.Helper()
	engine.Require(t, kind)
	e := &testEngine{config: config.Engine{Kind: kind, CallTimeout: 30 * time.Second}}
	var err error
	if e.config.AgentFile, err = engine.PutAgent(t.Context(), t.TempDir()); err != nil {
		t.Fatal(err)
	}
	if kind == "docker" {
		err = e.startDocker(t, opts)
	} else {
		err = e.startContainerd(t, opts)
	}
	if err != nil {
		engine.Lacking(t, kind, err)
	}
	t.Cleanup(func() {
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	})
	if err := e.ImportBusybox(t.Context(), testImage); err != nil {
		t.Fatal(err)
	}
	return e
}

func (e *testEngine) startDocker(t testing.TB, opts engine.Options) error {
	d, err := engine.StartDocker(t.Context(), opts)
	if err != nil {
		return err
	}
	e.daemon, e.config.Address = d, d.Host()
	e.env = []string{"DOCKER_HOST=" + d.Host(), "BERM_ENGINE_AGENT_FILE=" + e.config.AgentFile}
	return nil
}

func (e *testEngine) startContainerd(t testing.TB, opts engine.Options) error {
	d, err := engine.StartContainerd(t.Context(), opts)
	if err != nil {
		return err
	}
	e.daemon, e.containerd = d, d
	e.config.Address, e.config.Namespace = d.Address(), d.Namespace()
	e.config.CgroupParent, e.config.Netns = d.CgroupParent(), d.Netns()
	e.env = append(engineEnv(e.config), "CONTAINERD_ADDRESS="+d.Address())
	return nil
}

// dir makes a directory for a server's files. Whatever stays mounted below it, should a
// test fail, goes with the engine.
func (e *testEngine) dir(t testing.TB) string {
	t.Helper()
	if e.containerd == nil {
		return t.TempDir()
	}
	dir, err := os.MkdirTemp(e.containerd.Root(), "")
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

// open makes a client of the engine that sees what a server's does.
func (e *testEngine) open(t testing.TB, server *demoServer) runtime.Runtime {
	t.Helper()
	cfg := e.config
	cfg.CallTimeout = time.Minute
	rt, err := serve.OpenRuntime(cfg, server.stateDir(), nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { serve.CloseRuntime(rt) })
	return rt
}

// wantEmpty checks that no sandbox and no network of Berm is left on the engine, nor
// anything else that stopped servers, of which there may be none, made there.
func wantEmpty(t *testing.T, e *testEngine, servers ...*demoServer) {
	t.Helper()
	if len(servers) == 0 {
		servers = []*demoServer{{dir: e.dir(t), opts: demoOptions{engine: e.config}}}
	}
	for _, server := range servers {
		rt := e.open(t, server)
		containers, err := rt.List(t.Context(), map[string]string{lifecycle.LabelOwner: ""})
		if err != nil || len(containers) > 0 {
			t.Errorf("containers are left: %v, %v", containers, err)
		}
		networks, err := rt.(runtime.Networker).Networks(t.Context(), map[string]string{lifecycle.LabelOwner: ""})
		if err != nil || len(networks) > 0 {
			t.Errorf("networks are left: %v, %v", networks, err)
		}
	}
	e.wantNoParts(t, servers)
}

// containersOf counts the server's containers on the engine.
func containersOf(t *testing.T, e *testEngine, server *demoServer) int {
	t.Helper()
	containers, err := e.open(t, server).List(t.Context(), map[string]string{lifecycle.LabelOwner: server.instance})
	if err != nil {
		t.Fatal(err)
	}
	return len(containers)
}

func wantEmptyDir(t *testing.T, dir string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) > 0 {
		t.Errorf("left in %s: %v, %v", dir, entries, err)
	}
}
