package policy

import (
	"encoding/json"
	"errors"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestSandboxDefaults(t *testing.T) {
	want := Spec{
		Profile: "default", Image: "python:3.11-slim", Network: "off", HostPathMode: "rw", MountPath: "/workspace", CPUs: 1, MemoryMB: 512, PidsLimit: 128,
		ReadOnlyRootfs: true, Env: map[string]string{}, TTL: time.Hour, MaxLifetime: 24 * time.Hour, TmpfsMB: 64, CapAdd: []string{}, Agent: "on",
	}
	v := mustParse(t, "", Options{}).Sandbox(Request{Image: ptr(""), Network: ptr(""), HostPath: ptr(""), HostPathMode: ptr(""), MountPath: ptr("")})
	if d := cmp.Diff(Verdict{Spec: want}, v); d != "" || v.Err() != nil {
		t.Error(d)
	}
}

func TestSandboxTakesTheRequest(t *testing.T) {
	p := mustParse(t, "networks: {team: {engine_network: team-net}}\nprofiles: {p: {user: 1:1, runtime_class: runsc, cap_add: [chown], agent: off, userns: auto}, q: {extends: p, userns: off}}", Options{})
	v := p.Sandbox(Request{
		Profile: "p", Network: ptr("team"), HostPathMode: ptr("ro"), MountPath: ptr("/w"), CPUs: ptr(1.5), MemoryMB: ptr(int64(32)), PidsLimit: ptr(int64(1)),
		ReadOnlyRootfs: ptr(false), WorkspaceQuotaMB: ptr(int64(7)), TTL: ptr(time.Minute), IdleTTL: ptr(time.Second),
	})
	want := Spec{
		Profile: "p", Image: "python:3.11-slim", Network: "team", EngineNetwork: "team-net", HostPathMode: "ro", MountPath: "/w", CPUs: 1.5, MemoryMB: 32, PidsLimit: 1,
		WorkspaceQuotaMB: 7, Env: map[string]string{}, TTL: time.Minute, IdleTTL: time.Second, MaxLifetime: 24 * time.Hour,
		User: "1:1", RuntimeClass: "runsc", CapAdd: []string{"CAP_CHOWN"}, Agent: "off", Userns: "auto",
	}
	same(t, Verdict{Spec: want}, v)
	if s := p.Sandbox(Request{Profile: "q"}).Spec; s.Userns != "" || s.User != "1:1" {
		t.Errorf("userns: off is %+v", s)
	}
}

// The Docker Engine API doesn't leave out what it can't give.
func TestContainerUserns(t *testing.T) {
	p := mustParse(t, "profiles: {p: {userns: auto, engine_api: {build: on}}, q: {extends: p, userns: off}}", Options{})
	for profile, want := range map[string][]string{"p": {ruleNamespace}, "q": nil} {
		if got := rulesOf(t, p.Container(ContainerRequest{Profile: profile, Image: "python:3.11-slim"}).Err()); !slices.Equal(got, want) {
			t.Errorf("container of %s: %v", profile, got)
		}
		if got := rulesOf(t, p.Operation(profile, OpBuild)); !slices.Equal(got, want) {
			t.Errorf("build of %s: %v", profile, got)
		}
	}
}

func TestSandboxDenials(t *testing.T) {
	tests := []struct {
		name    string
		req     Request
		rule    string
		field   string
		message string
		invalid bool
	}{
		{"profile", Request{Profile: "gone\x1b"}, ruleProfileUnknown, "profile", `there is no profile "gone\\x1b"; the policy has default, network_basic, network_extended, offline_readonly`, true},
		{"network", Request{Network: ptr("host")}, ruleNetworkUnknown, "network", `network "host" is not one of the policy's; allowed is off or on`, false},
		{"network's engine name", Request{Network: ptr("berm-sandbox")}, ruleNetworkUnknown, "network", `network "berm-sandbox" is not one of the policy's; allowed is off or on`, false},
		{"cpus nan", Request{CPUs: ptr(math.NaN())}, ruleRange, "cpus", "cpus NaN is out of range, it must be a finite number, at least 0.01", true},
		{"cpus inf", Request{CPUs: ptr(math.Inf(1))}, ruleRange, "cpus", "cpus +Inf is out of range, it must be a finite number, at least 0.01", true},
		{"cpus -inf", Request{CPUs: ptr(math.Inf(-1))}, ruleRange, "cpus", "cpus -Inf is out of range, it must be a finite number, at least 0.01", true},
		{"cpus zero", Request{CPUs: ptr(0.0)}, ruleRange, "cpus", "cpus 0 is out of range, it must be a finite number, at least 0.01", true},
		{"cpus rounded to no limit", Request{CPUs: ptr(1e-10)}, ruleRange, "cpus", "cpus 1e-10 is out of range, it must be a finite number, at least 0.01", true},
		{"cpus over", Request{CPUs: ptr(2.01)}, ruleOverMax, "cpus", "cpus 2.01 is over the maximum of profile default, 2", false},
		{"cpus far over", Request{CPUs: ptr(math.MaxFloat64)}, ruleOverMax, "cpus", "cpus 1.7976931348623157e+308 is over the maximum of profile default, 2", false},
		{"memory low", Request{MemoryMB: ptr(int64(31))}, ruleRange, "memory_mb", "memory_mb 31 is out of range, it must be at least 32", true},
		{"memory negative", Request{MemoryMB: ptr(int64(math.MinInt64))}, ruleRange, "memory_mb", "memory_mb -9223372036854775808 is out of range, it must be at least 32", true},
		{"memory over", Request{MemoryMB: ptr(int64(math.MaxInt64))}, ruleOverMax, "memory_mb", "memory_mb 9223372036854775807 is over the maximum of profile default, 2048", false},
		{"pids zero", Request{PidsLimit: ptr(int64(0))}, ruleRange, "pids_limit", "pids_limit 0 is out of range, it must be at least 1", true},
		{"pids unlimited", Request{PidsLimit: ptr(int64(-1))}, ruleRange, "pids_limit", "pids_limit -1 is out of range, it must be at least 1", true},
		{"pids over", Request{PidsLimit: ptr(int64(513))}, ruleOverMax, "pids_limit", "pids_limit 513 is over the maximum of profile default, 512", false},
		{"quota negative", Request{WorkspaceQuotaMB: ptr(int64(-1))}, ruleRange, "workspace_quota_mb", "workspace_quota_mb -1 is out of range, it must be 0 (unlimited) to 1099511627776", true},
		{"quota overflows", Request{WorkspaceQuotaMB: ptr(int64(math.MaxInt64))}, ruleRange, "workspace_quota_mb", "workspace_quota_mb 9223372036854775807 is out of range, it must be 0 (unlimited) to 1099511627776", true},
		{"ttl zero", Request{TTL: ptr(time.Duration(0))}, ruleTTLRange, "ttl", "ttl 0s is too short, it must be at least 1s", true},
		{"ttl negative", Request{TTL: ptr(-time.Hour)}, ruleTTLRange, "ttl", "ttl -1h0m0s is too short, it must be at least 1s", true},
		{"idle ttl negative", Request{IdleTTL: ptr(-time.Hour)}, ruleTTLRange, "idle_ttl", "idle_ttl -1h0m0s is too short, it must be at least 1s", true},
	}
	p := mustParse(t, "", Options{})
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			v := p.Sandbox(tt.req)
			var denied *DeniedError
			if !errors.As(v.Err(), &denied) || len(v.Denials) != 1 || denied.Invalid() != tt.invalid {
				t.Fatalf("%+v", v.Denials)
			}
			r := v.Denials[0]
			if r.Rule != tt.rule || r.Field != tt.field || r.Message != tt.message || r.Value == "" || r.Allowed == "" {
				t.Errorf("%+v", r)
			}
		})
	}
}

func TestSandboxCollectsDenials(t *testing.T) {
	v := mustParse(t, "", Options{}).Sandbox(Request{
		Image: ptr("UPPER"), Network: ptr("x"), CPUs: ptr(-1.0), MemoryMB: ptr(int64(1 << 30)), PidsLimit: ptr(int64(0)), HostPath: ptr("/etc"),
		HostPathMode: ptr("x"), MountPath: ptr("x"), Env: map[string]string{"1": ""}, TTL: ptr(time.Duration(1)), IdleTTL: ptr(time.Duration(1)),
	})
	var fields []string
	for _, r := range v.Denials {
		fields = append(fields, r.Field)
	}
	want := []string{"image", "network", "cpus", "memory_mb", "pids_limit", "host_path_mode", "mount_path", "host_path", "env.1", "ttl", "idle_ttl"}
	same(t, want, fields)
	var denied *DeniedError
	if !errors.As(v.Err(), &denied) || denied.Invalid() || strings.Count(denied.Error(), "; ") < len(want)-1 {
		t.Errorf("%v", denied)
	}
}

func TestSandboxOverrides(t *testing.T) {
	const yaml = `
profiles:
  all: {locked: [image, network, host_path, host_path_mode, mount_path, extra_mounts, cpus, memory_mb, pids_limit, read_only_rootfs, workspace_quota_mb, ttl, idle_ttl, timeout]}
resources: {over_max: clamp}
`
	p := mustParse(t, yaml, Options{})
	const locked = "profiles.all.locked"
	tests := []struct {
		name string
		req  Request
		want []Override
	}{
		{"locked", Request{Profile: "all", Image: ptr("alpine"), Network: ptr("on"), HostPath: ptr("/etc"), HostPathMode: ptr("x"), MountPath: ptr("/"), CPUs: ptr(math.NaN()), MemoryMB: ptr(int64(1)), PidsLimit: ptr(int64(-1)),
			ReadOnlyRootfs: ptr(false), WorkspaceQuotaMB: ptr(int64(1)), TTL: ptr(time.Minute), IdleTTL: ptr(time.Minute), ExtraMounts: []MountRequest{{"/a", "/b", "ro"}}}, []Override{
			{"image", "alpine", "python:3.11-slim", locked}, {"network", "on", "off", locked}, {"cpus", "NaN", 1.0, locked}, {"memory_mb", int64(1), int64(512), locked},
			{"pids_limit", int64(-1), int64(128), locked}, {"workspace_quota_mb", int64(1), int64(0), locked}, {"read_only_rootfs", false, true, locked}, {"host_path_mode", "x", "rw", locked},
			{"mount_path", "/", "/workspace", locked}, {"host_path", "/etc", "", locked}, {"extra_mounts", []string{"/a:/b:ro"}, []string{}, locked}, {"ttl", "1m0s", "1h0m0s", locked}, {"idle_ttl", "1m0s", "0s", locked}}},
		{"locked but the same", Request{Profile: "all", Image: ptr("python:3.11-slim"), Network: ptr("off"), CPUs: ptr(1.0), TTL: ptr(time.Hour)}, nil},
		{"locked by a built-in", Request{Profile: "offline_readonly", Network: ptr("on"), ReadOnlyRootfs: ptr(false), HostPathMode: ptr("rw")}, []Override{
			{"network", "on", "off", "profiles.offline_readonly.locked"}, {"read_only_rootfs", false, true, "profiles.offline_readonly.locked"}, {"host_path_mode", "rw", "ro", "profiles.offline_readonly.locked"}}},
		{"clamped", Request{CPUs: ptr(3.0), MemoryMB: ptr(int64(4096)), PidsLimit: ptr(int64(math.MaxInt64))}, []Override{
			{"cpus", 3.0, 2.0, ruleOverMax}, {"memory_mb", int64(4096), int64(2048), ruleOverMax}, {"pids_limit", int64(math.MaxInt64), int64(512), ruleOverMax}}},
		{"lifetime", Request{TTL: ptr(25 * time.Hour), IdleTTL: ptr(time.Duration(math.MaxInt64))}, []Override{
			{"ttl", "25h0m0s", "24h0m0s", ruleMaxLifetime}, {"idle_ttl", "2562047h47m16.854775807s", "24h0m0s", ruleMaxLifetime}}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			v := p.Sandbox(tt.req)
			if d := cmp.Diff(tt.want, v.Overridden); d != "" || !v.Allowed() {
				t.Errorf("%v %s", v.Err(), d)
			}
			if _, err := json.Marshal(v); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestClampedValuesAreInForce(t *testing.T) {
	p := mustParse(t, "resources: {over_max: clamp}", Options{})
	s := p.Sandbox(Request{CPUs: ptr(3.0), MemoryMB: ptr(int64(4096)), PidsLimit: ptr(int64(1000)), TTL: ptr(25 * time.Hour)}).Spec
	if s.CPUs != 2 || s.MemoryMB != 2048 || s.PidsLimit != 512 || s.TTL != 24*time.Hour {
		t.Errorf("%+v", s)
	}
	if v := p.Sandbox(Request{CPUs: ptr(math.Inf(1))}); v.Allowed() {
		t.Error("infinity is clamped")
	}
}

func TestNoIdleTTL(t *testing.T) {
	p := mustParse(t, "ttl: {idle_default: 5m}", Options{})
	if s := p.Sandbox(Request{}).Spec; s.IdleTTL != 5*time.Minute {
		t.Errorf("%v", s.IdleTTL)
	}
	if v := p.Sandbox(Request{IdleTTL: ptr(time.Duration(0))}); !v.Allowed() || v.Spec.IdleTTL != 0 {
		t.Errorf("%+v", v)
	}
}

func TestShorten(t *testing.T) {
	for in, want := range map[string]string{
		"plain é": "plain é", "a\nb\x1b[0m": `a\nb\x1b[0m`, "\xff": `\xff`, strings.Repeat("x", 300): strings.Repeat("x", 256) + "…",
		"\u202egnp": `\u202egnp`,
	} {
		if got := shorten(in); got != want {
			t.Errorf("%q: %q", in, got)
		}
	}
}
