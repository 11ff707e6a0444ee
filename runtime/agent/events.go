package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/agent/wire"
)

// Events follows the starts and ends of processes. Ctx only bounds the start. The events end when a
// session breaks, as some may have been missed.
func (r *Runtime) Events(ctx context.Context, id string) (runtime.Events, error) {
	e, err := r.openEvents(ctx, id)
	if err != nil {
		return nil, fmt.Errorf("follow the processes of container %s: %w", id, err)
	}
	return e, nil
}

func (r *Runtime) openEvents(ctx context.Context, id string) (*events, error) {
	b, err := r.container(ctx, id)
	if err != nil {
		return nil, err
	}
	e := &events{b: b, id: id, sessions: map[*session]bool{}, changed: map[string]runtime.ProcessInfo{}}
	e.change.L = &e.mu
	e.ctx, e.cancel = context.WithCancelCause(context.WithoutCancel(ctx))
	if !b.socketless() {
		x, err := b.start(ctx, id, eventsRequest, b.take)
		if err != nil {
			return nil, err
		}
		if err := x.outlive(e.ctx); err != nil {
			return nil, err
		}
		e.add(x)
	}
	b.mu.Lock()
	b.events[e] = true // own adds later sessions
	b.mu.Unlock()
	leave := context.AfterFunc(b.ctx, func() { e.end(b.left()) })
	context.AfterFunc(e.ctx, func() { leave() })
	for _, s := range b.serving() {
		e.watch(s)
	}
	return e, nil
}

var eventsRequest = &wire.Request{Op: wire.OpEvents}

// events follows the processes of a container, which may belong to several sessions.
type events struct {
	b      *container
	id     string
	ctx    context.Context // ends with Close
	cancel context.CancelCauseFunc

	mu       sync.Mutex
	change   sync.Cond         // broadcast when a field below changes
	sessions map[*session]bool // the followed sessions; true until the first report
	changed  map[string]runtime.ProcessInfo
	begun    bool // Next has returned all processes once
	err      error
}

// watch follows the processes of a served session.
func (e *events) watch(s *session) {
	e.mu.Lock()
	_, is := e.sessions[s]
	if !is {
		e.sessions[s] = true
	}
	e.mu.Unlock()
	if is {
		return
	}
	s.use()
	x, err := e.b.begin(e.ctx, e.id, s, eventsRequest)
	if err != nil {
		e.lose(s, err)
		return
	}
	e.add(x)
}

// add reads the events of a call in a goroutine.
func (e *events) add(x *call) {
	s := x.s
	if s.served != nil { // the session lasts as long as it has processes
		x.idle = true
		s.release()
	}
	e.mu.Lock()
	e.sessions[s] = true
	e.mu.Unlock()
	started := e.b.task(func() {
		defer x.drop()
		err := e.b.r.guard(func() error { return e.read(x) })
		if errors.Is(err, wire.ErrProtocol) {
			err = x.broken(err)
		}
		e.lose(s, err)
	})
	if !started {
		x.drop()
		e.end(e.b.left())
	}
}

// read reads events until the call ends.
func (e *events) read(x *call) error {
	var batch []runtime.ProcessInfo
	for {
		kind, payload, err := x.frame()
		switch {
		case err != nil:
			return err
		case kind == wire.KindItem && len(batch) < maxListed:
			info, err := x.s.process(payload, "")
			if err != nil {
				return err
			}
			// A session must not report processes of another one.
			if owner := e.b.owner(info.ID); owner == x.s || owner == nil && x.s.served == nil {
				batch = append(batch, info)
			}
		case kind == wire.KindReady:
			e.put(x.s, batch)
			batch = nil
		default:
			return fmt.Errorf("%w: a frame of kind %d, after %d processes", wire.ErrProtocol, kind, len(batch))
		}
	}
}

// put keeps changes for Next. While many are kept, it waits, except with a session's first report: Next
// waits for that report.
func (e *events) put(s *session, batch []runtime.ProcessInfo) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for len(e.changed) >= maxListed && (e.begun || !e.sessions[s]) && e.err == nil {
		e.change.Wait()
	}
	for _, info := range batch {
		e.changed[info.ID] = info
	}
	e.sessions[s] = false
	e.change.Broadcast()
}

// lose ends the events because s ended, unless s ended because it had no processes any more.
func (e *events) lose(s *session, err error) {
	if s.served != nil {
		s.b.mu.Lock()
		needed := s.ownsLocked()
		s.b.mu.Unlock()
		if !needed {
			e.mu.Lock()
			defer e.mu.Unlock()
			delete(e.sessions, s)
			e.change.Broadcast()
			return
		}
	}
	if !refused(err) && !runtime.HasClass(err) {
		err = runtime.Unavailable(err)
	}
	e.end(fmt.Errorf("follow the processes of container %s: %w", e.id, err))
}

// end makes Next fail with err, and ends all calls.
func (e *events) end(err error) {
	e.mu.Lock()
	if e.err == nil {
		e.err = err
	}
	e.change.Broadcast()
	e.mu.Unlock()
	e.b.mu.Lock()
	delete(e.b.events, e)
	e.b.mu.Unlock()
	e.cancel(err)
}

func (e *events) Next() ([]runtime.ProcessInfo, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	pending := func() bool { return slices.Contains(slices.Collect(maps.Values(e.sessions)), true) }
	for e.err == nil && (!e.begun && pending() || e.begun && len(e.changed) == 0) {
		e.change.Wait()
	}
	if e.err != nil {
		return nil, e.err
	}
	out := make([]runtime.ProcessInfo, 0, len(e.changed))
	out = slices.AppendSeq(out, maps.Values(e.changed))
	slices.SortFunc(out, func(a, b runtime.ProcessInfo) int {
		return cmp.Or(a.StartedAt.Compare(b.StartedAt), strings.Compare(a.ID, b.ID))
	})
	clear(e.changed)
	e.begun = true
	e.change.Broadcast()
	return out, nil
}

func (e *events) Close() error {
	e.end(errLeft)
	return nil
}
