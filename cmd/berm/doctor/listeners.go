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
	"net/url"
	"os"
	"path/filepath"
	"slices"
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

// expiresSoon is how long before its expiry a certificate is reported.
const expiresSoon = 14 * 24 * time.Hour

// checkDoors checks the addresses that berm serve would listen on, and who answers there. It also
// checks the settings of tokens, telemetry and the audit log.
func checkDoors(ctx context.Context, limit time.Duration, cfg *config.Config, s *storageFacts) []finding {
	served := s.lockedBy != ""
	out := checkSandboxAPI(ctx, limit, cfg, served)
	in := &serve.Inputs{}
	failed := map[string]bool{}
	checks := serve.Checks(cfg, in)
	for i, c := range checks {
		_, err := reading(ctx, limit, c.What, func() (struct{}, error) { return struct{}{}, c.Run() })
		l := i - len(checks) + len(cfg.EngineAPI.Listeners) // the checks of listeners are the last
		switch {
		case err != nil:
			failed[c.ID] = true
			out = append(out, judge(c.ID, bad(true, said(err), wontStart, c.Fix))...)
		case l >= 0:
			out = append(out, checkListener(ctx, limit, cfg.EngineAPI.Listeners[l], in.TLS[l], served)...)
		}
	}
	if cfg.HTTP.Listen != config.ListenNone {
		if !failed["doors.tokens"] {
			out = append(out, judgeTokens(cfg.HTTP, in.Tokens.Len())...)
		}
		if !failed["doors.signing_key"] {
			out = append(out, judge("doors.signing_key", okay(in.SigningKey != nil, "given"), okay(true, "made at each start: signed URLs end with the server"))...)
		}
	}
	if !failed["doors.telemetry"] {
		out = append(out, checkCollector(ctx, limit, cfg.Otel)...)
	}
	if !serve.InContainer() { // other users can't read files in a container
		out = append(out, checkSecrets(ctx, limit, cfg)...)
	}
	if len(cfg.EngineAPI.Listeners) > 0 {
		if path := cfg.EngineAPI.AuditLog; path != "" {
			out = append(out, checkAuditLog(ctx, limit, path)...)
		}
		if served && s.databaseErr == nil {
			out = append(out, checkRestarts(ctx, limit, filepath.Join(cfg.StateDir, serve.StateStore))...)
		}
	}
	return out
}

// checkSandboxAPI asks the server that runs on the state directory, or checks whether a server
// could listen. Served reports whether a server has locked the state directory.
func checkSandboxAPI(ctx context.Context, limit time.Duration, cfg *config.Config, served bool) []finding {
	address, unreadable := serve.Within(ctx, limit, func(context.Context) (string, error) { return serve.Announced(cfg.StateDir, serve.StateAddress) }) // as storage.state_dir says
	if address == "" {
		return checkAddress(ctx, limit, cfg.HTTP.Listen, unreadable == nil)
	}
	running, ready, err := askVersion(ctx, limit, address)
	if err != nil && !served { // the server was killed, and the next one may listen there
		return checkAddress(ctx, limit, cfg.HTTP.Listen, true)
	}
	found := fmt.Sprintf("berm %s answers at %s", running, address)
	if running != config.Version {
		found += "; this one is " + config.Version
	}
	return judge("doors.sandbox_api",
		bad(err != nil, said(err), "the server that has the state directory is of no use", "look at its log"),
		soft(ready != nil, found+", and isn't ready: "+said(ready), "calls are answered with 503", "look at its log"),
		okay(true, found))
}

// checkAddress checks whether a server could listen at the sandbox API's address. Known means that
// no server of this state directory listens.
func checkAddress(ctx context.Context, limit time.Duration, address string, known bool) []finding {
	const id = "doors.sandbox_api"
	none, passed := address == config.ListenNone, config.Passed(address)
	var err, stranger error
	var other string
	if !none && !passed {
		err = serve.Try(ctx, limit, func(ctx context.Context) error { return listenable(ctx, address) })
	}
	taken := errors.Is(err, unix.EADDRINUSE)
	if taken {
		other, _, stranger = askVersion(ctx, limit, address)
	}
	return judge(id,
		okay(none, "off: http.listen is none"),
		okay(passed, address+", which systemd passes"),
		okay(err == nil, address+" is free"),
		bad(!taken, fmt.Sprintf("%s can't be listened on: %v", address, err), wontStart, "choose another with --listen"),
		bad(stranger != nil, "another process listens on "+address, wontStart, "choose another with --listen"),
		soft(!known, fmt.Sprintf("berm %s answers at %s", other, address), "whether it is that of this state directory isn't known", "run berm doctor as the server's user"),
		bad(true, fmt.Sprintf("berm %s listens on %s, with another state directory", other, address), wontStart, "give the state directory and the configuration of that server, or choose another with --listen"))
}

// askVersion asks a server for its version. Ready is the error of its readiness.
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

// judgeTokens judges whether the sandbox API needs a token, and TLS. It doesn't know who can reach
// a socket that systemd passes, which only the unit says.
func judgeTokens(cfg config.HTTP, tokens int) []finding {
	const fix = "give tokens in security.token_file or BERM_SECURITY_TOKENS"
	listen, found, none := cfg.Listen, strconv.Itoa(tokens), tokens == 0
	passed := config.Passed(listen)
	means := "every process that reaches " + listen + " may do everything"
	mode := cfg.FileMode()
	open := serve.WorldWritable(listen, mode)
	elsewhere := !none && serve.CheckExposure(cfg, 0) != nil
	return slices.Concat(
		judge("doors.tokens",
			soft(passed && none, "none", means+"; if that is TCP beyond loopback, berm serve refuses to start", fix),
			okay(passed, found+"; if "+listen+" is TCP beyond loopback, it needs a proxy with TLS before it"),
			soft(none && open, fmt.Sprintf("none, and every user of this machine reaches %s, mode %04o", listen, mode), means, fix),
			soft(none, "none", means, fix),
			okay(true, found)),
		judge("doors.tls",
			soft(elsewhere, listen+" is plain HTTP", "who listens in on the way has the tokens", "put a proxy with TLS before it, or keep it in a network of those who may")))
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
	return judge("doors.secrets", soft(len(open) > 0, "every user of this machine can read "+some(open), "who reads a secret has what it is for", "chmod o-r "+strings.Join(open, " ")))
}

// checkListener checks a listener of the engine proxy. Served reports whether a server has locked
// the state directory, and so most likely listens there.
func checkListener(ctx context.Context, limit time.Duration, l config.Listener, secured *tls.Config, served bool) []finding {
	found, passed := l.Address, config.Passed(l.Address)
	var err error
	if !passed {
		err = serve.Try(ctx, limit, func(ctx context.Context) error { return listenable(ctx, strings.TrimPrefix(l.Address, "tcp://")) })
	}
	taken := errors.Is(err, unix.EADDRINUSE)
	switch {
	case passed:
		found += ", which systemd passes"
	case err == nil:
		found += " is free"
	default:
		found += " is listened on"
	}
	open := false
	if mode := l.FileMode(); strings.HasPrefix(l.Address, "unix://") {
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
	return judge("doors.engine_api",
		soft(err == nil && !passed && served, l.Address+" isn't listened on, though a server runs", "who calls there finds nobody", "see whether it runs with this configuration"),
		bad(taken && !served, "another process listens on "+l.Address, wontStart, "choose another address"),
		bad(err != nil && !taken, fmt.Sprintf("%s can't be listened on: %v", l.Address, err), wontStart, "choose another address, or make what it lacks"),
		soft(open, found, "every user of this machine is its caller", "give the callers' uids, or a socket_mode of 0660"),
		bad(left < 0, found, "clients refuse it", "renew the certificate"),
		soft(left < expiresSoon, found, "clients refuse it from then on", "renew the certificate"),
		soft(len(audited) > 0, found+"; mode: audit for "+some(audited), "what the policy denies is let through", "set their mode to enforce once berm policy learn has nothing to add"),
		soft(l.AllowPlain && l.ClientCAFile == "", found+", without client certificates", "whoever reaches it is its caller", "set client_ca_file, or keep it in a network of those who may"),
		okay(true, found))
}

func checkAuditLog(ctx context.Context, limit time.Duration, path string) []finding {
	err := serve.Try(ctx, limit, func(context.Context) error {
		if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) {
			return access(filepath.Dir(path), unix.W_OK|unix.X_OK)
		}
		return access(path, unix.W_OK)
	})
	return judge("doors.audit_log",
		bad(err != nil, said(err), wontStart, "set engine_api.audit_log to a file that berm may write, in a directory that is there"),
		okay(true, path))
}

// checkRestarts reports the containers that the server restarts in place of the engine, from the
// database.
func checkRestarts(ctx context.Context, limit time.Duration, database string) []finding {
	rows, err := serve.Within(ctx, limit, func(ctx context.Context) ([]restart.Row, error) { return store.ReadRestarts(ctx, database) })
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
	return judge("doors.restarts",
		soft(err != nil, said(err), "what waits for its restart isn't known", "run berm doctor as the server's user"),
		okay(true, found))
}

// checkCollector checks whether a collector of telemetry listens. It doesn't print the URL, which
// may hold a secret.
func checkCollector(ctx context.Context, limit time.Duration, cfg config.Otel) []finding {
	const id = "doors.telemetry"
	if cfg.Endpoint == "" {
		return judge(id, okay(true, "nothing is sent"))
	}
	u, _ := url.Parse(cfg.Endpoint) // the configuration is valid
	address := net.JoinHostPort(u.Hostname(), cmp.Or(u.Port(), u.Scheme))
	err := serve.Try(ctx, limit, func(ctx context.Context) error {
		conn, err := new(net.Dialer).DialContext(ctx, "tcp", address)
		if err != nil {
			return err
		}
		return conn.Close()
	})
	return judge(id,
		soft(err != nil, said(err), "logs, metrics and traces are lost until the collector is there", "start it, or set otel.endpoint right"),
		okay(true, "a collector listens on "+address))
}

// listenable returns nil if a server could listen on an address, and EADDRINUSE if a process does.
// It listens on a TCP port for a moment.
func listenable(ctx context.Context, address string) error {
	if path, isUnix := strings.CutPrefix(address, "unix://"); isUnix {
		return socketable(ctx, path)
	}
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", address)
	if err != nil {
		return err
	}
	return l.Close()
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
	if _, err := os.Lstat(dir); errors.Is(err, fs.ErrNotExist) { // the server makes it
		dir = filepath.Dir(dir)
	}
	return access(dir, unix.W_OK|unix.X_OK)
}
