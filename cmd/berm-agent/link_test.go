package main

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/runtime/agent/wire"
)

func TestLink(t *testing.T) {
	for user, uid := range users {
		t.Run(user, func(t *testing.T) {
			s := newSandbox(t, uid)
			k := s.accept()
			raw, err := k.conn.(*net.UnixConn).SyscallConn()
			if err != nil {
				t.Fatal(err)
			}
			var peer *unix.Ucred
			if ctlErr := raw.Control(func(fd uintptr) { peer, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) }); ctlErr != nil || err != nil {
				t.Fatal(ctlErr, err)
			}
			if int(peer.Pid) != s.pid || int(peer.Uid) != uid {
				t.Errorf("%+v dials, want process %d of user %d", peer, s.pid, uid)
			}
			if a := k.run("x", "id -u; pwd"); a.stdout.String() != fmt.Sprintf("%d\n/\n", uid) {
				t.Errorf("%q, %q", &a.stdout, &a.stderr)
			}
		})
	}
}

func TestRedial(t *testing.T) {
	s := newSandbox(t, 65534)
	k := s.accept()
	k.start(&wire.Start{ID: "x", Command: []string{"sleep", "1000"}})
	if err := s.l.Close(); err != nil {
		t.Fatal(err)
	}
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
	if err != nil {
		t.Fatal(err)
	}
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

// leave begins a run and closes its stream once some of its output has come.
func leave(t *testing.T, s *sandbox, start *wire.Start) *outcome {
	t.Helper()
	k := s.accept()
	a, ok := k.begin(&wire.Request{Op: wire.OpRun, Start: start})
	if !ok {
		t.Fatal(a.failure)
	}
	for a.seq == 0 && k.next(a) {
	}
	if err := k.stream.Close(); err != nil {
		t.Fatal(err)
	}
	return a
}

func TestAttachAfterABreak(t *testing.T) {
	s := newSandbox(t, 0)
	a := leave(t, s, &wire.Start{ID: "x", Label: "mine", Command: []string{"sh", "-c", "echo one; sleep 0.2; echo two >&2; sleep 0.2; read line; echo $line"}, Stdin: true})
	k := s.accept()
	b, ok := k.begin(&wire.Request{Op: wire.OpAttach, Process: &wire.Process{ID: "x", From: a.seq}})
	if !ok {
		t.Fatal(b.failure)
	}
	for b.stderr.Len() == 0 && k.next(b) {
	}
	if err := k.w.Send(wire.KindData, []byte("three\n")); err != nil {
		t.Fatal(err)
	}
	for k.next(b) {
	}
	if b.failure != nil || a.stdout.String() != "one\n" || b.stdout.String() != "three\n" || b.stderr.String() != "two\n" || b.info.NextSeq != 14 || b.info.Label != "mine" {
		t.Errorf("%+v, then %+v", a, b)
	}
	k.end()
	// It is kept, and its output can be had again, from any place.
	for from, want := range map[int64]string{0: "one\nthree\n", -1: "one\nthree\n", 2: "e\nthree\n", 9: "hree\n", 14: ""} {
		a := k.do(&wire.Request{Op: wire.OpAttach, Process: &wire.Process{ID: "x", From: from}})
		if a.failure != nil || a.stdout.String() != want || a.info.Running {
			t.Errorf("from %d: %+v", from, a)
		}
	}
}

// Nothing is lost that Berm has taken the connection's end for, whatever was on its way.
func TestBreakInMuchOutput(t *testing.T) {
	s := newSandbox(t, 0)
	const lines = 400_000
	start := &wire.Start{ID: "x", Command: []string{"sh", "-c", fmt.Sprintf("seq %d; sleep 0.5", lines)}, KeepBytes: maxKeep}
	a := leave(t, s, start)
	k := s.accept()
	b := k.do(&wire.Request{Op: wire.OpAttach, Process: &wire.Process{ID: "x", From: a.seq}})
	if b.failure != nil {
		t.Fatal(b.failure)
	}
	want, err := shell(fmt.Sprintf("seq %d", lines))
	if err != nil {
		t.Fatal(err)
	}
	if got := a.stdout.String() + b.stdout.String(); got != want {
		t.Errorf("%d bytes, want %d", len(got), len(want))
	}
	// Without an attachment the oldest makes room, and that can be told.
	start.ID, start.KeepBytes = "y", 1000
	leave(t, s, start)
	info := k.await("y")
	if info.NextSeq != int64(len(want)) || info.FirstSeq != info.NextSeq-1000 {
		t.Errorf("%+v", info)
	}
	if a := k.do(&wire.Request{Op: wire.OpAttach, Process: &wire.Process{ID: "y", From: -1}}); a.stdout.String() != want[len(want)-1000:] {
		t.Errorf("%q", &a.stdout)
	}
	if a := k.do(&wire.Request{Op: wire.OpAttach, Process: &wire.Process{ID: "y", From: info.FirstSeq - 1}}); a.class() != wire.ClassOutOfRange {
		t.Errorf("%+v", a)
	}
}

// Who asked last holds it, whose word to go comes first.
func TestTakeOverInTurn(t *testing.T) {
	s := newSandbox(t, 0)
	first, second := s.accept(), s.accept()
	first.start(&wire.Start{ID: "x", Command: []string{"cat"}, Stdin: true})
	attach := &wire.Request{Op: wire.OpAttach, Process: &wire.Process{ID: "x"}}
	a, _ := first.request(attach)
	b, _ := second.request(attach)
	second.tellToGo()
	if err := second.w.Send(wire.KindData, []byte("hello")); err != nil {
		t.Fatal(err)
	}
	for b.stdout.Len() < len("hello") && second.next(b) { // so it has begun
	}
	first.tellToGo()
	for first.next(a) {
	}
	if a.class() != wire.ClassAborted {
		t.Errorf("%+v", a)
	}
	second.end()
	for second.next(b) {
	}
	if b.failure != nil || b.stdout.String() != "hello" {
		t.Errorf("%+v", b)
	}
}

func TestTakeOver(t *testing.T) {
	s := newSandbox(t, 0)
	first, second := s.accept(), s.accept()
	a, ok := first.begin(&wire.Request{Op: wire.OpRun, Start: &wire.Start{ID: "x", Command: []string{"sh", "-c", "echo one; sleep 0.3; cat | wc -c"}, Stdin: true}})
	if !ok {
		t.Fatal(a.failure)
	}
	for a.seq == 0 && first.next(a) {
	}
	stop := make(chan struct{})
	go func() { // more than the process takes, so that somebody waits for it
		defer close(stop)
		for range 8 {
			if first.w.Send(wire.KindData, make([]byte, wire.MaxData)) != nil {
				return
			}
		}
	}()
	b, ok := second.begin(&wire.Request{Op: wire.OpAttach, Process: &wire.Process{ID: "x", From: -1}})
	if !ok {
		t.Fatal(b.failure)
	}
	for first.next(a) {
	}
	if a.class() != wire.ClassAborted {
		t.Errorf("%+v", a)
	}
	<-stop
	second.end()
	for second.next(b) {
	}
	if b.failure != nil || b.info.ExitCode != 0 || b.stdout.Len() < len("one\n0\n") {
		t.Errorf("%+v", b)
	}
	first.end()
	if a := first.run("y", "echo well"); a.stdout.String() != "well\n" {
		t.Errorf("%+v", a)
	}
	if info := first.ask(wire.OpProcess, "x").info; info.Running || info.ID != "x" {
		t.Errorf("it isn't kept: %+v", info)
	}
}

// Garbage ends its stream, or its session, and nothing else.
func TestGarbage(t *testing.T) {
	s := newSandbox(t, 0)
	for _, garbage := range []string{"GET / HTTP/1.1\r\n\r\n", "\x02\x00\x00\x00\x01{", "\x02\xff\xff\xff\xff", "\x04\x00\x00\x00\x00", "\x02\x00\x00\x00\x04null\x05\x00\x00\x00\x00"} {
		k := s.accept()
		if err := k.open(); err != nil {
			t.Fatal(err)
		}
		if _, err := k.stream.Write([]byte(garbage)); err != nil {
			t.Fatal(err)
		}
		if err := k.stream.Close(); err != nil {
			t.Fatal(err)
		}
		for err := error(nil); err == nil; _, _, err = k.r.Next() {
		}
		if a := s.accept().run("x", "echo well"); a.stdout.String() != "well\n" {
			t.Errorf("%+v", a)
		}
		k = s.accept()
		if _, err := k.conn.Write([]byte(garbage)); err != nil {
			t.Fatal(err)
		}
		await(t, "the session's end", func() bool { _, _ = k.conn.Write([]byte(garbage)); return k.mux.IsClosed() })
	}
	if a := s.accept().run("x", "echo well"); a.stdout.String() != "well\n" {
		t.Errorf("%+v", a)
	}
}
