package lifecycle

import (
	"context"
	"slices"
	"time"

	"github.com/bermhq/berm/runtime"
)

// Process returns a process, for a managed one with the end of its standard error. It fails with
// a *ProcessError in the NotFound class if there is none.
func (p *processes) Process(ctx context.Context, ref ProcessRef) (Process, error) {
	h, info, err := p.find(ctx, ref)
	if err != nil {
		return h.lastOr(err)
	}
	proc := h.process(info)
	if h.kind == KindManaged && !info.TTY && info.NextSeq > info.FirstSeq {
		proc.Stderr = h.stderr(ctx, info)
	}
	return proc, nil
}

// lastOr returns a command that ended with its container, or else err. The handle may be nil.
func (h *handle) lastOr(err error) (Process, error) {
	if h != nil {
		if l, ok := h.lastOf(); ok {
			return l.process, nil
		}
	}
	return Process{}, err
}

// Processes lists the running processes of a kind, and the last that have ended, in the order in
// which they were started. It ignores the ID of ref.
func (p *processes) Processes(ctx context.Context, ref ProcessRef) ([]Process, error) {
	m, sb, err := p.within(ref.Tenant, ref.Key)
	var all []Process
	if m != nil && sb.Status == StatusStopped {
		if ref.Kind == KindExec {
			m.registry.mu.Lock()
			for _, l := range m.last {
				all = append(all, l.process)
			}
			m.registry.mu.Unlock()
		}
		slices.SortFunc(all, func(a, b Process) int { return a.StartedAt.Compare(b.StartedAt) })
		return all, nil
	}
	if err != nil {
		return nil, err
	}
	infos, err := m.list(ctx, sb)
	if err != nil {
		return nil, m.handle(sb, "", "").explain(ctx, err)
	}
	for _, info := range infos {
		m.seen(info)
		if k, _ := kindOf(info.ID); k == ref.Kind {
			all = append(all, m.process(info))
		}
	}
	return all, nil
}

// Signal sends a signal to the group of a process. A *ProcessError in the FailedPrecondition
// class says that it has ended.
func (p *processes) Signal(ctx context.Context, ref ProcessRef, signal int) error {
	if signal < 1 || signal > 64 {
		return &InvalidError{Field: "signal", Message: "must be from 1 to 64"}
	}
	h, err := p.reach(ref)
	if err != nil {
		return err
	}
	return h.explain(ctx, h.signal(ctx, signal))
}

// Resize sets the size of the terminal of a process.
func (p *processes) Resize(ctx context.Context, ref ProcessRef, rows, cols int) error {
	if err := checkScreen(rows, cols); err != nil {
		return err
	}
	h, err := p.reach(ref)
	if err != nil {
		return err
	}
	return h.explain(ctx, h.do(ctx, "process_resize", func(ctx context.Context, container, proc string) error {
		return p.insider.Resize(ctx, container, proc, rows, cols)
	}))
}

// Kill kills a process with all its descendants. It is no error if the process has ended. If they
// can't be killed, Kill removes the sandbox.
func (p *processes) Kill(ctx context.Context, ref ProcessRef) (Process, error) {
	return p.endWith(ctx, ref, (*handle).killOrEnd)
}

// Stop closes a process's input and sends TERM to its group. It waits up to 5 s for the process to
// end, and then kills what is left of it and its descendants. The stop goes on when ctx ends. It is
// no error if the process has ended.
func (p *processes) Stop(ctx context.Context, ref ProcessRef) (Process, error) {
	return p.endWith(ctx, ref, (*handle).stop)
}

// endWith ends a process, and returns it as it ended.
func (p *processes) endWith(ctx context.Context, ref ProcessRef, end func(*handle, context.Context) error) (Process, error) {
	h, info, err := p.find(ctx, ref)
	if err != nil {
		return h.lastOr(err)
	}
	if !info.Running {
		return h.process(info), nil
	}
	if err := end(h, ctx); err != nil {
		return Process{}, h.explain(ctx, err)
	}
	after, err := h.ask(ctx)
	if err != nil {
		return h.lost(info), nil // it ended with its sandbox
	}
	h.seen(after)
	return h.process(after), nil
}

// Wait waits until a process has ended.
func (p *processes) Wait(ctx context.Context, ref ProcessRef) (Process, error) {
	h, info, err := p.find(ctx, ref)
	if err != nil {
		return Process{}, err
	}
	if info.Running {
		after, err := h.awaitEnd(ctx)
		switch {
		case err == nil:
			info = after
		case ctx.Err() == nil && (!h.alive() || h.dead(ctx)):
			return h.lost(info), nil
		default:
			return Process{}, h.explain(ctx, err)
		}
	}
	return h.process(info), nil
}

// awaitEnd waits until a process has ended. It asks again at intervals, as the monitor may miss
// the end.
func (h *handle) awaitEnd(ctx context.Context) (runtime.ProcessInfo, error) {
	for {
		info, err := h.ask(ctx)
		if err != nil {
			return info, err
		}
		h.seen(info)
		if !info.Running {
			return info, nil
		}
		var done <-chan struct{}
		h.registry.mu.Lock()
		if t := h.procs[h.proc]; t != nil && !t.ended {
			done = t.done
		}
		h.registry.mu.Unlock()
		wait := askMost
		if err := h.sleep(ctx, &wait, done); err != nil {
			return info, err
		}
	}
}

// lost returns a process that ended with its container.
func (h *handle) lost(info runtime.ProcessInfo) Process {
	if l, ok := h.lastOf(); ok {
		return l.process
	}
	info.Running, info.Killed, info.EndedAt = false, true, time.Now().UTC()
	p := h.process(info)
	p.ExitCode = nil
	return p
}
