package serve

import (
	"context"
	"io"
	"path/filepath"
	"testing"

	"github.com/bermhq/berm/cmd/berm/config"
)

// What the operator sets for sandboxes gets where it is heeded.
func TestSettings(t *testing.T) {
	s := config.Default().Sandbox
	s.MaxSandboxes, s.MaxCommands, s.MaxProcesses = 2, 3, 5
	got := settings(s, nil)
	if got.MaxSandboxes != 2 || got.MaxCommands != 3 || got.MaxProcesses != 5 {
		t.Errorf("got %+v", got)
	}
}

// A server that is cancelled while it starts ends without an error.
func TestServeIsCancelled(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	dir := t.TempDir()
	cfg := config.Default()
	cfg.StateDir, cfg.HTTP.Listen, cfg.Engine.Address = filepath.Join(dir, "state"), "127.0.0.1:0", "unix://"+filepath.Join(dir, "no-engine.sock")
	if err := runServer(ctx, cfg, nil, io.Discard); err != nil {
		t.Error(err)
	}
}
