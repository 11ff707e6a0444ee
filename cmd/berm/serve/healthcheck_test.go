package serve

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/pem"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/bermhq/berm/cmd/berm/config"
	"github.com/bermhq/berm/runtime/runtimetest/check"
)

// listenerConfig has the Docker Engine API alone, at one address.
func listenerConfig(t *testing.T, l config.Listener) *config.Config {
	t.Helper()
	cfg := config.Default()
	cfg.StateDir, cfg.HTTP.Listen, cfg.EngineAPI.Listeners = t.TempDir(), config.ListenNone, []config.Listener{l}
	return cfg
}

func TestHealthcheckSandboxAPI(t *testing.T) {
	t.Parallel()
	ready := true
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/readyz" && !ready {
			w.WriteHeader(http.StatusServiceUnavailable)
			_, _ = fmt.Fprint(w, `{"detail":"no engine"}`)
		}
	}))
	defer server.Close()
	address := server.Listener.Addr().String()
	_, port, err := net.SplitHostPort(address)
	if err != nil {
		t.Fatal(err)
	}
	for name, set := range map[string]func(*config.Config){
		"configured": func(cfg *config.Config) { cfg.HTTP.Listen = address },
		"everywhere": func(cfg *config.Config) { cfg.HTTP.Listen = ":" + port },
		"IPv4":       func(cfg *config.Config) { cfg.HTTP.Listen = "0.0.0.0:" + port },
		"IPv6":       func(cfg *config.Config) { cfg.HTTP.Listen = "[::]:" + port },
		"announced":  func(cfg *config.Config) { write(t, filepath.Join(cfg.StateDir, "address"), address+"\n") },
		"port of 0": func(cfg *config.Config) {
			cfg.HTTP.Listen = "127.0.0.1:0"
			write(t, filepath.Join(cfg.StateDir, "address"), address+"\n")
		},
		"none by env": func(cfg *config.Config) {
			cfg.HTTP.Listen = config.ListenNone
			write(t, filepath.Join(cfg.StateDir, "address"), address+"\n")
		},
	} {
		cfg := config.Default()
		cfg.StateDir = t.TempDir()
		set(cfg)
		if err := checkHealth(t.Context(), cfg, false); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	ready = false
	cfg := config.Default()
	cfg.StateDir, cfg.HTTP.Listen = t.TempDir(), address
	if err := checkHealth(t.Context(), cfg, false); err == nil || !strings.Contains(err.Error(), "503: no engine") {
		t.Errorf("one that isn't ready: %v", err)
	}
	if err := checkHealth(t.Context(), cfg, true); err != nil {
		t.Errorf("one that isn't ready, but there: %v", err)
	}
	for _, cfg.HTTP.Listen = range []string{"127.0.0.1:0", "systemd:http"} {
		if err := checkHealth(t.Context(), cfg, true); err == nil || !strings.Contains(err.Error(), "no server runs") {
			t.Errorf("%s, which nobody announced: %v", cfg.HTTP.Listen, err)
		}
	}
}

// Who listens by IPv6 alone, as systemd can have it, is found as well.
func TestHealthcheckIPv6Only(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp6", "[::]:0") // IPV6_V6ONLY
	if err != nil {
		t.Skip("no IPv6 here:", err)
	}
	server := &httptest.Server{Listener: l, Config: &http.Server{Handler: http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		if r.Host != "localhost" {
			t.Errorf("asked for the host %q", r.Host)
		}
	})}}
	server.Start()
	defer server.Close()
	cfg := config.Default()
	cfg.StateDir, cfg.HTTP.Listen = t.TempDir(), l.Addr().String()
	if err := checkHealth(t.Context(), cfg, false); err != nil {
		t.Error(err)
	}
}

func TestHealthcheckEngineAPI(t *testing.T) {
	t.Parallel()
	status := http.StatusOK
	handler := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/_ping" {
			t.Errorf("asked for %s", r.URL.Path)
		}
		w.WriteHeader(status)
	})
	socket := filepath.Join(t.TempDir(), "engine.sock")
	l := check.Value(net.Listen("unix", socket))(t)
	server := &httptest.Server{Listener: l, Config: &http.Server{Handler: handler}}
	server.Start()
	defer server.Close()
	cfg := listenerConfig(t, config.Listener{Address: "systemd:docker"})
	if err := checkHealth(t.Context(), cfg, false); err == nil || !strings.Contains(err.Error(), "no server runs") {
		t.Errorf("one that nobody announced: %v", err)
	}
	write(t, filepath.Join(cfg.StateDir, stateEngineAddress), "unix://"+socket+"\n")
	if err := checkHealth(t.Context(), cfg, false); err != nil {
		t.Errorf("one that is announced: %v", err)
	}
	cfg = listenerConfig(t, config.Listener{Address: "unix://" + socket})
	for _, tt := range []struct {
		status      int
		ready, live bool
	}{{200, true, true}, {403, true, true}, {404, false, true}, {502, false, false}} {
		status = tt.status
		if err := checkHealth(t.Context(), cfg, false); (err == nil) != tt.ready {
			t.Errorf("ready, with %d: %v", tt.status, err)
		}
		if err := checkHealth(t.Context(), cfg, true); (err == nil) != tt.live {
			t.Errorf("there, with %d: %v", tt.status, err)
		}
	}
}

func TestHealthcheckTLS(t *testing.T) {
	t.Parallel()
	server := httptest.NewUnstartedServer(http.NotFoundHandler())
	server.TLS = &tls.Config{ClientAuth: tls.RequireAnyClientCert} // the health check has none
	server.Config.ErrorLog = log.New(io.Discard, "", 0)
	server.StartTLS()
	defer server.Close()
	file := filepath.Join(t.TempDir(), "cert.pem")
	write(t, file, string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})))
	cfg := listenerConfig(t, config.Listener{Address: "tcp://" + server.Listener.Addr().String(), TLSCertFile: file})
	if err := checkHealth(t.Context(), cfg, false); err != nil {
		t.Error(err)
	}
	write(t, file, string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: []byte("another")})))
	if err := checkHealth(t.Context(), cfg, false); err == nil || !strings.Contains(err.Error(), "its certificate isn't that of") {
		t.Errorf("another certificate: %v", err)
	}
}

// A server that hangs is told of within the time, in one line.
func TestHealthcheckHangs(t *testing.T) {
	l := check.Value(net.Listen("tcp", "127.0.0.1:0"))(t)
	defer func() { _ = l.Close() }()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	t.Setenv("BERM_STATE_DIR", t.TempDir())
	healthcheck := func(args ...string) (string, int) {
		var errs bytes.Buffer
		code := config.Run(t.Context(), NewHealthcheckCommand(), args, nil, io.Discard, &errs)
		return errs.String(), code
	}
	stderr, code := healthcheck("--listen", l.Addr().String(), "--timeout", "50ms")
	if code != 1 || strings.Count(stderr, "\n") != 1 || !strings.Contains(stderr, "doesn't answer") || ctx.Err() != nil {
		t.Errorf("exit code %d, %q", code, stderr)
	}
	if stderr, code := healthcheck("--timeout", "0s"); code != config.ExitUsage {
		t.Errorf("no time at all: exit code %d, %q", code, stderr)
	}
}
