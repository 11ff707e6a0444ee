package quota

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/lifecycle/hostdir"
	"github.com/bermhq/berm/runtime/keylock"
)

const (
	liveFor   = 5 * time.Second // for which a figure holds while a sandbox may write
	idleFor   = time.Hour       // after which an account that nobody uses is forgotten
	sweepWait = time.Minute     // between two looks for such accounts
	adoptWait = time.Minute     // between two tries to adopt a chat
)

// account is what is known of a workspace. Forgetting it loses nothing but time, unless it
// has been kept for good.
type account struct {
	tenant  string
	limited atomic.Bool // the kernel has been told the quota
	keep    atomic.Bool // never forget it: it has had a chat that the kernel doesn't count

	// Of Service.mu.
	users int // operations and reservations that have it
	used  time.Time

	written int64 // of what the kernel counts, but isn't used: staged, or about to go; of Service.counting

	walking keylock.Map[string] // by chat: held while it is measured, or a commit changes it

	mu       sync.Mutex // never held for long
	reserved int64      // by reservations, not committed yet
	credited int64      // of what the kernel counts, to reservations that replace it
	chats    map[string]*figure
	unheld   map[string]time.Time // chats that aren't in the project, by when that was tried last
}

// figure is what a chat's directory holds.
type figure struct {
	made      time.Time
	bytes     int64
	credited  int64     // of them, to reservations that replace them
	known     bool      // it has been measured
	unbounded bool      // it has too much in it for that
	live      bool      // it had a sandbox when it was measured, or since
	began, at time.Time // of that
	changes   int       // in it, of which nobody knows by how much
	seen      int       // of them, before it was measured
}

// use returns a workspace's account, which is kept until unuse.
func (s *Service) use(w Workspace) *account {
	s.mu.Lock()
	defer s.mu.Unlock()
	a := s.accounts[w.ID]
	if a == nil {
		if now := time.Now(); now.Sub(s.swept) > sweepWait {
			s.swept = now
			maps.DeleteFunc(s.accounts, func(_ string, a *account) bool { return a.users == 0 && !a.keep.Load() && now.Sub(a.used) > idleFor })
		}
		a = &account{tenant: w.Tenant, chats: map[string]*figure{}, unheld: map[string]time.Time{}}
		s.accounts[w.ID] = a
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

// figureLocked returns a chat's figure, or one that isn't known yet.
func (a *account) figureLocked(chatID string) *figure {
	f := a.chats[chatID]
	if f == nil {
		f = &figure{made: time.Now()}
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
	if changed {
		f.changes++
	}
}

// touch has a chat measured before it next counts, as its sandbox comes or goes. What isn't
// known yet of a chat is measured anyway.
func (s *Service) touch(tenant, chatID string) {
	var accounts []*account
	s.mu.Lock()
	for _, a := range s.accounts {
		if a.tenant == tenant {
			accounts = append(accounts, a)
		}
	}
	s.mu.Unlock()
	for _, a := range accounts {
		a.mu.Lock()
		if f := a.chats[chatID]; f != nil {
			f.live = true
			f.changes++
		}
		a.mu.Unlock()
	}
}

// holdsLocked reports whether the figure is still right.
func (f *figure) holdsLocked(live bool) bool {
	switch {
	case !f.known || f.changes != f.seen:
		return false
	case live:
		return time.Since(f.at) <= liveFor
	}
	return !f.live
}

// unheld returns the chats that the kernel doesn't count, after another try to have it do so.
func (s *Service) unheld(ctx context.Context, a *account, w Workspace) ([]string, error) {
	a.mu.Lock()
	var again []string
	for id, tried := range a.unheld {
		if time.Since(tried) > adoptWait {
			again = append(again, id)
			a.unheld[id] = time.Now()
		}
	}
	a.mu.Unlock()
	for _, id := range again {
		if err := s.adoptAgain(ctx, a, w, id); err != nil {
			return nil, err
		}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.Sorted(maps.Keys(a.unheld)), nil
}

// adoptAgain adopts a chat's directory that couldn't be before; unless it is the workspace's
// no more. That it still can't be is no error.
func (s *Service) adoptAgain(ctx context.Context, a *account, w Workspace, chatID string) error {
	root, err := s.open(w.Tenant, chatID) // first: should the chat go meanwhile, another's isn't touched
	ids, lerr := s.opts.Store.ChatIDs(ctx, w.Tenant, w.ID)
	if lerr == nil && !slices.Contains(ids, chatID) {
		a.hold(chatID)
	}
	if err != nil {
		return lerr
	}
	defer root.Close()
	if lerr != nil || !slices.Contains(ids, chatID) {
		return lerr
	}
	_ = s.Adopt(w, chatID, root) // which remembers how it went
	return nil
}

// hold notes that the kernel counts a chat, or that it is no chat of the workspace.
func (a *account) hold(chatID string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.unheld, chatID)
}

// Forget drops what is known of a chat that has been deleted, with all that it held.
func (s *Service) Forget(w Workspace, chatID string) {
	s.known(w, func(a *account) {
		delete(a.chats, chatID)
		delete(a.unheld, chatID)
	})
}

// Freed notes that files of a chat were removed. How much room that gave is measured when it
// is next asked for: a file with other links gave none, and the last of its links all.
func (s *Service) Freed(w Workspace, chatID string) {
	s.known(w, func(a *account) {
		if f := a.chats[chatID]; f != nil {
			f.changes++
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
	began := time.Now()
	chats, err := s.fresh(ctx, a, w, chatID)
	if err != nil {
		return total{}, err
	}
	unlock, err := s.counting.Lock(ctx, w.ID)
	if err != nil {
		return total{}, err
	}
	defer unlock()
	counted, err := s.countedLocked(a, w)
	if err != nil {
		return total{}, err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	t := s.sumLocked(a, chats, began)
	t.used = add(t.used, counted)
	return t, nil
}

// keysOf is the ID of the account of a tenant's keys without chats, which share one quota.
// Workspaces have UUIDs.
func keysOf(tenant string) string { return "keys of " + tenant }

// keysTotal adds up the directories of a tenant's keys that are no chats. It measures those
// that may have changed, but for other sandboxes' that live, which have theirs measured.
func (s *Service) keysTotal(ctx context.Context, a *account, w Workspace, key string) (total, error) {
	began := time.Now()
	keys, err := s.keys(w.Tenant, key)
	chats, cerr := s.opts.Store.ChatIDs(ctx, w.Tenant, "")
	if err = cmp.Or(err, cerr); err != nil {
		return total{}, Unavailable(ctx, err)
	}
	slices.Sort(chats)
	keys = slices.DeleteFunc(keys, func(id string) bool { _, chat := slices.BinarySearch(chats, id); return chat })
	for _, id := range keys {
		live := id != key && s.live(w.Tenant, id)
		a.mu.Lock()
		holds := live && a.figureLocked(id).known
		a.mu.Unlock()
		if !holds {
			if err := s.refresh(ctx, a, w.Tenant, id); err != nil {
				return total{}, err
			}
		}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	return s.sumLocked(a, keys, began), nil
}

// countedLocked is what the kernel counts and is used: neither staged nor about to be
// replaced. The workspace's count must be locked.
func (s *Service) countedLocked(a *account, w Workspace) (int64, error) {
	if s.enforcement() != "hard" {
		return 0, nil
	}
	used, err := s.projects.Used(w.Project)
	if err != nil {
		return 0, &lifecycle.UnavailableError{Err: fmt.Errorf("workspace %s: %w", w.ID, err)}
	}
	return max(used-a.written, 0), nil
}

// fresh brings what is known of a workspace up to date, and returns the chats that count by
// what was measured: all, or those that the kernel doesn't count.
func (s *Service) fresh(ctx context.Context, a *account, w Workspace, chatID string) (ids []string, err error) {
	if s.enforcement() == "hard" {
		if err := s.limit(a, w); err != nil {
			return nil, err
		}
		ids, err = s.unheld(ctx, a, w)
	} else {
		ids, err = s.opts.Store.ChatIDs(ctx, w.Tenant, w.ID)
		if err == nil && chatID != "" && !slices.Contains(ids, chatID) {
			ids = append(ids, chatID)
		}
	}
	if err != nil {
		return nil, Unavailable(ctx, err)
	}
	for _, id := range ids {
		if err := s.refresh(ctx, a, w.Tenant, id); err != nil {
			return nil, err
		}
	}
	return ids, nil
}

// sumLocked adds up what is known of some chats, and of those that it is known of only
// since they were listed.
func (s *Service) sumLocked(a *account, ids []string, listed time.Time) total {
	var t total
	one := func(id string, f *figure) {
		t.used = add(t.used, f.bytes)
		if f.unbounded && t.chat == "" {
			t.chat = id
		}
	}
	for _, id := range ids {
		if f := a.chats[id]; f != nil {
			one(id, f)
		}
	}
	for id, f := range a.chats {
		if s.enforcement() != "hard" && !f.made.Before(listed) && !slices.Contains(ids, id) {
			one(id, f)
		}
	}
	if t.chat != "" {
		t.used = max(t.used, add(s.opts.QuotaBytes, 1))
	}
	return t
}

// refresh measures a chat, unless what is known of it holds. One measurement goes on at a time,
// and does for those who came before it began.
func (s *Service) refresh(ctx context.Context, a *account, tenant, chatID string) error {
	came := time.Now()
	unlock, err := a.walking.Lock(ctx, chatID)
	if err != nil {
		return err
	}
	defer unlock()
	live := s.live(tenant, chatID)
	began := time.Now()
	a.mu.Lock()
	f := a.figureLocked(chatID)
	// Without a quota it is asked for too seldom to keep track.
	if f.began.After(came) || s.opts.QuotaBytes > 0 && f.holdsLocked(live) {
		a.mu.Unlock()
		return nil
	}
	changes := f.changes
	f.live = live
	a.mu.Unlock()

	bytes, err := s.measureChat(ctx, tenant, chatID)
	live = s.live(tenant, chatID)
	a.mu.Lock()
	defer a.mu.Unlock()
	unbounded := errors.Is(err, hostdir.ErrUnbounded)
	if err != nil && !unbounded {
		f.live = true // so that it is measured when it is next asked for
		return err
	}
	f.bytes, f.known, f.unbounded = bytes, true, unbounded
	f.seen, f.live, f.began, f.at = changes, f.live || live, began, time.Now()
	return nil
}

// measureChat measures a chat's directory; one that isn't there holds nothing. Errors:
// hostdir.ErrUnbounded, the context's, *lifecycle.UnavailableError.
func (s *Service) measureChat(ctx context.Context, tenant, chatID string) (int64, error) {
	root, err := s.open(tenant, chatID)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	var bytes int64
	if err == nil {
		bytes, err = s.measure(ctx, root)
		_ = root.Close() // nothing was written
	}
	if err == nil || errors.Is(err, hostdir.ErrUnbounded) {
		return bytes, err
	}
	return 0, Unavailable(ctx, fmt.Errorf("measure chat %q: %w", chatID, err))
}

// add is a+b, or the most there is, of what isn't negative.
func add(a, b int64) int64 {
	if b > math.MaxInt64-a {
		return math.MaxInt64
	}
	return a + b
}
