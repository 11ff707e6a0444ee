package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	"github.com/google/uuid"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"

	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/runtime"
)

// claimTime is how long a create waits for archive calls that use its mounts.
const claimTime = 10 * time.Second

// launch starts the create of a key that the caller holds; the flight holds the
// key from here on, and drops it. Old is the record that makes way, or nil.
// Its spans belong to ctx's trace; nothing else of ctx reaches it.
func (m *Manager) launch(ctx context.Context, want *wanted, old *record) (*flight, error) {
	now := time.Now().UTC()
	f := &flight{
		want:    want,
		pulling: make(chan struct{}),
		done:    make(chan struct{}),
		starting: Sandbox{
			Tenant: want.id.tenant, Key: want.id.key, SessionID: uuid.NewString(), Status: StatusStarting,
			Spec: want.spec, Overridden: want.overridden, Metadata: want.metadata,
			AgentID: want.agentID, VolumePath: want.volume, CreatedAt: now, LastUsedAt: now,
		},
	}
	if f.starting.Metadata == nil {
		f.starting.Metadata = map[string]string{}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closing {
		return nil, errClosing
	}
	if err := m.capacityLocked(want, old); err != nil {
		return nil, err
	}
	m.making[f.starting.SessionID] = struct{}{}
	m.slots[want.id].flight = f
	f.recreated = old != nil && !old.snapshotLocked(now).Expired(now)
	ctx = trace.ContextWithSpanContext(m.base, trace.SpanContextFromContext(ctx))
	ctx, f.cancel = context.WithCancelCause(ctx)
	m.wg.Go(func() {
		defer f.cancel(nil)
		m.fly(ctx, f, old)
	})
	return f, nil
}

// capacityLocked counts what is there and on the way.
func (m *Manager) capacityLocked(want *wanted, old *record) error {
	var all, own int
	for id, s := range m.slots {
		if s.record == nil && s.flight == nil || old != nil && id == want.id {
			continue
		}
		all++
		if id.tenant == want.id.tenant {
			own++
		}
	}
	if want.max > 0 && own >= want.max {
		return &CapacityError{
			Message:    fmt.Sprintf("the caller has %d of %d sandboxes; delete one, or let one expire", own, want.max),
			RetryAfter: 10 * time.Second,
		}
	}
	if limit := m.opts.Settings.MaxSandboxes; limit > 0 && all >= limit {
		return &CapacityError{Message: fmt.Sprintf("all %d sandboxes are taken", limit), RetryAfter: 10 * time.Second}
	}
	return nil
}

// fly makes the sandbox and settles the flight.
func (m *Manager) fly(ctx context.Context, f *flight, old *record) {
	var sb Sandbox
	err := m.guard("create", func() (err error) { sb, err = m.make(ctx, f, old); return err })
	m.mu.Lock()
	s := m.slots[f.want.id]
	delete(m.making, f.starting.SessionID)
	if err != nil {
		f.err = &StartError{Err: err}
		select {
		case <-f.pulling: // its callers were sent away, and are to hear of it when they are back
			failed := f.starting
			failed.Status, failed.Error = StatusFailed, err.Error()
			s.failure = &failure{sb: failed, err: f.err, at: time.Now()}
		default:
		}
	} else {
		if _, gone := m.ended[sb.ContainerID]; gone {
			sb.Status = StatusStopped
		}
		if dir, _ := workspace(sb.Spec); dir != "" { // another may have come to share it meanwhile
			sb.Enforcement.WorkspaceQuota = m.quotaEnforcement(sb)
		}
		rec := &record{sb: sb}
		m.publishLocked(f.want.id, rec)
		f.result = CreateResult{Sandbox: rec.snapshotLocked(time.Now()), Result: ResultCreated}
		if old != nil {
			f.result.Result = ResultReplaced
			f.result.Recreated = f.recreated
		}
	}
	m.forgetEndedLocked()
	m.mu.Unlock()
	if err == nil { // told here, as its callers may have left
		m.metrics.creates.WithLabelValues(string(f.result.Result)).Inc()
		if attrs := sandboxAttrs(f.result.Sandbox); f.result.Result == ResultReplaced {
			m.log.InfoContext(ctx, "sandbox_replaced", attrs...)
		} else {
			m.log.InfoContext(ctx, "sandbox_created", attrs...)
		}
	}
	// The key is let go before the callers are woken, so that what they do next
	// finds it free.
	m.drop(f.want.id)
	close(f.done)
}

// make does a create's work. When it fails, nothing new is left; what the engine
// won't remove carries labels by which the sweep finds it.
func (m *Manager) make(ctx context.Context, f *flight, old *record) (sb Sandbox, err error) {
	mounts, err := m.operatorMounts(f.starting)
	if err != nil {
		return sb, err
	}
	mounts = append(mounts, f.want.spec.Mounts...)
	// First, as it has ended, however long the image takes.
	if err := m.makeWay(ctx, f, old); err != nil {
		return sb, fmt.Errorf("remove the old sandbox: %w", err)
	}
	image, err := m.image(ctx, f)
	if err != nil {
		return sb, err
	}
	if err := m.ensureNetwork(ctx, f.want.spec.EngineNetwork); err != nil {
		return sb, err
	}
	if f.recreated {
		m.detach(m.snapshot(old).SessionID) // its container is gone
	}
	defer func() {
		if err != nil || sb.ContainerID == "" { // as after a panic
			m.detach(f.starting.SessionID)
		}
	}()
	inode, err := m.attach(ctx, subject(f.starting))
	if err != nil {
		return sb, err
	}
	unclaim, err := m.claim(ctx, f.starting.SessionID, mounts)
	if err != nil {
		return sb, err
	}
	defer unclaim()
	if err := m.engine.Acquire(ctx, 1); err != nil {
		return sb, err
	}
	// Expiry counts from here: waiting for an image or for a turn costs nothing.
	sb = f.starting
	sb.WorkspaceInode = inode
	sb.CreatedAt = time.Now().UTC()
	sb.LastUsedAt = sb.CreatedAt
	sb.Deadline = sb.CreatedAt.Add(sb.Spec.MaxLifetime)
	sb.ExpiresAt = earlier(sb.CreatedAt.Add(sb.Spec.TTL), sb.Deadline)
	c, mode, err := func() (runtime.Container, string, error) {
		defer m.engine.Release(1)
		return m.start(ctx, sb, image, mounts)
	}()
	if err != nil {
		if errdefs.IsNotFound(err) {
			m.forgetNetwork(sb.Spec.EngineNetwork) // it may be what somebody has removed
		}
		return sb, err
	}
	sb.LastUsedAt = time.Now().UTC() // before, nobody could
	sb.Status = statusOf(c.State)
	sb.ContainerID = c.ID
	sb.Endpoint = Endpoint{IP: c.IP, Port: m.opts.Settings.AgentPort}
	sb.Enforcement = Enforcement{Mounts: mode, WorkspaceQuota: m.quotaEnforcement(sb)}
	switch {
	case c.ID == "":
		err = errors.New("the engine gave the container no id")
	case sb.Spec.EngineNetwork != "" && c.IP == "":
		err = fmt.Errorf("the container has no address on network %s", sb.Spec.EngineNetwork)
	default:
		if err = m.opts.Store.Put(ctx, storeRecord(sb)); err != nil {
			_ = m.opts.Store.Delete(context.WithoutCancel(ctx), sb.SessionID) // it may be there in spite of the error
		}
	}
	if err != nil {
		if c.ID != "" {
			if rerr := m.remove(ctx, c.ID); rerr != nil {
				m.log.WarnContext(ctx, "sandbox_clean_failed", append(sandboxAttrs(sb), "error", rerr)...)
			}
		}
		return Sandbox{}, err
	}
	if f.recreated {
		if err := m.opts.Store.Delete(ctx, m.snapshot(old).SessionID); err != nil {
			// The next start sees that it was replaced, and forgets it then.
			m.log.WarnContext(ctx, "store_delete_failed", append(sandboxAttrs(sb), "error", err)...)
		}
	}
	return sb, nil
}

// claim claims a sandbox's mounts. An archive call that uses one of them may take long, and
// fails the create then. One that comes later finds the sandbox among MountsInUse.
func (m *Manager) claim(ctx context.Context, sessionID string, mounts []policy.Mount) (leave func(), err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, claimTime, &CapacityError{
		Message:    fmt.Sprintf("a docker cp in the engine proxy has used one of the sandbox's directories for more than %s; try again when it is over", claimTime),
		RetryAfter: claimTime,
	})
	defer cancel()
	return m.opts.Claim(ctx, sessionID, mounts)
}

// makeWay removes what the new sandbox replaces. One that has ended goes whole; of
// one that died and is made again, the record stays until the new one has taken its
// place, so that nothing is lost if that can't be made.
func (m *Manager) makeWay(ctx context.Context, f *flight, old *record) error {
	switch {
	case old == nil:
		return nil
	case f.recreated:
		return m.remove(ctx, m.snapshot(old).ContainerID)
	default:
		return m.clear(ctx, f.want.id, old)
	}
}

// start makes the container, with its directories held until it runs.
func (m *Manager) start(ctx context.Context, sb Sandbox, image runtime.Image, mounts []policy.Mount) (runtime.Container, string, error) {
	labels, err := m.labelsFor(sb, image)
	if err != nil {
		return runtime.Container{}, "", err
	}
	spec := runtime.Spec{
		Name:           "berm-" + sb.SessionID,
		Image:          image.ID,
		Command:        m.opts.Settings.Command,
		Env:            m.environment(sb),
		Labels:         labels,
		User:           sb.Spec.User,
		Hostname:       "sandbox",
		Network:        sb.Spec.EngineNetwork,
		CPUs:           sb.Spec.CPUs,
		MemoryBytes:    sb.Spec.MemoryMB << 20,
		PidsLimit:      sb.Spec.PidsLimit,
		ReadOnlyRootfs: sb.Spec.ReadOnlyRootfs,
		CapAdd:         sb.Spec.CapAdd,
		RuntimeClass:   sb.Spec.RuntimeClass,
		UserNS:         sb.Spec.Userns == policy.UsernsAuto,
	}
	for _, v := range image.Env {
		name, _, _ := strings.Cut(v, "=")
		given := slices.ContainsFunc(spec.Env, func(e string) bool { return strings.HasPrefix(e, name+"=") })
		if !given && m.opts.Policy().DeniesEnv(name) {
			spec.Unset = append(spec.Unset, name)
		}
	}
	if sb.Spec.Agent == policy.AgentOff { // else the runtime decides
		spec.Agent = &runtime.Agent{}
	}
	if sb.Spec.TmpfsMB > 0 {
		spec.Tmpfs = []runtime.Tmpfs{{Target: "/tmp", SizeBytes: sb.Spec.TmpfsMB << 20}}
	}
	var mode string
	release := func() error { return nil }
	if len(mounts) > 0 {
		mode = m.opts.Holder.Mode()
		var sources []string
		sources, release, err = m.opts.Holder.Hold(ctx, sb.SessionID, mounts)
		if err != nil {
			return runtime.Container{}, "", fmt.Errorf("hold the mounts' directories: %w", err)
		}
		if err := sameWorkspace(sb, mounts, sources); err != nil {
			return runtime.Container{}, "", fmt.Errorf("hold the workspace: %w", errors.Join(err, release()))
		}
		for i, mt := range mounts {
			spec.Mounts = append(spec.Mounts, runtime.Mount{Source: sources[i], Target: mt.MountPath, ReadOnly: mt.Mode == "ro"})
		}
	}
	var c runtime.Container
	err = m.guard("create", func() error { // a panic must not keep the directories held
		return m.call(ctx, "create", func(ctx context.Context) (err error) {
			c, err = m.opts.Runtime.Create(ctx, spec)
			return err
		})
	})
	if rerr := release(); rerr != nil && err == nil {
		err = fmt.Errorf("release the mounts' directories: %w", rerr)
		cleanCtx := context.WithoutCancel(ctx)
		if xerr := m.call(cleanCtx, "remove", func(ctx context.Context) error { return m.opts.Runtime.Remove(ctx, c.ID) }); xerr != nil {
			err = errors.Join(err, xerr)
		}
	}
	return c, mode, err
}

// environment puts together the sandbox's variables: the operator's, the caller's,
// what the policy injects, and the agent's id. A later one wins.
func (m *Manager) environment(sb Sandbox) []string {
	var env []string
	add := func(vars map[string]string) {
		for _, name := range slices.Sorted(maps.Keys(vars)) {
			env = append(env, name+"="+vars[name])
		}
	}
	add(m.opts.Settings.Env)
	add(sb.Spec.Env)
	env = append(env, m.opts.Policy().InjectedEnv()...)
	if sb.AgentID != "" {
		env = append(env, "AGENT_ID="+sb.AgentID)
	}
	return env
}

// clear removes an old record's container and the record itself.
func (m *Manager) clear(ctx context.Context, id keyID, old *record) error {
	m.mu.Lock()
	sb := old.sb
	old.sb.Status = StatusStopping
	m.mu.Unlock()
	if err := m.remove(ctx, sb.ContainerID); err != nil {
		m.changeStatus(old, StatusStopping, sb.Status) // unless it has died of it
		return err
	}
	if err := m.opts.Store.Delete(context.WithoutCancel(ctx), sb.SessionID); err != nil {
		m.changeStatus(old, StatusStopping, StatusStopped)
		return &UnavailableError{Err: err}
	}
	m.detach(sb.SessionID)
	m.mu.Lock()
	defer m.mu.Unlock()
	m.forgetLocked(id)
	return nil
}

// changeStatus changes a record's status unless it is another by now.
func (m *Manager) changeStatus(r *record, from, to Status) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if r.sb.Status == from {
		r.sb.Status = to
	}
}

// image answers the image to run, and has it pulled as the policy says.
func (m *Manager) image(ctx context.Context, f *flight) (runtime.Image, error) {
	ref, pull := f.want.spec.Image, m.opts.Policy().PullPolicy()
	if pull != policy.PullAlways {
		var img runtime.Image
		err := m.call(ctx, "image", func(ctx context.Context) error {
			var err error
			img, err = m.opts.Runtime.Image(ctx, ref)
			return err
		})
		if err == nil {
			return img, nil
		}
		if !errdefs.IsNotFound(err) || pull == policy.PullNever {
			return img, fmt.Errorf("image %s: %w", ref, err)
		}
	}
	p := m.pull(ref)
	f.progress = p.progress
	close(f.pulling)
	select {
	case r := <-p.result:
		if r.Err != nil {
			return runtime.Image{}, fmt.Errorf("pull image %s: %w", ref, r.Err)
		}
		return r.Val.(runtime.Image), nil
	case <-ctx.Done():
		return runtime.Image{}, context.Cause(ctx)
	}
}

func earlier(a, b time.Time) time.Time {
	if b.Before(a) {
		return b
	}
	return a
}

func failSpan(span trace.Span, err error) { span.SetStatus(codes.Error, ErrorType(err)) }
