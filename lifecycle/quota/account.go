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
	liveFor   = 5 * time.Second // how long a figure is valid while a sandbox may write
	idleFor   = time.Hour       // how long an unused account is kept
	sweepWait = time.Minute     // between two searches for unused accounts
	adoptWait = time.Minute     // between two tries to adopt a chat
)

// account caches the measurements of a workspace. Unless keep is set, it can be dropped and made
// again.
type account struct {
	tenant  string
	limited atomic.Bool // the kernel has the limit
	keep    atomic.Bool // never forget the account: it has had a chat that the kernel doesn't count

	// Guarded by Service.mu.
	users int // operations and reservations that use it
	used  time.Time

	// written is how many bytes the kernel counts that aren't in use: staged, or about to be
	// replaced. Guarded by Service.counting.
	written int64

	walking keylock.Map[string] // by chat: held while it is measured, or a commit changes it

	mu       sync.Mutex // never held for long
	reserved int64      // bytes of reservations that aren't committed yet
	credited int64      // bytes of the kernel's count that reservations will replace
	chats    map[string]*figure
	unheld   map[string]time.Time // chats that aren't in the project, by the last try to adopt them
}

// figure is the size of a chat's directory.
type figure struct {
	made      time.Time
	bytes     int64
	credited  int64     // bytes that reservations will replace
	known     bool      // it has been measured
	unbounded bool      // it is too large to be measured
	live      bool      // it has had a sandbox at its last measurement, or since
	began, at time.Time // begin and end of the last measurement
	changes   int       // counts changes of unknown size
	seen      int       // changes when the last measurement began
}

// use returns a workspace's account, and keeps it until unuse.
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

// figureLocked returns a chat's figure. It makes one that isn't known yet if there is none.
func (a *account) figureLocked(chatID string) *figure {
	f := a.chats[chatID]
	if f == nil {
		f = &figure{made: time.Now()}
		a.chats[chatID] = f
	}
	return f
}

// sandboxed records that a chat has a live sandbox. Changed says that the directory may have
// changed.
func (a *account) sandboxed(chatID string, changed bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	f := a.figureLocked(chatID)
	f.live = true
	if changed {
		f.changes++
	}
}

// touch makes a chat be measured before it is counted again, as a sandbox was attached or
// detached. A chat without a figure is measured anyway.
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

// holdsLocked reports whether the figure is still valid. Live says that the chat has a
// sandbox.
func (f *figure) holdsLocked(live bool) bool {
	switch {
	case !f.known || f.changes != f.seen:
		return false
	case live:
		return time.Since(f.at) <= liveFor
	}
	return !f.live
}

// unheld tries to adopt the chats that the kernel doesn't count, at most every adoptWait. It
// returns those that are left.
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

// adoptAgain tries to adopt a chat's directory again, if the chat still is the workspace's. A
// directory that still can't be adopted is no error.
func (s *Service) adoptAgain(ctx context.Context, a *account, w Workspace, chatID string) error {
	root, err := s.open(w.Tenant, chatID) // first, so that it isn't the directory of a later chat of that ID
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
	_ = s.Adopt(w, chatID, root) // which records the result in the account
	return nil
}

// hold records that the kernel counts a chat, or that the chat isn't the workspace's any more.
func (a *account) hold(chatID string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.unheld, chatID)
}

// Forget drops the figure of a chat that was deleted with its files.
func (s *Service) Forget(w Workspace, chatID string) {
	s.known(w, func(a *account) {
		delete(a.chats, chatID)
		delete(a.unheld, chatID)
	})
}

// Freed records that files of a chat were removed. The chat is measured when its size is next
// needed: removing a file frees nothing while it has other links.
func (s *Service) Freed(w Workspace, chatID string) {
	s.known(w, func(a *account) {
		if f := a.chats[chatID]; f != nil {
			f.changes++
		}
	})
}

// known calls f with the workspace's account, if there is one, and holds its mu.
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

// total is the size of a workspace.
type total struct {
	used int64  // bytes; over the quota if a chat can't be measured
	chat string // a chat that can't be measured; or empty
}

// total measures the chats of a workspace that may have changed, and returns the sum of all. The
// chat chatID counts even if the store doesn't have it.
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

// keysOf returns the ID of the account for a tenant's keys without chats, which share one quota.
// It can't be a workspace's ID, since that is a UUID.
func keysOf(tenant string) string { return "keys of " + tenant }

// keysTotal adds up the directories of a tenant's keys that are no chats. It measures those
// that may have changed. It skips known directories of other live sandboxes, whose own
// commands measure them.
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

// countedLocked returns the bytes in use by the kernel's count: neither staged nor about to be
// replaced. The caller holds Service.counting of the workspace.
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

// fresh measures what may have changed in a workspace. It returns the chats that count by
// their figures: all of them, or with a hard quota, those that the kernel doesn't count.
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

// sumLocked adds up the figures of the chats in ids. With a soft quota, it also adds chats
// that got a figure since listed.
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

// refresh measures a chat, unless its figure is valid. A chat is measured once at a time, for
// all callers that came before the measurement began.
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
	// Without a quota, a figure is needed too rarely to track changes.
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

// measureChat measures a chat's directory, which has 0 bytes if it is missing. Errors are
// hostdir.ErrUnbounded, the context's, or a *lifecycle.UnavailableError.
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

// add returns a+b, or the largest int64 if that overflows. Neither may be negative.
func add(a, b int64) int64 {
	if b > math.MaxInt64-a {
		return math.MaxInt64
	}
	return a + b
}
