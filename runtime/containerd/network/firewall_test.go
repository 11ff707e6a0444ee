package network

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/bermhq/berm/runtime"
)

// TestNetworkReach tells who reaches whom.
func TestNetworkReach(t *testing.T) {
	for _, tt := range []struct {
		internal, isolated, bridgeNetfilter bool
	}{
		{false, false, false}, {false, false, true}, {false, true, false}, {false, true, true},
		{true, false, false}, {true, false, true}, {true, true, false}, {true, true, true},
	} {
		t.Run(fmt.Sprintf("internal %t isolated %t br_netfilter %t", tt.internal, tt.isolated, tt.bridgeNetfilter), func(t *testing.T) {
			t.Parallel() // it mostly waits for what must not answer
			b := newNetFixture(t, nil)
			setBridgeNetfilter(t, b, tt.bridgeNetfilter)
			b.ipt(t, "-P FORWARD DROP") // as Docker has it
			n := b.ensure(t, runtime.Network{Name: "n", Internal: tt.internal, Isolated: tt.isolated})
			x, y := b.container(t, "n"), b.container(t, "n")
			b.ensure(t, runtime.Network{Name: "other"})
			z := b.container(t, "other")
			for _, netns := range []string{b.outside, b.host, x.netns, y.netns, z.netns} {
				b.serve(t, netns)
			}
			b.route(t, b.outside, n.Subnet.String(), hostOut)
			if tt.internal { // as one that can change its routes may try
				b.route(t, x.netns, "0.0.0.0/0", y.ip)
			}
			check := func(who, from, to, want string) {
				t.Helper()
				if got := b.reach(t, from, to); got != want {
					t.Errorf("%s: seen as %q, want %q", who, got, want)
				}
			}
			when := func(open bool, address string) string {
				if open {
					return address
				}
				return ""
			}
			check("neighbour", x.netns, y.ip, when(!tt.isolated, x.ip))
			check("outside", x.netns, outsideAddr, when(!tt.internal, hostOut))
			check("host", x.netns, hostOut, when(!tt.internal, x.ip))
			check("from outside", b.outside, x.ip, "")
			check("to another network", x.netns, z.ip, "")
			check("from another network", z.netns, x.ip, "")
			check("itself", x.netns, "127.0.0.1", "127.0.0.1")

			// Docker puts rules like this one in front.
			b.ipt(t, "-I FORWARD -j ACCEPT")
			check("from outside, with a rule in front", b.outside, x.ip, "")
			check("to another network, with a rule in front", x.netns, z.ip, "")
			if tt.internal {
				check("outside, with a rule in front", x.netns, outsideAddr, "")
			} else {
				b.route(t, x.netns, y.ip+"/32", n.gateway().String())
				b.route(t, y.netns, x.ip+"/32", n.gateway().String())
				check("neighbour by the gateway", x.netns, y.ip, when(!tt.isolated, x.ip))
			}
		})
	}
}

func setBridgeNetfilter(t *testing.T, b *netFixture, on bool) {
	t.Helper()
	value := map[bool]string{true: "1", false: "0"}[on]
	b.in(t, b.host, func() error {
		err := setSysctl("bridge/bridge-nf-call-iptables", value)
		if os.IsNotExist(err) && !on {
			return nil // the module isn't loaded
		}
		return err
	})
}

func TestNetworkInternalHost(t *testing.T) {
	b := newNetFixture(t, nil)
	n := b.ensure(t, runtime.Network{Name: "n", Internal: true})
	x := b.container(t, "n")
	b.serve(t, b.host)
	b.in(t, x.netns, func() error {
		link, err := netlink.LinkByName(ifName)
		if err != nil {
			return err
		}
		dst := &net.IPNet{IP: net.ParseIP(hostOut), Mask: net.CIDRMask(32, 32)}
		return netlink.RouteReplace(&netlink.Route{Dst: dst, LinkIndex: link.Attrs().Index, Scope: netlink.SCOPE_LINK})
	})
	if got := b.reach(t, x.netns, hostOut); got != "" {
		t.Errorf("the host is reached, and sees %q", got)
	}
	b.in(t, x.netns, func() error {
		list, err := steady(func() ([]netlink.Neigh, error) { return netlink.NeighList(0, netlink.FAMILY_V4) })
		for _, neighbour := range list {
			if neighbour.IP.String() == hostOut && len(neighbour.HardwareAddr) > 0 {
				t.Errorf("the host tells of its address: %v", neighbour)
			}
		}
		return err
	})
	if got := b.reach(t, x.netns, n.gateway().String()); got != "" {
		t.Errorf("the host is reached by its own address there, and sees %q", got)
	}
	b.serve(t, x.netns)
	if got := b.reach(t, b.host, x.ip); got != n.gateway().String() {
		t.Errorf("the host reaches the container, which sees %q", got)
	}
}

func TestFirewallSenders(t *testing.T) {
	b := newNetFixture(t, nil)
	n := b.ensure(t, runtime.Network{Name: "n"})
	x := b.container(t, "n")
	b.serve(t, b.outside)
	const forged = "203.0.113.9"
	b.in(t, x.netns, func() error { return up(ifName, forged+"/32") })
	b.route(t, b.host, forged+"/32", x.ip)
	b.route(t, b.outside, forged+"/32", hostOut)
	b.in(t, x.netns, func() error { return replaceDefault(n.gateway().String(), forged) })
	if got := b.reach(t, x.netns, outsideAddr); got != "" {
		t.Errorf("a forged address is seen as %q", got)
	}
}

func TestNetworkRules(t *testing.T) {
	n := &network{Bridge: "berm-0a", Subnet: netip.MustParsePrefix("10.0.0.0/24")}
	for _, tt := range []struct {
		internal, isolated bool
		filter             string
		jumps              int
	}{
		{false, false, "! -s 10.0.0.0/24 -i berm-0a -j DROP; -i berm-0a -o berm-0a -j ACCEPT; -i berm-0a -j ACCEPT; " +
			"-o berm-0a -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT; -j DROP", 2},
		{false, true, "! -s 10.0.0.0/24 -i berm-0a -j DROP; -i berm-0a -o berm-0a -j DROP; -i berm-0a -j ACCEPT; " +
			"-o berm-0a -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT; -j DROP", 2},
		{true, false, "! -s 10.0.0.0/24 -i berm-0a -j DROP; -i berm-0a -o berm-0a -j ACCEPT; " +
			"-i berm-0a -m conntrack --ctstate ESTABLISHED -j ACCEPT; -j DROP", 3},
		{true, true, "! -s 10.0.0.0/24 -i berm-0a -j DROP; -i berm-0a -o berm-0a -j DROP; " +
			"-i berm-0a -m conntrack --ctstate ESTABLISHED -j ACCEPT; -j DROP", 3},
	} {
		n.Internal, n.Isolated = tt.internal, tt.isolated
		rules := networkRules(n)
		got := strings.ReplaceAll(strings.Join(rules["filter"].rules, "; "), "-A BERM-0a ", "")
		if got != tt.filter || len(rules["filter"].jumps) != tt.jumps {
			t.Errorf("internal %t, isolated %t: %s, %d jumps", tt.internal, tt.isolated, got, len(rules["filter"].jumps))
		}
		mangle := strings.ReplaceAll(strings.Join(rules["mangle"].rules, "\n"), "RETURN", "ACCEPT")
		if mangle != strings.Join(rules["filter"].rules, "\n") {
			t.Errorf("mangle:\n%s", mangle)
		}
		if _, nat := rules["nat"]; nat == tt.internal {
			t.Errorf("internal %t, masquerading %t", tt.internal, nat)
		}
	}
}

func TestFirewallRestore(t *testing.T) {
	wanted := map[string]tableRules{"filter": {
		jumps: []string{"-A FORWARD -i b -j BERM-1"}, rules: []string{"-A BERM-1 -j DROP"},
	}}
	const set = "*filter\n:BERM-1 - [0:0]\n-I FORWARD 1 -i b -j BERM-1\n-A BERM-1 -j DROP\nCOMMIT\n"
	const reset = "*filter\n:BERM-1 - [0:0]\n-D FORWARD -i b -j BERM-1\n-I FORWARD 1 -i b -j BERM-1\n-A BERM-1 -j DROP\nCOMMIT\n"
	const there = ":BERM-1 - [1:2]\n"
	for _, tt := range []struct{ name, save, want, gone string }{
		{"nothing", "", set, ""},
		{"as it should be", there + "-A FORWARD -i b -j BERM-1\n-A FORWARD -j DOCKER\n-A BERM-1 -j DROP", "",
			"*filter\n:BERM-1 - [0:0]\n-D FORWARD -i b -j BERM-1\n-X BERM-1\nCOMMIT\n"},
		{"behind another's of ours", there + "-A FORWARD -i c -j BERM-2\n-A FORWARD -i b -j BERM-1\n-A BERM-1 -j DROP", "",
			"*filter\n:BERM-1 - [0:0]\n-D FORWARD -i b -j BERM-1\n-X BERM-1\nCOMMIT\n"},
		{"behind others", there + "-A FORWARD -j DOCKER\n-A FORWARD -i b -j BERM-1\n-A BERM-1 -j DROP", reset,
			"*filter\n:BERM-1 - [0:0]\n-D FORWARD -i b -j BERM-1\n-X BERM-1\nCOMMIT\n"},
		{"flushed", there, set, "*filter\n:BERM-1 - [0:0]\n-X BERM-1\nCOMMIT\n"},
		{"more", there + "-A FORWARD -i b -j BERM-1\n-A BERM-1 -j DROP\n-A BERM-1 -j ACCEPT", reset,
			"*filter\n:BERM-1 - [0:0]\n-D FORWARD -i b -j BERM-1\n-X BERM-1\nCOMMIT\n"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			fw := parseFirewall([]byte("# saved\n*filter\n:FORWARD DROP [0:0]\n" + tt.save + "\nCOMMIT\n*nat\n:OUTPUT ACCEPT [0:0]\nCOMMIT\n"))
			if got := string(fw.restore("BERM-1", wanted)); got != tt.want {
				t.Errorf("set:\n%s\nwant:\n%s", got, tt.want)
			}
			if got := string(fw.restore("BERM-1", nil)); got != tt.gone {
				t.Errorf("remove:\n%s\nwant:\n%s", got, tt.gone)
			}
		})
	}
}

// TestRulesAsSaved holds the rules to the way in which iptables-save prints them:
// otherwise each sweep would put them in place anew.
func TestRulesAsSaved(t *testing.T) {
	b := newNetFixture(t, nil)
	for _, n := range []runtime.Network{{Name: "a"}, {Name: "b", Isolated: true}, {Name: "c", Internal: true}} {
		rec := b.ensure(t, n)
		b.in(t, b.host, func() error {
			fw, err := readFirewall(t.Context())
			if change := fw.restore(rec.chain(), networkRules(rec)); len(change) > 0 {
				t.Errorf("network %s would be changed:\n%s", n.Name, change)
			}
			return err
		})
	}
	if rules := b.rules(t); !slices.ContainsFunc(rules, func(r string) bool { return strings.Contains(r, "MASQUERADE") }) {
		t.Errorf("no masquerading in %q", rules)
	}
}
