package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/runtime"
)

// goneWithIt is the message for a process whose container has ended.
const goneWithIt = "what ran in it went with its container"

// within finds the running sandbox of a key. If the sandbox exists but doesn't run, it returns
// the monitor and a *StateError.
func (p *processes) within(tenant, key string) (*monitor, Sandbox, error) {
	id, err := p.registry.open(tenant, key)
	if err != nil {
		return nil, Sandbox{}, err
	}
	rec, sb := p.registry.recordOf(id)
	switch {
	case rec == nil || sb.Status == StatusExpired:
		return nil, sb, &NotFoundError{Key: id.key}
	case sb.Status == StatusStopped:
		return monitorOf(rec), sb, &StateError{Key: id.key, Status: sb.Status, Want: goneWithIt}
	case sb.Status != StatusRunning:
		return monitorOf(rec), sb, &StateError{Key: id.key, Status: sb.Status, Want: "its processes need it running; resume it first"}
	}
	return monitorOf(rec), sb, nil
}

// handle is one command or process of a running sandbox. It may not exist.
type handle struct {
	*monitor
	sb   Sandbox
	kind Kind
	id   string // the caller's ID
	proc string // the runtime's ID
}

func (m *monitor) handle(sb Sandbox, k Kind, id string) *handle {
	return &handle{monitor: m, sb: sb, kind: k, id: id, proc: string(k) + "." + id}
}

// lastOf returns a command that ended with its container.
func (h *handle) lastOf() (lastOf, bool) {
	h.registry.mu.Lock()
	defer h.registry.mu.Unlock()
	l, ok := h.last[h.id]
	return l, ok && h.kind == KindExec
}

func (h *handle) processID() processID { return processID{h.sb.keyID(), h.proc} }

// handleOf returns the handle of a process that the sandbox has reported.
func (m *monitor) handleOf(sb Sandbox, proc string) *handle {
	k, id := kindOf(proc)
	return m.handle(sb, k, id)
}

// reach returns the handle of a process. If the sandbox exists but doesn't run, it returns the
// handle and a *StateError.
func (p *processes) reach(ref ProcessRef) (*handle, error) {
	if ref.ID == "" && ref.Kind == KindManaged {
		ref.ID = defaultProcess
	}
	if err := ref.Kind.checkID(ref.ID); err != nil {
		return nil, err
	}
	m, sb, err := p.within(ref.Tenant, ref.Key)
	if m == nil {
		return nil, err
	}
	return m.handle(sb, ref.Kind, ref.ID), err
}

// find is reach, and also asks the sandbox about the process.
func (p *processes) find(ctx context.Context, ref ProcessRef) (*handle, runtime.ProcessInfo, error) {
	h, err := p.reach(ref)
	if err != nil {
		return h, runtime.ProcessInfo{}, err
	}
	info, err := h.ask(ctx)
	if err != nil {
		return h, info, h.explain(ctx, err)
	}
	h.seen(info)
	return h, info, nil
}

// ask asks the sandbox about the process.
func (h *handle) ask(ctx context.Context) (runtime.ProcessInfo, error) {
	info, err := ask(ctx, h.engine, "process_info", func(ctx context.Context) (runtime.ProcessInfo, error) {
		return h.insider.Process(ctx, h.sb.ContainerID, h.proc)
	})
	if err == nil && info.ID != h.proc {
		err = errdefs.ErrUnavailable.WithMessage("the sandbox tells of another process than it was asked for")
	}
	return info, err
}

// do calls the runtime for the process.
func (h *handle) do(ctx context.Context, op string, f func(ctx context.Context, container, proc string) error) error {
	return h.engine.call(ctx, op, func(ctx context.Context) error { return f(ctx, h.sb.ContainerID, h.proc) })
}

// start starts the process.
func (h *handle) start(ctx context.Context, p runtime.Process) (info runtime.ProcessInfo, f runtime.Follower, err error) {
	p.ID = h.proc
	err = h.engine.call(ctx, "process_start", func(ctx context.Context) (err error) {
		info, f, err = h.insider.Start(ctx, h.sb.ContainerID, p)
		return err
	})
	return info, f, err
}

// startFailed translates an error of start. If the process may run in spite of the error, the
// monitor looks for it.
func (h *handle) startFailed(ctx context.Context, err error) error {
	refused := errdefs.IsNotFound(err) || errdefs.IsFailedPrecondition(err)
	if !refused && (ctx.Err() != nil || errdefs.IsUnavailable(err) || errdefs.IsDeadlineExceeded(err)) {
		h.registry.mu.Lock()
		if h.aliveLocked() {
			h.rec.unsure = time.Now()
			h.startLocked()
		}
		h.registry.mu.Unlock()
	}
	return h.notStarted(ctx, err)
}

// notStarted translates the error of a command that couldn't be started.
func (h *handle) notStarted(ctx context.Context, err error) error {
	switch {
	case errdefs.IsNotFound(err) || errdefs.IsFailedPrecondition(err):
		return h.whyNotStarted(ctx, h.sb, err)
	case errdefs.IsResourceExhausted(err): // the container may also be dead
		if dead := h.registry.checkAlive(ctx, h.rec, h.sb, diedEarly); dead != nil {
			return dead
		}
	}
	return h.explain(ctx, err)
}

func (h *handle) kill(ctx context.Context) error { return h.do(ctx, "process_kill", h.insider.Kill) }

// forget makes the sandbox forget the process, which has ended.
func (h *handle) forget(ctx context.Context) error {
	err := h.do(ctx, "process_forget", h.insider.Forget)
	if err == nil {
		h.registry.mu.Lock()
		if t := h.procs[h.proc]; t != nil && t.ended {
			delete(h.procs, h.proc)
		}
		h.registry.mu.Unlock()
	}
	return err
}

// killOrEnd kills the process, or removes its sandbox if that fails.
func (h *handle) killOrEnd(ctx context.Context) error {
	err := h.kill(ctx)
	if errors.Is(err, runtime.ErrNotKilled) {
		return h.registry.terminate(ctx, h.rec, h.sb)
	}
	return err
}

// signal sends a signal to the process group.
func (h *handle) signal(ctx context.Context, signal int) error {
	return h.do(ctx, "process_signal", func(ctx context.Context, container, proc string) error {
		return h.insider.Signal(ctx, container, proc, signal)
	})
}

// explain translates an error of the runtime for callers. The sandbox or the engine may have
// written the error's text, so explain replaces it where it can.
func (h *handle) explain(ctx context.Context, err error) error {
	if err == nil {
		return nil
	}
	sb := h.sb
	var gone *GoneError
	switch {
	case errors.As(err, &gone), errors.Is(err, errClosing):
		return err
	case ctx.Err() != nil:
		return fmt.Errorf("processes of sandbox %s: %w", sb.Key, context.Cause(ctx))
	case errdefs.IsInternal(err):
		return fmt.Errorf("processes of sandbox %s: %w", sb.Key, err)
	case errdefs.IsOutOfRange(err):
		return goneError(-1, "output from there on isn't kept any more")
	case errdefs.IsAborted(err):
		return processError(h.id, errdefs.ErrAborted, "another has taken it over")
	case errdefs.IsResourceExhausted(err):
		return noRoom(sb)
	}
	switch other := h.registry.explain(ctx, h.rec, sb, "processes", goneWithIt, err); {
	case errors.Is(other, errDied): // not errDied, by which the caller would start it again
		return &StateError{Key: sb.Key, Status: StatusStopped, Want: goneWithIt}
	case other != nil:
		return other
	case errdefs.IsNotFound(err):
		return noProcess(h.id)
	}
	return processError(h.id, errdefs.ErrFailedPrecondition, "%q has ended, or has no input or terminal", h.id)
}

// dead asks the engine whether the container has ended.
func (h *handle) dead(ctx context.Context) bool {
	return errors.Is(h.registry.checkAlive(ctx, h.rec, h.sb, goneWithIt), errDied)
}
