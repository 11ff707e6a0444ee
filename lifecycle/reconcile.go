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

	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/runtime"
)

// Run's own rhythm.
const (
	probeEvery   = 5 * time.Second // the engine's health
	probeTimeout = 4 * time.Second
	retryEvery   = 500 * time.Millisecond // while the engine is away
	touchEvery   = time.Second            // last uses to the store
	drainTimeout = 30 * time.Second       // creates under way when Run ends
	closeTimeout = 5 * time.Second        // tidying up after that
)

// Run reconciles with the engine, then follows its events and writes last uses
// down, until ctx ends. A lost engine is no error: Run goes on trying. When it
// returns, no create is under way any more.
func (m *Manager) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	defer func() {
		m.mu.Lock()
		m.closing = true
		m.mu.Unlock()
		m.stopTending()
		m.drain()
		wg.Wait()
		m.tenders.Wait()
		m.close(context.WithoutCancel(ctx))
	}()
	if err := m.opts.Holder.Clean(); err != nil {
		m.log.WarnContext(ctx, "holds_clean_failed", "error", err)
	}
	wg.Go(func() { m.touchLoop(ctx) })
	for {
		err := m.follow(ctx)
		if ctx.Err() != nil {
			return nil
		}
		m.setDown(ctx, err)
		select {
		case <-time.After(retryEvery):
		case <-ctx.Done():
			return nil
		}
	}
}

// close does what is left to do once nothing is under way any more. What fails here
// is made up for by the next start.
func (m *Manager) close(ctx context.Context) {
	defer m.cancel()
	ctx, cancel := context.WithTimeout(ctx, closeTimeout)
	defer cancel()
	m.writeUses(ctx)
	m.mu.Lock()
	down := m.down
	m.mu.Unlock()
	if down != nil || m.hasObjects(ctx) {
		return // a stopped container's network would be another one when it is made again
	}
	if _, err := m.collectNetworks(ctx, func(string) bool { return false }); err != nil {
		m.log.WarnContext(ctx, "networks_clean_failed", "error", err)
	}
}

// drain waits for the creates under way, and cuts off those that take too long, or
// wait for images.
func (m *Manager) drain() {
	m.mu.Lock()
	for _, s := range m.slots {
		if s.flight != nil {
			s.flight.giveUp(errClosing)
		}
	}
	m.mu.Unlock()
	done := make(chan struct{})
	go func() { m.wg.Wait(); close(done) }()
	select {
	case <-done:
	case <-time.After(drainTimeout):
		m.cancel()
		<-done
	}
}

// follow is one stretch of a reachable engine: subscribe, reconcile, then apply
// what happens, until the engine goes away.
func (m *Manager) follow(ctx context.Context) error {
	info, err := m.probe(ctx)
	if err != nil {
		return err
	}
	m.mu.Lock()
	m.info = info
	m.mu.Unlock()
	g, ctx := errgroup.WithContext(ctx)
	var ready []chan struct{}
	watch := func(labels map[string]string, f func(runtime.Event)) {
		w, ok := m.opts.Runtime.(runtime.Watcher)
		if !ok {
			return
		}
		watching := make(chan struct{})
		ready = append(ready, watching)
		g.Go(func() error {
			err := w.Watch(ctx, labels, sync.OnceFunc(func() { close(watching) }), f)
			if err == nil && ctx.Err() == nil {
				err = errors.New("the engine's event stream ended")
			}
			return err
		})
	}
	watch(map[string]string{LabelOwner: m.opts.Owner}, m.apply)
	if m.opts.Settings.AdoptLegacy {
		watch(legacySelector(), func(e runtime.Event) {
			if _, owned := e.Labels[LabelOwner]; !owned { // else the first watch tells it, or it isn't ours
				m.apply(e)
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
		if err := m.reconcile(ctx); err != nil {
			return fmt.Errorf("reconcile with the engine: %w", err)
		}
		m.setUp(ctx)
		return m.probeLoop(ctx)
	})
	return g.Wait()
}

// probeLoop asks after the engine's health until it is gone.
func (m *Manager) probeLoop(ctx context.Context) error {
	tick := time.NewTicker(probeEvery)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil
		}
		if _, err := m.probe(ctx); err != nil && ctx.Err() == nil {
			return err
		}
	}
}

func (m *Manager) probe(ctx context.Context) (info runtime.Info, err error) {
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	err = m.call(ctx, "info", func(ctx context.Context) error {
		info, err = m.opts.Runtime.Info(ctx)
		return err
	})
	return info, err
}

func (m *Manager) setDown(ctx context.Context, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.down == nil || m.down.Error() != err.Error() {
		m.log.WarnContext(ctx, "engine_unavailable", "error", err)
	}
	m.down = err
	clear(m.networks) // another engine may come back
	m.metrics.available.Set(0)
}

func (m *Manager) setUp(ctx context.Context) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.down, m.known = nil, true
	m.metrics.available.Set(1)
	m.log.InfoContext(ctx, "engine_available", "backend", m.info.Backend, "version", m.info.Version)
}

// apply takes one event of the engine's.
func (m *Manager) apply(e runtime.Event) {
	switch e.Type {
	case runtime.EventExit, runtime.EventRemoved:
		m.containerGone(e.ContainerID)
	case runtime.EventPaused:
		m.containerIs(e.ContainerID, StatusRunning, StatusPaused)
	case runtime.EventResumed:
		m.containerIs(e.ContainerID, StatusPaused, StatusRunning)
	}
}

// containerGone notes that a container runs no more.
func (m *Manager) containerGone(containerID string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if id, ok := m.containers[containerID]; ok {
		m.slots[id].record.sb.Status = StatusStopped
		m.loseLocked(m.slots[id].record)
	}
	if len(m.making) > 0 || m.reconciling { // who listed it alive is to know better
		m.ended[containerID] = struct{}{}
	}
}

// forgetEndedLocked drops the news of containers that nobody will ask about.
func (m *Manager) forgetEndedLocked() {
	if len(m.making) == 0 && !m.reconciling {
		clear(m.ended)
	}
}

func (m *Manager) containerIs(containerID string, from, to Status) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if id, ok := m.containers[containerID]; ok {
		if r := m.slots[id].record; r.sb.Status == from {
			r.sb.Status = to
		}
	}
}

// found is a container of ours with what its labels tell.
type found struct {
	container runtime.Container
	sandbox   Sandbox
	adopted   bool
}

// reconcile makes the records agree with what the engine has.
func (m *Manager) reconcile(ctx context.Context) (err error) {
	ctx, span := m.tracer.Start(ctx, "reconcile")
	defer func() {
		if err != nil {
			failSpan(span, err)
		}
		span.End()
	}()
	// First, as what was left of a network or a container may be in the way of the new.
	m.sweepEngine(ctx)
	if err := m.sealEarlier(ctx); err != nil {
		return err
	}
	pol := m.opts.Policy()
	for _, n := range pol.Networks() {
		err := m.ensureNetwork(ctx, n.EngineNetwork)
		if err != nil && (errdefs.IsUnavailable(err) || ctx.Err() != nil) {
			return err
		}
		if err != nil { // no reason to leave all other sandboxes alone, and the ended ones alive
			m.log.WarnContext(ctx, "network_not_made", "network", n.EngineNetwork, "error", err)
		}
	}
	// What is known is noted before the engine lists: what is put meanwhile belongs
	// to a container that may not be in the list.
	stored, err := m.opts.Store.Records(ctx)
	if err != nil {
		return &UnavailableError{Err: err}
	}
	m.mu.Lock()
	before := maps.Clone(m.containers)
	m.reconciling = true
	m.mu.Unlock()
	defer func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		m.reconciling = false
		m.forgetEndedLocked()
	}()
	all, err := m.inspectAll(ctx, pol, func(id string) bool {
		_, known := before[id]
		return known || slices.ContainsFunc(stored, func(r Record) bool { return r.ContainerID == id })
	})
	if err != nil {
		return err
	}
	keep, surplus := settle(all)
	for _, f := range surplus {
		m.mu.Lock()
		_, busy := m.making[f.sandbox.SessionID]
		_, known := m.containers[f.container.ID]
		m.mu.Unlock()
		if busy || known {
			continue
		}
		m.log.WarnContext(ctx, "sandbox_duplicate", sandboxAttrs(f.sandbox)...)
		if err := m.remove(ctx, f.container.ID); err != nil {
			m.log.WarnContext(ctx, "sandbox_clean_failed", append(sandboxAttrs(f.sandbox), "error", err)...)
		}
	}
	// What another process left is taken over once, at the start. Later, memory knows
	// best: what it doesn't know is what a failed create left, and the sweep's.
	if !m.tookOver {
		for _, r := range m.takeOver(keep, stored) {
			if err := m.opts.Store.Put(ctx, r); err != nil {
				return &UnavailableError{Err: err}
			}
		}
		gone := m.takeBack(stored)
		if err := m.opts.Store.Delete(ctx, gone...); err != nil {
			return &UnavailableError{Err: err}
		}
		if err := m.resume(ctx); err != nil {
			return err
		}
		if err := m.opts.Store.TookOver(ctx); err != nil {
			return &UnavailableError{Err: err}
		}
		m.tookOver = true
	}
	m.refresh(before, all)
	span.SetAttributes(attribute.Int("berm.sandboxes", len(keep)), attribute.Int("berm.removed", len(surplus)))
	m.log.InfoContext(ctx, "reconciled", "sandboxes", len(keep), "removed", len(surplus))
	return nil
}

// inspectAll lists our containers and looks at each. Those with labels that make
// no sense are reported and left alone. Known reports whether a record has an ID.
func (m *Manager) inspectAll(ctx context.Context, pol *policy.Policy, known func(id string) bool) ([]found, error) {
	var listed []runtime.Container
	list := func(selector map[string]string) error {
		return m.call(ctx, "list", func(ctx context.Context) error {
			cs, err := m.opts.Runtime.List(ctx, selector)
			listed = append(listed, cs...)
			return err
		})
	}
	if err := list(map[string]string{LabelOwner: m.opts.Owner}); err != nil {
		return nil, err
	}
	listed = slices.DeleteFunc(m.opts.Sealer.Genuine(listed, known), func(c runtime.Container) bool { return isObject(c.Labels) })
	ours := len(listed)
	var legacy policy.Spec
	if m.opts.Settings.AdoptLegacy {
		if err := list(legacySelector()); err != nil {
			return nil, err
		}
		v := pol.Sandbox(policy.Request{})
		if err := v.Err(); err != nil {
			return nil, fmt.Errorf("the policy refuses what adopted sandboxes need: %w", err)
		}
		legacy = v.Spec
	}
	results := make([]*found, len(listed))
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(8)
	for i, c := range listed {
		if _, owned := c.Labels[LabelOwner]; i >= ours && owned {
			continue // in the first list already, or another instance's
		}
		g.Go(func() error {
			full := c
			err := m.call(gctx, "inspect", func(ctx context.Context) error {
				var err error
				full, err = m.opts.Runtime.Inspect(ctx, c.ID)
				return err
			})
			if errdefs.IsNotFound(err) {
				return nil // gone since it was listed
			}
			if err != nil {
				return err
			}
			f := &found{container: full, adopted: i >= ours}
			switch {
			case f.adopted && !m.imageLacks(gctx, full.Image, func(name string) bool { return slices.Contains(legacyLabels, name) }):
				err = errors.New("the image has labels of the old service, or is gone")
			case f.adopted:
				f.sandbox, err = sandboxFromLegacy(full.Labels, full.CreatedAt, legacy)
			default:
				f.sandbox, err = sandboxFromLabels(full.Labels, full.Env)
			}
			f.sandbox.ContainerID = full.ID
			if err != nil {
				m.log.WarnContext(ctx, "sandbox_labels_malformed", "container_id", full.ID, "error", err)
				return nil
			}
			results[i] = f
			return nil
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

// settle decides which containers stay: of several for one key the newest, and
// none that was never started.
func settle(all []found) (keep, surplus []found) {
	newest := map[keyID]found{}
	for _, f := range all {
		id := keyID{f.sandbox.Tenant, f.sandbox.Key}
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

// takeOver makes records of the containers that are there, and answers what the
// store is to know of those that it doesn't, or that it knows from a backup: the next start
// finds it no longer fresh. Adopted ones aren't among them, as what they were made of isn't known.
func (m *Manager) takeOver(keep []found, stored []Record) (unknown []Record) {
	bySession := make(map[string]Record, len(stored))
	for _, r := range stored {
		bySession[r.SessionID] = r
	}
	now := time.Now().UTC()
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, f := range keep {
		sb := f.sandbox
		sb.Status = m.statusLocked(f.container)
		sb.Endpoint.IP = f.container.IP
		if !f.adopted {
			sb.Endpoint.Port = m.opts.Settings.AgentPort
		}
		r, known := bySession[sb.SessionID]
		if known {
			sb.ExpiresAt, sb.LastUsedAt = r.ExpiresAt, r.LastUsedAt
			sb.Metadata, sb.Overridden, sb.Enforcement = r.Metadata, r.Overridden, r.Enforcement
		}
		old := known && r.LastUsedAt.IsZero() // a backup's
		if old || !known && (!f.adopted || m.opts.Store.Fresh()) {
			// What it was renewed to is lost, if it wasn't in a create that was cut
			// off: one more TTL.
			if more := earlier(now.Add(sb.Spec.TTL), sb.Deadline); more.After(sb.ExpiresAt) {
				sb.ExpiresAt = more
			}
			sb.LastUsedAt = now
		}
		if old || !known && !f.adopted {
			unknown = append(unknown, storeRecord(sb))
		}
		if sb.Metadata == nil {
			sb.Metadata = map[string]string{}
		}
		rec := &record{sb: sb, adopted: f.adopted, stale: true}
		m.publishLocked(keyID{sb.Tenant, sb.Key}, rec)
		if m.insider != nil && (sb.Status == StatusRunning || sb.Status == StatusPaused) {
			rec.inside.unsure = true // commands and processes of an earlier time may run in it
			m.tendLocked(rec)
		}
	}
	return unknown
}

// takeBack makes records of what only the store still knows, to be made again when
// it is used, and answers the sessions that it may forget: the ended, the replaced, and
// those of a backup, which may have been deleted since.
func (m *Manager) takeBack(stored []Record) (gone []string) {
	now := time.Now()
	slices.SortFunc(stored, func(a, b Record) int { return b.CreatedAt.Compare(a.CreatedAt) }) // the newest first
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, r := range stored {
		id := keyID{r.Tenant, r.Key}
		rec := &record{sb: sandboxFromStore(r, m.opts.Settings.AgentPort)}
		if s := m.slots[id]; s == nil && !r.LastUsedAt.IsZero() && !rec.snapshotLocked(now).Expired(now) {
			m.publishLocked(id, rec)
		} else if s == nil || s.record.sb.SessionID != r.SessionID {
			gone = append(gone, r.SessionID)
		}
	}
	return gone
}

// refresh brings the records' states up to what the engine has. Of keys that an
// operation holds right now, only the deaths are told.
func (m *Manager) refresh(before map[string]keyID, all []found) {
	m.mu.Lock()
	defer m.mu.Unlock()
	update := func(id keyID, containerID string, status Status) {
		s := m.slots[id]
		if s == nil || s.record == nil || s.record.sb.ContainerID != containerID {
			return
		}
		if s.busy == nil || status == StatusStopped { // nothing revives a dead container
			s.record.sb.Status = status
			if status == StatusStopped {
				m.loseLocked(s.record)
			}
		}
	}
	for _, f := range all {
		delete(before, f.container.ID)
		update(keyID{f.sandbox.Tenant, f.sandbox.Key}, f.container.ID, m.statusLocked(f.container))
	}
	for containerID, id := range before {
		update(id, containerID, StatusStopped)
	}
}

// statusLocked is a container's state, as far as the news goes.
func (m *Manager) statusLocked(c runtime.Container) Status {
	if _, ended := m.ended[c.ID]; ended {
		return StatusStopped
	}
	return statusOf(c.State)
}

func statusOf(s runtime.State) Status {
	switch s {
	case runtime.StateRunning:
		return StatusRunning
	case runtime.StatePaused:
		return StatusPaused
	default:
		return StatusStopped
	}
}

// EnsureNetwork makes one of the policy's networks, by the engine's name, unless it is
// there. The error is an *UnavailableError while the engine is away.
func (m *Manager) EnsureNetwork(ctx context.Context, name string) error {
	if err := m.available(); err != nil {
		return err
	}
	return m.ensureNetwork(ctx, name)
}

// ensureNetwork makes an engine network, once for each engine that comes up.
func (m *Manager) ensureNetwork(ctx context.Context, name string) error {
	if name == "" {
		return nil
	}
	m.mu.Lock()
	_, there := m.networks[name]
	m.mu.Unlock()
	if there {
		return nil
	}
	n := runtime.Network{Name: name, Isolated: true}
	for _, rule := range m.opts.Policy().Networks() {
		if rule.EngineNetwork == name {
			n.Internal, n.Isolated, n.External = rule.Internal, rule.Isolated, rule.External
		}
	}
	n.Labels = m.opts.Sealer.Seal(ObjectNetwork, m.withLabels(map[string]string{LabelOwner: m.opts.Owner}))
	err := m.call(ctx, "ensure_network", func(ctx context.Context) error { return m.opts.Runtime.EnsureNetwork(ctx, n) })
	if err == nil {
		err = m.checkNetwork(ctx, n)
	}
	if err != nil {
		return fmt.Errorf("network %s: %w", name, err)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.networks[name] = struct{}{}
	return nil
}

// checkNetwork refuses a network that this instance didn't make, unless the policy says that
// the operator made it. An engine that can't list networks has no others.
func (m *Manager) checkNetwork(ctx context.Context, want runtime.Network) error {
	networks, ok := m.opts.Runtime.(runtime.Networker)
	if !ok {
		return nil
	}
	var list []runtime.Network
	err := m.call(ctx, "networks", func(ctx context.Context) (err error) {
		list, err = networks.Networks(ctx, nil)
		return err
	})
	if err != nil {
		return err
	}
	for _, n := range list {
		if n.Name == want.Name && !isObject(n.Labels) && (want.External || m.opts.Sealer.Valid(ObjectNetwork, n.ID, n.Labels)) {
			return nil
		}
	}
	return runtime.Precondition("the engine has a network of this name that isn't Berm's: remove or rename it, name another in the policy's engine_network, or set external if an operator made it for Berm")
}

// forgetNetwork has a network made sure of again.
func (m *Manager) forgetNetwork(name string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.networks, name)
}

// touchLoop writes last uses down while there are any.
func (m *Manager) touchLoop(ctx context.Context) {
	tick := time.NewTicker(touchEvery)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			m.writeUses(ctx)
		case <-ctx.Done():
			return
		}
	}
}

func (m *Manager) writeUses(ctx context.Context) {
	used := map[string]time.Time{}
	now := time.Now().UTC()
	m.mu.Lock()
	for _, s := range m.slots {
		if r := s.record; r != nil && (r.stale || r.busyLocked()) {
			if r.busyLocked() {
				r.sb.LastUsedAt = now
			}
			used[r.sb.SessionID] = r.sb.LastUsedAt
			r.stale = false
		}
	}
	m.mu.Unlock()
	if len(used) == 0 {
		return
	}
	err := m.opts.Store.Touch(ctx, used)
	if err == nil {
		return
	}
	m.log.WarnContext(ctx, "store_touch_failed", "error", err)
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, s := range m.slots {
		if s.record != nil && !used[s.record.sb.SessionID].IsZero() {
			s.record.stale = true // tried again
		}
	}
}
