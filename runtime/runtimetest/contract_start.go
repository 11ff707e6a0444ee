package runtimetest

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/runtime"
)

func starterCases() []contractCase {
	return []contractCase{
		inOne("start/in one container", (*fixture).spec,
			containerCase{"bytes both ways", testStartBytes},
			containerCase{"end of the input", testStartEnd},
			containerCase{"exit codes", testStartExitCodes},
			containerCase{"standard error", testStartStderr},
			containerCase{"refused", testStartRefused},
			containerCase{"paused", testStartPaused},
			containerCase{"canceled at any stage", testStartCanceled},
			containerCase{"close", testStartClose},
			containerCase{"container removed", testStartRemoved}, // the last one
		),
		{"start/user and directory", testStartFields},
		{"start/no room", testStartNoRoom},
	}
}

// program starts a program, and closes its streams at the end of the test.
func (b *fixture) program(t *testing.T, id, user string, command ...string) runtime.Stdio {
	t.Helper()
	s, err := b.Starter.Start(b.ctx, id, runtime.Program{Command: command, User: user})
	if err != nil {
		t.Fatalf("start %q: %v", command, err)
	}
	t.Cleanup(func() { _ = s.Close() }) // the case may have
	return s
}

// said is all that a program prints; the test fails unless it ends with a code.
func (b *fixture) said(t *testing.T, s runtime.Stdio, want int) (stdout, stderr string) {
	t.Helper()
	out, err := io.ReadAll(s)
	if err != nil {
		t.Errorf("read: %v", err)
	}
	code, stderr, err := s.Wait(b.ctx)
	if err != nil || code != want {
		t.Errorf("exit code %d, %v; want %d; output %.200q, %.200q", code, err, want, out, stderr)
	}
	return string(out), stderr
}

func testStartBytes(t *testing.T, b *fixture, id string) {
	s := b.program(t, id, "", "/bin/cat")
	const size = 64 << 20
	source := func() io.Reader { return io.LimitReader(rand.NewChaCha8([32]byte{}), size) }
	sent, got := sha256.New(), sha256.New()
	if _, err := io.Copy(sent, source()); err != nil {
		t.Fatal(err)
	}
	wrote := make(chan error, 1)
	go func() {
		_, err := io.Copy(s, source())
		wrote <- err
	}()
	if n, err := io.CopyN(got, s, size); err != nil {
		t.Fatalf("after %d bytes: %v", n, err)
	}
	must(t, <-wrote)
	if !bytes.Equal(sent.Sum(nil), got.Sum(nil)) {
		t.Error("cat returned other bytes than were sent")
	}
}

// testStartEnd checks that Close ends the input, and that Wait still returns the exit code.
func testStartEnd(t *testing.T, b *fixture, id string) {
	s := b.program(t, id, "", "/bin/sh", "-c", "cat; echo end >&2; exit 5")
	if _, err := s.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(s, make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	must(t, s.Close())
	if code, _, err := s.Wait(b.ctx); code != 5 || err != nil {
		t.Errorf("exit code %d, %v", code, err)
	}
	if n, err := s.Read(make([]byte, 1)); n > 0 || err == nil {
		t.Errorf("read after close: %d bytes, %v", n, err)
	}
}

func testStartFields(t *testing.T, b *fixture) {
	spec := b.spec()
	spec.User, spec.WorkingDir, spec.Env = "1000:1000", "/tmp", []string{"A=container"}
	c := b.create(t, spec)
	script := `echo $(id -u) $(id -g) $(pwd) $A`
	for user, want := range map[string]string{"": "1000 1000", "0:0": "0 0", "2000:3000": "2000 3000"} {
		out, _ := b.said(t, b.program(t, c.ID, user, "/bin/sh", "-c", script), 0)
		if want += " / container\n"; out != want {
			t.Errorf("as user %q: %q, want %q", user, out, want)
		}
	}
}

func testStartExitCodes(t *testing.T, b *fixture, id string) {
	for script, want := range map[string]int{"exit 0": 0, "exit 3": 3, "exit 126": 126, "kill -TERM $$": 143, "kill -KILL $$": 137} {
		b.said(t, b.program(t, id, "", "/bin/sh", "-c", script), want)
	}
}

// testStartStderr checks that a program isn't blocked by more standard error than is kept.
func testStartStderr(t *testing.T, b *fixture, id string) {
	s := b.program(t, id, "", "/bin/sh", "-c", "echo begin >&2; yes | head -c 1000000 >&2; echo out")
	out, stderr := b.said(t, s, 0)
	if out != "out\n" || len(stderr) != 4<<10 || !strings.HasPrefix(stderr, "begin\ny\n") {
		t.Errorf("output %q, standard error of %d bytes: %.20q", out, len(stderr), stderr)
	}
}

func testStartRefused(t *testing.T, b *fixture, id string) {
	refused := func(id string, is func(error) bool, name string, command ...string) {
		t.Helper()
		s, err := b.Starter.Start(b.ctx, id, runtime.Program{Command: command})
		class(t, fmt.Sprintf("start %q", command), err, is, name)
		if s != nil {
			t.Errorf("start %q: there are streams", command)
		}
	}
	refused(id, errdefs.IsInvalidArgument, "InvalidArgument")
	refused(id, errdefs.IsInvalidArgument, "InvalidArgument", "cat")
	refused(id, errdefs.IsInvalidArgument, "InvalidArgument", "/bin/cat", "a\x00b")
	refused(id, errdefs.IsNotFound, "NotFound", "/no/such/program")
	refused(id, errdefs.IsNotFound, "NotFound", "/etc/passwd")
	refused(noID, errdefs.IsNotFound, "NotFound", "/bin/cat")
}

func testStartPaused(t *testing.T, b *fixture, id string) {
	s := b.program(t, id, "", "/bin/cat")
	must(t, b.rt.Pause(b.ctx, id))
	begun := time.Now()
	_, err := b.Starter.Start(b.ctx, id, runtime.Program{Command: []string{"/bin/cat"}})
	class(t, "start in a paused container", err, errdefs.IsFailedPrecondition, "FailedPrecondition")
	if took := time.Since(begun); took > 5*time.Second {
		t.Errorf("it took %s", took)
	}
	must(t, b.rt.Resume(b.ctx, id))
	b.echo(t, s)
}

// echo checks that a cat is there.
func (b *fixture) echo(t *testing.T, s runtime.Stdio) {
	t.Helper()
	if _, err := s.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(s, make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
}

func testStartRemoved(t *testing.T, b *fixture, id string) {
	s := b.program(t, id, "", "/bin/cat")
	b.echo(t, s)
	must(t, b.rt.Remove(b.ctx, id))
	if n, err := s.Read(make([]byte, 1)); n > 0 || err == nil {
		t.Errorf("read: %d bytes, %v", n, err)
	}
	code, _, err := s.Wait(b.ctx)
	if err != nil {
		class(t, "wait", err, errdefs.IsFailedPrecondition, "FailedPrecondition")
	} else if code != 137 {
		t.Errorf("exit code %d", code)
	}
	_ = s.Close() // twice, and in any state
	_ = s.Close()
}

// testStartCanceled ends the context at many stages of a start.
func testStartCanceled(t *testing.T, b *fixture, id string) {
	for delay := time.Duration(0); delay < 300*time.Millisecond; delay = delay*3/2 + 2*time.Millisecond {
		ctx, cancel := context.WithCancelCause(b.ctx)
		time.AfterFunc(delay, func() { cancel(errCause) })
		s, err := b.Starter.Start(ctx, id, runtime.Program{Command: []string{"/bin/cat"}})
		if err != nil && (!errdefs.IsCanceled(err) || !errors.Is(err, errCause)) {
			t.Errorf("ended after %s: %v", delay, err)
		}
		if s != nil {
			cancel(nil) // ends the start only
			b.echo(t, s)
			_ = s.Close()
		}
		cancel(nil)
	}
	b.await(t, "the programs to end", func() bool {
		return !strings.Contains(b.output(t, id, "ps", "-o", "args"), "cat")
	})
}

// testStartClose checks that no call is blocked by a program that ignores the end of its
// input, or doesn't read it, or whose output nobody reads.
func testStartClose(t *testing.T, b *fixture, id string) {
	for _, script := range []string{"sleep 70000", "exec yes", "trap '' PIPE; yes; sleep 70000"} {
		s := b.program(t, id, "", "/bin/sh", "-c", script)
		wrote, read := make(chan struct{}), make(chan struct{})
		go func() {
			defer close(wrote)
			_, _ = s.Write(make([]byte, 16<<20))
		}()
		if script == "sleep 70000" {
			go func() {
				defer close(read)
				_, _ = s.Read(make([]byte, 1))
			}()
		} else {
			close(read)
		}
		begun := time.Now()
		if err := s.Close(); err != nil {
			t.Errorf("%s: %v", script, err)
		}
		<-wrote
		<-read
		if took := time.Since(begun); took > 3*time.Second {
			t.Errorf("%s: it took %s", script, took)
		}
		ctx, cancel := context.WithTimeout(b.ctx, 100*time.Millisecond)
		if code, _, err := s.Wait(ctx); err != nil {
			class(t, "wait", err, errdefs.IsDeadlineExceeded, "DeadlineExceeded")
		} else if script == "sleep 70000" {
			t.Errorf("it has ended with %d", code)
		}
		cancel()
	}
	if got := b.inspect(t, id).State; got != runtime.StateRunning {
		t.Errorf("the container is %s", got)
	}
}

func testStartNoRoom(t *testing.T, b *fixture) {
	spec := b.spec()
	spec.PidsLimit = 64 // enough for the threads with which the OCI runtime starts the first program
	c := b.create(t, spec)
	full := b.program(t, c.ID, "", "/bin/sh", "-c", "while true; do sleep 70002 & done 2>/dev/null")
	if b.Class == "crun" { // moves a program that it has started into the cgroup, where the limit isn't asked
		b.program(t, c.ID, "", "/bin/true")
		_ = full.Close()
		return
	}
	// It ends when it finds no room itself. What started beside it could take its room for a moment.
	_, _, err := full.Wait(b.ctx)
	must(t, err)
	b.await(t, "no room", func() bool {
		var s runtime.Stdio
		s, err = b.Starter.Start(b.ctx, c.ID, runtime.Program{Command: []string{"/bin/true"}})
		if err != nil {
			return !errdefs.IsDeadlineExceeded(err)
		}
		_ = s.Close()
		return false
	})
	class(t, "start", err, errdefs.IsResourceExhausted, "ResourceExhausted")
	_ = full.Close()
}
