package engineapi

import (
	"bytes"
	"slices"
	"strings"
	"testing"

	"github.com/docker/docker/api/types/container"

	"github.com/bermhq/berm/runtime/runtimetest"
)

// TestSeccomp makes system calls in containers that this version made, and one before it.
func TestSeccomp(t *testing.T) {
	host, direct := testEngine(t)
	d := doorTo(t, host, "")
	left := sweepOwn(t, direct, d)
	c := d.client("seccomp")
	programs := map[string][]byte{"getpid": runtimetest.SyscallProgram(t, 39, 0, 0), "io_setup": runtimetest.SyscallProgram(t, 206, 1, 0)}
	code := func(name string, before bool, options ...string) int64 {
		t.Helper()
		if before {
			d.engine.host.Store(&engineHost{cpus: 1})
		}
		made, err := c.ContainerCreate(t.Context(), &container.Config{Image: testImage, Cmd: []string{"/" + name}}, &container.HostConfig{SecurityOpt: options}, nil, nil, "")
		if err != nil {
			t.Fatal(err)
		}
		d.engine.host.Store(nil)
		if err := direct.CopyToContainer(t.Context(), made.ID, "/", bytes.NewReader(tarOf(t, name, string(programs[name]))), container.CopyToContainerOptions{}); err != nil {
			t.Fatal(err)
		}
		shown, err := c.ContainerInspect(t.Context(), made.ID)
		if err != nil || !slices.Equal(shown.HostConfig.SecurityOpt, []string{noNewPrivileges}) {
			t.Errorf("inspect: %q, %v", shown.HostConfig.SecurityOpt, err)
		}
		if err := c.ContainerStart(t.Context(), made.ID, container.StartOptions{}); err != nil {
			t.Fatal(err)
		}
		ended, failed := direct.ContainerWait(t.Context(), made.ID, container.WaitConditionNotRunning)
		select {
		case end := <-ended:
			return end.StatusCode
		case err := <-failed:
			t.Fatal(err)
		}
		return 0
	}
	const eperm = 1
	if n := code("io_setup", false); n != eperm {
		t.Errorf("io_setup: error number %d, want EPERM", n)
	}
	if n := code("io_setup", false, "seccomp=builtin"); n != eperm {
		t.Errorf("io_setup with the built-in profile: error number %d, want EPERM", n)
	}
	if n := code("getpid", false); n == eperm {
		t.Error("getpid is refused, too: the programs prove nothing")
	}
	if n := code("io_setup", true); n == eperm {
		t.Error("a container of the version before refuses io_setup, so it isn't one")
	}
	left()
}

func TestOwnSeccomp(t *testing.T) {
	for options, want := range map[string]bool{
		"name=apparmor name=seccomp,profile=default": true, "name=seccomp,profile=builtin": true, "name=seccomp,profile=unconfined": true, "seccomp": true, "name=seccomp": true,
		"name=seccomp,profile=/etc/docker/seccomp.json": false, "name=apparmor": false, "": false,
	} {
		if got := ownSeccomp(strings.Fields(options)); got != want {
			t.Errorf("%q: %v", options, got)
		}
	}
}
