package network

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/vishvananda/netlink"

	"github.com/bermhq/berm/runtime"
)

func TestAttach(t *testing.T) {
	b := newNetFixture(t, nil)
	n := b.ensure(t, runtime.Network{Name: "n", Isolated: true})
	if _, err := b.Attach(t.Context(), newID(), "none"); !errdefs.IsNotFound(err) {
		t.Errorf("no such network: %v", err)
	}
	if _, err := os.Stat(b.networkDir("none")); !os.IsNotExist(err) {
		t.Errorf("a network that isn't there has a directory: %v", err)
	}
	c := b.container(t, "n")
	got, err := b.Attached(c.id)
	if err != nil || got == nil || got.IP != c.ip || got.Network != "n" || !n.Subnet.Contains(netip.MustParseAddr(c.ip)) {
		t.Fatalf("attached: %+v, %v", got, err)
	}
	b.in(t, b.host, func() error {
		link, err := netlink.LinkByName(got.Veth)
		if err != nil {
			return err
		}
		port, err := netlink.LinkGetProtinfo(link)
		if !port.Isolated {
			t.Error("the port isn't isolated")
		}
		return err
	})
	b.in(t, c.netns, func() error {
		links, err := steady(netlink.LinkList)
		for _, l := range links {
			addrs, err := steady(func() ([]netlink.Addr, error) { return netlink.AddrList(l, netlink.FAMILY_V6) })
			if len(addrs) > 0 || err != nil {
				t.Errorf("IPv6 addresses: %v, %v", addrs, err)
			}
		}
		return err
	})
	if ids, err := b.Attachments(); err != nil || !slices.Equal(ids, []string{c.id}) {
		t.Errorf("attachments: %v, %v", ids, err)
	}
	if _, err := b.MakeNetns(c.id, ""); err == nil {
		t.Error("a second namespace is made for the container")
	}
	for range 2 {
		must(t, b.Detach(t.Context(), c.id))
	}
	if got, err := b.Attached(c.id); got != nil || err != nil {
		t.Errorf("afterwards: %+v, %v", got, err)
	}
	if got := n.addresses(t); len(got) > 0 {
		t.Errorf("addresses: %v", got)
	}
}

// TestAttachMany takes more addresses than there are, one after the other.
func TestAttachMany(t *testing.T) {
	b := newNetFixture(t, nil)
	n := b.ensure(t, runtime.Network{Name: "n"})
	// All but 13 of the network's are others'.
	must(t, b.Detach(t.Context(), b.container(t, "n").id))
	others := n.gateway()
	for range 240 {
		others = others.Next()
		must(t, os.WriteFile(filepath.Join(n.ipam(), n.Bridge, others.String()), []byte(newID()+"\r\n"+ifName), 0o600))
	}
	const workers, each = 4, 10
	var wg sync.WaitGroup
	for range workers {
		wg.Go(func() {
			for range each {
				id := newID()
				if _, err := b.MakeNetns(id, ""); err != nil {
					t.Error(err)
					return
				}
				_, err := b.Attach(t.Context(), id, "n")
				if err := errors.Join(err, b.Detach(t.Context(), id)); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	if got := n.addresses(t); len(got) != 240 {
		t.Errorf("addresses: %v", got)
	}
}

func TestAttachAtOnce(t *testing.T) {
	b := newNetFixture(t, nil)
	n := b.ensure(t, runtime.Network{Name: "n"})
	b.standing.Clear() // all of them find it so
	const at = 50
	ips := make([]string, at)
	var wg sync.WaitGroup
	for i := range at {
		wg.Go(func() {
			id := newID()
			if _, err := b.MakeNetns(id, ""); err != nil {
				t.Error(err)
				return
			}
			e, err := b.Attach(t.Context(), id, "n")
			if err != nil {
				t.Error(err)
			}
			ips[i] = e.IP
		})
	}
	wg.Wait()
	slices.Sort(ips)
	if got := len(slices.Compact(ips)); got != at {
		t.Errorf("%d addresses for %d containers", got, at)
	}
	ids, err := b.Attachments()
	if err != nil || len(ids) != at {
		t.Fatalf("%d attachments, %v", len(ids), err)
	}
	for _, id := range ids {
		wg.Go(func() {
			if err := b.Detach(t.Context(), id); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if got := n.addresses(t); len(got) > 0 {
		t.Errorf("addresses: %v", got)
	}
}

// TestDetachRecovery cuts attach and detach short, and detaches.
func TestDetachRecovery(t *testing.T) {
	b := newNetFixture(t, nil)
	n := b.ensure(t, runtime.Network{Name: "n"})
	must := func(t *testing.T, errs ...error) {
		t.Helper()
		must(t, errors.Join(errs...))
	}
	remove := func(t *testing.T, c testContainer, path string) {
		t.Helper()
		r, err := b.cni(n)
		must(t, err)
		b.in(t, b.host, func() error { return r.Remove(context.Background(), c.id, path) })
	}
	whole := func(cut func(*testing.T, testContainer)) func(*testing.T) string {
		return func(t *testing.T) string {
			c := b.container(t, "n")
			cut(t, c)
			return c.id
		}
	}
	for name, cut := range map[string]func(*testing.T) string{
		"nothing": func(*testing.T) string { return newID() },
		"namespace not mounted": func(t *testing.T) string {
			id := newID()
			must(t, os.MkdirAll(b.path("netns"), 0o700), os.WriteFile(b.path("netns", id), nil, 0o600))
			return id
		},
		"namespace": func(t *testing.T) string {
			id := newID()
			_, err := b.MakeNetns(id, "")
			must(t, err)
			return id
		},
		"user": func(t *testing.T) string {
			id := newID()
			_, err := b.MakeNetns(id, "")
			must(t, err, n.writeUser(id, Endpoint{Network: "n"}))
			return id
		},
		"link and address, not written down": whole(func(t *testing.T, c testContainer) {
			must(t, n.writeUser(c.id, Endpoint{Network: "n"}))
		}),
		"address without link": whole(func(t *testing.T, c testContainer) {
			b.in(t, c.netns, func() error {
				link, err := netlink.LinkByName(ifName)
				return errors.Join(err, netlink.LinkDel(link))
			})
		}),
		"link without address": whole(func(t *testing.T, c testContainer) {
			must(t, os.Remove(filepath.Join(n.ipam(), n.Bridge, c.ip)))
		}),
		"user damaged":              whole(func(t *testing.T, c testContainer) { must(t, os.WriteFile(n.user(c.id), nil, 0o600)) }),
		"unplugged":                 whole(func(t *testing.T, c testContainer) { remove(t, c, c.netns) }),
		"unplugged, user removed":   whole(func(t *testing.T, c testContainer) { remove(t, c, c.netns); must(t, os.Remove(n.user(c.id))) }),
		"host started anew":         whole(func(t *testing.T, c testContainer) { must(t, RemoveNetns(c.netns)) }),
		"host started anew, a file": whole(func(t *testing.T, c testContainer) { must(t, RemoveNetns(c.netns), os.WriteFile(c.netns, nil, 0o600)) }),
		"bridge gone":               whole(func(t *testing.T, _ testContainer) { b.in(t, b.host, func() error { return removeBridge(n.Bridge) }) }),
	} {
		t.Run(name, func(t *testing.T) {
			id := cut(t)
			if ids, err := b.Attachments(); err != nil || slices.Contains(ids, id) == (name == "nothing") {
				t.Errorf("attachments: %v, %v", ids, err)
			}
			if _, err := b.Attached(id); err != nil {
				t.Errorf("attached: %v", err)
			}
			must(t, b.Detach(t.Context(), id), b.Sweep(t.Context()))
			if ids, err := b.Attachments(); err != nil || len(ids) > 0 {
				t.Errorf("attachments afterwards: %v, %v", ids, err)
			}
			if got := n.addresses(t); len(got) > 0 {
				t.Errorf("addresses: %v", got)
			}
			if left, _ := filepath.Glob("/var/lib/cni/*/*" + id + "*"); len(left) > 0 {
				t.Errorf("left: %v", left)
			}
			b.awaitNoPorts(t)
		})
	}
}

// TestAttachFails has the last plug-in fail, or hang, when the others are done.
func TestAttachFails(t *testing.T) {
	for name, tt := range map[string]struct {
		script string
		class  func(error) bool
	}{
		"fails": {"exit 1", func(err error) bool { return err != nil && !errdefs.IsUnavailable(err) }},
		"hangs": {"exec sleep 60", errdefs.IsUnavailable},
	} {
		t.Run(name, func(t *testing.T) {
			b := newNetFixture(t, nil)
			n := b.ensure(t, runtime.Network{Name: "n"})
			real := b.opts
			dir := t.TempDir()
			must(t, os.WriteFile(filepath.Join(dir, "portmap"), []byte("#!/bin/sh\n"+tt.script+"\n"), 0o700))
			b.opts.PluginDirs = append([]string{dir}, b.opts.PluginDirs...)
			b.opts.CallTimeout = time.Second
			id := newID()
			if _, err := b.MakeNetns(id, ""); err != nil {
				t.Fatal(err)
			}
			if _, err := b.Attach(t.Context(), id, "n"); !tt.class(err) {
				t.Errorf("attach: %v", err)
			}
			b.opts = real
			if err := b.RemoveNetwork(t.Context(), "n"); !errdefs.IsFailedPrecondition(err) {
				t.Errorf("remove the network: %v", err)
			}
			if got := n.addresses(t); len(got) != 1 {
				t.Errorf("addresses: %v", got) // else it failed too early
			}
			must(t, b.Detach(t.Context(), id))
			if got := n.addresses(t); len(got) > 0 {
				t.Errorf("addresses afterwards: %v", got)
			}
			b.awaitNoPorts(t)
		})
	}
}

// awaitNoPorts waits for links of namespaces that have ended: the kernel clears them
// away some time later.
func (b *netFixture) awaitNoPorts(t *testing.T) {
	t.Helper()
	b.in(t, b.host, func() error {
		for {
			links, err := steady(netlink.LinkList)
			if err != nil {
				return err
			}
			if !slices.ContainsFunc(links, func(l netlink.Link) bool { return l.Type() == "veth" && l.Attrs().Name != "out" }) {
				return nil
			}
			if err := t.Context().Err(); err != nil {
				return err
			}
		}
	})
}

func BenchmarkAttach(bm *testing.B) {
	b := newNetFixture(bm, nil)
	b.ensure(bm, runtime.Network{Name: "n"})
	for bm.Loop() {
		c := b.container(bm, "n")
		must(bm, b.Detach(bm.Context(), c.id))
	}
}

func BenchmarkNetwork(bm *testing.B) {
	b := newNetFixture(bm, nil)
	for bm.Loop() {
		b.ensure(bm, runtime.Network{Name: "n"})
		must(bm, b.RemoveNetwork(bm.Context(), "n"))
	}
}

func BenchmarkEnsureNetwork(bm *testing.B) {
	b := newNetFixture(bm, nil)
	for bm.Loop() {
		b.ensure(bm, runtime.Network{Name: "n"})
	}
}
