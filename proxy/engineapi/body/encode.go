package body

import (
	"maps"
	"math"
	"net"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/mount"
	"github.com/docker/docker/api/types/network"
	"github.com/docker/go-connections/nat"

	"github.com/bermhq/berm/policy"
)

// NoNewPrivileges is the security option of every container.
const NoNewPrivileges = "no-new-privileges"

var variable = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]{0,254}$`)

// Judged is a judged container before it is created.
type Judged struct {
	Body      *Create
	Spec      policy.ContainerSpec
	ImageRef  string                               // the image's reference for the engine
	Mounts    []Mounted                            // all mounts of the request
	Sources   []string                             // the path that the engine mounts for each bind
	Endpoints map[string]*network.EndpointSettings // by the network's ID
	Labels    map[string]string
	Seccomp   string            // the SecurityOpt with Berm's profile; empty for the engine's own
	Unset     []string          // variables of the image that the policy denies
	Volumes   map[string]string // labels of the volumes that are made for the container
}

// Encode writes the create request for the engine, from the judged spec and from fields of the
// body that affect nothing outside the container. V is the minor version of the API.
func (p *Judged) Encode(injected []string, v int) container.CreateRequest {
	b, s := p.Body, p.Spec
	cfg := &container.Config{
		Hostname: b.Hostname, Domainname: b.Domainname, User: s.User,
		AttachStdin: b.AttachStdin, AttachStdout: b.AttachStdout, AttachStderr: b.AttachStderr,
		ExposedPorts: b.exposed(), Tty: b.Tty, OpenStdin: b.OpenStdin, StdinOnce: b.StdinOnce,
		Env: p.Env(injected), Cmd: b.Cmd, Entrypoint: b.Entrypoint, Shell: b.Shell,
		Image: p.ImageRef, WorkingDir: b.WorkingDir, Labels: p.Labels, StopSignal: b.StopSignal,
		Healthcheck: b.Healthcheck, StopTimeout: b.StopTimeout,
	}
	req := container.CreateRequest{Config: cfg, HostConfig: p.host(v)}
	req.NetworkingConfig = p.networking(req.HostConfig)
	return req
}

// Env returns the judged environment in the order of the request, and then names alone, which
// remove variables of the image. The injected variables of the policy come last.
func (p *Judged) Env(injected []string) []string {
	var out []string
	done := map[string]bool{}
	add := func(name, entry string) {
		if !done[name] {
			out, done[name] = append(out, entry), true
		}
	}
	for _, e := range injected {
		name, _, _ := strings.Cut(e, "=")
		done[name] = true
	}
	for _, e := range p.Body.Env {
		name, _, _ := strings.Cut(e, "=")
		if value, ok := p.Spec.Env[name]; ok {
			add(name, name+"="+value)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(p.Spec.Env)) {
		add(name, name+"="+p.Spec.Env[name])
	}
	for _, e := range p.Body.Env {
		if variable.MatchString(e) {
			add(e, e)
		}
	}
	for _, name := range p.Unset {
		add(name, name)
	}
	return append(out, injected...)
}

func (b *Create) exposed() nat.PortSet {
	if len(b.ExposedPorts) == 0 {
		return nil
	}
	set := nat.PortSet{}
	for key := range b.ExposedPorts {
		if port, protocol, err := parsePort(string(key)); err == nil {
			set[natPort(port, protocol)] = struct{}{}
		}
	}
	return set
}

func natPort(port int, protocol string) nat.Port {
	return nat.Port(strconv.Itoa(port) + "/" + protocol)
}

// host writes the host configuration, which confines the container. Fields that it doesn't set
// are the engine's default.
func (p *Judged) host(v int) *container.HostConfig {
	b, s := p.Body.HostConfig, p.Spec
	h := &container.HostConfig{
		LogConfig:     container.LogConfig{Type: s.LogDriver, Config: s.LogOptions},
		RestartPolicy: container.RestartPolicy{Name: container.RestartPolicyMode(engineRestart(s))},
		AutoRemove:    b.AutoRemove, ConsoleSize: b.ConsoleSize, Init: b.Init,
		CapDrop: []string{"ALL"}, CapAdd: s.Capabilities, SecurityOpt: p.security(),
		DNS: s.DNS, DNSOptions: s.DNSOptions, DNSSearch: s.DNSSearch, ExtraHosts: s.ExtraHosts, GroupAdd: s.Groups,
		IpcMode: ipcMode(s), OomScoreAdj: s.OOMScoreAdj, PortBindings: portMap(s.Ports),
		ReadonlyRootfs: s.ReadOnlyRootfs, Tmpfs: p.tmpfs(), ShmSize: s.ShmBytes, Sysctls: s.Sysctls, Runtime: s.Runtime,
		Mounts: p.MountList(),
		Resources: container.Resources{
			Memory: s.MemoryBytes, MemorySwap: s.SwapBytes, NanoCPUs: nanoCPUs(s.CPUs), PidsLimit: &s.PidsLimit,
		},
	}
	harmless(&b.Resources, &h.Resources)
	for _, u := range s.Ulimits {
		h.Ulimits = append(h.Ulimits, &container.Ulimit{Name: u.Name, Soft: u.Soft, Hard: u.Hard})
	}
	if engineRestart(s) == string(container.RestartPolicyOnFailure) {
		h.RestartPolicy.MaximumRetryCount = b.RestartPolicy.MaximumRetryCount
	}
	h.PidMode = pidMode(s)
	if v >= 41 {
		h.CgroupnsMode = container.CgroupnsModePrivate
	}
	return h
}

func ipcMode(s policy.ContainerSpec) container.IpcMode {
	if s.IpcNone {
		return container.IPCModeNone
	}
	return container.IPCModePrivate
}

func pidMode(s policy.ContainerSpec) container.PidMode {
	if s.PidOf == "" {
		return ""
	}
	return container.PidMode("container:" + s.PidOf)
}

// security returns the container's security options. They include every option that the policy
// lets a caller ask for.
func (p *Judged) security() []string {
	if p.Seccomp == "" {
		return []string{NoNewPrivileges}
	}
	return []string{NoNewPrivileges, p.Seccomp}
}

// harmless copies resource settings that can only restrict the container itself.
func harmless(r, to *container.Resources) {
	to.CPUShares, to.CpusetCpus, to.CpusetMems = r.CPUShares, r.CpusetCpus, r.CpusetMems
	to.MemoryReservation = r.MemoryReservation
	if to.Memory > 0 {
		to.MemoryReservation = min(r.MemoryReservation, to.Memory)
	}
	if r.MemorySwappiness != nil && *r.MemorySwappiness >= 0 {
		to.MemorySwappiness = r.MemorySwappiness
	}
}

func nanoCPUs(cpus float64) int64 { return int64(math.Round(cpus * 1e9)) }

func portMap(ports []policy.ContainerPort) nat.PortMap {
	if len(ports) == 0 {
		return nil
	}
	m := nat.PortMap{}
	for _, p := range ports {
		b := nat.PortBinding{HostIP: p.HostIP}
		if p.HostPort != 0 {
			b.HostPort = strconv.Itoa(p.HostPort)
		}
		if p.HostEnd != 0 {
			b.HostPort += "-" + strconv.Itoa(p.HostEnd)
		}
		key := natPort(p.Port, p.Protocol)
		m[key] = append(m[key], b)
	}
	return m
}

// engineRestart returns the restart policy that the engine gets. A container with binds gets
// none: Berm holds the binds for a start, so the engine must not start the container by itself.
func engineRestart(s policy.ContainerSpec) string {
	if len(s.Binds) > 0 {
		return string(container.RestartPolicyDisabled)
	}
	return s.Restart
}

// MountList returns the binds, with their held paths as sources, and the volumes. A bind isn't
// recursive: file systems mounted below the source were never judged, and older engines would
// leave them writable below a read-only bind. The engine doesn't make a missing source.
func (p *Judged) MountList() []mount.Mount {
	var out []mount.Mount
	for i, m := range p.Spec.Binds {
		out = append(out, mount.Mount{
			Type: mount.TypeBind, Source: p.Sources[i], Target: m.MountPath, ReadOnly: m.Mode == "ro",
			BindOptions: &mount.BindOptions{Propagation: mount.PropagationRPrivate, NonRecursive: true},
		})
	}
	for _, v := range p.Spec.Volumes {
		// A named volume exists, but may be removed before the engine uses it. The engine would
		// then make it anew, so it gets the labels too.
		options := &mount.VolumeOptions{NoCopy: p.asked(v.Target).noCopy, Labels: p.Volumes}
		out = append(out, mount.Mount{Type: mount.TypeVolume, Source: v.Source, Target: v.Target, ReadOnly: v.ReadOnly, VolumeOptions: options})
	}
	return out
}

func (p *Judged) asked(target string) Mounted {
	i := slices.IndexFunc(p.Mounts, func(m Mounted) bool { return m.Target == target })
	if i < 0 {
		return Mounted{}
	}
	return p.Mounts[i]
}

func (p *Judged) tmpfs() map[string]string {
	if len(p.Spec.Tmpfs) == 0 {
		return nil
	}
	m := map[string]string{}
	for _, t := range p.Spec.Tmpfs {
		mode := "rw"
		if t.ReadOnly {
			mode = "ro"
		}
		m[t.Target] = mode + ",nosuid,nodev,size=" + strconv.FormatInt(t.SizeBytes, 10)
		flags := p.asked(t.Target).flags
		if !slices.Contains(strings.Split(flags, ","), "exec") && !slices.Contains(strings.Split(flags, ","), "noexec") {
			m[t.Target] += ",noexec" // the engine's default
		}
		if flags != "" {
			m[t.Target] += "," + flags
		}
	}
	return m
}

// networking names each network by its ID, in the mode and as an endpoint.
func (p *Judged) networking(h *container.HostConfig) *network.NetworkingConfig {
	s := p.Spec
	switch s.Network {
	case policy.SpecNetworkNone:
		h.NetworkMode = policy.NetNone
		return nil
	case policy.SpecNetworkContainer:
		h.NetworkMode = container.NetworkMode("container:" + s.Networks[0].ID)
		return nil
	}
	h.NetworkMode = container.NetworkMode(s.Networks[0].ID)
	cfg := &network.NetworkingConfig{EndpointsConfig: map[string]*network.EndpointSettings{}}
	for _, n := range s.Networks {
		e := EncodeEndpoint(p.Endpoints[n.ID], n.Own)
		e.NetworkID = n.ID // otherwise a later start by the engine could join another network of that name
		cfg.EndpointsConfig[n.ID] = e
	}
	return cfg
}

// EncodeEndpoint writes an endpoint for the engine. On a network that isn't the caller's own, it
// leaves out aliases, links and addresses.
func EncodeEndpoint(e *network.EndpointSettings, own bool) *network.EndpointSettings {
	out := &network.EndpointSettings{}
	if e == nil {
		return out
	}
	out.GwPriority = e.GwPriority
	if !own {
		return out
	}
	out.Aliases, out.Links = e.Aliases, e.Links
	if a := e.IPAMConfig; a != nil && (net.ParseIP(a.IPv4Address) != nil || net.ParseIP(a.IPv6Address) != nil) {
		out.IPAMConfig = &network.EndpointIPAMConfig{IPv4Address: a.IPv4Address, IPv6Address: a.IPv6Address}
	}
	return out
}

// Encode writes the update for the engine, without the fields that don't change. It always sets
// memory and swap together, so that the container gets no swap.
func (b *Update) Encode(s policy.ContainerSpec) container.UpdateConfig {
	u := container.UpdateConfig{RestartPolicy: container.RestartPolicy{Name: container.RestartPolicyMode(s.Restart)}}
	if s.Restart == string(container.RestartPolicyOnFailure) {
		u.RestartPolicy.MaximumRetryCount = b.RestartPolicy.MaximumRetryCount
	}
	u.Memory, u.MemorySwap, u.NanoCPUs = s.MemoryBytes, s.SwapBytes, nanoCPUs(s.CPUs)
	if s.PidsLimit != 0 {
		u.PidsLimit = &s.PidsLimit
	}
	harmless(&b.Resources, &u.Resources)
	return u
}
