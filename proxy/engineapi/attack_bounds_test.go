package engineapi

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	goruntime "runtime"
	"slices"
	"strings"
	"syscall"

	"github.com/bermhq/berm/proxy/engineapi/body"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/image"
	"github.com/docker/docker/api/types/mount"
	"github.com/docker/docker/api/types/network"
	"github.com/docker/docker/api/types/volume"
	"github.com/docker/go-connections/nat"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/runtime"
)

// bounds is fixtureRules again, in the words of the engine: what may come to be at most.
type bounds struct {
	owner, tenant, dir, image string
	pins                      string          // where the door holds binds
	shared                    string          // the ID of a network on which others are too
	networks, containers      map[string]bool // IDs of the attacker's own
	others                    []string        // IDs of others' containers and networks
}

var mayHave = []string{"CAP_CHOWN", "CAP_KILL", "CAP_NET_BIND_SERVICE"}

// excess collects what is more than may be.
type excess []string

func (e *excess) unless(ok bool, what string, value any) {
	if !ok {
		*e = append(*e, fmt.Sprintf("%s=%v", what, value))
	}
}

// labels of everything that a caller makes.
func (b bounds) labels(labels map[string]string) (e excess) {
	e.unless(labels[lifecycle.LabelOwner] == b.owner && labels[lifecycle.LabelTenant] == b.tenant && labels[lifecycle.LabelDoor] == lifecycle.DoorEngine &&
		labels[lifecycle.LabelExpiresAt] != "", "labels", "")
	return e
}

// asked judges a container as an engine is asked for it; what isn't asked for is the
// engine's default.
func (b bounds) asked(cfg *container.Config, h *container.HostConfig, n *network.NetworkingConfig) (e excess) {
	e = b.labels(cfg.Labels)
	for _, v := range cfg.Env {
		name, _, _ := strings.Cut(v, "=")
		e.unless(!strings.HasPrefix(name, "SECRET"), "Env", name)
		e.unless(name != "PINNED" || v == "PINNED=yes", "Env", v)
	}
	e.unless(cfg.MacAddress == "", "MacAddress", cfg.MacAddress) //nolint:staticcheck // older engines take it
	e = append(e, b.privileges(h)...)
	e = append(e, b.limits(h)...)
	e = append(e, b.unused(h)...)
	if n != nil {
		for ref, endpoint := range n.EndpointsConfig {
			e.unless(b.networks[ref], "EndpointsConfig", ref)
			e.unless(endpoint == nil || endpoint.MacAddress == "" && len(endpoint.DriverOpts) == 0, "EndpointsConfig", endpoint)
		}
	}
	mode := string(h.NetworkMode)
	of, shared := strings.CutPrefix(mode, "container:")
	e.unless(mode == "none" || b.networks[mode] || shared && b.containers[of], "NetworkMode", mode)
	return append(e, b.mounts(h)...)
}

func (b bounds) privileges(h *container.HostConfig) (e excess) {
	e.unless(!h.Privileged, "Privileged", true)
	for _, name := range h.CapAdd {
		e.unless(slices.Contains(mayHave, name), "CapAdd", name)
	}
	e.unless(slices.Contains(h.CapDrop, "ALL"), "CapDrop", h.CapDrop)
	profile, err := runtime.SeccompOption(goruntime.GOARCH)
	e.unless(err == nil && slices.Equal(h.SecurityOpt, []string{"no-new-privileges", profile}), "SecurityOpt", body.Shorten(fmt.Sprint(h.SecurityOpt)))
	e.unless(h.PidMode == "", "PidMode", h.PidMode)
	e.unless(h.IpcMode == "private" || h.IpcMode == "none", "IpcMode", h.IpcMode)
	e.unless(h.UTSMode == "", "UTSMode", h.UTSMode)
	e.unless(h.UsernsMode == "", "UsernsMode", h.UsernsMode)
	e.unless(h.CgroupnsMode == "private", "CgroupnsMode", h.CgroupnsMode)
	e.unless(h.Cgroup == "" && h.CgroupParent == "", "CgroupParent", string(h.Cgroup)+h.CgroupParent)
	e.unless(len(h.Devices)+len(h.DeviceRequests)+len(h.DeviceCgroupRules) == 0, "Devices", fmt.Sprint(h.Devices, h.DeviceRequests, h.DeviceCgroupRules))
	e.unless(len(h.Sysctls) == 0, "Sysctls", h.Sysctls)
	e.unless(h.Runtime == "" || h.Runtime == "runc", "Runtime", h.Runtime)
	return e
}

func (b bounds) limits(h *container.HostConfig) (e excess) {
	e.unless(h.Memory > 0 && h.Memory <= 128<<20, "Memory", h.Memory)
	e.unless(h.MemorySwap == h.Memory || h.MemorySwap == -1, "MemorySwap", h.MemorySwap) // -1: the kernel can't limit it
	e.unless(h.PidsLimit != nil && *h.PidsLimit > 0 && *h.PidsLimit <= 100, "PidsLimit", "")
	e.unless(h.NanoCPUs > 0 && h.NanoCPUs <= 1e9, "NanoCpus", h.NanoCPUs)
	e.unless(h.CPUShares <= 1024, "CpuShares", h.CPUShares)
	e.unless(h.ShmSize > 0 && h.ShmSize <= 16<<20, "ShmSize", h.ShmSize)
	e.unless(h.OomScoreAdj >= 0, "OomScoreAdj", h.OomScoreAdj)
	e.unless(h.OomKillDisable == nil || !*h.OomKillDisable, "OomKillDisable", true)
	e.unless(h.CPURealtimePeriod+h.CPURealtimeRuntime == 0, "CpuRealtimeRuntime", h.CPURealtimeRuntime)
	e.unless(len(h.BlkioWeightDevice) == 0 && h.BlkioWeight == 0, "BlkioWeight", h.BlkioWeight)
	e.unless(slices.Contains([]string{"", "no", "on-failure"}, string(h.RestartPolicy.Name)), "RestartPolicy", h.RestartPolicy.Name)
	for _, u := range h.Ulimits {
		if slices.Contains([]string{"cpu", "data", "fsize", "rss", "stack"}, u.Name) {
			continue // of nobody's but its own processes
		}
		e.unless((u.Name == "nofile" || u.Name == "nproc" || u.Name == "core") && u.Hard >= 0 && u.Hard <= 1024 && u.Soft <= u.Hard, "Ulimits", u)
	}
	e.unless(h.LogConfig.Type == "none" || h.LogConfig.Type == "json-file" && h.LogConfig.Config["max-size"] != "", "LogConfig", h.LogConfig.Type)
	for name, value := range h.LogConfig.Config {
		e.unless(slices.Contains([]string{"max-size", "max-file", "compress", "mode", "max-buffer-size", "labels", "tag"}, name), "LogConfig", name)
		e.unless(name != "tag" || !strings.ContainsAny(value, "($|\" "), "LogConfig tag", value) // the engine executes it
	}
	return e
}

func (b bounds) unused(h *container.HostConfig) (e excess) {
	e.unless(len(h.VolumesFrom) == 0, "VolumesFrom", h.VolumesFrom)
	e.unless(h.VolumeDriver == "" || h.VolumeDriver == "local", "VolumeDriver", h.VolumeDriver)
	e.unless(len(h.Links) == 0, "Links", h.Links)
	e.unless(len(h.StorageOpt) == 0, "StorageOpt", h.StorageOpt)
	e.unless(len(h.Annotations) == 0, "Annotations", h.Annotations)
	e.unless(len(h.DNS)+len(h.DNSSearch)+len(h.DNSOptions)+len(h.ExtraHosts) == 0, "Dns", fmt.Sprint(h.DNS, h.ExtraHosts))
	e.unless(!h.PublishAllPorts, "PublishAllPorts", true)
	e = append(e, b.ports(h.PortBindings)...)
	return e
}

func (b bounds) ports(ports nat.PortMap) (e excess) {
	for port, list := range ports {
		for _, p := range list {
			ip, err := netip.ParseAddr(p.HostIP)
			e.unless(err == nil && ip.IsLoopback() && !ip.Is4In6(), "PortBindings", fmt.Sprint(port, p.HostIP))
		}
	}
	return e
}

// mounts judges what is to be mounted, by what the paths lead to on the host.
func (b bounds) mounts(h *container.HostConfig) (e excess) {
	for _, bind := range h.Binds {
		source, _, ok := strings.Cut(bind, ":")
		e.unless(ok && !filepath.IsAbs(source) && source != "attack-v-vol" || b.allowed(source), "Binds", bind)
	}
	for _, m := range h.Mounts {
		switch m.Type {
		case mount.TypeBind:
			e.unless(b.allowed(m.Source), "Mounts", m.Source)
			o := m.BindOptions
			e.unless(o != nil && o.NonRecursive && !o.CreateMountpoint && o.Propagation == "rprivate", "Mounts.BindOptions", o)
		case mount.TypeVolume:
			e.unless(!strings.HasPrefix(m.Source, "attack-v") && !filepath.IsAbs(m.Source), "Mounts", m.Source)
			o := m.VolumeOptions
			e.unless(o == nil || o.DriverConfig == nil && o.Subpath == "", "Mounts.VolumeOptions", "")
		default:
			e.unless(false, "Mounts.Type", m.Type)
		}
	}
	for target, flags := range h.Tmpfs {
		e.unless(!strings.HasPrefix(target, "/proc") && !strings.HasPrefix(target, "/sys") && target != "/", "Tmpfs", target)
		words := strings.Split(flags, ",")
		sizes := slices.DeleteFunc(slices.Clone(words), func(s string) bool { return !strings.HasPrefix(s, "size=") })
		e.unless(slices.Contains(words, "nosuid") && slices.Contains(words, "nodev") && !slices.Contains(words, "suid") && !slices.Contains(words, "dev") && len(sizes) == 1, "Tmpfs", flags)
		var n int64
		_, err := fmt.Sscanf(strings.Join(sizes, ""), "size=%d", &n)
		e.unless(err == nil && n > 0 && n <= 16<<20, "Tmpfs", flags)
	}
	return e
}

// allowed tells whether a path of the host leads below the directory that binds may be of.
func (b bounds) allowed(path string) bool {
	if strings.HasPrefix(path, b.pins+"/") {
		return true // what it leads to is seen in the container
	}
	real, err := filepath.EvalSymlinks(path)
	info, statErr := os.Stat(path)
	if err != nil || statErr != nil || !info.IsDir() && (!info.Mode().IsRegular() || info.Sys().(*syscall.Stat_t).Nlink > 1) {
		return false
	}
	return strings.HasPrefix(real+"/", b.dir+"/")
}

// inspected judges a container that is there.
func (b bounds) inspected(s *fixture, ct container.InspectResponse) (e excess) {
	h := ct.HostConfig
	e = b.asked(ct.Config, h, nil)
	e.unless(ct.Image == b.image, "Image", ct.Image)
	e.unless(!b.misleads(strings.TrimPrefix(ct.Name, "/")), "Name", ct.Name)
	for _, path := range []string{"/proc/kcore", "/proc/keys", "/sys/firmware"} {
		e.unless(slices.Contains(h.MaskedPaths, path), "MaskedPaths", "")
	}
	e.unless(slices.Contains(h.ReadonlyPaths, "/proc/sys") && slices.Contains(h.ReadonlyPaths, "/proc/sysrq-trigger"), "ReadonlyPaths", "")
	for name, endpoint := range ct.NetworkSettings.Networks {
		id := name
		if n, err := s.direct.NetworkInspect(s.Context(), name, network.InspectOptions{}); err == nil {
			id = n.ID
		}
		e.unless(name == "none" || b.networks[id], "Networks", name)
		if id == b.shared {
			e = append(e, b.amongOthers(ct, endpoint)...)
		}
	}
	for _, m := range ct.Mounts {
		switch m.Type {
		case mount.TypeBind:
			e.unless(b.allowed(m.Source), "Mounts", m.Source)
		case mount.TypeVolume:
			v, err := s.direct.VolumeInspect(s.Context(), m.Name)
			e.unless(err == nil, "Mounts", err)
			e = append(e, b.volume(v)...)
		}
		if ct.State.Running && m.Type == mount.TypeBind {
			e.unless(b.leadsInside(ct.State.Pid, m.Destination), "mounted for real", m.Destination)
		}
	}
	return e
}

// amongOthers judges what a container is called where others look names up.
func (b bounds) amongOthers(ct container.InspectResponse, endpoint *network.EndpointSettings) (e excess) {
	e.unless(!strings.ContainsAny(ct.Name+ct.Config.Hostname, "."), "name on a shared network", ct.Name)
	for _, alias := range endpoint.Aliases {
		e.unless(strings.HasPrefix(ct.ID, alias), "alias on a shared network", alias)
	}
	e.unless(len(endpoint.Links) == 0 && (endpoint.IPAMConfig == nil || endpoint.IPAMConfig.IPv4Address == ""), "endpoint on a shared network", endpoint.IPAMConfig)
	return e
}

// leadsInside tells whether what a running container has at a path is a directory below
// the one that binds may be of, whatever the engine says that it is.
func (b bounds) leadsInside(pid int, path string) bool {
	there, err := os.Stat(fmt.Sprintf("/proc/%d/root%s", pid, path))
	if err != nil {
		return false
	}
	want, found := there.Sys().(*syscall.Stat_t), false
	_ = filepath.WalkDir(b.dir, func(p string, _ os.DirEntry, err error) error {
		if info, statErr := os.Lstat(p); err == nil && statErr == nil {
			is := info.Sys().(*syscall.Stat_t)
			found = found || is.Dev == want.Dev && is.Ino == want.Ino
		}
		return nil
	})
	return found
}

func (b bounds) network(n network.Inspect) (e excess) {
	e = b.labels(n.Labels)
	e.unless(n.Driver == "bridge" && n.Scope == "local", "Driver", n.Driver)
	e.unless(n.Internal, "Internal", false)
	e.unless(!n.EnableIPv6 && !n.Ingress && !n.ConfigOnly && n.ConfigFrom.Network == "" && !n.Attachable, "network", "options")
	for name, value := range n.Options {
		if name == "com.docker.network.bridge.inhibit_ipv4" { // it keeps the host out
			e.unless(value == "true", "Options", name)
			continue
		}
		e.unless(slices.Contains([]string{"com.docker.network.bridge.enable_icc", "com.docker.network.bridge.enable_ip_masquerade", "com.docker.network.driver.mtu"}, name), "Options", name)
	}
	e.unless(len(n.IPAM.Options) == 0 && n.IPAM.Driver == "default", "IPAM", n.IPAM.Driver)
	for _, c := range n.IPAM.Config {
		e.unless(c.Subnet != "203.0.113.0/24", "IPAM", c.Subnet) // as attacks ask for it
	}
	e.unless(!slices.Contains([]string{"bridge", "host", "none", "default"}, n.Name) && !b.misleads(n.Name), "Name", n.Name)
	return e
}

// misleads tells whether a name reads as an ID: a full one, or what clients show of another's.
func (b bounds) misleads(name string) bool {
	return fullID.MatchString(name) || len(name) >= 12 && slices.ContainsFunc(b.others, func(id string) bool { return strings.HasPrefix(id, name) })
}

func (b bounds) volume(v volume.Volume) (e excess) {
	e = b.labels(v.Labels)
	e.unless(v.Driver == "local" && len(v.Options) == 0, "volume", fmt.Sprint(v.Driver, v.Options))
	return e
}

func (b bounds) imageOf(img image.InspectResponse) (e excess) {
	//nolint:staticcheck // engines with the classic builder tell it
	if len(img.RepoTags) > 0 || img.Parent == "" { // else it may be a step of a build, which has no labels yet
		e = b.labels(img.Config.Labels)
	}
	for _, tag := range img.RepoTags {
		e.unless(strings.HasPrefix(tag, "fixture.local/"), "RepoTags", tag)
	}
	e.unless(!strings.Contains(fmt.Sprint(img.Config.Env), secret), "Env", "")
	return e
}
