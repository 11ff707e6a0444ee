package engineapi

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strings"

	"github.com/bermhq/berm/proxy/engineapi/body"

	"github.com/bermhq/berm/proxy/engineapi/upstream"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/mount"
	"github.com/google/uuid"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/lifecycle/mountpin"
	"github.com/bermhq/berm/policy"
)

// effective is the spec that a container was allowed, and its held mounts.
type effective struct {
	body.Granted
	held []mountpin.Pinned // the mounts to verify; nil if the binds aren't held
}

// effectiveOf decodes the spec that a container was allowed from its labels. Ok is false if
// they have none.
func effectiveOf(labels map[string]string) (e effective, ok bool) {
	err := json.Unmarshal([]byte(labels[lifecycle.LabelEffective]), &e)
	return e, err == nil
}

// allowed is effectiveOf for an inspected container. It refuses one whose labels have no spec.
func allowed(ct *container.InspectResponse) (effective, error) {
	e, ok := effectiveOf(ct.Config.Labels)
	if !ok {
		return e, denied("verify.start", "Config.Labels", "the container doesn't say what it was allowed", "containers that this proxy made")
	}
	return e, nil
}

// hasSocket reports whether the container mounts one of Berm's sockets in place of the
// engine's.
func (e *effective) hasSocket() bool {
	return slices.ContainsFunc(e.Binds, func(b policy.Mount) bool { return b.Socket })
}

// socketCaller returns the caller under whose name the sockets in c's containers serve.
func socketCaller(c Caller) Caller {
	return Caller{Name: c.Name, Tenant: c.Tenant, Profile: cmp.Or(c.Profile, "default")}
}

// madeBy returns the caller that made a container. The container's socket serves under the
// name of that caller.
func madeBy(labels map[string]string) Caller {
	return Caller{Name: labels[lifecycle.LabelCaller], Tenant: labels[lifecycle.LabelTenant], Profile: labels[lifecycle.LabelProfile]}
}

// toHold returns the binds to hold. It replaces the source of a socket by the path of Berm's
// socket.
func toHold(c *call, e *effective, ct *container.InspectResponse, holder lifecycle.Holder) ([]policy.Mount, error) {
	if !e.hasSocket() {
		return e.Binds, nil
	}
	of := socketCaller(c.caller)
	if ct != nil {
		of = madeBy(ct.Config.Labels)
	}
	path := c.opts.Sockets(of.Name, of.Tenant, of.Profile)
	if path == "" || holder.Mode() != mountpin.ModeHeld {
		return nil, denied("mounts.docker_socket", "HostConfig.Mounts", "there is no socket for the engine's: the container's caller isn't configured, or Berm can't hold mounts here", "a container without the engine's socket")
	}
	binds := slices.Clone(e.Binds)
	for i := range binds {
		if binds[i].Socket {
			binds[i].Source, binds[i].Local, binds[i].Operator = path, path, true
		}
	}
	return binds, nil
}

// holdBinds holds the sources of the container's binds until release, at the paths that the
// engine's configuration names. It sets e.Sources to these paths. A nil ct is a container
// that is being created. The caller holds the container's start lock, so that no name is held
// twice.
func holdBinds(c *call, e *effective, ct *container.InspectResponse) (release func(), err error) {
	if len(e.Binds) == 0 || e.Audit {
		return func() {}, nil
	}
	holder, name := c.opts.Pins, uuid.NewString()
	var named []string
	if ct != nil {
		named = e.Named(ct.HostConfig)
		if named[0] == e.Binds[0].Source {
			holder = c.opts.Unheld
		} else {
			name = path.Base(path.Dir(named[0]))
		}
	}
	stale := denied("mounts.recreate", "HostConfig.Mounts", "the engine's configuration of the container names other paths than Berm holds now", "recreate the container")
	switch {
	case ct != nil && (holder == nil || uuid.Validate(name) != nil):
		return refuseHold(c, e, named, stale)
	case holder == nil:
		return refuseHold(c, e, nil, denied("mounts.unheld", "HostConfig.Mounts", "host paths can't be held here", "volumes"))
	}
	binds, err := toHold(c, e, ct, holder)
	if err != nil {
		return refuseHold(c, e, named, err)
	}
	sources, free, err := holder.Hold(c.ctx, name, binds)
	var d *policy.DeniedError
	switch {
	case errors.As(err, &d) && ct != nil && holder == c.opts.Unheld && c.opts.Pins != nil && c.opts.Pins.Mode() == mountpin.ModeHeld:
		return refuseHold(c, e, named, stale) // a new container's binds would be held
	case errors.As(err, &d):
		d.Reasons[0].Field = "HostConfig.Mounts"
		return refuseHold(c, e, named, err)
	case errors.Is(err, mountpin.ErrLinked):
		return refuseHold(c, e, named, denied("mounts.hard_link", "HostConfig.Mounts", "a file to be mounted has hard links, and so other names that may lie anywhere", "a file with one name, or its directory"))
	case errors.Is(err, mountpin.ErrExchanged), errors.Is(err, fs.ErrNotExist):
		return refuseHold(c, e, named, denied("verify.start", "HostConfig.Mounts", "a host path is not the directory or file any more that was allowed", "what was there when the container was made"))
	case errors.Is(err, fs.ErrExist):
		return nil, conflict("the container is still being made, or its last start is being cleaned up")
	case err != nil:
		return nil, err
	}
	release = func() {
		if err := free(); err != nil {
			c.log.ErrorContext(c.ctx, "engine_api_release_failed", "error", err.Error())
		}
	}
	if e.Sources = sources; ct != nil && !slices.Equal(sources, named) {
		release()
		return refuseHold(c, e, named, stale)
	}
	nested := e.Nested()
	if holder.Mode() != mountpin.ModeHeld {
		if slices.ContainsFunc(nested, func(n body.Nested) bool { return n.Rel != "" }) {
			release()
			return refuseHold(c, e, named, denied(ruleNested, "HostConfig.Mounts", "a mount path lies in that of a bind, which can't be held here", "mount paths outside those of binds"))
		}
		return release, nil
	}
	c.concealed = conceals(e.Binds, sources)
	if err := mountPoints(c, e, nested); err != nil {
		release()
		return refuseHold(c, e, named, err)
	}
	for i, b := range e.Binds {
		p, err := mountpin.NewPinned(sources[i], b.MountPath, b.Mode == "ro")
		if err != nil {
			release()
			return nil, err
		}
		e.held = append(e.held, p)
	}
	for _, n := range nested {
		if n.Rel != "" {
			e.held = append(e.held, mountpin.Pinned{Target: n.Target})
		}
	}
	return release, nil
}

// ruleNested is the rule for a mount whose target lies below the target of a bind.
const ruleNested = "mounts.nested"

// mountPoints makes the mount points of mounts that lie in held binds. If the engine made them,
// it would follow links on the way.
func mountPoints(c *call, e *effective, nested []body.Nested) error {
	for _, n := range nested {
		if n.Rel == "" {
			continue
		}
		outer, dir := e.Binds[n.Outer], e.Sources[n.Outer]
		f, err := mountpin.OpenBelow(dir, n.Rel, n.File)
		if errors.Is(err, fs.ErrNotExist) && outer.Mode != "ro" && !n.File {
			if err = c.rules.MakeMount(policy.Mount{Local: dir + "/" + n.Rel, Missing: n.Rel}); err == nil {
				f, err = mountpin.OpenBelow(dir, n.Rel, n.File)
			}
		}
		if err != nil {
			kind := "directory"
			if n.File {
				kind = "file"
			}
			return denied(ruleNested, "HostConfig.Mounts", fmt.Sprintf("mount path %s lies in the bind at %s, whose source has no %s there, or only by a link", n.Target, outer.MountPath, kind),
				fmt.Sprintf("an existing %s at %s below the bind's source", kind, n.Rel))
		}
		_ = f.Close()
	}
	return nil
}

// refuseWriters refuses to start a container with mounts in a bind while another container could write to
// the bind. With a link, the other one could redirect runc's mounts, which only newer releases of runc
// notice. Every running container of the tenant counts: a process may have received a file descriptor
// while the bind was shared.
func refuseWriters(c *call, e effective, ct *container.InspectResponse) error {
	if len(e.Nested()) == 0 {
		return nil
	}
	version, err := c.engine.Runc(c.ctx)
	if err != nil || safeRunc(version) && (e.Runtime == "" || e.Runtime == "runc") {
		return err
	}
	sharer, err := findSharer(c, useOf(ct.ID, ct.Config.Labels, ct.Mounts), true)
	if err != nil || sharer == "" {
		return err
	}
	return denied(ruleNested, "HostConfig.Mounts", fmt.Sprintf("a mount path lies in that of a bind, which processes of other containers could lead elsewhere while runc %q mounts", body.Shorten(version)),
		"a start while no other container of the tenant's runs, nor one that can write to the mounts, or runc 1.2.8, 1.3.3 or 1.4")
}

// refuseHold refuses to hold the binds. In mode audit it logs the refusal, and the engine
// mounts the paths in named.
func refuseHold(c *call, e *effective, named []string, why error) (release func(), err error) {
	e.Sources = named
	return func() {}, c.judged(why)
}

// hasBinds reports whether a container has bind mounts.
func hasBinds(mounts []container.MountPoint) bool {
	return slices.ContainsFunc(mounts, func(m container.MountPoint) bool { return m.Type == mount.TypeBind })
}

// holdMade judges an existing container again, and holds its binds. The caller holds the
// container's start lock. For a container without binds, holdMade does nothing: the containers
// of a build have no label with a spec.
func holdMade(c *call, seen *container.InspectResponse) (release func(), err error) {
	if !hasBinds(seen.Mounts) {
		return func() {}, nil
	}
	v, err := c.engine.Max(c.ctx)
	if err != nil {
		return nil, err
	}
	ct, err := c.inspect(seen.ID, v)
	if err != nil {
		return nil, err
	}
	e, err := allowed(ct)
	if err == nil && !e.Audit {
		err = c.judged(stillAllowed(c, e, ct.HostConfig))
	}
	if err != nil {
		return nil, err
	}
	return holdBinds(c, &e, ct)
}

// verifyHeld compares the mounts of a container that was just started with the held ones. It
// skips a container that has ended since, or that ran before the start.
func verifyHeld(c *call, e effective, before, now *container.InspectResponse, v upstream.Version) error {
	if len(e.held) == 0 || now.State == nil || now.State.Pid == 0 || before.State != nil && now.State.StartedAt == before.State.StartedAt {
		return nil
	}
	err := mountpin.Verify(now.State.Pid, e.held)
	if err == nil || errors.Is(err, mountpin.ErrGone) {
		return nil
	}
	if again, inspectErr := c.inspect(now.ID, v); inspectErr == nil && (again.State == nil || again.State.Pid != now.State.Pid) {
		return nil // it ended, and its process ID may be another process's
	}
	c.metrics.mismatches.Inc()
	c.log.ErrorContext(c.ctx, "engine_api_bind_differs", "container", now.ID, "error", err.Error())
	return denied("verify.start", "HostConfig.Mounts", "the container has another directory mounted than was held", "the directory that was allowed")
}

// Binds returns the binds of all containers that this proxy made, running or not.
func (d *Proxy) Binds(ctx context.Context) ([]policy.Mount, error) {
	v, err := d.engine.Max(ctx)
	if err != nil {
		return nil, err
	}
	var out []policy.Mount
	err = d.eachContainer(ctx, v, func(ct *listed) {
		if e, ok := effectiveOf(ct.Labels); ok && !e.Audit && d.opts.Sealer.Valid(lifecycle.ObjectContainer, ct.ID, ct.Labels) {
			out = append(out, e.Binds...)
			return
		}
		for _, m := range ct.Mounts {
			if m.Type == mount.TypeBind {
				out = append(out, bindOf(m))
			}
		}
	}, d.proxyLabels()...)
	return out, err
}

// bindOf returns a bind with the source that the engine mounts.
func bindOf(m container.MountPoint) policy.Mount {
	mode := "ro"
	if m.RW {
		mode = "rw"
	}
	return policy.Mount{HostPath: m.Source, Source: m.Source, Local: m.Source, MountPath: m.Destination, Mode: mode}
}

// pins returns the binds that are held, and the paths at which the engine mounts them.
func pins(labels map[string]string, mounts []container.MountPoint) (binds []policy.Mount, sources []string) {
	if !hasBinds(mounts) {
		return nil, nil
	}
	e, ok := effectiveOf(labels)
	if !ok || e.Audit {
		return nil, nil
	}
	for _, b := range e.Binds {
		for _, m := range mounts {
			if m.Type == mount.TypeBind && m.Destination == b.MountPath && m.Source != b.Source {
				binds, sources = append(binds, b), append(sources, m.Source)
			}
		}
	}
	return binds, sources
}

// conceals returns a replacer of the paths that the engine mounts by those that the caller
// asked for.
func conceals(binds []policy.Mount, sources []string) *strings.Replacer {
	var pairs []string
	for i, b := range slices.Backward(binds) { // the source of bind 10 begins with that of bind 1
		pairs = append(pairs, sources[i], b.HostPath)
	}
	return strings.NewReplacer(pairs...)
}

// shownEntry is shown for an entry of the engine's list.
func shownEntry(entry json.RawMessage) json.RawMessage {
	var ct struct {
		Labels map[string]string
		Mounts []container.MountPoint
	}
	if !bytes.Contains(entry, []byte(`"bind"`)) || json.Unmarshal(entry, &ct) != nil {
		return entry
	}
	return shown(entry, ct.Labels, ct.Mounts)
}

// shown returns the engine's JSON of a container as its caller may see it. Its binds have the
// paths that the caller asked for.
func shown(raw json.RawMessage, labels map[string]string, mounts []container.MountPoint) json.RawMessage {
	binds, sources := pins(labels, mounts)
	if len(binds) == 0 {
		return raw
	}
	for i := range binds {
		binds[i].HostPath, sources[i] = inJSON(binds[i].HostPath), inJSON(sources[i])
	}
	return json.RawMessage(conceals(binds, sources).Replace(string(raw)))
}

// inJSON returns a text as it stands within a JSON string of the engine's.
func inJSON(s string) string {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	_ = enc.Encode(s) // a text can be encoded
	return strings.Trim(strings.TrimSpace(b.String()), `"`)
}

// byAskedPath makes the volume filter find binds by the paths that the caller asked for.
func byAskedPath(c *call, f filters) error {
	if !slices.ContainsFunc(f["volume"], path.IsAbs) {
		return nil
	}
	asked := f["volume"]
	return c.eachContainer(c.ctx, c.version, func(ct *listed) {
		binds, sources := pins(ct.Labels, ct.Mounts)
		for i, b := range binds {
			if slices.Contains(asked, b.HostPath) {
				f["volume"] = append(f["volume"], sources[i])
			}
		}
	}, c.ownLabels()...)
}

// concealPaths replaces the paths of held binds in the engine's error.
func concealPaths(c *call, err error) error {
	var e *upstream.Error
	if c.concealed != nil && errors.As(err, &e) {
		e.Message = c.concealed.Replace(e.Message)
	}
	return err
}
