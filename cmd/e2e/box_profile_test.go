package e2e

import (
	"slices"
	"strings"
	"time"

	"github.com/bermhq/berm/proxy/apitype"
)

// What the profiles give, and take.
var boxProfiles = []boxCase{
	{"default", profileRow("default", "off", "rw", 120, limits{1, 512, 128}, true)},
	{"offline_readonly", profileRow("offline_readonly", "off", "ro", 60, limits{0.5, 256, 64}, true)},
	{"network_basic", profileRow("network_basic", "on", "rw", 120, limits{1, 512, 128}, true)},
	{"network_extended", profileRow("network_extended", "on", "rw", 300, limits{2, 1024, 256}, false)},
	{"locked fields", profileLocked},
	{"policy file", profileFile},
}

func profileRow(name, network, mode string, maxTimeout int64, want limits, readOnly bool) func(r *boxRow) {
	return func(r *boxRow) {
		dir := r.makeDir(r, "roots", "root", r.key)
		sb := r.create(apitype.SandboxRequest{Profile: &name, HostPath: &dir})
		s := sb.Spec
		if s.Profile != name || s.Network != network || s.HostPathMode != mode || s.ReadOnlyRootfs != readOnly || s.WorkspaceQuotaMB != 0 ||
			(limits{s.CPUs, s.MemoryMB, s.PidsLimit}) != want || len(sb.Overridden) != 0 {
			r.Errorf("%+v", sb)
		}
		if got := r.limits(); got != want {
			r.Errorf("the kernel holds it to %+v, want %+v", got, want)
		}
		if got := slices.Contains(r.interfaces(), "eth0"); got != (network == "on") {
			r.Errorf("interfaces: %v", r.interfaces())
		}
		if res := r.exec(apitype.ExecRequest{Command: shell("touch /workspace/file")}); res.OK != (mode == "rw") || exists(dir+"/file") != (mode == "rw") {
			r.Errorf("writing below the mount: %+v", res)
		}
		if res := r.exec(apitype.ExecRequest{Command: shell("touch /file")}); res.OK == readOnly {
			r.Errorf("writing to the root: %+v", res)
		}
		if got := strings.Contains(r.mountOptions("/tmp"), "size=65536k"); got != readOnly {
			r.Errorf("/tmp is %q", r.mountOptions("/tmp"))
		}
		res := r.exec(apitype.ExecRequest{Command: apitype.Command{"true"}})
		if time.Duration(res.Timeout) != 30*time.Second || len(res.Overridden) != 0 {
			r.Errorf("a timeout left out: %+v", res)
		}
		most := time.Duration(maxTimeout) * time.Second
		if res := r.exec(apitype.ExecRequest{Command: apitype.Command{"true"}, Timeout: apitype.SecondsOf(maxTimeout)}); time.Duration(res.Timeout) != most || len(res.Overridden) != 0 {
			r.Errorf("the longest timeout: %+v", res)
		}
		res = r.exec(apitype.ExecRequest{Command: apitype.Command{"true"}, Timeout: apitype.SecondsOf(maxTimeout + 1)})
		if time.Duration(res.Timeout) != most || len(res.Overridden) != 1 || res.Overridden[0].Field != "timeout" {
			r.Errorf("one over the longest timeout: %+v", res)
		}
	}
}

func profileLocked(r *boxRow) {
	dir := r.makeDir(r, "roots", "root", r.key)
	sb := r.create(apitype.SandboxRequest{
		Profile: new("offline_readonly"), HostPath: &dir, Network: new("on"), HostPathMode: new("rw"), ReadOnlyRootfs: new(false),
		ExtraMounts: []apitype.MountRequest{{HostPath: r.makeDir(r, "roots", "root", r.key+"-extra"), MountPath: "/extra", Mode: "rw"}},
	})
	var fields []string
	for _, o := range sb.Overridden {
		fields = append(fields, o.Field)
		if o.Rule != "profiles.offline_readonly.locked" || o.Requested == o.Effective {
			r.Errorf("overridden: %+v", o)
		}
	}
	slices.Sort(fields)
	if want := []string{"extra_mounts[0].mode", "host_path_mode", "network", "read_only_rootfs"}; !slices.Equal(fields, want) {
		r.Errorf("overridden: %v, want %v", fields, want)
	}
	if sb.Spec.Network != "off" || sb.Spec.HostPathMode != "ro" || !sb.Spec.ReadOnlyRootfs || slices.Contains(r.interfaces(), "eth0") {
		r.Errorf("%+v", sb.Spec)
	}
	for _, dir := range []string{"/", "/workspace/", "/extra/"} {
		r.fails("touch " + dir + "file")
	}
	once := apitype.SandboxRequest{Profile: new("offline_readonly"), HostPath: &dir, Network: new("lab"), ExtraMounts: []apitype.MountRequest{
		{HostPath: r.makeDir(r, "roots", "root", r.key+"-extra"), MountPath: "/extra"},
	}}
	if again := r.create(once); again.Result != "reused" || len(again.Overridden) != 1 || again.Overridden[0].Requested != "lab" {
		r.Errorf("once more, otherwise: %+v", again) // it is what this request asked for that counts
	}
	res := r.exec(apitype.ExecRequest{Command: apitype.Command{"true"}, Sandbox: &once, Timeout: apitype.SecondsOf(61)})
	if len(res.Overridden) != 2 || res.Overridden[0].Requested != "lab" || res.Overridden[1].Field != "timeout" {
		r.Errorf("with a command: %+v", res)
	}
	if again := r.create(apitype.SandboxRequest{Profile: new("offline_readonly"), HostPath: &dir, Network: new("off"), ExtraMounts: []apitype.MountRequest{
		{HostPath: r.makeDir(r, "roots", "root", r.key+"-extra"), MountPath: "/extra"},
	}}); again.Result != "reused" || len(again.Overridden) != 0 {
		r.Errorf("asked for as it is: %+v", again)
	}
}

// A policy file adds profiles, and overrides built-in ones.
func profileFile(r *boxRow) {
	x := r.on(r.shared, "basic")
	sb := x.create(apitype.SandboxRequest{Profile: new("network_basic")})
	if want := (limits{0.25, 96, 33}); x.limits() != want || sb.Spec.Network != "off" || !sb.Spec.ReadOnlyRootfs {
		r.Errorf("%+v, %+v", sb, x.limits())
	}
	for seconds, want := range map[int64]time.Duration{0: 7 * time.Second, 12: 11 * time.Second} {
		req := apitype.ExecRequest{Command: apitype.Command{"true"}}
		if seconds > 0 {
			req.Timeout = apitype.SecondsOf(seconds)
		}
		if res := x.exec(req); time.Duration(res.Timeout) != want {
			r.Errorf("timeout %d: %+v", seconds, res)
		}
	}
	x = r.on(r.shared, "tiny")
	sb = x.create(apitype.SandboxRequest{Profile: new("tiny"), MemoryMB: new(int64(128)), Network: new("on")})
	if want := (limits{0.5, 64, 64}); x.limits() != want || len(sb.Overridden) != 1 || sb.Overridden[0].Field != "memory_mb" || sb.Overridden[0].Rule != "profiles.tiny.locked" {
		r.Errorf("%+v, %+v", sb, x.limits())
	}
}
