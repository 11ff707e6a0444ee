package workspace

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/lifecycle/usage"
)

const (
	liveFor   = 5 * time.Second // for which a figure holds while a sandbox may write
	maxWalks  = 3               // of one directory that uploads change meanwhile
	idleFor   = time.Hour       // after which an account that nobody uses is forgotten
	sweepWait = time.Minute     // between two looks for such accounts
)

// account is what is known of a workspace. Forgetting it loses nothing but time.
type account struct {
	limited atomic.Bool // the kernel has been told the quota

	// Of Service.mu.
	users int // operations and reservations that have it
	used  time.Time

	mu       sync.Mutex // never held for long
	reserved int64      // by reservations, not committed yet
	chats    map[string]*figure
}

// figure is what a chat's directory holds.
type figure struct {
	bytes     int64
	known     bool // it has been measured
	unbounded bool // it has too much in it for that
	stale     bool // something in it changed, nobody knows by how much
	live      bool // it had a sandbox when it was measured, or since
	at        time.Time
	changing  int   // committed changes that aren't done
	pending   int64 // bytes that they add
	walk      *walk // that is under way
}

// walk is one measurement under way.
type walk struct {
	done    chan struct{}
	kept    bool  // what it found; to be read once it is done
	overlap bool  // with a change by the API, of which it may have seen nothing, some, or all
	added   int64 // bytes by such changes
	again   bool  // something may have changed where it had been
	live    bool  // a sandbox has made itself known
}

// use answers an account, which is kept until unuse.
func (s *Service) use(id string) *account {
	s.mu.Lock()
	defer s.mu.Unlock()
	a := s.accounts[id]
	if a == nil {
		if now := time.Now(); now.Sub(s.swept) > sweepWait {
			s.swept = now
			maps.DeleteFunc(s.accounts, func(_ string, a *account) bool { return a.users == 0 && now.Sub(a.used) > idleFor })
		}
		a = &account{chats: map[string]*figure{}}
		s.accounts[id] = a
	}
	a.users++
	return a
}

func (s *Service) unuse(a *account) {
	s.mu.Lock()
	defer s.mu.Unlock()
	a.users--
	a.used = time.Now()
}

// figureLocked answers a chat's figure, or one that isn't known yet.
func (a *account) figureLocked(chatID string) *figure {
	f := a.chats[chatID]
	if f == nil {
		f = &figure{}
		a.chats[chatID] = f
	}
	return f
}

// sandboxed notes that a chat has a live sandbox, which may have changed its directory.
func (a *account) sandboxed(chatID string, changed bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	f := a.figureLocked(chatID)
	f.live = true
	if f.walk != nil {
		f.walk.live = true
	}
	if changed {
		f.touchLocked()
	}
}

// touchLocked has a chat measured anew.
func (f *figure) touchLocked() {
	f.stale = true
	if f.walk != nil {
		f.walk.again = true
	}
}

// overlapLocked has the walk under way know that n bytes may have been added meanwhile.
func (f *figure) overlapLocked(n int64) {
	if f.walk != nil {
		f.walk.overlap = true
		f.walk.added = add(f.walk.added, n)
	}
}

// holdsLocked tells whether the figure is still right.
func (f *figure) holdsLocked(live bool) bool {
	switch {
	case !f.known || f.stale:
		return false
	case live:
		return time.Since(f.at) <= liveFor
	}
	return !f.live
}

// Forget drops what is known of a chat that has been deleted, with all that it held.
func (s *Service) Forget(w Workspace, chatID string) {
	s.known(w, func(a *account) { delete(a.chats, chatID) })
}

// Freed notes that n bytes of a chat were removed. How much room that gave is measured
// when it is next asked for: what had other links gave none.
func (s *Service) Freed(w Workspace, chatID string, n int64) {
	if n == 0 {
		return
	}
	s.known(w, func(a *account) {
		if f := a.chats[chatID]; f != nil {
			f.touchLocked()
		}
	})
}

// known calls f with the workspace's account, locked, if there is one.
func (s *Service) known(w Workspace, f func(*account)) {
	s.mu.Lock()
	a := s.accounts[w.ID]
	s.mu.Unlock()
	if a != nil {
		a.mu.Lock()
		defer a.mu.Unlock()
		f(a)
	}
}

// total is what a workspace holds.
type total struct {
	used int64  // bytes; over the quota, if a chat can't be measured
	chat string // the one that can't be measured
}

// total brings what is known of a workspace up to date, and adds it up. The chat counts
// whether or not the store has it.
func (s *Service) total(ctx context.Context, a *account, w Workspace, chatID string) (total, error) {
	if s.enforcement() != "hard" {
		_, t, err := s.soft(ctx, a, w, chatID)
		return t, err
	}
	if err := s.limit(a, w); err != nil {
		return total{}, err
	}
	used, err := s.opts.Projects.Used(w.Project)
	if err != nil {
		return total{}, &lifecycle.UnavailableError{Err: fmt.Errorf("workspace %s: %w", w.ID, err)}
	}
	return total{used: used}, nil
}

// soft is total where the kernel doesn't count, with the chats that were added up.
func (s *Service) soft(ctx context.Context, a *account, w Workspace, chatID string) ([]string, total, error) {
	ids, err := s.opts.Store.ChatIDs(ctx, w.Tenant, w.ID)
	if err != nil {
		return nil, total{}, unavailable(ctx, err)
	}
	if chatID != "" && !slices.Contains(ids, chatID) {
		ids = append(ids, chatID)
	}
	for _, id := range ids {
		if err := s.refresh(ctx, a, w.Tenant, id); err != nil {
			return nil, total{}, err
		}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	return ids, a.sumLocked(ids, s.opts.QuotaBytes), nil
}

// sumLocked adds up what is known of some chats.
func (a *account) sumLocked(ids []string, quota int64) total {
	var t total
	for _, id := range ids {
		f := a.figureLocked(id)
		t.used = add(t.used, f.bytes)
		if f.unbounded && t.chat == "" {
			t.chat = id
		}
	}
	if t.chat != "" {
		t.used = max(t.used, add(quota, 1))
	}
	return t
}

// refresh measures a chat, unless what is known of it holds. Those who come while it is
// being measured wait for that, and only go on with a measurement that began after they
// came.
func (s *Service) refresh(ctx context.Context, a *account, tenant, chatID string) error {
	waited := false
	for walked := 1; ; {
		live := s.opts.Live(tenant, chatID)
		a.mu.Lock()
		f := a.figureLocked(chatID)
		if s.opts.QuotaBytes > 0 && f.holdsLocked(live) { // without one it is asked for too seldom to keep track
			a.mu.Unlock()
			return nil
		}
		if w := f.walk; w != nil {
			a.mu.Unlock()
			select {
			case <-w.done:
				if waited && w.kept {
					return nil
				}
				waited = true
				continue
			case <-ctx.Done():
				return context.Cause(ctx)
			}
		}
		w := &walk{done: make(chan struct{}), overlap: f.changing > 0, added: f.pending}
		f.walk = w
		a.mu.Unlock()

		bytes, err := s.measureChat(ctx, tenant, chatID)
		live = live || s.opts.Live(tenant, chatID)
		a.mu.Lock()
		unbounded := errors.Is(err, usage.ErrUnbounded)
		// One that overlapped would be too much by what it may have counted twice.
		w.kept = unbounded || err == nil && (!w.overlap || walked == maxWalks)
		if w.kept {
			f.bytes, f.known, f.unbounded = add(bytes, w.added), true, unbounded
			f.stale, f.live, f.at = w.again || w.overlap, live || w.live, time.Now()
		}
		f.walk = nil
		a.mu.Unlock()
		close(w.done)
		switch {
		case w.kept:
			return nil
		case err != nil:
			return err
		}
		walked++
	}
}

// measureChat measures a chat's directory; one that isn't there holds nothing. Errors:
// usage.ErrUnbounded, the context's, *lifecycle.UnavailableError.
func (s *Service) measureChat(ctx context.Context, tenant, chatID string) (int64, error) {
	root, err := s.opts.Open(tenant, chatID)
	if errdefs.IsNotFound(err) {
		return 0, nil
	}
	var bytes int64
	if err == nil {
		bytes, err = s.measure(ctx, root)
		_ = root.Close() // nothing was written
	}
	if err == nil || errors.Is(err, usage.ErrUnbounded) {
		return bytes, err
	}
	return 0, unavailable(ctx, fmt.Errorf("measure chat %q: %w", chatID, err))
}

// add is a+b, or the most there is, of what isn't negative.
func add(a, b int64) int64 {
	if b > math.MaxInt64-a {
		return math.MaxInt64
	}
	return a + b
}
