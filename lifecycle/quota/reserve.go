package quota

import (
	"context"
	"os"
	"time"
)

// growFor is how long a growing reservation goes by what was known when it was last
// compared with all that its workspace holds; before the commit that is done again.
const growFor = time.Second

// roundUp is by how much additions may exceed a quota that the kernel holds, as it counts
// whole blocks.
const roundUp = 1 << 20

// Reservation is room in a workspace. It belongs to one goroutine.
//
// Where the kernel counts ("hard"), what is staged is written outside of the workspace's
// project: the kernel would refuse what has room only in place of something else, which is
// there until then. Staged has it counted before the commit, whatever the limit.
type Reservation struct {
	s       *Service
	w       Workspace
	chatID  string
	account *account // nil where there is nothing to be kept: no quota, or released

	n, replaced int64
	held        int64  // of the account's
	credit      int64  // of what it replaces, that no other may count on
	creditor    *int64 // that has noted it
	written     int64  // of what the kernel counts, that isn't used yet, or is about to go
	chats       []string
	checked     time.Time // since when they were measured
	settled     bool      // they aren't measured again
	done        func()    // ends a commit: the chat can be measured again
}

// Reserve keeps room for an addition of n bytes to a chat, of which replaced, counted as
// package usage does, make way for it. Without room it is a *FullError. What adds nothing
// has room in a full workspace, too; but of what is replaced nothing counts for two
// reservations at once. Neither is negative. The reservation must be released. Errors besides:
// *lifecycle.UnavailableError.
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

// Grow has it keep room for n bytes in all; for less than before it does nothing.
// Errors: as Reserve's; the room that there was is kept.
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

// Replaces notes that n more bytes, counted as Reserve's, make way for what it grows by.
func (r *Reservation) Replaces(n int64) { r.replaced = add(r.replaced, n) }

// Staged puts a directory with n bytes that have been written into the workspace's project,
// where there are any. Nothing may be written there afterwards. It may be called once.
// Errors: *lifecycle.UnavailableError.
func (r *Reservation) Staged(ctx context.Context, dir *os.Root, n int64) error {
	if r.s.projects == nil {
		return nil
	}
	a := r.s.use(r.w)
	defer r.s.unuse(a)
	unlock, err := r.s.counting.Lock(ctx, r.w.ID) // so that nobody finds it counted and reserved
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

// Refresh measures what may have changed, for Grow and Commit, which from here on go by
// that and by what other reservations did since, so that they can be called under a lock
// which isn't to be kept for long. Errors: the context's, *lifecycle.UnavailableError.
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

// Commit turns the reservation into use, before what was written takes its place: n bytes,
// in place of replaced, both counted as hostdir.Allocated does. It measures nothing, but waits
// for a measurement of the chat that is under way. If there is no room for that any more it is a
// *FullError, and nothing has changed. Errors besides: as Reserve's. Done must be called
// afterwards, whether or not that went well; until then the chat isn't measured. It is called
// once.
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

// take compares what is wanted with what the workspace has room for, and takes it: to be
// held, or to be used.
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
	// What adds nothing may come whatever the rest of the workspace holds. Not so beyond what
	// the kernel holds sandboxes to: one that renames each file before it is replaced would
	// keep them all.
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
	if s.projects != nil { // the kernel has counted n, and still counts what makes way
		a.written += credit - r.written
		r.written = credit
	}
	if credit < min(replaced, f.bytes) { // another reservation counts on the rest: how much goes is unknown
		f.changes++
	}
	f.bytes = add(max(f.bytes-credit, 0), n)
	return nil
}

// giveBackLocked ends what it keeps. The account's mu must be held.
func (r *Reservation) giveBackLocked() {
	r.account.reserved -= r.held
	if r.creditor != nil {
		*r.creditor -= r.credit
	}
	r.held, r.credit, r.creditor = 0, 0, nil
}

// Done ends a committed change. What it changed in truth may be other than was committed;
// then the chat is measured anew. Without a commit it does nothing.
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

// unwrite has all that the kernel counts be used.
func (r *Reservation) unwrite() {
	unlock, err := r.s.counting.Lock(context.Background(), r.w.ID)
	if err != nil { // which it can't be
		return
	}
	defer unlock()
	r.account.written -= r.written
	r.written = 0
}

// Release gives back what wasn't committed; it may be called more than once.
func (r *Reservation) Release() {
	if r.account == nil {
		return
	}
	r.Done(false) // somebody forgot it
	r.unwrite()   // first: what is staged is there until it is removed
	r.account.mu.Lock()
	r.giveBackLocked()
	r.account.mu.Unlock()
	r.s.unuse(r.account)
	r.account = nil
}
