package lifecycle

import (
	"context"
	"fmt"
	"sync"
	"time"
)

// Uses of one sandbox at once.
const (
	maxFileCalls = 64 // watches included
	maxPortConns = 256
)

// diedEarly is the message for a container that died before its command.
const diedEarly = "it died before the command could start; try again"

// limit returns how many uses of a kind one sandbox may have at once, and their name for errors.
func (s Settings) limit(u use) (most int, name string) {
	switch u {
	case useCommand:
		return s.MaxCommands, "commands running"
	case useProcess:
		return s.MaxProcesses, "processes running"
	case useFiles:
		return maxFileCalls, "files calls under way"
	}
	return maxPortConns, "connections to its ports"
}

// Access gives access to the files and ports of one sandbox. It is safe for many goroutines.
// Each operation counts as a use of the sandbox.
type Access struct {
	registry *Registry
	rec      *record
	sb       Sandbox
}

// Files returns access to the files of a key's sandbox. It fails with a *NotFoundError if there
// is none. It makes a stopped sandbox again, as Exec does. It does so even if the workspace is
// over its quota: otherwise callers couldn't remove files.
func (r *Registry) Files(ctx context.Context, tenant, key string) (*Access, error) {
	id, err := r.open(tenant, key)
	if err != nil {
		return nil, err
	}
	rec, _, err := r.awake(ctx, id)
	if err != nil {
		return nil, err
	}
	return &Access{r, rec, r.snapshot(rec)}, nil
}

// Ports returns access to the ports of a key's sandbox. It fails with a *NotFoundError if there
// is none. If the sandbox doesn't run, it returns the Access and a *StateError. It doesn't make
// the sandbox again, since nothing would listen in a new container.
func (r *Registry) Ports(ctx context.Context, tenant, key string) (*Access, error) {
	id, err := r.open(tenant, key)
	if err != nil {
		return nil, err
	}
	rec, sb, err := r.recordSoon(ctx, id)
	if err != nil {
		return nil, err
	}
	return &Access{r, rec, sb}, usePort.check(sb)
}

// SessionID returns the session of the sandbox. A later call of Files or Ports may find another.
func (a *Access) SessionID() string { return a.sb.SessionID }

// acquire counts one more use of a sandbox, until leave is called. All uses but a port's keep
// the sandbox from idling out. acquire fails if the sandbox doesn't run, or has its maximum of
// such uses. For a command or process in a stopped sandbox, the error is errDied: the caller may
// try again in a new container.
func (r *Registry) acquire(rec *record, u use) (sb Sandbox, leave func(), err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	sb = rec.snapshotLocked(time.Now())
	if err := u.check(sb); err != nil {
		return sb, nil, err
	}
	most, name := r.opts.Settings.limit(u)
	if n := rec.uses[u]; n >= most {
		return sb, nil, &CapacityError{
			Message:    fmt.Sprintf("sandbox %q has %d %s, which is as many as it may", sb.Key, n, name),
			RetryAfter: time.Second,
		}
	}
	rec.uses[u]++
	rec.usedLocked()
	return sb, sync.OnceFunc(func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		rec.leaveLocked(u)
	}), nil
}

// check returns an error unless the sandbox can be used.
func (u use) check(sb Sandbox) error {
	switch {
	case sb.Status == StatusRunning:
		return nil
	case sb.Status == StatusExpired:
		return &NotFoundError{Key: sb.Key}
	case u == usePort:
		return &StateError{Key: sb.Key, Status: sb.Status, Want: "its ports need it running"}
	case sb.Status == StatusStopped && u == useFiles:
		return &StateError{Key: sb.Key, Status: sb.Status, Want: "it died before its files could be used; try again"}
	case sb.Status == StatusStopped: // just now, or a new one has replaced it
		return &StateError{Key: sb.Key, Status: sb.Status, Want: diedEarly, died: true}
	case u == useFiles:
		return &StateError{Key: sb.Key, Status: sb.Status, Want: "its files need it running; resume or create it first"}
	}
	return &StateError{Key: sb.Key, Status: sb.Status, Want: "commands need it running; resume or create it first"}
}

// leaveLocked ends one use of the sandbox.
func (r *record) leaveLocked(u use) {
	r.uses[u]--
	if u != usePort { // portConn has called touch for each transfer
		r.usedLocked()
	}
}
