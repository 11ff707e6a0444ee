package engineapi

import (
	"encoding/json"
	"io"
	"net/http"
	"net/url"
	"slices"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/swarm"
	"github.com/docker/docker/api/types/system"

	"github.com/bermhq/berm/lifecycle"
)

func systemRoutes() []route {
	return []route{
		{method: http.MethodGet, template: "/_ping", serve: (*call).ping},
		{method: http.MethodHead, template: "/_ping", serve: (*call).ping},
		{method: http.MethodGet, template: "/version", serve: (*call).versions},
		{method: http.MethodGet, template: "/info", serve: (*call).info},
		{method: http.MethodGet, template: "/system/df", query: []string{"type*", "verbose"}, since: 25, serve: (*call).diskUsage},
	}
}

// ping tells that the engine answers, and in which version it is to be spoken to.
func (c *call) ping() error {
	resp, err := c.ask(ask{path: "/_ping"})
	if err != nil {
		return err
	}
	if resp.StatusCode >= 300 {
		return failure(resp)
	}
	_, _ = io.Copy(io.Discard, io.LimitReader(resp.Body, bufferSize))
	_ = resp.Body.Close()
	most, err := c.engine.max(c.ctx)
	if err != nil {
		return err
	}
	h := c.w.Header()
	for _, name := range []string{"Docker-Experimental", "Ostype", "Server"} {
		if values := resp.Header[name]; len(values) > 0 {
			h[name] = values
		}
	}
	h.Set("Builder-Version", "1") // the classic builder is the only one behind this door
	h.Set("Api-Version", most.String())
	h.Set("Content-Type", "text/plain; charset=utf-8")
	if c.r.Method == http.MethodGet {
		_, _ = io.WriteString(c.w, "OK")
	}
	return nil
}

// versions are the engine's, with the API's as the door has it.
func (c *call) versions() error {
	var told struct {
		Platform      map[string]string `json:",omitempty"`
		Components    []component       `json:",omitempty"`
		Version       string
		APIVersion    string `json:"ApiVersion"`
		MinAPIVersion string `json:",omitempty"`
		GitCommit     string
		GoVersion     string
		Os            string
		Arch          string
		KernelVersion string `json:",omitempty"`
		Experimental  bool   `json:",omitempty"`
		BuildTime     string `json:",omitempty"`
	}
	if err := c.engine.get(c.ctx, c.version, "/version", nil, &told); err != nil {
		return err
	}
	most, err := c.engine.max(c.ctx)
	if err != nil {
		return err
	}
	told.APIVersion, told.MinAPIVersion = most.String(), oldest.String()
	for _, part := range told.Components {
		if part.Details["ApiVersion"] != "" {
			part.Details["ApiVersion"], part.Details["MinAPIVersion"] = told.APIVersion, told.MinAPIVersion
		}
	}
	return c.answer(http.StatusOK, told)
}

// component is a part of the engine.
type component struct {
	Name    string
	Version string
	Details map[string]string `json:",omitempty"`
}

// info tells what clients go by, and nothing of the host's or others' affairs.
func (c *call) info() error {
	p, err := c.profile()
	if err != nil {
		return err
	}
	var of system.Info
	if err := c.engine.get(c.ctx, c.version, "/info", nil, &of); err != nil {
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
func (c *call) diskUsage() error {
	query := url.Values{}
	for _, kind := range c.query["type"] {
		if !slices.Contains([]string{"container", "image", "volume", "build-cache"}, kind) {
			return malformed("unknown object type: " + shorten(kind))
		}
		if c.version >= 42 {
			query.Add("type", kind)
		}
	}
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
	// It may have to walk through all volumes, for as long as the caller waits.
	err := c.engine.eachSlow(c.ctx, c.version, "/system/df", query, func(name string, entry json.RawMessage) error {
		if lists[name] == nil {
			return nil
		}
		own, err := c.ownEntry(kinds[name], name, entry)
		if own {
			*lists[name] = append(*lists[name], shown(entry))
		}
		return err
	})
	if err != nil {
		return err
	}
	return c.answer(http.StatusOK, of)
}
