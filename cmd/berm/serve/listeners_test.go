package serve

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"maps"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/bermhq/berm/cmd/berm/config"
	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/lifecycle/mountpin"
	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/proxy/engineapi"
	"github.com/bermhq/berm/runtime/runtimetest/check"
)

// TestOpenSocketsAreToldOf starts the sandbox API on unix sockets.
func TestOpenSocketsAreToldOf(t *testing.T) {
	tokens := check.Value(proxy.ParseTokens([]byte("a-token-for-tests-only")))(t)
	for name, tt := range map[string]struct {
		mode   string
		tokens *proxy.Tokens
		warns  bool
	}{
		"its user's": {"0600", nil, false}, "everybody's": {"0666", nil, true}, "to write to": {"0602", nil, true}, "with tokens": {"0666", tokens, false},
	} {
		cfg := config.Default()
		cfg.HTTP.Listen, cfg.HTTP.SocketMode = "unix://"+filepath.Join(t.TempDir(), "s"), tt.mode
		var log bytes.Buffer
		s := server{cfg: cfg, manager: &lifecycle.Service{}, policies: &policyKeeper{}, inputs: &Inputs{Tokens: tt.tokens}, tel: &telemetry{registry: prometheus.NewRegistry()}, log: slog.New(slog.NewTextHandler(&log, nil))}
		if _, err := s.listenAPI(t.Context()); err != nil {
			t.Fatal(err)
		}
		if warns := strings.Contains(log.String(), "sandbox_api_open"); warns != tt.warns {
			t.Errorf("%s: %s", name, log.String())
		}
		_ = s.undo.run()
	}
}

// fakeHolder is a holder of a mode.
type fakeHolder struct {
	lifecycle.Holder
	mode string
}

func (h fakeHolder) Mode() string { return h.mode }

// TestSocketsForContainers has each caller's socket serve as that caller, in mode enforce.
func TestSocketsForContainers(t *testing.T) {
	cfg := config.Default()
	cfg.StateDir = t.TempDir()
	cfg.EngineAPI.Listeners = []config.Listener{
		{Callers: []config.Caller{{Name: "ci", Tenant: "a", Mode: config.ModeAudit}, {Name: "ci", Tenant: "b", Profile: "p"}}},
		{Callers: []config.Caller{{Name: "ci", Tenant: "a", Profile: "default"}}}, // the first, but for its mode
	}
	dir := filepath.Join(cfg.StateDir, "sockets")
	must(t, errors.Join(os.Mkdir(dir, 0o755), os.WriteFile(filepath.Join(dir, "left"), nil, 0o600)))
	door, err := engineapi.New(engineapi.Options{
		Dial:   func(context.Context) (net.Conn, error) { return nil, net.ErrClosed },
		Policy: func() *policy.Policy { return nil }, Owner: "o",
	})
	if err != nil {
		t.Fatal(err)
	}
	s := server{cfg: cfg, holder: fakeHolder{mode: mountpin.ModeTrusted}, proxy: door, log: slog.New(slog.DiscardHandler)}
	if err := s.listenSockets(t.Context()); err != nil || len(s.listeners) > 0 {
		t.Errorf("where nothing can be held: %d listeners, %v", len(s.listeners), err)
	}
	s.holder = fakeHolder{mode: mountpin.ModeHeld}
	must(t, s.listenSockets(t.Context()))
	defer func() { _ = s.undo.run() }()
	want := map[engineapi.Caller]string{
		{Name: "ci", Tenant: "a", Profile: "default", Socket: true}: filepath.Join(dir, "0"), {Name: "ci", Tenant: "b", Profile: "p", Socket: true}: filepath.Join(dir, "1"),
	}
	if !maps.Equal(s.mounted, want) || len(s.listeners) != len(want) {
		t.Errorf("%d sockets: %v", len(s.listeners), s.mounted)
	}
	for _, l := range s.listeners {
		if !l.opts.OneClient { // or each user of each container would have as many connections
			t.Errorf("%s: bounds each user", l.Addr())
		}
	}
	there, err := os.Stat(dir)
	left, _ := filepath.Glob(filepath.Join(dir, "*"))
	if err != nil || there.Mode().Perm() != 0o700 || len(left) != len(want) {
		t.Errorf("%v, %v, %v", there.Mode(), left, err)
	}
}
