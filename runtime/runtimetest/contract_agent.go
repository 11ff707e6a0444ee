package runtimetest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/runtime"
)

// agentCases are about work inside a container.
func agentCases() []contractCase {
	return []contractCase{
		inOne("agent/process", (*fixture).spec,
			containerCase{"any", testProcess},
			containerCase{"that can't be", testProcessRefused},
			containerCase{"with input", testProcessInput},
			containerCase{"from a place on", testProcessFrom},
			containerCase{"followed from its start", testProcessFollowed},
			containerCase{"with many followers", testProcessFollowers},
			containerCase{"with a slow follower", testProcessSlow},
			containerCase{"with exclusive followers", testProcessExclusive},
		),
		inOne("agent/more of processes", (*fixture).spec,
			containerCase{"several writers", testProcessWriters},
			containerCase{"events", testEvents},
			containerCase{"signaled", testProcessSignaled},
			containerCase{"timeout", testProcessTimeout},
		),
		inOne("agent/files", (*fixture).spec,
			containerCase{"any", testFiles},
			containerCase{"in lists", testFileLists},
			containerCase{"watched", testFilesWatched},
			containerCase{"tar", testTar},
		),
	}
}

func (b *fixture) start(t *testing.T, id string, p runtime.Process) runtime.ProcessInfo {
	t.Helper()
	info, w, err := b.rt.Start(b.ctx, id, p)
	must(t, err)
	if w != nil {
		t.Error("a follower that nobody asked for")
	}
	return info
}

// follow follows a process without loss.
func (b *fixture) follow(t *testing.T, id, process string, from int64) runtime.Follower {
	t.Helper()
	return b.followAs(t, id, process, runtime.Follow{From: from, Lossless: true})
}

func (b *fixture) followAs(t *testing.T, id, process string, how runtime.Follow) runtime.Follower {
	t.Helper()
	w, err := b.rt.Follow(b.ctx, id, process, how)
	must(t, err)
	t.Cleanup(func() { _ = w.Close() })
	return w
}

func (b *fixture) input(t *testing.T, id, process string) runtime.Input {
	t.Helper()
	in, err := b.rt.Input(b.ctx, id, process)
	must(t, err)
	t.Cleanup(func() { _ = in.Close() })
	return in
}

// types gives a process input, and leaves it open.
func (b *fixture) types(t *testing.T, id, process, text string) {
	t.Helper()
	in := b.input(t, id, process)
	if n, err := io.WriteString(in, text); err != nil || n != len(text) {
		t.Fatalf("%d bytes, %v", n, err)
	}
	must(t, in.Close())
}

// rest is all output that is to come, that on stderr in brackets, and how it ends.
func rest(t *testing.T, a runtime.Follower) (string, runtime.ProcessInfo) {
	t.Helper()
	var out [2]strings.Builder
	for {
		chunk, err := a.Next()
		if errors.Is(err, io.EOF) {
			if out[1].Len() > 0 {
				out[0].WriteString("[" + out[1].String() + "]")
			}
			return out[0].String(), a.Info()
		}
		must(t, err)
		n := 0
		if chunk.Stderr {
			n = 1
		}
		out[n].Write(chunk.Data)
	}
}

// until reads output until it contains a text, and answers its last place.
func until(t *testing.T, a runtime.Follower, text string) int64 {
	t.Helper()
	var out []byte
	for {
		chunk, err := a.Next()
		if err != nil {
			t.Fatalf("after %q: %v", out, err)
		}
		if out = append(out, chunk.Data...); bytes.Contains(out, []byte(text)) {
			return chunk.Seq
		}
	}
}

func sh(id, script string) runtime.Process {
	return runtime.Process{ID: id, Command: []string{"sh", "-c", script}}
}

func testProcess(t *testing.T, b *fixture, id string) {
	p := sh("p", "echo out; echo err >&2; exit 3")
	p.Label = "a label"
	info := b.start(t, id, p)
	if info.ID != "p" || info.Label != p.Label || time.Since(info.StartedAt).Abs() > time.Minute {
		t.Errorf("started: %+v", info)
	}
	out, info := rest(t, b.follow(t, id, "p", 0))
	if out != "out\n[err\n]" || info.ExitCode != 3 || info.Running || info.EndedAt.IsZero() || info.NextSeq != 8 || info.Signal != 0 {
		t.Errorf("%q, %+v", out, info)
	}
	again, err := b.rt.Process(b.ctx, id, "p")
	if err != nil || again.ExitCode != 3 || again.Running || again.Label != p.Label || !slices.Equal(again.Command, p.Command) {
		t.Errorf("%+v, %v", again, err)
	}
	_, _, err = b.rt.Start(b.ctx, id, p)
	class(t, "an ID that is taken", err, errdefs.IsAlreadyExists, "AlreadyExists")
	b.start(t, id, sh("q", "sleep 1000"))
	list, err := b.rt.ListProcesses(b.ctx, id)
	if err != nil || len(list) != 2 || list[0].ID != "p" || list[1].ID != "q" || !list[1].Running {
		t.Errorf("%+v, %v", list, err)
	}
	class(t, "forget one that runs", b.rt.Forget(b.ctx, id, "q"), errdefs.IsFailedPrecondition, "FailedPrecondition")
	for range 2 {
		must(t, b.rt.Kill(b.ctx, id, "q"))
	}
	b.await(t, "the end of its output", func() bool {
		q, err := b.rt.Process(b.ctx, id, "q")
		return err != nil || !q.Running
	})
	if q, err := b.rt.Process(b.ctx, id, "q"); err != nil || !q.Killed || q.ExitCode != 137 {
		t.Errorf("killed: %+v, %v", q, err)
	}
	for _, process := range []string{"p", "q", "p"} {
		must(t, b.rt.Forget(b.ctx, id, process))
	}
	if list, err := b.rt.ListProcesses(b.ctx, id); err != nil || len(list) != 0 {
		t.Errorf("%+v, %v", list, err)
	}
	b.start(t, id, p) // the ID is free again
}

func testProcessRefused(t *testing.T, b *fixture, id string) {
	for name, p := range map[string]runtime.Process{
		"no ID": sh("", "true"), "odd ID": sh("a b", "true"), "long ID": sh(strings.Repeat("x", 129), "true"),
		"no command": {ID: "p"}, "relative directory": {ID: "p", Command: []string{"true"}, WorkingDir: "x"},
		"long label": {ID: "p", Command: []string{"true"}, Label: strings.Repeat("x", 1025)},
		"much kept":  {ID: "p", Command: []string{"true"}, KeepBytes: 4<<20 + 1},
	} {
		_, _, err := b.rt.Start(b.ctx, id, p)
		class(t, name, err, errdefs.IsInvalidArgument, "InvalidArgument")
	}
	b.start(t, id, runtime.Process{ID: "missing", Command: []string{"no-such-program"}})
	if _, info := rest(t, b.follow(t, id, "missing", 0)); info.ExitCode != 127 {
		t.Errorf("a program that isn't there: %+v", info)
	}
	for what, call := range map[string]func(id, process string) error{
		"look":   func(id, p string) error { _, err := b.rt.Process(b.ctx, id, p); return err },
		"follow": func(id, p string) error { _, err := b.rt.Follow(b.ctx, id, p, runtime.Follow{}); return err },
		"input":  func(id, p string) error { _, err := b.rt.Input(b.ctx, id, p); return err },
		"signal": func(id, p string) error { return b.rt.Signal(b.ctx, id, p, 15) },
		"kill":   func(id, p string) error { return b.rt.Kill(b.ctx, id, p) },
	} {
		class(t, what+" of none", call(id, "none"), errdefs.IsNotFound, "NotFound")
		class(t, what+" in none", call(noID, "p"), errdefs.IsNotFound, "NotFound")
	}
	class(t, "signal of one that has ended", b.rt.Signal(b.ctx, id, "missing", 15), errdefs.IsFailedPrecondition, "FailedPrecondition")
	_, err := b.rt.Input(b.ctx, id, "missing")
	class(t, "input of one that has ended", err, errdefs.IsFailedPrecondition, "FailedPrecondition")
	_, err = b.rt.Events(b.ctx, noID)
	class(t, "events in none", err, errdefs.IsNotFound, "NotFound")
}

func testProcessInput(t *testing.T, b *fixture, id string) {
	p := runtime.Process{ID: "p", Command: []string{"cat"}, Stdin: true}
	b.start(t, id, p)
	w := b.follow(t, id, "p", 0)
	b.types(t, id, "p", "first\n")
	seq := until(t, w, "first\n")
	must(t, w.Close())
	w = b.follow(t, id, "p", seq)
	in := b.input(t, id, "p")
	if _, err := io.WriteString(in, "second\n"); err != nil {
		t.Fatal(err)
	}
	must(t, in.CloseWrite())
	if out, info := rest(t, w); out != "second\n" || info.ExitCode != 0 || info.NextSeq != 13 {
		t.Errorf("%q, %+v", out, info)
	}
	_, err := in.Write([]byte("x"))
	class(t, "input after its end", err, errdefs.IsFailedPrecondition, "FailedPrecondition")
	// Without it there is none.
	p.ID, p.Stdin = "q", false
	b.start(t, id, p)
	if out, info := rest(t, b.follow(t, id, "q", 0)); out != "" || info.ExitCode != 0 {
		t.Errorf("%q, %+v", out, info)
	}
}

func testProcessFrom(t *testing.T, b *fixture, id string) {
	p := sh("p", "echo 0123456789; echo abcdefghi; exit 4")
	p.KeepBytes = 12
	b.start(t, id, p)
	b.await(t, "it to end", func() bool {
		info, err := b.rt.Process(b.ctx, id, "p")
		must(t, err)
		return !info.Running
	})
	for from, want := range map[int64]string{-1: "9\nabcdefghi\n", 9: "9\nabcdefghi\n", 11: "abcdefghi\n", 15: "efghi\n", 21: ""} {
		if out, info := rest(t, b.follow(t, id, "p", from)); out != want || info.ExitCode != 4 || info.FirstSeq != 9 || info.NextSeq != 21 {
			t.Errorf("from %d: %q, %+v", from, out, info)
		}
	}
	for _, from := range []int64{0, 8, 22, 1 << 40} {
		_, err := b.rt.Follow(b.ctx, id, "p", runtime.Follow{From: from})
		class(t, fmt.Sprintf("from %d", from), err, errdefs.IsOutOfRange, "OutOfRange")
	}
	_, err := b.rt.Follow(b.ctx, id, "p", runtime.Follow{From: -2})
	class(t, "from -2", err, errdefs.IsInvalidArgument, "InvalidArgument")
	// What was given to its end once isn't kept.
	p.ID, p.Once = "once", true
	_, w, err := b.rt.Start(b.ctx, id, func() runtime.Process { p.Follow = &runtime.Follow{Lossless: true}; return p }())
	must(t, err)
	if out, info := rest(t, w); out != "0123456789\nabcdefghi\n" || info.ExitCode != 4 {
		t.Errorf("once: %q, %+v", out, info)
	}
	b.await(t, "the output to be let go of", func() bool {
		info, err := b.rt.Process(b.ctx, id, "once")
		return err == nil && info.FirstSeq == info.NextSeq && info.NextSeq == 21
	})
}

func testProcessSignaled(t *testing.T, b *fixture, id string) {
	b.start(t, id, sh("p", "sleep 1000"))
	must(t, b.rt.Signal(b.ctx, id, "p", 15))
	if _, info := rest(t, b.follow(t, id, "p", 0)); info.ExitCode != 143 || info.Signal != 15 || info.Killed || info.TimedOut {
		t.Errorf("%+v", info)
	}
	if !b.Real {
		return
	}
	class(t, "signal one that has ended", b.rt.Signal(b.ctx, id, "p", 15), errdefs.IsFailedPrecondition, "FailedPrecondition")
	// All of its group get it, also while its input is full.
	p := sh("q", `(trap '' HUP; exec sleep 70004) & trap 'echo hup' HUP; trap 'echo term; exit 5' TERM; echo ready; while :; do sleep 0.1; done`)
	p.Stdin = true
	b.start(t, id, p)
	a, in := b.follow(t, id, "q", 0), b.input(t, id, "q")
	until(t, a, "ready\n")
	written := make(chan struct{})
	go func() {
		defer close(written)
		_, _ = in.Write(make([]byte, 1<<20)) // taken or not
	}()
	select {
	case <-written:
		t.Error("the input isn't full")
	case <-time.After(300 * time.Millisecond):
	}
	for _, signal := range []int{1, 15} {
		must(t, b.rt.Signal(b.ctx, id, "q", signal))
		if signal == 1 {
			until(t, a, "hup\n")
		}
	}
	if out, info := rest(t, a); !strings.HasPrefix(out, "term\n") || info.ExitCode != 5 || info.Signal != 0 {
		t.Errorf("%q, %+v", out, info)
	}
	<-written
	b.await(t, "its child to end", func() bool { return !strings.Contains(b.output(t, id, "ps", "-o", "args"), "70004") })
}

// unreached is of a container whose program isn't reached by a socket.
func (b *fixture) unreached() runtime.Spec {
	spec := b.spec()
	spec.Agent = &runtime.Agent{Program: b.Agent}
	return spec
}

func testProcessTimeout(t *testing.T, b *fixture, id string) {
	p := sh("p", "sleep 1000")
	p.Timeout = 300 * time.Millisecond
	b.start(t, id, p)
	if _, info := rest(t, b.follow(t, id, "p", 0)); info.ExitCode != 137 || !info.TimedOut || info.NotKilled {
		t.Errorf("%+v", info)
	}
}

// testProcessKilled kills the same trees as testCancelKills, one of them by a timeout.
func testProcessKilled(t *testing.T, b *fixture, id string) {
	b.start(t, id, sh("spared", "sleep 60000"))
	for name, script := range map[string]string{ // by the IDs
		"setsid":      "setsid sleep 70001 & setsid setsid sleep 70002 & sleep 70003",
		"double-fork": "(sleep 70001 &) ; (setsid sh -c 'sleep 70002; true' &) ; sleep 70003",
		"timeout":     "env -i setsid sleep 70001 & sleep 70003",
	} {
		p := sh(name, script)
		if name == "timeout" {
			p.Timeout = time.Second
		}
		b.start(t, id, p)
		b.await(t, "the processes to start", func() bool {
			ps := b.output(t, id, "ps", "-o", "args")
			return strings.Contains(ps, "sleep 70001") && strings.Contains(ps, "sleep 70003")
		})
		if name != "timeout" {
			must(t, b.rt.Kill(b.ctx, id, name))
		}
		if _, info := rest(t, b.follow(t, id, name, 0)); info.TimedOut != (name == "timeout") || info.Killed == info.TimedOut || info.NotKilled {
			t.Errorf("%s: %+v", name, info)
		}
		if ps := b.output(t, id, "ps", "-o", "stat,args"); strings.Contains(ps, "7000") || !strings.Contains(ps, "60000") {
			t.Errorf("%s:\n%s", name, ps)
		}
	}
}

func testProcessTerminal(t *testing.T, b *fixture, id string) {
	p := sh("p", "test -t 0 && test -t 1 && test -t 2 && stty size; read x; stty size; echo $x >&2; exit 6")
	p.TTY, p.Stdin, p.Rows, p.Cols = true, true, 30, 100
	b.start(t, id, p)
	a := b.follow(t, id, "p", 0)
	until(t, a, "30 100")
	must(t, b.rt.Resize(b.ctx, id, "p", 40, 120))
	b.types(t, id, "p", "typed\n")
	if out, info := rest(t, a); !strings.HasSuffix(out, "40 120\r\ntyped\r\n") || info.ExitCode != 6 || !info.TTY {
		t.Errorf("%q, %+v", out, info)
	}
	b.start(t, id, sh("q", "sleep 1000"))
	class(t, "resize without a terminal", b.rt.Resize(b.ctx, id, "q", 1, 1), errdefs.IsFailedPrecondition, "FailedPrecondition")
}

// testProcessOutlives has a second client find what a first one started, but for what that
// was waiting for.
func testProcessOutlives(t *testing.T, b *fixture) {
	dir := t.TempDir()
	first := b.Reopen(t, dir)
	c, err := first.Create(b.ctx, b.spec())
	must(t, err)
	p := sh("p", "echo before; read x; echo after; exit 5")
	p.Stdin, p.Label = true, "kept"
	p.Follow = &runtime.Follow{Lossless: true, Exclusive: true}
	_, a, err := first.Start(b.ctx, c.ID, p)
	must(t, err)
	events, err := first.Events(b.ctx, c.ID)
	must(t, err)
	if got := told(t, events); len(got) != 1 {
		t.Errorf("%+v", got)
	}
	seq := until(t, a, "before\n")
	left := make(chan error, 1)
	up := newSignalWriter("up")
	go func() {
		_, err := first.Exec(b.ctx, c.ID, runtime.Exec{Command: []string{"sh", "-c", "setsid sleep 70001 & echo up; sleep 70003"}, Stdout: up})
		left <- err
	}()
	<-up.seen
	must(t, first.(io.Closer).Close())
	if chunk, err := a.Next(); err == nil {
		t.Errorf("after the client was closed: %+v", chunk)
	}
	if got, err := events.Next(); err == nil {
		t.Errorf("after the client was closed: %+v", got)
	}
	_, _ = a.Close(), events.Close()

	if err := <-left; err == nil {
		t.Error("a command ended well when its client was closed")
	}

	second := b.Reopen(t, dir)
	in := second
	b.await(t, "the command to be killed", func() bool {
		var ps bytes.Buffer
		if _, err := second.Exec(b.ctx, c.ID, runtime.Exec{Command: []string{"ps", "-o", "args"}, Stdout: &ps}); err != nil {
			t.Fatal(err)
		}
		return !strings.Contains(ps.String(), "sleep 7000")
	})
	if info, err := in.Process(b.ctx, c.ID, "p"); err != nil || !info.Running || info.Label != "kept" {
		t.Errorf("%+v, %v", info, err)
	}
	if events, err = in.Events(b.ctx, c.ID); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = events.Close() })
	if got := told(t, events); len(got) != 1 || got[0].ID != "p" || !got[0].Running {
		t.Errorf("%+v", got)
	}
	// That of the one before is gone with its connection, or soon.
	b.await(t, "room for an exclusive follower", func() bool {
		a, err = in.Follow(b.ctx, c.ID, "p", runtime.Follow{From: seq, Exclusive: true})
		if err != nil && !errdefs.IsAlreadyExists(err) {
			t.Fatal(err)
		}
		return err == nil
	})
	t.Cleanup(func() { _ = a.Close() })
	input, err := in.Input(b.ctx, c.ID, "p")
	must(t, err)
	if _, err := io.WriteString(input, "go on\n"); err != nil {
		t.Error(err)
	}
	if out, info := rest(t, a); out != "after\n" || info.ExitCode != 5 {
		t.Errorf("%q, %+v", out, info)
	}
	if got := told(t, events); len(got) != 1 || got[0].Running || got[0].ExitCode != 5 {
		t.Errorf("%+v", got)
	}
	res, err := second.Exec(b.ctx, c.ID, runtime.Exec{Command: []string{"true"}})
	if err != nil || res.ExitCode != 0 {
		t.Errorf("%+v, %v", res, err)
	}
}

// testExecUser runs commands as others than the container's user.
func testExecUser(t *testing.T, b *fixture) {
	for own, users := range map[string]map[string]string{
		"":          {"": "0:0", "0:0": "0:0", "1000:1000": "1000:1000", "root": "0:0"},
		"1000:1000": {"": "1000:1000", "1000:1000": "1000:1000", "0:0": "0:0", "1000:0": "1000:0"},
	} {
		spec := b.spec()
		spec.User = own
		c := b.create(t, spec)
		for user, want := range users {
			if out, _, _ := b.run(t, c.ID, runtime.Exec{Command: []string{"sh", "-c", "echo $(id -u):$(id -g)"}, User: user}); out != want+"\n" {
				t.Errorf("as %q in a container of %q: %q; want %s", user, own, out, want)
			}
		}
		res, err := b.rt.Exec(b.ctx, c.ID, runtime.Exec{Command: []string{"sh", "-c", "i=0; while test $i -lt 20000; do i=$((i+1)); done"}})
		if err != nil || res.CPUTime <= 0 || res.CPUTime > time.Minute || res.PeakMemoryBytes < 1<<10 {
			t.Errorf("%+v, %v", res, err)
		}
	}
}

// testProcessUser has a process of another user beside one of the container's own.
func testProcessUser(t *testing.T, b *fixture, id string) {
	p := sh("other", "id -u; setsid sleep 70001 & sleep 70003")
	p.User = "1000:1000"
	b.start(t, id, p)
	b.start(t, id, sh("own", "sleep 70005"))
	p.User = "1001"
	if _, _, err := b.rt.Start(b.ctx, id, p); !errdefs.IsAlreadyExists(err) {
		t.Errorf("of one ID: %v", err)
	}
	list, err := b.rt.ListProcesses(b.ctx, id)
	if err != nil || len(list) != 2 {
		t.Errorf("%+v, %v", list, err)
	}
	a := b.follow(t, id, "other", 0)
	until(t, a, "1000\n")
	b.await(t, "all to start", func() bool { return strings.Count(b.output(t, id, "ps", "-o", "args"), "\nsleep 7000") == 3 })
	must(t, b.rt.Kill(b.ctx, id, "other"))
	if ps := b.output(t, id, "ps", "-o", "args"); strings.Contains(ps, "sleep 70001") || strings.Contains(ps, "sleep 70003") || !strings.Contains(ps, "sleep 70005") {
		t.Errorf("still there, or gone:\n%s", ps)
	}
	must(t, b.rt.Forget(b.ctx, id, "other"))
}

// testServeStopped: where a container stops the program that serves another user, or kills
// it, all of the command is killed all the same, and soon.
func testServeStopped(t *testing.T, b *fixture, id string) {
	for _, signal := range []string{"STOP", "KILL"} {
		begun := time.Now()
		_, err := b.rt.Exec(b.ctx, id, runtime.Exec{User: "1000:1000", Command: []string{
			"sh", "-c", "setsid sleep 70001 & for p in $(pidof berm-init); do kill -" + signal + " $p; done; sleep 70003",
		}})
		if !errors.Is(err, runtime.ErrInterrupted) || errors.Is(err, runtime.ErrNotKilled) {
			t.Errorf("%s: %v", signal, err)
		}
		if took := time.Since(begun); took > 20*time.Second {
			t.Errorf("%s: it took %s", signal, took)
		}
		if ps := b.output(t, id, "ps", "-o", "args"); strings.Contains(ps, "7000") {
			t.Errorf("%s: still there:\n%s", signal, ps)
		}
		if out, _, _ := b.run(t, id, runtime.Exec{Command: []string{"echo", "well"}, User: "1000:1000"}); out != "well\n" {
			t.Errorf("%s: the next says %q", signal, out)
		}
	}
}

// testServePaused: a pause at any moment of a program's start holds up neither it nor others.
// Each user has a program of its own.
func testServePaused(t *testing.T, b *fixture, id string) {
	for uid := range 8 {
		delay, command := time.Duration(uid)*20*time.Millisecond, runtime.Exec{Command: []string{"true"}, User: fmt.Sprint(2000 + uid)}
		ended := make(chan error, 1)
		go func() {
			_, err := b.rt.Exec(b.ctx, id, command)
			ended <- err
		}()
		time.Sleep(delay)
		must(t, b.pauseAndResume(b.ctx, id))
		select {
		case err := <-ended:
			if err != nil && !errdefs.IsFailedPrecondition(err) {
				t.Errorf("paused after %s: %v", delay, err)
			}
		case <-time.After(30 * time.Second):
			t.Fatalf("paused after %s: it doesn't end", delay)
		}
		b.await(t, "the engine to know that the pause is over", func() bool { // dockerd 20.10 hears of the pause late
			_, err := b.rt.Exec(b.ctx, id, command)
			if err != nil && !errdefs.IsFailedPrecondition(err) {
				t.Errorf("paused after %s: the next: %v", delay, err)
			}
			return !errdefs.IsFailedPrecondition(err)
		})
	}
}

// testExecAlike: what a command is and may be doesn't depend on the carrier. A name for the
// user has the engine start a program.
func testExecAlike(t *testing.T, b *fixture) {
	for _, user := range []struct{ own, name string }{{"", "root"}, {"65534:65534", "nobody"}} {
		spec := b.spec()
		spec.User, spec.ReadOnlyRootfs, spec.Env, spec.CapAdd = user.own, true, []string{"A=container"}, []string{"CAP_NET_BIND_SERVICE"}
		spec.Tmpfs = []runtime.Tmpfs{{Target: "/tmp", SizeBytes: 1 << 20}}
		spec.PidsLimit, spec.WorkingDir = 50, "/tmp"
		c := b.create(t, spec)
		for name, tt := range map[string]struct {
			command []string
			varies  string // in what is printed
		}{
			// Signals from 32 on, which a C library keeps for itself, are as the engine was started with.
			"status": {[]string{"grep", "-vE", "^(Pid|Tgid|Ngid|PPid|NSpid|NStgid|NSpgid|NSsid|Vm.*|Rss.*|Hugetlb.*|.*ctxt_switches|State|Threads|Name|SigQ|.*_allowed.*|FDSize|.*thp.*|.*THP.*):", "/proc/self/status"}, `(?m)^SigIgn:\t[0-9a-f]{9}`},
			// Some versions of runc leave the limit of open files as they have it themselves.
			"limits": {[]string{"cat", "/proc/self/limits"}, `(?m)^Max open files +[0-9]+ +`},
			"cgroup": {[]string{"cat", "/proc/self/cgroup"}, ""},
			"mounts": {[]string{"cat", "/proc/self/mountinfo"}, ""},
			"spaces": {[]string{"sh", "-c", "for n in cgroup ipc mnt net pid uts user; do readlink /proc/self/ns/$n; done"}, ""},
			"files":  {[]string{"sh", "-c", "ls /proc/$$/fd; readlink /proc/$$/root; pwd"}, ""},
			"env":    {[]string{"sh", "-c", "tr '\\0' '\\n' </proc/$$/environ | sort"}, ""},
			"oom":    {[]string{"cat", "/proc/self/oom_score_adj"}, ""},
			"nice":   {[]string{"sh", "-c", "cut -d' ' -f18,19,40,41 /proc/self/stat"}, ""},
			"id":     {[]string{"id"}, ""},
		} {
			got := map[string]string{}
			for _, as := range []string{"", user.name} {
				var out bytes.Buffer
				res, err := b.rt.Exec(b.ctx, c.ID, runtime.Exec{Command: tt.command, User: as, Stdout: &out, Stderr: &out, Env: []string{"B=command"}})
				if err != nil || res.ExitCode != 0 {
					t.Errorf("%s as %q: %+v, %v, %s", name, as, res, err, &out)
				}
				text := out.String()
				if tt.varies != "" {
					text = regexp.MustCompile(tt.varies).ReplaceAllString(text, "")
				}
				got[as] = text
			}
			if got[""] != got[user.name] {
				t.Errorf("%s of %s:\n%s\nand by the engine:\n%s", name, user.name, got[""], got[user.name])
			}
		}
	}
}

// testImpostor: of those in a container that say they are its program, only its first
// process is heard. The impostor is the same program; what it ran would have it above.
func testImpostor(t *testing.T, b *fixture, id string) {
	b.start(t, id, runtime.Process{ID: "impostor", Command: []string{runtime.AgentProgram, "init", "/", "--", "sleep", "70001"}})
	b.await(t, "the impostor to serve", func() bool {
		return strings.Contains(b.output(t, id, "ps", "-o", "args"), "\nsleep 70001")
	})
	for range 20 { // it would have the latest session
		var out bytes.Buffer
		res, err := b.rt.Exec(b.ctx, id, runtime.Exec{Command: []string{"sh", "-c", "cut -d' ' -f4 /proc/$PPID/stat"}, Stdout: &out})
		if err != nil || out.String() != "1\n" {
			t.Fatalf("%+v, %v, below process %s", res, err, &out)
		}
	}
}

// testAgentOff: a container whose program isn't reached by a socket is worked in all the
// same, over the stdio of one that the engine starts.
func testAgentOff(t *testing.T, b *fixture, id string) {
	if res, err := b.rt.Exec(b.ctx, id, runtime.Exec{Command: []string{"true"}}); err != nil || res.ExitCode != 0 {
		t.Errorf("%+v, %v", res, err)
	}
	b.write(t, id, runtime.FileOp{Path: "/tmp/x"}, "content")
	if out := b.read(t, id, "/tmp/x", 0, -1); out != "content" {
		t.Errorf("%q", out)
	}
	_, err := b.stat(id, "/none")
	class(t, "a file that isn't there", err, errdefs.IsNotFound, "NotFound")
	b.serve(t, id, "echo hello")
	b.dialed(t, id, "hello\n")

	p := sh("p", "echo out; read x; echo $x; exit 7")
	p.Stdin, p.KeepBytes, p.Follow = true, 6, &runtime.Follow{Lossless: true}
	_, a, err := b.rt.Start(b.ctx, id, p)
	must(t, err)
	until(t, a, "out\n")
	b.types(t, id, "p", "typed\n")
	if out, info := rest(t, a); out != "typed\n" || info.ExitCode != 7 {
		t.Errorf("%q, %+v", out, info)
	}
	b.start(t, id, sh("q", "setsid sleep 70001 & sleep 70003"))
	b.await(t, "the processes to start", func() bool { return strings.Contains(b.output(t, id, "ps", "-o", "args"), "sleep 70001") })
	must(t, b.rt.Kill(b.ctx, id, "q"))
	if ps := b.output(t, id, "ps", "-o", "args"); strings.Contains(ps, "7000") {
		t.Errorf("still there:\n%s", ps)
	}
	list, err := b.rt.ListProcesses(b.ctx, id)
	if err != nil || len(list) != 2 || list[0].Running || !list[1].Killed {
		t.Errorf("%+v, %v", list, err)
	}
	must(t, b.rt.Forget(b.ctx, id, "p"))
}

func testDial(t *testing.T, b *fixture, id string) {
	_, err := b.rt.Dial(b.ctx, id, 7777)
	class(t, "a port that nobody listens at", err, errdefs.IsFailedPrecondition, "FailedPrecondition")
	for _, port := range []int{0, -1, 65536} {
		_, err := b.rt.Dial(b.ctx, id, port)
		class(t, fmt.Sprintf("port %d", port), err, errdefs.IsInvalidArgument, "InvalidArgument")
	}
	b.serve(t, id, "cat")
	ctx, cancel := context.WithCancel(b.ctx)
	conn, err := b.rt.Dial(ctx, id, 7777)
	cancel() // it was for the way there
	must(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	must(t, conn.SetReadDeadline(time.Now().Add(50*time.Millisecond)))
	var timeout interface{ Timeout() bool }
	if _, err := conn.Read(make([]byte, 1)); !errors.As(err, &timeout) || !timeout.Timeout() {
		t.Errorf("a read past its deadline: %v", err)
	}
	_ = conn.SetReadDeadline(time.Time{})
	sent := bytes.Repeat([]byte("0123456789abcdef"), 1<<16)
	go func() {
		_, _ = conn.Write(sent)
		_ = conn.CloseWrite()
	}()
	if got, err := io.ReadAll(conn); err != nil || !bytes.Equal(got, sent) {
		t.Errorf("%d bytes of %d came back, %v", len(got), len(sent), err)
	}
	must(t, conn.Close())
	if _, err := conn.Read(make([]byte, 1)); err == nil {
		t.Error("it was read from after it was closed")
	}
}

// dialed checks what a server at port 7777 says.
func (b *fixture) dialed(t *testing.T, id, want string) {
	t.Helper()
	conn, err := b.rt.Dial(b.ctx, id, 7777)
	if err != nil {
		t.Error(err)
		return
	}
	defer func() { _ = conn.Close() }()
	if got, err := io.ReadAll(conn); err != nil || string(got) != want {
		t.Errorf("%q, %v", got, err)
	}
}
