package engineapi

import (
	"context"
	"net/http"
	"net/url"
	"path"
	"strconv"
	"time"

	"github.com/docker/docker/api/types/container"

	"github.com/bermhq/berm/policy"
)

// startContainer starts a container, or ends and starts it, after another look: what was
// allowed must still be what is there, and its directories where they were.
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
	over, err := c.turns.take(c.ctx, id)
	if err != nil {
		return err
	}
	defer over()
	defer c.detach(makeTimeout + wait)() // what is begun is verified, whoever waits for it
	v, err := c.engine.max(c.ctx)
	if err != nil {
		return err
	}
	ct, err := c.inspect(id, v)
	if err != nil {
		return err
	}
	if err := expired(ct); err != nil {
		return err
	}
	leaveMounts, err := c.starting(ct)
	if err != nil {
		return err
	}
	defer leaveMounts()
	e, err := effectiveOf(ct)
	if err != nil {
		return err
	}
	a := ask{path: "/containers/" + id + "/" + path.Base(c.route.template), query: query}
	if e.Audit {
		if err := c.allow([]policy.Reason{{Rule: "verify.start", Message: "the container was denied, and made in mode audit", Allowed: "a new container"}}); err != nil {
			return err
		}
		return c.forward(a, false)
	}
	if err := c.judged(c.verifyStart(e, ct, v)); err != nil {
		return err
	}
	return c.startStanding(a, e, ct, v)
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
	return c.forward(ask{path: "/containers/" + id + "/stop", query: query}, false)
}

// startStanding starts a container between two looks at its directories. What the engine
// has mounted that wasn't judged doesn't run on.
func (c *call) startStanding(a ask, e effective, ct *container.InspectResponse, v version) error {
	release, err := c.claim(ct.ID, ct.ID, e.Binds)
	if err != nil {
		return err
	}
	defer release()
	for _, m := range e.Binds {
		if now, err := c.rules.EnginePath(m.Local); err != nil || now != m.Source {
			return exchanged(m)
		}
	}
	if err := c.judged(c.stillAllowed(e, ct.HostConfig)); err != nil {
		return err
	}
	places, err := stand(e.Binds)
	if err != nil {
		return err
	}
	defer places.close()
	resp, err := c.ask(a)
	if err != nil {
		c.stopUnseen(ct.ID, e, places, v)
		return err
	}
	if resp.StatusCode >= 400 {
		return failure(resp)
	}
	if err := c.judged(c.verifyStarted(ct.ID, e, places, v)); err != nil {
		_ = resp.Body.Close()
		c.removeUnfit(ct.ID, v)
		return err
	}
	return c.relay(resp, false)
}

// verifyStarted looks at a container that was just started, unless it is gone already.
func (c *call) verifyStarted(id string, e effective, places *standing, v version) error {
	if err := places.same(); err != nil {
		return err
	}
	ct, err := c.inspect(id, v)
	if statusOf(err) == http.StatusNotFound {
		return nil
	}
	if err != nil {
		return err
	}
	return c.verifyStart(e, ct, v)
}

// stopUnseen is for a start whose answer was lost: the container may run all the same.
func (c *call) stopUnseen(id string, e effective, places *standing, v version) {
	defer c.detach(undoTimeout)()
	if err := c.verifyStarted(id, e, places, v); err != nil {
		c.removeUnfit(id, v)
	}
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
