package lifecycle_test

import (
	"context"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/containerd/errdefs"
	"github.com/google/uuid"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/runtimetest"
)

func TestDelete(t *testing.T) {
	w := newWorld(t, setup{})
	made := w.create(request("k"))
	res, err := w.Delete(context.Background(), "a", "k")
	if err != nil || res.Result != lifecycle.ResultDeleted || res.SessionID != made.Sandbox.SessionID || res.ContainerID != made.Sandbox.ContainerID {
		t.Fatalf("delete: %+v, %v", res, err)
	}
	calls := w.fake.Calls("remove")
	res, err = w.Delete(context.Background(), "a", "k")
	if err != nil || res.Result != lifecycle.ResultNotFound || w.fake.Calls("remove") != calls {
		t.Errorf("again: %+v, %v", res, err)
	}
	must(t, w.fake.Remove(context.Background(), w.create(request("k")).Sandbox.ContainerID))
	if res, err := w.Delete(context.Background(), "a", "k"); err != nil || res.Result != lifecycle.ResultDeleted {
		t.Errorf("one whose container has vanished: %+v, %v", res, err)
	}
	if w.store.len() != 0 || len(w.fake.Containers()) != 0 {
		t.Error("something is left")
	}
}

func TestDeleteFailsAndKeeps(t *testing.T) {
	fake, _ := breaking("remove")
	w := newWorld(t, setup{fake: fake})
	w.create(request("k"))
	if _, err := w.Delete(context.Background(), "a", "k"); !errors.Is(err, errBroken) {
		t.Fatalf("delete: %v", err)
	}
	if got := w.status("k"); got != lifecycle.StatusRunning {
		t.Errorf("status %s", got)
	}
	if w.metric("berm_sandbox_deletes_total{result=error}") != 1 || w.metric("berm_sandboxes_active") != 1 {
		t.Error("metrics")
	}
}

// One failure doesn't keep the others from being swept, and the next sweep makes up for it.
func TestSweepCollectsTheEnded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		stuck := ""
		w := newTraced(t, setup{fake: runtimetest.FakeOptions{Fail: func(op, id string) error {
			if op == "remove" && id == stuck {
				return errBroken
			}
			return nil
		}}})
		for _, key := range []string{"stuck", "gone", "renewed"} {
			w.createFor(key, time.Minute)
		}
		w.create(request("long"))
		sb, err := w.Get(t.Context(), "a", "stuck")
		must(t, err)
		stuck = sb.ContainerID
		time.Sleep(30 * time.Second)
		must(t, second(w.Renew(t.Context(), "a", "renewed", 0)))
		time.Sleep(30 * time.Second)
		if swept, err := w.Sweep(t.Context()); err == nil || swept != (lifecycle.Swept{Expired: 2, Cleaned: 1, Errors: 1}) {
			t.Errorf("with a broken engine: %+v, %v", swept, err)
		}
		if _, err := w.Get(t.Context(), "a", "gone"); !errdefs.IsNotFound(err) {
			t.Errorf("gone: %v", err)
		}
		if got := w.status("stuck"); got != lifecycle.StatusExpired {
			t.Errorf("stuck: %s", got)
		}
		if w.status("renewed") != lifecycle.StatusRunning || w.status("long") != lifecycle.StatusRunning {
			t.Error("a live one was swept")
		}
		stuck = ""
		for _, want := range []lifecycle.Swept{{Expired: 1, Cleaned: 1}, {}} {
			if swept, err := w.Sweep(t.Context()); err != nil || swept != want {
				t.Errorf("afterwards: %+v, %v", swept, err)
			}
		}
		for name, want := range map[string]float64{"cleanups_total{result=deleted}": 2, "cleanups_total{result=error}": 1, "cleanup_errors_total{error_type=internal}": 1} {
			if n := w.metric("berm_sandbox_" + name); n != want {
				t.Errorf("%s is %v", name, n)
			}
		}
		names := map[string]int{}
		for _, s := range w.spans.Ended() {
			names[s.Name()]++
			if s.Name() == "sweep" && s.Parent().IsValid() {
				t.Error("a sweep has a parent")
			}
		}
		if names["sweep"] != 3 || names["sweep.sandbox"] != 3 {
			t.Errorf("spans: %v", names)
		}
	})
}

// A sweep that waits for a key finds out that its sandbox was removed meanwhile.
func TestSweepLooksAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, setup{fake: runtimetest.FakeOptions{Delay: func(op string) time.Duration {
			if op == "remove" {
				return time.Second
			}
			return 0
		}}})
		w.createFor("k", time.Minute)
		time.Sleep(time.Minute)
		deleted := later(func() error { return second(w.Delete(t.Context(), "a", "k")) })
		synctest.Wait()
		if swept, err := w.Sweep(t.Context()); err != nil || swept != (lifecycle.Swept{Expired: 1}) {
			t.Errorf("swept %+v, %v", swept, err)
		}
		must(t, <-deleted)
	})
}

func TestSweepSparesOthers(t *testing.T) { synctest.Test(t, sweepSparesOthers) }

func sweepSparesOthers(t *testing.T) {
	ctx := context.Background()
	w := newWorld(t, setup{})
	other := newWorld(t, setup{engine: w.fake, owner: "another"})
	theirs := other.create(request("k")).Sandbox
	mine := w.create(request("k")).Sandbox
	// A stranger's, one with our label but nothing else, and a real orphan.
	for name, labels := range map[string]map[string]string{
		"stranger": nil,
		"odd":      {lifecycle.LabelOwner: "owner"},
	} {
		must(t, second(w.fake.Create(ctx, runtime.Spec{Name: name, Image: runtimetest.DefaultImage, Labels: labels})))
	}
	c, err := w.fake.Inspect(ctx, mine.ContainerID)
	must(t, err)
	for _, name := range []string{"orphan", "late"} {
		labels := maps.Clone(c.Labels)
		labels[lifecycle.LabelSessionID] = uuid.NewString()
		newSealer("owner", nil, nil).Seal(lifecycle.ObjectContainer, labels)
		time.Sleep(2 * time.Second)
		must(t, second(w.fake.Create(ctx, runtime.Spec{Name: name, Image: runtimetest.DefaultImage, Labels: labels})))
	}
	if swept := w.sweep(); swept.Orphans != 1 || swept.Cleaned != 1 {
		t.Errorf("swept %+v", swept)
	}
	left := map[string]bool{}
	for _, c := range w.fake.Containers() {
		left[c.Name] = true
	}
	if left["orphan"] {
		t.Error("the orphan is left")
	}
	for _, name := range []string{"stranger", "odd", "late", "berm-" + theirs.SessionID, "berm-" + mine.SessionID} {
		if !left[name] {
			t.Errorf("%s was swept", name)
		}
	}
	w.stop()
	other.stop()
}

func TestIdleTTL(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, setup{policy: "version: 1\nprofiles: {default: {max_timeout: 1h}}\n"})
		req := request("k")
		req.Request.IdleTTL = ptr(time.Minute)
		sb := w.create(req).Sandbox
		if want := sb.LastUsedAt.Add(time.Minute); !sb.IdleExpiresAt.Equal(want) {
			t.Fatalf("idle expiry %s, want %s", sb.IdleExpiresAt, want)
		}
		time.Sleep(50 * time.Second)
		w.exec("k", "true")
		time.Sleep(50 * time.Second)
		if got := w.status("k"); got != lifecycle.StatusRunning {
			t.Fatalf("50 s after a command: %s", got)
		}
		// A running command keeps it, however long it runs.
		long := int64(300)
		done := later(func() error {
			return second(w.Exec(context.Background(), lifecycle.ExecRequest{Tenant: "a", Key: "k", Command: []string{"sleep", "200"}, Timeout: &long}))
		})
		time.Sleep(150 * time.Second)
		if swept := w.sweep(); swept.Expired != 0 {
			t.Fatal("it idled out under a command")
		}
		must(t, <-done)
		time.Sleep(time.Minute)
		if swept := w.sweep(); swept.Cleaned != 1 {
			t.Errorf("swept %+v", swept)
		}
	})
}

func TestRenewStopsAtTheDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, setup{policy: "version: 1\nttl: {default: 1m, max_lifetime: 150s}\n"})
		sb := w.create(request("k")).Sandbox
		if got := sb.Deadline.Sub(sb.CreatedAt); got != 150*time.Second {
			t.Fatalf("deadline after %s", got)
		}
		for _, want := range []time.Duration{110 * time.Second, 150 * time.Second, 150 * time.Second} {
			time.Sleep(50 * time.Second)
			got, err := w.Renew(context.Background(), "a", "k", 0)
			if want == 150*time.Second && time.Since(sb.CreatedAt) >= want {
				if !errdefs.IsNotFound(err) {
					t.Errorf("renewed past the deadline: %+v, %v", got, err)
				}
				continue
			}
			if err != nil || got.ExpiresAt.Sub(sb.CreatedAt) != want {
				t.Errorf("expires %s after creation, want %s: %v", got.ExpiresAt.Sub(sb.CreatedAt), want, err)
			}
		}
		if got := w.status("k"); got != lifecycle.StatusExpired {
			t.Errorf("at the deadline: %s", got)
		}
	})
}

func TestPauseAndResume(t *testing.T) {
	ctx := context.Background()
	w := newWorld(t, setup{})
	w.create(request("k"))
	for range 2 {
		if sb, err := w.Pause(ctx, "a", "k"); err != nil || sb.Status != lifecycle.StatusPaused {
			t.Fatalf("pause: %+v, %v", sb, err)
		}
	}
	if _, err := w.Exec(ctx, lifecycle.ExecRequest{Tenant: "a", Key: "k", Command: []string{"true"}}); !errorIs[*lifecycle.StateError](err) {
		t.Errorf("exec while paused: %v", err)
	}
	if res := w.create(request("k")); res.Result != lifecycle.ResultReused {
		t.Errorf("create while paused: %s", res.Result)
	}
	if sb, err := w.Resume(ctx, "a", "k"); err != nil || sb.Status != lifecycle.StatusRunning {
		t.Fatalf("resume: %+v, %v", sb, err)
	}
	w.exec("k", "true")
}

func TestDeadContainerIsMadeAgain(t *testing.T) {
	w := newWorld(t, setup{})
	req := request("k")
	req.Metadata = map[string]string{"m": "1"}
	req.Request.Env = map[string]string{"E": "1"}
	first := w.create(req).Sandbox
	w.die("k")
	res, err := w.Exec(context.Background(), lifecycle.ExecRequest{Tenant: "a", Key: "k", Command: []string{"env"}})
	if err != nil || !res.Recreated || !res.OK() || !strings.Contains(res.Stdout, "E=1") {
		t.Fatalf("exec: %+v, %v", res, err)
	}
	second, err := w.Get(context.Background(), "a", "k")
	if err != nil || second.SessionID == first.SessionID || second.Metadata["m"] != "1" {
		t.Errorf("second: %+v, %v", second, err)
	}
	w.die("k")
	if res := w.create(req); res.Result != lifecycle.ResultReplaced || !res.Recreated {
		t.Errorf("create: %+v", res)
	}
	if len(w.fake.Containers()) != 1 || w.store.len() != 1 {
		t.Error("a dead container is left")
	}
}

// A dead sandbox that can't be made again isn't lost: the next use tries anew.
func TestRemakeThatFailsLosesNothing(t *testing.T) {
	fake, breakOp := breaking("")
	w := newWorld(t, setup{fake: fake})
	req := request("k")
	req.Metadata = map[string]string{"m": "1"}
	first := w.create(req).Sandbox
	w.die("k")
	breakOp("create")
	if _, err := w.Exec(context.Background(), lifecycle.ExecRequest{Tenant: "a", Key: "k", Command: []string{"true"}}); !errors.Is(err, errBroken) {
		t.Fatalf("exec: %v", err)
	}
	if sb, err := w.Get(context.Background(), "a", "k"); err != nil || sb.SessionID != first.SessionID || w.store.len() != 1 {
		t.Errorf("afterwards: %+v, %v", sb, err)
	}
	breakOp("")
	if res := w.exec("k", "true"); !res.Recreated {
		t.Errorf("once it can be made: %+v", res)
	}
	sb, err := w.Get(context.Background(), "a", "k")
	if err != nil || sb.SessionID == first.SessionID || sb.Metadata["m"] != "1" || w.store.len() != 1 || len(w.fake.Containers()) != 1 {
		t.Errorf("at the end: %+v, %v; %d records", sb, err, w.store.len())
	}
}

func TestRestartKnowsItsSandboxes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, setup{})
		req := request("k")
		req.Metadata = map[string]string{"m": "1"}
		req.Request.TTL = ptr(time.Minute)
		req.Request.Env = map[string]string{"SECRET": "hunter2"}
		req.AgentID = "agent"
		w.create(req)
		vanishing := request("gone")
		vanishing.Request.Env = map[string]string{"KEPT": "1"}
		w.create(vanishing)
		w.createFor("ended", 10*time.Second)
		time.Sleep(30 * time.Second)
		renewed, err := w.Renew(context.Background(), "a", "k", 0)
		must(t, err)
		w.stop()
		for _, c := range w.fake.Containers() {
			for name, value := range c.Labels {
				if strings.Contains(value, "hunter2") {
					t.Errorf("label %s has a secret", name)
				}
			}
			if key := c.Labels[lifecycle.LabelKey]; key == "gone" || key == "ended" {
				_ = w.fake.Remove(context.Background(), c.ID)
			}
		}
		again := newWorld(t, setup{engine: w.fake, store: w.store})
		sb, err := again.Get(context.Background(), "a", "k")
		if err != nil || sb.SessionID != renewed.SessionID || !sb.ExpiresAt.Equal(renewed.ExpiresAt) ||
			sb.Metadata["m"] != "1" || sb.Spec.Env["SECRET"] != "hunter2" || sb.AgentID != "agent" || sb.Status != lifecycle.StatusRunning {
			t.Fatalf("after the restart: %+v, %v", sb, err)
		}
		if res := again.create(req); res.Result != lifecycle.ResultReused {
			t.Errorf("create: %s", res.Result)
		}
		if _, err := again.Get(context.Background(), "a", "ended"); !errdefs.IsNotFound(err) {
			t.Errorf("one that ended meanwhile: %v", err)
		}
		if got := again.status("gone"); got != lifecycle.StatusStopped {
			t.Errorf("one whose container vanished meanwhile: %s", got)
		}
		if res := again.exec("gone", "env"); !res.Recreated || !strings.Contains(res.Stdout, "KEPT=1\n") {
			t.Errorf("a command in it: %+v", res)
		}
		if _, err := again.Delete(context.Background(), "a", "gone"); err != nil || again.store.len() != 1 {
			t.Errorf("its delete: %v, %d records", err, again.store.len())
		}
	})
}

func TestReconcileTidies(t *testing.T) {
	ctx := context.Background()
	w := newWorld(t, setup{})
	first := w.create(request("k")).Sandbox
	c, err := w.fake.Inspect(ctx, first.ContainerID)
	must(t, err)
	w.stop()
	with := func(name string, change map[string]string) {
		labels := maps.Clone(c.Labels)
		maps.Copy(labels, change)
		newSealer("owner", nil, nil).Seal(lifecycle.ObjectContainer, labels)
		must(t, second(w.fake.Create(ctx, runtime.Spec{Name: name, Image: runtimetest.DefaultImage, Labels: labels})))
	}
	with("newer", map[string]string{
		lifecycle.LabelSessionID: "6f9619ff-8b86-d011-b42d-00c04fc964ff",
		lifecycle.LabelCreatedAt: first.CreatedAt.Add(time.Second).Format(time.RFC3339Nano),
	})
	with("malformed", map[string]string{lifecycle.LabelSessionID: "7f9619ff-8b86-d011-b42d-00c04fc964ff", lifecycle.LabelDeadline: "soon"})
	with("forged", map[string]string{lifecycle.LabelSessionID: "8f9619ff-8b86-d011-b42d-00c04fc964ff", lifecycle.LabelEffective: `{"image":"other"}`})
	again := newTraced(t, setup{engine: w.fake, store: w.store})
	again.check("reconcile", map[string]any{"berm.sandboxes": int64(1), "berm.removed": int64(1)}, false, "runtime.sweep", "runtime.ensure_network",
		"runtime.networks", "runtime.list", "runtime.inspect", "runtime.inspect", "runtime.inspect", "runtime.inspect", "runtime.remove")
	sb, err := again.Get(ctx, "a", "k")
	if err != nil || sb.SessionID != "6f9619ff-8b86-d011-b42d-00c04fc964ff" {
		t.Fatalf("the newest stays: %+v, %v", sb, err)
	}
	left := map[string]bool{}
	for _, c := range w.fake.Containers() {
		left[c.Name] = true
	}
	if left[c.Name] || !left["newer"] || !left["malformed"] || !left["forged"] {
		t.Errorf("left: %v", left)
	}
}

func TestAdoption(t *testing.T) {
	ctx := context.Background()
	fake := runtimetest.NewFake(runtimetest.FakeOptions{})
	volume := t.TempDir()
	old := legacyContainer(t, fake, volume, func(map[string]string) {}).Labels
	expires, err := time.Parse(time.RFC3339, old[lifecycle.LegacyExpiresAt])
	must(t, err)
	policy := "version: 1\nmounts: {allowed_roots: [" + volume + "]}\n"
	without := newWorld(t, setup{engine: fake, policy: policy})
	if list, _, _ := without.List(ctx, lifecycle.DefaultTenant, lifecycle.ListOptions{}); len(list) != 0 {
		t.Fatalf("adopted unasked: %v", list)
	}
	without.stop()
	w := newWorld(t, setup{engine: fake, policy: policy, settings: lifecycle.Settings{AdoptLegacy: true}})
	req := lifecycle.CreateRequest{Tenant: lifecycle.DefaultTenant, Key: legacyKey, AgentID: "agent", VolumePath: volume}
	res := w.create(req)
	if res.Result != lifecycle.ResultReused || res.Sandbox.SessionID != old[lifecycle.LegacySessionID] ||
		!res.Sandbox.ExpiresAt.Equal(expires) || res.Sandbox.Endpoint.Port != 8080 {
		t.Errorf("adopted: %+v", res)
	}
	req.AgentID = "another"
	var conflict *lifecycle.ConflictError
	if _, err := w.Create(ctx, req); !errors.As(err, &conflict) || len(conflict.Differences) != 1 {
		t.Errorf("another agent: %v", err)
	}
}

func TestEngineGoesAndComesBack(t *testing.T) {
	ctx := context.Background()
	w := newWorld(t, setup{wait: true, fake: runtimetest.FakeOptions{}})
	w.ready()
	made := w.create(request("k")).Sandbox
	w.create(request("dies"))
	w.fake.SetDown(true)
	w.eventually("it is seen", func() bool { return w.Ready(ctx) != nil })
	if _, err := w.Create(ctx, request("new")); !errdefs.IsUnavailable(err) {
		t.Errorf("create: %v", err)
	}
	if _, err := w.Exec(ctx, lifecycle.ExecRequest{Tenant: "a", Key: "k", Command: []string{"true"}}); !errdefs.IsUnavailable(err) {
		t.Errorf("exec: %v", err)
	}
	if st := w.Status(ctx, "a"); st.Available || st.Reason == "" || st.ActiveSandboxes != 2 {
		t.Errorf("status: %+v", st)
	}
	for _, c := range w.fake.Containers() {
		if c.Labels[lifecycle.LabelKey] == "dies" {
			w.fake.Die(c.ID)
		}
	}
	w.fake.SetDown(false)
	w.ready()
	if res := w.create(request("k")); res.Result != lifecycle.ResultReused || res.Sandbox.SessionID != made.SessionID {
		t.Errorf("afterwards: %+v", res)
	}
	if got := w.status("dies"); got != lifecycle.StatusStopped {
		t.Errorf("what died meanwhile: %s", got)
	}
}

// A create that failed because the engine went away may have left its container
// there. When the engine is back, that is no sandbox but the sweep's.
func TestFailedCreateIsNotTakenOver(t *testing.T) {
	ctx := context.Background()
	var w *world
	w = newWorld(t, setup{fake: runtimetest.FakeOptions{FailAfter: func(op, _ string) error {
		if op == "create" {
			w.fake.SetDown(true)
			return errBroken
		}
		return nil
	}}})
	if _, err := w.Create(ctx, request("k")); err == nil {
		t.Fatal("made in spite of it all")
	}
	w.eventually("it is seen", func() bool { return w.Ready(ctx) != nil })
	w.fake.SetDown(false)
	w.ready()
	if len(w.fake.Containers()) != 1 {
		t.Fatal("the create left nothing")
	}
	if sb, err := w.Get(ctx, "a", "k"); !errdefs.IsNotFound(err) {
		t.Errorf("taken over: %+v, %v", sb, err)
	}
	w.eventually("it is swept", func() bool { return w.sweep().Orphans == 1 })
	if len(w.fake.Containers()) != 0 {
		t.Error("it is left")
	}
}

func TestHungEngineIsNoticed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var hung atomic.Bool
		w := newWorld(t, setup{fake: runtimetest.FakeOptions{Delay: func(op string) time.Duration {
			if op == "info" && hung.Load() {
				return time.Hour
			}
			return 0
		}}})
		hung.Store(true)
		time.Sleep(10 * time.Second)
		if w.Ready(context.Background()) == nil {
			t.Error("a hung engine counts as ready")
		}
		hung.Store(false)
		time.Sleep(10 * time.Second)
		if err := w.Ready(context.Background()); err != nil {
			t.Errorf("afterwards: %v", err)
		}
	})
}

func TestNetworkComesAndGoes(t *testing.T) {
	ctx := context.Background()
	w := newWorld(t, setup{})
	mine := map[string]string{lifecycle.LabelOwner: "owner"}
	if n, err := w.fake.Networks(ctx, mine); err != nil || len(n) != 1 || !n[0].Isolated {
		t.Fatalf("at the start: %v, %v", n, err)
	}
	req := request("k")
	req.Request.Network = ptr("on")
	sb := w.create(req).Sandbox
	if sb.Endpoint.IP == "" {
		t.Error("no address")
	}
	w.stop()
	if n, _ := w.fake.Networks(ctx, mine); len(n) != 1 {
		t.Error("a network in use was removed")
	}
	again := newWorld(t, setup{engine: w.fake, store: w.store})
	if got, err := again.Get(ctx, "a", "k"); err != nil || got.Endpoint.IP != sb.Endpoint.IP {
		t.Errorf("address after a restart: %+v, %v", got.Endpoint, err)
	}
	must(t, second(again.Delete(ctx, "a", "k")))
	again.stop()
	if n, _ := w.fake.Networks(ctx, mine); len(n) != 0 {
		t.Error("an unused network stays after the end")
	}
}

func TestOperatorMounts(t *testing.T) {
	chats, deps := t.TempDir(), t.TempDir()
	settings := lifecycle.Settings{
		ChatsRoot: chats, ChatMountPath: "/chat", DependenciesRoot: deps, DependenciesPath: "/deps",
	}
	w := newWorld(t, setup{settings: settings})
	w.create(lifecycle.CreateRequest{Tenant: lifecycle.DefaultTenant, Key: "k"})
	must(t, os.Symlink("/etc", filepath.Join(chats, "evil")))
	must(t, os.Symlink(filepath.Join(chats, "k"), filepath.Join(chats, "sly")))
	for _, key := range []string{"evil", "sly"} {
		if _, err := w.Create(context.Background(), lifecycle.CreateRequest{Tenant: lifecycle.DefaultTenant, Key: key}); err == nil {
			t.Errorf("a symbolic link was mounted for %s", key)
		}
	}
	mine := t.TempDir()
	nested := newWorld(t, setup{settings: settings, policy: "version: 1\nmounts: {allowed_roots: [" + mine + "]}\n"})
	for _, target := range []string{"/chat", "/chat/below", "/deps"} {
		req := request("k")
		req.Request.HostPath, req.Request.MountPath = &mine, &target
		if _, err := nested.Create(context.Background(), req); !errdefs.IsInvalidArgument(err) {
			t.Errorf("mounted at %s: %v", target, err)
		}
	}
	must(t, os.Remove(deps))
	calls := func() int { return w.fake.Calls("create") + w.fake.Calls("image") }
	before := calls()
	if _, err := w.Create(context.Background(), request("later")); err == nil || calls() != before {
		t.Errorf("a missing read-only root: %v", err)
	}
}

func TestList(t *testing.T) {
	ctx := context.Background()
	w := newWorld(t, setup{})
	for _, key := range []string{"c", "a", "b", "d"} {
		req := request(key)
		req.Metadata = map[string]string{"even": map[bool]string{true: "yes", false: "no"}[key == "b" || key == "d"]}
		w.create(req)
	}
	page, next, err := w.List(ctx, "a", lifecycle.ListOptions{Limit: 3})
	if err != nil || len(page) != 3 || next != "c" || page[0].Key != "a" {
		t.Fatalf("first page: %v, %q, %v", page, next, err)
	}
	page, next, err = w.List(ctx, "a", lifecycle.ListOptions{Limit: 3, After: next})
	if err != nil || len(page) != 1 || next != "" || page[0].Key != "d" {
		t.Fatalf("second page: %v, %q, %v", page, next, err)
	}
	page, _, _ = w.List(ctx, "a", lifecycle.ListOptions{Metadata: map[string]string{"even": "yes"}})
	if len(page) != 2 {
		t.Errorf("by metadata: %v", page)
	}
	if page, _, _ = w.List(ctx, "a", lifecycle.ListOptions{Status: lifecycle.StatusPaused}); len(page) != 0 {
		t.Errorf("by status: %v", page)
	}
	if _, _, err := w.List(ctx, "a", lifecycle.ListOptions{Limit: 101}); !errdefs.IsInvalidArgument(err) {
		t.Errorf("limit 101: %v", err)
	}
}
