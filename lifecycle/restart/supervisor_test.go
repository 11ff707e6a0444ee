package restart

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/containerd/errdefs"
	"github.com/google/go-cmp/cmp"

	"github.com/bermhq/berm/runtime/runtimetest/check"
)

// fake is an engine and a store. Its containers run until they are ended.
type fake struct {
	mu         sync.Mutex
	containers map[string]*Container
	rows       map[string]Row
	starts     []string      // "ID at offset"
	begun      time.Time     // of the test
	startErr   error         // what a start fails with
	startTakes time.Duration // how long one takes
	most, now  int           // starts at a time
	hung       bool          // looks at containers take forever, but for the one named "free"
	watcher    func(string)
	life       string        // of the engine; empty: it doesn't tell
	down       chan struct{} // closed when the engine goes away
}

func newFake() *fake {
	return &fake{containers: map[string]*Container{}, rows: map[string]Row{}, begun: time.Now(), down: make(chan struct{})}
}

func (f *fake) Watch(ctx context.Context, ready func(string), changed func(string)) error {
	f.mu.Lock()
	f.watcher = changed
	down, life := f.down, f.life
	f.mu.Unlock()
	ready(life)
	select {
	case <-ctx.Done():
	case <-down:
	}
	return errors.New("gone")
}

func (f *fake) List(context.Context) ([]string, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Collect(maps.Keys(f.containers)), nil
}

func (f *fake) Inspect(ctx context.Context, id string) (Container, error) {
	f.mu.Lock()
	if f.hung && id != "free" {
		f.mu.Unlock()
		<-ctx.Done()
		return Container{}, ctx.Err()
	}
	defer f.mu.Unlock()
	c := f.containers[id]
	if c == nil {
		return Container{}, errdefs.ErrNotFound
	}
	return *c, nil
}

func (f *fake) TakeOver(_ context.Context, id string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if _, ok := f.rows[id]; !ok {
		return errors.New("it was taken over before it had a row")
	}
	f.containers[id].EngineRestart = false
	return nil
}

func (f *fake) StartContainer(_ context.Context, id string) error {
	f.mu.Lock()
	f.now++
	f.most = max(f.most, f.now)
	takes := f.startTakes
	f.mu.Unlock()
	time.Sleep(takes) // of a synctest clock
	f.mu.Lock()
	defer f.mu.Unlock()
	f.now--
	f.starts = append(f.starts, fmt.Sprintf("%s at %v", id, time.Since(f.begun)))
	c := f.containers[id]
	switch {
	case c == nil:
		return errdefs.ErrNotFound
	case f.startErr != nil:
		return f.startErr
	case !c.Running:
		c.Running, c.StartedAt = true, time.Now()
	}
	return nil
}

func (f *fake) Restarts(context.Context) ([]Row, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Collect(maps.Values(f.rows)), nil
}

func (f *fake) PutRestart(_ context.Context, r Row) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.rows[r.ContainerID] = r
	return nil
}

func (f *fake) DeleteRestart(_ context.Context, id string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.rows, id)
	return nil
}

// add makes a container that runs.
func (f *fake) add(id string) *Container {
	c := &Container{Running: true, StartedAt: time.Now(), Expires: time.Now().Add(time.Hour)}
	f.mu.Lock()
	f.containers[id] = c
	f.mu.Unlock()
	return c
}

// do changes the engine.
func (f *fake) do(change func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change()
}

// end ends a container.
func (f *fake) end(id string, code int) {
	f.mu.Lock()
	c := f.containers[id]
	c.Running, c.ExitCode, c.FinishedAt = false, code, time.Now()
	watcher := f.watcher
	f.mu.Unlock()
	watcher(id)
	synctest.Wait()
}

// away ends the event stream; another connection succeeds.
func (f *fake) away() {
	f.mu.Lock()
	close(f.down)
	f.down = make(chan struct{})
	f.mu.Unlock()
}

// started returns the starts since the last call.
func (f *fake) started() []string {
	synctest.Wait()
	f.mu.Lock()
	defer f.mu.Unlock()
	got := f.starts
	f.starts = nil
	return got
}

func (f *fake) row(id string) Row {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.rows[id]
}

// run runs a supervisor of f until stop is called, or the test ends.
func run(t *testing.T, f *fake) (s *Supervisor, stop func()) {
	t.Helper()
	s, err := New(t.Context(), Options{Engine: f, Store: f})
	must(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	synctest.Wait()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(stop)
	return s, stop
}

func set(t *testing.T, s *Supervisor, id, policy string, retries int) {
	t.Helper()
	must(t, s.Set(t.Context(), id, Policy{policy, retries}, false))
}

func wantStarts(t *testing.T, f *fake, what string, want ...string) {
	t.Helper()
	if diff := cmp.Diff(want, f.started()); diff != "" {
		t.Errorf("%s: starts, -want +got:\n%s", what, diff)
	}
}

func TestBackoff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFake()
		f.add("a")
		s, _ := run(t, f)
		set(t, s, "a", OnFailure, 3)
		for range 4 {
			f.end("a", 1)
			if w := s.Waiting(); w > 1 {
				t.Errorf("%v wait", w)
			}
			time.Sleep(time.Minute)
		}
		wantStarts(t, f, "on-failure:3", "a at 100ms", "a at 1m0.1s", "a at 2m0.1s") // each ran for long
		if got := f.row("a"); got.Count != 3 || !got.Next.IsZero() {
			t.Errorf("row: %+v", got)
		}
		over, err := s.Starting(t.Context(), "a") // by hand
		must(t, err)
		f.add("a")
		f.end("a", 1)
		time.Sleep(time.Second)
		wantStarts(t, f, "while it is started by hand")
		over()
		synctest.Wait()
		if w := s.Waiting(); w != 1 {
			t.Errorf("%v wait", w)
		}
		time.Sleep(150 * time.Millisecond)
		f.end("a", 1)
		time.Sleep(250 * time.Millisecond)
		f.end("a", 0)
		time.Sleep(time.Hour)
		wantStarts(t, f, "by hand", "a at 4m1.1s", "a at 4m1.35s")
		if got := f.row("a").Count; got != 2 {
			t.Errorf("count %d", got)
		}
	})
}

func TestStopByHand(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFake()
		ids := []string{"a", "u", "f"}
		for _, id := range ids {
			f.add(id)
		}
		s, stop := run(t, f)
		set(t, s, "a", Always, 0)
		set(t, s, "u", UnlessStopped, 0)
		set(t, s, "f", OnFailure, 0)
		for _, id := range ids {
			if waited, err := s.Stopping(t.Context(), id, true); waited || err != nil {
				t.Errorf("%s: %v, %v", id, waited, err)
			}
			f.end(id, 143)
		}
		time.Sleep(time.Hour / 2)
		wantStarts(t, f, "after a stop by hand")
		stop()
		run(t, f) // Berm comes back
		got := f.started()
		slices.Sort(got)
		if diff := cmp.Diff([]string{"a at 30m0s", "f at 30m0s"}, got); diff != "" {
			t.Errorf("after a restart of Berm: %s", diff)
		}
		if f.row("a").Stopped || !f.row("u").Stopped {
			t.Error("stopped by hand is wrong")
		}
	})
}

// TestStopWhileWaiting has a stop by hand cancel a restart that waits, and wait for one
// that goes on.
func TestStopWhileWaiting(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFake()
		f.add("a")
		s, _ := run(t, f)
		set(t, s, "a", Always, 0)
		f.end("a", 1)
		if waited, err := s.Stopping(t.Context(), "a", true); !waited || err != nil {
			t.Errorf("%v, %v", waited, err)
		}
		time.Sleep(time.Minute)
		wantStarts(t, f, "cancelled")

		over, err := s.Starting(t.Context(), "a")
		must(t, err)
		f.add("a")
		over()
		f.do(func() { f.startTakes = time.Second })
		f.end("a", 1)
		time.Sleep(500 * time.Millisecond)
		begun := time.Now()
		if waited, err := s.Stopping(t.Context(), "a", true); !waited || err != nil || time.Since(begun) < 500*time.Millisecond { // it may have ended again
			t.Errorf("%v, %v after %v", waited, err, time.Since(begun))
		}
		if len(f.started()) != 1 || !f.containers["a"].Running {
			t.Error("the start wasn't waited for")
		}
		f.end("a", 137)
		time.Sleep(time.Minute)
		wantStarts(t, f, "after the stop")
	})
}

func TestUpdate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFake()
		f.add("a")
		s, _ := run(t, f)
		set(t, s, "a", Always, 0)
		f.end("a", 0)
		set(t, s, "a", "no", 0)
		time.Sleep(time.Minute)
		wantStarts(t, f, "after --restart=no")
		over, err := s.Starting(t.Context(), "a")
		must(t, err)
		f.add("a")
		over()
		f.end("a", 0)
		time.Sleep(time.Minute)
		wantStarts(t, f, "with --restart=no")
	})
}

// TestBrokenStream has the event stream end. Only a new life of the engine's starts what was
// stopped by hand; what ended meanwhile is restarted either way.
func TestBrokenStream(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFake()
		f.life = "first"
		f.add("stopped")
		f.add("ends")
		s, _ := run(t, f)
		set(t, s, "stopped", Always, 0)
		set(t, s, "ends", Always, 0)
		if _, err := s.Stopping(t.Context(), "stopped", true); err != nil {
			t.Fatal(err)
		}
		f.end("stopped", 143)
		f.do(func() {
			c := f.containers["ends"]
			c.Running, c.FinishedAt = false, time.Now()
		})
		f.away()
		time.Sleep(time.Minute)
		wantStarts(t, f, "in the same life", "ends at 1.1s")
		f.do(func() { f.life = "second" })
		f.away()
		time.Sleep(time.Minute)
		wantStarts(t, f, "in the next life", "stopped at 1m1s")
	})
}

// TestLoss kills Berm, or the engine, at moments of a restart: afterwards all that should
// run does, started once.
func TestLoss(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFake()
		for _, id := range []string{"ran", "waits", "created", "by label", "new"} {
			f.add(id)
		}
		*f.containers["created"] = Container{Expires: time.Now().Add(time.Hour), Policy: Policy{Name: Always}}
		f.containers["by label"].Policy = Policy{Name: Always}
		f.containers["new"].Policy = Policy{Name: "no"}
		s, stop := run(t, f)
		for _, id := range []string{"ran", "waits"} {
			set(t, s, id, Always, 0)
		}
		f.end("waits", 1)
		stop()
		f.end("ran", 0) // while Berm is down
		f.end("by label", 0)
		f.rows["gone"] = Row{ContainerID: "gone", Policy: Policy{Name: Always}}
		s, _ = run(t, f)
		got := f.started()
		slices.Sort(got)
		if diff := cmp.Diff([]string{"by label at 0s", "ran at 0s", "waits at 0s"}, got); diff != "" {
			t.Errorf("after a restart of Berm: %s", diff)
		}
		for id, want := range map[string]bool{"gone": false, "new": false, "created": true, "by label": true} {
			if _, ok := f.rows[id]; ok != want {
				t.Errorf("row of %s: %v", id, ok)
			}
		}

		// The engine goes away while it starts one, and another waits.
		time.Sleep(time.Second)
		f.do(func() { f.startErr = errdefs.ErrUnavailable })
		f.end("ran", 0)
		time.Sleep(minBackoff)
		if got := f.started(); len(got) != 1 {
			t.Errorf("tried: %q", got)
		}
		f.do(func() {
			c := f.containers["by label"] // it doesn't survive the engine
			c.Running, c.FinishedAt = false, time.Now()
			f.startErr = nil
		})
		f.away()
		time.Sleep(2 * retryEvery)
		got = f.started()
		slices.Sort(got)
		if len(got) != 2 || f.row("ran").Count != 0 {
			t.Errorf("after the engine's restart: %q, %+v", got, f.row("ran"))
		}

		// A removed container's row goes.
		f.do(func() { delete(f.containers, "ran") })
		f.watcher("ran")
		synctest.Wait()
		if _, ok := f.rows["ran"]; ok {
			t.Error("the row of a removed container stays")
		}
		stop()
		if _, ok := s.Row("waits"); !ok {
			t.Error("no row")
		}
	})
}

// TestAdopt takes over containers of a version before, which the engine restarts.
func TestAdopt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFake()
		for _, id := range []string{"runs", "stopped", "has a row"} {
			c := f.add(id)
			c.Policy, c.EngineRestart = Policy{Name: UnlessStopped}, true
		}
		f.rows["has a row"] = Row{ContainerID: "has a row", Policy: Policy{Name: Always}}
		c := f.containers["stopped"]
		c.Running, c.FinishedAt = false, time.Now()
		s, _ := run(t, f)
		for id, c := range f.containers {
			if c.EngineRestart {
				t.Errorf("%s: the engine still restarts it", id)
			}
		}
		if r, _ := s.Row("has a row"); r.Name != Always {
			t.Errorf("the row was replaced: %+v", r)
		}
		for id := range f.containers {
			if id != "stopped" {
				f.end(id, 1)
			}
		}
		time.Sleep(time.Second)
		if got := f.started(); len(got) != 2 {
			t.Errorf("starts: %q", got)
		}
	})
}

// TestStartFails gives a container up that can't be started, as the engine does, until
// the next boot.
func TestStartFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFake()
		f.add("a")
		s, _ := run(t, f)
		set(t, s, "a", Always, 0)
		f.do(func() { f.startErr = errdefs.ErrUnavailable })
		f.end("a", 1)
		time.Sleep(2 * time.Second)
		wantStarts(t, f, "the engine can't be asked", "a at 100ms", "a at 1.1s")
		f.do(func() { f.startErr = errors.New("denied") })
		time.Sleep(time.Hour/2 - 2*time.Second)
		wantStarts(t, f, "denied", "a at 3.1s")
		f.do(func() { f.startErr = nil })
		f.away()
		time.Sleep(retryEvery)
		wantStarts(t, f, "at the next boot", "a at 30m1s")
		f.do(func() { f.containers["a"].Expires = time.Now() })
		f.end("a", 1)
		time.Sleep(time.Minute)
		wantStarts(t, f, "expired")
	})
}

func TestStartsAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFake()
		f.startTakes = time.Second
		for i := range 20 {
			id := fmt.Sprint(i)
			c := f.add(id)
			c.Running, c.FinishedAt = false, time.Now()
			f.rows[id] = Row{ContainerID: id, Policy: Policy{Name: Always}}
		}
		run(t, f)
		time.Sleep(10 * time.Second)
		if n := len(f.started()); n != 20 || f.most != maxSteps {
			t.Errorf("%d starts, %d at a time", n, f.most)
		}
	})
}

// TestHungContainers has looks at many containers hang, as those of a tenant do that reads
// archives of them slowly: another container is restarted all the same, and soon.
func TestHungContainers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFake()
		for i := range 16 {
			f.add(fmt.Sprint(i))
		}
		f.add("free")
		s, _ := run(t, f)
		for id := range f.containers {
			set(t, s, id, Always, 0)
		}
		f.do(func() { f.hung = true })
		for i := range 16 {
			f.end(fmt.Sprint(i), 1)
		}
		time.Sleep(10 * time.Minute)
		wantStarts(t, f, "hung")
		worst := time.Duration(0)
		for range 20 {
			ended := time.Now()
			f.end("free", 1)
			for len(f.started()) == 0 {
				time.Sleep(time.Second / 10)
			}
			worst = max(worst, time.Since(ended))
			time.Sleep(steady)
		}
		if worst > 2*lookTime {
			t.Errorf("restarted after %v", worst)
		}
	})
}

var must = check.Must // ends a test if a step of its own fails
