package docker

import (
	"testing"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/system"
	"github.com/google/go-cmp/cmp"

	"github.com/bermhq/berm/runtime"
)

func TestSurvey(t *testing.T) {
	t.Parallel()
	got := survey(system.Info{
		Driver: "overlay2", CgroupDriver: "systemd", LiveRestoreEnabled: true, MemoryLimit: true, PidsLimit: true,
		Runtimes:        map[string]system.RuntimeWithStatus{"runsc": {}, "runc": {}},
		SecurityOptions: []string{"name=seccomp,profile=default", "name=apparmor"},
	})
	want := runtime.Survey{
		Storage: "overlay2", CgroupDriver: "systemd", LiveRestore: true, Classes: []string{"runc", "runsc"},
		Security: []string{"apparmor", "seccomp"}, Unlimited: []string{"cpu", "swap"}, NoUserNS: noUserNS,
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
}

func TestHolders(t *testing.T) {
	t.Parallel()
	r := &Runtime{host: "unix:///srv/engine/docker.sock"}
	var containers []container.Summary
	for name, source := range map[string]string{
		"its socket": "/srv/engine/docker.sock", "around it": "/srv", "the usual one": "/var/run/docker.sock", "everything": "/",
		"beside it": "/srv/engine/docker", "below it": "/srv/engine/docker.sock/x", "a volume": "", "elsewhere": "/var/run/docker",
	} {
		containers = append(containers, container.Summary{ID: name, Names: []string{"/" + name}, Mounts: []container.MountPoint{{Source: "/data"}, {Source: source}}})
	}
	want := []runtime.Holder{{ID: "around it", Name: "around it"}, {ID: "everything", Name: "everything"}, {ID: "its socket", Name: "its socket"}, {ID: "the usual one", Name: "the usual one"}}
	if d := cmp.Diff(want, holders(r.host, containers)); d != "" {
		t.Error(d)
	}
}
