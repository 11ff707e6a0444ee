package network

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/runtimetest/check"
	"github.com/bermhq/berm/runtime/runtimetest/engine"
)

const (
	hostOut     = "198.51.100.1" // the host's address on the link that leads out
	outsideAddr = "198.51.100.2" // the world
)

// netFixture is a host in a network namespace of its own, with a world outside.
type netFixture struct {
	*Manager
	host, outside string
}

func newNetFixture(t testing.TB, change func(*Options)) *netFixture {
	t.Helper()
	engine.Require(t, "containerd")
	b := &netFixture{host: testNetns(t), outside: testNetns(t)}
	b.in(t, b.outside, func() error { return up("lo") })
	b.in(t, b.host, func() error {
		if err := up("lo"); err != nil {
			return err
		}
		fd, err := unix.Open(b.outside, unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer func() { _ = unix.Close(fd) }()
		link := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "out", TxQLen: -1}, PeerName: "in", PeerNamespace: netlink.NsFd(fd)}
		if err := netlink.LinkAdd(link); err != nil {
			return err
		}
		return up("out", hostOut+"/30")
	})
	b.in(t, b.outside, func() error { return up("in", outsideAddr+"/30") })
	opts := Options{
		Root: shortTempDir(t), Namespace: "berm", Netns: b.host, PluginDirs: []string{"/opt/cni/bin", "/usr/lib/cni", "/usr/libexec/cni"},
		Subnets: netip.MustParsePrefix("10.213.0.0/16"), CallTimeout: 30 * time.Second, Logger: slog.New(slog.DiscardHandler),
	}
	if change != nil {
		change(&opts)
	}
	b.Manager = New(opts)
	t.Cleanup(func() { b.clear(t) })
	return b
}

// clear detaches and removes everything, and looks for what is left of it.
func (b *netFixture) clear(t testing.TB) {
	ids, err := b.Attachments()
	for _, id := range ids {
		err = errors.Join(err, b.Detach(context.Background(), id))
	}
	all, e := b.networks()
	err = errors.Join(err, e)
	for _, n := range all {
		err = errors.Join(err, b.RemoveNetwork(context.Background(), n.Name))
	}
	must(t, err)
	b.in(t, b.host, func() error {
		links, err := steady(netlink.LinkList)
		for _, l := range links {
			if name := l.Attrs().Name; name != "lo" && name != "out" {
				t.Errorf("left: interface %s", name)
			}
		}
		save, e := iptables(context.Background(), nil, "iptables-save")
		if strings.Contains(string(save), chainPrefix) || strings.Contains(string(save), bridgePrefix) {
			t.Errorf("left in the firewall:\n%s", save)
		}
		return errors.Join(err, e)
	})
	for _, n := range all {
		if left, _ := filepath.Glob("/var/lib/cni/*/*" + n.Bridge + "*"); len(left) > 0 {
			t.Errorf("left: %v", left)
		}
	}
	for _, id := range ids {
		if left, _ := filepath.Glob("/var/lib/cni/*/*" + id + "*"); len(left) > 0 {
			t.Errorf("left: %v", left)
		}
	}
	for _, dir := range []string{"networks", "netns"} {
		if left, err := names(b.path(dir)); err != nil || len(left) > 0 {
			t.Errorf("left in %s: %v, %v", dir, left, err)
		}
	}
}

func newID() string { return strings.ToLower(rand.Text()) }

// shortTempDir fits a Root, whatever the test's name.
func shortTempDir(t testing.TB) string {
	dir, err := os.MkdirTemp("", "berm-net-")
	must(t, err)
	t.Cleanup(func() {
		must(t, os.RemoveAll(dir))
	})
	return dir
}

func testNetns(t testing.TB) string {
	t.Helper()
	r := &Manager{opts: Options{Root: shortTempDir(t)}}
	path, err := r.MakeNetns("ns", "")
	must(t, err)
	t.Cleanup(func() {
		must(t, RemoveNetns(path))
	})
	return path
}

func up(name string, addrs ...string) error {
	link, err := netlink.LinkByName(name)
	if err != nil {
		return err
	}
	for _, a := range addrs {
		addr, err := netlink.ParseAddr(a)
		if err != nil {
			return err
		}
		if err := netlink.AddrReplace(link, addr); err != nil {
			return err
		}
	}
	return netlink.LinkSetUp(link)
}

// in runs f on a thread in a network namespace.
func (b *netFixture) in(t testing.TB, netns string, f func() error) {
	t.Helper()
	r := &Manager{opts: Options{Netns: netns}}
	must(t, r.onHost(context.Background(), func(context.Context) error { return f() }))
}

func (b *netFixture) ensure(t testing.TB, n runtime.Network) *network {
	t.Helper()
	must(t, b.EnsureNetwork(t.Context(), n))
	rec, err := readNetwork(b.networkDir(n.Name))
	if err != nil || rec == nil {
		t.Fatalf("record: %+v, %v", rec, err)
	}
	return rec
}

type testContainer struct{ id, netns, ip string }

func (b *netFixture) container(t testing.TB, network string) testContainer {
	t.Helper()
	c := testContainer{id: newID()}
	var err error
	if c.netns, err = b.MakeNetns(c.id, ""); err != nil {
		t.Fatal(err)
	}
	e, err := b.Attach(t.Context(), c.id, network)
	must(t, err)
	c.ip = e.IP
	return c
}

// serve returns everyone on port 7 with his address, within a network namespace.
func (b *netFixture) serve(t testing.TB, netns string) {
	t.Helper()
	var l net.Listener
	b.in(t, netns, func() (err error) {
		l, err = new(net.ListenConfig).Listen(context.Background(), "tcp4", ":7")
		return err
	})
	var serving sync.WaitGroup
	serving.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			host, _, _ := net.SplitHostPort(conn.RemoteAddr().String())
			_, _ = io.WriteString(conn, host)
			_ = conn.Close()
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		serving.Wait()
	})
}

// reach dials from a network namespace, and answers as whom the server sees it;
// empty when it isn't reached.
func (b *netFixture) reach(t testing.TB, netns, ip string) string {
	t.Helper()
	var seen string
	b.in(t, netns, func() error {
		// A local network answers within a millisecond, a busy machine or not.
		dialer := net.Dialer{Timeout: 300 * time.Millisecond}
		conn, err := dialer.DialContext(context.Background(), "tcp4", net.JoinHostPort(ip, "7"))
		if err != nil {
			return nil //nolint:nilerr // not reached
		}
		defer func() { _ = conn.Close() }()
		got, err := io.ReadAll(conn)
		seen = string(got)
		return err
	})
	return seen
}

func (b *netFixture) route(t testing.TB, netns, prefix, via string) {
	t.Helper()
	b.in(t, netns, func() error {
		p := netip.MustParsePrefix(prefix).Masked()
		dst := &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), 32)}
		return netlink.RouteReplace(&netlink.Route{Dst: dst, Gw: net.ParseIP(via)})
	})
}

// ipt runs iptables on the host.
func (b *netFixture) ipt(t testing.TB, args string) {
	t.Helper()
	b.in(t, b.host, func() error {
		path, err := FindProgram("iptables")
		if err != nil {
			return err
		}
		if out, err := exec.Command(path, append([]string{"--wait"}, strings.Fields(args)...)...).CombinedOutput(); err != nil {
			return fmt.Errorf("iptables %s: %w: %s", args, err, bytes.TrimSpace(out))
		}
		return nil
	})
}

// rules are all of the host's rules, counters left out.
func (b *netFixture) rules(t testing.TB) []string {
	t.Helper()
	var all []string
	b.in(t, b.host, func() error {
		fw, err := readFirewall(context.Background())
		for name, table := range fw {
			for _, rule := range table.rules {
				all = append(all, name+" "+rule)
			}
		}
		return err
	})
	slices.Sort(all)
	return all
}

// addresses that are taken.
func (n *network) addresses(t testing.TB) []string {
	t.Helper()
	files, err := names(filepath.Join(n.ipam(), n.Bridge))
	must(t, err)
	return slices.DeleteFunc(files, func(f string) bool {
		_, err := netip.ParseAddr(f)
		return err != nil
	})
}

// replaceDefault sends what leaves by a gateway, from an address.
func replaceDefault(gateway, source string) error {
	_, all, _ := net.ParseCIDR("0.0.0.0/0")
	return netlink.RouteReplace(&netlink.Route{Dst: all, Gw: net.ParseIP(gateway), Src: net.ParseIP(source)})
}

var must = check.Must // ends a test if a step of its own fails
