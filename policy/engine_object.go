package policy

import (
	"cmp"
	"fmt"
	"slices"
)

// What a profile can switch off for clients of the engine's own API, by its key in
// the policy file.
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

// NetworkCreateRequest is a network as a client of the engine's own API asks for it.
// Fields that are harmless (labels) aren't in it, and those that no policy allows are
// in Other: an ingress or config-only network, another network's configuration, a scope.
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

// VolumeCreateRequest is a volume as a client of the engine's own API asks for it.
type VolumeCreateRequest struct {
	Name    string // empty is one that the engine makes up
	Driver  string // empty is "local"
	Options map[string]string
	Other   []OtherField // what no policy allows: a cluster volume
}

// ImageRef judges a reference to an image that a client of the engine's own API wants
// to pull, look at or remove, as that of a container is judged. It gives the
// reference that the engine is to be asked for. The error is a *DeniedError.
func (p *Policy) ImageRef(profile, ref string) (string, []Override, error) {
	j, ok := p.containerJudge(profile)
	if !ok {
		return "", nil, j.err()
	}
	run := j.image(&ref, false)
	return run, j.overridden, j.err()
}

// TagRef judges a name that a caller wants to give to an image of its own, and gives
// it in its normal form. The error is a *DeniedError.
//
// Whoever names an image decides what is run by that name. So a profile's and a pin's
// images never get a caller's, and what is on the allow-list only where the profile
// names its repository, or the namespace above it, among its tags: not by a whole
// registry or by "*".
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

// LoadRef is TagRef for a name that an archive of images gives. It has to match the
// profile's load too.
func (p *Policy) LoadRef(profile, ref string) (string, error) {
	name, err := p.TagRef(profile, ref)
	if err != nil {
		return name, err
	}
	return name, p.matches(profile, OpLoad, ruleLoad, name)
}

// PushRef judges a name with a tag by which a caller wants to push an image, and gives it
// in its normal form. The error is a *DeniedError.
func (p *Policy) PushRef(profile, ref string) (string, error) {
	img, err := parseImage(ref)
	if err != nil || img.digest != "" {
		j := &judge{policy: p}
		j.invalid(ruleImageSyntax, OpPush, ref, "a name with a tag, and no digest", fmt.Sprintf("%q is not a name that an image can be pushed by", shorten(ref)))
		return "", j.err()
	}
	return img.String(), p.matches(profile, OpPush, rulePush, ref)
}

// matches judges a name by the patterns of one of the profile's lists.
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

// Login judges a registry at which a caller wants to try its credentials. The error is a
// *DeniedError.
func (p *Policy) Login(profile, registry string) error {
	j, ok := p.containerJudge(profile)
	if ok && !slices.Contains(j.api.Login, registry) {
		allowed := inList(j.api.Login, "none")
		j.deny(ruleLogin, "serveraddress", registry, allowed, fmt.Sprintf("registry %q is refused: it is not one of profile %s's engine_api.login (allowed is %s)", shorten(registry), j.profile.Name, allowed))
	}
	return j.err()
}

// ListsImage tells whether an image that isn't the caller's own, but has these names
// (RepoTags and RepoDigests), may be seen with the profile: one of them is what a
// container could be made of.
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

// Operation tells whether the profile allows an operation, one of OpPull and so on.
// The error is a *DeniedError.
func (p *Policy) Operation(profile, op string) error {
	j, ok := p.containerJudge(profile)
	if ok {
		j.operation(op)
	}
	return j.err()
}

// Redacted tells whether a variable's value is kept from clients of the engine's own
// API: it is injected, or matches the profile's redact_env.
func (p *Policy) Redacted(profile, name string) bool {
	pr, ok := p.profiles[cmp.Or(profile, defaultProfile)] // no copy: it is asked for each variable
	if _, injected := p.env.inject[name]; injected || !ok {
		return true
	}
	return matchAny(pr.EngineAPI.RedactEnv, name)
}
