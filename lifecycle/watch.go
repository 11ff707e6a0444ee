package lifecycle

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/runtime"
)

// startLocked starts the loop of the monitor, or wakes it.
func (m *monitor) startLocked() {
	switch {
	case m.kick != nil:
		select {
		case m.kick <- struct{}{}:
		default:
		}
	case !m.registry.closing:
		kick := make(chan struct{}, 1)
		m.kick = kick
		m.registry.workers.Go(func() { m.loop(kick) })
	}
}

// loop follows the processes of a sandbox until none runs, or Run ends.
func (m *monitor) loop(kick <-chan struct{}) {
	ctx, cancel := context.WithCancel(m.registry.running)
	var events sync.WaitGroup
	defer events.Wait()
	defer cancel()
	events.Go(func() { m.watch(ctx) })
	for measure := time.Now().Add(measureGap); ; {
		m.killLate(ctx)
		m.enforce(ctx)
		m.prune(ctx)
		m.registry.mu.Lock()
		alive := m.aliveLocked()
		if m.running == 0 && m.rec.unsure.IsZero() && len(kick) == 0 && !(alive && (m.unkillable || m.measure || m.over && !m.readLocked())) {
			m.kick = nil
			m.registry.mu.Unlock()
			return
		}
		due := earlier(measure, m.dueLocked())
		m.registry.mu.Unlock()
		timer := time.NewTimer(time.Until(due))
		select {
		case <-ctx.Done():
			timer.Stop()
			return
		case <-kick:
			timer.Stop()
		case <-timer.C:
		}
		if now := time.Now(); !now.Before(measure) {
			measure = now.Add(measureGap)
			m.registry.mu.Lock()
			if now.Sub(m.measuredAt) >= measureGap && m.running > 0 && m.rec.sb.Status == StatusRunning && m.registry.mayHaveQuota(m.rec.sb) {
				m.measure = true
			}
			m.registry.mu.Unlock()
		}
	}
}

// dueLocked returns when the loop next runs without a kick, at most measureGap from now: when it
// may measure, when a process's timeout is over, or soon if the last attempt failed.
func (m *monitor) dueLocked() time.Time {
	now := time.Now()
	due, soon := now.Add(measureGap), now.Add(lookEvery)
	if m.measure {
		due = earlier(due, m.measuredAt.Add(measureSoon))
	}
	if m.unkillable || m.over {
		due = earlier(due, soon)
	}
	for _, t := range m.procs {
		switch {
		case t.ended || t.deadline.IsZero():
		case !t.overdue.IsZero():
			due = earlier(due, t.kill)
		case now.Before(t.deadline):
			due = earlier(due, t.deadline)
		default: // late, but the sandbox is paused
			due = earlier(due, soon)
		}
	}
	return due
}

// watch reads the events of the sandbox until ctx ends. It subscribes again each minute, since
// events may get lost.
func (m *monitor) watch(ctx context.Context) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for wait := watchAgain; ; wait = min(2*wait, lookEvery) {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		}
		began, sb := time.Now(), m.snapshot()
		if sb.Status != StatusPaused { // a paused agent sends no events
			err := m.engine.guard("process_events", func() error { return m.readEvents(ctx, sb) })
			if ctx.Err() == nil && (errdefs.IsNotFound(err) || errdefs.IsFailedPrecondition(err)) {
				_ = m.registry.checkAlive(ctx, m.rec, sb, goneWithIt) // records the container's end
			}
			m.registry.mu.Lock()
			if errdefs.IsNotImplemented(err) || time.Since(m.rec.unsure) > unsureMost {
				m.rec.unsure = time.Time{}
			}
			m.startLocked()
			m.registry.mu.Unlock()
		}
		if time.Since(began) > lookEvery { // the subscription worked
			wait = watchAgain
		}
		timer.Reset(wait)
	}
}

func (m *monitor) readEvents(ctx context.Context, sb Sandbox) error {
	ctx, cancel := context.WithTimeout(ctx, measureGap)
	defer cancel()
	events, err := ask(ctx, m.engine, "process_events", func(ctx context.Context) (runtime.Events, error) {
		return m.insider.Events(ctx, sb.ContainerID)
	})
	if err != nil {
		return err
	}
	defer events.Close()
	defer context.AfterFunc(ctx, func() { _ = events.Close() })()
	for first := true; ; first = false {
		infos, err := events.Next()
		if err != nil {
			return err
		}
		infos = ownProcesses(infos)
		if first {
			m.listed(infos)
		} else {
			for _, info := range infos {
				m.seen(info)
			}
		}
		m.registry.mu.Lock()
		if first {
			m.rec.unsure = time.Time{}
		}
		m.startLocked()
		m.registry.mu.Unlock()
		select { // limits the rate of events, which a sandbox may send without end
		case <-time.After(eventGap):
		case <-ctx.Done():
		}
	}
}

// killLate kills the processes that run past their timeout.
func (m *monitor) killLate(ctx context.Context) {
	_, down := m.engine.status()
	m.registry.mu.Lock()
	sb, late := m.rec.sb, m.lateLocked()
	if down != nil || !m.aliveLocked() {
		late = nil // without engine or container, a kill would fail
	}
	m.registry.mu.Unlock()
	for proc, by := range late {
		h := m.handleOf(sb, proc)
		kill, cancel := context.WithTimeout(ctx, overdueKill)
		err := h.kill(kill)
		if info, ierr := h.ask(kill); err == nil && ierr == nil {
			m.seen(info)
		}
		cancel()
		if errors.Is(err, runtime.ErrNotKilled) || err != nil && by > overdueEnd && ctx.Err() == nil {
			m.registry.mu.Lock()
			m.unkillable = true
			m.registry.mu.Unlock()
		}
	}
}

// prune makes the sandbox forget the oldest of the processes that have ended.
func (m *monitor) prune(ctx context.Context) {
	m.registry.mu.Lock()
	sb := m.rec.sb
	var all []runtime.ProcessInfo
	for _, t := range m.procs {
		if t.ended {
			all = append(all, t.info)
		}
	}
	slices.SortFunc(all, func(a, b runtime.ProcessInfo) int { // the newest first
		return cmp.Or(b.StartedAt.Compare(a.StartedAt), cmp.Compare(b.ID, a.ID))
	})
	size := int64(0)
	var drop []string
	for i, info := range all {
		size += max(info.NextSeq-info.FirstSeq, 0)
		if i > 0 && (i >= maxEnded || size > maxEndedBytes) && m.streams[info.ID] == nil {
			drop = append(drop, info.ID)
		}
	}
	m.registry.mu.Unlock()
	for _, proc := range drop {
		if m.handleOf(sb, proc).forget(ctx) != nil {
			return // the next call tries again
		}
	}
}

// enforce removes or stops the sandbox, if the end of a command or a measurement demands it.
func (m *monitor) enforce(ctx context.Context) {
	m.registry.mu.Lock()
	sb, alive := m.rec.sb, m.aliveLocked()
	unkillable, measure := m.unkillable && alive, m.measure && alive && time.Since(m.measuredAt) >= measureSoon
	if measure || !alive {
		m.measure, m.measuredAt = false, time.Now()
	}
	m.registry.mu.Unlock()
	if unkillable {
		if err := m.registry.terminate(ctx, m.rec, sb); err != nil {
			m.engine.log.WarnContext(ctx, "sandbox_terminate_failed", append(sandboxAttrs(sb), "error", err)...)
		}
		return
	}
	if measure {
		m.measured(m.quotas.Left(ctx, subject(sb), true))
	}
	m.registry.mu.Lock()
	stop := m.over && m.aliveLocked() && !m.readLocked()
	m.registry.mu.Unlock()
	if !stop {
		return
	}
	m.keepEnded(ctx, sb)
	if err := m.registry.stopOverQuota(ctx, m.rec, sb); err != nil {
		m.engine.log.WarnContext(ctx, "sandbox_stop_failed", append(sandboxAttrs(sb), "error", err)...)
	}
}
