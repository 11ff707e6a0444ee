package workspace

import (
	"context"
	"time"

	"github.com/bermhq/berm/lifecycle"
)

// growFor is how long a growing reservation goes by what was known when it was last
// compared with all that its workspace holds; the commit compares again.
const growFor = time.Second

// Reservation is room in a workspace. It belongs to one goroutine.
//
// Where the kernel holds the quota, it counts what is written as it is written, in addition
// to what that is to replace, and refuses what goes beyond: then a reservation is no more
// than an early look.
type Reservation struct {
	s       *Service
	w       Workspace
	chatID  string
	account *account // nil where there is nothing to be kept: no quota, the kernel's, or released

	n, replaced int64
	held        int64 // of the account's
	chats       []string
	checked     time.Time // when they were measured
	figure      *figure   // that a commit has changed, until it is done
	added       int64     // to it
}

// Reserve keeps room for an addition of n bytes to a chat, of which replaced, counted as
// package usage does, make way for it. Without room it is a *QuotaError. What adds nothing
// has room in a full workspace, too. The reservation must be released. Errors besides:
// *lifecycle.InvalidError for less than 0 bytes, *lifecycle.UnavailableError.
func (s *Service) Reserve(ctx context.Context, w Workspace, chatID string, n, replaced int64) (*Reservation, error) {
	r := &Reservation{s: s, w: w, chatID: chatID, n: n, replaced: replaced}
	if err := negative(n, replaced); err != nil {
		return nil, err
	}
	switch s.enforcement() {
	case "":
	case "hard":
		a := s.use(w.ID)
		defer s.unuse(a)
		t, err := s.total(ctx, a, w, chatID)
		if err != nil {
			return nil, err
		}
		if n > replaced && n > s.opts.QuotaBytes-t.used {
			return nil, s.over(w, t)
		}
	default:
		r.account = s.use(w.ID)
		if err := r.take(ctx, n, replaced, false); err != nil {
			r.Release()
			return nil, err
		}
	}
	return r, nil
}

func negative(n, replaced int64) error {
	if n < 0 || replaced < 0 {
		return &lifecycle.InvalidError{Field: "size", Message: "can't be less than 0"}
	}
	return nil
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

// Commit turns the reservation into use, before what was written takes its place: n bytes,
// in place of replaced, both counted as package usage does. If there is no room for that
// any more it is a *QuotaError, and nothing has changed. Errors besides: as Reserve's. Done
// must be called afterwards, whether or not that went well. It is called once.
func (r *Reservation) Commit(ctx context.Context, n, replaced int64) error {
	if err := negative(n, replaced); err != nil {
		return err
	}
	if r.account == nil {
		return nil
	}
	return r.take(ctx, n, replaced, true)
}

// take compares what is wanted with what the workspace has room for, and takes it: to be
// held, or to be used.
func (r *Reservation) take(ctx context.Context, n, replaced int64, commit bool) error {
	s, a := r.s, r.account
	if commit || time.Since(r.checked) > growFor {
		chats, _, err := s.soft(ctx, a, r.w, r.chatID)
		if err != nil {
			return err
		}
		r.chats, r.checked = chats, time.Now()
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	t := a.sumLocked(r.chats, s.opts.QuotaBytes)
	f := a.figureLocked(r.chatID)
	credit := min(replaced, f.bytes)
	need := max(n-credit, 0)
	// What adds nothing may come whatever the rest of the workspace holds.
	if need > 0 && need > s.opts.QuotaBytes-add(t.used, a.reserved-r.held) {
		return s.over(r.w, t)
	}
	a.reserved -= r.held
	r.held = 0
	if !commit {
		r.held = need
		a.reserved += need
		return nil
	}
	f.overlapLocked(n)
	f.bytes = add(f.bytes-credit, n)
	f.changing++
	f.pending = add(f.pending, n)
	r.figure, r.added = f, n
	return nil
}

// Done ends a committed change. What it changed in truth may be other than was committed;
// then the chat is measured anew. Without a commit it does nothing.
func (r *Reservation) Done(asCommitted bool) {
	if r.figure == nil {
		return
	}
	r.account.mu.Lock()
	defer r.account.mu.Unlock()
	r.figure.changing--
	r.figure.pending -= r.added
	if !asCommitted {
		r.figure.touchLocked()
	}
	r.figure = nil
}

// Release gives back what wasn't committed; it may be called more than once.
func (r *Reservation) Release() {
	if r.account == nil {
		return
	}
	r.Done(false) // somebody forgot it
	r.account.mu.Lock()
	r.account.reserved -= r.held
	r.account.mu.Unlock()
	r.s.unuse(r.account)
	r.account = nil
}
