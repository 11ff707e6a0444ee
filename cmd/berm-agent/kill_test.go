package main

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/bermhq/berm/runtime/agent/wire"
)

// hiding are the ways a process gets away from who started it; all end in "sleep 4712".
var hiding = map[string]string{
	"plainly":           "sleep 4712",
	"in the background": "sleep 4712 & sleep 4712 & wait",
	"session":           "setsid -f sleep 4712; sleep 4712",
	"forked twice":      "( (setsid sleep 4712 &) & ); sleep 4712",
	"nohup":             "nohup setsid sleep 4712 >/dev/null 2>&1 </dev/null & sleep 4712",
	"no environment":    "env -i setsid -f /bin/sh -c '/bin/sleep 4712 & exec /bin/sleep 4712'; exec sleep 4712",
	"deaf":              "trap '' TERM INT HUP; (trap '' TERM; setsid -f sleep 4712); sleep 4712",
	"a crowd":           "i=0; while [ $i -lt 30 ]; do setsid -f sleep 4712; i=$((i + 1)); done; sleep 4712",
	"stopped":           "setsid -f sleep 4712; sleep 0.05; kill -STOP $$",
	"breeding":          "breed() { setsid -f sh -c 'sleep 0.01; sleep 4712'; sleep 0.005; }; while :; do breed; done",
}

func TestKill(t *testing.T) {
	for user, uid := range users {
		t.Run(user, func(t *testing.T) {
			t.Parallel()
			k := newSandbox(t, uid).accept()
			k.start(&wire.Start{ID: "bystander", Command: []string{"sleep", "4713"}})
			await(t, "the bystander", func() bool { return strings.Contains(k.inside(), "sleep 4713") })
			for name, script := range hiding {
				k.start(&wire.Start{ID: "x", Command: []string{"sh", "-c", script}})
				await(t, "its start", func() bool { return strings.Contains(k.inside(), "sleep 4712") })
				k.sure(&wire.Request{Op: wire.OpKill, Process: &wire.Process{ID: "x"}})
				if left := k.inside(); left != "sleep 4713 \n" {
					t.Errorf("%s: left:\n%s", name, left)
				}
				if info := k.await("x"); info.ExitCode != 137 || info.Signal != 9 || !info.Killed || info.OOMKilled || info.TimedOut {
					t.Errorf("%s: %+v", name, info)
				}
				k.sure(&wire.Request{Op: wire.OpForget, Process: &wire.Process{ID: "x"}})
			}
			if info := k.ask(wire.OpProcess, "bystander").info; !info.Running {
				t.Errorf("bystander: %+v", info)
			}
		})
	}
}

// A command is killed, with its tree, when nobody waits for it any more.
func TestCommandEndsWithItsStream(t *testing.T) {
	t.Parallel()
	s := newSandbox(t, 65534)
	k := s.accept()
	k.start(&wire.Start{ID: "bystander", Command: []string{"sleep", "4713"}})
	for name, script := range hiding {
		for _, all := range []bool{false, true} { // of the session
			if all && name != "session" {
				continue
			}
			k = s.accept()
			a, ok := k.begin(command(wire.Start{ID: "x", Command: []string{"sh", "-c", script}}))
			if !ok {
				t.Fatal(a.failure)
			}
			await(t, "its start", func() bool { return strings.Contains(k.beside().inside(), "sleep 4712") })
			if all {
				k.hangUp()
			} else if err := k.stream.Close(); err != nil {
				t.Fatal(err)
			}
			k = s.accept()
			await(t, "its end", func() bool { return k.ask(wire.OpProcess, "x").class() == wire.ClassNotFound })
			if left := k.inside(); left != "sleep 4713 \n" {
				t.Errorf("%s: left:\n%s", name, left)
			}
		}
	}
	if all := k.list(); len(all) != 1 || !all[0].Running {
		t.Errorf("%+v", all)
	}
}

func TestTimeout(t *testing.T) {
	t.Parallel()
	s := newSandbox(t, 65534)
	k := s.accept()
	for name, script := range hiding {
		t.Run(name, func(t *testing.T) {
			k.t = t
			begun := time.Now()
			a := k.do(command(wire.Start{ID: "x", Command: []string{"sh", "-c", script}, TimeoutMS: 200}))
			if took := time.Since(begun); took < 200*time.Millisecond || took > 10*time.Second {
				t.Errorf("it took %s", took)
			}
			if a.failure != nil || !a.info.TimedOut || a.info.NotKilled || a.info.Killed || a.info.ExitCode != 137 {
				t.Errorf("%+v", a)
			}
			if left := k.inside(); left != "" {
				t.Errorf("left:\n%s", left)
			}
		})
	}
	// Also when Berm is gone.
	k.t = t
	k.start(&wire.Start{ID: "alone", Command: []string{"sleep", "4712"}, TimeoutMS: 300})
	k.hangUp()
	k = s.accept()
	if info := k.await("alone"); !info.TimedOut || info.ExitCode != 137 {
		t.Errorf("%+v", info)
	}
}

// A sandbox can kill the supervisors. It gains nothing but a lie about itself.
func TestSupervisorKilled(t *testing.T) {
	for user, uid := range users {
		t.Run(user, func(t *testing.T) {
			t.Parallel()
			k := newSandbox(t, uid).accept()
			if a := k.run("daemon", "setsid -f sleep 4716 >/dev/null 2>&1"); a.failure != nil {
				t.Fatal(a.failure)
			}
			time.Sleep(20 * time.Millisecond) // the clock that tells what began when ticks in 10
			k.start(&wire.Start{ID: "x", Command: []string{"sh", "-c", "echo one; kill -KILL $PPID; setsid -f sleep 4715; sleep 4715"}})
			info := k.await("x")
			if info.ExitCode != 137 || info.Signal != 9 || info.Killed {
				t.Errorf("%+v", info)
			}
			k.start(&wire.Start{ID: "bystander", Command: []string{"sleep", "4713"}})
			await(t, "the bystander", func() bool { return strings.Contains(k.inside(), "sleep 4713") })
			k.sure(&wire.Request{Op: wire.OpKill, Process: &wire.Process{ID: "x"}})
			if left := k.inside(); !strings.Contains(left, "sleep 4716") || !strings.Contains(left, "sleep 4713") || strings.Contains(left, "4715") {
				t.Errorf("left:\n%s", left)
			}
			// All of them at once.
			a := k.run("y", "for p in $(grep -lx berm-exec /proc/[0-9]*/comm); do kill -KILL $(basename $(dirname $p)); done")
			if a.failure != nil || a.info.Signal != 9 || a.info.OOMKilled {
				t.Errorf("%+v", a)
			}
			if info := k.await("bystander"); info.Signal != 9 {
				t.Errorf("%+v", info)
			}
			if a := k.run("z", "echo well"); a.stdout.String() != "well\n" {
				t.Errorf("%+v", a)
			}
		})
	}
}

// Kill returns although a sandbox does what it can against it.
func TestKillIsBounded(t *testing.T) {
	t.Parallel()
	k := newSandbox(t, 0).accept()
	k.start(&wire.Start{ID: "saviour", Command: []string{"sh", "-c", "while :; do kill -CONT -1; done"}})
	k.start(&wire.Start{ID: "x", Command: []string{"sh", "-c", "while :; do setsid -f sleep 4712; sleep 0.001; done"}})
	begun := time.Now()
	a := k.ask(wire.OpKill, "x")
	took := time.Since(begun)
	t.Logf("%v after %s", a.failure, took)
	if took > killTimeout+5*time.Second || a.failure != nil && a.class() != wire.ClassNotKilled {
		t.Errorf("%v after %s", a.failure, took)
	}
}

// TestSignal signals a process that may not have a group yet.
func TestSignal(t *testing.T) {
	k, _ := serveStdio(t)
	k.start(&wire.Start{ID: "x", Command: []string{"sleep", "1000"}})
	k.sure(&wire.Request{Op: wire.OpSignal, Process: &wire.Process{ID: "x", Signal: 9}})
	if info := k.await("x"); info.ExitCode != 137 || info.Signal != 9 {
		t.Errorf("%+v", info)
	}
}

// A supervisor has no memory of its own to speak of, and next to no files.
func TestSupervisorIsSmall(t *testing.T) {
	k, cmd := serveStdio(t)
	for i := range 10 {
		k.start(&wire.Start{ID: fmt.Sprint("p", i), Command: []string{"sleep", "1000"}})
	}
	kids := children(cmd.Process.Pid)
	if len(kids) != 10 {
		t.Fatalf("children: %v", kids)
	}
	for _, pid := range kids {
		files, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
		must(t, err)
		threads, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
		must(t, err)
		if kib := anonymous(t, pid); len(files) != 1 || len(threads) != 1 || kib > 256 {
			t.Errorf("%d files, %d threads, %d KiB", len(files), len(threads), kib)
		} else if pid == kids[0] {
			t.Logf("%d KiB, most of it shared", kib)
		}
	}
}
