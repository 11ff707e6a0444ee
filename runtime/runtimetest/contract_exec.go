package runtimetest

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/runtime"
)

func execCases() []contractCase {
	return []contractCase{
		{"exec/streams", testExecStreams},
		{"exec/exit codes", testExecExitCodes},
		{"exec/stdin", testExecStdin},
		{"exec/stdin left open", testExecStdinLeftOpen},
		{"exec/env user directory", testExecFields},
		{"exec/refused", testExecRefused},
		{"exec/canceled", testExecCanceled},
		{"exec/container removed", testExecContainerRemoved},
	}
}

func testExecStreams(t *testing.T, b *bed) {
	c := b.create(t, b.spec())
	stdout, stderr, code := b.run(t, c.ID, runtime.Exec{Command: []string{"sh", "-c", "echo to stdout; echo to stderr >&2"}})
	if stdout != "to stdout\n" || stderr != "to stderr\n" || code != 0 {
		t.Errorf("stdout %q, stderr %q, exit code %d", stdout, stderr, code)
	}
	if _, err := b.rt.Exec(b.ctx, c.ID, runtime.Exec{Command: []string{"sh", "-c", "echo to stdout; echo to stderr >&2"}}); err != nil {
		t.Errorf("without writers: %v", err)
	}
}

func testExecExitCodes(t *testing.T, b *bed) {
	c := b.create(t, b.spec())
	for _, want := range []int{0, 1, 3, 126, 255} {
		if _, _, code := b.run(t, c.ID, runtime.Exec{Command: []string{"sh", "-c", fmt.Sprintf("exit %d", want)}}); code != want {
			t.Errorf("exit %d is told as %d", want, code)
		}
	}
	for _, missing := range []string{"no-such-program", "/no/such/program"} {
		if _, _, code := b.run(t, c.ID, runtime.Exec{Command: []string{missing}}); code != 126 && code != 127 {
			t.Errorf("%s ended with %d, want 126 or 127", missing, code)
		}
	}
}

func testExecStdin(t *testing.T, b *bed) {
	c := b.create(t, b.spec())
	if stdout, _, code := b.run(t, c.ID, runtime.Exec{Command: []string{"cat"}}); stdout != "" || code != 0 {
		t.Errorf("no stdin: %q, exit code %d", stdout, code)
	}
	// Random, so that nothing lost or doubled goes unseen.
	sent := make([]byte, 4<<20)
	_, _ = rand.NewChaCha8([32]byte{}).Read(sent) // never fails
	var got bytes.Buffer
	result, err := b.rt.Exec(b.ctx, c.ID, runtime.Exec{Command: []string{"cat"}, Stdin: bytes.NewReader(sent), Stdout: &got})
	if err != nil || result.ExitCode != 0 {
		t.Fatalf("cat: %+v, %v", result, err)
	}
	if sha256.Sum256(sent) != sha256.Sum256(got.Bytes()) {
		t.Errorf("cat returned %d bytes that aren't the %d sent", got.Len(), len(sent))
	}
}

func testExecStdinLeftOpen(t *testing.T, b *bed) {
	c := b.create(t, b.spec())
	r, w := io.Pipe()
	t.Cleanup(func() { _ = w.Close() })
	begun := time.Now()
	result, err := b.rt.Exec(b.ctx, c.ID, runtime.Exec{Command: []string{"true"}, Stdin: r})
	if err != nil || result.ExitCode != 0 || time.Since(begun) > 5*time.Second {
		t.Errorf("a command that doesn't read its stdin: %+v, %v after %s", result, err, time.Since(begun))
	}
}

func testExecFields(t *testing.T, b *bed) {
	spec := b.spec()
	spec.Env = []string{"A=container", "B=container"}
	spec.User = "1000:1000"
	spec.Tmpfs = []runtime.Tmpfs{{Target: "/open", SizeBytes: 1 << 20}}
	c := b.create(t, spec)
	stdout, _, _ := b.run(t, c.ID, runtime.Exec{Command: []string{"env"}, Env: []string{"A=exec", "C=with = and space"}})
	env := strings.Split(strings.TrimSpace(stdout), "\n")
	for _, v := range []string{"A=exec", "B=container", "C=with = and space"} {
		if !slices.Contains(env, v) {
			t.Errorf("env %q lacks %q", env, v)
		}
	}
	if slices.Contains(env, "A=container") {
		t.Errorf("env %q has the container's A", env)
	}
	for _, tt := range []struct{ user, want string }{{"", "1000"}, {"0:0", "0"}, {"2000", "2000"}, {"2000:3000", "2000"}} {
		if got, _, _ := b.run(t, c.ID, runtime.Exec{Command: []string{"id", "-u"}, User: tt.user}); strings.TrimSpace(got) != tt.want {
			t.Errorf("as user %q: uid %q, want %q", tt.user, got, tt.want)
		}
	}
	for _, dir := range []string{"/tmp", "/", "/open/made/for this"} {
		if got, stderr, _ := b.run(t, c.ID, runtime.Exec{Command: []string{"pwd"}, WorkingDir: dir}); got != dir+"\n" {
			t.Errorf("in %s: %q %s", dir, got, stderr)
		}
	}
}

func testExecRefused(t *testing.T, b *bed) {
	c := b.create(t, b.spec())
	_, err := b.rt.Exec(b.ctx, c.ID, runtime.Exec{})
	class(t, "no command", err, errdefs.IsInvalidArgument, "InvalidArgument")
	_, err = b.rt.Exec(b.ctx, c.ID, runtime.Exec{Command: []string{"true"}, WorkingDir: "relative"})
	class(t, "a relative directory", err, errdefs.IsInvalidArgument, "InvalidArgument")
}

func testExecCanceled(t *testing.T, b *bed) {
	c := b.create(t, b.spec())
	for _, tt := range []struct {
		name string
		end  func() (context.Context, func())
		is   func(error) bool
		want error
	}{
		{"canceled", func() (context.Context, func()) {
			ctx, cancel := context.WithCancelCause(b.ctx)
			return ctx, func() { cancel(errCause) }
		}, errdefs.IsCanceled, errCause},
		{"deadline", func() (context.Context, func()) {
			ctx, cancel := context.WithTimeoutCause(b.ctx, time.Second, errCause)
			return ctx, func() { <-ctx.Done(); cancel() }
		}, errdefs.IsDeadlineExceeded, errCause},
	} {
		ctx, end := tt.end()
		out := newSignalWriter("started")
		go func() {
			<-out.seen
			end()
		}()
		_, err := b.rt.Exec(ctx, c.ID, runtime.Exec{Command: []string{"sh", "-c", "echo started; sleep 1000"}, Stdout: out})
		class(t, tt.name, err, tt.is, tt.name)
		if !errors.Is(err, tt.want) {
			t.Errorf("%s: error %v doesn't wrap the cause", tt.name, err)
		}
		if errors.Is(err, runtime.ErrNotKilled) {
			t.Errorf("%s: %v", tt.name, err)
		}
	}
	if got := b.output(t, c.ID, "echo", "alive"); got != "alive" {
		t.Errorf("a command afterwards prints %q", got)
	}
	// A reader that nobody ends mustn't hold up the answer.
	r, w := io.Pipe()
	t.Cleanup(func() { _ = w.Close() })
	ctx, cancel := context.WithTimeout(b.ctx, 300*time.Millisecond)
	defer cancel()
	_, err := b.rt.Exec(ctx, c.ID, runtime.Exec{Command: []string{"cat"}, Stdin: r})
	class(t, "with a stdin that blocks", err, errdefs.IsDeadlineExceeded, "DeadlineExceeded")
}

func testExecContainerRemoved(t *testing.T, b *bed) {
	c := b.create(t, b.spec())
	out := newSignalWriter("started")
	failed := make(chan error)
	go func() {
		_, err := b.rt.Exec(b.ctx, c.ID, runtime.Exec{Command: []string{"sh", "-c", "echo started; sleep 1000"}, Stdout: out})
		failed <- err
	}()
	select {
	case <-out.seen:
	case err := <-failed:
		t.Fatal(err)
	}
	if err := b.rt.Remove(b.ctx, c.ID); err != nil {
		t.Error(err)
	}
	class(t, "a command under way", <-failed, errdefs.IsFailedPrecondition, "FailedPrecondition")
}

// signalWriter closes a channel when it has seen a text.
type signalWriter struct {
	text string
	seen chan struct{}
	buf  []byte
	done bool
}

func newSignalWriter(text string) *signalWriter {
	return &signalWriter{text: text, seen: make(chan struct{})}
}

func (w *signalWriter) Write(p []byte) (int, error) {
	w.buf = append(w.buf, p...)
	if !w.done && bytes.Contains(w.buf, []byte(w.text)) {
		w.done = true
		close(w.seen)
	}
	return len(p), nil
}
