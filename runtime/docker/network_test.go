package docker

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/network"

	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/runtimetest"
)

// TestInternalNetworkLacksTheHost: what listens on all of the host's addresses is out of
// reach from an internal network, and not from another.
func TestInternalNetworkLacksTheHost(t *testing.T) {
	r, s := connected(t)
	server, err := s.ContainerCreate(t.Context(), &container.Config{Image: testImage, Cmd: []string{"nc", "-ll", "-p", "17778", "-e", "echo", "reached"}},
		&container.HostConfig{NetworkMode: "host"}, nil, nil, "lacks-host")
	must(t, err)
	t.Cleanup(func() {
		must(t, s.ContainerRemove(context.Background(), server.ID, container.RemoveOptions{Force: true}))
	})
	must(t, s.ContainerStart(t.Context(), server.ID, container.StartOptions{}))
	for _, internal := range []bool{false, true} { // so that the server is known to be there
		t.Run(fmt.Sprint("internal ", internal), func(t *testing.T) {
			name := fmt.Sprint("lacks-host-", internal)
			t.Cleanup(func() {
				must(t, r.RemoveNetwork(context.Background(), name))
			})
			must(t, r.EnsureNetwork(t.Context(), runtime.Network{Name: name, Internal: internal}))
			n, err := s.NetworkInspect(t.Context(), name, network.InspectOptions{})
			if err != nil || len(n.IPAM.Config) == 0 {
				t.Fatalf("%+v, %v", n, err)
			}
			c := sandbox(t, r, func(s *runtime.Spec) { s.Network = name })
			gateway, _, _ := strings.Cut(strings.Replace(n.IPAM.Config[0].Subnet, ".0/", ".1/", 1), "/")
			ask := "nc -w 2 " + gateway + " 17778"
			if !internal {
				ask = "for i in 1 2 3; do " + ask + " && break; sleep 1; done"
			}
			out, _, _ := runtimetest.Shell(t, r, c.ID, ask)
			if (strings.TrimSpace(out) == "reached") == internal {
				t.Errorf("internal %t: the host, at %s, says %q", internal, gateway, out)
			}
		})
	}
}

// TestSquattedNetwork: a network that has the name, and another driver or other options, isn't
// taken for the one that is asked for.
func TestSquattedNetwork(t *testing.T) {
	r, s := connected(t)
	bridge := func(options ...string) network.CreateOptions {
		o := network.CreateOptions{Driver: "bridge", Options: map[string]string{}}
		for _, name := range options {
			o.Options[name] = map[string]string{iccOption: "false", inhibitOption: "true"}[name]
		}
		return o
	}
	internal := func(o network.CreateOptions) network.CreateOptions { o.Internal = true; return o }
	for name, tt := range map[string]struct {
		there network.CreateOptions
		want  runtime.Network
		ok    bool
	}{
		"same":              {bridge(iccOption), runtime.Network{Isolated: true}, true},
		"not isolated":      {bridge(), runtime.Network{Isolated: true}, false},
		"isolated":          {bridge(iccOption), runtime.Network{}, false},
		"internal":          {internal(bridge(iccOption, inhibitOption)), runtime.Network{Isolated: true}, false},
		"open":              {bridge(iccOption), runtime.Network{Internal: true, Isolated: true}, false},
		"internal and host": {internal(bridge(iccOption)), runtime.Network{Internal: true, Isolated: true}, false},
		"external":          {bridge(), runtime.Network{Isolated: true, External: true}, true},
		"external and open": {bridge(), runtime.Network{Internal: true, External: true}, false},
	} {
		t.Run(name, func(t *testing.T) {
			made, err := s.NetworkCreate(t.Context(), "squatted", tt.there)
			must(t, err)
			t.Cleanup(func() {
				must(t, s.NetworkRemove(context.Background(), made.ID))
			})
			tt.want.Name = "squatted"
			err = r.EnsureNetwork(t.Context(), tt.want)
			if tt.ok && err != nil || !tt.ok && !errdefs.IsFailedPrecondition(err) {
				t.Errorf("EnsureNetwork: %v", err)
			}
		})
	}
	for name, n := range map[string]network.Summary{
		"host": {Driver: "host", Scope: "local"}, "macvlan": {Driver: "macvlan", Scope: "local"}, "overlay": {Driver: "overlay", Scope: "swarm"},
		"bridge of a swarm": {Driver: "bridge", Scope: "swarm"}, "IPv6": {Driver: "bridge", Scope: "local", EnableIPv6: true},
	} {
		if err := sameNetwork(n, runtime.Network{}); !errdefs.IsFailedPrecondition(err) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
