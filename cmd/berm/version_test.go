package main

import (
	"debug/buildinfo"
	"encoding/json"
	"os"
	"strings"
	"testing"
)

// The bill names every module of the binary once, so that scanners know it.
func TestVersionSBOM(t *testing.T) {
	t.Parallel()
	stdout, stderr, code := berm(t, "", "version", "--sbom")
	if code != 0 {
		t.Fatalf("exit code %d, %s", code, stderr)
	}
	var got bill
	if err := json.Unmarshal([]byte(stdout), &got); err != nil || got.Format != "CycloneDX" || got.SpecVersion != "1.5" {
		t.Fatalf("%v: %.200s", err, stdout)
	}
	refs := map[string]string{}
	for _, part := range got.Components {
		if _, twice := refs[part.Ref]; twice || part.Ref == "" {
			t.Errorf("%q is there twice, or has no reference", part.Ref)
		}
		refs[part.Ref] = part.PURL
	}
	info, err := buildinfo.ReadFile(os.Args[0])
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range info.Deps {
		if purl := refs["pkg:golang/"+m.Path+"@"+m.Version]; purl == "" && m.Replace == nil {
			t.Errorf("%s %s is missing", m.Path, m.Version)
		}
	}
	if std := "pkg:golang/std@" + strings.TrimPrefix(info.GoVersion, "go"); refs[std] == "" {
		t.Errorf("%s is missing", std)
	}
	if _, err := builtinAgent(); err == nil && refs["pkg:golang/github.com/bermhq/berm/cmd/berm-agent@"+version] == "" {
		t.Error("berm-agent is missing")
	}
}

func TestVersionJSON(t *testing.T) {
	t.Parallel()
	stdout, stderr, code := berm(t, "", "version", "-o", "json")
	var got buildAbout
	if err := json.Unmarshal([]byte(stdout), &got); err != nil || code != 0 || got.Version != version || got.GoVersion == "" || len(got.Modules) == 0 {
		t.Errorf("exit code %d, %v: %.200s%s", code, err, stdout, stderr)
	}
	if _, _, code := berm(t, "", "version", "-o", "yaml"); code != exitUsage {
		t.Errorf("an unknown format: exit code %d", code)
	}
}
