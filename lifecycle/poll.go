package lifecycle

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/runtime"
)

// polls reports whether the loop of the monitor runs.
func (m *monitor) polls() bool {
	m.registry.mu.Lock()
	defer m.registry.mu.Unlock()
	return m.kick != nil
}

// hurry makes the monitor of a key look often: a caller waits for an end.
func (p *processes) hurry(id keyID) {
	rec := p.registry.recordOf(id)
	if rec == nil {
		return
	}
	p.registry.mu.Lock()
	defer p.registry.mu.Unlock()
	if m := monitorOf(rec); len(m.tracked) > 0 {
		m.startLocked()
	}
}

// loop looks at the processes of a sandbox until none runs, or Run ends.
func (m *monitor) loop(kick <-chan struct{}) {
	ctx := m.registry.running
	m.registry.mu.Lock()
	wait := lookFirst
	if m.rec.unsure {
		wait = 0
		m.since = time.Now()
	}
	m.registry.mu.Unlock()
	due := time.Now().Add(wait)
	measured := time.Now()
	for {
		timer := time.NewTimer(time.Until(due))
		select {
		case <-ctx.Done():
			timer.Stop()
			return
		case <-kick:
			timer.Stop()
			wait = lookFirst
			if soon := time.Now().Add(wait); soon.Before(due) {
				due = soon
			}
		case <-timer.C:
			m.look(ctx)
			wait = min(max(2*wait, lookFirst), lookMost)
			m.registry.mu.Lock()
			if m.turns.Waiting(m.rec.sb.keyID()) > 0 {
				wait = lookFirst
			}
			if time.Since(measured) >= measureGap {
				measured = time.Now()
				if len(m.tracked) > 0 && m.rec.sb.Status == StatusRunning && m.quotas.mayHaveQuota(m.rec.sb) {
					m.measure = true
				}
			}
			m.registry.mu.Unlock()
			due = time.Now().Add(wait)
		}
		m.enforce(ctx)
		m.registry.mu.Lock()
		if len(m.tracked) == 0 && !m.rec.unsure && !(m.unkillable && m.aliveLocked()) && len(kick) == 0 {
			m.kick = nil
			m.registry.mu.Unlock()
			return
		}
		m.registry.mu.Unlock()
	}
}

// look lists the processes of the sandbox, and kills those whose timeout didn't end them.
func (m *monitor) look(ctx context.Context) {
	m.registry.mu.Lock()
	sb, alive := m.rec.sb, m.aliveLocked()
	if !alive || sb.Status == StatusPaused {
		defer m.registry.mu.Unlock()
		if !alive {
			m.registry.loseLocked(m.rec)
		}
		for _, t := range m.tracked { // frozen, it can't be overdue
			t.overdue = time.Time{}
		}
		return
	}
	m.registry.mu.Unlock()
	infos, err := m.list(ctx, sb)
	switch {
	case err == nil:
		m.listed(infos)
		m.prune(ctx, sb, infos)
	case ctx.Err() != nil:
		return
	case errdefs.IsNotFound(err), errdefs.IsFailedPrecondition(err):
		_ = m.registry.checkAlive(ctx, m.rec, sb, goneWithIt) // records its end
	}
	_, down := m.engine.status()
	m.registry.mu.Lock()
	if err == nil || errdefs.IsNotImplemented(err) || time.Since(m.since) > unsureMost {
		m.rec.unsure = false
	}
	var late map[string]time.Duration
	if down == nil { // else nothing can be killed
		late = m.lateLocked()
	}
	m.registry.mu.Unlock()
	for proc, by := range late {
		kill, cancel := context.WithTimeout(ctx, overdueKill)
		err := m.handleOf(sb, proc).kill(kill)
		cancel()
		if errors.Is(err, runtime.ErrNotKilled) || err != nil && by > overdueEnd && ctx.Err() == nil {
			m.registry.mu.Lock()
			m.unkillable = true
			m.startLocked()
			m.registry.mu.Unlock()
		}
	}
}

// prune makes a sandbox forget the oldest of the processes that have ended.
func (m *monitor) prune(ctx context.Context, sb Sandbox, infos []runtime.ProcessInfo) {
	kept, size := 0, int64(0)
	for _, info := range slices.Backward(infos) {
		if info.Running {
			continue
		}
		kept++
		size += max(info.NextSeq-info.FirstSeq, 0)
		if kept == 1 || kept <= maxEnded && size <= maxEndedBytes {
			continue
		}
		m.registry.mu.Lock()
		attached := m.hubs[info.ID] != nil
		m.registry.mu.Unlock()
		if !attached {
			_ = m.handleOf(sb, info.ID).forget(ctx) // the next look tries again
		}
	}
}

// enforce removes or stops the sandbox, if the end of a command or a measurement demands it.
func (m *monitor) enforce(ctx context.Context) {
	m.registry.mu.Lock()
	sb, alive := m.rec.sb, m.aliveLocked()
	unkillable, measure := m.unkillable && alive, m.measure && alive
	m.measure = false
	m.registry.mu.Unlock()
	if unkillable {
		if err := m.registry.terminate(ctx, m.rec, sb); err != nil {
			m.engine.log.WarnContext(ctx, "sandbox_terminate_failed", append(sandboxAttrs(sb), "error", err)...)
		}
		return
	}
	if measure {
		m.measured(m.quotas.quotaLeft(ctx, sb, true))
	}
	m.registry.mu.Lock()
	stop := m.over && m.aliveLocked() && !m.attachedLocked()
	m.registry.mu.Unlock()
	if !stop {
		return
	}
	m.keepEnded(ctx, sb)
	if err := m.registry.stopOverQuota(ctx, m.rec, sb); err != nil {
		m.engine.log.WarnContext(ctx, "sandbox_stop_failed", append(sandboxAttrs(sb), "error", err)...)
	}
}
