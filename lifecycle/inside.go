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

// within finds the running sandbox of a key. With an error, the record is nil unless
// there is one.
func (m *Manager) within(tenant, key string) (*record, Sandbox, error) {
	key, err := ParseKey(key)
	if err != nil {
		return nil, Sandbox{}, err
	}
	if err := m.available(); err != nil {
		return nil, Sandbox{}, err
	}
	rec := m.recordOf(keyID{tenant, key})
	if rec == nil {
		return nil, Sandbox{}, &NotFoundError{Key: key}
	}
	sb := m.snapshot(rec)
	switch {
	case sb.Status == StatusExpired:
		return nil, sb, &NotFoundError{Key: key}
	case m.insider == nil:
		return nil, sb, &UnsupportedError{Key: key}
	case sb.Status == StatusStopped:
		return rec, sb, &StateError{Key: key, Status: sb.Status, Want: "what ran in it went with its container"}
	case sb.Status != StatusRunning:
		return rec, sb, &StateError{Key: key, Status: sb.Status, Want: "its processes need it running; resume it first"}
	}
	return rec, sb, nil
}

// find looks a command or process up.
func (m *Manager) find(ctx context.Context, tenant, key string, k kind, id string) (*record, runtime.ProcessInfo, error) {
	if !idPattern.MatchString(id) {
		return nil, runtime.ProcessInfo{}, noProcess(id)
	}
	rec, sb, err := m.within(tenant, key)
	if err != nil {
		return rec, runtime.ProcessInfo{}, err
	}
	info, err := m.ask(ctx, sb, string(k)+id)
	if err != nil {
		return rec, info, m.explain(ctx, rec, sb, id, err)
	}
	m.seen(rec, info)
	return rec, info, nil
}

func noProcess(id string) error {
	return &ProcessError{ID: id, Class: errdefs.ErrNotFound, Message: fmt.Sprintf("there is no %q in the sandbox", id)}
}

// ask asks for one process.
func (m *Manager) ask(ctx context.Context, sb Sandbox, proc string) (info runtime.ProcessInfo, err error) {
	err = m.call(ctx, "process_info", func(ctx context.Context) error {
		info, err = m.insider.Process(ctx, sb.ContainerID, proc)
		return err
	})
	if err == nil && info.ID != proc {
		err = errdefs.ErrUnavailable.WithMessage("the sandbox tells of another process than it was asked for")
	}
	return info, err
}

func (m *Manager) signal(ctx context.Context, tenant, key string, k kind, id string, signal int) error {
	if err := checkSignal(signal); err != nil {
		return err
	}
	return m.act(ctx, tenant, key, id, "process_signal", func(ctx context.Context, container string) error {
		return m.insider.Signal(ctx, container, string(k)+id, signal)
	})
}

func (m *Manager) resize(ctx context.Context, tenant, key string, k kind, id string, rows, cols int) error {
	if err := checkScreen(rows, cols); err != nil {
		return err
	}
	return m.act(ctx, tenant, key, id, "process_resize", func(ctx context.Context, container string) error {
		return m.insider.Resize(ctx, container, string(k)+id, rows, cols)
	})
}

// act does something to a process.
func (m *Manager) act(ctx context.Context, tenant, key, id, op string, f func(ctx context.Context, container string) error) error {
	if !idPattern.MatchString(id) {
		return noProcess(id)
	}
	rec, sb, err := m.within(tenant, key)
	if err != nil {
		return err
	}
	err = m.call(ctx, op, func(ctx context.Context) error { return f(ctx, sb.ContainerID) })
	switch {
	case err == nil:
		return nil
	case errdefs.IsNotImplemented(err): // it runs all the same
		return &UnsupportedError{Key: sb.Key, Message: "its agent is older than this Berm, so that what runs in it can only be killed", Err: err}
	}
	return m.explain(ctx, rec, sb, id, err)
}

// explain says what an error of the runtime's means. Its own words may be the
// sandbox's, or the engine's, and aren't passed on where there are better ones.
func (m *Manager) explain(ctx context.Context, rec *record, sb Sandbox, id string, err error) error {
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
		return &GoneError{Message: "output from there on isn't kept any more", FirstSeq: -1}
	case errdefs.IsAborted(err):
		return &ProcessError{ID: id, Class: errdefs.ErrAborted, Message: "another has taken it over"}
	case errdefs.IsResourceExhausted(err):
		return noRoom(sb)
	case !errdefs.IsNotFound(err) && !errdefs.IsFailedPrecondition(err):
		return what
	}
	// The process, or the container?
	switch dead := m.lookAgain(ctx, rec, sb); {
	case errors.Is(dead, errNeverStarted):
		return &StateError{Key: sb.Key, Status: StatusStopped, Want: "what ran in it went with its container"}
	case dead != nil:
		return dead
	case errdefs.IsNotFound(err):
		return noProcess(id)
	}
	return &ProcessError{ID: id, Class: errdefs.ErrFailedPrecondition, Message: fmt.Sprintf("%q has ended, or has no input or terminal", id)}
}

// noRoom is the error of a command or process that the sandbox couldn't start.
func noRoom(sb Sandbox) error {
	return &CapacityError{Message: fmt.Sprintf("sandbox %q has no room for another process: nothing was started", sb.Key), RetryAfter: time.Second}
}

// goTend has f run until Run ends, at which it must end; false when that is now.
func (m *Manager) goTend(f func()) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closing {
		return false
	}
	m.tenders.Go(f)
	return true
}

// streamEnded says what the end of a stream means: io.EOF with what is known of the
// process then, and whether the workspace is over its quota, or an error.
func (m *Manager) streamEnded(s *stream, id string, info runtime.ProcessInfo, err error) (runtime.ProcessInfo, bool, error) {
	h := s.h
	ctx, cancel := context.WithTimeout(m.tending, lookTimeout)
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
		return info, m.endSeen(ctx, h.rec, info), io.EOF
	case errdefs.IsCanceled(err):
		return info, false, err
	}
	err = m.explain(ctx, h.rec, h.sb, id, err)
	m.mu.Lock()
	alive := m.aliveLocked(h.rec)
	m.mu.Unlock()
	if !alive || errdefs.IsUnavailable(err) && m.dead(ctx, h.rec, h.sb) {
		info.Running, info.Killed, info.EndedAt = false, true, time.Now().UTC()
		return info, false, io.EOF
	}
	return info, false, err
}

// dead asks the engine whether a container is.
func (m *Manager) dead(ctx context.Context, rec *record, sb Sandbox) bool {
	return errors.Is(m.lookAgain(ctx, rec, sb), errNeverStarted)
}

// endSeen notes the end of a process, and tells whether it left the workspace over its
// quota.
func (m *Manager) endSeen(ctx context.Context, rec *record, info runtime.ProcessInfo) bool {
	m.mu.Lock()
	sb := rec.sb
	first := m.seenLocked(rec, info)
	over := rec.inside.over
	m.mu.Unlock()
	if !first {
		return over
	}
	return m.measured(rec, m.quotaLeft(ctx, sb, true))
}
