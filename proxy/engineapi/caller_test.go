package engineapi

import (
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"net/http/httptest"
	"testing"
)

// TestCallerOfCertificate: who has a certificate of the authority chooses its common name,
// but not its digest.
func TestCallerOfCertificate(t *testing.T) {
	sum := sha256.Sum256([]byte("admin's"))
	digest := "sha256:" + hex.EncodeToString(sum[:])
	callers := Callers{Certs: map[string]Caller{digest: {Name: "admin"}, "ci": {Name: "ci"}}}
	for name, c := range map[string]struct{ raw, cn, want string }{
		"by digest":       {"admin's", "x", "admin"},
		"by name":         {"other's", "ci", "ci"},
		"digest as name":  {"other's", digest, ""},
		"neither":         {"other's", "x", ""},
		"without a name":  {"other's", "", ""},
		"digest and name": {"admin's", "ci", "admin"},
	} {
		r := httptest.NewRequest("GET", "/_ping", nil)
		cert := &x509.Certificate{Raw: []byte(c.raw), Subject: pkix.Name{CommonName: c.cn}}
		r.TLS = &tls.ConnectionState{PeerCertificates: []*x509.Certificate{cert}, VerifiedChains: [][]*x509.Certificate{{cert}}}
		got, ok := callers.of(r)
		if got.Name != c.want || ok != (c.want != "") {
			t.Errorf("%s: %+v, %v", name, got, ok)
		}
	}
}
