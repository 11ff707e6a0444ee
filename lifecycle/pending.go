package lifecycle

import (
	"context"
	"time"

	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/runtime"
)

// desired is a sandbox to be made, as the policy has judged it.
type desired struct {
	Sandbox
	ownEnv bool // the request brings its own environment
	max    int  // the caller's own cap on sandboxes; 0 is none
}

// differences compares the desired sandbox with an existing one. For an adopted one, it compares
// only the fields that the old service knew.
func (d *desired) differences(sb Sandbox, adopted bool) []policy.Difference {
	var diff []policy.Difference
	if !adopted {
		diff = policy.Diff(sb.Spec, d.Spec)
	}
	if sb.AgentID != d.AgentID {
		diff = append(diff, policy.Difference{Field: "agent_id", Current: sb.AgentID, Requested: d.AgentID})
	}
	if sb.VolumePath != d.VolumePath {
		diff = append(diff, policy.Difference{Field: "volume_host_path", Current: sb.VolumePath, Requested: d.VolumePath})
	}
	return diff
}

// keep copies the values that a sandbox keeps when it is made again, as far as the policy in force
// allows.
func (d *desired) keep(sb Sandbox, pol *policy.Policy) (err error) {
	if len(d.Metadata) == 0 {
		d.Metadata = sb.Metadata
	}
	if !d.ownEnv {
		d.Spec.Env, _, err = pol.ExecEnv(sb.Spec.Env)
	}
	return err
}

// failureKept is how long the error of a create whose callers were answered "pulling" is kept
// for the next caller.
const failureKept = 10 * time.Minute

// maxFailures bounds the failures that are kept for a tenant.
const maxFailures = 32

// pendingCreate is a create under way. It holds its key, and outlives its callers.
type pendingCreate struct {
	pulling chan struct{} // closed when it turns out that the image must be pulled
	done    chan struct{} // closed when the fields below are set
	result  CreateResult
	err     error

	unlock   func()                      // of the key
	cancel   context.CancelCauseFunc     // ends the create, which then makes nothing
	starting Sandbox                     // what Get returns during the create; never changed
	dead     string                      // session of the dead sandbox that it makes again; or empty
	progress func() runtime.PullProgress // set before pulling is closed
}

// giveUp cancels a create that waits for its image, or has waited for it.
func (p *pendingCreate) giveUp(why error) {
	select {
	case <-p.pulling:
		p.cancel(why)
	default:
	}
}

func (p *pendingCreate) pullingError() *PullingError {
	sb := p.starting
	at := p.progress()
	sb.Pull = &at
	return &PullingError{Sandbox: sb, Progress: at, RetryAfter: time.Second}
}
