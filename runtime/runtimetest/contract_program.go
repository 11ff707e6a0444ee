package runtimetest

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/runtime"
)

// programCases are about a container's first process, and the agent in its place.
func programCases() []contractCase {
	return []contractCase{
		{"create/pid", testPid},
		{"create/agent and others in its way", testAgentInWay},
		{"create/agent and image command", testAgentImageCommand},
	}
}

func testPid(t *testing.T, b *fixture) {
	spec := b.spec()
	c := b.create(t, spec)
	pid := b.inspect(t, c.ID).Pid
	if pid <= 0 || c.Pid != pid {
		t.Fatalf("created with %d, inspected with %d", c.Pid, pid)
	}
	if b.Real {
		inside, err := os.Readlink("/proc/" + strconv.Itoa(pid) + "/ns/pid")
		must(t, err)
		if got := b.output(t, c.ID, "readlink", "/proc/self/ns/pid"); got != inside {
			t.Errorf("process %d is in %s, the container in %s", pid, inside, got)
		}
		status, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/status")
		if err != nil || !strings.Contains(strings.Join(strings.Fields(string(status)), " "), " NSpid: "+strconv.Itoa(pid)+" 1 ") {
			t.Errorf("process %d isn't the first: %s, %v", pid, status, err)
		}
	}
	spec = b.spec()
	spec.Command = []string{"true"}
	if c = b.create(t, spec); c.Pid == pid {
		t.Errorf("two containers have process %d", pid)
	}
	if got := b.awaitState(t, c.ID, runtime.StateExited).Pid; got != 0 {
		t.Errorf("after its end it has process %d", got)
	}
}

// agent returns an Agent whose directory has a file.
func (b *fixture) agent(t *testing.T) *runtime.Agent {
	t.Helper()
	dir := t.TempDir()
	must(t, os.WriteFile(filepath.Join(dir, "s"), []byte("hello\n"), 0o644))
	must(t, os.Chmod(dir, 0o755))
	return &runtime.Agent{Program: b.Agent, Dir: dir}
}

func testAgent(t *testing.T, b *fixture) {
	for _, readOnly := range []bool{true, false} {
		spec := b.spec()
		spec.Agent, spec.ReadOnlyRootfs, spec.User, spec.WorkingDir = b.agent(t), readOnly, "1000:1000", "/made/for it"
		c := b.create(t, spec)
		b.wantAgent(t, c.ID, "sleep 100000")
		if got := b.output(t, c.ID, "cat", runtime.AgentDir+"/s"); got != "hello" {
			t.Errorf("the directory has %q", got)
		}
		if got := b.output(t, c.ID, "readlink", "/proc/"+b.mainPid(t, c.ID)+"/cwd"); got != spec.WorkingDir {
			t.Errorf("the command is in %s", got)
		}
		for _, try := range []string{"echo x > " + runtime.AgentDir + "/s", "touch " + runtime.AgentDir + "/x", "rm " + runtime.AgentDir + "/s", "echo x > " + runtime.AgentProgram, "rm " + runtime.AgentProgram} {
			if _, _, code := b.run(t, c.ID, runtime.Exec{Command: []string{"sh", "-c", try}, User: "0:0"}); code == 0 {
				t.Errorf("%s: it was done", try)
			}
		}
		// The container sees a file that Berm adds later.
		path := filepath.Join(spec.Agent.Dir, "later")
		must(t, os.WriteFile(path, nil, 0o644))
		if got := b.shell(t, c.ID, "ls "+runtime.AgentDir); got != "later\ns" {
			t.Errorf("with a file more: %q", got)
		}
	}
}

// wantAgent checks that the first process is the agent, and its child the command.
func (b *fixture) wantAgent(t *testing.T, id, command string) {
	t.Helper()
	first := strings.ReplaceAll(b.output(t, id, "cat", "/proc/1/cmdline"), "\x00", " ")
	if !strings.HasPrefix(first, runtime.AgentProgram+" init ") || !strings.HasSuffix(strings.TrimSpace(first), " -- "+command) {
		t.Errorf("the first process is %q", first)
	}
	b.await(t, "the command to be its child", func() bool { return strings.Contains(b.output(t, id, "ps", "-o", "ppid,args"), "  1 "+command) })
}

func testAgentAlone(t *testing.T, b *fixture, id string) {
	b.wantAgent(t, id, "sleep 100000")
	if got := b.shell(t, id, "ls "+runtime.AgentDir); !strings.Contains(got, "No such file") {
		t.Errorf("%s: %s", runtime.AgentDir, got)
	}
}

func testAgentTmpfs(t *testing.T, b *fixture) {
	for _, readOnly := range []bool{true, false} {
		spec := b.spec()
		spec.Agent, spec.ReadOnlyRootfs = b.agent(t), readOnly
		spec.Tmpfs = []runtime.Tmpfs{{Target: "/run", SizeBytes: 1 << 20}, {Target: "/tmp", SizeBytes: 1 << 20}}
		c := b.create(t, spec)
		if got := b.shell(t, c.ID, "cat /run/berm/s; touch /run/x && ls /run; touch /run/berm/x 2>/dev/null || echo no"); got != "hello\nberm\nx\nno" {
			t.Errorf("in the container: %q", got)
		}
	}
}

func testAgentImageCommand(t *testing.T, b *fixture) {
	for _, readOnly := range []bool{true, false} {
		spec := b.spec()
		spec.Image, spec.Command, spec.Agent, spec.ReadOnlyRootfs = b.Configured, nil, b.agent(t), readOnly
		c := b.create(t, spec)
		if b.Real { // the image's volumes aren't in its way
			b.wantAgent(t, c.ID, "sleep 200000")
			script := "cat /run/berm/s && ! touch /run/berm/x 2>/dev/null && test -x /sbin/berm-init"
			if out, said, code := b.run(t, c.ID, runtime.Exec{Command: []string{"sh", "-c", script}, User: "0:0"}); out != "hello\n" || code != 0 {
				t.Errorf("read-only root %t: code %d, %q, %s", readOnly, code, out, said)
			}
		}
		if c.State != runtime.StateRunning {
			t.Errorf("%+v", c)
		}
	}
}

// testAgentInWay checks that Create refuses mounts that would hide the agent's places, or make
// them in a directory of the host's, and that it makes nothing there.
func testAgentInWay(t *testing.T, b *fixture) {
	source := t.TempDir()
	for _, target := range []string{"/run/berm", "/run/berm/", "/run/./berm/x", "/run", "/sbin", "/sbin/", "/sbin/berm-init", "/sbin/berm-init/x", "/"} {
		spec := b.spec()
		spec.Agent, spec.Mounts = b.agent(t), []runtime.Mount{{Source: source, Target: target}}
		_, err := b.rt.Create(b.ctx, spec)
		class(t, "a mount at "+target, err, errdefs.IsInvalidArgument, "InvalidArgument")
		if target == "/run" {
			continue
		}
		spec = b.spec()
		spec.Agent, spec.Tmpfs = b.agent(t), []runtime.Tmpfs{{Target: target, SizeBytes: 1 << 20}}
		_, err = b.rt.Create(b.ctx, spec)
		class(t, "a tmpfs at "+target, err, errdefs.IsInvalidArgument, "InvalidArgument")
	}
	spec := b.spec()
	spec.Agent = b.agent(t)
	for _, target := range []string{"/run/bermuda", "/sbin/berm-init-x", "/sbin2", "/workspace"} {
		spec.Mounts = append(spec.Mounts, runtime.Mount{Source: source, Target: target})
	}
	b.create(t, spec)
	for what, agent := range map[string]*runtime.Agent{"relative program": {Program: "agent"}, "relative directory": {Program: b.Agent, Dir: "dir"}} {
		spec := b.spec()
		spec.Agent = agent
		_, err := b.rt.Create(b.ctx, spec)
		class(t, what, err, errdefs.IsInvalidArgument, "InvalidArgument")
	}
	if b.Real {
		for what, agent := range map[string]*runtime.Agent{
			"missing program": {Program: source + "/none"}, "missing directory": {Program: b.Agent, Dir: source + "/none"},
		} {
			spec := b.spec()
			spec.Agent = agent
			_, err := b.rt.Create(b.ctx, spec)
			class(t, what, err, errdefs.IsInvalidArgument, "InvalidArgument")
		}
	}
	if entries, err := os.ReadDir(source); err != nil || len(entries) > 0 {
		t.Errorf("the host's directory has %v, %v", entries, err)
	}
	if cs := b.list(t); len(cs) != 1 {
		t.Errorf("%d containers are there", len(cs))
	}
}
