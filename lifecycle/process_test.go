package lifecycle_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/runtimetest"
)

// process is a start of a managed process in sandbox k.
func process(id string, command ...string) lifecycle.StartRequest {
	create := request("k")
	return lifecycle.StartRequest{Kind: lifecycle.KindManaged, ID: id, ExecRequest: lifecycle.ExecRequest{
		Tenant: "a", Key: "k", Create: &create, Command: command,
	}}
}

func (w *world) attachProcess(id string, from int64, takeOver bool) lifecycle.Stream {
	w.t.Helper()
	return w.attach(procRef("a", "k", id), from, takeOver)
}

func (w *world) process(id string) lifecycle.Process {
	w.t.Helper()
	return w.ask(procRef("a", "k", id))
}

func (w *world) processClass(want func(error) bool, err error) {
	w.t.Helper()
	var of *lifecycle.ProcessError
	if !errors.As(err, &of) || !want(err) {
		w.t.Errorf("the error is of another class: %v", err)
	}
}

func TestProcess(t *testing.T) {
	w := newWorld(t, setup{})
	p := w.begin(process("", "sh", "-c", "echo out; echo err >&2; cat; exit 4"))
	if p.ID != "default" || !p.Running() || p.SessionID == "" || p.Ready != nil || p.ExitCode != nil {
		t.Errorf("started: %+v", p)
	}
	_, err := w.start(context.Background(), process("default", "cat"))
	w.processClass(errdefs.IsAlreadyExists, err)
	if n := w.Status(context.Background(), "a").RunningProcesses; n != 1 {
		t.Errorf("%d processes run", n)
	}
	s := w.attachProcess("", 0, false)
	if p := w.process(""); !p.Attached || !p.Running() {
		t.Errorf("attached to: %+v", p)
	}
	if _, err := io.WriteString(s, "in"); err != nil {
		t.Error(err)
	}
	if err := s.CloseWrite(); err != nil {
		t.Error(err)
	}
	if out, errs := readAll(t, s, 0); out != "out\nin" || errs != "err\n" {
		t.Errorf("%q, %q", out, errs)
	}
	if p := s.Ended(); p.Running() || p.ExitCode == nil || *p.ExitCode != 4 || p.EndedAt.IsZero() {
		t.Errorf("ended: %+v", p)
	}
	_ = s.Close()
	if p := w.process("default"); p.Running() || p.Stderr != "err\n" || p.Attached || p.NextSeq != 10 {
		t.Errorf("asked afterwards: %+v", p)
	}
	if n := w.Status(context.Background(), "a").RunningProcesses; n != 0 {
		t.Errorf("%d processes run", n)
	}
	// One that has ended makes way.
	if p := w.begin(process("", "cat")); !p.Running() || p.NextSeq != 0 {
		t.Errorf("started again: %+v", p)
	}
	all, err := w.Processes(context.Background(), procRef("a", "k", ""))
	if err != nil || len(all) != 1 || !all[0].Running() {
		t.Errorf("list: %+v, %v", all, err)
	}
	if _, err := w.Processes(context.Background(), procRef("b", "k", "")); !errdefs.IsNotFound(err) {
		t.Errorf("another tenant's: %v", err)
	}
	_, err = w.Process(context.Background(), procRef("a", "k", "none"))
	w.processClass(errdefs.IsNotFound, err)
	if n := w.Streams("a", "k"); n != 0 {
		t.Errorf("%d holds on processes are left", n)
	}
}

func TestProcessReplace(t *testing.T) {
	w := newWorld(t, setup{settings: lifecycle.Settings{MaxProcesses: 1}})
	w.begin(process("p", "cat"))
	old := w.attachProcess("p", 0, false)
	req := process("p", "sh", "-c", "echo new; cat")
	req.Replace = true
	if p := w.begin(req); !p.Running() {
		t.Errorf("%+v", p)
	}
	readAll(t, old, 0)
	if p := old.Ended(); p.Running() || p.ExitCode == nil {
		t.Errorf("the old one: %+v", p)
	}
	s := w.attachProcess("p", 0, false)
	if c, err := s.Next(); err != nil || string(c.Data) != "new\n" {
		t.Errorf("the new one: %q, %v", c.Data, err)
	}
	var full *lifecycle.CapacityError
	if _, err := w.start(context.Background(), process("q", "cat")); !errors.As(err, &full) || full.RetryAfter == 0 {
		t.Errorf("one too many: %v", err)
	}
	if _, err := w.Stop(context.Background(), procRef("a", "k", "p")); err != nil {
		t.Error(err)
	}
	w.begin(process("q", "cat"))
}

// A process isn't stopped for one that may not take its place.
func TestProcessReplaceRefused(t *testing.T) {
	dir := t.TempDir()
	w := newWorld(t, setup{policy: "version: 1\nmounts: {allowed_roots: [" + dir + "]}\n"})
	replacing := func() lifecycle.StartRequest {
		req := process("p", "cat")
		req.Create.Request.HostPath, req.Create.Request.WorkspaceQuotaMB = &dir, ptr(int64(2))
		req.Replace = true
		return req
	}
	first := w.begin(replacing())
	for _, tt := range []struct {
		name   string
		change func(*lifecycle.StartRequest)
		want   func(error) bool
	}{
		{"working dir", func(r *lifecycle.StartRequest) { r.WorkingDir = "relative" }, func(err error) bool {
			return lifecycle.ErrorType(err) == "policy_denied" || errdefs.IsInvalidArgument(err)
		}},
		{"another spec", func(r *lifecycle.StartRequest) { r.Create.Request.PidsLimit = ptr(int64(5)) }, errorIs[*lifecycle.ConflictError]},
		{"quota", func(*lifecycle.StartRequest) {
			must(t, os.WriteFile(filepath.Join(dir, "f"), make([]byte, 3<<20), 0o600))
		}, errorIs[*lifecycle.QuotaError]},
	} {
		req := replacing()
		tt.change(&req)
		if _, err := w.start(context.Background(), req); !tt.want(err) {
			t.Errorf("%s: %v", tt.name, err)
		}
		if p := w.process("p"); !p.Running() || !p.StartedAt.Equal(first.StartedAt) {
			t.Errorf("%s: the old one: %+v", tt.name, p)
		}
	}
}

func TestProcessAttach(t *testing.T) {
	w := newWorld(t, setup{})
	w.begin(process("p", "sh", "-c", "echo one; cat"))
	first := w.attachProcess("p", 0, false)
	if c, err := first.Next(); err != nil || string(c.Data) != "one\n" {
		t.Errorf("%q, %v", c.Data, err)
	}
	ended := later(func() error { return second(first.Next()) })
	_, err := w.Follow(context.Background(), procRef("a", "k", "p"), lifecycle.FollowRequest{From: 0, Attach: true, TakeOver: false})
	w.processClass(errdefs.IsAlreadyExists, err)
	// One who only follows isn't in the way, sees the same, and has no input.
	f, err := w.Follow(context.Background(), procRef("a", "k", "p"), lifecycle.FollowRequest{From: 0})
	must(t, err)
	defer f.Close()
	if _, err := io.WriteString(f, "x"); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("input of a follower: %v", err)
	}
	taker := w.attachProcess("p", 0, true)
	must(t, second(io.WriteString(taker, "two\n")))
	w.processClass(errdefs.IsAborted, <-ended)
	must(t, taker.CloseWrite())
	for name, s := range map[string]nexter{"taker": taker, "follower": f} {
		if out, _ := readAll(t, s, 0); out != "one\ntwo\n" {
			t.Errorf("the %s read %q", name, out)
		}
	}
	if p := f.Ended(); p.Running() || *p.ExitCode != 0 {
		t.Errorf("the follower's end: %+v", p)
	}
	_ = taker.Close()
	w.attachProcess("p", -1, false)
}

// A follower that is too slow is told so; a process that nobody holds up goes on.
func TestSlowFollower(t *testing.T) {
	w := newWorld(t, setup{fake: printer(200)})
	w.begin(process("p", "print"))
	f, err := w.Follow(context.Background(), procRef("a", "k", "p"), lifecycle.FollowRequest{From: 0})
	must(t, err)
	defer f.Close()
	must(t, w.attachProcess("p", 0, false).CloseWrite())
	s := w.attachProcess("p", 0, true)
	if out, errs := readAll(t, s, 0); len(out)+len(errs) != 200<<12 {
		t.Errorf("the reader got %d bytes", len(out)+len(errs))
	}
	var gone *lifecycle.GoneError
	if _, err := f.Next(); !errors.As(err, &gone) || gone.FirstSeq <= 0 {
		t.Errorf("the follower: %v", err)
	}
}

func TestProcessStderr(t *testing.T) {
	long := strings.Repeat("x", 100<<10) + "end"
	w := newWorld(t, setup{fake: runtimetest.FakeOptions{Exec: func(_ context.Context, _ runtime.Container, e runtime.Exec) (runtime.ExecResult, error) {
		if e.Command[0] != "complain" {
			return runtime.ExecResult{}, errors.ErrUnsupported
		}
		_, _ = io.WriteString(e.Stderr, long)
		_, _ = io.WriteString(e.Stdout, "\xff")
		_, _ = io.ReadAll(e.Stdin)
		_, _ = io.WriteString(e.Stderr, "\xff")
		return runtime.ExecResult{}, nil
	}}})
	w.begin(process("p", "complain"))
	w.eventually("it complains", func() bool { return w.process("p").NextSeq > 100<<10 })
	if p := w.process("p"); len(p.Stderr) != 64<<10 || !strings.HasSuffix(p.Stderr, "xend") {
		t.Errorf("%d bytes, ending in %q", len(p.Stderr), p.Stderr[max(0, len(p.Stderr)-10):])
	}
	s := w.attachProcess("p", 0, false) // that doesn't read
	must(t, s.CloseWrite())
	if p := w.process("p"); !strings.Contains(p.Stderr, "x") {
		t.Errorf("beside a reader: %q", p.Stderr)
	}
	readAll(t, s, 0)
	_ = s.Close()
	if p := w.process("p"); !strings.HasSuffix(p.Stderr, "xend\ufffd") {
		t.Errorf("at the end: %q", p.Stderr[max(0, len(p.Stderr)-10):])
	}
}

func TestStopProcess(t *testing.T) {
	for _, tt := range []struct {
		name, script string
		took         time.Duration
		code         int
	}{
		{"at the end of its input", "cat; exit 0", 0, 0},
		{"at TERM", "sleep 1000", 0, 143},
		{"at KILL", "trap '' TERM; sleep 1000", 5 * time.Second, 137},
		{"by itself meanwhile", "trap '' TERM; sleep 2; exit 7", 2 * time.Second, 7},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, setup{})
				w.begin(process("p", "sh", "-c", tt.script))
				synctest.Wait()
				s := w.attachProcess("p", 0, false)
				start := time.Now()
				p, err := w.Stop(context.Background(), procRef("a", "k", "p"))
				took := time.Since(start)
				// TERM may come before the end of its input is seen.
				if err != nil || p.Running() || p.ExitCode == nil || *p.ExitCode != tt.code && (tt.code != 0 || *p.ExitCode != 143) {
					t.Errorf("%+v, %v", p, err)
				}
				if took < tt.took || took > tt.took+600*time.Millisecond {
					t.Errorf("it took %s, want %s", took, tt.took)
				}
				readAll(t, s, 0)
				if p := s.Ended(); p.Running() || p.ExitCode == nil {
					t.Errorf("who was attached: %+v", p)
				}
				if again, err := w.Stop(context.Background(), procRef("a", "k", "p")); err != nil || again.EndedAt != p.EndedAt {
					t.Errorf("again: %+v, %v", again, err)
				}
				_ = s.Close()
			})
		})
	}
}

// A sandbox that doesn't answer for a moment costs its process nothing of its time.
func TestStopProcessThatIsSlowToAnswer(t *testing.T) {
	const deaf = "trap '' TERM; sleep 1000"
	for _, tt := range []struct {
		name, op, script string
		err              error
		took             time.Duration
		code             int
	}{
		{"the signal", "process_signal", deaf, errdefs.ErrUnavailable, 5 * time.Second, 137},
		{"the signal, which is obeyed", "process_signal", "sleep 1000", errdefs.ErrUnavailable, 0, 143},
		{"the question", "process", deaf, errdefs.ErrUnavailable, 5 * time.Second, 137},
		{"the question, in the middle", "process", deaf, fmt.Errorf("%w: %w", errdefs.ErrFailedPrecondition, runtime.ErrInterrupted), 5 * time.Second, 137},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var stopping, failed atomic.Bool
				w := newWorld(t, setup{fake: runtimetest.FakeOptions{Fail: func(op, _ string) error {
					if op == "process_input" { // to close it
						stopping.Store(true)
					}
					if op == tt.op && stopping.Load() && failed.CompareAndSwap(false, true) {
						return tt.err
					}
					return nil
				}}})
				w.begin(process("p", "sh", "-c", tt.script))
				synctest.Wait()
				start := time.Now()
				p, err := w.Stop(context.Background(), procRef("a", "k", "p"))
				if err != nil || p.ExitCode == nil || *p.ExitCode != tt.code || !failed.Load() {
					t.Errorf("%+v, %v", p, err)
				}
				if took := time.Since(start); took < tt.took || took > tt.took+time.Second {
					t.Errorf("it took %s, want %s", took, tt.took)
				}
			})
		})
	}
}

// Whoever asked may leave: what has begun is brought to its end.
func TestStopProcessWithoutCaller(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, setup{})
		w.begin(process("p", "sh", "-c", "trap '' TERM; sleep 1000"))
		synctest.Wait()
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		if _, err := w.Stop(ctx, procRef("a", "k", "p")); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("stop: %v", err)
		}
		if p := w.process("p"); !p.Running() {
			t.Errorf("after a second: %+v", p)
		}
		time.Sleep(5 * time.Second)
		if p := w.process("p"); p.Running() {
			t.Errorf("after six: %+v", p)
		}
	})
}

func TestWaitProcess(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, setup{})
		w.begin(process("p", "sh", "-c", "sleep 60; exit 3"))
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		if _, err := w.Wait(ctx, procRef("a", "k", "p")); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("for a second: %v", err)
		}
		p, err := w.Wait(context.Background(), procRef("a", "k", "p"))
		if err != nil || p.Running() || *p.ExitCode != 3 {
			t.Errorf("to its end: %+v, %v", p, err)
		}
		w.begin(process("q", "cat"))
		s := w.attachProcess("q", 0, false)
		done := make(chan lifecycle.Process, 1)
		go func() {
			p, err := w.Wait(context.Background(), procRef("a", "k", "q"))
			if err != nil {
				t.Error(err)
			}
			done <- p
		}()
		time.Sleep(time.Second)
		w.fake.Die(w.fake.Containers()[0].ID)
		for _, p := range []lifecycle.Process{<-done, func() lifecycle.Process { readAll(t, s, 0); return s.Ended() }()} {
			if p.Running() || p.ExitCode != nil || p.EndedAt.IsZero() {
				t.Errorf("one whose sandbox died: %+v", p)
			}
		}
		if st := w.Status(context.Background(), "a"); st.RunningProcesses != 0 {
			t.Errorf("%d processes run", st.RunningProcesses)
		}
		_ = s.Close()
	})
}

func TestProcessReady(t *testing.T) {
	for _, tt := range []struct {
		name, script string
		ready        lifecycle.Readiness
		want         bool
		took         time.Duration
		runs         bool
	}{
		{"line", "sleep 3; echo it is ready now; cat", lifecycle.Readiness{Line: "is ready"}, true, 3 * time.Second, true},
		{"line of errors", "sleep 3; echo ready >&2; cat", lifecycle.Readiness{Line: "ready"}, true, 3 * time.Second, true},
		{"line in pieces", "printf re; sleep 1; printf ad; printf x >&2; printf y; cat", lifecycle.Readiness{Line: "ready"}, true, time.Second, true},
		{"never", "echo nothing; cat", lifecycle.Readiness{Line: "ready"}, false, 30 * time.Second, true},
		{"not in time", "sleep 3; echo ready; cat", lifecycle.Readiness{Line: "ready", Timeout: time.Second}, false, time.Second, true},
		{"ended", "sleep 2; echo red; exit 1", lifecycle.Readiness{Line: "ready"}, false, 2 * time.Second, false},
		{"port", "cat", lifecycle.Readiness{Port: 80}, true, 2 * time.Second, true},
		{"another port", "cat", lifecycle.Readiness{Port: 81}, false, 30 * time.Second, true},
		{"ended without a port", "sleep 1; exit 0", lifecycle.Readiness{Port: 81}, false, time.Second, false},
		{"port or line", "sleep 1; echo ready; cat", lifecycle.Readiness{Port: 80, Line: "ready"}, true, time.Second, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, setup{})
				go func() {
					time.Sleep(2 * time.Second)
					w.fake.Listen(80, func(c net.Conn) { _ = c.Close() })
				}()
				req := process("p", "sh", "-c", tt.script)
				req.Ready = &tt.ready
				start := time.Now()
				p := w.begin(req)
				took := time.Since(start)
				if p.Ready == nil || *p.Ready != tt.want || p.Running() != tt.runs || took < tt.took || took > tt.took+time.Second {
					t.Errorf("after %s: %+v, %v", took, p, p.Ready)
				}
				if again := w.process("p"); again.Ready == nil || *again.Ready != tt.want {
					t.Errorf("asked again: %+v", again)
				}
				if tt.runs { // nothing of the output is lost to who comes now
					s := w.attachProcess("p", 0, false)
					if err := s.CloseWrite(); err != nil {
						t.Error(err)
					}
					readAll(t, s, 0)
					_ = s.Close()
				}
				time.Sleep(time.Minute)
			})
		})
	}
}

func TestProcessesAtOnce(t *testing.T) {
	w := newWorld(t, setup{})
	w.create(request("k"))
	var wg sync.WaitGroup
	var mu sync.Mutex
	started := map[string]int{}
	for i := range 40 {
		wg.Go(func() {
			id := fmt.Sprint("p", i%4)
			req := process(id, "cat")
			req.Create = nil
			if _, err := w.start(context.Background(), req); err == nil {
				mu.Lock()
				started[id]++
				mu.Unlock()
			} else if !errdefs.IsAlreadyExists(err) {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if n := w.Status(context.Background(), "a").RunningProcesses; n != 4 || len(started) != 4 {
		t.Errorf("%d run, %v were started", n, started)
	}
	for id, n := range started {
		if n != 1 {
			t.Errorf("%s was started %d times", id, n)
		}
	}
}
