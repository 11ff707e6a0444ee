package main

import (
	"errors"
	"net"
	"path/filepath"
	"strings"
	"testing"

	"github.com/bermhq/berm/cmd/berm/config"
	"github.com/bermhq/berm/lifecycle/hold"
	"github.com/bermhq/berm/policy"
)

func TestEngineView(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "engine.sock")
	cfg := config.Engine{Address: "unix://" + socket}
	outside := !inContainer()
	if got, want := engineView(t.Context(), cfg), (view{root: outside, mounts: outside}); got != want {
		t.Errorf("an engine that is away: %+v, want %+v", got, want)
	}
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	if got, want := engineView(t.Context(), cfg), (view{root: true, mounts: true}); got != want {
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
	opts := policyOptions(cfg, view{root: true})
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
	holder, why := newHolder(t.TempDir(), view{root: true}, nil)
	if why == nil || holder.Mode() != hold.ModeVerified {
		t.Fatalf("without the engine's mounts: %s, %v", holder.Mode(), why)
	}
	if err := holdable(holder, why)(p); err == nil || !strings.Contains(err.Error(), why.Error()) {
		t.Errorf("a policy that demands holding: %v", err)
	}
	if err := holdable(&hold.Pinner{}, nil)(p); err != nil {
		t.Errorf("where mounts can be held: %v", err)
	}
	auto, err := policy.Parse(nil, policy.Options{})
	if err != nil {
		t.Fatal(err)
	}
	if err := holdable(hold.Verifier{}, errors.New("why"))(auto); err != nil {
		t.Errorf("a policy that doesn't: %v", err)
	}
}
