package policy

import (
	"errors"
	"fmt"
	"path"
	"regexp"
	"slices"
	"strings"

	"github.com/distribution/reference"
)

const (
	maxImageBytes = 512
	dockerHub     = "docker.io"
	reservedHost  = "berm.invalid" // of names that only Berm gives
)

var (
	errImageSyntax = errors.New("is not an image reference")
	errImageID     = errors.New("is an image ID; only references by name are taken")

	sha256Sum = regexp.MustCompile(`^sha256:[0-9a-f]{64}$`)
)

// image is a parsed reference. Its tag is never empty, unless there is a digest.
type image struct {
	name   string // with its registry: "docker.io/library/python"
	tag    string
	digest string // "sha256:…", or empty
}

// parseImage parses a reference as engines do. The tag is "latest" if there is neither a tag nor
// a digest. It refuses an image ID, but takes the start of one for a name.
func parseImage(s string) (image, error) {
	if len(s) > maxImageBytes {
		return image{}, errImageSyntax
	}
	if strings.HasPrefix(s, "sha256:") || sha256Sum.MatchString("sha256:"+s) {
		return image{}, errImageID
	}
	named, err := reference.ParseNormalizedNamed(s)
	if err != nil || reference.Domain(named) == reservedHost {
		return image{}, errImageSyntax
	}
	img := image{name: named.Name()}
	if t, ok := named.(reference.Tagged); ok {
		img.tag = t.Tag()
	}
	if d, ok := named.(reference.Digested); ok {
		img.digest = d.Digest().String()
		if !sha256Sum.MatchString(img.digest) {
			return image{}, errImageSyntax
		}
	}
	if img.tag == "" && img.digest == "" {
		img.tag = "latest"
	}
	return img, nil
}

// String returns the form that a Spec has and the engine gets. It is short for Docker Hub's
// images ("python:3.11-slim"), unless the short form would mean another image. It has the
// digest instead of the tag if there is one.
func (i image) String() string {
	name := i.name
	if named, err := reference.ParseNormalizedNamed(i.name); err == nil {
		short := reference.FamiliarName(named)
		if again, err := parseImage(i.suffix(short)); err == nil && again.name == i.name {
			name = short
		}
	}
	return i.suffix(name)
}

func (i image) suffix(name string) string {
	if i.digest != "" {
		return name + "@" + i.digest
	}
	return name + ":" + i.tag
}

type imageRules struct {
	allow         []imagePattern
	patterns      []string
	pins          map[string]string // normalised reference -> digest
	requireDigest bool
	pull          string
}

// The answers of PullPolicy.
const (
	PullMissing = "missing" // pull what the engine doesn't have
	PullAlways  = "always"  // ask the registry every time
	PullNever   = "never"   // what the engine doesn't have can't be used
)

// PullPolicy returns when images are pulled: PullMissing, PullAlways or PullNever.
func (p *Policy) PullPolicy() string { return p.images.pull }

// imagePattern matches a repository, or with prefix all repositories below repo.
type imagePattern struct {
	all, prefix bool
	repo        string
	tag         string // a glob; empty is any tag, and any digest
	digest      string // empty is any
}

func parsePattern(s string) (imagePattern, error) {
	if s == "*" {
		return imagePattern{all: true}, nil
	}
	var p imagePattern
	repo, digest, hasDigest := strings.Cut(s, "@")
	if hasDigest {
		if !sha256Sum.MatchString(digest) {
			return p, errors.New("its digest is not sha256: and 64 hex digits")
		}
		p.digest = digest
	}
	if i := strings.LastIndex(repo, ":"); i > strings.LastIndex(repo, "/") {
		repo, p.tag = repo[:i], repo[i+1:]
		if _, err := path.Match(p.tag, ""); err != nil || p.tag == "" || hasDigest {
			return p, errors.New("a tag must be a pattern, and can't go with a digest")
		}
	}
	if repo, p.prefix = strings.CutSuffix(repo, "/*"); p.prefix {
		// A bare registry is no repository, so that it can't be parsed as one.
		if !strings.Contains(repo, "/") && (strings.ContainsAny(repo, ".:") || repo == "localhost") {
			if _, err := reference.ParseNormalizedNamed(repo + "/x"); err != nil {
				return p, errImageSyntax
			}
			if p.repo = repo; repo == "index."+dockerHub {
				p.repo = dockerHub
			}
			return p, nil
		}
		repo += "/x"
	}
	img, err := parseImage(repo)
	if err != nil {
		return p, err
	}
	if p.repo = img.name; p.prefix {
		p.repo = strings.TrimSuffix(p.repo, "/x")
	}
	return p, nil
}

func (p imagePattern) match(i image) bool {
	switch {
	case p.all:
		return true
	case p.prefix && !strings.HasPrefix(i.name, p.repo+"/"), !p.prefix && i.name != p.repo:
		return false
	case p.digest != "":
		return i.digest == p.digest
	case p.tag != "":
		// A digest decides what is run, whatever the tag beside it says.
		ok, _ := path.Match(p.tag, i.tag)
		return ok && i.digest == ""
	}
	return true
}

// wide reports whether a pattern matches whole registries. A pattern below localhost isn't wide,
// as local images have such names.
func (p imagePattern) wide() bool {
	return p.all || p.prefix && !strings.Contains(p.repo, "/") && p.repo != "localhost"
}

func (l *loader) loadImages() {
	f := &l.file.Images
	r := imageRules{patterns: f.Allow, pins: map[string]string{}, requireDigest: f.RequireDigest}
	for i, s := range f.Allow {
		p, err := parsePattern(s)
		if err != nil {
			l.problem(fmt.Sprintf("images.allow[%d]", i), "%q is no pattern: %v", s, err)
			continue
		}
		r.allow = append(r.allow, p)
	}
	for _, ref := range sortedKeys(f.Pins) {
		at := join("images.pins", ref)
		img, err := parseImage(ref)
		switch {
		case err != nil:
			l.problem(at, "%q %v", ref, err)
		case img.digest != "":
			l.problem(at, "a pinned reference has a tag, and no digest")
		case !sha256Sum.MatchString(f.Pins[ref]):
			l.problem(at, "must be sha256: and 64 hex digits")
		case r.pins[img.String()] != "":
			l.problem(at, "is pinned twice, as %s", img)
		default:
			r.pins[img.String()] = f.Pins[ref]
		}
	}
	r.pull = l.choice("images.pull", &f.Pull, PullMissing, PullAlways, PullNever)
	l.policy.images = r
}

// pinned returns the image to run for a requested one: with the digest of its pin, if any.
func (r imageRules) pinned(i image) image {
	if i.digest == "" {
		i.digest = r.pins[i.String()]
	}
	return i
}

// implicit reports whether an image needs no entry on the allow-list, because a profile or a pin
// names it.
func (p *Policy) implicit(i image) bool {
	s := i.String()
	if p.images.pins[s] != "" {
		return true
	}
	for ref, digest := range p.images.pins {
		pin, _ := parseImage(ref)
		if i.name == pin.name && i.digest == digest {
			return true
		}
	}
	for _, pr := range p.profiles {
		if pr.Image == s {
			return true
		}
	}
	return false
}

// image judges a requested reference, or the profile's if ref is nil, and returns the one to
// run. A trusted image, which is the caller's own, needs neither an entry on the allow-list
// nor a digest.
func (j *judge) image(ref *string, trusted bool) string {
	own := j.profile.Image
	asked := own
	if ref != nil {
		asked = *ref
	}
	img, err := parseImage(asked)
	if err != nil && !j.profile.locked("image") {
		rule := ruleImageSyntax
		if errors.Is(err, errImageID) {
			rule = ruleImageID
		}
		j.invalid(rule, "image", asked, "a reference such as "+own, fmt.Sprintf("image %q %v", shorten(asked), err))
		return ""
	}
	if j.profile.locked("image") && (err != nil || img.String() != own) {
		j.override(lockedRule(j.profile.Name), "image", asked, own)
		img, _ = parseImage(own)
	}
	rules := j.policy.images
	run := rules.pinned(img)
	if run != img && asked != own {
		j.override(ruleImagePins, "image", asked, run.String())
	}
	tagged := image{name: img.name, tag: img.tag}
	if pin := rules.pins[tagged.String()]; img.tag != "" && pin != "" && run.digest != pin {
		j.deny(ruleImagePins, "image", asked, pin, fmt.Sprintf("image %q is pinned to %s by the policy", shorten(asked), pin))
	}
	if trusted {
		return run.String()
	}
	if !j.policy.implicit(img) && !slices.ContainsFunc(rules.allow, func(p imagePattern) bool { return p.match(img) }) {
		allowed := strings.Join(j.policy.allowedImages(), ", ")
		j.deny(ruleImageAllow, "image", asked, allowed, fmt.Sprintf("image %q is not on the policy's allow-list; allowed is %s", shorten(asked), allowed))
	}
	if rules.requireDigest && run.digest == "" {
		j.deny(ruleRequireDigest, "image", asked, "a reference with a digest, or one that the policy pins",
			fmt.Sprintf("image %q has no digest, which the policy demands", shorten(asked)))
	}
	return run.String()
}

// allowedImages returns the patterns and references of the images that may be requested.
func (p *Policy) allowedImages() []string {
	s := append(slices.Clone(p.images.patterns), sortedKeys(p.images.pins)...)
	for _, name := range p.Profiles() {
		s = append(s, p.profiles[name].Image)
	}
	slices.Sort(s)
	return slices.Compact(s)
}
