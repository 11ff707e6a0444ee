package lifecycle

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/keylock"
)

// use is a way to use a running sandbox.
type use int

const (
	useCommand use = iota
	useProcess
	useFiles
	usePort
	useKinds // the number of kinds
)

// records is the state of the Registry. Its mutex is never held across a call to the engine, the
// store, or a measurement of a quota.
type records struct {
	metrics *metrics
	quotas  Quotas
	watch   func(*record) watcher // makes the watcher of each record; set before the first one

	keys        keylock.Map[keyID]
	mu          sync.Mutex
	slots       map[keyID]*slot
	containers  map[string]keyID    // by container ID, of all records
	making      map[string]struct{} // session IDs of creates under way
	ended       map[string]struct{} // containers that ended during a create or a reconciliation
	reconciling bool                // keeps ended, as making does
	closing     bool                // no new tasks and workers start
}

// slot is the state of one key. It is guarded by records.mu, and freed once it is empty.
type slot struct {
	pending *pendingCreate             // the create that holds the key, if one does
	record  *record                    // the live sandbox, if there is one
	failure *failure                   // the last create's error, until a caller gets it
	joining map[context.Context]func() // wake the callers that wait for the key and would join a create
}

// record is a live sandbox. Its snapshot is replaced, never changed. All fields are guarded by
// records.mu.
type record struct {
	sb      Sandbox
	uses    [useKinds]int
	unsure  time.Time // since when unknown processes may run in it, so that it isn't idle; zero if none may
	stored  time.Time // the LastUsedAt that the store has; zero if that isn't known
	adopted bool      // from the old service: only its own parameters can be compared
	watcher watcher
	quotas  Quotas
}

// watcher follows the processes of one sandbox. Its methods are called with records.mu held.
type watcher interface {
	// foundLocked is called if the container is an earlier Berm's: processes may run in it.
	foundLocked()
	// lostLocked is called when the container has ended.
	lostLocked()
}

// failure is the error of a create that no caller has got yet.
type failure struct {
	sb  Sandbox
	err error
	at  time.Time
}

// slotLocked returns the slot of a key, and makes it if there is none.
func (t *records) slotLocked(id keyID) *slot {
	s := t.slots[id]
	if s == nil {
		s = &slot{}
		t.slots[id] = s
	}
	return s
}

// freeLocked removes a slot that is empty.
func (t *records) freeLocked(id keyID, s *slot) {
	if s.pending == nil && s.record == nil && s.failure == nil && len(s.joining) == 0 {
		delete(t.slots, id)
	}
}

// publishLocked makes rec the sandbox of its key.
func (t *records) publishLocked(rec *record) {
	id := rec.sb.keyID()
	s := t.slotLocked(id)
	if s.record == nil {
		t.metrics.active.Inc()
	} else {
		t.loseLocked(s.record)
		delete(t.containers, s.record.sb.ContainerID)
	}
	s.record, s.failure = rec, nil
	rec.watcher, rec.quotas = t.watch(rec), t.quotas
	if rec.sb.ContainerID != "" {
		t.containers[rec.sb.ContainerID] = id
	}
}

// forgetLocked removes the record of a key.
func (t *records) forgetLocked(id keyID) {
	s := t.slots[id]
	if s == nil || s.record == nil {
		return
	}
	t.loseLocked(s.record)
	delete(t.containers, s.record.sb.ContainerID)
	s.record = nil
	t.metrics.active.Dec()
	t.freeLocked(id, s)
}

// loseLocked ends what ran in a container that has ended.
func (t *records) loseLocked(rec *record) {
	rec.watcher.lostLocked()
	rec.unsure = time.Time{}
}

// recordOf returns the record of a key, and its sandbox as it is now; nil and the zero Sandbox if
// there is none.
func (t *records) recordOf(id keyID) (*record, Sandbox) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if s := t.slots[id]; s != nil && s.record != nil {
		return s.record, s.record.snapshotLocked(time.Now())
	}
	return nil, Sandbox{}
}

// all returns the records of all keys.
func (t *records) all() (list []*record) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, s := range t.slots {
		if s.record != nil {
			list = append(list, s.record)
		}
	}
	return list
}

// snapshot returns the sandbox of a record as it is now.
func (t *records) snapshot(r *record) Sandbox {
	t.mu.Lock()
	defer t.mu.Unlock()
	return r.snapshotLocked(time.Now())
}

// aliveLocked reports whether a record is its key's sandbox, and its container alive.
func (t *records) aliveLocked(rec *record) bool {
	s := t.slots[rec.sb.keyID()]
	return s != nil && s.record == rec && (rec.sb.Status == StatusRunning || rec.sb.Status == StatusPaused)
}

// touch restarts the idle time of a sandbox.
func (t *records) touch(rec *record) {
	t.mu.Lock()
	defer t.mu.Unlock()
	rec.usedLocked()
}

// changeStatus changes the status of a record if it is still from.
func (t *records) changeStatus(r *record, from, to Status) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if r.sb.Status == from {
		r.sb.Status = to
	}
}

// containerGone records that a container has ended.
func (t *records) containerGone(containerID string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if id, ok := t.containers[containerID]; ok {
		t.slots[id].record.sb.Status = StatusStopped
		t.loseLocked(t.slots[id].record)
	}
	if len(t.making) > 0 || t.reconciling { // a create or a list may still take it for running
		t.ended[containerID] = struct{}{}
	}
}

// containerIs records that a container was paused or resumed.
func (t *records) containerIs(containerID string, from, to Status) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if id, ok := t.containers[containerID]; ok {
		if r := t.slots[id].record; r.sb.Status == from {
			r.sb.Status = to
		}
	}
}

// forgetEndedLocked forgets the ended containers once nothing needs them any more.
func (t *records) forgetEndedLocked() {
	if len(t.making) == 0 && !t.reconciling {
		clear(t.ended)
	}
}

// statusLocked returns the status of a container from a list or an inspection. The container may
// have ended since.
func (t *records) statusLocked(c runtime.Container) Status {
	if _, ended := t.ended[c.ID]; ended {
		return StatusStopped
	}
	return statusIn(c)
}

// orphanLocked reports whether no record has the container, and no create is making it.
func (t *records) orphanLocked(c runtime.Container) bool {
	_, known := t.containers[c.ID]
	_, making := t.making[c.Labels[LabelSessionID]]
	return !known && !making
}

// capacityLocked returns a *CapacityError if a create would exceed a cap. Old is the record
// that the new sandbox replaces, or nil.
func (t *records) capacityLocked(want *desired, old *record, limit int) error {
	var all, own int
	for id, s := range t.slots {
		if s.record == nil && s.pending == nil || old != nil && id == want.keyID() {
			continue
		}
		all++
		if id.tenant == want.Tenant {
			own++
		}
	}
	if want.max > 0 && own >= want.max {
		return &CapacityError{
			Message:    fmt.Sprintf("the caller has %d of %d sandboxes; delete one, or let one expire", own, want.max),
			RetryAfter: 10 * time.Second,
		}
	}
	if limit > 0 && all >= limit {
		return &CapacityError{Message: fmt.Sprintf("all %d sandboxes are taken", limit), RetryAfter: 10 * time.Second}
	}
	return nil
}

// dropFailuresLocked forgets the oldest failures of a tenant beyond maxFailures.
func (t *records) dropFailuresLocked(tenant string) {
	n, oldest := 0, keyID{}
	for id, s := range t.slots {
		if id.tenant != tenant || s.failure == nil {
			continue
		}
		if n++; n == 1 || s.failure.at.Before(t.slots[oldest].failure.at) {
			oldest = id
		}
	}
	if n > maxFailures {
		t.slots[oldest].failure = nil
		t.freeLocked(oldest, t.slots[oldest])
	}
}

// takeFailure returns the error of the last create if that had the same spec. It does so once.
func (t *records) takeFailure(want *desired, now time.Time) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	s := t.slots[want.keyID()]
	if s == nil || s.failure == nil {
		return nil
	}
	fail := s.failure
	s.failure = nil
	t.freeLocked(want.keyID(), s)
	if now.Sub(fail.at) > failureKept || len(want.differences(fail.sb, false)) > 0 {
		return nil
	}
	return fail.err
}

// informed records that a caller got the error of a failed create.
func (t *records) informed(id keyID) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if s := t.slots[id]; s != nil {
		s.failure = nil
		t.freeLocked(id, s)
	}
}

// mayHaveQuota reports whether the sandbox may have a quota to measure. It makes no calls, so mu
// may be held.
func (t *records) mayHaveQuota(sb Sandbox) bool {
	dir, _ := workspace(sb.Spec)
	return dir != "" || t.quotas.Shared()
}

// MountsInUse returns the mounts that callers asked for, of all sandboxes that exist or are
// being created, of every tenant. A sandbox whose container is dead has none.
func (t *records) MountsInUse() []policy.Mount {
	t.mu.Lock()
	defer t.mu.Unlock()
	var mounts []policy.Mount
	for _, s := range t.slots {
		if r := s.record; r != nil && r.sb.Status != StatusStopped {
			mounts = append(mounts, r.sb.Spec.Mounts...)
			if r.adopted && r.sb.VolumePath != "" { // the old service made it, without a spec
				mounts = append(mounts, policy.Mount{Source: r.sb.VolumePath, Local: r.sb.VolumePath, Mode: "rw"})
			}
		}
		if s.pending != nil {
			mounts = append(mounts, s.pending.starting.Spec.Mounts...)
		}
	}
	return mounts
}

// writeUses writes the last uses that the store doesn't have. The next call repeats what fails.
func (t *records) writeUses(ctx context.Context, store Store) error {
	used := map[string]time.Time{}
	now := time.Now().UTC()
	t.mu.Lock()
	for _, s := range t.slots {
		if r := s.record; r != nil {
			if r.busyLocked() {
				r.sb.LastUsedAt = now
			}
			if r.sb.LastUsedAt.After(r.stored) {
				used[r.sb.SessionID] = r.sb.LastUsedAt
			}
		}
	}
	t.mu.Unlock()
	if len(used) == 0 {
		return nil
	}
	if err := store.Touch(ctx, used); err != nil {
		return err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, s := range t.slots {
		if r := s.record; r != nil && !used[r.sb.SessionID].IsZero() {
			r.stored = used[r.sb.SessionID]
		}
	}
	return nil
}

// usedLocked restarts the idle time.
func (r *record) usedLocked() { r.sb.LastUsedAt = time.Now().UTC() }

// busyLocked reports whether the sandbox is in use, and so isn't idle.
func (r *record) busyLocked() bool {
	return r.uses[useCommand] > 0 || r.uses[useProcess] > 0 || r.uses[useFiles] > 0 || !r.unsure.IsZero()
}

// snapshotLocked returns the sandbox as it is at now. Its status depends on the time. Its quota's
// enforcement depends on other sandboxes: it isn't the kernel's once they share the directory.
func (r *record) snapshotLocked(now time.Time) Sandbox {
	sb := r.sb
	if dir, _ := workspace(sb.Spec); dir != "" {
		sb.Enforcement.WorkspaceQuota = r.quotas.Enforcement(subject(sb))
	}
	sb.IdleExpiresAt = time.Time{}
	if sb.Spec.IdleTTL > 0 {
		last := sb.LastUsedAt
		if r.busyLocked() {
			last = now
		}
		sb.IdleExpiresAt = last.Add(sb.Spec.IdleTTL).UTC()
	}
	if sb.Expired(now) {
		sb.Status = StatusExpired
	}
	return sb
}

// snapshotLocked returns the sandbox of the key: the one that is being made, else the live one,
// else the one whose create failed.
func (s *slot) snapshotLocked(now time.Time) (Sandbox, bool) {
	switch {
	case s.pending != nil:
		sb := s.pending.starting
		select {
		case <-s.pending.pulling:
			p := s.pending.progress()
			sb.Pull = &p
		default:
		}
		return sb, true
	case s.record != nil:
		return s.record.snapshotLocked(now), true
	case s.failure != nil && now.Sub(s.failure.at) <= failureKept:
		return s.failure.sb, true
	}
	return Sandbox{}, false
}

// lockOrJoin locks a key. If a create holds the key, or begins while lockOrJoin waits, it returns
// that create instead. The caller must call unlock if it gets neither a create nor an error.
func (t *records) lockOrJoin(ctx context.Context, id keyID) (unlock func(), p *pendingCreate, err error) {
	for {
		t.mu.Lock()
		s := t.slotLocked(id)
		if s.pending != nil {
			defer t.mu.Unlock()
			return nil, s.pending, nil
		}
		wait, wake := context.WithCancel(ctx) // launch calls wake
		if s.joining == nil {
			s.joining = map[context.Context]func(){}
		}
		s.joining[wait] = wake
		t.mu.Unlock()
		unlock, err = t.keys.Lock(wait, id)
		wake()
		t.mu.Lock()
		delete(s.joining, wait)
		t.freeLocked(id, s)
		t.mu.Unlock()
		if err == nil || ctx.Err() != nil { // else a create began, and may have ended since
			return unlock, nil, err
		}
	}
}

// enforced updates how the quota of a sandbox is enforced, once the sandbox is over it. A sandbox
// made without a quota has one if its directory became a chat's since. enforced doesn't hold mu
// while it asks.
func (t *records) enforced(rec *record, sb Sandbox) Sandbox {
	if sb.Enforcement.WorkspaceQuota != "" {
		return sb
	}
	now := t.quotas.Enforcement(subject(sb))
	t.mu.Lock()
	defer t.mu.Unlock()
	rec.sb.Enforcement.WorkspaceQuota, sb.Enforcement.WorkspaceQuota = now, now
	return sb
}
