package policy

import (
	"errors"
	"fmt"
	"math"
	"os"
	"path"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/bermhq/berm/runtime/runtimetest/check"
)

// mustParse reads a policy file, whose version line is added.
func mustParse(t testing.TB, yaml string, opts Options) *Policy {
	t.Helper()
	if opts.Resolve == nil {
		opts.Resolve = fakeHost{}.resolve
	}
	if yaml != "" {
		yaml = "version: 1\n" + yaml
	}
	p, err := Parse([]byte(yaml), opts)
	must(t, err)
	return p
}

func same(t testing.TB, want, got any, opts ...cmp.Option) {
	t.Helper()
	if d := cmp.Diff(want, got, opts...); d != "" {
		t.Error(d)
	}
}

func wantProblems(t *testing.T, want []string, err error) {
	t.Helper()
	var le *LoadError
	if !errors.As(err, &le) || !errdefs.IsInvalidArgument(err) {
		t.Fatalf("error is %v", err)
	}
	var got []string
	for _, p := range le.Problems {
		got = append(got, p.String())
	}
	same(t, want, got)
}

// fakeHost is a host's file system: each path and what it really is. "" and what
// isn't there are no directories; the parents of what is there are.
type fakeHost map[string]string

func (h fakeHost) resolve(p string) (string, error) {
	if to, ok := h[p]; ok && to != "" {
		return to, nil
	}
	for dir := range h {
		if strings.HasPrefix(dir, p+"/") {
			return p, nil
		}
	}
	return "", os.ErrNotExist
}

func (h fakeHost) mkdir(dir, rel string, _ *Owner) error {
	p := path.Join(dir, rel)
	if _, ok := h[p]; ok {
		return fmt.Errorf("%s is there", p)
	}
	h[p] = p
	return nil
}

func ptr[T any](v T) *T { return &v }

func TestParseEmptyIsBuiltin(t *testing.T) {
	for _, data := range []string{"", "\n", "# nothing\n", "---\n"} {
		p, err := Parse([]byte(data), Options{Resolve: fakeHost{}.resolve})
		if err != nil {
			t.Fatalf("%q: %v", data, err)
		}
		if got := p.Profiles(); len(got) != 4 {
			t.Errorf("%q: profiles %v", data, got)
		}
	}
}

func TestParseDefaultsFromOptions(t *testing.T) {
	opts := Options{DefaultImage: "busybox", DefaultTTL: 5 * time.Minute, DefaultIdleTTL: time.Minute, EngineNetwork: "my-net"}
	p := mustParse(t, "", opts)
	s := p.Sandbox(Request{Network: ptr("on")}).Spec
	if s.Image != "busybox:latest" || s.TTL != 5*time.Minute || s.IdleTTL != time.Minute || s.EngineNetwork != "my-net" {
		t.Errorf("got %+v", s)
	}
	p = mustParse(t, "profiles: {default: {image: alpine}}\nttl: {default: 2m, idle_default: 0}\nnetworks: {on: {engine_network: other}}", opts)
	s = p.Sandbox(Request{Network: ptr("on")}).Spec
	if s.Image != "alpine:latest" || s.TTL != 2*time.Minute || s.IdleTTL != 0 || s.EngineNetwork != "other" {
		t.Errorf("the file doesn't win: %+v", s)
	}
}

const fullPolicy = `
profiles:
  default: {memory_mb: 600, image: alpine}
  big: {extends: network_extended, network: team, host_path_mode: ro, mount_path: /w/, timeout: 45s, max_timeout: 600s,
        cpus: 3, max_cpus: 4, memory_mb: 4096, max_memory_mb: 8192, pids_limit: 600, max_pids_limit: 700,
        read_only_rootfs: true, workspace_quota_mb: 10, ttl: 30m, idle_ttl: 5m, user: 1000:1000,
        cap_add: [net_bind_service, CAP_CHOWN, CHOWN], runtime_class: runsc, agent: exec, userns: auto, locked: [user_x],
        engine_api: {capabilities: [net_raw, CAP_NET_RAW, kill], volumes: off, networks: off, ports: loopback, port_range: 1-2, log_drivers: [local], log_max_mb: 3,
          restart: [], runtimes: [kata], sysctls: [net.core.somaxconn], users: non_root, dns: off, tmpfs_mb: 5, max_ulimit: 6, pull: off, build: on,
          buildkit: {enabled: true, network: bridge, outputs: [tar], secrets: false, ssh: false, provenance: off, cache: off, cgroup_parent: /a.b/c.slice}, build_add_url: ["https://x.local:1/a/"], commit: on,
          tags: [acme/*], archive: off, exec: off, docker_socket: on, redact_env: ["*KEY*"], max_objects: 0, max_execs: 7, read_only_rootfs: true, show_labels: true}}
mounts: {allowed_roots: [/srv/data/, /srv/more], trusted_roots: [/srv/more], owner: 1000:1000, shared_root: /srv/more, path_map: [{engine: /srv/data, local: /data}], hold: required}
networks: {team: {engine_network: team-net, internal: true, isolated: false}, on: {}}
env:
  allow: ["A*", TZ]
  deny: [ADMIN]
  pin: {TZ: UTC}
  inject: {KEY: {file: /run/secrets/key}, OTHER: {env: OTHER_KEY}}
images: {allow: [python, "ghcr.io/acme/*"], pins: {alpine: "sha256:` + someSum + `"}, require_digest: false, pull: never}
resources: {over_max: clamp}
ttl: {default: 10m, idle_default: 1m, max_lifetime: 2h}
`

const someSum = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"

func fullOptions() Options {
	h := fakeHost{"/data": "/data", "/srv/more": "/srv/more", "/srv/more/default": "/srv/more/default"}
	return Options{Resolve: h.resolve, MakeDir: h.mkdir, Secret: func(s SecretSource) (string, error) {
		return "hunter2" + s.File + s.Env, nil
	}}
}

func TestYAMLRoundTrip(t *testing.T) {
	for _, yaml := range []string{"", strings.Replace(fullPolicy, "user_x", "image", 1)} {
		p := mustParse(t, yaml, fullOptions())
		first, err := p.YAML()
		must(t, err)
		if strings.Contains(string(first), "hunter2") {
			t.Error("a secret is printed")
		}
		again, err := Parse(first, fullOptions())
		if err != nil {
			t.Fatalf("%v\n%s", err, first)
		}
		second, err := again.YAML()
		must(t, err)
		same(t, string(first), string(second))
		for _, m := range []*mountRules{&p.mounts, &again.mounts} {
			m.resolve, m.resolveFile, m.makeDir = nil, nil, nil
		}
		opts := cmp.AllowUnexported(Policy{}, mountRules{}, root{}, mapping{}, envRules{}, imageRules{}, imagePattern{}, ttlFile{}, file{})
		same(t, *p, *again, opts, cmpopts.EquateEmpty(), cmp.FilterPath(func(x cmp.Path) bool { return x.String() == "file.Profiles" }, cmp.Ignore()))
	}
}

func TestPolicyNeverPrintsSecrets(t *testing.T) {
	p := mustParse(t, "env: {inject: {KEY: {env: X}}}", Options{Secret: func(SecretSource) (string, error) { return "hunter2", nil }})
	for _, s := range []string{fmt.Sprint(p), fmt.Sprintf("%+v", p), fmt.Sprintf("%#v", p)} {
		if strings.Contains(s, "hunter2") {
			t.Errorf("printed as %s", s)
		}
	}
	same(t, []string{"KEY=hunter2"}, p.InjectedEnv())
}

const noValue = "has no value: give it one, such as [] for an empty list, or leave the key out"

func TestParseProblems(t *testing.T) {
	dir := fakeHost{"/srv": "/srv", "/srv/data": "/srv/data", "/srv/etc": "/etc", "/c": "/c"}
	secret := func(s SecretSource) (string, error) {
		switch s.Env {
		case "EMPTY":
			return "", nil
		case "NUL":
			return "a\x00b", nil
		}
		return "", errors.New("gone")
	}
	tests := []struct {
		name, yaml string
		want       []string
	}{
		{"no version", "mounts: {}", []string{"version: must be 1"}},
		{"version", "version: 2", []string{"line 1: version: must be 1"}},
		{"bad version", "version: one", []string{"line 1: version: must be a whole number", "line 1: version: must be 1"}},
		{"list", "[1]", []string{"must be a mapping"}},
		{"syntax", "version: 1\n a: b: c", []string{"line 2: mapping values are not allowed in this context"}},
		{"two documents", "version: 1\n---\nversion: 1", []string{"there is more than one YAML document"}},
		{"unknown", "version: 1\nmount: {}\nmounts:\n  root: /x", []string{
			"line 2: mount: is not a known key (did you mean \"mounts\"? known here: env, images, mounts, networks, profiles, resources, ttl, version)",
			"line 4: mounts.root: is not a known key (known here: allowed_roots, default_workspace, hold, missing, owner, path_map, shared_root, trusted_roots)"}},
		{"duplicates", "version: 1\nenv: {allow: [A]}\nprofiles:\n  a: {}\n  a: {}\nenv: {}", []string{
			"line 5: profiles.a: is there twice, first on line 4", "line 6: env: is there twice, first on line 2"}},
		{"types", "version: 1\nprofiles:\n  a:\n    cpus: x\n    memory_mb: 1.5\n    read_only_rootfs: on\n    timeout: 30\n    locked: a\n    user: [1]\n    image: !x y", []string{
			"line 4: profiles.a.cpus: must be a number", "line 5: profiles.a.memory_mb: must be a whole number",
			"line 6: profiles.a.read_only_rootfs: must be true or false", "line 7: profiles.a.timeout: must be a duration such as 30s, 15m or 24h",
			"line 8: profiles.a.locked: must be a list", "line 9: profiles.a.user: must be a single value", "line 10: profiles.a.image: must be a plain string"}},
		{"overflow", "version: 1\nprofiles: {a: {memory_mb: 99999999999999999999}}", []string{"line 2: profiles.a.memory_mb: must be a whole number"}},
		{"alias", "version: 1\nprofiles: {a: &x {}, b: *x}", []string{"line 2: profiles.b: aliases are not supported"}},
		{"alias of nothing", "version: 1\nenv: {pin: {A: *hush}}", []string{"aliases are not supported, and one names no anchor"}},
		{"no value", "version: 1\nmounts:\nenv:\n  allow:\n  # - A\nprofiles:\n  a:\n  b: {locked: ~, cpus: }", []string{
			"line 4: env.allow: " + noValue, "line 8: profiles.b.locked: " + noValue, "line 8: profiles.b.cpus: " + noValue}},
		{"merge", "version: 1\nprofiles: {a: {<<: {cpus: 1}}}", []string{"line 2: profiles.a.<<: is not a known key (known here: " + knownProfileKeys + ")"}},
		{"odd key", "version: 1\nprofiles: {[a]: {}}", []string{"line 2: profiles: line 2 has a key that is not a plain word"}},
		{"choices", "version: 1\nresources: {over_max: ignore}\nimages: {pull: sometimes}\nmounts: {hold: no}", []string{
			`line 2: resources.over_max: is "ignore", must be refuse or clamp`, `line 3: images.pull: is "sometimes", must be missing, always or never`,
			`line 4: mounts.hold: is "no", must be required or auto`}},
		{"ttl", "version: 1\nttl: {default: 48h, idle_default: 1ms, max_lifetime: 24h}", []string{
			"line 2: ttl.default: is 48h0m0s, must be from 1s to ttl.max_lifetime, 24h0m0s",
			"line 2: ttl.idle_default: is 1ms, must be 0 (never), or from 1s to ttl.max_lifetime, 24h0m0s"}},
		{"lifetime", "version: 1\nttl: {max_lifetime: 0, default: 1s}", []string{"line 2: ttl.max_lifetime: is 0s, must be at least 1s"}},
		{"networks", "version: 1\nnetworks:\n  off: {engine_network: x}\n  a: {engine_network: host}\n  b: {}\n  c: {engine_network: berm-sandbox}\n  d: {engine_network: 'container:x'}", []string{
			`line 2: networks.on.engine_network: "berm-sandbox" is that of network c already`,
			"line 3: networks.off: a network's name is letters, digits, _, . and -, 64 at most, and none of off, host, none, bridge, default, ingress, docker_gwbridge",
			`line 4: networks.a.engine_network: "host" can't be used: name a network of its own, none of host, none, bridge, default, ingress, docker_gwbridge`,
			`line 5: networks.b.engine_network: "" can't be used: name a network of its own, none of host, none, bridge, default, ingress, docker_gwbridge`,
			`line 7: networks.d.engine_network: "container:x" can't be used: name a network of its own, none of host, none, bridge, default, ingress, docker_gwbridge`}},
		{"images", "version: 1\nimages:\n  allow: ['', UPPER, 'a:[', 'a@sha256:1', 'a/*/b']\n  pins: {UPPER: x, alpine: b, 'c@sha256:" + someSum + "': d}", []string{
			`line 3: images.allow[0]: "" is no pattern: is not an image reference`, `line 3: images.allow[1]: "UPPER" is no pattern: is not an image reference`,
			`line 3: images.allow[2]: "a:[" is no pattern: a tag must be a pattern, and can't go with a digest`,
			`line 3: images.allow[3]: "a@sha256:1" is no pattern: its digest is not sha256: and 64 hex digits`,
			`line 3: images.allow[4]: "a/*/b" is no pattern: is not an image reference`,
			`line 4: images.pins.UPPER: "UPPER" is not an image reference`, `line 4: images.pins.alpine: must be sha256: and 64 hex digits`,
			`line 4: images.pins.c@sha256:` + someSum + `: a pinned reference has a tag, and no digest`}},
		{"pinned twice", "version: 1\nimages: {pins: {alpine: 'sha256:" + someSum + "', 'alpine:latest': 'sha256:" + someSum + "'}}", []string{
			"line 2: images.pins.alpine:latest: is pinned twice, as alpine:latest"}},
		{"require digest", "version: 1\nimages: {require_digest: true}\nprofiles: {default: {image: 'a@sha256:" + someSum + "'}, x: {image: busybox}}", []string{
			"line 2: images.require_digest: image busybox:latest of profile x has no digest, and no pin gives it one"}},
		{"env", "version: 1\nenv:\n  allow: ['[', '']\n  pin: {1A: x, BERM_X: y, D: z, N: \"a\\0b\"}\n  inject:\n    A: {}\n    B: {file: x}\n    C: {env: GONE}\n    D: {env: EMPTY}\n    E: {env: NUL}", []string{
			`line 3: env.allow[0]: "[" is not a pattern`, `line 3: env.allow[1]: "" is not a pattern`,
			"line 4: env.pin.1A: needs a name of letters, digits and _ . : -, beginning with a letter or _", "line 4: env.pin.BERM_X: names that begin with BERM_ are Berm's own", "line 4: env.pin.N: its value contains a NUL",
			"line 6: env.inject.A: needs either file or env", "line 7: env.inject.B.file: must be an absolute path", "line 8: env.inject.C: can't be read: gone",
			"line 9: env.inject.D: is pinned as well", "line 9: env.inject.D: the secret is empty", "line 10: env.inject.E: the secret contains a NUL"}},
		{"profile names", "version: 1\nprofiles: {'a b': {}, default: {extends: x}, network_basic: {extends: default}}", []string{
			"line 2: profiles.a b: a profile's name is letters, digits, _ and -, 64 at most", "line 2: profiles.default.extends: a built-in profile can't extend another",
			"line 2: profiles.network_basic.extends: a built-in profile can't extend another"}},
		{"extends", "version: 1\nprofiles:\n  a: {extends: b}\n  b: {extends: c}\n  c: {extends: a}\n  d: {extends: gone}\n  e: {extends: e}", []string{
			"line 5: profiles.c.extends: c and a extend each other",
			`line 6: profiles.d.extends: there is no profile "gone" (known: a, b, c, d, default, e, network_basic, network_extended, offline_readonly)`,
			"line 7: profiles.e.extends: e and e extend each other"}},
		{"profile values", "version: 1\nprofiles:\n  a: {image: 'sha256:" + someSum + "', network: x, host_path_mode: rx, mount_path: /proc/x, user: root, runtime_class: 'a b', agent: maybe, userns: '0:100000:65536', cap_add: [ALL, 'a b'], locked: [env]}", []string{
			`line 3: profiles.a.image: "sha256:` + someSum + `" is an image ID; only references by name are taken`, `line 3: profiles.a.network: there is no network "x" (known: off, on)`,
			`line 3: profiles.a.host_path_mode: is "rx", must be none, ro or rw`, `line 3: profiles.a.mount_path: "/proc/x" lies in /proc`,
			`line 3: profiles.a.user: is "root", must be a number, or two with a colon (uid:gid)`, `line 3: profiles.a.runtime_class: "a b" is not a runtime's name`, `line 3: profiles.a.agent: is "maybe", must be on or off`, `line 3: profiles.a.userns: is "0:100000:65536", must be auto or off`,
			`line 3: profiles.a.cap_add: "ALL" is not the name of one capability`, `line 3: profiles.a.cap_add: "a b" is not the name of one capability`,
			`line 3: profiles.a.locked: "env" can't be locked (these can: ` + strings.Join(lockable, ", ") + ")"}},
		{"profile ranges", "version: 1\nprofiles:\n  a: {cpus: .nan, memory_mb: 31, pids_limit: 0, workspace_quota_mb: -1, timeout: 0s, ttl: 25h, idle_ttl: -1s, max_cpus: .inf}", []string{
			"line 3: profiles.a.cpus: must be a number from 0.01 to 65536", "line 3: profiles.a.max_cpus: must be a number up to 65536", "line 3: profiles.a.memory_mb: is 31, must be from 32 to 1099511627776",
			"line 3: profiles.a.pids_limit: is 0, must be from 1 to 4194304", "line 3: profiles.a.workspace_quota_mb: is -1, must be from 0 to 1099511627776",
			"line 3: profiles.a.timeout: is 0s, must be at least 1s", "line 3: profiles.a.ttl: is 25h0m0s, must be from 1s to 24h0m0s", "line 3: profiles.a.idle_ttl: is -1s, must be from 1s to 24h0m0s"}},
		{"maximum below", "version: 1\nprofiles:\n  a: {max_cpus: 0.5, max_memory_mb: 256, max_pids_limit: 64, max_timeout: 10s}", []string{
			"line 3: profiles.a.max_cpus: is 0.5, below the profile's own value of 1: lower that as well", "line 3: profiles.a.max_memory_mb: is 256, below the profile's own value of 512: lower that as well",
			"line 3: profiles.a.max_pids_limit: is 64, below the profile's own value of 128: lower that as well", "line 3: profiles.a.max_timeout: is 10s, below the profile's own value of 30s: lower that as well"}},
		{"roots", "version: 1\nmounts:\n  allowed_roots:\n  - srv\n  - /gone\n  - /etc/x\n  - /srv/etc", []string{
			`line 4: mounts.allowed_roots[0]: "srv" is not absolute`,
			"line 5: mounts.allowed_roots[1]: /gone is not a directory that Berm can see: make it; if Berm runs in a container, mount it into Berm's container at the same path, or map it in mounts.path_map",
			"line 6: mounts.allowed_roots[2]: /etc/x is not a directory that Berm can see: make it; if Berm runs in a container, mount it into Berm's container at the same path, or map it in mounts.path_map",
			"line 7: mounts.allowed_roots[3]: /srv/etc lies in /etc, which is always refused, so that nothing in it could be mounted"}},
		{"path map", "version: 1\nmounts:\n  path_map:\n  - {engine: a, local: /c}\n  - {engine: /a, local: c}\n  - {engine: /a, local: /gone}\n  - {engine: /a, local: /c}\n  - {engine: /a, local: /srv}", []string{
			`line 4: mounts.path_map[0].engine: "a" is not absolute`, `line 5: mounts.path_map[1].local: "c" is not absolute`,
			"line 6: mounts.path_map[2].local: /gone is not an existing directory", "line 8: mounts.path_map[4]: maps what another entry maps already"}},
		{"workspace form", "version: 1\nmounts: {default_workspace: x}", []string{`line 2: mounts.default_workspace: "x" is not absolute`}},
		{"workspace outside", "version: 1\nmounts: {shared_root: /srv, allowed_roots: [/srv/data]}", []string{
			`line 2: mounts.shared_root: the default workspace can't be used: host path "/srv/default" is not under an allowed root; allowed is /srv/data and below`}},
		{"workspace without roots", "version: 1\nmounts: {default_workspace: /srv/x}", []string{
			`line 2: mounts.default_workspace: the default workspace can't be used: host path "/srv/x" is refused: host mounts are disabled, as the policy has neither allowed roots nor a shared root`}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_, err := Parse([]byte(tt.yaml), Options{Resolve: dir.resolve, MakeDir: fakeHost{}.mkdir, Secret: secret})
			wantProblems(t, tt.want, err)
		})
	}
}

const knownProfileKeys = "agent, cap_add, cpus, engine_api, extends, host_path_mode, idle_ttl, image, locked, max_cpus, max_memory_mb, max_pids_limit, " +
	"max_timeout, memory_mb, mount_path, network, pids_limit, read_only_rootfs, runtime_class, timeout, ttl, user, userns, workspace_quota_mb"

func TestParseOtherProblems(t *testing.T) {
	tests := []struct {
		name, yaml string
		opts       Options
		want       string
	}{
		{"size", strings.Repeat("#", maxFileBytes+1), Options{}, "policy: the file is over 1048576 bytes"},
		{"image option", "", Options{DefaultImage: "UPPER"}, `policy: the default image "UPPER" is not an image reference`},
		{"ttl option", "", Options{DefaultTTL: 25 * time.Hour}, "policy: ttl.default: is 25h0m0s, must be from 1s to ttl.max_lifetime, 24h0m0s"},
		{"refuse option", "", Options{Refuse: []string{"run"}}, `policy: the path to be refused "run" is not absolute`},
		{"own file system", "version: 1\nmounts: {shared_root: /srv}", Options{Resolve: fakeHost{"/srv": "/srv"}.resolve, InContainer: true, OnRootFS: func(string) (bool, error) { return true, nil }},
			"policy: line 2: mounts.shared_root: /srv lies on the file system of Berm's own container, so that it is not the engine's /srv: mount it into Berm's container at the same path, or map it in mounts.path_map"},
		{"can't be examined", "version: 1\nmounts: {shared_root: /srv}", Options{Resolve: fakeHost{"/srv": "/srv"}.resolve, InContainer: true, OnRootFS: func(string) (bool, error) { return false, errors.New("no") }},
			"policy: line 2: mounts.shared_root: /srv can't be examined: no"},
		{"can't be made", "version: 1\nmounts: {shared_root: /srv}", Options{Resolve: fakeHost{"/srv": "/srv"}.resolve, MakeDir: func(string, string, *Owner) error { return errors.New("read-only") }},
			"policy: line 2: mounts.shared_root: the default workspace can't be made: read-only"},
		{"not made", "version: 1\nmounts: {shared_root: /srv}", Options{Resolve: fakeHost{"/srv": "/srv"}.resolve, MakeDir: func(string, string, *Owner) error { return nil }},
			`policy: line 2: mounts.shared_root: the default workspace can't be used: host path "/srv/default" does not exist, or is no directory; allowed is one in /srv and below`},
		{"link on the way", "version: 1\nmounts: {allowed_roots: [/srv], default_workspace: /srv/link/x}",
			Options{Resolve: fakeHost{"/srv": "/srv", "/srv/link": "/home"}.resolve, MakeDir: func(string, string, *Owner) error { panic("made") }},
			`policy: line 2: mounts.default_workspace: the default workspace can't be used: host path "/srv/link/x" is not under an allowed root, or leads out of it; allowed is /srv and below`},
		{"relative answer", "version: 1\nmounts: {shared_root: /srv}", Options{Resolve: func(string) (string, error) { return "srv", nil }},
			"policy: line 2: mounts.shared_root: /srv is not a directory that Berm can see: make it; if Berm runs in a container, mount it into Berm's container at the same path, or map it in mounts.path_map"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_, err := Parse([]byte(tt.yaml), tt.opts)
			if err == nil || err.Error() != tt.want {
				t.Errorf("got  %v\nwant %v", err, tt.want)
			}
		})
	}
}

func TestProfilesTable(t *testing.T) {
	p := mustParse(t, "", Options{})
	same(t, []string{"default", "network_basic", "network_extended", "offline_readonly"}, p.Profiles())
	tests := []struct {
		name, network, mode string
		maxTimeout          time.Duration
		cpus                float64
		memory, pids        int64
		readOnly            bool
		locked              []string
	}{
		{"default", "off", "rw", 120 * time.Second, 1, 512, 128, true, []string{}},
		{"offline_readonly", "off", "ro", 60 * time.Second, 0.5, 256, 64, true, []string{"host_path_mode", "network", "read_only_rootfs"}},
		{"network_basic", "on", "rw", 120 * time.Second, 1, 512, 128, true, []string{}},
		{"network_extended", "on", "rw", 300 * time.Second, 2, 1024, 256, false, []string{}},
	}
	for _, tt := range tests {
		got, ok := p.Profile(tt.name)
		if !ok {
			t.Errorf("%s is missing", tt.name)
		}
		want := Profile{
			Name: tt.name, Image: "python:3.11-slim", Network: tt.network, HostPathMode: tt.mode, MountPath: "/workspace",
			Timeout: 30 * time.Second, MaxTimeout: tt.maxTimeout, CPUs: tt.cpus, MaxCPUs: 2, MemoryMB: tt.memory, MaxMemoryMB: 2048,
			PidsLimit: tt.pids, MaxPidsLimit: 512, ReadOnlyRootfs: tt.readOnly, TTL: time.Hour, CapAdd: []string{}, Agent: "on", Userns: "off", EngineAPI: builtinEngineAPI(), Locked: tt.locked,
		}
		if tt.network == "on" {
			want.EngineAPI.Networks, want.EngineAPI.DNS = "own", "on"
		}
		if d := cmp.Diff(want, got); d != "" {
			t.Errorf("%s: %s", tt.name, d)
		}
	}
	if d, _ := p.Profile(""); d.Name != "default" {
		t.Error("the empty name is not default")
	}
	if _, ok := p.Profile("gone"); ok {
		t.Error("a profile that isn't there was found")
	}
}

func TestProfileInheritance(t *testing.T) {
	p := mustParse(t, `
profiles:
  default: {timeout: 20s, cpus: 3, memory_mb: 3000, user: 1000}
  z: {extends: offline_readonly, pids_limit: 1000, locked: []}
  a: {extends: z, max_cpus: 8, user: ""}
`, Options{})
	d, _ := p.Profile("default")
	if d.MaxCPUs != 3 || d.MaxMemoryMB != 3000 {
		t.Errorf("a maximum is below the profile's own value: %+v", d)
	}
	b, _ := p.Profile("network_extended")
	if b.Timeout != 20*time.Second || b.CPUs != 2 || b.MemoryMB != 1024 || b.User != "1000" {
		t.Errorf("a built-in profile keeps its table and inherits the rest: %+v", b)
	}
	a, _ := p.Profile("a")
	if a.Network != "off" || a.CPUs != 0.5 || a.MaxCPUs != 8 || a.PidsLimit != 1000 || a.MaxPidsLimit != 1000 || a.User != "" || len(a.Locked) != 0 || a.HostPathMode != "ro" {
		t.Errorf("got %+v", a)
	}
	a.Locked = append(a.Locked, "image")
	if again, _ := p.Profile("a"); len(again.Locked) != 0 {
		t.Error("a caller can change the policy")
	}
}

func TestAccessors(t *testing.T) {
	p := mustParse(t, strings.Replace(fullPolicy, "user_x", "image", 1), fullOptions())
	want := []NetworkRule{{Name: "on", EngineNetwork: "berm-sandbox", Isolated: true}, {Name: "team", EngineNetwork: "team-net", Internal: true}}
	same(t, want, p.Networks())
	if p.PullPolicy() != PullNever || !p.HoldRequired() || !p.AllowsMounts() {
		t.Error("pull or hold got lost")
	}
	same(t, []string{"KEY=hunter2/run/secrets/key", "OTHER=hunter2OTHER_KEY"}, p.InjectedEnv())
	b, _ := p.Profile("big")
	same(t, []string{"CAP_CHOWN", "CAP_NET_BIND_SERVICE"}, b.CapAdd)
	q := mustParse(t, "", Options{})
	if q.PullPolicy() != PullMissing || q.HoldRequired() || q.AllowsMounts() || len(q.InjectedEnv()) != 0 {
		t.Error("the built-in policy pulls what is missing, and demands and injects nothing")
	}
}

// FuzzParse: whatever is taken can be printed, and reads the same again; nothing
// outside of the hooks is touched.
func FuzzParse(f *testing.F) {
	f.Add([]byte("version: 1\n" + strings.Replace(fullPolicy, "user_x", "image", 1)))
	f.Add([]byte("version: 1\nprofiles: {a: {extends: b}, b: {extends: a}}"))
	f.Add([]byte("version: 1\nmounts: {shared_root: /srv/more}\nttl: {idle_default: 0}"))
	f.Add([]byte("a: &a [*a]"))
	f.Fuzz(func(t *testing.T, data []byte) {
		opts := fullOptions()
		opts.OnRootFS = func(string) (bool, error) { return false, nil }
		p, err := Parse(data, opts)
		if err != nil {
			var le *LoadError
			if !errors.As(err, &le) || len(le.Problems) == 0 {
				t.Fatalf("error is %v", err)
			}
			return
		}
		for _, name := range p.Profiles() {
			pr, _ := p.Profile(name)
			if !finite(pr.CPUs) || pr.CPUs < minCPUs || pr.MemoryMB < minMemoryMB || pr.PidsLimit < 1 || pr.CPUs > pr.MaxCPUs || math.IsInf(pr.MaxCPUs, 0) {
				t.Errorf("profile %s is out of bounds: %+v", name, pr)
			}
			if v := p.Sandbox(Request{Profile: name}); !v.Allowed() {
				t.Errorf("profile %s denies itself: %v", name, v.Err())
			} else if !path.IsAbs(v.Spec.MountPath) {
				t.Errorf("mount path %q", v.Spec.MountPath)
			}
		}
		first, err := p.YAML()
		must(t, err)
		again, err := Parse(first, opts)
		if err != nil {
			t.Fatalf("%v\n%s", err, first)
		}
		if second, err := again.YAML(); err != nil || string(first) != string(second) {
			t.Errorf("%v\n%s", err, cmp.Diff(string(first), string(second)))
		}
	})
}

var must = check.Must // ends a test if a step of its own fails
