package engineapi

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/mount"
	"github.com/docker/docker/api/types/network"

	"github.com/bermhq/berm/proxy/engineapi/body"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/proxy"
)

// asAsked is a body that was denied, as it goes through in mode audit: as it came, but
// with Berm's own labels, and with IDs where it names what may be somebody else's.
// What is another caller's isn't there in this mode either.
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

// askedMode makes a namespace's mode name a container by its ID. It fails if the container
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

// askedNetwork gives the ID of a network that isn't another caller's, or the name of one
// of the engine's own.
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

// askedMounts labels the volumes that the engine may make.
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
		labels := maps.Clone(options.Labels)
		if labels == nil {
			labels = map[string]string{}
		}
		maps.Copy(labels, p.Volumes)
		options.Labels, m.VolumeOptions = labels, &options
	}
	return list, nil
}

// auditMade reports whether labels are those of a container that was denied, and made in
// mode audit, or don't say.
func auditMade(labels map[string]string) bool {
	var e struct{ Audit bool }
	return json.Unmarshal([]byte(labels[lifecycle.LabelEffective]), &e) != nil || e.Audit
}

// refuseUnconfined refuses to work in a container that was denied, and made in mode audit, to
// those whom the policy binds. It goes by the container that was looked up last.
func refuseUnconfined(c *call) error {
	if !c.unconfined {
		return nil
	}
	return c.allow([]policy.Reason{{Rule: "verify.start", Message: "the container was denied, and made in mode audit", Allowed: "a new container"}})
}
