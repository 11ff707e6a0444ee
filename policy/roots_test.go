package policy

import (
	"os"
	"testing"
)

// What a container has mounted is where its engine says, unless the file says otherwise.
func TestGivenPathMap(t *testing.T) {
	t.Parallel()
	base := tree(t)
	data, outside, inner := base+"/data", base+"/outside", base+"/data/a"
	given := []PathMapping{
		{Engine: "/srv/data", Local: data}, {Engine: "/srv/outside", Local: outside}, {Engine: "/volumes/inner", Local: inner},
		{Engine: "/srv/file", Local: data + "/file"}, {Engine: "/srv/gone", Local: base + "/gone"},
	}
	p := mustParse(t, "mounts: {allowed_roots: ["+base+"], path_map: [{engine: /told, local: "+outside+"}]}", Options{Resolve: ResolveDir, PathMap: given})
	for local, want := range map[string]string{
		data: "/srv/data", data + "/sp ace": "/srv/data/sp ace", inner + "/b": "/volumes/inner/b", outside: "/told", base + "/real": base + "/real",
	} {
		if got, err := p.EnginePath(local); err != nil || got != want {
			t.Errorf("%s is %s, %v; want %s", local, got, err, want)
		}
	}
}

// A volume of Berm's own can be a root, where the engine keeps it. Nothing beside it can,
// nor what is refused in it.
func TestGivenVolume(t *testing.T) {
	t.Parallel()
	base := tree(t)
	if err := os.Mkdir(base+"/outside/below", 0o755); err != nil {
		t.Fatal(err)
	}
	const store = "/var/lib/docker/volumes/"
	given := []PathMapping{
		{Engine: store + "work/_data", Local: base + "/data", Volume: true},
		{Engine: store + "bind", Local: base + "/real"}, // no volume
		{Engine: store + "state/_data", Local: base + "/outside", Volume: true},
	}
	for root, ok := range map[string]bool{
		base + "/data": true, base + "/real": false, base + "/outside": false,
		store + "work/_data": true, store + "bind": false, store + "state/_data": false, store + "state/_data/below": false,
	} {
		_, err := Parse([]byte("version: 1\nmounts: {allowed_roots: ["+root+"]}"), Options{Resolve: ResolveDir, PathMap: given, Refuse: []string{base + "/outside"}})
		if (err == nil) != ok {
			t.Errorf("root %s: %v", root, err)
		}
	}
	p := mustParse(t, "mounts: {allowed_roots: ["+base+"/data]}", Options{Resolve: ResolveDir, PathMap: given, Refuse: []string{base + "/data/a"}})
	for path, rule := range map[string]string{
		base + "/data/sp ace": "", store + "work/_data/sp ace": "", store + "work/_data": ruleAlwaysRefused,
		base + "/data/a/b": ruleAlwaysRefused, base + "/outside": ruleAllowedRoots, store + "other/_data": ruleAlwaysRefused, store + "work": ruleAlwaysRefused,
	} {
		m, reason := p.mounts.judge(path)
		switch {
		case rule == "" && (reason != nil || m.Source != store+"work/_data/sp ace"):
			t.Errorf("%s: %+v, %+v", path, m, reason)
		case rule != "" && (reason == nil || reason.Rule != rule):
			t.Errorf("%s: %+v, want %s", path, reason, rule)
		}
	}
}
