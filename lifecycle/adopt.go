package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sync/errgroup"

	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/runtime"
)

// reconciler keeps the records in step with the engine.
type reconciler struct {
	registry *Registry
	engine   *engine
}

// found is a container of this instance, with the sandbox that its labels describe.
type found struct {
	container runtime.Container
	sandbox   Sandbox
	adopted   bool
}

// inspectAll lists the containers of this instance and inspects each. It logs and leaves out
// those with malformed labels. Known reports whether a record has a container's ID.
func (c *reconciler) inspectAll(ctx context.Context, known func(id string) bool) ([]found, error) {
	listed, err := c.engine.list(ctx, c.engine.ownSelector())
	if err != nil {
		return nil, err
	}
	listed = slices.DeleteFunc(c.engine.opts.Sealer.Genuine(listed, known), func(x runtime.Container) bool { return isObject(x.Labels) })
	ours := len(listed)
	var legacy policy.Spec
	if c.engine.opts.Settings.AdoptLegacy {
		old, err := c.engine.list(ctx, legacySelector())
		if err != nil {
			return nil, err
		}
		for _, x := range old {
			if _, owned := x.Labels[LabelOwner]; !owned { // else it is in the first list, or another instance's
				listed = append(listed, x)
			}
		}
		v := c.engine.opts.Policy().Sandbox(policy.Request{})
		if err := v.Err(); err != nil {
			return nil, fmt.Errorf("the policy refuses what adopted sandboxes need: %w", err)
		}
		legacy = v.Spec
	}
	results := make([]*found, len(listed))
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(8)
	for i, x := range listed {
		g.Go(func() (err error) {
			var spec *policy.Spec
			if i >= ours {
				spec = &legacy
			}
			results[i], err = c.inspect(gctx, x.ID, spec)
			return err
		})
	}
	if err := g.Wait(); err != nil {
		return nil, err
	}
	var all []found
	for _, f := range results {
		if f != nil {
			all = append(all, *f)
		}
	}
	return all, nil
}

// inspect inspects a container. Legacy is the spec of one that the old service made, else nil.
// It returns nil if the container is gone or has malformed labels.
func (c *reconciler) inspect(ctx context.Context, containerID string, legacy *policy.Spec) (*found, error) {
	full, err := c.engine.inspect(ctx, containerID)
	if errdefs.IsNotFound(err) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	f := &found{container: full, adopted: legacy != nil}
	if legacy == nil {
		f.sandbox, err = sandboxFromLabels(full.Labels, full.Env)
	} else {
		lacks, ierr := c.engine.imageLacks(ctx, full.Image, func(name string) bool { return slices.Contains(legacyLabels, name) })
		if ierr != nil {
			return nil, ierr
		}
		f.sandbox, err = sandboxFromLegacy(full.Labels, full.CreatedAt, *legacy)
		if !lacks {
			err = errors.New("the image has labels of the old service, or is gone")
		}
	}
	if err != nil {
		c.engine.log.WarnContext(ctx, "sandbox_labels_malformed", "container_id", full.ID, "error", err)
		return nil, nil
	}
	f.sandbox.ContainerID = full.ID
	return f, nil
}

// settle decides which containers to keep: the newest of each key. It keeps none that was never
// started.
func settle(all []found) (keep, surplus []found) {
	newest := map[keyID]found{}
	for _, f := range all {
		id := f.sandbox.keyID()
		if f.container.State == runtime.StateCreated {
			surplus = append(surplus, f)
			continue
		}
		if other, ok := newest[id]; ok {
			if other.sandbox.CreatedAt.After(f.sandbox.CreatedAt) {
				f, other = other, f
			}
			surplus = append(surplus, other)
		}
		newest[id] = f
	}
	return slices.Collect(maps.Values(newest)), surplus
}

// takeOver makes records of the sandboxes that an earlier process left in the engine and in the
// store.
func (c *reconciler) takeOver(ctx context.Context, keep []found, stored []Sandbox) error {
	store := c.engine.opts.Store
	for _, r := range c.takeContainers(keep, stored) {
		if err := store.Put(ctx, r); err != nil {
			return &UnavailableError{Err: err}
		}
	}
	if err := store.Delete(ctx, c.takeStored(stored)...); err != nil {
		return &UnavailableError{Err: err}
	}
	if err := c.resume(ctx); err != nil {
		return err
	}
	if err := store.TookOver(ctx); err != nil {
		return &UnavailableError{Err: err}
	}
	return nil
}

// takeContainers makes records of the containers. It returns the sandboxes to store, because the
// store lacks them or has them from a backup: at the next start, Store.Fresh is false. It leaves
// out adopted ones, because the request that made them isn't known.
func (c *reconciler) takeContainers(keep []found, stored []Sandbox) (unknown []Sandbox) {
	bySession := make(map[string]Sandbox, len(stored))
	for _, r := range stored {
		bySession[r.SessionID] = r
	}
	opts := c.engine.opts
	now := time.Now().UTC()
	c.registry.mu.Lock()
	defer c.registry.mu.Unlock()
	for _, f := range keep {
		sb := f.sandbox
		sb.Status = c.registry.statusLocked(f.container)
		sb.Endpoint.IP = f.container.IP
		if !f.adopted {
			sb.Endpoint.Port = opts.Settings.AgentPort
		}
		r, known := bySession[sb.SessionID]
		if known {
			sb.ExpiresAt, sb.LastUsedAt = r.ExpiresAt, r.LastUsedAt
			sb.Metadata, sb.Overridden, sb.Enforcement = r.Metadata, r.Overridden, r.Enforcement
		}
		old := known && r.LastUsedAt.IsZero() // it is from a backup
		if old || !known && (!f.adopted || opts.Store.Fresh()) {
			// Add one TTL, since the store may have lost a renewal.
			if more := earlier(now.Add(sb.Spec.TTL), sb.Deadline); more.After(sb.ExpiresAt) {
				sb.ExpiresAt = more
			}
			sb.LastUsedAt = now
		}
		if old || !known && !f.adopted {
			unknown = append(unknown, sb)
		}
		if sb.Metadata == nil {
			sb.Metadata = map[string]string{}
		}
		rec := &record{sb: sb, adopted: f.adopted}
		c.registry.publishLocked(rec)
		if sb.Status == StatusRunning || sb.Status == StatusPaused {
			rec.watcher.foundLocked()
		}
	}
	return unknown
}

// takeStored makes records of sandboxes that only the store has. Their next use makes the
// containers. It returns the sessions that the store can forget: those that have ended or were
// replaced, and those from a backup, since they may have been deleted after it.
func (c *reconciler) takeStored(stored []Sandbox) (gone []string) {
	r := c.registry
	now := time.Now()
	slices.SortFunc(stored, func(a, b Sandbox) int { return b.CreatedAt.Compare(a.CreatedAt) }) // the newest first
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, x := range stored {
		rec := &record{sb: x, quotas: r.quotas}
		rec.sb.Status, rec.sb.Endpoint, rec.sb.WorkspaceInode = StatusStopped, Endpoint{Port: r.opts.Settings.AgentPort}, ""
		if x.Metadata == nil {
			rec.sb.Metadata = map[string]string{}
		}
		if s := r.slots[rec.sb.keyID()]; s == nil && !x.LastUsedAt.IsZero() && !rec.snapshotLocked(now).Expired(now) {
			r.publishLocked(rec)
		} else if s == nil || s.record.sb.SessionID != x.SessionID {
			gone = append(gone, x.SessionID)
		}
	}
	return gone
}

// resume attaches the sandboxes of an earlier process to the quotas. It fails only if ctx ends.
// Then some sandboxes aren't attached, and the sweep would remove their limits.
func (c *reconciler) resume(ctx context.Context) error {
	t := c.registry.records
	for _, r := range t.all() {
		sb := t.snapshot(r)
		s := subject(sb)
		s.Resumed = true
		inode, err := t.quotas.Attach(ctx, s)
		if ctx.Err() != nil {
			break
		}
		if err != nil { // the others can still be attached
			c.engine.log.WarnContext(ctx, "sandbox_quota_unsure", append(sandboxAttrs(sb), "error", err)...)
		}
		if inode != "" {
			t.mu.Lock()
			r.sb.WorkspaceInode = inode
			t.mu.Unlock()
		}
	}
	return context.Cause(ctx)
}
