package serve

import (
	"bytes"
	"errors"
	"log/slog"
	"net"
	"path/filepath"
	"strings"
	"testing"

	"github.com/bermhq/berm/cmd/berm/config"
	"github.com/bermhq/berm/lifecycle/mountpin"
	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/runtime/runtimetest/check"
)

func TestEngineView(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "engine.sock")
	cfg := config.Engine{Address: "unix://" + socket}
	outside := !InContainer()
	if got, want := EngineView(t.Context(), cfg), (View{Root: outside, Mounts: outside, pids: outside}); got != want {
		t.Errorf("an engine that is away: %+v, want %+v", got, want)
	}
	l := check.Value(net.Listen("unix", socket))(t)
	defer func() { _ = l.Close() }()
	if got, want := EngineView(t.Context(), cfg), (View{Root: true, Mounts: true, pids: true, Asked: true}); got != want {
		t.Errorf("an engine in this very process: %+v, want %+v", got, want)
	}
	if got := EngineView(t.Context(), config.Engine{Address: "tcp://192.0.2.1:2376"}); got.Mounts {
		t.Error("an engine elsewhere is said to see our mounts")
	}
}

func TestEngineSocket(t *testing.T) {
	t.Setenv("DOCKER_HOST", "unix:///from/env.sock")
	for address, want := range map[string]string{
		"unix:///a.sock": "/a.sock", "tcp://127.0.0.1:1": "", "": "/from/env.sock",
	} {
		if got := EngineSocket(config.Engine{Address: address}); got != want {
			t.Errorf("%q has the socket %q, want %q", address, got, want)
		}
	}
	t.Setenv("DOCKER_HOST", "")
	if got := EngineSocket(config.Engine{}); got != "/var/run/docker.sock" {
		t.Errorf("by default it is %q", got)
	}
	t.Setenv("CONTAINERD_ADDRESS", "/from/env.sock")
	for address, want := range map[string]string{"unix:///a.sock": "/a.sock", "/a.sock": "/a.sock", "": "/from/env.sock"} {
		if got := EngineSocket(config.Engine{Kind: "containerd", Address: address}); got != want {
			t.Errorf("containerd at %q has the socket %q, want %q", address, got, want)
		}
	}
	t.Setenv("CONTAINERD_ADDRESS", "")
	if got := EngineSocket(config.Engine{Kind: "containerd"}); got != "/run/containerd/containerd.sock" {
		t.Errorf("containerd's by default is %q", got)
	}
}

// Containerd is of use only to those who see its files and mounts as it does.
func TestEngineSuits(t *testing.T) {
	for _, tt := range []struct {
		kind string
		view View
		ok   bool
	}{
		{"containerd", View{Root: true, Mounts: true, Asked: true}, true},
		{"containerd", View{Root: true, Asked: true}, false},
		{"containerd", View{Asked: true}, false},
		{"containerd", View{}, true}, // it may turn out well
		{"docker", View{Asked: true}, true},
	} {
		if err := tt.view.Suits(tt.kind); (err == nil) != tt.ok {
			t.Errorf("%s, %+v: %v", tt.kind, tt.view, err)
		}
	}
}

// TestCheckAgent checks that the agent is put where the engine sees it, or that the log says
// why it can't be: then the engine keeps a copy.
func TestCheckAgent(t *testing.T) {
	dir := t.TempDir()
	local := config.Engine{Kind: "docker", Address: "unix:///nonexistent"}
	remote := local
	remote.Address = "tcp://192.0.2.1:2376"
	told := func(cfg config.Engine) config.Engine {
		cfg.AgentDir = "/elsewhere"
		return cfg
	}
	for name, tt := range map[string]struct {
		cfg  config.Engine
		view View
		off  string // empty: it can be
	}{
		"same root":           {local, View{Root: true}, ""},
		"another root":        {local, View{Asked: true}, "doesn't share Berm's file system"},
		"another root, told":  {told(local), View{Asked: true}, ""},
		"another machine":     {remote, View{Root: true, Asked: true}, "may be on another machine"},
		"no machine but ours": {told(remote), View{Root: true, Asked: true}, ""},
	} {
		state := filepath.Join(dir, name)
		program, err := CheckAgent(tt.cfg, state, tt.view)
		if tt.off != "" {
			if err == nil || !strings.Contains(err.Error(), tt.off) || !strings.Contains(err.Error(), filepath.Join(state, "agents")) {
				t.Errorf("%s: %v", name, err)
			}
			continue
		}
		if want, wantErr := builtinAgent(); !bytes.Equal(program, want) || !errors.Is(err, wantErr) {
			t.Errorf("%s: %d bytes, %v", name, len(program), err)
		}
	}
	none := config.Engine{Kind: "docker", AgentDir: config.AgentNone}
	backend := check.Value(OpenRuntime(none, dir, nil))(t)
	var log bytes.Buffer
	inside, err := WithAgent(backend, none, dir, View{Root: true}, slog.New(slog.NewTextHandler(&log, nil)))
	if err != nil || !strings.Contains(log.String(), "agent_off") {
		t.Fatalf("turned off: %v, %s", err, &log)
	}
	if err := inside.Close(); err != nil {
		t.Error(err)
	}
}

func TestHoldRequired(t *testing.T) {
	p := check.Value(policy.Parse([]byte("version: 1\nmounts: {allowed_roots: ["+t.TempDir()+"]}\n"), policy.Options{}))(t)
	for _, v := range []View{{Root: true}, {Root: true, Mounts: true}} {
		holder, why := NewHolder(t.TempDir(), v, NewTrusted(t.TempDir(), nil, nil))
		if why == nil || holder.Mode() != mountpin.ModeTrusted {
			t.Fatalf("%+v: %s, %v", v, holder.Mode(), why)
		}
		if err := CheckPolicy(config.Default(), why)(p); err == nil || !strings.Contains(err.Error(), why.Error()) || !strings.Contains(err.Error(), HoldRemedy) {
			t.Errorf("a policy that demands holding: %v", err)
		}
	}
	if err := CheckPolicy(config.Default(), nil)(p); err != nil {
		t.Errorf("where mounts can be held: %v", err)
	}
	auto := check.Value(policy.Parse(nil, policy.Options{}))(t)
	if err := CheckPolicy(config.Default(), errors.New("why"))(auto); err != nil {
		t.Errorf("a policy that doesn't: %v", err)
	}
}

var (
	must  = check.Must // ends a test if a step of its own fails
	write = check.Write
)
