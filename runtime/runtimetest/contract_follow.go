package runtimetest

import (
	"bytes"
	"errors"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/runtime"
)

// blocked checks that done isn't closed soon.
func blocked(t *testing.T, what string, done <-chan error) {
	t.Helper()
	select {
	case err := <-done:
		t.Fatalf("%s: it didn't wait: %v", what, err)
	case <-time.After(200 * time.Millisecond):
	}
}

// writes writes so many bytes, and tells how that ended.
func writes(in runtime.Input, size int) <-chan error {
	done := make(chan error, 1)
	go func() {
		_, err := in.Write(bytes.Repeat([]byte("x"), size))
		done <- err
	}()
	return done
}

// ending reads output until it ends, and returns how much there was and why there is no more.
func ending(w runtime.Follower) (n int, err error) {
	for {
		chunk, err := w.Next()
		if err != nil {
			return n, err
		}
		n += len(chunk.Data)
	}
}

// testProcessFollowed: whoever starts a process misses none of its output.
func testProcessFollowed(t *testing.T, b *fixture, id string) {
	p := sh("p", "echo 0123456789; echo abcdefghi; exit 4")
	p.KeepBytes, p.Follow = 12, &runtime.Follow{From: 99, Lossless: true}
	info, w, err := b.rt.Start(b.ctx, id, p)
	must(t, err)
	t.Cleanup(func() { _ = w.Close() })
	if !b.Real && !info.Running {
		t.Errorf("%+v", info)
	}
	time.Sleep(100 * time.Millisecond)
	if out, info := rest(t, w); out != "0123456789\nabcdefghi\n" || info.ExitCode != 4 || info.ID != "p" {
		t.Errorf("%q, %+v", out, info)
	}
	if _, err := w.Next(); !errors.Is(err, io.EOF) {
		t.Errorf("after the end: %v", err)
	}
	_, _, err = b.rt.Start(b.ctx, id, p)
	class(t, "an ID that is taken", err, errdefs.IsAlreadyExists, "AlreadyExists")
}

func testProcessFollowers(t *testing.T, b *fixture, id string) {
	p := runtime.Process{ID: "p", Command: []string{"cat"}, Stdin: true}
	if b.Real {
		p.Command = []string{"sh", "-c", "echo $$; exec cat"}
	}
	info := b.start(t, id, p)
	if info.PID <= 1 || info.User != "0:0" {
		t.Errorf("%+v", info)
	}
	var all []runtime.Follower
	for i := range 64 {
		all = append(all, b.followAs(t, id, "p", runtime.Follow{From: -int64(i / 2 % 2), Lossless: i%2 == 0}))
	}
	_, err := b.rt.Follow(b.ctx, id, "p", runtime.Follow{})
	class(t, "one more follower", err, errdefs.IsResourceExhausted, "ResourceExhausted")
	b.types(t, id, "p", "hello\n")
	for _, w := range all {
		until(t, w, "hello\n")
	}
	must(t, all[0].Close())
	if chunk, err := all[0].Next(); err == nil || errors.Is(err, io.EOF) {
		t.Errorf("one that is closed: %+v, %v", chunk, err)
	}
	b.await(t, "room for a follower", func() bool {
		all[0], err = b.rt.Follow(b.ctx, id, "p", runtime.Follow{})
		return err == nil
	})
	must(t, b.rt.Kill(b.ctx, id, "p"))
	for i, w := range all {
		if out, info := rest(t, w); !info.Killed || i == 0 && !strings.HasSuffix(out, "hello\n") {
			t.Errorf("follower %d: %q, %+v", i, out, info)
		}
		_ = w.Close()
	}
}

// testProcessSlow: a follower that doesn't read delays its process if it is lossless, and
// nobody else.
func testProcessSlow(t *testing.T, b *fixture, id string) {
	const size = 2 << 20 // more than is on the way
	p := runtime.Process{ID: "p", Command: []string{"cat"}, Stdin: true, KeepBytes: 4 << 10}
	b.start(t, id, p)
	slow, late := b.follow(t, id, "p", 0), b.followAs(t, id, "p", runtime.Follow{})
	input := b.input(t, id, "p")
	written := writes(input, size)
	blocked(t, "a slow follower", written)
	p.ID = "q"
	b.start(t, id, p)
	other := b.follow(t, id, "q", 0)
	b.types(t, id, "q", "hello\n")
	until(t, other, "hello\n")
	got := make(chan error, 1)
	go func() {
		n, err := ending(slow)
		if errors.Is(err, io.EOF) && n == size {
			err = nil
		}
		got <- err
	}()
	must(t, <-written)
	must(t, input.CloseWrite())
	if err := <-got; err != nil {
		t.Errorf("the lossless follower: %v", err)
	}
	n, err := ending(late)
	class(t, "the follower that fell behind", err, errdefs.IsOutOfRange, "OutOfRange")
	if n >= size {
		t.Errorf("it has %d bytes", n)
	}
	// Without a lossless follower nothing waits.
	gone := b.follow(t, id, "q", runtime.FromFirst)
	input = b.input(t, id, "q")
	must(t, other.Close())
	written = writes(input, size)
	blocked(t, "a slow follower", written)
	must(t, gone.Close())
	must(t, <-written)
	if info, err := b.rt.Process(b.ctx, id, "q"); err != nil || info.NextSeq < size/2 || info.NextSeq-info.FirstSeq > 4<<10 {
		t.Errorf("%+v, %v", info, err)
	}
}

func testProcessExclusive(t *testing.T, b *fixture, id string) {
	b.start(t, id, runtime.Process{ID: "p", Command: []string{"cat"}, Stdin: true})
	plain, first := b.follow(t, id, "p", 0), b.followAs(t, id, "p", runtime.Follow{Exclusive: true})
	_, err := b.rt.Follow(b.ctx, id, "p", runtime.Follow{Exclusive: true})
	class(t, "another exclusive one", err, errdefs.IsAlreadyExists, "AlreadyExists")
	failed := make(chan error, 1)
	go func() {
		_, err := first.Next()
		failed <- err
	}()
	second := b.followAs(t, id, "p", runtime.Follow{TakeOver: true})
	select {
	case err := <-failed:
		class(t, "the first", err, errdefs.IsAborted, "Aborted")
	case <-b.ctx.Done():
		t.Fatal("the first wasn't told")
	}
	_, err = b.rt.Follow(b.ctx, id, "p", runtime.Follow{Exclusive: true})
	class(t, "beside one that took over", err, errdefs.IsAlreadyExists, "AlreadyExists")
	b.types(t, id, "p", "x\n")
	until(t, second, "x\n")
	until(t, plain, "x\n")
	must(t, second.Close())
	b.followAs(t, id, "p", runtime.Follow{Exclusive: true})
}

func testProcessWriters(t *testing.T, b *fixture, id string) {
	b.start(t, id, runtime.Process{ID: "p", Command: []string{"cat"}, Stdin: true})
	w, first := b.follow(t, id, "p", 0), b.input(t, id, "p")
	if _, err := io.WriteString(first, "first\n"); err != nil {
		t.Error(err)
	}
	_, err := b.rt.Input(b.ctx, id, "p")
	class(t, "a second writer", err, errdefs.IsAlreadyExists, "AlreadyExists")
	must(t, first.Close())
	b.types(t, id, "p", "second\n")
	until(t, w, "second\n")

	// One that waits is let go by Close, and by the end of its process.
	b.start(t, id, runtime.Process{ID: "q", Command: []string{"sleep", "1000"}, Stdin: true})
	for what, end := range map[string]func(runtime.Input) error{
		"close": runtime.Input.Close,
		"kill":  func(runtime.Input) error { return b.rt.Kill(b.ctx, id, "p") },
	} {
		process := "q"
		if what == "kill" {
			process = "p"
			b.followAs(t, id, "p", runtime.Follow{Lossless: true}) // nobody reads it
		}
		input := b.input(t, id, process)
		written := writes(input, 2<<20)
		blocked(t, what, written)
		if err := end(input); err != nil {
			t.Errorf("%s: %v", what, err)
		}
		select {
		case err := <-written:
			class(t, what, err, errdefs.IsFailedPrecondition, "FailedPrecondition")
		case <-time.After(10 * time.Second):
			t.Fatalf("%s: it waits on", what)
		}
		if what == "close" {
			b.input(t, id, process)
		}
	}
	_, err = b.rt.Input(b.ctx, id, "p")
	class(t, "input of one that was killed", err, errdefs.IsFailedPrecondition, "FailedPrecondition")
}

// told returns the next changes.
func told(t *testing.T, events runtime.Events) []runtime.ProcessInfo {
	t.Helper()
	got, err := events.Next()
	must(t, err)
	return got
}

func testEvents(t *testing.T, b *fixture, id string) {
	open := func() runtime.Events {
		events, err := b.rt.Events(b.ctx, id)
		must(t, err)
		t.Cleanup(func() { _ = events.Close() })
		return events
	}
	events := open()
	if got := told(t, events); got == nil || len(got) != 0 {
		t.Errorf("at first: %+v", got)
	}
	b.output(t, id, "true") // is no process
	p := sh("p", "sleep 1000")
	p.Label = "a label"
	b.start(t, id, p)
	if got := told(t, events); len(got) != 1 || got[0].ID != "p" || !got[0].Running || got[0].Label != p.Label || got[0].PID <= 1 || got[0].User != "0:0" {
		t.Errorf("after a start: %+v", got)
	}
	b.start(t, id, sh("q", "exit 3"))
	for {
		got := told(t, events)
		if len(got) != 1 || got[0].ID != "q" {
			t.Fatalf("of one: %+v", got)
		}
		if !got[0].Running {
			if got[0].ExitCode != 3 || got[0].EndedAt.IsZero() {
				t.Errorf("its end: %+v", got)
			}
			break
		}
	}
	again := open()
	if got := told(t, again); len(got) != 2 || got[0].ID != "p" || got[1].ID != "q" || got[1].Running {
		t.Errorf("at first: %+v", got)
	}
	must(t, b.rt.Kill(b.ctx, id, "p"))
	for _, events := range []runtime.Events{events, again} {
		if got := told(t, events); len(got) != 1 || got[0].ID != "p" || got[0].Running || !got[0].Killed {
			t.Errorf("after a kill: %+v", got)
		}
	}
	ended := make(chan error, 1)
	go func() {
		_, err := events.Next()
		ended <- err
	}()
	blocked(t, "without changes", ended)
	must(t, events.Close())
	if err := <-ended; err == nil {
		t.Error("after it was closed there is more")
	}
	// What is forgotten isn't told of any more.
	b.start(t, id, sh("r", "exit 4"))
	b.await(t, "it to end", func() bool {
		info, err := b.rt.Process(b.ctx, id, "r")
		return err == nil && !info.Running
	})
	for _, process := range []string{"p", "q", "r"} {
		must(t, b.rt.Forget(b.ctx, id, process))
	}
	if got := told(t, open()); len(got) != 0 {
		t.Errorf("afterwards: %+v", got)
	}
}
