package lifecycle

import (
	"context"
	"fmt"
	"maps"
	"time"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/runtime"
)

// Ended answers the sandboxes whose end has come at now.
func (m *Manager) Ended(now time.Time) []Sandbox {
	m.mu.Lock()
	defer m.mu.Unlock()
	var ended []Sandbox
	for id, s := range m.slots {
		if s.failure != nil && now.Sub(s.failure.at) > failureKept {
			s.failure = nil
			m.freeLocked(id, s)
		}
		if s.record == nil || s.record.endsLocked().After(now) {
			continue
		}
		ended = append(ended, s.record.snapshotLocked(now))
	}
	return ended
}

// endsLocked is when the record ends; one that is in use doesn't idle out.
func (r *record) endsLocked() time.Time {
	if r.sb.Spec.IdleTTL > 0 && !r.busyLocked() {
		return earlier(r.sb.ExpiresAt, r.sb.LastUsedAt.Add(r.sb.Spec.IdleTTL))
	}
	return r.sb.ExpiresAt
}

// Collect removes a sandbox that has ended. It looks again under the key's lock,
// and answers false when the sandbox was replaced, renewed or removed since. A create
// that is under way isn't waited for: it removes what has ended itself.
func (m *Manager) Collect(ctx context.Context, sb Sandbox) (bool, error) {
	if err := m.available(); err != nil {
		return false, err
	}
	id := keyID{sb.Tenant, sb.Key}
	if f, err := m.hold(ctx, id, true); err != nil || f != nil {
		return false, err
	}
	defer m.drop(id)
	rec := m.recordOf(id)
	if rec == nil {
		return false, nil
	}
	if now := m.snapshot(rec); now.SessionID != sb.SessionID || now.Status != StatusExpired {
		return false, nil
	}
	return true, m.clear(ctx, id, rec)
}

// Orphans answers this instance's containers that no record knows and no create
// is making: what a create that failed could not remove. Those made at before or
// later are spared, and so are those whose labels make no sense, which can't be ours.
func (m *Manager) Orphans(ctx context.Context, before time.Time) ([]runtime.Container, error) {
	if err := m.available(); err != nil {
		return nil, err
	}
	// What is known, or on the way, now isn't made an orphan by its end while the
	// engine lists.
	m.mu.Lock()
	known, making := maps.Clone(m.containers), maps.Clone(m.making)
	m.mu.Unlock()
	var listed []runtime.Container
	err := m.call(ctx, "list", func(ctx context.Context) error {
		var err error
		listed, err = m.opts.Runtime.List(ctx, map[string]string{LabelOwner: m.opts.Owner})
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("list this instance's containers: %w", err)
	}
	before = before.Truncate(time.Second) // an engine may know no fractions
	m.mu.Lock()
	defer m.mu.Unlock()
	var orphans []runtime.Container
	for _, c := range m.opts.Sealer.Genuine(listed, func(id string) bool { _, ok := known[id]; return ok }) {
		_, wasKnown := known[c.ID]
		_, wasMaking := making[c.Labels[LabelSessionID]]
		if wasKnown || wasMaking || !c.CreatedAt.Before(before) || !m.orphanLocked(c) {
			continue
		}
		if _, err := sandboxFromLabels(c.Labels, nil); err == nil {
			orphans = append(orphans, c)
		}
	}
	return orphans, nil
}

func (m *Manager) orphanLocked(c runtime.Container) bool {
	_, known := m.containers[c.ID]
	_, making := m.making[c.Labels[LabelSessionID]]
	return !known && !making
}

// CollectOrphan removes a container that Orphans answered, unless it is known by
// now.
func (m *Manager) CollectOrphan(ctx context.Context, c runtime.Container) error {
	m.mu.Lock()
	orphan := m.orphanLocked(c)
	m.mu.Unlock()
	if !orphan {
		return nil
	}
	return m.remove(ctx, c.ID)
}

// SweepEngine has the engine's backend remove what a Create or a Remove that was cut
// short left behind and no list tells of, where the backend knows of such things. A
// failure is logged and left to the next sweep.
func (m *Manager) SweepEngine(ctx context.Context) {
	if m.available() == nil {
		m.sweepEngine(ctx)
	}
}

func (m *Manager) sweepEngine(ctx context.Context) {
	s, ok := m.opts.Runtime.(runtime.Sweeper)
	if !ok {
		return
	}
	if err := m.call(ctx, "sweep", s.Sweep); err != nil && ctx.Err() == nil {
		m.log.WarnContext(ctx, "engine_sweep_failed", "error", err)
	}
}

// CollectNetworks removes this instance's networks that the policy names no more
// and nobody uses, and those made for a policy that is gone. It answers how many.
func (m *Manager) CollectNetworks(ctx context.Context) (int, error) {
	return m.collectNetworks(ctx, func(name string) bool {
		for _, n := range m.opts.Policy().Networks() {
			if n.EngineNetwork == name {
				return true
			}
		}
		return false
	})
}

// collectNetworks removes this instance's unused networks but those to keep.
func (m *Manager) collectNetworks(ctx context.Context, keep func(name string) bool) (int, error) {
	nw, ok := m.opts.Runtime.(runtime.Networker)
	if !ok {
		return 0, nil
	}
	var listed []runtime.Network
	err := m.call(ctx, "networks", func(ctx context.Context) error {
		var err error
		listed, err = nw.Networks(ctx, map[string]string{LabelOwner: m.opts.Owner})
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("list this instance's networks: %w", err)
	}
	removed := 0
	for _, n := range listed {
		if keep(n.Name) || isObject(n.Labels) || !m.opts.Sealer.Valid(ObjectNetwork, n.ID, n.Labels) {
			continue
		}
		err := m.call(ctx, "remove_network", func(ctx context.Context) error { return nw.RemoveNetwork(ctx, n.Name) })
		switch {
		case err == nil:
			removed++
			m.forgetNetwork(n.Name)
		case !errdefs.IsFailedPrecondition(err): // one that is in use stays
			return removed, fmt.Errorf("remove network %s: %w", n.Name, err)
		}
	}
	return removed, nil
}
