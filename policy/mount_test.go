package policy

import (
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// tree makes a directory tree with the links that someone in a sandbox could have
// left in it, and answers its resolved root.
func tree(t testing.TB) string {
	t.Helper()
	base, err := filepath.EvalSymlinks(t.TempDir())
	must(t, err)
	for _, d := range []string{"data/a/b", "database", "outside", "data/sp ace", "real"} {
		must(t, os.MkdirAll(filepath.Join(base, d), 0o755))
	}
	for link, to := range map[string]string{
		"data/etc": "/etc", "data/out": "../outside", "data/in": "a/b", "data/loop": "loop", "data/dangling": "nowhere", "data/up": "..",
		"data/proc": "/proc/self/root/etc", "data/rootlink": "/", "data/self": "/proc/self/root" + base + "/data/a", "data/sibling": "../database", "entry": "data/a", "rootlink": "real",
	} {
		must(t, os.Symlink(to, filepath.Join(base, link)))
	}
	must(t, os.WriteFile(filepath.Join(base, "data/file"), nil, 0o644))
	return base
}

func TestHostPath(t *testing.T) {
	base := tree(t)
	data := base + "/data"
	p := mustParse(t, "mounts: {allowed_roots: ["+data+", "+base+"/rootlink]}", Options{Resolve: ResolveDir, Refuse: []string{base + "/real/a/engine.sock", base + "/real/state"}})
	tests := []struct {
		name, path string
		source     string // empty: refused by rule
		rule       string
	}{
		{"root", data, data, ""},
		{"below", data + "/sp ace", data + "/sp ace", ""},
		{"trailing slash", data + "/sp ace/", data + "/sp ace", ""},
		{"double slashes", "//" + data + "//sp ace", data + "/sp ace", ""},
		{"dots inside", data + "/a/../sp ace/.", data + "/sp ace", ""},
		{"contains a refused", base + "/real", "", ruleAlwaysRefused},
		{"contains a refused through a link", base + "/rootlink", "", ruleAlwaysRefused},
		{"holds the engine's socket", base + "/real/a", "", ruleAlwaysRefused},
		{"below a refused", base + "/real/state/x", "", ruleAlwaysRefused},
		{"prefix of a name", base + "/database", "", ruleAllowedRoots},
		{"parent", base, "", ruleAlwaysRefused}, // it contains the engine's socket as well
		{"outside", base + "/outside", "", ruleAllowedRoots},
		{"outside and missing", base + "/outside/gone", "", ruleAllowedRoots},
		{"dots out", data + "/../outside", "", ruleAllowedRoots},
		{"many dots", data + strings.Repeat("/..", 20) + "/etc", "", ruleAlwaysRefused},
		{"link to etc", data + "/etc", "", ruleAlwaysRefused},
		{"through a link to etc", data + "/etc/ssl", "", ruleAlwaysRefused},
		{"link to proc self root", data + "/proc", "", ruleAlwaysRefused},
		{"link to the root", data + "/rootlink", "", ruleAlwaysRefused},
		{"through a link to the root", data + "/rootlink/usr", "", ruleAllowedRoots},
		{"link out", data + "/out", "", ruleAllowedRoots},
		{"link to a sibling", data + "/sibling", "", ruleAllowedRoots},
		{"link up", data + "/up", "", ruleAlwaysRefused},
		{"missing", data + "/gone", "", ruleNotADirectory},
		{"file", data + "/file", "", ruleNotADirectory},
		{"below a file", data + "/file/x", "", ruleNotADirectory},
		{"loop", data + "/loop", "", ruleNotADirectory},
		{"dangling", data + "/dangling", "", ruleNotADirectory},
		{"root of all", "/", "", ruleAlwaysRefused},
		{"dots to the root", "/..", "", ruleAlwaysRefused},
		{"etc", "/etc", "", ruleAlwaysRefused},
		{"etc with dots", "/etc/.././etc/", "", ruleAlwaysRefused},
		{"below etc", "/etc/ssl", "", ruleAlwaysRefused},
		{"etc by another root", "/proc/self/root/etc", "", ruleAlwaysRefused},
		{"root by proc", "/proc/1/root" + data, "", ruleAlwaysRefused},
		{"proc", "/proc", "", ruleAlwaysRefused},
		{"sys", "/sys/fs/cgroup", "", ruleAlwaysRefused},
		{"dev", "/dev/shm", "", ruleAlwaysRefused},
		{"home of root", "/root", "", ruleAlwaysRefused},
		{"boot", "/boot", "", ruleAlwaysRefused},
		{"run", "/run", "", ruleAlwaysRefused},
		{"var run", "/var/run", "", ruleAlwaysRefused},
		{"docker", "/var/lib/docker/volumes", "", ruleAlwaysRefused},
		{"containerd", "/var/lib/containerd", "", ruleAlwaysRefused},
		{"docker socket", "/var/run/docker.sock", "", ruleAlwaysRefused},
		{"contains docker", "/var/lib", "", ruleAlwaysRefused},
		{"contains run", "/var", "", ruleAlwaysRefused},
		{"like etc", "/etcetera", "", ruleAllowedRoots},
		{"relative", "data", "", rulePathSyntax},
		{"dot relative", "./" + data, "", rulePathSyntax},
		{"home", "~/data", "", rulePathSyntax},
		{"nul", data + "\x00/etc", "", rulePathSyntax},
		{"newline", data + "\n", "", rulePathSyntax},
		{"c1 control", data + "\u0085", "", rulePathSyntax},
		{"not utf-8", data + "/\xff", "", rulePathSyntax},
		{"too long", data + strings.Repeat("/a", 2100), "", rulePathSyntax},
		{"blank", " ", "", rulePathSyntax},
		{"leading blank", " " + data, "", rulePathSyntax},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			main := p.Sandbox(Request{HostPath: &tt.path})
			extra := p.Sandbox(Request{ExtraMounts: []MountRequest{{HostPath: tt.path, MountPath: "/x"}}})
			if tt.source != "" {
				want := Mount{HostPath: path.Clean(tt.path), Source: tt.source, Local: tt.source, MountPath: "/workspace", Mode: "rw"}
				if d := cmp.Diff([]Mount{want}, main.Spec.Mounts); d != "" || !main.Allowed() || main.Spec.HostPath != want.HostPath {
					t.Errorf("%v %s", main.Err(), d)
				}
				want.MountPath, want.Mode = "/x", "ro"
				if d := cmp.Diff([]Mount{want}, extra.Spec.ExtraMounts); d != "" || !extra.Allowed() {
					t.Errorf("%v %s", extra.Err(), d)
				}
				return
			}
			for field, v := range map[string]Verdict{"host_path": main, "extra_mounts[0].host_path": extra} {
				if len(v.Denials) != 1 || len(v.Spec.Mounts) != 0 {
					t.Fatalf("%s: %+v", field, v)
				}
				r := v.Denials[0]
				if r.Rule != tt.rule || r.Field != field || r.Invalid != (tt.rule == rulePathSyntax) || r.Allowed == "" || r.Message == "" || r.Value == "" {
					t.Errorf("%+v", r)
				}
				if !r.Invalid && (!strings.Contains(r.Message, tt.path) || !strings.Contains(r.Message, data)) {
					t.Errorf("the message doesn't name the path and what would be allowed: %s", r.Message)
				}
			}
		})
	}
}

// A link may lead into a root, and what it leads to is not told when it leads out.
func TestHostPathLinks(t *testing.T) {
	base := tree(t)
	p := mustParse(t, "mounts: {allowed_roots: ["+base+"/data]}", Options{Resolve: ResolveDir})
	for asked, source := range map[string]string{"/entry": "/data/a", "/data/in": "/data/a/b", "/data/self": "/data/a", "/data/up/data": "/data"} {
		v := p.Sandbox(Request{HostPath: ptr(base + asked)})
		if !v.Allowed() || v.Spec.Mounts[0].Source != base+source || v.Spec.HostPath != base+asked {
			t.Errorf("%s: %v %+v", asked, v.Err(), v.Spec.Mounts)
		}
	}
	v := p.Sandbox(Request{HostPath: ptr(base + "/data/out")})
	if v.Allowed() || strings.Contains(v.Err().Error(), "/outside") {
		t.Errorf("%v", v.Err())
	}
}

// The roots are resolved at load: whoever swaps one for a link gains nothing.
func TestRootSwappedLater(t *testing.T) {
	h := fakeHost{"/srv/data": "/srv/data", "/srv/data/x": "/srv/data/x", "/var/run": "/run", "/var/lib/docker": "/big/docker"}
	p := mustParse(t, "mounts: {allowed_roots: [/srv/data]}", Options{Resolve: h.resolve})
	h["/srv/data"], h["/srv/data/x"] = "/home/u", "/home/u/x"
	for _, asked := range []string{"/srv/data", "/srv/data/x"} {
		if v := p.Sandbox(Request{HostPath: &asked}); v.Allowed() || v.Denials[0].Rule != ruleAllowedRoots {
			t.Errorf("%s: %+v", asked, v)
		}
	}
}

func TestRefusedPlacesAreResolved(t *testing.T) {
	h := fakeHost{"/var/lib/docker": "/big/docker", "/big/docker": "/big/docker", "/big/x": "/big/x", "/big": "/big", "/engines": "/srv/engines"}
	p := mustParse(t, "mounts: {allowed_roots: [/big]}", Options{Resolve: h.resolve, Refuse: []string{"/engines/a.sock"}})
	for asked, rule := range map[string]string{
		"/big/docker": ruleAlwaysRefused, "/big": ruleAlwaysRefused, "/big/docker/x": ruleAlwaysRefused, "/srv/engines/a.sock": ruleAlwaysRefused,
		"/srv/engines": ruleAlwaysRefused, "/engines": ruleAlwaysRefused, "/": ruleAlwaysRefused, "/srv": ruleAlwaysRefused,
		"/big/x": "", "/big/dockers": ruleNotADirectory,
	} {
		v := p.Sandbox(Request{HostPath: &asked})
		if rule == "" && !v.Allowed() || rule != "" && (v.Allowed() || v.Denials[0].Rule != rule) {
			t.Errorf("%s: %v", asked, v.Err())
		}
	}
}

func TestHostMountsDisabled(t *testing.T) {
	p := mustParse(t, "", Options{})
	v := p.Sandbox(Request{HostPath: ptr("/srv/data")})
	if v.Allowed() || v.Denials[0].Rule != ruleDisabled || v.Denials[0].Invalid {
		t.Errorf("%+v", v)
	}
	v = p.Sandbox(Request{HostPath: ptr("/etc")})
	if v.Allowed() || v.Denials[0].Rule != ruleAlwaysRefused {
		t.Errorf("%+v", v)
	}
	if v = p.Sandbox(Request{HostPath: ptr("")}); !v.Allowed() || v.Spec.HostPath != "" || v.Spec.Mounts != nil {
		t.Errorf("%+v", v)
	}
}

func TestPathMap(t *testing.T) {
	// What the engine has at /srv/data and /mnt/b is here at /data, a link, and /data/b.
	h := fakeHost{
		"/data": "/vol/data", "/vol/data": "/vol/data", "/vol/data/x": "/vol/data/x", "/data/x": "/vol/data/x", "/data/b": "/vol/b",
		"/vol/b": "/vol/b", "/data/hop": "/vol/b/y", "/vol/b/y": "/vol/b/y", "/data/out": "/srv/data/trap", "/srv/data/trap": "/srv/data/trap",
		"/data/etc": "/etc", "/data/db": "/vol/database", "/srv/data/x": "/srv/data/x", "/same": "/same", "/same/x": "/same/x",
	}
	p := mustParse(t, "mounts: {allowed_roots: [/srv/data, /mnt/b, /same], path_map: [{engine: /srv/data/, local: /data}, {engine: /mnt/b, local: /data/b}]}",
		Options{Resolve: h.resolve, InContainer: true, OnRootFS: func(p string) (bool, error) { return !under(p, "/vol") && !under(p, "/same"), nil }})
	tests := []struct{ asked, source, local, rule string }{
		{"/srv/data", "/srv/data", "/vol/data", ""},
		{"/srv/data/x", "/srv/data/x", "/vol/data/x", ""},
		{"/mnt/b", "/mnt/b", "/vol/b", ""},
		{"/srv/data/b", "/mnt/b", "/vol/b", ""},
		{"/srv/data/hop", "/mnt/b/y", "/vol/b/y", ""},
		{"/same/x", "/same/x", "/same/x", ""},
		{"/srv/data/out", "", "", ruleAllowedRoots}, // into our own /srv/data, which isn't the engine's
		{"/srv/data/etc", "", "", ruleAlwaysRefused},
		{"/srv/data/db", "", "", ruleAllowedRoots},
		{"/data/x", "/srv/data/x", "/vol/data/x", ""}, // our own name for the same directory
		{"/vol", "", "", ruleAllowedRoots},
	}
	for _, tt := range tests {
		v := p.Sandbox(Request{HostPath: &tt.asked})
		if tt.rule != "" {
			if v.Allowed() || v.Denials[0].Rule != tt.rule {
				t.Errorf("%s: %+v", tt.asked, v)
			}
			continue
		}
		if !v.Allowed() || v.Spec.Mounts[0].Source != tt.source || v.Spec.Mounts[0].Local != tt.local {
			t.Errorf("%s: %v %+v", tt.asked, v.Err(), v.Spec.Mounts)
		}
	}
	if got, err := p.EnginePath("/data/b"); got != "/mnt/b" || err != nil {
		t.Errorf("EnginePath: %s %v", got, err)
	}
	if got, err := p.EnginePath("/gone"); err == nil {
		t.Errorf("EnginePath of nothing: %s", got)
	}
}

func TestDefaultWorkspace(t *testing.T) {
	tests := []struct {
		name, yaml string
		host       fakeHost
		asked      *string
		made, want string
	}{
		{"configured", "mounts: {allowed_roots: [/srv], default_workspace: /srv/w/}", fakeHost{"/srv": "/srv", "/srv/w": "/srv/w"}, nil, "", "/srv/w"},
		{"empty means default", "mounts: {allowed_roots: [/srv], default_workspace: /srv/w}", fakeHost{"/srv": "/srv", "/srv/w": "/srv/w"}, ptr(""), "", "/srv/w"},
		{"of the shared root", "mounts: {shared_root: /srv}", fakeHost{"/srv": "/srv", "/srv/default": "/srv/default"}, nil, "", "/srv/default"},
		{"made", "mounts: {shared_root: /srv}", fakeHost{"/srv": "/srv"}, nil, "/srv/default", "/srv/default"},
		{"made where it is", "mounts: {allowed_roots: [/srv], default_workspace: /srv/l/a/b}", fakeHost{"/srv": "/srv", "/srv/l": "/srv/d", "/srv/d": "/srv/d", "/srv/l/a/b": "/srv/d/a/b"}, nil, "", "/srv/l/a/b"},
		{"none", "mounts: {allowed_roots: [/srv]}", fakeHost{"/srv": "/srv"}, nil, "", ""},
		{"another", "mounts: {shared_root: /srv}", fakeHost{"/srv": "/srv", "/srv/default": "/srv/default", "/srv/x": "/srv/x"}, ptr("/srv/x"), "", "/srv/x"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			made := ""
			p := mustParse(t, tt.yaml, Options{Resolve: tt.host.resolve, MakeDir: func(dir, rel string, owner *Owner) error {
				made = path.Join(dir, rel)
				return tt.host.mkdir(dir, rel, owner)
			}})
			v := p.Sandbox(Request{HostPath: tt.asked})
			if !v.Allowed() || v.Spec.HostPath != tt.want || made != tt.made || len(v.Overridden) != 0 {
				t.Errorf("made %q, %+v", made, v)
			}
		})
	}
}

func TestDefaultWorkspaceIsMadeForReal(t *testing.T) {
	base := tree(t)
	p := mustParse(t, "mounts: {shared_root: "+base+"/data, default_workspace: "+base+"/data/in/new/er}", Options{Resolve: ResolveDir})
	want := base + "/data/a/b/new/er"
	if v := p.Sandbox(Request{}); !v.Allowed() || v.Spec.Mounts[0].Source != want {
		t.Errorf("%+v", v)
	}
	if fi, err := os.Stat(want); err != nil || fi.Mode().Perm() != 0o755 {
		t.Errorf("%v %v", fi, err)
	}
	_, err := Parse([]byte("version: 1\nmounts: {allowed_roots: ["+base+"/data], default_workspace: "+base+"/data/out/new}"), Options{})
	if err == nil {
		t.Error("a workspace through a link out of the root is taken")
	}
	if _, err := os.Stat(base + "/outside/new"); err == nil {
		t.Error("a directory was made outside of the root")
	}
}

func TestMountsOfARequest(t *testing.T) {
	h := fakeHost{"/srv": "/srv", "/srv/a": "/srv/a", "/srv/b": "/srv/b", "/srv/w": "/srv/w"}
	const yaml = `
mounts: {allowed_roots: [/srv], default_workspace: /srv/w}
profiles:
  closed: {host_path_mode: none, locked: [host_path_mode]}
  fixed: {locked: [host_path, extra_mounts, mount_path], mount_path: /fixed}
  open: {read_only_rootfs: false}
`
	p := mustParse(t, yaml, Options{Resolve: h.resolve})
	a := ptr("/srv/a")
	tests := []struct {
		name      string
		req       Request
		mounts    []string // source:target:mode
		overrides []string // field rule
		denials   []string // field rule
	}{
		{"all", Request{HostPath: a, MountPath: ptr("/m/"), HostPathMode: ptr("ro"), ExtraMounts: []MountRequest{{"/srv/b/", "/z", "rw"}, {"/srv/b", "/y/.", ""}}},
			[]string{"/srv/a:/m:ro", "/srv/b:/y:ro", "/srv/b:/z:rw"}, nil, nil},
		{"mode none", Request{HostPathMode: ptr("none")}, nil, nil, nil},
		{"mode none with paths", Request{HostPathMode: ptr("none"), HostPath: ptr("/etc"), ExtraMounts: []MountRequest{{"/srv/b", "/y", ""}}}, nil,
			[]string{"host_path mounts.mode_none", "extra_mounts mounts.mode_none"}, nil},
		{"locked none", Request{Profile: "closed", HostPathMode: ptr("rw"), HostPath: a, ExtraMounts: []MountRequest{{"/srv/b", "/y", ""}}}, nil,
			[]string{"host_path_mode profiles.closed.locked", "host_path mounts.mode_none", "extra_mounts mounts.mode_none"}, nil},
		{"locked paths", Request{Profile: "fixed", HostPath: a, MountPath: ptr("/y"), ExtraMounts: []MountRequest{{"/srv/b", "/y", ""}}}, []string{"/srv/w:/fixed:rw"},
			[]string{"mount_path profiles.fixed.locked", "host_path profiles.fixed.locked", "extra_mounts profiles.fixed.locked"}, nil},
		{"locked read-only", Request{Profile: "offline_readonly", HostPathMode: ptr("rw"), ExtraMounts: []MountRequest{{"/srv/b", "/y", "rw"}}}, []string{"/srv/w:/workspace:ro", "/srv/b:/y:ro"},
			[]string{"host_path_mode profiles.offline_readonly.locked", "extra_mounts[0].mode profiles.offline_readonly.locked"}, nil},
		{"locked but the same", Request{Profile: "offline_readonly", HostPathMode: ptr("ro")}, []string{"/srv/w:/workspace:ro"}, nil, nil},
		{"bad modes", Request{HostPathMode: ptr("RW"), ExtraMounts: []MountRequest{{"/srv/b", "/y", "none"}}}, nil, nil, []string{"host_path_mode mounts.mode", "extra_mounts[0].mode mounts.mode"}},
		{"bad targets", Request{MountPath: ptr("x"), ExtraMounts: []MountRequest{{"/srv/b", "/", ""}, {"/srv/b", "/x/../sys", ""}, {"/srv/b", "/proc/self", ""}, {"/srv/b", "", ""}, {"/srv/b", "/dev\x00", ""}}}, nil, nil,
			[]string{"mount_path mounts.target", "extra_mounts[0].mount_path mounts.target", "extra_mounts[1].mount_path mounts.target", "extra_mounts[2].mount_path mounts.target", "extra_mounts[3].mount_path mounts.target", "extra_mounts[4].mount_path mounts.target"}},
		{"bad target, nothing mounted", Request{HostPathMode: ptr("none"), MountPath: ptr("/dev/shm")}, nil, nil, []string{"mount_path mounts.target"}},
		{"in the agent's way", Request{MountPath: ptr("/run"), ExtraMounts: []MountRequest{{"/srv/b", "/sbin/", ""}, {"/srv/b", "/run/berm/x", ""}, {"/srv/b", "/sbin/berm-init", ""}}}, nil, nil,
			[]string{"mount_path mounts.target", "extra_mounts[0].mount_path mounts.target", "extra_mounts[1].mount_path mounts.target", "extra_mounts[2].mount_path mounts.target"}},
		{"beside the agent", Request{MountPath: ptr("/run/bermuda")}, []string{"/srv/w:/run/bermuda:rw"}, nil, nil},
		{"like a kernel directory", Request{MountPath: ptr("/devel")}, []string{"/srv/w:/devel:rw"}, nil, nil},
		{"same target", Request{ExtraMounts: []MountRequest{{"/srv/b", "/workspace/", ""}}}, nil, nil, []string{"mount_path mounts.target_overlap"}},
		{"nested targets", Request{ExtraMounts: []MountRequest{{"/srv/b", "/y/z", ""}, {"/srv/a", "/y", ""}}}, nil, nil, []string{"extra_mounts mounts.target_overlap"}},
		{"beside each other", Request{ExtraMounts: []MountRequest{{"/srv/b", "/workspace2", ""}}}, []string{"/srv/w:/workspace:rw", "/srv/b:/workspace2:ro"}, nil, nil},
		{"tmpfs", Request{MountPath: ptr("/tmp/x")}, nil, nil, []string{"mount_path mounts.target_overlap"}},
		{"no tmpfs", Request{Profile: "open", MountPath: ptr("/tmp")}, []string{"/srv/w:/tmp:rw"}, nil, nil},
		{"too many", Request{ExtraMounts: slices.Repeat([]MountRequest{{"/srv/b", "/y", ""}}, 33)}, nil, nil, []string{"extra_mounts mounts.too_many"}},
		{"every denial", Request{HostPath: ptr("/etc"), ExtraMounts: []MountRequest{{"/home", "/y", ""}, {"x", "/z", ""}}}, nil, nil,
			[]string{"host_path mounts.always_refused", "extra_mounts[0].host_path mounts.allowed_roots", "extra_mounts[1].host_path mounts.path_syntax"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			v := p.Sandbox(tt.req)
			var mounts, overrides, denials []string
			if v.Allowed() {
				for _, m := range v.Spec.Mounts {
					mounts = append(mounts, m.Source+":"+m.MountPath+":"+m.Mode)
				}
			}
			for _, o := range v.Overridden {
				overrides = append(overrides, o.Field+" "+o.Rule)
			}
			for _, r := range v.Denials {
				denials = append(denials, r.Field+" "+r.Rule)
			}
			same(t, tt.mounts, mounts)
			same(t, tt.overrides, overrides)
			same(t, tt.denials, denials)
			if v.Spec.HostPathMode == "none" && v.Spec.HostPath != "" {
				t.Errorf("host path %q with mode none", v.Spec.HostPath)
			}
		})
	}
}

// FuzzPath: what is allowed lies under a root, outside of what is refused, and is
// where the file system says it is.
func FuzzPath(f *testing.F) {
	base := tree(f)
	data := base + "/data"
	p := mustParse(f, "mounts: {allowed_roots: ["+data+"]}", Options{Resolve: ResolveDir, Refuse: []string{data + "/a/b"}})
	for _, s := range []string{"", "/", "/a", "/sp ace", "/in", "/etc", "/out/../a", "/up/data", "/self", "//sp ace/.", "/a/b/../../sp ace", "base", "/proc"} {
		f.Add(s, true)
		f.Add(s, false)
	}
	refused := append([]string{data + "/a/b"}, alwaysRefused...)
	f.Fuzz(func(t *testing.T, s string, below bool) {
		if below {
			s = data + s
		}
		m, reason := p.mounts.judge(s, sources{})
		if reason != nil {
			if reason.Rule == "" || reason.Message == "" || m != (Mount{}) {
				t.Errorf("%q: %+v %+v", s, reason, m)
			}
			return
		}
		actual, err := filepath.EvalSymlinks(path.Clean(s))
		if err != nil || actual != m.Source || m.Local != m.Source || m.HostPath != path.Clean(s) {
			t.Fatalf("%q is %q: %+v %v", s, actual, m, err)
		}
		if actual != data && !strings.HasPrefix(actual, data+"/") {
			t.Errorf("%q leads to %q, outside of the root", s, actual)
		}
		for _, bad := range refused {
			if actual == bad || bad != "/" && strings.HasPrefix(actual+"/", bad+"/") || strings.HasPrefix(bad, actual+"/") {
				t.Errorf("%q leads to %q, against %s", s, actual, bad)
			}
		}
	})
}
