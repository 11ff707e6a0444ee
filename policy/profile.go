package policy

import (
	"cmp"
	"maps"
	"math"
	"regexp"
	"slices"
	"strings"
	"time"
)

const (
	defaultProfile = "default"
	defaultImage   = "python:3.11-slim"

	minCPUs     = 0.01 // less than that is no limit at all to some engines
	minMemoryMB = 32
	maxMB       = 1 << 40 // so that bytes fit into 64 bits
	maxPids     = 1 << 22
	maxCPUs     = 1 << 16
	tmpfsMB     = 64
)

// How Berm reaches its program in a sandbox.
const (
	AgentOn  = "on"  // also "socket": the sandbox's first process dials Berm
	AgentOff = "off" // also "exec": the engine starts the program when it is needed
)

// Whether a sandbox has a user namespace with a range of the host's IDs of its own.
const (
	UsernsAuto = "auto"
	UsernsOff  = "off"
)

// lockable are the fields that a profile can lock.
var lockable = []string{
	"image", "network", "host_path", "host_path_mode", "mount_path", "extra_mounts", "cpus", "memory_mb", "pids_limit",
	"read_only_rootfs", "workspace_quota_mb", "ttl", "idle_ttl", "timeout",
}

// Profile is a complete profile: its own values, over those of the profile that it extends and
// the built-in ones. Fields that a request leaves out, or that Locked has, take its values.
type Profile struct {
	Name             string        `yaml:"-" json:"name"`
	Image            string        `yaml:"image" json:"image"` // normalised
	Network          string        `yaml:"network" json:"network"`
	HostPathMode     string        `yaml:"host_path_mode" json:"host_path_mode"`
	MountPath        string        `yaml:"mount_path" json:"mount_path"`
	Timeout          time.Duration `yaml:"timeout" json:"timeout"` // of a command without its own
	MaxTimeout       time.Duration `yaml:"max_timeout" json:"max_timeout"`
	CPUs             float64       `yaml:"cpus" json:"cpus"`
	MaxCPUs          float64       `yaml:"max_cpus" json:"max_cpus"`
	MemoryMB         int64         `yaml:"memory_mb" json:"memory_mb"`
	MaxMemoryMB      int64         `yaml:"max_memory_mb" json:"max_memory_mb"`
	PidsLimit        int64         `yaml:"pids_limit" json:"pids_limit"`
	MaxPidsLimit     int64         `yaml:"max_pids_limit" json:"max_pids_limit"`
	ReadOnlyRootfs   bool          `yaml:"read_only_rootfs" json:"read_only_rootfs"`
	WorkspaceQuotaMB int64         `yaml:"workspace_quota_mb" json:"workspace_quota_mb"` // 0 is unlimited
	TTL              time.Duration `yaml:"ttl" json:"ttl"`
	IdleTTL          time.Duration `yaml:"idle_ttl" json:"idle_ttl"`           // 0 is never
	User             string        `yaml:"user" json:"user"`                   // empty is the image's own
	CapAdd           []string      `yaml:"cap_add" json:"cap_add"`             // sorted, never nil
	RuntimeClass     string        `yaml:"runtime_class" json:"runtime_class"` // empty is the engine's default
	Agent            string        `yaml:"agent" json:"agent"`                 // "on" or "off"
	Userns           string        `yaml:"userns" json:"userns"`               // "auto" or "off"
	EngineAPI        EngineAPI     `yaml:"engine_api" json:"engine_api"`
	Locked           []string      `yaml:"locked" json:"locked"` // sorted, never nil
}

// Profiles returns the names of all profiles, sorted.
func (p *Policy) Profiles() []string { return sortedKeys(p.profiles) }

// Profile returns the profile of a name; empty is "default". It returns false if there is none.
func (p *Policy) Profile(name string) (Profile, bool) {
	if name == "" {
		name = defaultProfile
	}
	pr, ok := p.profiles[name]
	pr.CapAdd, pr.Locked, pr.EngineAPI = slices.Clone(pr.CapAdd), slices.Clone(pr.Locked), pr.EngineAPI.clone()
	return pr, ok
}

func (p Profile) locked(field string) bool { return slices.Contains(p.Locked, field) }

// builtinProfiles exist in every policy, and a file can change them. All but default extend
// default.
const builtinProfiles = `
default: {network: off, host_path_mode: rw, max_timeout: 120s, cpus: 1, memory_mb: 512, pids_limit: 128, read_only_rootfs: true}
offline_readonly: {network: off, host_path_mode: ro, max_timeout: 60s, cpus: 0.5, memory_mb: 256, pids_limit: 64, read_only_rootfs: true,
  locked: [network, host_path_mode, read_only_rootfs]}
network_basic: {network: on, host_path_mode: rw, max_timeout: 120s, cpus: 1, memory_mb: 512, pids_limit: 128, read_only_rootfs: true, locked: [],
  engine_api: {networks: own, dns: on}}
network_extended: {network: on, host_path_mode: rw, max_timeout: 300s, cpus: 2, memory_mb: 1024, pids_limit: 256, read_only_rootfs: false, locked: [],
  engine_api: {networks: own, dns: on}}
`

var profileName = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$`)

// loadProfiles loads all profiles. The networks, images and TTLs must be loaded before.
func (l *loader) loadProfiles() {
	var all map[string]fileProfile
	l.builtin = Decode([]byte(builtinProfiles), &all)
	for _, name := range sortedKeys(l.file.Profiles) {
		path := join("profiles", name)
		if !profileName.MatchString(name) {
			l.problem(path, "a profile's name is letters, digits, _ and -, 64 at most")
		}
		if l.builtin.mappings[name] != nil && l.file.Profiles[name].Extends != "" {
			l.problem(path+".extends", "a built-in profile can't extend another")
		}
	}
	maps.Copy(all, l.file.Profiles)
	l.policy.profiles = map[string]Profile{}
	for _, name := range sortedKeys(all) {
		p := l.profile(name, all, nil)
		if img, err := parseImage(p.Image); err == nil && l.policy.images.requireDigest && l.policy.images.pinned(img).digest == "" {
			l.problem("images.require_digest", "image %s of profile %s has no digest, and no pin gives it one", p.Image, name)
		}
	}
	// Done last, so that a profile's engine_api doesn't inherit its parent's cap_add.
	for name, p := range l.policy.profiles {
		p.EngineAPI.Capabilities = sortedSet(append(slices.Clone(p.EngineAPI.Capabilities), p.CapAdd...))
		l.policy.profiles[name] = p
	}
}

// profile resolves a profile, and first the one that it extends. Above are the profiles that
// extend it.
func (l *loader) profile(name string, all map[string]fileProfile, above []string) Profile {
	if p, ok := l.policy.profiles[name]; ok {
		return p
	}
	p := Profile{
		Image: cmp.Or(l.opts.DefaultImage, defaultImage), MountPath: "/workspace", Timeout: 30 * time.Second,
		MaxCPUs: 2, MaxMemoryMB: 2048, MaxPidsLimit: 512, TTL: l.policy.ttl.Default, IdleTTL: l.policy.ttl.IdleDefault,
		CapAdd: []string{}, Agent: AgentOn, Userns: UsernsOff, EngineAPI: builtinEngineAPI(), Locked: []string{},
	}
	path := join("profiles", name)
	if name != defaultProfile {
		parent, field := cmp.Or(all[name].Extends, defaultProfile), path+".extends"
		if l.builtin.mappings[name] != nil {
			parent = defaultProfile
		}
		switch _, ok := all[parent]; {
		case !ok:
			l.problem(field, "there is no profile %q (known: %s)", parent, strings.Join(sortedKeys(all), ", "))
			parent = defaultProfile
		case parent == name || slices.Contains(above, parent):
			l.problem(field, "%s and %s extend each other", name, parent)
			parent = defaultProfile
		}
		p = l.profile(parent, all, append(above, name))
	}
	own := fileProfile{Profile: p}
	own.Name = name
	l.builtin.decodeOver(name, &own)
	l.decodeOver(path, &own)
	p = own.Profile
	l.checkProfile(path, &p)
	l.policy.profiles[name] = p
	return p
}

var (
	userName     = regexp.MustCompile(`^[0-9]{1,10}(:[0-9]{1,10})?$`)
	runtimeClass = regexp.MustCompile(`^([A-Za-z0-9][A-Za-z0-9_./-]{0,127})?$`)
	capability   = regexp.MustCompile(`^CAP_[A-Z_]{2,32}$`)
)

// checkProfile checks and normalises a profile's values. It doesn't report an inherited value
// again.
func (l *loader) checkProfile(path string, p *Profile) {
	img, err := parseImage(p.Image)
	switch {
	case err == nil:
		p.Image = img.String()
	case l.sound[path+".image"]:
		l.problem(path+".image", "%q %v", p.Image, err)
	case p.Name == defaultProfile:
		l.problem("", "the default image %q %v", p.Image, err)
	}
	if _, ok := l.policy.networks[p.Network]; !ok && p.Network != networkOff && l.sound[path+".network"] {
		l.problem(path+".network", "there is no network %q (known: off, %s)", p.Network, strings.Join(sortedKeys(l.policy.networks), ", "))
	}
	l.word(path+".host_path_mode", p.HostPathMode, modes...)
	if target, why := cleanTarget(p.MountPath); why == "" {
		p.MountPath = target
	} else if l.sound[path+".mount_path"] {
		l.problem(path+".mount_path", "%q %s", p.MountPath, why)
	}
	if !finite(p.CPUs) || p.CPUs < minCPUs || p.CPUs > maxCPUs {
		l.problem(path+".cpus", "must be a number from %v to %v", minCPUs, maxCPUs)
	}
	if !finite(p.MaxCPUs) || p.MaxCPUs > maxCPUs {
		l.problem(path+".max_cpus", "must be a number up to %v", maxCPUs)
	}
	within(l, path+".memory_mb", p.MemoryMB, minMemoryMB, maxMB)
	within(l, path+".max_memory_mb", p.MaxMemoryMB, minMemoryMB, maxMB)
	within(l, path+".pids_limit", p.PidsLimit, 1, maxPids)
	within(l, path+".max_pids_limit", p.MaxPidsLimit, 1, maxPids)
	within(l, path+".workspace_quota_mb", p.WorkspaceQuotaMB, 0, maxMB)
	within(l, path+".timeout", p.Timeout, time.Second, math.MaxInt64)
	within(l, path+".max_timeout", p.MaxTimeout, time.Second, math.MaxInt64)
	notBelow(l, path+".max_cpus", &p.MaxCPUs, p.CPUs)
	notBelow(l, path+".max_memory_mb", &p.MaxMemoryMB, p.MemoryMB)
	notBelow(l, path+".max_pids_limit", &p.MaxPidsLimit, p.PidsLimit)
	notBelow(l, path+".max_timeout", &p.MaxTimeout, p.Timeout)
	if l.sound[path+".ttl"] {
		within(l, path+".ttl", p.TTL, minTTL, l.policy.ttl.MaxLifetime)
	}
	if l.sound[path+".idle_ttl"] && p.IdleTTL != 0 {
		within(l, path+".idle_ttl", p.IdleTTL, minTTL, l.policy.ttl.MaxLifetime)
	}
	if p.User != "" && !userName.MatchString(p.User) {
		l.problem(path+".user", "is %q, must be a number, or two with a colon (uid:gid)", p.User)
	}
	if !runtimeClass.MatchString(p.RuntimeClass) {
		l.problem(path+".runtime_class", "%q is not a runtime's name", p.RuntimeClass)
	}
	switch p.Agent {
	case "socket":
		p.Agent = AgentOn
	case "exec":
		p.Agent = AgentOff
	}
	l.word(path+".agent", p.Agent, AgentOn, AgentOff)
	l.word(path+".userns", p.Userns, UsernsAuto, UsernsOff)
	l.checkEngineAPI(path+".engine_api", &p.EngineAPI)
	for i, c := range p.CapAdd {
		c = capabilityName(c)
		if !capability.MatchString(c) || c == "CAP_ALL" {
			l.problem(path+".cap_add", "%q is not the name of one capability", p.CapAdd[i])
		}
		p.CapAdd[i] = c
	}
	p.CapAdd = sortedSet(p.CapAdd)
	for _, f := range p.Locked {
		if !slices.Contains(lockable, f) && l.sound[path+".locked"] {
			l.problem(path+".locked", "%q can't be locked (these can: %s)", f, strings.Join(lockable, ", "))
		}
	}
	p.Locked = sortedSet(p.Locked)
}

// word checks a word that the file has at a path.
func (l *loader) word(path, v string, allowed ...string) {
	if l.sound[path] && !slices.Contains(allowed, v) {
		l.problem(path, "is %q, must be %s", v, orList(allowed))
	}
}

// sortedSet sorts a list in place and drops duplicates.
func sortedSet(list []string) []string {
	slices.Sort(list)
	return slices.Compact(list)
}

func within[T int64 | time.Duration](l *loader, path string, v, low, high T) {
	if v < low || v > high {
		if high == math.MaxInt64 {
			l.problem(path, "is %v, must be at least %v", v, low)
			return
		}
		l.problem(path, "is %v, must be from %v to %v", v, low, high)
	}
}

// notBelow raises a maximum that is below the profile's own value. That is a problem if the file
// sets the maximum for this profile.
func notBelow[T int64 | float64 | time.Duration](l *loader, path string, most *T, v T) {
	if math.IsNaN(float64(v)) || *most >= v { // a NaN is a problem already
		return
	}
	if l.sound[path] {
		l.problem(path, "is %v, below the profile's own value of %v: lower that as well", *most, v)
	}
	*most = v
}

func finite(f float64) bool { return !math.IsNaN(f) && !math.IsInf(f, 0) }
