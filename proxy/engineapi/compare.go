package engineapi

import (
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"

	"github.com/bermhq/berm/policy"
	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/mount"
	"github.com/opencontainers/go-digest"
)

// granted is what a container was allowed, as its label keeps it.
type granted struct {
	policy.ContainerSpec
	ImageID string `json:"image_id"`
	Audit   bool   `json:"audit,omitempty"` // it was denied, and made in mode audit

	RestartMax int    `json:"restart_max,omitempty"` // retries of the restart policy
	Seccomp    string `json:"seccomp,omitempty"`     // digest of the SecurityOpt with a profile; empty for the engine's own

	sources []string // what the engine mounts for each bind
}

// differences collects what of a container isn't as it was judged.
type differences []string

func (d *differences) add(same bool, what string) {
	if !same {
		*d = append(*d, what)
	}
}

// sameEnv tells whether each variable that was sent is there once, with its value, and none
// that was sent without one has a value.
func sameEnv(got, sent []string) bool {
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

// What every engine masks, and has read-only, in a container's /proc and /sys.
var (
	maskedPaths   = []string{"/proc/kcore", "/proc/keys", "/proc/timer_list", "/sys/firmware"}
	readonlyPaths = []string{"/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"}
)

func (d *differences) privileges(s policy.ContainerSpec, h *container.HostConfig, v int) {
	d.add(!h.Privileged, "HostConfig.Privileged")
	caps := []string{}
	for _, name := range h.CapAdd {
		name = strings.ToUpper(name)
		caps = append(caps, "CAP_"+strings.TrimPrefix(name, "CAP_"))
	}
	slices.Sort(caps)
	d.add(slices.Equal(slices.Compact(caps), s.Capabilities) || len(caps) == 0 && len(s.Capabilities) == 0, "HostConfig.CapAdd")
	d.add(slices.Contains(h.CapDrop, "ALL"), "HostConfig.CapDrop")
	if v >= 40 { // older ones don't show them
		d.add(containsAll(h.MaskedPaths, maskedPaths), "HostConfig.MaskedPaths")
		d.add(containsAll(h.ReadonlyPaths, readonlyPaths), "HostConfig.ReadonlyPaths")
	}
	d.add(h.ReadonlyRootfs == s.ReadOnlyRootfs, "HostConfig.ReadonlyRootfs")
	d.add(s.Runtime == "" || h.Runtime == s.Runtime, "HostConfig.Runtime")
	d.add(sameSet(h.GroupAdd, s.Groups), "HostConfig.GroupAdd")
	d.add(maps.Equal(h.Sysctls, s.Sysctls), "HostConfig.Sysctls")
}

// sameSecurity reports whether options are those that a container gets, with the seccomp
// profile whose digest its label has.
func sameSecurity(options []string, seccomp string) bool {
	if seccomp == "" {
		return slices.Equal(options, []string{noNewPrivileges})
	}
	return len(options) == 2 && options[0] == noNewPrivileges && digest.FromString(options[1]).String() == seccomp
}

func containsAll(list, wanted []string) bool {
	return !slices.ContainsFunc(wanted, func(s string) bool { return !slices.Contains(list, s) })
}

func sameSet(a, b []string) bool {
	return len(a) == len(b) && containsAll(a, b) && containsAll(b, a)
}

func (d *differences) namespaces(h *container.HostConfig, v int) {
	d.add(h.PidMode == "", "HostConfig.PidMode")
	d.add(h.IpcMode.IsPrivate(), "HostConfig.IpcMode")
	d.add(h.UTSMode == "", "HostConfig.UTSMode")
	d.add(h.UsernsMode == "", "HostConfig.UsernsMode")
	d.add(v < 41 || h.CgroupnsMode.IsPrivate(), "HostConfig.CgroupnsMode")
	d.add(h.Cgroup == "", "HostConfig.Cgroup")
	d.add(h.CgroupParent == "", "HostConfig.CgroupParent")
}

// closed are the fields that are never set.
func (d *differences) closed(h *container.HostConfig) {
	d.add(len(h.Devices) == 0 && len(h.DeviceRequests) == 0 && len(h.DeviceCgroupRules) == 0, "HostConfig.Devices")
	d.add(len(h.Binds) == 0, "HostConfig.Binds")
	d.add(len(h.VolumesFrom) == 0, "HostConfig.VolumesFrom")
	d.add(h.VolumeDriver == "", "HostConfig.VolumeDriver")
	d.add(len(h.Links) == 0, "HostConfig.Links")
	d.add(!h.PublishAllPorts, "HostConfig.PublishAllPorts")
	d.add(len(h.StorageOpt) == 0, "HostConfig.StorageOpt")
	d.add(len(h.Annotations) == 0, "HostConfig.Annotations")
	d.add(h.Isolation.IsDefault(), "HostConfig.Isolation")
	d.add(h.OomKillDisable == nil || !*h.OomKillDisable, "HostConfig.OomKillDisable")
	d.add(h.CPURealtimePeriod == 0 && h.CPURealtimeRuntime == 0, "HostConfig.CpuRealtimeRuntime")
	d.add(len(h.BlkioWeightDevice) == 0 && len(h.BlkioDeviceReadBps) == 0 && len(h.BlkioDeviceWriteBps) == 0 &&
		len(h.BlkioDeviceReadIOps) == 0 && len(h.BlkioDeviceWriteIOps) == 0 && h.BlkioWeight == 0, "HostConfig.BlkioWeight")
}

// hasOptions tells whether the log has the options that were sent; an engine may
// add those of its own configuration.
func hasOptions(got, sent map[string]string) bool {
	for name, value := range sent {
		if have, ok := got[name]; !ok || have != value {
			return false
		}
	}
	return true
}

func (d *differences) limits(s policy.ContainerSpec, h *container.HostConfig) {
	d.add(h.ShmSize == s.ShmBytes, "HostConfig.ShmSize")
	d.add(h.OomScoreAdj == s.OOMScoreAdj, "HostConfig.OomScoreAdj")
	d.add(h.CPUShares <= defaultShares, "HostConfig.CpuShares")
	d.add(h.LogConfig.Type == s.LogDriver && hasOptions(h.LogConfig.Config, s.LogOptions), "HostConfig.LogConfig")
	d.add(sameSet(h.DNS, s.DNS) && sameSet(h.DNSOptions, s.DNSOptions) && sameSet(h.DNSSearch, s.DNSSearch), "HostConfig.Dns")
	d.add(sameSet(h.ExtraHosts, s.ExtraHosts), "HostConfig.ExtraHosts")
	want := portMap(s.Ports)
	d.add(len(h.PortBindings) == len(want) && (len(want) == 0 || reflect.DeepEqual(h.PortBindings, want)), "HostConfig.PortBindings")
	limits := map[string]policy.ContainerUlimit{}
	for _, u := range h.Ulimits {
		limits[u.Name] = policy.ContainerUlimit{Name: u.Name, Soft: u.Soft, Hard: u.Hard}
	}
	for _, u := range s.Ulimits {
		d.add(limits[u.Name] == u, "HostConfig.Ulimits")
	}
}

// mounts compares what is mounted, and how, with what was judged.
func (d *differences) mounts(s granted, ct *container.InspectResponse) {
	left := slices.Clone(ct.Mounts)
	take := func(fits func(container.MountPoint) bool) bool {
		i := slices.IndexFunc(left, fits)
		if i >= 0 {
			left = slices.Delete(left, i, i+1)
		}
		return i >= 0
	}
	private := func(p mount.Propagation) bool { return p == "" || p == mount.PropagationRPrivate }
	d.add(len(s.sources) == len(s.Binds) && slices.Equal(s.sources, s.named(ct.HostConfig)), "HostConfig.Mounts")
	for i, b := range s.Binds {
		d.add(take(func(m container.MountPoint) bool {
			return m.Type == mount.TypeBind && i < len(s.sources) && m.Source == s.sources[i] && m.Destination == b.MountPath && m.RW == (b.Mode != "ro") && private(m.Propagation)
		}), "Mounts")
	}
	for _, v := range s.Volumes {
		d.add(take(func(m container.MountPoint) bool {
			return m.Type == mount.TypeVolume && (m.Name == v.Source || v.Source == "") && m.Destination == v.Target && m.RW != v.ReadOnly && m.Driver == "local" && private(m.Propagation)
		}), "Mounts")
	}
	for _, t := range s.Tmpfs {
		options, ok := ct.HostConfig.Tmpfs[t.Target]
		d.add(ok && strings.Contains(","+options+",", fmt.Sprintf(",nosuid,nodev,size=%d,", t.SizeBytes)), "HostConfig.Tmpfs")
		take(func(m container.MountPoint) bool { return m.Type == mount.TypeTmpfs && m.Destination == t.Target }) // not every engine lists them
	}
	d.add(len(left) == 0, "Mounts")
	d.add(len(ct.HostConfig.Tmpfs) == len(s.Tmpfs), "HostConfig.Tmpfs")
	d.add(len(ct.HostConfig.Mounts) == len(s.Binds)+len(s.Volumes), "HostConfig.Mounts")
	for _, m := range ct.HostConfig.Mounts {
		switch b, v := m.BindOptions, m.VolumeOptions; m.Type {
		case mount.TypeBind:
			d.add(b != nil && b.NonRecursive && !b.CreateMountpoint && b.Propagation == mount.PropagationRPrivate, "HostConfig.Mounts")
		case mount.TypeVolume:
			d.add(v == nil || v.DriverConfig == nil && v.Subpath == "", "HostConfig.Mounts")
		default:
			d.add(false, "HostConfig.Mounts")
		}
	}
}

// sameResources compares what an update can change. An engine whose kernel can't limit
// swap says that it is unlimited.
func sameResources(s policy.ContainerSpec, h *container.HostConfig) bool {
	return h.Memory == s.MemoryBytes && (h.MemorySwap == s.SwapBytes || h.MemorySwap == -1) && cpusOf(h) == nanoCPUs(s.CPUs) &&
		h.PidsLimit != nil && *h.PidsLimit == s.PidsLimit
}

func cpusOf(h *container.HostConfig) int64 {
	if h.NanoCPUs == 0 && h.CPUQuota > 0 && h.CPUPeriod > 0 {
		return h.CPUQuota * 1e9 / h.CPUPeriod
	}
	return h.NanoCPUs
}

// restartIs tells whether the engine has the restart policy that it got for s.
func restartIs(h *container.HostConfig, s policy.ContainerSpec) bool {
	want := engineRestart(s)
	return string(h.RestartPolicy.Name) == want || h.RestartPolicy.IsNone() && (want == "" || want == "no")
}

// named returns the source that the engine's configuration has for each bind, empty for
// a bind that it lacks.
func (g *granted) named(h *container.HostConfig) []string {
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
