package network

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"

	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/atomicfile"
)

func TestEnsureNetwork(t *testing.T) {
	b := newNetFixture(t, nil)
	var wg sync.WaitGroup
	errs := make([]error, 10)
	for i := range errs {
		wg.Go(func() {
			errs[i] = b.EnsureNetwork(t.Context(), runtime.Network{Name: "n", Labels: map[string]string{"a": "1"}, Isolated: true})
		})
	}
	wg.Wait()
	must(t, errors.Join(errs...))
	before, rules := b.ensure(t, runtime.Network{Name: "n", Labels: map[string]string{"b": "2"}, Isolated: true}), b.rules(t)
	again := New(b.opts) // which knows nothing of it
	if err := again.EnsureNetwork(t.Context(), runtime.Network{Name: "n"}); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("with other options: %v", err)
	}
	got, err := again.Networks(t.Context(), nil)
	want := []runtime.Network{{Name: "n", ID: before.ID, Labels: map[string]string{"a": "1"}, Isolated: true, CreatedAt: before.Created}}
	if diff := cmp.Diff(want, got); diff != "" || err != nil || before.ID == "" || time.Since(before.Created).Abs() > time.Minute {
		t.Errorf("%v\n%s", err, diff)
	}
	if diff := cmp.Diff(rules, b.rules(t)); diff != "" {
		t.Errorf("rules: %s", diff)
	}
	if err := b.EnsureNetwork(t.Context(), runtime.Network{}); !errdefs.IsInvalidArgument(err) {
		t.Errorf("without a name: %v", err)
	}
}

func TestNetworksAtOnce(t *testing.T) {
	b := newNetFixture(t, nil)
	const at = 16
	all := func(call func(name string) error) {
		t.Helper()
		var wg sync.WaitGroup
		for i := range at {
			wg.Go(func() {
				if err := call(fmt.Sprint(i)); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
	}
	all(func(name string) error { return b.EnsureNetwork(t.Context(), runtime.Network{Name: name}) })
	recs, err := b.networks()
	subnets := make(map[netip.Prefix]bool)
	for _, n := range recs {
		subnets[n.Subnet] = true
	}
	if err != nil || len(subnets) != at {
		t.Errorf("%d subnets, %v", len(subnets), err)
	}
	rules := b.rules(t)
	all(func(string) error { return b.Sweep(t.Context()) })
	if diff := cmp.Diff(rules, b.rules(t)); diff != "" {
		t.Errorf("rules after the sweeps: %s", diff)
	}
	all(func(name string) error { return b.RemoveNetwork(t.Context(), name) })
}

func TestRemoveNetwork(t *testing.T) {
	b := newNetFixture(t, nil)
	b.ipt(t, "-A FORWARD -s 192.0.2.1 -j DROP")
	others := b.rules(t)
	b.ensure(t, runtime.Network{Name: "n"})
	c := b.container(t, "n")
	if err := b.RemoveNetwork(t.Context(), "n"); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("in use: %v", err)
	}
	must(t, b.Detach(t.Context(), c.id))
	for range 2 {
		must(t, b.RemoveNetwork(t.Context(), "n"))
	}
	if diff := cmp.Diff(others, b.rules(t)); diff != "" {
		t.Errorf("the rules of others: %s", diff)
	}
	if _, err := b.Attach(t.Context(), newID(), "n"); !errdefs.IsNotFound(err) {
		t.Errorf("attach to one that is gone: %v", err)
	}
}

// TestNetworkRecovery cuts the making and the removal of a network short.
func TestNetworkRecovery(t *testing.T) {
	calls := map[string]func(*netFixture, context.Context) error{
		"ensure": func(b *netFixture, ctx context.Context) error {
			return b.EnsureNetwork(ctx, runtime.Network{Name: "n"})
		},
		"remove": func(b *netFixture, ctx context.Context) error { return b.RemoveNetwork(ctx, "n") },
		"sweep":  func(b *netFixture, ctx context.Context) error { return b.Sweep(ctx) },
	}
	stages := map[string]struct {
		cut     func(*testing.T, *netFixture, *network)
		removed bool // the sweep removes it
	}{
		"directory": {func(t *testing.T, _ *netFixture, n *network) {
			must(t, os.Remove(filepath.Join(n.dir, networkRecord)))
		}, true},
		"record": {func(*testing.T, *netFixture, *network) {}, false},
		"marked": {func(t *testing.T, _ *netFixture, n *network) {
			n.Removing = true
			must(t, n.write())
		}, true},
		"temporary": {func(t *testing.T, _ *netFixture, n *network) {
			must(t, os.WriteFile(filepath.Join(n.dir, atomicfile.TempPrefix+"x"), []byte("{"), 0o600))
		}, false},
	}
	for _, rest := range []bool{false, true} { // of the network: its bridge and its rules
		for stage, s := range stages {
			if rest && stage == "directory" {
				continue // the record is the last to go
			}
			for call, f := range calls {
				t.Run(stage+map[bool]string{true: " and the rest ", false: " "}[rest]+call, func(t *testing.T) {
					b := newNetFixture(t, nil)
					n := b.ensure(t, runtime.Network{Name: "n"})
					if !rest {
						b.in(t, b.host, func() error {
							return errors.Join(removeBridge(n.Bridge), setRules(t.Context(), n.chain(), nil))
						})
					}
					s.cut(t, b, n)
					b.standing.Clear() // as in a process that has just started
					must(t, f(b, t.Context()))
					list, err := b.Networks(t.Context(), nil)
					if want := call == "ensure" || call == "sweep" && !s.removed; err != nil || (len(list) == 1) != want {
						t.Fatalf("networks: %v, %v", list, err)
					}
					if len(list) == 1 {
						b.works(t, "n")
					}
				})
			}
		}
	}
}

// works reports whether a container on a network gets out of it.
func (b *netFixture) works(t *testing.T, network string) {
	t.Helper()
	b.serve(t, b.outside)
	c := b.container(t, network)
	if got := b.reach(t, c.netns, outsideAddr); got != hostOut {
		t.Errorf("the world outside sees %q", got)
	}
}

// TestSweepNetworks takes from a network in use what others can take.
func TestSweepNetworks(t *testing.T) {
	for name, harm := range map[string]string{
		"filter flushed":  "iptables -F",
		"mangle flushed":  "iptables -t mangle -F",
		"nat flushed":     "iptables -t nat -F",
		"rule in front":   "iptables -I FORWARD -j DROP",
		"bridge removed":  "bridge",
		"nothing":         "",
		"address leaked":  "address",
		"isolation ended": "isolation",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newNetFixture(t, nil)
			n := b.ensure(t, runtime.Network{Name: "n", Isolated: true})
			x, y := b.container(t, "n"), b.container(t, "n")
			b.serve(t, b.outside)
			b.serve(t, y.netns)
			setBridgeNetfilter(t, b, false)
			rules := b.rules(t)
			e, err := b.Attached(y.id)
			if err != nil || e == nil {
				t.Fatalf("%+v, %v", e, err)
			}
			switch harm {
			case "bridge":
				b.in(t, b.host, func() error { return removeBridge(n.Bridge) })
			case "isolation":
				b.in(t, b.host, func() error {
					link, err := netlink.LinkByName(e.Veth)
					return errors.Join(err, netlink.LinkSetIsolated(link, false))
				})
			case "address":
				file := filepath.Join(n.ipam(), n.Bridge, n.Subnet.Addr().Next().Next().Next().Next().Next().String())
				must(t, os.WriteFile(file, []byte(newID()+"\r\n"+ifName), 0o600))
			case "":
			default:
				b.ipt(t, harm[len("iptables "):])
			}
			must(t, b.Sweep(t.Context()))
			if harm == "iptables -I FORWARD -j DROP" {
				b.ipt(t, "-D FORWARD -j DROP")
			}
			if diff := cmp.Diff(rules, b.rules(t)); diff != "" {
				t.Errorf("rules: %s", diff)
			}
			if got := b.reach(t, x.netns, outsideAddr); got != hostOut {
				t.Errorf("the world outside sees %q", got)
			}
			if got := b.reach(t, x.netns, y.ip); got != "" {
				t.Errorf("a neighbour sees %q", got)
			}
			if got := n.addresses(t); len(got) != 2 {
				t.Errorf("addresses: %q", got)
			}
		})
	}
}

// A list that changed while it was told isn't taken, nor is it asked for without end.
func TestSteady(t *testing.T) {
	for _, tt := range []struct {
		name              string
		interrupted, asks int
		err               error
	}{
		{"quiet", 0, 1, nil},
		{"busy", 3, 4, nil},
		{"never still", steadyTries, steadyTries, netlink.ErrDumpInterrupted},
	} {
		asks := 0
		list, err := steady(func() ([]int, error) {
			if asks++; asks <= tt.interrupted {
				return []int{0}, netlink.ErrDumpInterrupted
			}
			return []int{1}, nil
		})
		if asks != tt.asks || !errors.Is(err, tt.err) || err == nil && !slices.Equal(list, []int{1}) {
			t.Errorf("%s: asked %d times: %v, %v", tt.name, asks, list, err)
		}
	}
}

func TestFreeSubnet(t *testing.T) {
	for _, tt := range []struct {
		pool  string
		taken []string
		want  string
	}{
		{"10.213.0.0/16", nil, "10.213.0.0/24"},
		{"10.213.7.9/16", []string{"10.213.0.0/24", "10.213.1.128/25"}, "10.213.2.0/24"},
		{"10.213.0.0/23", []string{"10.213.0.5/32"}, "10.213.1.0/24"},
		{"10.213.0.0/24", []string{"10.213.0.5/32"}, ""},
		{"10.213.0.0/16", []string{"10.0.0.0/8"}, ""},
		{"255.255.255.0/24", []string{"255.255.255.255/32"}, ""},
		{"0.0.0.0/0", []string{"0.0.0.0/0"}, ""},
	} {
		var taken []netip.Prefix
		for _, s := range tt.taken {
			taken = append(taken, netip.MustParsePrefix(s))
		}
		got, err := freeSubnet(netip.MustParsePrefix(tt.pool), taken)
		if tt.want == "" && !errdefs.IsFailedPrecondition(err) || tt.want != "" && got.String() != tt.want {
			t.Errorf("%s without %s: %s, %v; want %s", tt.pool, tt.taken, got, err, tt.want)
		}
	}
}

func TestNetworkSubnets(t *testing.T) {
	b := newNetFixture(t, func(o *Options) { o.Subnets = netip.MustParsePrefix("10.77.0.0/21") })
	b.in(t, b.host, func() error { return up("out", "10.77.0.9/25") })
	b.route(t, b.host, "10.77.2.0/23", outsideAddr)
	b.in(t, b.host, func() error { // a route of a table of its own
		_, dst, err := net.ParseCIDR("10.77.5.0/24")
		if err != nil {
			return err
		}
		link, err := netlink.LinkByName("out")
		if err != nil {
			return err
		}
		return netlink.RouteReplace(&netlink.Route{Dst: dst, LinkIndex: link.Attrs().Index, Table: 100})
	})
	got := make(map[string]bool)
	for i, name := range []string{"a", "b", "c", "d"} {
		got[b.ensure(t, runtime.Network{Name: name, Internal: i == 0}).Subnet.String()] = true
	}
	want := map[string]bool{"10.77.1.0/24": true, "10.77.4.0/24": true, "10.77.6.0/24": true, "10.77.7.0/24": true}
	if !maps.Equal(got, want) {
		t.Errorf("subnets: %v", got)
	}
	if err := b.EnsureNetwork(t.Context(), runtime.Network{Name: "e"}); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("without a subnet: %v", err)
	}
	if list, err := b.Networks(t.Context(), nil); err != nil || len(list) != 4 {
		t.Errorf("afterwards %+v, %v", list, err)
	}
}

func TestNetworkLacking(t *testing.T) {
	b := newNetFixture(t, func(o *Options) { o.PluginDirs = []string{"/nonexistent"} })
	if err := b.EnsureNetwork(t.Context(), runtime.Network{Name: "n"}); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("without plug-ins: %v", err)
	}
	b.opts.PluginDirs, b.opts.Netns = []string{"/usr/lib/cni", "/opt/cni/bin", "/usr/libexec/cni"}, "/nonexistent"
	if err := b.EnsureNetwork(t.Context(), runtime.Network{Name: "n"}); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("without a namespace: %v", err)
	}
	b.opts.Netns = b.host
}

func TestNetworkLocked(t *testing.T) {
	b := newNetFixture(t, nil)
	n := b.ensure(t, runtime.Network{Name: "n"})
	unlock, err := LockDir(t.Context(), n.dir)
	must(t, err)
	cause := errors.New("enough")
	b.standing.Clear()
	for name, call := range map[string]func(context.Context) error{
		"remove": func(ctx context.Context) error { return b.RemoveNetwork(ctx, "n") },
		"attach": func(ctx context.Context) error { _, err := b.Attach(ctx, newID(), "n"); return err },
		"ensure": func(ctx context.Context) error { return b.EnsureNetwork(ctx, runtime.Network{Name: "n"}) },
	} {
		ctx, cancel := context.WithCancelCause(t.Context())
		began := time.Now()
		time.AfterFunc(20*time.Millisecond, func() { cancel(cause) })
		if err := call(ctx); !errdefs.IsCanceled(err) || !errors.Is(err, cause) || time.Since(began) > runtime.Grace {
			t.Errorf("%s: %v after %v", name, err, time.Since(began))
		}
		cancel(nil)
	}
	b.opts.CallTimeout = 20 * time.Millisecond
	if err := b.RemoveNetwork(t.Context(), "n"); !errdefs.IsUnavailable(err) {
		t.Errorf("remove, while another has the lock: %v", err)
	}
	b.opts.CallTimeout = 30 * time.Second
	unlock()
}
