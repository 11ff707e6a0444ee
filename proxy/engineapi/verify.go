package engineapi

import (
	"context"
	"errors"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/bermhq/berm/proxy/engineapi/body"

	"github.com/bermhq/berm/proxy/engineapi/upstream"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/mount"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/policy"
)

// refuseOther is differ for an inspected container. It also logs the differences.
func refuseOther(c *call, id string, d body.Differences, rule string) error {
	slices.Sort(d)
	d = slices.Compact(d)
	err := differ(d, rule)
	if err != nil {
		c.log.WarnContext(c.ctx, "engine_api_not_as_allowed", "container", id, "fields", []string(d))
	}
	return err
}

// differ returns a denial that lists the differences, or nil if there are none.
func differ(d body.Differences, rule string) error {
	if len(d) == 0 {
		return nil
	}
	return denied(rule, d[0], "the container is not as it was allowed: it differs in "+strings.Join(d, ", "), "the container as it was allowed")
}

// verifyMade verifies the container that the engine has created. In mode audit the container
// needn't be within the policy, but it must have its labels.
func verifyMade(c *call, p *plan, id string, v upstream.Version) error {
	ct, err := c.inspect(id, v)
	if err != nil {
		return err
	}
	var d body.Differences
	d.Add(ct.ID == id, "Id")
	for name := range ct.Config.Labels {
		if _, asked := p.Labels[name]; !asked {
			d.Add(!lifecycle.IsOwnLabel(name), "Config.Labels") // an image's
		}
	}
	for name, value := range p.Labels {
		got, ok := ct.Config.Labels[name]
		d.Add(ok && got == value, "Config.Labels")
	}
	if !p.audited {
		d.Add(body.SameEnv(ct.Config.Env, p.Env(c.rules.InjectedEnv())), "Config.Env")
		more, err := differencesOf(c, p.effective(), ct, v)
		if err != nil {
			return err
		}
		d = append(d, more...)
		d.Add(body.SameResources(p.Spec, ct.HostConfig), "HostConfig.Resources")
		d.Add(body.RestartIs(ct.HostConfig, p.Spec), "HostConfig.RestartPolicy")
	}
	if err := verifyVolumes(c, &d, p.audited, ct); err != nil {
		return err
	}
	return refuseOther(c, id, d, "verify.create")
}

// verifyVolumes checks again that the container's volumes are the caller's. Until a container
// uses a volume, another caller can remove it and take its name.
func verifyVolumes(c *call, d *body.Differences, audited bool, ct *container.InspectResponse) error {
	for _, m := range ct.Mounts {
		if m.Type != mount.TypeVolume {
			continue
		}
		v, _, err := anyVolume(c, m.Name)
		switch {
		case isMissing(err):
			d.Add(false, "Mounts")
		case err != nil:
			return err
		case audited:
			d.Add(!c.others(lifecycle.ObjectVolume, v.Name, v.Labels), "Mounts")
		default:
			d.Add(ownVolume(c, v), "Mounts")
		}
	}
	return nil
}

// inspect inspects a container in version v of the API.
func (c *call) inspect(id string, v upstream.Version) (*container.InspectResponse, error) {
	ct, err := inspected(c, upstream.Ask{Version: v}, id)
	if err == nil && ct.NetworkSettings == nil {
		err = errIncomplete
	}
	return ct, err
}

// inspected inspects a container by a. It fails if a part is missing, other than
// NetworkSettings.
func inspected(c *call, a upstream.Ask, id string) (*container.InspectResponse, error) {
	a.Method, a.Path = http.MethodGet, "/containers/"+id+"/json"
	var ct container.InspectResponse
	err := c.engine.Do(c.ctx, a, &ct)
	if err == nil && (ct.ContainerJSONBase == nil || ct.HostConfig == nil || ct.Config == nil || ct.State == nil) {
		err = errIncomplete
	}
	return &ct, err
}

var errIncomplete = errors.New("inspect container: the engine's answer lacks a part")

// differencesOf compares a container with what it was allowed, except for what an update can
// change.
func differencesOf(c *call, want effective, ct *container.InspectResponse, v upstream.Version) (body.Differences, error) {
	d := body.Compare(want.Granted, ct, int(v))
	err := networkDifferences(c, &d, want.ContainerSpec, ct)
	return d, err
}

// networkDifferences looks up each network of the container by its name. The network must be a
// judged one, or one of the caller's or the policy's that the container may still join: it may
// have been connected since.
func networkDifferences(c *call, d *body.Differences, s policy.ContainerSpec, ct *container.InspectResponse) error {
	mode := string(ct.HostConfig.NetworkMode)
	switch s.Network {
	case policy.SpecNetworkNone:
		d.Add(mode == policy.NetNone, "HostConfig.NetworkMode")
	case policy.SpecNetworkContainer:
		d.Add(mode == "container:"+s.Networks[0].ID && len(ct.NetworkSettings.Networks) == 0, "HostConfig.NetworkMode")
	default:
		// Some engines answer the network's name. Its owner is checked below.
		d.Add(len(s.Networks) > 0 && (mode == s.Networks[0].ID || mode != "" && mode == s.Networks[0].Name), "HostConfig.NetworkMode")
	}
	for name, endpoint := range ct.NetworkSettings.Networks {
		if name == policy.NetNone && s.Network == policy.SpecNetworkNone {
			continue
		}
		n, err := lookUpNetwork(c, name)
		if err != nil {
			return err
		}
		if n == nil {
			continue // without this network, the container can't start
		}
		judged := slices.ContainsFunc(s.Networks, func(w policy.ContainerNetwork) bool { return w.ID == n.ID })
		if !judged && (policyOwn(c, n) || c.own(lifecycle.ObjectNetwork, n.ID, n.Labels)) {
			judged = c.rules.NetworkJoin(c.caller.Profile, joinOf(c, n.Name, n)) == nil
		}
		d.Add(judged, "NetworkSettings.Networks")
		d.Add(endpoint == nil || endpoint.NetworkID == "" || endpoint.NetworkID == n.ID, "NetworkSettings.Networks")
	}
	return nil
}

// expiry returns the time in a container's expiry label. It refuses a container that has
// expired.
func expiry(label string) (time.Time, error) {
	expires, err := time.Parse(time.RFC3339Nano, label)
	if err != nil || !time.Now().Before(expires) {
		return expires, denied("ttl.expired", "", "the container's time is up", "a new container")
	}
	return expires, nil
}

// verifyStart verifies a container just before its start, or just after.
func verifyStart(c *call, e effective, ct *container.InspectResponse, v upstream.Version) error {
	d, err := differencesOf(c, e, ct, v)
	if err != nil {
		return err
	}
	d.Add(withinLimits(c, e, ct.HostConfig), "HostConfig.Resources")
	return refuseOther(c, ct.ID, d, "verify.start")
}

// withinLimits reports whether the values that an update can change are those that the container
// was created with, or that the policy would allow now.
func withinLimits(c *call, e effective, h *container.HostConfig) bool {
	if body.SameResources(e.ContainerSpec, h) && body.RestartIs(h, e.ContainerSpec) {
		return true
	}
	if h.Memory <= 0 || body.CPUsOf(h) <= 0 || h.PidsLimit == nil || *h.PidsLimit <= 0 || h.MemorySwap != h.Memory && h.MemorySwap != -1 {
		return false
	}
	verdict := c.rules.ContainerUpdate(c.caller.Profile, policy.ContainerRequest{
		MemoryBytes: h.Memory, CPUs: float64(body.CPUsOf(h)) / 1e9, PidsLimit: h.PidsLimit, Restart: string(h.RestartPolicy.Name),
	})
	return verdict.Allowed() && len(verdict.Overridden) == 0
}

// endUnfit removes a container that isn't as it was allowed. It only kills a container that
// couldn't be verified for another reason.
func endUnfit(c *call, id string, v upstream.Version, why error) {
	if _, ok := errors.AsType[*policy.DeniedError](why); ok {
		removeUnfit(c, id, v)
		return
	}
	undo{func(ctx context.Context) error {
		err := c.engine.Do(ctx, upstream.Ask{Method: http.MethodPost, Version: v, Path: "/containers/" + id + "/kill"}, nil)
		if upstream.StatusOf(err) == http.StatusConflict { // it doesn't run
			return nil
		}
		return missingIsFine(err)
	}}.run(c.ctx, c.log)
}

// removeUnfit removes a container that must not run, even if c's context has ended.
func removeUnfit(c *call, id string, v upstream.Version) {
	undo{func(ctx context.Context) error { return removeByForce(ctx, c, v, id) }}.run(c.ctx, c.log)
}
