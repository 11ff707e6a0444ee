package main

import (
	"path/filepath"
	"testing"

	"github.com/bermhq/berm/cmd/berm/config"
	"github.com/bermhq/berm/cmd/berm/serve"
	"github.com/bermhq/berm/policy"
)

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
	opts := policyOptions(cfg, serve.View{Root: true}, nil)
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
