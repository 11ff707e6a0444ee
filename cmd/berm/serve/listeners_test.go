package serve

import (
	"bytes"
	"log/slog"
	"path/filepath"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/bermhq/berm/cmd/berm/config"
	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/proxy"
)

// TestOpenSocketsAreToldOf starts the sandbox API on unix sockets.
func TestOpenSocketsAreToldOf(t *testing.T) {
	tokens, err := proxy.ParseTokens([]byte("a-token-for-tests-only"))
	if err != nil {
		t.Fatal(err)
	}
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
