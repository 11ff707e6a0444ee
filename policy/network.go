package policy

import (
	"cmp"
	"fmt"
	"maps"
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
	Name          string `yaml:"-"`              // the policy's: "on", "team"
	EngineNetwork string `yaml:"engine_network"` // the engine's
	Internal      bool   `yaml:"internal"`       // no way out of the host
	Isolated      bool   `yaml:"isolated"`       // its containers don't reach each other
	External      bool   `yaml:"external"`       // an operator makes it, and not Berm
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
	networkID         = regexp.MustCompile(`^[0-9a-f]{64}$`)
	engineNetworkName = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}$`)
	// reservedNetworks are names of the engine's own networks. host, bridge and default aren't
	// isolated, none is no network, and a swarm makes ingress and docker_gwbridge.
	reservedNetworks = []string{"host", "none", "bridge", "default", "ingress", "docker_gwbridge"}
)

func (l *loader) loadNetworks() {
	rules, engines := map[string]NetworkRule{networkOn: {}}, map[string]string{}
	maps.Copy(rules, l.file.Networks)
	for _, name := range sortedKeys(rules) {
		n, path := NetworkRule{Name: name, Isolated: true}, join("networks", name)
		l.decodeOver(path, &n)
		if name == networkOn && n.EngineNetwork == "" {
			n.EngineNetwork = cmp.Or(l.opts.EngineNetwork, engineNetwork)
			n.External = n.External || l.opts.ExternalNetwork
		}
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
		rules[name] = n
	}
	l.file.Networks, l.policy.networks = rules, rules
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
