package policy

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
)

const (
	networkOff    = "off"
	networkOn     = "on"
	engineNetwork = "berm-sandbox"
)

// NetworkRule is a network that requests may name.
type NetworkRule struct {
	Name          string // the policy's: "on", "team"
	EngineNetwork string // the engine's
	Internal      bool   // no way out of the host
	Isolated      bool   // its containers don't reach each other
	External      bool   // an operator makes it, and not Berm
}

// Networks gives every network of the policy, sorted by name. "off" is none.
func (p *Policy) Networks() []NetworkRule {
	rules := make([]NetworkRule, 0, len(p.networks))
	for _, name := range sortedKeys(p.networks) {
		rules = append(rules, p.networks[name])
	}
	return rules
}

var (
	networkName       = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$`)
	engineNetworkName = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}$`)
	// reservedNetworks are the engine's own: without isolation, or no networks, or those of
	// a swarm, of which ones that were there before would keep it.
	reservedNetworks = []string{"host", "none", "bridge", "default", "ingress", "docker_gwbridge"}
)

func (l *loader) loadNetworks() {
	if l.file.Networks == nil {
		l.file.Networks = map[string]networkFile{}
	}
	on := l.file.Networks[networkOn]
	if on.EngineNetwork == "" {
		on.EngineNetwork = l.opts.EngineNetwork
		on.External = on.External || l.opts.ExternalNetwork
	}
	if on.EngineNetwork == "" {
		on.EngineNetwork = engineNetwork
	}
	l.file.Networks[networkOn] = on
	l.policy.networks = map[string]NetworkRule{}
	engines := map[string]string{}
	for _, name := range sortedKeys(l.file.Networks) {
		n, path := l.file.Networks[name], join("networks", name)
		if !networkName.MatchString(name) || name == networkOff || slices.Contains(reservedNetworks, name) {
			l.problem(path, "a network's name is letters, digits, _, . and -, 64 at most, and none of off, %s", strings.Join(reservedNetworks, ", "))
		}
		if !engineNetworkName.MatchString(n.EngineNetwork) || slices.Contains(reservedNetworks, n.EngineNetwork) {
			l.problem(path+".engine_network", "%q can't be used: name a network of its own, none of %s", n.EngineNetwork, strings.Join(reservedNetworks, ", "))
		}
		if other, ok := engines[n.EngineNetwork]; ok {
			l.problem(path+".engine_network", "%q is that of network %s already", n.EngineNetwork, other)
		}
		engines[n.EngineNetwork] = name
		if n.Isolated == nil {
			isolated := true
			n.Isolated = &isolated
			l.file.Networks[name] = n
		}
		l.policy.networks[name] = NetworkRule{Name: name, EngineNetwork: n.EngineNetwork, Internal: n.Internal, Isolated: *n.Isolated, External: n.External}
	}
}

func (j *sandboxJudge) network(req Request) {
	name := pick(&j.judge, "network", given(req.Network), j.profile.Network)
	j.spec.Network = name
	if name == networkOff {
		return
	}
	n, ok := j.policy.networks[name]
	if !ok {
		allowed := orList(append([]string{networkOff}, sortedKeys(j.policy.networks)...))
		j.deny(ruleNetworkUnknown, "network", name, allowed, fmt.Sprintf("network %q is not one of the policy's; allowed is %s", shorten(name), allowed))
	}
	j.spec.EngineNetwork = n.EngineNetwork
}
