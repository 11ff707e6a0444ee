package runtimetest

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	goruntime "runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/runtime"
)

func execCases(real bool) []contractCase {
	cases := []containerCase{
		{"streams", testExecStreams},
		{"exit codes", testExecExitCodes},
		{"stdin", testExecStdin},
		{"stdin left open", testExecStdinLeftOpen},
		{"stdin ends before the output", testExecHalfClose},
		{"arguments", testExecArguments},
		{"refused", testExecRefused},
		{"canceled", testExecCanceled},
		{"canceled at any stage", testExecCanceledAnytime},
	}
	if real {
		cases = append(cases,
			containerCase{"killed by a signal", testExecSignals},
			containerCase{"not executable", testExecNotExecutable},
			containerCase{"descendant keeps the output", testExecDescendant}, // the last one
		)
	}
	return []contractCase{
		inOne("exec/in one container", (*fixture).spec, cases...),
		{"exec/env user directory", testExecFields},
		{"exec/container removed", testExecContainerRemoved},
		{"exec/container dies", testExecContainerDies},
	}
}

func testExecStreams(t *testing.T, b *fixture, id string) {
	stdout, stderr, code := b.run(t, id, runtime.Exec{Command: []string{"sh", "-c", "echo to stdout; echo to stderr >&2"}})
	if stdout != "to stdout\n" || stderr != "to stderr\n" || code != 0 {
		t.Errorf("stdout %q, stderr %q, exit code %d", stdout, stderr, code)
	}
	if _, err := b.rt.Exec(b.ctx, id, runtime.Exec{Command: []string{"sh", "-c", "echo to stdout; echo to stderr >&2"}}); err != nil {
		t.Errorf("without writers: %v", err)
	}
}

func testExecExitCodes(t *testing.T, b *fixture, id string) {
	for _, want := range []int{0, 1, 3, 126, 255} {
		if _, _, code := b.run(t, id, runtime.Exec{Command: []string{"sh", "-c", fmt.Sprintf("exit %d", want)}}); code != want {
			t.Errorf("exit %d is told as %d", want, code)
		}
	}
	for _, missing := range []string{"no-such-program", "/no/such/program"} {
		if _, _, code := b.run(t, id, runtime.Exec{Command: []string{missing}}); code != 126 && code != 127 {
			t.Errorf("%s ended with %d, want 126 or 127", missing, code)
		}
	}
}

func testExecStdin(t *testing.T, b *fixture, id string) {
	if stdout, _, code := b.run(t, id, runtime.Exec{Command: []string{"cat"}}); stdout != "" || code != 0 {
		t.Errorf("no stdin: %q, exit code %d", stdout, code)
	}
	// Random, so that nothing lost or doubled goes unseen.
	sent := make([]byte, 4<<20)
	_, _ = rand.NewChaCha8([32]byte{}).Read(sent) // never fails
	var got bytes.Buffer
	result, err := b.rt.Exec(b.ctx, id, runtime.Exec{Command: []string{"cat"}, Stdin: bytes.NewReader(sent), Stdout: &got})
	if err != nil || result.ExitCode != 0 {
		t.Fatalf("cat: %+v, %v", result, err)
	}
	if sha256.Sum256(sent) != sha256.Sum256(got.Bytes()) {
		t.Errorf("cat returned %d bytes that aren't the %d sent", got.Len(), len(sent))
	}
}

func testExecStdinLeftOpen(t *testing.T, b *fixture, id string) {
	r, w := io.Pipe()
	t.Cleanup(func() { _ = w.Close() })
	begun := time.Now()
	result, err := b.rt.Exec(b.ctx, id, runtime.Exec{Command: []string{"true"}, Stdin: r})
	if err != nil || result.ExitCode != 0 || time.Since(begun) > 5*time.Second {
		t.Errorf("a command that doesn't read its stdin: %+v, %v after %s", result, err, time.Since(begun))
	}
}

func testExecFields(t *testing.T, b *fixture) {
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

func testExecRefused(t *testing.T, b *fixture, id string) {
	_, err := b.rt.Exec(b.ctx, id, runtime.Exec{})
	class(t, "no command", err, errdefs.IsInvalidArgument, "InvalidArgument")
	_, err = b.rt.Exec(b.ctx, id, runtime.Exec{Command: []string{"true"}, WorkingDir: "relative"})
	class(t, "a relative directory", err, errdefs.IsInvalidArgument, "InvalidArgument")
}

// testExecNoRoom: a command that can't be started, as the limit of processes leaves no
// room for it, has no exit code; one that isn't there has.
func testExecNoRoom(t *testing.T, b *fixture) {
	for name, agent := range map[string]*runtime.Agent{"socket": nil, "engine": b.agent(t)} {
		t.Run(name, func(t *testing.T) {
			spec := b.spec()
			spec.Agent, spec.PidsLimit = agent, 64
			// Who fills it up ends with the first process too many, which may be one of
			// touch's: there are others, for later.
			spec.Command = []string{"sh", "-c", `until [ -e /full ]; do sleep 0.1; done
				for i in 1 2 4 8 16 32; do (sleep $i; while true; do sleep 70002 & done) & done; exec sleep 70003`}
			c := b.create(t, spec)
			for _, dir := range []string{"", "/new/dir"} {
				_, stderr, code := b.run(t, c.ID, runtime.Exec{Command: []string{"no-such-program"}, WorkingDir: dir})
				if code != 126 && code != 127 || !strings.Contains(stderr, "no-such-program") {
					t.Errorf("a program that isn't there, in %q: exit code %d, %q", dir, code, stderr)
				}
			}
			b.output(t, c.ID, "touch", "/full")
			b.await(t, "the container to be full", func() bool {
				stats, err := b.rt.Stats(b.ctx, c.ID)
				must(t, err)
				return stats.Pids >= spec.PidsLimit-1
			})
			for _, dir := range []string{"", "/", "/other/dir"} {
				for range 2 {
					var stdout, stderr bytes.Buffer
					res, err := b.rt.Exec(b.ctx, c.ID, runtime.Exec{
						Command: []string{"echo", "alive"}, WorkingDir: dir, Stdin: strings.NewReader("x"), Stdout: &stdout, Stderr: &stderr,
					})
					switch {
					case err == nil && (res.ExitCode != 0 || stdout.String() != "alive\n"):
						t.Errorf("in %q: exit code %d, %q, %q", dir, res.ExitCode, stdout.String(), stderr.String())
					case err != nil && (!errors.Is(err, runtime.ErrNoRoom) || !errdefs.IsResourceExhausted(err)):
						t.Errorf("in %q: %v", dir, err)
					}
				}
			}
		})
	}
}

func testExecCanceled(t *testing.T, b *fixture, id string) {
	for name, is := range map[string]func(error) bool{"Canceled": errdefs.IsCanceled, "DeadlineExceeded": errdefs.IsDeadlineExceeded} {
		ctx, cancel := context.WithCancelCause(b.ctx)
		out := newSignalWriter("started")
		if name == "Canceled" {
			go func() { <-out.seen; cancel(errCause) }()
		} else {
			var stop context.CancelFunc
			ctx, stop = context.WithTimeoutCause(ctx, time.Second, errCause)
			defer stop()
		}
		_, err := b.rt.Exec(ctx, id, runtime.Exec{Command: []string{"sh", "-c", "echo started; sleep 1000"}, Stdout: out})
		class(t, "exec", err, is, name)
		if !errors.Is(err, errCause) || errors.Is(err, runtime.ErrNotKilled) {
			t.Errorf("%s: %v", name, err)
		}
		cancel(nil)
	}
	b.alive(t, id)
	// A reader that nobody ends mustn't hold up the answer.
	r, w := io.Pipe()
	t.Cleanup(func() { _ = w.Close() })
	ctx, cancel := context.WithTimeout(b.ctx, 300*time.Millisecond)
	defer cancel()
	_, err := b.rt.Exec(ctx, id, runtime.Exec{Command: []string{"cat"}, Stdin: r})
	class(t, "with a stdin that blocks", err, errdefs.IsDeadlineExceeded, "DeadlineExceeded")
}

// testExecHalfClose: the end of the input isn't the end of the command.
func testExecHalfClose(t *testing.T, b *fixture, id string) {
	stdout, _, code := b.run(t, id, runtime.Exec{
		Command: []string{"sh", "-c", "cat; sleep 0.3; echo after; exit 4"}, Stdin: strings.NewReader("before\n"),
	})
	if stdout != "before\nafter\n" || code != 4 {
		t.Errorf("stdout %q, exit code %d", stdout, code)
	}
}

// testExecArguments: no shell comes in between.
func testExecArguments(t *testing.T, b *fixture, id string) {
	args := []string{"$HOME", "`id`", "a;b", "*", `"quoted"`, "ünïcödé", `back\slash`, "--", "-x"}
	if got, _, _ := b.run(t, id, runtime.Exec{Command: append([]string{"echo"}, args...)}); got != strings.Join(args, " ")+"\n" {
		t.Errorf("%q were printed as %q", args, got)
	}
}

// testExecCanceledAnytime ends the context at many stages of a command's start.
func testExecCanceledAnytime(t *testing.T, b *fixture, id string) {
	for delay := time.Millisecond; delay < 300*time.Millisecond; delay = delay*3/2 + time.Millisecond {
		ctx, cancel := context.WithTimeout(b.ctx, delay)
		_, err := b.rt.Exec(ctx, id, runtime.Exec{Command: []string{"sleep", "100001"}})
		cancel()
		class(t, fmt.Sprintf("exec ended after %s", delay), err, errdefs.IsDeadlineExceeded, "DeadlineExceeded")
		if errors.Is(err, runtime.ErrNotKilled) {
			t.Errorf("exec ended after %s: %v", delay, err)
		}
	}
	b.alive(t, id)
	if b.Real {
		if ps := b.output(t, id, "ps", "-o", "args"); strings.Contains(ps, "100001") {
			t.Errorf("still there:\n%s", ps)
		}
	}
}

// underWay starts a command that doesn't end by itself, waits until it runs, and
// gives its error once it has ended.
func (b *fixture) underWay(ctx context.Context, t *testing.T, id string) <-chan error {
	t.Helper()
	out, failed := newSignalWriter("started"), make(chan error, 1)
	go func() {
		_, err := b.rt.Exec(ctx, id, runtime.Exec{Command: []string{"sh", "-c", "echo started; sleep 1000"}, Stdout: out})
		failed <- err
	}()
	select {
	case <-out.seen:
	case err := <-failed:
		t.Fatalf("the command ended early: %v", err)
	}
	return failed
}

// interrupted checks the error of a command whose container ended.
func interrupted(t *testing.T, what string, err error) {
	t.Helper()
	class(t, what, err, errdefs.IsFailedPrecondition, "FailedPrecondition")
	if !errors.Is(err, runtime.ErrInterrupted) {
		t.Errorf("%s: error %v isn't ErrInterrupted", what, err)
	}
}

func testExecContainerRemoved(t *testing.T, b *fixture) {
	c := b.create(t, b.spec())
	var failed []<-chan error
	for range 3 {
		failed = append(failed, b.underWay(b.ctx, t, c.ID))
	}
	must(t, b.rt.Remove(b.ctx, c.ID))
	for _, f := range failed {
		interrupted(t, "a command under way", <-f)
	}
	_, err := b.rt.Exec(b.ctx, c.ID, runtime.Exec{Command: []string{"true"}})
	class(t, "a command afterwards", err, errdefs.IsNotFound, "NotFound")
	if errors.Is(err, runtime.ErrInterrupted) {
		t.Errorf("a command that never started: %v", err)
	}
}

func testExecContainerDies(t *testing.T, b *fixture) {
	spec := b.spec()
	spec.Command = []string{"sh", "-c", "until test -e /end; do sleep 0.1; done; exit 5"}
	if !b.Real {
		spec.Command = []string{"sh", "-c", "sleep 3; exit 5"}
	}
	c := b.create(t, spec)
	command := b.underWay(b.ctx, t, c.ID)
	if b.Real { // which may end under it
		_, _ = b.rt.Exec(b.ctx, c.ID, runtime.Exec{Command: []string{"touch", "/end"}})
	}
	interrupted(t, "a command under way", <-command)
	if c = b.awaitState(t, c.ID, runtime.StateExited); c.ExitCode != 5 {
		t.Errorf("the main process' exit code %d", c.ExitCode)
	}
	_, err := b.rt.Exec(b.ctx, c.ID, runtime.Exec{Command: []string{"true"}})
	class(t, "a command afterwards", err, errdefs.IsFailedPrecondition, "FailedPrecondition")
	if errors.Is(err, runtime.ErrInterrupted) {
		t.Errorf("a command that never started: %v", err)
	}
}

// A container's first process is killed, and its commands with it, but it takes its time until
// the engine hears of the former.
func testExecContainerEndsSlowly(t *testing.T, b *fixture) {
	c := b.create(t, b.spec())
	command := b.underWay(b.ctx, t, c.ID)
	c, err := b.rt.Inspect(b.ctx, c.ID)
	must(t, err)
	release := holdEnd(t, c.Pid)
	must(t, unix.Kill(c.Pid, unix.SIGKILL))
	b.await(t, "the first process to wait for the held one", func() bool { return endsSlowly(c.Pid) })
	if c = b.inspect(t, c.ID); c.State != runtime.StateRunning {
		t.Errorf("the engine has heard of it: %s", c.State)
	}
	_, err = b.rt.Exec(b.ctx, c.ID, runtime.Exec{Command: []string{"true"}})
	class(t, "a command meanwhile", err, errdefs.IsFailedPrecondition, "FailedPrecondition")
	release()
	interrupted(t, "a command under way", <-command)
}

// endsSlowly reports whether what is left of a process has no memory any more, and sleeps.
func endsSlowly(pid int) bool {
	threads, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid)) // the pattern is good
	return slices.ContainsFunc(threads, func(name string) bool {
		stat, _ := os.ReadFile(name) // it may have ended
		_, rest, _ := strings.Cut(string(stat), ") ")
		fields := strings.Fields(rest) // from the third on, as proc_pid_stat(5) has them
		return len(fields) > 20 && fields[0] == "S" && fields[20] == "0"
	})
}

// holdEnd has a process be in the PID namespace of another, so that it can't end before
// release was called.
func holdEnd(t *testing.T, pid int) (release func()) {
	t.Helper()
	held := exec.Command("sleep", "1000")
	started := make(chan error)
	go func() {
		goruntime.LockOSThread() // for good: what it starts is in that namespace
		ns, err := os.Open(fmt.Sprintf("/proc/%d/ns/pid", pid))
		if err == nil {
			err = errors.Join(unix.Setns(int(ns.Fd()), unix.CLONE_NEWPID), ns.Close())
		}
		if err == nil {
			err = held.Start()
		}
		started <- err
	}()
	must(t, <-started)
	release = sync.OnceFunc(func() {
		_ = held.Process.Kill()
		_ = held.Wait() // until then the kernel waits
	})
	t.Cleanup(release)
	return release
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
