package lifecycle_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
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

// follow is a start of a shell script in sandbox k, which is made if need be.
func follow(id, script string) lifecycle.StartRequest {
	create := request("k")
	return lifecycle.StartRequest{ID: id, ExecRequest: lifecycle.ExecRequest{
		Tenant: "a", Key: "k", Create: &create, Command: []string{"sh", "-c", script},
	}}
}

// begin starts a process.
func (w *world) begin(req lifecycle.StartRequest) lifecycle.Process {
	w.t.Helper()
	p, err := w.start(context.Background(), req)
	if err != nil {
		w.t.Fatalf("start %q: %v", req.ID, err)
	}
	return p
}

func (w *world) attach(ref lifecycle.ProcessRef, from int64, takeOver bool) lifecycle.Stream {
	w.t.Helper()
	s, err := w.Follow(context.Background(), ref, lifecycle.FollowRequest{From: from, Attach: true, TakeOver: takeOver})
	if err != nil {
		w.t.Fatalf("attach to %q from %d: %v", ref.ID, from, err)
	}
	w.t.Cleanup(func() { _ = s.Close() })
	return s
}

func (w *world) attachExec(id string, from int64) lifecycle.Stream {
	w.t.Helper()
	return w.attach(execRef("a", "k", id), from, true)
}

type nexter interface {
	Next() (runtime.Chunk, error)
}

// readAll reads a stream to its end, and checks that nothing is missing.
func readAll(t *testing.T, s nexter, from int64) (stdout, stderr string) {
	t.Helper()
	var out, errs strings.Builder
	for {
		c, err := s.Next()
		if errors.Is(err, io.EOF) {
			return out.String(), errs.String()
		}
		if err != nil {
			t.Fatalf("after %d: %v", from, err)
		}
		if c.Seq != from+int64(len(c.Data)) {
			t.Fatalf("a chunk of %d bytes ends at %d, after one that ended at %d", len(c.Data), c.Seq, from)
		}
		from = c.Seq
		if c.Stderr {
			errs.Write(c.Data)
		} else {
			out.Write(c.Data)
		}
	}
}

func (w *world) kill(id string) {
	w.t.Helper()
	if _, err := w.Kill(context.Background(), execRef("a", "k", id)); err != nil {
		w.t.Errorf("kill %s: %v", id, err)
	}
}

// ask returns a process.
func (w *world) ask(ref lifecycle.ProcessRef) lifecycle.Process {
	w.t.Helper()
	p, err := w.Process(context.Background(), ref)
	if err != nil {
		w.t.Fatalf("process %q: %v", ref.ID, err)
	}
	return p
}

func (w *world) execution(id string) lifecycle.Process {
	w.t.Helper()
	return w.ask(execRef("a", "k", id))
}

func TestNewIDsAreNotLookedFor(t *testing.T) {
	w := newWorld(t, setup{})
	w.begin(follow("named", "true")) // and makes the sandbox
	for req, want := range map[*lifecycle.StartRequest]int{{}: 0, {ID: "new", NewID: true}: 0, {ID: "other"}: 1} {
		start := follow(req.ID, "sleep 1000")
		start.NewID = req.NewID
		before := w.fake.Calls("process")
		w.begin(start)
		if n := w.fake.Calls("process") - before; n != want {
			t.Errorf("ID %q, new %t: the agent was asked for it %d times, want %d", req.ID, req.NewID, n, want)
		}
	}
}

func TestStartExec(t *testing.T) {
	w := newWorld(t, setup{})
	e := w.begin(follow("", "echo out; echo err >&2; exit 3"))
	if e.ID == "" || e.SessionID == "" || e.Backend != "fake" || !e.Created || e.Existing || e.Timeout != 30*time.Second {
		t.Errorf("started: %+v", e)
	}
	s := w.attachExec(e.ID, 0)
	if out, errs := readAll(t, s, 0); out != "out\n" || errs != "err\n" {
		t.Errorf("from the beginning: %q, %q", out, errs)
	}
	ended := s.Ended()
	if ended.Status != lifecycle.ExecCompleted || ended.ExitCode == nil || *ended.ExitCode != 3 || ended.EndedAt.IsZero() || ended.CPUTime == 0 || ended.PeakMemoryBytes == 0 {
		t.Errorf("ended: %+v", ended)
	}
	for from, want := range map[int64]string{-1: "out\nerr\n", 4: "err\n", 6: "r\n", 8: ""} {
		s := w.attachExec(e.ID, from)
		if out, errs := readAll(t, s, max(from, 0)); out+errs != want || s.Ended().Status != lifecycle.ExecCompleted {
			t.Errorf("from %d: %q, %+v", from, out+errs, s.Ended())
		}
		_ = s.Close()
	}
	var gone *lifecycle.GoneError
	if _, err := w.Follow(context.Background(), execRef("a", "k", e.ID), lifecycle.FollowRequest{From: 9, Attach: true, TakeOver: true}); !errors.As(err, &gone) || gone.FirstSeq != 0 {
		t.Errorf("from beyond the end: %v", err)
	}
	if got := w.execution(e.ID); got.Status != lifecycle.ExecCompleted || got.Timeout != 30*time.Second || got.NextSeq != 8 {
		t.Errorf("asked afterwards: %+v", got)
	}
	if all, err := w.Processes(context.Background(), execRef("a", "k", "")); err != nil || len(all) != 1 || all[0].ID != e.ID {
		t.Errorf("list: %+v, %v", all, err)
	}
	if n := w.Status(context.Background(), "a").RunningCommands; n != 0 {
		t.Errorf("%d commands run", n)
	}
	if n := w.metric("berm_sandbox_commands_total{status=completed}"); n != 1 {
		t.Errorf("%v commands were counted", n)
	}
}

func TestStartRefusals(t *testing.T) {
	w := newWorld(t, setup{})
	w.create(request("k"))
	type change = func(*lifecycle.StartRequest)
	ready := func(r lifecycle.Readiness) change { return func(req *lifecycle.StartRequest) { req.Ready = &r } }
	for name, tt := range map[string]struct {
		change
		only lifecycle.Kind // empty is both
	}{
		"no command":    {change: func(r *lifecycle.StartRequest) { r.Command = nil }},
		"empty program": {change: func(r *lifecycle.StartRequest) { r.Command = []string{""} }},
		"NUL":           {change: func(r *lifecycle.StartRequest) { r.Command = []string{"a", "b\x00"} }},
		"long argument": {change: func(r *lifecycle.StartRequest) { r.Command = []string{"echo", strings.Repeat("x", 128<<10)} }},
		"many":          {change: func(r *lifecycle.StartRequest) { r.Command = slices.Repeat([]string{"x"}, 5000) }},
		"id":            {change: func(r *lifecycle.StartRequest) { r.ID = "../x" }},
		"long id":       {change: func(r *lifecycle.StartRequest) { r.ID = strings.Repeat("x", 124) }},
		"rows":          {change: func(r *lifecycle.StartRequest) { r.TTY, r.Rows = true, -1 }},
		"columns":       {change: func(r *lifecycle.StartRequest) { r.TTY, r.Cols = true, 4097 }},
		"no terminal":   {change: func(r *lifecycle.StartRequest) { r.Rows = 24 }, only: lifecycle.KindExec},
		"keep":          {change: func(r *lifecycle.StartRequest) { r.KeepBytes = 4<<20 + 1 }},
		"key":           {change: func(r *lifecycle.StartRequest) { r.Key = "?" }},
		"working dir":   {change: func(r *lifecycle.StartRequest) { r.WorkingDir = "relative" }},
		"name of env":   {change: func(r *lifecycle.StartRequest) { r.Env = map[string]string{"A=B": ""} }},
		"timeout":       {change: func(r *lifecycle.StartRequest) { r.Timeout = ptr(int64(-1)) }, only: lifecycle.KindExec},
		"no readiness":  {change: ready(lifecycle.Readiness{}), only: lifecycle.KindManaged},
		"port":          {change: ready(lifecycle.Readiness{Port: 65536}), only: lifecycle.KindManaged},
		"line":          {change: ready(lifecycle.Readiness{Line: "a\nb"}), only: lifecycle.KindManaged},
		"time":          {change: ready(lifecycle.Readiness{Line: "a", Timeout: time.Hour}), only: lifecycle.KindManaged},
	} {
		for _, kind := range []lifecycle.Kind{lifecycle.KindExec, lifecycle.KindManaged} {
			if tt.only != "" && tt.only != kind {
				continue
			}
			req := follow("x", "true")
			req.Kind = kind
			tt.change(&req)
			if _, err := w.start(t.Context(), req); !errdefs.IsInvalidArgument(err) && lifecycle.ErrorType(err) != "policy_denied" {
				t.Errorf("%s of kind %s: %v", name, kind, err)
			}
		}
	}
	for name, req := range map[string]lifecycle.ExecRequest{"no command": {}, "output limit": {Command: []string{"true"}, OutputLimit: ptr(5 << 20)}} {
		req.Tenant, req.Key = "a", "k"
		if _, err := w.Exec(t.Context(), req); !errdefs.IsInvalidArgument(err) {
			t.Errorf("%s: %v", name, err)
		}
	}
	var none *lifecycle.ProcessError
	for name, err := range map[string]error{
		"attach": func() error {
			_, err := w.Follow(context.Background(), execRef("a", "k", "none"), lifecycle.FollowRequest{From: 0, Attach: true, TakeOver: true})
			return err
		}(),
		"get":    func() error { _, err := w.Process(context.Background(), execRef("a", "k", "none")); return err }(),
		"kill":   func() error { _, err := w.Kill(context.Background(), execRef("a", "k", "none")); return err }(),
		"signal": w.Signal(context.Background(), execRef("a", "k", "none"), 15),
		"resize": w.Resize(context.Background(), execRef("a", "k", "none"), 1, 1),
		"write":  w.Write(context.Background(), execRef("a", "k", "none"), strings.NewReader("x"), true),
	} {
		if !errors.As(err, &none) || !errdefs.IsNotFound(err) {
			t.Errorf("%s of what isn't there: %v", name, err)
		}
	}
	for _, err := range []error{
		w.Signal(t.Context(), execRef("a", "k", "x"), 0), w.Signal(t.Context(), execRef("a", "k", "x"), 65),
		w.Signal(t.Context(), execRef("a", "k", "../x"), 15), w.Signal(t.Context(), lifecycle.ProcessRef{Tenant: "a", Key: "k", Kind: lifecycle.KindManaged, ID: "-a"}, 15),
		w.Resize(t.Context(), execRef("a", "k", "x"), 0, 1), w.Resize(t.Context(), execRef("a", "k", "x"), 1, 4097),
	} {
		if !errdefs.IsInvalidArgument(err) {
			t.Errorf("malformed: %v", err)
		}
	}
	if _, err := w.Process(context.Background(), execRef("b", "k", "none")); !errdefs.IsNotFound(err) || errors.As(err, &none) {
		t.Errorf("another tenant's sandbox: %v", err)
	}
}

func TestWithoutAgent(t *testing.T) {
	w := newWorld(t, setup{fake: runtimetest.FakeOptions{Fail: func(op, _ string) error {
		if strings.HasPrefix(op, "process") {
			return errdefs.ErrNotImplemented
		}
		return nil
	}}})
	w.create(request("k"))
	var unsupported *lifecycle.UnsupportedError
	_, startErr := w.start(context.Background(), follow("", "true"))
	_, listErr := w.Processes(context.Background(), execRef("a", "k", ""))
	_, processErr := w.start(context.Background(), process("p", "cat"))
	for _, err := range []error{startErr, listErr, processErr, w.Signal(context.Background(), execRef("a", "k", "x"), 15)} {
		if !errors.As(err, &unsupported) || !errdefs.IsNotImplemented(err) || unsupported.Key != "k" {
			t.Errorf("%v", err)
		}
	}
	res, err := w.Exec(context.Background(), lifecycle.ExecRequest{Tenant: "a", Key: "k", Command: []string{"echo", "x"}})
	if err != nil || !res.OK() {
		t.Errorf("a plain command: %+v, %v", res, err)
	}
	if st := w.Status(context.Background(), "a"); st.RunningCommands != 0 || st.RunningProcesses != 0 {
		t.Errorf("status: %+v", st)
	}
}

func TestStartExecIdempotent(t *testing.T) {
	w := newWorld(t, setup{settings: lifecycle.Settings{MaxCommands: 1}})
	first := w.begin(follow("x", "sleep 100"))
	again := w.begin(follow("x", "sleep 100")) // though no other could be started
	if first.Existing || !again.Existing || again.Created || again.StartedAt != first.StartedAt {
		t.Errorf("first %+v\nagain %+v", first, again)
	}
	if _, err := w.start(context.Background(), follow("x", "sleep 99")); !errorIs[*lifecycle.ProcessError](err) || !errdefs.IsAlreadyExists(err) {
		t.Errorf("another command: %v", err)
	}
	other := follow("x", "sleep 100")
	other.Create.Request.PidsLimit = ptr(int64(5))
	if _, err := w.start(context.Background(), other); !errorIs[*lifecycle.ConflictError](err) {
		t.Errorf("for another sandbox: %v", err)
	}
	var full *lifecycle.CapacityError
	if _, err := w.start(context.Background(), follow("y", "true")); !errors.As(err, &full) || full.RetryAfter == 0 {
		t.Errorf("one too many: %v", err)
	}
	w.kill("x")
	if e := w.begin(follow("x", "sleep 100")); !e.Existing || e.Status != lifecycle.ExecKilled || e.ExitCode != nil {
		t.Errorf("asked again after its end: %+v", e)
	}
	w.begin(follow("y", "true")) // there is room again, at once
	w.eventually("it ends", func() bool { return w.execution("y").Status == lifecycle.ExecCompleted })
	if e := w.begin(follow("z", "true")); e.Existing {
		t.Errorf("another: %+v", e)
	}
	if _, err := w.start(context.Background(), follow("y", "false")); !errdefs.IsAlreadyExists(err) {
		t.Errorf("one that has ended, differently: %v", err)
	}
}

func TestStartExecAtOnce(t *testing.T) {
	w := newWorld(t, setup{})
	var wg sync.WaitGroup
	fresh := make(chan bool, 20)
	for range cap(fresh) {
		wg.Go(func() {
			e, err := w.start(context.Background(), follow("x", "sleep 100"))
			if err != nil {
				t.Error(err)
			}
			fresh <- !e.Existing
		})
	}
	wg.Wait()
	close(fresh)
	n := 0
	for f := range fresh {
		if f {
			n++
		}
	}
	if running := w.Status(context.Background(), "a").RunningCommands; n != 1 || running != 1 {
		t.Errorf("%d were started, %d run", n, running)
	}
}

func TestStreamClose(t *testing.T) {
	w := newWorld(t, setup{})
	w.begin(follow("x", "sleep 100"))
	s := w.attachExec("x", 0)
	ended := later(func() error { return second(s.Next()) })
	time.Sleep(5 * time.Millisecond)
	_, _ = s.Close(), s.Close()
	if err := <-ended; !errdefs.IsCanceled(err) {
		t.Errorf("Next of a stream that was closed: %v", err)
	}
	if e := w.execution("x"); e.Status != lifecycle.ExecRunning {
		t.Errorf("the command: %+v", e)
	}
}

func TestExecInput(t *testing.T) {
	w := newWorld(t, setup{})
	req := follow("given", "cat")
	req.Stdin = []byte("all of it")
	w.begin(req)
	if out, _ := readAll(t, w.attachExec("given", 0), 0); out != "all of it" {
		t.Errorf("given at the start: %q", out)
	}
	req.Stdin = []byte("something else")
	if _, err := w.start(context.Background(), req); !errdefs.IsAlreadyExists(err) {
		t.Errorf("with other input: %v", err)
	}

	req = follow("open", "cat")
	req.OpenStdin, req.Stdin = true, []byte("one ")
	w.begin(req)
	s := w.attachExec("open", 0)
	if c, err := s.Next(); err != nil || string(c.Data) != "one " {
		t.Errorf("%q, %v", c.Data, err)
	}
	if _, err := io.WriteString(s, "two "); err != nil {
		t.Error(err)
	}
	if err := w.Write(context.Background(), execRef("a", "k", "open"), strings.NewReader("three "), false); err != nil {
		t.Errorf("beside the reader: %v", err)
	}
	if err := w.Write(context.Background(), execRef("a", "k", "open"), strings.NewReader(""), true); err != nil {
		t.Errorf("the end: %v", err)
	}
	if out, _ := readAll(t, s, 4); out != "two three " {
		t.Errorf("read %q", out)
	}
	_ = s.Close()

	req = follow("lonely", "cat")
	req.OpenStdin = true
	w.begin(req)
	if err := w.Write(context.Background(), execRef("a", "k", "lonely"), strings.NewReader("nobody reads"), true); err != nil {
		t.Errorf("without a reader: %v", err)
	}
	if out, _ := readAll(t, w.attachExec("lonely", 0), 0); out != "nobody reads" {
		t.Errorf("read %q", out)
	}

	w.begin(follow("none", "sleep 100"))
	for _, id := range []string{"none", "lonely"} {
		if err := w.Write(context.Background(), execRef("a", "k", id), strings.NewReader("x"), false); !errorIs[*lifecycle.ProcessError](err) || !errdefs.IsFailedPrecondition(err) {
			t.Errorf("%s takes no input: %v", id, err)
		}
	}
}

// What is never read holds up who writes, who isn't waited for without end, and nobody else.
func TestInputThatIsNeverTaken(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, setup{policy: longCommands})
		req := follow("x", "sleep 100000")
		req.OpenStdin, req.Timeout = true, ptr(int64(7200))
		w.begin(req)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := w.Write(ctx, execRef("a", "k", "x"), bytes.NewReader(make([]byte, 1<<20)), true); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("for a second: %v", err)
		}
		for range 2 { // the second one waits for the first, if at all
			start := time.Now()
			err := w.Write(t.Context(), execRef("a", "k", "x"), bytes.NewReader(make([]byte, 1<<20)), true)
			w.processClass(errdefs.IsAborted, err)
			if took := time.Since(start); took != 2*time.Minute {
				t.Errorf("it took %s", took)
			}
		}
		if e := w.execution("x"); e.Status != lifecycle.ExecRunning {
			t.Errorf("the command: %+v", e)
		}
		s := w.attachExec("x", 0)
		w.kill("x")
		if readAll(t, s, 0); s.Ended().Status != lifecycle.ExecKilled {
			t.Errorf("%+v", s.Ended())
		}
		_ = s.Close()
	})
}

// printer is an engine where "print" waits for the end of its input, and then prints so
// many blocks of 4 KiB, every third of them as an error.
func printer(blocks int) runtimetest.FakeOptions {
	return runtimetest.FakeOptions{Exec: func(_ context.Context, _ runtime.Container, e runtime.Exec) (runtime.ExecResult, error) {
		if e.Command[0] != "print" {
			return runtime.ExecResult{}, errors.ErrUnsupported
		}
		_, _ = io.ReadAll(e.Stdin)
		for i := range blocks {
			out := e.Stdout
			if i%3 == 2 {
				out = e.Stderr
			}
			if _, err := fmt.Fprintf(out, "%04095d\n", i); err != nil {
				return runtime.ExecResult{}, nil
			}
		}
		return runtime.ExecResult{}, nil
	}}
}

func printing(id string) lifecycle.StartRequest {
	req := follow(id, "")
	req.Command, req.OpenStdin = []string{"print"}, true
	return req
}

func (w *world) endInput(id string) {
	w.t.Helper()
	must(w.t, w.Write(context.Background(), execRef("a", "k", id), strings.NewReader(""), true))
}

// A caller that is attached holds the command up, and so misses nothing, however slow it is.
func TestMuchOutput(t *testing.T) {
	const blocks = 1000
	w := newWorld(t, setup{fake: printer(blocks)})
	req := printing("x")
	req.KeepBytes, req.Follow = 64<<10, true
	_, s, err := w.Start(context.Background(), req)
	must(t, err)
	w.endInput("x")
	time.Sleep(20 * time.Millisecond) // all would be printed by now
	if e := w.execution("x"); e.FirstSeq != 0 || e.Status != lifecycle.ExecRunning {
		t.Errorf("before anybody reads: %+v", e)
	}
	c, err := s.Next()
	must(t, err)
	seq := c.Seq
	time.Sleep(20 * time.Millisecond)
	if e := w.execution("x"); e.Status != lifecycle.ExecRunning {
		t.Errorf("while its reader sleeps: %+v", e)
	}
	out, errs := readAll(t, s, seq)
	if n := int(seq) + len(out) + len(errs); n != blocks<<12 || !strings.HasSuffix(out, "999\n") || s.Ended().NextSeq != blocks<<12 {
		t.Errorf("%d bytes of %d, %+v", n, blocks<<12, s.Ended())
	}
	_ = s.Close()
	var gone *lifecycle.GoneError
	if _, err := w.Follow(context.Background(), execRef("a", "k", "x"), lifecycle.FollowRequest{}); !errors.As(err, &gone) || gone.FirstSeq <= 0 || !errdefs.IsOutOfRange(err) {
		t.Fatalf("what is gone: %v", err)
	}
	out, errs = readAll(t, w.attachExec("x", gone.FirstSeq), gone.FirstSeq)
	if len(out)+len(errs) != blocks<<12-int(gone.FirstSeq) {
		t.Errorf("what is kept: %d bytes from %d", len(out)+len(errs), gone.FirstSeq)
	}
}

// A command that nobody follows, or no longer, isn't held up.
func TestOutputNobodyReads(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, setup{fake: printer(1000)})
		for _, id := range []string{"alone", "left"} {
			req := printing(id)
			req.KeepBytes, req.Follow = 64<<10, id == "left"
			w.begin(req)
			w.endInput(id)
			synctest.Wait()
			if e := w.execution(id); e.Status != lifecycle.ExecCompleted {
				t.Errorf("%s: %+v", id, e)
			}
		}
	})
}

// Whoever attaches doesn't cut off the input that a command was started with.
func TestAttachWhileInputIsHeld(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const printed = 800 << 10
		reads := make(chan struct{})
		w := newWorld(t, setup{fake: runtimetest.FakeOptions{Exec: func(_ context.Context, _ runtime.Container, e runtime.Exec) (runtime.ExecResult, error) {
			if e.Command[0] != "count" {
				return runtime.ExecResult{}, errors.ErrUnsupported
			}
			_, _ = e.Stdout.Write(make([]byte, printed))
			<-reads
			n, err := io.Copy(io.Discard, e.Stdin)
			_, _ = fmt.Fprint(e.Stdout, n, err)
			return runtime.ExecResult{}, nil
		}}})
		req := follow("x", "")
		req.Command, req.Stdin = []string{"count"}, make([]byte, 1<<20)
		var taken atomic.Int64
		req.Taken = func() { taken.Add(1) }
		w.begin(req)
		synctest.Wait()
		if taken.Load() != 0 {
			t.Error("its input is said to be taken before it is read")
		}
		from := w.attachExec("x", 1000)
		if c, err := from.Next(); err != nil || c.Seq != 1000+int64(len(c.Data)) {
			t.Errorf("from 1000: %d, %v", c.Seq, err)
		}
		s := w.attachExec("x", -1)
		close(reads)
		out, _ := readAll(t, s, 0)
		if want := "1048576 <nil>"; strings.Trim(out, "\x00") != want || len(out) != printed+len(want) {
			t.Errorf("%d bytes, ending in %q", len(out), out[max(0, len(out)-30):])
		}
		synctest.Wait()
		if n := taken.Swap(0); n != 1 {
			t.Errorf("its input is said to be taken %d times", n)
		}
		again := req
		again.KeepBytes = -1
		for _, r := range []lifecycle.StartRequest{req, again} { // one that is there already, and one that fails
			if _, err := w.start(t.Context(), r); (err != nil) != (r.KeepBytes < 0) || taken.Swap(0) != 1 {
				t.Errorf("again: %v", err)
			}
		}
		_, _ = from.Close(), s.Close()
	})
}

func TestExecSignals(t *testing.T) {
	w := newWorld(t, setup{})
	w.begin(follow("x", "sleep 100"))
	must(t, w.Signal(context.Background(), execRef("a", "k", "x"), 15))
	s := w.attachExec("x", 0)
	readAll(t, s, 0)
	if e := s.Ended(); e.Status != lifecycle.ExecCompleted || e.Signal != 15 || *e.ExitCode != 143 {
		t.Errorf("after TERM: %+v", e)
	}
	if err := w.Signal(context.Background(), execRef("a", "k", "x"), 15); !errorIs[*lifecycle.ProcessError](err) || !errdefs.IsFailedPrecondition(err) {
		t.Errorf("again: %v", err)
	}
	if e, err := w.Kill(context.Background(), execRef("a", "k", "x")); err != nil || e.Status != lifecycle.ExecCompleted {
		t.Errorf("killed after its end: %+v, %v", e, err)
	}
	req := follow("tty", "sleep 100")
	req.TTY = true
	if e := w.begin(req); !e.TTY {
		t.Errorf("%+v", e)
	}
	if err := w.Resize(context.Background(), execRef("a", "k", "tty"), 40, 100); err != nil {
		t.Error(err)
	}
	if err := w.Resize(context.Background(), execRef("a", "k", "x"), 40, 100); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("without a terminal: %v", err)
	}
	if e, err := w.Kill(context.Background(), execRef("a", "k", "tty")); err != nil || e.Status != lifecycle.ExecKilled || e.ExitCode != nil {
		t.Errorf("kill: %+v, %v", e, err)
	}
}

func TestFollowedTimeout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, setup{})
		req := follow("x", "echo begun; sleep 100")
		req.Timeout = ptr(int64(2))
		start := time.Now()
		w.begin(req)
		s := w.attachExec("x", 0)
		out, _ := readAll(t, s, 0)
		if e := s.Ended(); out != "begun\n" || e.Status != lifecycle.ExecTimedOut || e.ExitCode != nil || e.Timeout != 2*time.Second || time.Since(start) != 2*time.Second {
			t.Errorf("%q, %+v after %s", out, e, time.Since(start))
		}
		_ = s.Close()
	})
}

func TestFollowedUnderASandboxThatEnds(t *testing.T) {
	for _, end := range []string{"kill", "delete"} {
		t.Run(end, func(t *testing.T) {
			w := newWorld(t, setup{})
			sb := w.create(request("k")).Sandbox
			w.begin(follow("x", "echo begun; sleep 100"))
			s := w.attachExec("x", 0)
			must(t, second(s.Next()))
			if end == "kill" {
				w.fake.Die(sb.ContainerID)
			} else if _, err := w.Delete(context.Background(), "a", "k"); err != nil {
				t.Fatal(err)
			}
			readAll(t, s, 6)
			if e := s.Ended(); e.Status != lifecycle.ExecKilled || e.ExitCode != nil || e.EndedAt.IsZero() {
				t.Errorf("%+v", e)
			}
			if n := w.Status(context.Background(), "a").RunningCommands; n != 0 {
				t.Errorf("%d commands run", n)
			}
			if end == "delete" {
				if _, err := w.Process(context.Background(), execRef("a", "k", "x")); !errdefs.IsNotFound(err) {
					t.Errorf("asked afterwards: %v", err)
				}
				return
			}
			if e := w.execution("x"); e.Status != lifecycle.ExecKilled {
				t.Errorf("asked afterwards: %+v", e)
			}
			if all, err := w.Processes(context.Background(), execRef("a", "k", "")); err != nil || len(all) != 1 {
				t.Errorf("list: %v, %v", all, err)
			}
			if _, err := w.Follow(context.Background(), execRef("a", "k", "x"), lifecycle.FollowRequest{From: 0, Attach: true, TakeOver: true}); !errorIs[*lifecycle.StateError](err) {
				t.Errorf("attach: %v", err)
			}
			// Nothing is run twice unless it is asked for by another name.
			if e := w.begin(follow("x", "echo begun; sleep 100")); !e.Existing || e.Status != lifecycle.ExecKilled {
				t.Errorf("asked for again: %+v", e)
			}
			if e := w.begin(follow("y", "true")); !e.Recreated {
				t.Errorf("the next: %+v", e)
			}
		})
	}
}

// What goes on running doesn't escape the quota.
func TestQuotaOfWhatRuns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		w := newWorld(t, setup{policy: longCommands + "mounts: {allowed_roots: [" + dir + "]}\n"})
		req := process("p", "cat")
		req.Create.Request.HostPath, req.Create.Request.WorkspaceQuotaMB = &dir, ptr(int64(2))
		w.begin(req)
		exec := follow("x", "sleep 100000")
		exec.Create, exec.Timeout = nil, ptr(int64(3600))
		w.begin(exec)
		write := func(size int) {
			must(t, os.WriteFile(filepath.Join(dir, "f"), make([]byte, size), 0o600))
		}
		write(1 << 20)
		time.Sleep(5 * time.Minute)
		if st := w.status("k"); st != lifecycle.StatusRunning {
			t.Fatalf("within its quota, it is %s", st)
		}
		write(3 << 20)
		time.Sleep(2 * time.Minute)
		if st := w.status("k"); st != lifecycle.StatusStopped {
			t.Errorf("over its quota, it is %s", st)
		}
		if e := w.execution("x"); e.Status != lifecycle.ExecKilled || !e.QuotaExceeded {
			t.Errorf("the command: %+v", e)
		}
	})
}
