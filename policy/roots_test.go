package policy

import (
	"errors"
	"os"
	"path"
	"strings"
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
	must(t, os.Mkdir(base+"/outside/below", 0o755))
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
		m, reason := p.mounts.judge(path, sources{})
		switch {
		case rule == "" && (reason != nil || m.Source != store+"work/_data/sp ace"):
			t.Errorf("%s: %+v, %+v", path, m, reason)
		case rule != "" && (reason == nil || reason.Rule != rule):
			t.Errorf("%s: %+v, want %s", path, reason, rule)
		}
	}
}

// What belongs to the host's system or its people is mounted only if a root names it.
func TestGuardedPlaces(t *testing.T) {
	t.Parallel()
	resolve := func(p string) (string, error) {
		switch top, rest, _ := strings.Cut(strings.TrimPrefix(p, "/"), "/"); top {
		case "bin", "lib":
			return path.Join("/usr", p), nil
		case "home":
			return path.Join("/srv/home", rest), nil
		case "all":
			return path.Join("/", rest), nil
		}
		return p, nil
	}
	for _, tt := range []struct {
		roots, asked string
		ok           bool
	}{
		{"/srv", "/srv/a", true},
		{"/var", "/var/log", true},
		{"/var", "/var/lib/x", false},
		{"/var", "/var/spool", false},
		{"/var", "/var/spool/cron", false},
		{"/var, /var/spool/x", "/var/spool/x/y", true},
		{"/var, /var/spool/x", "/var/spool/y", false},
		{"/var/lib/x", "/var/lib/x", true},
		{"/var/lib/x", "/var/lib/docker", false},
		{"/opt", "/opt/x", true},
		{"/usr/local/share", "/usr/local/share/x", true},
		{"/usr/local/share", "/usr/local", false},
		{"/usr", "/bin/x", true},
		{"/bin", "/bin/x", true}, // that names it, wherever it is
		{"/bin", "/usr/lib", false},
		{"/srv", "/srv/home/u", false}, // where homes really are
		{"/srv", "/srv/home", false},
		{"/srv", "/srv", false}, // it contains them
		{"/srv, /srv/home/u", "/srv", false},
		{"/srv, /srv/home/u", "/home/u/x", true},
		{"/srv, /home", "/srv", true},
	} {
		p, err := Parse([]byte("version: 1\nmounts: {allowed_roots: ["+tt.roots+"]}"), Options{Resolve: resolve})
		if err != nil {
			t.Errorf("%s: %v", tt.roots, err)
			continue
		}
		if v := p.Sandbox(Request{HostPath: &tt.asked}); v.Allowed() != tt.ok {
			t.Errorf("%s with roots %s: %v", tt.asked, tt.roots, v.Err())
		}
	}
	for _, root := range []string{"/", "/.", "/var/lib", "/all", "/all/var/lib"} {
		for _, key := range []string{"allowed_roots: [" + root + "]", "shared_root: " + root} {
			if _, err := Parse([]byte("version: 1\nmounts: {"+key+"}"), Options{Resolve: resolve}); err == nil || !strings.Contains(err.Error(), "too wide") {
				t.Errorf("%s: %v", key, err)
			}
		}
	}
}

// A learned root that names a guarded directory is kept beside a wider one.
func TestLearnGuardedRoot(t *testing.T) {
	t.Parallel()
	p := mustParse(t, "mounts: {allowed_roots: [/var]}", Options{Resolve: func(p string) (string, error) { return p, nil }})
	asked := "/var/spool/x"
	denied := p.Sandbox(Request{HostPath: &asked}).Denials
	out, err := p.Learn([]LearnRecord{{Profile: "default", Reasons: denied}})
	if err != nil || !strings.Contains(string(out), "- /var\n") || !strings.Contains(string(out), "- /var/spool/x\n") {
		t.Errorf("%v\n%s", err, out)
	}
}

// Without holds, the path of a mount must not pass through a directory that anything sandboxed
// has ever been able to write to.
func TestUnheld(t *testing.T) {
	t.Parallel()
	p := mustParse(t, "mounts: {allowed_roots: [/srv], trusted_roots: [/srv/data, /link]}", Options{Resolve: func(p string) (string, error) {
		if p == "/link" {
			return "/srv/other", nil
		}
		return p, nil
	}})
	ro, rw := func(p string) Mount { return Mount{HostPath: p, Source: p, Mode: "ro"} }, func(p string) Mount { return Mount{HostPath: p, Source: p, Mode: "rw"} }
	operator := rw("/chats/k")
	operator.Operator = true
	for _, tt := range []struct {
		name  string
		mount Mount
		other []Mount
		ok    bool
	}{
		{"read-only below", ro("/srv/data/x"), nil, true},
		{"read-only itself", ro("/srv/data"), nil, true},
		{"read-only below, of a link's", ro("/srv/other/x"), nil, true},
		{"elsewhere", ro("/srv/x"), nil, false},
		{"around", ro("/srv"), nil, false},
		{"a name that begins alike", ro("/srv/database"), nil, false},
		{"writable below", rw("/srv/data/x"), nil, false},
		{"writable itself", rw("/srv/data"), nil, true},
		{"writable twice", rw("/srv/data"), []Mount{rw("/srv/data")}, true},
		{"below another's writable", ro("/srv/data/x"), []Mount{rw("/srv/data")}, false},
		{"below a writable one of all", ro("/srv/data"), []Mount{rw("/")}, false},
		{"below another's read-only", ro("/srv/data/x"), []Mount{ro("/srv/data")}, true},
		{"another's in it", rw("/srv/data"), []Mount{ro("/srv/data/x")}, false},
		{"another's in it, read-only", ro("/srv/data"), []Mount{ro("/srv/data/x")}, true},
		{"another's far in it", rw("/srv/data"), []Mount{ro("/srv"), rw("/srv/data/x/y")}, false},
		{"the operator's", operator, []Mount{operator, rw("/srv")}, true},
		{"the operator's below a writable one", operator, []Mount{rw("/chats")}, false},
		{"the operator's around another's", operator, []Mount{ro("/chats/k/x")}, false},
	} {
		err := p.Unheld(tt.mount, tt.other)
		var denied *DeniedError
		if (err == nil) != tt.ok || err != nil && (!errors.As(err, &denied) || denied.Reasons[0].Rule != ruleUnheld) {
			t.Errorf("%s: %v", tt.name, err)
		}
	}
	for file, required := range map[string]bool{
		"":                              false,
		"allowed_roots: [/srv]":         true,
		"trusted_roots: [/srv]":         false,
		"shared_root: /srv, hold: auto": false,
		"allowed_roots: [/srv], trusted_roots: [/srv/data]":            true,
		"allowed_roots: [/srv/data/x], trusted_roots: [/srv/data]":     false,
		"allowed_roots: [/srv/data, /mnt], trusted_roots: [/srv/data]": true,
	} {
		if p := mustParse(t, "mounts: {"+file+"}", Options{Resolve: func(p string) (string, error) { return p, nil }}); p.HoldRequired() != required {
			t.Errorf("%s: hold required is %v", file, !required)
		}
	}
	if _, err := Parse([]byte("version: 1\nmounts: {trusted_roots: [/gone, /etc]}"), Options{Resolve: fakeHost{"/etc": "/etc"}.resolve}); err == nil ||
		!strings.Contains(err.Error(), "trusted_roots[0]") || !strings.Contains(err.Error(), "trusted_roots[1]") {
		t.Errorf("trusted roots that can't be: %v", err)
	}
}
