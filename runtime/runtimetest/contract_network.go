package runtimetest

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/runtime"
)

func networkerCases() []contractCase {
	return []contractCase{
		{"network/list and remove", testNetworks},
		{"network/refused", testNetworkRefused},
		{"network/many at once", testNetworkMany},
	}
}

func testNetworks(t *testing.T, b *fixture) {
	for i := range 2 {
		network := runtime.Network{Name: fmt.Sprintf("%s-%d", b.name, i), Labels: map[string]string{labelCase: b.name, "index": fmt.Sprint(i)}}
		network.Internal, network.Isolated = i == 1, i == 1
		must(t, b.rt.EnsureNetwork(b.ctx, network))
	}
	both, err := b.rt.Networks(b.ctx, map[string]string{labelCase: b.name, "index": ""})
	if err != nil || len(both) != 2 {
		t.Fatalf("both: %+v, %v", both, err)
	}
	one, err := b.rt.Networks(b.ctx, map[string]string{labelCase: b.name, "index": "1"})
	if err != nil || len(one) != 1 {
		t.Fatalf("one: %+v, %v", one, err)
	}
	got := one[0]
	if got.Name != b.name+"-1" || got.ID == "" || got.Labels["index"] != "1" || !got.Internal || !got.Isolated || time.Since(got.CreatedAt).Abs() > time.Minute {
		t.Errorf("%+v", got)
	}
	spec := b.spec()
	spec.Network = got.Name
	c := b.create(t, spec)
	class(t, "remove one in use", b.rt.RemoveNetwork(b.ctx, got.Name), errdefs.IsFailedPrecondition, "FailedPrecondition")
	must(t, b.rt.Remove(b.ctx, c.ID))
	for range 2 {
		if err := b.rt.RemoveNetwork(b.ctx, got.Name); err != nil {
			t.Errorf("remove: %v", err)
		}
	}
	if left, err := b.rt.Networks(b.ctx, b.labels); err != nil || len(left) != 1 {
		t.Errorf("afterwards: %+v, %v", left, err)
	}
}

func (b *fixture) onNetwork(t *testing.T, network string) runtime.Container {
	t.Helper()
	spec := b.spec()
	spec.Network = network
	c := b.create(t, spec)
	t.Cleanup(func() { // before the network
		must(t, b.rt.Remove(context.Background(), c.ID))
	})
	return c
}

// testNetworkReach checks that from an isolated network a container reaches the world and no
// neighbour, and from an internal one a neighbour and not the world.
func testNetworkReach(t *testing.T, b *fixture) {
	for _, isolated := range []bool{true, false} {
		name := fmt.Sprintf("%s-%t", b.name, isolated)
		must(t, b.rt.EnsureNetwork(b.ctx, runtime.Network{Name: name, Labels: b.labels, Isolated: isolated, Internal: !isolated}))
		server, client := b.onNetwork(t, name), b.onNetwork(t, name)
		b.serve(t, server.ID, "echo hello")
		// Where no answer should come, a second is enough.
		patience := map[bool]string{true: "nc -w 5 ", false: "nc -w 1 "}
		got := b.shell(t, client.ID, patience[!isolated]+server.IP+" 7777")
		if strings.Contains(got, "hello") == isolated {
			t.Errorf("isolated %t: one container says to another: %q", isolated, got)
		}
		got = b.shell(t, client.ID, patience[isolated]+strings.Replace(b.Outside, ":", " ", 1))
		if strings.Contains(got, "outside") != isolated {
			t.Errorf("internal %t: the world outside says %q", !isolated, got)
		}
	}
}

// serve has a container run a command for each connection to its port 7777.
func (b *fixture) serve(t *testing.T, id, command string) {
	t.Helper()
	b.shell(t, id, "setsid nc -ll -p 7777 -e "+command+" >/dev/null 2>&1 &")
	b.await(t, "the server to listen", func() bool {
		return strings.Contains(b.output(t, id, "netstat", "-ltn"), ":7777")
	})
}

// testNetworksApart checks that containers don't reach other networks. It runs alone, as a
// Docker Engine 20.10 lets all networks reach each other for some milliseconds whenever it
// makes one.
func testNetworksApart(t *testing.T, b *fixture) {
	var on []runtime.Container
	for i := range 2 {
		name := fmt.Sprintf("%s-%d", b.name, i)
		must(t, b.rt.EnsureNetwork(b.ctx, runtime.Network{Name: name, Labels: b.labels}))
		on = append(on, b.onNetwork(t, name))
	}
	near := b.onNetwork(t, b.name+"-0")
	b.serve(t, on[0].ID, "echo hello")
	ask := "nc -w 1 " + on[0].IP + " 7777"
	if got := b.shell(t, near.ID, ask); !strings.Contains(got, "hello") {
		t.Errorf("from the same network: %q", got)
	}
	if got := b.shell(t, on[1].ID, ask); strings.Contains(got, "hello") {
		t.Errorf("from another network: %q", got)
	}
}

func testNetworkRefused(t *testing.T, b *fixture) {
	class(t, "no name", b.rt.EnsureNetwork(b.ctx, runtime.Network{Labels: b.labels}), errdefs.IsInvalidArgument, "InvalidArgument")
	if err := b.rt.RemoveNetwork(b.ctx, b.name+"-never"); err != nil {
		t.Errorf("remove one that never was: %v", err)
	}
	must(t, b.rt.EnsureNetwork(b.ctx, runtime.Network{Name: b.name + "-longer", Labels: b.labels}))
	if err := b.rt.RemoveNetwork(b.ctx, b.name); err != nil { // the start of one's name isn't one
		t.Error(err)
	}
	if left, err := b.rt.Networks(b.ctx, b.labels); err != nil || len(left) != 1 {
		t.Errorf("left %+v, %v", left, err)
	}
}

// testNetworkMany checks that no address is given twice, and that all come back.
func testNetworkMany(t *testing.T, b *fixture) {
	const n = 4
	must(t, b.rt.EnsureNetwork(b.ctx, runtime.Network{Name: b.name, Labels: b.labels}))
	for range 2 {
		cs := make([]runtime.Container, n)
		var wg sync.WaitGroup
		for i := range n {
			spec := b.spec()
			spec.Network = b.name
			wg.Go(func() {
				var err error
				if cs[i], err = b.rt.Create(b.ctx, spec); err != nil {
					t.Errorf("create: %v", err)
				}
			})
		}
		wg.Wait()
		byIP := make(map[string]string)
		for _, c := range cs {
			if other, taken := byIP[c.IP]; taken || c.IP == "" {
				t.Errorf("address %q of %s is %q's, too", c.IP, c.Name, other)
			}
			byIP[c.IP] = c.Name
			if got := b.inspect(t, c.ID).IP; got != c.IP {
				t.Errorf("inspected address %q, want %q", got, c.IP)
			}
		}
		for _, c := range cs {
			wg.Go(func() {
				if err := b.rt.Remove(b.ctx, c.ID); err != nil {
					t.Errorf("remove: %v", err)
				}
			})
		}
		wg.Wait()
	}
	if err := b.rt.RemoveNetwork(b.ctx, b.name); err != nil {
		t.Errorf("afterwards it is in use: %v", err)
	}
}
