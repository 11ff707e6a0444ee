// Package restart applies the restart policies of containers that the engine must not start by
// itself.
//
// The rules are Docker Engine's. A policy decides at each exit. It also decides for every
// container that doesn't run when Berm or the engine has started.
package restart

import (
	"context"
	"time"
)

// The policies that restart, by Docker's names. Any other name is none.
const (
	Always        = "always"
	OnFailure     = "on-failure"
	UnlessStopped = "unless-stopped"
)

const (
	minBackoff = 100 * time.Millisecond
	maxBackoff = time.Minute
	steady     = 10 * time.Second // a container that ran this long starts over with minBackoff
	joinDelay  = 5 * time.Second  // delay at a boot for a container that joins another one's network
)

// Policy is a restart policy. The zero value never restarts.
type Policy struct {
	Name       string
	MaxRetries int // of OnFailure; 0 is no limit
}

// None reports whether the policy never restarts.
func (p Policy) None() bool {
	return p.Name != Always && p.Name != OnFailure && p.Name != UnlessStopped
}

// Row is what the store keeps of a container. It is a value.
type Row struct {
	ContainerID string
	Policy
	Count   int           // restarts since the last start by hand
	Stopped bool          // it was stopped or killed by hand since it was last started by hand
	Exit    time.Time     // end of the last run that the policy was asked about; zero is none
	Backoff time.Duration // the last delay before a restart
	Next    time.Time     // when the container is started again; zero if no restart is due
}

// Store keeps rows durably. It must be safe for concurrent use.
type Store interface {
	// Restarts returns all rows.
	Restarts(ctx context.Context) ([]Row, error)
	// PutRestart writes a row over the one of the same container.
	PutRestart(ctx context.Context, r Row) error
	// DeleteRestart removes a container's row, if there is one.
	DeleteRestart(ctx context.Context, containerID string) error
}

// Container is a container as the engine shows it.
type Container struct {
	Policy        Policy // from its creation; counts until it has a row
	EngineRestart bool   // the engine has a restart policy for it, and so may start it by itself
	Running       bool   // or paused
	ExitCode      int
	StartedAt     time.Time // zero: never
	FinishedAt    time.Time
	Expires       time.Time // it isn't started from then on
	Joins         bool      // it needs another container to run
}

// Engine is the container engine. It must be safe for concurrent use. It has more methods than
// an interface should have, because Inspect and StartContainer must use the same engine.
type Engine interface {
	// Watch calls changed with the ID of each container that ends or is removed, until ctx
	// ends or the engine goes away. It calls ready once it misses no more events. Life
	// identifies the engine's current run; it is empty if runs can't be told apart.
	Watch(ctx context.Context, ready func(life string), changed func(id string)) error
	// List returns the IDs of all containers that the engine must not start by itself.
	List(ctx context.Context) ([]string, error)
	// Inspect returns a container. The error is in errdefs' NotFound class if there is none.
	Inspect(ctx context.Context, id string) (Container, error)
	// TakeOver removes the engine's own restart policy of a container.
	TakeOver(ctx context.Context, id string) error
	// StartContainer starts a container unless it runs. The error is in errdefs' Unavailable
	// class if the engine can't be reached.
	StartContainer(ctx context.Context, id string) error
}

// restarts reports whether the policy restarts a container that ended with a code.
func (r Row) restarts(code int) bool {
	switch r.Name {
	case Always:
		return true
	case UnlessStopped:
		return !r.Stopped
	case OnFailure:
		return code != 0 && (r.MaxRetries == 0 || r.Count < r.MaxRetries)
	}
	return false
}

// decide returns the row for the current state of the container. Off says that restarts are
// cancelled until the next start by hand. At a boot, of Berm or of the engine, off is ignored,
// and a restart resets the row's count and backoff.
func (r Row) decide(c Container, off, boot bool, now time.Time) Row {
	if c.Running || c.StartedAt.IsZero() || !now.Before(c.Expires) {
		r.Next = time.Time{}
		return r
	}
	if !boot && c.FinishedAt.Equal(r.Exit) {
		return r
	}
	if c.FinishedAt.Sub(c.StartedAt) >= steady {
		r.Backoff = 0
	}
	r.Backoff = min(max(2*r.Backoff, minBackoff), maxBackoff)
	r.Exit, r.Next = c.FinishedAt, time.Time{}
	switch {
	case off && !boot || !r.restarts(c.ExitCode):
	case boot:
		r.Count, r.Stopped, r.Backoff, r.Next = 0, false, 0, now
		if c.Joins {
			r.Next = now.Add(joinDelay)
		}
	default:
		r.Count++
		r.Next = now.Add(r.Backoff)
	}
	return r
}
