package engineapi

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"net/http"
	"slices"
	"strings"

	"github.com/docker/docker/api/types/network"

	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/proxy"
)

// builtinNetworks stand for the networks that every engine has, for clients that look for
// them. They tell nothing of the engine's.
var builtinNetworks = func() (list []network.Inspect) {
	for name, driver := range map[string]string{"bridge": "bridge", policy.NetHost: "host", policy.NetNone: "null"} {
		id := sha256.Sum256([]byte("berm network " + name))
		list = append(list, network.Inspect{
			Name: name, ID: hex.EncodeToString(id[:]), Scope: "local", Driver: driver, EnableIPv4: true,
			IPAM:       network.IPAM{Driver: "default", Config: []network.IPAMConfig{}},
			Containers: map[string]network.EndpointResource{}, Options: map[string]string{}, Labels: map[string]string{},
		})
	}
	slices.SortFunc(list, func(a, b network.Inspect) int { return strings.Compare(a.Name, b.Name) })
	return list
}()

// builtinNetwork returns one by its name, its ID or a short ID; nil for any other. By the name
// bridge, containers get the profile's network: its addresses are shown.
func builtinNetwork(c *call, ref string) (*network.Inspect, error) {
	i := slices.IndexFunc(builtinNetworks, func(n network.Inspect) bool {
		return n.Name == ref || len(ref) >= 12 && strings.HasPrefix(n.ID, ref)
	})
	if i < 0 {
		return nil, nil
	}
	n := builtinNetworks[i]
	name, err := defaultNetwork(c)
	if err != nil || n.Driver != "bridge" || name == "" {
		return &n, err
	}
	meant, err := lookUpNetwork(c, name)
	if err == nil && meant != nil && policyOwn(c, meant) {
		n.Internal, n.IPAM.Config = meant.Internal, nil
		for _, config := range meant.IPAM.Config {
			n.IPAM.Config = append(n.IPAM.Config, network.IPAMConfig{Subnet: config.Subnet, Gateway: config.Gateway})
		}
	}
	return &n, err
}

// defaultNetwork is the engine's name of the profile's network, which callers know as bridge;
// empty if the profile has none.
func defaultNetwork(c *call) (string, error) {
	p, err := c.profile()
	rules := c.rules.Networks()
	i := slices.IndexFunc(rules, func(r policy.NetworkRule) bool { return r.Name == p.Network })
	if err != nil || i < 0 {
		return "", err
	}
	return rules[i].EngineNetwork, nil
}

// meantName is the engine's name of a network that a caller means.
func meantName(c *call, ref string) (string, error) {
	if ref != "bridge" {
		return ref, nil
	}
	name, err := defaultNetwork(c)
	if err == nil && name == "" {
		err = noNetwork(ref)
	}
	return name, err
}

// listedBuiltins are those that the filters of a list leave.
func listedBuiltins(c *call) (entries []json.RawMessage, err error) {
	for _, n := range builtinNetworks {
		if !c.filter.keepBuiltin(&n) {
			continue
		}
		shown, err := builtinNetwork(c, n.Name)
		if err != nil {
			return nil, err
		}
		entry, err := json.Marshal(shown)
		if err != nil {
			return nil, err
		}
		entries = append(entries, entry)
	}
	return entries, nil
}

func (f filters) keepBuiltin(n *network.Inspect) bool {
	for name, values := range f {
		fits := map[string]func(string) bool{
			"name":     func(s string) bool { return strings.Contains(n.Name, s) },
			"id":       func(s string) bool { return strings.HasPrefix(n.ID, s) },
			"driver":   func(s string) bool { return s == n.Driver },
			"scope":    func(s string) bool { return s == n.Scope },
			"type":     func(s string) bool { return s == "builtin" },
			"dangling": func(s string) bool { return !isTrue(s) },
		}[name]
		if fits == nil || !slices.ContainsFunc(values, fits) {
			return false
		}
	}
	return true
}

// absentSwarm answers reads of Swarm's objects, and a leave, as an engine outside of a swarm;
// nil for other requests.
func absentSwarm(method string, segments []segment) error {
	if method == http.MethodPost && literally([]string{"swarm", "leave"}, segments) {
		return &proxy.Fault{Status: http.StatusServiceUnavailable, Code: "no_swarm", Title: "No swarm", Detail: "This node is not part of a swarm"}
	}
	if method != http.MethodGet || !slices.Contains([]string{"swarm", "nodes", "services", "tasks", "secrets", "configs"}, segments[0].raw) {
		return nil
	}
	return &proxy.Fault{Status: http.StatusServiceUnavailable, Code: "no_swarm", Title: "No swarm",
		Detail: `This node is not a swarm manager. Use "docker swarm init" or "docker swarm join" to connect this node to swarm and try again.`}
}

// noPlugins is the list of an engine without plugins.
func noPlugins(c *call) error { return c.answer(http.StatusOK, []string{}) }

func noPlugin(c *call) error { return notFound("plugin \"" + c.name + "\" not found") }

// noBuildKit is why BuildKit's endpoints are refused.
func noBuildKit(field string) error {
	return denied("build.builder", field, "BuildKit isn't offered here; set DOCKER_BUILDKIT=0", "the classic builder: DOCKER_BUILDKIT=0 docker build")
}
