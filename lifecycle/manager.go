package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	goruntime "runtime"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containerd/errdefs"
	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"
	"golang.org/x/sync/semaphore"
	"golang.org/x/sync/singleflight"

	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/runtime"
)

// DefaultTenant is the tenant of callers that have no token, and of adopted
// sandboxes.
const DefaultTenant = "default"

// Options configure a Manager.
type Options struct {
	Runtime runtime.Runtime       // mandatory
	Policy  func() *policy.Policy // mandatory: the policy in force; asked once per call
	Store   Store                 // mandatory
	// Quotas holds sandboxes to quotas; nil: one with a quota of its own is refused.
	Quotas Quotas
	// Collector removes what callers of the engine's own API made; nil: there are none.
	Collector runtime.Collector
	Sealer    *Sealer // tells this instance's objects from others; nil: knows what this Manager makes
	Holder    Holder  // mandatory: holds judged directories while the engine mounts them
	// Claim keeps archive calls of the engine proxy away from the mounts of a sandbox that is
	// being created, until leave. It waits for those that go on. Nil: there are none.
	Claim    func(ctx context.Context, sessionID string, mounts []policy.Mount) (leave func(), err error)
	Owner    string                // mandatory: this instance's id; nothing that carries another's is touched
	Labels   map[string]string     // further ones of every container and network; nil is none
	Settings Settings              // the operator's settings; the zero value is usable
	Logger   *slog.Logger          // nil discards
	Registry prometheus.Registerer // nil: metrics are kept but not exported
	Tracer   trace.TracerProvider  // nil: no spans
}

// Settings are what the operator sets for every sandbox.
type Settings struct {
	AgentPort      int               // port in Endpoint; 0 is none
	Env            map[string]string // set in every sandbox, before the caller's
	Command        []string          // main process of every sandbox; nil is the image's own
	MaxSandboxes   int               // live ones over all tenants; 0 is no cap
	MaxCommands    int               // running at once in one sandbox; 0 is 64
	MaxQueued      int               // waiting in one sandbox for their turn, with Serialize; 0 is 64
	MaxProcesses   int               // managed processes running at once in one sandbox; 0 is 16
	EngineParallel int               // creates and removals at once; 0 is twice the cores
	AdoptLegacy    bool              // take over containers with the old service's labels, and write them

	ChatsRoot        string // host directory with one directory per key; empty is none
	ChatMountPath    string // where a key's directory is seen; mandatory with ChatsRoot
	DependenciesRoot string // host directory, read-only; empty is none
	DependenciesPath string // where it is seen
	ToolsRoot        string // host directory, read-only; empty is none
	ToolsPath        string // where it is seen
	VolumePath       string // where a request's volume_host_path is seen; empty is "/volume"
	// EnginePath maps a path of this process to the engine's; nil: they are the same.
	EnginePath func(local string) (string, error)
}

// Store keeps what labels can't. It must be safe for many goroutines.
type Store interface {
	// Records answers all that was put and not deleted.
	Records(ctx context.Context) ([]Record, error)
	// Put writes a record over the one of the same session, durably.
	Put(ctx context.Context, r Record) error
	// Touch writes last uses, by session. Sessions that aren't there are skipped.
	Touch(ctx context.Context, lastUsed map[string]time.Time) error
	// Delete removes records by session; those that aren't there are no error.
	Delete(ctx context.Context, sessionIDs ...string) error
	// Fresh says that nobody had taken over when the store was opened, since it was made or
	// restored: what an earlier one knew is lost.
	Fresh() bool
	// TookOver notes that what there is has been taken over.
	TookOver(ctx context.Context) error
	// Ping is nil when the store can be written.
	Ping(ctx context.Context) error
}

// Record is what the store knows of one sandbox: enough to make it again if its
// container is gone.
type Record struct {
	SessionID   string
	Tenant      string
	Key         string
	ContainerID string
	CreatedAt   time.Time
	ExpiresAt   time.Time
	Deadline    time.Time
	LastUsedAt  time.Time   // zero: the record is a backup's, and what happened since isn't known
	Spec        policy.Spec // without Env, which follows
	Env         map[string]string
	AgentID     string
	VolumePath  string
	Metadata    map[string]string
	Overridden  []policy.Override
	Enforcement Enforcement
}

// Holder makes sure that the engine mounts the directories that were judged.
type Holder interface {
	// Hold takes the mounts' directories as they are now. It returns what the engine must
	// mount instead, in the same order, and a release that must be called once the
	// container runs or has failed. The container must go if release fails. The name
	// is a container's for its life. Hold returns a *policy.DeniedError if
	// a mount isn't allowed here.
	Hold(ctx context.Context, name string, mounts []policy.Mount) (sources []string, release func() error, err error)
	// Clean removes what dead processes left behind. It is called before the first Hold.
	Clean() error
	// Mode is "held" or "trusted", as in Enforcement.
	Mode() string
}

// record is a live sandbox. Its snapshot is replaced, never changed; all fields
// are guarded by Manager.mu.
type record struct {
	sb      Sandbox
	running int  // commands
	procs   int  // managed processes
	files   int  // files calls under way
	conns   int  // connections to ports, busy or not
	stale   bool // LastUsedAt is newer than the store's
	adopted bool // from the old service: only its own parameters can be compared
	inside  inside
}

// failure is a create's error that nobody has been told of.
type failure struct {
	sb  Sandbox
	err error
	at  time.Time
}

// Manager is the one place where sandboxes are made, changed and ended.
// All methods may be called from many goroutines at once. Until the start-up
// reconciliation is done, and while the engine is away, calls that need it fail
// with errdefs' Unavailable.
type Manager struct {
	opts    Options
	log     *slog.Logger
	metrics *metrics
	tracer  trace.Tracer
	engine  *semaphore.Weighted // bounds creates and removals
	pulls   singleflight.Group

	base   context.Context // of creates, which outlive their callers
	cancel context.CancelFunc
	wg     sync.WaitGroup // creates, and stops of processes

	insider     runtime.Insider // Options.Runtime, or nil if it is none
	tending     context.Context // of what looks after processes, and ends with Run
	stopTending context.CancelFunc
	tenders     sync.WaitGroup

	mu          sync.Mutex
	slots       map[keyID]*slot
	lines       map[keyID]*line                                  // of keys where somebody has the turn
	starting    map[processID]struct{}                           // managed processes that are being started
	containers  map[string]keyID                                 // container ID to key, of all records
	making      map[string]struct{}                              // session IDs of creates under way
	ended       map[string]struct{}                              // containers that ended while creates, or a reconciliation, were under way
	networks    map[string]struct{}                              // engine networks known to be there
	pullsAt     map[string]*atomic.Pointer[runtime.PullProgress] // how far pulls under way are, by reference
	reconciling bool                                             // likewise
	closing     bool                                             // no new creates
	down        error                                            // why nothing that needs the engine can be done; nil when it can
	known       bool                                             // what isn't in slots isn't there; else down says why not
	info        runtime.Info

	tookOver bool // the first reconciliation is done; of Run's goroutine alone
}

// New checks the options and returns a Manager that answers Unavailable until Run
// has reconciled.
func New(opts Options) (*Manager, error) {
	switch {
	case opts.Runtime == nil:
		return nil, errors.New("lifecycle: Runtime is mandatory")
	case opts.Policy == nil:
		return nil, errors.New("lifecycle: Policy is mandatory")
	case opts.Store == nil:
		return nil, errors.New("lifecycle: Store is mandatory")
	case opts.Holder == nil:
		return nil, errors.New("lifecycle: Holder is mandatory")
	case opts.Owner == "":
		return nil, errors.New("lifecycle: Owner is mandatory")
	case opts.Settings.ChatsRoot != "" && opts.Settings.ChatMountPath == "":
		return nil, errors.New("lifecycle: ChatMountPath is mandatory with ChatsRoot")
	}
	if opts.Claim == nil {
		opts.Claim = func(context.Context, string, []policy.Mount) (func(), error) { return func() {}, nil }
	}
	if opts.Logger == nil {
		opts.Logger = slog.New(slog.DiscardHandler)
	}
	if opts.Sealer == nil {
		var err error
		if opts.Sealer, err = NewSealer(context.Background(), SealerOptions{Owner: opts.Owner, Logger: opts.Logger}); err != nil {
			return nil, err
		}
	}
	if opts.Tracer == nil {
		opts.Tracer = noop.NewTracerProvider()
	}
	s := &opts.Settings
	if s.EngineParallel <= 0 {
		s.EngineParallel = 2 * goruntime.NumCPU()
	}
	if s.MaxCommands <= 0 {
		s.MaxCommands = 64
	}
	if s.MaxQueued <= 0 {
		s.MaxQueued = 64
	}
	if s.MaxProcesses <= 0 {
		s.MaxProcesses = 16
	}
	if s.VolumePath == "" {
		s.VolumePath = "/volume"
	}
	if s.EnginePath == nil {
		s.EnginePath = func(local string) (string, error) { return local, nil }
	}
	m := &Manager{
		opts:       opts,
		log:        opts.Logger,
		metrics:    newMetrics(opts.Registry),
		tracer:     opts.Tracer.Tracer("github.com/bermhq/berm/lifecycle"),
		engine:     semaphore.NewWeighted(int64(s.EngineParallel)),
		slots:      map[keyID]*slot{},
		lines:      map[keyID]*line{},
		starting:   map[processID]struct{}{},
		containers: map[string]keyID{},
		making:     map[string]struct{}{},
		ended:      map[string]struct{}{},
		networks:   map[string]struct{}{},
		pullsAt:    map[string]*atomic.Pointer[runtime.PullProgress]{},
		down:       errors.New("the start-up reconciliation isn't done yet"),
	}
	m.insider, _ = opts.Runtime.(runtime.Insider)
	m.base, m.cancel = context.WithCancel(context.Background())
	m.tending, m.stopTending = context.WithCancel(context.Background())
	return m, nil
}

var errClosing = errdefs.ErrUnavailable.WithMessage("berm is shutting down")

// available is nil when the engine can be asked.
func (m *Manager) available() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closing {
		return errClosing
	}
	if m.down != nil {
		return &UnavailableError{Err: m.down}
	}
	return nil
}

// Ready is nil when calls can succeed: reconciled, the engine and the store there.
func (m *Manager) Ready(ctx context.Context) error {
	if err := m.available(); err != nil {
		return err
	}
	if err := m.opts.Store.Ping(ctx); err != nil {
		return &UnavailableError{Err: err}
	}
	return nil
}

// Status tells how the service is; counts are the tenant's.
func (m *Manager) Status(_ context.Context, tenant string) ServiceStatus {
	m.mu.Lock()
	defer m.mu.Unlock()
	st := ServiceStatus{Backend: m.info, Available: m.down == nil && !m.closing}
	if m.down != nil {
		st.Reason = m.down.Error()
	}
	for id, s := range m.slots {
		if s.record != nil && id.tenant == tenant {
			st.ActiveSandboxes++
			st.RunningCommands += s.record.running
			st.RunningProcesses += s.record.procs
		}
	}
	return st
}

// call does one operation on the engine: a span, its duration, its errors.
func (m *Manager) call(ctx context.Context, op string, f func(context.Context) error) error {
	ctx, span := m.tracer.Start(ctx, "runtime."+op, trace.WithSpanKind(trace.SpanKindClient))
	defer span.End()
	start := time.Now()
	err := f(ctx)
	m.metrics.operation(op, time.Since(start), err)
	if err != nil {
		span.SetAttributes(attribute.String("error.type", ErrorType(err)))
		span.SetStatus(codes.Error, ErrorType(err))
	}
	return err
}

// guard runs f in a goroutine of a request, and turns a panic into an error, which is
// logged and counted.
func (m *Manager) guard(op string, f func() error) (err error) {
	defer func() {
		if v := recover(); v != nil {
			m.metrics.runtimeErrors.WithLabelValues(op, "panic").Inc()
			m.log.Error("panic", "operation", op, "panic", fmt.Sprint(v), "stack", string(debug.Stack()))
			err = fmt.Errorf("%s: panic: %v", op, v)
		}
	}()
	return f()
}

// remove takes a container away, also when the caller has gone meanwhile.
func (m *Manager) remove(ctx context.Context, containerID string) error {
	ctx = context.WithoutCancel(ctx)
	if err := m.engine.Acquire(ctx, 1); err != nil {
		return err
	}
	defer m.engine.Release(1)
	return m.call(ctx, "remove", func(ctx context.Context) error {
		return m.opts.Runtime.Remove(ctx, containerID)
	})
}

// publishLocked makes rec the sandbox of its key.
func (m *Manager) publishLocked(id keyID, rec *record) {
	s := m.slots[id]
	if s == nil {
		s = &slot{}
		m.slots[id] = s
	}
	if s.record == nil {
		m.metrics.active.Inc()
	} else {
		m.loseLocked(s.record)
		delete(m.containers, s.record.sb.ContainerID)
	}
	s.record, s.failure = rec, nil
	if rec.sb.ContainerID != "" {
		m.containers[rec.sb.ContainerID] = id
	}
}

// forgetLocked drops the sandbox of a key.
func (m *Manager) forgetLocked(id keyID) {
	s := m.slots[id]
	if s == nil || s.record == nil {
		return
	}
	m.loseLocked(s.record)
	delete(m.containers, s.record.sb.ContainerID)
	s.record = nil
	m.metrics.active.Dec()
	m.freeLocked(id, s)
}

// recordOf answers the live record of a key, or nil.
func (m *Manager) recordOf(id keyID) *record {
	m.mu.Lock()
	defer m.mu.Unlock()
	if s := m.slots[id]; s != nil {
		return s.record
	}
	return nil
}

// snapshot answers a record's sandbox as it is now.
func (m *Manager) snapshot(r *record) Sandbox {
	m.mu.Lock()
	defer m.mu.Unlock()
	return r.snapshotLocked(time.Now())
}

// busyLocked tells whether the sandbox is in use, and so isn't idle.
func (r *record) busyLocked() bool {
	return r.running > 0 || r.procs > 0 || r.files > 0 || r.inside.unsure
}

// snapshotLocked works out what depends on the time.
func (r *record) snapshotLocked(now time.Time) Sandbox {
	sb := r.sb
	sb.IdleExpiresAt = time.Time{}
	if sb.Spec.IdleTTL > 0 {
		last := sb.LastUsedAt
		if r.busyLocked() {
			last = now
		}
		sb.IdleExpiresAt = last.Add(sb.Spec.IdleTTL).UTC()
	}
	if sb.Expired(now) {
		sb.Status = StatusExpired
	}
	return sb
}

// storeRecord is what the store is to know of a sandbox.
func storeRecord(sb Sandbox) Record {
	return Record{
		SessionID: sb.SessionID, Tenant: sb.Tenant, Key: sb.Key, ContainerID: sb.ContainerID,
		CreatedAt: sb.CreatedAt, ExpiresAt: sb.ExpiresAt, Deadline: sb.Deadline, LastUsedAt: sb.LastUsedAt,
		Spec: sb.Spec, Env: sb.Spec.Env, AgentID: sb.AgentID, VolumePath: sb.VolumePath,
		Metadata: sb.Metadata, Overridden: sb.Overridden, Enforcement: sb.Enforcement,
	}
}

// sandboxFromStore is a sandbox whose container is gone.
func sandboxFromStore(r Record, port int) Sandbox {
	sb := Sandbox{
		SessionID: r.SessionID, Tenant: r.Tenant, Key: r.Key, ContainerID: r.ContainerID, Status: StatusStopped,
		CreatedAt: r.CreatedAt, ExpiresAt: r.ExpiresAt, Deadline: r.Deadline, LastUsedAt: r.LastUsedAt,
		Spec: r.Spec, AgentID: r.AgentID, VolumePath: r.VolumePath, Endpoint: Endpoint{Port: port},
		Metadata: r.Metadata, Overridden: r.Overridden, Enforcement: r.Enforcement,
	}
	sb.Spec.Env = r.Env
	if sb.Metadata == nil {
		sb.Metadata = map[string]string{}
	}
	return sb
}
