package policy

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// bindPolicy allows a root of a real file system.
func bindPolicy(t *testing.T, more string) (p *Policy, root string) {
	t.Helper()
	root, err := filepath.EvalSymlinks(t.TempDir())
	outside := t.TempDir()
	must(t, err, os.WriteFile(outside+"/file", nil, 0o600), os.Symlink(outside, root+"/outside"), os.Mkdir(root+"/dir", 0o755), os.WriteFile(root+"/file", nil, 0o600), os.Symlink("file", root+"/link"),
		os.Symlink("/etc/passwd", root+"/out"), os.Symlink("gone", root+"/dangling"), os.Symlink("/etc", root+"/etc"), os.Symlink(".", root+"/self"), syscall.Mkfifo(root+"/fifo", 0o600))
	return mustParse(t, "mounts: {allowed_roots: ["+root+"]"+more+"}\nprofiles: {sock: {host_path_mode: none, engine_api: {docker_socket: on}}}\n",
		Options{Resolve: ResolveDir, Refuse: []string{root + "/state"}}), root
}

func TestBindSources(t *testing.T) {
	p, root := bindPolicy(t, ", missing: create")
	off, offRoot := bindPolicy(t, "")
	for name, tt := range map[string]struct {
		source, profile string
		keep, refusing  bool // without Create; mounts.missing: refuse
		want            Mount
		rule            string
	}{
		"directory":                   {source: "/dir", want: Mount{Source: "/dir"}},
		"file":                        {source: "/file", want: Mount{Source: "/file", File: true}},
		"link to a file":              {source: "/link", want: Mount{Source: "/file", File: true}},
		"link out to a file":          {source: "/out", rule: ruleAlwaysRefused},
		"fifo":                        {source: "/fifo", keep: true, rule: ruleNotADirectory},
		"missing":                     {source: "/dir/a/b", want: Mount{Source: "/dir/a/b", Missing: "a/b"}},
		"missing, not to be made":     {source: "/dir/a/b", keep: true, rule: ruleNotADirectory},
		"missing, only read":          {source: "/dir/a/b", profile: "offline_readonly", rule: ruleNotADirectory},
		"missing, refused":            {source: "/dir/a/b", refusing: true, rule: ruleNotADirectory},
		"missing by a link out":       {source: "/etc/a", rule: ruleAlwaysRefused},
		"file outside":                {source: "/outside/file", rule: ruleAllowedRoots},
		"missing outside by a link":   {source: "/outside/a", rule: ruleAllowedRoots},
		"missing outside":             {source: "/../elsewhere/a", rule: ruleAllowedRoots},
		"missing in what is refused":  {source: "/state/hold/x", rule: ruleAlwaysRefused},
		"missing, refused by a link":  {source: "/self/state", rule: ruleAlwaysRefused},
		"missing below, by a link":    {source: "/self/state/x", rule: ruleAlwaysRefused},
		"missing and what is refused": {source: "/state", rule: ruleAlwaysRefused},
		"too deep":                    {source: strings.Repeat("/d", maxMissing+1), rule: ruleNotADirectory},
	} {
		p, root := p, root
		if tt.refusing {
			p, root = off, offRoot
		}
		v := p.Container(ContainerRequest{Profile: tt.profile, Image: "python:3.11-slim", Mounts: []ContainerMount{{Field: "M", Type: "bind", Source: root + tt.source, Target: "/x", Create: !tt.keep}}})
		if tt.rule != "" {
			if len(v.Denials) != 1 || v.Denials[0].Rule != tt.rule {
				t.Errorf("%s: %+v", name, v.Denials)
			}
			continue
		}
		want := tt.want
		want.HostPath, want.Source, want.Local, want.MountPath, want.Mode = root+tt.source, root+want.Source, root+want.Source, "/x", "rw"
		if !v.Allowed() || v.Spec.Binds[0] != want {
			t.Errorf("%s: %+v, %v", name, v.Spec.Binds, v.Err())
		}
	}
	if v := p.Container(ContainerRequest{Image: "python:3.11-slim", Mounts: []ContainerMount{{Field: "M", Type: "bind", Source: root + "/file", Target: "/x", OnlyDir: true}}}); v.Allowed() {
		t.Error("a file where only a directory will do")
	}
	if v := p.Sandbox(Request{HostPath: ptr(root + "/file")}); v.Allowed() {
		t.Error("a sandbox gets a file")
	}
	if v := p.Sandbox(Request{HostPath: ptr(root + "/dir/a")}); v.Allowed() {
		t.Error("a sandbox's directory is made")
	}
}

// An allowed root that is gone isn't made again.
func TestRootIsGone(t *testing.T) {
	p, root := bindPolicy(t, ", missing: create")
	must(t, os.RemoveAll(root))
	v := p.Container(ContainerRequest{Image: "python:3.11-slim", Mounts: []ContainerMount{{Field: "M", Type: "bind", Source: root + "/a", Target: "/x", Create: true}}})
	if len(v.Denials) != 1 || v.Denials[0].Rule != ruleAllowedRoots {
		t.Errorf("%+v", v.Denials)
	}
}

// A file of Berm's own is refused where a link to it leads, too.
func TestRefusedFile(t *testing.T) {
	root, err := filepath.EvalSymlinks(t.TempDir())
	must(t, err, os.Mkdir(root+"/v1", 0o755), os.WriteFile(root+"/v1/tokens", nil, 0o600), os.Symlink("v1", root+"/now"), os.Symlink("now/tokens", root+"/tokens"))
	p := mustParse(t, "mounts: {allowed_roots: ["+root+"]}\n", Options{Resolve: ResolveDir, Refuse: []string{root + "/tokens"}})
	for _, source := range []string{"/tokens", "/now/tokens", "/v1/tokens", "/v1", "/now", ""} {
		v := p.Container(ContainerRequest{Image: "python:3.11-slim", Mounts: []ContainerMount{{Field: "M", Type: "bind", Source: root + source, Target: "/x"}}})
		if len(v.Denials) != 1 || v.Denials[0].Rule != ruleAlwaysRefused {
			t.Errorf("%s: %+v", source, v.Denials)
		}
	}
}

func TestMakeMount(t *testing.T) {
	p, root := bindPolicy(t, ", missing: create")
	missing := func(dir, rel string) Mount { return Mount{Local: root + dir + "/" + rel, Missing: rel} }
	must(t, p.MakeMount(Mount{Local: root + "/none"}), p.MakeMount(missing("/dir", "a/b")), p.MakeMount(missing("/dir", "a/b")))
	if fi, err := os.Lstat(root + "/dir/a/b"); err != nil || !fi.IsDir() || fi.Mode().Perm() != 0o755 {
		t.Errorf("made: %v, %v", fi, err)
	}
	outside := t.TempDir()
	must(t, os.Symlink(outside, root+"/led"), os.Symlink("dir", root+"/inner"))
	for _, m := range []Mount{missing("/led", "a"), missing("/inner", "x"), missing("", "inner/x"), missing("", "led/a"), missing("", "dangling"), missing("", "dangling/a"), missing("", "file/a"), missing("", "../a")} {
		if err := p.MakeMount(m); err == nil {
			t.Errorf("%+v: made", m)
		}
	}
	left, err := os.ReadDir(outside)
	if _, inner := os.Lstat(root + "/dir/x"); err != nil || len(left) > 0 || !errors.Is(inner, os.ErrNotExist) {
		t.Errorf("made through a link: %v, %v", left, inner)
	}
}

// Only the literal paths are the engine's socket, after cleaning.
func TestSocketBinds(t *testing.T) {
	p, root := bindPolicy(t, "")
	must(t, os.Symlink("/var/run/docker.sock", root+"/s"), os.Mkdir(root+"/docker.sock", 0o755))
	for source, want := range map[string]bool{
		"/var/run/docker.sock": true, "/run/docker.sock": true,
		"/run/docker.sock/x": false, "/run": false, "/var/run/./x/docker.sock": false, "/run/containerd/containerd.sock": false, "/RUN/docker.sock": false,
		root + "/s": false,
	} {
		req := ContainerRequest{Profile: "sock", Image: "python:3.11-slim", Mounts: []ContainerMount{{Field: "M", Type: "bind", Source: source, Target: "/x", ReadOnly: true}}}
		v := p.Container(req)
		if v.Allowed() != want || want && v.Spec.Binds[0] != (Mount{HostPath: source, Source: source, Local: source, MountPath: "/x", Mode: "ro", Socket: true}) {
			t.Errorf("%s: %+v, %v", source, v.Spec.Binds, v.Err())
		}
		if req.Profile = ""; p.Container(req).Allowed() {
			t.Errorf("%s: allowed though docker_socket is off", source)
		}
	}
	if v := p.Container(ContainerRequest{Image: "python:3.11-slim", Mounts: []ContainerMount{{Type: "bind", Source: root + "/docker.sock", Target: "/x"}}}); !v.Allowed() || v.Spec.Binds[0].Socket {
		t.Errorf("a directory of that name: %+v, %v", v.Spec.Binds, v.Err())
	}
	v := p.Container(ContainerRequest{Image: "python:3.11-slim", Mounts: []ContainerMount{
		{Type: "bind", Source: root + "/dir", Target: "/app"}, {Type: "volume", Target: "/app/a/b"}, {Type: "tmpfs", Target: "/app/tmp"}, {Type: "bind", Source: root + "/file", Target: "/app/f"}}})
	if !v.Allowed() || len(v.Spec.Binds) != 2 {
		t.Errorf("in a bind: %v", v.Err())
	}
}
