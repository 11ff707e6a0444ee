package engineapi

import (
	"context"
	"fmt"
	"maps"
	"net/http"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/docker/docker/api/types/container"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/proxy/engineapi/body"
	"github.com/bermhq/berm/proxy/engineapi/upstream"
)

// acts names the calls that count until the engine is done with them: it goes on with them when the
// client leaves.
const acts = "starts, restarts and stops"

// endTime is how long a container may take to stop.
const endTime = body.MaxStopSeconds * time.Second

// startContainer starts or restarts a container. It fails unless the container is still as it
// was allowed, and the policy would allow it now.
func startContainer(c *call, a upstream.Ask, id string) error {
	if err := c.untilEnd(c.enter(acts, maxActs)); err != nil {
		return err
	}
	if err := c.untilEnd(c.restarts.Starting(c.ctx, id)); err != nil {
		return err
	}
	resp, err := startOne(c, a, id) //nolint:bodyclose // relay closes it
	if err != nil {
		return err
	}
	return c.relay(resp, false)
}

// StartContainer starts a container that this proxy made, without a client's request. It judges
// and verifies the container as for the caller that made it. A container that runs already goes
// on. StartContainer returns a *policy.DeniedError if the container may not be started.
func (d *Proxy) StartContainer(ctx context.Context, id string) error {
	v, err := d.engine.Max(ctx)
	if err != nil {
		return err
	}
	c := &call{Proxy: d, ctx: ctx, rules: d.opts.Policy(), version: v}
	resp, err := startOne(c, upstream.Ask{Method: http.MethodPost, Path: "/containers/" + id + "/start"}, id)
	r := record(c, err)
	r.Peer, r.Method, r.Route, r.Objects = "berm", http.MethodPost, "/containers/{id}/start", []string{id}
	d.opts.Audit.write(r)
	if err != nil {
		return fmt.Errorf("start container %q: %w", id, err)
	}
	return resp.Body.Close()
}

// startOne starts or restarts the container while it holds the container's start lock. It
// returns the engine's answer, which has no body, or an error for a status of 400 or more.
func startOne(c *call, a upstream.Ask, id string) (*http.Response, error) {
	over, err := c.startLocks.Lock(c.ctx, id)
	if err != nil {
		return nil, err
	}
	defer over()
	waiting, most := c.ctx, makeTimeout
	if !strings.HasSuffix(a.Path, "/start") {
		most += endTime // of the container, before it starts again
	}
	defer c.detach(most)() // verifies the started container even if the client leaves
	v, err := c.engine.Max(c.ctx)
	if err != nil {
		return nil, err
	}
	ct, err := c.inspect(id, v)
	if err != nil {
		return nil, err
	}
	if c.caller.Tenant == "" { // StartContainer acts for the container's own caller
		c.caller = madeBy(ct.Config.Labels)
		if own, err := c.ownContainer(ct.ID, ct.Config.Labels); err != nil {
			return nil, err
		} else if !own {
			return nil, noContainer(id)
		}
	}
	if _, err := expiry(ct.Config.Labels[lifecycle.LabelExpiresAt]); err != nil {
		return nil, err
	}
	leaveMounts, err := claimMounts(waiting, c, ct)
	if err != nil {
		return nil, err
	}
	defer leaveMounts()
	e, err := allowed(ct)
	if err != nil {
		return nil, err
	}
	if row, ok := c.restarts.Row(id); ok {
		e.Restart = row.Name
	}
	if c.unconfined = e.Audit; e.Audit {
		if err := refuseUnconfined(c); err != nil {
			return nil, err
		}
		return askForStart(c, a)
	}
	return startHeld(c, a, e, ct, v)
}

func askForStart(c *call, a upstream.Ask) (*http.Response, error) {
	resp, err := c.ask(a)
	if err == nil && resp.StatusCode >= 400 {
		return nil, upstream.Failure(resp)
	}
	return resp, err
}

// detach makes the call go on for at most the given time when the client leaves. Back undoes
// that.
func (c *call) detach(most time.Duration) (back func()) {
	client := c.ctx
	ctx, cancel := context.WithTimeout(context.WithoutCancel(client), most)
	c.ctx = ctx
	return func() { cancel(); c.ctx = client }
}

// stopContainer stops a container. The engine goes on with the stop when the client has left. So
// the call goes on too, and counts against the limits until the stop is over.
func stopContainer(c *call, a upstream.Ask, id string) error {
	if err := c.untilEnd(c.enter(acts, maxActs)); err != nil {
		return err
	}
	if err := c.untilEnd(c.enter("stops of container "+id, maxStops)); err != nil {
		return err
	}
	defer c.detach(makeTimeout + endTime)()
	return endContainer(c, a, id, true)
}

// startHeld starts a container, and holds the sources of its binds until the engine has mounted
// them. If the started container isn't as it was allowed, startHeld removes it.
func startHeld(c *call, a upstream.Ask, e effective, ct *container.InspectResponse, v upstream.Version) (*http.Response, error) {
	if err := c.judged(stillAllowed(c, e, ct.HostConfig)); err != nil {
		return nil, err
	}
	if err := c.judged(refuseWriters(c, e, ct)); err != nil {
		return nil, err
	}
	release, err := holdBinds(c, &e, ct)
	if err != nil {
		return nil, err
	}
	defer release()
	if err := c.judged(verifyStart(c, e, ct, v)); err != nil {
		return nil, err
	}
	resp, err := askForStart(c, a)
	if err != nil {
		if upstream.StatusOf(err) == 0 { // the answer is lost, but the container may run
			defer c.detach(upstream.UndoTimeout)()
			if err := verifyStarted(c, e, ct, v); err != nil {
				endUnfit(c, ct.ID, v, err)
			}
		}
		return nil, err
	}
	if err := c.judged(verifyStarted(c, e, ct, v)); err != nil {
		endUnfit(c, ct.ID, v, err)
		return nil, err
	}
	return resp, nil
}

// verifyStarted verifies a container that was just started. Before is the container before the
// start. A container that is gone already is no error.
func verifyStarted(c *call, e effective, before *container.InspectResponse, v upstream.Version) error {
	now, err := c.inspect(before.ID, v)
	if err != nil {
		return missingIsFine(err)
	}
	if err := verifyStart(c, e, now, v); err != nil {
		return err
	}
	return verifyHeld(c, e, before, now, v)
}

// updateContainer changes a container's resources and restart policy, within what the profile allows a
// new container.
func updateContainer(c *call, b *body.Update) error {
	if err := body.CheckChangeable(&b.Resources, b.RestartPolicy); err != nil {
		return err
	}
	req := policy.ContainerRequest{
		Profile: c.caller.Profile, Restart: string(b.RestartPolicy.Name), Devices: body.DeviceList(&b.Resources), Other: body.Refused("", &b.Resources, b.DiskQuota),
	}
	body.Limits(&b.Resources, &req)
	if len(req.Ulimits) > 0 {
		req.Other = append(req.Other, policy.OtherField{Field: "Ulimits", Value: req.Ulimits[0].Name})
		req.Ulimits = nil
	}
	verdict := c.rules.ContainerUpdate(c.caller.Profile, req)
	if err := c.allow(verdict.Denials); err != nil {
		return err
	}
	ct, _, err := c.container(c.name)
	if err != nil {
		return err
	}
	host, err := c.engine.HostInfo(c.ctx, c.version)
	if err != nil {
		return err
	}
	verdict.Spec.CPUs = min(verdict.Spec.CPUs, float64(host.CPUs))
	asked := restartPolicy(b.RestartPolicy)
	_, ours := c.restartedHere(ct.ID, ct.Config.Labels)
	if ours {
		if ct.HostConfig.AutoRemove && !asked.None() {
			return conflict("Cannot update container " + ct.ID + ": Conflicting options: Restart policy cannot be updated because AutoRemove is enabled for the container")
		}
		b.RestartPolicy, verdict.Spec.Restart = container.RestartPolicy{}, "" // the engine keeps none
	}
	var change any = b // as asked, in mode audit
	if verdict.Allowed() {
		change = b.Encode(verdict.Spec)
	}
	defer c.detach(upstream.AskTimeout)()
	v, err := c.engine.Max(c.ctx)
	if err != nil {
		return err
	}
	answer := struct{ Warnings []string }{[]string{}}
	err = c.engine.Post(c.ctx, v, "/containers/"+ct.ID+"/update", nil, change, &answer)
	if verdict.Allowed() {
		if verr := verifyUpdate(c, ct.ID, v); verr != nil {
			return verr
		}
	}
	if err != nil {
		return err
	}
	if ours && asked.Name != "" {
		if err := c.restarts.Set(c.ctx, ct.ID, asked, ct.State != nil && !ct.State.Running); err != nil {
			return err
		}
	}
	return c.answer(http.StatusOK, answer)
}

// verifyUpdate verifies a container after an update, even after one that failed halfway. It removes a
// container that is out of bounds.
func verifyUpdate(c *call, id string, v upstream.Version) error {
	ct, err := c.inspect(id, v)
	if err != nil {
		return missingIsFine(err)
	}
	e, err := allowed(ct)
	if err == nil && (e.Audit || withinLimits(c, e, ct.HostConfig)) {
		return nil
	}
	if err == nil {
		err = denied("verify.update", "HostConfig.Resources", "the container is not as it was allowed after the update", "limits of the profile")
	}
	if err := c.judged(err); err != nil {
		removeUnfit(c, id, v)
		return err
	}
	return nil
}

// stillAllowed judges an existing container again, by the policy in force now and the profile that it was
// made with: its image, user, mounts, networks, ports, privileges and limits. It doesn't judge the
// environment and the lifetime again, nor limits that an update has changed: withinLimits judges these.
func stillAllowed(c *call, e effective, h *container.HostConfig) error {
	req := e.request()
	if err := findPeer(c, req.PidOf); err != nil {
		return err
	}
	same := body.SameResources(e.ContainerSpec, h) && body.RestartIs(h, e.ContainerSpec)
	if !same {
		req.CPUs, req.MemoryBytes, req.PidsLimit = 0, 0, nil
		if len(e.Binds) == 0 { // with binds, Berm carries out the policy that is in e
			req.Restart = ""
		}
	}
	verdict := c.rules.Container(req)
	if !verdict.Allowed() { // an image that the caller built itself needn't be on the list
		img, err := lookUpImage(c, e.ImageID)
		if err != nil {
			return err
		}
		if req.Trusted = img != nil && ownImage(c, img.Config.Labels); req.Trusted {
			verdict = c.rules.Container(req)
		}
	}
	if err := verdict.Err(); err != nil {
		return err
	}
	return differ(narrowed(e.ContainerSpec, verdict.Spec, same), "verify.policy")
}

// request returns the create request that asks for exactly what was allowed.
func (e *effective) request() policy.ContainerRequest {
	req := policy.ContainerRequest{
		Profile: e.Profile, Image: e.Image, User: e.User, Groups: e.Groups,
		Networks: e.Networks, Ports: e.Ports, CapAdd: e.Capabilities, CapDrop: []string{"ALL"},
		Sysctls: e.Sysctls, Ulimits: e.Ulimits, Runtime: e.Runtime, LogDriver: e.LogDriver, LogOptions: e.LogOptions,
		Restart: e.Restart, DNS: e.DNS, DNSOptions: e.DNSOptions, DNSSearch: e.DNSSearch, ExtraHosts: e.ExtraHosts,
		CPUs: e.CPUs, MemoryBytes: e.MemoryBytes, PidsLimit: &e.PidsLimit,
		ShmBytes: e.ShmBytes, OOMScoreAdj: e.OOMScoreAdj, ReadOnlyRootfs: e.ReadOnlyRootfs,
	}
	if e.PidOf != "" {
		req.PidOf = &policy.ContainerPeer{Asked: containerMode + e.PidOf}
	}
	if e.Network == policy.SpecNetworkNone {
		req.Networks = []policy.ContainerNetwork{{Field: "HostConfig.NetworkMode", Mode: policy.NetNone}}
	}
	for _, m := range e.Binds {
		req.Mounts = append(req.Mounts, policy.ContainerMount{
			Field: "HostConfig.Mounts", Type: "bind", Source: m.HostPath, Target: m.MountPath, ReadOnly: m.Mode == "ro", OnlyDir: !m.File, Socket: m.Socket,
		})
	}
	req.Mounts = append(append(req.Mounts, e.Volumes...), e.Tmpfs...)
	return req
}

// narrowed returns the fields in which the policy now allows less. With limits, it also compares CPUs,
// memory and the number of processes.
func narrowed(was, now policy.ContainerSpec, limits bool) body.Differences {
	var d body.Differences
	d.Add(now.Image == was.Image, "Image")
	d.Add(now.User == was.User, "Config.User")
	d.Add(was.ReadOnlyRootfs || !now.ReadOnlyRootfs, "HostConfig.ReadonlyRootfs")
	d.Add(now.Runtime == was.Runtime, "HostConfig.Runtime")
	d.Add(now.PidOf == was.PidOf, "HostConfig.PidMode")
	d.Add(slices.Equal(now.Binds, was.Binds), "HostConfig.Mounts")
	d.Add(now.Network == was.Network && len(now.Networks) == len(was.Networks), "HostConfig.NetworkMode")
	for _, n := range was.Networks {
		d.Add(slices.ContainsFunc(now.Networks, func(o policy.ContainerNetwork) bool { return o.Name == n.Name }), "NetworkSettings.Networks")
	}
	d.Add(slices.Equal(now.Ports, was.Ports), "HostConfig.PortBindings")
	d.Add(slices.Equal(now.Ulimits, was.Ulimits), "HostConfig.Ulimits")
	d.Add(maps.Equal(now.LogOptions, was.LogOptions), "HostConfig.LogConfig")
	d.Add(now.ShmBytes >= was.ShmBytes, "HostConfig.ShmSize")
	d.Add(len(now.Tmpfs) == len(was.Tmpfs) && (len(was.Tmpfs) == 0 || reflect.DeepEqual(now.Tmpfs, was.Tmpfs)), "HostConfig.Tmpfs")
	if limits {
		d.Add(now.CPUs >= was.CPUs && now.MemoryBytes >= was.MemoryBytes && now.PidsLimit >= was.PidsLimit, "HostConfig.Resources")
	}
	return d
}
