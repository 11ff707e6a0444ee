package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"go.opentelemetry.io/otel/trace"

	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/runtime"
)

// drainTimeout is how long close waits for creates and stops before it cancels them.
const drainTimeout = 30 * time.Second

// Registry holds the sandboxes. It gives every key of a tenant at most one, and orders what
// happens to a key.
type Registry struct {
	*records
	opts    *Options
	log     *slog.Logger
	tracer  trace.Tracer
	engine  *engine
	creator *creator

	base   context.Context // of creates and stops, which outlive their callers
	cancel context.CancelFunc
	tasks  sync.WaitGroup // creates and stops

	running context.Context // ends with Run
	stop    context.CancelFunc
	workers sync.WaitGroup // goroutines that end with running
}

func newRegistry(opts *Options) *Registry {
	r := &Registry{
		opts:   opts,
		log:    opts.Logger,
		tracer: opts.Tracer.Tracer("github.com/bermhq/berm/lifecycle"),
	}
	r.base, r.cancel = context.WithCancel(context.Background())
	r.running, r.stop = context.WithCancel(context.Background())
	r.records = &records{
		metrics:    newMetrics(opts.Registry),
		quotas:     opts.Quotas,
		slots:      map[keyID]*slot{},
		containers: map[string]keyID{},
		making:     map[string]struct{}{},
		ended:      map[string]struct{}{},
	}
	r.engine = newEngine(r.base, opts, r.metrics, r.tracer)
	r.creator = &creator{opts: opts, engine: r.engine, quotas: opts.Quotas}
	return r
}

var errClosing = errdefs.ErrUnavailable.WithMessage("berm is shutting down")

// available returns an error in the Unavailable class while the engine can't be used.
func (r *Registry) available() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closing {
		return errClosing
	}
	return r.engine.available()
}

// open checks a key, and that the engine can be used.
func (r *Registry) open(tenant, key string) (keyID, error) {
	id, err := parseID(tenant, key)
	if err == nil {
		err = r.available()
	}
	return id, err
}

// Ready returns nil if calls can succeed: the sandboxes are reconciled, and the engine and the
// store answer.
func (r *Registry) Ready(ctx context.Context) error {
	if err := r.available(); err != nil {
		return err
	}
	if err := r.opts.Store.Ping(ctx); err != nil {
		return &UnavailableError{Err: err}
	}
	return nil
}

// Status returns the state of the service. The counts are the tenant's.
func (r *Registry) Status(_ context.Context, tenant string) ServiceStatus {
	r.mu.Lock()
	defer r.mu.Unlock()
	info, _ := r.engine.status()
	down := r.engine.available()
	st := ServiceStatus{Backend: info, Available: down == nil && !r.closing}
	if u, ok := errors.AsType[*UnavailableError](down); ok {
		st.Reason = u.Message
	}
	for id, s := range r.slots {
		if s.record != nil && id.tenant == tenant {
			st.ActiveSandboxes++
			st.RunningCommands += s.record.uses[useCommand]
			st.RunningProcesses += s.record.uses[useProcess]
		}
	}
	return st
}

// Owner returns the owner of files that Berm makes on the host for sandboxes, or nil for Berm's
// own user.
func (r *Registry) Owner() *policy.Owner { return r.opts.Policy().Owner() }

// EnsureNetwork creates one of the policy's networks unless it exists. Name is the engine's. It
// always asks the engine, since the network may have been removed outside of Berm. The error is
// an *UnavailableError while the engine can't be used.
func (r *Registry) EnsureNetwork(ctx context.Context, name string) error {
	if err := r.available(); err != nil {
		return err
	}
	r.engine.forgetNetwork(name)
	return r.engine.ensureNetwork(ctx, name)
}

// work runs f in a goroutine, which must end when r.running does. It returns false, and doesn't run
// f, if r.running has ended.
func (r *Registry) work(f func()) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closing {
		return false
	}
	r.workers.Go(f)
	return true
}

// close ends the workers, and waits for creates and stops. It cancels those that take too long or
// wait for images. No new ones start.
func (r *Registry) close() {
	r.mu.Lock()
	r.closing = true
	for _, s := range r.slots {
		if s.pending != nil {
			s.pending.giveUp(errClosing)
		}
	}
	r.mu.Unlock()
	r.stop()
	done := make(chan struct{})
	go func() { r.tasks.Wait(); close(done) }()
	select {
	case <-done:
	case <-time.After(drainTimeout):
		r.cancel()
		<-done
	}
	r.workers.Wait()
}

// withRecord locks the key of a record and calls f. It returns nil without a call if the key has
// another record by now.
func (r *Registry) withRecord(ctx context.Context, rec *record, f func(keyID) error) error {
	r.mu.Lock()
	id := rec.sb.keyID()
	r.mu.Unlock()
	unlock, err := r.keys.Lock(ctx, id)
	if err != nil {
		return err
	}
	defer unlock()
	if now, _ := r.recordOf(id); now != rec {
		return nil
	}
	return f(id)
}

// terminate removes a sandbox in which a process can't be killed.
func (r *Registry) terminate(ctx context.Context, rec *record, sb Sandbox) error {
	ctx = context.WithoutCancel(ctx)
	return r.withRecord(ctx, rec, func(id keyID) error {
		r.log.WarnContext(ctx, "sandbox_terminated", append(sandboxAttrs(sb), "reason", "a command could not be killed")...)
		return r.clear(ctx, id, rec)
	})
}

// clear removes the container of a record, and the record itself. The caller holds the key.
func (r *Registry) clear(ctx context.Context, id keyID, old *record) error {
	r.mu.Lock()
	sb := old.sb
	old.sb.Status = StatusStopping
	r.mu.Unlock()
	if err := r.engine.remove(ctx, sb.ContainerID); err != nil {
		r.changeStatus(old, StatusStopping, sb.Status) // unless it has died meanwhile
		return err
	}
	if err := r.opts.Store.Delete(context.WithoutCancel(ctx), sb.SessionID); err != nil {
		r.changeStatus(old, StatusStopping, StatusStopped)
		return &UnavailableError{Err: err}
	}
	r.quotas.Detach(sb.SessionID)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.forgetLocked(id)
	return nil
}

// explain returns the error that callers get for a failed operation inside a sandbox. It returns
// nil if the container lives and err is about a file or process in it. What names the kind of
// object. Dead is the message if the container has ended.
func (r *Registry) explain(ctx context.Context, rec *record, sb Sandbox, what, dead string, err error) error {
	named := fmt.Errorf("%s of sandbox %s: %w", what, sb.Key, err)
	switch {
	case errdefs.IsNotImplemented(err):
		return &UnsupportedError{Key: sb.Key, Err: err}
	case errdefs.IsUnavailable(err):
		return &UnavailableError{Err: named}
	case !errdefs.IsNotFound(err) && !errdefs.IsFailedPrecondition(err) && !errdefs.IsInternal(err):
		return named
	}
	return r.checkAlive(ctx, rec, sb, dead)
}

// checkAlive asks the engine whether the container of a sandbox runs. If it has ended, the error
// is a *StateError that is errDied, with want as its message.
func (r *Registry) checkAlive(ctx context.Context, rec *record, sb Sandbox, want string) error {
	c, err := r.engine.inspect(ctx, sb.ContainerID)
	switch {
	case errdefs.IsNotFound(err) || err == nil && statusIn(c) == StatusStopped:
		r.containerGone(sb.ContainerID)
		return &StateError{Key: sb.Key, Status: StatusStopped, Want: want, died: true}
	case err != nil:
		return fmt.Errorf("run in sandbox %s: %w", sb.Key, err)
	case c.State == runtime.StatePaused:
		r.changeStatus(rec, StatusRunning, StatusPaused)
		return &StateError{Key: sb.Key, Status: StatusPaused, Want: "commands need it running; resume it first"}
	}
	return nil
}

// stopOverQuota stops a sandbox whose workspace is over its quota. Its files stay.
func (r *Registry) stopOverQuota(ctx context.Context, rec *record, sb Sandbox) error {
	r.log.WarnContext(ctx, "workspace_quota_exceeded", append(sandboxAttrs(sb), "quota_mb", sb.Spec.WorkspaceQuotaMB, "enforcement", sb.Enforcement.WorkspaceQuota)...)
	return r.withRecord(ctx, rec, func(keyID) error {
		if err := r.engine.remove(ctx, sb.ContainerID); err != nil {
			return err
		}
		r.containerGone(sb.ContainerID)
		return nil
	})
}
