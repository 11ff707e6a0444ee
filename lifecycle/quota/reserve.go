package quota

import (
	"context"
	"os"
	"time"
)

// growFor is how long a growing reservation relies on its last measurement of the workspace.
// Refresh measures once more before the commit.
const growFor = time.Second

// roundUp is by how much the kernel's count may exceed a quota before additions are refused.
// The kernel counts whole blocks.
const roundUp = 1 << 20

// Reservation is room in a workspace. It belongs to one goroutine.
//
// With a hard quota, staged files are written outside of the workspace's project. Inside it,
// the kernel would refuse an addition that only has room once it has replaced a file. Staged
// puts the files into the project before the commit, whatever the limit.
type Reservation struct {
	s       *Service
	w       Workspace
	chatID  string
	account *account // nil without a quota, and after Release

	n, replaced int64
	held        int64  // its part of account.reserved
	credit      int64  // replaced bytes that only this reservation may count on
	creditor    *int64 // the counter that includes credit: a figure's or the account's
	written     int64  // its part of account.written
	chats       []string
	checked     time.Time // when the last measurement of chats began
	settled     bool      // don't measure chats again
	done        func()    // ends a commit: the chat can be measured again
}

// Reserve reserves room for an addition of n bytes to a chat, which replaces other bytes.
// Both are counted as hostdir.Allocated does, and not negative. An addition that replaces as
// much as it adds has room in a full workspace, too. But two reservations can't count on the
// same replaced bytes. The caller must release the reservation.
//
// The error is a *FullError without room, or a *lifecycle.UnavailableError.
func (s *Service) Reserve(ctx context.Context, w Workspace, chatID string, n, replaced int64) (*Reservation, error) {
	r := &Reservation{s: s, w: w, chatID: chatID, n: n, replaced: replaced}
	if s.enforcement() == "" {
		return r, nil
	}
	r.account = s.use(w)
	if err := r.take(ctx, n, replaced, false); err != nil {
		r.Release()
		return nil, err
	}
	return r, nil
}

// Grow makes the reservation keep room for n bytes in all. It never shrinks a reservation.
// Errors are as Reserve's; the reservation stays as it was then.
func (r *Reservation) Grow(ctx context.Context, n int64) error {
	if r.account == nil || n <= r.n {
		return nil
	}
	if err := r.take(ctx, n, r.replaced, false); err != nil {
		return err
	}
	r.n = n
	return nil
}

// Replaces records that the addition replaces n more bytes, counted as for Reserve.
func (r *Reservation) Replaces(n int64) { r.replaced = add(r.replaced, n) }

// Staged puts a directory with n written bytes into the workspace's project. Without project
// quotas it does nothing. Nothing may be written there afterwards. It may be called once.
// The error is a *lifecycle.UnavailableError.
func (r *Reservation) Staged(ctx context.Context, dir *os.Root, n int64) error {
	if r.s.projects == nil {
		return nil
	}
	a := r.s.use(r.w)
	defer r.s.unuse(a)
	unlock, err := r.s.counting.Lock(ctx, r.w.ID) // so that no count has the bytes as used and as reserved
	if err != nil {
		return err
	}
	defer unlock()
	if err := r.s.adopt(a, r.w, dir); err != nil {
		return err
	}
	if r.account != nil {
		r.written = n
		a.written += n
	}
	return nil
}

// Refresh measures chats that may have changed. After it, Grow and Commit measure nothing
// more, so that they can be called under a lock that is held only briefly. They still see what
// other reservations do. Errors are the context's, or a *lifecycle.UnavailableError.
func (r *Reservation) Refresh(ctx context.Context) error {
	if r.account == nil {
		return nil
	}
	if err := r.measure(ctx); err != nil {
		return err
	}
	r.settled = true
	return nil
}

func (r *Reservation) measure(ctx context.Context) error {
	began := time.Now()
	chats, err := r.s.fresh(ctx, r.account, r.w, r.chatID)
	if err != nil {
		return err
	}
	r.chats, r.checked = chats, began
	return nil
}

// Commit counts an addition of n bytes, which replaces other bytes, as used. Both are counted
// as hostdir.Allocated does. The caller then moves the files into place, and must call Done,
// whether or not that succeeded. Until Done, the chat isn't measured. Commit itself measures
// nothing, but waits for a measurement of the chat that is under way. It may be called once.
//
// Errors are as Reserve's. After a *FullError nothing has changed.
func (r *Reservation) Commit(ctx context.Context, n, replaced int64) error {
	if r.account == nil {
		return nil
	}
	unlock, err := r.account.walking.Lock(ctx, r.chatID)
	if err != nil {
		return err
	}
	if err := r.take(ctx, n, replaced, true); err != nil {
		unlock()
		return err
	}
	r.done = unlock
	return nil
}

// take checks that the workspace has room for an addition, and reserves it. If commit is
// true, it counts it as used instead.
func (r *Reservation) take(ctx context.Context, n, replaced int64, commit bool) error {
	s, a := r.s, r.account
	if !commit && !r.settled && time.Since(r.checked) > growFor {
		if err := r.measure(ctx); err != nil {
			return err
		}
	}
	unlock, err := s.counting.Lock(ctx, r.w.ID)
	if err != nil {
		return err
	}
	defer unlock()
	counted, err := s.countedLocked(a, r.w)
	if err != nil {
		return err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	t := s.sumLocked(a, r.chats, r.checked)
	t.used = add(t.used, counted)
	f := a.figureLocked(r.chatID)
	there, creditor := f.bytes, &f.credited
	if s.projects != nil {
		there, creditor = counted, &a.credited
	}
	if r.creditor == creditor {
		there += r.credit
	}
	credit := max(min(replaced, there-*creditor), 0)
	need := max(n-credit, 0)
	// An addition that replaces as much as it adds has room in a full workspace. But a sandbox
	// could rename each file before it is replaced, and so keep them all. So nothing is added
	// once the kernel's count exceeds the quota by more than roundUp.
	full := need > 0 && need > s.opts.QuotaBytes-add(t.used, a.reserved-r.held)
	if full || n > 0 && counted > add(s.opts.QuotaBytes, roundUp) {
		return s.over(r.w, t)
	}
	r.giveBackLocked()
	if !commit {
		r.held, r.credit, r.creditor = need, credit, creditor
		a.reserved += need
		*creditor += credit
		return nil
	}
	if s.projects != nil { // the kernel has counted n, and still counts what is replaced
		a.written += credit - r.written
		r.written = credit
	}
	if credit < min(replaced, f.bytes) { // another reservation counts on the rest, so measure how much goes
		f.changes++
	}
	f.bytes = add(max(f.bytes-credit, 0), n)
	return nil
}

// giveBackLocked returns the reserved bytes and the credit. The caller holds the account's mu.
func (r *Reservation) giveBackLocked() {
	r.account.reserved -= r.held
	if r.creditor != nil {
		*r.creditor -= r.credit
	}
	r.held, r.credit, r.creditor = 0, 0, nil
}

// Done ends a commit. If the change differs from what was committed, asCommitted is false, and
// the chat is measured again. Without a commit, Done does nothing.
func (r *Reservation) Done(asCommitted bool) {
	if r.done == nil {
		return
	}
	r.unwrite()
	if !asCommitted {
		r.s.Freed(r.w, r.chatID)
	}
	r.done()
	r.done = nil
}

// unwrite takes the reservation's part out of account.written: all that the kernel counts of
// it is in use from then on.
func (r *Reservation) unwrite() {
	unlock, err := r.s.counting.Lock(context.Background(), r.w.ID)
	if err != nil { // which it can't be
		return
	}
	defer unlock()
	r.account.written -= r.written
	r.written = 0
}

// Release returns the room that wasn't committed. It may be called more than once.
func (r *Reservation) Release() {
	if r.account == nil {
		return
	}
	r.Done(false) // in case the caller didn't
	r.unwrite()   // before the room is returned, as staged files stay until they are removed
	r.account.mu.Lock()
	r.giveBackLocked()
	r.account.mu.Unlock()
	r.s.unuse(r.account)
	r.account = nil
}
