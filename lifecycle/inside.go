package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/runtime"
)

// mayAsk checks a key, and that the backend can be asked about processes.
func (p *processes) mayAsk(tenant, key string) (keyID, error) {
	id, err := parseID(tenant, key)
	if err != nil {
		return id, err
	}
	if err := p.registry.available(); err != nil {
		return id, err
	}
	if p.insider == nil {
		return id, &UnsupportedError{Key: id.key}
	}
	return id, nil
}

// within finds the running sandbox of a key. The monitor isn't nil if the error is that the
// sandbox doesn't run.
func (p *processes) within(tenant, key string) (*monitor, Sandbox, error) {
	id, err := parseID(tenant, key)
	if err != nil {
		return nil, Sandbox{}, err
	}
	if err := p.registry.available(); err != nil {
		return nil, Sandbox{}, err
	}
	rec := p.registry.recordOf(id)
	if rec == nil {
		return nil, Sandbox{}, &NotFoundError{Key: id.key}
	}
	sb := p.registry.snapshot(rec)
	switch {
	case sb.Status == StatusExpired:
		return nil, sb, &NotFoundError{Key: id.key}
	case p.insider == nil:
		return nil, sb, &UnsupportedError{Key: id.key}
	case sb.Status == StatusStopped:
		return p.monitor(rec), sb, &StateError{Key: id.key, Status: sb.Status, Want: "what ran in it went with its container"}
	case sb.Status != StatusRunning:
		return p.monitor(rec), sb, &StateError{Key: id.key, Status: sb.Status, Want: "its processes need it running; resume it first"}
	}
	return p.monitor(rec), sb, nil
}

// find finds a command or process of a running sandbox.
func (p *processes) find(ctx context.Context, tenant, key string, k kind, id string) (*monitor, runtime.ProcessInfo, error) {
	if !idPattern.MatchString(id) {
		return nil, runtime.ProcessInfo{}, noProcess(id)
	}
	m, sb, err := p.within(tenant, key)
	if err != nil {
		return m, runtime.ProcessInfo{}, err
	}
	info, err := m.ask(ctx, sb, string(k)+id)
	if err != nil {
		return m, info, m.explain(ctx, sb, id, err)
	}
	m.seen(info)
	return m, info, nil
}

func processError(id string, class error, format string, args ...any) *ProcessError {
	return &ProcessError{ID: id, Class: class, Message: fmt.Sprintf(format, args...)}
}

func noProcess(id string) error {
	return processError(id, errdefs.ErrNotFound, "there is no %q in the sandbox", id)
}

func goneError(first int64, format string, args ...any) *GoneError {
	return &GoneError{Message: fmt.Sprintf(format, args...), FirstSeq: first}
}

// noRoom is the error of a command or process that the sandbox couldn't start.
func noRoom(sb Sandbox) error {
	return &CapacityError{Message: fmt.Sprintf("sandbox %q has no room for another process: nothing was started", sb.Key), RetryAfter: time.Second}
}

// ask asks a sandbox about one process.
func (m *monitor) ask(ctx context.Context, sb Sandbox, proc string) (runtime.ProcessInfo, error) {
	info, err := ask(ctx, m.engine, "process_info", func(ctx context.Context) (runtime.ProcessInfo, error) {
		return m.insider.Process(ctx, sb.ContainerID, proc)
	})
	if err == nil && info.ID != proc {
		err = errdefs.ErrUnavailable.WithMessage("the sandbox tells of another process than it was asked for")
	}
	return info, err
}

// listSeen lists the processes of a kind for a caller, and records what it sees.
func (m *monitor) listSeen(ctx context.Context, sb Sandbox, want kind) (list []runtime.ProcessInfo, err error) {
	infos, err := m.list(ctx, sb)
	if err != nil {
		return nil, m.explain(ctx, sb, "", err)
	}
	for _, info := range infos {
		m.seen(info)
		if k, _ := kindOf(info.ID); k == want {
			list = append(list, info)
		}
	}
	return list, nil
}

func (p *processes) signal(ctx context.Context, tenant, key string, k kind, id string, signal int) error {
	if err := checkSignal(signal); err != nil {
		return err
	}
	return p.act(ctx, tenant, key, id, "process_signal", func(ctx context.Context, container string) error {
		return p.insider.Signal(ctx, container, string(k)+id, signal)
	})
}

func (p *processes) resize(ctx context.Context, tenant, key string, k kind, id string, rows, cols int) error {
	if err := checkScreen(rows, cols); err != nil {
		return err
	}
	return p.act(ctx, tenant, key, id, "process_resize", func(ctx context.Context, container string) error {
		return p.insider.Resize(ctx, container, string(k)+id, rows, cols)
	})
}

// act calls f for a process of a running sandbox.
func (p *processes) act(ctx context.Context, tenant, key, id, op string, f func(ctx context.Context, container string) error) error {
	if !idPattern.MatchString(id) {
		return noProcess(id)
	}
	m, sb, err := p.within(tenant, key)
	if err != nil {
		return err
	}
	err = p.engine.call(ctx, op, func(ctx context.Context) error { return f(ctx, sb.ContainerID) })
	switch {
	case err == nil:
		return nil
	case errdefs.IsNotImplemented(err): // it runs all the same
		return &UnsupportedError{Key: sb.Key, Message: "its agent is older than this Berm, so that what runs in it can only be killed", Err: err}
	}
	return m.explain(ctx, sb, id, err)
}

// explain returns the meaning of an error of the runtime. The error's own words may be the
// sandbox's or the engine's. Where there are better ones, they aren't passed on.
func (m *monitor) explain(ctx context.Context, sb Sandbox, id string, err error) error {
	what := fmt.Errorf("processes of sandbox %s: %w", sb.Key, err)
	var gone *GoneError
	switch {
	case errors.As(err, &gone), errors.Is(err, errClosing):
		return err
	case ctx.Err() != nil:
		return fmt.Errorf("processes of sandbox %s: %w", sb.Key, context.Cause(ctx))
	case errdefs.IsNotImplemented(err):
		return &UnsupportedError{Key: sb.Key, Err: err}
	case errdefs.IsUnavailable(err):
		return &UnavailableError{Err: what}
	case errdefs.IsOutOfRange(err):
		return goneError(-1, "output from there on isn't kept any more")
	case errdefs.IsAborted(err):
		return processError(id, errdefs.ErrAborted, "another has taken it over")
	case errdefs.IsResourceExhausted(err):
		return noRoom(sb)
	case !errdefs.IsNotFound(err) && !errdefs.IsFailedPrecondition(err):
		return what
	}
	// The process, or the container?
	switch dead := m.registry.checkAlive(ctx, m.rec, sb); {
	case errors.Is(dead, errDied):
		return &StateError{Key: sb.Key, Status: StatusStopped, Want: "what ran in it went with its container"}
	case dead != nil:
		return dead
	case errdefs.IsNotFound(err):
		return noProcess(id)
	}
	return processError(id, errdefs.ErrFailedPrecondition, "%q has ended, or has no input or terminal", id)
}

// dead asks the engine whether the container of a sandbox has ended.
func (m *monitor) dead(ctx context.Context, sb Sandbox) bool {
	return errors.Is(m.registry.checkAlive(ctx, m.rec, sb), errDied)
}

// end returns the meaning of the end of a stream: io.EOF with what is known of the process then,
// and whether the workspace is over its quota, or an error.
func (s *stream) end(id string, info runtime.ProcessInfo, err error) (runtime.ProcessInfo, bool, error) {
	h, m := s.h, s.h.m
	ctx, cancel := context.WithTimeout(m.registry.running, lookTimeout)
	defer cancel()
	switch {
	case errors.Is(err, io.EOF):
		h.mu.Lock()
		label := info.Label
		if h.info.ID == info.ID {
			info = h.info
		}
		info.Label, info.Running = label, false
		h.mu.Unlock()
		return info, m.endSeen(ctx, info), io.EOF
	case errdefs.IsCanceled(err):
		return info, false, err
	}
	err = m.explain(ctx, h.sb, id, err)
	if !m.alive() || errdefs.IsUnavailable(err) && m.dead(ctx, h.sb) {
		info.Running, info.Killed, info.EndedAt = false, true, time.Now().UTC()
		return info, false, io.EOF
	}
	return info, false, err
}
