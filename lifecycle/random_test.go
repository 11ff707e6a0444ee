package lifecycle_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/runtimetest"
)

var (
	randomSeeds = flag.Int("random-seeds", 40, "random histories that TestRandomHistories plays")
	randomFirst = flag.Uint64("random-first", 1, "seed of the first one")
)

// TestRandomHistories plays random operations, many at once, on an engine and a
// store that fail now and then, go away, and outlive managers that are stopped or
// cut off. Whenever it is quiet again, engine, records and store must agree, and no
// sandbox may be lost that was answered, nor anything be left that has ended.
func TestRandomHistories(t *testing.T) {
	for seed := *randomFirst; seed < *randomFirst+uint64(*randomSeeds); seed++ {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { playHistory(t, seed) })
		})
	}
}

const pulledImage = "registry.local/tool:1"

// history is one random run.
type history struct {
	t     *testing.T
	fake  *runtimetest.Fake
	store *memStore
	*world

	mu     sync.Mutex
	rng    *rand.Rand
	faults float64 // how likely a call fails; 0 is never
	cut    bool    // the manager is cut off from the engine and the store
	// promised says until when an answered sandbox must be known, by key, and deletes
	// how often the key's end was asked for.
	promised map[string]time.Time
	deletes  map[string]int
	strict   bool // nothing ever fails, so that more must hold
}

func playHistory(t *testing.T, seed uint64) {
	h := &history{
		t: t, store: newStore(), rng: rand.New(rand.NewPCG(seed, 0)),
		promised: map[string]time.Time{}, deletes: map[string]int{}, strict: seed%4 == 0,
	}
	h.fake = runtimetest.NewFake(runtimetest.FakeOptions{
		Registry: map[string]runtime.Image{pulledImage: {}},
		Fail:     func(op, _ string) error { return h.fault(op) },
		FailAfter: func(op, _ string) error {
			if op == "exec" {
				return nil // an engine that forgets what it was asked for, but not that it ran
			}
			return h.fault(op)
		},
		Delay: func(op string) time.Duration { return h.delay(op) },
		Exec: func(ctx context.Context, _ runtime.Container, e runtime.Exec) (runtime.ExecResult, error) {
			if e.Command[0] != "stuck" {
				return runtime.ExecResult{}, errors.ErrUnsupported
			}
			<-ctx.Done()
			return runtime.ExecResult{}, errors.Join(ctx.Err(), runtime.ErrNotKilled)
		},
	})
	h.begin()
	for range 3 {
		h.storm()
		h.quiet()
		if h.chance(0.5) {
			h.stop()
			h.begin()
			h.settled("after a restart")
		}
	}
	h.end()
}

func (h *history) intn(n int) int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.rng.IntN(n)
}

func (h *history) chance(p float64) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.rng.Float64() < p
}

func (h *history) delay(op string) time.Duration {
	if op == "info" {
		return 0
	}
	return time.Duration(h.intn(20)) * time.Millisecond
}

// fault is the outcome of a call that is to fail, else nil.
func (h *history) fault(op string) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	switch {
	case h.cut:
		return fmt.Errorf("%s: cut off: %w", op, errdefs.ErrUnavailable)
	case op == "info" || op == "watch" || h.rng.Float64() >= h.faults:
		return nil
	case h.rng.IntN(2) == 0:
		return fmt.Errorf("%s: %w", op, errdefs.ErrUnavailable)
	}
	return fmt.Errorf("%s: %w", op, errBroken)
}

func (h *history) set(faults float64, cut bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.faults, h.cut = faults, cut
}

// shakyStore fails before or after its work.
type shakyStore struct {
	*memStore
	h *history
}

func (s shakyStore) shake(f func() error) error {
	if err := s.h.fault("store"); err != nil {
		return err
	}
	time.Sleep(s.h.delay("store"))
	if err := f(); err != nil {
		return err
	}
	return s.h.fault("store")
}

func (s shakyStore) Records(ctx context.Context) (rs []lifecycle.Sandbox, err error) {
	err = s.shake(func() error { rs, err = s.memStore.Records(ctx); return err })
	return rs, err
}

func (s shakyStore) Put(ctx context.Context, r lifecycle.Sandbox) error {
	return s.shake(func() error { return s.memStore.Put(ctx, r) })
}

func (s shakyStore) Touch(ctx context.Context, used map[string]time.Time) error {
	return s.shake(func() error { return s.memStore.Touch(ctx, used) })
}

func (s shakyStore) Delete(ctx context.Context, ids ...string) error {
	return s.shake(func() error { return s.memStore.Delete(ctx, ids...) })
}

// begin makes a manager on what is there.
func (h *history) begin() {
	h.t.Helper()
	h.world = newWorld(h.t, setup{
		engine: h.fake, store: h.store, policy: "version: 1\nimages: {allow: [registry.local/tool]}\n",
		wrapStore: func(s *memStore) lifecycle.Store { return shakyStore{s, h} },
	})
}

// storm does many random things at once. It ends with the faults, and sometimes
// with the manager's sudden death.
func (h *history) storm() {
	if !h.strict {
		h.set([]float64{0, 0.02, 0.1, 0.3}[h.intn(4)], false)
	}
	die := !h.strict && h.chance(0.3)
	var wg sync.WaitGroup
	for range 6 {
		wg.Go(func() {
			for range 30 {
				h.step()
				h.atMostOne()
			}
		})
	}
	if die {
		time.Sleep(time.Duration(h.intn(3000)) * time.Millisecond)
		h.set(0, true)
		h.stop() // nothing of what it tidies gets through
		wg.Wait()
		h.fake.SetDown(false)
		h.set(0, false)
		h.begin()
		return
	}
	wg.Wait()
	h.fake.SetDown(false)
	h.set(0, false)
}

// step does one random thing.
func (h *history) step() {
	tenant, key := []string{"a", "b"}[h.intn(2)], fmt.Sprint("k", h.intn(3))
	name := tenant + "/" + key
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	if h.chance(0.1) { // a caller without patience
		timer := time.AfterFunc(time.Duration(h.intn(60))*time.Millisecond, cancel)
		defer timer.Stop()
	}
	req := lifecycle.CreateRequest{Tenant: tenant, Key: key}
	// The same for all of a key's, so that none that is made anew ends sooner.
	req.Request.TTL = ptr(map[string]time.Duration{"k0": 3 * time.Second, "k1": 20 * time.Second, "k2": time.Hour}[key])
	if h.chance(0.1) {
		req.AgentID = "another"
	}
	if h.chance(0.1) {
		req.Request.Image = ptr(pulledImage)
	}
	switch n := h.intn(100); {
	case n < 30:
		asked := h.askedFor(name)
		res, err := h.Create(ctx, req)
		h.class("create", err)
		if err == nil {
			h.promise(name, asked, res.Sandbox)
		}
	case n < 55:
		exec := lifecycle.ExecRequest{Tenant: tenant, Key: key, Command: []string{"true"}, Timeout: ptr(int64(1))}
		if h.chance(0.3) {
			exec.Create = &req
		}
		if h.chance(0.3) {
			exec.Command = []string{"sleep", fmt.Sprint(h.intn(3))}
		}
		if h.chance(0.05) { // it costs the sandbox its life
			exec.Command = []string{"stuck"}
			h.forsake(name)
			defer h.forsake(name)
		}
		res, err := h.Exec(ctx, exec)
		h.class("exec", err)
		if err == nil && (res.ExitCode != nil) != (res.Status == lifecycle.ExecCompleted) {
			h.t.Errorf("exec: %+v", res)
		}
	case n < 67:
		h.forsake(name)
		_, err := h.Delete(ctx, tenant, key)
		h.class("delete", err)
		h.forsake(name)
	case n < 72:
		_, err := h.Renew(ctx, tenant, key, 0)
		h.class("renew", err)
	case n < 76:
		_, err := h.Pause(ctx, tenant, key)
		h.class("pause", err)
	case n < 82:
		_, err := h.Resume(ctx, tenant, key)
		h.class("resume", err)
	case n < 87:
		_, _ = h.Sweep(ctx)
	case n < 92:
		if cs := h.fake.Containers(); len(cs) > 0 {
			h.fake.Die(cs[h.intn(len(cs))].ID)
		}
	case n < 93 && !h.strict:
		h.fake.SetDown(true)
		time.Sleep(time.Duration(h.intn(2000)) * time.Millisecond)
		h.fake.SetDown(false)
	case n < 97:
		time.Sleep(time.Duration(h.intn(500)) * time.Millisecond)
	default:
		_, _, _ = h.List(ctx, tenant, lifecycle.ListOptions{})
		_, _ = h.Get(ctx, tenant, key)
	}
}

// class holds an error to the classes that callers are promised.
func (h *history) class(op string, err error) {
	var (
		conflict *lifecycle.ConflictError
		pulling  *lifecycle.PullingError
		start    *lifecycle.StartError
		state    *lifecycle.StateError
		missing  *lifecycle.NotFoundError
	)
	switch {
	case err == nil, errors.Is(err, context.Canceled), errdefs.IsUnavailable(err), errors.Is(err, errBroken),
		errors.As(err, &conflict), errors.As(err, &pulling), errors.As(err, &start), errors.As(err, &state):
	case errors.As(err, &missing) && op != "create" && op != "delete":
	case errdefs.IsFailedPrecondition(err) && op != "create" && op != "delete": // it changed under the call
	case errdefs.IsNotFound(err) && (op == "pause" || op == "resume"): // likewise
	default:
		h.t.Errorf("%s: %v", op, err)
	}
}

func (h *history) askedFor(name string) int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.deletes[name]
}

// promise notes an answered sandbox, unless somebody asked for its end meanwhile.
func (h *history) promise(name string, asked int, sb lifecycle.Sandbox) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.deletes[name] == asked && sb.Ends().After(h.promised[name]) {
		h.promised[name] = sb.Ends()
	}
}

func (h *history) forsake(name string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.deletes[name]++
	delete(h.promised, name)
}

// atMostOne looks for a second container of a key, where nothing fails.
func (h *history) atMostOne() {
	if !h.strict {
		return
	}
	seen := map[string]bool{}
	for _, c := range h.fake.Containers() {
		name := c.Labels[lifecycle.LabelTenant] + "/" + c.Labels[lifecycle.LabelKey]
		if seen[name] {
			h.t.Errorf("%s has two containers", name)
		}
		seen[name] = true
	}
}

// quiet lets all come to rest, and looks.
func (h *history) quiet() {
	h.t.Helper()
	h.ready()
	h.settled("after a storm")
}

// settled sweeps, and compares engine, records and store.
func (h *history) settled(when string) {
	h.t.Helper()
	time.Sleep(3 * time.Second) // creates under way, the news of the engine's, and what was made in this second
	began := time.Now()
	if _, err := h.Sweep(context.Background()); err != nil {
		h.t.Errorf("%s: sweep: %v", when, err)
	}
	time.Sleep(10 * time.Millisecond)
	containers := map[string]runtime.Container{}
	for _, c := range h.fake.Containers() {
		containers[c.ID] = c
	}
	now := time.Now()
	records, keys := 0, map[string]bool{}
	for _, tenant := range []string{"a", "b"} {
		sbs, _, err := h.List(context.Background(), tenant, lifecycle.ListOptions{})
		must(h.t, err)
		for _, sb := range sbs {
			if sb.Status == lifecycle.StatusFailed {
				continue
			}
			records++
			name := sb.Tenant + "/" + sb.Key
			keys[name] = true
			c, there := containers[sb.ContainerID]
			delete(containers, sb.ContainerID)
			alive := there && (c.State == runtime.StateRunning || c.State == runtime.StatePaused)
			switch {
			case sb.Status == lifecycle.StatusStopped && !alive:
			case sb.Status == lifecycle.StatusRunning && there && c.State == runtime.StateRunning:
			case sb.Status == lifecycle.StatusExpired && sb.ExpiresAt.After(began):
			case sb.Status == lifecycle.StatusPaused && there && c.State == runtime.StatePaused:
			default:
				h.t.Errorf("%s: %s is %s, and its container %q", when, name, sb.Status, c.State)
			}
			// A stopped one may be half deleted.
			if sb.Status != lifecycle.StatusStopped && !h.store.has(sb.SessionID) {
				h.t.Errorf("%s: %s isn't in the store", when, name)
			}
		}
	}
	for _, c := range containers {
		h.t.Errorf("%s: container of %s that nobody knows: %s", when, c.Labels[lifecycle.LabelKey], c.State)
	}
	for name, until := range h.promised {
		if !keys[name] && until.After(now) {
			h.t.Errorf("%s: %s was answered and is lost, %s before its end", when, name, until.Sub(now))
		}
	}
	if held := h.Held(); held[1] != records || held[2] != 0 || held[3] != 0 {
		h.t.Errorf("%s: of %d records: slots, containers, making, ended = %v", when, records, held)
	}
	if got := h.metric("berm_sandboxes_active"); int(got) != records {
		h.t.Errorf("%s: %v active sandboxes, %d records", when, got, records)
	}
	if h.strict && h.store.len() != records {
		h.t.Errorf("%s: %d in the store, %d records", when, h.store.len(), records)
	}
}

// end lets go of everything, and looks for what is left.
func (h *history) end() {
	h.t.Helper()
	ctx := context.Background()
	for _, tenant := range []string{"a", "b"} {
		sbs, _, _ := h.List(ctx, tenant, lifecycle.ListOptions{})
		for _, sb := range sbs {
			if _, err := h.Delete(ctx, tenant, sb.Key); err != nil {
				h.t.Errorf("delete: %v", err)
			}
		}
	}
	time.Sleep(2 * time.Second)
	if _, err := h.Sweep(ctx); err != nil {
		h.t.Errorf("the last sweep: %v", err)
	}
	if cs := h.fake.Containers(); len(cs) != 0 {
		h.t.Errorf("%d containers are left", len(cs))
	}
	if held := h.Held(); slices.Max(held[:]) != 0 {
		h.t.Errorf("slots, containers, making, ended = %v are left", held)
	}
	h.stop()
	// What the store could not forget is forgotten after its end.
	time.Sleep(time.Hour)
	h.begin()
	h.stop()
	if n := h.store.len(); n != 0 {
		h.t.Errorf("%d records are left in the store", n)
	}
	if ns, err := h.fake.Networks(ctx, nil); err != nil || len(ns) != 0 {
		h.t.Errorf("networks are left: %v, %v", ns, err)
	}
}
