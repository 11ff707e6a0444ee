package policy

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// rulesOf gives the rules of a *DeniedError, and of nil none.
func rulesOf(t *testing.T, err error) []string {
	t.Helper()
	if err == nil {
		return nil
	}
	var denied *DeniedError
	if !errors.As(err, &denied) {
		t.Fatalf("%v is no refusal", err)
	}
	var rules []string
	for _, r := range denied.Reasons {
		if r.Field == "" || r.Message == "" || r.Allowed == "" {
			t.Errorf("%+v", r)
		}
		rules = append(rules, r.Rule)
	}
	return rules
}

func TestContainerExec(t *testing.T) {
	p := containerPolicies(t)
	tests := []struct {
		name, profile string
		privileged    bool
		user          string
		env           map[string]string
		want          []string
	}{
		{"plain", "", false, "", nil, nil},
		{"as root", "", false, "0", nil, nil},
		{"env", "", false, "", map[string]string{"A": "1"}, nil},
		{"privileged", "", true, "", nil, []string{rulePrivileged}},
		{"the container's user", "numbers", false, "", nil, nil},
		{"another", "numbers", false, "7", nil, nil},
		{"root", "numbers", false, "0", nil, []string{ruleUser}},
		{"root by name", "numbers", false, "root", nil, []string{ruleUser}},
		{"root by group", "numbers", false, "1:0", nil, []string{ruleUser}},
		{"loader", "", false, "", map[string]string{"LD_PRELOAD": "x"}, []string{ruleEnvAllow}},
		{"all", "tight", true, "0", map[string]string{"ADMIN": ""}, []string{ruleOperation, rulePrivileged, ruleUser, ruleUser, ruleEnvDeny}},
		{"profile", "gone", false, "", nil, []string{ruleProfileUnknown}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			env, _, err := p.ContainerExec(tt.profile, tt.privileged, tt.user, tt.env)
			same(t, tt.want, rulesOf(t, err))
			if err == nil && env["TZ"] != "UTC" {
				t.Errorf("%v", env)
			}
		})
	}
	env, over, err := p.ContainerExec("", false, "", map[string]string{"KEY": "x", "TZ": "y", "A": "1"})
	if d := cmp.Diff(map[string]string{"TZ": "UTC", "A": "1"}, env); d != "" || err != nil || len(over) != 2 {
		t.Errorf("%v %v %s", over, err, d)
	}
}

func TestOperation(t *testing.T) {
	p := containerPolicies(t)
	tests := []struct {
		profile, op string
		ok          bool
	}{
		{"", OpPull, true}, {"", OpBuild, false}, {"", OpCommit, false}, {"", OpArchive, true}, {"", OpExec, true}, {"", "swarm", false}, {"", "", false},
		{"tight", OpPull, false}, {"tight", OpExec, false}, {"open", OpBuild, true}, {"gone", OpPull, false},
	}
	for _, tt := range tests {
		if rules := rulesOf(t, p.Operation(tt.profile, tt.op)); (len(rules) == 0) != tt.ok {
			t.Errorf("%s of %q: %v", tt.op, tt.profile, rules)
		}
	}
}

func TestImageRef(t *testing.T) {
	p := containerPolicies(t)
	tests := []struct {
		profile, ref, want string
		rules              []string
	}{
		{"", "busybox", "busybox:latest", nil},
		{"", "ghcr.io/a/b@" + sum2, "ghcr.io/a/b@" + sum2, nil},
		{"", "alpine", "alpine@" + sum, nil},
		{"fixed", "busybox", "python:3.11-slim", nil},
		{"", "debian", "", []string{ruleImageAllow}},
		{"", sum, "", []string{ruleImageID}},
		{"", "", "", []string{ruleImageSyntax}},
		{"gone", "busybox", "", []string{ruleProfileUnknown}},
	}
	for _, tt := range tests {
		got, _, err := p.ImageRef(tt.profile, tt.ref)
		if d := cmp.Diff(tt.rules, rulesOf(t, err)); d != "" || err == nil && got != tt.want {
			t.Errorf("%q: %q %v", tt.ref, got, err)
		}
	}
}

func TestTagRef(t *testing.T) {
	p := containerPolicies(t)
	tests := []struct {
		profile, ref string
		ok           bool
	}{
		{"open", "acme/mine:1", true},
		{"open", "acme/tool:1", true}, // on the allow-list, and named
		{"open", "mine", true},        // by "*"
		{"open", "busybox", false},    // on the allow-list, and named by "*" alone
		{"open", "docker.io/library/busybox:1", false},
		{"open", "ghcr.io/x/y", false},
		{"open", "python:3.11-slim", false}, // a profile's
		{"open", "alpine", false},           // a pin's
		{"open", "alpine:3", true},
		{"open", "acme/mine@" + sum, false},
		{"open", "mine:1@" + sum, false},
		{"open", sum, false},
		{"open", someSum, false},
		{"open", "UPPER", false},
		{"open", "", false},
		{"", "acme/mine:1", false},
		{"gone", "acme/mine:1", false},
	}
	for _, tt := range tests {
		got, err := p.TagRef(tt.profile, tt.ref)
		if rules := rulesOf(t, err); (err == nil) != tt.ok || tt.ok && got == "" {
			t.Errorf("%q of %q: %q %v", tt.ref, tt.profile, got, rules)
		}
	}
}

// TestTagsOfLocalhost is of the names that Testcontainers makes up for what it builds.
func TestTagsOfLocalhost(t *testing.T) {
	for tags, want := range map[string]bool{"localhost/*": true, "localhost:5000/*": false, "*": false} {
		p := mustParse(t, "images: {allow: ['*']}\nprofiles: {default: {engine_api: {tags: ['"+tags+"']}}}", Options{})
		for _, ref := range []string{"localhost/0123456789ab:ba9876543210", "localhost:5000/x:1"} {
			if _, err := p.TagRef("", ref); (err == nil) != (want && ref != "localhost:5000/x:1") {
				t.Errorf("%s by %s: %v", ref, tags, err)
			}
		}
	}
}

func TestListsImage(t *testing.T) {
	p := containerPolicies(t)
	digest := mustParse(t, "images: {require_digest: true, allow: [busybox]}\nprofiles: {default: {image: 'busybox@"+sum+"'}}", Options{})
	tests := []struct {
		name    string
		policy  *Policy
		profile string
		refs    []string
		want    bool
	}{
		{"allowed", p, "", []string{"secret/x:1", "busybox:1"}, true},
		{"by digest", p, "", []string{"busybox@" + sum2}, true},
		{"a profile's", p, "", []string{"python:3.11-slim"}, true},
		{"none of them", p, "", []string{"secret/x:1", "<none>:<none>", sum}, false},
		{"without a name", p, "", nil, false},
		{"what a pin doesn't lead to", p, "", []string{"alpine:latest"}, false},
		{"what a pin leads to", p, "", []string{"alpine:latest", "alpine@" + sum}, true},
		{"no digest", digest, "", []string{"busybox:1"}, false},
		{"with digest", digest, "", []string{"busybox:1", "busybox@" + sum2}, true},
		{"locked", p, "fixed", []string{"busybox:1"}, false},
		{"the locked one", p, "fixed", []string{"python:3.11-slim"}, true},
		{"profile", p, "gone", []string{"busybox:1"}, false},
	}
	for _, tt := range tests {
		if got := tt.policy.ListsImage(tt.profile, tt.refs); got != tt.want {
			t.Errorf("%s: %v", tt.name, got)
		}
	}
}

func TestRedacted(t *testing.T) {
	p := mustParse(t, "profiles: {p: {engine_api: {redact_env: ['*KEY*']}}}\nenv: {inject: {TOKEN: {env: X}}}", Options{Secret: func(SecretSource) (string, error) { return "x", nil }})
	for _, tt := range []struct {
		profile, name string
		want          bool
	}{{"", "TOKEN", true}, {"", "API_KEY", false}, {"p", "API_KEY", true}, {"p", "TOKEN", true}, {"p", "PATH", false}, {"gone", "PATH", true}} {
		if got := p.Redacted(tt.profile, tt.name); got != tt.want {
			t.Errorf("%+v: %v", tt, got)
		}
	}
}

func TestNetworkCreate(t *testing.T) {
	p := containerPolicies(t)
	option := func(name, value string) NetworkCreateRequest {
		return NetworkCreateRequest{Name: "n", Options: map[string]string{name: value}}
	}
	tests := []struct {
		name, profile string
		req           NetworkCreateRequest
		want          []string
	}{
		{"plain", "open", NetworkCreateRequest{Name: "proj_default"}, nil},
		{"bridge", "open", NetworkCreateRequest{Name: "n", Driver: "bridge"}, nil},
		{"icc", "open", option("com.docker.network.bridge.enable_icc", "false"), nil},
		{"mtu", "open", option("com.docker.network.driver.mtu", "1400"), nil},
		{"off", "tight", NetworkCreateRequest{Name: "n", Internal: true}, []string{ruleNetworkOwn}},
		{"hex digits", "open", NetworkCreateRequest{Name: "0123456789ab"}, nil},
		{"macvlan", "open", NetworkCreateRequest{Name: "n", Driver: "macvlan"}, []string{ruleNetworkOptions}},
		{"host", "open", NetworkCreateRequest{Name: "n", Driver: "host"}, []string{ruleNetworkOptions}},
		{"driver's case", "open", NetworkCreateRequest{Name: "n", Driver: "Bridge"}, []string{ruleNetworkOptions}},
		{"parent", "open", option("parent", "eth0"), []string{ruleNetworkOptions}},
		{"bridge's name", "open", option("com.docker.network.bridge.name", "docker0"), []string{ruleNetworkOptions}},
		{"host binding", "open", option("com.docker.network.bridge.host_binding_ipv4", "0.0.0.0"), []string{ruleNetworkOptions}},
		{"icc's value", "open", option("com.docker.network.bridge.enable_icc", "maybe"), []string{ruleNetworkOptions}},
		{"small mtu", "open", option("com.docker.network.driver.mtu", "100"), []string{ruleNetworkOptions}},
		{"large mtu", "open", option("com.docker.network.driver.mtu", "65535"), []string{ruleNetworkOptions}},
		{"mtu's value", "open", option("com.docker.network.driver.mtu", "1400\n"), []string{ruleNetworkOptions}},
		{"other", "open", NetworkCreateRequest{Name: "n", Other: []OtherField{{"IPAM.Config", "10.0.0.0/8"}, {"ConfigFrom", "x"}}}, []string{ruleField, ruleField}},
		{"profile", "gone", NetworkCreateRequest{Name: "n"}, []string{ruleProfileUnknown}},
	}
	for _, name := range []string{"", "host", "none", "bridge", "default", "ingress", "docker_gwbridge", "berm-sandbox", "team-net", "a/b", "container:x", strings.Repeat("a", 64), strings.Repeat("n", 129), "n\n", "-n"} {
		tests = append(tests, struct {
			name, profile string
			req           NetworkCreateRequest
			want          []string
		}{"name " + name, "open", NetworkCreateRequest{Name: name}, []string{ruleNetworkName}})
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			spec, over, err := p.NetworkCreate(tt.profile, tt.req)
			if d := cmp.Diff(tt.want, rulesOf(t, err)); d != "" || len(over) > 0 {
				t.Errorf("%v %s", over, d)
			}
			want := NetworkSpec{Name: tt.req.Name, Options: tt.req.Options}
			if d := cmp.Diff(want, spec); err == nil && d != "" {
				t.Error(d)
			}
		})
	}
	for _, profile := range []string{"", "fixed"} {
		spec, over, err := p.NetworkCreate(profile, NetworkCreateRequest{Name: "n"})
		if d := cmp.Diff([]Override{{"Internal", false, true, ruleInternal}}, over); d != "" || err != nil || !spec.Internal {
			t.Errorf("%v %v %s", spec, err, d)
		}
		if spec, over, err := p.NetworkCreate(profile, NetworkCreateRequest{Name: "n", Internal: true}); err != nil || !spec.Internal || len(over) > 0 {
			t.Errorf("%v %v %v", spec, over, err)
		}
	}
}

func TestVolumeCreate(t *testing.T) {
	p := containerPolicies(t)
	tests := []struct {
		name, profile string
		req           VolumeCreateRequest
		want          []string
	}{
		{"anonymous", "", VolumeCreateRequest{}, nil},
		{"named", "", VolumeCreateRequest{Name: "v", Driver: "local", Options: map[string]string{}}, nil},
		{"off", "tight", VolumeCreateRequest{Name: "v"}, []string{ruleVolumes}},
		{"name", "", VolumeCreateRequest{Name: "/etc"}, []string{ruleVolumeName}},
		{"program's", "", VolumeCreateRequest{Name: "berm-program-0"}, []string{ruleVolumeName}},
		{"driver", "", VolumeCreateRequest{Driver: "nfs"}, []string{ruleVolumeOptions}},
		{"driver's case", "", VolumeCreateRequest{Driver: "Local"}, []string{ruleVolumeOptions}},
		{"bind", "", VolumeCreateRequest{Options: map[string]string{"type": "none", "o": "bind", "device": "/"}}, []string{ruleVolumeOptions, ruleVolumeOptions, ruleVolumeOptions}},
		{"size", "", VolumeCreateRequest{Options: map[string]string{"size": "1g"}}, []string{ruleVolumeOptions}},
		{"cluster", "", VolumeCreateRequest{Other: []OtherField{{"ClusterVolumeSpec", "{}"}}}, []string{ruleField}},
		{"profile", "gone", VolumeCreateRequest{}, []string{ruleProfileUnknown}},
	}
	for _, tt := range tests {
		if d := cmp.Diff(tt.want, rulesOf(t, p.VolumeCreate(tt.profile, tt.req))); d != "" {
			t.Errorf("%s: %s", tt.name, d)
		}
	}
}

func TestNetworkJoin(t *testing.T) {
	p := containerPolicies(t)
	own := ContainerNetwork{Field: "network", Asked: "x", Mode: NetNamed, ID: "a", Name: "x", Own: true}
	internal := own
	internal.Internal = true
	tests := []struct {
		name, profile string
		n             ContainerNetwork
		want          []string
	}{
		{"own", "open", own, nil},
		{"own, inside", "", internal, nil},
		{"own, with a way out", "", own, []string{ruleInternal}},
		{"the policy's", "", ContainerNetwork{Field: "network", Asked: "team-net", Mode: NetNamed, ID: "b", Name: "team-net"}, nil},
		{"the policy's, locked", "fixed", ContainerNetwork{Field: "network", Asked: "team-net", Mode: NetNamed, ID: "b", Name: "team-net"}, []string{"profiles.fixed.locked"}},
		{"theirs", "open", ContainerNetwork{Field: "network", Asked: "y", Mode: NetNamed, ID: "b", Name: "y"}, []string{ruleNetworkForeign}},
		{"host", "open", ContainerNetwork{Field: "network", Asked: "host", Mode: NetHost}, []string{ruleNetworkHost}},
		{"profile", "gone", own, []string{ruleProfileUnknown}},
	}
	for _, tt := range tests {
		if d := cmp.Diff(tt.want, rulesOf(t, p.NetworkJoin(tt.profile, tt.n))); d != "" {
			t.Errorf("%s: %s", tt.name, d)
		}
	}
}

func TestObjectTTL(t *testing.T) {
	p := containerPolicies(t)
	tests := []struct {
		profile string
		asked   *time.Duration
		ttl     time.Duration
		want    []string
	}{
		{"", nil, time.Hour, nil},
		{"", ptr(time.Minute), time.Minute, nil},
		{"", ptr(48 * time.Hour), 24 * time.Hour, nil},
		{"fixed", ptr(time.Minute), time.Hour, nil},
		{"", ptr(time.Duration(0)), 0, []string{ruleTTLRange}},
		{"gone", nil, 0, []string{ruleProfileUnknown}},
	}
	for _, tt := range tests {
		ttl, most, err := p.ObjectTTL(tt.profile, tt.asked)
		if d := cmp.Diff(tt.want, rulesOf(t, err)); d != "" || ttl != tt.ttl || most != 24*time.Hour {
			t.Errorf("%q %v: %v %v %s", tt.profile, tt.asked, ttl, most, d)
		}
	}
}

func TestLoadPushLogin(t *testing.T) {
	p := mustParse(t, `
images: {allow: ["acme/listed", "reg.local/*"]}
profiles: {default: {engine_api: {tags: ["acme/*"], load: ["acme/in/*", "acme/in"], push: ["reg.local:5000/ci/*"], login: ["reg.local:5000", docker.io]}}}
`, Options{})
	for _, op := range []string{OpLoad, OpPush, OpLogin} {
		if rules := rulesOf(t, p.Operation("", op)); len(rules) != 0 {
			t.Errorf("%s: %v", op, rules)
		}
		if rules := rulesOf(t, mustParse(t, "", Options{}).Operation("", op)); !slices.Equal(rules, []string{ruleOperation}) {
			t.Errorf("%s by default: %v", op, rules)
		}
	}
	load := func(s string) error { _, err := p.LoadRef("", s); return err }
	push := func(s string) error { _, err := p.PushRef("", s); return err }
	login := func(s string) error { return p.Login("", s) }
	for _, tt := range []struct {
		judge func(string) error
		value string
		rule  string // empty: allowed
	}{
		{load, "acme/in/a:1", ""},
		{load, "acme/in", ""},
		{load, "acme/other:1", ruleLoad},
		{load, "other/in:1", ruleTags},
		{load, "acme/in@" + sum, ruleImageSyntax},
		{load, "python:3.11-slim", ruleTags}, // a profile's
		{push, "reg.local:5000/ci/a:1", ""},
		{push, "reg.local:5000/ci/a", ""},
		{push, "reg.local/ci/a", rulePush},
		{push, "reg.local:5000/cia", rulePush},
		{push, "ci/a", rulePush},
		{push, "reg.local:5000/ci/a@" + sum, ruleImageSyntax},
		{push, sum, ruleImageSyntax},
		{login, "reg.local:5000", ""},
		{login, "docker.io", ""},
		{login, "reg.local", ruleLogin},
		{login, "", ruleLogin},
		{login, "reg.local:5000@evil.local", ruleLogin},
	} {
		rules := rulesOf(t, tt.judge(tt.value))
		if want := slices.DeleteFunc([]string{tt.rule}, func(s string) bool { return s == "" }); !slices.Equal(rules, want) {
			t.Errorf("%q: %v, want %v", tt.value, rules, want)
		}
	}
}
