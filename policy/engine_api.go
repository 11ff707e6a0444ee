package policy

import (
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// The words of an EngineAPI's fields.
const (
	wordOn       = "on"
	wordOff      = "off"
	wordOwn      = "own"
	wordInternal = "internal"
	wordLoopback = "loopback"
	wordAny      = "any"
	wordNonRoot  = "non_root"

	restartNo       = "no"
	logJSONFile     = "json-file"
	logLocal        = "local"
	logNone         = "none"
	maxListed       = 256 // entries of a list in the file
	maxUlimit       = 1 << 30
	maxObjectsLimit = 1 << 20
)

var (
	restartPolicies = []string{restartNo, "on-failure", "always", "unless-stopped"}
	logDrivers      = []string{logJSONFile, logLocal, logNone}
	specialRanges   = []netip.Prefix{
		netip.MustParsePrefix("0.0.0.0/8"), netip.MustParsePrefix("127.0.0.0/8"), netip.MustParsePrefix("169.254.0.0/16"), netip.MustParsePrefix("224.0.0.0/3"),
		netip.MustParsePrefix("::/8"), netip.MustParsePrefix("fe80::/10"), netip.MustParsePrefix("ff00::/8"),
	}
	registryHost = regexp.MustCompile(`^[a-z0-9]([a-z0-9.-]{0,253}[a-z0-9])?(:[1-9][0-9]{0,4})?$`)
	addURL       = regexp.MustCompile(`^https?://[A-Za-z0-9.-]+(:[0-9]+)?/([A-Za-z0-9._~-]+/)*$`)
)

// builtinEngineAPI is what the profile default has without a file.
func builtinEngineAPI() EngineAPI {
	return EngineAPI{
		Capabilities: slices.DeleteFunc(slices.Clone(engineCapabilities), func(c string) bool {
			return c == "CAP_MKNOD" || c == "CAP_NET_RAW"
		}),
		Volumes: wordOwn, Networks: wordInternal, Ports: wordOff, PortRange: "1024-65535",
		LogDrivers: slices.Clone(logDrivers), LogMaxMB: 30, Restart: slices.Clone(restartPolicies),
		Runtimes: []string{}, Sysctls: []string{}, Users: wordAny, DNS: wordOff, TmpfsMB: tmpfsMB, MaxUlimit: 1 << 20,
		Pull: wordOn, Build: wordOff, BuildKit: builtinBuildKit(), BuildAddURL: []string{}, Commit: wordOff, Tags: []string{}, Load: []string{}, Push: []string{}, Login: []string{}, Archive: wordOn, Exec: wordOn, DockerSocket: wordOff,
		Subnets: []string{}, HostGateway: wordOff, RedactEnv: []string{}, MaxObjects: 64, MaxExecs: 1024,
	}
}

// clone returns a copy that shares nothing with the original.
func (e EngineAPI) clone() EngineAPI {
	for _, list := range []*[]string{&e.Capabilities, &e.LogDrivers, &e.Restart, &e.Runtimes, &e.Sysctls, &e.BuildKit.Outputs, &e.BuildAddURL, &e.Tags, &e.Load, &e.Push, &e.Login, &e.Subnets, &e.RedactEnv} {
		*list = slices.Clone(*list)
	}
	return e
}

// checkEngineAPI checks and normalises what the file says of the engine's own API for
// one profile; what is inherited has been checked.
func (l *loader) checkEngineAPI(at string, e *EngineAPI) {
	for _, w := range []struct {
		key, v  string
		allowed []string
	}{
		{"volumes", e.Volumes, []string{wordOwn, wordOff}},
		{"networks", e.Networks, []string{wordOwn, wordInternal, wordOff}},
		{"ports", e.Ports, []string{wordOff, wordLoopback, wordAny}},
		{"users", e.Users, []string{wordAny, wordNonRoot}},
		{"dns", e.DNS, []string{wordOff, wordOn}},
		{"host_gateway", e.HostGateway, []string{wordOff, wordOn}},
		{"pull", e.Pull, []string{wordOn, wordOff}},
		{"build", e.Build, []string{wordOn, wordOff}},
		{"commit", e.Commit, []string{wordOn, wordOff}},
		{"archive", e.Archive, []string{wordOn, wordOff}},
		{"exec", e.Exec, []string{wordOn, wordOff}},
		{"docker_socket", e.DockerSocket, []string{wordOff, wordOn}},
	} {
		l.word(at+"."+w.key, w.v, w.allowed...)
	}
	number := func(key string, v, low, high int64) {
		if l.sound[at+"."+key] {
			within(l, at+"."+key, v, low, high)
		}
	}
	number("log_max_mb", e.LogMaxMB, 1, maxMB)
	number("tmpfs_mb", e.TmpfsMB, 1, maxMB)
	number("max_ulimit", e.MaxUlimit, 1, maxUlimit)
	number("max_memlock_mb", e.MaxMemlockMB, 0, maxMB)
	number("max_objects", e.MaxObjects, 0, maxObjectsLimit)
	number("max_execs", e.MaxExecs, 0, maxObjectsLimit)
	if _, _, ok := parsePortRange(e.PortRange); !ok && l.sound[at+".port_range"] {
		l.problem(at+".port_range", "%q is not two ports from 1 to 65535, as 1024-65535, the lower one first", e.PortRange)
	}
	l.checkEngineLists(at, e)
	l.checkBuildKit(at+".buildkit", &e.BuildKit)
	if l.sound[at+".capabilities"] {
		for i, c := range e.Capabilities {
			if e.Capabilities[i] = capabilityName(c); !slices.Contains(knownCapabilities, e.Capabilities[i]) {
				l.problem(at+".capabilities", "%q is not the name of one capability", c)
			}
		}
		e.Capabilities = sortedSet(e.Capabilities)
	}
}

// checkEngineLists checks the lists that the file gives.
func (l *loader) checkEngineLists(at string, e *EngineAPI) {
	oneOf := func(allowed []string) func(string) string {
		return func(s string) string {
			if !slices.Contains(allowed, s) {
				return "must be " + orList(allowed)
			}
			return ""
		}
	}
	for _, list := range []struct {
		key    string
		values []string
		bad    func(string) string
	}{
		{"log_drivers", e.LogDrivers, oneOf(logDrivers)},
		{"restart", e.Restart, oneOf(restartPolicies)},
		{"runtimes", e.Runtimes, func(s string) string {
			if s == "" || !runtimeClass.MatchString(s) {
				return "is not a runtime's name"
			}
			return ""
		}},
		{"sysctls", e.Sysctls, badSysctl},
		{"buildkit.outputs", e.BuildKit.Outputs, oneOf(buildOutputs)},
		{"build_add_url", e.BuildAddURL, func(s string) string {
			if !addURL.MatchString(s) || strings.Contains(s, "..") {
				return "must be http:// or https://, a host and a path that ends with /"
			}
			return ""
		}},
		{"subnets", e.Subnets, badPool},
		{"tags", e.Tags, badPattern},
		{"load", e.Load, badPattern},
		{"push", e.Push, badPattern},
		{"login", e.Login, func(s string) string {
			if !registryHost.MatchString(s) {
				return "must be a registry as images name it: a host, and a port if it isn't 443"
			}
			return ""
		}},
	} {
		path := at + "." + list.key
		if !l.sound[path] {
			continue
		}
		if len(list.values) > maxListed {
			l.problem(path, "has %d entries, more than %d", len(list.values), maxListed)
			continue
		}
		for i, s := range list.values {
			// Each once, so that the file says what it means.
			if why := list.bad(s); why != "" {
				l.problem(fmt.Sprintf("%s[%d]", path, i), "%q %s", s, why)
			} else if slices.Contains(list.values[:i], s) {
				l.problem(fmt.Sprintf("%s[%d]", path, i), "%q is there twice", s)
			}
		}
	}
	if l.sound[at+".log_drivers"] && len(e.LogDrivers) == 0 {
		l.problem(at+".log_drivers", "must name at least one of %s", orList(logDrivers))
	}
	if l.sound[at+".redact_env"] {
		l.globs(at+".redact_env", e.RedactEnv)
	}
}

// badPattern says what is wrong with a pattern of images.
func badPattern(s string) string {
	if _, err := parsePattern(s); err != nil {
		return fmt.Sprintf("is no pattern: %v", err)
	}
	return ""
}

// badPool says what is wrong with a range of which networks may have subnets.
func badPool(s string) string {
	pool, err := netip.ParsePrefix(s)
	switch {
	case err != nil || pool != pool.Masked() || pool.Addr().Is4In6():
		return "is not a range such as 10.80.0.0/16"
	case slices.ContainsFunc(specialRanges, pool.Overlaps):
		return "has addresses of the host itself, of links or for many receivers"
	}
	return ""
}

// badSysctl says what is wrong with the name of a sysctl: only those that a
// container has for itself can be allowed.
func badSysctl(s string) string {
	namespaced := []string{"kernel.msgmax", "kernel.msgmnb", "kernel.msgmni", "kernel.sem", "kernel.shmall", "kernel.shmmax", "kernel.shmmni", "kernel.shm_rmid_forced"}
	switch {
	case strings.ContainsAny(s, "/ \t\n*=") || len(s) > 255 || strings.HasSuffix(s, "."):
	case slices.Contains(namespaced, s), strings.HasPrefix(s, "fs.mqueue."), strings.HasPrefix(s, "net."):
		return ""
	}
	return "is not the name of a sysctl that a container has for itself"
}

func parsePortRange(s string) (low, high int, ok bool) {
	from, to, _ := strings.Cut(s, "-")
	low, errLow := strconv.Atoi(from)
	high, errHigh := strconv.Atoi(to)
	return low, high, errLow == nil && errHigh == nil && low >= 1 && high <= 65535 && low <= high
}
