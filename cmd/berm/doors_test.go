package main

import (
	"bytes"
	"io"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/bermhq/berm/cmd/berm/config"
	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/proxy"
)

// A sandbox that can write to a directory around one that a container of the other door
// has could exchange that: the two can't be there at once, whichever is first.
func TestDoorsKeepClear(t *testing.T) {
	b := newClientBed(t)
	outer := filepath.Join(b.dir, "work", "a")
	inner := filepath.Join(outer, "b")
	if err := os.MkdirAll(inner, 0o755); err != nil {
		t.Fatal(err)
	}
	ask := func(method, key, body string) (int, string) {
		t.Helper()
		req, err := http.NewRequestWithContext(t.Context(), method, "http://localhost/api/v1/sandboxes/"+key, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Content-Type", "application/json")
		resp, err := b.http.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = resp.Body.Close() }()
		text, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		return resp.StatusCode, string(text)
	}
	around := `{"image":"` + testImage + `","host_path":"` + outer + `","host_path_mode":"rw"}`
	cli := clis(t)[0]

	id := b.must(t, cli, "create", "--restart", "always", "-v", inner+":/x", testImage, "sleep", "600")
	if status, text := ask(http.MethodPut, "around", around); status != http.StatusForbidden || !strings.Contains(text, "mounts.exposed") {
		t.Errorf("a sandbox around it: %d, %s", status, text)
	}
	// Nor once the other door is switched off: its containers live on.
	conf := filepath.Join(b.dir, "berm.yaml")
	served := string(readBytes(t, conf))
	head, _, _ := strings.Cut(served, "  listeners:")
	_, tail, _ := strings.Cut(served, "sandbox:")
	for _, text := range []string{head + "sandbox:" + tail, served} {
		b.signal(t, os.Interrupt)
		if err := b.cmd.Wait(); err != nil {
			t.Fatal(err)
		}
		write(t, conf, text)
		b.start(t)
		if status, text := ask(http.MethodPut, "around", around); status != http.StatusForbidden || !strings.Contains(text, "mounts.exposed") {
			t.Errorf("a sandbox around it in a later run: %d, %s", status, text)
		}
	}
	b.must(t, cli, "rm", id)
	if status, text := ask(http.MethodPut, "around", around); status != http.StatusCreated {
		t.Errorf("a sandbox by itself: %d, %s", status, text)
	}
	if text, err := b.run(t, cli, "create", "-v", inner+":/x", testImage, "sleep", "600"); err == nil || !strings.Contains(text, "mounts.exposed") {
		t.Errorf("a container in it: %v, %s", err, text)
	}
	if status, text := ask(http.MethodDelete, "around", ""); status != http.StatusOK {
		t.Errorf("delete: %d, %s", status, text)
	}
}

func readBytes(t *testing.T, path string) []byte {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// TestOpenSocketsAreToldOf starts the sandbox API on unix sockets.
func TestOpenSocketsAreToldOf(t *testing.T) {
	tokens, err := proxy.ParseTokens([]byte(testToken))
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
		d := doorParts{cfg: cfg, manager: &lifecycle.Manager{}, policies: &policyKeeper{}, tokens: tt.tokens, tel: &telemetry{registry: prometheus.NewRegistry()}, log: slog.New(slog.NewTextHandler(&log, nil))}
		var undo cleanup
		if _, _, err := d.sandboxAPI(t.Context(), &undo); err != nil {
			t.Fatal(err)
		}
		if warns := strings.Contains(log.String(), "sandbox_api_open"); warns != tt.warns {
			t.Errorf("%s: %s", name, log.String())
		}
		_ = undo.run()
	}
}
