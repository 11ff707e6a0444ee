package lifecycle

import (
	"context"
	"time"

	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/runtime"
)

// desired is a sandbox that the policy has judged and that is to be made.
type desired struct {
	Sandbox
	ownEnv bool // the request brings its own environment
	max    int  // the caller's own cap on sandboxes; 0 is none
}

// differences compares what is desired with a sandbox. Of an adopted one, it compares only
// what the old service knew.
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

// keep takes over what a sandbox that is made again doesn't lose, as far as the policy in
// force allows.
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

// maxFailures is how many of them a tenant has.
const maxFailures = 32

// pendingCreate is a create under way. It holds its key, and outlives its callers.
type pendingCreate struct {
	pulling chan struct{} // closed when it turns out that the image must be pulled
	done    chan struct{} // closed when the fields below are set
	result  CreateResult
	err     error

	unlock   func()                      // of the key
	cancel   context.CancelCauseFunc     // ends it, with nothing made
	starting Sandbox                     // what Get shows meanwhile; never changed
	dead     string                      // session of the dead sandbox that it makes again; empty if none
	progress func() runtime.PullProgress // set before pulling is closed
}

// giveUp cancels a create that waits for its image, or did.
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
