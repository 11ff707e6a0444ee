package engineapi

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/mount"
	"github.com/opencontainers/go-digest"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/policy"
)

// differences collects what of a container isn't as it was judged.
type differences []string

func (d *differences) add(same bool, what string) {
	if !same {
		*d = append(*d, what)
	}
}

// err says what differs, as a denial.
func (d differences) err(rule string) error {
	if len(d) == 0 {
		return nil
	}
	return denied(rule, d[0], "the container is not as it was allowed: it differs in "+strings.Join(d, ", "), "the container as it was allowed")
}

// verifyMade looks at the container that came to be. In mode audit it needn't be within
// the policy, but it must be labelled.
func (c *call) verifyMade(p *plan, id string, v version) error {
	ct, err := c.inspect(id, v)
	if err != nil {
		return err
	}
	var d differences
	d.add(ct.ID == id, "Id")
	want := maps.Clone(p.labels)
	for name := range ct.Config.Labels {
		if _, asked := want[name]; !asked {
			d.add(!lifecycle.IsOwnLabel(name), "Config.Labels") // an image's
		}
	}
	for name, value := range want {
		got, ok := ct.Config.Labels[name]
		d.add(ok && got == value, "Config.Labels")
	}
	if !p.audited {
		d.add(sameEnv(ct.Config.Env, p.env(c.rules.InjectedEnv())), "Config.Env")
		more, err := c.differences(p.effective(), ct, v)
		if err != nil {
			return err
		}
		d = append(d, more...)
		d.add(sameResources(p.spec, ct.HostConfig), "HostConfig.Resources")
		d.add(restartIs(ct.HostConfig, p.spec), "HostConfig.RestartPolicy")
	}
	if err := c.verifyVolumes(&d, p.audited, ct); err != nil {
		return err
	}
	slices.Sort(d)
	d = slices.Compact(d)
	if err := d.err("verify.create"); err != nil {
		c.log.WarnContext(c.ctx, "engine_api_not_as_allowed", "container", id, "fields", []string(d))
		return err
	}
	return nil
}

// verifyVolumes looks again whose the volumes are: until the container was there, which
// keeps them, their names could be taken by others.
func (c *call) verifyVolumes(d *differences, audited bool, ct *container.InspectResponse) error {
	for _, m := range ct.Mounts {
		if m.Type != mount.TypeVolume {
			continue
		}
		v, _, err := c.anyVolume(m.Name)
		switch {
		case errors.Is(err, errNotFound):
			d.add(false, "Mounts")
		case err != nil:
			return err
		case audited:
			d.add(!c.others(lifecycle.ObjectVolume, v.Name, v.Labels), "Mounts")
		default:
			d.add(c.ownVolume(v), "Mounts")
		}
	}
	return nil
}

// inspect asks the engine for a container in its own version.
func (c *call) inspect(id string, v version) (*container.InspectResponse, error) {
	var ct container.InspectResponse
	if err := c.engine.get(c.ctx, v, "/containers/"+id+"/json", nil, &ct); err != nil {
		return nil, err
	}
	if ct.ContainerJSONBase == nil || ct.HostConfig == nil || ct.Config == nil || ct.NetworkSettings == nil {
		return nil, fmt.Errorf("inspect container: the engine's answer lacks a part")
	}
	return &ct, nil
}

// sameEnv tells whether each variable that was sent is there once, with its value, and none
// that was sent without one has a value.
func sameEnv(got, sent []string) bool {
	count := map[string]int{}
	for _, e := range got {
		name, _, _ := strings.Cut(e, "=")
		count[name]++
	}
	for _, e := range sent {
		name, _, given := strings.Cut(e, "=")
		if given && (count[name] != 1 || !slices.Contains(got, e)) {
			return false
		}
		if !given && slices.ContainsFunc(got, func(g string) bool { return strings.HasPrefix(g, name+"=") }) {
			return false
		}
	}
	return true
}

// differences compares a container with what it was allowed, in all that can't be changed
// by an update.
func (c *call) differences(want effective, ct *container.InspectResponse, v version) (differences, error) {
	var d differences
	d.add(ct.Image == want.ImageID, "Image")
	d.add(ct.Config.User == want.User, "Config.User")
	d.add(!ct.Config.NetworkDisabled, "Config.NetworkDisabled")
	if h := ct.Config.Healthcheck; h != nil {
		body := healthBody{Interval: int64(h.Interval), Timeout: int64(h.Timeout), StartPeriod: int64(h.StartPeriod), StartInterval: int64(h.StartInterval)}
		d.add(body.check() == nil, "Config.Healthcheck")
	}
	d.add(sameSecurity(ct.HostConfig.SecurityOpt, want.Seccomp), "HostConfig.SecurityOpt")
	d.privileges(want.ContainerSpec, ct.HostConfig, v)
	d.namespaces(ct.HostConfig, v)
	d.closed(ct.HostConfig)
	d.limits(want.ContainerSpec, ct.HostConfig)
	d.mounts(want, ct)
	d.add(len(want.Binds) == 0 || ct.HostConfig.RestartPolicy.IsNone(), "HostConfig.RestartPolicy")
	err := c.networkDifferences(&d, want.ContainerSpec, ct)
	return d, err
}

// What every engine masks, and has read-only, in a container's /proc and /sys.
var (
	maskedPaths   = []string{"/proc/kcore", "/proc/keys", "/proc/timer_list", "/sys/firmware"}
	readonlyPaths = []string{"/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"}
)

func (d *differences) privileges(s policy.ContainerSpec, h *container.HostConfig, v version) {
	d.add(!h.Privileged, "HostConfig.Privileged")
	caps := []string{}
	for _, name := range h.CapAdd {
		name = strings.ToUpper(name)
		caps = append(caps, "CAP_"+strings.TrimPrefix(name, "CAP_"))
	}
	slices.Sort(caps)
	d.add(slices.Equal(slices.Compact(caps), s.Capabilities) || len(caps) == 0 && len(s.Capabilities) == 0, "HostConfig.CapAdd")
	d.add(slices.Contains(h.CapDrop, "ALL"), "HostConfig.CapDrop")
	if v >= 40 { // older ones don't show them
		d.add(containsAll(h.MaskedPaths, maskedPaths), "HostConfig.MaskedPaths")
		d.add(containsAll(h.ReadonlyPaths, readonlyPaths), "HostConfig.ReadonlyPaths")
	}
	d.add(h.ReadonlyRootfs == s.ReadOnlyRootfs, "HostConfig.ReadonlyRootfs")
	d.add(s.Runtime == "" || h.Runtime == s.Runtime, "HostConfig.Runtime")
	d.add(sameSet(h.GroupAdd, s.Groups), "HostConfig.GroupAdd")
	d.add(maps.Equal(h.Sysctls, s.Sysctls), "HostConfig.Sysctls")
}

// sameSecurity reports whether options are those that a container gets, with the seccomp
// profile whose digest its label has.
func sameSecurity(options []string, seccomp string) bool {
	if seccomp == "" {
		return slices.Equal(options, []string{noNewPrivileges})
	}
	return len(options) == 2 && options[0] == noNewPrivileges && digest.FromString(options[1]).String() == seccomp
}

func containsAll(list, wanted []string) bool {
	return !slices.ContainsFunc(wanted, func(s string) bool { return !slices.Contains(list, s) })
}

func sameSet(a, b []string) bool {
	return len(a) == len(b) && containsAll(a, b) && containsAll(b, a)
}

func (d *differences) namespaces(h *container.HostConfig, v version) {
	d.add(h.PidMode == "", "HostConfig.PidMode")
	d.add(h.IpcMode.IsPrivate(), "HostConfig.IpcMode")
	d.add(h.UTSMode == "", "HostConfig.UTSMode")
	d.add(h.UsernsMode == "", "HostConfig.UsernsMode")
	d.add(v < 41 || h.CgroupnsMode.IsPrivate(), "HostConfig.CgroupnsMode")
	d.add(h.Cgroup == "", "HostConfig.Cgroup")
	d.add(h.CgroupParent == "", "HostConfig.CgroupParent")
}

// closed are the fields that are never set.
func (d *differences) closed(h *container.HostConfig) {
	d.add(len(h.Devices) == 0 && len(h.DeviceRequests) == 0 && len(h.DeviceCgroupRules) == 0, "HostConfig.Devices")
	d.add(len(h.Binds) == 0, "HostConfig.Binds")
	d.add(len(h.VolumesFrom) == 0, "HostConfig.VolumesFrom")
	d.add(h.VolumeDriver == "", "HostConfig.VolumeDriver")
	d.add(len(h.Links) == 0, "HostConfig.Links")
	d.add(!h.PublishAllPorts, "HostConfig.PublishAllPorts")
	d.add(len(h.StorageOpt) == 0, "HostConfig.StorageOpt")
	d.add(len(h.Annotations) == 0, "HostConfig.Annotations")
	d.add(h.Isolation.IsDefault(), "HostConfig.Isolation")
	d.add(h.OomKillDisable == nil || !*h.OomKillDisable, "HostConfig.OomKillDisable")
	d.add(h.CPURealtimePeriod == 0 && h.CPURealtimeRuntime == 0, "HostConfig.CpuRealtimeRuntime")
	d.add(len(h.BlkioWeightDevice) == 0 && len(h.BlkioDeviceReadBps) == 0 && len(h.BlkioDeviceWriteBps) == 0 &&
		len(h.BlkioDeviceReadIOps) == 0 && len(h.BlkioDeviceWriteIOps) == 0 && h.BlkioWeight == 0, "HostConfig.BlkioWeight")
}

// hasOptions tells whether the log has the options that were sent; an engine may
// add those of its own configuration.
func hasOptions(got, sent map[string]string) bool {
	for name, value := range sent {
		if have, ok := got[name]; !ok || have != value {
			return false
		}
	}
	return true
}

func (d *differences) limits(s policy.ContainerSpec, h *container.HostConfig) {
	d.add(h.ShmSize == s.ShmBytes, "HostConfig.ShmSize")
	d.add(h.OomScoreAdj == s.OOMScoreAdj, "HostConfig.OomScoreAdj")
	d.add(h.CPUShares <= defaultShares, "HostConfig.CpuShares")
	d.add(h.LogConfig.Type == s.LogDriver && hasOptions(h.LogConfig.Config, s.LogOptions), "HostConfig.LogConfig")
	d.add(sameSet(h.DNS, s.DNS) && sameSet(h.DNSOptions, s.DNSOptions) && sameSet(h.DNSSearch, s.DNSSearch), "HostConfig.Dns")
	d.add(sameSet(h.ExtraHosts, s.ExtraHosts), "HostConfig.ExtraHosts")
	want := portMap(s.Ports)
	d.add(len(h.PortBindings) == len(want) && (len(want) == 0 || reflect.DeepEqual(h.PortBindings, want)), "HostConfig.PortBindings")
	limits := map[string]policy.ContainerUlimit{}
	for _, u := range h.Ulimits {
		limits[u.Name] = policy.ContainerUlimit{Name: u.Name, Soft: u.Soft, Hard: u.Hard}
	}
	for _, u := range s.Ulimits {
		d.add(limits[u.Name] == u, "HostConfig.Ulimits")
	}
}

// mounts compares what is mounted, and how, with what was judged.
func (d *differences) mounts(s effective, ct *container.InspectResponse) {
	left := slices.Clone(ct.Mounts)
	take := func(fits func(container.MountPoint) bool) bool {
		i := slices.IndexFunc(left, fits)
		if i >= 0 {
			left = slices.Delete(left, i, i+1)
		}
		return i >= 0
	}
	private := func(p mount.Propagation) bool { return p == "" || p == mount.PropagationRPrivate }
	d.add(len(s.sources) == len(s.Binds) && slices.Equal(s.sources, s.named(ct.HostConfig)), "HostConfig.Mounts")
	for i, b := range s.Binds {
		d.add(take(func(m container.MountPoint) bool {
			return m.Type == mount.TypeBind && i < len(s.sources) && m.Source == s.sources[i] && m.Destination == b.MountPath && m.RW == (b.Mode != "ro") && private(m.Propagation)
		}), "Mounts")
	}
	for _, v := range s.Volumes {
		d.add(take(func(m container.MountPoint) bool {
			return m.Type == mount.TypeVolume && (m.Name == v.Source || v.Source == "") && m.Destination == v.Target && m.RW != v.ReadOnly && m.Driver == "local" && private(m.Propagation)
		}), "Mounts")
	}
	for _, t := range s.Tmpfs {
		options, ok := ct.HostConfig.Tmpfs[t.Target]
		d.add(ok && strings.Contains(","+options+",", fmt.Sprintf(",nosuid,nodev,size=%d,", t.SizeBytes)), "HostConfig.Tmpfs")
		take(func(m container.MountPoint) bool { return m.Type == mount.TypeTmpfs && m.Destination == t.Target }) // not every engine lists them
	}
	d.add(len(left) == 0, "Mounts")
	d.add(len(ct.HostConfig.Tmpfs) == len(s.Tmpfs), "HostConfig.Tmpfs")
	d.add(len(ct.HostConfig.Mounts) == len(s.Binds)+len(s.Volumes), "HostConfig.Mounts")
	for _, m := range ct.HostConfig.Mounts {
		switch b, v := m.BindOptions, m.VolumeOptions; m.Type {
		case mount.TypeBind:
			d.add(b != nil && b.NonRecursive && !b.CreateMountpoint && b.Propagation == mount.PropagationRPrivate, "HostConfig.Mounts")
		case mount.TypeVolume:
			d.add(v == nil || v.DriverConfig == nil && v.Subpath == "", "HostConfig.Mounts")
		default:
			d.add(false, "HostConfig.Mounts")
		}
	}
}

// networkDifferences looks up by its own name each network that the container would be
// connected with: one that was judged, one of the caller's that it was connected with
// since, or one of the policy's.
func (c *call) networkDifferences(d *differences, s policy.ContainerSpec, ct *container.InspectResponse) error {
	mode := string(ct.HostConfig.NetworkMode)
	switch s.Network {
	case policy.SpecNetworkNone:
		d.add(mode == policy.NetNone, "HostConfig.NetworkMode")
	case policy.SpecNetworkContainer:
		d.add(mode == "container:"+s.Networks[0].ID && len(ct.NetworkSettings.Networks) == 0, "HostConfig.NetworkMode")
	default:
		// Some engines tell it by its name; whose that is, is looked up below.
		d.add(len(s.Networks) > 0 && (mode == s.Networks[0].ID || mode != "" && mode == s.Networks[0].Name), "HostConfig.NetworkMode")
	}
	for name, endpoint := range ct.NetworkSettings.Networks {
		if name == policy.NetNone && s.Network == policy.SpecNetworkNone {
			continue
		}
		n, err := c.lookUpNetwork(name)
		if err != nil {
			return err
		}
		if n == nil {
			continue // it is gone, and the container can't start
		}
		judged := slices.ContainsFunc(s.Networks, func(w policy.ContainerNetwork) bool { return w.ID == n.ID })
		d.add(judged || c.policyOwn(n) || c.own(lifecycle.ObjectNetwork, n.ID, n.Labels), "NetworkSettings.Networks")
		d.add(endpoint == nil || endpoint.NetworkID == "" || endpoint.NetworkID == n.ID, "NetworkSettings.Networks")
	}
	return nil
}

// sameResources compares what an update can change. An engine whose kernel can't limit
// swap says that it is unlimited.
func sameResources(s policy.ContainerSpec, h *container.HostConfig) bool {
	return h.Memory == s.MemoryBytes && (h.MemorySwap == s.SwapBytes || h.MemorySwap == -1) && cpusOf(h) == nanoCPUs(s.CPUs) &&
		h.PidsLimit != nil && *h.PidsLimit == s.PidsLimit
}

func cpusOf(h *container.HostConfig) int64 {
	if h.NanoCPUs == 0 && h.CPUQuota > 0 && h.CPUPeriod > 0 {
		return h.CPUQuota * 1e9 / h.CPUPeriod
	}
	return h.NanoCPUs
}

// restartIs tells whether the engine has the restart policy that it got for s.
func restartIs(h *container.HostConfig, s policy.ContainerSpec) bool {
	want := engineRestart(s)
	return string(h.RestartPolicy.Name) == want || h.RestartPolicy.IsNone() && (want == "" || want == "no")
}

// effectiveOf reads what a container was allowed from its labels.
func effectiveOf(ct *container.InspectResponse) (effective, error) {
	var e effective
	if err := json.Unmarshal([]byte(ct.Config.Labels[lifecycle.LabelEffective]), &e); err != nil {
		return e, denied("verify.start", "Config.Labels", "the container doesn't say what it was allowed", "containers that this door made")
	}
	return e, nil
}

// expired refuses a container that has no more time.
func expired(ct *container.InspectResponse) error {
	expires, err := time.Parse(time.RFC3339Nano, ct.Config.Labels[lifecycle.LabelExpiresAt])
	if err != nil || !time.Now().Before(expires) {
		return denied("ttl.expired", "", "the container's time is up", "a new container")
	}
	return nil
}

// verifyStart looks at a container before it is started again, or just after.
func (c *call) verifyStart(e effective, ct *container.InspectResponse, v version) error {
	d, err := c.differences(e, ct, v)
	if err != nil {
		return err
	}
	d.add(c.withinLimits(e, ct.HostConfig), "HostConfig.Resources")
	slices.Sort(d)
	d = slices.Compact(d)
	if err := d.err("verify.start"); err != nil {
		c.log.WarnContext(c.ctx, "engine_api_not_as_allowed", "container", ct.ID, "fields", []string(d))
		return err
	}
	return nil
}

// withinLimits tells whether what updates can change is as it was made, or as the policy
// would still let it be made.
func (c *call) withinLimits(e effective, h *container.HostConfig) bool {
	if sameResources(e.ContainerSpec, h) && restartIs(h, e.ContainerSpec) {
		return true
	}
	if h.Memory <= 0 || cpusOf(h) <= 0 || h.PidsLimit == nil || *h.PidsLimit <= 0 || h.MemorySwap != h.Memory && h.MemorySwap != -1 {
		return false
	}
	verdict := c.rules.ContainerUpdate(c.caller.Profile, policy.ContainerRequest{
		MemoryBytes: h.Memory, CPUs: float64(cpusOf(h)) / 1e9, PidsLimit: h.PidsLimit, Restart: string(h.RestartPolicy.Name),
	})
	return verdict.Allowed() && len(verdict.Overridden) == 0
}

// endUnfit removes a container that isn't as it was allowed, and kills one that can't be
// looked at.
func (c *call) endUnfit(id string, v version, why error) {
	var d *policy.DeniedError
	if errors.As(why, &d) {
		c.removeUnfit(id, v)
		return
	}
	undo{func(ctx context.Context) error {
		err := c.engine.do(ctx, ask{method: http.MethodPost, version: v, path: "/containers/" + id + "/kill"}, nil)
		if statusOf(err) == http.StatusConflict { // it doesn't run
			return nil
		}
		return missingIsFine(err)
	}}.run(c.ctx, c.log)
}

// removeUnfit removes a container that must not run, with its own time.
func (c *call) removeUnfit(id string, v version) {
	undo{func(ctx context.Context) error { return c.removeByForce(ctx, v, id) }}.run(c.ctx, c.log)
}
