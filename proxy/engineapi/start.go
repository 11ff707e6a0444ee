package engineapi

import (
	"context"
	"fmt"
	"net/http"
	"time"

	"github.com/bermhq/berm/proxy/engineapi/body"

	"github.com/bermhq/berm/proxy/engineapi/upstream"

	"github.com/docker/docker/api/types/container"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/policy"
)

// acts are what is counted until it is over: the engine goes on with it also when the caller
// has left.
const acts = "starts, restarts and stops"

// endTime is how long a container may take to end.
const endTime = body.MaxStopSeconds * time.Second

// startContainer starts a container, or stops and starts it, if it is still as it was
// allowed and still would be.
func startContainer(c *call, a upstream.Ask, id string) error {
	leave, err := c.enter(acts, maxActs)
	if err != nil {
		return err
	}
	defer leave()
	over, err := c.restarts.Starting(c.ctx, id)
	if err != nil {
		return err
	}
	defer over()
	resp, err := startOne(c, a, id) //nolint:bodyclose // relay closes it
	if err != nil {
		return err
	}
	return c.relay(resp, false)
}

// StartContainer starts a container that this proxy made, without a request of a client's.
// The container is judged and verified as for its own caller. One that runs already stays
// as it is. The error is a *policy.DeniedError if the container may not be started.
func (d *Proxy) StartContainer(ctx context.Context, id string) error {
	v, err := d.engine.Max(ctx)
	if err != nil {
		return err
	}
	c := &call{Proxy: d, ctx: ctx, rules: d.opts.Policy(), version: v}
	resp, err := startOne(c, upstream.Ask{Method: http.MethodPost, Path: "/containers/" + id + "/start"}, id)
	r := Record{
		Time: time.Now().UTC(), Peer: "berm", Method: http.MethodPost, Route: "/containers/{id}/start", Version: v.String(),
		Caller: c.caller.Name, Tenant: c.caller.Tenant, Profile: c.caller.Profile, Verdict: VerdictAllowed, Objects: []string{id},
	}
	r.judged(err, nil)
	d.opts.Audit.write(r)
	if err != nil {
		return fmt.Errorf("start container %q: %w", id, err)
	}
	return resp.Body.Close()
}

// startOne starts the container, or stops and starts it, once no other start of it goes on.
// It returns the engine's answer, which has no body. An answer that is an error is one.
func startOne(c *call, a upstream.Ask, id string) (*http.Response, error) {
	over, err := c.startLocks.Lock(c.ctx, id)
	if err != nil {
		return nil, err
	}
	defer over()
	waiting := c.ctx
	defer c.detach(makeTimeout + endTime)() // verify what was started even if the client leaves
	v, err := c.engine.Max(c.ctx)
	if err != nil {
		return nil, err
	}
	ct, err := c.inspect(id, v)
	if err != nil {
		return nil, err
	}
	if c.caller.Tenant == "" { // StartContainer acts for the container's own caller
		labels := ct.Config.Labels
		c.caller = Caller{Name: labels[lifecycle.LabelCaller], Tenant: labels[lifecycle.LabelTenant], Profile: labels[lifecycle.LabelProfile]}
		if own, err := c.ownContainer(ct.ID, labels); err != nil {
			return nil, err
		} else if !own {
			return nil, noContainer(id)
		}
	}
	if err := expired(ct); err != nil {
		return nil, err
	}
	leaveMounts, err := claimMounts(waiting, c, ct)
	if err != nil {
		return nil, err
	}
	defer leaveMounts()
	e, err := effectiveOf(ct)
	if err != nil {
		return nil, err
	}
	if row, ok := c.restarts.Row(id); ok {
		e.Restart = row.Name
	}
	if e.Audit {
		if err := c.allow([]policy.Reason{{Rule: "verify.start", Message: "the container was denied, and made in mode audit", Allowed: "a new container"}}); err != nil {
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

// detach has the call go on when its caller leaves, for so long at most. The caller of
// detach calls back when it is over.
func (c *call) detach(most time.Duration) (back func()) {
	client := c.ctx
	ctx, cancel := context.WithTimeout(context.WithoutCancel(client), most)
	c.ctx = ctx
	return func() { cancel(); c.ctx = client }
}

// stopContainer stops a container. The engine goes on with it when the caller has left,
// so the call does too: it counts for as long.
func stopContainer(c *call, a upstream.Ask, id string) error {
	leave, err := c.enter(acts, maxActs)
	if err != nil {
		return err
	}
	defer leave()
	leaveOne, err := c.enter("stops of container "+id, maxStops)
	if err != nil {
		return err
	}
	defer leaveOne()
	defer c.detach(makeTimeout + endTime)()
	return endContainer(c, a, id, true)
}

// startHeld starts a container as it was allowed, with the sources of its binds held
// until the engine has mounted them. It removes a container that is not as it was allowed.
func startHeld(c *call, a upstream.Ask, e effective, ct *container.InspectResponse, v upstream.Version) (*http.Response, error) {
	if err := c.judged(stillAllowed(c, e, ct.HostConfig)); err != nil {
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

// verifyStarted verifies a container that was just started. Before is what it was like
// then. A container that is gone already is fine.
func verifyStarted(c *call, e effective, before *container.InspectResponse, v upstream.Version) error {
	now, err := c.inspect(before.ID, v)
	if upstream.StatusOf(err) == http.StatusNotFound {
		return nil
	}
	if err != nil {
		return err
	}
	if err := verifyStart(c, e, now, v); err != nil {
		return err
	}
	return verifyHeld(c, e, before, now, v)
}
