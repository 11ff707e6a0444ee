package engineapi

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strings"

	"github.com/bermhq/berm/proxy/engineapi/body"
	"github.com/bermhq/berm/proxy/engineapi/buildkit"

	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/proxy/engineapi/upstream"

	"github.com/distribution/reference"
	"github.com/docker/go-connections/nat"
	"github.com/opencontainers/go-digest"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/runtime"
)

// plan is a judged container before it is created.
type plan struct {
	body.Judged
	image    imageInfo
	missing  []string // names of volumes to create
	audited  bool     // the policy denied it; in mode audit it is created as it was asked for
	warnings []string
}

// imageInfo is the part of an inspected image that the proxy uses.
type imageInfo struct {
	ID                    string `json:"Id"`
	RepoTags, RepoDigests []string
	Config                imageConfig
}

type imageConfig struct {
	User, WorkingDir string
	Env              []string
	Labels           map[string]string
	OnBuild          []string
	Volumes          map[string]struct{}
	ExposedPorts     nat.PortSet
}

// planContainer judges a request and plans the container. It creates nothing, except a missing
// network of the policy's.
func planContainer(c *call, b *body.Create) (*plan, error) {
	if b.HostConfig == nil {
		b.HostConfig = &body.Host{}
	}
	ttl, err := c.callersLabels(b.Labels)
	if err != nil {
		return nil, err
	}
	if err := b.Check(); err != nil {
		return nil, err
	}
	if encodedBytes([]any{b.Cmd, b.Entrypoint}) > maxCommandBytes {
		return nil, proxy.Malformed(fmt.Sprintf("the command has more than %d bytes, as JSON", maxCommandBytes))
	}
	if _, err := reference.ParseAnyReference(b.Image); err != nil {
		return nil, proxy.Malformed(fmt.Sprintf("invalid reference format: %q", body.Shorten(b.Image)))
	}
	req, err := b.Request()
	if err != nil {
		return nil, err
	}
	req.Profile, req.TTL = c.caller.Profile, ttl
	p := &plan{Judged: body.Judged{Body: b}}
	if req.Networks, p.Endpoints, err = joinedNetworks(c, b); err != nil {
		return nil, err
	}
	if err := c.judged(findPeer(c, req.PidOf)); err != nil {
		return nil, err
	}
	if err := judgePlan(c, p, req); err != nil {
		return nil, err
	}
	return p, finishPlan(c, p)
}

// judgePlan judges the request by the policy. If the policy replaces the image, judgePlan looks
// up the replacement and judges again: the container gets that image's volumes and ports.
func judgePlan(c *call, p *plan, req policy.ContainerRequest) error {
	asked, byID := p.Body.Image, ""
	for range 3 {
		img, err := seenImage(c, asked)
		if err == nil && img == nil {
			img, err = lookUpImage(c, byName(c, asked))
		}
		if err != nil {
			return err
		}
		again, named := req, asked
		if img != nil {
			again.Trusted = ownImage(c, img.Config.Labels)
			if named = nameOf(c, asked, img, again.Trusted); named != asked {
				byID = img.ID
			}
			p.image = *img
		}
		if len(p.image.Config.Volumes) > body.MaxLookedUp || len(p.image.Config.ExposedPorts) > body.MaxListed {
			return denied("request.image", "Image", "the image declares more volumes or ports than anybody needs", "another image")
		}
		again.Image = named
		if again.Ports, err = p.Body.Published(req.Ports, p.image.Config.ExposedPorts); err != nil {
			return err
		}
		if p.Mounts, err = p.Body.Mounts(c.socket); err != nil {
			return err
		}
		if err := mountsFrom(c, p); err != nil {
			return err
		}
		p.Mounts = body.Anonymous(p.Mounts, p.image.Config.Volumes, "the image's VOLUME")
		if p.missing, err = lookUpVolumes(c, p.Mounts); err != nil {
			return err
		}
		again.Mounts = nil
		for _, m := range p.Mounts {
			again.Mounts = append(again.Mounts, m.ContainerMount)
		}
		verdict := c.rules.Container(again)
		if err := c.allow(verdict.Denials); err != nil {
			return err
		}
		p.Spec, p.audited, p.ImageRef = verdict.Spec, !verdict.Allowed(), verdict.Spec.Image
		if p.audited || again.Trusted && named == p.Spec.Image || sameImage(named, p.Spec.Image) {
			return settleImage(c, p, img, byID, verdict.Overridden)
		}
		asked = p.Spec.Image
	}
	return fmt.Errorf("the policy has no end of images in the stead of %q", body.Shorten(p.Body.Image))
}

// settleImage fails unless the image exists and has none of Berm's own labels. Then it chooses
// the reference that the engine gets.
func settleImage(c *call, p *plan, img *imageInfo, byID string, overridden []policy.Override) error {
	if img == nil {
		return notFound("No such image: " + familiar(p.Body.Image))
	}
	if p.Body.WorkingDir == "" && runtime.KernelPath(img.Config.WorkingDir) {
		return denied("request.working_dir", "Image", fmt.Sprintf("the image's working directory %q is in a file system of the kernel", body.Shorten(img.Config.WorkingDir)), "a working directory elsewhere")
	}
	for name := range img.Config.Labels {
		if lifecycle.IsOwnLabel(name) && !(ownImage(c, img.Config.Labels) && (stamped(name) || name == labelTTL)) {
			return denied("labels.reserved", "Image", fmt.Sprintf("the image has a label %q, which is Berm's own", body.Shorten(name)), "images without such labels")
		}
	}
	if encodedBytes(img.Config.Labels) > maxImageLabelBytes {
		return denied("request.image", "Image", fmt.Sprintf("the image has more than %d bytes of labels, as JSON", maxImageLabelBytes), "another image")
	}
	if byID != "" {
		if img.ID != byID {
			return denied("images.pins", "Image", "the image of this ID is not the one that the policy has in its stead", p.Spec.Image)
		}
		p.ImageRef = img.ID
	} else if !imageID.MatchString(p.Body.Image) && sameImage(p.Body.Image, p.Spec.Image) {
		p.ImageRef = p.Body.Image // means the judged image to every engine, and clients compare it
	}
	for _, o := range overridden {
		p.warnings = append(p.warnings, fmt.Sprintf("%s: %v instead of %q (rule %s)", o.Field, o.Effective, fmt.Sprint(o.Requested), o.Rule))
	}
	return nil
}

// stamped reports whether a label is one that every container of the proxy gets.
func stamped(name string) bool {
	return slices.Contains([]string{
		lifecycle.LabelOwner, lifecycle.LabelDoor, lifecycle.LabelTenant, lifecycle.LabelCaller, lifecycle.LabelProfile, lifecycle.LabelSessionID,
		lifecycle.LabelCreatedAt, lifecycle.LabelExpiresAt, lifecycle.LabelDeadline, lifecycle.LabelEffective, lifecycle.LabelSeal,
	}, name)
}

var imageID = regexp.MustCompile(`^(sha256:)?[0-9a-f]{1,64}$`)

// byName returns a reference that no engine takes for a prefix of an ID. In mode audit it
// returns ref itself: a caller there may use any image.
func byName(c *call, ref string) string {
	if idStart.MatchString(ref) && !c.caller.Audit {
		return ref + ":latest"
	}
	return ref
}

// nameOf returns a name for the policy to judge, for an image that may be asked for by its ID or
// a prefix of it.
func nameOf(c *call, asked string, img *imageInfo, own bool) string {
	hex := strings.TrimPrefix(asked, "sha256:")
	if !imageID.MatchString(asked) || !strings.HasPrefix(img.ID, "sha256:"+hex) {
		return asked
	}
	if slices.ContainsFunc(img.RepoTags, func(tag string) bool { return sameImage(tag, asked) }) {
		return asked
	}
	if own {
		return img.ID
	}
	for _, name := range slices.Concat(img.RepoTags, img.RepoDigests) {
		if _, _, err := c.rules.ImageRef(c.caller.Profile, name); err == nil {
			return name
		}
	}
	return asked // the denial must not reveal an image that the caller may not see
}

// lookUpImage inspects an image of the engine's. It returns nil if there is none of that name.
// Callers can't use the names of pins, as these would reveal what other tenants build.
func lookUpImage(c *call, ref string) (*imageInfo, error) {
	if _, err := reference.ParseAnyReference(ref); err != nil || strings.HasPrefix(ref, buildkit.PinHost) {
		return nil, nil // a malformed reference could change the request's path
	}
	var img imageInfo
	err := c.engine.Get(c.ctx, c.version, "/images/"+ref+"/json", nil, &img)
	switch {
	case upstream.StatusOf(err) == http.StatusNotFound:
		return nil, nil
	case err != nil:
		return nil, err
	case img.ID == "":
		return nil, fmt.Errorf("inspect image: the engine's answer has no ID")
	}
	return &img, nil
}

func sameImage(a, b string) bool {
	left, errLeft := reference.ParseDockerRef(a)
	right, errRight := reference.ParseDockerRef(b)
	return errLeft == nil && errRight == nil && left.String() == right.String()
}

// familiar returns an image's name in the form of the engine's errors.
func familiar(ref string) string {
	if named, err := reference.ParseNormalizedNamed(ref); err == nil {
		return reference.FamiliarString(reference.TagNameOnly(named))
	}
	return body.Shorten(ref)
}

// finishPlan completes the spec, and stamps the labels.
func finishPlan(c *call, p *plan) error {
	s := &p.Spec
	if !p.audited { // an audited container is created as it was asked for
		if err := completePlan(c, p); err != nil {
			return err
		}
	}
	p.Labels = unsealedLabels(c, p.Body.Labels, s.TTL, s.MaxLifetime)
	p.Volumes = maps.Clone(p.Labels)
	maps.DeleteFunc(p.Volumes, func(name, _ string) bool { return !stamped(name) })
	c.opts.Sealer.Seal(lifecycle.ObjectVolume, p.Volumes)
	if ttl, there := p.image.Config.Labels[labelTTL]; there && p.Labels[labelTTL] == "" {
		p.Labels[labelTTL] = ttl // the engine adds it
	}
	if !slices.ContainsFunc(sortedKeys(c.opts.Labels), func(name string) bool { return p.Labels[name] != "" }) {
		maps.Copy(p.Labels, c.opts.Labels)
	}
	return describePlan(c, p)
}

// effective returns the spec that the container's label keeps.
func (p *plan) effective() effective {
	e := effective{Granted: body.Granted{ContainerSpec: p.Spec, ImageID: p.image.ID, Audit: p.audited, RestartMax: restartOf(p).MaxRetries, Sources: p.Sources}}
	if p.Seccomp != "" {
		e.Seccomp = digest.FromString(p.Seccomp).String()
	}
	return e
}

// describePlan writes the effective spec into its label, and seals all labels.
func describePlan(c *call, p *plan) error {
	label, err := json.Marshal(p.effective())
	if err != nil {
		return fmt.Errorf("encode the effective spec: %w", err)
	}
	if encodedBytes(string(label)) > maxEffectiveBytes {
		return proxy.Malformed("it asks for more mounts, networks, ports, hosts and limits than anybody needs")
	}
	p.Labels[lifecycle.LabelEffective] = string(label)
	c.opts.Sealer.Seal(lifecycle.ObjectContainer, p.Labels)
	return nil
}

// completePlan fills in what the judged spec leaves open: the image's user, the host's CPUs, the
// IDs of the policy's networks, and the containers of links.
func completePlan(c *call, p *plan) error {
	s := &p.Spec
	if s.User == "" {
		s.User = p.image.Config.User
	}
	host, err := c.engine.HostInfo(c.ctx, c.version)
	if err != nil {
		return err
	}
	s.CPUs, p.Seccomp = min(s.CPUs, float64(host.CPUs)), host.Seccomp // the engine would refuse more CPUs
	for i := range s.Networks {
		n := &s.Networks[i]
		if n.ID != "" || n.Mode != policy.NetNamed {
			continue
		}
		info, err := policyNetwork(c, n.Name)
		if err != nil {
			return err
		}
		if info == nil {
			return denied("networks.missing", n.Field, fmt.Sprintf("the policy's network %s isn't there and can't be made, or Berm didn't make the one that is there", n.Name),
				"another network, or none; an operator may remove or rename one that Berm didn't make")
		}
		n.ID, n.Internal = info.ID, info.Internal
	}
	if err := checkNames(c, p, c.query.Get("name")); err != nil {
		return err
	}
	for _, e := range p.image.Config.Env {
		name, _, _ := strings.Cut(e, "=")
		if _, pinned := s.Env[name]; !pinned && c.rules.DeniesEnv(name) {
			p.Unset = append(p.Unset, name)
			p.warnings = append(p.warnings, fmt.Sprintf("Env: the image's %s is left out (rule env.deny)", body.Shorten(name)))
		}
	}
	for _, e := range p.Endpoints {
		if e == nil || len(e.Links) == 0 {
			continue
		}
		if e.Links, err = ownLinks(c, e.Links); err != nil {
			return err
		}
	}
	if weight := p.Body.HostConfig.BlkioWeight; weight != 0 {
		p.warnings = append(p.warnings, fmt.Sprintf("HostConfig.BlkioWeight: %d isn't passed on, as it would take other containers' share", weight))
	}
	for _, m := range p.Mounts {
		if m.Label {
			p.warnings = append(p.warnings, m.Field+": the option to label it for SELinux isn't passed on")
		}
	}
	return nil
}

var (
	hexName   = regexp.MustCompile(`^[0-9a-f]{12,64}$`)
	nameRules = map[lifecycle.ObjectKind]string{
		lifecycle.ObjectContainer: "request.name", lifecycle.ObjectNetwork: "networks.name", lifecycle.ObjectImage: "images.tags",
	}
)

// checkNames refuses names that could be mistaken for another's. A container's name must not
// read as an ID. On a network that others share, no name may read as a host's on the Internet.
func checkNames(c *call, p *plan, name string) error {
	if name != "" && !objectName.MatchString(name) {
		return proxy.Malformed("Invalid container name (" + body.Shorten(name) + "), only [a-zA-Z0-9][a-zA-Z0-9_.-] are allowed")
	}
	if err := checkIDName(c, lifecycle.ObjectContainer, strings.TrimPrefix(name, "/")); err != nil {
		return err
	}
	shared := slices.ContainsFunc(p.Spec.Networks, func(n policy.ContainerNetwork) bool { return n.Mode == policy.NetNamed && !n.Own })
	if !shared {
		return nil
	}
	return sharedName(name + p.Body.Hostname)
}

// checkIDName refuses a name that reads as a full ID, or that is a prefix of an object's ID.
// Clients show the first 12 digits of IDs, and engines look for names first.
func checkIDName(c *call, kind lifecycle.ObjectKind, name string) error {
	if !hexName.MatchString(name) {
		return nil
	}
	taken := fullID.MatchString(name)
	query := url.Values{"all": {"1"}}
	if kind != lifecycle.ObjectImage {
		query.Set("filters", filters{"id": {name}}.String())
	}
	err := each(c.ctx, c.Proxy, c.version, kind, query, func(o *labelled) {
		taken = taken || strings.HasPrefix(strings.TrimPrefix(o.ID, "sha256:"), name)
	})
	if err == nil && taken {
		err = denied(nameRules[kind], "name", fmt.Sprintf("the name %q reads as an ID", body.Shorten(name)), "another name")
	}
	return err
}

// sharedName refuses a name that reads as a host's on the Internet. On a network that others
// share, the engine's name server would resolve it to this container for them.
func sharedName(name string) error {
	if strings.Contains(name, ".") {
		return denied("request.name", "name", "on a network that others share, neither the name nor the hostname may have a dot", "names without a dot")
	}
	return nil
}
