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
	host, direct := testEngine(t)
	d := doorTo(t, host, "")
	sweepOwn(t, direct, d)
	ctx, address := t.Context(), d.listen(Caller{Name: "inner", Tenant: "inner"})
	serve := []string{"sh", "-c", "mkdir -p /w; echo reached > /w/f; httpd -f -p 17777 -h /w"}
	listener, err := direct.ContainerCreate(ctx, &container.Config{Image: testImage, Cmd: serve}, &container.HostConfig{NetworkMode: "host"}, nil, nil, "inner-host")
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := direct.ContainerRemove(t.Context(), listener.ID, container.RemoveOptions{Force: true}); err != nil {
			t.Error(err)
		}
	}()
	if err := direct.ContainerStart(ctx, listener.ID, container.StartOptions{}); err != nil {
		t.Fatal(err)
	}
	docker := func(args ...string) string {
		t.Helper()
		out, errs, err := dockerCLI(t, "/usr/bin/docker", address, args...)
		if err != nil {
			t.Fatalf("docker %v: %v: %s", args, err, errs)
		}
		return strings.TrimSpace(out)
	}
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
		t.Errorf("the host, at %s, says %q", gateway, got)
	}
}
