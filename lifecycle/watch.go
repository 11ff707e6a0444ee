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

// watches reports whether the loop of the monitor runs.
func (m *monitor) watches() bool {
	m.registry.mu.Lock()
	defer m.registry.mu.Unlock()
	return m.kick != nil
}

// hurry makes the monitor of a key watch now: a caller waits for an end.
func (p *processes) hurry(id keyID) {
	rec, _ := p.registry.recordOf(id)
	if rec == nil {
		return
	}
	p.registry.mu.Lock()
	defer p.registry.mu.Unlock()
	if m := monitorOf(rec); len(m.tracked) > 0 {
		m.urgent = true
		m.startLocked()
	}
}

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
	start := time.Now()
	m.registry.mu.Lock()
	if m.rec.unsure {
		m.since = start
	}
	m.registry.mu.Unlock()
	looked, watching := start, false
	for {
		m.enforce(ctx)
		m.prune(ctx)
		m.registry.mu.Lock()
		alive := m.aliveLocked()
		if len(m.tracked) == 0 && !m.rec.unsure && len(kick) == 0 && !(alive && (m.unkillable || m.measure || m.over && !m.readLocked())) {
			m.kick, m.urgent = nil, false
			m.registry.mu.Unlock()
			return
		}
		due := m.dueLocked(looked)
		begin := start.Add(watchAfter)
		if m.urgent || m.rec.unsure {
			begin = start
		}
		m.registry.mu.Unlock()
		if !watching {
			if watching = !time.Now().Before(begin); watching {
				events.Go(func() { m.watch(ctx) })
			} else {
				due = begin
			}
		}
		timer := time.NewTimer(time.Until(due))
		select {
		case <-ctx.Done():
			timer.Stop()
			return
		case <-kick:
			timer.Stop()
			continue
		case <-timer.C:
		}
		m.registry.mu.Lock()
		look := watching && !time.Now().Before(m.lookLocked(looked))
		if time.Since(later(start, m.measuredAt)) >= measureGap {
			m.measure = m.measure || len(m.tracked) > 0 && m.rec.sb.Status == StatusRunning && m.registry.mayHaveQuota(m.rec.sb)
		}
		m.registry.mu.Unlock()
		if look {
			looked = time.Now()
			m.look(ctx)
		}
	}
}

// dueLocked returns when the loop goes on by itself.
func (m *monitor) dueLocked(looked time.Time) time.Time {
	due := earlier(m.lookLocked(looked), later(looked, m.measuredAt).Add(measureGap))
	if m.measure {
		due = earlier(due, m.measuredAt.Add(watchAfter))
	}
	return due
}

// lookLocked returns when the next look is due: in a minute, as events may get lost; when a
// timeout should have ended a process; or soon, while something is wrong or a caller waits.
func (m *monitor) lookLocked(looked time.Time) time.Time {
	soon, due := looked.Add(lookEvery), looked.Add(measureGap)
	if m.rec.unsure || m.unkillable || m.urgent || m.over {
		return soon
	}
	for _, t := range m.tracked {
		switch {
		case t.deadline.IsZero():
		case t.overdue.IsZero() && m.rec.sb.Status != StatusPaused && t.deadline.After(looked):
			due = earlier(due, t.deadline)
		default:
			due = earlier(due, soon)
		}
	}
	return due
}

func later(a, b time.Time) time.Time {
	if b.After(a) {
		return b
	}
	return a
}

// watch reads the events of the sandbox until ctx ends.
func (m *monitor) watch(ctx context.Context) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for wait := watchAfter; ; wait = min(2*wait, lookEvery) {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		}
		began, sb := time.Now(), m.snapshot()
		err := m.engine.guard("process_events", func() error { return m.readEvents(ctx, sb) })
		if ctx.Err() == nil && (errdefs.IsNotFound(err) || errdefs.IsFailedPrecondition(err)) {
			_ = m.registry.checkAlive(ctx, m.rec, sb, goneWithIt) // records its end
			m.registry.mu.Lock()
			m.startLocked()
			m.registry.mu.Unlock()
		}
		if time.Since(began) > lookEvery { // it has worked
			wait = watchAfter
		}
		timer.Reset(wait)
	}
}

func (m *monitor) readEvents(ctx context.Context, sb Sandbox) error {
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
		m.rec.unsure = m.rec.unsure && !first
		m.startLocked()
		m.registry.mu.Unlock()
		select { // a sandbox may send as many as it likes
		case <-time.After(eventGap):
		case <-ctx.Done():
		}
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

// prune makes the sandbox forget the oldest of the processes that have ended.
func (m *monitor) prune(ctx context.Context) {
	type old struct {
		proc string
		endedProcess
	}
	m.registry.mu.Lock()
	sb := m.rec.sb
	var all []old
	for proc, e := range m.ended {
		all = append(all, old{proc, e})
	}
	slices.SortFunc(all, func(a, b old) int { // the newest first
		return cmp.Or(b.started.Compare(a.started), cmp.Compare(b.proc, a.proc))
	})
	size := int64(0)
	var drop []string
	for i, e := range all {
		size += e.kept
		if i > 0 && (i >= maxEnded || size > maxEndedBytes) && m.streams[e.proc] == nil {
			drop = append(drop, e.proc)
		}
	}
	m.registry.mu.Unlock()
	for _, proc := range drop {
		if m.handleOf(sb, proc).forget(ctx) != nil {
			return // the next time tries again
		}
	}
}

// enforce removes or stops the sandbox, if the end of a command or a measurement demands it.
func (m *monitor) enforce(ctx context.Context) {
	m.registry.mu.Lock()
	sb, alive := m.rec.sb, m.aliveLocked()
	unkillable, measure := m.unkillable && alive, m.measure && alive && time.Since(m.measuredAt) >= watchAfter
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
