package lifecycle

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/runtime"
)

// claimTime is how long a create waits for archive calls that use its mounts.
const claimTime = 10 * time.Second

// creator makes one sandbox at a time, from the judgement to the record in the store. It
// doesn't know which sandboxes exist.
type creator struct {
	opts   *Options
	engine *engine
	quotas Quotas
}

// create makes a sandbox. If it fails, it removes everything that it made. If the engine can't
// remove the container, the sweep finds it by its labels.
func (c *creator) create(ctx context.Context, p *pendingCreate, mounts []policy.Mount) (sb Sandbox, err error) {
	image, err := c.image(ctx, p)
	if err != nil {
		return sb, err
	}
	if err := c.engine.ensureNetwork(ctx, p.starting.Spec.EngineNetwork); err != nil {
		return sb, err
	}
	if p.dead != "" {
		c.quotas.Detach(p.dead)
	}
	defer func() {
		if err != nil || sb.ContainerID == "" { // as after a panic
			c.quotas.Detach(p.starting.SessionID)
		}
	}()
	inode, err := c.quotas.Attach(ctx, subject(p.starting))
	if err != nil {
		return sb, err
	}
	unclaim, err := c.claim(ctx, p.starting.SessionID, mounts)
	if err != nil {
		return sb, err
	}
	defer unclaim()
	if err := c.engine.bound.Acquire(ctx, 1); err != nil {
		return sb, err
	}
	// The TTL starts here, so that the wait for an image or for a turn doesn't count.
	sb = p.starting
	sb.WorkspaceInode = inode
	sb.CreatedAt = time.Now().UTC()
	sb.LastUsedAt = sb.CreatedAt
	sb.Deadline = sb.CreatedAt.Add(sb.Spec.MaxLifetime)
	sb.ExpiresAt = earlier(sb.CreatedAt.Add(sb.Spec.TTL), sb.Deadline)
	made, mode, err := func() (runtime.Container, string, error) {
		defer c.engine.bound.Release(1)
		return c.start(ctx, sb, image, mounts)
	}()
	if err != nil {
		if errdefs.IsNotFound(err) {
			c.engine.forgetNetwork(sb.Spec.EngineNetwork) // it may have been removed outside of Berm
		}
		return sb, err
	}
	sb.LastUsedAt = time.Now().UTC()
	sb.Status = statusOf(made.State)
	sb.ContainerID = made.ID
	sb.Endpoint = Endpoint{IP: made.IP, Port: c.opts.Settings.AgentPort}
	sb.Enforcement = Enforcement{Mounts: mode, WorkspaceQuota: c.quotas.Enforcement(subject(sb))}
	if err := c.store(ctx, sb); err != nil {
		return Sandbox{}, err
	}
	if p.dead != "" {
		if err := c.opts.Store.Delete(ctx, p.dead); err != nil {
			// Berm's next start deletes the replaced sandbox.
			c.opts.Logger.WarnContext(ctx, "store_delete_failed", append(sandboxAttrs(sb), "error", err)...)
		}
	}
	return sb, nil
}

// claim claims the mounts of a sandbox. It fails if an archive call uses one of them for longer
// than claimTime. A later archive call finds the mounts in MountsInUse.
func (c *creator) claim(ctx context.Context, sessionID string, mounts []policy.Mount) (leave func(), err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, claimTime, &CapacityError{
		Message:    fmt.Sprintf("a docker cp in the engine proxy has used one of the sandbox's directories for more than %s; try again when it is over", claimTime),
		RetryAfter: claimTime,
	})
	defer cancel()
	return c.opts.Claim(ctx, sessionID, mounts)
}

// store checks a sandbox whose container runs, and puts it into the store. If that fails, it
// removes the container.
func (c *creator) store(ctx context.Context, sb Sandbox) (err error) {
	switch {
	case sb.ContainerID == "":
		return errors.New("the engine gave the container no id")
	case sb.Spec.EngineNetwork != "" && sb.Endpoint.IP == "":
		err = fmt.Errorf("the container has no address on network %s", sb.Spec.EngineNetwork)
	default:
		if err = c.opts.Store.Put(ctx, sb); err != nil {
			_ = c.opts.Store.Delete(context.WithoutCancel(ctx), sb.SessionID) // Put may have stored it
		}
	}
	if err != nil {
		if rerr := c.engine.remove(ctx, sb.ContainerID); rerr != nil {
			c.opts.Logger.WarnContext(ctx, "sandbox_clean_failed", append(sandboxAttrs(sb), "error", rerr)...)
		}
	}
	return err
}

// image returns the image to run. It pulls it as the policy says.
func (c *creator) image(ctx context.Context, p *pendingCreate) (runtime.Image, error) {
	ref, pull := p.starting.Spec.Image, c.opts.Policy().PullPolicy()
	if pull != policy.PullAlways {
		img, err := c.engine.image(ctx, ref)
		if err == nil {
			return img, nil
		}
		if !errdefs.IsNotFound(err) || pull == policy.PullNever {
			return img, fmt.Errorf("image %s: %w", ref, err)
		}
	}
	under := c.engine.pull(ref)
	p.progress = under.progress
	close(p.pulling)
	return c.engine.await(ctx, ref, under)
}

// start creates and starts the container. Its directories are pinned until it runs.
func (c *creator) start(ctx context.Context, sb Sandbox, image runtime.Image, mounts []policy.Mount) (made runtime.Container, mode string, err error) {
	spec, err := c.containerSpec(sb, image)
	if err != nil {
		return made, "", err
	}
	release := func() error { return nil }
	if len(mounts) > 0 {
		mode = c.opts.Holder.Mode()
		var sources []string
		sources, release, err = c.opts.Holder.Hold(ctx, sb.SessionID, mounts)
		if err != nil {
			return made, "", fmt.Errorf("hold the mounts' directories: %w", err)
		}
		if err := sameWorkspace(sb, mounts, sources); err != nil {
			return made, "", fmt.Errorf("hold the workspace: %w", errors.Join(err, release()))
		}
		for i, mt := range mounts {
			spec.Mounts = append(spec.Mounts, runtime.Mount{Source: sources[i], Target: mt.MountPath, ReadOnly: mt.Mode == "ro"})
		}
	}
	err = c.engine.guard("create", func() (err error) { // a panic must not keep the directories pinned
		made, err = ask(ctx, c.engine, "create", func(ctx context.Context) (runtime.Container, error) {
			return c.opts.Runtime.Create(ctx, spec)
		})
		return err
	})
	if rerr := release(); rerr != nil && err == nil {
		err = fmt.Errorf("release the mounts' directories: %w", rerr)
		// The caller holds the bound that engine.remove would wait for.
		err = errors.Join(err, c.engine.call(context.WithoutCancel(ctx), "remove", func(ctx context.Context) error {
			return c.opts.Runtime.Remove(ctx, made.ID)
		}))
	}
	return made, mode, err
}

// containerSpec returns the container's spec, without mounts.
func (c *creator) containerSpec(sb Sandbox, image runtime.Image) (runtime.Spec, error) {
	labels, err := c.labels(sb, image)
	if err != nil {
		return runtime.Spec{}, err
	}
	spec := runtime.Spec{
		Name:           "berm-" + sb.SessionID,
		Image:          image.ID,
		Command:        c.opts.Settings.Command,
		Env:            c.environment(sb),
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
		if !given && c.opts.Policy().DeniesEnv(name) {
			spec.Unset = append(spec.Unset, name)
		}
	}
	if sb.Spec.Agent == policy.AgentOff { // else the runtime decides
		spec.Agent = &runtime.Agent{}
	}
	if sb.Spec.TmpfsMB > 0 {
		spec.Tmpfs = []runtime.Tmpfs{{Target: "/tmp", SizeBytes: sb.Spec.TmpfsMB << 20}}
	}
	return spec, nil
}

// environment returns the sandbox's variables: the operator's, the caller's, those that the
// policy injects, and the agent's ID. A later one wins.
func (c *creator) environment(sb Sandbox) []string {
	var env []string
	add := func(vars map[string]string) {
		for _, name := range slices.Sorted(maps.Keys(vars)) {
			env = append(env, name+"="+vars[name])
		}
	}
	add(c.opts.Settings.Env)
	add(sb.Spec.Env)
	env = append(env, c.opts.Policy().InjectedEnv()...)
	if sb.AgentID != "" {
		env = append(env, "AGENT_ID="+sb.AgentID)
	}
	return env
}

// labels returns the labels of a new sandbox's container. It sets labels of Berm's that the image
// would add to the empty string.
func (c *creator) labels(sb Sandbox, image runtime.Image) (map[string]string, error) {
	spec, err := json.Marshal(sb.Spec)
	if err != nil {
		return nil, fmt.Errorf("encode spec: %w", err)
	}
	names := make([]string, 0, len(sb.Spec.Env))
	for name := range sb.Spec.Env {
		names = append(names, name)
	}
	slices.Sort(names)
	l := c.engine.withLabels(map[string]string{
		LabelOwner:     c.opts.Owner,
		LabelTenant:    sb.Tenant,
		LabelKey:       sb.Key,
		LabelSessionID: sb.SessionID,
		LabelProfile:   sb.Spec.Profile,
		LabelCreatedAt: sb.CreatedAt.Format(time.RFC3339Nano),
		LabelExpiresAt: sb.ExpiresAt.Format(time.RFC3339Nano),
		LabelDeadline:  sb.Deadline.Format(time.RFC3339Nano),
		LabelSpec:      sb.Spec.Digest(),
		LabelEffective: string(spec),
		LabelEnv:       strings.Join(names, ","),
		LabelAgent:     strconv.Itoa(runtime.AgentVersion),
	})
	if sb.AgentID != "" {
		l[LabelAgentID] = sb.AgentID
	}
	if sb.VolumePath != "" {
		l[LabelVolume] = sb.VolumePath
	}
	if sb.WorkspaceInode != "" {
		l[LabelInode] = sb.WorkspaceInode
	}
	if c.opts.Settings.AdoptLegacy {
		l[LegacySessionID] = sb.SessionID
		l[LegacyChatID] = sb.Key
		l[LegacyExpiresAt] = sb.ExpiresAt.Format(time.RFC3339Nano)
		l[LegacyAgentID] = sb.AgentID
		l[LegacyVolume] = sb.VolumePath
		l[LegacyPort] = strconv.Itoa(c.opts.Settings.AgentPort)
	}
	for name := range image.Labels {
		if _, set := l[name]; !set && IsOwnLabel(name) {
			l[name] = ""
		}
	}
	return c.opts.Sealer.Seal(ObjectContainer, l), nil
}
