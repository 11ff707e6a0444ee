package buildkit

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"

	"github.com/bermhq/berm/proxy/engineapi/body"
)

// Limits of a build's attributes.
const (
	maxAttrs     = 512
	maxAttrBytes = 64 << 10
	maxAllBytes  = 512 << 10
)

// like returns a check for a pattern that must match the whole value.
func like(pattern string) func(string) bool {
	return regexp.MustCompile(`\A(?:` + pattern + `)\z`).MatchString
}

// relative reports whether a path stays below its directory.
func relative(v string) bool {
	return v != "" && v[0] != '/' && !slices.Contains(strings.Split(v, "/"), "..")
}

const word = `[A-Za-z0-9][A-Za-z0-9._/-]{0,200}`

var (
	// harmless are attributes that only need to be well formed.
	harmless = map[string]func(string) bool{
		"filename":       relative,
		"target":         like(word),
		"platform":       like(`[a-z0-9]*(/[a-z0-9]+){0,2}`), // one
		"multi-platform": like(`|false`),
		"no-cache":       like(`[A-Za-z0-9._,-]*`),
		"contextkey":     like(word),
		"dockerfilekey":  like(word),
		"requestid":      like(`|frontend\.(lint|outline|targets|subrequests\.describe)`),
	}
	// ownArgs are build arguments for BuildKit itself.
	ownArgs = map[string]func(string) bool{
		"BUILDKIT_INLINE_CACHE":         like(`|0|1|true|false`),
		"BUILDKIT_CONTEXT_KEEP_GIT_DIR": like(`|0|1|true|false`),
		"BUILDKIT_DOCKERFILE_CHECK":     like(`[A-Za-z0-9=;,_ -]{0,500}`),
		"BUILDKIT_BUILD_NAME":           like(`.{0,200}`),
		"BUILDKIT_MULTI_PLATFORM":       like(`|0|false`),
	}
	frontendCaps = []string{
		"moby.buildkit.frontend.inputs", "moby.buildkit.frontend.subrequests", "moby.buildkit.frontend.contexts", "moby.buildkit.frontend.gitquerystring",
	}
	uploadURL  = like(`https?://buildkit-session/[a-z0-9]{1,64}`)
	localName  = like(`local:[A-Za-z0-9._:/-]{1,200}`)
	imageName  = like(`docker-image://[^\s"]{1,400}`)
	argName    = like(`[A-Za-z_][A-Za-z0-9_.-]{0,100}`)
	provenance = like(`((type=provenance|mode=(min|max)|inline-only=(true|false)|disabled=(true|false)|version=v[0-9.]{1,8})(,|$))*`)
)

// attrs are the Dockerfile frontend's attributes, after judgement.
type attrs struct {
	out     map[string]string
	uploads []string // URLs of files that the client sends
	pull    bool     // the client wants images pulled again
}

// judgeAttrs judges the frontend's attributes and adds Berm's. Inputs allows attributes for
// results of other builds. Session translates the ID of a session.
func judgeAttrs(b Build, tenant string, in map[string]string, inputs bool, session func(string) (string, error)) (*attrs, error) {
	if err := limitAttrs(in); err != nil {
		return nil, err
	}
	a := &attrs{out: map[string]string{}}
	args, labels := map[string]string{}, map[string]string{}
	for _, key := range slices.Sorted(maps.Keys(in)) {
		value, ok := in[key], false
		switch name, rest, prefixed := strings.Cut(key, ":"); {
		case !prefixed:
			ok = a.plain(key, value)
		case name == "build-arg" && ownArgs[rest] != nil:
			a.out[key], ok = value, ownArgs[rest](value)
		case name == "build-arg":
			args[rest], ok = value, argName(rest) && !strings.HasPrefix(strings.ToUpper(rest), "BUILDKIT_")
		case name == "label":
			labels[rest], ok = value, true
		case name == "local-sessionid":
			id, err := session(value)
			if err != nil {
				return nil, err
			}
			a.out[key], ok = id, true
		case key == "attest:provenance":
			ok = a.provenance(b.Rules().Provenance, value)
		case name == "input-metadata", name == "context" && strings.HasPrefix(value, "input:"):
			a.out[key], ok = value, inputs
		case name == "context":
			a.out[key], ok = value, imageName(value) || localName(value)
		case name == "vcs", name == "sharedkey":
			a.out[key], ok = value, true
		}
		if !ok {
			return nil, denied("attributes", body.Shorten(key), fmt.Sprintf("%s=%s is refused", body.Shorten(key), body.Shorten(value)), "the options of docs/engine-differences.md")
		}
	}
	return a, a.add(b, tenant, args, labels)
}

func limitAttrs(in map[string]string) error {
	all := 0
	for key, value := range in {
		all += len(key) + len(value)
		if len(key)+len(value) > maxAttrBytes {
			return denied("attributes", body.Shorten(key), "the attribute is too long", fmt.Sprintf("up to %d bytes", maxAttrBytes))
		}
	}
	if len(in) > maxAttrs || all > maxAllBytes {
		return denied("attributes", "", "the build has too many attributes", fmt.Sprintf("up to %d, of %d bytes", maxAttrs, maxAllBytes))
	}
	return nil
}

// plain judges an attribute whose name has no prefix.
func (a *attrs) plain(key, value string) bool {
	switch key {
	case "image-resolve-mode":
		a.pull = value == "pull"
		return slices.Contains([]string{"pull", "local", "default", ""}, value)
	case "force-network-mode":
		a.out[key] = value
		return slices.Contains([]string{"none", "default", ""}, value)
	case "context":
		a.out[key], a.uploads = value, append(a.uploads, value)
		return uploadURL(value)
	case "frontend.caps":
		var keep []string
		for c := range strings.SplitSeq(value, ",") {
			if c = strings.TrimSuffix(c, "+forward"); slices.Contains(frontendCaps, c) {
				keep = append(keep, c)
			}
		}
		a.out[key] = strings.Join(keep, ",")
		return true
	}
	a.out[key] = value
	return harmless[key] != nil && harmless[key](value)
}

// provenance judges the attribute for an image's provenance. Without a mode, BuildKit would add
// the most detailed one.
func (a *attrs) provenance(most, value string) bool {
	switch {
	case !provenance(value) || most != "max" && strings.Contains(value, "mode=max"):
		return false
	case most == "off":
		return true
	case most == "min" && !strings.Contains(value, "mode=min"):
		value = strings.TrimPrefix(strings.TrimSuffix(value, ",")+",mode=min", ",")
	}
	a.out["attest:provenance"] = value
	return true
}

// add adds the attributes that only Berm sets.
func (a *attrs) add(b Build, tenant string, args, labels map[string]string) error {
	args, err := b.Args(args)
	if err != nil {
		return err
	}
	for name, value := range args {
		a.out["build-arg:"+name] = value
	}
	if labels, err = b.Labels(labels); err != nil {
		return err
	}
	for name, value := range labels {
		a.out["label:"+name] = value
	}
	limits, err := b.Limits()
	if err != nil {
		return err
	}
	none := a.out["force-network-mode"] == "none"
	delete(a.out, "force-network-mode")
	maps.Copy(a.out, limits)
	if none {
		a.out["force-network-mode"] = "none"
	}
	a.out["image-resolve-mode"] = "local"
	a.out["cmdline"] = "built-in"                         // without it a # syntax line names a frontend
	a.out["hostname"] = "b-" + derive("hostname", tenant) // part of a step's key in the cache
	a.out["build-arg:BUILDKIT_CACHE_MOUNT_NS"] = derive("cache", tenant)
	if rules := b.Rules(); rules.Cache == "off" {
		a.out["no-cache"] = ""
	}
	return nil
}
