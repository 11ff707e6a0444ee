package doctor

import (
	"cmp"
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
	"github.com/bermhq/berm/proxy/apitype"
)

// expiresSoon is how long before its end a certificate is reported.
const expiresSoon = 14 * 24 * time.Hour

// checkDoors looks at what berm serve would listen on, and at who answers there.
func checkDoors(ctx context.Context, limit time.Duration, cfg *config.Config, s *storageFacts) []finding {
	served := s.lockedBy != ""
	out := []finding{checkSandboxAPI(ctx, limit, cfg, served)}
	in := &serve.Inputs{}
	failed := map[string]bool{}
	checks := serve.Checks(cfg, in)
	for i, c := range checks {
		_, err := reading(ctx, limit, c.What, func() (struct{}, error) { return struct{}{}, c.Run() })
		l := i - len(checks) + len(cfg.EngineAPI.Listeners) // the checks of listeners are the last
		switch {
		case err != nil:
			failed[c.ID] = true
			out = append(out, bad(c.ID, said(err), wontStart, c.Fix))
		case l >= 0:
			out = append(out, checkListener(ctx, limit, cfg.EngineAPI.Listeners[l], in.TLS[l], served))
		}
	}
	if cfg.HTTP.Listen != config.ListenNone {
		if !failed["doors.tokens"] {
			out = append(out, judgeTokens(cfg.HTTP, in.Tokens.Len())...)
		}
		if !failed["doors.signing_key"] {
			out = append(out, okay("doors.signing_key", map[bool]string{true: "given", false: "made at each start: signed URLs end with the server"}[in.SigningKey != nil]))
		}
	}
	if !failed["doors.telemetry"] {
		out = append(out, checkCollector(ctx, limit, cfg.Otel))
	}
	if !serve.InContainer() { // where it is alone
		out = append(out, checkSecrets(ctx, limit, cfg)...)
	}
	if len(cfg.EngineAPI.Listeners) > 0 {
		if path := cfg.EngineAPI.AuditLog; path != "" {
			out = append(out, checkAuditLog(ctx, limit, path))
		}
		if served && s.databaseErr == nil {
			out = append(out, checkRestarts(ctx, limit, filepath.Join(cfg.StateDir, serve.StateStore)))
		}
	}
	return out
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
		return bad(id, said(err), "the server that has the state directory is of no use", "look at its log")
	}
	found := fmt.Sprintf("berm %s answers at %s", running, address)
	if running != config.Version {
		found += "; this one is " + config.Version
	}
	if ready != nil {
		return soft(id, found+", and isn't ready: "+said(ready), "calls are answered with 503", "look at its log")
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
	return first(
		rule{err != nil, bad(id, "another process listens on "+address, wontStart, "choose another with --listen")},
		rule{!known, soft(id, fmt.Sprintf("berm %s answers at %s", other, address), "whether it is that of this state directory isn't known", "run berm doctor as the server's user")},
		rule{true, bad(id, fmt.Sprintf("berm %s listens on %s, with another state directory", other, address), wontStart, "give the state directory and the configuration of that server, or choose another with --listen")},
	)
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

// judgeTokens says whether who reaches the sandbox API has to show a token.
func judgeTokens(cfg config.HTTP, tokens int) []finding {
	const id = "doors.tokens"
	const fix = "give tokens in security.token_file or BERM_SECURITY_TOKENS"
	listen := cfg.Listen
	passed, found := config.Passed(listen), strconv.Itoa(tokens) // whom what is passed is for is in its unit
	switch {
	case passed && tokens == 0:
		return []finding{soft(id, "none", "every process that reaches "+listen+" may do everything; if that is TCP beyond loopback, berm serve refuses to start", fix)}
	case passed:
		return []finding{okay(id, found+"; if "+listen+" is TCP beyond loopback, it needs a proxy with TLS before it")}
	case tokens == 0:
		found = "none"
		if mode, err := cfg.FileMode(); err == nil && serve.WorldWritable(listen, mode) {
			found = fmt.Sprintf("none, and every user of this machine reaches %s, mode %04o", listen, mode)
		}
		return []finding{soft(id, found, "every process that reaches "+listen+" may do everything", fix)}
	case serve.CheckExposure(cfg, 0) != nil: // it can be reached from elsewhere
		return []finding{okay(id, found), soft("doors.tls", listen+" is plain HTTP", "who listens in on the way has the tokens", "put a proxy with TLS before it, or keep it in a network of those who may")}
	}
	return []finding{okay(id, found)}
}

// checkSecrets reports files with secrets that every user can read. It skips files that
// can't be read, which other checks report.
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

// checkListener looks at one of the engine proxy. Served says that a server has the state
// directory, and so most likely these addresses.
func checkListener(ctx context.Context, limit time.Duration, l config.Listener, secured *tls.Config, served bool) finding {
	const id = "doors.engine_api"
	found, passed := l.Address, config.Passed(l.Address)
	var err error
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
	open := false
	if mode, err := l.FileMode(); err == nil && strings.HasPrefix(l.Address, "unix://") {
		found += fmt.Sprintf(", mode %04o", mode)
		open = l.ForEverybody() && serve.WorldWritable(l.Address, mode)
	}
	var audited []string
	for _, c := range l.Callers {
		if c.Mode == config.ModeAudit {
			audited = append(audited, c.Name)
		}
	}
	found += fmt.Sprintf(", callers: %d", len(l.Callers))
	left := 2 * expiresSoon
	if secured != nil && len(secured.Certificates) > 0 && secured.Certificates[0].Leaf != nil {
		end := secured.Certificates[0].Leaf.NotAfter
		found += ", certificate until " + end.Format(time.DateOnly)
		left = time.Until(end)
	}
	return first(
		rule{open, soft(id, found, "every user of this machine is its caller", "give the callers' uids, or a socket_mode of 0660")},
		rule{left < 0, bad(id, found, "clients refuse it", "renew the certificate")},
		rule{left < expiresSoon, soft(id, found, "clients refuse it from then on", "renew the certificate")},
		rule{len(audited) > 0, soft(id, found+"; mode: audit for "+some(audited), "what the policy denies is let through", "set their mode to enforce once berm policy learn has nothing to add")},
		rule{l.AllowPlain && l.ClientCAFile == "", soft(id, found+", without client certificates", "whoever reaches it is its caller", "set client_ca_file, or keep it in a network of those who may")},
		rule{true, okay(id, found)},
	)
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
		return soft(id, said(err), "what waits for its restart isn't known", "run berm doctor as the server's user")
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
	u, err := url.Parse(cfg.Endpoint)
	if err != nil {
		return bad(id, "otel.endpoint is no URL", wontStart, "set it to one such as http://127.0.0.1:4318")
	}
	address := net.JoinHostPort(u.Hostname(), cmp.Or(u.Port(), u.Scheme))
	err = serve.Try(ctx, limit, func(ctx context.Context) error {
		conn, err := new(net.Dialer).DialContext(ctx, "tcp", address)
		if err != nil {
			return err
		}
		return conn.Close()
	})
	if err != nil {
		return soft(id, said(err), "logs, metrics and traces are lost until the collector is there", "start it, or set otel.endpoint right")
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
