package engineapi

import (
	"maps"
	"reflect"
	"slices"

	"github.com/bermhq/berm/proxy/engineapi/body"

	"github.com/docker/docker/api/types/container"

	"github.com/bermhq/berm/policy"
)

// stillAllowed judges a container once more that was allowed before, by the policy in
// force now and the profile that it was made with: its image, its user, its mounts,
// networks and ports, its privileges and its limits. Its variables and its life aren't
// judged again. What an update changed has been judged by withinLimits.
func stillAllowed(c *call, e effective, h *container.HostConfig) error {
	req := e.request()
	same := body.SameResources(e.ContainerSpec, h) && body.RestartIs(h, e.ContainerSpec)
	if !same {
		req.CPUs, req.MemoryBytes, req.PidsLimit = 0, 0, nil
		if len(e.Binds) == 0 { // else Berm carries it out, and the update of it isn't the engine's
			req.Restart = ""
		}
	}
	verdict := c.rules.Container(req)
	if !verdict.Allowed() { // an image that the caller built itself needn't be on the list
		img, err := lookUpImage(c, e.ImageID)
		if err != nil {
			return err
		}
		if req.Trusted = img != nil && ownImage(c, img.Config.Labels); req.Trusted {
			verdict = c.rules.Container(req)
		}
	}
	if err := verdict.Err(); err != nil {
		return err
	}
	return differ(narrowed(e.ContainerSpec, verdict.Spec, same), "verify.policy")
}

// request asks for what was allowed, in so many words.
func (e *effective) request() policy.ContainerRequest {
	req := policy.ContainerRequest{
		Profile: e.Profile, Image: e.Image, User: e.User, Groups: e.Groups,
		Networks: e.Networks, Ports: e.Ports, CapAdd: e.Capabilities, CapDrop: []string{"ALL"},
		Sysctls: e.Sysctls, Ulimits: e.Ulimits, Runtime: e.Runtime, LogDriver: e.LogDriver, LogOptions: e.LogOptions,
		Restart: e.Restart, DNS: e.DNS, DNSOptions: e.DNSOptions, DNSSearch: e.DNSSearch, ExtraHosts: e.ExtraHosts,
		CPUs: e.CPUs, MemoryBytes: e.MemoryBytes, PidsLimit: &e.PidsLimit,
		ShmBytes: e.ShmBytes, OOMScoreAdj: e.OOMScoreAdj, ReadOnlyRootfs: e.ReadOnlyRootfs,
	}
	if e.Network == policy.SpecNetworkNone {
		req.Networks = []policy.ContainerNetwork{{Field: "HostConfig.NetworkMode", Mode: policy.NetNone}}
	}
	for _, m := range e.Binds {
		req.Mounts = append(req.Mounts, policy.ContainerMount{
			Field: "HostConfig.Mounts", Type: "bind", Source: m.HostPath, Target: m.MountPath, ReadOnly: m.Mode == "ro",
		})
	}
	req.Mounts = append(append(req.Mounts, e.Volumes...), e.Tmpfs...)
	return req
}

// narrowed tells what the policy would make less of now. Limits that are as they were
// made are compared too.
func narrowed(was, now policy.ContainerSpec, limits bool) body.Differences {
	var d body.Differences
	d.Add(now.Image == was.Image, "Image")
	d.Add(now.User == was.User, "Config.User")
	d.Add(was.ReadOnlyRootfs || !now.ReadOnlyRootfs, "HostConfig.ReadonlyRootfs")
	d.Add(now.Runtime == was.Runtime, "HostConfig.Runtime")
	d.Add(slices.Equal(now.Binds, was.Binds), "HostConfig.Mounts")
	d.Add(now.Network == was.Network && len(now.Networks) == len(was.Networks), "HostConfig.NetworkMode")
	for _, n := range was.Networks {
		d.Add(slices.ContainsFunc(now.Networks, func(o policy.ContainerNetwork) bool { return o.Name == n.Name }), "NetworkSettings.Networks")
	}
	d.Add(slices.Equal(now.Ports, was.Ports), "HostConfig.PortBindings")
	d.Add(slices.Equal(now.Ulimits, was.Ulimits), "HostConfig.Ulimits")
	d.Add(maps.Equal(now.LogOptions, was.LogOptions), "HostConfig.LogConfig")
	d.Add(now.ShmBytes >= was.ShmBytes, "HostConfig.ShmSize")
	d.Add(len(now.Tmpfs) == len(was.Tmpfs) && (len(was.Tmpfs) == 0 || reflect.DeepEqual(now.Tmpfs, was.Tmpfs)), "HostConfig.Tmpfs")
	if limits {
		d.Add(now.CPUs >= was.CPUs && now.MemoryBytes >= was.MemoryBytes && now.PidsLimit >= was.PidsLimit, "HostConfig.Resources")
	}
	return d
}
