package lifecycle_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
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

// What a start makes up for a lost store, the start after it finds.
func TestLostStoreIsWrittenAnew(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx := context.Background()
		w := newWorld(t, setup{})
		w.createFor("k", time.Minute)
		time.Sleep(50 * time.Second)
		must(t, second(w.Renew(ctx, "a", "k", 0)))
		w.stop()
		time.Sleep(20 * time.Second) // past what the label says
		lost := newStore()           // of an earlier version that has found no engine, say, and so not fresh
		w = newWorld(t, setup{engine: w.fake, store: lost})
		w.stop()
		time.Sleep(30 * time.Second)
		w = newWorld(t, setup{engine: w.fake, store: lost})
		if swept := w.sweep(); swept.Cleaned != 0 || w.status("k") != lifecycle.StatusRunning {
			t.Errorf("%+v", swept)
		}
	})
}

// TestOutdatedAgent takes a sandbox over whose agent is of another version. A command makes it
// again, and says so.
func TestOutdatedAgent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx := context.Background()
		w := newWorld(t, setup{})
		first := w.create(request("k")).Sandbox
		c, err := w.fake.Inspect(ctx, first.ContainerID)
		must(t, err)
		w.stop()
		must(t, w.fake.Remove(ctx, c.ID))
		delete(c.Labels, lifecycle.LabelAgent)
		newSealer("owner", nil, nil).Seal(lifecycle.ObjectContainer, c.Labels)
		old, err := w.fake.Create(ctx, runtime.Spec{Name: c.Name, Image: runtimetest.DefaultImage, Labels: c.Labels})
		must(t, err)
		w = newWorld(t, setup{engine: w.fake, store: w.store})
		if swept := w.sweep(); swept.Cleaned != 0 || w.status("k") != lifecycle.StatusStopped {
			t.Errorf("%+v, %s", swept, w.status("k"))
		}
		if _, err := w.fake.Inspect(ctx, old.ID); !errdefs.IsNotFound(err) { // what ran in it is over
			t.Errorf("the old container: %v", err)
		}
		if res := w.exec("k", "true"); !res.OK() || !res.Recreated {
			t.Errorf("%+v", res)
		}
	})
}

// A store that was restored from a backup is behind: what it still knows of live sandboxes
// holds, but for their ends, and what has gone since isn't brought back.
func TestRestoredStore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx := context.Background()
		w := newWorld(t, setup{})
		for _, key := range []string{"renewed", "idle", "deleted", "replaced"} {
			req := request(key)
			req.Request.TTL, req.Metadata = ptr(time.Minute), map[string]string{"of": key}
			if key != "renewed" {
				req.Request.TTL = ptr(time.Hour)
			}
			if key == "idle" {
				req.Request.IdleTTL = ptr(time.Minute)
			}
			w.create(req)
		}
		backup := w.store.backup()
		time.Sleep(50 * time.Second)
		for _, key := range []string{"renewed", "idle"} {
			must(t, second(w.Renew(ctx, "a", key, 0)))
		}
		for _, key := range []string{"deleted", "replaced"} {
			must(t, second(w.Delete(ctx, "a", key)))
		}
		again := w.create(request("replaced")).Sandbox
		later := w.create(request("later")).Sandbox
		w.stop()
		time.Sleep(20 * time.Second) // past what the backup and the labels say
		w = newWorld(t, setup{engine: w.fake, store: backup})
		if swept := w.sweep(); swept.Cleaned != 0 {
			t.Errorf("%+v", swept)
		}
		for _, key := range []string{"renewed", "idle"} {
			if sb, err := w.Get(ctx, "a", key); err != nil || sb.Status != lifecycle.StatusRunning || sb.Metadata["of"] != key {
				t.Errorf("%s: %+v, %v", key, sb, err)
			}
		}
		for key, session := range map[string]string{"replaced": again.SessionID, "later": later.SessionID} {
			if sb, err := w.Get(ctx, "a", key); err != nil || sb.SessionID != session {
				t.Errorf("%s: %+v, %v", key, sb, err)
			}
		}
		if sb, err := w.Get(ctx, "a", "deleted"); err == nil {
			t.Errorf("what was deleted is back: %+v", sb)
		}
		if records, err := backup.Records(ctx); err != nil || len(records) != 4 {
			t.Errorf("the store has %d records, %v", len(records), err)
		}
		w.stop()
		time.Sleep(30 * time.Second)
		w = newWorld(t, setup{engine: w.fake, store: backup})
		if swept := w.sweep(); swept.Cleaned != 0 {
			t.Errorf("at the second start: %+v", swept)
		}
		time.Sleep(time.Minute)
		if swept := w.sweep(); swept.Cleaned != 2 {
			t.Errorf("after one more TTL: %+v", swept)
		}
	})
}

// A delete that fails half-way may have killed the container, and then no create
// may answer it as if it ran.
func TestFailedRemovalThatKilled(t *testing.T) {
	var w *world
	var broken atomic.Bool
	w = newWorld(t, setup{fake: runtimetest.FakeOptions{Fail: func(op, id string) error {
		if op != "remove" || !broken.Load() {
			return nil
		}
		w.fake.Die(id)
		for range 1000 { // until the news is here
			if sb, err := w.Get(context.Background(), "a", "k"); err != nil || sb.Status != lifecycle.StatusStopping {
				break
			}
			time.Sleep(time.Millisecond)
		}
		return errBroken
	}}})
	w.create(request("k"))
	broken.Store(true)
	if _, err := w.Delete(context.Background(), "a", "k"); !errors.Is(err, errBroken) {
		t.Fatalf("delete: %v", err)
	}
	if got := w.status("k"); got != lifecycle.StatusStopped {
		t.Errorf("afterwards it is %s", got)
	}
	broken.Store(false)
	if res := w.create(request("k")); !res.Recreated {
		t.Errorf("create: %+v", res)
	}
}

// A container that refuses a command because it is paused must not be taken for
// dead, and made anew.
func TestExecInAPausedContainer(t *testing.T) {
	var w *world
	w = newWorld(t, setup{fake: runtimetest.FakeOptions{Fail: func(op, id string) error {
		if op == "exec" { // behind the manager's back, at the very moment of the command
			return w.fake.Pause(context.Background(), id)
		}
		return nil
	}}})
	sb := w.create(request("k")).Sandbox
	_, err := w.Exec(context.Background(), lifecycle.ExecRequest{Tenant: "a", Key: "k", Command: []string{"true"}})
	var state *lifecycle.StateError
	if !errors.As(err, &state) || state.Status != lifecycle.StatusPaused {
		t.Errorf("exec: %v", err)
	}
	if got, err := w.Get(context.Background(), "a", "k"); err != nil || got.ContainerID != sb.ContainerID || got.Status != lifecycle.StatusPaused {
		t.Errorf("afterwards: %+v, %v", got, err)
	}
}

// What an earlier policy allowed isn't made anew once the policy in force wouldn't.
func TestRemakeAsksThePolicy(t *testing.T) {
	ctx := context.Background()
	for name, tt := range map[string]struct {
		change func(*lifecycle.CreateRequest)
		policy string
		denied bool // else it conflicts
	}{
		"refused": {func(r *lifecycle.CreateRequest) { r.Request.MemoryMB = ptr(int64(400)) },
			"version: 1\nresources: {over_max: refuse}\nprofiles: {default: {memory_mb: 256, max_memory_mb: 256}}\n", true},
		"locked": {func(r *lifecycle.CreateRequest) { r.Request.ReadOnlyRootfs = ptr(false) },
			"version: 1\nprofiles: {default: {locked: [read_only_rootfs]}}\n", false},
		"env": {func(r *lifecycle.CreateRequest) { r.Request.Env = map[string]string{"LD_PRELOAD": "x"} },
			"version: 1\nenv: {deny: [LD_*]}\n", true},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, setup{})
			req := request("k")
			tt.change(&req)
			w.create(req)
			w.die("k")
			pol, err := policy.Parse([]byte(tt.policy), policy.Options{DefaultImage: runtimetest.DefaultImage})
			must(t, err)
			w.policy = pol
			req.Request.Env = nil // or the create would be refused for its own
			_, execErr := w.Exec(ctx, lifecycle.ExecRequest{Tenant: "a", Key: "k", Command: []string{"true"}})
			_, createErr := w.Create(ctx, req)
			for call, err := range map[string]error{"exec": execErr, "create": createErr} {
				var denied *policy.DeniedError
				if got := errors.As(err, &denied); got != tt.denied || !got && !errorIs[*lifecycle.ConflictError](err) {
					t.Errorf("%s: %v", call, err)
				}
			}
			if w.fake.Calls("create") != 1 || w.status("k") != lifecycle.StatusStopped {
				t.Error("it was made anew, or lost")
			}
		})
	}
}

// A create that waits for its image keeps neither what has ended nor the sweep.
func TestSweepDoesNotWaitForAPull(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := pullingWorld(t, func(context.Context, func(runtime.PullProgress)) error {
			time.Sleep(10 * time.Minute)
			return nil
		})
		req := request("k")
		req.Request.TTL = ptr(time.Second)
		w.create(req)
		w.createFor("other", time.Second)
		time.Sleep(time.Second)
		req.Request.Image = ptr(remoteImage)
		if _, err := w.Create(context.Background(), req); !errorIs[*lifecycle.PullingError](err) {
			t.Fatalf("create: %v", err)
		}
		start := time.Now()
		if swept := w.sweep(); swept.Cleaned != 1 || time.Since(start) > time.Second {
			t.Errorf("swept %+v in %s", swept, time.Since(start))
		}
		if n := len(w.fake.Containers()); n != 0 {
			t.Errorf("%d containers outlive their end", n)
		}
		time.Sleep(11 * time.Minute)
	})
}

// A network that somebody else removed is made again.
func TestRemovedNetworkComesBack(t *testing.T) {
	ctx := context.Background()
	w := newWorld(t, setup{})
	ns, err := w.fake.Networks(ctx, nil)
	if err != nil || len(ns) != 1 {
		t.Fatal(ns, err)
	}
	must(t, w.fake.RemoveNetwork(ctx, ns[0].Name))
	req := request("k")
	req.Request.Network = ptr("on")
	_, _ = w.Create(ctx, req) // finds out
	if sb := w.create(req).Sandbox; sb.Endpoint.IP == "" {
		t.Errorf("%+v", sb)
	}
}

// A network that can't be made is a matter of the creates that want it.
func TestNetworkThatCannotBeMade(t *testing.T) {
	fake, _ := breaking("ensure_network")
	w := newWorld(t, setup{fake: fake})
	w.create(request("k"))
	req := request("on")
	req.Request.Network = ptr("on")
	if _, err := w.Create(context.Background(), req); !errors.Is(err, errBroken) {
		t.Errorf("on the network: %v", err)
	}
}

// A caller who leaves while the workspace is measured makes it neither full nor
// unmeasured.
func TestQuotaOfACallerWhoLeft(t *testing.T) {
	dir := t.TempDir()
	for i := range 1100 {
		must(t, os.WriteFile(filepath.Join(dir, fmt.Sprint(i)), []byte("x"), 0o600))
	}
	ctx, leave := context.WithCancel(context.Background())
	defer leave()
	w := newWorld(t, setup{
		policy: "version: 1\nmounts: {allowed_roots: [" + dir + "]}\n",
		fake: runtimetest.FakeOptions{FailAfter: func(op, _ string) error {
			if op == "exec" {
				leave()
			}
			return nil
		}},
	})
	w.create(mounting("k", dir, 1))
	res, err := w.Exec(ctx, lifecycle.ExecRequest{Tenant: "a", Key: "k", Command: []string{"true"}})
	if err != nil || !res.OK() || res.QuotaExceeded || w.status("k") != lifecycle.StatusRunning {
		t.Errorf("%+v, %v", res, err)
	}
}

// Commands that find their sandbox dead, many at once, share the one that is made
// anew, and none is turned away.
func TestManyCommandsInADeadSandbox(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, setup{fake: runtimetest.FakeOptions{Delay: func(op string) time.Duration {
			if op == "info" || op == "watch" {
				return 0
			}
			return time.Second
		}}})
		sb := w.create(request("k")).Sandbox
		w.fake.Die(sb.ContainerID)
		var wg sync.WaitGroup
		for i := range 40 {
			wg.Go(func() {
				time.Sleep(time.Duration(i) * 100 * time.Millisecond)
				if res, err := w.Exec(context.Background(), lifecycle.ExecRequest{Tenant: "a", Key: "k", Command: []string{"true"}}); err != nil || !res.OK() {
					t.Errorf("after %d00 ms: %+v, %v", i, res, err)
				}
			})
		}
		wg.Wait()
		if n := w.fake.Calls("create"); n != 2 {
			t.Errorf("%d creates", n)
		}
	})
}
