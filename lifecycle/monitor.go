package lifecycle

import (
	"context"
	"encoding/json"
	"slices"
	"strings"
	"time"

	"github.com/bermhq/berm/runtime"
)

// kind is what a process in a sandbox is to its caller. The ID of a process in its sandbox
// begins with the kind.
type kind string

const (
	kindExec    kind = "exec."
	kindProcess kind = "proc."
)

// use returns how a process of the kind counts.
func (k kind) use() use {
	if k == kindProcess {
		return useProcess
	}
	return useCommand
}

func kindOf(proc string) (kind, string) {
	for _, k := range []kind{kindExec, kindProcess} {
		if id, ok := strings.CutPrefix(proc, string(k)); ok && idPattern.MatchString(id) {
			return k, id
		}
	}
	return "", ""
}

// label is what Berm attaches to a process in a sandbox. The sandbox can read and forge it.
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

// maxTimeout is more than any policy allows.
const maxTimeout = 10 * 365 * 24 * time.Hour

// parseLabel decodes a process label. It returns the zero label if s is malformed.
func parseLabel(s string) (l label) {
	if len(s) > 1024 || json.Unmarshal([]byte(s), &l) != nil || l.TimeoutMS < 0 || l.TimeoutMS > int64(maxTimeout/time.Millisecond) {
		return label{}
	}
	return l
}

func (l label) timeout() time.Duration { return time.Duration(l.TimeoutMS) * time.Millisecond }

// monitor follows the commands and processes of one sandbox. Its fields are guarded by
// records.mu. While some run, it lists them at intervals: that takes a tenth of a millisecond,
// needs no attachment, and finds what an earlier Berm started.
type monitor struct {
	*processes
	rec *record

	tracked map[string]*tracked  // by runtime ID: those not known to have ended
	ended   map[string]time.Time // by runtime ID, when those that have ended were started
	hubs    map[string]*hub      // by runtime ID: those that are attached
	ready   map[string]bool      // by runtime ID: of processes whose caller asked for it
	last    map[string]lastOf    // by ExecID: commands that ended with their container

	kick       chan struct{} // holds one; nil unless the loop runs
	since      time.Time     // when it became unsure what runs
	measure    bool          // the workspace must be measured: something ended, or has run for a while
	over       bool          // the workspace is over its quota: stop the sandbox
	unkillable bool          // something can't be killed: remove the sandbox
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
	overdue  time.Time     // when it was first seen past its deadline
	missed   bool          // it wasn't in the last list
	unlock   func()        // of its sandbox' turn; nil if it has none
	done     chan struct{} // closed when it has ended
}

func monitorOf(rec *record) *monitor { return rec.watcher.(*monitor) }

// aliveLocked reports whether the sandbox is its key's, and its container alive.
func (m *monitor) aliveLocked() bool { return m.registry.aliveLocked(m.rec) }

func (m *monitor) alive() bool {
	m.registry.mu.Lock()
	defer m.registry.mu.Unlock()
	return m.aliveLocked()
}

func (m *monitor) snapshot() Sandbox { return m.registry.snapshot(m.rec) }

// trackLocked records that a process runs. Counted says that the caller has counted it, and
// unlock, if not nil, ends the turn that the process has from now on.
func (m *monitor) trackLocked(info runtime.ProcessInfo, counted bool, unlock func()) {
	k, _ := kindOf(info.ID)
	t := m.tracked[info.ID]
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
		if m.tracked == nil {
			m.tracked = map[string]*tracked{}
		}
		m.tracked[info.ID] = t
		if !counted {
			m.rec.uses[k.use()]++
		}
		if l.Serialized && unlock == nil {
			t.unlock, _ = m.turns.TryLock(m.rec.sb.keyID())
		}
	case counted: // a list was quicker
		m.rec.uses[k.use()]--
	}
	if unlock != nil {
		t.unlock = unlock
	}
	m.startLocked()
}

// endLocked records that a process has ended. It returns false if that was known.
func (m *monitor) endLocked(proc string, status ExecStatus) bool {
	t := m.tracked[proc]
	if t == nil {
		return false
	}
	delete(m.tracked, proc)
	if m.ended == nil {
		m.ended = map[string]time.Time{}
	}
	m.ended[proc] = t.info.StartedAt
	m.rec.leaveLocked(t.kind.use())
	if t.unlock != nil {
		t.unlock()
	}
	if t.kind == kindExec {
		m.registry.metrics.command(status, runtime.PathAgent)
	}
	close(t.done)
	return true
}

// seen records what a sandbox reports of one of its processes.
func (m *monitor) seen(info runtime.ProcessInfo) {
	m.registry.mu.Lock()
	defer m.registry.mu.Unlock()
	m.seenLocked(info)
}

// seenLocked is seen. It returns true if the process is known from now on to have ended. A
// report may be late: of a process known to have ended, or whose ID another has by now.
func (m *monitor) seenLocked(info runtime.ProcessInfo) (ended bool) {
	k, _ := kindOf(info.ID)
	t := m.tracked[info.ID]
	over, known := m.ended[info.ID]
	switch {
	case k == "" || !m.aliveLocked():
	case t != nil && info.StartedAt.Before(t.info.StartedAt):
	case t == nil && info.Running && known && !info.StartedAt.After(over):
	case info.Running && t != nil:
		t.info = info
	case info.Running:
		m.trackLocked(info, false, nil)
	case m.endLocked(info.ID, statusOfEnd(info)):
		m.unkillable = m.unkillable || info.NotKilled
		m.measure = m.measure || m.quotas.mayHaveQuota(m.rec.sb)
		m.startLocked()
		return true
	}
	return false
}

// foundLocked implements watcher.
func (m *monitor) foundLocked() {
	if m.insider != nil {
		m.rec.unsure = true
		m.startLocked()
	}
}

// lostLocked implements watcher.
func (m *monitor) lostLocked() {
	now := time.Now().UTC()
	for proc, t := range m.tracked {
		if t.kind != kindExec {
			m.endLocked(proc, "")
			continue
		}
		info := t.info
		info.Running, info.Killed, info.EndedAt = false, true, now
		info.TimedOut = !t.deadline.IsZero() && now.After(t.deadline)
		m.keepLastLocked(info, t.label.Hash, m.over)
		m.endLocked(proc, statusOfEnd(info))
	}
	m.measure, m.over, m.ready = false, false, nil
}

// keepLastLocked keeps the end of a command beyond its container.
func (m *monitor) keepLastLocked(info runtime.ProcessInfo, hash string, overQuota bool) {
	if m.last == nil {
		m.last = map[string]lastOf{}
	}
	e := m.executionLocked(info)
	e.QuotaExceeded = overQuota
	m.last[e.ID] = lastOf{e, hash}
}

// keepEnded keeps how the commands of a sandbox ended that is about to be stopped.
func (m *monitor) keepEnded(ctx context.Context, sb Sandbox) {
	infos, err := m.list(ctx, sb)
	if err != nil {
		return
	}
	m.registry.mu.Lock()
	defer m.registry.mu.Unlock()
	for _, info := range infos[max(0, len(infos)-maxEnded):] {
		if k, _ := kindOf(info.ID); k == kindExec && !info.Running {
			m.keepLastLocked(info, parseLabel(info.Label).Hash, true)
		}
	}
}

func (m *monitor) lastOf(execID string) (lastOf, bool) {
	m.registry.mu.Lock()
	defer m.registry.mu.Unlock()
	l, ok := m.last[execID]
	return l, ok
}

// listed records a whole list of processes. A tracked one that isn't in it is lost.
func (m *monitor) listed(infos []runtime.ProcessInfo) {
	m.registry.mu.Lock()
	defer m.registry.mu.Unlock()
	there := make(map[string]bool, len(infos))
	for _, info := range infos {
		there[info.ID] = true
	}
	for proc, t := range m.tracked {
		if !there[proc] && t.missed {
			m.endLocked(proc, ExecKilled)
		}
		t.missed = !there[proc] // it may have been started after the list was made
	}
	for proc := range m.ended {
		if !there[proc] {
			delete(m.ended, proc)
		}
	}
	for proc := range m.ready {
		if !there[proc] && m.tracked[proc] == nil {
			delete(m.ready, proc)
		}
	}
	for _, info := range infos {
		m.seenLocked(info)
	}
}

// lateLocked returns the commands that their timeout should have ended, and by how much they
// are late.
func (m *monitor) lateLocked() map[string]time.Duration {
	now := time.Now()
	late := map[string]time.Duration{}
	for proc, t := range m.tracked {
		switch {
		case t.deadline.IsZero() || now.Before(t.deadline):
		case t.overdue.IsZero():
			t.overdue = now
		case now.Sub(t.overdue) >= overdueKill:
			late[proc] = now.Sub(t.overdue)
		}
	}
	return late
}

// started records what Start returned. It returns true if the process is counted from now on,
// and has the turn that unlock ends.
func (m *monitor) started(info runtime.ProcessInfo, unlock func()) bool {
	m.registry.mu.Lock()
	defer m.registry.mu.Unlock()
	if !m.aliveLocked() {
		return false
	}
	m.trackLocked(info, true, unlock)
	if !info.Running {
		m.seenLocked(info)
	}
	return true
}

// endSeen records the end of a process. It returns true if the workspace is over its quota then.
func (m *monitor) endSeen(ctx context.Context, info runtime.ProcessInfo) bool {
	m.registry.mu.Lock()
	sb := m.rec.sb
	first := m.seenLocked(info)
	over := m.over
	m.registry.mu.Unlock()
	if !first {
		return over
	}
	return m.measured(m.quotas.quotaLeft(ctx, sb, true))
}

// forgetHubLocked makes the next caller of openHub open a new hub.
func (m *monitor) forgetHubLocked(h *hub) {
	if m.hubs[h.proc] != h {
		return
	}
	delete(m.hubs, h.proc)
	if m.over { // enforce waited for its readers
		m.startLocked()
	}
}

// attachedLocked reports whether a process that has ended is attached: it may still be read.
func (m *monitor) attachedLocked() bool {
	for proc := range m.hubs {
		if m.tracked[proc] == nil {
			return true
		}
	}
	return false
}

// ownProcesses removes those that Berm didn't start, and all but the first maxListed.
func ownProcesses(infos []runtime.ProcessInfo) []runtime.ProcessInfo {
	infos = slices.DeleteFunc(infos, func(i runtime.ProcessInfo) bool {
		k, _ := kindOf(i.ID)
		return k == ""
	})
	return infos[:min(len(infos), maxListed)]
}
