package lifecycle

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/keylock"
)

// Intervals and bounds of a monitor. They don't delay callers: a caller that follows or asks for a
// process sees its end at once.
const (
	watchAgain  = 250 * time.Millisecond // after the events broke off; each try doubles it, up to lookEvery
	lookEvery   = 5 * time.Second        // while a process is late, or the agent doesn't answer
	lookTimeout = 5 * time.Second
	eventGap    = 20 * time.Millisecond  // between two events of a sandbox
	measureSoon = 250 * time.Millisecond // between two measurements of a workspace after something ended
	measureGap  = time.Minute            // between two measurements of a workspace while something runs
	unsureMost  = time.Minute            // after Berm's start, a silent agent prevents idling out so long

	overdueKill = 10 * time.Second // past its timeout, Berm kills a command itself
	overdueEnd  = time.Minute      // past its timeout, Berm removes the sandbox if that failed

	maxEnded      = 32      // ended commands and processes that a sandbox keeps
	maxEndedBytes = 8 << 20 // of their output
	maxListed     = 1024    // processes of a sandbox; Berm ignores further ones
)

// Bounds of managed processes.
const (
	defaultProcess = "default"
	stopInput      = 200 * time.Millisecond // to close the input, which a writer may block
	stopGrace      = 5 * time.Second        // from TERM to KILL
	stopMost       = 30 * time.Second       // for all of a stop
	stderrWait     = time.Second            // for the sandbox to send it
	maxStderr      = 64 << 10               // bytes of the standard error that callers see
	askFirst       = 10 * time.Millisecond  // first interval of a wait; each attempt doubles it
	askMost        = 500 * time.Millisecond

	startAttempts = 3               // to start a command whose sandbox dies before it
	endKnown      = 2 * time.Second // until an engine knows of a container's end
)

// processes runs commands and managed processes in the sandboxes of a Registry. It shares the
// Registry's mutex.
type processes struct {
	registry *Registry
	engine   *engine
	quotas   Quotas
	opts     *Options
	insider  runtime.Insider
	turns    keylock.Map[keyID]
	starting keylock.Map[processID] // by the caller's ID
	inputs   keylock.Map[processID] // by the runtime's ID
}

// processID names a process of a key.
type processID struct {
	keyID
	process string
}

func newProcesses(r *Registry) *processes {
	p := &processes{registry: r, engine: r.engine, quotas: r.quotas, opts: r.opts, insider: r.opts.Runtime}
	r.watch = func(rec *record) watcher {
		return &monitor{
			processes: p, rec: rec, procs: map[string]*proc{},
			streams: map[string]map[*stream]struct{}{}, last: map[string]lastOf{},
		}
	}
	return p
}

// monitor follows the processes of one sandbox. Its fields are guarded by records.mu. While any
// process runs, it reads the sandbox's events. It also finds processes that an earlier Berm
// started.
type monitor struct {
	*processes
	rec *record

	procs   map[string]*proc                // known processes, by the runtime's ID
	running int                             // of procs, not known to have ended
	streams map[string]map[*stream]struct{} // open streams, by the runtime's ID
	last    map[string]lastOf               // commands that ended with their container, by the caller's ID

	kick       chan struct{} // wakes the loop; nil unless it runs
	measuredAt time.Time     // when the loop last measured the workspace
	measure    bool          // the workspace must be measured: a process ended, or has run for a while
	over       bool          // the workspace is over its quota: stop the sandbox
	unkillable bool          // a process can't be killed: remove the sandbox
}

// lastOf is a command whose container is gone.
type lastOf struct {
	process Process
	hash    string
}

// proc is a command or process of a sandbox.
type proc struct {
	kind     Kind
	info     runtime.ProcessInfo // as last seen; without the command once it has ended
	ended    bool
	ready    *bool // nil unless its caller asked for it
	label    label
	deadline time.Time     // by which a timeout should have ended it; zero is never
	overdue  time.Time     // when it was first seen past its deadline
	kill     time.Time     // when Berm next tries to kill it
	missed   bool          // it wasn't in the last list
	unlock   func()        // ends its turn; nil if it has none
	done     chan struct{} // closed when it has ended; nil if it was never known to run
}

func monitorOf(rec *record) *monitor { return rec.watcher.(*monitor) }

// aliveLocked reports whether the sandbox is still its key's, and its container is alive.
func (m *monitor) aliveLocked() bool { return m.registry.aliveLocked(m.rec) }

func (m *monitor) alive() bool {
	m.registry.mu.Lock()
	defer m.registry.mu.Unlock()
	return m.aliveLocked()
}

func (m *monitor) snapshot() Sandbox { return m.registry.snapshot(m.rec) }

// trackLocked records that a process runs. Counted says that the caller has counted it as a use.
// With unlock, the process has a turn from now on, which unlock ends.
func (m *monitor) trackLocked(info runtime.ProcessInfo, counted bool, unlock func()) {
	k, _ := kindOf(info.ID)
	t := m.procs[info.ID]
	switch {
	case t == nil || t.ended:
		l := parseLabel(info.Label)
		t = &proc{kind: k, info: info, label: l, done: make(chan struct{})}
		if l.TimeoutMS > 0 {
			start := info.StartedAt
			if now := time.Now(); counted || start.After(now) {
				start = now
			}
			t.deadline = start.Add(l.timeout())
		}
		m.procs[info.ID] = t
		m.running++
		if !counted {
			m.rec.uses[k.use()]++
		}
		if l.Serialized && unlock == nil {
			t.unlock, _ = m.turns.TryLock(m.rec.sb.keyID())
		}
	case counted: // a list has reported it first, and so counted it
		m.rec.uses[k.use()]--
	}
	if unlock != nil {
		t.unlock = unlock
	}
	m.startLocked()
}

// endLocked records that a running process has ended.
func (m *monitor) endLocked(t *proc, status ExecStatus) {
	t.ended = true
	m.running--
	m.rec.leaveLocked(t.kind.use())
	if t.unlock != nil {
		t.unlock()
	}
	if t.kind == KindExec {
		m.registry.metrics.command(status)
	}
	close(t.done)
}

// seen records a sandbox's report about one of its processes.
func (m *monitor) seen(info runtime.ProcessInfo) {
	m.registry.mu.Lock()
	defer m.registry.mu.Unlock()
	m.seenLocked(info)
}

// seenLocked is seen. It returns true if the report is the first of the process's end. A report
// may be stale: the process has ended since, or another process has its ID.
func (m *monitor) seenLocked(info runtime.ProcessInfo) (ended bool) {
	k, _ := kindOf(info.ID)
	t := m.procs[info.ID]
	switch {
	case k == "" || !m.aliveLocked():
	case t == nil && len(m.procs) >= maxListed:
	case t != nil && info.StartedAt.Before(t.info.StartedAt):
	case t != nil && t.ended && info.Running && info.StartedAt.Equal(t.info.StartedAt):
	case info.Running && (t == nil || t.ended):
		m.trackLocked(info, false, nil)
	case info.Running:
		t.info = info
	default:
		ended = t != nil && !t.ended
		if !ended && (t == nil || info.StartedAt.After(t.info.StartedAt)) {
			t = &proc{kind: k, ended: true}
			m.procs[info.ID] = t
		}
		t.info = info
		t.info.Command = nil // may be long
		if ended {
			m.endLocked(t, statusOfEnd(info))
			m.leftLocked(info)
		}
	}
	return ended
}

// leftLocked makes the loop act on the end of a process: it may measure the workspace, or remove
// the sandbox.
func (m *monitor) leftLocked(info runtime.ProcessInfo) {
	m.unkillable = m.unkillable || info.NotKilled
	m.measure = m.measure || m.registry.mayHaveQuota(m.rec.sb)
	m.startLocked()
}

// isLocked reports whether the process of an ID is still the one that info describes.
func (m *monitor) isLocked(info runtime.ProcessInfo) bool {
	t := m.procs[info.ID]
	return t != nil && t.info.StartedAt.Equal(info.StartedAt)
}

// foundLocked implements watcher.
func (m *monitor) foundLocked() {
	m.rec.unsure = time.Now()
	m.startLocked()
}

// lostLocked implements watcher.
func (m *monitor) lostLocked() {
	now := time.Now().UTC()
	for _, t := range m.procs {
		if t.ended {
			continue
		}
		if t.kind != KindExec {
			m.endLocked(t, "")
			continue
		}
		info := t.info
		info.Running, info.Killed, info.EndedAt = false, true, now
		info.TimedOut = !t.deadline.IsZero() && now.After(t.deadline)
		m.keepLastLocked(info, t.label.Hash, m.over)
		m.endLocked(t, statusOfEnd(info))
	}
	m.measure, m.over = false, false
	clear(m.procs)
}

// keepLastLocked keeps the result of a command after its container has ended.
func (m *monitor) keepLastLocked(info runtime.ProcessInfo, hash string, overQuota bool) {
	p := m.processLocked(info)
	p.QuotaExceeded = overQuota
	m.last[p.ID] = lastOf{p, hash}
}

// keepEnded keeps the results of a sandbox's ended commands, before the sandbox is stopped.
func (m *monitor) keepEnded(ctx context.Context, sb Sandbox) {
	infos, err := m.list(ctx, sb)
	if err != nil {
		return
	}
	m.registry.mu.Lock()
	defer m.registry.mu.Unlock()
	for _, info := range infos[max(0, len(infos)-maxEnded):] {
		if k, _ := kindOf(info.ID); k == KindExec && !info.Running {
			m.keepLastLocked(info, parseLabel(info.Label).Hash, true)
		}
	}
}

// listed records a list of all processes. A running process that two lists lack is lost.
func (m *monitor) listed(infos []runtime.ProcessInfo) {
	m.registry.mu.Lock()
	defer m.registry.mu.Unlock()
	there := make(map[string]bool, len(infos))
	for _, info := range infos {
		there[info.ID] = true
	}
	for id, t := range m.procs {
		switch {
		case there[id]:
			t.missed = false
		case t.ended:
			delete(m.procs, id)
		case t.missed:
			m.endLocked(t, ExecKilled)
			delete(m.procs, id)
		default:
			t.missed = true // not lost yet: it may have started after the sandbox made the list
		}
	}
	for _, info := range infos {
		m.seenLocked(info)
	}
}

// lateLocked returns the commands that run past their timeout and are due to be killed, and for
// how long they are late. In a paused sandbox, no command is late.
func (m *monitor) lateLocked() map[string]time.Duration {
	now := time.Now()
	late := map[string]time.Duration{}
	for proc, t := range m.procs {
		switch {
		case t.ended || t.deadline.IsZero() || now.Before(t.deadline) || m.rec.sb.Status == StatusPaused:
			t.overdue = time.Time{}
		case t.overdue.IsZero():
			t.overdue, t.kill = now, now.Add(overdueKill)
		case !now.Before(t.kill):
			late[proc] = now.Sub(t.overdue)
			t.kill = now.Add(lookEvery)
		}
	}
	return late
}

// started records a process that the runtime has started. If it returns true, the monitor has
// taken over the use that the caller counted, and unlock.
func (m *monitor) started(info runtime.ProcessInfo, unlock func()) bool {
	m.registry.mu.Lock()
	defer m.registry.mu.Unlock()
	if !m.aliveLocked() {
		return false
	}
	if t := m.procs[info.ID]; t != nil && t.ended && info.Running && !info.StartedAt.After(t.info.StartedAt) { // its end was quicker
		if t.done == nil {
			if t.kind == KindExec {
				m.registry.metrics.command(statusOfEnd(t.info))
			}
			m.leftLocked(t.info)
		}
		return false
	}
	m.trackLocked(info, true, unlock)
	if !info.Running {
		m.seenLocked(info)
	}
	return true
}

// endSeen records the end of a process. It returns true if the workspace is now over its quota.
func (m *monitor) endSeen(ctx context.Context, info runtime.ProcessInfo) bool {
	m.registry.mu.Lock()
	sb := m.rec.sb
	first := m.seenLocked(info)
	over := m.over
	m.registry.mu.Unlock()
	if !first && (over || !m.registry.mayHaveQuota(sb)) {
		return over
	}
	return m.measured(m.quotas.Left(ctx, subject(sb), true))
}

// readLocked reports whether a caller still reads the output of a process that has ended.
func (m *monitor) readLocked() bool {
	for proc := range m.streams {
		if t := m.procs[proc]; t == nil || t.ended {
			return true
		}
	}
	return false
}

// ownProcesses returns the processes that Berm started, at most maxListed.
func ownProcesses(infos []runtime.ProcessInfo) []runtime.ProcessInfo {
	infos = slices.DeleteFunc(infos, func(i runtime.ProcessInfo) bool {
		k, _ := kindOf(i.ID)
		return k == ""
	})
	return infos[:min(len(infos), maxListed)]
}

// process returns a process as callers see it.
func (m *monitor) process(info runtime.ProcessInfo) Process {
	m.registry.mu.Lock()
	defer m.registry.mu.Unlock()
	return m.processLocked(info)
}

func (m *monitor) processLocked(info runtime.ProcessInfo) Process {
	k, id := kindOf(info.ID)
	sb := m.rec.snapshotLocked(time.Now())
	p := Process{
		ID: id, SessionID: sb.SessionID, Backend: m.engine.backend(),
		Command: info.Command, TTY: info.TTY, Status: ExecRunning,
		StartedAt: info.StartedAt, Timeout: parseLabel(info.Label).timeout(),
		FirstSeq: info.FirstSeq, NextSeq: info.NextSeq, QuotaEnforcement: sb.Enforcement.WorkspaceQuota,
	}
	if t := m.procs[info.ID]; t != nil {
		p.Ready = t.ready
	}
	for s := range m.streams[info.ID] {
		p.Attached = p.Attached || s.attached && info.Running && s.info.StartedAt.Equal(info.StartedAt)
	}
	if info.Running {
		return p
	}
	p.Status = statusOfEnd(info)
	p.Signal, p.EndedAt, p.CPUTime, p.PeakMemoryBytes = info.Signal, info.EndedAt, info.CPUTime, info.PeakMemoryBytes
	if k == KindManaged || p.Status == ExecCompleted {
		p.ExitCode = &info.ExitCode
	}
	return p
}

// whyNotStarted asks the engine about a container that refused to start a command. The engine may
// not know of the container's end yet, so whyNotStarted waits for up to endKnown.
func (m *monitor) whyNotStarted(ctx context.Context, sb Sandbox, refusal error) error {
	for until, wait := time.Now().Add(endKnown), askFirst; ; {
		if err := m.registry.checkAlive(ctx, m.rec, sb, diedEarly); err != nil {
			return err
		}
		if !errdefs.IsFailedPrecondition(refusal) || time.Now().After(until) {
			break
		}
		if err := m.sleep(ctx, &wait, nil); err != nil {
			return err
		}
	}
	// The container lives, but the engine has lost the command, as in a restart of the engine.
	return &UnavailableError{Err: errors.New("run in sandbox " + sb.Key + ": " + refusal.Error())} // without its class
}

// sleep waits before the next attempt, or until wake is closed, and doubles the wait.
func (p *processes) sleep(ctx context.Context, wait *time.Duration, wake <-chan struct{}) error {
	timer := time.NewTimer(*wait)
	defer timer.Stop()
	*wait = min(2**wait, askMost)
	select {
	case <-timer.C:
	case <-wake:
	case <-p.registry.running.Done():
		return errClosing
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	return nil
}

// list returns all processes of the sandbox that Berm started.
func (m *monitor) list(ctx context.Context, sb Sandbox) ([]runtime.ProcessInfo, error) {
	ctx, cancel := context.WithTimeout(ctx, lookTimeout)
	defer cancel()
	infos, err := ask(ctx, m.engine, "process_list", func(ctx context.Context) ([]runtime.ProcessInfo, error) {
		return m.insider.ListProcesses(ctx, sb.ContainerID)
	})
	return ownProcesses(infos), err
}

// measured records the result of a measurement. It returns true if the workspace is over its
// quota.
func (m *monitor) measured(err error) bool {
	if _, over := errors.AsType[*QuotaError](err); !over {
		return false
	}
	m.registry.enforced(m.rec, m.snapshot())
	m.registry.mu.Lock()
	defer m.registry.mu.Unlock()
	m.over = m.aliveLocked()
	m.startLocked()
	return true
}
