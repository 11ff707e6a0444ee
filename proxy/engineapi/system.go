package engineapi

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"time"

	"github.com/bermhq/berm/proxy/engineapi/body"

	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/proxy/engineapi/upstream"

	"github.com/docker/docker/api/types"
	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/swarm"
	"github.com/docker/docker/api/types/system"
	"golang.org/x/sync/singleflight"

	"github.com/bermhq/berm/lifecycle"
)

func systemRoutes() []route {
	return []route{
		{method: http.MethodGet, template: "/_ping", serve: pingEngine},
		{method: http.MethodHead, template: "/_ping", serve: pingEngine},
		{method: http.MethodGet, template: "/version", serve: engineVersions},
		{method: http.MethodGet, template: "/info", serve: engineInfo},
		{method: http.MethodGet, template: "/system/df", query: params{"type*": nil, "verbose": nil}, since: 25, serve: diskUsage},
	}
}

// pingEngine tells that the engine answers, and in which version it is to be spoken to.
func pingEngine(c *call) error {
	resp, err := c.open(upstream.Ask{Path: "/_ping"})
	if err != nil {
		return err
	}
	_, _ = io.Copy(io.Discard, io.LimitReader(resp.Body, upstream.BufferSize))
	_ = resp.Body.Close()
	most, err := c.engine.Max(c.ctx)
	if err != nil {
		return err
	}
	h := c.w.Header()
	for _, name := range []string{"Docker-Experimental", "Ostype", "Server"} {
		if values := resp.Header[name]; len(values) > 0 {
			h[name] = values
		}
	}
	h.Set("Builder-Version", "1") // the classic builder is the only one behind this proxy
	h.Set("Api-Version", most.String())
	h.Set("Content-Type", "text/plain; charset=utf-8")
	if c.r.Method == http.MethodGet {
		_, _ = io.WriteString(c.w, "OK")
	}
	return nil
}

// engineVersions are the engine's, with the API's as the proxy has it.
func engineVersions(c *call) error {
	var told types.Version
	if err := c.engine.Get(c.ctx, c.version, "/version", nil, &told); err != nil {
		return err
	}
	most, err := c.engine.Max(c.ctx)
	if err != nil {
		return err
	}
	told.APIVersion, told.MinAPIVersion = most.String(), upstream.Oldest.String()
	for _, part := range told.Components {
		if part.Details["ApiVersion"] != "" {
			part.Details["ApiVersion"], part.Details["MinAPIVersion"] = told.APIVersion, told.MinAPIVersion
		}
	}
	return c.answer(http.StatusOK, told)
}

// engineInfo tells what clients go by, and nothing of the host's or others' affairs.
func engineInfo(c *call) error {
	p, err := c.profile()
	if err != nil {
		return err
	}
	var of system.Info
	if err := c.engine.Get(c.ctx, c.version, "/info", nil, &of); err != nil {
		return err
	}
	told := system.Info{
		Name:   "berm",
		Driver: of.Driver, LoggingDriver: p.EngineAPI.LogDrivers[0], CgroupDriver: of.CgroupDriver, CgroupVersion: of.CgroupVersion,
		MemoryLimit: of.MemoryLimit, SwapLimit: of.SwapLimit, CPUCfsPeriod: of.CPUCfsPeriod, CPUCfsQuota: of.CPUCfsQuota,
		CPUShares: of.CPUShares, CPUSet: of.CPUSet, PidsLimit: of.PidsLimit, OomKillDisable: of.OomKillDisable,
		IPv4Forwarding: of.IPv4Forwarding, KernelVersion: of.KernelVersion, OperatingSystem: of.OperatingSystem,
		OSVersion: of.OSVersion, OSType: of.OSType, Architecture: of.Architecture, NCPU: of.NCPU, MemTotal: of.MemTotal,
		SystemTime: of.SystemTime, ServerVersion: of.ServerVersion, ExperimentalBuild: of.ExperimentalBuild,
		SecurityOptions: of.SecurityOptions, DefaultRuntime: of.DefaultRuntime, Runtimes: map[string]system.RuntimeWithStatus{},
		Plugins:            system.PluginsInfo{Volume: []string{"local"}, Network: []string{"bridge"}, Log: p.EngineAPI.LogDrivers},
		Swarm:              swarm.Info{LocalNodeState: swarm.LocalNodeStateInactive},
		IndexServerAddress: of.IndexServerAddress,
	}
	for name := range of.Runtimes {
		if name == of.DefaultRuntime || name == p.RuntimeClass || slices.Contains(p.EngineAPI.Runtimes, name) {
			told.Runtimes[name] = system.RuntimeWithStatus{}
		}
	}
	err = c.eachContainer(c.ctx, c.version, func(ct *listed) {
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
	if err != nil {
		return err
	}
	return c.answer(http.StatusOK, told)
}

// diskUsage is of the caller's own containers, volumes and images.
func diskUsage(c *call) error {
	types := map[string]string{"Images": "image", "Containers": "container", "Volumes": "volume"}
	for _, kind := range c.query["type"] {
		if !slices.Contains([]string{"container", "image", "volume", "build-cache"}, kind) {
			return proxy.Malformed("unknown object type: " + body.Shorten(kind))
		}
	}
	all := c.version < 42 || len(c.query["type"]) == 0
	var of struct {
		LayersSize                              int64 // what all layers take together is nobody's business
		Images, Containers, Volumes, BuildCache []json.RawMessage
		BuilderSize                             int64
	}
	of.BuildCache = []json.RawMessage{}
	lists := map[string]*[]json.RawMessage{"Images": &of.Images, "Containers": &of.Containers, "Volumes": &of.Volumes}
	kinds := map[string]lifecycle.ObjectKind{"Images": lifecycle.ObjectImage, "Containers": lifecycle.ObjectContainer, "Volumes": lifecycle.ObjectVolume}
	for _, list := range lists {
		*list = []json.RawMessage{}
	}
	entries, err := c.usage.of(c)
	for _, e := range entries {
		if lists[e.list] == nil || !all && !slices.Contains(c.query["type"], types[e.list]) {
			continue
		}
		own, err := ownEntry(c, kinds[e.list], e.list, e.raw)
		if err != nil {
			return err
		}
		if own {
			*lists[e.list] = append(*lists[e.list], shown(e.raw))
		}
	}
	if err != nil {
		return err
	}
	return c.answer(http.StatusOK, of)
}

// usageTime bounds a walk of the engine through all volumes and layers.
const usageTime = 10 * time.Minute

// usage asks the engine for its disk usage, once for all callers that ask meanwhile. It
// leaves the engine as much time after each walk as the walk took.
type usage struct {
	group   singleflight.Group
	walking chan struct{} // of one place, taken during a walk: engines refuse a second one
	after   time.Time     // no walk begins before; belongs to whoever walks
}

// usageEntry is an entry of one of the answer's lists.
type usageEntry struct {
	list string
	raw  json.RawMessage
}

// of returns the entries of all callers. It waits until the call's end. There is one walk for
// each API version, of all types, so that no caller can have many queue.
func (u *usage) of(c *call) ([]usageEntry, error) {
	walk := u.group.DoChan(c.version.String(), func() (any, error) {
		u.walking <- struct{}{}
		defer func() { <-u.walking }()
		time.Sleep(time.Until(u.after))
		begun := time.Now()
		defer func() { u.after = time.Now().Add(min(time.Since(begun), time.Minute)) }()
		ctx, cancel := context.WithTimeout(context.WithoutCancel(c.ctx), usageTime)
		defer cancel()
		var all []usageEntry
		size := 0
		err := c.engine.EachLong(ctx, c.version, "/system/df", nil, func(list string, entry json.RawMessage) error {
			if list == "" || list == "BuildCache" {
				return nil
			}
			if size += len(entry); size > upstream.MaxAnswer {
				return fmt.Errorf("the engine's answer is over %d bytes", upstream.MaxAnswer)
			}
			all = append(all, usageEntry{list, entry})
			return nil
		})
		return all, err
	})
	select {
	case r := <-walk:
		all, _ := r.Val.([]usageEntry)
		return all, r.Err
	case <-c.ctx.Done():
		return nil, context.Cause(c.ctx)
	}
}
