package serve

import (
	"net"
	"path/filepath"
	"strings"
	"testing"

	"github.com/bermhq/berm/cmd/berm/config"
	"github.com/bermhq/berm/runtime/runtimetest/check"
)

// Where it can't or needn't be entered, nothing is run; that it is entered where it
// should be, the stack on containerd shows.
func TestEnterEngine(t *testing.T) {
	t.Parallel()
	socket := filepath.Join(t.TempDir(), "engine.sock")
	tests := map[string]struct {
		cfg  config.Engine
		want string // in the error; empty: there is none
	}{
		"elsewhere": {config.Engine{Kind: "docker", Address: "tcp://127.0.0.1:1"}, "no unix socket"},
		"nobody":    {config.Engine{Kind: "containerd", Address: socket + "x"}, "no such file"},
		"here":      {config.Engine{Kind: "containerd", Address: socket}, ""},
	}
	l := check.Value(net.Listen("unix", socket))(t)
	t.Cleanup(func() { _ = l.Close() })
	for name, tt := range tests {
		done, err := EnterEngine(t.Context(), tt.cfg)
		if done || (err == nil) != (tt.want == "") || err != nil && !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: done %v, %v, want %q", name, done, err, tt.want)
		}
	}
}
