package lifecycle_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/containerd/errdefs"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/lifecycle/mountpin/mountpintest"
	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/runtimetest"
)

func ptr[T any](v T) *T { return &v }

func TestCreateReuseConflict(t *testing.T) {
	w := newWorld(t, setup{})
	first := w.create(request("chat"))
	if first.Result != lifecycle.ResultCreated || first.Sandbox.Status != lifecycle.StatusRunning {
		t.Fatalf("first: %+v", first)
	}
	before := w.fake.Calls("create") + w.fake.Calls("inspect") + w.fake.Calls("list") + w.fake.Calls("image")
	second := w.create(request("chat"))
	if second.Result != lifecycle.ResultReused || second.Sandbox.SessionID != first.Sandbox.SessionID {
		t.Fatalf("second: %+v", second)
	}
	other := request("chat")
	other.Request.MemoryMB = ptr(int64(256))
	other.AgentID = "x"
	_, err := w.Create(context.Background(), other)
	var conflict *lifecycle.ConflictError
	if !errors.As(err, &conflict) || len(conflict.Differences) != 2 {
		t.Fatalf("conflict: %v", err)
	}
	if conflict.SessionID != first.Sandbox.SessionID || conflict.Differences[0].Field != "memory_mb" || conflict.Differences[1].Field != "agent_id" {
		t.Errorf("conflict: %+v", conflict)
	}
	if after := w.fake.Calls("create") + w.fake.Calls("inspect") + w.fake.Calls("list") + w.fake.Calls("image"); after != before {
		t.Errorf("reuse and conflict made %d engine calls", after-before)
	}
	for name, want := range map[string]float64{"created": 1, "reused": 1, "conflict": 1, "replaced": 0, "error": 0} {
		if got := w.metric("berm_sandbox_creates_total{result=" + name + "}"); got != want {
			t.Errorf("creates %s: %v, want %v", name, got, want)
		}
	}
	if got := w.metric("berm_sandboxes_active"); got != 1 {
		t.Errorf("active: %v", got)
	}
}

func TestTenantsAreApart(t *testing.T) {
	w := newWorld(t, setup{})
	a := w.create(lifecycle.CreateRequest{Tenant: "a", Key: "k"})
	b := w.create(lifecycle.CreateRequest{Tenant: "b", Key: "k"})
	if a.Sandbox.SessionID == b.Sandbox.SessionID {
		t.Fatal("two tenants share a sandbox")
	}
	must(t, second(w.Delete(context.Background(), "b", "k")))
	if _, err := w.Get(context.Background(), "a", "k"); err != nil {
		t.Errorf("b's delete took a's sandbox: %v", err)
	}
	if list, _, _ := w.List(context.Background(), "b", lifecycle.ListOptions{}); len(list) != 0 {
		t.Errorf("b sees %v", list)
	}
}

func TestUUIDKeyIsCanonical(t *testing.T) {
	w := newWorld(t, setup{})
	upper := w.create(request("6F9619FF-8B86-D011-B42D-00C04FC964FF"))
	if upper.Sandbox.Key != "6f9619ff-8b86-d011-b42d-00c04fc964ff" {
		t.Errorf("key %q", upper.Sandbox.Key)
	}
	if again := w.create(request(" 6f9619ff-8b86-d011-b42d-00c04fc964ff ")); again.Result != lifecycle.ResultReused {
		t.Errorf("the same UUID spelled otherwise: %s", again.Result)
	}
}

func TestThousandCreatesOfOneKey(t *testing.T) {
	w := newWorld(t, setup{fake: runtimetest.FakeOptions{Delay: func(string) time.Duration { return 5 * time.Millisecond }}})
	var wg sync.WaitGroup
	var created atomic.Int32
	sessions := make([]string, 1000)
	for i := range sessions {
		wg.Go(func() {
			res, err := w.Create(context.Background(), request("one"))
			if err != nil {
				t.Error(err)
				return
			}
			if res.Result == lifecycle.ResultCreated {
				created.Add(1)
			}
			sessions[i] = res.Sandbox.SessionID
		})
	}
	wg.Wait()
	for _, s := range sessions {
		if s != sessions[0] {
			t.Fatalf("sessions %s and %s", s, sessions[0])
		}
	}
	if created.Load() != 1 || w.fake.Calls("create") != 1 || len(w.fake.Containers()) != 1 {
		t.Errorf("%d say created, %d engine creates, %d containers", created.Load(), w.fake.Calls("create"), len(w.fake.Containers()))
	}
}

func TestExpiredIsReplaced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, setup{})
		req := request("k")
		req.Request.TTL = ptr(time.Minute)
		first := w.create(req)
		time.Sleep(time.Until(first.Sandbox.ExpiresAt) - time.Nanosecond)
		if res := w.create(req); res.Result != lifecycle.ResultReused {
			t.Fatalf("a moment before its end: %s", res.Result)
		}
		time.Sleep(time.Nanosecond) // equality counts as expired
		second := w.create(req)
		if second.Result != lifecycle.ResultReplaced || second.Recreated || second.Sandbox.SessionID == first.Sandbox.SessionID {
			t.Fatalf("at its end: %+v", second)
		}
		if cs := w.fake.Containers(); len(cs) != 1 || cs[0].ID != second.Sandbox.ContainerID {
			t.Errorf("containers: %v", cs)
		}
		if n := w.store.len(); n != 1 {
			t.Errorf("%d records in the store", n)
		}
	})
}

func TestOldThatCantBeRemovedStays(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fake, breakOp := breaking("")
		w := newWorld(t, setup{fake: fake})
		req := request("k")
		req.Request.TTL = ptr(time.Minute)
		first := w.create(req)
		time.Sleep(time.Minute)
		breakOp("remove")
		if _, err := w.Create(context.Background(), req); !errorIs[*lifecycle.StartError](err) || !errors.Is(err, errBroken) {
			t.Fatalf("create: %v", err)
		}
		sb, err := w.Get(context.Background(), "a", "k")
		if err != nil || sb.SessionID != first.Sandbox.SessionID || w.fake.Calls("create") != 1 {
			t.Errorf("old record: %+v, %v; %d creates", sb, err, w.fake.Calls("create"))
		}
		breakOp("")
		if res := w.create(req); res.Result != lifecycle.ResultReplaced {
			t.Errorf("afterwards: %s", res.Result)
		}
	})
}

// crippledEngine makes containers that lack something.
type crippledEngine struct {
	*runtimetest.Fake
	cripple func(*runtime.Container)
}

func (e crippledEngine) Create(ctx context.Context, spec runtime.Spec) (runtime.Container, error) {
	c, err := e.Fake.Create(ctx, spec)
	e.cripple(&c)
	return c, err
}

func TestLaterStepFails(t *testing.T) {
	for name, tt := range map[string]struct {
		cripple func(*runtime.Container)
		after   func(op, _ string) error
		store   error
		left    int // only the sweep can remove it
	}{
		"no id":      {cripple: func(c *runtime.Container) { c.ID = "" }, left: 1},
		"no address": {cripple: func(c *runtime.Container) { c.IP = "" }},
		"store":      {store: errBroken},
		"create after the container is there": {left: 1, after: func(op, _ string) error {
			if op == "create" {
				return errBroken
			}
			return nil
		}},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, setup{fake: runtimetest.FakeOptions{FailAfter: tt.after}, wrap: func(f *runtimetest.Fake) runtime.AgentRuntime {
				if tt.cripple == nil {
					return f
				}
				return crippledEngine{f, tt.cripple}
			}})
			w.store.setFail(tt.store)
			req := request("k")
			req.Request.Network = ptr("on")
			if _, err := w.Create(t.Context(), req); !errorIs[*lifecycle.StartError](err) || errors.Is(err, errBroken) != (tt.cripple == nil) {
				t.Errorf("create: %v", err)
			}
			if _, err := w.Get(t.Context(), "a", "k"); !errdefs.IsNotFound(err) {
				t.Errorf("a failed create is on record: %v", err)
			}
			if n := len(w.fake.Containers()); n != tt.left {
				t.Errorf("%d containers are left", n)
			}
			w.eventually("nothing is left", func() bool { w.sweep(); return len(w.fake.Containers()) == 0 })
			if got := w.metric("berm_sandboxes_active"); got != 0 {
				t.Errorf("active: %v", got)
			}
		})
	}
}

func TestCallerGoesAway(t *testing.T) {
	gate := make(chan struct{})
	entered := make(chan struct{})
	w := newWorld(t, setup{fake: runtimetest.FakeOptions{Fail: func(op, _ string) error {
		if op == "create" {
			close(entered)
			<-gate
		}
		return nil
	}}})
	ctx, cancel := context.WithCancel(context.Background())
	done := later(func() error { return second(w.Create(ctx, request("k"))) })
	<-entered
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Fatalf("create: %v", err)
	}
	if got := w.status("k"); got != lifecycle.StatusStarting {
		t.Errorf("meanwhile: %s", got)
	}
	close(gate)
	if res := w.create(request("k")); res.Result != lifecycle.ResultReused || w.fake.Calls("create") != 1 || w.store.len() != 1 {
		t.Errorf("afterwards: %+v, %d creates, %d records", res, w.fake.Calls("create"), w.store.len())
	}
	if n := w.metric("berm_sandbox_creates_total{result=created}"); n != 1 {
		t.Errorf("%v counted as made", n)
	}
}

func TestCapacity(t *testing.T) {
	w := newWorld(t, setup{settings: lifecycle.Settings{MaxSandboxes: 3}})
	var full *lifecycle.CapacityError
	for _, key := range []string{"1", "2"} {
		req := request(key)
		req.MaxSandboxes = 2
		w.create(req)
	}
	third := request("3")
	third.MaxSandboxes = 2
	if _, err := w.Create(context.Background(), third); !errors.As(err, &full) || full.RetryAfter == 0 {
		t.Errorf("over the caller's cap: %v", err)
	}
	again := request("2")
	again.MaxSandboxes = 2
	w.create(again)
	w.create(lifecycle.CreateRequest{Tenant: "b", Key: "1"})
	if _, err := w.Create(context.Background(), lifecycle.CreateRequest{Tenant: "b", Key: "2"}); !errors.As(err, &full) {
		t.Errorf("over the service's cap: %v", err)
	}
}

func TestPolicyAndValidation(t *testing.T) {
	w := newWorld(t, setup{})
	for _, tt := range []struct {
		name    string
		change  func(*lifecycle.CreateRequest)
		invalid bool // else denied
	}{
		{"key", func(r *lifecycle.CreateRequest) { r.Key = "../x" }, true},
		{"long key", func(r *lifecycle.CreateRequest) { r.Key = string(make([]byte, 129)) }, true},
		{"relative volume", func(r *lifecycle.CreateRequest) { r.VolumePath = "srv" }, true},
		{"volume with a NUL", func(r *lifecycle.CreateRequest) { r.VolumePath = "/srv/\x00" }, false},
		{"agent id", func(r *lifecycle.CreateRequest) { r.AgentID = "a\nb" }, true},
		{"metadata", func(r *lifecycle.CreateRequest) { r.Metadata = map[string]string{"": "x"} }, true},
		{"mount", func(r *lifecycle.CreateRequest) { r.Request.HostPath = ptr("/etc") }, false},
		{"volume", func(r *lifecycle.CreateRequest) { r.VolumePath = "/etc" }, false},
		{"image", func(r *lifecycle.CreateRequest) { r.Request.Image = ptr("evil/image") }, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			req := request("k")
			tt.change(&req)
			_, err := w.Create(context.Background(), req)
			var denied *policy.DeniedError
			if invalid := errdefs.IsInvalidArgument(err); invalid != tt.invalid || !invalid && !errors.As(err, &denied) {
				t.Errorf("%v", err)
			}
		})
	}
	if n := w.fake.Calls("create"); n != 0 {
		t.Errorf("%d creates reached the engine", n)
	}
}

// A create that waits for its key, behind one that then waits for its image, is answered at once.
func TestCreateJoinsWhileItWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := pullingWorld(t, func(context.Context, func(runtime.PullProgress)) error {
			time.Sleep(10 * time.Minute)
			return nil
		})
		req := request("k")
		req.Request.Image = ptr(remoteImage)
		start := time.Now()
		var answered sync.WaitGroup
		err := w.WithoutSandbox(context.Background(), "a", "k", func(context.Context) error {
			for range 3 {
				answered.Go(func() {
					if _, err := w.Create(context.Background(), req); !errorIs[*lifecycle.PullingError](err) || time.Since(start) != time.Second {
						t.Errorf("create after %s: %v", time.Since(start), err)
					}
				})
			}
			time.Sleep(time.Second)
			return nil
		})
		if err != nil {
			t.Error(err)
		}
		answered.Wait()
		time.Sleep(11 * time.Minute)
		if st := w.status("k"); st != lifecycle.StatusRunning {
			t.Errorf("it is %s", st)
		}
	})
}

func TestPullIsAnsweredAndShared(t *testing.T) {
	gate := make(chan struct{})
	w := pullingWorld(t, func(ctx context.Context, progress func(runtime.PullProgress)) error {
		progress(runtime.PullProgress{Status: "downloading", CurrentBytes: 1, TotalBytes: 2})
		select {
		case <-gate:
		case <-ctx.Done():
		}
		return ctx.Err()
	})
	req := request("k")
	req.Request.Image = ptr(remoteImage)
	var pulling *lifecycle.PullingError
	for range 3 {
		if _, err := w.Create(context.Background(), req); !errors.As(err, &pulling) || pulling.RetryAfter <= 0 {
			t.Fatalf("create: %v", err)
		}
	}
	other := request("other")
	other.Request.Image = ptr(remoteImage)
	if _, err := w.Create(context.Background(), other); !errors.As(err, &pulling) {
		t.Fatalf("create: %v", err)
	}
	w.eventually("progress is shown", func() bool {
		sb, err := w.Get(context.Background(), "a", "k")
		return err == nil && sb.Status == lifecycle.StatusStarting && sb.Pull != nil && sb.Pull.TotalBytes == 2
	})
	req2 := req
	req2.AgentID = "another"
	if _, err := w.Create(context.Background(), req2); !errorIs[*lifecycle.ConflictError](err) {
		t.Errorf("another spec meanwhile: %v", err)
	}
	close(gate)
	// A command with the spec waits for the image instead of being sent away.
	res, err := w.Exec(context.Background(), lifecycle.ExecRequest{Tenant: "a", Key: "k", Create: &req, Command: []string{"true"}})
	if err != nil || !res.OK() {
		t.Fatalf("exec: %+v, %v", res, err)
	}
	w.eventually("the other sandbox is made", func() bool { return w.status("other") == lifecycle.StatusRunning })
	if n := w.fake.Calls("pull"); n != 1 {
		t.Errorf("%d pulls", n)
	}
}

func TestFailedPullIsToldOnce(t *testing.T) {
	const ref = "registry.local/team/missing:1"
	gate := make(chan struct{})
	w := newWorld(t, setup{
		policy: "version: 1\nimages: {allow: [registry.local/team/missing]}\n",
		fake: runtimetest.FakeOptions{Fail: func(op, _ string) error {
			if op == "pull" {
				<-gate
			}
			return nil
		}},
	})
	req := request("k")
	req.Request.Image = ptr(ref)
	if _, err := w.Create(context.Background(), req); !errorIs[*lifecycle.PullingError](err) {
		t.Fatalf("create: %v", err)
	}
	close(gate)
	w.eventually("the failure shows", func() bool { return w.status("k") == lifecycle.StatusFailed })
	if _, err := w.Create(context.Background(), req); !errorIs[*lifecycle.StartError](err) || !errdefs.IsNotFound(err) {
		t.Errorf("told: %v", err)
	}
	if _, err := w.Create(context.Background(), req); err == nil {
		t.Error("afterwards: made without its image")
	}
	w.eventually("it is pulled again", func() bool { return w.fake.Calls("pull") == 2 })
}

func TestPullNever(t *testing.T) {
	w := newWorld(t, setup{policy: "version: 1\nimages: {allow: [registry.local/x], pull: never}\n"})
	req := request("k")
	req.Request.Image = ptr("registry.local/x")
	if _, err := w.Create(context.Background(), req); !errdefs.IsNotFound(err) {
		t.Errorf("create: %v", err)
	}
	if n := w.fake.Calls("pull"); n != 0 {
		t.Errorf("%d pulls", n)
	}
}

// countingHolder counts the holds that go on.
type countingHolder struct {
	mountpintest.Holder
	held *atomic.Int64
}

func (h countingHolder) Hold(ctx context.Context, name string, mounts []policy.Mount) ([]string, func() error, error) {
	h.held.Add(1)
	sources, _, err := h.Holder.Hold(ctx, name, mounts)
	return sources, func() error { h.held.Add(-1); return nil }, err
}

// A panic ends the create, keeps nothing of it, and is counted.
func TestCreatePanics(t *testing.T) {
	var left, held atomic.Int64
	dir := t.TempDir()
	req := mounting("k", dir, 0)
	w := newWorld(t, setup{policy: "version: 1\nmounts: {allowed_roots: [" + dir + "]}\n", holder: countingHolder{held: &held}, settings: lifecycle.Settings{EngineParallel: 1}, fake: runtimetest.FakeOptions{Fail: func(op, _ string) error {
		if op == "create" && left.Add(-1) >= 0 {
			panic("boo")
		}
		return nil
	}}})
	left.Store(3)
	for range 3 {
		if res, err := w.Create(context.Background(), req); err == nil {
			t.Errorf("got %+v", res)
		}
	}
	if n := held.Load(); n != 0 {
		t.Errorf("%d are held", n)
	}
	w.create(req)
	if err := testutil.GatherAndCompare(w.reg, strings.NewReader(`# HELP berm_runtime_errors_total Failed calls to the engine, by operation and error type.
# TYPE berm_runtime_errors_total counter
berm_runtime_errors_total{error_type="panic",operation="create"} 3
`), "berm_runtime_errors_total"); err != nil {
		t.Error(err)
	}
}
