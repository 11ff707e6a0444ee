package config

import (
	"cmp"
	"fmt"
	"io/fs"
	"net"
	"path"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/bermhq/berm/policy"
)

// EngineAPI has the settings of the engine proxy, which serves the Docker Engine API.
type EngineAPI struct {
	Listeners    []Listener `yaml:"listeners" doc:"where the Docker Engine API is served; an empty list turns this door off"`
	AuditLog     string     `yaml:"audit_log" path:"true" doc:"file that every decision is appended to, as JSON lines; absolute; made with mode 0600, and again when it was moved away; empty writes none"`
	ArchiveFixed bool       `yaml:"archive_fixed" doc:"assert that the engine has the fixes of CVE-2026-41568 and CVE-2026-42306, as a backport to a release before 29.5.1; without them docker cp is refused where it isn't safe"`
	AllowedHosts []string   `yaml:"allowed_hosts" doc:"further names that a Host header may carry over TCP, beside loopback's and the address that was called"`
	SpoolDir     string     `yaml:"spool_dir" path:"true" doc:"directory of the files of builds while they are sent, absolute; empty is spool in state_dir"`
	SpoolMB      int64      `yaml:"spool_mb" doc:"most disk that these files may take, in MiB; one tenant may have half of it; at least 64"`
}

// Listener is one address of the Docker Engine API, with its callers.
type Listener struct {
	Address      string   `yaml:"address" doc:"unix:///path, tcp://host:port, or systemd:NAME for the socket that systemd passes under that name"`
	SocketMode   string   `yaml:"socket_mode" doc:"file mode of the unix socket, octal; empty is 0660"`
	Owner        string   `yaml:"owner" doc:"owner of the unix socket, uid:gid in numbers; empty is Berm's own"`
	TLSCertFile  string   `yaml:"tls_cert_file" path:"true" doc:"certificate of the TCP listener with its chain, PEM, absolute; read at the start"`
	TLSKeyFile   string   `yaml:"tls_key_file" path:"true" doc:"key of that certificate, PEM, absolute"`
	ClientCAFile string   `yaml:"client_ca_file" path:"true" doc:"certificates, PEM, absolute, by one of which a client's has to be signed; without it a TCP listener has to be on loopback"`
	AllowPlain   bool     `yaml:"allow_plain" doc:"let a TCP listener without client certificates be elsewhere than on loopback: whoever reaches it is its caller"`
	Callers      []Caller `yaml:"callers" doc:"who may call, the others are refused"`
}

// Caller maps users or client certificates of a listener to a name, a tenant and a profile. A
// Caller without UIDs and Certs stands for everybody who matches no other one.
type Caller struct {
	Name    string   `yaml:"name" doc:"name in the audit log, the log and the labels of what is made"`
	Tenant  string   `yaml:"tenant" doc:"whose everything is that the caller makes; it sees nothing else"`
	Profile string   `yaml:"profile" doc:"profile of the policy; empty is default"`
	Mode    string   `yaml:"mode" doc:"enforce, or audit: what the policy denies is let through, and written into the audit log; empty is enforce"`
	UIDs    []uint32 `yaml:"uids" doc:"users at the other end of a unix socket, as numbers"`
	Certs   []string `yaml:"certs" doc:"client certificates: the subject's common name, or sha256: and the digest of the certificate in lower-case hex"`
}

const (
	// ListenNone is the HTTP.Listen that turns the sandbox API off.
	ListenNone = "none"

	// NetworkAuto is the Sandbox.Network that stands for the network of Berm's own container.
	NetworkAuto = "auto"

	// ModeEnforce is a Caller's default mode: requests that the policy denies fail.
	ModeEnforce = "enforce"
	// ModeAudit lets denied requests through, and writes them to the audit log.
	ModeAudit = "audit"

	defaultSocketMode = "0660"
)

var (
	callerPattern      = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_.:-]{0,63}$`)
	fingerprintPattern = regexp.MustCompile(`^sha256:[0-9a-f]{64}$`)
)

func (e EngineAPI) validate(p *problems, http HTTP, kind string) {
	p.unless(http.Listen != ListenNone || len(e.Listeners) > 0, "http.listen", "is none, and engine_api.listeners is empty: nothing would be served")
	p.unless(len(e.Listeners) == 0 || kind == "docker", "engine_api.listeners", "need engine.kind: docker")
	p.unless(e.SpoolMB >= 64 && e.SpoolMB <= 1<<30, "engine_api.spool_mb", "want at least 64, not %d", e.SpoolMB)
	for _, host := range e.AllowedHosts {
		p.unless(isHost(host), "engine_api.allowed_hosts", "%q is no host name", host)
	}
	taken := map[string]string{listenKey(http.Listen): "http.listen"}
	for i, l := range e.Listeners {
		at := fmt.Sprintf("engine_api.listeners[%d]", i)
		l.validate(p, at)
		other, clash := taken[listenKey(l.Address)]
		p.unless(!clash || strings.HasSuffix(l.Address, ":0"), at+".address", "is the same as %s", other)
		taken[listenKey(l.Address)] = at + ".address"
		for j, c := range l.Callers {
			p.unless(c.Mode != ModeAudit || e.AuditLog != "", fmt.Sprintf("%s.callers[%d].mode", at, j), "audit needs engine_api.audit_log")
		}
	}
}

// listenKey returns an address in a form that is the same for all its spellings.
func listenKey(address string) string {
	if name, ok := strings.CutPrefix(address, "unix://"); ok {
		return path.Clean(name)
	}
	return strings.TrimPrefix(address, "tcp://")
}

func (l Listener) validate(p *problems, at string) {
	name, unix := strings.CutPrefix(l.Address, "unix://")
	host, tcp := strings.CutPrefix(l.Address, "tcp://")
	socket, passed := strings.CutPrefix(l.Address, systemdScheme)
	switch {
	case passed:
		p.passed(at+".address", socket)
		p.unless(l.SocketMode == "" && l.Owner == "", at+".address", "socket_mode and owner are for unix:// only; of a socket that is passed, its unit has them")
	case unix:
		p.socket(at+".address", l.Address, name)
		p.unless(!l.AllowPlain, at+".allow_plain", "is for tcp:// only")
	case tcp:
		p.unless(isHostPort(host), at+".address", "want tcp://host:port, not %q", l.Address)
		p.unless(l.SocketMode == "" && l.Owner == "", at+".address", "socket_mode and owner are for unix:// only")
		p.unless(l.ClientCAFile != "" || l.AllowPlain || l.onLoopback(), at+".client_ca_file",
			"is missing: without client certificates, %s lets everybody in who reaches it; listen on loopback, or accept it with allow_plain: true", l.Address)
	default:
		p.unless(false, at+".address", "want unix:///path, tcp://host:port or systemd:NAME, not %q", l.Address)
	}
	_, err := parseMode(cmp.Or(l.SocketMode, defaultSocketMode))
	p.unless(err == nil, at+".socket_mode", "want an octal file mode up to 0777, not %q", l.SocketMode)
	_, err = policy.ParseOwner(l.Owner)
	p.unless(l.Owner == "" || err == nil, at+".owner", "want uid:gid in numbers, not %q", l.Owner)
	p.unless(!unix || l.TLSCertFile+l.TLSKeyFile+l.ClientCAFile == "", at+".tls_cert_file", "TLS is for tcp:// only")
	p.unless((l.TLSCertFile == "") == (l.TLSKeyFile == ""), at+".tls_key_file", "a certificate and its key belong together")
	p.unless(l.ClientCAFile == "" || l.TLSCertFile != "", at+".client_ca_file", "needs tls_cert_file and tls_key_file")
	p.paths(members(at+".", reflect.ValueOf(l)))
	l.validateCallers(p, at, unix || passed) // the kind of a passed socket shows only at the start
}

func (l Listener) validateCallers(p *problems, at string, unix bool) {
	p.unless(len(l.Callers) > 0, at+".callers", "names nobody")
	taken := map[string]bool{}
	once := func(key, kind, value string) {
		p.unless(!taken[kind+value], key, "%q is another caller's as well", value)
		taken[kind+value] = true
	}
	for i, c := range l.Callers {
		key := fmt.Sprintf("%s.callers[%d]", at, i)
		p.unless(callerPattern.MatchString(c.Name), key+".name", "want up to 64 letters, digits, '_', '.', ':' and '-', not %q", c.Name)
		p.unless(callerPattern.MatchString(c.Tenant), key+".tenant", "want up to 64 letters, digits, '_', '.', ':' and '-', not %q", c.Tenant)
		p.unless(c.Mode == "" || c.Mode == ModeEnforce || c.Mode == ModeAudit, key+".mode", "want enforce or audit, not %q", c.Mode)
		p.unless(unix || len(c.UIDs) == 0, key+".uids", "only a unix socket tells them")
		p.unless(l.ClientCAFile != "" || len(c.Certs) == 0, key+".certs", "need client_ca_file")
		once(key+".name", "name ", c.Name)
		for _, uid := range c.UIDs {
			once(key+".uids", "uid ", strconv.FormatUint(uint64(uid), 10))
		}
		for _, cert := range c.Certs {
			digest := strings.HasPrefix(strings.ToLower(cert), "sha256:")
			p.unless(cert != "" && (!digest || fingerprintPattern.MatchString(cert)), key+".certs", "%q is neither a common name nor sha256: and 64 digits of lower-case hex", cert)
			once(key+".certs", "cert ", cert)
		}
		if c.Anybody() {
			once(key, "any", "everybody else")
		}
	}
}

// Anybody reports whether c stands for everybody who matches no other caller.
func (c Caller) Anybody() bool { return len(c.UIDs) == 0 && len(c.Certs) == 0 }

// ForEverybody reports whether one of the callers is Anybody.
func (l Listener) ForEverybody() bool { return slices.ContainsFunc(l.Callers, Caller.Anybody) }

// FileMode is SocketMode as a mode.
func (l Listener) FileMode() fs.FileMode {
	return valid(parseMode(cmp.Or(l.SocketMode, defaultSocketMode)))
}

// Owners returns Owner as numbers. They are -1 if Owner is empty.
func (l Listener) Owners() (uid, gid int) {
	if l.Owner == "" {
		return -1, -1
	}
	o := valid(policy.ParseOwner(l.Owner))
	return o.UID, o.GID
}

func (l Listener) onLoopback() bool {
	host, _, err := net.SplitHostPort(strings.TrimPrefix(l.Address, "tcp://"))
	return err == nil && loopback(host)
}
