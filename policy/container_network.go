package policy

import (
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

const (
	maxNetworks   = 32
	noOwnNetworks = "no networks of the caller's own"
)

// networkJudge judges the networks that a container joins, and those that callers create.
type networkJudge struct{ *containerJudge }

// networks judges all networks that a container joins.
func (j networkJudge) networks(req ContainerRequest) {
	asked := req.Networks
	if j.tooMany(ruleNetworkTooMany, "NetworkingConfig.EndpointsConfig", len(asked), maxNetworks, "there are %d networks") {
		return
	}
	if len(asked) == 0 {
		asked = []ContainerNetwork{{Field: j.name("network"), Mode: NetDefault}}
	}
	s, none := &j.spec, false
	for _, n := range asked {
		if len(n.Options) > 0 {
			const allowed = "the option left out; names, links and addresses on networks of the caller's own"
			j.refused(ruleNetworkOptions, n.Field, "network option", strings.Join(n.Options, ", "), allowed)
		}
		switch n.Mode {
		case NetDefault:
			j.defaultNetwork(n)
		case NetNone:
			none = true
		case NetHost:
			j.deny(ruleNetworkHost, n.Field, n.Asked, j.networksInWords(), "the host's network is refused; allowed is "+j.networksInWords())
		case NetContainer:
			j.containersNetwork(n, len(asked))
		case NetNamed:
			j.namedNetwork(n)
		default:
			j.foreignNetwork(n)
		}
	}
	switch {
	case none && len(s.Networks) > 0:
		j.invalid(ruleNetworkMixed, asked[0].Field, NetNone, "none, or networks", "no network and networks can't be asked for at once")
	case s.Network == "" && len(s.Networks) > 0:
		s.Network = SpecNetworkNetworks
	case s.Network == "":
		s.Network = SpecNetworkNone
	}
}

// internal reports whether the caller's own networks must have no way out. Otherwise a caller
// could get around a profile that locks its network.
func (j networkJudge) internal() bool {
	return j.api.Networks != wordOwn || j.profile.locked("network")
}

func (j networkJudge) networksInWords() string {
	names := []string{NetNone}
	for _, name := range sortedKeys(j.policy.networks) {
		names = append(names, j.policy.networks[name].EngineNetwork)
	}
	return orList(append(names, "the caller's own"))
}

// join adds a network, unless the container joins it already.
func (j networkJudge) join(n ContainerNetwork) {
	same := func(o ContainerNetwork) bool { return o.Name == n.Name && (o.ID == n.ID || o.ID == "" || n.ID == "") }
	if i := slices.IndexFunc(j.spec.Networks, same); i >= 0 {
		if j.spec.Networks[i].ID == "" {
			j.spec.Networks[i] = n
		}
		return
	}
	j.spec.Networks = append(j.spec.Networks, n)
}

// defaultNetwork joins the profile's network, unless that is off.
func (j networkJudge) defaultNetwork(n ContainerNetwork) {
	if j.profile.Network != networkOff {
		j.join(ContainerNetwork{Field: n.Field, Asked: n.Asked, Mode: NetNamed, Name: j.policy.networks[j.profile.Network].EngineNetwork})
	}
}

func (j networkJudge) containersNetwork(n ContainerNetwork, all int) {
	if !n.Own || n.ID == "" {
		j.deny(ruleNetworkForeign, n.Field, n.Asked, "the network of one of the caller's own containers", fmt.Sprintf("container %q is not one of the caller's", shorten(n.Asked)))
		return
	}
	if all > 1 {
		j.invalid(ruleNetworkMixed, n.Field, n.Asked, "another container's network by itself", "another container's network and networks can't be asked for at once")
	}
	j.spec.Network = SpecNetworkContainer
	j.spec.Networks = append(j.spec.Networks, n)
}

// namedNetwork allows the policy's networks, and the caller's own.
func (j networkJudge) namedNetwork(n ContainerNetwork) {
	if n.Own {
		j.ownNetwork(n)
		return
	}
	for name, rule := range j.policy.networks {
		if rule.EngineNetwork != n.Name || n.Name == "" {
			continue
		}
		if j.profile.locked("network") && name != j.profile.Network {
			effective := NetNone
			if j.profile.Network != networkOff {
				effective = j.policy.networks[j.profile.Network].EngineNetwork
			}
			j.override(lockedRule(j.profile.Name), n.Field, n.Asked, effective)
			j.defaultNetwork(n)
			return
		}
		j.join(n)
		return
	}
	j.foreignNetwork(n)
}

func (j networkJudge) ownNetwork(n ContainerNetwork) {
	switch {
	case j.api.Networks == wordOff:
		j.off(ruleNetworkOwn, n.Field, "network", n.Asked, "networks", noOwnNetworks)
	case n.ID == "":
		j.foreignNetwork(n)
	case j.internal() && !n.Internal:
		j.deny(ruleInternal, n.Field, n.Asked, "networks without a way out", fmt.Sprintf("network %q is refused: profile %s allows only own networks that are internal", shorten(n.Asked), j.profile.Name))
	default:
		j.join(n)
	}
}

// foreignNetwork denies a network. The answer doesn't tell whether the network is another
// caller's or doesn't exist.
func (j networkJudge) foreignNetwork(n ContainerNetwork) {
	j.deny(ruleNetworkForeign, n.Field, n.Asked, j.networksInWords(), fmt.Sprintf("network %q is not one of the caller's or of the policy's; allowed is %s", shorten(n.Asked), j.networksInWords()))
}

// networkOptions are the options that a caller's own network may have, and the patterns of
// their values.
var networkOptions = map[string]*regexp.Regexp{
	"com.docker.network.bridge.enable_icc":           regexp.MustCompile(`^(true|false)$`),
	"com.docker.network.bridge.enable_ip_masquerade": regexp.MustCompile(`^(true|false)$`),
	"com.docker.network.driver.mtu":                  regexp.MustCompile(`^[1-9][0-9]{2,4}$`),
}

const maxMTU, minMTU = 9000, 576

// NetworkCreate judges a network that a caller wants to make. The error is a
// *DeniedError.
func (p *Policy) NetworkCreate(profile string, req NetworkCreateRequest) (NetworkSpec, []Override, error) {
	container, ok := p.containerJudge(profile)
	if !ok {
		return NetworkSpec{}, nil, container.err()
	}
	j := networkJudge{container}
	if j.api.Networks == wordOff {
		j.off(ruleNetworkOwn, "Name", "network", req.Name, "networks", noOwnNetworks)
	}
	if !j.ownNetworkName(req.Name) {
		const allowed = "letters, digits, _, . and -, 128 at most, other than an ID and the names of the engine's and the policy's own networks"
		j.refused(ruleNetworkName, "Name", "network name", req.Name, allowed)
	}
	if req.Driver != "" && req.Driver != "bridge" {
		j.refused(ruleNetworkOptions, "Driver", "network driver", req.Driver, "bridge")
	}
	for _, name := range sortedKeys(req.Options) {
		j.networkOption(name, req.Options[name])
	}
	for _, o := range req.Other {
		j.otherField(o)
	}
	spec := NetworkSpec{Name: req.Name, Internal: req.Internal, IPv6: req.IPv6, Options: req.Options}
	if !spec.Internal && j.internal() {
		j.override(ruleInternal, "Internal", false, true)
		spec.Internal = true
	}
	j.subnets(req, &spec)
	return spec, j.overridden, j.err()
}

// subnets judges the subnets of a requested network: at most one of each family, in a pool of
// the profile's. IPv6 needs a subnet. It is denied on an internal network, where the host would
// have an address, as engines can't prevent that.
func (j networkJudge) subnets(req NetworkCreateRequest, spec *NetworkSpec) {
	four, six := 0, 0
	for _, s := range req.Subnets {
		judged, ipv6, ok := j.subnet(s)
		if !ok {
			continue
		}
		count := &four
		if ipv6 {
			count = &six
		}
		if *count++; *count > 1 || ipv6 && !req.IPv6 {
			j.invalid(ruleNetworkSubnet, s.Field, s.Subnet, "one subnet of each family, and one of IPv6 with EnableIPv6", fmt.Sprintf("subnet %q is refused: a network has one of each family, and one of IPv6 only with EnableIPv6", shorten(s.Subnet)))
			continue
		}
		spec.Subnets = append(spec.Subnets, judged)
	}
	switch {
	case !req.IPv6:
	case six == 0:
		j.deny(ruleNetworkSubnet, "EnableIPv6", "true", j.poolsInWords(), "IPv6 is refused without a subnet of its own; allowed is "+j.poolsInWords())
	case spec.Internal:
		j.deny(ruleNetworkSubnet, "EnableIPv6", "true", "IPv6 on networks that aren't internal", "IPv6 is refused on an internal network, as the host would be reachable at the gateway")
	}
}

func (j networkJudge) poolsInWords() string {
	return inList(j.api.Subnets, "none (engine_api.subnets)")
}

// subnet judges a subnet, the range in it for containers, and the gateway.
func (j networkJudge) subnet(s NetworkSubnet) (judged NetworkSubnet, ipv6, ok bool) {
	subnet, err := netip.ParsePrefix(s.Subnet)
	if err != nil || subnet != subnet.Masked() || subnet.Addr().Is4In6() {
		j.deny(ruleNetworkSubnet, s.Field, s.Subnet, "a subnet of "+j.poolsInWords(), fmt.Sprintf("%q is not a subnet; allowed is one of %s", shorten(s.Subnet), j.poolsInWords()))
		return s, false, false
	}
	inside := func(outer netip.Prefix, p netip.Prefix) bool {
		return outer.Bits() <= p.Bits() && outer.Contains(p.Addr())
	}
	if !slices.ContainsFunc(j.api.Subnets, func(pool string) bool {
		p, err := netip.ParsePrefix(pool)
		return err == nil && inside(p, subnet)
	}) {
		j.refused(ruleNetworkSubnet, s.Field, "subnet", s.Subnet, "a subnet of "+j.poolsInWords())
	}
	judged = NetworkSubnet{Field: s.Field, Subnet: subnet.String()}
	if s.Range != "" {
		part, err := netip.ParsePrefix(s.Range)
		if err != nil || part != part.Masked() || !inside(subnet, part) {
			part = subnet
			j.invalid(ruleNetworkSubnet, s.Field, s.Range, "a range in the subnet", fmt.Sprintf("%q is not a range in subnet %s", shorten(s.Range), subnet))
		}
		judged.Range = part.String()
	}
	if s.Gateway != "" {
		gateway, err := netip.ParseAddr(s.Gateway)
		// The gateway can't be the network's first address, nor the last, which is for broadcasts.
		if err != nil || gateway.Zone() != "" || !subnet.Contains(gateway) || gateway == subnet.Addr() || !subnet.Contains(gateway.Next()) {
			gateway = subnet.Addr().Next()
			j.invalid(ruleNetworkSubnet, s.Field, s.Gateway, "an address in the subnet, other than the first and the last", fmt.Sprintf("%q is not a gateway in subnet %s", shorten(s.Gateway), subnet))
		}
		judged.Gateway = gateway.String()
	}
	return judged, subnet.Addr().Is6(), true
}

// ownNetworkName reports whether a caller may give a network this name. Engines accept names
// and IDs alike, and may have two networks of one name. It doesn't find out whether the name
// is the start of an ID; the policy's caller must.
func (j networkJudge) ownNetworkName(name string) bool {
	if !engineNetworkName.MatchString(name) || slices.Contains(reservedNetworks, name) || networkID.MatchString(name) {
		return false
	}
	for _, rule := range j.policy.networks {
		if rule.EngineNetwork == name {
			return false
		}
	}
	return true
}

func (j networkJudge) networkOption(name, value string) {
	field, form := "Options."+shorten(name), networkOptions[name]
	if form == nil {
		j.refused(ruleNetworkOptions, field, "network option", name, orList(sortedKeys(networkOptions)))
		return
	}
	mtu, err := strconv.Atoi(value)
	if !form.MatchString(value) || err == nil && (mtu < minMTU || mtu > maxMTU) {
		allowed := fmt.Sprintf("true and false, or of the mtu %d to %d", minMTU, maxMTU)
		j.invalid(ruleNetworkOptions, field, value, allowed, fmt.Sprintf("network option %s is %q; allowed is %s", name, shorten(value), allowed))
	}
}

// NetworkJoin judges connecting an existing container of the caller to a network. The rules are
// those of a container's creation. The error is a *DeniedError.
func (p *Policy) NetworkJoin(profile string, n ContainerNetwork) error {
	container, ok := p.containerJudge(profile)
	j := networkJudge{container}
	if ok {
		j.networks(ContainerRequest{Networks: []ContainerNetwork{n}})
		for _, o := range j.overridden {
			j.deny(o.Rule, n.Field, n.Asked, j.networksInWords(), fmt.Sprintf("network %q is refused: the profile locks its network", shorten(n.Asked)))
		}
	}
	return j.err()
}
