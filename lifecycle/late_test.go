package lifecycle_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/runtimetest"
)

// failing fails once per operation that is set.
type failing struct{ op atomic.Pointer[string] }

func (f *failing) next(op string) { f.op.Store(&op) }

func (f *failing) fail(op, _ string) error {
	if want := f.op.Load(); want != nil && *want == op && f.op.CompareAndSwap(want, nil) {
		return errdefs.ErrUnavailable.WithMessage("slow")
	}
	return nil
}

// lateStart is an engine that shows a container as created until a reconciliation has seen it.
type lateStart struct {
	*runtimetest.Fake
	created atomic.Bool
	seen    chan struct{}
	once    sync.Once
}

func (l *lateStart) Create(ctx context.Context, spec runtime.Spec) (runtime.Container, error) {
	c, err := l.Fake.Create(ctx, spec)
	l.created.Store(true)
	<-l.seen
	l.created.Store(false)
	return c, err
}

func (l *lateStart) Inspect(ctx context.Context, id string) (runtime.Container, error) {
	c, err := l.Fake.Inspect(ctx, id)
	if err == nil && l.created.Load() {
		c.State = runtime.StateCreated
		l.once.Do(func() { close(l.seen) })
		time.Sleep(time.Second)
	}
	return c, err
}

// TestReconcileDuringCreate checks that a container that a reconciliation saw before it was started
// isn't taken for a dead one.
func TestReconcileDuringCreate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var f failing
		l := &lateStart{seen: make(chan struct{})}
		w := newWorld(t, setup{fake: runtimetest.FakeOptions{Fail: f.fail}, wrap: func(f *runtimetest.Fake) runtime.AgentRuntime { l.Fake = f; return l }})
		done := later(func() error { return second(w.Create(context.Background(), request("k"))) })
		synctest.Wait()
		f.next("info")
		must(t, <-done)
		time.Sleep(5 * time.Second)
		w.ready()
		if st := w.status("k"); st != lifecycle.StatusRunning {
			t.Errorf("it is %s", st)
		}
		if res := w.exec("k", "true"); res.Recreated {
			t.Error("it was made again")
		}
	})
}

// TestFailuresAreBounded checks that the errors of creates whose callers left don't pile up.
func TestFailuresAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, setup{policy: "version: 1\nimages: {allow: ['reg.example/*']}\n", fake: runtimetest.FakeOptions{Fail: func(op, _ string) error {
			if op == "pull" {
				time.Sleep(100 * time.Millisecond)
				return errdefs.ErrNotFound.WithMessage("no such image")
			}
			return nil
		}}})
		image := "reg.example/none:1"
		for i := range 40 {
			_, err := w.Create(t.Context(), lifecycle.CreateRequest{Tenant: "a", Key: fmt.Sprintf("k%02d", i), Request: policy.Request{Image: &image}})
			if !errorIs[*lifecycle.PullingError](err) {
				t.Fatalf("%d: %v", i, err)
			}
			time.Sleep(200 * time.Millisecond)
		}
		list, _, err := w.List(t.Context(), "a", lifecycle.ListOptions{})
		if err != nil || len(list) != 32 || list[0].Key != "k08" {
			t.Errorf("%d are kept, %v", len(list), err)
		}
	})
}

// TestPullWithoutWaiters checks that neither a delete nor a shutdown waits for an image, that a pull
// ends with the last create that waits for it, and a panic of it with its create.
func TestPullWithoutWaiters(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var active atomic.Int64
		w := newWorld(t, setup{policy: "version: 1\nimages: {allow: ['reg.example/*']}\n", fake: runtimetest.FakeOptions{
			Registry: map[string]runtime.Image{"reg.example/x:1": {}, "reg.example/x:2": {}, "reg.example/panics:1": {}},
			Pull: func(ctx context.Context, ref string, _ func(runtime.PullProgress)) error {
				if strings.Contains(ref, "panics") {
					panic("boo")
				}
				active.Add(1)
				defer active.Add(-1)
				<-ctx.Done()
				return ctx.Err()
			},
		}})
		create := func(key, image string) {
			t.Helper()
			_, err := w.Create(t.Context(), lifecycle.CreateRequest{Tenant: "a", Key: key, Request: policy.Request{Image: &image}})
			if !errorIs[*lifecycle.PullingError](err) && !strings.Contains(image, "panics") {
				t.Fatalf("%s: %v", key, err)
			}
			synctest.Wait()
		}
		start := time.Now()
		create("k", "reg.example/x:1")
		create("l", "reg.example/x:1")
		create("m", "reg.example/x:2")
		create("p", "reg.example/panics:1")
		for i, key := range []string{"m", "k", "l"} {
			if res, err := w.Delete(t.Context(), "a", key); err != nil || res.Result != lifecycle.ResultNotFound {
				t.Errorf("delete %s: %+v, %v", key, res, err)
			}
			if sb, err := w.Get(t.Context(), "a", key); err == nil {
				t.Errorf("afterwards: %+v", sb)
			}
			synctest.Wait()
			if n := active.Load(); n != []int64{1, 1, 0}[i] {
				t.Errorf("without %s, %d pulls go on", key, n)
			}
		}
		create("k", "reg.example/x:1") // another begins
		if n := active.Load(); n != 1 {
			t.Errorf("%d pulls go on", n)
		}
		w.stop()
		if took := time.Since(start); took > time.Second {
			t.Errorf("it took %s", took)
		}
	})
}

// TestAdoptedBesideASlowEngine checks that an adopted sandbox outlives a question about its image
// that fails.
func TestAdoptedBesideASlowEngine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var f failing
		asked := ""
		fake := runtimetest.NewFake(runtimetest.FakeOptions{Fail: func(op, id string) error {
			if err := f.fail(op, id); err != nil {
				if asked = op; op == "info" {
					f.next("image")
				}
				return err
			}
			return nil
		}})
		volume := t.TempDir()
		old := legacyContainer(t, fake, volume, func(map[string]string) {})
		w := newWorld(t, setup{
			engine: fake, policy: "version: 1\nmounts: {allowed_roots: [" + volume + "]}\n",
			settings: lifecycle.Settings{AdoptLegacy: true, AgentPort: 9090},
		})
		f.next("info")
		time.Sleep(10 * time.Second)
		w.ready()
		sb, err := w.Get(t.Context(), lifecycle.DefaultTenant, legacyKey)
		if err != nil || sb.Status != lifecycle.StatusRunning || sb.ContainerID != old.ID || asked != "image" {
			t.Errorf("%s, %v, after a failure of %q", sb.Status, err, asked)
		}
	})
}

// TestSealBesideASlowEngine checks that a container of a version without seals gets one although a
// question about its image fails.
func TestSealBesideASlowEngine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, setup{})
		c, err := w.fake.Inspect(t.Context(), w.create(request("k")).Sandbox.ContainerID)
		must(t, err)
		w.stop()
		delete(c.Labels, lifecycle.LabelSeal)
		var f failing
		fake := runtimetest.NewFake(runtimetest.FakeOptions{Fail: f.fail})
		must(t, second(fake.Create(t.Context(), runtime.Spec{Name: c.Name, Image: runtimetest.DefaultImage, Labels: c.Labels})))
		f.next("image")
		seals := &memSeals{}
		w = newWorld(t, setup{engine: fake, seals: seals})
		if _, err := w.Get(t.Context(), "a", "k"); err != nil || len(seals.seals) != 1 || f.op.Load() != nil {
			t.Errorf("%d seals are kept, %v", len(seals.seals), err)
		}
	})
}

// finish ends all containers, and the world.
func (w *world) finish() {
	for _, c := range w.fake.Containers() {
		w.fake.Die(c.ID)
	}
	w.stop()
}

// slowAnswer answers a start late.
type slowAnswer struct{ *runtimetest.Fake }

func (s slowAnswer) Start(ctx context.Context, id string, p runtime.Process) (runtime.ProcessInfo, runtime.Follower, error) {
	info, f, err := s.Fake.Start(ctx, id, p)
	time.Sleep(50 * time.Millisecond)
	return info, f, err
}

// TestEndBeforeStart checks that a command whose end is known before the answer to its start ends
// its turn, and counts once.
func TestEndBeforeStart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, setup{wrap: func(f *runtimetest.Fake) runtime.AgentRuntime { return slowAnswer{f} }})
		w.begin(process("p", "cat")) // so that events are read
		time.Sleep(time.Second)
		req := follow("x", "true")
		req.Serialize = true
		w.begin(req)
		time.Sleep(time.Second)
		if st := w.Status(t.Context(), "a"); st.RunningCommands != 0 {
			t.Errorf("%+v", st)
		}
		start := time.Now()
		req.ID = "y"
		w.begin(req)
		if took := time.Since(start); took > time.Second {
			t.Errorf("the next in turn began after %s", took)
		}
		if n := w.metric("berm_sandbox_commands_total{status=completed}"); n != 2 {
			t.Errorf("%v commands were counted", n)
		}
		w.finish()
	})
}

// TestReplaceWhileNotReady checks that a process whose start waits for it to become ready can be
// replaced, and that its old attachment writes nothing to the new one.
func TestReplaceWhileNotReady(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, setup{})
		req := process("p", "cat")
		req.Ready = &lifecycle.Readiness{Line: "never", Timeout: 5 * time.Minute}
		first := make(chan lifecycle.Process, 1)
		go func() {
			p, err := w.start(context.Background(), req)
			if err != nil {
				t.Error(err)
			}
			first <- p
		}()
		time.Sleep(time.Second)
		old := w.attachProcess("p", 0, false)
		again := process("p", "cat")
		again.Replace = true
		if p := w.begin(again); !p.Running() || p.Attached {
			t.Errorf("%+v", p)
		}
		if p := <-first; p.Running() || p.Ready == nil || *p.Ready {
			t.Errorf("the first: %+v", p)
		}
		if p := w.process("p"); p.Ready != nil {
			t.Errorf("the second: %+v", p)
		}
		if _, err := old.Write([]byte("hello\n")); !errdefs.IsFailedPrecondition(err) {
			t.Errorf("input of the old attachment: %v", err)
		}
		_ = old.Close()
		s := w.attachProcess("p", 0, false)
		_ = s.CloseWrite()
		if out, _ := readAll(t, s, 0); out != "" {
			t.Errorf("the second was given %q", out)
		}
		_ = s.Close()
		w.finish()
	})
}

// TestAttachAgainAtOnce checks that the place of an attachment is free when it is closed.
func TestAttachAgainAtOnce(t *testing.T) {
	w := newWorld(t, setup{})
	w.begin(process("p", "cat"))
	for range 500 {
		s, err := w.Follow(t.Context(), procRef("a", "k", "p"), lifecycle.FollowRequest{From: -1, Attach: true})
		must(t, err)
		_ = s.Close()
	}
}

// TestOverdueBesideOthers checks that other commands don't put off the end of one that is late.
func TestOverdueBesideOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, setup{wrap: func(f *runtimetest.Fake) runtime.AgentRuntime { return stubborn{f, nil} }})
		req := follow("x", "sleep 100000")
		req.Timeout = ptr(int64(2))
		w.begin(req)
		for i := range 12 {
			time.Sleep(2 * time.Second)
			w.begin(follow(fmt.Sprint("b", i), "true"))
		}
		if e := w.execution("x"); e.Status != lifecycle.ExecKilled {
			t.Errorf("%+v", e)
		}
		w.finish()
	})
}

// flood is an engine whose sandboxes tell of starts and ends without end.
type flood struct{ *runtimetest.Fake }

func (flood) Events(context.Context, string) (runtime.Events, error) { return &flooding{}, nil }

type flooding struct {
	n      int64
	closed atomic.Bool
}

func (f *flooding) Next() ([]runtime.ProcessInfo, error) {
	if f.closed.Load() {
		return nil, errdefs.ErrUnavailable
	}
	f.n++
	return []runtime.ProcessInfo{{ID: "exec.x", Running: f.n%2 == 1, StartedAt: time.Unix(f.n, 0)}}, nil
}

func (f *flooding) Close() error { f.closed.Store(true); return nil }

// TestEventFlood checks that a sandbox can't have its workspace measured as often as it likes.
func TestEventFlood(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := chatQuotas("k")
		w := newWorld(t, setup{quotas: q, wrap: func(f *runtimetest.Fake) runtime.AgentRuntime { return flood{f} }})
		w.begin(process("p", "cat"))
		time.Sleep(time.Second)
		q.calls()
		time.Sleep(10 * time.Second)
		n := 0
		for _, measured := range q.calls() {
			if measured {
				n++
			}
		}
		if n == 0 || n > 45 {
			t.Errorf("measured %d times in 10 s", n)
		}
		w.finish()
	})
}

// TestWithoutEvents checks that a caller that waits, or stops a process, doesn't depend on events.
func TestWithoutEvents(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fake, _ := breaking("process_events")
		w := newWorld(t, setup{fake: fake})
		w.begin(process("p", "sleep", "10"))
		w.begin(process("q", "cat"))
		start := time.Now()
		if p, err := w.Stop(t.Context(), procRef("a", "k", "q")); err != nil || p.Running() || time.Since(start) > 2*time.Second {
			t.Errorf("stopped after %s: %+v, %v", time.Since(start), p, err)
		}
		if p, err := w.Wait(t.Context(), procRef("a", "k", "p")); err != nil || p.Running() || time.Since(start) > 12*time.Second {
			t.Errorf("ended after %s: %+v, %v", time.Since(start), p, err)
		}
		w.finish()
	})
}

// TestStopOverQuotaAgain checks that a sandbox that can't be stopped over its quota is stopped soon
// after it can.
func TestStopOverQuotaAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := chatQuotas("k")
		var stuck atomic.Bool
		w := newWorld(t, setup{quotas: q, fake: runtimetest.FakeOptions{Fail: func(op, _ string) error {
			if op == "remove" && stuck.Load() {
				return errdefs.ErrUnavailable
			}
			return nil
		}}})
		w.begin(process("p", "cat"))
		time.Sleep(time.Second)
		stuck.Store(true)
		q.hold("k", 101)
		w.begin(follow("x", "sleep 1"))
		time.Sleep(2 * time.Second)
		stuck.Store(false)
		time.Sleep(6 * time.Second)
		if st := w.status("k"); st != lifecycle.StatusStopped {
			t.Errorf("it is %s", st)
		}
		w.finish()
	})
}

// TestPanicKeepsNoInput checks that the memory of the input is given back after a panic.
func TestPanicKeepsNoInput(t *testing.T) {
	w := newWorld(t, setup{fake: runtimetest.FakeOptions{Fail: func(op, _ string) error {
		if op == "process_start" {
			panic("boo")
		}
		return nil
	}}})
	taken := 0
	defer func() {
		if recover() == nil || taken != 1 {
			t.Errorf("the input was said to be taken %d times", taken)
		}
	}()
	req := follow("x", "true")
	req.Stdin, req.Taken = []byte("in"), func() { taken++ }
	_, _ = w.start(t.Context(), req)
}
