package engineapi

import (
	"encoding/json"
	"errors"
	"net"
	"net/http"
	"path"
	"slices"
	"strings"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/registry"
	"github.com/docker/docker/api/types/swarm"
	"github.com/docker/docker/api/types/system"
	"github.com/google/uuid"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/proxy"
)

// info is what an engine says of itself, with what newer versions of the API lack.
type info struct {
	system.Info
	BridgeNfIptables  *bool `json:",omitempty"`
	BridgeNfIP6tables *bool `json:"BridgeNfIp6tables,omitempty"`
}

// engineInfo tells what clients go by, and nothing of the host's or others' affairs: no paths,
// addresses, names, labels or devices of the host, and counts of the caller's own.
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

// shownDriverStatus are the facts of a storage driver that tell nothing of the host's disks.
var shownDriverStatus = []string{"Backing Filesystem", "Supports d_type", "Using metacopy", "Native Overlay Diff", "userxattr", "driver-type"}

// shownRegistries keeps that the engine's host is an insecure registry. Others, and mirrors,
// are the operator's.
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

// trimContainers leaves the caller's own containers of those that an image is said to have: in
// their number, where the engine counted them, and in its manifests.
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

// imageUsage is what the images take that a caller may see.
type imageUsage struct {
	list                  []json.RawMessage
	alone, shared, shares int64 // bytes of layers of one image, the most of others, and of how many images these are
}

// add takes an entry of the engine's, unless the caller may not see it.
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

// size is at least what the images' layers take together: it counts the largest of what they
// share once. What only images share with it that the caller may not see counts as its own.
func (u *imageUsage) size() (size int64, err error) {
	for i := 0; i < len(u.list) && u.shares == 1 && err == nil; i++ {
		u.list[i], err = edit(u.list[i], func(n *int64) { *n = 0 }, "SharedSize")
	}
	return u.alone + u.shared, err
}
