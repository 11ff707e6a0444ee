package policy

import (
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// What is allowed, as far as it is in the spec.
func TestContainerAllows(t *testing.T) {
	p, id := containerPolicies(t), strings.Repeat("a", 64)
	own := ContainerNetwork{Field: "N", Asked: "mine", Mode: NetNamed, ID: id, Name: "mine", Own: true}
	internal := own
	internal.Internal = true
	team := ContainerNetwork{Field: "N", Asked: "team-net", Mode: NetNamed, ID: "b", Name: "team-net"}
	on := ContainerNetwork{Field: "HostConfig.NetworkMode", Mode: NetNamed, Name: "berm-sandbox"}
	nets := func(n ...ContainerNetwork) ContainerRequest { return ContainerRequest{Networks: n} }
	tests := []struct {
		name, profile string
		req           ContainerRequest
		got           func(ContainerSpec) any
		want          any
	}{
		{"image of a profile", "", ContainerRequest{Image: "docker.io/library/python:3.11-slim"}, func(s ContainerSpec) any { return s.Image }, "python:3.11-slim"},
		{"own image", "", ContainerRequest{Image: "mine:1", Trusted: true}, func(s ContainerSpec) any { return s.Image }, "mine:1"},
		{"own image by ID", "", ContainerRequest{Image: sum, Trusted: true}, func(s ContainerSpec) any { return s.Image }, sum},
		{"env", "", ContainerRequest{Env: map[string]string{"A": "1"}}, func(s ContainerSpec) any { return s.Env }, map[string]string{"A": "1", "TZ": "UTC"}},
		{"user by name", "", ContainerRequest{User: "root", Groups: []string{"docker"}}, func(s ContainerSpec) any { return []any{s.User, s.Groups} }, []any{"root", []string{"docker"}}},
		{"user by number", "numbers", ContainerRequest{User: "1:2147483647", Groups: []string{"7"}}, func(s ContainerSpec) any { return []any{s.User, s.Groups} }, []any{"1:2147483647", []string{"7"}}},
		{"the profile's user", "tight", ContainerRequest{User: "1000:1000"}, func(s ContainerSpec) any { return s.User }, "1000:1000"},
		{"ttl", "", ContainerRequest{TTL: ptr(time.Minute)}, func(s ContainerSpec) any { return s.TTL }, time.Minute},
		{"bind", "", oneMount(ContainerMount{Type: "bind", Source: "/srv/link/", Target: "/x/./y"}), func(s ContainerSpec) any { return s.Binds }, []Mount{{HostPath: "/srv/link", Source: "/srv/a", Local: "/srv/a", MountPath: "/x/y", Mode: "rw"}}},
		{"read-only bind", "", oneMount(ContainerMount{Type: "bind", Source: "/srv/a", Target: "/x", ReadOnly: true}), func(s ContainerSpec) any { return s.Binds[0].Mode }, "ro"},
		{"bind at the agent's place", "", oneMount(ContainerMount{Type: "bind", Source: "/srv/a", Target: "/run"}), func(s ContainerSpec) any { return s.Binds[0].MountPath }, "/run"},
		{"volume in an anonymous one", "", oneMount(ContainerMount{Type: "volume", Target: "/x"}, ContainerMount{Type: "volume", Source: "v", Own: true, Target: "/x/y", ReadOnly: true}),
			func(s ContainerSpec) any { return s.Volumes },
			[]ContainerMount{{Field: "M0", Type: "volume", Target: "/x"}, {Field: "M1", Type: "volume", Source: "v", Own: true, Target: "/x/y", ReadOnly: true}}},
		{"bind in a volume", "", oneMount(ContainerMount{Type: "volume", Target: "/x"}, ContainerMount{Type: "bind", Source: "/srv/a", Target: "/x/y"}), func(s ContainerSpec) any { return len(s.Binds) }, 1},
		{"tmpfs", "", oneMount(ContainerMount{Type: "tmpfs", Target: "/tmp"}, ContainerMount{Type: "tmpfs", Target: "/tmp/x", SizeBytes: 5}), func(s ContainerSpec) any { return []int64{s.Tmpfs[0].SizeBytes, s.Tmpfs[1].SizeBytes} }, []int64{64 << 20, 5}},

		{"default network", "open", ContainerRequest{}, func(s ContainerSpec) any { return s.Networks }, []ContainerNetwork{on}},
		{"none", "open", nets(ContainerNetwork{Mode: NetNone}), func(s ContainerSpec) any { return s.Network }, "none"},
		{"none, of a profile without", "", nets(ContainerNetwork{Mode: NetNone}, ContainerNetwork{Mode: NetDefault}), func(s ContainerSpec) any { return s.Network }, "none"},
		{"own network", "open", nets(own), func(s ContainerSpec) any { return s.Networks }, []ContainerNetwork{own}},
		{"own internal network", "", nets(internal), func(s ContainerSpec) any { return s.Networks }, []ContainerNetwork{internal}},
		{"own beside the default of a profile without", "", nets(ContainerNetwork{Mode: NetDefault}, internal), func(s ContainerSpec) any { return s.Networks }, []ContainerNetwork{internal}},
		{"the policy's network", "", nets(team), func(s ContainerSpec) any { return s.Networks }, []ContainerNetwork{team}},
		{"the same twice", "", nets(team, team), func(s ContainerSpec) any { return s.Networks }, []ContainerNetwork{team}},
		{"default and its name", "open", nets(ContainerNetwork{Mode: NetDefault}, ContainerNetwork{Mode: NetNamed, Name: "berm-sandbox", ID: "c"}), func(s ContainerSpec) any { return s.Networks },
			[]ContainerNetwork{{Mode: NetNamed, Name: "berm-sandbox", ID: "c"}}},
		{"own container's", "tight", nets(ContainerNetwork{Mode: NetContainer, ID: id, Own: true}), func(s ContainerSpec) any { return []any{s.Network, s.Networks} },
			[]any{"container", []ContainerNetwork{{Mode: NetContainer, ID: id, Own: true}}}},

		{"port", "open", onePort("", 8080, 80, "tcp"), func(s ContainerSpec) any { return s.Ports }, []ContainerPort{{Field: "P", HostPort: 8080, Port: 80, Protocol: "tcp"}}},
		{"any port", "open", onePort("10.0.0.1", 0, 65535, "sctp"), func(s ContainerSpec) any { return s.Ports }, []ContainerPort{{Field: "P", HostIP: "10.0.0.1", Port: 65535, Protocol: "sctp"}}},
		{"ports", "open", portRange(8000, 9000), func(s ContainerSpec) any { return s.Ports }, []ContainerPort{{Field: "P", HostPort: 8000, HostEnd: 9000, Port: 80, Protocol: "tcp"}}},
		{"loopback port", "tight", onePort("::1", 1024, 80, "udp"), func(s ContainerSpec) any { return s.Ports[0].HostIP }, "::1"},

		{"added", "", capAdd("cap_kill"), func(s ContainerSpec) any { return len(s.Capabilities) }, 12},
		{"added beyond the default", "open", capAdd("sys_admin"), func(s ContainerSpec) any { return s.Capabilities }, []string{"CAP_CHOWN", "CAP_KILL", "CAP_NET_RAW", "CAP_SYS_ADMIN"}},
		{"all dropped", "", ContainerRequest{CapDrop: []string{"all"}}, func(s ContainerSpec) any { return s.Capabilities }, []string{}},
		{"all dropped but one", "", ContainerRequest{CapDrop: []string{"CAP_ALL"}, CapAdd: []string{"chown"}}, func(s ContainerSpec) any { return s.Capabilities }, []string{"CAP_CHOWN"}},
		{"dropped and added", "open", ContainerRequest{CapDrop: []string{"chown", "kill"}, CapAdd: []string{"CHOWN"}}, func(s ContainerSpec) any { return s.Capabilities }, []string{"CAP_NET_RAW"}},
		{"security options", "", security("no-new-privileges", "no-new-privileges:true", "no-new-privileges=true", "seccomp=builtin", "seccomp:builtin", "apparmor=docker-default"), func(s ContainerSpec) any { return s.Profile }, "default"},
		{"namespaces", "", ContainerRequest{Namespaces: []ContainerNamespace{{"a", "pid", ""}, {"b", "ipc", "private"}, {"c", "cgroup", "private"}, {"d", "userns", ""}}}, func(s ContainerSpec) any { return s.Profile }, "default"},
		{"runtime class", "tight", ContainerRequest{Runtime: "runsc"}, func(s ContainerSpec) any { return s.Runtime }, "runsc"},
		{"runtime", "open", ContainerRequest{Runtime: "kata"}, func(s ContainerSpec) any { return s.Runtime }, "kata"},
		{"sysctl", "open", ContainerRequest{Sysctls: map[string]string{"net.core.somaxconn": "1024"}}, func(s ContainerSpec) any { return s.Sysctls }, map[string]string{"net.core.somaxconn": "1024"}},
		{"ulimits of its own", "", ContainerRequest{Ulimits: []ContainerUlimit{{"stack", 1 << 40, -1}, {"cpu", 0, 5}, {"fsize", -1, -1}}}, func(s ContainerSpec) any { return s.Ulimits },
			[]ContainerUlimit{{"stack", 1 << 40, -1}, {"cpu", 0, 5}, {"fsize", -1, -1}}},
		{"ulimits", "", ContainerRequest{Ulimits: []ContainerUlimit{{"nofile", 0, 1 << 20}, {"core", 0, 0}}}, func(s ContainerSpec) any { return s.Ulimits }, []ContainerUlimit{{"nofile", 0, 1 << 20}, {"core", 0, 0}}},
		{"restart", "open", ContainerRequest{Restart: "on-failure"}, func(s ContainerSpec) any { return s.Restart }, "on-failure"},
		{"no restart", "tight", ContainerRequest{Restart: "no"}, func(s ContainerSpec) any { return s.Restart }, "no"},
		{"dns", "open", ContainerRequest{DNS: []string{"1.1.1.1", "fd00::1"}, DNSOptions: []string{"ndots:1"}, DNSSearch: []string{".", "a.b"}, ExtraHosts: []string{"db:10.0.0.2", "d=::1", "e:[::1]"}},
			func(s ContainerSpec) any {
				return len(s.DNS) + len(s.DNSOptions) + len(s.DNSSearch) + len(s.ExtraHosts)
			}, 8},

		{"no shared memory", "", ContainerRequest{Namespaces: []ContainerNamespace{{"HostConfig.IpcMode", "ipc", "none"}}}, func(s ContainerSpec) any { return s.IpcNone }, true},
		{"no log", "", logs("none"), func(s ContainerSpec) any { return []any{s.LogDriver, len(s.LogOptions)} }, []any{"none", 0}},
		{"log size", "", logs("local", "max-size", "10M", "compress", "false", "mode", "non-blocking", "max-buffer-size", "4m"), func(s ContainerSpec) any { return s.LogOptions },
			map[string]string{"max-size": "10M", "max-file": "3", "compress": "false", "mode": "non-blocking", "max-buffer-size": "4m"}},
		{"large log file", "", logs("", "max-size", "20m"), func(s ContainerSpec) any { return s.LogOptions }, map[string]string{"max-size": "20m", "max-file": "1"}},
		{"log labels", "", logs("", "labels", "com.example/a,b_c-d"), func(s ContainerSpec) any { return s.LogOptions["labels"] }, "com.example/a,b_c-d"},
		{"log files", "", logs("", "max-file", "10"), func(s ContainerSpec) any { return s.LogOptions }, map[string]string{"max-size": "3145728", "max-file": "10"}},

		{"limits", "open", ContainerRequest{CPUs: 1.5, MemoryBytes: 1 << 30, SwapBytes: 1 << 30, PidsLimit: ptr(int64(512)), ShmBytes: 1 << 20, OOMScoreAdj: 500, ReadOnlyRootfs: true},
			func(s ContainerSpec) any {
				return []any{s.CPUs, s.MemoryBytes, s.SwapBytes, s.PidsLimit, s.ShmBytes, s.OOMScoreAdj, s.ReadOnlyRootfs}
			}, []any{1.5, int64(1 << 30), int64(1 << 30), int64(512), int64(1 << 20), 500, true}},
		{"what Docker's client sends for nothing", "", ContainerRequest{PidsLimit: ptr(int64(0))}, func(s ContainerSpec) any { return s.PidsLimit }, int64(128)},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if tt.req.Profile = tt.profile; tt.req.Image == "" {
				tt.req.Image = "busybox"
			}
			v := p.Container(tt.req)
			if d := cmp.Diff(tt.want, tt.got(v.Spec)); d != "" || !v.Allowed() || len(v.Overridden) > 0 {
				t.Errorf("%v %v %s", v.Err(), v.Overridden, d)
			}
		})
	}
}

func TestContainerOverrides(t *testing.T) {
	p := containerPolicies(t)
	clamp := mustParse(t, "resources: {over_max: clamp}\nprofiles: {p: {engine_api: {max_ulimit: 100}}}", Options{})
	roots := mustParse(t, "profiles: {p: {read_only_rootfs: true, engine_api: {read_only_rootfs: true}}, q: {read_only_rootfs: false, engine_api: {read_only_rootfs: true}}, r: {read_only_rootfs: true}}", Options{})
	const locked = "profiles.fixed.locked"
	tests := []struct {
		name   string
		policy *Policy
		req    ContainerRequest
		want   []Override
	}{
		{"pin", p, ContainerRequest{Image: "alpine", Env: map[string]string{"TZ": "x", "KEY": "y"}}, []Override{
			{"Image", "alpine", "alpine@" + sum, ruleImagePins}, {"Env.KEY", hidden, setByUs, ruleEnvInject}, {"Env.TZ", hidden, setByUs, ruleEnvPin}}},
		{"locked", p, ContainerRequest{Profile: "fixed", Image: "busybox", CPUs: 2, MemoryBytes: 1, PidsLimit: ptr(int64(-1)), ReadOnlyRootfs: false, TTL: ptr(time.Minute),
			Networks: []ContainerNetwork{{Field: "N", Asked: "team", Mode: NetNamed, Name: "team-net"}}}, []Override{
			{"Image", "busybox", "python:3.11-slim", locked}, {"ttl", "1m0s", "1h0m0s", locked}, {"N", "team", "berm-sandbox", locked}, {"HostConfig.NanoCpus", 2.0, 1.0, locked},
			{"HostConfig.Memory", int64(1), int64(512 << 20), locked}, {"HostConfig.PidsLimit", int64(-1), int64(128), locked}, {"HostConfig.ReadonlyRootfs", false, true, locked}}},
		{"locked image, own or not", p, ContainerRequest{Profile: "fixed", Image: sum, Trusted: true, ReadOnlyRootfs: true}, []Override{{"Image", sum, "python:3.11-slim", locked}}},
		{"read-only binds", p, ContainerRequest{Profile: "readonly", Image: "busybox", Mounts: []ContainerMount{{Field: "M", Type: "bind", Source: "/srv/a", Target: "/x"}}}, []Override{
			{"M", "rw", "ro", "profiles.readonly.locked"}}},
		{"swap", p, ContainerRequest{Image: "busybox", SwapBytes: -1}, []Override{{"HostConfig.MemorySwap", int64(-1), int64(512 << 20), ruleSwap}}},
		{"every address", p, ContainerRequest{Profile: "tight", Image: "busybox", Ports: []ContainerPort{{Field: "P", HostPort: 8080, Port: 1, Protocol: "tcp"}}}, []Override{{"P", "", "127.0.0.1", rulePortAddress}}},
		{"read-only root", roots, ContainerRequest{Profile: "p", Image: "python:3.11-slim"}, []Override{{"HostConfig.ReadonlyRootfs", false, true, ruleReadOnlyRootfs}}},
		{"read-only root, asked for", roots, ContainerRequest{Profile: "p", Image: "python:3.11-slim", ReadOnlyRootfs: true}, nil},
		{"read-only root, not the profile's", roots, ContainerRequest{Profile: "q", Image: "python:3.11-slim"}, nil},
		{"read-only root, without the key", roots, ContainerRequest{Profile: "r", Image: "python:3.11-slim"}, nil},
		{"lifetime", p, ContainerRequest{Image: "busybox", TTL: ptr(48 * time.Hour)}, []Override{{"ttl", "48h0m0s", "24h0m0s", ruleMaxLifetime}}},
		{"clamped", clamp, ContainerRequest{
			Profile: "p", Image: "python:3.11-slim", CPUs: 9, MemoryBytes: math.MaxInt64, PidsLimit: ptr(int64(-1)), ShmBytes: math.MaxInt64, LogOptions: map[string]string{"max-size": "1g"},
			Ulimits: []ContainerUlimit{{"nofile", 101, -1}}, Mounts: []ContainerMount{{Field: "M", Type: "tmpfs", Target: "/x", SizeBytes: math.MaxInt64}}}, []Override{
			{"M", int64(math.MaxInt64), int64(64 << 20), ruleOverMax}, {"HostConfig.Ulimits.nofile", int64(101), int64(100), ruleOverMax}, {"HostConfig.Ulimits.nofile", int64(-1), int64(100), ruleOverMax},
			{"HostConfig.LogConfig.Config", int64(1 << 30), int64(30 << 20), ruleOverMax}, {"HostConfig.NanoCpus", 9.0, 2.0, ruleOverMax}, {"HostConfig.Memory", int64(math.MaxInt64), int64(2 << 30), ruleOverMax},
			{"HostConfig.PidsLimit", int64(-1), int64(512), ruleOverMax}, {"HostConfig.ShmSize", int64(math.MaxInt64), int64(64 << 20), ruleOverMax}}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			v := tt.policy.Container(tt.req)
			if d := cmp.Diff(tt.want, v.Overridden); d != "" || !v.Allowed() {
				t.Errorf("%v %s", v.Err(), d)
			}
			checkSpec(t, tt.policy, tt.req.Profile, v.Spec)
		})
	}
}

func TestContainerUpdate(t *testing.T) {
	p := containerPolicies(t)
	clamp := mustParse(t, "resources: {over_max: clamp}", Options{})
	tests := []struct {
		name    string
		policy  *Policy
		profile string
		req     ContainerRequest
		want    ContainerSpec
		rules   []string // of the denials
	}{
		{"nothing", p, "", ContainerRequest{}, ContainerSpec{Profile: "default"}, nil},
		{"all", p, "", ContainerRequest{CPUs: 2, MemoryBytes: 64 << 20, PidsLimit: ptr(int64(7)), Restart: "always"},
			ContainerSpec{Profile: "default", CPUs: 2, MemoryBytes: 64 << 20, SwapBytes: 64 << 20, PidsLimit: 7, Restart: "always"}, nil},
		{"no swap", p, "", ContainerRequest{MemoryBytes: 64 << 20, SwapBytes: -1}, ContainerSpec{Profile: "default", MemoryBytes: 64 << 20, SwapBytes: 64 << 20}, nil},
		{"swap alone", p, "", ContainerRequest{SwapBytes: -1}, ContainerSpec{Profile: "default"}, nil},
		{"unlimited pids", clamp, "", ContainerRequest{PidsLimit: ptr(int64(0))}, ContainerSpec{Profile: "default", PidsLimit: 512}, nil},
		{"unlimited pids refused", p, "", ContainerRequest{PidsLimit: ptr(int64(0))}, ContainerSpec{}, []string{ruleOverMax}},
		{"over", p, "", ContainerRequest{CPUs: 3, MemoryBytes: 1 << 40, PidsLimit: ptr(int64(-1))}, ContainerSpec{}, []string{ruleOverMax, ruleOverMax, ruleOverMax}},
		{"below", p, "", ContainerRequest{CPUs: math.NaN(), MemoryBytes: -1}, ContainerSpec{}, []string{ruleRange, ruleRange}},
		{"restart", p, "tight", ContainerRequest{Restart: "always"}, ContainerSpec{}, []string{ruleRestart}},
		{"other", p, "", ContainerRequest{Devices: []string{"x"}, OOMKillDisable: true, Privileged: true, Other: []OtherField{{"BlkioWeight", "1"}}}, ContainerSpec{},
			[]string{rulePrivileged, ruleDevice, ruleField, ruleOOM}},
		{"locked", p, "fixed", ContainerRequest{CPUs: 2, PidsLimit: ptr(int64(-1))}, ContainerSpec{Profile: "fixed", CPUs: 1, PidsLimit: 128}, nil},
		{"profile", p, "gone", ContainerRequest{}, ContainerSpec{}, []string{ruleProfileUnknown}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			v := tt.policy.ContainerUpdate(tt.profile, tt.req)
			var rules []string
			for _, r := range v.Denials {
				rules = append(rules, r.Rule)
			}
			same(t, tt.rules, rules)
			if d := cmp.Diff(tt.want, v.Spec); d != "" && v.Allowed() {
				t.Error(d)
			}
		})
	}
}

// checkSpec holds an allowed spec against its profile, whatever was asked for.
func checkSpec(t testing.TB, p *Policy, profile string, s ContainerSpec) {
	t.Helper()
	pr, _ := p.Profile(profile)
	api := pr.EngineAPI
	check := func(ok bool, what string) {
		t.Helper()
		if !ok {
			t.Errorf("%s: %+v", what, s)
		}
	}
	check(s.CPUs >= minCPUs && s.CPUs <= pr.MaxCPUs, "cpus")
	check(s.MemoryBytes >= minMemoryMB<<20 && s.MemoryBytes <= pr.MaxMemoryMB<<20 && s.SwapBytes == s.MemoryBytes, "memory")
	check(s.PidsLimit >= 1 && s.PidsLimit <= pr.MaxPidsLimit, "pids")
	check(s.ShmBytes >= 1 && s.ShmBytes <= api.TmpfsMB<<20, "shm")
	check(s.OOMScoreAdj >= 0, "oom")
	check(s.TTL > 0 && s.TTL <= s.MaxLifetime, "ttl")
	for _, c := range s.Capabilities {
		check(slices.Contains(api.Capabilities, c) && c != capabilityAll, "capabilities")
	}
	check(slices.IsSorted(s.Capabilities), "capabilities' order")
	for _, b := range s.Binds {
		check(pr.HostPathMode != modeNone && (under(b.Source, "/srv") && !under(b.MountPath, "/proc")) && (b.Mode == "ro" || b.Mode == "rw"), "binds")
	}
	for _, m := range s.Tmpfs {
		check(m.SizeBytes >= 1 && m.SizeBytes <= api.TmpfsMB<<20 && m.Source == "" && m.Target != "", "tmpfs")
	}
	for _, m := range s.Volumes {
		check(api.Volumes == "own" && (m.Own || m.Source == "") && len(m.Options) == 0, "volumes")
	}
	checkNetworks(p, pr, s, check)
	for _, port := range s.Ports {
		low, high, _ := parsePortRange(api.PortRange)
		check(api.Ports != "off" && (port.HostPort == 0 && port.HostEnd == 0 || port.HostPort >= low && max(port.HostPort, port.HostEnd) <= high), "ports")
		check(api.Ports != "loopback" || port.HostIP == loopback || port.HostIP == "::1" || strings.HasPrefix(port.HostIP, "127."), "port's address")
	}
	check(slices.Contains(api.LogDrivers, s.LogDriver), "log driver")
	if s.LogDriver != logNone {
		files, _ := wholeNumber(s.LogOptions["max-file"])
		check(files >= 1 && parseBytes(s.LogOptions["max-size"]) > 0 && files*parseBytes(s.LogOptions["max-size"]) <= api.LogMaxMB<<20, "log size")
	}
	check(s.Restart == "no" || slices.Contains(api.Restart, s.Restart), "restart")
	check(s.Runtime == pr.RuntimeClass || slices.Contains(api.Runtimes, s.Runtime), "runtime")
	check(api.Users != "non_root" || isNonRoot(s.User), "user")
	check(pr.User == "" || s.User == pr.User, "user of the profile")
	for _, u := range s.Ulimits {
		check(slices.Contains(ownUlimits, u.Name) || u.Soft >= 0 && u.Hard >= u.Soft && u.Hard <= api.MaxUlimit, "ulimits")
	}
	for name := range s.Sysctls {
		check(slices.Contains(api.Sysctls, name), "sysctls")
	}
	check(api.DNS == "on" || len(s.DNS)+len(s.DNSOptions)+len(s.DNSSearch)+len(s.ExtraHosts) == 0, "dns")
	check(!pr.locked("read_only_rootfs") || s.ReadOnlyRootfs == pr.ReadOnlyRootfs, "root")
}

func checkNetworks(p *Policy, pr Profile, s ContainerSpec, check func(bool, string)) {
	switch s.Network {
	case SpecNetworkNone:
		check(len(s.Networks) == 0, "networks beside none")
	case SpecNetworkContainer:
		check(len(s.Networks) == 1 && s.Networks[0].Own && s.Networks[0].ID != "", "container's network")
		return
	default:
		check(s.Network == SpecNetworkNetworks && len(s.Networks) > 0, "networks")
	}
	for _, n := range s.Networks {
		ofPolicy := slices.ContainsFunc(p.Networks(), func(r NetworkRule) bool {
			return r.EngineNetwork == n.Name && (!pr.locked("network") || r.Name == pr.Network)
		})
		check(n.Mode == NetNamed && (ofPolicy || n.Own && n.ID != "" && pr.EngineAPI.Networks != "off" && (n.Internal || pr.EngineAPI.Networks == "own" && !pr.locked("network"))), "network")
	}
}
