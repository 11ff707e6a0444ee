package policy

import (
	"fmt"
	"math"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

const containerPolicy = `
profiles:
  open: {extends: network_basic, max_memory_mb: 1024, engine_api: {ports: any, port_range: 8000-9000, capabilities: [chown, NET_RAW, SYS_ADMIN, KILL], sysctls: [net.core.somaxconn], runtimes: [kata], restart: [on-failure], tags: [acme/*, "*"], build: on}}
  tight: {extends: default, user: "1000:1000", runtime_class: runsc, host_path_mode: none,
    engine_api: {users: non_root, volumes: off, networks: off, ports: loopback, log_drivers: [local], log_max_mb: 4, tmpfs_mb: 8, restart: [], exec: off, pull: off, capabilities: [], max_ulimit: 100}}
  numbers: {engine_api: {users: non_root}}
  fixed: {extends: network_basic, locked: [image, network, cpus, memory_mb, pids_limit, read_only_rootfs, ttl, extra_mounts], engine_api: {networks: own}}
  readonly: {extends: network_basic, host_path_mode: ro, locked: [host_path_mode]}
mounts: {allowed_roots: [/srv]}
networks: {team: {engine_network: team-net}}
env: {allow: ["A*", TZ, KEY], deny: [ADMIN], pin: {TZ: UTC}, inject: {KEY: {env: KEY}}}
images: {allow: ["busybox", "acme/tool", "ghcr.io/*"], pins: {alpine: "sha256:` + someSum + `"}}
`

func containerPolicies(t testing.TB) *Policy {
	h := fakeHost{"/srv": "/srv", "/srv/a": "/srv/a", "/srv/link": "/srv/a", "/srv/out": "/etc", "/srv/default": "/srv/default"}
	return mustParse(t, containerPolicy, Options{Resolve: h.resolve, Secret: func(SecretSource) (string, error) { return "hunter2", nil }})
}

func TestContainerDefaults(t *testing.T) {
	v := containerPolicies(t).Container(ContainerRequest{Image: "busybox"})
	api := builtinEngineAPI()
	want := ContainerSpec{
		Profile: "default", Image: "busybox:latest", Env: map[string]string{"TZ": "UTC"}, TTL: time.Hour, MaxLifetime: 24 * time.Hour,
		Network: "none", Capabilities: api.Capabilities,
		LogDriver: "json-file", LogOptions: map[string]string{"max-size": "10485760", "max-file": "3"}, Restart: "no",
		CPUs: 1, MemoryBytes: 512 << 20, SwapBytes: 512 << 20, PidsLimit: 128, ShmBytes: 64 << 20,
	}
	if d := cmp.Diff(ContainerVerdict{Spec: want}, v); d != "" || v.Err() != nil {
		t.Error(d)
	}
	if v := containerPolicies(t).Container(ContainerRequest{Profile: "tight", Image: "busybox"}); !v.Allowed() || v.Spec.User != "1000:1000" || v.Spec.Runtime != "runsc" ||
		v.Spec.LogDriver != "local" || v.Spec.ShmBytes != 8<<20 || len(v.Spec.Capabilities) != 0 || v.Spec.Capabilities == nil {
		t.Errorf("%+v", v)
	}
	if s := containerPolicies(t).Container(ContainerRequest{Profile: "open", Image: "busybox"}).Spec; s.Network != "networks" ||
		!cmp.Equal(s.Networks, []ContainerNetwork{{Field: "HostConfig.NetworkMode", Mode: NetNamed, Name: "berm-sandbox"}}) {
		t.Errorf("%+v", s)
	}
}

// bad is a request of the profile with one thing wrong.
type bad struct {
	name, profile string
	req           ContainerRequest
	rule, field   string
}

func security(opts ...string) ContainerRequest { return ContainerRequest{SecurityOpt: opts} }
func capAdd(c string) ContainerRequest         { return ContainerRequest{CapAdd: []string{c}} }
func oneNet(n ContainerNetwork) ContainerRequest {
	n.Field = "N"
	return ContainerRequest{Networks: []ContainerNetwork{n}}
}
func oneMount(m ...ContainerMount) ContainerRequest {
	for i := range m {
		m[i].Field = fmt.Sprintf("M%d", i)
	}
	return ContainerRequest{Mounts: m}
}
func onePort(ip string, host, port int, proto string) ContainerRequest {
	return ContainerRequest{Ports: []ContainerPort{{Field: "P", HostIP: ip, HostPort: host, Port: port, Protocol: proto}}}
}
func portRange(host, end int) ContainerRequest {
	r := onePort("", host, 80, "tcp")
	r.Ports[0].HostEnd = end
	return r
}
func logs(driver string, options ...string) ContainerRequest {
	r := ContainerRequest{LogDriver: driver, LogOptions: map[string]string{}}
	for i := 0; i < len(options); i += 2 {
		r.LogOptions[options[i]] = options[i+1]
	}
	return r
}
func ulimit(name string, soft, hard int64) ContainerRequest {
	return ContainerRequest{Ulimits: []ContainerUlimit{{name, soft, hard}}}
}
func namespace(kind, mode string) ContainerRequest {
	return ContainerRequest{Namespaces: []ContainerNamespace{{"NS", kind, mode}}}
}

func privilegeTests() []bad {
	const opt = "HostConfig.SecurityOpt"
	tests := []bad{
		{"privileged", "", ContainerRequest{Privileged: true}, rulePrivileged, "HostConfig.Privileged"},
		{"device", "", ContainerRequest{Devices: []string{"/dev/sda"}}, ruleDevice, "HostConfig.Devices"},
		{"other", "", ContainerRequest{Other: []OtherField{{"HostConfig.CgroupParent", "../x"}}}, ruleField, "HostConfig.CgroupParent"},
		{"capability dropped by a name that isn't", "", ContainerRequest{CapDrop: []string{"NO_SUCH"}}, ruleCapability, "HostConfig.CapDrop"},
		{"no new privileges both ways", "", security("no-new-privileges:true", "no-new-privileges:false"), ruleSecurityOpt, opt},
		{"user of the profile", "tight", ContainerRequest{User: "0"}, ruleUser, "User"},
		{"too many groups", "", ContainerRequest{Groups: make([]string, 65)}, ruleUser, "HostConfig.GroupAdd"},
		{"long user", "", ContainerRequest{User: strings.Repeat("a", 300)}, ruleUser, "User"},
		{"runtime", "", ContainerRequest{Runtime: "runc"}, ruleRuntime, "HostConfig.Runtime"},
		{"weaker runtime", "tight", ContainerRequest{Runtime: "runc"}, ruleRuntime, "HostConfig.Runtime"},
		{"restart", "open", ContainerRequest{Restart: "always"}, ruleRestart, "HostConfig.RestartPolicy.Name"},
		{"odd restart", "", ContainerRequest{Restart: "Always"}, ruleRestart, "HostConfig.RestartPolicy.Name"},
	}
	for _, c := range []string{"ALL", "all", "CAP_ALL", "cap_all", "SYS_ADMIN", "sys_admin", "CAP_SYS_ADMIN", "cap_Sys_Admin", "NET_RAW", "MKNOD", "CAP_CAP_CHOWN", " SYS_ADMIN", "", "sys_admın", "ſys_admin"} {
		tests = append(tests, bad{"cap " + c, "", capAdd(c), ruleCapability, "HostConfig.CapAdd"})
	}
	for _, o := range []string{
		"seccomp=unconfined", "seccomp:unconfined", `seccomp={"defaultAction":"SCMP_ACT_ALLOW"}`, "seccomp", "seccomp=", "apparmor=unconfined", "apparmor:unconfined", "label=disable", "label:disable",
		"disable", "label=type:spc_t", "systempaths=unconfined", "no-new-privileges=false", "no-new-privileges:false", "no-new-privileges=0", "", "=", "SECCOMP=builtin", "writable-cgroups=true", "seccomp=builtin=x",
	} {
		tests = append(tests, bad{"option " + o, "", security(o), ruleSecurityOpt, opt})
	}
	for _, n := range [][2]string{
		{"pid", "host"}, {"pid", "container:abc"}, {"ipc", "host"}, {"ipc", "shareable"}, {"ipc", "container:x"}, {"uts", "host"}, {"cgroup", "host"},
		{"userns", "host"}, {"userns", "private"}, {"userns", "keep-id"}, {"pid", "Private"}, {"time", "host"},
	} {
		tests = append(tests, bad{n[0] + " " + n[1], "", namespace(n[0], n[1]), ruleNamespace, "NS"})
	}
	for _, u := range []string{"", "0", "00", "0:0", "root", "+1", "-1", "1000:0", "1000:00", "01000", "0x3e8", "1000:staff", "app", "1000:", ":1000", " 1000", "4294967296", "2147483648", "1000:4294967296", "1000\n"} {
		tests = append(tests, bad{"user " + u, "numbers", ContainerRequest{User: u}, ruleUser, "User"})
	}
	for _, g := range []string{"0", "00", "root", "docker", "1:1", "", "4294967296"} {
		tests = append(tests, bad{"group " + g, "numbers", ContainerRequest{User: "1", Groups: []string{g}}, ruleUser, "HostConfig.GroupAdd"})
	}
	return tests
}

func mountTests() []bad {
	volume := func(name string, own bool) ContainerRequest {
		return oneMount(ContainerMount{Type: "volume", Source: name, Own: own, Target: "/v"})
	}
	bind := func(source, target string) ContainerMount {
		return ContainerMount{Type: "bind", Source: source, Target: target}
	}
	named := func(target string) ContainerMount {
		return ContainerMount{Type: "volume", Source: "v", Own: true, Target: target}
	}
	tmpfs := func(target string, size int64) ContainerMount {
		return ContainerMount{Type: "tmpfs", Target: target, SizeBytes: size}
	}
	many := func(n int, typ string) ContainerRequest {
		var m []ContainerMount
		for i := range n {
			m = append(m, ContainerMount{Type: typ, Source: "/srv/a", Target: fmt.Sprintf("/m%d", i)})
		}
		return oneMount(m...)
	}
	tests := []bad{
		{"type", "", oneMount(ContainerMount{Type: "npipe", Target: "/x"}), ruleMountType, "M0"},
		{"image mount", "", oneMount(ContainerMount{Type: "image", Source: "busybox", Target: "/x"}), ruleMountType, "M0"},
		{"no type", "", oneMount(ContainerMount{Target: "/x"}), ruleMountType, "M0"},
		{"option of a bind", "", oneMount(ContainerMount{Type: "bind", Source: "/srv/a", Target: "/x", Options: []string{"propagation=rshared"}}), ruleMountOptions, "M0"},
		{"option of a volume", "", oneMount(ContainerMount{Type: "volume", Target: "/x", Options: []string{"driver=x"}}), ruleMountOptions, "M0"},
		{"option of a tmpfs", "", oneMount(ContainerMount{Type: "tmpfs", Target: "/x", Options: []string{"exec"}}), ruleMountOptions, "M0"},
		{"link out", "", oneMount(bind("/srv/out", "/x")), ruleAlwaysRefused, "M0"},
		{"socket", "", oneMount(bind("/var/run/docker.sock", "/x")), ruleAlwaysRefused, "M0"},
		{"socket by run", "", oneMount(bind("/run/docker.sock", "/x")), ruleAlwaysRefused, "M0"},
		{"proc", "", oneMount(bind("/proc/self/root/srv/a", "/x")), ruleAlwaysRefused, "M0"},
		{"root", "", oneMount(bind("/", "/x")), ruleAlwaysRefused, "M0"},
		{"elsewhere", "", oneMount(bind("/home", "/x")), ruleAllowedRoots, "M0"},
		{"missing", "", oneMount(bind("/srv/gone", "/x")), ruleNotADirectory, "M0"},
		{"relative", "", oneMount(bind("srv", "/x")), rulePathSyntax, "M0"},
		{"no source", "", oneMount(bind("", "/x")), rulePathSyntax, "M0"},
		{"no binds", "tight", oneMount(bind("/srv/a", "/x")), ruleModeNone, "M0"},
		{"locked binds", "fixed", oneMount(bind("/srv/a", "/x")), "profiles.fixed.locked", "M0"},
		{"volumes off", "tight", volume("v", true), ruleVolumes, "M0"},
		{"anonymous volumes off", "tight", volume("", true), ruleVolumes, "M0"},
		{"foreign volume", "", volume("v", false), ruleVolumeForeign, "M0"},
		{"volume's name", "", volume("../v", true), ruleVolumeName, "M0"},
		{"volume as a path", "", volume("/etc", true), ruleVolumeName, "M0"},
		{"volume with a newline", "", volume("v\n", true), ruleVolumeName, "M0"},
		{"long volume", "", volume(strings.Repeat("v", 129), true), ruleVolumeName, "M0"},
		{"too many binds", "", many(33, "bind"), ruleTooMany, "HostConfig.Mounts"},
		{"too many mounts", "", many(65, "tmpfs"), ruleTooMany, "HostConfig.Mounts"},
		{"tmpfs too large", "", oneMount(tmpfs("/x", 64<<20+1)), ruleOverMax, "M0"},
		{"same target", "", oneMount(tmpfs("/x", 0), tmpfs("/x/", 0)), ruleTargetOverlap, "M1"},
		{"below a named volume", "", oneMount(named("/x"), tmpfs("/x/y", 0)), ruleTargetOverlap, "M1"},
		{"named volume above", "", oneMount(ContainerMount{Type: "volume", Own: true, Target: "/x/y/z"}, named("/x/y")), ruleTargetOverlap, "M1"},
		{"bind in a named volume", "", oneMount(named("/x"), bind("/srv/a", "/x/./y")), ruleTargetOverlap, "M1"},
		{"the same target of two binds", "", oneMount(bind("/srv/a", "/x"), bind("/srv/a", "/x/z/..")), ruleTargetOverlap, "M1"},
		{"hosts file", "", oneMount(bind("/srv/a", "/etc/./hosts")), ruleTarget, "M0"},
		{"resolv.conf", "", oneMount(bind("/srv/a", "/etc/resolv.conf")), ruleTarget, "M0"},
		{"socket on a tight profile", "tight", oneMount(bind("/run/docker.sock", "/x")), ruleAlwaysRefused, "M0"},
		{"negative tmpfs", "", oneMount(tmpfs("/x", -1)), ruleRange, "M0"},
	}
	for _, target := range []string{"", "/", "x", "/..", "/proc", "/proc/sys", "/sys/fs/cgroup", "/dev", "/dev/shm", "/x/../proc/1", "/a\x00", "//proc", "/./sys"} {
		tests = append(tests, bad{"target " + target, "", oneMount(tmpfs(target, 0)), ruleTarget, "M0"})
	}
	return tests
}

func networkTests() []bad {
	id := strings.Repeat("a", 64)
	nets := make([]ContainerNetwork, 33)
	return []bad{
		{"host", "open", oneNet(ContainerNetwork{Mode: NetHost, Asked: "host"}), ruleNetworkHost, "N"},
		{"host, own", "open", oneNet(ContainerNetwork{Mode: NetHost, Asked: "host", Own: true, ID: id}), ruleNetworkHost, "N"},
		{"foreign container", "open", oneNet(ContainerNetwork{Mode: NetContainer, Asked: "container:x", ID: id}), ruleNetworkForeign, "N"},
		{"no such container", "open", oneNet(ContainerNetwork{Mode: NetContainer, Asked: "container:x", Own: true}), ruleNetworkForeign, "N"},
		{"foreign network", "open", oneNet(ContainerNetwork{Mode: NetNamed, Asked: "theirs", ID: id, Name: "theirs"}), ruleNetworkForeign, "N"},
		{"engine's bridge", "open", oneNet(ContainerNetwork{Mode: NetNamed, Asked: "bridge", ID: id, Name: "bridge"}), ruleNetworkForeign, "N"},
		{"no such network", "open", oneNet(ContainerNetwork{Mode: NetNamed, Asked: "gone"}), ruleNetworkForeign, "N"},
		{"policy's name for it", "open", oneNet(ContainerNetwork{Mode: NetNamed, Asked: "team", Name: "team"}), ruleNetworkForeign, "N"},
		{"asks by a good name for another", "open", oneNet(ContainerNetwork{Mode: NetNamed, Asked: "team-net", ID: id, Name: "theirs"}), ruleNetworkForeign, "N"},
		{"own without an ID", "open", oneNet(ContainerNetwork{Mode: NetNamed, Asked: "x", Own: true, Name: "x"}), ruleNetworkForeign, "N"},
		{"odd mode", "open", oneNet(ContainerNetwork{Mode: "ns:/proc/1/ns/net", Asked: "x"}), ruleNetworkForeign, "N"},
		{"no mode", "open", oneNet(ContainerNetwork{Asked: "x"}), ruleNetworkForeign, "N"},
		{"options", "open", oneNet(ContainerNetwork{Mode: NetDefault, Options: []string{"ipv4_address=10.0.0.1"}}), ruleNetworkOptions, "N"},
		{"own beside off", "tight", oneNet(ContainerNetwork{Mode: NetNamed, Own: true, ID: id, Internal: true}), ruleNetworkOwn, "N"},
		{"own with a way out", "", oneNet(ContainerNetwork{Mode: NetNamed, Own: true, ID: id}), ruleInternal, "N"},
		{"own with a way out of a locked profile", "fixed", oneNet(ContainerNetwork{Mode: NetNamed, Own: true, ID: id}), ruleInternal, "N"},
		{"none and one", "open", ContainerRequest{Networks: []ContainerNetwork{{Field: "N", Mode: NetNone}, {Mode: NetNamed, Name: "team-net"}}}, ruleNetworkMixed, "N"},
		{"container and one", "open", ContainerRequest{Networks: []ContainerNetwork{{Field: "N", Mode: NetContainer, Own: true, ID: id}, {Mode: NetNone}}}, ruleNetworkMixed, "N"},
		{"container and a network", "open", ContainerRequest{Networks: []ContainerNetwork{{Field: "N", Mode: NetContainer, Own: true, ID: id}, {Mode: NetNamed, Name: "team-net"}}}, ruleNetworkMixed, "N"},
		{"a network and a container", "open", ContainerRequest{Networks: []ContainerNetwork{{Mode: NetDefault}, {Field: "N", Mode: NetContainer, Own: true, ID: id}}}, ruleNetworkMixed, "N"},
		{"too many", "open", ContainerRequest{Networks: nets}, ruleNetworkTooMany, "NetworkingConfig.EndpointsConfig"},
	}
}

func hostTests() []bad {
	tests := []bad{
		{"ports off", "", onePort("127.0.0.1", 8080, 80, "tcp"), rulePorts, "P"},
		{"port range", "open", onePort("", 80, 80, "tcp"), rulePortRange, "P"},
		{"port range above", "open", onePort("", 9001, 80, "tcp"), rulePortRange, "P"},
		{"ports from below", "open", portRange(7999, 8001), rulePortRange, "P"},
		{"ports to above", "open", portRange(8999, 9001), rulePortRange, "P"},
		{"too many ports", "open", ContainerRequest{Ports: make([]ContainerPort, 129)}, rulePortSyntax, "HostConfig.PortBindings"},
		{"log driver", "", logs("syslog"), ruleLogDriver, "HostConfig.LogConfig.Type"},
		{"log driver of the profile", "tight", logs("json-file"), ruleLogDriver, "HostConfig.LogConfig.Type"},
		{"log option", "", logs("", "syslog-address", "tcp://x"), ruleLogOptions, "HostConfig.LogConfig.Config.syslog-address"},
		{"option of none", "", logs("none", "max-size", "1m"), ruleLogOptions, "HostConfig.LogConfig.Config.max-size"},
		{"log too large", "", logs("", "max-size", "31m", "max-file", "1"), ruleOverMax, "HostConfig.LogConfig.Config"},
		{"log too large in all", "", logs("local", "max-size", "11m", "max-file", "3"), ruleOverMax, "HostConfig.LogConfig.Config"},
		{"dns off", "", ContainerRequest{DNS: []string{"1.1.1.1"}}, ruleDNS, "HostConfig.Dns"},
		{"dns options off", "", ContainerRequest{DNSOptions: []string{"ndots:1"}}, ruleDNS, "HostConfig.DnsOptions"},
		{"domains off", "", ContainerRequest{DNSSearch: []string{"x"}}, ruleDNS, "HostConfig.DnsSearch"},
		{"hosts off", "", ContainerRequest{ExtraHosts: []string{"a:1.1.1.1"}}, ruleDNS, "HostConfig.ExtraHosts"},
		{"too many servers", "open", ContainerRequest{DNS: make([]string, 33)}, ruleDNSSyntax, "HostConfig.Dns"},
		{"dns option", "open", ContainerRequest{DNSOptions: []string{"a\nnameserver 1.1.1.1"}}, ruleDNSSyntax, "HostConfig.DnsOptions"},
		{"domain", "open", ContainerRequest{DNSSearch: []string{"a b"}}, ruleDNSSyntax, "HostConfig.DnsSearch"},
	}
	for _, p := range []bad{
		{req: onePort("0.0.0.0", 8080, 80, "tcp")}, {req: onePort("::", 8080, 80, "tcp")}, {req: onePort("10.0.0.1", 8080, 80, "tcp")}, {req: onePort("::ffff:127.0.0.1", 8080, 80, "tcp")},
		{req: onePort("localhost", 8080, 80, "tcp")}, {req: onePort("127.1", 8080, 80, "tcp")}, {req: onePort("::1%lo", 8080, 80, "tcp")}, {req: onePort(" 127.0.0.1", 8080, 80, "tcp")},
	} {
		tests = append(tests, bad{"address " + p.req.Ports[0].HostIP, "tight", p.req, rulePortAddress, "P"})
	}
	for i, r := range []ContainerRequest{
		onePort("", -1, 80, "tcp"), onePort("", 65536, 80, "tcp"), onePort("", 8000, 0, "tcp"), onePort("", 8000, 65536, "tcp"), onePort("", 8000, 80, "icmp"), onePort("", 8000, 80, ""), onePort("", 8000, 80, "TCP"),
		portRange(0, 8000), portRange(8001, 8000), portRange(8000, -1), portRange(8000, 65536),
	} {
		tests = append(tests, bad{fmt.Sprint("port ", i), "open", r, rulePortSyntax, "P"})
	}
	for _, o := range [][2]string{
		{"max-size", "-1"}, {"max-size", "0"}, {"max-size", "1"}, {"max-size", "x"}, {"max-size", ""}, {"max-size", "1.5m"}, {"max-size", "10 m"}, {"max-size", "1t"}, {"max-size", "9999999999999m"}, {"max-size", "1mib"}, {"max-size", "17179869185g"}, {"max-size", "1048577g"},
		{"max-file", "0"}, {"max-file", "-1"}, {"max-file", "101"}, {"max-file", "1e3"}, {"max-file", "99999999999999999999"}, {"compress", "yes"}, {"mode", "x"}, {"max-buffer-size", "5m"}, {"max-buffer-size", "-1"}, {"labels", "a b"}, {"labels", "{{.x}}"}, {"env", "A"}, {"env-regex", "A"}, {"labels-regex", "A"},
	} {
		tests = append(tests, bad{"log " + o[0] + " " + o[1], "", logs("", o[0], o[1]), ruleLogOptions, "HostConfig.LogConfig.Config." + o[0]})
	}
	for _, s := range []string{"127.0.0.1", "127.0.0.53", "::1", "0.0.0.0", "::", "::ffff:127.0.0.1", "::ffff:0.0.0.0", "224.0.0.1", "host-gateway", "", "fe80::1%eth0"} {
		tests = append(tests, bad{"server " + s, "open", ContainerRequest{DNS: []string{s}}, ruleDNSSyntax, "HostConfig.Dns"})
	}
	for _, s := range []string{"a", "", ":", "a:host-gateway", "a=host-gateway", "a:", ":1.1.1.1", "a b:1.1.1.1", "a:1.1.1.1\nb:2.2.2.2", "a\n:1.1.1.1"} {
		tests = append(tests, bad{"host " + s, "open", ContainerRequest{ExtraHosts: []string{s}}, ruleDNSSyntax, "HostConfig.ExtraHosts"})
	}
	return tests
}

func resourceTests() []bad {
	const cpus, memory, pids, oom = "HostConfig.NanoCpus", "HostConfig.Memory", "HostConfig.PidsLimit", "HostConfig.OomScoreAdj"
	return []bad{
		{"profile", "gone", ContainerRequest{}, ruleProfileUnknown, "profile"},
		{"image", "", ContainerRequest{Image: "debian"}, ruleImageAllow, "Image"},
		{"no image", "", ContainerRequest{Image: "-"}, ruleImageSyntax, "Image"},
		{"image ID", "", ContainerRequest{Image: sum}, ruleImageID, "Image"},
		{"own image's syntax", "", ContainerRequest{Image: "sha256:abc", Trusted: true}, ruleImageID, "Image"},
		{"env denied", "", ContainerRequest{Env: map[string]string{"ADMIN": "1"}}, ruleEnvDeny, "Env.ADMIN"},
		{"env not allowed", "", ContainerRequest{Env: map[string]string{"LD_PRELOAD": "x"}}, ruleEnvAllow, "Env.LD_PRELOAD"},
		{"env name", "", ContainerRequest{Env: map[string]string{"A=B": "x"}}, ruleEnvSyntax, "Env.A=B"},
		{"ttl", "", ContainerRequest{TTL: ptr(time.Duration(0))}, ruleTTLRange, "ttl"},
		{"cpus", "", ContainerRequest{CPUs: 2.5}, ruleOverMax, cpus},
		{"cpus negative", "", ContainerRequest{CPUs: -1}, ruleRange, cpus},
		{"cpus nan", "", ContainerRequest{CPUs: math.NaN()}, ruleRange, cpus},
		{"cpus inf", "", ContainerRequest{CPUs: math.Inf(1)}, ruleRange, cpus},
		{"cpus tiny", "", ContainerRequest{CPUs: 1e-9}, ruleRange, cpus},
		{"memory", "open", ContainerRequest{MemoryBytes: 1<<30 + 1}, ruleOverMax, memory},
		{"memory low", "", ContainerRequest{MemoryBytes: 6 << 20}, ruleRange, memory},
		{"memory negative", "", ContainerRequest{MemoryBytes: -1}, ruleRange, memory},
		{"pids", "", ContainerRequest{PidsLimit: ptr(int64(513))}, ruleOverMax, pids},
		{"pids unlimited", "", ContainerRequest{PidsLimit: ptr(int64(-1))}, ruleOverMax, pids},
		{"pids below", "", ContainerRequest{PidsLimit: ptr(int64(math.MinInt64))}, ruleOverMax, pids},
		{"shm", "", ContainerRequest{ShmBytes: 65 << 20}, ruleOverMax, "HostConfig.ShmSize"},
		{"shm negative", "", ContainerRequest{ShmBytes: -1}, ruleRange, "HostConfig.ShmSize"},
		{"oom score", "", ContainerRequest{OOMScoreAdj: -1}, ruleOOM, oom},
		{"oom score above", "", ContainerRequest{OOMScoreAdj: 1001}, ruleOOM, oom},
		{"oom kill", "", ContainerRequest{OOMKillDisable: true}, ruleOOM, "HostConfig.OomKillDisable"},
		{"sysctl", "", ContainerRequest{Sysctls: map[string]string{"kernel.core_pattern": "|x"}}, ruleSysctl, "HostConfig.Sysctls.kernel.core_pattern"},
		{"sysctl not listed", "", ContainerRequest{Sysctls: map[string]string{"net.core.somaxconn": "1"}}, ruleSysctl, "HostConfig.Sysctls.net.core.somaxconn"},
		{"sysctl by another name", "open", ContainerRequest{Sysctls: map[string]string{"net/core/somaxconn": "1"}}, ruleSysctl, "HostConfig.Sysctls.net/core/somaxconn"},
		{"sysctl's value", "open", ContainerRequest{Sysctls: map[string]string{"net.core.somaxconn": "1\n2"}}, ruleSysctl, "HostConfig.Sysctls.net.core.somaxconn"},
		{"ulimit", "", ulimit("memlock", 1, 1), ruleUlimit, "HostConfig.Ulimits.memlock"},
		{"own ulimit's soft over hard", "", ulimit("stack", 6, 5), ruleUlimit, "HostConfig.Ulimits.stack"},
		{"own ulimit below", "", ulimit("stack", -2, -1), ruleUlimit, "HostConfig.Ulimits.stack"},
		{"ulimit of others", "", ulimit("rtprio", 1, 1), ruleUlimit, "HostConfig.Ulimits.rtprio"},
		{"ulimit's case", "", ulimit("NOFILE", 1, 1), ruleUlimit, "HostConfig.Ulimits.NOFILE"},
		{"core", "", ulimit("core", 0, 1), ruleOverMax, "HostConfig.Ulimits.core"},
		{"files", "tight", ulimit("nofile", 10, 101), ruleOverMax, "HostConfig.Ulimits.nofile"},
		{"files unlimited", "", ulimit("nofile", 1, -1), ruleOverMax, "HostConfig.Ulimits.nofile"},
		{"soft unlimited", "", ulimit("nproc", -1, 5), ruleUlimit, "HostConfig.Ulimits.nproc"},
		{"soft over hard", "", ulimit("nproc", 6, 5), ruleUlimit, "HostConfig.Ulimits.nproc"},
		{"ulimit twice", "", ContainerRequest{Ulimits: []ContainerUlimit{{"nproc", 1, 1}, {"nproc", 2, 2}}}, ruleUlimit, "HostConfig.Ulimits.nproc"},
	}
}

func TestContainerDenials(t *testing.T) {
	p := containerPolicies(t)
	seen := map[string]bool{}
	for _, tests := range [][]bad{privilegeTests(), mountTests(), networkTests(), hostTests(), resourceTests()} {
		for _, tt := range tests {
			t.Run(tt.name, func(t *testing.T) {
				tt.req.Profile = tt.profile
				if tt.req.Image == "" && tt.name != "no image" {
					tt.req.Image = "busybox"
				}
				v := p.Container(tt.req)
				if v.Allowed() || v.Err() == nil {
					t.Fatalf("allowed: %+v", v.Spec)
				}
				for _, r := range v.Denials {
					if r.Rule != tt.rule || r.Field != tt.field {
						t.Errorf("%+v", r)
					}
					if r.Message == "" || r.Allowed == "" || strings.ContainsAny(r.Message, "\n\x00") || strings.Contains(r.Message, "hunter2") {
						t.Errorf("%+v", r)
					}
					seen[r.Rule] = true
				}
			})
		}
	}
	for _, rule := range []string{
		ruleField, rulePrivileged, ruleCapability, ruleSecurityOpt, ruleNamespace, ruleDevice, ruleUser, ruleSysctl, ruleUlimit, ruleRuntime, ruleRestart, ruleOOM, ruleMountType,
		ruleMountOptions, ruleVolumes, ruleVolumeName, ruleVolumeForeign, ruleNetworkHost, ruleNetworkForeign, ruleNetworkMixed, ruleNetworkTooMany, ruleNetworkOptions, ruleNetworkOwn,
		ruleInternal, rulePorts, rulePortAddress, rulePortRange, rulePortSyntax, ruleLogDriver, ruleLogOptions, ruleDNS, ruleDNSSyntax,
	} {
		if !seen[rule] {
			t.Errorf("nothing was refused by %s", rule)
		}
	}
}

// A network that is somebody else's is refused in the same words as one that isn't there.
func TestForeignNetworksAreNotConfirmed(t *testing.T) {
	p := containerPolicies(t)
	judge := func(n ContainerNetwork) []Reason {
		r := oneNet(n)
		r.Image = "busybox"
		return p.Container(r).Denials
	}
	there := judge(ContainerNetwork{Mode: NetNamed, Asked: "x", ID: "abc", Name: "theirs", Internal: true})
	gone := judge(ContainerNetwork{Mode: NetNamed, Asked: "x"})
	if d := cmp.Diff(there, gone); d != "" || len(gone) != 1 {
		t.Error(d)
	}
}

// What is collected isn't just the first.
func TestContainerCollectsDenials(t *testing.T) {
	v := containerPolicies(t).Container(ContainerRequest{
		Image: "debian", Env: map[string]string{"X": ""}, Privileged: true, Devices: []string{"/dev/kvm", "/dev/fuse"}, CapAdd: []string{"SYS_PTRACE", "ALL"}, CPUs: 99, MemoryBytes: 1,
		Mounts: []ContainerMount{{Type: "bind", Source: "/etc", Target: "/"}}, Ports: []ContainerPort{{Port: 1, Protocol: "udp"}},
	})
	var rules []string
	for _, r := range v.Denials {
		rules = append(rules, r.Rule)
	}
	want := []string{ruleImageAllow, ruleEnvAllow, ruleTarget, ruleAlwaysRefused, rulePorts, ruleCapability, ruleCapability, rulePrivileged, ruleDevice, ruleDevice, ruleOverMax, ruleRange}
	same(t, want, rules)
	if v := containerPolicies(t).Container(ContainerRequest{Image: "busybox", CapAdd: make([]string, 1<<16)}); len(v.Denials) != maxReasons {
		t.Errorf("%d reasons", len(v.Denials))
	}
}

// hostile gives each field of a request a value that the policy must not let pass as if
// it weren't there.
var hostile = map[string]any{
	"Profile": "gone", "Image": "debian", "Trusted": true, "Env": map[string]string{"ADMIN": "1"}, "User": "0", "Groups": make([]string, 65), "TTL": ptr(time.Duration(-1)),
	"Mounts": []ContainerMount{{Type: "bind", Source: "/", Target: "/x"}}, "Networks": []ContainerNetwork{{Mode: NetHost}}, "Ports": []ContainerPort{{Port: 1, Protocol: "tcp"}},
	"CapAdd": []string{"ALL"}, "CapDrop": []string{"ALL"}, "SecurityOpt": []string{"seccomp=unconfined"}, "Privileged": true, "Namespaces": []ContainerNamespace{{Kind: "pid", Mode: "host"}}, "PidOf": &ContainerPeer{Asked: "x"},
	"Devices": []string{"/dev/sda"}, "Sysctls": map[string]string{"kernel.x": "1"}, "Ulimits": []ContainerUlimit{{"core", -1, -1}}, "Runtime": "x", "LogDriver": "fluentd",
	"LogOptions": map[string]string{"x": "y"}, "Restart": "sometimes", "DNS": []string{"1.1.1.1"}, "DNSOptions": []string{"x"}, "DNSSearch": []string{"x"}, "ExtraHosts": []string{"x:1.1.1.1"},
	"CPUs": 1e9, "MemoryBytes": int64(1 << 60), "SwapBytes": int64(-1), "PidsLimit": ptr(int64(-1)), "ShmBytes": int64(1 << 60), "OOMScoreAdj": -1000, "OOMKillDisable": true, "ReadOnlyRootfs": true,
	"Other": []OtherField{{"x", "y"}},
}

func TestEveryFieldIsLookedAt(t *testing.T) {
	p := containerPolicies(t)
	rt := reflect.TypeFor[ContainerRequest]()
	base := ContainerRequest{Image: "busybox"}
	for i := range rt.NumField() {
		name := rt.Field(i).Name
		value, ok := hostile[name]
		if !ok {
			t.Errorf("field %s has no hostile value", name)
			continue
		}
		req := base
		if name == "Trusted" {
			req.Image = "debian"
		}
		before := p.Container(req)
		reflect.ValueOf(&req).Elem().Field(i).Set(reflect.ValueOf(value))
		if cmp.Equal(before, p.Container(req)) {
			t.Errorf("%s: %v changes nothing", name, value)
		}
	}
}
