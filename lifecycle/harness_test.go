package lifecycle_test

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"go.opentelemetry.io/otel/trace"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/lifecycle/mountpin/mountpintest"
	"github.com/bermhq/berm/lifecycle/quota"
	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/runtimetest"
	"github.com/bermhq/berm/runtime/runtimetest/check"
)

// memStore is a store in memory, so that tests can run on a clock of their own.
type memStore struct {
	mu      sync.Mutex
	fresh   bool
	records map[string]lifecycle.Sandbox
	fail    error // of Put
}

func newStore() *memStore { return &memStore{records: map[string]lifecycle.Sandbox{}} }

func (s *memStore) Records(context.Context) ([]lifecycle.Sandbox, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Collect(maps.Values(s.records)), nil
}

func (s *memStore) Put(_ context.Context, r lifecycle.Sandbox) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fail != nil {
		return s.fail
	}
	s.records[r.SessionID] = r
	return nil
}

func (s *memStore) Touch(_ context.Context, used map[string]time.Time) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for id, at := range used {
		if r, ok := s.records[id]; ok {
			r.LastUsedAt = at
			s.records[id] = r
		}
	}
	return nil
}

func (s *memStore) Delete(_ context.Context, ids ...string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, id := range ids {
		delete(s.records, id)
	}
	return nil
}

// backup is the store as it is now, as a restore brings it back.
func (s *memStore) backup() *memStore {
	s.mu.Lock()
	defer s.mu.Unlock()
	b := newStore()
	for id, r := range s.records {
		r.LastUsedAt = time.Time{}
		b.records[id] = r
	}
	b.fresh = true
	return b
}

// Fresh is as if the store was opened by each start.
func (s *memStore) Fresh() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.fresh
}

func (s *memStore) TookOver(context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.fresh = false
	return nil
}

func (s *memStore) Ping(context.Context) error { return nil }

func (s *memStore) setFail(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.fail = err
}

func (s *memStore) has(session string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, ok := s.records[session]
	return ok
}

func (s *memStore) len() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.records)
}

// world is a manager on a fake engine.
type world struct {
	*lifecycle.Service
	t      *testing.T
	fake   *runtimetest.Fake
	store  *memStore
	reg    *prometheus.Registry
	policy *policy.Policy
	stop   func()
}

// setup says how a world differs from the usual.
type setup struct {
	fake      runtimetest.FakeOptions
	engine    *runtimetest.Fake // instead of a new one
	store     *memStore         // instead of an empty one
	policy    string
	settings  lifecycle.Settings
	owner     string // "owner" if empty
	seals     lifecycle.SealStore
	logger    *slog.Logger
	tracer    trace.TracerProvider
	wrap      func(*runtimetest.Fake) runtime.AgentRuntime // what the manager gets instead of the fake
	wrapStore func(*memStore) lifecycle.Store              // what the manager gets instead of the store
	wait      bool                                         // don't wait until it is ready
	name      string                                       // of the engine

	quotas lifecycle.Quotas // instead of soft ones, without workspaces
	claim  func(context.Context, string, []policy.Mount) (func(), error)
	holder lifecycle.Holder // instead of one that holds nothing
}

// newSealer is the sealer of every world of an owner.
func newSealer(owner string, store lifecycle.SealStore, logger *slog.Logger) *lifecycle.Sealer {
	key := make([]byte, lifecycle.SealKeyBytes)
	s, err := lifecycle.NewSealer(context.Background(), lifecycle.SealerOptions{Key: key, Owner: owner, Store: store, Logger: logger})
	if err != nil {
		panic(err)
	}
	return s
}

// noRows is a store of quotas that is empty, and stays so.
type noRows struct{ quota.Store }

func (noRows) Projects(context.Context) ([]quota.Project, error) { return nil, nil }

// softQuotas measure sandboxes' own directories, and know of no workspaces.
func softQuotas() *quota.Service {
	s, err := quota.New(context.Background(), quota.Options{Store: noRows{}, Off: true})
	if err != nil {
		panic(err)
	}
	return s
}

func newWorld(t *testing.T, s setup) *world {
	t.Helper()
	w := &world{t: t, fake: s.engine, store: s.store, reg: prometheus.NewPedanticRegistry()}
	if w.fake == nil {
		s.fake.Files = t.TempDir()
		w.fake = runtimetest.NewFake(s.fake)
	}
	if w.store == nil {
		w.store = newStore()
	}
	if s.owner == "" {
		s.owner = "owner"
	}
	var err error
	w.policy, err = policy.Parse([]byte(s.policy), policy.Options{DefaultImage: runtimetest.DefaultImage})
	must(t, err)
	if s.quotas == nil {
		s.quotas = softQuotas()
	}
	if s.holder == nil {
		s.holder = mountpintest.Holder{}
	}
	var engine runtime.AgentRuntime = w.fake
	if s.wrap != nil {
		engine = s.wrap(w.fake)
	}
	var store lifecycle.Store = w.store
	if s.wrapStore != nil {
		store = s.wrapStore(w.store)
	}
	w.Service, err = lifecycle.New(lifecycle.Options{
		Sealer: newSealer(s.owner, s.seals, s.logger), Runtime: engine, Collector: w.fake, Policy: func() *policy.Policy { return w.policy }, Store: store,
		Engine: s.name, Holder: s.holder, Claim: s.claim, Owner: s.owner, Settings: s.settings, Registry: w.reg,
		Logger: s.logger, Tracer: s.tracer, Quotas: s.quotas,
	})
	must(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	done := later(func() error { return w.Run(ctx) })
	w.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	t.Cleanup(w.stop)
	if !s.wait {
		w.ready()
	}
	return w
}

// remoteImage has to be pulled in a pullingWorld.
const remoteImage = "registry.local/team/tool:1"

// pullingWorld is a world whose engine calls pull for remoteImage.
func pullingWorld(t *testing.T, pull func(context.Context, func(runtime.PullProgress)) error) *world {
	return newWorld(t, setup{
		policy: "version: 1\nimages: {allow: [registry.local/team/tool]}\n",
		fake: runtimetest.FakeOptions{
			Registry: map[string]runtime.Image{remoteImage: {}},
			Pull:     func(ctx context.Context, _ string, at func(runtime.PullProgress)) error { return pull(ctx, at) },
		},
	})
}

// ready waits until the manager is.
func (w *world) ready() {
	w.t.Helper()
	for range 10_000 {
		if w.Ready(context.Background()) == nil {
			return
		}
		time.Sleep(time.Millisecond)
	}
	w.t.Fatal("the manager didn't become ready")
}

// eventually waits for what another goroutine is about to do.
func (w *world) eventually(what string, ok func() bool) {
	w.t.Helper()
	for range 5_000 {
		if ok() {
			return
		}
		time.Sleep(time.Millisecond)
	}
	w.t.Fatalf("it never came to: %s", what)
}

func request(key string) lifecycle.CreateRequest {
	return lifecycle.CreateRequest{Tenant: "a", Key: key}
}

func (w *world) create(req lifecycle.CreateRequest) lifecycle.CreateResult {
	w.t.Helper()
	res, err := w.Create(context.Background(), req)
	if err != nil {
		w.t.Fatalf("create %s: %v", req.Key, err)
	}
	return res
}

func (w *world) exec(key string, command ...string) lifecycle.ExecResult {
	w.t.Helper()
	res, err := w.Exec(context.Background(), lifecycle.ExecRequest{Tenant: "a", Key: key, Command: command})
	if err != nil {
		w.t.Fatalf("exec %v in %s: %v", command, key, err)
	}
	return res
}

func (w *world) status(key string) lifecycle.Status {
	w.t.Helper()
	sb, err := w.Get(context.Background(), "a", key)
	must(w.t, err)
	return sb.Status
}

// die ends the container of a sandbox, and waits until that is known.
func (w *world) die(key string) {
	w.t.Helper()
	sb, err := w.Get(context.Background(), "a", key)
	must(w.t, err)
	w.fake.Die(sb.ContainerID)
	w.eventually("the sandbox is stopped", func() bool { return w.status(key) == lifecycle.StatusStopped })
}

// metric reads one sample: "name" or "name{label=value}".
func (w *world) metric(name string) float64 {
	w.t.Helper()
	name, label, _ := strings.Cut(strings.TrimSuffix(name, "}"), "{")
	families, err := w.reg.Gather()
	must(w.t, err)
	for _, f := range families {
		if f.GetName() != name {
			continue
		}
		for _, m := range f.GetMetric() {
			if label == "" || slices.ContainsFunc(m.GetLabel(), func(l *dto.LabelPair) bool {
				return l.GetName()+"="+l.GetValue() == label
			}) {
				return m.GetCounter().GetValue() + m.GetGauge().GetValue()
			}
		}
	}
	return 0
}

var errBroken = errors.New("broken")

// breaking returns options of a fake engine on which an operation fails, and breakOp, which names
// another such operation; empty is none.
func breaking(op string) (opts runtimetest.FakeOptions, breakOp func(op string)) {
	var broken atomic.Value
	broken.Store(op)
	return runtimetest.FakeOptions{Fail: func(op, _ string) error {
		if op == broken.Load() {
			return errBroken
		}
		return nil
	}}, func(op string) { broken.Store(op) }
}

// execRef and procRef name processes of a tenant's sandbox.
func execRef(tenant, key, id string) lifecycle.ProcessRef {
	return lifecycle.ProcessRef{Tenant: tenant, Key: key, Kind: lifecycle.KindExec, ID: id}
}

func procRef(tenant, key, id string) lifecycle.ProcessRef {
	return lifecycle.ProcessRef{Tenant: tenant, Key: key, Kind: lifecycle.KindManaged, ID: id}
}

// start is Start without its stream.
func (w *world) start(ctx context.Context, req lifecycle.StartRequest) (lifecycle.Process, error) {
	p, s, err := w.Start(ctx, req)
	if s != nil {
		_ = s.Close()
	}
	return p, err
}

// later calls f in a goroutine.
func later[T any](f func() T) <-chan T {
	done := make(chan T, 1)
	go func() { done <- f() }()
	return done
}

// mounting is a request with a directory of the host and a quota for it.
func mounting(key, dir string, mb int64) lifecycle.CreateRequest {
	req := request(key)
	req.Request.HostPath, req.Request.WorkspaceQuotaMB = &dir, &mb
	return req
}

func second[T any](_ T, err error) error { return err }

var must = check.Must // ends a test if a step of its own fails

// errorIs looks for an error's type.
func errorIs[E error](err error) bool {
	_, ok := errors.AsType[E](err)
	return ok
}
