package main

import (
	"fmt"
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
	if dropped > 30 {
		t.Errorf("%d connections in 2 s", dropped)
	}
	if a := s.accept().run("y", "echo well"); a.stdout.String() != "well\n" {
		t.Errorf("%+v", a)
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
