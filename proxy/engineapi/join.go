package engineapi

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/docker/docker/api/types/network"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/proxy/engineapi/body"
	"github.com/bermhq/berm/runtime"
)

// lookUpNetwork returns a network of any owner by its ID, its name, or a prefix of its ID. It
// returns nil if there is none.
func lookUpNetwork(c *call, ref string) (*network.Inspect, error) {
	n, _, err := anyNetwork(c, ref)
	if isMissing(err) {
		return nil, nil
	}
	return n, err
}

// policyNetwork returns one of the policy's networks by the engine's name, and makes it if it is
// missing. It returns nil if that isn't possible, or if another network has the name.
func policyNetwork(c *call, name string) (*network.Inspect, error) {
	n, err := lookUpNetwork(c, name)
	if err == nil && n == nil && c.opts.EnsureNetwork != nil {
		if err := c.opts.EnsureNetwork(c.ctx, name); err != nil {
			return nil, fmt.Errorf("make network %s: %w", name, err)
		}
		n, err = lookUpNetwork(c, name)
	}
	if err != nil || n == nil || n.Name != name || !policyOwn(c, n) {
		return nil, err
	}
	return n, nil
}

// namedNetwork is lookUpNetwork, except that it makes a missing network of the policy's. Another
// caller's network doesn't hide one of the caller's own whose ID begins with ref.
func namedNetwork(c *call, ref string) (*network.Inspect, error) {
	info, err := lookUpNetwork(c, ref)
	if err == nil && info == nil && policyName(c, ref) {
		return policyNetwork(c, ref)
	}
	if err == nil && (info == nil || c.others(lifecycle.ObjectNetwork, info.ID, info.Labels)) {
		id, err := startOf(c, lifecycle.ObjectNetwork, ref)
		if err != nil || id == "" {
			return info, err
		}
		return lookUpNetwork(c, id)
	}
	return info, err
}

// policyName reports whether the policy has a network of the engine's name.
func policyName(c *call, name string) bool {
	return slices.ContainsFunc(c.rules.Networks(), func(r policy.NetworkRule) bool { return r.EngineNetwork == name })
}

// joinedNetworks returns the networks that a container asks to join. It merges NetworkMode and
// EndpointsConfig, without duplicates.
func joinedNetworks(c *call, b *body.Create) ([]policy.ContainerNetwork, map[string]*network.EndpointSettings, error) {
	mode := string(b.HostConfig.NetworkMode)
	asked, err := b.Endpoints()
	if err != nil {
		return nil, nil, err
	}
	if len(asked) > body.MaxLookedUp {
		return nil, nil, proxy.Malformed(fmt.Sprintf("there are more than %d networks", body.MaxLookedUp))
	}
	if b.NetworkDisabled && isDefaultNetwork(mode) {
		mode = policy.NetNone
	}
	var list []policy.ContainerNetwork
	if len(asked) == 0 || !isDefaultNetwork(mode) {
		n, err := resolveNetwork(c, mode, true)
		if err != nil {
			return nil, nil, err
		}
		n.Field = modeField
		list = append(list, n)
	}
	endpoints := map[string]*network.EndpointSettings{}
	taken := map[string]bool{}
	for _, ref := range slices.Sorted(maps.Keys(asked)) {
		n, err := resolveNetwork(c, ref, false)
		if err != nil {
			return nil, nil, err
		}
		n.Field = fmt.Sprintf("NetworkingConfig.EndpointsConfig[%q]", body.Shorten(ref))
		if n.Options, err = endpointOptions(asked[ref], n); err != nil {
			return nil, nil, err
		}
		if taken[identity(n)] {
			return nil, nil, proxy.Malformed(fmt.Sprintf("the network %q is there twice", body.Shorten(ref)))
		}
		taken[identity(n)] = true
		if n.ID != "" && asked[ref] != nil {
			endpoints[n.ID] = asked[ref]
		}
		same := func(o policy.ContainerNetwork) bool { return identity(o) == identity(n) }
		if i := slices.IndexFunc(list, same); i >= 0 {
			list[i].Options = n.Options
			continue
		}
		list = append(list, n)
	}
	return list, endpoints, hostLinks(b.HostConfig.Links, &list[0], endpoints)
}

// identity returns a string that distinguishes a network from others. For a missing network, it uses the
// name.
func identity(n policy.ContainerNetwork) string {
	if n.ID == "" && n.Mode == policy.NetNamed {
		return n.Mode + ":" + n.Asked
	}
	return n.Mode + ":" + n.ID
}

// hostLinks adds the links of HostConfig.Links to the endpoint of the network mode, which must be
// a network of the caller's own. Clients may send the same links in both places.
func hostLinks(links []string, n *policy.ContainerNetwork, endpoints map[string]*network.EndpointSettings) error {
	if len(links) == 0 {
		return nil
	}
	if !n.Own || n.Mode != policy.NetNamed || n.ID == "" || n.Field != modeField {
		n.Options = append(n.Options, fmt.Sprintf("Links=%v", links))
		return nil
	}
	e := network.EndpointSettings{}
	if asked := endpoints[n.ID]; asked != nil {
		e = *asked
	}
	e.Links = slices.Clone(e.Links)
	for _, link := range links {
		if !slices.Contains(e.Links, link) {
			e.Links = append(e.Links, link)
		}
	}
	if len(e.Links) > maxAliases {
		return proxy.Malformed(fmt.Sprintf("a network has more than %d links", maxAliases))
	}
	endpoints[n.ID] = &e
	return nil
}

const modeField = "HostConfig.NetworkMode"

func isDefaultNetwork(name string) bool { return name == "" || name == "default" || name == "bridge" }

// resolveNetwork looks up a network by a client's name for it. With mode, ref is a network mode, which
// may also be the network of another container.
func resolveNetwork(c *call, ref string, mode bool) (policy.ContainerNetwork, error) {
	n := policy.ContainerNetwork{Asked: ref}
	if of, ok := strings.CutPrefix(ref, "container:"); ok && mode {
		ct, _, err := c.container(of)
		if err != nil {
			return n, err
		}
		n.Mode, n.ID = policy.NetContainer, ct.ID
		n.Own = (c.caller.Audit || !c.unconfined) && !ct.HostConfig.NetworkMode.IsHost() && !ct.HostConfig.NetworkMode.IsContainer()
		return n, nil
	}
	switch {
	case isDefaultNetwork(ref):
		n.Mode = policy.NetDefault
		return n, nil
	case ref == policy.NetNone, ref == policy.NetHost:
		n.Mode = ref
		return n, nil
	}
	n.Mode = policy.NetNamed
	info, err := namedNetwork(c, ref)
	if err != nil || info == nil {
		return n, err
	}
	meantNetwork(c, &n, info)
	return n, nil
}

// meantNetwork fills in a network's description for the policy.
func meantNetwork(c *call, n *policy.ContainerNetwork, info *network.Inspect) {
	switch {
	case info.Driver == "host":
		n.Mode = policy.NetHost
	case info.Driver == "null":
		n.Mode = policy.NetNone
	case info.Name == "bridge":
		n.Mode = policy.NetDefault
	case c.own(lifecycle.ObjectNetwork, info.ID, info.Labels):
		n.ID, n.Name, n.Own, n.Internal = info.ID, info.Name, true, info.Internal
	case policyOwn(c, info), info.Labels[lifecycle.LabelDoor] != lifecycle.DoorEngine && !policyName(c, info.Name):
		n.ID, n.Name, n.Internal = info.ID, info.Name, info.Internal
	} // another caller's network, or one with just the name of a policy network, counts as missing
}

const maxAliases = 64

// endpointOptions returns the options of an endpoint that no policy allows. On a network that
// others share, an alias could mislead them.
func endpointOptions(e *network.EndpointSettings, n policy.ContainerNetwork) ([]string, error) {
	if e == nil {
		return nil, nil
	}
	var options []string
	add := func(given bool, name string, value any) {
		if given {
			options = append(options, fmt.Sprintf("%s=%v", name, value))
		}
	}
	add(e.MacAddress != "", "MacAddress", e.MacAddress)
	add(len(e.DriverOpts) > 0, "DriverOpts", slices.Sorted(maps.Keys(e.DriverOpts)))
	add(!n.Own && len(e.Aliases) > 0, "Aliases", e.Aliases)
	add(!n.Own && len(e.Links) > 0, "Links", e.Links)
	add(e.GwPriority < -1<<31 || e.GwPriority > 1<<31, "GwPriority", e.GwPriority)
	if a := e.IPAMConfig; a != nil {
		ip, err := netip.ParseAddr(a.IPv4Address)
		add(a.IPv4Address != "" && (!n.Own || err != nil || !ip.Is4()), "IPAMConfig.IPv4Address", a.IPv4Address)
		six, err := netip.ParseAddr(a.IPv6Address)
		add(a.IPv6Address != "" && (!n.Own || err != nil || !six.Is6() || six.Is4In6() || six.Zone() != ""), "IPAMConfig.IPv6Address", a.IPv6Address)
		add(len(a.LinkLocalIPs) > 0, "IPAMConfig.LinkLocalIPs", a.LinkLocalIPs)
	}
	if len(e.Aliases) > maxAliases || len(e.Links) > maxAliases {
		return nil, proxy.Malformed(fmt.Sprintf("a network has more than %d aliases or links", maxAliases))
	}
	for _, alias := range e.Aliases {
		if !body.DomainName.MatchString(alias) {
			return nil, proxy.Malformed(fmt.Sprintf("%q can't be an alias", body.Shorten(alias)))
		}
	}
	return options, nil
}

// ownLinks resolves an endpoint's links to names of the caller's own containers.
func ownLinks(c *call, links []string) ([]string, error) {
	var out []string
	for _, link := range links {
		ref, alias, ok := strings.Cut(link, ":")
		if !ok {
			alias = ref
		}
		if !body.DomainName.MatchString(alias) {
			return nil, proxy.Malformed(fmt.Sprintf("%q can't be an alias", body.Shorten(alias)))
		}
		ct, _, err := c.container(ref)
		if err != nil {
			return nil, err
		}
		out = append(out, strings.TrimPrefix(ct.Name, "/")+":"+alias)
	}
	return out, nil
}

const containerMode = "container:"

// findPeer looks up the container whose PID namespace another one asks to share. A process in one
// of them can open the other's root, and pass the descriptor on to a third container. Engines
// without the fixes of ArchiveFixed must not copy files of a container whose root a process has
// open. Berm can't find out which containers these are.
func findPeer(c *call, p *policy.ContainerPeer) error {
	if p == nil {
		return nil
	}
	if !c.opts.ArchiveFixed {
		release, err := c.engine.Release(c.ctx)
		if err != nil {
			return err
		}
		if !SafeArchives(release) {
			return denied("archive.engine", "HostConfig.PidMode", fmt.Sprintf("another container's processes are refused: engine %q copies files by paths that they could exchange", body.Shorten(release)), "engine "+ArchiveFixed)
		}
		runc, err := c.engine.Runc(c.ctx)
		if err != nil {
			return err
		}
		if !safeRunc(runc) {
			return denied(ruleNested, "HostConfig.PidMode", fmt.Sprintf("another container's processes are refused: they could lead runc %q elsewhere while it mounts", body.Shorten(runc)), "runc 1.2.8, 1.3.3 or 1.4")
		}
	}
	ct, e, confined, err := related(c, strings.TrimPrefix(p.Asked, containerMode))
	if err == nil && confined {
		p.ID, p.Allowed = ct.ID, &e.ContainerSpec
	}
	return err
}

// related looks up a container of the caller's, and the spec that it was allowed. Confined is false if
// the caller may not work in it; see bars.
func related(c *call, ref string) (ct *seen, e effective, confined bool, err error) {
	defer func(was bool) { c.unconfined = was }(c.unconfined) // restores the value for the call's own container
	if ct, _, err = c.container(ref); err != nil {
		return nil, e, false, err
	}
	e, _ = effectiveOf(ct.Config.Labels)
	barred, _ := bars(c, ct.Config.Labels)
	return ct, e, !barred, nil
}

// mountsFrom adds the mounts of the containers in HostConfig.VolumesFrom to the plan. The policy judges
// each mount, and the engine gets no VolumesFrom. Of two mounts with one target the last counts, as with
// the engine.
func mountsFrom(c *call, p *plan) error {
	const field = "HostConfig.VolumesFrom"
	for i, entry := range slices.Backward(p.Body.HostConfig.VolumesFrom) {
		ref, readOnly, err := body.VolumesFrom(entry)
		if err != nil {
			return err
		}
		ct, e, confined, err := related(c, ref)
		if err != nil {
			return err
		}
		if !confined {
			err := denied("mounts.type", field, fmt.Sprintf("container %q was denied, and made in mode audit, or has a socket that serves as another caller", body.Shorten(ref)), "other containers")
			if err := c.judged(err); err != nil {
				return err
			}
		}
		p.Mounts = body.From(p.Mounts, e.ContainerSpec, ct.Mounts, readOnly, fmt.Sprintf("%s[%d]", field, i))
		if len(p.Mounts) > body.MaxLookedUp {
			return proxy.Malformed(fmt.Sprintf("there are more than %d mounts", body.MaxLookedUp))
		}
	}
	return nil
}

// holdsMounts reports whether a container of the caller's has an anonymous volume with another mount
// inside it. At each start of such a container, nobody else may be able to write to the volume.
func holdsMounts(c *call, volume string) (held bool, err error) {
	err = eachOwn(c, lifecycle.ObjectContainer, filters{"volume": {volume}}, func(o *labelled) {
		e, _ := effectiveOf(o.Labels)
		targets := e.Targets()
		for _, v := range e.Volumes {
			held = held || v.Source == "" && slices.ContainsFunc(targets, func(t string) bool { return t != v.Target && runtime.Below(t, v.Target) })
		}
	})
	return held, err
}
