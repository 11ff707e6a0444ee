package policy

import (
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestEngineAPIOfTheFile(t *testing.T) {
	p := mustParse(t, strings.Replace(fullPolicy, "user_x", "image", 1), fullOptions())
	got, _ := p.Profile("big")
	want := EngineAPI{
		Capabilities: []string{"CAP_CHOWN", "CAP_KILL", "CAP_NET_BIND_SERVICE", "CAP_NET_RAW"}, Volumes: "off", Networks: "off", Ports: "loopback", PortRange: "1-2",
		LogDrivers: []string{"local"}, LogMaxMB: 3, Restart: []string{}, Runtimes: []string{"kata"}, Sysctls: []string{"net.core.somaxconn"}, Users: "non_root", DNS: "off",
		TmpfsMB: 5, MaxUlimit: 6, Pull: "off", Build: "on",
		BuildKit:    BuildKit{Enabled: true, Network: "bridge", Outputs: []string{"tar"}, Provenance: "off", Cache: "off", CgroupParent: "/a.b/c.slice"},
		BuildAddURL: []string{"https://x.local:1/a/"}, Commit: "on", Tags: []string{"acme/*"}, Load: []string{}, Push: []string{}, Login: []string{}, Archive: "off", Exec: "off", DockerSocket: "on", Subnets: []string{}, HostGateway: "off", RedactEnv: []string{"*KEY*"}, MaxExecs: 7, ShowLabels: true,
		ReadOnlyRootfs: true,
	}
	same(t, want, got.EngineAPI)
	// A caller can't change the policy through what it was given.
	got.EngineAPI.Capabilities[0], got.EngineAPI.Tags[0] = "x", "x"
	if again, _ := p.Profile("big"); !cmp.Equal(want, again.EngineAPI) {
		t.Error("the policy has been changed from outside")
	}
}

func TestEngineAPIInheritance(t *testing.T) {
	p := mustParse(t, `
profiles:
  parent: {extends: network_basic, cap_add: [NET_ADMIN], engine_api: {volumes: off, capabilities: [KILL], tags: [a/*], buildkit: {ssh: false, outputs: [tar]}}}
  child: {extends: parent, cap_add: [], engine_api: {tags: [], pull: off, buildkit: {enabled: true}}}
  plain: {extends: parent}
`, Options{})
	get := func(name string) EngineAPI { pr, _ := p.Profile(name); return pr.EngineAPI }
	if e := get("child"); e.Volumes != "off" || e.Networks != "own" || e.DNS != "on" || e.Pull != "off" || len(e.Tags) != 0 || !slices.Equal(e.Capabilities, []string{"CAP_KILL"}) {
		t.Errorf("%+v", e)
	}
	if e := get("plain"); !slices.Equal(e.Tags, []string{"a/*"}) || !slices.Equal(e.Capabilities, []string{"CAP_KILL", "CAP_NET_ADMIN"}) || e.Pull != "on" {
		t.Errorf("%+v", e)
	}
	inherited := builtinBuildKit()
	inherited.Enabled, inherited.SSH, inherited.Outputs = true, false, []string{"tar"}
	same(t, inherited, get("child").BuildKit)
	if e := get("default"); e.Networks != "internal" || e.DNS != "off" || slices.Contains(e.Capabilities, "CAP_NET_RAW") || len(e.Capabilities) != 12 {
		t.Errorf("%+v", e)
	}
}

func TestEngineAPIProblems(t *testing.T) {
	const yaml = `version: 1
profiles:
  a:
    engine_api:
      capabilities: [ALL, cap_all, KILLS, "*"]
      volumes: on
      networks: host
      ports: yes
      port_range: 5-1
      log_drivers: [syslog, local, local]
      log_max_mb: 0
      restart: [never]
      runtimes: [""]
      sysctls: [kernel.core_pattern, "net.*", net/x]
      users: root
      dns: maybe
      tmpfs_mb: -1
      max_ulimit: 0
      pull: x
      build: x
      commit: x
      tags: [UPPER]
      archive: x
      exec: x
      redact_env: ["["]
      max_objects: -1
  b: {engine_api: {nothing: 1}}
  c: {engine_api: {log_drivers: []}}
  u: {engine_api: {build_add_url: ["https://x.local", "ftp://x/", "https://x/../", "https://u@x/", "https://x/?a/", "http://x/", "https:///", "http://x/"]}}
  d: {extends: a, engine_api: {volumes: own}}
  n: {engine_api: {docker_socket: x, host_gateway: x, load: [UPPER], push: [UPPER], login: ["https://x.local", x.local/a], max_memlock_mb: -1, subnets: [10.0.0.0/33]}}
  k: {engine_api: {buildkit: {network: host, outputs: [registry, tar, tar], provenance: full, cache: on, cgroup_parent: a/../b}}}
  l: {engine_api: {buildkit: {sources: []}}}
`
	const noRegistry = " must be a registry as images name it: a host, and a port if it isn't 443"
	const noPrefix = " must be http:// or https://, a host and a path that ends with /"
	want := []string{
		`line 5: profiles.a.engine_api.capabilities: "ALL" is not the name of one capability`, `line 5: profiles.a.engine_api.capabilities: "cap_all" is not the name of one capability`,
		`line 5: profiles.a.engine_api.capabilities: "KILLS" is not the name of one capability`, `line 5: profiles.a.engine_api.capabilities: "*" is not the name of one capability`,
		`line 6: profiles.a.engine_api.volumes: is "on", must be own or off`, `line 7: profiles.a.engine_api.networks: is "host", must be own, internal or off`,
		`line 8: profiles.a.engine_api.ports: is "yes", must be off, loopback or any`,
		`line 9: profiles.a.engine_api.port_range: "5-1" is not two ports from 1 to 65535, as 1024-65535, the lower one first`,
		`line 10: profiles.a.engine_api.log_drivers[0]: "syslog" must be json-file, local or none`, `line 10: profiles.a.engine_api.log_drivers[2]: "local" is there twice`,
		"line 11: profiles.a.engine_api.log_max_mb: is 0, must be from 1 to 1099511627776",
		`line 12: profiles.a.engine_api.restart[0]: "never" must be no, on-failure, always or unless-stopped`, `line 13: profiles.a.engine_api.runtimes[0]: "" is not a runtime's name`,
		`line 14: profiles.a.engine_api.sysctls[0]: "kernel.core_pattern" is not the name of a sysctl that a container has for itself`,
		`line 14: profiles.a.engine_api.sysctls[1]: "net.*" is not the name of a sysctl that a container has for itself`,
		`line 14: profiles.a.engine_api.sysctls[2]: "net/x" is not the name of a sysctl that a container has for itself`,
		`line 15: profiles.a.engine_api.users: is "root", must be any or non_root`, `line 16: profiles.a.engine_api.dns: is "maybe", must be off or on`,
		"line 17: profiles.a.engine_api.tmpfs_mb: is -1, must be from 1 to 1099511627776", "line 18: profiles.a.engine_api.max_ulimit: is 0, must be from 1 to 1073741824",
		`line 19: profiles.a.engine_api.pull: is "x", must be on or off`, `line 20: profiles.a.engine_api.build: is "x", must be on or off`, `line 21: profiles.a.engine_api.commit: is "x", must be on or off`,
		`line 22: profiles.a.engine_api.tags[0]: "UPPER" is no pattern: is not an image reference`,
		`line 23: profiles.a.engine_api.archive: is "x", must be on or off`, `line 24: profiles.a.engine_api.exec: is "x", must be on or off`,
		`line 25: profiles.a.engine_api.redact_env[0]: "[" is not a pattern`, "line 26: profiles.a.engine_api.max_objects: is -1, must be from 0 to 1048576",
		"line 27: profiles.b.engine_api.nothing: is not a known key (known here: archive, build, build_add_url, buildkit, capabilities, commit, dns, docker_socket, exec, host_gateway, load, log_drivers, log_max_mb, login, max_execs, max_memlock_mb, max_objects, max_ulimit, networks, " +
			"port_range, ports, pull, push, read_only_rootfs, redact_env, restart, runtimes, show_labels, subnets, sysctls, tags, tmpfs_mb, users, volumes)",
		"line 28: profiles.c.engine_api.log_drivers: must name at least one of json-file, local or none",
		`line 29: profiles.u.engine_api.build_add_url[0]: "https://x.local"` + noPrefix, `line 29: profiles.u.engine_api.build_add_url[1]: "ftp://x/"` + noPrefix,
		`line 29: profiles.u.engine_api.build_add_url[2]: "https://x/../"` + noPrefix, `line 29: profiles.u.engine_api.build_add_url[3]: "https://u@x/"` + noPrefix,
		`line 29: profiles.u.engine_api.build_add_url[4]: "https://x/?a/"` + noPrefix, `line 29: profiles.u.engine_api.build_add_url[6]: "https:///"` + noPrefix,
		`line 29: profiles.u.engine_api.build_add_url[7]: "http://x/" is there twice`,
		`line 31: profiles.n.engine_api.host_gateway: is "x", must be off or on`, `line 31: profiles.n.engine_api.docker_socket: is "x", must be off or on`,
		"line 31: profiles.n.engine_api.max_memlock_mb: is -1, must be from 0 to 1099511627776", `line 31: profiles.n.engine_api.subnets[0]: "10.0.0.0/33" is not a range such as 10.80.0.0/16`,
		`line 31: profiles.n.engine_api.load[0]: "UPPER" is no pattern: is not an image reference`, `line 31: profiles.n.engine_api.push[0]: "UPPER" is no pattern: is not an image reference`,
		`line 31: profiles.n.engine_api.login[0]: "https://x.local"` + noRegistry, `line 31: profiles.n.engine_api.login[1]: "x.local/a"` + noRegistry,
		`line 32: profiles.k.engine_api.buildkit.outputs[0]: "registry" must be image, local, tar, docker or oci`,
		`line 32: profiles.k.engine_api.buildkit.outputs[2]: "tar" is there twice`,
		`line 32: profiles.k.engine_api.buildkit.network: is "host", must be none or bridge`,
		`line 32: profiles.k.engine_api.buildkit.provenance: is "full", must be off, min or max`,
		`line 32: profiles.k.engine_api.buildkit.cache: is "on", must be tenant or off`,
		`line 32: profiles.k.engine_api.buildkit.cgroup_parent: "a/../b" is not a path of a cgroup, as /builds, or a slice, as builds.slice`,
		"line 33: profiles.l.engine_api.buildkit.sources: is not a known key (known here: cache, cgroup_parent, enabled, network, outputs, provenance, secrets, ssh)",
	}
	_, err := Parse([]byte(yaml), Options{Resolve: fakeHost{}.resolve})
	wantProblems(t, want, err)
}

// A profile is printed by the keys of the file, and a copy of it shares no list.
func TestProfileFields(t *testing.T) {
	for _, typ := range []reflect.Type{reflect.TypeFor[Profile](), reflect.TypeFor[EngineAPI](), reflect.TypeFor[BuildKit]()} {
		for i := range typ.NumField() {
			tag := typ.Field(i).Tag
			if key := tag.Get("yaml"); key != tag.Get("json") && key != "-" {
				t.Errorf("%s.%s has the key %q in the file", typ, typ.Field(i).Name, key)
			}
		}
	}
	var e EngineAPI
	v := reflect.ValueOf(&e).Elem()
	for i := range v.NumField() {
		if list, ok := v.Field(i).Addr().Interface().(*[]string); ok {
			*list = []string{"y"}
		}
	}
	e.BuildKit.Outputs = []string{"y"}
	if &e.clone().BuildKit.Outputs[0] == &e.BuildKit.Outputs[0] {
		t.Error("buildkit.outputs is shared")
	}
	c := reflect.ValueOf(e.clone())
	for i := range v.NumField() {
		if list, ok := c.Field(i).Interface().([]string); ok && &list[0] == &v.Field(i).Interface().([]string)[0] {
			t.Errorf("%s is shared", v.Type().Field(i).Name)
		}
	}
}
