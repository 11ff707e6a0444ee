package serve

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/bermhq/berm/cmd/berm/config"
	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/runtime/runtimetest/check"
)

func TestLoadSigningKey(t *testing.T) {
	key := strings.Repeat("k", 32)
	file := func(content string) string {
		name := filepath.Join(t.TempDir(), "key")
		must(t, os.WriteFile(name, []byte(content), 0o600))
		return name
	}
	for name, tt := range map[string]struct {
		cfg  config.Security
		want string
		ok   bool
	}{
		"none":       {config.Security{}, "", true},
		"value":      {config.Security{SigningKey: key}, key, true},
		"file":       {config.Security{SigningKeyFile: file("\n" + key + "\n")}, key, true},
		"short":      {config.Security{SigningKey: key[1:]}, "", false},
		"blanks":     {config.Security{SigningKey: strings.Repeat(" ", 32)}, "", false},
		"short file": {config.Security{SigningKeyFile: file(key[1:] + "\n")}, "", false},
		"empty file": {config.Security{SigningKeyFile: file("")}, "", false},
		"no file":    {config.Security{SigningKeyFile: "/nowhere/key"}, "", false},
	} {
		got, err := loadSigningKey(tt.cfg)
		if string(got) != tt.want || (err == nil) != tt.ok {
			t.Errorf("%s: got %q, %v", name, got, err)
		}
		if err != nil && strings.Contains(err.Error(), "kk") {
			t.Errorf("%s: the error tells the key: %v", name, err)
		}
	}
}

// Nothing of the server's own may be mounted into a sandbox by a caller: neither its
// state nor the directories that it gives to sandboxes itself, in which other
// tenants' chats lie, and what all of them run.
func TestOwnPathsAreRefused(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "conf", "berm.yaml")
	must(t, errors.Join(os.Mkdir(filepath.Dir(file), 0o700), os.WriteFile(file, nil, 0o600)))
	cfg := check.Value(config.Load(config.Options{File: file}))(t)
	cfg.StateDir, cfg.PolicyFile = filepath.Join(dir, "state"), filepath.Join(dir, "etc", "policy.yaml")
	cfg.Engine.Address, cfg.HTTP.Listen = "unix://"+filepath.Join(dir, "engine.sock"), "unix://"+filepath.Join(dir, "berm.sock")
	cfg.Security.TokenFile = filepath.Join(dir, "tokens")
	cfg.Sandbox.ChatsRoot, cfg.Sandbox.DependenciesRoot, cfg.Sandbox.LambdaToolsRoot = filepath.Join(dir, "chats"), filepath.Join(dir, "deps"), filepath.Join(dir, "tools")
	cfg.EngineAPI.SpoolDir = filepath.Join(dir, "spool")
	opts := policyOptions(cfg, View{Root: true}, Self{})
	opts.Resolve = func(path string) (string, error) { return path, nil } // all of it is there
	p := check.Value(policy.Parse([]byte("version: 1\nmounts: {allowed_roots: ["+dir+"]}\n"), opts))(t)
	for name, allowed := range map[string]bool{
		"work": true, "": false, "state": false, "state/hold": false, "etc": false, "conf": false, "engine.sock": false, "berm.sock": false, "tokens": false, "spool": false,
		"chats": false, "chats/.tenants/other/key": false, "deps": false, "tools/bin": false,
	} {
		path := filepath.Join(dir, name)
		if v := p.Sandbox(policy.Request{HostPath: &path}); v.Allowed() != allowed {
			t.Errorf("%s: allowed is %v, want %v: %v", path, v.Allowed(), allowed, v.Err())
		}
	}
}
