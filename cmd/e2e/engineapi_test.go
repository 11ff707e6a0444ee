package e2e

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/docker/docker/client"

	"github.com/bermhq/berm/runtime/runtimetest/check"
)

// Both doors are one process, each listener is its callers', and either door can be off.
func TestServeEngineAPI(t *testing.T) {
	t.Parallel()
	e := commonEngine(t, "docker")
	dir := t.TempDir()
	ca := newAuthority(t, dir, "server", "ci", "stranger")
	write(t, filepath.Join(dir, "berm.yaml"), `
engine_api:
  audit_log: `+dir+`/audit.log
  listeners:
    - address: unix://`+dir+`/docker.sock
      socket_mode: "0640"
      owner: "0:12345"
      callers: [{name: rooted, tenant: a, uids: [0]}]
    - address: unix://`+dir+`/others.sock
      callers: [{name: others, tenant: b, uids: [12345]}]
    - address: tcp://127.0.0.1:0
      tls_cert_file: `+dir+`/server.pem
      tls_key_file: `+dir+`/server-key.pem
      client_ca_file: `+dir+`/ca.pem
      callers: [{name: ci, tenant: c, certs: [ci]}]
`)
	c := startChildWith(t, dir, e, "serving", "--config", filepath.Join(dir, "berm.yaml"))
	info := check.Value(os.Stat(filepath.Join(dir, "docker.sock")))(t)
	if got := info.Mode().Perm(); got != 0o640 || info.Sys().(*syscall.Stat_t).Gid != 12345 {
		t.Errorf("the socket's mode is %o, its group %d", got, info.Sys().(*syscall.Stat_t).Gid)
	}
	unix := dockerClient(t, client.WithHost("unix://"+dir+"/docker.sock"))
	until(t, "the engine is reached", func() bool {
		_, err := unix.ServerVersion(t.Context())
		return err == nil
	})
	if status, _ := c.get(t, "/healthz"); status != http.StatusOK {
		t.Errorf("the other door: %d", status)
	}
	others := dockerClient(t, client.WithHost("unix://"+dir+"/others.sock"))
	if _, err := others.ServerVersion(t.Context()); err == nil || !strings.Contains(err.Error(), "callers.unknown") {
		t.Errorf("a stranger on a socket: %v", err)
	}
	address := "tcp://" + c.tcpAddress(t)
	for name, want := range map[string]string{"ci": "", "stranger": "callers.unknown", "": "tls: certificate required"} {
		_, err := dockerClient(t, client.WithHost(address), ca.client(t, name)).ServerVersion(t.Context())
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("with the certificate of %q: %v, want %q", name, err, want)
		}
	}
	if _, body := c.get(t, "/metrics"); !strings.Contains(body, `berm_engine_api_requests_total{route="/version",verdict="allowed"}`) {
		t.Error("/metrics lacks the requests of this door")
	}
	log, err := os.ReadFile(filepath.Join(dir, "audit.log"))
	if err != nil || !strings.Contains(string(log), `"caller":"ci"`) || !strings.Contains(string(log), `"rule":"callers.unknown"`) {
		t.Errorf("the audit log: %v\n%s", err, log)
	}
	c.end(t, syscall.SIGTERM)
	for _, name := range []string{"docker.sock", "others.sock"} {
		if _, err := os.Lstat(filepath.Join(dir, name)); !os.IsNotExist(err) {
			t.Errorf("%s is left: %v", name, err)
		}
	}

	alone := startChildWith(t, dir, e, "serving_engine_api", "--config", filepath.Join(dir, "berm.yaml"), "--listen", "none")
	unix = dockerClient(t, client.WithHost("unix://"+dir+"/docker.sock"))
	until(t, "the engine is reached", func() bool {
		_, err := unix.Ping(t.Context())
		return err == nil
	})
	if _, err := os.Lstat(filepath.Join(dir, "berm.sock")); !os.IsNotExist(err) {
		t.Errorf("the door that is off has a socket: %v", err)
	}
	alone.end(t, syscall.SIGTERM)
}

// tcpAddress is what the log says of the only TCP listener.
func (c *child) tcpAddress(t *testing.T) string {
	t.Helper()
	for line := range strings.Lines(c.Log.String()) {
		if _, rest, ok := strings.Cut(line, "msg=serving_engine_api address=tcp://"); ok {
			return strings.Fields(rest)[0]
		}
	}
	t.Fatalf("the log has no address:\n%s", c.Log)
	return ""
}

func dockerClient(t testing.TB, opts ...client.Opt) *client.Client {
	t.Helper()
	c := check.Value(client.NewClientWithOpts(append(opts, client.WithAPIVersionNegotiation())...))(t)
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// authority signs certificates, kept in a directory as PEM.
type authority struct {
	dir  string
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

// newAuthority makes one, and certificates of the names, for both ends at 127.0.0.1.
func newAuthority(t *testing.T, dir string, names ...string) *authority {
	t.Helper()
	a := &authority{dir: dir}
	for i, name := range append([]string{"ca"}, names...) {
		key := check.Value(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))(t)
		c := &x509.Certificate{
			SerialNumber: big.NewInt(int64(i)), Subject: pkix.Name{CommonName: name}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
			NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), IsCA: i == 0, BasicConstraintsValid: true,
		}
		if i == 0 {
			a.cert, a.key = c, key
		}
		der := check.Value(x509.CreateCertificate(rand.Reader, c, a.cert, &key.PublicKey, a.key))(t)
		keyDER := check.Value(x509.MarshalPKCS8PrivateKey(key))(t)
		if i == 0 {
			a.cert = check.Value(x509.ParseCertificate(der))(t)
		}
		write(t, filepath.Join(dir, name+".pem"), string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})))
		write(t, filepath.Join(dir, name+"-key.pem"), string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: keyDER})))
	}
	return a
}

// client has a Docker client show a certificate; without a name none.
func (a *authority) client(t *testing.T, name string) client.Opt {
	t.Helper()
	pool := x509.NewCertPool()
	pool.AddCert(a.cert)
	cfg := &tls.Config{RootCAs: pool}
	if name != "" {
		cert := check.Value(tls.LoadX509KeyPair(filepath.Join(a.dir, name+".pem"), filepath.Join(a.dir, name+"-key.pem")))(t)
		cfg.Certificates = []tls.Certificate{cert}
	}
	return client.WithHTTPClient(&http.Client{Transport: &http.Transport{TLSClientConfig: cfg, DisableKeepAlives: true}})
}
