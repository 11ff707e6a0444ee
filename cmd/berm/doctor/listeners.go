package doctor

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/cmd/berm/config"
	"github.com/bermhq/berm/cmd/berm/serve"
	"github.com/bermhq/berm/lifecycle/restart"
	"github.com/bermhq/berm/lifecycle/store"
	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/proxy/apitype"
)

// expiresSoon is how long before its end a certificate is told of.
const expiresSoon = 14 * 24 * time.Hour

// checkDoors looks at what berm serve would listen on, and at who answers there.
func checkDoors(ctx context.Context, limit time.Duration, cfg *config.Config, s *storageFacts) []finding {
	out := []finding{checkSandboxAPI(ctx, limit, cfg, s.lockedBy != "")}
	out = append(out, checkTokens(ctx, limit, cfg)...)
	if cfg.HTTP.Listen != config.ListenNone {
		out = append(out, checkSigningKey(ctx, limit, cfg.Security))
	}
	if !serve.InContainer() { // where it is alone
		out = append(out, checkSecrets(ctx, limit, cfg)...)
	}
	for _, l := range cfg.EngineAPI.Listeners {
		out = append(out, checkListener(ctx, limit, l, s.lockedBy != ""))
	}
	if path := cfg.EngineAPI.AuditLog; path != "" && len(cfg.EngineAPI.Listeners) > 0 {
		out = append(out, checkAuditLog(ctx, limit, path))
	}
	if len(cfg.EngineAPI.Listeners) > 0 && s.lockedBy != "" && s.databaseErr == nil {
		out = append(out, checkRestarts(ctx, limit, filepath.Join(cfg.StateDir, serve.StateStore)))
	}
	return append(out, checkCollector(ctx, limit, cfg.Otel))
}

// checkSandboxAPI asks the server that has the state directory, or looks whether one could
// listen. Served says that one has it.
func checkSandboxAPI(ctx context.Context, limit time.Duration, cfg *config.Config, served bool) finding {
	const id = "doors.sandbox_api"
	address, unreadable := serve.Within(ctx, limit, func(context.Context) (string, error) { return serve.Announced(cfg.StateDir) }) // as storage.state_dir says
	if address == "" {
		return checkAddress(ctx, limit, cfg.HTTP.Listen, unreadable == nil)
	}
	running, ready, err := askVersion(ctx, limit, address)
	if err != nil && !served { // it was killed, and the next one takes the address back
		return checkAddress(ctx, limit, cfg.HTTP.Listen, true)
	}
	if err != nil {
		return bad(id, config.OneLine(err).Error(), "the server that has the state directory is of no use", "look at its log")
	}
	found := fmt.Sprintf("berm %s answers at %s", running, address)
	if running != config.Version {
		found += "; this one is " + config.Version
	}
	if ready != nil {
		return soft(id, found+", and isn't ready: "+config.OneLine(ready).Error(), "calls are answered with 503", "look at its log")
	}
	return okay(id, found)
}

// checkAddress looks whether the sandbox API could be served. Known says that no server of
// this state directory listens.
func checkAddress(ctx context.Context, limit time.Duration, address string, known bool) finding {
	const id = "doors.sandbox_api"
	if address == config.ListenNone {
		return okay(id, "off: http.listen is none")
	}
	if config.Passed(address) {
		return okay(id, address+", which systemd passes")
	}
	err := serve.Try(ctx, limit, func(ctx context.Context) error { return listenable(ctx, address) })
	if err == nil {
		return okay(id, address+" is free")
	}
	if !errors.Is(err, unix.EADDRINUSE) {
		return bad(id, fmt.Sprintf("%s can't be listened on: %v", address, err), wontStart, "choose another with --listen")
	}
	other, _, err := askVersion(ctx, limit, address)
	switch {
	case err != nil:
		return bad(id, "another process listens on "+address, wontStart, "choose another with --listen")
	case !known:
		return soft(id, fmt.Sprintf("berm %s answers at %s", other, address), "whether it is that of this state directory isn't known", "run berm doctor as the server's user")
	}
	return bad(id, fmt.Sprintf("berm %s listens on %s, with another state directory", other, address), wontStart, "give the state directory and the configuration of that server, or choose another with --listen")
}

// askVersion asks a server who it is. Ready says why it isn't.
func askVersion(ctx context.Context, limit time.Duration, address string) (version string, ready, err error) {
	health, err := serve.Within(ctx, limit, func(ctx context.Context) (apitype.Health, error) {
		var h apitype.Health
		status, body, err := serve.FetchHealth(ctx, address, "/healthz")
		if err != nil {
			return h, err
		}
		if status != http.StatusOK || json.Unmarshal(body, &h) != nil || h.Status == "" || h.Version == "" {
			return h, fmt.Errorf("what listens on %s is no berm", address)
		}
		return h, nil
	})
	if err != nil {
		return "", nil, err
	}
	return health.Version, serve.Try(ctx, limit, func(ctx context.Context) error { return serve.AskHealth(ctx, address, "/readyz", nil) }), nil
}

func checkTokens(ctx context.Context, limit time.Duration, cfg *config.Config) []finding {
	const id = "doors.tokens"
	tokens, err := reading(ctx, limit, "security.token_file", func() (*proxy.Tokens, error) { return serve.LoadTokens(cfg.Security) })
	if err != nil {
		return []finding{bad(id, config.OneLine(err).Error(), wontStart, "mend it; docs/api.md has the format")}
	}
	listen := cfg.HTTP.Listen
	if listen == config.ListenNone {
		return nil
	}
	if config.Passed(listen) { // whom it is for is in its unit
		if tokens.Len() == 0 {
			return []finding{soft(id, "none", "every process that reaches "+listen+" may do everything; if that is TCP beyond loopback, berm serve refuses to start", "give tokens in security.token_file or BERM_SECURITY_TOKENS")}
		}
		return []finding{okay(id, strconv.Itoa(tokens.Len())+"; if "+listen+" is TCP beyond loopback, it needs a proxy with TLS before it")}
	}
	if err := serve.CheckExposure(cfg.HTTP, tokens.Len()); err != nil {
		return []finding{bad(id, "none, and "+listen+" is neither loopback nor a unix socket", wontStart, "give a token in security.token_file or BERM_SECURITY_TOKENS, or listen on 127.0.0.1")}
	}
	if tokens.Len() == 0 {
		found := "none"
		if mode, err := cfg.HTTP.FileMode(); err == nil && serve.WorldWritable(listen, mode) {
			found = fmt.Sprintf("none, and every user of this machine reaches %s, mode %04o", listen, mode)
		}
		return []finding{soft(id, found, "every process that reaches "+listen+" may do everything", "give tokens in security.token_file or BERM_SECURITY_TOKENS")}
	}
	out := []finding{okay(id, strconv.Itoa(tokens.Len()))}
	if serve.CheckExposure(cfg.HTTP, 0) != nil { // it can be reached from elsewhere
		out = append(out, soft("doors.tls", listen+" is plain HTTP", "who listens in on the way has the tokens", "put a proxy with TLS before it, or keep it in a network of those who may"))
	}
	return out
}

func checkSigningKey(ctx context.Context, limit time.Duration, cfg config.Security) finding {
	const id = "doors.signing_key"
	key, err := reading(ctx, limit, "security.signing_key_file", func() ([]byte, error) { return serve.LoadSigningKey(cfg) })
	switch {
	case err != nil:
		return bad(id, config.OneLine(err).Error(), wontStart, "openssl rand -base64 32 makes one")
	case key == nil:
		return okay(id, "made at each start: signed URLs end with the server")
	}
	return okay(id, "given")
}

// checkSecrets tells of files with secrets that are every user's to read. One that is
// stuck is told of by who reads it.
func checkSecrets(ctx context.Context, limit time.Duration, cfg *config.Config) []finding {
	var open []string
	for _, file := range []string{cfg.Security.TokenFile, cfg.Security.SigningKeyFile, cfg.Otel.HeadersFile, cfg.Engine.RegistryAuthFile} {
		fi, err := serve.Within(ctx, limit, func(context.Context) (fs.FileInfo, error) { return os.Stat(file) })
		if err == nil && fi.Mode().Perm()&0o004 != 0 {
			open = append(open, file)
		}
	}
	if len(open) == 0 {
		return nil
	}
	return []finding{soft("doors.secrets", "every user of this machine can read "+some(open), "who reads a secret has what it is for", "chmod o-r "+strings.Join(open, " "))}
}

// checkListener looks at one of the Docker Engine API. Served says that a server has the
// state directory, and so most likely these addresses.
func checkListener(ctx context.Context, limit time.Duration, l config.Listener, served bool) finding {
	const id = "doors.engine_api"
	secured, err := reading(ctx, limit, "engine_api: certificates of "+l.Address, func() (*tls.Config, error) { return serve.ListenerTLS(l) })
	if err != nil {
		return bad(id, config.OneLine(err).Error(), wontStart, "set the listener's files right")
	}
	found, passed := l.Address, config.Passed(l.Address)
	if !passed {
		err = serve.Try(ctx, limit, func(ctx context.Context) error { return listenable(ctx, strings.TrimPrefix(l.Address, "tcp://")) })
	}
	switch {
	case passed:
		found += ", which systemd passes"
	case err == nil && served:
		return soft(id, found+" isn't listened on, though a server runs", "who calls there finds nobody", "see whether it runs with this configuration")
	case err == nil:
		found += " is free"
	case errors.Is(err, unix.EADDRINUSE) && served:
		found += " is listened on"
	case errors.Is(err, unix.EADDRINUSE):
		return bad(id, "another process listens on "+l.Address, wontStart, "choose another address")
	default:
		return bad(id, fmt.Sprintf("%s can't be listened on: %v", l.Address, err), wontStart, "choose another address, or make what it lacks")
	}
	if mode, err := l.FileMode(); err == nil && strings.HasPrefix(l.Address, "unix://") {
		found += fmt.Sprintf(", mode %04o", mode)
		if serve.Anybody(l) && serve.WorldWritable(l.Address, mode) {
			return soft(id, found, "every user of this machine is its caller", "give the callers' uids, or a socket_mode of 0660")
		}
	}
	var audited []string
	for _, c := range l.Callers {
		if c.Mode == config.ModeAudit {
			audited = append(audited, c.Name)
		}
	}
	found += fmt.Sprintf(", callers: %d", len(l.Callers))
	if secured != nil && len(secured.Certificates) > 0 && secured.Certificates[0].Leaf != nil {
		end := secured.Certificates[0].Leaf.NotAfter
		found += ", certificate until " + end.Format(time.DateOnly)
		if left := time.Until(end); left < 0 {
			return bad(id, found, "clients refuse it", "renew the certificate")
		} else if left < expiresSoon {
			return soft(id, found, "clients refuse it from then on", "renew the certificate")
		}
	}
	switch {
	case len(audited) > 0:
		return soft(id, found+"; mode: audit for "+some(audited), "what the policy denies is let through", "set their mode to enforce once berm policy learn has nothing to add")
	case l.AllowPlain && l.ClientCAFile == "":
		return soft(id, found+", without client certificates", "whoever reaches it is its caller", "set client_ca_file, or keep it in a network of those who may")
	}
	return okay(id, found)
}

func checkAuditLog(ctx context.Context, limit time.Duration, path string) finding {
	const id = "doors.audit_log"
	err := serve.Try(ctx, limit, func(context.Context) error {
		at, mode := path, uint32(unix.W_OK)
		if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) {
			at, mode = filepath.Dir(path), unix.W_OK|unix.X_OK
		}
		if err := unix.Faccessat(unix.AT_FDCWD, at, mode, unix.AT_EACCESS); err != nil {
			return &os.PathError{Op: "write to", Path: at, Err: err}
		}
		return nil
	})
	if err != nil {
		return bad(id, err.Error(), wontStart, "set engine_api.audit_log to a file that berm may write, in a directory that is there")
	}
	return okay(id, path)
}

// checkRestarts reports what the server restarts in the engine's stead, by its database.
func checkRestarts(ctx context.Context, limit time.Duration, database string) finding {
	const id = "doors.restarts"
	rows, err := serve.Within(ctx, limit, func(ctx context.Context) ([]restart.Row, error) { return store.ReadRestarts(ctx, database) })
	if err != nil {
		return soft(id, config.OneLine(err).Error(), "what waits for its restart isn't known", "run berm doctor as the server's user")
	}
	restarts, waiting := 0, []string{}
	for _, r := range rows {
		restarts += r.Count
		if !r.Next.IsZero() {
			waiting = append(waiting, fmt.Sprintf("%.12s until %s", r.ContainerID, r.Next.Format(time.RFC3339)))
		}
	}
	found := fmt.Sprintf("containers with bind mounts and a restart policy: %d; restarts since they were last started by hand: %d", len(rows), restarts)
	if len(waiting) > 0 {
		found += "; waiting for the next: " + some(waiting)
	}
	return okay(id, found)
}

// checkCollector looks whether telemetry has where to go. The URL may hold a secret.
func checkCollector(ctx context.Context, limit time.Duration, cfg config.Otel) finding {
	const id = "doors.telemetry"
	if cfg.Endpoint == "" {
		return okay(id, "nothing is sent")
	}
	if _, err := reading(ctx, limit, "otel.headers_file", func() (map[string]string, error) { return serve.OtelHeaders(cfg) }); err != nil {
		return bad(id, config.OneLine(err).Error(), wontStart, "set otel.headers right")
	}
	u, err := url.Parse(cfg.Endpoint)
	if err != nil {
		return bad(id, "otel.endpoint is no URL", wontStart, "set it to one such as http://127.0.0.1:4318")
	}
	port := u.Port()
	if port == "" {
		port = u.Scheme
	}
	address := net.JoinHostPort(u.Hostname(), port)
	err = serve.Try(ctx, limit, func(ctx context.Context) error {
		conn, err := new(net.Dialer).DialContext(ctx, "tcp", address)
		if err != nil {
			return err
		}
		return conn.Close()
	})
	if err != nil {
		return soft(id, config.OneLine(err).Error(), "logs, metrics and traces are lost until the collector is there", "start it, or set otel.endpoint right")
	}
	return okay(id, "a collector listens on "+address)
}

// listenable tells whether an address could be listened on, and is EADDRINUSE if somebody
// does. A bound TCP address that isn't listened on is in nobody's way.
func listenable(ctx context.Context, address string) error {
	if path, isUnix := strings.CutPrefix(address, "unix://"); isUnix {
		return socketable(ctx, path)
	}
	host, service, err := net.SplitHostPort(address)
	if err != nil {
		return err
	}
	port, err := net.DefaultResolver.LookupPort(ctx, "tcp", service)
	if err != nil || port == 0 {
		return err
	}
	if host == "" {
		host = "::"
	}
	ip, err := netip.ParseAddr(host)
	if err != nil {
		found, err := net.DefaultResolver.LookupNetIP(ctx, "ip", host)
		if err != nil {
			return err
		}
		ip = found[0]
	}
	err = bindable(ip.Unmap(), port)
	if ip == netip.IPv6Unspecified() && (errors.Is(err, unix.EAFNOSUPPORT) || errors.Is(err, unix.EADDRNOTAVAIL)) {
		return bindable(netip.IPv4Unspecified(), port)
	}
	return err
}

func bindable(ip netip.Addr, port int) error {
	family := unix.AF_INET6
	var address unix.Sockaddr
	if ip.Is4() {
		family, address = unix.AF_INET, &unix.SockaddrInet4{Port: port, Addr: ip.As4()}
	} else {
		in6 := &unix.SockaddrInet6{Port: port, Addr: ip.As16()}
		if zone, err := net.InterfaceByName(ip.Zone()); err == nil {
			in6.ZoneId = uint32(zone.Index) //nolint:gosec // no interface has a negative one
		}
		address = in6
	}
	fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return os.NewSyscallError("socket", err)
	}
	defer func() { _ = unix.Close(fd) }()
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1); err != nil {
		return os.NewSyscallError("setsockopt", err)
	}
	return os.NewSyscallError("bind", unix.Bind(fd, address))
}

// socketable is listenable for the path of a unix socket.
func socketable(ctx context.Context, path string) error {
	fi, err := os.Lstat(path)
	switch {
	case err == nil && fi.Mode().Type() != fs.ModeSocket:
		return errors.New("there is something else than a socket")
	case err == nil:
		if conn, err := new(net.Dialer).DialContext(ctx, "unix", path); err == nil {
			_ = conn.Close()
			return unix.EADDRINUSE
		} else if errors.Is(err, fs.ErrPermission) {
			return err
		}
	case !errors.Is(err, fs.ErrNotExist):
		return err
	}
	dir := filepath.Dir(path)
	if err := unix.Faccessat(unix.AT_FDCWD, dir, unix.W_OK|unix.X_OK, unix.AT_EACCESS); err != nil {
		return &os.PathError{Op: "write to", Path: dir, Err: err}
	}
	return nil
}
