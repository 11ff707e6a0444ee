package buildkit

import (
	"errors"
	"testing"

	"github.com/moby/buildkit/solver/pb"
	"github.com/moby/buildkit/sourcepolicy"
	spb "github.com/moby/buildkit/sourcepolicy/pb"
)

func TestMissing(t *testing.T) {
	const source = `docker-image://docker.io/library/busybox:1`
	for text, want := range map[string]string{
		`failed to solve: source "` + source + `" denied by policy`:           source,
		`{"error":"source \"` + source + `\" denied by policy: not allowed"}`: source,
		`source "` + source + `" not allowed by policy`:                       "",
		`source "https://x" denied by policy`:                                 "",
		`source "docker-image://a b" denied by policy`:                        "",
		`source "docker-image://` + PinHost + `x:1" denied by policy`:         "",
		`source "docker-image://` + bytesOf(1001) + `" denied by policy`:      "",
		"": "",
	} {
		if got := missing(text); got != want {
			t.Errorf("%s: %q", text, got)
		}
	}
}

// allows decides as the engine does, and returns what the source becomes.
func allows(t testing.TB, p *spb.Policy, id string) (string, bool) {
	op := &pb.SourceOp{Identifier: id}
	_, err := sourcepolicy.NewEngine([]*spb.Policy{p}).Evaluate(t.Context(), op)
	if err != nil && !errors.Is(err, sourcepolicy.ErrSourceDenied) {
		t.Error(err)
	}
	return op.Identifier, err == nil
}

func TestSources(t *testing.T) {
	s := newSources([]string{"https://files.example.com/pub/"})
	s.pins["docker-image://docker.io/library/a.b:1"] = pin{name: "docker.io/library/a.b:1", ref: PinHost + "one:1", id: "sha256:1"}
	s.uploads["http://buildkit-session/abc"], s.inputs["docker-image://"+PinHost+"two:1"] = true, true
	p := s.policy()
	if p.Version != 1 || p.Rules[0].Action != spb.PolicyAction_DENY {
		t.Error(p)
	}
	for id, want := range map[string]string{
		"docker-image://docker.io/library/a.b:1": image + PinHost + "one:1", image + PinHost + "one:1": image + PinHost + "one:1", image + PinHost + "one:1@sha256:1": image + PinHost + "one:1@sha256:1",
		image + PinHost + "two:1": image + PinHost + "two:1", "http://buildkit-session/abc": "http://buildkit-session/abc", "local://context": "local://context",
		"https://files.example.com/pub/a/b.tar": "https://files.example.com/pub/a/b.tar",
		image + PinHost + "one:1@sha256:2":      "", image + PinHost + "one:2": "", "x" + image + PinHost + "one:1": "", "docker-image://docker.io/library/axb:1": "", "docker-image://docker.io/library/a.b:1@sha256:2": "", "docker-image://docker.io/library/a.b:12": "",
		image + PinHost + "two:1@sha256:1": "", image + PinHost + "three:1": "", "http://buildkit-session/abcd": "", "http://buildkit-session/ab": "", "local://a\nb": "", "local://": "", "xlocal://a": "",
		"https://files.example.com/pub/": "", "https://files.example.com/pub/./a": "", "https://files.example.com/pub/.a": "", "https://files.example.com/pub//a": "", "https://files.example.com/pub/a//b": "",
		"https://files.example.com/pub/a/../../b": "", "https://files.example.com/pub/a\n": "", `https://files.example.com/pub/a\..\b`: "", "https://files.example.com/pub/../a": "", "https://files.example.com/pub/a/..": "", "https://files.example.com/pub/a?b": "", "https://files.example.com/pub/a#b": "", "https://files.example.com/pub/%2e": "", "https://filesXexample.com/pub/a": "", "http://files.example.com/pub/a": "", "git+https://files.example.com/pub/a": "",
		"docker-image://busybox": "", "git://x": "", "oci-layout://x": "", "https://x": "", "": "", "a\nb": "", "docker-image+blob://x": "",
	} {
		got, ok := allows(t, p, id)
		if ok != (want != "") || ok && got != want {
			t.Errorf("%q: %q, %v", id, got, ok)
		}
	}
	for id := range map[string]bool{"local://context": true, "docker-image://scratch": true, "x": true} {
		if _, ok := allows(t, newSources(nil).policy(), id); ok != (id == "local://context") {
			t.Errorf("%s: %v", id, ok)
		}
	}
	if got := s.shown().Replace("FROM " + PinHost + "one:1@sha256:1"); got != "FROM docker.io/library/a.b:1@sha256:1" {
		t.Error(got)
	}
}

// TestDerived has each name differ where a part or its place does.
func TestDerived(t *testing.T) {
	seen := map[string]bool{}
	for _, parts := range [][]string{{"a", "b"}, {"a", "c"}, {"ab"}, {"", "ab"}, {"ab", ""}, {"a", "b", ""}, {"1:a"}, {"a", "1:b"}} {
		seen[derive(parts...)] = true
	}
	if len(seen) != 8 || Pin("o", "t", "1") == Pin("p", "t", "1") || Pin("o", "t", "1") == Pin("o", "u", "1") || Pin("o", "t", "1") == Pin("o", "t", "2") {
		t.Error(seen)
	}
}
