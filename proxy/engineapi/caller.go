package engineapi

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"net"
	"net/http"
	"strconv"
	"strings"

	"github.com/bermhq/berm/proxy"
)

// Caller is whom a connection belongs to.
type Caller struct {
	Name    string // as the audit log has it
	Tenant  string // whose everything is that it makes
	Profile string // of the policy; empty is "default"
	Audit   bool   // what the policy denies is let through, and written down
}

// Callers tell one listener's connections apart. A connection that is none of theirs is
// refused.
type Callers struct {
	UIDs  map[uint32]Caller // by the user at the other end of a unix socket
	Certs map[string]Caller // by the client certificate: its common name, or "sha256:" and the hex digest of it
	Any   *Caller           // everybody else who can reach the listener; nil is nobody
}

type peerKey struct{}

// peer is who is at the other end of a connection, as the kernel says.
type peer struct {
	uid  uint32
	pid  int32
	unix bool
}

// ConnContext has the requests of a connection know their peer; for http.Server.
func ConnContext(ctx context.Context, conn net.Conn) context.Context {
	var p peer
	if cred, ok := proxy.PeerOf(conn); ok {
		p = peer{uid: cred.Uid, pid: cred.Pid, unix: true}
	}
	return context.WithValue(ctx, peerKey{}, p)
}

func (c Callers) of(r *http.Request) (Caller, bool) {
	if p, ok := r.Context().Value(peerKey{}).(peer); ok && p.unix {
		if caller, ok := c.UIDs[p.uid]; ok {
			return caller, true
		}
	}
	if r.TLS != nil && len(r.TLS.VerifiedChains) > 0 {
		cert := r.TLS.PeerCertificates[0]
		sum := sha256.Sum256(cert.Raw)
		if caller, ok := c.Certs["sha256:"+hex.EncodeToString(sum[:])]; ok {
			return caller, true
		}
		name := cert.Subject.CommonName
		if caller, ok := c.Certs[name]; ok && name != "" && !strings.HasPrefix(name, "sha256:") { // which is another certificate's digest
			return caller, true
		}
	}
	if c.Any == nil {
		return Caller{}, false
	}
	return *c.Any, true
}

// peerName is the other end of the connection, for the audit log.
func peerName(r *http.Request) string {
	if p, ok := r.Context().Value(peerKey{}).(peer); ok && p.unix {
		return "uid=" + strconv.FormatUint(uint64(p.uid), 10) + " pid=" + strconv.Itoa(int(p.pid))
	}
	if r.TLS != nil && len(r.TLS.PeerCertificates) > 0 {
		return r.RemoteAddr + " cn=" + r.TLS.PeerCertificates[0].Subject.CommonName
	}
	return r.RemoteAddr
}
