package containerd

import (
	"context"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/runtimetest"
	"github.com/bermhq/berm/runtime/runtimetest/check"
	"github.com/bermhq/berm/runtime/runtimetest/engine"
)

// start starts a program.
func start(t *testing.T, r *Runtime, id string, command ...string) *stdio {
	t.Helper()
	s, err := r.Start(t.Context(), id, runtime.Program{Command: command})
	must(t, err)
	return s.(*stdio)
}

// echo checks that a cat is there.
func echo(t *testing.T, s io.ReadWriter) {
	t.Helper()
	if _, err := s.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(s, make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
}

// TestStartEngineKilled has the engine die while a program runs: the streams go on, and
// how the program ended is known once the engine is back.
func TestStartEngineKilled(t *testing.T) {
	c := engine.Own(t, "containerd", engine.StartContainerd, engine.Options{Image: testImage})
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	r := newRuntime(t, c)
	s := start(t, r, sandbox(t, r), "/bin/cat")
	echo(t, s)
	c.Kill()
	echo(t, s)
	must(t, c.Start(ctx))
	echo(t, s)
	awaitEngine(ctx, t, r)
	must(t, s.Close())
	if code, _, err := s.Wait(ctx); code != 0 || err != nil {
		t.Errorf("exit code %d, %v", code, err)
	}
}

// TestStartLeavesNothing checks that nothing of a program stays in the engine, its shim or
// the backend's files, however it ends.
func TestStartLeavesNothing(t *testing.T) {
	r := newRuntime(t, shared.Get(t))
	r.patience = 300 * time.Millisecond
	id := sandbox(t, r)
	s := shimOf(t, r, id)
	open := func() int {
		files, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", s.pid))
		must(t, err)
		return len(files)
	}
	use := func() {
		runtimetest.Shell(t, r, id, "exit 3")
		s := start(t, r, id, "/bin/cat")
		echo(t, s)
		_ = s.Close()
		_ = start(t, r, id, "/bin/sh", "-c", "sleep 1 & exec yes").Close()
		canceled, cancel := context.WithCancel(t.Context())
		cancel()
		for ctx, program := range map[context.Context]string{canceled: "/bin/cat", t.Context(): "/no/such"} {
			if _, err := r.Start(ctx, id, runtime.Program{Command: []string{program}}); err == nil {
				t.Errorf("%s was started", program)
			}
		}
		r.chores.await(t)
	}
	use()
	before := open()
	for range 2 {
		use()
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if err := await(ctx, func() (bool, error) { return open() <= before, nil }); err != nil {
		t.Fatalf("the shim has %d files open, %d before", open(), before)
	}
	left, err := os.ReadDir(r.root.path("containers", id, "exec"))
	if err != nil || len(left) != 0 {
		t.Errorf("left: %v, %v", left, err)
	}
}

// await waits until no chore is under way.
func (c *chores) await(t *testing.T) {
	t.Helper()
	c.mu.Lock()
	idle := c.idle
	c.mu.Unlock()
	select {
	case <-idle:
	case <-time.After(endPatience + endTimeout):
		t.Fatal("the engine doesn't forget the programs")
	}
}

// TestSlowShim has a shim answer nothing: containerd 1 then says that it doesn't know the
// container's state, which isn't that the container has ended.
func TestSlowShim(t *testing.T) {
	r := newRuntime(t, shared.Get(t))
	id := sandbox(t, r)
	s := shimOf(t, r, id)
	must(t, unix.Kill(s.pid, unix.SIGSTOP))
	defer func() { must(t, unix.Kill(s.pid, unix.SIGCONT)) }()
	check.Eventually(t, "all of the shim's threads have stopped", func() bool {
		threads := check.Value(os.ReadDir(fmt.Sprintf("/proc/%d/task", s.pid)))(t)
		return !slices.ContainsFunc(threads, func(thread os.DirEntry) bool {
			id := check.Value(strconv.Atoi(thread.Name()))(t)
			p, err := readProcess(id)
			return err != nil || p.state != 'T'
		})
	})
	if _, err := r.runningPid(r.namespaced(t.Context()), id); !errdefs.IsDeadlineExceeded(err) {
		t.Errorf("got %v, want a DeadlineExceeded", err)
	}
}

// shimOf finds a container's shim.
func shimOf(t *testing.T, r *Runtime, id string) shim {
	t.Helper()
	shims, err := r.remains.shims()
	i := slices.IndexFunc(shims, func(s shim) bool { return s.id == id })
	if i < 0 {
		t.Fatalf("the container has no shim: %v", err)
	}
	return shims[i]
}
