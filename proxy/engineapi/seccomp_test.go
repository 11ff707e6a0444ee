package engineapi

import (
	"bytes"
	"slices"
	"testing"

	"github.com/bermhq/berm/proxy/engineapi/body"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/client"

	"github.com/bermhq/berm/runtime/runtimetest"
)

// TestSeccomp makes system calls in containers that this version made, and one before it.
func TestSeccomp(t *testing.T) {
	d, direct := engineDoor(t, "")
	c := d.client("seccomp")
	l := startLiar(t, d.host) // behind it Berm makes containers as the version before did
	l.set(func(l *liar) { l.change = put("SecurityOptions", []string{}) })
	older := doorTo(t, l.host, "")
	older.opts.Owner, older.opts.Sealer = d.opts.Owner, d.opts.Sealer
	makers := map[bool]*client.Client{false: c, true: older.client("seccomp")}
	programs := map[string][]byte{"getpid": runtimetest.SyscallProgram(t, 39, 0, 0), "io_setup": runtimetest.SyscallProgram(t, 206, 1, 0)}
	code := func(name string, before bool, options ...string) int64 {
		t.Helper()
		made := must(makers[before].ContainerCreate(t.Context(), &container.Config{Image: testImage, Cmd: []string{"/" + name}}, &container.HostConfig{SecurityOpt: options}, nil, nil, ""))(t)
		noError(t, direct.CopyToContainer(t.Context(), made.ID, "/", bytes.NewReader(tarOf(t, name, string(programs[name]))), container.CopyToContainerOptions{}))
		shown, err := c.ContainerInspect(t.Context(), made.ID)
		if err != nil || !slices.Equal(shown.HostConfig.SecurityOpt, []string{body.NoNewPrivileges}) {
			t.Errorf("inspect: %q, %v", shown.HostConfig.SecurityOpt, err)
		}
		noError(t, c.ContainerStart(t.Context(), made.ID, container.StartOptions{}))
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
	d.left()
}
