package body

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/go-connections/nat"

	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/proxy"
)

// Request translates the body for the policy, except for mounts, networks and the image.
func (b *Create) Request() (policy.ContainerRequest, error) {
	h := b.HostConfig
	req := policy.ContainerRequest{
		Env: map[string]string{}, User: b.User, Groups: h.GroupAdd,
		CapAdd: h.CapAdd, CapDrop: h.CapDrop, SecurityOpt: h.SecurityOpt, Privileged: h.Privileged,
		Namespaces: h.namespaces(), Devices: DeviceList(&h.Resources), Sysctls: h.Sysctls, Runtime: h.Runtime,
		LogDriver: h.LogConfig.Type, LogOptions: h.LogConfig.Config, Restart: string(h.RestartPolicy.Name),
		DNS: h.DNS, DNSOptions: h.DNSOptions, DNSSearch: h.DNSSearch, ExtraHosts: h.ExtraHosts,
		ShmBytes: h.ShmSize, OOMScoreAdj: h.OomScoreAdj, ReadOnlyRootfs: h.ReadonlyRootfs,
		Other: b.refused(),
	}
	for _, e := range b.Env {
		if name, value, ok := strings.Cut(e, "="); ok {
			req.Env[name] = value // the last one counts
		} else {
			delete(req.Env, name)
		}
	}
	if h.PidMode.IsContainer() { // the caller of Request looks the container up
		req.PidOf = &policy.ContainerPeer{Asked: string(h.PidMode)}
	}
	Limits(&h.Resources, &req)
	var err error
	req.Ports, err = h.ports()
	return req, err
}

// Limits fills in the limits that an update can change too.
func Limits(r *container.Resources, req *policy.ContainerRequest) {
	req.MemoryBytes, req.SwapBytes, req.PidsLimit = r.Memory, r.MemorySwap, r.PidsLimit
	req.CPUs = cpus(r)
	req.OOMKillDisable = r.OomKillDisable != nil && *r.OomKillDisable
	for _, u := range r.Ulimits {
		req.Ulimits = append(req.Ulimits, policy.ContainerUlimit{Name: u.Name, Soft: u.Soft, Hard: u.Hard})
	}
	if req.PidsLimit != nil && *req.PidsLimit == 0 {
		req.PidsLimit = nil // clients send 0 for a limit that they leave out
	}
}

// cpus returns the limit in CPUs; 0 is none.
func cpus(r *container.Resources) float64 {
	if r.NanoCPUs != 0 {
		return float64(r.NanoCPUs) / 1e9
	}
	if r.CPUQuota <= 0 {
		return 0
	}
	period := r.CPUPeriod
	if period == 0 {
		period = 100_000
	}
	return float64(r.CPUQuota) / float64(period)
}

func (h *Host) namespaces() []policy.ContainerNamespace {
	list := []policy.ContainerNamespace{
		{Field: "HostConfig.PidMode", Kind: "pid", Mode: string(h.PidMode)},
		{Field: "HostConfig.IpcMode", Kind: "ipc", Mode: string(h.IpcMode)},
		{Field: "HostConfig.UTSMode", Kind: "uts", Mode: string(h.UTSMode)},
		{Field: "HostConfig.CgroupnsMode", Kind: "cgroup", Mode: string(h.CgroupnsMode)},
		{Field: "HostConfig.UsernsMode", Kind: "userns", Mode: string(h.UsernsMode)},
	}
	return slices.DeleteFunc(list, func(n policy.ContainerNamespace) bool {
		return n.Mode == "" || n.Kind == "pid" && h.PidMode.IsContainer()
	})
}

// DeviceList describes the devices, device requests and device cgroup rules that are asked for.
func DeviceList(r *container.Resources) []string {
	var list []string
	for _, d := range r.Devices {
		list = append(list, d.PathOnHost+":"+d.PathInContainer+":"+d.CgroupPermissions)
	}
	for _, d := range r.DeviceRequests {
		list = append(list, fmt.Sprintf("request of driver %q for %v", d.Driver, d.Capabilities))
	}
	for _, rule := range r.DeviceCgroupRules {
		list = append(list, "cgroup rule "+rule)
	}
	return list
}

// Others collects the given fields that no policy allows.
type Others []policy.OtherField

// Add adds a field if it is given.
func (o *Others) Add(given bool, field string, value any) {
	if given {
		*o = append(*o, policy.OtherField{Field: field, Value: Shorten(fmt.Sprint(value))})
	}
}

// refused returns the fields of the body that no policy allows.
func (b *Create) refused() []policy.OtherField {
	var o Others
	h := b.HostConfig
	o.Add(b.MacAddress != "", "MacAddress", b.MacAddress) //nolint:staticcheck // old clients send it
	o.Add(len(b.OnBuild) > 0, "OnBuild", b.OnBuild)
	o.Add(b.Runtime != "" && b.Runtime != h.Runtime, "Runtime", b.Runtime)
	o.Add(len(b.VolumesFrom) > 0, "VolumesFrom", b.VolumesFrom)
	o.Add(len(b.PortSpecs) > 0, "PortSpecs", b.PortSpecs)
	o.Add(h.VolumeDriver != "" && h.VolumeDriver != "local", "HostConfig.VolumeDriver", h.VolumeDriver)
	o.Add(len(h.Annotations) > 0, "HostConfig.Annotations", slices.Sorted(maps.Keys(h.Annotations)))
	o.Add(len(h.Capabilities) > 0, "HostConfig.Capabilities", h.Capabilities)
	o.Add(len(h.LxcConf) > 0, "HostConfig.LxcConf", h.LxcConf)
	o.Add(h.Cgroup != "", "HostConfig.Cgroup", h.Cgroup)
	o.Add(len(h.StorageOpt) > 0, "HostConfig.StorageOpt", slices.Sorted(maps.Keys(h.StorageOpt)))
	o.Add(h.Isolation != "" && h.Isolation != container.IsolationDefault, "HostConfig.Isolation", h.Isolation)
	o.Add(h.MaskedPaths != nil, "HostConfig.MaskedPaths", h.MaskedPaths)
	o.Add(h.ReadonlyPaths != nil, "HostConfig.ReadonlyPaths", h.ReadonlyPaths)
	r := h.Resources
	r.BlkioWeight = 0 // Encode leaves it out, as does an engine whose kernel doesn't support it
	return append(o, Refused("HostConfig.", &r, h.DiskQuota)...)
}

// defaultShares is the weight of a container that asks for none.
const defaultShares = 1024

// Refused returns the resource fields that no policy allows. At is the prefix of their names.
func Refused(at string, r *container.Resources, diskQuota int64) []policy.OtherField {
	var o Others
	o.Add(r.CPUShares > defaultShares, at+"CpuShares", r.CPUShares)
	o.Add(r.CgroupParent != "", at+"CgroupParent", r.CgroupParent)
	for name, n := range map[string]any{
		"BlkioWeight": r.BlkioWeight, "CpuRealtimePeriod": r.CPURealtimePeriod, "CpuRealtimeRuntime": r.CPURealtimeRuntime,
		"DiskQuota": diskQuota, "KernelMemory": r.KernelMemory, "KernelMemoryTCP": r.KernelMemoryTCP, "CpuCount": r.CPUCount, //nolint:staticcheck // old clients send it
		"CpuPercent": r.CPUPercent, "IOMaximumIOps": r.IOMaximumIOps, "IOMaximumBandwidth": r.IOMaximumBandwidth,
		"BlkioWeightDevice": len(r.BlkioWeightDevice), "BlkioDeviceReadBps": len(r.BlkioDeviceReadBps), "BlkioDeviceWriteBps": len(r.BlkioDeviceWriteBps),
		"BlkioDeviceReadIOps": len(r.BlkioDeviceReadIOps), "BlkioDeviceWriteIOps": len(r.BlkioDeviceWriteIOps),
	} {
		o.Add(fmt.Sprint(n) != "0", at+name, n)
	}
	slices.SortFunc(o, func(a, b policy.OtherField) int { return strings.Compare(a.Field, b.Field) })
	return o
}

// ports returns the ports to publish, in the order of their keys.
func (h *Host) ports() ([]policy.ContainerPort, error) {
	var list []policy.ContainerPort
	for _, key := range slices.Sorted(maps.Keys(h.PortBindings)) {
		port, protocol, err := parsePort(string(key))
		if err != nil {
			return nil, err
		}
		field := fmt.Sprintf("HostConfig.PortBindings[%q]", key)
		bindings := h.PortBindings[key]
		if len(bindings) == 0 {
			bindings = []nat.PortBinding{{}}
		}
		for _, b := range bindings {
			p := policy.ContainerPort{Field: field, HostIP: b.HostIP, Port: port, Protocol: protocol}
			if b.HostPort != "" {
				first, last, isRange := strings.Cut(b.HostPort, "-")
				n, err := strconv.ParseUint(first, 10, 16)
				end, endErr := uint64(0), error(nil)
				if isRange {
					end, endErr = strconv.ParseUint(last, 10, 16)
				}
				if err != nil || endErr != nil || isRange && (n == 0 || end < n) {
					return nil, proxy.Malformed(fmt.Sprintf("%s: the host port %q is neither a port's number nor a range of them", field, Shorten(b.HostPort)))
				}
				p.HostPort, p.HostEnd = int(n), int(end)
			}
			list = append(list, p)
		}
	}
	if len(list) > MaxListed {
		return nil, proxy.Malformed(fmt.Sprintf("there are more than %d ports", MaxListed))
	}
	return list, nil
}

// Published adds the ports that PublishAllPorts stands for. These are the exposed ports of the
// body and the image that aren't published already.
func (b *Create) Published(have []policy.ContainerPort, image nat.PortSet) ([]policy.ContainerPort, error) {
	if !b.HostConfig.PublishAllPorts {
		return have, nil
	}
	all := nat.PortSet{}
	maps.Copy(all, b.ExposedPorts)
	maps.Copy(all, image)
	for _, key := range slices.Sorted(maps.Keys(all)) {
		port, protocol, err := parsePort(string(key))
		if err != nil {
			return nil, err
		}
		if !slices.ContainsFunc(have, func(p policy.ContainerPort) bool { return p.Port == port && p.Protocol == protocol }) {
			have = append(have, policy.ContainerPort{Field: "HostConfig.PublishAllPorts", Port: port, Protocol: protocol})
		}
	}
	return have, nil
}

// parsePort reads "80/tcp", or "80".
func parsePort(s string) (port int, protocol string, err error) {
	number, protocol, ok := strings.Cut(s, "/")
	if !ok {
		protocol = "tcp"
	}
	protocol = strings.ToLower(protocol)
	n, err := strconv.ParseUint(number, 10, 16)
	if err != nil || n == 0 || !slices.Contains([]string{"tcp", "udp", "sctp"}, protocol) {
		return 0, "", proxy.Malformed(fmt.Sprintf("%q is not a port as 80/tcp", Shorten(s)))
	}
	return int(n), protocol, nil
}
