package engineapi

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/docker/docker/api/types/container"
	dockerfilters "github.com/docker/docker/api/types/filters"
	"github.com/docker/docker/api/types/mount"
	"github.com/docker/docker/client"

	"github.com/bermhq/berm/runtime/runtimetest/check"
)

const socketRules = basePolicy + `
profiles:
  default: {host_path_mode: none, max_memory_mb: 256, memory_mb: 64, engine_api: {docker_socket: "on", commit: "on"}}
  wide: {extends: default, memory_mb: 128, max_memory_mb: 512, engine_api: {docker_socket: "on"}}
  without: {extends: default, engine_api: {docker_socket: "off"}}
`

// from is the Docker client of a process in a running container.
func from(t *testing.T, direct *client.Client, id, path string) *client.Client {
	t.Helper()
	return newClient(t, fmt.Sprintf("unix:///proc/%d/root%s", inspect(t, direct, id).State.Pid, path))
}

// TestDockerSocket mounts a socket of Berm's for the engine's, in all forms that clients have.
func TestDockerSocket(t *testing.T) {
	d, direct := engineDoor(t, socketRules)
	c, other := d.client("mine"), d.client("other")
	d.socketFor("mine", "mine", "default")
	d.socketFor("other", "other", "default")
	foreign := makeOne(t, other, nil, "socket-foreign")
	const at = "/var/run/docker.sock"
	listener := filepath.Join(d.dir, "mine.sock")
	second := newClient(t, d.listenAs("second", Caller{Name: "mine", Tenant: "mine"}))
	for name, h := range map[string]*container.HostConfig{
		"short":          {Binds: []string{at + ":" + at}},
		"read-only":      {Binds: []string{"/run/docker.sock:" + at + ":ro,z"}},
		"cleaned":        {Binds: []string{"/var/run/../run/docker.sock:" + at}},
		"mount":          {Mounts: []mount.Mount{{Type: mount.TypeBind, Source: at, Target: at, BindOptions: &mount.BindOptions{CreateMountpoint: true}}}},
		"listener":       {Binds: []string{d.dir + "/./mine.sock:" + at}}, // as Testcontainers has it from DOCKER_HOST
		"listener mount": {Mounts: []mount.Mount{{Type: mount.TypeBind, Source: listener, Target: at}}},
	} {
		t.Run(name, func(t *testing.T) {
			id := makeOne(t, c, h, "")
			must(t, startIt(t, c, id))
			in := from(t, direct, id, at)
			list := check.Value(in.ContainerList(t.Context(), container.ListOptions{All: true}))(t)
			if !slices.ContainsFunc(list, func(ct container.Summary) bool { return ct.ID == id }) || slices.ContainsFunc(list, func(ct container.Summary) bool { return ct.ID == foreign }) {
				t.Errorf("it lists %+v", list)
			}
			if _, err := in.ContainerInspect(t.Context(), foreign); err == nil {
				t.Error("it sees another tenant's")
			}
			deniedBy(t, makeOneOr(t, in, &container.HostConfig{Privileged: true}), "containers.privileged")
			if mine := check.Value(c.ContainerInspect(t.Context(), id))(t); !strings.HasSuffix(mine.Mounts[0].Source, "run/docker.sock") && mine.Mounts[0].Source != listener {
				t.Errorf("shown: %+v", mine.Mounts)
			}
			if name != "short" && name != "listener" {
				return
			}
			must(t, restartIt(t, second, id)) // whose own path is another one
			must(t, direct.ContainerKill(t.Context(), id, "KILL"))
			must(t, d.StartContainer(t.Context(), id))
			heir := makeOne(t, second, &container.HostConfig{VolumesFrom: []string{id}}, "")
			must(t, startIt(t, second, heir))
			// What is made through it is its caller's, and may have one too.
			in = from(t, direct, id, at)
			sibling := makeOne(t, in, &container.HostConfig{Binds: []string{at + ":" + at}}, "")
			must(t, startIt(t, in, sibling))
			for _, id := range []string{id, heir, sibling} {
				check.Value(from(t, direct, id, at).Ping(t.Context()))(t)
				if got := inspect(t, direct, id).Config.Labels["berm.caller"]; got != "mine" {
					t.Errorf("its caller is %q", got)
				}
			}
			// Testcontainers' reaper removes by label what its client made.
			made := check.Value(c.ContainerCreate(t.Context(), &container.Config{Image: testImage, Labels: map[string]string{"session": name}}, nil, nil, nil, ""))(t)
			filter := dockerfilters.NewArgs(dockerfilters.Arg("label", "session="+name))
			list = check.Value(in.ContainerList(t.Context(), container.ListOptions{All: true, Filters: filter}))(t)
			if len(list) != 1 || list[0].ID != made.ID {
				t.Fatalf("it finds %+v", list)
			}
			must(t, in.ContainerRemove(t.Context(), made.ID, forced))
		})
	}
	log := string(readFile(t, d.audit))
	if !strings.Contains(log, `"caller":"mine","tenant":"mine","profile":"default","peer":"socket uid=0 pid=`) {
		t.Error("the audit log doesn't tell of the socket")
	}
}

// TestDockerSocketAttacks tries to get more by a socket than its own caller has.
func TestDockerSocketAttacks(t *testing.T) {
	d, direct := engineDoor(t, socketRules)
	wide := newClient(t, d.listen(Caller{Name: "wide", Tenant: "one", Profile: "wide"}))
	narrow := newClient(t, d.listen(Caller{Name: "narrow", Tenant: "one"}))
	without := newClient(t, d.listen(Caller{Name: "without", Tenant: "one", Profile: "without"}))
	audit := newClient(t, d.listen(Caller{Name: "audit", Tenant: "one", Audit: true}))
	for name, profile := range map[string]string{"wide": "wide", "narrow": "default", "audit": "default", "without": "without"} {
		d.socketFor(name, "one", profile)
	}
	bind := func(source string) *container.HostConfig {
		return &container.HostConfig{Binds: []string{source + ":/s"}}
	}
	for _, path := range d.mounted { // by their own paths
		deniedBy(t, makeOneOr(t, wide, bind(path)), "mounts.mode_none")
	}
	deniedBy(t, makeOneOr(t, wide, bind(filepath.Join(d.dir, "narrow.sock"))), "mounts.mode_none") // another listener's
	deniedBy(t, makeOneOr(t, without, bind(filepath.Join(d.dir, "without.sock"))), "mounts.always_refused")
	for _, source := range []string{"/run", "/var/run", "/run/docker.sock/..", "/run/docker.sock/x"} {
		if err := makeOneOr(t, wide, bind(source)); err == nil {
			t.Errorf("%s is mounted", source)
		}
	}
	deniedBy(t, makeOneOr(t, without, bind("/run/docker.sock")), "mounts.always_refused")

	// Another caller of the tenant with another profile doesn't get into the container.
	id := makeOne(t, wide, bind("/run/docker.sock"), "")
	must(t, startIt(t, narrow, id))
	for range 2 { // also from what is remembered
		_, execErr := narrow.ContainerExecCreate(t.Context(), id, container.ExecOptions{Cmd: []string{"true"}})
		_, _, copyErr := narrow.CopyFromContainer(t.Context(), id, "/etc")
		putErr := narrow.CopyToContainer(t.Context(), id, "/", strings.NewReader(strings.Repeat("\x00", 1024)), container.CopyToContainerOptions{})
		_, attachErr := narrow.ContainerAttach(t.Context(), id, container.AttachOptions{Stream: true, Stdin: true})
		made := check.Value(wide.ContainerExecCreate(t.Context(), id, container.ExecOptions{Cmd: []string{"true"}}))(t)
		startErr := narrow.ContainerExecStart(t.Context(), made.ID, container.ExecStartOptions{Detach: true})
		_, commitErr := narrow.ContainerCommit(t.Context(), id, container.CommitOptions{})
		for what, err := range map[string]error{"exec": execErr, "copy": copyErr, "put": putErr, "attach": attachErr, "start of an exec": startErr, "commit": commitErr} {
			if err == nil || !strings.Contains(err.Error(), "socket that serves as another caller") && !strings.Contains(err.Error(), "received 403") {
				t.Errorf("%s: %v", what, err)
			}
		}
		deniedBy(t, makeOneOr(t, narrow, &container.HostConfig{NetworkMode: container.NetworkMode("container:" + id)}), "networks.foreign")
	}
	// Nor by a container that sees its processes, in which every caller of the tenant may work.
	pidOf := func(id string) *container.HostConfig {
		return &container.HostConfig{PidMode: container.PidMode("container:" + id)}
	}
	deniedBy(t, makeOneOr(t, wide, pidOf(id)), "containers.namespaces")
	plain := makeOne(t, wide, nil, "")
	deniedBy(t, makeOneOr(t, narrow, &container.HostConfig{VolumesFrom: []string{id}}), "mounts.type")
	both := pidOf(plain)
	both.Binds = []string{"/run/docker.sock:/s"}
	deniedBy(t, makeOneOr(t, wide, both), "containers.namespaces")
	in := from(t, direct, id, "/s")
	sibling := makeOne(t, in, &container.HostConfig{Resources: container.Resources{Memory: 400 << 20}}, "")
	if got := inspect(t, direct, sibling).Config.Labels["berm.profile"]; got != "wide" {
		t.Errorf("profile %q", got)
	}

	// Mode audit isn't passed on to those who can enter the container.
	audited := makeOne(t, audit, bind("/var/run/docker.sock"), "")
	must(t, startIt(t, audit, audited))
	deniedBy(t, makeOneOr(t, from(t, direct, audited, "/s"), &container.HostConfig{Privileged: true}), "containers.privileged")

	// The policy turns it off: what is mounted already serves nobody.
	d.under(strings.ReplaceAll(socketRules, `docker_socket: "on"`, `docker_socket: "off"`), "")
	deniedBy(t, errOf(in.ContainerList(t.Context(), container.ListOptions{})), "operations.off")
	deniedBy(t, restartIt(t, wide, id), "mounts.always_refused")
	d.under(socketRules, "")

	// The caller isn't configured any more.
	mounted := d.mounted
	d.mounted = nil
	deniedBy(t, restartIt(t, wide, id), "mounts.docker_socket")
	deniedBy(t, makeOneOr(t, wide, bind("/run/docker.sock")), "mounts.docker_socket")
	d.opts.Pins, d.mounted = unheld{}, mounted
	deniedBy(t, makeOneOr(t, wide, bind("/run/docker.sock")), "mounts.docker_socket")
}
