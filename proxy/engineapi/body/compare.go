package body

import (
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/mount"
	"github.com/opencontainers/go-digest"

	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/runtime"
)

// Granted is what a container was allowed, as its label keeps it.
type Granted struct {
	policy.ContainerSpec
	ImageID string `json:"image_id"`
	Audit   bool   `json:"audit,omitempty"` // the policy denied it, and it was created in mode audit

	RestartMax int    `json:"restart_max,omitempty"` // retries of the restart policy
	Seccomp    string `json:"seccomp,omitempty"`     // digest of the SecurityOpt with a profile; empty for the engine's own

	Sources []string `json:"-"` // the path that the engine mounts for each bind
}

// Differences are the names of fields in which a container isn't as it was judged.
type Differences []string

// Add adds the field what, unless it is the same.
func (d *Differences) Add(same bool, what string) {
	if !same {
		*d = append(*d, what)
	}
}

// Compare compares a container with what it was allowed. It leaves out networks, and fields that
// an update can change. V is the minor version of the API in which it was inspected.
func Compare(want Granted, ct *container.InspectResponse, v int) Differences {
	var d Differences
	d.Add(ct.Image == want.ImageID, "Image")
	d.Add(ct.Config.User == want.User, "Config.User")
	d.Add(!ct.Config.NetworkDisabled, "Config.NetworkDisabled")
	if h := ct.Config.Healthcheck; h != nil {
		times := *h
		times.Test, times.Retries = nil, 0 // those of the image
		d.Add(checkHealth(&times) == nil, "Config.Healthcheck")
	}
	d.Add(sameSecurity(ct.HostConfig.SecurityOpt, want.Seccomp), "HostConfig.SecurityOpt")
	d.privileges(want.ContainerSpec, ct.HostConfig, v)
	d.namespaces(want.ContainerSpec, ct.HostConfig, v)
	d.closed(ct.HostConfig)
	d.limits(want.ContainerSpec, ct.HostConfig)
	d.mounts(want, ct)
	d.Add(len(want.Binds) == 0 || ct.HostConfig.RestartPolicy.IsNone(), "HostConfig.RestartPolicy")
	return d
}

// SameEnv reports whether each sent variable is in got exactly once, with its value. A variable
// that was sent without a value must have none.
func SameEnv(got, sent []string) bool {
	count := map[string]int{}
	for _, e := range got {
		name, _, _ := strings.Cut(e, "=")
		count[name]++
	}
	for _, e := range sent {
		name, _, given := strings.Cut(e, "=")
		if given && (count[name] != 1 || !slices.Contains(got, e)) {
			return false
		}
		if !given && slices.ContainsFunc(got, func(g string) bool { return strings.HasPrefix(g, name+"=") }) {
			return false
		}
	}
	return true
}

// Paths in a container's /proc and /sys that every engine masks or makes read-only.
var (
	maskedPaths   = []string{"/proc/kcore", "/proc/keys", "/proc/timer_list", "/sys/firmware"}
	readonlyPaths = []string{"/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"}
)

func (d *Differences) privileges(s policy.ContainerSpec, h *container.HostConfig, v int) {
	d.Add(!h.Privileged, "HostConfig.Privileged")
	caps := []string{}
	for _, name := range h.CapAdd {
		name = strings.ToUpper(name)
		caps = append(caps, "CAP_"+strings.TrimPrefix(name, "CAP_"))
	}
	slices.Sort(caps)
	d.Add(slices.Equal(slices.Compact(caps), s.Capabilities) || len(caps) == 0 && len(s.Capabilities) == 0, "HostConfig.CapAdd")
	d.Add(slices.Contains(h.CapDrop, "ALL"), "HostConfig.CapDrop")
	if v >= 40 { // older ones don't show them
		d.Add(containsAll(h.MaskedPaths, maskedPaths), "HostConfig.MaskedPaths")
		d.Add(containsAll(h.ReadonlyPaths, readonlyPaths), "HostConfig.ReadonlyPaths")
	}
	d.Add(h.ReadonlyRootfs == s.ReadOnlyRootfs, "HostConfig.ReadonlyRootfs")
	d.Add(s.Runtime == "" || h.Runtime == s.Runtime, "HostConfig.Runtime")
	d.Add(sameSet(h.GroupAdd, s.Groups), "HostConfig.GroupAdd")
	d.Add(maps.Equal(h.Sysctls, s.Sysctls), "HostConfig.Sysctls")
}

// sameSecurity reports whether options are those that Encode writes. Seccomp is the digest of
// the profile's option, or "" for the engine's own profile.
func sameSecurity(options []string, seccomp string) bool {
	if seccomp == "" {
		return slices.Equal(options, []string{NoNewPrivileges})
	}
	return len(options) == 2 && options[0] == NoNewPrivileges && digest.FromString(options[1]).String() == seccomp
}

func containsAll(list, wanted []string) bool {
	return !slices.ContainsFunc(wanted, func(s string) bool { return !slices.Contains(list, s) })
}

func sameSet(a, b []string) bool {
	return len(a) == len(b) && containsAll(a, b) && containsAll(b, a)
}

func (d *Differences) namespaces(s policy.ContainerSpec, h *container.HostConfig, v int) {
	d.Add(h.PidMode == pidMode(s), "HostConfig.PidMode")
	d.Add(h.IpcMode == ipcMode(s), "HostConfig.IpcMode")
	d.Add(h.UTSMode == "", "HostConfig.UTSMode")
	d.Add(h.UsernsMode == "", "HostConfig.UsernsMode")
	d.Add(v < 41 || h.CgroupnsMode.IsPrivate(), "HostConfig.CgroupnsMode")
	d.Add(h.Cgroup == "", "HostConfig.Cgroup")
	d.Add(h.CgroupParent == "", "HostConfig.CgroupParent")
}

// closed compares the fields that Encode never sets.
func (d *Differences) closed(h *container.HostConfig) {
	d.Add(len(h.Devices) == 0 && len(h.DeviceRequests) == 0 && len(h.DeviceCgroupRules) == 0, "HostConfig.Devices")
	d.Add(len(h.Binds) == 0, "HostConfig.Binds")
	d.Add(len(h.VolumesFrom) == 0, "HostConfig.VolumesFrom")
	d.Add(h.VolumeDriver == "", "HostConfig.VolumeDriver")
	d.Add(len(h.Links) == 0, "HostConfig.Links")
	d.Add(!h.PublishAllPorts, "HostConfig.PublishAllPorts")
	d.Add(len(h.StorageOpt) == 0, "HostConfig.StorageOpt")
	d.Add(len(h.Annotations) == 0, "HostConfig.Annotations")
	d.Add(h.Isolation.IsDefault(), "HostConfig.Isolation")
	d.Add(h.OomKillDisable == nil || !*h.OomKillDisable, "HostConfig.OomKillDisable")
	d.Add(h.CPURealtimePeriod == 0 && h.CPURealtimeRuntime == 0, "HostConfig.CpuRealtimeRuntime")
	d.Add(len(h.BlkioWeightDevice) == 0 && len(h.BlkioDeviceReadBps) == 0 && len(h.BlkioDeviceWriteBps) == 0 &&
		len(h.BlkioDeviceReadIOps) == 0 && len(h.BlkioDeviceWriteIOps) == 0 && h.BlkioWeight == 0, "HostConfig.BlkioWeight")
}

// hasOptions reports whether got has all sent options of the log driver. The engine may add
// options of its own configuration.
func hasOptions(got, sent map[string]string) bool {
	for name, value := range sent {
		if have, ok := got[name]; !ok || have != value {
			return false
		}
	}
	return true
}

func (d *Differences) limits(s policy.ContainerSpec, h *container.HostConfig) {
	d.Add(h.ShmSize == s.ShmBytes, "HostConfig.ShmSize")
	d.Add(h.OomScoreAdj == s.OOMScoreAdj, "HostConfig.OomScoreAdj")
	d.Add(h.CPUShares <= defaultShares, "HostConfig.CpuShares")
	d.Add(h.LogConfig.Type == s.LogDriver && hasOptions(h.LogConfig.Config, s.LogOptions), "HostConfig.LogConfig")
	d.Add(sameSet(h.DNS, s.DNS) && sameSet(h.DNSOptions, s.DNSOptions) && sameSet(h.DNSSearch, s.DNSSearch), "HostConfig.Dns")
	d.Add(sameSet(h.ExtraHosts, s.ExtraHosts), "HostConfig.ExtraHosts")
	want := portMap(s.Ports)
	d.Add(len(h.PortBindings) == len(want) && (len(want) == 0 || reflect.DeepEqual(h.PortBindings, want)), "HostConfig.PortBindings")
	limits := map[string]policy.ContainerUlimit{}
	for _, u := range h.Ulimits {
		limits[u.Name] = policy.ContainerUlimit{Name: u.Name, Soft: u.Soft, Hard: u.Hard}
	}
	for _, u := range s.Ulimits {
		d.Add(limits[u.Name] == u, "HostConfig.Ulimits")
	}
}

// mounts compares the mounts and their options with the judged ones.
func (d *Differences) mounts(s Granted, ct *container.InspectResponse) {
	left := slices.Clone(ct.Mounts)
	take := func(fits func(container.MountPoint) bool) bool {
		i := slices.IndexFunc(left, fits)
		if i >= 0 {
			left = slices.Delete(left, i, i+1)
		}
		return i >= 0
	}
	private := func(p mount.Propagation) bool { return p == "" || p == mount.PropagationRPrivate }
	d.Add(len(s.Sources) == len(s.Binds) && slices.Equal(s.Sources, s.Named(ct.HostConfig)), "HostConfig.Mounts")
	for i, b := range s.Binds {
		d.Add(take(func(m container.MountPoint) bool {
			return m.Type == mount.TypeBind && i < len(s.Sources) && m.Source == s.Sources[i] && m.Destination == b.MountPath && m.RW == (b.Mode != "ro") && private(m.Propagation)
		}), "Mounts")
	}
	for _, v := range s.Volumes {
		d.Add(take(func(m container.MountPoint) bool {
			return m.Type == mount.TypeVolume && (m.Name == v.Source || v.Source == "") && m.Destination == v.Target && m.RW != v.ReadOnly && m.Driver == "local" && private(m.Propagation)
		}), "Mounts")
	}
	for _, t := range s.Tmpfs {
		options, ok := ct.HostConfig.Tmpfs[t.Target]
		d.Add(ok && strings.Contains(","+options+",", fmt.Sprintf(",nosuid,nodev,size=%d,", t.SizeBytes)), "HostConfig.Tmpfs")
		take(func(m container.MountPoint) bool { return m.Type == mount.TypeTmpfs && m.Destination == t.Target }) // not every engine lists them
	}
	d.Add(len(left) == 0, "Mounts")
	d.Add(len(ct.HostConfig.Tmpfs) == len(s.Tmpfs), "HostConfig.Tmpfs")
	d.Add(len(ct.HostConfig.Mounts) == len(s.Binds)+len(s.Volumes), "HostConfig.Mounts")
	for _, m := range ct.HostConfig.Mounts {
		switch b, v := m.BindOptions, m.VolumeOptions; m.Type {
		case mount.TypeBind:
			d.Add(b != nil && b.NonRecursive && !b.CreateMountpoint && b.Propagation == mount.PropagationRPrivate, "HostConfig.Mounts")
		case mount.TypeVolume:
			d.Add(v == nil || v.DriverConfig == nil && v.Subpath == "", "HostConfig.Mounts")
		default:
			d.Add(false, "HostConfig.Mounts")
		}
	}
}

// SameResources compares the limits that an update can change. If the kernel can't limit swap,
// the engine reports unlimited swap.
func SameResources(s policy.ContainerSpec, h *container.HostConfig) bool {
	return h.Memory == s.MemoryBytes && (h.MemorySwap == s.SwapBytes || h.MemorySwap == -1) && CPUsOf(h) == nanoCPUs(s.CPUs) &&
		h.PidsLimit != nil && *h.PidsLimit == s.PidsLimit
}

// CPUsOf returns a container's limit in billionths of a CPU.
func CPUsOf(h *container.HostConfig) int64 {
	if h.NanoCPUs == 0 && h.CPUQuota > 0 && h.CPUPeriod > 0 {
		return h.CPUQuota * 1e9 / h.CPUPeriod
	}
	return h.NanoCPUs
}

// RestartIs reports whether the container has the restart policy that the engine gets for s.
func RestartIs(h *container.HostConfig, s policy.ContainerSpec) bool {
	want := engineRestart(s)
	return string(h.RestartPolicy.Name) == want || h.RestartPolicy.IsNone() && (want == "" || want == "no")
}

// Nested is a mount whose target lies below that of a bind, with no other mount between.
type Nested struct {
	Outer  int    // index of the bind
	Target string // absolute
	Rel    string // from the bind's target; empty for a file that the engine itself mounts
	File   bool
}

// Targets returns the targets of all mounts, those of the binds first.
func (g *Granted) Targets() (targets []string) {
	for _, b := range g.Binds {
		targets = append(targets, b.MountPath)
	}
	for _, m := range slices.Concat(g.Volumes, g.Tmpfs) {
		targets = append(targets, m.Target)
	}
	return targets
}

// Nested returns the mounts that the engine mounts by a path through a bind.
func (g *Granted) Nested() (out []Nested) {
	targets := g.Targets()
	add := func(target string, file, engine bool) {
		outer := -1
		for i, t := range targets {
			if t != target && runtime.Below(target, t) && (outer < 0 || len(t) > len(targets[outer])) {
				outer = i
			}
		}
		if outer < 0 || outer >= len(g.Binds) {
			return
		}
		n := Nested{Outer: outer, Target: target, File: file}
		if !engine {
			n.Rel = strings.TrimPrefix(target, targets[outer]+"/")
		}
		out = append(out, n)
	}
	for i, t := range targets {
		add(t, i < len(g.Binds) && (g.Binds[i].File || g.Binds[i].Socket), false)
	}
	for _, t := range policy.NetworkFiles {
		add(t, true, true)
	}
	return out
}

// Named returns the source of each bind in the engine's configuration. It is empty for a bind
// that the configuration lacks.
func (g *Granted) Named(h *container.HostConfig) []string {
	sources := make([]string, len(g.Binds))
	for i, b := range g.Binds {
		for _, m := range h.Mounts {
			if m.Type == mount.TypeBind && m.Target == b.MountPath {
				sources[i] = m.Source
			}
		}
	}
	return sources
}
