package lifecycle_test

import (
	"context"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/runtimetest"
)

const longCommands = "version: 1\nprofiles: {default: {max_timeout: 2h}}\n"

// What runs is found again by the next Berm, which counts it and sees to its end.
func TestRestart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		settings := lifecycle.Settings{MaxCommands: 1, MaxProcesses: 1}
		w := newWorld(t, setup{policy: longCommands, settings: settings})
		exec := follow("x", "echo begun; cat; exit 5")
		exec.OpenStdin, exec.Serialize, exec.Timeout = true, true, ptr(int64(7000))
		exec.Create.Request.IdleTTL = ptr(time.Minute)
		started := w.begin(exec)
		proc := process("p", "cat")
		proc.Create = nil
		w.begin(proc)
		w.stop()

		time.Sleep(30 * time.Minute) // more than its idle time
		w = newWorld(t, setup{engine: w.fake, store: w.store, policy: longCommands, settings: settings})
		if swept := w.sweep(); swept.Expired != 0 {
			t.Error("it idled out under what runs in it")
		}
		synctest.Wait()
		if st := w.Status(t.Context(), "a"); st.RunningCommands != 1 || st.RunningProcesses != 1 {
			t.Errorf("found: %+v", st)
		}
		e := w.begin(exec)
		if !e.Existing || e.StartedAt != started.StartedAt || e.Timeout != started.Timeout || e.SessionID != started.SessionID || e.Command[0] != "sh" {
			t.Errorf("before: %+v\nafter:  %+v", started, e)
		}
		if _, err := w.start(t.Context(), follow("y", "true")); !errorIs[*lifecycle.CapacityError](err) {
			t.Errorf("one command too many: %v", err)
		}
		proc.ID = "q"
		if _, err := w.start(t.Context(), proc); !errorIs[*lifecycle.CapacityError](err) {
			t.Errorf("one process too many: %v", err)
		}
		next := make(chan time.Time)
		go func() { // it has the turn still
			req := serialized("true")
			req.Create = nil
			if _, err := w.Exec(context.Background(), req); err != nil {
				t.Error(err)
			}
			next <- time.Now()
		}()
		time.Sleep(10 * time.Minute)
		if swept := w.sweep(); swept.Expired != 0 {
			t.Error("it idled out later")
		}
		s := w.attachExec("x", 0)
		must(t, second(io.WriteString(s, "in")))
		end := time.Now()
		must(t, s.CloseWrite())
		if out, _ := readAll(t, s, 0); out != "begun\nin" || *s.Ended().ExitCode != 5 {
			t.Errorf("%q, %+v", out, s.Ended())
		}
		if at := <-next; at != end {
			t.Errorf("the next in turn began after %s", at.Sub(end))
		}
		if _, err := w.Stop(t.Context(), procRef("a", "k", "p")); err != nil {
			t.Error(err)
		}
		_ = s.Close()
		time.Sleep(61 * time.Second)
		if swept := w.sweep(); swept.Cleaned != 1 {
			t.Errorf("a minute after the last end: %+v", swept)
		}
	})
}

// Until a sandbox has said what runs in it, it isn't idle, but not forever.
func TestRestartWithoutAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		answers := true
		fake := runtimetest.NewFake(runtimetest.FakeOptions{Fail: func(op, _ string) error {
			if (op == "process_list" || op == "process_events") && !answers {
				return errdefs.ErrUnavailable
			}
			return nil
		}})
		w := newWorld(t, setup{engine: fake})
		req := request("k")
		req.Request.IdleTTL = ptr(time.Minute)
		w.create(req)
		w.stop()
		answers = false
		time.Sleep(2 * time.Minute)
		w = newWorld(t, setup{engine: fake, store: w.store})
		if swept := w.sweep(); swept.Expired != 0 {
			t.Error("it idled out before it answered")
		}
		time.Sleep(30 * time.Second)
		if swept := w.sweep(); swept.Expired != 0 {
			t.Error("it idled out before it answered, later")
		}
		time.Sleep(3 * time.Minute)
		if swept := w.sweep(); swept.Cleaned != 1 {
			t.Errorf("it never answers: %+v", swept)
		}
	})
}

func TestIdleUnderProcesses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, setup{policy: longCommands})
		req := follow("x", "sleep 200")
		req.Create.Request.IdleTTL, req.Timeout = ptr(time.Minute), ptr(int64(300))
		w.begin(req)
		time.Sleep(150 * time.Second)
		if swept := w.sweep(); swept.Expired != 0 {
			t.Fatal("it idled out under a command that nobody follows")
		}
		time.Sleep(100 * time.Second) // 50 s after its end, which was seen soon
		proc := process("p", "sleep", "200")
		proc.Create = nil
		w.begin(proc)
		time.Sleep(150 * time.Second)
		if swept := w.sweep(); swept.Expired != 0 {
			t.Fatal("it idled out under a process")
		}
		time.Sleep(106 * time.Second)
		s, err := w.Follow(t.Context(), execRef("a", "k", "x"), lifecycle.FollowRequest{From: 0, Attach: true, TakeOver: true}) // what is read is a use
		must(t, err)
		_ = s.Close()
		time.Sleep(59 * time.Second)
		if swept := w.sweep(); swept.Expired != 0 {
			t.Fatal("it idled out after it was used")
		}
		time.Sleep(2 * time.Second)
		if swept := w.sweep(); swept.Cleaned != 1 {
			t.Errorf("swept %+v", swept)
		}
	})
}

// stubborn is an engine whose sandboxes don't hold commands to their timeouts.
type stubborn struct {
	*runtimetest.Fake
	killErr error
}

func (s stubborn) Start(ctx context.Context, id string, p runtime.Process) (runtime.ProcessInfo, runtime.Follower, error) {
	p.Timeout = 0
	return s.Fake.Start(ctx, id, p)
}

func (s stubborn) Kill(ctx context.Context, id, process string) error {
	if s.killErr != nil {
		return s.killErr
	}
	return s.Fake.Kill(ctx, id, process)
}

func TestTimeoutThatIsntHeld(t *testing.T) {
	for _, tt := range []struct {
		name  string
		err   error
		after time.Duration
		gone  bool
	}{
		{"killed", nil, 30 * time.Second, false},
		{"not killed", runtime.ErrNotKilled, 30 * time.Second, true},
		{"no answer", errdefs.ErrUnavailable, 90 * time.Second, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, setup{wrap: func(f *runtimetest.Fake) runtime.AgentRuntime { return stubborn{f, tt.err} }})
				req := follow("x", "sleep 100000")
				req.Timeout = ptr(int64(2))
				w.begin(req)
				s := w.attachExec("x", 0)
				time.Sleep(9 * time.Second)
				if e := w.execution("x"); e.Status != lifecycle.ExecRunning {
					t.Errorf("too early: %+v", e)
				}
				time.Sleep(tt.after)
				if n := len(w.fake.Containers()); n == 0 != tt.gone {
					t.Errorf("%d containers", n)
				}
				readAll(t, s, 0)
				want := lifecycle.ExecKilled
				if tt.gone {
					want = lifecycle.ExecTimedOut
				}
				if e := s.Ended(); e.Status != want || e.ExitCode != nil {
					t.Errorf("%+v", e)
				}
				if n := w.Status(t.Context(), "a").RunningCommands; n != 0 {
					t.Errorf("%d commands run", n)
				}
				_ = s.Close()
			})
		})
	}
}

func TestKillThatFails(t *testing.T) {
	w := newWorld(t, setup{wrap: func(f *runtimetest.Fake) runtime.AgentRuntime { return stubborn{f, runtime.ErrNotKilled} }})
	w.begin(follow("x", "sleep 100"))
	if e, err := w.Kill(context.Background(), execRef("a", "k", "x")); err != nil || e.Status != lifecycle.ExecKilled {
		t.Errorf("%+v, %v", e, err)
	}
	if n := len(w.fake.Containers()); n != 0 {
		t.Error("the sandbox lives on")
	}
}

func TestPausedIsntOverdue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, setup{wrap: func(f *runtimetest.Fake) runtime.AgentRuntime { return stubborn{f, nil} }})
		req := follow("x", "sleep 100000")
		req.Timeout = ptr(int64(2))
		w.begin(req)
		time.Sleep(time.Second)
		must(t, second(w.Pause(t.Context(), "a", "k")))
		if _, err := w.Process(t.Context(), execRef("a", "k", "x")); !errorIs[*lifecycle.StateError](err) {
			t.Errorf("asked while it is paused: %v", err)
		}
		time.Sleep(time.Minute)
		must(t, second(w.Resume(t.Context(), "a", "k")))
		time.Sleep(5 * time.Second)
		if e := w.execution("x"); e.Status != lifecycle.ExecRunning {
			t.Errorf("%+v", e)
		}
		time.Sleep(20 * time.Second)
		if e := w.execution("x"); e.Status != lifecycle.ExecKilled {
			t.Errorf("%+v", e)
		}
	})
}

// What has ended is kept, within bounds.
func TestEndedAreForgotten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, setup{})
		for i := range 40 {
			w.begin(follow(fmt.Sprint("x", i), "echo done"))
			time.Sleep(time.Second)
		}
		all, err := w.Processes(t.Context(), execRef("a", "k", ""))
		if err != nil || len(all) != 32 || all[31].ID != "x39" {
			t.Errorf("%d are kept, %v", len(all), err)
		}
	})
}

// liar is an engine whose sandboxes say what they like.
type liar struct {
	*runtimetest.Fake
	infos []runtime.ProcessInfo
	chunk runtime.Chunk
}

func (l liar) ListProcesses(context.Context, string) ([]runtime.ProcessInfo, error) {
	return append([]runtime.ProcessInfo(nil), l.infos...), nil
}

func (l liar) Process(_ context.Context, _, process string) (runtime.ProcessInfo, error) {
	for _, info := range l.infos {
		if info.ID == process {
			return info, nil
		}
	}
	return runtime.ProcessInfo{ID: "exec.another", Running: true}, nil
}

func (l liar) Follow(context.Context, string, string, runtime.Follow) (runtime.Follower, error) {
	return lie{l.chunk}, nil
}

func (l liar) Events(context.Context, string) (runtime.Events, error) {
	return &lies{infos: l.infos}, nil
}

// lies are events that say the same once, and then end.
type lies struct{ infos []runtime.ProcessInfo }

func (l *lies) Next() ([]runtime.ProcessInfo, error) {
	if l.infos == nil {
		return nil, errdefs.ErrUnavailable
	}
	infos := append([]runtime.ProcessInfo(nil), l.infos...)
	l.infos = nil
	return infos, nil
}

func (*lies) Close() error { return nil }

type lie struct{ c runtime.Chunk }

func (l lie) Next() (runtime.Chunk, error) {
	if l.c.Seq < 0 {
		panic("boo")
	}
	return l.c, nil
}
func (lie) Info() runtime.ProcessInfo { return runtime.ProcessInfo{} }
func (lie) Close() error              { return nil }

func TestLies(t *testing.T) {
	infos := []runtime.ProcessInfo{
		{ID: "exec.x", Running: true, FirstSeq: -5, NextSeq: -9, Label: `{"t":-1}`, StartedAt: time.Now().Add(1e6 * time.Hour)},
		{ID: "exec.y", Running: true, Label: strings.Repeat("[", 2000)},
		{ID: "exec.../..", Running: true},
		{ID: "exec.", Running: true},
		{ID: "what else", Running: true},
		{ID: "proc.p", Running: false, ExitCode: -7, FirstSeq: 10, NextSeq: 1 << 62},
		{ID: "proc.p", Running: true},
	}
	for i := range 5000 {
		infos = append(infos, runtime.ProcessInfo{ID: fmt.Sprint("exec.z", i), Running: false})
	}
	w := newWorld(t, setup{wrap: func(f *runtimetest.Fake) runtime.AgentRuntime {
		return liar{f, infos, runtime.Chunk{Seq: 1, Data: make([]byte, 5)}}
	}})
	w.create(request("k"))
	all, err := w.Processes(context.Background(), execRef("a", "k", ""))
	if err != nil || len(all) > 1024 || all[0].Timeout != 0 || all[1].Timeout != 0 {
		t.Errorf("%d, %v", len(all), err)
	}
	if _, err := w.Process(context.Background(), execRef("a", "k", "w")); !errdefs.IsUnavailable(err) {
		t.Errorf("told of another process: %v", err)
	}
	s, err := w.Follow(context.Background(), execRef("a", "k", "x"), lifecycle.FollowRequest{From: -1, Attach: true, TakeOver: true})
	must(t, err)
	defer s.Close()
	if _, err := s.Next(); !errdefs.IsUnavailable(err) {
		t.Errorf("told of output that makes no sense: %v", err)
	}
	if _, err := w.Delete(context.Background(), "a", "k"); err != nil {
		t.Error(err)
	}
}

// Output at places near the largest integer, and a panic, end a stream and nothing else.
func TestLiesOfPlaces(t *testing.T) {
	for name, l := range map[string]liar{
		"far away":   {infos: []runtime.ProcessInfo{{ID: "exec.x", Running: true, FirstSeq: math.MaxInt64 - 1, NextSeq: math.MaxInt64 - 1}}, chunk: runtime.Chunk{Seq: 5, Data: make([]byte, 5)}},
		"at the end": {infos: []runtime.ProcessInfo{{ID: "exec.x", Running: true, FirstSeq: math.MaxInt64, NextSeq: math.MaxInt64}}, chunk: runtime.Chunk{Seq: math.MaxInt64, Data: make([]byte, 5)}},
		"panic":      {infos: []runtime.ProcessInfo{{ID: "exec.x", Running: true}}, chunk: runtime.Chunk{Seq: -1}},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, setup{wrap: func(f *runtimetest.Fake) runtime.AgentRuntime {
				l.Fake = f
				return l
			}})
			w.create(request("k"))
			s, err := w.Follow(context.Background(), execRef("a", "k", "x"), lifecycle.FollowRequest{From: -1, Attach: true, TakeOver: true})
			must(t, err)
			defer s.Close()
			if c, err := s.Next(); err == nil {
				t.Errorf("got %+v", c)
			}
		})
	}
}

// Whatever happens at once, all is counted right in the end, and nothing is left.
func TestInsideStorm(t *testing.T) {
	w := newWorld(t, setup{settings: lifecycle.Settings{MaxCommands: 1000, MaxProcesses: 1000}})
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	var wg sync.WaitGroup
	for i := range 16 {
		wg.Go(func() {
			rnd := rand.New(rand.NewPCG(1, uint64(i))) //nolint:gosec // to be had again
			for range 60 {
				id := fmt.Sprint("x", rnd.IntN(6))
				switch rnd.IntN(12) {
				case 0, 1, 2:
					req := follow(id, []string{"echo hi; sleep 0.01", "cat", "true"}[rnd.IntN(3)])
					req.OpenStdin, req.Follow, req.Serialize = rnd.IntN(2) == 0, rnd.IntN(2) == 0, rnd.IntN(4) == 0
					req.Stdin = []byte("abc")
					start, stop := context.WithTimeout(ctx, 50*time.Millisecond)
					_, _ = w.start(start, req)
					stop()
				case 3, 4:
					if s, err := w.Follow(ctx, execRef("a", "k", id), lifecycle.FollowRequest{From: -1, Attach: true, TakeOver: true}); err == nil {
						_, _ = s.Write([]byte("x"))
						_ = s.CloseWrite()
						if rnd.IntN(2) == 0 {
							_, _ = s.Next()
						}
						_ = s.Close()
					}
				case 5:
					_, _ = w.Kill(ctx, execRef("a", "k", id))
				case 6:
					_ = w.Write(ctx, execRef("a", "k", id), strings.NewReader("y"), rnd.IntN(2) == 0)
				case 7:
					req := process(id, "cat")
					req.Replace = rnd.IntN(2) == 0
					_, _ = w.start(ctx, req)
				case 8:
					if s, err := w.Follow(ctx, procRef("a", "k", id), lifecycle.FollowRequest{From: -1, Attach: true, TakeOver: rnd.IntN(2) == 0}); err == nil {
						_ = s.CloseWrite()
						_, _ = s.Next()
						_ = s.Close()
					}
				case 9:
					_, _ = w.Stop(ctx, procRef("a", "k", id))
					_, _ = w.Process(ctx, procRef("a", "k", id))
				case 10:
					_, _ = w.Processes(ctx, execRef("a", "k", ""))
					_, _ = w.Processes(ctx, procRef("a", "k", ""))
				case 11:
					if rnd.IntN(4) == 0 {
						_, _ = w.Delete(ctx, "a", "k")
					} else if cs := w.fake.Containers(); len(cs) > 0 && rnd.IntN(2) == 0 {
						w.fake.Die(cs[0].ID)
					}
				}
			}
		})
	}
	wg.Wait()
	must(t, second(w.Create(context.Background(), request("k"))))
	w.eventually("all is ended", func() bool {
		w.exec("k", "true") // which makes it again if need be
		execs, err1 := w.Processes(context.Background(), execRef("a", "k", ""))
		for _, e := range execs {
			_, _ = w.Kill(context.Background(), execRef("a", "k", e.ID))
		}
		processes, err2 := w.Processes(context.Background(), procRef("a", "k", ""))
		for _, p := range processes {
			_, _ = w.Stop(context.Background(), procRef("a", "k", p.ID))
		}
		return err1 == nil && err2 == nil
	})
	w.eventually("nothing is counted", func() bool {
		st := w.Status(context.Background(), "a")
		return st.RunningCommands == 0 && st.RunningProcesses == 0 && !w.Turn("a", "k") && w.Streams("a", "k") == 0
	})
}

// Whatever a sandbox says is an ID or a label of ours, it is harmless.
func FuzzSaid(f *testing.F) {
	for _, s := range []string{"exec.x", "proc.default", "exec.", "exec.a/b", `{"h":"x","t":30000,"i":true}`, `{"t":1e99}`, `{"t":-1}`, "[", `{"t":9223372036854775807}`} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		if d := lifecycle.LabelTimeout(s); d < 0 || d > 11*365*24*time.Hour {
			t.Errorf("a timeout of %s", d)
		}
		k, id := lifecycle.KindOf(s)
		if k != "" && (k+"."+id != s || id == "" || len(s) > 128 || strings.ContainsAny(id, "/ \n\x00")) {
			t.Errorf("kind %q of %q", k, id)
		}
	})
}
