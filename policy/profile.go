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

// Profile is a profile in force: its own values, those that it extends, and the
// built-in ones. A request's fields take its values where they are left out, or
// locked.
type Profile struct {
	Name             string        `json:"name"`
	Image            string        `json:"image"` // normalised
	Network          string        `json:"network"`
	HostPathMode     string        `json:"host_path_mode"`
	MountPath        string        `json:"mount_path"`
	Timeout          time.Duration `json:"timeout"` // of a command that names none
	MaxTimeout       time.Duration `json:"max_timeout"`
	CPUs             float64       `json:"cpus"`
	MaxCPUs          float64       `json:"max_cpus"`
	MemoryMB         int64         `json:"memory_mb"`
	MaxMemoryMB      int64         `json:"max_memory_mb"`
	PidsLimit        int64         `json:"pids_limit"`
	MaxPidsLimit     int64         `json:"max_pids_limit"`
	ReadOnlyRootfs   bool          `json:"read_only_rootfs"`
	WorkspaceQuotaMB int64         `json:"workspace_quota_mb"` // 0 is unlimited
	TTL              time.Duration `json:"ttl"`
	IdleTTL          time.Duration `json:"idle_ttl"`      // 0 is never
	User             string        `json:"user"`          // empty is the image's own
	CapAdd           []string      `json:"cap_add"`       // sorted, never nil
	RuntimeClass     string        `json:"runtime_class"` // empty is the engine's default
	Agent            string        `json:"agent"`         // "on" or "off"
	Userns           string        `json:"userns"`        // "auto" or "off"
	EngineAPI        EngineAPI     `json:"engine_api"`
	Locked           []string      `json:"locked"` // sorted, never nil
}

// Profiles gives the names of all profiles, sorted.
func (p *Policy) Profiles() []string { return sortedKeys(p.profiles) }

// Profile gives a profile by its name; empty is "default". False when there is none.
func (p *Policy) Profile(name string) (Profile, bool) {
	if name == "" {
		name = defaultProfile
	}
	pr, ok := p.profiles[name]
	pr.CapAdd, pr.Locked, pr.EngineAPI = slices.Clone(pr.CapAdd), slices.Clone(pr.Locked), pr.EngineAPI.clone()
	return pr, ok
}

func (p Profile) locked(field string) bool { return slices.Contains(p.Locked, field) }

// overlay returns the profile as the file would have to say it.
func (p Profile) overlay() (o overlay) {
	take(&o, p)
	return o
}

// builtinProfiles are there without a file. All but default extend default.
func builtinProfiles() map[string]overlay {
	table := func(network, mode string, maxTimeout time.Duration, cpus float64, memory, pids int64, readOnly bool) overlay {
		return overlay{
			Network: &network, HostPathMode: &mode, MaxTimeout: &maxTimeout, CPUs: &cpus, MemoryMB: &memory,
			PidsLimit: &pids, ReadOnlyRootfs: &readOnly, Locked: []string{},
		}
	}
	offline := table("off", "ro", 60*time.Second, 0.5, 256, 64, true)
	offline.Locked = []string{"network", "host_path_mode", "read_only_rootfs"}
	basic := table("on", "rw", 120*time.Second, 1, 512, 128, true)
	extended := table("on", "rw", 300*time.Second, 2, 1024, 256, false)
	own, on := wordOwn, wordOn
	basic.EngineAPI = &engineAPIFile{Networks: &own, DNS: &on}
	extended.EngineAPI = basic.EngineAPI
	return map[string]overlay{
		defaultProfile:     table("off", "rw", 120*time.Second, 1, 512, 128, true),
		"offline_readonly": offline,
		"network_basic":    basic,
		"network_extended": extended,
	}
}

var profileName = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$`)

// loadProfiles needs the networks, images and times to be loaded.
func (l *loader) loadProfiles() {
	builtin := builtinProfiles()
	names := maps.Clone(builtin)
	for _, name := range sortedKeys(l.file.Profiles) {
		o := l.file.Profiles[name]
		path := join("profiles", name)
		if !profileName.MatchString(name) {
			l.problem(path, "a profile's name is letters, digits, _ and -, 64 at most")
		}
		if _, ok := builtin[name]; ok && o.Extends != "" {
			l.problem(path+".extends", "a built-in profile can't extend another")
		}
		names[name] = o
	}
	l.policy.profiles = map[string]Profile{}
	for _, name := range sortedKeys(names) {
		p := l.profile(name, builtin, names, nil)
		if img, err := parseImage(p.Image); err == nil && l.policy.images.requireDigest && l.policy.images.pinned(img).digest == "" {
			l.problem("images.require_digest", "image %s of profile %s has no digest, and no pin gives it one", p.Image, name)
		}
	}
	// Only now, so that a profile doesn't inherit what its parent's cap_add allowed.
	for name, p := range l.policy.profiles {
		p.EngineAPI.Capabilities = append(slices.Clone(p.EngineAPI.Capabilities), p.CapAdd...)
		slices.Sort(p.EngineAPI.Capabilities)
		p.EngineAPI.Capabilities = slices.Compact(p.EngineAPI.Capabilities)
		l.policy.profiles[name] = p
	}
}

// profile resolves one profile, and those that it extends before it.
func (l *loader) profile(name string, builtin, all map[string]overlay, above []string) Profile {
	if p, ok := l.policy.profiles[name]; ok {
		return p
	}
	p := Profile{
		Image: cmp.Or(l.opts.DefaultImage, defaultImage), MountPath: "/workspace", Timeout: 30 * time.Second,
		MaxCPUs: 2, MaxMemoryMB: 2048, MaxPidsLimit: 512, TTL: l.policy.ttl.normal, IdleTTL: l.policy.ttl.idle,
		CapAdd: []string{}, Agent: AgentOn, Userns: UsernsOff, EngineAPI: builtinEngineAPI(), Locked: []string{},
	}
	own := l.file.Profiles[name]
	if name != defaultProfile {
		parent, field := cmp.Or(own.Extends, defaultProfile), join("profiles", name)+".extends"
		if _, ok := builtin[name]; ok {
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
		p = l.profile(parent, builtin, all, append(above, name))
	}
	p.Name = name
	give(&p, builtin[name])
	give(&p, own)
	l.checkProfile(&p, own)
	l.policy.profiles[name] = p
	return p
}

var (
	userName     = regexp.MustCompile(`^[0-9]{1,10}(:[0-9]{1,10})?$`)
	runtimeClass = regexp.MustCompile(`^([A-Za-z0-9][A-Za-z0-9_./-]{0,127})?$`)
	capability   = regexp.MustCompile(`^CAP_[A-Z_]{2,32}$`)
)

// checkProfile checks and normalises a profile's values. own is what the file
// says of it, so that what it inherited is complained about only once.
func (l *loader) checkProfile(p *Profile, own overlay) {
	path := join("profiles", p.Name)
	img, err := parseImage(p.Image)
	switch {
	case err == nil:
		p.Image = img.String()
	case own.Image != nil:
		l.problem(path+".image", "%q %v", p.Image, err)
	case p.Name == defaultProfile:
		l.problem("", "the default image %q %v", p.Image, err)
	}
	if _, ok := l.policy.networks[p.Network]; !ok && p.Network != networkOff && own.Network != nil {
		l.problem(path+".network", "there is no network %q (known: off, %s)", p.Network, strings.Join(sortedKeys(l.policy.networks), ", "))
	}
	if own.HostPathMode != nil && !slices.Contains(modes, p.HostPathMode) {
		l.problem(path+".host_path_mode", "is %q, must be %s", p.HostPathMode, orList(modes))
	}
	if target, why := cleanTarget(p.MountPath); why == "" {
		p.MountPath = target
	} else if own.MountPath != nil {
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
	notBelow(l, path+".max_cpus", &p.MaxCPUs, p.CPUs, own.MaxCPUs != nil)
	notBelow(l, path+".max_memory_mb", &p.MaxMemoryMB, p.MemoryMB, own.MaxMemoryMB != nil)
	notBelow(l, path+".max_pids_limit", &p.MaxPidsLimit, p.PidsLimit, own.MaxPidsLimit != nil)
	notBelow(l, path+".max_timeout", &p.MaxTimeout, p.Timeout, own.MaxTimeout != nil)
	if own.TTL != nil {
		within(l, path+".ttl", p.TTL, minTTL, l.policy.ttl.maxLifetime)
	}
	if own.IdleTTL != nil && p.IdleTTL != 0 {
		within(l, path+".idle_ttl", p.IdleTTL, minTTL, l.policy.ttl.maxLifetime)
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
	if words := []string{AgentOn, AgentOff}; own.Agent != nil && !slices.Contains(words, p.Agent) {
		l.problem(path+".agent", "is %q, must be %s", p.Agent, orList(words))
	}
	if words := []string{UsernsAuto, UsernsOff}; own.Userns != nil && !slices.Contains(words, p.Userns) {
		l.problem(path+".userns", "is %q, must be %s", p.Userns, orList(words))
	}
	l.checkEngineAPI(path+".engine_api", &p.EngineAPI, own.EngineAPI)
	l.checkLists(path, p, own)
}

// checkLists checks and normalises a profile's lists, as checkProfile does.
func (l *loader) checkLists(path string, p *Profile, own overlay) {
	for i, c := range p.CapAdd {
		c = capabilityName(c)
		if !capability.MatchString(c) || c == "CAP_ALL" {
			l.problem(path+".cap_add", "%q is not the name of one capability", p.CapAdd[i])
		}
		p.CapAdd[i] = c
	}
	slices.Sort(p.CapAdd)
	p.CapAdd = slices.Compact(p.CapAdd)
	for _, f := range p.Locked {
		if !slices.Contains(lockable, f) && own.Locked != nil {
			l.problem(path+".locked", "%q can't be locked (these can: %s)", f, strings.Join(lockable, ", "))
		}
	}
	slices.Sort(p.Locked)
	p.Locked = slices.Compact(p.Locked)
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

// notBelow raises an inherited maximum to the profile's own value; a maximum that
// the file gives for this profile has to be high enough by itself.
func notBelow[T int64 | float64 | time.Duration](l *loader, path string, most *T, v T, explicit bool) {
	if math.IsNaN(float64(v)) || *most >= v { // a NaN has been complained about
		return
	}
	if explicit {
		l.problem(path, "is %v, below the profile's own value of %v: lower that as well", *most, v)
	}
	*most = v
}

func finite(f float64) bool { return !math.IsNaN(f) && !math.IsInf(f, 0) }
