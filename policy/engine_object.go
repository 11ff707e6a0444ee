package policy

import (
	"cmp"
	"fmt"
	"slices"
)

// The operations of the engine's API that a profile can switch off, by their keys in the
// policy file.
const (
	OpPull    = "pull"
	OpBuild   = "build"
	OpCommit  = "commit"
	OpArchive = "archive"
	OpExec    = "exec"
	OpLoad    = "load"
	OpPush    = "push"
	OpLogin   = "login"

	OpDockerSocket = "docker_socket"
)

// NetworkCreateRequest is a client's request for a network by the engine's API. It has no
// harmless fields, such as labels. Other has the fields that no policy allows: an ingress or
// config-only network, another network's configuration, a scope.
type NetworkCreateRequest struct {
	Name     string
	Driver   string // empty is "bridge"
	Internal bool
	IPv6     bool
	Subnets  []NetworkSubnet
	Options  map[string]string
	Other    []OtherField
}

// NetworkSubnet is a range of addresses of a network. Range and Gateway may be empty.
type NetworkSubnet struct {
	Field                  string
	Subnet, Range, Gateway string
}

// NetworkSpec is a judged network of the engine's API. Its driver is "bridge".
type NetworkSpec struct {
	Name     string
	Internal bool
	IPv6     bool
	Subnets  []NetworkSubnet // in their normal form
	Options  map[string]string
}

// VolumeCreateRequest is a client's request for a volume by the engine's API.
type VolumeCreateRequest struct {
	Name    string // empty lets the engine choose
	Driver  string // empty is "local"
	Options map[string]string
	Other   []OtherField // fields that no policy allows: a cluster volume
}

// ImageRef judges the reference of an image that a client of the engine's API wants to pull,
// inspect or remove. The rules are those for a container's image. It returns the reference to
// pass to the engine. The error is a *DeniedError.
func (p *Policy) ImageRef(profile, ref string) (string, []Override, error) {
	j, ok := p.containerJudge(profile)
	if !ok {
		return "", nil, j.err()
	}
	run := j.image(&ref, false)
	return run, j.overridden, j.err()
}

// TagRef judges a name that a caller wants to give to its own image, and returns the name
// normalised. The error is a *DeniedError.
//
// If a caller could give its image another image's name, other callers would run the wrong image.
// So it can't use the name of a profile's image or of a pin. A name on the allow-list needs a tags
// pattern of its repository or of the namespace above it. A pattern of a whole registry, or "*",
// isn't enough.
func (p *Policy) TagRef(profile, ref string) (string, error) {
	j, ok := p.containerJudge(profile)
	if !ok {
		return "", j.err()
	}
	const field = "tag"
	img, err := parseImage(ref)
	if err != nil || img.digest != "" {
		j.invalid(ruleImageSyntax, field, ref, "a reference with a tag, and no digest", fmt.Sprintf("%q is not a name that an image can be given", shorten(ref)))
		return "", j.err()
	}
	listed := slices.ContainsFunc(p.images.allow, func(p imagePattern) bool { return p.match(img) })
	named := slices.ContainsFunc(j.api.Tags, func(s string) bool {
		pattern, err := parsePattern(s)
		return err == nil && pattern.match(img) && (!listed || !pattern.wide())
	})
	if !named || p.implicit(img) {
		allowed := inList(j.api.Tags, "none")
		j.deny(ruleTags, field, ref, allowed, fmt.Sprintf("image name %q is refused: it is not one of profile %s's engine_api.tags (allowed is %s), or everybody's image has it", shorten(ref), j.profile.Name, allowed))
	}
	return img.String(), j.err()
}

// LoadRef is TagRef for an image name in an archive. The name must match the profile's load
// patterns, too.
func (p *Policy) LoadRef(profile, ref string) (string, error) {
	name, err := p.TagRef(profile, ref)
	if err != nil {
		return name, err
	}
	return name, p.matches(profile, OpLoad, ruleLoad, name)
}

// PushRef judges the name, with a tag, by which a caller wants to push an image. It returns the
// name normalised. The error is a *DeniedError.
func (p *Policy) PushRef(profile, ref string) (string, error) {
	img, err := parseImage(ref)
	if err != nil || img.digest != "" {
		j := &judge{policy: p}
		j.invalid(ruleImageSyntax, OpPush, ref, "a name with a tag, and no digest", fmt.Sprintf("%q is not a name that an image can be pushed by", shorten(ref)))
		return "", j.err()
	}
	return img.String(), p.matches(profile, OpPush, rulePush, ref)
}

// matches returns a *DeniedError unless a name matches the profile's load or push patterns, by
// their key.
func (p *Policy) matches(profile, key, rule, ref string) error {
	j, ok := p.containerJudge(profile)
	if !ok {
		return j.err()
	}
	list := map[string][]string{OpLoad: j.api.Load, OpPush: j.api.Push}[key]
	img, err := parseImage(ref)
	if err != nil || !slices.ContainsFunc(list, func(s string) bool {
		pattern, err := parsePattern(s)
		return err == nil && pattern.match(img)
	}) {
		allowed := inList(list, "none")
		j.deny(rule, key, ref, allowed, fmt.Sprintf("image name %q is refused: it is not one of profile %s's engine_api.%s (allowed is %s)", shorten(ref), j.profile.Name, key, allowed))
	}
	return j.err()
}

// Login judges whether a caller may check its credentials with a registry. The error is a
// *DeniedError.
func (p *Policy) Login(profile, registry string) error {
	j, ok := p.containerJudge(profile)
	if ok && !slices.Contains(j.api.Login, registry) {
		allowed := inList(j.api.Login, "none")
		j.deny(ruleLogin, "serveraddress", registry, allowed, fmt.Sprintf("registry %q is refused: it is not one of profile %s's engine_api.login (allowed is %s)", shorten(registry), j.profile.Name, allowed))
	}
	return j.err()
}

// ListsImage reports whether a profile's caller may see an image that isn't its own. Refs are
// the image's RepoTags and RepoDigests. One of them must be an image that the profile allows
// for containers.
func (p *Policy) ListsImage(profile string, refs []string) bool {
	for _, ref := range refs {
		img, err := parseImage(ref)
		if err != nil {
			continue
		}
		j, ok := p.containerJudge(profile)
		if !ok {
			return false
		}
		// A reference that leads to another image doesn't show this one.
		if run := j.image(&ref, false); j.err() == nil && run == img.String() {
			return true
		}
	}
	return false
}

// Operation judges an operation, such as OpPull. The error is a *DeniedError if the profile
// doesn't allow it.
func (p *Policy) Operation(profile, op string) error {
	j, ok := p.containerJudge(profile)
	if ok {
		j.operation(op)
	}
	return j.err()
}

// Redacted reports whether clients of the engine's API don't see a variable's value: it is
// injected, or matches the profile's redact_env.
func (p *Policy) Redacted(profile, name string) bool {
	pr, ok := p.profiles[cmp.Or(profile, defaultProfile)] // no copy: it is asked for each variable
	if _, injected := p.env.inject[name]; injected || !ok {
		return true
	}
	return matchAny(pr.EngineAPI.RedactEnv, name)
}
