package config

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/netip"
	"net/url"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

var (
	instancePattern = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$`)
	networkPattern  = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}$`)
	// namespacePattern is what containerd takes for an identifier.
	namespacePattern = regexp.MustCompile(`^[A-Za-z0-9]+([_.-][A-Za-z0-9]+)*$`)
	envPattern       = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`)
	headerPattern    = regexp.MustCompile("^[A-Za-z0-9!#$%&'*+.^_`|~-]+$")
)

// AgentNone is the Engine.AgentDir that turns the agent off.
const AgentNone = "none"

// maxContainerdStateDir leaves room for what the containerd backend keeps there.
const maxContainerdStateDir = 79

type problems []error

func (p *problems) unless(ok bool, key, format string, args ...any) {
	if !ok {
		*p = append(*p, fmt.Errorf("%s: %s", key, fmt.Sprintf(format, args...)))
	}
}

// oneOf reports a value that isn't one of the known ones.
func (p *problems) oneOf(key, value string, known ...string) {
	last := len(known) - 1
	p.unless(slices.Contains(known, value), key, "want %s or %s, not %q", strings.Join(known[:last], ", "), known[last], value)
}

func (c *Config) validate() []error {
	var p problems
	c.HTTP.validate(&p)
	c.Engine.validate(&p)
	c.Otel.validate(&p)
	c.Sandbox.validate(&p)
	c.Storage.validate(&p)
	c.EngineAPI.validate(&p, c.HTTP, c.Engine.Kind)
	for i, l := range c.EngineAPI.Listeners {
		p.unless(!l.AllowPlain || c.Sandbox.Network != NetworkAuto, fmt.Sprintf("engine_api.listeners[%d].allow_plain", i),
			"with sandbox.network: auto, sandboxes would reach this listener, and be its callers: name a network that Berm isn't in")
	}

	p.oneOf("logging.level", c.Logging.Level, "debug", "info", "warn", "error")
	p.oneOf("logging.format", c.Logging.Format, "text", "json")
	ratio := c.Tracing.SampleRatio
	p.unless(ratio >= 0 && ratio <= 1, "tracing.sample_ratio", "want 0 to 1, not %v", ratio)

	p.unless(headerPattern.MatchString(c.Security.TokenHeader), "security.token_header", "%q is no name of a header", c.Security.TokenHeader)
	p.unless(c.Security.Tokens == "" || c.Security.TokenFile == "", "security.token_file", "BERM_SECURITY_TOKENS is set as well; choose one")
	p.unless(c.Security.SigningKey == "" || c.Security.SigningKeyFile == "", "security.signing_key_file", "BERM_SECURITY_SIGNING_KEY is set as well; choose one")
	p.paths(fields(c))
	p.unless(c.StateDir != "", "state_dir", "must not be empty")
	p.unless(c.Engine.Kind != "containerd" || len(c.StateDir) <= maxContainerdStateDir, "state_dir",
		"with containerd it has at most %d characters, for pipes and sockets lie below it", maxContainerdStateDir)
	return p
}

func (e Engine) validate(p *problems) {
	p.oneOf("engine.kind", e.Kind, "docker", "containerd")
	p.unless(e.CallTimeout > 0, "engine.call_timeout", "must be more than 0")
	p.unless(e.Instance == "" || instancePattern.MatchString(e.Instance), "engine.instance",
		"want up to 63 letters, digits, '_', '.' and '-', not %q", e.Instance)
	p.unless(e.AgentDir == "" || e.AgentDir == AgentNone || path.IsAbs(e.AgentDir), "engine.agent_dir", "want an absolute path or none, not %q", e.AgentDir)
	if e.Kind == "docker" {
		for _, f := range []struct{ key, value string }{
			{"namespace", e.Namespace}, {"snapshotter", e.Snapshotter}, {"cgroup_parent", e.CgroupParent}, {"netns", e.Netns},
			{"subnets", e.Subnets}, {"cni_plugin_dirs", strings.Join(e.CNIPluginDirs, ",")},
		} {
			p.unless(f.value == "", "engine."+f.key, "is for engine.kind: containerd only; Docker would not heed it")
		}
		return
	}
	p.unless(e.Address == "" || path.IsAbs(strings.TrimPrefix(e.Address, "unix://")), "engine.address",
		"want the path of containerd's socket, not %q", e.Address)
	p.unless(e.Namespace == "" || len(e.Namespace) <= 76 && namespacePattern.MatchString(e.Namespace), "engine.namespace",
		"want up to 76 letters and digits, with single '_', '.' and '-' in between, not %q", e.Namespace)
	p.unless(e.Snapshotter == "" || namespacePattern.MatchString(e.Snapshotter), "engine.snapshotter", "%q is no name of a snapshotter", e.Snapshotter)
	p.unless(e.CgroupParent == "" || path.IsAbs(e.CgroupParent) && path.Clean(e.CgroupParent) == e.CgroupParent && e.CgroupParent != "/", "engine.cgroup_parent",
		"want a clean absolute path below /, not %q", e.CgroupParent)
	_, err := parsePool(e.Subnets)
	p.unless(err == nil, "engine.subnets", "want an IPv4 prefix of at most 24 bits, such as 10.213.0.0/16, not %q", e.Subnets)
	for _, dir := range e.CNIPluginDirs {
		p.unless(path.IsAbs(dir), "engine.cni_plugin_dirs", "want absolute paths, not %q", dir)
	}
}

// valid returns v. It drops the error of parsing a setting that validate has checked already.
func valid[T any](v T, _ error) T { return v }

// Pool returns Subnets as a prefix, or the zero Prefix if Subnets is empty.
func (e Engine) Pool() netip.Prefix { return valid(parsePool(e.Subnets)) }

func parsePool(s string) (netip.Prefix, error) {
	if s == "" {
		return netip.Prefix{}, nil
	}
	pool, err := netip.ParsePrefix(s)
	if err != nil {
		return netip.Prefix{}, err
	}
	if !pool.Addr().Is4() || pool.Bits() > 24 || pool != pool.Masked() {
		return netip.Prefix{}, errors.New("not a pool of IPv4 networks")
	}
	return pool, nil
}

// paths checks the settings that are paths.
func (p *problems) paths(list []field) {
	for _, f := range list {
		p.unless(!f.path || f.value.IsZero() || path.IsAbs(f.value.String()), f.key, "want an absolute path, not %q", f.value)
	}
}

// socket checks the path of a unix socket.
func (p *problems) socket(key, address, name string) {
	p.unless(path.IsAbs(name), key, "want unix:// and an absolute path, not %q", address)
	p.unless(len(name) < 108, key, "a socket's path has at most 107 bytes")
}

func isHostPort(s string) bool {
	_, port, err := net.SplitHostPort(s)
	_, perr := strconv.ParseUint(port, 10, 16)
	return err == nil && perr == nil
}

func isHost(s string) bool { return s != "" && !strings.ContainsAny(s, "/ ") }

func (h HTTP) validate(p *problems) {
	if name, ok := strings.CutPrefix(h.Listen, "unix://"); ok {
		p.socket("http.listen", h.Listen, name)
	} else if name, ok := strings.CutPrefix(h.Listen, systemdScheme); ok {
		p.passed("http.listen", name)
	} else {
		p.unless(h.Listen == ListenNone || isHostPort(h.Listen), "http.listen", "want host:port, unix:///path, systemd:NAME or none, not %q", h.Listen)
	}
	_, err := parseMode(h.SocketMode)
	p.unless(err == nil, "http.socket_mode", "want an octal file mode up to 0777, not %q", h.SocketMode)
	p.unless(h.DrainTimeout > 0, "http.drain_timeout", "must be more than 0")
	for _, host := range h.AllowedHosts {
		p.unless(isHost(host), "http.allowed_hosts", "%q is no host name", host)
	}
	for _, origin := range h.AllowedOrigins {
		u, err := url.Parse(origin)
		p.unless(err == nil && u.Scheme != "" && u.Host != "" && u.Path == "" && u.User == nil, "http.allowed_origins",
			"%q is no origin such as https://console.example.com", origin)
	}
}

// FileMode returns SocketMode as a file mode.
func (h HTTP) FileMode() fs.FileMode { return valid(parseMode(h.SocketMode)) }

func parseMode(s string) (fs.FileMode, error) {
	n, err := strconv.ParseUint(s, 8, 32)
	if err != nil || n > 0o777 {
		return 0, errors.New("not an octal file mode")
	}
	return fs.FileMode(n), nil
}

// SlogLevel returns Level as a slog.Level.
func (l Logging) SlogLevel() (level slog.Level) {
	_ = level.UnmarshalText([]byte(l.Level)) // validate has checked it
	return level
}

func (o Otel) validate(p *problems) {
	p.unless(o.Headers == "" || o.HeadersFile == "", "otel.headers_file", "BERM_OTEL_HEADERS is set as well; choose one")
	p.unless(o.ServiceName != "", "otel.service_name", "must not be empty")
	if o.Endpoint == "" {
		return
	}
	u, err := url.Parse(o.Endpoint)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" {
		p.unless(false, "otel.endpoint", "want http://host:port or https://host:port")
		return
	}
	p.unless(u.User == nil && u.RawQuery == "", "otel.endpoint", "carries credentials; give them as headers")
	p.unless(u.Scheme == "https" || loopback(u.Hostname()) || o.Insecure, "otel.endpoint",
		"http:// to a host that isn't loopback needs otel.insecure: true")
}

func loopback(host string) bool {
	ip, err := netip.ParseAddr(host)
	return host == "localhost" || err == nil && ip.IsLoopback()
}

// maxWorkspaceQuotaMB is one PiB, in MiB.
const maxWorkspaceQuotaMB = 1 << 30

func (s Storage) validate(p *problems) {
	p.unless(s.WorkspaceQuotaMB >= 0 && s.WorkspaceQuotaMB <= maxWorkspaceQuotaMB, "storage.workspace_quota_mb",
		"want 0 to %d, not %d", maxWorkspaceQuotaMB, s.WorkspaceQuotaMB)
	p.oneOf("storage.project_quotas", s.ProjectQuotas, ProjectQuotasAuto, ProjectQuotasRequired, ProjectQuotasOff)
}

func (s Sandbox) validate(p *problems) {
	p.unless(s.Image != "", "sandbox.image", "must not be empty")
	p.unless(networkPattern.MatchString(s.Network), "sandbox.network", "%q is no name of a network", s.Network)
	p.unless(s.Port >= 0 && s.Port < 1<<16, "sandbox.port", "want 0 to 65535, not %d", s.Port)
	p.unless(s.TTL > 0, "sandbox.ttl", "must be more than 0")
	p.unless(s.IdleTTL >= 0, "sandbox.idle_ttl", "must not be negative")
	p.unless(s.CleanupInterval >= 100*time.Millisecond, "sandbox.cleanup_interval", "must be at least 100ms")
	p.unless(s.MaxSandboxes >= 0, "sandbox.max_sandboxes", "must not be negative")
	for _, most := range []struct {
		key     string
		n, most int
	}{ // the agent keeps 1,024 processes
		{"sandbox.max_commands", s.MaxCommands, 512},
		{"sandbox.max_processes", s.MaxProcesses, 256},
	} {
		p.unless(most.n >= 1 && most.n <= most.most, most.key, "want 1 to %d, not %d", most.most, most.n)
	}
	for name, value := range s.Env {
		p.unless(envPattern.MatchString(name), "sandbox.env", "%q is no name of an environment variable", name)
		p.unless(!strings.Contains(value, "\x00"), "sandbox.env", "the value of %s contains a NUL", name)
	}
	for _, arg := range s.Command {
		p.unless(!strings.Contains(arg, "\x00"), "sandbox.command", "an argument contains a NUL")
	}
	taken := map[string]string{}
	for _, mount := range [][2]string{
		{"sandbox.chat_mount_path", s.ChatMountPath},
		{"sandbox.dependencies_mount_path", s.DependenciesMountPath},
		{"sandbox.lambda_tools_mount_path", s.LambdaToolsMountPath},
		{"sandbox.volume_mount_path", s.VolumeMountPath},
	} {
		key, dir := mount[0], path.Clean(mount[1])
		p.unless(path.IsAbs(mount[1]) && dir != "/", key, "want an absolute path below /, not %q", mount[1])
		other, clash := taken[dir]
		p.unless(!clash, key, "is the same as %s", other)
		taken[dir] = key
	}
}
