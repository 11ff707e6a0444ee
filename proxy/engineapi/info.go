package engineapi

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"net"
	"net/http"
	"path"
	"slices"
	"strings"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/network"
	"github.com/docker/docker/api/types/registry"
	"github.com/docker/docker/api/types/swarm"
	"github.com/docker/docker/api/types/system"
	"github.com/google/uuid"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/proxy"
)

// info is the engine's answer about itself, with fields that newer versions of the API lack.
type info struct {
	system.Info
	BridgeNfIptables  *bool `json:",omitempty"`
	BridgeNfIP6tables *bool `json:"BridgeNfIp6tables,omitempty"`
}

// engineInfo answers what clients need of the engine's information. It leaves out paths, addresses,
// names, labels and devices of the host, and counts only the caller's own objects.
func engineInfo(c *call) error {
	p, err := c.profile()
	if err != nil {
		return err
	}
	var of info
	if err := c.engine.Get(c.ctx, c.version, "/info", nil, &of); err != nil {
		return err
	}
	told := info{BridgeNfIptables: of.BridgeNfIptables, BridgeNfIP6tables: of.BridgeNfIP6tables, Info: system.Info{
		ID:   uuid.NewSHA1(uuid.NameSpaceOID, []byte("berm "+c.opts.Owner+" "+c.caller.Tenant)).String(),
		Name: "berm", Labels: []string{}, CDISpecDirs: []string{},
		Driver: of.Driver, DriverStatus: of.DriverStatus, LoggingDriver: p.EngineAPI.LogDrivers[0], CgroupDriver: of.CgroupDriver, CgroupVersion: of.CgroupVersion,
		MemoryLimit: of.MemoryLimit, SwapLimit: of.SwapLimit, KernelMemory: of.KernelMemory,
		CPUCfsPeriod: of.CPUCfsPeriod, CPUCfsQuota: of.CPUCfsQuota,
		CPUShares: of.CPUShares, CPUSet: of.CPUSet, PidsLimit: of.PidsLimit, OomKillDisable: of.OomKillDisable,
		IPv4Forwarding: of.IPv4Forwarding, KernelVersion: of.KernelVersion, OperatingSystem: of.OperatingSystem,
		OSVersion: of.OSVersion, OSType: of.OSType, Architecture: of.Architecture, NCPU: of.NCPU, MemTotal: of.MemTotal,
		SystemTime: of.SystemTime, ServerVersion: of.ServerVersion, ExperimentalBuild: of.ExperimentalBuild,
		DefaultRuntime: of.DefaultRuntime, Runtimes: map[string]system.RuntimeWithStatus{},
		Plugins:            system.PluginsInfo{Volume: []string{"local"}, Network: []string{"bridge"}, Log: p.EngineAPI.LogDrivers},
		Swarm:              swarm.Info{LocalNodeState: swarm.LocalNodeStateInactive},
		IndexServerAddress: of.IndexServerAddress, RegistryConfig: shownRegistries(of.RegistryConfig),
		LiveRestoreEnabled: of.LiveRestoreEnabled, Isolation: of.Isolation,
		ContainerdCommit: of.ContainerdCommit, RuncCommit: of.RuncCommit, InitCommit: of.InitCommit, // versions, which /version has as well
	}}
	if of.InitBinary != "" {
		told.InitBinary = path.Base(of.InitBinary)
	}
	told.DriverStatus = slices.DeleteFunc(told.DriverStatus, func(pair [2]string) bool { return !slices.Contains(shownDriverStatus, pair[0]) })
	for _, option := range of.SecurityOptions {
		if name, file, ok := strings.Cut(option, "profile=/"); ok && file != "" {
			option = name + "profile=custom"
		}
		told.SecurityOptions = append(told.SecurityOptions, option)
	}
	for _, w := range of.Warnings { // others are for the operator, and may have addresses
		if strings.HasPrefix(w, "WARNING: No ") || strings.HasPrefix(w, "WARNING: Support for ") || strings.HasSuffix(w, " is disabled") {
			told.Warnings = append(told.Warnings, w)
		}
	}
	for name := range of.Runtimes {
		if name == of.DefaultRuntime || name == p.RuntimeClass || slices.Contains(p.EngineAPI.Runtimes, name) {
			told.Runtimes[name] = system.RuntimeWithStatus{}
		}
	}
	if err := countOwn(c, &told.Info); err != nil {
		return err
	}
	return c.answer(http.StatusOK, told)
}

// shownDriverStatus are the facts of a storage driver that reveal nothing of the host's disks.
var shownDriverStatus = []string{"Backing Filesystem", "Supports d_type", "Using metacopy", "Native Overlay Diff", "userxattr", "driver-type"}

// shownRegistries keeps the insecure registries on loopback addresses. Others, and mirrors, are the
// operator's.
func shownRegistries(of *registry.ServiceConfig) *registry.ServiceConfig {
	told := &registry.ServiceConfig{
		InsecureRegistryCIDRs: []*registry.NetIPNet{}, Mirrors: []string{},
		IndexConfigs: map[string]*registry.IndexInfo{"docker.io": {Name: "docker.io", Mirrors: []string{}, Secure: true, Official: true}},
	}
	if of == nil {
		return told
	}
	for _, n := range of.InsecureRegistryCIDRs {
		if n != nil && (*net.IPNet)(n).IP.IsLoopback() {
			told.InsecureRegistryCIDRs = append(told.InsecureRegistryCIDRs, n)
		}
	}
	return told
}

// countOwn counts the caller's containers, and the images that it may see.
func countOwn(c *call, told *system.Info) error {
	err := each(c.ctx, c.Proxy, c.version, lifecycle.ObjectImage, nil, func(o *listed) {
		if _, _, ok := listedImage(c, o.RepoTags, o.RepoDigests, o.Labels); ok {
			told.Images++
		}
	})
	if err != nil {
		return err
	}
	return c.eachContainer(c.ctx, c.version, func(ct *listed) {
		if !c.own(lifecycle.ObjectContainer, ct.ID, ct.Labels) {
			return
		}
		told.Containers++
		switch ct.State {
		case container.StateRunning:
			told.ContainersRunning++
		case container.StatePaused:
			told.ContainersPaused++
		default:
			told.ContainersStopped++
		}
	}, c.ownLabels()...)
}

// ownContainers returns the images of the caller's containers, by the containers' IDs.
func ownContainers(c *call) (map[string]string, error) {
	if c.mine != nil {
		return c.mine, nil
	}
	mine := map[string]string{}
	err := eachOwn(c, lifecycle.ObjectContainer, filters{}, func(o *labelled) { mine[o.ID] = o.ImageID })
	if err == nil {
		c.mine = mine
	}
	return mine, err
}

// trimContainers removes other callers' containers from an image's description: from their number, if the
// engine counted them, and from the manifests.
func trimContainers(c *call, entry json.RawMessage, image string) (json.RawMessage, error) {
	_, number, _ := proxy.CutField(entry, "Containers")
	_, manifests, _ := proxy.CutField(entry, "Manifests")
	if counted := number != nil && string(number) != "-1"; !counted && manifests == nil {
		return entry, nil
	}
	mine, err := ownContainers(c)
	if err != nil {
		return nil, err
	}
	entry, err = edit(entry, func(n *int) {
		if *n < 0 {
			return
		}
		*n = 0
		for _, of := range mine {
			if of == image {
				*n++
			}
		}
	}, "Containers")
	if err != nil {
		return nil, err
	}
	var errs []error
	entry, err = edit(entry, func(manifests *[]json.RawMessage) {
		for i := range *manifests {
			(*manifests)[i], err = edit((*manifests)[i], func(ids *[]string) {
				*ids = slices.DeleteFunc(*ids, func(id string) bool { _, own := mine[id]; return !own })
			}, "ImageData", "Containers")
			errs = append(errs, err)
		}
	}, "Manifests")
	return entry, errors.Join(append(errs, err)...)
}

// imageUsage adds up the disk usage of the images that a caller may see.
type imageUsage struct {
	list                  []json.RawMessage
	alone, shared, shares int64 // bytes of layers of one image; most bytes of others in an image; images with others
}

// add adds an image of the engine's answer, unless the caller may not see it.
func (u *imageUsage) add(c *call, entry json.RawMessage) error {
	var of listed
	if err := json.Unmarshal(entry, &of); err != nil {
		return err
	}
	entry, err := trimImage(c, entry, nil)
	if err != nil || entry == nil {
		return err
	}
	shared := max(of.SharedSize, 0)
	u.alone += of.Size - shared
	if shared > 0 {
		u.shares++
		u.shared = max(u.shared, shared)
	}
	u.list = append(u.list, entry)
	return nil
}

// size returns a lower bound of the bytes of all layers: of the shared ones, it counts only the largest
// part. An image that alone has shared layers shares them with images that the caller may not see, so
// size clears its SharedSize.
func (u *imageUsage) size() (size int64, err error) {
	for i := 0; i < len(u.list) && u.shares == 1 && err == nil; i++ {
		u.list[i], err = edit(u.list[i], func(n *int64) { *n = 0 }, "SharedSize")
	}
	return u.alone + u.shared, err
}

// builtinNetworks stand for the networks that every engine has, since clients look for them. They reveal
// nothing of the engine's networks.
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

// builtinNetwork returns a built-in network by its name, its ID or a short ID, or nil. Containers on
// bridge get the profile's network, so bridge shows the addresses of that.
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

// defaultNetwork returns the engine's name of the profile's network, which callers know as bridge. It
// returns "" if the profile has none.
func defaultNetwork(c *call) (string, error) {
	p, err := c.profile()
	rules := c.rules.Networks()
	i := slices.IndexFunc(rules, func(r policy.NetworkRule) bool { return r.Name == p.Network })
	if err != nil || i < 0 {
		return "", err
	}
	return rules[i].EngineNetwork, nil
}

// meantName returns the engine's name for a network that a caller names; bridge is the profile's network.
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

// listedBuiltins returns the built-in networks that match the filters of a list.
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

// absentSwarm returns the error of an engine outside of a swarm, for reads of Swarm's objects and for a
// leave. It returns nil for other requests.
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

// noPlugins answers the list of an engine without plugins.
func noPlugins(c *call) error { return c.answer(http.StatusOK, []string{}) }

func noPlugin(c *call) error { return notFound("plugin \"" + c.name + "\" not found") }

// noBuildKit returns the denial for uses of BuildKit.
func noBuildKit(field string) error {
	return denied("build.builder", field, "BuildKit isn't offered here; set DOCKER_BUILDKIT=0", "the classic builder: DOCKER_BUILDKIT=0 docker build; where the policy enables BuildKit, buildx")
}
