package engineapi

import (
	"context"
	"strings"
	"testing"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/network"
	"github.com/docker/go-connections/nat"

	"github.com/bermhq/berm/policy"
)

// under has a door's policy be another from now on.
func (d *testDoor) under(rules, image string) {
	d.t.Helper()
	p := must(policy.Parse([]byte(rules), policy.Options{DefaultImage: image}))(d.t)
	d.opts.Policy = func() *policy.Policy { return p }
}

// TestTightenedPolicy makes a container under one policy and starts it under others.
func TestTightenedPolicy(t *testing.T) {
	host, direct := testEngine(t)
	dir := workDir(t)
	wide := "mounts: {allowed_roots: [" + dir + "], hold: auto}\nprofiles: {default: {memory_mb: 64, cap_add: [NET_ADMIN], engine_api: {ports: any, dns: \"on\", restart: [\"no\", always], sysctls: [net.ipv4.ip_forward], %}}}\n"
	with := func(key string) string { return basePolicy + strings.Replace(wide, "%", key, 1) }
	d := doorTo(t, host, with(""))
	sweepOwn(t, direct, d)
	c := d.client("tight")
	n := must(c.NetworkCreate(context.Background(), "tight-net", network.CreateOptions{Internal: true}))(t)
	ct := must(c.ContainerCreate(t.Context(), &container.Config{Image: testImage, Cmd: []string{"sleep", "600"}, ExposedPorts: nat.PortSet{"80/tcp": {}}}, &container.HostConfig{
		Binds: []string{dir + ":/a", "tight-vol:/v"}, Tmpfs: map[string]string{"/t": "size=32m"}, CapAdd: []string{"NET_ADMIN"}, NetworkMode: container.NetworkMode(n.ID),
		PortBindings: nat.PortMap{"80/tcp": {{}}}, DNS: []string{"192.0.2.53"}, Sysctls: map[string]string{"net.ipv4.ip_forward": "1"},
		RestartPolicy: container.RestartPolicy{Name: "always"},
	}, nil, nil, ""))(t)
	base := func(text string) string { return basePolicy + text }
	for name, tt := range map[string]struct{ rules, rule string }{
		"image":        {strings.Replace(with(""), "berm.local/*", "other/*", 1), "(rule images.allow)"},
		"no binds":     {base("profiles: {default: {host_path_mode: none, memory_mb: 64, cap_add: [NET_ADMIN]}}\n"), "(rule "},
		"elsewhere":    {strings.Replace(with(""), dir, "/srv", 1), "(rule mounts."},
		"capabilities": {strings.Replace(with(""), "cap_add: [NET_ADMIN], ", "", 1), "(rule containers.capabilities)"},
		"user":         {with("users: non_root"), "(rule containers.user)"},
		"a user":       {strings.Replace(with(""), "memory_mb: 64", "memory_mb: 64, user: \"1000\"", 1), "(rule verify.policy)"},
		"root":         {strings.Replace(with(""), "memory_mb: 64", "memory_mb: 64, read_only_rootfs: true, locked: [read_only_rootfs]", 1), "(rule verify.policy)"},
		"memory":       {strings.Replace(with(""), "memory_mb: 64", "memory_mb: 32, max_memory_mb: 32", 1), "(rule "},
		"ports":        {strings.Replace(with(""), "ports: any", "ports: loopback", 1), "(rule verify.policy)"},
		"volumes":      {with("volumes: \"off\""), "(rule mounts.volumes)"},
		"networks":     {with("networks: \"off\""), "(rule networks"},
		"tmpfs":        {with("tmpfs_mb: 16"), "(rule "},
		"restart":      {strings.Replace(with(""), "restart: [\"no\", always]", "restart: [\"no\"]", 1), "(rule containers.restart)"},
		"sysctls":      {strings.Replace(with(""), "sysctls: [net.ipv4.ip_forward], ", "", 1), "(rule "},
		"dns":          {strings.Replace(with(""), "dns: \"on\"", "dns: \"off\"", 1), "(rule "},
	} {
		t.Run(name, func(t *testing.T) {
			image := testImage
			if name == "image" { // the profile's own would be allowed
				image = "other/image:1"
			}
			d.under(tt.rules, image)
			if err := startIt(t, c, ct.ID); err == nil || !strings.Contains(err.Error(), tt.rule) || !strings.Contains(err.Error(), "denied by policy") {
				t.Errorf("got %v, want a denial with %q", err, tt.rule)
			}
		})
	}
	if inspect(t, direct, ct.ID).State.Running {
		t.Error("it runs")
	}
	// One that is as wide or wider doesn't stand in the way.
	for _, rules := range []string{with(""), strings.Replace(with("tmpfs_mb: 4096"), "memory_mb: 64", "memory_mb: 128", 1)} {
		d.under(rules, testImage)
		if err := restartIt(t, c, ct.ID); err != nil {
			t.Error(err)
		}
	}
}
