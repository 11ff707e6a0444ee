package engineapi

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"github.com/bermhq/berm/proxy/engineapi/body"

	"github.com/bermhq/berm/proxy/engineapi/upstream"

	"github.com/docker/docker/api/types/network"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/policy"
)

// inhibitOption keeps the host from having an address on a bridge. Containers of an internal
// network could otherwise reach the host.
const inhibitOption = "com.docker.network.bridge.inhibit_ipv4"

func noNetwork(ref string) error { return notFound("network " + body.Shorten(ref) + " not found") }

// ownNetworkOf returns a network of the caller's by its ID, a prefix of the ID, or its name.
func ownNetworkOf(c *call, ref string) (*network.Inspect, json.RawMessage, error) {
	n, raw, err := anyNetwork(c, ref)
	if isMissing(err) || err == nil && !c.own(lifecycle.ObjectNetwork, n.ID, n.Labels) {
		id, listErr := startOf(c, lifecycle.ObjectNetwork, ref)
		if err = listErr; id != "" {
			return ownNetworkOf(c, id)
		}
		if err == nil {
			err = noNetwork(ref)
		}
	}
	if err != nil {
		return nil, nil, err
	}
	c.about(n.ID)
	return n, raw, nil
}

// anyNetwork is ownNetworkOf for a network of any owner.
func anyNetwork(c *call, ref string) (*network.Inspect, json.RawMessage, error) {
	return anyObject(c, lifecycle.ObjectNetwork, ref, noNetwork, func(n *network.Inspect) bool { return fullID.MatchString(n.ID) })
}

// anyObject inspects a network or a volume of any owner. It returns the error missing if there is
// none, or if ref is ambiguous. Right checks the engine's answer.
func anyObject[T any](c *call, kind lifecycle.ObjectKind, ref string, missing func(string) error, right func(*T) bool) (*T, json.RawMessage, error) {
	if !volumeName.MatchString(ref) {
		return nil, nil, missing(ref)
	}
	var raw json.RawMessage
	err := c.engine.Get(c.ctx, c.version, listPaths[kind]+"/"+ref, nil, &raw)
	if s := upstream.StatusOf(err); s == http.StatusNotFound || s == http.StatusBadRequest || s == http.StatusConflict {
		return nil, nil, missing(ref)
	}
	if err != nil {
		return nil, nil, err
	}
	var object T
	if err := json.Unmarshal(raw, &object); err != nil || !right(&object) {
		return nil, nil, fmt.Errorf("inspect %s: the engine's answer can't be read: %w", kind, err)
	}
	return &object, raw, nil
}

func listNetworks(c *call) error {
	builtin, err := listedBuiltins(c)
	if err != nil {
		return err
	}
	return listOwn(c, lifecycle.ObjectNetwork, url.Values{"filters": {c.onlyOwn(c.filter).String()}}, builtin...)
}

func inspectNetwork(c *call) error {
	builtin, err := builtinNetwork(c, c.name)
	if err != nil {
		return err
	}
	if builtin != nil {
		return c.answer(http.StatusOK, builtin)
	}
	_, raw, err := ownNetworkOf(c, c.name)
	if err != nil {
		return err
	}
	var failed error
	raw, err = edit(raw, func(joined *map[string]json.RawMessage) {
		for id := range *joined { // an operator may have connected others' containers
			if _, err := c.containerID(id); isMissing(err) {
				delete(*joined, id)
			} else {
				failed = cmp.Or(failed, err)
			}
		}
	}, "Containers")
	if err := cmp.Or(failed, err); err != nil {
		return err
	}
	return answerShown(c, http.StatusOK, raw, "Labels")
}

// otherFields returns the given fields of a network's creation that no policy allows.
func otherFields(b *network.CreateRequest) []policy.OtherField {
	var o body.Others
	o.Add(b.Scope != "" && b.Scope != "local", "Scope", b.Scope)
	o.Add(b.EnableIPv4 != nil && !*b.EnableIPv4, "EnableIPv4", "false")
	o.Add(b.Ingress, "Ingress", "true")
	o.Add(b.ConfigOnly, "ConfigOnly", "true")
	o.Add(b.ConfigFrom != nil && b.ConfigFrom.Network != "", "ConfigFrom", "{…}")
	if b.IPAM != nil {
		o.Add(b.IPAM.Driver != "" && b.IPAM.Driver != "default", "IPAM.Driver", b.IPAM.Driver)
		o.Add(len(b.IPAM.Options) > 0, "IPAM.Options", "{…}")
		for i, config := range b.IPAM.Config {
			o.Add(len(config.AuxAddress) > 0, fmt.Sprintf("IPAM.Config[%d].AuxiliaryAddresses", i), "{…}")
		}
	}
	return o
}

// subnetsOf returns the ranges of addresses that a network asks for.
func subnetsOf(b *network.CreateRequest) (list []policy.NetworkSubnet) {
	if b.IPAM == nil {
		return nil
	}
	for i, config := range b.IPAM.Config {
		if config.Subnet != "" || config.IPRange != "" || config.Gateway != "" {
			list = append(list, policy.NetworkSubnet{Field: fmt.Sprintf("IPAM.Config[%d]", i), Subnet: config.Subnet, Range: config.IPRange, Gateway: config.Gateway})
		}
	}
	return list
}

// minIPv6 is the API version of the first engine that isolates IPv6 networks by default.
const minIPv6 = 46

// checkSubnets refuses a subnet that overlaps a network of the host: engines compare subnets only
// with their own networks. It refuses IPv6 on engines that forward packets between networks.
func checkSubnets(c *call, spec policy.NetworkSpec) error {
	if len(spec.Subnets) == 0 {
		return nil
	}
	if v, err := c.engine.Max(c.ctx); err != nil {
		return err
	} else if spec.IPv6 && v < minIPv6 {
		return denied("networks.subnets", "EnableIPv6", "IPv6 is refused: the engine doesn't keep IPv6 networks apart", "Docker Engine 27 or later")
	}
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		return fmt.Errorf("list the host's addresses: %w", err)
	}
	for _, s := range spec.Subnets {
		subnet, err := netip.ParsePrefix(s.Subnet)
		if err != nil {
			return err
		}
		for _, a := range addrs {
			if host, err := netip.ParsePrefix(a.String()); err == nil && subnet.Overlaps(host.Masked()) {
				return denied("networks.subnets", s.Field, fmt.Sprintf("subnet %q is refused: a network of the host or of the engine uses it", s.Subnet), "another subnet")
			}
		}
	}
	return nil
}

func createNetwork(c *call, asked *network.CreateRequest) error {
	spec, _, err := c.rules.NetworkCreate(c.caller.Profile, policy.NetworkCreateRequest{
		Name: asked.Name, Driver: asked.Driver, Internal: asked.Internal, Options: asked.Options, Other: otherFields(asked),
		IPv6: asked.EnableIPv6 != nil && *asked.EnableIPv6, Subnets: subnetsOf(asked),
	})
	if err := c.judged(err); err != nil {
		return err
	}
	if err := c.judged(cmp.Or(checkIDName(c, lifecycle.ObjectNetwork, spec.Name), checkSubnets(c, spec))); err != nil {
		return err
	}
	labels, err := stampLabels(c, lifecycle.ObjectNetwork, asked.Labels)
	if err != nil {
		return err
	}
	if err := c.untilEnd(c.room("networks", 1)); err != nil {
		return err
	}
	var made network.CreateResponse
	alone := true
	want := network.CreateRequest{CreateOptions: network.CreateOptions{
		Driver: "bridge", Internal: spec.Internal, Options: spec.Options, Labels: labels, IPAM: &network.IPAM{Driver: "default"}, EnableIPv6: &spec.IPv6,
	}, Name: spec.Name, CheckDuplicate: &alone} //nolint:staticcheck // old engines need it
	for _, s := range spec.Subnets {
		want.IPAM.Config = append(want.IPAM.Config, network.IPAMConfig{Subnet: s.Subnet, IPRange: s.Range, Gateway: s.Gateway})
	}
	if want.Internal {
		want.Options = map[string]string{}
		maps.Copy(want.Options, spec.Options)
		want.Options[inhibitOption] = "true"
	}
	if err := c.engine.Post(c.ctx, c.version, "/networks/create", nil, want, &made); err != nil {
		return err
	}
	if err := verifyNetwork(c, made.ID, want); err != nil {
		removeUnwanted(c, "/networks/"+made.ID, nil)
		return err
	}
	c.known.put(made.ID, c.caller.Tenant)
	return c.answer(http.StatusCreated, made)
}

// verifyNetwork compares the created network with the request.
func verifyNetwork(c *call, id string, want network.CreateRequest) error {
	if !fullID.MatchString(id) {
		return fmt.Errorf("create network: the engine's answer has no ID")
	}
	n, _, err := ownNetworkOf(c, id)
	if err != nil {
		return err
	}
	switch {
	case n.Name != want.Name, n.Driver != want.Driver, n.Scope != "local", n.Internal != want.Internal, n.EnableIPv6 != *want.EnableIPv6, !sameSubnets(n.IPAM.Config, want.IPAM.Config), n.Ingress, n.ConfigOnly,
		n.ConfigFrom.Network != "", !maps.Equal(n.Labels, want.Labels), !sameOptions(n.Options, want.Options, *want.EnableIPv6):
		return denied("verify.create", "", "the engine made another network than it was asked for", "a local bridge network")
	}
	return nil
}

// sameSubnets reports whether a network has the requested subnets, and no further one of IPv6. An
// engine chooses a gateway and an IPv4 subnet if the request has none.
func sameSubnets(got, want []network.IPAMConfig) bool {
	for _, w := range want {
		if !slices.ContainsFunc(got, func(g network.IPAMConfig) bool {
			return g.Subnet == w.Subnet && g.IPRange == w.IPRange && (g.Gateway == w.Gateway || w.Gateway == "")
		}) {
			return false
		}
	}
	return !slices.ContainsFunc(got, func(g network.IPAMConfig) bool {
		made := strings.Contains(g.Subnet, ":") || slices.ContainsFunc(want, func(w network.IPAMConfig) bool { return !strings.Contains(w.Subnet, ":") })
		return made && !slices.ContainsFunc(want, func(w network.IPAMConfig) bool { return g.Subnet == w.Subnet })
	})
}

// sameOptions compares a network's options with the requested ones. It leaves out options that
// newer engines add.
func sameOptions(got, want map[string]string, ipv6 bool) bool {
	got = maps.Clone(got)
	for name, value := range map[string]string{"com.docker.network.enable_ipv4": "true", "com.docker.network.enable_ipv6": strconv.FormatBool(ipv6)} {
		if got[name] == value && want[name] == "" {
			delete(got, name)
		}
	}
	return maps.Equal(got, want) || len(got) == 0 && len(want) == 0
}

func removeNetwork(c *call) error {
	n, _, err := ownNetworkOf(c, c.name)
	if err != nil {
		return err
	}
	return c.forward(c.askFor(n.ID), false)
}

func pruneNetworks(c *call) error {
	return c.forward(upstream.Ask{Path: "/networks/prune", Query: url.Values{"filters": {c.onlyOwn(c.filter).String()}}}, false)
}

// connectNetwork connects a container of the caller's to a network that the policy would have
// allowed at the container's creation.
func connectNetwork(c *call, asked *network.ConnectOptions) error {
	id, own, err := joinable(c, c.name, asked.EndpointConfig)
	if err != nil {
		return err
	}
	ct, _, err := c.container(asked.Container)
	if err != nil {
		return err
	}
	if !own {
		if err := sharedName(ct.Name + ct.Config.Hostname); err != nil {
			return err
		}
	}
	settings := asked.EndpointConfig
	if settings != nil && len(settings.Links) > 0 {
		if settings.Links, err = ownLinks(c, settings.Links); err != nil {
			return err
		}
	}
	c.about(id)
	join := network.ConnectOptions{Container: ct.ID, EndpointConfig: body.EncodeEndpoint(settings, true)}
	if err := c.engine.Post(c.ctx, c.version, "/networks/"+id+"/connect", nil, join, nil); err != nil {
		return err
	}
	return c.status(http.StatusOK)
}

// joinOf describes a network to the policy, for a container that exists already.
func joinOf(c *call, ref string, info *network.Inspect) policy.ContainerNetwork {
	join := policy.ContainerNetwork{Field: "network", Asked: ref, Mode: policy.NetNamed}
	meantNetwork(c, &join, info)
	if join.Mode == policy.NetDefault { // the engine's own bridge, and not the profile's network
		join.Mode, join.Name = policy.NetNamed, info.Name
	}
	return join
}

// joinable judges a network for a container that exists already. It returns the network's ID, and
// whether the network is the caller's own. It answers "not found" for a network that is neither
// the caller's nor the policy's.
func joinable(c *call, ref string, settings *network.EndpointSettings) (id string, own bool, err error) {
	if ref, err = meantName(c, ref); err != nil {
		return "", false, err
	}
	info, err := namedNetwork(c, ref)
	if err != nil {
		return "", false, err
	}
	if info == nil || c.others(lifecycle.ObjectNetwork, info.ID, info.Labels) {
		return "", false, noNetwork(ref)
	}
	join := joinOf(c, ref, info)
	if join.Options, err = endpointOptions(settings, join); err != nil {
		return "", false, err
	}
	err = c.rules.NetworkJoin(c.caller.Profile, join)
	var denial *policy.DeniedError
	if errors.As(err, &denial) && !c.caller.Audit && !join.Own && !slices.ContainsFunc(denial.Reasons, func(r policy.Reason) bool { return r.Rule != "networks.foreign" && r.Rule != "networks.host" }) {
		return "", false, noNetwork(ref)
	}
	return info.ID, join.Own, c.judged(err)
}

func disconnectNetwork(c *call, asked *network.DisconnectOptions) error {
	ct, _, err := c.container(asked.Container)
	if err != nil {
		return err
	}
	name, err := meantName(c, c.name)
	if err != nil {
		return err
	}
	n, _, err := anyNetwork(c, name)
	if err != nil {
		return err
	}
	if !c.own(lifecycle.ObjectNetwork, n.ID, n.Labels) && !joined(ct, n) {
		return noNetwork(c.name)
	}
	c.about(n.ID)
	asked.Container = ct.ID
	if err := c.engine.Post(c.ctx, c.version, "/networks/"+n.ID+"/disconnect", nil, asked, nil); err != nil {
		return err
	}
	return c.status(http.StatusOK)
}

// joined reports whether a container is connected to a network. The container needn't run.
func joined(ct *seen, n *network.Inspect) bool {
	endpoint, ok := ct.NetworkSettings.Networks[n.Name]
	return ok && (endpoint == nil || endpoint.NetworkID == "" || endpoint.NetworkID == n.ID)
}
