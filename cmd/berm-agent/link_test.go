package main

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/bermhq/berm/runtime/agent/wire"
)

func TestRedial(t *testing.T) {
	t.Parallel()
	s := newSandbox(t, 65534)
	k := s.accept()
	k.start(&wire.Start{ID: "x", Command: []string{"sleep", "1000"}})
	must(t, s.l.Close())
	k.hangUp()
	before := cpuTime(t, s.pid)
	time.Sleep(time.Second)
	if spent := cpuTime(t, s.pid) - before; spent > 100*time.Millisecond {
		t.Errorf("%s spent on a second of waiting", spent)
	}
	if _, err := os.Lstat(filepath.Join(s.dir, wire.Socket)); !os.IsNotExist(err) {
		t.Fatal(err)
	}
	s.listen()
	begun := time.Now()
	k = s.accept()
	if took := time.Since(begun); took > time.Second {
		t.Errorf("dialled after %s", took)
	}
	if info := k.ask(wire.OpProcess, "x").info; !info.Running {
		t.Errorf("%+v", info)
	}
	// One who drops what it takes isn't dialled without end.
	dropped := 0
	for until := time.Now().Add(2 * time.Second); time.Now().Before(until); dropped++ {
		s.accept().hangUp()
	}
	if dropped > 60 {
		t.Errorf("%d connections in 2 s", dropped)
	}
	if a := s.accept().run("y", "echo well"); a.stdout.String() != "well\n" {
		t.Errorf("%+v", a)
	}
}

// TestSameConnection checks that a connection is for one operation after another, until the last.
func TestSameConnection(t *testing.T) {
	t.Parallel()
	s := newSandbox(t, 65534)
	s.accept().start(&wire.Start{ID: "there", Command: []string{"sleep", "1000"}})
	for name, last := range map[string]*wire.Request{
		"upload":   fileRequest(wire.OpWrite, wire.File{}, "/no/such"),
		"follower": follow("follower-0", 0),
	} {
		k := s.accept()
		k.same = k.first
		for n := range 3 {
			if a := k.run(fmt.Sprint(name, n), "echo well"); a.stdout.String() != "well\n" {
				t.Errorf("%s: %+v", name, a)
			}
			k.start(&wire.Start{ID: fmt.Sprintf("%s-%d", name, n), Command: []string{"true"}})
			k.sure(fileRequest(wire.OpMkdir, wire.File{Parents: true}, "/tmp"))
			if a := k.ask(wire.OpKill, "nothing"); a.class() != wire.ClassNotFound {
				t.Errorf("%s: %+v", name, a)
			}
			if a := k.ask(wire.OpProcess, "there"); !a.info.Running {
				t.Errorf("%s: %+v", name, a)
			}
		}
		k.begin(last)
		if _, err := io.Copy(io.Discard, k.stream); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// cpuTime is what a process has used.
func cpuTime(t *testing.T, pid int) time.Duration {
	t.Helper()
	tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", pid))
	must(t, err)
	var sum time.Duration
	for _, path := range tasks {
		b, err := os.ReadFile(path)
		if err != nil {
			continue // it has ended
		}
		var ns int64
		if _, err := fmt.Sscan(string(b), &ns); err != nil {
			t.Fatal(err)
		}
		sum += time.Duration(ns)
	}
	return sum
}
