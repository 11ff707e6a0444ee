// Package lifecycle gives every key of a tenant at most one sandbox, and every sandbox an end. It
// orders what happens to a key, remembers what exists, and makes the engine run what the policy
// judged.
//
// Its parts call each other one way: processes, Registry, creator, engine. The reconciler and
// the collector call Registry and engine. A Service bundles them.
package lifecycle

import (
	"strconv"
	"time"

	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/runtime"
)

// Status of a sandbox.
type Status string

// The states of a sandbox.
const (
	StatusStarting Status = "starting" // being made; its image may still be pulled
	StatusRunning  Status = "running"
	StatusPaused   Status = "paused"
	StatusStopping Status = "stopping"
	StatusStopped  Status = "stopped" // its container died or was stopped; the next command makes it again
	StatusFailed   Status = "failed"  // it could not be made
	StatusExpired  Status = "expired" // past its end, not yet collected
)

// Sandbox is a snapshot of one sandbox. It is a value: nothing in it may be changed.
type Sandbox struct {
	Tenant      string
	Key         string
	SessionID   string // UUID; new with every container
	ContainerID string // empty until there is one
	Status      Status
	Error       string // why it failed, with StatusFailed

	Spec       policy.Spec
	Overridden []policy.Override
	Metadata   map[string]string // the caller's own; never nil
	AgentID    string            // empty unless given
	VolumePath string            // the old service's volume_host_path, cleaned; empty unless given

	// WorkspaceInode identifies the mounted directory that the sandbox's own quota counts:
	// device and inode. Empty without a quota, and of sandboxes of older versions.
	WorkspaceInode string

	Endpoint    Endpoint
	Enforcement Enforcement

	CreatedAt     time.Time // all times are UTC
	ExpiresAt     time.Time
	IdleExpiresAt time.Time // zero: never idles out
	Deadline      time.Time // no renewal goes past it
	LastUsedAt    time.Time

	Pull *runtime.PullProgress // of its image, while that is being pulled
}

// Ends returns when the sandbox ends if it isn't used or renewed.
func (s Sandbox) Ends() time.Time {
	if !s.IdleExpiresAt.IsZero() && s.IdleExpiresAt.Before(s.ExpiresAt) {
		return s.IdleExpiresAt
	}
	return s.ExpiresAt
}

// Expired reports whether the sandbox has ended at now; equality counts.
func (s Sandbox) Expired(now time.Time) bool { return !s.Ends().After(now) }

// Endpoint is the address of a service in the sandbox.
type Endpoint struct {
	IP   string // address on the sandbox network; empty without one
	Port int    // the configured agent service port; 0 if none
}

// Enforcement says how strictly a sandbox's limits are enforced.
type Enforcement struct {
	// Mounts is "held" if the judged directories were pinned until the container ran. It is
	// "trusted" if no sandbox can change their paths, and empty without mounts.
	Mounts string
	// WorkspaceQuota is "hard" (the kernel's), "soft" (measured around commands),
	// or empty without a quota.
	WorkspaceQuota string
}

// CreateRequest asks for a sandbox.
type CreateRequest struct {
	Tenant     string // mandatory
	Key        string // mandatory; ParseKey's form
	Request    policy.Request
	Metadata   map[string]string
	AgentID    string
	VolumePath string // the old service's volume_host_path; empty is none
	// MaxSandboxes is the caller's own limit for the tenant; 0 is none.
	MaxSandboxes int
	// Patient makes Create wait while an image is pulled, rather than return a *PullingError.
	Patient bool
}

// Result is the outcome of a create or a delete. Metrics count it.
type Result string

// The outcomes of a create or a delete.
const (
	ResultCreated  Result = "created"
	ResultReused   Result = "reused"
	ResultConflict Result = "conflict"
	ResultReplaced Result = "replaced" // instead of an ended or dead one
	ResultError    Result = "error"
	ResultDeleted  Result = "deleted"
	ResultNotFound Result = "not_found"
)

// CreateResult is a successful create.
type CreateResult struct {
	Sandbox Sandbox
	Result  Result // ResultCreated, ResultReused or ResultReplaced
	// Recreated says that the key's container had died and was made again.
	Recreated bool
}

// DeleteResult is a successful delete.
type DeleteResult struct {
	Result      Result // ResultDeleted or ResultNotFound
	SessionID   string // empty if there was none
	ContainerID string // empty if there was none
}

// ListOptions select sandboxes of a tenant.
type ListOptions struct {
	Status   Status            // empty is any
	Metadata map[string]string // all of these must match
	Limit    int               // 1 to 100; 0 is 100
	After    string            // the key before the first one; empty is the start
}

// ExecRequest asks for a command to be run to its end.
type ExecRequest struct {
	Tenant string // mandatory
	Key    string // mandatory
	// Create, if not nil, makes the sandbox if there is none, and conflicts with one of
	// another spec. Its Tenant, Key and Patient are ignored.
	Create      *CreateRequest
	Command     []string          // mandatory
	Env         map[string]string // judged by the env policy
	WorkingDir  string            // absolute; empty is the mount path, or the image's own without a mount
	Stdin       []byte
	Timeout     *int64 // seconds; nil is the profile's default; clamped to its maximum
	OutputLimit *int   // in code points, for each stream; nil is 4,000; 0 or less keeps nothing
	Raw         bool   // keep the bytes as they are, in StdoutRaw and StderrRaw, cut at OutputLimit bytes
	// Keep is called before the output takes more memory, by one goroutine for each stream. If
	// it fails, the output that follows is cut. Nil allows all.
	Keep func(bytes int) error
	// Serialize makes the command wait for the serialized ones that came before. The wait
	// doesn't count against the timeout.
	Serialize bool
}

// ExecStatus is how a command ended.
type ExecStatus string

// The statuses of a command that has ended.
const (
	ExecCompleted ExecStatus = "completed"
	ExecTimedOut  ExecStatus = "timed_out"
	ExecKilled    ExecStatus = "killed" // its sandbox was removed or died
	ExecOOMKilled ExecStatus = "oom_killed"
)

// ExecResult is the outcome of a command.
type ExecResult struct {
	SessionID         string
	Backend           string
	Status            ExecStatus
	ExitCode          *int // nil unless completed
	Stdout, Stderr    string
	StdoutRaw         []byte // with Raw only
	StderrRaw         []byte
	StdoutTruncated   bool
	StderrTruncated   bool
	Duration          time.Duration
	CPUTime           time.Duration     // of the command and the children it waited for; 0 if not known
	PeakMemoryBytes   int64             // of the same
	Timeout           time.Duration     // that was in force
	Overridden        []policy.Override // of the command's request, and of its Create
	Recreated         bool              // the sandbox's container had died and was made again
	Created           bool              // the sandbox was made for this command
	SessionTerminated bool              // the command couldn't be killed, so the sandbox was
	QuotaExceeded     bool              // the workspace is over its quota now; the sandbox was stopped
	QuotaEnforcement  string            // as in Enforcement; empty without a quota
}

// OK reports whether the command completed with exit code 0.
func (r ExecResult) OK() bool {
	return r.Status == ExecCompleted && r.ExitCode != nil && *r.ExitCode == 0
}

// ServiceStatus is the state of the whole service.
type ServiceStatus struct {
	Backend         runtime.Info
	Available       bool   // the engine answers, and the start-up reconciliation is done
	Reason          string // why it isn't available; empty if it is
	ActiveSandboxes int    // of the tenant asked for
	RunningCommands int    // of the tenant asked for
	// RunningProcesses are the managed ones, of the tenant asked for.
	RunningProcesses int
}

func sandboxAttrs(sb Sandbox) []any {
	return []any{"tenant", sb.Tenant, "key", sb.Key, "session_id", sb.SessionID, "container_id", sb.ContainerID}
}

func earlier(a, b time.Time) time.Time {
	if b.Before(a) {
		return b
	}
	return a
}

// statusIn returns the status of a container's sandbox. A container whose agent is of another
// version counts as stopped, so that the next use makes it again. An adopted one has no agent.
func statusIn(c runtime.Container) Status {
	if c.Labels[LabelKey] != "" && c.Labels[LabelAgent] != strconv.Itoa(runtime.AgentVersion) {
		return StatusStopped
	}
	return statusOf(c.State)
}

func statusOf(s runtime.State) Status {
	switch s {
	case runtime.StateRunning:
		return StatusRunning
	case runtime.StatePaused:
		return StatusPaused
	default:
		return StatusStopped
	}
}

// DefaultTenant is the tenant of callers that have no token, and of adopted
// sandboxes.
const DefaultTenant = "default"
