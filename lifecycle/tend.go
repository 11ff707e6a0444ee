package lifecycle

import (
	"context"
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/runtime"
)

// How running commands and processes are looked after. Each sandbox that has some has a
// goroutine, which lists them; that costs a sandbox' program a tenth of a millisecond,
// needs no hold on any process, and sees what an earlier Berm started as well. Who
// follows a command to its end, or asks after it, sees that at once.
const (
	lookFirst   = 250 * time.Millisecond // after a start; each look doubles it
	lookMost    = 5 * time.Second
	lookTimeout = 5 * time.Second
	measureGap  = time.Minute // between two measurements of a workspace while something runs
	unsureMost  = time.Minute // for a program that doesn't answer after a start of Berm

	overdueKill = 10 * time.Second // past its timeout, a command is killed from outside
	overdueEnd  = time.Minute      // and then its sandbox is ended

	maxEnded      = 32      // commands and processes that have ended, kept in a sandbox
	maxEndedBytes = 8 << 20 // of their output
	maxListed     = 1024    // processes of a sandbox that are looked at
)

// kind is what a process in a sandbox is to its caller; it is also what its ID in the
// sandbox begins with.
type kind string

const (
	kindExec    kind = "exec."
	kindProcess kind = "proc."
)

// inside is what is known of the processes in a sandbox; guarded by Manager.mu.
type inside struct {
	running map[string]*tracked  // by runtime ID: those not known to have ended
	ended   map[string]time.Time // by runtime ID, when those that have ended were started
	hubs    map[string]*hub      // by runtime ID: those that somebody is attached to
	ready   map[string]bool      // by runtime ID: of processes, if it was asked for
	last    map[string]lastOf    // by ExecID: commands that ended with their container
	kick    chan struct{}        // holds one; nil unless tended
	unsure  bool                 // what runs in it isn't known yet
	since   time.Time            // when that began
	measure bool                 // the workspace is to be measured: something ended, or has run for a while
	over    bool                 // its workspace is over its quota: to be stopped
	doomed  bool                 // something can't be killed: to be ended
}

// lastOf is a command whose container is gone.
type lastOf struct {
	execution Execution
	hash      string
}

// tracked is a running command or process.
type tracked struct {
	kind     kind
	info     runtime.ProcessInfo // as last seen
	label    label
	deadline time.Time     // by which a timeout should have ended it; zero is never
	overdue  time.Time     // when it was first seen to be past it
	missed   bool          // it wasn't in the last list
	turn     bool          // it has its sandbox' turn
	done     chan struct{} // closed when it has ended
}

// label is what a process in a sandbox carries of Berm's. Never more: the sandbox
// might read it.
type label struct {
	Hash       string `json:"h,omitempty"` // of the request
	TimeoutMS  int64  `json:"t,omitempty"`
	Stdin      bool   `json:"i,omitempty"`
	Serialized bool   `json:"s,omitempty"`
}

func (l label) String() string {
	b, _ := json.Marshal(l) // strings and numbers can't fail
	return string(b)
}

// parseLabel reads what a sandbox says; what makes no sense is an empty one.
func parseLabel(s string) (l label) {
	if len(s) > 1024 || json.Unmarshal([]byte(s), &l) != nil || l.TimeoutMS < 0 || l.TimeoutMS > int64(maxTimeout/time.Millisecond) {
		return label{}
	}
	return l
}

// maxTimeout is more than any policy allows.
const maxTimeout = 10 * 365 * 24 * time.Hour

func (l label) timeout() time.Duration { return time.Duration(l.TimeoutMS) * time.Millisecond }

func kindOf(proc string) (kind, string) {
	for _, k := range []kind{kindExec, kindProcess} {
		if id, ok := strings.CutPrefix(proc, string(k)); ok && idPattern.MatchString(id) {
			return k, id
		}
	}
	return "", ""
}

// counter is where running ones of a kind are counted.
func (r *record) counter(k kind) *int {
	if k == kindProcess {
		return &r.procs
	}
	return &r.running
}

// trackLocked notes that a process runs. Counted says that the caller has counted it
// already, and turn that it holds its sandbox' turn, which goes over to it.
func (m *Manager) trackLocked(rec *record, info runtime.ProcessInfo, counted, turn bool) {
	k, _ := kindOf(info.ID)
	t := rec.inside.running[info.ID]
	switch {
	case t == nil:
		l := parseLabel(info.Label)
		t = &tracked{kind: k, info: info, label: l, done: make(chan struct{})}
		if l.TimeoutMS > 0 {
			start := info.StartedAt
			if now := time.Now(); counted || start.After(now) {
				start = now
			}
			t.deadline = start.Add(l.timeout())
		}
		if rec.inside.running == nil {
			rec.inside.running = map[string]*tracked{}
		}
		rec.inside.running[info.ID] = t
		if !counted {
			*rec.counter(k)++
		}
		if id := (keyID{rec.sb.Tenant, rec.sb.Key}); l.Serialized && !turn && m.lines[id] == nil {
			m.lines[id] = &line{}
			t.turn = true
		}
	case counted: // a look was quicker
		*rec.counter(k)--
	}
	t.turn = t.turn || turn
	m.tendLocked(rec)
}

// endLocked notes that a process has ended. Whoever comes first is told so.
func (m *Manager) endLocked(rec *record, proc string, status ExecStatus) bool {
	t := rec.inside.running[proc]
	if t == nil {
		return false
	}
	delete(rec.inside.running, proc)
	if rec.inside.ended == nil {
		rec.inside.ended = map[string]time.Time{}
	}
	rec.inside.ended[proc] = t.info.StartedAt
	*rec.counter(t.kind)--
	rec.usedLocked()
	if t.turn {
		m.passTurnLocked(keyID{rec.sb.Tenant, rec.sb.Key})
	}
	if t.kind == kindExec {
		m.metrics.command(status, runtime.PathAgent)
	}
	close(t.done)
	return true
}

// seen takes what a sandbox says of one of its processes.
func (m *Manager) seen(rec *record, info runtime.ProcessInfo) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.seenLocked(rec, info)
}

// seenLocked tells whether it is from this that the process is known to have ended. News
// may come late: of a process that is known to have ended, or of one whose ID another
// has by now.
func (m *Manager) seenLocked(rec *record, info runtime.ProcessInfo) (ended bool) {
	k, _ := kindOf(info.ID)
	t := rec.inside.running[info.ID]
	over, known := rec.inside.ended[info.ID]
	switch {
	case k == "" || !m.aliveLocked(rec):
	case t != nil && info.StartedAt.Before(t.info.StartedAt):
	case t == nil && info.Running && known && !info.StartedAt.After(over):
	case info.Running && t != nil:
		t.info = info
	case info.Running:
		m.trackLocked(rec, info, false, false)
	case m.endLocked(rec, info.ID, statusOfEnd(info)):
		rec.inside.doomed = rec.inside.doomed || info.NotKilled
		rec.inside.measure = rec.inside.measure || m.mayHaveQuota(rec.sb)
		m.tendLocked(rec)
		return true
	}
	return false
}

// aliveLocked tells whether a record is its key's sandbox, and its container alive.
func (m *Manager) aliveLocked(rec *record) bool {
	s := m.slots[keyID{rec.sb.Tenant, rec.sb.Key}]
	return s != nil && s.record == rec && (rec.sb.Status == StatusRunning || rec.sb.Status == StatusPaused)
}

// loseLocked ends what ran in a container that is gone.
func (m *Manager) loseLocked(rec *record) {
	now := time.Now().UTC()
	for proc, t := range rec.inside.running {
		if _, id := kindOf(proc); t.kind == kindExec {
			info := t.info
			info.Running, info.Killed, info.EndedAt = false, true, now
			info.TimedOut = !t.deadline.IsZero() && now.After(t.deadline)
			e := m.executionLocked(rec, info)
			e.QuotaExceeded = rec.inside.over
			rec.keepLast(id, e, t.label.Hash)
			m.endLocked(rec, proc, statusOfEnd(info))
		} else {
			m.endLocked(rec, proc, "")
		}
	}
	rec.inside.unsure, rec.inside.measure, rec.inside.over, rec.inside.ready = false, false, false, nil
}

func (r *record) keepLast(id string, e Execution, hash string) {
	if r.inside.last == nil {
		r.inside.last = map[string]lastOf{}
	}
	r.inside.last[id] = lastOf{e, hash}
}

// tendLocked sees to it that somebody looks after a sandbox' processes, and soon.
func (m *Manager) tendLocked(rec *record) {
	switch {
	case rec.inside.kick != nil:
		select {
		case rec.inside.kick <- struct{}{}:
		default:
		}
	case !m.closing:
		kick := make(chan struct{}, 1)
		rec.inside.kick = kick
		m.tenders.Go(func() { m.tend(rec, kick) })
	}
}

// tended tells whether a sandbox has processes that are looked after.
func (m *Manager) tended(rec *record) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return rec.inside.kick != nil
}

// hurryLocked has those looked at often whose end somebody waits for.
func (m *Manager) hurryLocked(id keyID) {
	if s := m.slots[id]; s != nil && s.record != nil && len(s.record.inside.running) > 0 {
		m.tendLocked(s.record)
	}
}

// tend looks after a sandbox' processes until none runs, or Run ends.
func (m *Manager) tend(rec *record, kick <-chan struct{}) {
	m.mu.Lock()
	wait := lookFirst
	if rec.inside.unsure {
		wait = 0
		rec.inside.since = time.Now()
	}
	m.mu.Unlock()
	due := time.Now().Add(wait)
	measured := time.Now()
	for {
		timer := time.NewTimer(time.Until(due))
		select {
		case <-m.tending.Done():
			timer.Stop()
			return
		case <-kick:
			timer.Stop()
			wait = lookFirst
			if soon := time.Now().Add(wait); soon.Before(due) {
				due = soon
			}
		case <-timer.C:
			m.look(m.tending, rec)
			wait = min(max(2*wait, lookFirst), lookMost)
			m.mu.Lock()
			if l := m.lines[keyID{rec.sb.Tenant, rec.sb.Key}]; l != nil && len(l.waiting) > 0 {
				wait = lookFirst
			}
			if time.Since(measured) >= measureGap {
				measured = time.Now()
				m.measureLocked(rec)
			}
			m.mu.Unlock()
			due = time.Now().Add(wait)
		}
		m.enforce(m.tending, rec)
		m.mu.Lock()
		if len(rec.inside.running) == 0 && !rec.inside.unsure && !(rec.inside.doomed && m.aliveLocked(rec)) && len(kick) == 0 {
			rec.inside.kick = nil
			m.mu.Unlock()
			return
		}
		m.mu.Unlock()
	}
}

// measureLocked has a workspace measured in which something may have written.
func (m *Manager) measureLocked(rec *record) {
	if m.mayHaveQuota(rec.sb) && len(rec.inside.running) > 0 && rec.sb.Status == StatusRunning {
		rec.inside.measure = true
	}
}

// look asks a sandbox what runs in it.
func (m *Manager) look(ctx context.Context, rec *record) {
	m.mu.Lock()
	sb, alive := rec.sb, m.aliveLocked(rec)
	m.mu.Unlock()
	if !alive || sb.Status == StatusPaused {
		m.mu.Lock()
		defer m.mu.Unlock()
		if !alive {
			m.loseLocked(rec)
		}
		for _, t := range rec.inside.running { // frozen, it can't be overdue
			t.overdue = time.Time{}
		}
		return
	}
	infos, err := m.list(ctx, sb)
	switch {
	case err == nil:
		m.listed(rec, infos)
		m.prune(ctx, rec, sb, infos)
	case ctx.Err() != nil:
		return
	case errdefs.IsNotFound(err), errdefs.IsFailedPrecondition(err):
		_ = m.lookAgain(ctx, rec, sb) // if it is dead, that is known now
	}
	m.mu.Lock()
	if err == nil || errdefs.IsNotImplemented(err) || time.Since(rec.inside.since) > unsureMost {
		rec.inside.unsure = false
	}
	var late map[string]time.Duration
	if m.down == nil { // without an engine, nothing can be done about it
		late = rec.lateLocked()
	}
	m.mu.Unlock()
	for proc, by := range late {
		kill, cancel := context.WithTimeout(ctx, overdueKill)
		err := m.kill(kill, sb, proc)
		cancel()
		if errors.Is(err, runtime.ErrNotKilled) || err != nil && by > overdueEnd && ctx.Err() == nil {
			m.doom(rec)
		}
	}
}

// list asks for all processes of a sandbox.
func (m *Manager) list(ctx context.Context, sb Sandbox) (infos []runtime.ProcessInfo, err error) {
	ctx, cancel := context.WithTimeout(ctx, lookTimeout)
	defer cancel()
	err = m.call(ctx, "process_list", func(ctx context.Context) error {
		infos, err = m.insider.ListProcesses(ctx, sb.ContainerID)
		return err
	})
	infos = slices.DeleteFunc(infos, func(i runtime.ProcessInfo) bool {
		k, _ := kindOf(i.ID)
		return k == ""
	})
	return infos[:min(len(infos), maxListed)], err
}

// listed takes a whole list. What ran, and isn't in it, has been lost.
func (m *Manager) listed(rec *record, infos []runtime.ProcessInfo) {
	m.mu.Lock()
	defer m.mu.Unlock()
	there := make(map[string]bool, len(infos))
	for _, info := range infos {
		there[info.ID] = true
	}
	for proc, t := range rec.inside.running {
		if !there[proc] && t.missed {
			m.endLocked(rec, proc, ExecKilled)
		}
		t.missed = !there[proc] // it may have been started after the list was made
	}
	for proc := range rec.inside.ended {
		if !there[proc] {
			delete(rec.inside.ended, proc)
		}
	}
	for proc := range rec.inside.ready {
		if !there[proc] && rec.inside.running[proc] == nil {
			delete(rec.inside.ready, proc)
		}
	}
	for _, info := range infos {
		m.seenLocked(rec, info)
	}
}

// lateLocked answers the commands that their timeout should have ended, and by how
// much they are late.
func (r *record) lateLocked() map[string]time.Duration {
	now := time.Now()
	var late map[string]time.Duration
	for proc, t := range r.inside.running {
		switch {
		case t.deadline.IsZero() || now.Before(t.deadline):
		case t.overdue.IsZero():
			t.overdue = now
		case now.Sub(t.overdue) >= overdueKill:
			if late == nil {
				late = map[string]time.Duration{}
			}
			late[proc] = now.Sub(t.overdue)
		}
	}
	return late
}

// prune has a sandbox forget the oldest of what has ended.
func (m *Manager) prune(ctx context.Context, rec *record, sb Sandbox, infos []runtime.ProcessInfo) {
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
		m.mu.Lock()
		attached := rec.inside.hubs[info.ID] != nil
		m.mu.Unlock()
		if !attached {
			_ = m.forget(ctx, sb, info.ID) // the next look tries again
		}
	}
}

// doom has a sandbox ended in which something can't be killed.
func (m *Manager) doom(rec *record) {
	m.mu.Lock()
	defer m.mu.Unlock()
	rec.inside.doomed = true
	m.tendLocked(rec)
}

// enforce does to a sandbox what the end of a command, or a measurement, asks for.
func (m *Manager) enforce(ctx context.Context, rec *record) {
	m.mu.Lock()
	sb, alive := rec.sb, m.aliveLocked(rec)
	doomed, measure := rec.inside.doomed && alive, rec.inside.measure && alive
	rec.inside.measure = false
	m.mu.Unlock()
	if doomed {
		if err := m.terminate(ctx, rec, sb); err != nil {
			m.log.WarnContext(ctx, "sandbox_terminate_failed", append(sandboxAttrs(sb), "error", err)...)
		}
		return
	}
	if measure {
		m.measured(rec, m.quotaLeft(ctx, sb, true))
	}
	m.mu.Lock()
	stop := rec.inside.over && m.aliveLocked(rec)
	for proc := range rec.inside.hubs {
		stop = stop && rec.inside.running[proc] != nil // what has ended may be read to its end
	}
	m.mu.Unlock()
	if !stop {
		return
	}
	m.keepEnded(ctx, rec, sb)
	if err := m.stopOverQuota(ctx, rec, sb); err != nil {
		m.log.WarnContext(ctx, "sandbox_stop_failed", append(sandboxAttrs(sb), "error", err)...)
	}
}

// measured notes what a measurement said, and tells whether the workspace is over its
// quota.
func (m *Manager) measured(rec *record, err error) bool {
	var over *QuotaError
	if !errors.As(err, &over) {
		return false
	}
	m.enforced(rec, m.snapshot(rec))
	m.mu.Lock()
	defer m.mu.Unlock()
	rec.inside.over = m.aliveLocked(rec)
	m.tendLocked(rec)
	return true
}

// keepEnded notes how the commands of a sandbox ended that is about to be stopped.
func (m *Manager) keepEnded(ctx context.Context, rec *record, sb Sandbox) {
	infos, err := m.list(ctx, sb)
	if err != nil {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, info := range infos[max(0, len(infos)-maxEnded):] {
		if k, id := kindOf(info.ID); k == kindExec && !info.Running {
			e := m.executionLocked(rec, info)
			e.QuotaExceeded = true
			rec.keepLast(id, e, parseLabel(info.Label).Hash)
		}
	}
}

func (m *Manager) kill(ctx context.Context, sb Sandbox, proc string) error {
	return m.call(ctx, "process_kill", func(ctx context.Context) error {
		return m.insider.Kill(ctx, sb.ContainerID, proc)
	})
}

func (m *Manager) forget(ctx context.Context, sb Sandbox, proc string) error {
	return m.call(ctx, "process_forget", func(ctx context.Context) error {
		return m.insider.Forget(ctx, sb.ContainerID, proc)
	})
}
