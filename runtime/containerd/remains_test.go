package containerd

import (
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/runtimetest/engine"
)

const pretendVar = "CONTAINERD_TEST_PRETEND"

// pretendEnv also keeps the race detector from sleeping a second at the end.
var pretendEnv = []string{pretendVar + "=yes", "GORACE=atexit_sleep_ms=0"}

// A process that only pretends to be something takes any arguments.
func init() {
	if os.Getenv(pretendVar) != "" {
		_, _ = io.Copy(io.Discard, os.Stdin)
		os.Exit(0)
	}
}

// pretend runs a process with these arguments, the first its name, in a directory.
func pretend(t *testing.T, dir string, args ...string) *exec.Cmd {
	t.Helper()
	cmd := &exec.Cmd{Path: "/proc/self/exe", Args: args, Dir: dir, Env: pretendEnv}
	stdin, err := cmd.StdinPipe() // its end is the process's
	must(t, err)
	must(t, cmd.Start())
	t.Cleanup(func() { _ = stdin.Close(); _ = cmd.Wait() })
	return cmd
}

// remainsRuntime is of an engine that isn't there.
func remainsRuntime(t *testing.T) *Runtime {
	t.Helper()
	engine.Require(t, "containerd")
	name := fmt.Sprintf("berm-remains-%d", os.Getpid())
	return newRuntimeWith(t, Options{
		Address: filepath.Join(t.TempDir(), "containerd.sock"), Namespace: name, CgroupParent: "/" + name,
		Root: t.TempDir(), Agent: []byte("x"),
	})
}

func TestShims(t *testing.T) {
	r := remainsRuntime(t)
	ns, address, id := r.opts.Namespace, r.opts.Address, newID()
	const name = "/usr/bin/containerd-shim-runc-v2"
	for what, args := range map[string][]string{
		"another program":   {"containerd", "-namespace", ns, "-id", id, "-address", address},
		"another namespace": {name, "-namespace", ns + "x", "-id", id, "-address", address},
		"another engine":    {name, "-namespace", ns, "-id", id, "-address", address + "x"},
		"no id of ours":     {name, "-namespace", ns, "-id", "../" + id[3:], "-address", address},
		"a shift":           {name, "start", "-namespace", ns, "-id", id, "-address", address},
		"no argument":       {name},
	} {
		pretend(t, "/", args...)
		if got, err := r.remains.shims(); err != nil || len(got) > 0 {
			t.Fatalf("%s: %v, %v", what, got, err)
		}
	}
	// Not even in a container can a process be taken for one.
	inside := &exec.Cmd{
		Path: "/proc/self/exe", Args: []string{name, "-namespace", ns, "-id", id, "-address", address}, Env: pretendEnv,
		SysProcAttr: &unix.SysProcAttr{Cloneflags: unix.CLONE_NEWPID},
	}
	stdin, err := inside.StdinPipe()
	must(t, err)
	must(t, inside.Start())
	t.Cleanup(func() { _ = stdin.Close(); _ = inside.Wait() })
	if got, err := r.remains.shims(); err != nil || len(got) > 0 {
		t.Errorf("in a container: %v, %v", got, err)
	}

	bundle := t.TempDir()
	cmd := pretend(t, bundle, name, "-namespace", ns, "-id", id, "-address", address)
	got, err := r.remains.shims()
	if err != nil || len(got) != 1 || got[0].id != id || got[0].pid != cmd.Process.Pid || got[0].bundle != bundle {
		t.Fatalf("got %+v, %v, want pid %d in %s", got, err, cmd.Process.Pid, bundle)
	}
	// One that has the pid of a shim that is gone isn't killed in its place.
	former := got[0]
	former.start--
	must(t, r.remains.killShim(t.Context(), former))
	if still, err := r.remains.shims(); err != nil || len(still) != 1 {
		t.Fatalf("another process was killed: %v", err)
	}
	for range 2 {
		must(t, r.remains.killShim(t.Context(), got[0]))
	}
	if left, err := r.remains.shims(); err != nil || len(left) > 0 {
		t.Errorf("left: %v, %v", left, err)
	}
}

// shimSocket is where the shim of a container listens.
func shimSocket(r *Runtime, id string) string {
	return fmt.Sprintf("%s/%x", shimSockets, sha256.Sum256([]byte(r.opts.Address+"/"+r.opts.Namespace+"/"+id)))
}

func TestRemoveRemains(t *testing.T) {
	r := remainsRuntime(t)
	mine, other := newID(), newID()
	state := filepath.Join(t.TempDir(), "io.containerd.runtime.v2.task", r.opts.Namespace)
	hierarchies, err := filepath.Glob(filepath.Join(cgroupRoot, "*", "cgroup.procs"))
	must(t, err)
	procs := filepath.Join(cgroupRoot, "cgroup.procs")
	if _, err := os.Stat(procs); err == nil { // version 2: what was found are others' cgroups
		hierarchies = []string{procs}
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		for _, id := range []string{mine, other} {
			must(t, r.remains.remove(ctx, id))
		}
		_ = os.Remove(filepath.Join(runcRoot, r.opts.Namespace))
		for _, h := range hierarchies {
			_ = os.Remove(filepath.Join(filepath.Dir(h), r.opts.CgroupParent))
		}
	})
	victims := map[string]*exec.Cmd{}
	for _, id := range []string{mine, other} {
		rootfs := filepath.Join(state, id, "rootfs")
		must(t, os.MkdirAll(rootfs, 0o700))
		must(t, unix.Mount("none", rootfs, "tmpfs", 0, ""))
		must(t, os.MkdirAll(filepath.Join(runcRoot, r.opts.Namespace, id), 0o700))
		must(t, os.MkdirAll(shimSockets, 0o711))
		must(t, os.WriteFile(shimSocket(r, id), nil, 0o600))
		victims[id] = pretend(t, "/", "victim")
		for _, h := range hierarchies {
			own := filepath.Join(filepath.Dir(h), r.opts.CgroupParent, id)
			must(t, os.MkdirAll(filepath.Join(own, "child"), 0o755))
			if strings.Contains(h, "cpuset") {
				continue // nobody can enter it until it has been given processors
			}
			// The parent's would do in version 1, but not in 2.
			into := filepath.Join(own, "child", "cgroup.procs")
			must(t, os.WriteFile(into, fmt.Append(nil, victims[id].Process.Pid), 0))
			if id == mine && strings.Contains(h, "freezer") { // as that of a sandbox that is paused
				must(t, os.WriteFile(filepath.Join(own, "freezer.state"), []byte("FROZEN"), 0))
			}
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	if err := r.remains.remove(ctx, mine); err != nil {
		for _, h := range hierarchies { // or it would never end
			_ = os.WriteFile(filepath.Join(filepath.Dir(h), r.opts.CgroupParent, mine, "freezer.state"), []byte("THAWED"), 0)
		}
		t.Fatal(err)
	}
	err = victims[mine].Wait()
	if status, ok := victims[mine].ProcessState.Sys().(interface{ Signaled() bool }); !ok || !status.Signaled() {
		t.Errorf("the process ended with %v", err)
	}
	if err := victims[other].Process.Signal(unix.Signal(0)); err != nil {
		t.Errorf("another container's process: %v", err)
	}
	paths := func(id string) []string {
		out := []string{shimSocket(r, id), filepath.Join(state, id), filepath.Join(runcRoot, r.opts.Namespace, id)}
		for _, h := range hierarchies {
			out = append(out, filepath.Join(filepath.Dir(h), r.opts.CgroupParent, id))
		}
		return out
	}
	for _, path := range paths(mine) {
		if _, err := os.Lstat(path); !os.IsNotExist(err) {
			t.Errorf("%s is left: %v", path, err)
		}
	}
	for _, path := range paths(other) {
		if _, err := os.Lstat(path); err != nil {
			t.Errorf("another container's: %v", err)
		}
	}
	// Whoever finds nothing has nothing to do.
	must(t, r.remains.remove(t.Context(), mine))
}

// TestDeadShim kills a container's shim under the engine, which leaves its socket.
func TestDeadShim(t *testing.T) {
	c := shared.Get(t)
	r := newRuntime(t, c)
	made, err := r.Create(t.Context(), runtime.Spec{Name: "dead-shim", Image: testImage, Command: []string{"sleep", "100000"}})
	must(t, err)
	running, err := r.remains.shims()
	must(t, err)
	for _, s := range running {
		if s.id == made.ID {
			must(t, unix.Kill(s.pid, unix.SIGKILL))
		}
	}
	if err := await(t.Context(), func() (bool, error) { // the engine finds out by itself
		now, err := r.Inspect(t.Context(), made.ID)
		return now.State == runtime.StateExited, err
	}); err != nil {
		t.Fatal(err)
	}
	if left, err := c.Leftovers(t.Context(), c.Root()); err != nil || !slices.Contains(left, "socket "+shimSocket(r, made.ID)) {
		t.Errorf("the socket of a dead shim isn't told of: %q, %v", left, err)
	}
	must(t, r.Remove(t.Context(), made.ID))
	wantNothingLeft(t, c)
}
