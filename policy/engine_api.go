package policy

import (
	"fmt"
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
	addURL          = regexp.MustCompile(`^https?://[A-Za-z0-9.-]+(:[0-9]+)?/([A-Za-z0-9._~-]+/)*$`)
)

// engineAPIFile is what a profile of the file says of the engine's own API.
type engineAPIFile struct {
	Capabilities   []string `yaml:"capabilities"`
	Volumes        *string  `yaml:"volumes"`
	Networks       *string  `yaml:"networks"`
	Ports          *string  `yaml:"ports"`
	PortRange      *string  `yaml:"port_range"`
	LogDrivers     []string `yaml:"log_drivers"`
	LogMaxMB       *int64   `yaml:"log_max_mb"`
	Restart        []string `yaml:"restart"`
	Runtimes       []string `yaml:"runtimes"`
	Sysctls        []string `yaml:"sysctls"`
	Users          *string  `yaml:"users"`
	DNS            *string  `yaml:"dns"`
	TmpfsMB        *int64   `yaml:"tmpfs_mb"`
	MaxUlimit      *int64   `yaml:"max_ulimit"`
	Pull           *string  `yaml:"pull"`
	Build          *string  `yaml:"build"`
	BuildAddURL    []string `yaml:"build_add_url"`
	Commit         *string  `yaml:"commit"`
	Tags           []string `yaml:"tags"`
	Archive        *string  `yaml:"archive"`
	Exec           *string  `yaml:"exec"`
	RedactEnv      []string `yaml:"redact_env"`
	MaxObjects     *int64   `yaml:"max_objects"`
	MaxExecs       *int64   `yaml:"max_execs"`
	ReadOnlyRootfs *bool    `yaml:"read_only_rootfs"`
}

// builtinEngineAPI is what the profile default has without a file.
func builtinEngineAPI() EngineAPI {
	return EngineAPI{
		Capabilities: slices.DeleteFunc(slices.Clone(engineCapabilities), func(c string) bool {
			return c == "CAP_MKNOD" || c == "CAP_NET_RAW"
		}),
		Volumes: wordOwn, Networks: wordInternal, Ports: wordOff, PortRange: "1024-65535",
		LogDrivers: slices.Clone(logDrivers), LogMaxMB: 30, Restart: slices.Clone(restartPolicies),
		Runtimes: []string{}, Sysctls: []string{}, Users: wordAny, DNS: wordOff, TmpfsMB: tmpfsMB, MaxUlimit: 1 << 20,
		Pull: wordOn, Build: wordOff, BuildAddURL: []string{}, Commit: wordOff, Tags: []string{}, Archive: wordOn, Exec: wordOn,
		RedactEnv: []string{}, MaxObjects: 64, MaxExecs: 1024,
	}
}

// clone returns a copy that shares nothing with the original.
func (e EngineAPI) clone() EngineAPI {
	var f engineAPIFile
	take(&f, e)
	give(&e, f)
	return e
}

// checkEngineAPI checks and normalises what the file says of the engine's own API for
// one profile; what is inherited has been checked. own may be nil.
func (l *loader) checkEngineAPI(at string, e *EngineAPI, own *engineAPIFile) {
	if own == nil {
		return
	}
	word := func(key string, v *string, allowed ...string) {
		if v != nil && !slices.Contains(allowed, *v) {
			l.problem(at+"."+key, "is %q, must be %s", *v, orList(allowed))
		}
	}
	word("volumes", own.Volumes, wordOwn, wordOff)
	word("networks", own.Networks, wordOwn, wordInternal, wordOff)
	word("ports", own.Ports, wordOff, wordLoopback, wordAny)
	word("users", own.Users, wordAny, wordNonRoot)
	word("dns", own.DNS, wordOff, wordOn)
	word("pull", own.Pull, wordOn, wordOff)
	word("build", own.Build, wordOn, wordOff)
	word("commit", own.Commit, wordOn, wordOff)
	word("archive", own.Archive, wordOn, wordOff)
	word("exec", own.Exec, wordOn, wordOff)
	number := func(key string, v *int64, low, high int64) {
		if v != nil {
			within(l, at+"."+key, *v, low, high)
		}
	}
	number("log_max_mb", own.LogMaxMB, 1, maxMB)
	number("tmpfs_mb", own.TmpfsMB, 1, maxMB)
	number("max_ulimit", own.MaxUlimit, 1, maxUlimit)
	number("max_objects", own.MaxObjects, 0, maxObjectsLimit)
	number("max_execs", own.MaxExecs, 0, maxObjectsLimit)
	if _, _, ok := parsePortRange(e.PortRange); !ok && own.PortRange != nil {
		l.problem(at+".port_range", "%q is not two ports from 1 to 65535, as 1024-65535, the lower one first", e.PortRange)
	}
	l.checkEngineLists(at, own)
	if own.Capabilities != nil {
		for i, c := range e.Capabilities {
			if e.Capabilities[i] = capabilityName(c); !slices.Contains(knownCapabilities, e.Capabilities[i]) {
				l.problem(at+".capabilities", "%q is not the name of one capability", c)
			}
		}
		slices.Sort(e.Capabilities)
		e.Capabilities = slices.Compact(e.Capabilities)
	}
}

func (l *loader) checkEngineLists(at string, own *engineAPIFile) {
	each := func(key string, list []string, bad func(string) string) {
		if len(list) > maxListed {
			l.problem(at+"."+key, "has %d entries, more than %d", len(list), maxListed)
			return
		}
		for i, s := range list {
			// Each once, so that the file says what it means.
			if why := bad(s); why != "" {
				l.problem(fmt.Sprintf("%s.%s[%d]", at, key, i), "%q %s", s, why)
			} else if slices.Contains(list[:i], s) {
				l.problem(fmt.Sprintf("%s.%s[%d]", at, key, i), "%q is there twice", s)
			}
		}
	}
	oneOf := func(allowed []string) func(string) string {
		return func(s string) string {
			if !slices.Contains(allowed, s) {
				return "must be " + orList(allowed)
			}
			return ""
		}
	}
	each("log_drivers", own.LogDrivers, oneOf(logDrivers))
	if own.LogDrivers != nil && len(own.LogDrivers) == 0 {
		l.problem(at+".log_drivers", "must name at least one of %s", orList(logDrivers))
	}
	each("restart", own.Restart, oneOf(restartPolicies))
	each("runtimes", own.Runtimes, func(s string) string {
		if s == "" || !runtimeClass.MatchString(s) {
			return "is not a runtime's name"
		}
		return ""
	})
	each("sysctls", own.Sysctls, badSysctl)
	each("build_add_url", own.BuildAddURL, func(s string) string {
		if !addURL.MatchString(s) || strings.Contains(s, "..") {
			return "must be http:// or https://, a host and a path that ends with /"
		}
		return ""
	})
	each("tags", own.Tags, func(s string) string {
		if _, err := parsePattern(s); err != nil {
			return fmt.Sprintf("is no pattern: %v", err)
		}
		return ""
	})
	l.globs(at+".redact_env", own.RedactEnv)
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
