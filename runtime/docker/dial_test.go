package docker

import (
	"bufio"
	"crypto/x509"
	"encoding/pem"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// What is dialled speaks HTTP as the engine's other calls do, with TLS if they do.
func TestDial(t *testing.T) {
	handler := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "here") })
	ask := func(t *testing.T, r *Runtime) {
		t.Helper()
		conn, err := r.Dial(t.Context())
		must(t, err)
		defer func() { _ = conn.Close() }()
		if _, err := io.WriteString(conn, "GET / HTTP/1.0\r\n\r\n"); err != nil {
			t.Fatal(err)
		}
		resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
		must(t, err)
		defer func() { _ = resp.Body.Close() }()
		if body, err := io.ReadAll(resp.Body); err != nil || string(body) != "here" {
			t.Errorf("%q, %v", body, err)
		}
	}
	t.Run("plain", func(t *testing.T) {
		t.Setenv("DOCKER_CERT_PATH", "")
		srv := httptest.NewServer(handler)
		defer srv.Close()
		ask(t, newRuntime(t, strings.Replace(srv.URL, "http://", "tcp://", 1)))
	})
	t.Run("TLS", func(t *testing.T) {
		srv := httptest.NewTLSServer(handler)
		defer srv.Close()
		dir := t.TempDir()
		key, err := x509.MarshalPKCS8PrivateKey(srv.TLS.Certificates[0].PrivateKey)
		must(t, err)
		cert := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: srv.Certificate().Raw})
		for name, data := range map[string][]byte{
			"ca.pem": cert, "cert.pem": cert, "key.pem": pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: key}),
		} {
			must(t, os.WriteFile(filepath.Join(dir, name), data, 0o600))
		}
		t.Setenv("DOCKER_CERT_PATH", dir)
		ask(t, newRuntime(t, strings.Replace(srv.URL, "https://", "tcp://", 1)))

		stranger := httptest.NewTLSServer(handler)
		defer stranger.Close()
		r := newRuntime(t, strings.Replace(stranger.URL, "https://127.0.0.1", "tcp://localhost", 1)) // which isn't in its certificate
		if conn, err := r.Dial(t.Context()); err == nil {
			_ = conn.Close()
			t.Error("an engine of another name was taken")
		}
	})
}
