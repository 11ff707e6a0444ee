package engineapi

import (
	"context"
	"fmt"
	"net/http"
	"net/url"
	"path"
	"strconv"
	"time"

	"github.com/docker/docker/api/types/container"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/policy"
)

// startContainer starts a container, or stops and starts it, if it is still as it was
// allowed and still would be.
func (c *call) startContainer() error {
	query, wait, err := c.startQuery()
	if err != nil {
		return err
	}
	id, err := c.containerID(c.name)
	if err != nil {
		return err
	}
	leave, err := c.act("starts "+id, maxActs)
	if err != nil {
		return err
	}
	defer leave()
	over, err := c.restarts.Starting(c.ctx, id)
	if err != nil {
		return err
	}
	defer over()
	resp, err := c.start(ask{path: "/containers/" + id + "/" + path.Base(c.route.template), query: query}, id, wait) //nolint:bodyclose // relay closes it
	if err != nil {
		return err
	}
	return c.relay(resp, false)
}

// StartContainer starts a container that this door made, without a request of a client's.
// The container is judged and verified as for its own caller. One that runs already stays
// as it is. The error is a *policy.DeniedError if the container may not be started.
func (d *Proxy) StartContainer(ctx context.Context, id string) error {
	v, err := d.engine.max(ctx)
	if err != nil {
		return err
	}
	c := &call{Proxy: d, ctx: ctx, rules: d.opts.Policy(), version: v}
	resp, err := c.start(ask{method: http.MethodPost, path: "/containers/" + id + "/start"}, id, 0)
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

// start starts the container, or stops and starts it, once no other start of it goes on.
// It returns the engine's answer, which has no body. An answer that is an error is one.
func (c *call) start(a ask, id string, wait time.Duration) (*http.Response, error) {
	over, err := c.startLocks.Lock(c.ctx, id)
	if err != nil {
		return nil, err
	}
	defer over()
	waiting := c.ctx
	defer c.detach(makeTimeout + wait)() // verify what was started even if the client leaves
	v, err := c.engine.max(c.ctx)
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
	leaveMounts, err := c.starting(waiting, ct)
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
		return c.askForStart(a)
	}
	return c.startHeld(a, e, ct, v)
}

func (c *call) askForStart(a ask) (*http.Response, error) {
	resp, err := c.ask(a)
	if err == nil && resp.StatusCode >= 400 {
		return nil, failure(resp)
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
func (c *call) stopContainer() error {
	query, wait, err := c.startQuery()
	if err != nil {
		return err
	}
	id, err := c.containerID(c.name)
	if err != nil {
		return err
	}
	leave, err := c.act("stops "+id, maxStops)
	if err != nil {
		return err
	}
	defer leave()
	defer c.detach(makeTimeout + wait)()
	return c.end(ask{path: "/containers/" + id + "/stop", query: query}, id, true)
}

// startHeld starts a container as it was allowed, with the sources of its binds held
// until the engine has mounted them. It removes a container that is not as it was allowed.
func (c *call) startHeld(a ask, e effective, ct *container.InspectResponse, v version) (*http.Response, error) {
	if err := c.judged(c.stillAllowed(e, ct.HostConfig)); err != nil {
		return nil, err
	}
	release, err := c.hold(&e, ct)
	if err != nil {
		return nil, err
	}
	defer release()
	if err := c.judged(c.verifyStart(e, ct, v)); err != nil {
		return nil, err
	}
	resp, err := c.askForStart(a)
	if err != nil {
		if statusOf(err) == 0 { // the answer is lost, but the container may run
			defer c.detach(undoTimeout)()
			if err := c.verifyStarted(e, ct, v); err != nil {
				c.endUnfit(ct.ID, v, err)
			}
		}
		return nil, err
	}
	if err := c.judged(c.verifyStarted(e, ct, v)); err != nil {
		c.endUnfit(ct.ID, v, err)
		return nil, err
	}
	return resp, nil
}

// verifyStarted verifies a container that was just started. Before is what it was like
// then. A container that is gone already is fine.
func (c *call) verifyStarted(e effective, before *container.InspectResponse, v version) error {
	now, err := c.inspect(before.ID, v)
	if statusOf(err) == http.StatusNotFound {
		return nil
	}
	if err != nil {
		return err
	}
	if err := c.verifyStart(e, now, v); err != nil {
		return err
	}
	return c.verifyHeld(e, before, now, v)
}

// startQuery reads what a start, a restart or a stop may be told, and how long the container
// may take to end. An end that is waited for as long as it takes is bounded.
func (c *call) startQuery() (url.Values, time.Duration, error) {
	query, wait := url.Values{}, time.Duration(0)
	if keys := c.query.Get("detachKeys"); keys != "" {
		if err := detachKeys(keys); err != nil {
			return nil, 0, err
		}
		query.Set("detachKeys", keys)
	}
	if signal := c.query.Get("signal"); signal != "" {
		if !signalName.MatchString(signal) {
			return nil, 0, malformed("Invalid signal: " + shorten(signal))
		}
		query.Set("signal", signal)
	}
	if c.query.Get("t") != "" {
		n, err := c.number("t")
		if err != nil || n < -1 || n > maxStopSeconds {
			return nil, 0, malformed("the time to end is not a number of seconds")
		}
		if n < 0 {
			n = maxStopSeconds
		}
		query.Set("t", strconv.FormatInt(n, 10))
	}
	if path.Base(c.route.template) != "start" {
		wait = maxStopSeconds * time.Second
	}
	return query, wait, nil
}
