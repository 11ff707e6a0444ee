package quota

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/lifecycle/hostdir"
	"github.com/bermhq/berm/runtime/runtimetest/check"
)

// world is a store, sandboxes and directories, all in memory; the directories hold nothing
// but a number of bytes.
type world struct {
	Store
	mu      sync.Mutex
	spaces  map[string]Workspace // by tenant and user
	chats   map[string]string    // workspaces, by chat
	live    map[string]bool
	bytes   map[string]int64
	failing error // of the store
	broken  error // of measurements
	walks   int
	during  func(chatID string) // is called while a chat is measured
}

func newWorld() *world {
	return &world{spaces: map[string]Workspace{}, chats: map[string]string{}, live: map[string]bool{}, bytes: map[string]int64{}}
}

// workspace makes the workspace of a user.
func (w *world) workspace(user string) Workspace {
	w.mu.Lock()
	defer w.mu.Unlock()
	ws := Workspace{ID: "of " + user, Tenant: "t", UserID: user, Project: uint32(len(w.spaces) + 1)}
	w.spaces[user] = ws
	return ws
}

func (w *world) find(tenant, id string) (Workspace, error) {
	if w.failing != nil {
		return Workspace{}, w.failing
	}
	for _, ws := range w.spaces {
		if ws.Tenant == tenant && ws.ID == id {
			return ws, nil
		}
	}
	return Workspace{}, fmt.Errorf("nothing: %w", errdefs.ErrNotFound)
}

func (w *world) WorkspaceOf(_ context.Context, tenant, chatID string) (Workspace, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.find(tenant, w.chats[chatID])
}

func (w *world) Workspace(_ context.Context, tenant, id string) (Workspace, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.find(tenant, id)
}

func (w *world) EnsureWorkspace(_ context.Context, made Workspace) (Workspace, bool, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if got, there := w.spaces[made.UserID]; there || w.failing != nil {
		return got, false, w.failing
	}
	w.spaces[made.UserID] = made
	return made, true, nil
}

func (w *world) ChatIDs(_ context.Context, _, id string) (ids []string, _ error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for chat, of := range w.chats {
		if of == id || id == "" {
			ids = append(ids, chat)
		}
	}
	return ids, w.failing
}

// set changes the world.
func (w *world) set(f func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	f()
}

// holds fills a chat's directory with some bytes, without a word to the service.
func (w *world) holds(chatID string, bytes int64) { w.set(func() { w.bytes[chatID] = bytes }) }

func (w *world) isLive(chatID string, live bool) { w.set(func() { w.live[chatID] = live }) }

func (w *world) walked() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.walks
}

func (w *world) wantWalks(t *testing.T, n int) {
	t.Helper()
	if got := w.walked(); got != n {
		t.Errorf("measured %d times, want %d", got, n)
	}
}

func (w *world) Projects(context.Context) ([]Project, error) { return nil, nil }

// setup is what a service of a world is like.
type setup struct {
	QuotaBytes int64
	Projects   *kernel
	Keys       func(tenant, key string) ([]string, error)
	Follow     func(dir, like *os.File) error
}

// of is the sandbox of a key.
func of(tenant, key string) lifecycle.Subject {
	return lifecycle.Subject{Tenant: tenant, Key: key, SessionID: tenant + "/" + key}
}

func inode(t *testing.T, dir *os.Root) (id string) {
	t.Helper()
	err := hostdir.With(dir, func(f *os.File) (err error) {
		id, err = hostdir.Inode(f)
		return err
	})
	must(t, err)
	return id
}

// service is of the world, with a quota, and one workspace with the chats.
func (w *world) service(t *testing.T, opts setup, chats ...string) (*Service, Workspace) {
	t.Helper()
	dir := t.TempDir()
	s, err := New(t.Context(), Options{Store: w, Root: dir, QuotaBytes: opts.QuotaBytes, Off: true})
	must(t, err)
	if opts.Projects != nil {
		s.projects = opts.Projects
	}
	if opts.Follow != nil {
		s.follow = opts.Follow
	}
	s.keys = opts.Keys
	if s.keys == nil {
		s.keys = func(string, string) ([]string, error) { return nil, nil }
	}
	s.live = func(_, chatID string) bool {
		w.mu.Lock()
		defer w.mu.Unlock()
		return w.live[chatID]
	}
	s.open = func(_, chatID string) (*os.Root, error) {
		w.mu.Lock()
		_, there := w.bytes[chatID]
		w.mu.Unlock()
		if !there {
			return nil, fs.ErrNotExist
		}
		path := filepath.Join(dir, chatID)
		if err := os.Mkdir(path, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
			return nil, err
		}
		return os.OpenRoot(path)
	}
	s.measure = func(ctx context.Context, root *os.Root) (int64, error) {
		chat := filepath.Base(root.Name())
		w.mu.Lock()
		w.walks++
		bytes, broken, during := w.bytes[chat], w.broken, w.during
		w.mu.Unlock()
		if during != nil {
			during(chat)
		}
		if ctx.Err() != nil {
			return 0, context.Cause(ctx)
		}
		return bytes, broken
	}
	ws := w.workspace("u")
	for _, chat := range chats {
		w.chats[chat] = ws.ID
	}
	return s, ws
}

// newService is a service of a world of its own.
func newService(t *testing.T, opts setup, chats ...string) (*world, *Service, Workspace) {
	t.Helper()
	w := newWorld()
	s, ws := w.service(t, opts, chats...)
	return w, s, ws
}

func used(t *testing.T, s *Service, w Workspace, want int64) {
	t.Helper()
	if u, err := s.Usage(context.Background(), w.Tenant, w.ID); err != nil || u.UsedBytes != want {
		t.Errorf("%d bytes are used, want %d, %v", u.UsedBytes, want, err)
	}
}

// over tells whether an error is of a quota, and fails the test when it is of anything else.
func over(t *testing.T, err error) bool {
	t.Helper()
	var soft *FullError
	var left *lifecycle.QuotaError
	switch {
	case err == nil:
		return false
	case errors.As(err, &soft), errors.As(err, &left):
		return true
	}
	t.Errorf("%v", err)
	return true
}

func wantOver(t *testing.T, what string, err error) {
	t.Helper()
	if !over(t, err) {
		t.Errorf("%s: there was room", what)
	}
}

func second[T any](_ T, err error) error { return err }

func isUnavailable(err error) bool {
	var e *lifecycle.UnavailableError
	return errors.As(err, &e)
}

// TestReal measures real directories, as nothing else here does.
func TestReal(t *testing.T) {
	t.Parallel()
	w, s, ws := newService(t, setup{QuotaBytes: 100}, "k", "none")
	s.measure = hostdir.Allocated
	w.holds("k", 0)
	root, err := s.open("t", "k")
	must(t, err)
	defer root.Close()
	must(t, root.WriteFile("f", make([]byte, 70), 0o600))
	used(t, s, ws, 70)
}

func TestArithmetic(t *testing.T) {
	t.Parallel()
	type step struct {
		chat        string
		n, replaced int64
		refused     bool
	}
	for name, tt := range map[string]struct {
		holds int64 // in chat k
		steps []step
		used  int64 // in the end
	}{
		"to the byte":              {0, []step{{"k", 60, 0, false}, {"l", 40, 0, false}, {"l", 1, 0, true}}, 100},
		"one too many":             {0, []step{{"k", 101, 0, true}}, 0},
		"nothing into a full one":  {100, []step{{"k", 0, 0, false}}, 100},
		"replaced":                 {100, []step{{"k", 40, 40, false}, {"k", 41, 40, true}}, 100},
		"replaced by less":         {100, []step{{"k", 30, 40, false}, {"k", 10, 0, false}, {"k", 1, 0, true}}, 100},
		"over, and less of it":     {150, []step{{"k", 30, 40, false}, {"k", 1, 0, true}, {"l", 1, 0, true}}, 140},
		"more than it can replace": {50, []step{{"k", 101, 1000, true}, {"k", 100, 1000, false}}, 100},
		"nothing there to replace": {0, []step{{"l", 101, 1000, true}, {"l", 100, 1000, false}}, 100},
		"huge":                     {50, []step{{"k", math.MaxInt64, 0, true}, {"k", math.MaxInt64, math.MaxInt64, true}, {"k", 50, 0, false}}, 100},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w, s, ws := newService(t, setup{QuotaBytes: 100}, "k", "l")
			w.holds("k", tt.holds)
			for i, st := range tt.steps {
				r, err := s.Reserve(t.Context(), ws, st.chat, st.n, st.replaced)
				if over(t, err) != st.refused {
					t.Fatalf("step %d: %v", i, err)
				}
				if st.refused {
					continue
				}
				if err := r.Commit(t.Context(), st.n, st.replaced); err != nil {
					t.Fatalf("step %d: %v", i, err)
				}
				r.Done(true)
				r.Release()
				r.Release()
			}
			used(t, s, ws, tt.used)
			if n := s.accounts[ws.ID].reserved; n != 0 {
				t.Errorf("%d bytes are still reserved", n)
			}
			if walks := w.walked(); walks > 1 { // l has no directory
				t.Errorf("measured %d times", walks)
			}
		})
	}
}

func TestReservations(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	_, s, ws := newService(t, setup{QuotaBytes: 100}, "k", "l")
	one := reserve(t, s, ws, 60, 0, false)
	wantOver(t, "a second one went beyond the quota", second(s.Reserve(ctx, ws, "l", 41, 0)))
	used(t, s, ws, 0) // what is reserved isn't used
	wantOver(t, "it grew beyond the quota", one.Grow(ctx, 101))
	for _, n := range []int64{10, 100} {
		if err := one.Grow(ctx, n); err != nil {
			t.Errorf("grow to %d: %v", n, err)
		}
	}
	wantOver(t, "a second one went beyond the quota", second(s.Reserve(ctx, ws, "l", 1, 0)))
	one.Release()
	one.Done(true)
	two, err := s.Reserve(ctx, ws, "l", 100, 0)
	if err != nil {
		t.Fatalf("what was released isn't there: %v", err)
	}
	if err := two.Commit(ctx, 30, 0); err != nil { // less came than was reserved
		t.Fatal(err)
	}
	two.Done(true)
	two.Release()
	used(t, s, ws, 30)
	three, err := s.Reserve(ctx, ws, "l", 10, 0)
	must(t, err)
	if err := three.Commit(ctx, 71, 0); !over(t, err) { // more came than there is room for
		t.Error("committed beyond the quota")
	}
	three.Done(true)
	three.Release()
	used(t, s, ws, 30)
	if n := s.accounts[ws.ID]; n.reserved != 0 || n.users != 0 {
		t.Errorf("left: %d bytes, %d users", n.reserved, n.users)
	}
}

func TestTogether(t *testing.T) {
	t.Parallel()
	w, s, ws := newService(t, setup{QuotaBytes: 100}, "k", "l", "m")
	var (
		wg     sync.WaitGroup
		mu     sync.Mutex
		passed int64
	)
	for i := range 60 {
		wg.Go(func() {
			chat := string("klm"[i%3])
			r, err := s.Reserve(t.Context(), ws, chat, 0, 0)
			if err != nil {
				t.Error(err)
				return
			}
			defer r.Release()
			for n := range int64(7) {
				if over(t, r.Grow(t.Context(), n+1)) {
					return
				}
			}
			if i%4 == 0 || over(t, r.Commit(t.Context(), 7, 0)) { // some give up
				return
			}
			mu.Lock()
			passed += 7
			mu.Unlock()
			w.set(func() { w.bytes[chat] += 7 })
			r.Done(i%5 != 0)
		})
	}
	wg.Wait()
	if passed > 100 || passed == 0 {
		t.Errorf("%d bytes passed", passed)
	}
	used(t, s, ws, passed)
	a := s.accounts[ws.ID]
	if a.reserved != 0 || a.users != 0 {
		t.Errorf("left: %d bytes, %d users", a.reserved, a.users)
	}
	for chat := range a.chats {
		if _, free := a.walking.TryLock(chat); !free {
			t.Errorf("chat %s is still being measured", chat)
		}
	}
}

func TestFresh(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w, s, ws := newService(t, setup{QuotaBytes: 100}, "k", "l")
		w.holds("k", 1)
		w.holds("l", 1)
		used(t, s, ws, 2)
		w.holds("k", 10)
		time.Sleep(24 * time.Hour)
		used(t, s, ws, 2) // nobody can have written to it
		w.isLive("k", true)
		used(t, s, ws, 2+9) // now somebody could
		w.holds("k", 20)
		time.Sleep(5 * time.Second)
		used(t, s, ws, 11)
		time.Sleep(time.Millisecond)
		used(t, s, ws, 21)
		w.holds("k", 30)
		w.isLive("k", false)
		used(t, s, ws, 31) // whatever it did at last
		w.holds("k", 40)
		time.Sleep(24 * time.Hour)
		used(t, s, ws, 31)
		w.wantWalks(t, 5)
		// A command, of a sandbox that is gone before anybody asks.
		must(t, s.Left(t.Context(), of("t", "k"), false))
		w.holds("k", 50)
		must(t, s.Left(t.Context(), of("t", "k"), true))
		used(t, s, ws, 51)
		// A sandbox whose call was no command.
		w.isLive("k", true)
		must(t, s.Left(t.Context(), of("t", "k"), false))
		w.isLive("k", false)
		w.holds("k", 60)
		used(t, s, ws, 61)
		w.holds("k", 5)
		s.Freed(ws, "k")
		used(t, s, ws, 6)
		// Something goes where the walk has been.
		s.Freed(ws, "k")
		w.during = func(string) {
			w.set(func() { w.during = nil; w.bytes["k"] = 2 })
			s.Freed(ws, "k")
		}
		used(t, s, ws, 6)
		used(t, s, ws, 3)
		w.set(func() { delete(w.chats, "k") })
		s.Forget(ws, "k")
		used(t, s, ws, 1)
		w.set(func() { w.chats["k"] = ws.ID; delete(w.bytes, "k") })
		used(t, s, ws, 1)
	})
}

func TestLeft(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ctx := t.Context()
		w, s, _ := newService(t, setup{QuotaBytes: 100}, "k", "l")
		w.holds("k", 100)
		w.isLive("k", true)
		for _, key := range []string{"k", "l", "no chat"} {
			if err := s.Left(ctx, of("t", key), false); err != nil {
				t.Errorf("%s of a full workspace: %v", key, err)
			}
		}
		if err := s.Left(ctx, of("other", "k"), true); err != nil {
			t.Errorf("another tenant's key: %v", err)
		}
		w.holds("k", 101)
		if err := s.Left(ctx, of("t", "k"), false); err != nil {
			t.Errorf("measured too often: %v", err)
		}
		err := s.Left(ctx, of("t", "k"), true)
		var q *lifecycle.QuotaError
		if !errors.As(err, &q) || *q != (lifecycle.QuotaError{UsedBytes: 101, QuotaBytes: 100}) {
			t.Errorf("over: %v", err)
		}
		if err := s.Left(ctx, of("t", "l"), false); !over(t, err) {
			t.Errorf("the other chat of the workspace: %v", err)
		}
		for key, want := range map[string]string{"k": "soft", "no chat": "soft"} {
			if got := s.Enforcement(of("t", key)); got != want {
				t.Errorf("enforcement of %s is %q", key, got)
			}
		}
	})
}

// TestKeysWithoutChats holds a tenant's keys that are no chats to one quota together.
func TestKeysWithoutChats(t *testing.T) {
	t.Parallel()
	w := newWorld()
	s, _ := w.service(t, setup{QuotaBytes: 100, Projects: &kernel{used: map[uint32]int64{}, limit: map[uint32]int64{}, adopted: map[string]uint32{}}, Keys: func(string, string) ([]string, error) {
		w.mu.Lock()
		defer w.mu.Unlock()
		return slices.Sorted(maps.Keys(w.bytes)), nil
	}}, "chat")
	left := func(key string, changed, want bool) {
		t.Helper()
		if got := over(t, s.Left(t.Context(), of("t", key), changed)); got != want {
			t.Errorf("%s: over is %v", key, got)
		}
	}
	w.holds("chat", 1000)
	w.holds("a", 60)
	w.isLive("a", true)
	left("a", true, false)
	if e := s.Enforcement(of("t", "a")); e != "soft" {
		t.Errorf("enforcement %q", e)
	}
	w.holds("a", 101)
	s.touch("t", "a")
	left("a", false, true)
	w.holds("a", 60)
	left("a", true, false)
	w.isLive("a", false) // deleted; its directory stays
	s.touch("t", "a")
	left("a", false, false)
	w.isLive("a", true)
	w.holds("a", 30)
	left("a", true, false)
	w.holds("a", 60) // written by a process until the sandbox was deleted
	w.isLive("a", false)
	s.touch("t", "a")
	w.holds("b", 50)
	left("b", true, true)
	w.set(func() { w.chats["a"] = w.spaces["u"].ID })
	s.Changed("t", "a")
	left("b", true, false)
	left("other", true, false)
}

func TestNoQuota(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	w, s, ws := newService(t, setup{}, "k")
	w.holds("k", 100)
	r := reserve(t, s, ws, math.MaxInt64, 0, false)
	if err := errors.Join(r.Grow(ctx, math.MaxInt64), r.Commit(ctx, math.MaxInt64, 0), s.Left(ctx, of("t", "k"), true)); err != nil {
		t.Error(err)
	}
	r.Done(true)
	r.Release()
	w.wantWalks(t, 0)
	used(t, s, ws, 100)
	w.holds("k", 200)
	used(t, s, ws, 200)
	u, err := s.Usage(ctx, ws.Tenant, ws.ID)
	if want := (Usage{WorkspaceID: ws.ID, UsedBytes: 200}); err != nil || u != want || s.Enforcement(of("t", "k")) != "" {
		t.Errorf("%+v, %v", u, err)
	}
	w.broken = hostdir.ErrUnbounded
	if _, err := s.Usage(ctx, ws.Tenant, ws.ID); !over(t, err) || strings.Contains(err.Error(), "quota") {
		t.Errorf("%v", err)
	}
}

// TestWalkOrCommit has a commit wait for a measurement of the chat, and one for a commit: none
// sees a part of a change.
func TestWalkOrCommit(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w, s, ws := newService(t, setup{QuotaBytes: 110}, "k")
		w.holds("k", 10)
		r := reserve(t, s, ws, 100, 0, false)
		defer r.Release()
		s.Freed(ws, "k")
		goOn := make(chan struct{})
		w.during = func(string) { <-goOn }
		go used(t, s, ws, 10)
		synctest.Wait()
		committed := make(chan error, 1)
		go func() { committed <- r.Commit(t.Context(), 100, 0) }()
		synctest.Wait()
		if len(committed) != 0 {
			t.Error("committed while it was measured")
		}
		close(goOn)
		must(t, <-committed)
		w.holds("k", 60)
		left := make(chan error, 1)
		go func() { left <- s.Left(t.Context(), of("t", "k"), true) }()
		synctest.Wait()
		w.wantWalks(t, 2)
		w.holds("k", 110)
		r.Done(true)
		must(t, <-left)
		used(t, s, ws, 110)
		w.wantWalks(t, 3)
	})
}

func TestCommitFindsLess(t *testing.T) {
	t.Parallel()
	w, s, ws := newService(t, setup{QuotaBytes: 100}, "k")
	w.holds("k", 50)
	w.isLive("k", true)
	r := reserve(t, s, ws, 50, 0, false)
	w.holds("k", 51)
	must(t, s.Left(t.Context(), of("t", "k"), true))
	wantOver(t, "committed beyond the quota", r.Commit(t.Context(), 50, 0))
	r.Done(true)
	r.Release()
	used(t, s, ws, 51)
}

func TestGrowsAnew(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w, s, ws := newService(t, setup{QuotaBytes: 100}, "k")
		w.holds("k", 50)
		w.isLive("k", true)
		r := reserve(t, s, ws, 10, 0, false)
		defer r.Release()
		w.holds("k", 80)
		if err := r.Grow(t.Context(), 30); err != nil {
			t.Error(err)
		}
		time.Sleep(liveFor + growFor)
		wantOver(t, "it never looks at what the sandbox writes", r.Grow(t.Context(), 31))
	})
}

func TestNotAsCommitted(t *testing.T) {
	t.Parallel()
	w, s, ws := newService(t, setup{QuotaBytes: 100}, "k")
	for _, forget := range []bool{false, true} {
		r := reserve(t, s, ws, 10, 0, false)
		must(t, r.Commit(t.Context(), 10, 0))
		w.holds("k", 3)
		if !forget {
			r.Done(false)
		}
		r.Release()
		used(t, s, ws, 3)
	}
}

func TestUnmeasurable(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	w, s, ws := newService(t, setup{QuotaBytes: 100}, "k", "l")
	w.holds("k", 1)
	w.broken = hostdir.ErrUnbounded
	for range 2 {
		_, err := s.Reserve(ctx, ws, "l", 1, 0)
		var q *FullError
		if !errors.As(err, &q) || q.Chat != "k" || q.WorkspaceID != ws.ID || q.UsedBytes <= q.QuotaBytes || !strings.Contains(err.Error(), `"k"`) {
			t.Errorf("reserve: %v", err)
		}
	}
	wantOver(t, "left", s.Left(ctx, of("t", "l"), false))
	wantOver(t, "usage", second(s.Usage(ctx, ws.Tenant, ws.ID)))
	if r, err := s.Reserve(ctx, ws, "k", 1, 1); err != nil { // what frees, or adds nothing, goes on
		t.Error(err)
	} else {
		r.Release()
	}
	w.wantWalks(t, 1)
	w.set(func() { w.broken = nil })
	s.Freed(ws, "k")
	used(t, s, ws, 1)
}

func TestOneWalk(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w, s, ws := newService(t, setup{QuotaBytes: 100}, "k")
		w.holds("k", 7)
		goOn := make(chan struct{})
		w.during = func(string) { <-goOn }
		// The first is cancelled in the middle; those who wait for it go on without.
		ctx, cancel := context.WithCancel(t.Context())
		go func() {
			if _, err := s.Usage(ctx, ws.Tenant, ws.ID); !errors.Is(err, context.Canceled) {
				t.Errorf("cancelled: %v", err)
			}
		}()
		synctest.Wait()
		for range 10 {
			go used(t, s, ws, 7)
		}
		waiting, leave := context.WithCancel(t.Context())
		go func() {
			if _, err := s.Reserve(waiting, ws, "k", 1, 0); !errors.Is(err, context.Canceled) {
				t.Errorf("cancelled while it waited: %v", err)
			}
		}()
		synctest.Wait()
		leave()
		synctest.Wait()
		w.wantWalks(t, 1)
		a := s.accounts[ws.ID]
		a.mu.Lock() // no lock is held meanwhile, or this would hang
		if a.reserved != 0 {
			t.Errorf("%d bytes are reserved", a.reserved)
		}
		a.mu.Unlock()
		cancel()
		close(goOn)
		synctest.Wait()
		w.wantWalks(t, 2)
	})
}

// TestWaitsForItsOwn asks after a change while an older measurement is under way, which
// must not be the answer.
func TestWaitsForItsOwn(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w, s, ws := newService(t, setup{QuotaBytes: 100}, "k")
		w.holds("k", 1)
		goOn := make(chan struct{})
		w.during = func(string) { <-goOn }
		go func() { _, _ = s.Usage(t.Context(), ws.Tenant, ws.ID) }()
		synctest.Wait()
		w.holds("k", 101)
		for range 3 {
			go func() {
				wantOver(t, "an old figure was the answer", s.Left(t.Context(), of("t", "k"), true))
			}()
		}
		synctest.Wait()
		close(goOn)
		synctest.Wait()
		if n := w.walked(); n > 3 {
			t.Errorf("measured %d times", n)
		}
	})
}

func TestFailures(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	w, s, ws := newService(t, setup{QuotaBytes: 100}, "k")
	w.holds("k", 1)
	r := reserve(t, s, ws, 1, 0, false)
	calls := map[string]func(context.Context) error{
		"ensure":  func(ctx context.Context) error { _, _, err := s.EnsureWorkspace(ctx, "t", "v"); return err },
		"usage":   func(ctx context.Context) error { _, err := s.Usage(ctx, ws.Tenant, ws.ID); return err },
		"left":    func(ctx context.Context) error { return s.Left(ctx, of("t", "k"), true) },
		"reserve": func(ctx context.Context) error { _, err := s.Reserve(ctx, ws, "k", 1, 0); return err },
		"refresh": r.Refresh,
	}
	w.failing = errors.New("disk full")
	gone, cancel := context.WithCancelCause(ctx)
	cause := errors.New("the caller went away")
	cancel(cause)
	for name, call := range calls {
		if err := call(ctx); !isUnavailable(err) || !errors.Is(err, w.failing) {
			t.Errorf("%s: %v", name, err)
		}
		if err := call(gone); !errors.Is(err, cause) || isUnavailable(err) {
			t.Errorf("%s, cancelled: %v", name, err)
		}
	}
	if got := s.Enforcement(of("t", "k")); got != "" {
		t.Errorf("enforcement %q", got)
	}
	w.failing, w.broken = nil, errors.New("too many open files")
	s.Freed(ws, "k")
	for _, name := range []string{"usage", "left", "reserve", "refresh"} {
		if err := calls[name](ctx); !isUnavailable(err) || !errors.Is(err, w.broken) {
			t.Errorf("%s: %v", name, err)
		}
	}
	w.broken = nil
	r.Done(true)
	r.Release()
	used(t, s, ws, 1)
}

func TestUsers(t *testing.T) {
	t.Parallel()
	_, s, _ := newService(t, setup{})
	for name, id := range map[string]string{
		"empty": "", "long": strings.Repeat("u", 256), "dot": ".", "dots": "..", "slash": "a/b", "backslash": `a\b`, "null": "a\x00",
		"newline": "a\n", "delete": "a\x7f", "c1": "a\u0085", "no UTF-8": "a\xff",
	} {
		_, made, err := s.EnsureWorkspace(t.Context(), "t", id)
		var invalid *lifecycle.InvalidError
		if made || !errors.As(err, &invalid) || invalid.Field != "user_id" {
			t.Errorf("%s: %v", name, err)
		}
	}
	for _, id := range []string{"x", "...", "a b", "ä@例.org", strings.Repeat("u", 255), "'--", "%2f"} {
		one, made, err := s.EnsureWorkspace(t.Context(), "t", id)
		if err != nil || !made || one.UserID != id || one.Tenant != "t" || len(one.ID) != 36 || one.CreatedAt.Location() != time.UTC {
			t.Errorf("%q: %+v, %v, %v", id, one, made, err)
		}
		again, made, err := s.EnsureWorkspace(t.Context(), "t", id)
		if err != nil || made || again != one {
			t.Errorf("%q again: %+v, %v, %v", id, again, made, err)
		}
		got, err := s.Workspace(t.Context(), "t", one.ID)
		if err != nil || got != one {
			t.Errorf("%q: %+v, %v", id, got, err)
		}
		var missing *NotFoundError
		if _, err := s.Workspace(t.Context(), "other", one.ID); !errors.As(err, &missing) || missing.ID != one.ID {
			t.Errorf("another tenant's: %v", err)
		}
	}
}

func TestIdle(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w, s, ws := newService(t, setup{QuotaBytes: 100}, "k")
		kept := reserve(t, s, ws, 60, 0, false)
		var last Workspace
		for i := range 10 {
			last = w.workspace(fmt.Sprint(i))
			used(t, s, last, 0)
		}
		time.Sleep(2 * idleFor)
		s.Forget(last, "k")
		last = w.workspace("last")
		used(t, s, last, 0)
		if n := len(s.accounts); n != 2 { // the last, and the one that has a reservation
			t.Errorf("%d accounts are kept", n)
		}
		reserve(t, s, ws, 41, 0, true)
		kept.Release()
	})
}

// kernel has project quotas.
type kernel struct {
	Projects
	limit, used map[uint32]int64
	adopted     map[string]uint32
	failing     error
	refusing    error // to adopt
	tries       int   // to adopt
	staged      int64 // bytes in what is adopted next
}

func (k *kernel) Limit(project uint32, bytes int64) error {
	k.limit[project] = bytes
	return k.failing
}

func (k *kernel) Used(project uint32) (int64, error) { return k.used[project], k.failing }

func (k *kernel) Adopt(dir *os.File, project uint32) error {
	id, err := hostdir.Inode(dir)
	if err != nil {
		return err
	}
	k.adopted[id] = project
	k.tries++
	k.used[project] += k.staged
	k.staged = 0
	return errors.Join(k.failing, k.refusing)
}

// stage has a reservation's n bytes be staged, which the kernel counts from then on.
func (k *kernel) stage(t *testing.T, r *Reservation, n int64) {
	t.Helper()
	dir, err := os.OpenRoot(t.TempDir())
	must(t, err)
	defer dir.Close()
	k.staged = n
	if err := r.Staged(t.Context(), dir, n); err != nil || k.adopted[inode(t, dir)] != r.w.Project {
		t.Fatalf("adopted %v, %v", k.adopted, err)
	}
}

func TestHard(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	k := newKernel()
	w, s, ws := newService(t, setup{QuotaBytes: 100, Projects: k}, "k")
	w.holds("k", 1000)
	k.used[ws.Project] = 60
	u, err := s.Usage(ctx, ws.Tenant, ws.ID)
	if want := (Usage{WorkspaceID: ws.ID, UsedBytes: 60, QuotaBytes: 100, Enforcement: "hard"}); err != nil || u != want {
		t.Errorf("%+v, %v", u, err)
	}
	if k.limit[ws.Project] != 100 || s.Enforcement(of("t", "k")) != "hard" {
		t.Errorf("limits %v", k.limit)
	}
	reserve(t, s, ws, 41, 0, true)
	r := reserve(t, s, ws, 40, 0, false)
	k.stage(t, r, 40)
	if err := errors.Join(r.Commit(ctx, 40, 0), s.Left(ctx, of("t", "k"), true)); err != nil {
		t.Error(err)
	}
	r.Done(true)
	r.Release()
	k.used[ws.Project] = 101
	wantOver(t, "over the quota", s.Left(ctx, of("t", "k"), true))
	dir, err := os.OpenRoot(t.TempDir())
	must(t, err)
	defer dir.Close()
	if err := s.Adopt(ws, "k", dir); err != nil || k.adopted[inode(t, dir)] != ws.Project {
		t.Errorf("adopted %v, %v", k.adopted, err)
	}
	k.failing = errors.New("no such device")
	other := w.workspace("other")
	for _, ws := range []Workspace{ws, other} {
		_, err := s.Usage(ctx, ws.Tenant, ws.ID)
		if !isUnavailable(err) || !isUnavailable(s.Adopt(ws, "k", dir)) {
			t.Errorf("%v", err)
		}
	}
	w.wantWalks(t, 0)

	// Without a quota an earlier limit goes.
	k.failing = nil
	s, ws = newWorld().service(t, setup{Projects: k})
	if err := s.Adopt(ws, "k", dir); err != nil || k.limit[ws.Project] != 0 {
		t.Errorf("limits %v, %v", k.limit, err)
	}
	clear(k.adopted)
	if err := s.Stage(ws, dir, nil); err != nil || len(k.adopted) > 0 {
		t.Errorf("before it is written, %v, %v", k.adopted, err)
	}
	r = reserve(t, s, ws, 1, 0, false)
	k.stage(t, r, 1)
	k.failing = errors.New("no such device")
	if err := r.Staged(t.Context(), dir, 1); !isUnavailable(err) {
		t.Errorf("staged: %v", err)
	}
	r.Release()
	// Nor is one needed where there are no projects.
	s, ws = newWorld().service(t, setup{QuotaBytes: 1})
	r = reserve(t, s, ws, 1, 0, false)
	if err := errors.Join(s.Adopt(ws, "k", dir), s.Stage(ws, dir, dir), r.Staged(t.Context(), dir, 1)); err != nil {
		t.Error(err)
	}
	r.Release()
	// Where there were some, what is staged is of the project that is there.
	for _, fails := range []error{nil, errors.New("no such device")} {
		followed := false
		s, ws = newWorld().service(t, setup{Follow: func(*os.File, *os.File) error { followed = true; return fails }})
		if err := s.Stage(ws, dir, dir); isUnavailable(err) != (fails != nil) || !followed {
			t.Errorf("followed: %t, %v", followed, err)
		}
	}
}

func TestOptions(t *testing.T) {
	t.Parallel()
	for name, opts := range map[string]Options{
		"store": {}, "quota": {Store: newWorld(), QuotaBytes: -1}, "root": {Store: newWorld(), Root: "/nonexistent"},
	} {
		if _, err := New(t.Context(), opts); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

var must = check.Must // ends a test if a step of its own fails
