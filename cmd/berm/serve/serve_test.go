package serve

import (
	"context"
	"io"
	"path/filepath"
	"testing"

	"github.com/bermhq/berm/cmd/berm/config"
)

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
