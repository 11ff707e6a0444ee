package lifecycle

import (
	"context"
	"io"
	"log/slog"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/otel/trace"

	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/runtime"
)

// Options configure a Manager.
type Options struct {
	Runtime  runtime.Runtime       // mandatory
	Policy   func() *policy.Policy // mandatory: the policy in force; asked once per call
	Store    Store                 // mandatory
	Holder   Holder                // nil: mounts are compared after the start instead of held
	Owner    string                // mandatory: this instance's id; nothing that carries another's is touched
	Settings Settings              // the operator's settings
	Logger   *slog.Logger          // nil discards
	Registry prometheus.Registerer // nil: metrics are kept but not exported
	Tracer   trace.TracerProvider  // nil: no spans
}

// Settings are what the operator sets for every sandbox.
type Settings struct {
	AgentPort int // port in Endpoint; 0 is none
}

// Store keeps what labels can't.
type Store interface {
	Close() error
}

// Holder pins directories for as long as the engine needs to mount them.
type Holder interface {
	Hold(ctx context.Context, sessionID string, mounts []policy.Mount) ([]policy.Mount, error)
}

// Manager is the one place where sandboxes are made, changed and ended.
// All methods may be called from many goroutines at once. Until the start-up
// reconciliation is done, and while the engine is away, calls that need it fail
// with errdefs' Unavailable.
type Manager struct{ opts Options }

// New checks the options and returns a Manager that does nothing until Run.
func New(opts Options) (*Manager, error) { panic("later") }

// Run reconciles with the engine, then follows its events and writes last uses
// down, until ctx ends. A lost engine is no error: Run goes on trying.
func (m *Manager) Run(ctx context.Context) error { panic("later") }

// Ready is nil when calls can succeed: reconciled, the engine and the store there.
func (m *Manager) Ready(ctx context.Context) error { panic("later") }

// Create answers the tenant's sandbox for a key, and makes it if there is none.
func (m *Manager) Create(ctx context.Context, req CreateRequest) (CreateResult, error) {
	panic("later")
}

// Get answers the sandbox of a key; *NotFoundError if there is none.
func (m *Manager) Get(ctx context.Context, tenant, key string) (Sandbox, error) { panic("later") }

// List answers the tenant's sandboxes in the order of their keys, and the last
// key if there are more.
func (m *Manager) List(ctx context.Context, tenant string, opts ListOptions) ([]Sandbox, string, error) {
	panic("later")
}

// Delete removes the sandbox of a key.
func (m *Manager) Delete(ctx context.Context, tenant, key string) (DeleteResult, error) {
	panic("later")
}

// Renew moves the expiry to ttl from now (0: the sandbox's own TTL), never past
// the deadline, and restarts the idle time.
func (m *Manager) Renew(ctx context.Context, tenant, key string, ttl time.Duration) (Sandbox, error) {
	panic("later")
}

// Pause freezes the sandbox's processes; Resume lets them go on.
func (m *Manager) Pause(ctx context.Context, tenant, key string) (Sandbox, error) { panic("later") }

// Resume is Pause's opposite.
func (m *Manager) Resume(ctx context.Context, tenant, key string) (Sandbox, error) { panic("later") }

// Exec runs a command to its end.
func (m *Manager) Exec(ctx context.Context, req ExecRequest) (ExecResult, error) { panic("later") }

// Logs copies what the sandbox's main process printed.
func (m *Manager) Logs(ctx context.Context, tenant, key string, opts runtime.LogOptions, stdout, stderr io.Writer) error {
	panic("later")
}

// Stats measures the sandbox.
func (m *Manager) Stats(ctx context.Context, tenant, key string) (runtime.Stats, error) {
	panic("later")
}

// Status tells how the service is; counts are the tenant's.
func (m *Manager) Status(ctx context.Context, tenant string) ServiceStatus { panic("later") }

// ParseKey checks a key and brings it into its canonical form: trimmed, and
// lower case if it is a UUID.
func ParseKey(s string) (string, error) { panic("later") }
