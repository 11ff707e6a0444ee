package engineapi

import (
	"net/http"

	"github.com/bermhq/berm/proxy/engineapi/body"

	"github.com/bermhq/berm/proxy/engineapi/upstream"

	"github.com/docker/docker/api/types/container"

	"github.com/bermhq/berm/policy"
)

// updateContainer changes a container's resources and restart policy, within what its
// profile allows a new one.
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
	var change any = b // of mode audit
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

// verifyUpdate looks at what became of the container, also after an update that failed
// half-way. One that is out of bounds goes.
func verifyUpdate(c *call, id string, v upstream.Version) error {
	ct, err := c.inspect(id, v)
	if upstream.StatusOf(err) == http.StatusNotFound {
		return nil
	}
	if err != nil {
		return err
	}
	e, err := effectiveOf(ct)
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
