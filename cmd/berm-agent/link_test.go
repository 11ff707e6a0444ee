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

// leave starts a process, and stops following it once some of its output has come.
func leave(t *testing.T, s *sandbox, start *wire.Start) *outcome {
	t.Helper()
	k := s.accept()
	start.Follow = &wire.Follow{Lossless: true}
	a, ok := k.begin(&wire.Request{Op: wire.OpStart, Start: start})
	if !ok {
		t.Fatal(a.failure)
	}
	for a.seq == 0 && k.next(a) {
	}
	must(t, k.stream.Close())
	return a
}

// Nothing is lost that Berm has taken the connection's end for, whatever was on its way.
func TestBreakInMuchOutput(t *testing.T) {
	t.Parallel()
	s := newSandbox(t, 0)
	const lines = 400_000
	start := &wire.Start{ID: "x", Command: []string{"sh", "-c", fmt.Sprintf("seq %d; sleep 0.5", lines)}, KeepBytes: wire.MaxKeep}
	a := leave(t, s, start)
	k := s.accept()
	b := k.do(follow("x", a.seq))
	if b.failure != nil {
		t.Fatal(b.failure)
	}
	want, err := shell(fmt.Sprintf("seq %d", lines))
	must(t, err)
	if got := a.stdout.String() + b.stdout.String(); got != want {
		t.Errorf("%d bytes, want %d", len(got), len(want))
	}
	// Without a lossless follower the oldest makes room, and that can be told.
	start.ID, start.KeepBytes = "y", 1000
	leave(t, s, start)
	info := k.await("y")
	if info.NextSeq != int64(len(want)) || info.FirstSeq != info.NextSeq-1000 {
		t.Errorf("%+v", info)
	}
	if a := k.do(follow("y", -1)); a.stdout.String() != want[len(want)-1000:] {
		t.Errorf("%q", &a.stdout)
	}
	if a := k.do(follow("y", info.FirstSeq-1)); a.class() != wire.ClassOutOfRange {
		t.Errorf("%+v", a)
	}
}
