package lifecycle

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	goruntime "runtime"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"

	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/runtime"
)

// Options configure a Service.
type Options struct {
	Runtime runtime.AgentRuntime  // mandatory
	Policy  func() *policy.Policy // mandatory: the policy in force; asked once per call
	Store   Store                 // mandatory
	Quotas  Quotas                // mandatory: holds sandboxes to quotas
	// Collector removes objects that callers made through the engine proxy; nil: without a proxy.
	Collector runtime.Collector
	Sealer    *Sealer // recognizes this instance's objects; nil: only those that this Service makes
	Holder    Holder  // mandatory: pins judged directories while the engine mounts them
	// Claim waits for archive calls of the engine proxy that use the mounts of a new sandbox,
	// and then keeps others away until leave. Nil: without a proxy.
	Claim    func(ctx context.Context, sessionID string, mounts []policy.Mount) (leave func(), err error)
	Engine   string                // its name in error messages: "the Docker Engine at unix:///run/docker.sock"; may be empty
	Owner    string                // mandatory: this instance's ID; objects of other instances aren't touched
	Labels   map[string]string     // more labels of every container and network; nil is none
	Settings Settings              // the operator's settings; the zero value is usable
	Logger   *slog.Logger          // nil discards
	Registry prometheus.Registerer // nil: metrics aren't exported
	Tracer   trace.TracerProvider  // nil: no spans
	// SweepEvery is the time between two sweeps of Collect; 0 is 30 s.
	SweepEvery time.Duration
}

// Settings are the operator's settings for every sandbox.
type Settings struct {
	AgentPort      int               // port in Endpoint; 0 is none
	Env            map[string]string // set in every sandbox, before the caller's
	Command        []string          // main process of every sandbox; nil is the image's own
	MaxSandboxes   int               // of all tenants; 0 is no cap
	MaxCommands    int               // running at once in one sandbox; 0 is 64
	MaxProcesses   int               // managed processes running at once in one sandbox; 0 is 16
	EngineParallel int               // creates and removals at once; 0 is twice the cores
	AdoptLegacy    bool              // take over containers with the old service's labels, and write them

	ChatsRoot        string // host directory with one directory per key; empty is none
	ChatMountPath    string // mount path of a key's directory; mandatory with ChatsRoot
	DependenciesRoot string // host directory, read-only; empty is none
	DependenciesPath string // its mount path
	ToolsRoot        string // host directory, read-only; empty is none
	ToolsPath        string // its mount path
	VolumePath       string // mount path of a request's volume_host_path; empty is "/volume"
	// EnginePath translates a path of this process into the engine's; nil: they are the same.
	EnginePath func(local string) (string, error)
}

// Holder makes sure that the engine mounts the directories that the policy judged.
type Holder interface {
	// Hold pins the directories of the mounts as they are now. It returns the sources that the
	// engine must mount instead, in the same order, and release, which must be called once
	// the container runs or has failed. If release fails, the container must be removed. The
	// name is the container's. Hold returns a *policy.DeniedError if a mount isn't allowed.
	Hold(ctx context.Context, name string, mounts []policy.Mount) (sources []string, release func() error, err error)
	// Clean removes pins that dead Berm processes left. It is called before the first Hold.
	Clean() error
	// Mode is "held" or "trusted", as in Enforcement.
	Mode() string
}

// check reports missing options, and sets the defaults.
func (o *Options) check() error {
	for field, missing := range map[string]bool{
		"Runtime": o.Runtime == nil, "Policy": o.Policy == nil, "Store": o.Store == nil, "Quotas": o.Quotas == nil,
		"Holder": o.Holder == nil, "Owner": o.Owner == "",
		"ChatMountPath": o.Settings.ChatsRoot != "" && o.Settings.ChatMountPath == "",
	} {
		if missing {
			return fmt.Errorf("lifecycle: %s is mandatory", field)
		}
	}
	if o.Claim == nil {
		o.Claim = func(context.Context, string, []policy.Mount) (func(), error) { return func() {}, nil }
	}
	o.Logger = cmp.Or(o.Logger, slog.New(slog.DiscardHandler))
	if o.Sealer == nil {
		var err error
		if o.Sealer, err = NewSealer(context.Background(), SealerOptions{Owner: o.Owner, Logger: o.Logger}); err != nil {
			return err
		}
	}
	o.SweepEvery = cmp.Or(o.SweepEvery, 30*time.Second)
	o.Tracer = cmp.Or[trace.TracerProvider](o.Tracer, noop.NewTracerProvider())
	o.Settings.setDefaults()
	return nil
}

func (s *Settings) setDefaults() {
	s.EngineParallel = cmp.Or(s.EngineParallel, 2*goruntime.NumCPU())
	s.MaxCommands = cmp.Or(s.MaxCommands, 64)
	s.MaxProcesses = cmp.Or(s.MaxProcesses, 16)
	s.VolumePath = cmp.Or(s.VolumePath, "/volume")
	if s.EnginePath == nil {
		s.EnginePath = func(local string) (string, error) { return local, nil }
	}
}

// Store keeps what labels can't, so that a sandbox can be made again if its container is gone. It
// must be safe for concurrent use.
type Store interface {
	// Records returns all stored sandboxes. LastUsedAt is zero if they are from a backup. The store
	// doesn't keep WorkspaceInode, Endpoint, Status, Error, IdleExpiresAt and Pull.
	Records(ctx context.Context) ([]Sandbox, error)
	// Put stores a sandbox durably, in place of the one of the same session.
	Put(ctx context.Context, sb Sandbox) error
	// Touch stores last uses, by session. It skips unknown sessions.
	Touch(ctx context.Context, lastUsed map[string]time.Time) error
	// Delete deletes sandboxes by session. Unknown sessions are no error.
	Delete(ctx context.Context, sessionIDs ...string) error
	// Fresh reports whether the store was created or restored, and TookOver not called since,
	// when it was opened. It then lacks what an earlier store knew.
	Fresh() bool
	// TookOver records that Berm has taken over the existing sandboxes.
	TookOver(ctx context.Context) error
	// Ping returns nil if the store can be written.
	Ping(ctx context.Context) error
}
