package engineapi

import (
	"fmt"
	"slices"
	"strings"

	"github.com/docker/docker/api/types/container"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/proxy/engineapi/body"
	"github.com/bermhq/berm/runtime"
)

const containerMode = "container:"

// findPeer looks up the container whose processes another one asks to see. A process in one of
// them can open the other's root, and pass that on to a third container. Engines without the
// fixes of ArchiveFixed must not copy files of a container whose root a process has open, and
// nothing tells any more which one that is.
func findPeer(c *call, p *policy.ContainerPeer) error {
	if p == nil {
		return nil
	}
	if !c.opts.ArchiveFixed {
		release, err := c.engine.Release(c.ctx)
		if err != nil {
			return err
		}
		if !SafeArchives(release) {
			return denied("archive.engine", "HostConfig.PidMode", fmt.Sprintf("another container's processes are refused: engine %q copies files by paths that they could exchange", body.Shorten(release)), "engine "+ArchiveFixed)
		}
		runc, err := c.engine.Runc(c.ctx)
		if err != nil {
			return err
		}
		if !safeRunc(runc) {
			return denied(ruleNested, "HostConfig.PidMode", fmt.Sprintf("another container's processes are refused: they could lead runc %q elsewhere while it mounts", body.Shorten(runc)), "runc 1.2.8, 1.3.3 or 1.4")
		}
	}
	ct, e, confined, err := related(c, strings.TrimPrefix(p.Asked, containerMode))
	if err == nil && confined {
		p.ID, p.Allowed = ct.ID, &e.ContainerSpec
	}
	return err
}

// related looks up a container of the caller's, and what it was allowed. It isn't confined if
// the caller may not work in it; see bars.
func related(c *call, ref string) (ct *container.InspectResponse, e effective, confined bool, err error) {
	defer func(was bool) { c.unconfined = was }(c.unconfined) // that of the call's own container
	if ct, _, err = c.container(ref); err != nil {
		return nil, e, false, err
	}
	e, _ = effectiveOf(ct.Config.Labels)
	barred, _ := bars(c, ct.Config.Labels)
	return ct, e, !barred, nil
}

// mountsFrom adds the mounts of the containers in HostConfig.VolumesFrom as if they had been
// asked for: the policy judges each, and the engine gets no VolumesFrom. Of two for one path
// the last one's counts, as with the engine.
func mountsFrom(c *call, p *plan) error {
	const field = "HostConfig.VolumesFrom"
	for i, entry := range slices.Backward(p.Body.HostConfig.VolumesFrom) {
		ref, readOnly, err := body.VolumesFrom(entry)
		if err != nil {
			return err
		}
		ct, e, confined, err := related(c, ref)
		if err != nil {
			return err
		}
		if !confined {
			err := denied("mounts.type", field, fmt.Sprintf("container %q was denied, and made in mode audit, or has a socket that serves as another caller", body.Shorten(ref)), "other containers")
			if err := c.judged(err); err != nil {
				return err
			}
		}
		p.Mounts = body.From(p.Mounts, e.ContainerSpec, ct.Mounts, readOnly, fmt.Sprintf("%s[%d]", field, i))
		if len(p.Mounts) > body.MaxLookedUp {
			return proxy.Malformed(fmt.Sprintf("there are more than %d mounts", body.MaxLookedUp))
		}
	}
	return nil
}

// holdsMounts reports whether a container of the caller's has a volume without a name, and
// another mount in it. Such a container is started again only while nobody else can write to
// the volume.
func holdsMounts(c *call, volume string) (held bool, err error) {
	err = eachOwn(c, lifecycle.ObjectContainer, filters{"volume": {volume}}, func(o *labelled) {
		e, _ := effectiveOf(o.Labels)
		targets := e.Targets()
		for _, v := range e.Volumes {
			held = held || v.Source == "" && slices.ContainsFunc(targets, func(t string) bool { return t != v.Target && runtime.Below(t, v.Target) })
		}
	})
	return held, err
}
