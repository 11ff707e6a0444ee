package runtimetest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/runtime"
)

func killCases() []contractCase {
	var own, other []containerCase
	// Each makes processes that sleep for 70001 and 70003 seconds, and maybe more.
	for name, script := range map[string]string{
		"tree":            "sleep 70001 & (sleep 70002; true) & sleep 70003",
		"setsid":          "setsid sleep 70001 & setsid setsid sleep 70002 & sleep 70003",
		"double fork":     "(sleep 70001 &) ; (setsid sh -c 'sleep 70002; true' &) ; sleep 70003",
		"nohup":           "(trap '' HUP; exec sleep 70001) >/dev/null 2>&1 & sleep 70003",
		"signals ignored": "trap '' TERM INT HUP QUIT; sleep 70001 & sleep 70003",
		"shell is gone":   "setsid sleep 70001 >/dev/null 2>&1 </dev/null & exec sleep 70003",
		"stopped":         "sleep 70001 & usleep 300000; kill -STOP $!; sleep 70003",
		"emptied env":     "env -i sleep 70001 & sleep 70003",
		"keeps forking":   "f() { while true; do sleep 70001 & usleep 20000; done; }; f & sleep 70003",
	} {
		own = append(own, containerCase{name, func(t *testing.T, b *fixture, id string) { testCancelKills(t, b, id, "", script) }})
		other = append(other, containerCase{name, func(t *testing.T, b *fixture, id string) { testCancelKills(t, b, id, "1000:1000", script) }})
	}
	crowded := func(b *fixture) runtime.Spec {
		spec := b.spec()
		spec.PidsLimit = 200
		return spec
	}
	return []contractCase{
		inOne("exec/cancel kills", crowded, own...),
		inOne("exec/cancel kills of a user", crowded, other...),
		{"exec/directory can't be made", testExecDirectoryRefused},
		{"exec/out of memory", testExecOOM},
	}
}

// testCancelKills checks that all of a command's processes are gone, and none else.
func testCancelKills(t *testing.T, b *fixture, id, user, script string) {
	spared := make(chan error, 1)
	release := newSignalWriter("up")
	go func() {
		result, err := b.rt.Exec(b.ctx, id, runtime.Exec{
			Command: []string{"sh", "-c", "echo up; until test -e /tmp/release; do usleep 50000; done; exit 7"}, User: user, Stdout: release,
		})
		if err == nil && result.ExitCode != 7 {
			err = fmt.Errorf("exit code %d, want 7", result.ExitCode)
		}
		spared <- err
	}()
	<-release.seen

	ctx, cancel := context.WithCancel(b.ctx)
	defer cancel()
	failed := make(chan error, 1)
	go func() {
		_, err := b.rt.Exec(ctx, id, runtime.Exec{Command: []string{"sh", "-c", script}, User: user})
		failed <- err
	}()
	b.await(t, "the processes to start", func() bool {
		select {
		case err := <-failed:
			t.Fatalf("the command ended early: %v", err)
		default:
		}
		ps := strings.Split(b.output(t, id, "ps", "-o", "args"), "\n")
		return slices.Contains(ps, "sleep 70001") && slices.Contains(ps, "sleep 70003")
	})
	cancel()
	begun := time.Now()
	err := <-failed
	class(t, "the command", err, errdefs.IsCanceled, "Canceled")
	if errors.Is(err, runtime.ErrNotKilled) {
		t.Errorf("the command: %v", err)
	}
	if took := time.Since(begun); took > 8*time.Second {
		t.Errorf("the kill took %s", took)
	}
	if ps := b.output(t, id, "ps", "-o", "stat,args"); strings.Contains(ps, "7000") {
		t.Errorf("still there:\n%s", ps)
	}
	b.output(t, id, "touch", "/tmp/release")
	if err := <-spared; err != nil {
		t.Errorf("another command of the same user: %v", err)
	}
	b.output(t, id, "rm", "/tmp/release")
	if got := b.inspect(t, id).State; got != runtime.StateRunning {
		t.Errorf("the container is %s", got)
	}
}

func testExecSignals(t *testing.T, b *fixture, id string) {
	for signal, want := range map[string]int{"KILL": 137, "TERM": 143, "SEGV": 139} {
		got, err := b.rt.Exec(b.ctx, id, runtime.Exec{Command: []string{"sh", "-c", "kill -" + signal + " $$"}})
		if err != nil || got.ExitCode != want || got.OOMKilled {
			t.Errorf("%s: %+v, %v; want exit code %d", signal, got, err, want)
		}
	}
}

func testExecDescendant(t *testing.T, b *fixture, id string) {
	begun := time.Now()
	stdout, _, code := b.run(t, id, runtime.Exec{Command: []string{"sh", "-c", "sleep 60 & echo done; exit 5"}})
	if took := time.Since(begun); stdout != "done\n" || code != 5 || took > 4*time.Second {
		t.Errorf("stdout %q, exit code %d after %s", stdout, code, took)
	}
	if ps := b.output(t, id, "ps", "-o", "args"); !strings.Contains(ps, "sleep 60") {
		t.Errorf("a descendant of a command that ended by itself was killed:\n%s", ps)
	}
}

func testExecNotExecutable(t *testing.T, b *fixture, id string) {
	for _, program := range []string{"/etc/passwd", "/etc"} {
		if _, _, code := b.run(t, id, runtime.Exec{Command: []string{program}}); code != 126 && code != 127 {
			t.Errorf("%s ended with %d, want 126 or 127", program, code)
		}
	}
}

func testExecDirectoryRefused(t *testing.T, b *fixture) {
	spec := b.spec()
	spec.ReadOnlyRootfs = true
	c := b.create(t, spec)
	for _, dir := range []string{"/not/to/be/made", "/etc/passwd", "/etc/passwd/below"} {
		_, err := b.rt.Exec(b.ctx, c.ID, runtime.Exec{Command: []string{"true"}, WorkingDir: dir})
		class(t, dir, err, errdefs.IsInvalidArgument, "InvalidArgument")
	}
}

func testExecOOM(t *testing.T, b *fixture) {
	spec := b.spec()
	spec.MemoryBytes = 48 << 20
	c := b.create(t, spec)
	result, err := b.rt.Exec(b.ctx, c.ID, runtime.Exec{Command: eatMemory})
	if err != nil || result.ExitCode != 137 || !result.OOMKilled {
		t.Errorf("a command over the limit: %+v, %v", result, err)
	}
	if got := b.inspect(t, c.ID).State; got != runtime.StateRunning {
		t.Errorf("the container is %s", got)
	}
	if result, err := b.rt.Exec(b.ctx, c.ID, runtime.Exec{Command: []string{"true"}}); err != nil || result.ExitCode != 0 || result.OOMKilled {
		t.Errorf("a command afterwards: %+v, %v", result, err)
	}
}

// eatMemory wants a buffer of 300 MiB, and fills it.
var eatMemory = []string{"dd", "if=/dev/zero", "of=/dev/null", "bs=300M", "count=1"}

// eatMemoryLater is for a main process: what it does in its first moments, or its last,
// an engine may miss.
var eatMemoryLater = []string{"sh", "-c", "sleep 1; " + strings.Join(eatMemory, " ") + "; code=$?; sleep 1; exit $code"}
