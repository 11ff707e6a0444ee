package engineapi

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/mount"
	"github.com/docker/docker/api/types/network"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/proxy/engineapi/body"
	"github.com/bermhq/berm/proxy/engineapi/upstream"
)

// makeTimeout bounds a create or start of a container, even if the client leaves.
const makeTimeout = 10 * time.Minute

func sortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }

// createContainer creates a container from what the policy allows of the body. It verifies the container
// before it answers.
func createContainer(c *call, asked *body.Create) error {
	query := c.passed
	if name := strings.TrimPrefix(c.query.Get("name"), "/"); name != "" {
		query.Set("name", name)
		if strings.HasPrefix(name, "buildx_buildkit_") { // buildx starts it if there is no /grpc
			if err := c.judged(noBuildKit("name")); err != nil {
				return err
			}
		}
	}
	p, err := planContainer(c, asked)
	if err != nil {
		return err
	}
	if err := c.untilEnd(c.room("containers", 1)); err != nil {
		return err
	}
	if err := c.untilEnd(c.room("volumes", p.anonymous())); err != nil {
		return err
	}
	made, err := makeContainer(c, p, query)
	if err != nil {
		return err
	}
	return c.answer(http.StatusCreated, made)
}

// anonymous returns how many anonymous volumes the engine creates with the container.
func (p *plan) anonymous() (n int64) {
	for _, m := range p.Mounts {
		if m.Type == "volume" && m.Source == "" {
			n++
		}
	}
	return n
}

// makeContainer creates the planned container. It undoes all if that fails or the client left meanwhile.
func makeContainer(c *call, p *plan, query url.Values) (container.CreateResponse, error) {
	client := c.ctx
	defer c.detach(makeTimeout)()
	var undo undo
	m, err := makePlanned(c, p, query, &undo)
	if err == nil && client.Err() != nil {
		err = context.Cause(client) // nobody would know of the container
	}
	if err != nil {
		undo.run(c.ctx, c.log)
	}
	return m, err
}

func makePlanned(c *call, p *plan, query url.Values, undo *undo) (out container.CreateResponse, err error) {
	session := p.Labels[lifecycle.LabelSessionID]
	if err := makeVolumes(c, p, undo); err != nil {
		return out, err
	}
	v, err := c.engine.Max(c.ctx)
	if err != nil {
		return out, err
	}
	if err := p.checkRestart(); err != nil {
		return out, err
	}
	if v < 40 && len(p.Spec.Binds) > 0 {
		return out, denied("mounts.engine", "HostConfig.Mounts", "the engine is too old for binds that leave out what is mounted below them", "volumes")
	}
	for _, b := range p.Spec.Binds {
		if err := makeMissing(c, p, b); err != nil {
			return out, err
		}
	}
	release, err := holdPlanned(c, p)
	if err != nil {
		return out, err
	}
	defer release()
	var body any
	if p.audited {
		if body, err = asAsked(c, p); err != nil {
			return out, err
		}
	} else {
		body = p.Encode(c.rules.InjectedEnv(), int(v))
	}
	// The container may exist even if the engine's answer is lost.
	undo.add(func(ctx context.Context) error { return removeSession(ctx, c, v, session) })
	ask := upstream.Ask{Method: http.MethodPost, Version: v, Path: "/containers/create", Query: query, JSON: body, Long: true}
	if err := c.engine.Do(c.ctx, ask, &out); err != nil {
		return out, createError(err, query.Get("name"))
	}
	if !fullID.MatchString(out.ID) {
		return out, errors.New("create container: the engine's answer has no ID")
	}
	c.about(out.ID)
	out.Warnings = append(append([]string{}, out.Warnings...), p.warnings...)
	if err := verifyMade(c, p, out.ID, v); err != nil {
		return out, err
	}
	c.firsts.put(session, out.ID)
	if p.audited {
		return out, nil
	}
	if e := p.effective(); !e.hasSocket() {
		c.known.put(out.ID, c.caller.Tenant)
	}
	if len(p.Spec.Binds) > 0 && !restartOf(p).None() {
		return out, c.restarts.Set(c.ctx, out.ID, restartOf(p), false)
	}
	return out, nil
}

// makeMissing makes the missing directories of a bind's source. They stay if the create fails, as with
// the engine.
func makeMissing(c *call, p *plan, b policy.Mount) error {
	if b.Missing == "" || p.audited {
		return nil
	}
	if err := c.rules.MakeMount(b); err != nil {
		return c.judged(denied("mounts.missing", "HostConfig.Mounts", fmt.Sprintf("host path %q can't be made: there is a link or a file on the way, or no room", body.Shorten(b.HostPath)), "an existing directory"))
	}
	return nil
}

// holdPlanned holds the binds of a planned container. In mode audit, a container whose binds can't be
// held counts as one that was denied.
func holdPlanned(c *call, p *plan) (release func(), err error) {
	e := effective{Granted: body.Granted{ContainerSpec: p.Spec, Audit: p.audited}}
	if release, err = holdBinds(c, &e, nil); err != nil {
		return nil, err
	}
	if p.Sources = e.Sources; len(p.Sources) < len(p.Spec.Binds) && !p.audited {
		p.audited = true
		return release, describePlan(c, p)
	}
	return release, nil
}

// createError replaces an error of the engine's that names another container.
func createError(err error, name string) error {
	if upstream.StatusOf(err) == http.StatusConflict && strings.Contains(err.Error(), "already in use") {
		return nameTaken(name)
	}
	return err
}

// makeVolumes creates the missing volumes, so that they have their labels from the start.
func makeVolumes(c *call, p *plan, undo *undo) error {
	for _, name := range p.missing {
		if p.audited && !slices.ContainsFunc(p.Spec.Volumes, func(m policy.ContainerMount) bool { return m.Source == name }) {
			continue
		}
		made, _, err := makeVolume(c, name, "", nil, p.VolumeLabels(name))
		if err != nil {
			return err
		}
		undo.add(func(ctx context.Context) error {
			return removeMade(ctx, c, name, made.Labels[lifecycle.LabelSessionID])
		})
	}
	return nil
}

// removeMade removes a volume that was created, unless another volume has its name by now.
func removeMade(ctx context.Context, c *call, name, session string) error {
	unlock, err := lockVolume(ctx, c, name)
	if err != nil {
		return err
	}
	defer unlock()
	var now labelled
	err = c.engine.Get(ctx, c.version, "/volumes/"+name, nil, &now)
	if err != nil || now.Labels[lifecycle.LabelSessionID] != session {
		return missingIsFine(err)
	}
	return remove(ctx, c, c.version, "/volumes/"+name, nil)
}

// removeSession removes the container that a create made, if it made one.
func removeSession(ctx context.Context, c *call, v upstream.Version, session string) error {
	var errs []error
	err := c.eachContainer(ctx, v, func(ct *listed) {
		errs = append(errs, removeByForce(ctx, c, v, ct.ID))
	}, lifecycle.LabelSessionID+"="+session, lifecycle.LabelOwner+"="+c.opts.Owner)
	return errors.Join(append(errs, err)...)
}

func removeByForce(ctx context.Context, c *call, v upstream.Version, id string) error {
	c.known.drop(id)
	c.transfers.end(id)
	return remove(ctx, c, v, "/containers/"+id, url.Values{"force": {"1"}, "v": {"1"}})
}

// remove removes an object of the engine's. An object that is gone already is no error.
func remove(ctx context.Context, c *call, v upstream.Version, path string, query url.Values) error {
	return missingIsFine(c.engine.Do(ctx, upstream.Ask{Method: http.MethodDelete, Version: v, Path: path, Query: query}, nil))
}

// removeUnwanted removes an object that the caller must not have, even if c's context has ended.
func removeUnwanted(c *call, path string, query url.Values) {
	undo{func(ctx context.Context) error { return remove(ctx, c, c.version, path, query) }}.run(c.ctx, c.log)
}

func missingIsFine(err error) error {
	if upstream.StatusOf(err) == http.StatusNotFound {
		return nil
	}
	return err
}

// eachContainer calls f for each container, running or not, that has all the labels.
func (d *Proxy) eachContainer(ctx context.Context, v upstream.Version, f func(*listed), labels ...string) error {
	query := url.Values{"all": {"1"}, "filters": {filters{"label": labels}.String()}}
	return each(ctx, d, v, lifecycle.ObjectContainer, query, f)
}

// undo is a list of steps that undo what was done. The last step runs first.
type undo []func(context.Context) error

func (u *undo) add(f func(context.Context) error) { *u = append(*u, f) }

// run runs the steps with a timeout of their own, since that of ctx may have passed. If a step fails, the
// object still has its labels, and the sweep finds it.
func (u undo) run(ctx context.Context, log *slog.Logger) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), upstream.UndoTimeout)
	defer cancel()
	for _, f := range slices.Backward(u) {
		if err := f(ctx); err != nil {
			log.ErrorContext(ctx, "engine_api_undo_failed", "error", err)
		}
	}
}

// asAsked returns a denied body as the engine gets it in mode audit: unchanged but for Berm's own labels,
// and IDs in place of names. Another caller's objects count as missing in this mode too.
func asAsked(c *call, p *plan) (*body.Create, error) {
	if othersImage(c, p.image.Config.Labels) {
		return nil, notFound("No such image: " + familiar(p.Body.Image))
	}
	b, h := *p.Body, *p.Body.HostConfig
	b.HostConfig, b.Labels = &h, p.Labels
	err := cmp.Or(askedMode(c, &h.PidMode), askedMode(c, &h.IpcMode), askedMode(c, &h.UTSMode), askedMode(c, &h.UsernsMode),
		askedMode(c, &h.CgroupnsMode), askedMode(c, &h.Cgroup), askedMode(c, &h.NetworkMode))
	if err != nil {
		return nil, err
	}
	h.VolumesFrom = slices.Clone(h.VolumesFrom)
	for i, from := range h.VolumesFrom {
		ref, mode, given := strings.Cut(from, ":")
		if h.VolumesFrom[i], err = c.containerID(ref); err != nil {
			return nil, err
		}
		if given {
			h.VolumesFrom[i] += ":" + mode
		}
	}
	if h.Links, err = ownLinks(c, h.Links); err != nil {
		return nil, err
	}
	if h.Mounts, err = askedMounts(c, p); err != nil {
		return nil, err
	}
	if !h.NetworkMode.IsContainer() {
		name, err := askedNetwork(c, string(h.NetworkMode))
		if err != nil {
			return nil, err
		}
		h.NetworkMode = container.NetworkMode(name)
	}
	return &b, askedEndpoints(c, &b)
}

// askedMode replaces the container's name in a namespace's mode by its ID. It fails if the container
// isn't the caller's.
func askedMode[M ~string](c *call, mode *M) error {
	ref, ok := strings.CutPrefix(string(*mode), "container:")
	if !ok {
		return nil
	}
	id, err := c.containerID(ref)
	*mode = M("container:" + id)
	return err
}

// askedNetwork returns the ID of a network that isn't another caller's, or the name of one of the
// engine's own.
func askedNetwork(c *call, ref string) (string, error) {
	if ref == "" || ref == "default" {
		return ref, nil
	}
	n, err := resolveNetwork(c, ref, false)
	switch {
	case err != nil:
		return "", err
	case n.Mode == policy.NetDefault:
		return "bridge", nil
	case n.Mode != policy.NetNamed:
		return n.Mode, nil
	case n.ID == "":
		return "", noNetwork(ref)
	}
	return n.ID, nil
}

func askedEndpoints(c *call, b *body.Create) error {
	asked, err := b.Endpoints()
	if err != nil || len(asked) == 0 {
		return err
	}
	out := map[string]*network.EndpointSettings{}
	for ref, e := range asked {
		name, err := askedNetwork(c, ref)
		if err != nil {
			return err
		}
		if e != nil {
			named := *e
			named.NetworkID = ""
			if fullID.MatchString(name) {
				named.NetworkID = name
			}
			if named.Links, err = ownLinks(c, e.Links); err != nil {
				return err
			}
			e = &named
		}
		out[name] = e
	}
	raw, err := json.Marshal(out)
	b.NetworkingConfig = map[string]json.RawMessage{"EndpointsConfig": raw}
	return err
}

// askedMounts returns the mounts, with labels for volumes that the engine may create.
func askedMounts(c *call, p *plan) ([]mount.Mount, error) {
	list := slices.Clone(p.Body.HostConfig.Mounts)
	for i := range list {
		m := &list[i]
		if m.Type == "image" {
			img, err := lookUpImage(c, m.Source)
			if err != nil {
				return nil, err
			}
			if img == nil || othersImage(c, img.Config.Labels) {
				return nil, notFound("No such image: " + familiar(m.Source))
			}
		}
		if m.Type != "volume" && m.VolumeOptions == nil {
			continue
		}
		if m.Source != "" && !volumeName.MatchString(m.Source) {
			return nil, proxy.Malformed(fmt.Sprintf("%q can't be a volume's name", body.Shorten(m.Source)))
		}
		options := mount.VolumeOptions{}
		if m.VolumeOptions != nil {
			options = *m.VolumeOptions
		}
		if _, err := c.callersLabels(options.Labels); err != nil {
			return nil, err
		}
		labels := map[string]string{}
		maps.Copy(labels, options.Labels)
		maps.Copy(labels, p.Volumes)
		options.Labels, m.VolumeOptions = labels, &options
	}
	return list, nil
}

// bars reports whether the caller may not work in a container of its tenant with these labels.
// That is so if the policy denied the container and it was created in mode audit, or if its
// socket serves under another caller's name. Open reports whether every caller of the tenant may
// work in it.
func bars(c *call, labels map[string]string) (barred, open bool) {
	e, ok := effectiveOf(labels)
	if !ok || e.Audit {
		return true, false
	}
	return e.hasSocket() && madeBy(labels) != socketCaller(c.caller), !e.hasSocket()
}

// refuseUnconfined refuses a call that bars forbids for the container that was looked up last.
// A caller in mode audit may go on.
func refuseUnconfined(c *call) error {
	if !c.unconfined {
		return nil
	}
	return c.allow([]policy.Reason{{Rule: "verify.start", Message: "the container was denied, and made in mode audit, or has a socket that serves as another caller", Allowed: "a new container"}})
}
