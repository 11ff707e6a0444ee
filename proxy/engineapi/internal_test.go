package engineapi

import (
	"strings"
	"testing"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/network"
)

// TestInternalNetworksLackTheHost: what listens on all of the host's addresses can't be
// reached from a caller's network without a way out, and another container can.
func TestInternalNetworksLackTheHost(t *testing.T) {
	d, direct := engineDoor(t, "")
	ctx, address := t.Context(), d.listen(Caller{Name: "inner", Tenant: "inner"})
	serve := []string{"sh", "-c", "mkdir -p /w; echo reached > /w/f; httpd -f -p 17777 -h /w"}
	listener := must(direct.ContainerCreate(ctx, &container.Config{Image: testImage, Cmd: serve}, &container.HostConfig{NetworkMode: "host"}, nil, nil, "inner-host"))(t)
	defer func() {
		if err := direct.ContainerRemove(t.Context(), listener.ID, container.RemoveOptions{Force: true}); err != nil {
			t.Error(err)
		}
	}()
	noError(t, direct.ContainerStart(ctx, listener.ID, container.StartOptions{}))
	docker := mustDocker(t, "/usr/bin/docker", address)
	docker("network", "create", "inner")
	docker(append([]string{"run", "-d", "--name", "inner-1", "--network", "inner", testImage}, serve...)...)
	docker("run", "-d", "--name", "inner-2", "--network", "inner", testImage, "sleep", "1000")
	fetch := func(tries, from string) string {
		return docker("exec", "inner-2", "sh", "-c", "for i in "+tries+"; do timeout 3 wget -q -O - http://"+from+":17777/f && break; sleep 1; done; true")
	}
	if got := fetch("1 2 3 4 5 6 7 8 9", "inner-1"); got != "reached" {
		t.Errorf("the other container says %q", got)
	}
	n, err := direct.NetworkInspect(ctx, "inner", network.InspectOptions{})
	if err != nil || len(n.IPAM.Config) != 1 {
		t.Fatalf("%+v, %v", n.IPAM, err)
	}
	gateway := n.IPAM.Config[0].Gateway
	if gateway == "" {
		gateway = strings.Replace(n.IPAM.Config[0].Subnet, ".0/", ".1/", 1)
		gateway, _, _ = strings.Cut(gateway, "/")
	}
	if got := fetch("1 2", gateway); got != "" {
		t.Errorf("the d.host, at %s, says %q", gateway, got)
	}
}
