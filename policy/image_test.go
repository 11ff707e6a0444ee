package policy

import (
	"errors"
	"strings"
	"testing"

	"github.com/distribution/reference"
)

const (
	sum  = "sha256:" + someSum
	sum2 = "sha256:ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff"
)

func TestParseImage(t *testing.T) {
	tests := []struct {
		in, want string
		err      error
	}{
		{"python", "python:latest", nil},
		{"python:3.11-slim", "python:3.11-slim", nil},
		{"docker.io/library/python:3.11-slim", "python:3.11-slim", nil},
		{"index.docker.io/library/python", "python:latest", nil},
		{"docker.io/acme/tool", "acme/tool:latest", nil},
		{"ghcr.io/acme/tool:v1", "ghcr.io/acme/tool:v1", nil},
		{"localhost:5000/x:Y", "localhost:5000/x:Y", nil},
		{"python@" + sum, "python@" + sum, nil},
		{"python:3@" + sum, "python@" + sum, nil},
		{"docker.io/foo.bar/x", "docker.io/foo.bar/x:latest", nil}, // short, it would be another registry's
		{"docker.io/localhost/x", "docker.io/localhost/x:latest", nil},
		{"docker.io/library/sha256:" + someSum, "docker.io/library/" + sum, nil}, // short, it would be an ID
		{"cafe:1", "cafe:1", nil},
		{"acme/cafe", "acme/cafe:latest", nil},
		{sum, "", errImageID},
		{"sha256:abcdef", "", errImageID},
		{someSum, "", errImageID},
		{"0123456789ab", "0123456789ab:latest", nil},
		{"a", "a:latest", nil},
		{"docker.io/library/0123456789ab", "0123456789ab:latest", nil},
		{"", "", errImageSyntax},
		{" python", "", errImageSyntax},
		{"python ", "", errImageSyntax},
		{"Python", "", errImageSyntax},
		{"pythоn", "", errImageSyntax}, // with a Cyrillic o
		{"python:", "", errImageSyntax},
		{"python:3\n", "", errImageSyntax},
		{"python\x00", "", errImageSyntax},
		{"../python", "", errImageSyntax},
		{"a//b", "", errImageSyntax},
		{"http://x/y", "", errImageSyntax},
		{"-x", "", errImageSyntax},
		{"python@sha256:1234", "", errImageSyntax},
		{"python@sha512:" + someSum + someSum, "", errImageSyntax},
		{"python@" + sum + "@" + sum, "", errImageSyntax},
		{"x/" + strings.Repeat("y", 600), "", errImageSyntax},
	}
	for _, tt := range tests {
		got, err := parseImage(tt.in)
		if !errors.Is(err, tt.err) || err == nil && got.String() != tt.want {
			t.Errorf("%q: got %q %v, want %q %v", tt.in, got, err, tt.want, tt.err)
		}
	}
}

func TestImagePatterns(t *testing.T) {
	tests := []struct {
		pattern  string
		yes, not []string
	}{
		{"*", []string{"python", "ghcr.io/a/b@" + sum}, nil},
		{"python", []string{"python", "python:3", "python@" + sum, "docker.io/library/python"}, []string{"pythons", "acme/python", "ghcr.io/library/python", "python/x"}},
		{"python:3.*", []string{"python:3.11", "python:3.", "library/python:3.1"}, []string{"python", "python:30", "python@" + sum, "python:3.11@" + sum}},
		{"python@" + sum, []string{"python@" + sum, "python:3@" + sum}, []string{"python", "python@" + sum2}},
		{"ghcr.io/acme/*", []string{"ghcr.io/acme/a", "ghcr.io/acme/a/b:1"}, []string{"ghcr.io/acme", "ghcr.io/acmes/a", "acme/a", "GHCR.io/acme/a", "ghcr.io:443/acme/a"}},
		{"ghcr.io/acme/*:v?", []string{"ghcr.io/acme/a:v1"}, []string{"ghcr.io/acme/a:v10", "ghcr.io/acme/a"}},
		{"ghcr.io/*", []string{"ghcr.io/x", "ghcr.io/a/b"}, []string{"ghcr.io.evil.org/x", "python", "docker.io/ghcr.io/x"}},
		{"localhost:5000/*", []string{"localhost:5000/x"}, []string{"localhost:50001/x", "localhost/x"}},
		{"docker.io/*", []string{"python", "acme/x"}, []string{"ghcr.io/x"}},
		{"index.docker.io/*", []string{"python"}, []string{"ghcr.io/x"}},
		{"library/*", []string{"python"}, []string{"acme/x"}},
		{"acme/*", []string{"acme/x"}, []string{"ghcr.io/acme/x", "python"}},
		{"cafe", []string{"cafe:1"}, []string{"python"}},
	}
	for _, tt := range tests {
		p, err := parsePattern(tt.pattern)
		if err != nil {
			t.Errorf("%s: %v", tt.pattern, err)
		}
		for want, refs := range map[bool][]string{true: tt.yes, false: tt.not} {
			for _, ref := range refs {
				img, err := parseImage(ref)
				if got := err == nil && p.match(img); got != want {
					t.Errorf("%s on %s: %v", tt.pattern, ref, got)
				}
			}
		}
	}
	for _, bad := range []string{"a b", "-/*", "UPPER.org/*/x", "x:", "x:[", "http://*", "un_der.score:x/*"} {
		if p, err := parsePattern(bad); err == nil {
			t.Errorf("%q is taken as %+v", bad, p)
		}
	}
}

func TestImageOfARequest(t *testing.T) {
	const yaml = `
profiles: {tool: {image: ghcr.io/acme/tool:v1}, fixed: {image: busybox, locked: [image]}}
images: {allow: ["alpine:3.*", "redis"], pins: {node:20: "` + sum + `", redis: "` + sum + `"}}
`
	tests := []struct {
		name, profile, asked, want string
		denied, overridden         string // rule
	}{
		{"left out", "", "", "python:3.11-slim", "", ""},
		{"a profile's", "tool", "", "ghcr.io/acme/tool:v1", "", ""},
		{"another profile's", "", "ghcr.io/acme/tool:v1", "ghcr.io/acme/tool:v1", "", ""},
		{"another tag of it", "", "ghcr.io/acme/tool:v2", "", ruleImageAllow, ""},
		{"another digest of it", "", "python:3.11-slim@" + sum, "", ruleImageAllow, ""},
		{"long form", "", "docker.io/library/python:3.11-slim", "python:3.11-slim", "", ""},
		{"allowed", "", "alpine:3.19", "alpine:3.19", "", ""},
		{"not allowed", "", "alpine", "", ruleImageAllow, ""},
		{"pinned", "", "node:20", "node@" + sum, "", ruleImagePins},
		{"pinned by digest", "", "node@" + sum, "node@" + sum, "", ""},
		{"pinned by both", "", "node:20@" + sum, "node@" + sum, "", ""},
		{"against the pin", "", "redis:latest@" + sum2, "", ruleImagePins, ""},
		{"other tag than the pin's", "", "redis:7", "redis:7", "", ""},
		{"digest of an allowed one", "", "redis@" + sum2, "redis@" + sum2, "", ""},
		{"locked", "fixed", "alpine:3.19", "busybox:latest", "", "profiles.fixed.locked"},
		{"locked, same", "fixed", "docker.io/library/busybox", "busybox:latest", "", ""},
		{"locked, malformed", "fixed", "UPPER", "busybox:latest", "", "profiles.fixed.locked"},
		{"malformed", "", "UPPER", "", ruleImageSyntax, ""},
		{"id", "", sum, "", ruleImageID, ""},
	}
	p := mustParse(t, yaml, Options{})
	for _, tt := range tests {
		v := p.Sandbox(Request{Profile: tt.profile, Image: &tt.asked})
		if tt.denied != "" {
			if r := v.Denials; len(r) == 0 || r[0].Rule != tt.denied || r[0].Field != "image" || r[0].Invalid != (tt.denied == ruleImageID || tt.denied == ruleImageSyntax) {
				t.Errorf("%s: %+v", tt.name, v)
			}
			continue
		}
		if !v.Allowed() || v.Spec.Image != tt.want {
			t.Errorf("%s: %s %v", tt.name, v.Spec.Image, v.Err())
		}
		if len(v.Overridden) == 0 && tt.overridden != "" || len(v.Overridden) > 0 && v.Overridden[0].Rule != tt.overridden {
			t.Errorf("%s: %+v", tt.name, v.Overridden)
		}
	}
	r := p.Sandbox(Request{Image: ptr("alpine")}).Denials[0]
	if want := "alpine:3.*, busybox:latest, ghcr.io/acme/tool:v1, node:20, python:3.11-slim, redis, redis:latest"; r.Allowed != want {
		t.Errorf("allowed is %q", r.Allowed)
	}
}

func TestRequireDigest(t *testing.T) {
	p := mustParse(t, `images: {require_digest: true, allow: ["*"], pins: {"python:3.11-slim": "`+sum+`"}}`, Options{})
	for asked, want := range map[string]string{"": "python@" + sum, "alpine@" + sum2: "alpine@" + sum2, "alpine": ""} {
		v := p.Sandbox(Request{Image: &asked})
		if want == "" && (v.Allowed() || v.Denials[0].Rule != ruleRequireDigest) || want != "" && v.Spec.Image != want {
			t.Errorf("%q: %+v", asked, v)
		}
	}
}

// FuzzImage: what is taken reads the same again, by us and by the engines' own
// parser, never as an image ID, and a pattern that allows it allows its short form.
func FuzzImage(f *testing.F) {
	for _, s := range []string{"python:3.11-slim", "docker.io/foo.bar/x", "docker.io/library/sha256:" + someSum, someSum, "a@" + sum, "localhost:5000/x:y@" + sum, "UPPER", "docker.io/localhost/x"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		img, err := parseImage(s)
		if err != nil {
			return
		}
		short := img.String()
		again, err := parseImage(short)
		if err != nil || again.String() != short || again.name != img.name || again.digest != img.digest {
			t.Fatalf("%q: %+v is %q, and that is %+v %v", s, img, short, again, err)
		}
		ref, err := reference.ParseAnyReference(short)
		if err != nil {
			t.Fatalf("%q: %v", short, err)
		}
		if named, ok := ref.(reference.Named); !ok || named.Name() != img.name {
			t.Errorf("%q is read as %v", short, ref)
		}
	})
}
