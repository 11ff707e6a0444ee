package policy

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

const relationPolicy = `
profiles:
  default: {network: "on", engine_api: {networks: own, dns: "off", host_gateway: "on", max_memlock_mb: 8, capabilities: [CHOWN], subnets: [10.80.0.0/16, "fd00:80::/48"]}}
  numbers: {engine_api: {users: non_root}}
  user: {user: "7:7"}
  plain: {engine_api: {subnets: [], host_gateway: "off"}}
images: {allow: [busybox]}
`

func relationPolicies(t *testing.T) *Policy { return mustParse(t, relationPolicy, Options{}) }

// TestPidOf joins the processes of containers of the caller's that have no more than it may.
func TestPidOf(t *testing.T) {
	p := relationPolicies(t)
	id := strings.Repeat("a", 64)
	peer := func(profile, user string, caps ...string) *ContainerPeer {
		return &ContainerPeer{Asked: "container:x", ID: id, Allowed: &ContainerSpec{Profile: profile, User: user, Capabilities: caps}}
	}
	for name, tt := range map[string]struct {
		profile string
		peer    *ContainerPeer
		ok      bool
	}{
		"own":                     {"", peer("default", "", "CAP_CHOWN"), true},
		"own, as root":            {"default", peer("default", "0"), true},
		"number":                  {"numbers", peer("numbers", "5:5"), true},
		"the profile's user":      {"user", peer("user", "7:7"), true},
		"another profile":         {"", peer("numbers", "5:5"), false},
		"more capabilities":       {"", peer("default", "", "CAP_CHOWN", "CAP_SYS_PTRACE"), false},
		"root, of a later policy": {"numbers", peer("numbers", "0"), false},
		"the image's user":        {"numbers", peer("numbers", ""), false},
		"a joined one":            {"", &ContainerPeer{Asked: "x", ID: id, Allowed: &ContainerSpec{Profile: "default", PidOf: "b"}}, false},
		"another user":            {"user", peer("user", "8:8"), false},
		"not the caller's":        {"", &ContainerPeer{Asked: "container:x", ID: id}, false},
		"one with a socket":       {"", &ContainerPeer{Asked: "container:x", ID: id, Allowed: &ContainerSpec{Profile: "default", Binds: []Mount{{Socket: true}}}}, false},
		"no ID":                   {"", &ContainerPeer{Asked: "container:x", Allowed: &ContainerSpec{Profile: "default"}}, false},
	} {
		v := p.Container(ContainerRequest{Profile: tt.profile, Image: "busybox", User: map[string]string{"numbers": "5"}[tt.profile], PidOf: tt.peer})
		if v.Allowed() != tt.ok || tt.ok && v.Spec.PidOf != id || !tt.ok && v.Denials[0].Rule != ruleNamespace {
			t.Errorf("%s: %q %v", name, v.Spec.PidOf, v.Err())
		}
	}
	if v := p.Container(ContainerRequest{Image: "busybox", Namespaces: []ContainerNamespace{{Field: "HostConfig.PidMode", Kind: "pid", Mode: "container:" + id}}}); v.Allowed() {
		t.Error("a container that nobody resolved")
	}
}

func TestNetworkSubnets(t *testing.T) {
	p := relationPolicies(t)
	ask := func(ipv6, internal bool, subnets ...NetworkSubnet) NetworkCreateRequest {
		return NetworkCreateRequest{Name: "n", IPv6: ipv6, Internal: internal, Subnets: subnets}
	}
	four := func(subnet, part, gateway string) NetworkCreateRequest {
		return ask(false, false, NetworkSubnet{Field: "S", Subnet: subnet, Range: part, Gateway: gateway})
	}
	const six = "fd00:80:0:1::/64"
	for name, tt := range map[string]struct {
		req NetworkCreateRequest
		ok  bool
	}{
		"subnet":                  {four("10.80.1.0/24", "", ""), true},
		"the whole pool":          {four("10.80.0.0/16", "", ""), true},
		"range and gateway":       {four("10.80.1.0/24", "10.80.1.128/25", "10.80.1.254"), true},
		"internal":                {ask(false, true, NetworkSubnet{Field: "S", Subnet: "10.80.1.0/24"}), true},
		"IPv6":                    {ask(true, false, NetworkSubnet{Field: "S", Subnet: six, Gateway: "fd00:80:0:1::1"}), true},
		"both":                    {ask(true, false, NetworkSubnet{Field: "S", Subnet: "10.80.1.0/24"}, NetworkSubnet{Field: "S", Subnet: six}), true},
		"more than the pool":      {four("10.80.0.0/15", "", ""), false},
		"above it":                {four("10.0.0.0/8", "", ""), false},
		"all":                     {four("0.0.0.0/0", "", ""), false},
		"beside it":               {four("10.81.0.0/24", "", ""), false},
		"not its own start":       {four("10.80.1.5/24", "", ""), false},
		"mapped":                  {four("::ffff:10.80.1.0/120", "", ""), false},
		"zone":                    {ask(true, false, NetworkSubnet{Field: "S", Subnet: "fd00:80::%eth0/64"}), false},
		"no subnet":               {four("", "", "10.80.1.1"), false},
		"range beside":            {four("10.80.1.0/24", "10.80.2.0/25", ""), false},
		"range above":             {four("10.80.1.0/24", "10.80.0.0/16", ""), false},
		"range not its own start": {four("10.80.1.0/24", "10.80.1.130/25", ""), false},
		"gateway before":          {four("10.80.1.0/24", "", "10.80.0.255"), false},
		"gateway beside":          {four("10.80.1.0/24", "", "10.80.2.1"), false},
		"gateway of the host":     {four("10.80.1.0/24", "", "192.0.2.1"), false},
		"gateway is the first":    {four("10.80.1.0/24", "", "10.80.1.0"), false},
		"gateway is the last":     {four("10.80.1.0/24", "", "10.80.1.255"), false},
		"gateway of IPv6":         {four("10.80.1.0/24", "", "fd00:80::1"), false},
		"gateway mapped":          {four("10.80.1.0/24", "", "::ffff:10.80.1.1"), false},
		"two":                     {ask(false, false, NetworkSubnet{Field: "S", Subnet: "10.80.1.0/24"}, NetworkSubnet{Field: "S", Subnet: "10.80.2.0/24"}), false},
		"two of IPv6":             {ask(true, false, NetworkSubnet{Field: "S", Subnet: six}, NetworkSubnet{Field: "S", Subnet: "fd00:80:0:2::/64"}), false},
		"IPv6 without a subnet":   {ask(true, false), false},
		"IPv6 with IPv4's":        {ask(true, false, NetworkSubnet{Field: "S", Subnet: "10.80.1.0/24"}), false},
		"IPv6 not enabled":        {ask(false, false, NetworkSubnet{Field: "S", Subnet: six}), false},
		"IPv6 of no pool":         {ask(true, false, NetworkSubnet{Field: "S", Subnet: "fd01::/64"}), false},
		"IPv6, internal":          {ask(true, true, NetworkSubnet{Field: "S", Subnet: six}), false},
	} {
		spec, _, err := p.NetworkCreate("", tt.req)
		if rules := rulesOf(t, err); (err == nil) != tt.ok || !tt.ok && rules[0] != ruleNetworkSubnet {
			t.Errorf("%s: %v", name, rules)
		}
		if d := cmp.Diff(tt.req.Subnets, spec.Subnets); tt.ok && d != "" {
			t.Errorf("%s: %s", name, d)
		}
	}
	if _, _, err := p.NetworkCreate("plain", four("10.80.1.0/24", "", "")); err == nil {
		t.Error("a profile without pools")
	}
	for _, pool := range []string{"10.80.0.1/16", "0.0.0.0/0", "127.0.0.0/16", "169.254.0.0/16", "240.0.0.0/8", "::/0", "fe80::/64", "ff02::/16", "::ffff:10.0.0.0/104", "x", "10.0.0.0"} {
		if _, err := Parse([]byte("version: 1\nprofiles: {default: {engine_api: {subnets: [\""+pool+"\"]}}}"), Options{}); err == nil {
			t.Errorf("pool %s is taken", pool)
		}
	}
}

// TestHostSettings has what the policy can switch on, and what it can't.
func TestHostSettings(t *testing.T) {
	p := relationPolicies(t)
	tag := func(s string) ContainerRequest { return logs("", "tag", s) }
	lock := func(soft, hard int64) ContainerRequest {
		return ContainerRequest{Ulimits: []ContainerUlimit{{"memlock", soft, hard}}}
	}
	hosts := func(s ...string) ContainerRequest { return ContainerRequest{ExtraHosts: s} }
	for name, tt := range map[string]struct {
		req  ContainerRequest
		rule string
	}{
		"gateway": {hosts("host.docker.internal:host-gateway", "x=host-gateway"), ""}, "gateway and another": {hosts("x:host-gateway", "y:1.1.1.1"), ruleDNS},
		"gateway of no name": {hosts(":host-gateway"), ruleDNS}, "gateway and more": {hosts("x:host-gateway\n1.1.1.1 y"), ruleDNS}, "gateways": {hosts(strings.Split(strings.Repeat("x:host-gateway ", 34), " ")[:34]...), ruleDNS},
		"memlock": {lock(8<<20, 8<<20), ""}, "memlock over": {lock(0, 8<<20+1), ruleOverMax}, "memlock unlimited": {lock(-1, -1), ruleOverMax},
		"tag": {tag("{{.Name}}/{{.ID}} x"), ruleLogOptions}, "tags": {tag("{{.ImageName}}/{{ .Name }}/{{.FullID}}:a-b_c@d.e"), ""}, "no tag": {tag(""), ""},
		"tag with a pipe": {tag(`{{.ID|printf "%999999999d"}}`), ruleLogOptions}, "tag with a loop": {tag("{{range .Config}}{{end}}"), ruleLogOptions}, "tag with variables": {tag("{{.ContainerEnv}}"), ruleLogOptions},
		"tag with a method": {tag("{{.Command}}"), ruleLogOptions}, "long tag": {tag(strings.Repeat("a", 65)), ruleLogOptions}, "tag of two lines": {tag("a\n"), ruleLogOptions}, "tag that trims": {tag("{{- .ID -}}"), ruleLogOptions},
		"kilobytes": {logs("", "max-size", "512kb", "max-file", "2"), ""},
	} {
		tt.req.Image = "busybox"
		v := p.Container(tt.req)
		if tt.rule == "" != v.Allowed() || tt.rule != "" && v.Denials[0].Rule != tt.rule {
			t.Errorf("%s: %v", name, v.Err())
		}
	}
	if v := p.Container(ContainerRequest{Profile: "plain", Image: "busybox", ExtraHosts: []string{"x:host-gateway"}}); v.Allowed() {
		t.Error("host-gateway where it is off")
	}
}
