package network

import (
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"

	"github.com/vishvananda/netlink"

	"github.com/bermhq/berm/runtime"
)

// The functions here must run on the host's side (onHost).

// findBridge returns nil if there is no such bridge.
func findBridge(name string) (*netlink.Bridge, error) {
	link, err := netlink.LinkByName(name)
	if isNoLink(err) {
		return nil, nil //nolint:nilnil // that is its meaning
	}
	if err != nil {
		return nil, fmt.Errorf("find bridge %s: %w", name, err)
	}
	bridge, ok := link.(*netlink.Bridge)
	if !ok {
		return nil, runtime.Precondition("the interface %s is a %s, and no bridge", name, link.Type())
	}
	return bridge, nil
}

func isNoLink(err error) bool {
	_, is := errors.AsType[netlink.LinkNotFoundError](err)
	return is
}

// makeBridge makes a network's bridge, or completes it, and brings it up. The firewall must
// be in place.
func makeBridge(n *network, log *slog.Logger) error {
	bridge, err := findBridge(n.Bridge)
	if err != nil {
		return err
	}
	if bridge == nil {
		// Set a MAC address. Otherwise it changes whenever ports come and go, and the containers'
		// neighbour tables are wrong for a while.
		mac := net.HardwareAddr{0x02, 0, 0, 0, 0, 0}
		_, _ = rand.Read(mac[1:]) // it never fails
		bridge = &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: n.Bridge, HardwareAddr: mac, TxQLen: -1}}
		if err := netlink.LinkAdd(bridge); err != nil {
			return fmt.Errorf("make bridge %s: %w", n.Bridge, err)
		}
	}
	if err := disableIPv6(n.Bridge); err != nil {
		return fmt.Errorf("disable IPv6 on %s: %w", n.Bridge, err)
	}
	if err := addAddress(n, bridge); err != nil {
		return err
	}
	if n.Internal {
		// The host shouldn't answer for addresses of its other interfaces.
		if err := setSysctl("ipv4/conf/"+n.Bridge+"/arp_ignore", "1"); err != nil {
			return fmt.Errorf("quieten %s: %w", n.Bridge, err)
		}
	} else if err := forward(log); err != nil {
		return fmt.Errorf("turn IPv4 forwarding on: %w", err)
	}
	if err := netlink.LinkSetUp(bridge); err != nil {
		return fmt.Errorf("bring %s up: %w", n.Bridge, err)
	}
	return nil
}

// addAddress lets the host reach the containers. On an internal network the firewall lets
// only the host begin a connection.
func addAddress(n *network, bridge *netlink.Bridge) error {
	gateway := netip.PrefixFrom(n.gateway(), n.Subnet.Bits())
	addr, err := netlink.ParseAddr(gateway.String())
	if err != nil {
		return err
	}
	if err := netlink.AddrReplace(bridge, addr); err != nil {
		return fmt.Errorf("give %s the address %s: %w", n.Bridge, gateway, err)
	}
	return nil
}

// forward makes the host forward the containers' packets.
func forward(log *slog.Logger) error {
	const file = "/proc/sys/net/ipv4/ip_forward"
	b, err := os.ReadFile(file)
	if err == nil && string(b) == "0\n" {
		log.Warn("ip_forwarding_turned_on")
		err = os.WriteFile(file, []byte("1"), 0o600)
	}
	return err
}

// joinBridge makes a container's host-side interface a port of the network's bridge, isolated
// if the network is. An interface that is gone is no error.
func joinBridge(n *network, veth string) error {
	bridge, err := findBridge(n.Bridge)
	if err != nil {
		return err
	}
	if bridge == nil {
		return runtime.Precondition("the bridge %s is gone", n.Bridge)
	}
	link, err := netlink.LinkByName(veth)
	if isNoLink(err) {
		return nil
	}
	if err == nil && link.Attrs().MasterIndex != bridge.Index {
		err = netlink.LinkSetMaster(link, bridge)
	}
	// Without this, frames between two ports pass where br_netfilter is off.
	if err == nil && n.Isolated {
		err = netlink.LinkSetIsolated(link, true)
	}
	if err != nil {
		return fmt.Errorf("make %s a port of %s: %w", veth, n.Bridge, err)
	}
	return nil
}

func removeBridge(name string) error {
	bridge, err := findBridge(name)
	if err != nil || bridge == nil {
		return err
	}
	if err := netlink.LinkDel(bridge); err != nil && !isNoLink(err) {
		return fmt.Errorf("remove bridge %s: %w", name, err)
	}
	return nil
}

// steadyTries is how often steady asks the kernel.
const steadyTries = 100

// steady asks the kernel for a list until it gets one that didn't change meanwhile. On a busy host, the
// second try usually succeeds.
func steady[T any](ask func() ([]T, error)) (list []T, err error) {
	for range steadyTries {
		if list, err = ask(); !errors.Is(err, netlink.ErrDumpInterrupted) {
			break
		}
	}
	return list, err
}

// takenPrefixes returns the prefixes of the host's addresses and routes, without the default route.
func takenPrefixes() ([]netip.Prefix, error) {
	addrs, err := steady(func() ([]netlink.Addr, error) { return netlink.AddrList(nil, netlink.FAMILY_V4) })
	if err != nil {
		return nil, fmt.Errorf("list the host's addresses: %w", err)
	}
	routes, err := steady(func() ([]netlink.Route, error) {
		return netlink.RouteListFiltered(netlink.FAMILY_V4, &netlink.Route{}, netlink.RT_FILTER_TABLE) // table 0: all
	})
	if err != nil {
		return nil, fmt.Errorf("list the host's routes: %w", err)
	}
	var taken []netip.Prefix
	add := func(ipNet *net.IPNet) {
		if ipNet == nil {
			return
		}
		ip, ok := netip.AddrFromSlice(ipNet.IP.To4())
		if bits, _ := ipNet.Mask.Size(); ok && bits > 0 {
			taken = append(taken, netip.PrefixFrom(ip, bits).Masked())
		}
	}
	for _, a := range addrs {
		add(a.IPNet)
		add(a.Peer)
	}
	for _, route := range routes {
		add(route.Dst)
	}
	return taken, nil
}

// freeSubnet returns the first /24 of a pool that overlaps with no taken prefix.
func freeSubnet(pool netip.Prefix, taken []netip.Prefix) (netip.Prefix, error) {
	addr := pool.Masked().Addr()
	for carry := uint32(0); pool.Contains(addr) && carry>>24 == 0; {
		subnet := netip.PrefixFrom(addr, 24)
		free := true
		for _, t := range taken {
			free = free && !subnet.Overlaps(t)
		}
		if free {
			return subnet, nil
		}
		b := addr.As4()
		carry = (uint32(b[0])<<16 | uint32(b[1])<<8 | uint32(b[2])) + 1
		addr = netip.AddrFrom4([4]byte{byte(carry >> 16), byte(carry >> 8), byte(carry), 0})
	}
	return netip.Prefix{}, runtime.Precondition("no /24 of %s is free of the host's other networks and routes", pool)
}
