package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"go.opentelemetry.io/otel/attribute"
	"golang.org/x/sync/errgroup"

	"github.com/bermhq/berm/runtime"
)

// Intervals and limits of Run.
const (
	probeEvery   = 5 * time.Second        // the engine's health
	retryEvery   = 500 * time.Millisecond // while the engine can't be used
	touchEvery   = time.Second            // last uses to the store
	closeTimeout = 5 * time.Second        // the clean-up at Run's end
)

// Run reconciles with the engine, then follows its events and stores last uses, until ctx ends.
// It retries while the engine can't be used. When it returns, no create is under way.
func (c *reconciler) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	defer func() {
		c.registry.close()
		wg.Wait()
		c.cleanUp(context.WithoutCancel(ctx))
	}()
	if err := c.engine.opts.Holder.Clean(); err != nil {
		c.engine.log.WarnContext(ctx, "holds_clean_failed", "error", err)
	}
	wg.Go(func() { c.touchLoop(ctx) })
	for {
		err := c.follow(ctx)
		if ctx.Err() != nil {
			return nil
		}
		c.engine.setDown(ctx, err)
		select {
		case <-time.After(retryEvery):
		case <-ctx.Done():
			return nil
		}
	}
}

// cleanUp stores last uses and removes unused networks at Run's end. The next start repeats what
// fails.
func (c *reconciler) cleanUp(ctx context.Context) {
	defer c.registry.cancel()
	ctx, cancel := context.WithTimeout(ctx, closeTimeout)
	defer cancel()
	c.writeUses(ctx)
	if c.engine.available() != nil {
		return
	}
	// A stopped container needs its network: one that is created again is another network.
	if containers, err := c.engine.objects(ctx, ObjectContainer); err != nil || len(containers) > 0 {
		return
	}
	if _, err := c.engine.removeNetworks(ctx, func(string) bool { return false }); err != nil {
		c.engine.log.WarnContext(ctx, "networks_clean_failed", "error", err)
	}
}

// follow subscribes to the events of the engine, reconciles, and applies the events until the
// engine can't be used any more.
func (c *reconciler) follow(ctx context.Context) error {
	info, err := c.engine.probe(ctx)
	if err != nil {
		return err
	}
	c.engine.mu.Lock()
	c.engine.info = info
	c.engine.mu.Unlock()
	g, ctx := errgroup.WithContext(ctx)
	var ready []chan struct{}
	watch := func(labels map[string]string, f func(runtime.Event)) {
		watching := make(chan struct{})
		ready = append(ready, watching)
		g.Go(func() error {
			err := c.engine.opts.Runtime.Watch(ctx, labels, sync.OnceFunc(func() { close(watching) }), f)
			if err == nil && ctx.Err() == nil {
				err = runtime.Unavailable(errors.New("the engine's event stream ended"))
			}
			return err
		})
	}
	watch(c.engine.ownSelector(), c.apply)
	if c.engine.opts.Settings.AdoptLegacy {
		watch(legacySelector(), func(e runtime.Event) {
			if _, owned := e.Labels[LabelOwner]; !owned { // else from the first watch, or another instance's
				c.apply(e)
			}
		})
	}
	g.Go(func() error {
		for _, watching := range ready {
			select {
			case <-watching:
			case <-ctx.Done():
				return nil
			}
		}
		if err := c.reconcile(ctx); err != nil {
			return fmt.Errorf("reconcile with the engine: %w", err)
		}
		c.engine.setUp(ctx)
		return c.probeLoop(ctx)
	})
	return g.Wait()
}

// probeLoop probes the engine until it fails to answer.
func (c *reconciler) probeLoop(ctx context.Context) error {
	tick := time.NewTicker(probeEvery)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil
		}
		if _, err := c.engine.probe(ctx); err != nil && ctx.Err() == nil {
			return err
		}
	}
}

// apply applies one event of the engine.
func (c *reconciler) apply(e runtime.Event) {
	switch e.Type {
	case runtime.EventExit, runtime.EventRemoved:
		c.registry.containerGone(e.ContainerID)
	case runtime.EventPaused:
		c.registry.containerIs(e.ContainerID, StatusRunning, StatusPaused)
	case runtime.EventResumed:
		c.registry.containerIs(e.ContainerID, StatusPaused, StatusRunning)
	}
}

// touchLoop stores last uses until ctx ends.
func (c *reconciler) touchLoop(ctx context.Context) {
	tick := time.NewTicker(touchEvery)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			c.writeUses(ctx)
		case <-ctx.Done():
			return
		}
	}
}

func (c *reconciler) writeUses(ctx context.Context) {
	if err := c.registry.writeUses(ctx, c.engine.opts.Store); err != nil {
		c.engine.log.WarnContext(ctx, "store_touch_failed", "error", err)
	}
}

// reconcile brings the records in step with the engine.
func (c *reconciler) reconcile(ctx context.Context) (err error) {
	r := c.registry
	ctx, span := r.tracer.Start(ctx, "reconcile")
	defer func() {
		if err != nil {
			failSpan(span, err)
		}
		span.End()
	}()
	if err := c.prepare(ctx); err != nil {
		return err
	}
	// Read the records before the engine lists. A container that gets its record in between may
	// be missing in the list.
	stored, err := r.opts.Store.Records(ctx)
	if err != nil {
		return &UnavailableError{Err: err}
	}
	r.mu.Lock()
	before := maps.Clone(r.containers)
	r.reconciling = true
	r.mu.Unlock()
	defer func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.reconciling = false
		r.forgetEndedLocked()
	}()
	all, err := c.inspectAll(ctx, func(id string) bool {
		_, known := before[id]
		return known || slices.ContainsFunc(stored, func(sb Sandbox) bool { return sb.ContainerID == id })
	})
	if err != nil {
		return err
	}
	keep, surplus := settle(all)
	c.removeSurplus(ctx, surplus)
	// Only the first reconciliation takes over the containers of an earlier process. Later, a
	// container without a record is from a failed create, and the sweep removes it.
	if c.engine.reconciled() != nil {
		if err := c.takeOver(ctx, keep, stored); err != nil {
			return err
		}
		c.removeOutdated(ctx, keep)
	}
	c.refresh(before, all)
	span.SetAttributes(attribute.Int("berm.sandboxes", len(keep)), attribute.Int("berm.removed", len(surplus)))
	r.log.InfoContext(ctx, "reconciled", "sandboxes", len(keep), "removed", len(surplus))
	return nil
}

// prepare cleans the engine up and creates the policy's networks.
func (c *reconciler) prepare(ctx context.Context) error {
	// First, because leftovers of a network or a container may be in the way of a new one.
	c.engine.sweep(ctx)
	if err := c.engine.sealEarlier(ctx); err != nil {
		return err
	}
	for _, n := range c.engine.opts.Policy().Networks() {
		err := c.engine.ensureNetwork(ctx, n.EngineNetwork)
		if err != nil && (errdefs.IsUnavailable(err) || ctx.Err() != nil) {
			return err
		}
		if err != nil { // sandboxes on other networks still work
			c.engine.log.WarnContext(ctx, "network_not_made", "network", n.EngineNetwork, "error", err)
		}
	}
	return nil
}

// removeOutdated removes containers whose agent is of another version. They count as stopped, and
// their processes mustn't go on unseen.
func (c *reconciler) removeOutdated(ctx context.Context, keep []found) {
	for _, f := range keep {
		if statusOf(f.container.State) == StatusStopped || statusIn(f.container) != StatusStopped {
			continue
		}
		c.engine.log.WarnContext(ctx, "sandbox_outdated", sandboxAttrs(f.sandbox)...)
		c.remove(ctx, f)
	}
}

// removeSurplus removes containers that settle didn't keep, unless they are in use by now.
func (c *reconciler) removeSurplus(ctx context.Context, surplus []found) {
	for _, f := range surplus {
		c.registry.mu.Lock()
		orphan := c.registry.orphanLocked(f.container)
		c.registry.mu.Unlock()
		if !orphan {
			continue
		}
		c.engine.log.WarnContext(ctx, "sandbox_duplicate", sandboxAttrs(f.sandbox)...)
		c.remove(ctx, f)
	}
}

// remove removes a container. It logs a failure.
func (c *reconciler) remove(ctx context.Context, f found) {
	if err := c.engine.remove(ctx, f.container.ID); err != nil {
		c.engine.log.WarnContext(ctx, "sandbox_clean_failed", append(sandboxAttrs(f.sandbox), "error", err)...)
	}
}

// refresh updates the status of the records from the engine's list. Of keys that an operation
// holds, it updates only those whose container has ended.
func (c *reconciler) refresh(before map[string]keyID, all []found) {
	r := c.registry
	r.mu.Lock()
	defer r.mu.Unlock()
	update := func(id keyID, containerID string, status Status) {
		s := r.slots[id]
		if s == nil || s.record == nil || s.record.sb.ContainerID != containerID {
			return
		}
		unlock, free := r.keys.TryLock(id)
		if free {
			defer unlock()
		}
		if free || status == StatusStopped { // a dead container stays dead
			s.record.sb.Status = status
			if status == StatusStopped {
				r.loseLocked(s.record)
			}
		}
	}
	for _, f := range all {
		// If the record is newer than the list, the list may show the container before its start.
		if _, known := before[f.container.ID]; known && f.container.State != runtime.StateCreated {
			update(f.sandbox.keyID(), f.container.ID, r.statusLocked(f.container))
		}
		delete(before, f.container.ID)
	}
	for containerID, id := range before {
		update(id, containerID, StatusStopped)
	}
}
