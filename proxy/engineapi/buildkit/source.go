package buildkit

import (
	"maps"
	"regexp"
	"slices"
	"strings"

	"github.com/moby/buildkit/solver/pb"
	spb "github.com/moby/buildkit/sourcepolicy/pb"
)

// PinHost begins the names of pins. No client may use them.
const PinHost = "berm.invalid/p/"

// Pins begins the names of one Berm's pins.
func Pins(owner string) string { return PinHost + derive("owner", owner) + "/" }

// Pin returns the repository of a pin: an image's second name, for the builds of one tenant.
// Its tag is 1.
func Pin(owner, tenant, id string) string { return Pins(owner) + derive("pin", tenant, id) }

const (
	maxPins  = 32
	maxGiven = 64 // uploads and inputs
	image    = "docker-image://"
)

// pin is a judged image under a name that no Dockerfile can have.
type pin struct {
	name    string // as the client knows it
	ref, id string
	release func()
}

// deniedSource matches BuildKit's error for a source that its policy denies. A forged text
// gets a judgement, and nothing else.
var deniedSource = regexp.MustCompile(`source \\?"(docker-image://[^"\s\\]{1,1000})\\?" denied by policy`)

// missing returns the source that an error names, or "".
func missing(text string) string {
	m := deniedSource.FindStringSubmatch(text)
	if m == nil || strings.Contains(m[1], PinHost) {
		return ""
	}
	return m[1]
}

// sources is what a build may read.
type sources struct {
	pins    map[string]pin  // by BuildKit's identifier of the source
	uploads map[string]bool // URLs of files that the client sends
	inputs  map[string]bool // pins of other builds, by BuildKit's identifier
	remote  []string        // URLs that ADD may begin with
}

func newSources(remote []string) *sources {
	return &sources{pins: map[string]pin{}, uploads: map[string]bool{}, inputs: map[string]bool{}, remote: remote}
}

func rule(action spb.PolicyAction, match spb.MatchType, identifier string) *spb.Rule {
	return &spb.Rule{Action: action, Selector: &spb.Selector{Identifier: identifier, MatchType: match}}
}

// below matches a path that no server can resolve to one outside of the directory before it.
const below = `[A-Za-z0-9_~-][A-Za-z0-9._~-]*(/[A-Za-z0-9_~-][A-Za-z0-9._~-]*)*`

// policy returns the source policy. The last rule that matches decides.
func (s *sources) policy() *spb.Policy {
	rules := []*spb.Rule{
		rule(spb.PolicyAction_DENY, spb.MatchType_REGEX, `(?s).*`),
		rule(spb.PolicyAction_ALLOW, spb.MatchType_REGEX, `^local://[A-Za-z0-9._:/-]+$`),
	}
	for _, allowed := range []map[string]bool{s.uploads, s.inputs} {
		for _, id := range slices.Sorted(maps.Keys(allowed)) {
			rules = append(rules, rule(spb.PolicyAction_ALLOW, spb.MatchType_EXACT, id))
		}
	}
	for _, url := range s.remote {
		rules = append(rules, rule(spb.PolicyAction_ALLOW, spb.MatchType_REGEX, "^"+regexp.QuoteMeta(url)+below+"$"))
	}
	for _, source := range slices.Sorted(maps.Keys(s.pins)) {
		p := s.pins[source]
		convert := rule(spb.PolicyAction_CONVERT, spb.MatchType_REGEX, "^"+regexp.QuoteMeta(source)+"$")
		convert.Updates = &spb.Update{Identifier: image + p.ref}
		rules = append(rules, rule(spb.PolicyAction_ALLOW, spb.MatchType_REGEX, "^"+regexp.QuoteMeta(image+p.ref)+"(@"+regexp.QuoteMeta(p.id)+")?$"), convert)
	}
	return &spb.Policy{Version: 1, Rules: rules}
}

// shown returns a replacer of pins by the names that the client knows.
func (s *sources) shown() *strings.Replacer {
	var names []string
	for _, p := range s.pins {
		names = append(names, p.ref, p.name)
	}
	return strings.NewReplacer(names...)
}

// release releases all pins.
func (s *sources) release() {
	for _, p := range s.pins {
		p.release()
	}
}

// pinnedIn returns the sources of a definition that are pins.
func pinnedIn(def *pb.Definition) (ids []string) {
	for _, text := range def.GetDef() {
		var op pb.Op
		if op.Unmarshal(text) == nil && strings.HasPrefix(op.GetSource().GetIdentifier(), image+PinHost) {
			ids = append(ids, op.GetSource().GetIdentifier())
		}
	}
	return ids
}

// pinImage judges the image of a source and pins it.
func (b *build) pinImage(source string, pull bool) (pin, error) {
	name := strings.TrimPrefix(source, image)
	id, err := b.judge.Base(name, pull, b.login)
	if err != nil {
		return pin{}, err
	}
	ref, release, err := b.judge.Pin(id)
	return pin{name: name, ref: ref, id: id, release: release}, err
}
