package lifecycle

import (
	"context"
	"fmt"
	"maps"
	"time"

	"github.com/bermhq/berm/runtime"
)

// collector finds and removes what has ended, for the reaper.
type collector struct {
	registry *Registry
	engine   *engine
}

// Ended returns the sandboxes whose end has come at now.
func (c *collector) Ended(now time.Time) []Sandbox {
	r := c.registry
	r.mu.Lock()
	defer r.mu.Unlock()
	var ended []Sandbox
	for id, s := range r.slots {
		if s.failure != nil && now.Sub(s.failure.at) > failureKept {
			s.failure = nil
			r.freeLocked(id, s)
		}
		if s.record == nil || s.record.endsLocked().After(now) {
			continue
		}
		ended = append(ended, s.record.snapshotLocked(now))
	}
	return ended
}

// Collect removes a sandbox that has ended. It checks again under the key's lock, and returns
// false if the sandbox was replaced, renewed or removed. It doesn't wait for a create, which
// removes the ended sandbox itself.
func (c *collector) Collect(ctx context.Context, sb Sandbox) (bool, error) {
	r := c.registry
	if err := r.available(); err != nil {
		return false, err
	}
	unlock, pending, err := r.lockOrJoin(ctx, sb.keyID())
	if err != nil || pending != nil {
		return false, err
	}
	defer unlock()
	rec, now := r.recordOf(sb.keyID())
	if now.SessionID != sb.SessionID || now.Status != StatusExpired {
		return false, nil
	}
	return true, r.clear(ctx, sb.keyID(), rec)
}

// Orphans returns this instance's containers that no record has and no create is making, such as
// what a failed create couldn't remove. It spares those made at before or later, and those with
// malformed labels, which can't be this instance's.
func (c *collector) Orphans(ctx context.Context, before time.Time) ([]runtime.Container, error) {
	r := c.registry
	if err := r.available(); err != nil {
		return nil, err
	}
	// A container that is on record now may end while the engine lists. That makes it no orphan.
	r.mu.Lock()
	known, making := maps.Clone(r.containers), maps.Clone(r.making)
	r.mu.Unlock()
	listed, err := c.engine.list(ctx, c.engine.ownSelector())
	if err != nil {
		return nil, fmt.Errorf("list this instance's containers: %w", err)
	}
	before = before.Truncate(time.Second) // an engine may know no fractions
	r.mu.Lock()
	defer r.mu.Unlock()
	var orphans []runtime.Container
	for _, x := range r.opts.Sealer.Genuine(listed, func(id string) bool { _, ok := known[id]; return ok }) {
		_, wasKnown := known[x.ID]
		_, wasMaking := making[x.Labels[LabelSessionID]]
		if wasKnown || wasMaking || !x.CreatedAt.Before(before) || !r.orphanLocked(x) {
			continue
		}
		if _, err := sandboxFromLabels(x.Labels, nil); err == nil {
			orphans = append(orphans, x)
		}
	}
	return orphans, nil
}

// CollectOrphan removes a container that Orphans returned, unless it is on record by now.
func (c *collector) CollectOrphan(ctx context.Context, x runtime.Container) error {
	r := c.registry
	r.mu.Lock()
	orphan := r.orphanLocked(x)
	r.mu.Unlock()
	if !orphan {
		return nil
	}
	return c.engine.remove(ctx, x.ID)
}

// SweepEngine removes what a Create or a Remove that was cut short left in the engine and no
// list shows, if the backend supports that. It logs a failure; the next sweep tries again.
func (c *collector) SweepEngine(ctx context.Context) {
	if c.registry.available() == nil {
		c.engine.sweep(ctx)
	}
}

// CollectNetworks removes this instance's unused networks that the policy doesn't name. It
// returns how many.
func (c *collector) CollectNetworks(ctx context.Context) (int, error) {
	return c.engine.removeNetworks(ctx, func(name string) bool {
		for _, n := range c.registry.opts.Policy().Networks() {
			if n.EngineNetwork == name {
				return true
			}
		}
		return false
	})
}

// SweepQuotas undoes what is left of the limits of sandboxes that are gone.
func (c *collector) SweepQuotas(ctx context.Context) error {
	if c.registry.available() != nil {
		return nil
	}
	return c.registry.quotas.Sweep(ctx)
}
