package main

import (
	"bytes"
	"errors"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/bermhq/berm/cmd/berm/config"
	"github.com/bermhq/berm/lifecycle/mountpin"
	"github.com/bermhq/berm/policy"
)

func TestEngineView(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "engine.sock")
	cfg := config.Engine{Address: "unix://" + socket}
	outside := !inContainer()
	if got, want := engineView(t.Context(), cfg), (view{root: outside, mounts: outside, pids: outside}); got != want {
		t.Errorf("an engine that is away: %+v, want %+v", got, want)
	}
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	if got, want := engineView(t.Context(), cfg), (view{root: true, mounts: true, pids: true, asked: true}); got != want {
		t.Errorf("an engine in this very process: %+v, want %+v", got, want)
	}
	if got := engineView(t.Context(), config.Engine{Address: "tcp://192.0.2.1:2376"}); got.mounts {
		t.Error("an engine elsewhere is said to see our mounts")
	}
}

func TestEngineSocket(t *testing.T) {
	t.Setenv("DOCKER_HOST", "unix:///from/env.sock")
	for address, want := range map[string]string{
		"unix:///a.sock": "/a.sock", "tcp://127.0.0.1:1": "", "": "/from/env.sock",
	} {
		if got := engineSocket(config.Engine{Address: address}); got != want {
			t.Errorf("%q has the socket %q, want %q", address, got, want)
		}
	}
	t.Setenv("DOCKER_HOST", "")
	if got := engineSocket(config.Engine{}); got != "/var/run/docker.sock" {
		t.Errorf("by default it is %q", got)
	}
	t.Setenv("CONTAINERD_ADDRESS", "/from/env.sock")
	for address, want := range map[string]string{"unix:///a.sock": "/a.sock", "/a.sock": "/a.sock", "": "/from/env.sock"} {
		if got := engineSocket(config.Engine{Kind: "containerd", Address: address}); got != want {
			t.Errorf("containerd at %q has the socket %q, want %q", address, got, want)
		}
	}
	t.Setenv("CONTAINERD_ADDRESS", "")
	if got := engineSocket(config.Engine{Kind: "containerd"}); got != "/run/containerd/containerd.sock" {
		t.Errorf("containerd's by default is %q", got)
	}
}

// Containerd is of use only to those who see its files and mounts as it does.
func TestEngineSuits(t *testing.T) {
	for _, tt := range []struct {
		kind string
		view view
		ok   bool
	}{
		{"containerd", view{root: true, mounts: true, asked: true}, true},
		{"containerd", view{root: true, asked: true}, false},
		{"containerd", view{asked: true}, false},
		{"containerd", view{}, true}, // it may turn out well
		{"docker", view{asked: true}, true},
	} {
		if err := tt.view.suits(tt.kind); (err == nil) != tt.ok {
			t.Errorf("%s, %+v: %v", tt.kind, tt.view, err)
		}
	}
}

func TestAgentProgram(t *testing.T) {
	file := filepath.Join(t.TempDir(), "berm-agent")
	cfg := config.Engine{Kind: "containerd", AgentFile: file}
	if _, err := agentProgram(cfg); err == nil || !strings.Contains(err.Error(), "engine.agent_file") {
		t.Errorf("a missing program: %v", err)
	}
	write(t, file, "#!/bin/sh\n")
	if err := checkEngine(cfg, "/state"); err == nil || !strings.Contains(err.Error(), "is no program of Linux") {
		t.Errorf("a script: %v", err)
	}
	write(t, file, "\x7fELF and so on")
	if program, err := agentProgram(cfg); err != nil || string(program) != "\x7fELF and so on" {
		t.Errorf("a program: %q, %v", program, err)
	}
	cfg.RegistryAuthFile = file
	if err := checkEngine(cfg, "/state"); err == nil || !strings.Contains(err.Error(), "engine.registry_auth_file") {
		t.Errorf("credentials that can't be read: %v", err)
	}
}

// Where the agent can't be given to sandboxes, they go without, and the log says why.
func TestPutAgent(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "berm-agent")
	write(t, file, "\x7fELF and so on")
	local := config.Engine{Kind: "docker", Address: "unix:///nonexistent", AgentFile: file}
	remote := local
	remote.Address = "tcp://192.0.2.1:2376"
	told := func(cfg config.Engine) config.Engine {
		cfg.AgentDir = "/elsewhere"
		return cfg
	}
	for name, tt := range map[string]struct {
		cfg  config.Engine
		view view
		off  string // empty: it is put there
	}{
		"same root":           {local, view{root: true}, ""},
		"another root":        {local, view{asked: true}, "doesn't share Berm's file system"},
		"another root, told":  {told(local), view{asked: true}, ""},
		"another machine":     {remote, view{root: true, asked: true}, "may be on another machine"},
		"no machine but ours": {told(remote), view{root: true, asked: true}, ""},
	} {
		root := filepath.Join(dir, name, "agents")
		program, err := putAgent(tt.cfg, root, tt.view)
		if tt.off != "" {
			var off *agentOffError
			if !errors.As(err, &off) || !strings.Contains(err.Error(), tt.off) || !strings.Contains(err.Error(), root) {
				t.Errorf("%s: %v", name, err)
			}
			continue
		}
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if data, err := os.ReadFile(filepath.Join(root, program)); err != nil || string(data) != "\x7fELF and so on" {
			t.Errorf("%s: %q, %v", name, data, err)
		}
	}
	local.AgentFile = filepath.Join(dir, "missing")
	if _, err := putAgent(local, dir, view{root: true}); err == nil || !strings.Contains(err.Error(), "engine.agent_file") {
		t.Errorf("a program that was named and isn't there: %v", err)
	}
	none := config.Engine{Kind: "docker", AgentDir: config.AgentNone}
	var log bytes.Buffer
	rt, err := withAgent(nil, none, dir, view{root: true}, slog.New(slog.NewTextHandler(&log, nil)))
	if rt != nil || err != nil || !strings.Contains(log.String(), "agent_off") {
		t.Errorf("turned off: %v, %v, %s", rt, err, &log)
	}
}

// No setting may be forgotten on its way to the demo's server.
func TestEngineEnvIsComplete(t *testing.T) {
	text := strings.Join(engineEnv(config.Engine{}), "\n")
	for i := range reflect.TypeFor[config.Engine]().NumField() {
		name := "BERM_ENGINE_" + strings.ToUpper(reflect.TypeFor[config.Engine]().Field(i).Tag.Get("yaml"))
		if !strings.Contains(text, name+"=") && name != "BERM_ENGINE_INSTANCE" { // a demo has its own
			t.Errorf("%s isn't told", name)
		}
	}
}

// Nothing of the server's own may be mounted into a sandbox by a caller: neither its
// state nor the directories that it gives to sandboxes itself, in which other
// tenants' chats lie, and what all of them run.
func TestOwnPathsAreRefused(t *testing.T) {
	dir := t.TempDir()
	cfg := config.Default()
	cfg.StateDir, cfg.PolicyFile = filepath.Join(dir, "state"), filepath.Join(dir, "etc", "policy.yaml")
	cfg.Engine.Address, cfg.HTTP.Listen = "unix://"+filepath.Join(dir, "engine.sock"), "unix://"+filepath.Join(dir, "berm.sock")
	cfg.Security.TokenFile = filepath.Join(dir, "tokens")
	cfg.Sandbox.ChatsRoot, cfg.Sandbox.DependenciesRoot, cfg.Sandbox.LambdaToolsRoot = filepath.Join(dir, "chats"), filepath.Join(dir, "deps"), filepath.Join(dir, "tools")
	opts := policyOptions(cfg, view{root: true}, nil)
	opts.Resolve = func(path string) (string, error) { return path, nil } // all of it is there
	p, err := policy.Parse([]byte("version: 1\nmounts: {allowed_roots: ["+dir+"]}\n"), opts)
	if err != nil {
		t.Fatal(err)
	}
	for name, allowed := range map[string]bool{
		"work": true, "": false, "state": false, "state/hold": false, "etc": false, "engine.sock": false, "berm.sock": false, "tokens": false,
		"chats": false, "chats/.tenants/other/key": false, "deps": false, "tools/bin": false,
	} {
		path := filepath.Join(dir, name)
		if v := p.Sandbox(policy.Request{HostPath: &path}); v.Allowed() != allowed {
			t.Errorf("%s: allowed is %v, want %v: %v", path, v.Allowed(), allowed, v.Err())
		}
	}
}

func TestHoldRequired(t *testing.T) {
	p, err := policy.Parse([]byte("version: 1\nmounts: {allowed_roots: ["+t.TempDir()+"]}\n"), policy.Options{})
	if err != nil {
		t.Fatal(err)
	}
	for _, v := range []view{{root: true}, {root: true, mounts: true}} {
		holder, why := newHolder(t.TempDir(), v, newTrusted(t.TempDir(), nil, nil))
		if why == nil || holder.Mode() != mountpin.ModeTrusted {
			t.Fatalf("%+v: %s, %v", v, holder.Mode(), why)
		}
		if err := holdable(why)(p); err == nil || !strings.Contains(err.Error(), why.Error()) || !strings.Contains(err.Error(), holdRemedy) {
			t.Errorf("a policy that demands holding: %v", err)
		}
	}
	if err := holdable(nil)(p); err != nil {
		t.Errorf("where mounts can be held: %v", err)
	}
	auto, err := policy.Parse(nil, policy.Options{})
	if err != nil {
		t.Fatal(err)
	}
	if err := holdable(errors.New("why"))(auto); err != nil {
		t.Errorf("a policy that doesn't: %v", err)
	}
}
