package lifecycle

import (
	"context"
	"time"

	"github.com/bermhq/berm/policy"
)

// Store keeps what labels can't. It must be safe for concurrent use.
type Store interface {
	// Records returns all records.
	Records(ctx context.Context) ([]Record, error)
	// Put stores a record durably, in place of the one of the same session.
	Put(ctx context.Context, r Record) error
	// Touch stores last uses, by session. It skips unknown sessions.
	Touch(ctx context.Context, lastUsed map[string]time.Time) error
	// Delete deletes records by session. Unknown sessions are no error.
	Delete(ctx context.Context, sessionIDs ...string) error
	// Fresh reports whether TookOver hadn't been called when the store was opened, since it was
	// made or restored: what an earlier one knew is lost.
	Fresh() bool
	// TookOver records that what exists has been taken over.
	TookOver(ctx context.Context) error
	// Ping returns nil if the store can be written.
	Ping(ctx context.Context) error
}

// Record is what the store keeps of one sandbox: enough to make it again if its container is
// gone.
type Record struct {
	SessionID   string
	Tenant      string
	Key         string
	ContainerID string
	CreatedAt   time.Time
	ExpiresAt   time.Time
	Deadline    time.Time
	LastUsedAt  time.Time   // zero: the record is a backup's
	Spec        policy.Spec // without Env, which follows
	Env         map[string]string
	AgentID     string
	VolumePath  string
	Metadata    map[string]string
	Overridden  []policy.Override
	Enforcement Enforcement
}

// storeRecord returns what the store keeps of a sandbox.
func storeRecord(sb Sandbox) Record {
	return Record{
		SessionID: sb.SessionID, Tenant: sb.Tenant, Key: sb.Key, ContainerID: sb.ContainerID,
		CreatedAt: sb.CreatedAt, ExpiresAt: sb.ExpiresAt, Deadline: sb.Deadline, LastUsedAt: sb.LastUsedAt,
		Spec: sb.Spec, Env: sb.Spec.Env, AgentID: sb.AgentID, VolumePath: sb.VolumePath,
		Metadata: sb.Metadata, Overridden: sb.Overridden, Enforcement: sb.Enforcement,
	}
}

// sandboxFromStore returns a stored sandbox, whose container is gone.
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
