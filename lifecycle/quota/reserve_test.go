package quota

import (
	"errors"
	"os"
	"testing"
	"testing/synctest"
	"time"
)

func newKernel() *kernel {
	return &kernel{limit: map[uint32]int64{}, used: map[uint32]int64{}, adopted: map[string]uint32{}}
}

// reserve fails the test unless there is room, or refused.
func reserve(t *testing.T, s *Service, w Workspace, n, replaced int64, refused bool) *Reservation {
	t.Helper()
	r, err := s.Reserve(t.Context(), w, "k", n, replaced)
	if over(t, err) != refused {
		t.Fatalf("%d bytes in place of %d: %v", n, replaced, err)
	}
	return r
}

// TestHardReservations has a kernel that counts, but refuses nothing.
func TestHardReservations(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	k := newKernel()
	s, ws := newWorld().service(t, setup{QuotaBytes: 100, Projects: k}, "k")
	one := reserve(t, s, ws, 60, 0, false)
	reserve(t, s, ws, 41, 0, true)
	two := reserve(t, s, ws, 40, 0, false)
	wantOver(t, "it grew beyond the quota", two.Grow(ctx, 41))
	used(t, s, ws, 0)
	k.stage(t, one, 60)
	used(t, s, ws, 0) // what is staged counts once
	wantOver(t, "it grew beyond the quota", two.Grow(ctx, 41))
	if err := two.Grow(ctx, 40); err != nil {
		t.Error(err)
	}
	must(t, one.Commit(ctx, 60, 0))
	used(t, s, ws, 60)
	one.Done(true)
	one.Release()
	used(t, s, ws, 60)
	k.used[ws.Project] = 100 // by a sandbox
	wantOver(t, "committed beyond the quota", errors.Join(two.Refresh(ctx), two.Commit(ctx, 40, 0)))
	two.Done(true)
	two.Release()

	// In a full workspace, what is replaced makes way for one.
	three := reserve(t, s, ws, 100, 100, false)
	reserve(t, s, ws, 1, 100, true)
	k.stage(t, three, 100)
	if err := s.Left(ctx, of("t", "k"), true); err != nil {
		t.Errorf("what is staged counts as used: %v", err)
	}
	must(t, three.Commit(ctx, 100, 100))
	used(t, s, ws, 100)
	k.used[ws.Project] = 100 // it is in its place
	three.Done(true)
	three.Release()
	used(t, s, ws, 100)
	if a := s.accounts[ws.ID]; a.reserved != 0 || a.written != 0 || a.credited != 0 || a.users != 0 {
		t.Errorf("left: %d bytes reserved, %d written, %d credited, %d users", a.reserved, a.written, a.credited, a.users)
	}
}

// TestReplacedInVain has a sandbox rename a file away each time when it is replaced.
func TestReplacedInVain(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	k := newKernel()
	const quota, size = 10 << 20, 5 << 20
	s, ws := newWorld().service(t, setup{QuotaBytes: quota, Projects: k}, "k")
	k.used[ws.Project] = quota
	one, two := reserve(t, s, ws, size, size, false), reserve(t, s, ws, size, size, false)
	k.stage(t, one, size)
	must(t, one.Commit(ctx, size, size))
	one.Done(true)
	one.Release()
	used(t, s, ws, quota+size)
	k.stage(t, two, size)
	wantOver(t, "committed beyond the quota", two.Commit(ctx, size, size))
	two.Release()
	k.used[ws.Project] = quota + roundUp + 1 // what was staged is gone
	reserve(t, s, ws, 1, size, true)
	reserve(t, s, ws, 0, size, false).Release()
	k.used[ws.Project] = quota + roundUp
	reserve(t, s, ws, size, size, false).Release()
}

// TestReplacedOnce fills a workspace with a file, which is replaced more than once at a time.
func TestReplacedOnce(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	w, s, ws := newService(t, setup{QuotaBytes: 100}, "k")
	w.holds("k", 100)
	one := reserve(t, s, ws, 100, 100, false)
	wantOver(t, "it grew beyond what it replaces", one.Grow(ctx, 101))
	reserve(t, s, ws, 1, 100, true)
	late := reserve(t, s, ws, 0, 0, false)
	late.Replaces(100)
	wantOver(t, "what is replaced counted twice", late.Grow(ctx, 100))
	one.Release()
	if err := late.Grow(ctx, 100); err != nil {
		t.Errorf("what was released isn't there: %v", err)
	}
	reserve(t, s, ws, 1, 100, true)
	must(t, late.Commit(ctx, 100, 100))
	late.Done(true)
	reserve(t, s, ws, 100, 100, false).Release()
	late.Release()
	used(t, s, ws, 100)
	if n := s.accounts[ws.ID].chats["k"].credited; n != 0 {
		t.Errorf("%d bytes are credited still", n)
	}
}

// TestCreditedElsewhere replaces a file while two others count on all that there is.
func TestCreditedElsewhere(t *testing.T) {
	t.Parallel()
	w, s, ws := newService(t, setup{QuotaBytes: 200}, "k")
	w.holds("k", 100)
	one, two := reserve(t, s, ws, 60, 60, false), reserve(t, s, ws, 60, 60, false)
	three := reserve(t, s, ws, 40, 40, false)
	must(t, three.Commit(t.Context(), 40, 40))
	three.Done(true)
	for _, r := range []*Reservation{one, two, three} {
		r.Release()
	}
	used(t, s, ws, 100)
}

// TestCommitMeasuresNothing commits beside a chat that can't be measured for long.
func TestCommitMeasuresNothing(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ctx := t.Context()
		w, s, ws := newService(t, setup{QuotaBytes: 100}, "k", "l")
		w.holds("l", 1)
		refused, kept := reserve(t, s, ws, 40, 0, false), reserve(t, s, ws, 40, 0, false)
		defer kept.Release()
		w.holds("l", 30)
		s.Freed(ws, "l")
		must(t, kept.Refresh(ctx), refused.Refresh(ctx))
		s.Freed(ws, "l")
		time.Sleep(time.Hour)
		wantOver(t, "committed without what was found before", refused.Commit(ctx, 61, 0))
		refused.Release()
		// A chat of which nothing was known then.
		w.set(func() { w.chats["m"] = ws.ID })
		newer, err := s.Reserve(ctx, ws, "m", 0, 0)
		must(t, err)
		defer newer.Release()
		s.Freed(ws, "l")
		time.Sleep(time.Hour)
		n := w.walked()
		must(t, newer.Commit(ctx, 10, 0))
		newer.Done(true)
		wantOver(t, "committed without what a newer chat holds", kept.Commit(ctx, 61, 0))
		if err := errors.Join(kept.Grow(ctx, 60), kept.Commit(ctx, 60, 0)); err != nil {
			t.Error(err)
		}
		kept.Done(true)
		if w.walked() != n {
			t.Error("a commit measures")
		}
	})
}

func TestTouched(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w, s, ws := newService(t, setup{QuotaBytes: 100}, "k", "l")
		w.holds("k", 0)
		s.touch("t", "k") // nothing is known yet
		used(t, s, ws, 0)
		w.holds("k", 5)
		s.touch("other", "k")
		s.touch("t", "l")
		used(t, s, ws, 0)
		s.touch("t", "k")
		used(t, s, ws, 5)
		if err := s.Left(t.Context(), of("t", "k"), false); err != nil { // now it is known whose it is
			t.Fatal(err)
		}
		for i := range int64(2) {
			w.holds("k", 6+i)
			s.touch("t", "k")
			used(t, s, ws, 6+i)
		}
		s.touch("t", "k")
		w.during = func(string) {
			w.set(func() { w.during = nil; w.bytes["k"] = 9 })
			s.touch("t", "k")
		}
		used(t, s, ws, 7)
		used(t, s, ws, 9)
		w.isLive("k", true)
		used(t, s, ws, 9)
		w.holds("k", 8)
		s.touch("t", "k") // though it isn't old
		used(t, s, ws, 8)
		w.isLive("k", false)
		used(t, s, ws, 8)
		n := w.walked()
		must(t, s.Left(t.Context(), of("t", "none"), true))
		s.touch("t", "none")
		used(t, s, ws, 8)
		if w.walked() != n {
			t.Error("measured for the key of no chat")
		}
	})
}

// TestUnheld has the kernel refuse to count a chat.
func TestUnheld(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ctx := t.Context()
		k := newKernel()
		w, s, ws := newService(t, setup{QuotaBytes: 100, Projects: k}, "k", "l")
		for _, chat := range []string{"k", "l"} {
			w.holds(chat, 50)
		}
		k.used[ws.Project] = 7
		dir, err := os.OpenRoot(t.TempDir())
		must(t, err)
		defer dir.Close()
		k.refusing = errors.New("operation not permitted")
		for _, chat := range []string{"k", "l"} {
			if err := s.Adopt(ws, chat, dir); !isUnavailable(err) {
				t.Errorf("%s: %v", chat, err)
			}
		}
		wantOver(t, "what the kernel doesn't count isn't counted", s.Left(ctx, of("t", "k"), true))
		w.holds("l", 20)
		s.Freed(ws, "l")
		used(t, s, ws, 77)
		reserve(t, s, ws, 24, 0, true)
		reserve(t, s, ws, 23, 0, false).Release()
		// It is tried again, until it goes well, or the chat is the workspace's no more.
		adopted := k.tries
		time.Sleep(2 * adoptWait)
		used(t, s, ws, 77)
		used(t, s, ws, 77)
		if k.tries-adopted != 2 {
			t.Errorf("tried %d times more", k.tries-adopted)
		}
		time.Sleep(2 * idleFor)
		s.use(Workspace{ID: "other", Tenant: "t"})
		used(t, s, ws, 77)
		k.refusing = nil
		w.set(func() { delete(w.chats, "l") })
		adopted = k.tries
		time.Sleep(2 * adoptWait)
		used(t, s, ws, 7)
		if k.tries-adopted != 1 {
			t.Errorf("tried %d times more", k.tries-adopted)
		}
		k.refusing = errors.New("operation not permitted")
		if err := s.Adopt(ws, "k", dir); !isUnavailable(err) {
			t.Error(err)
		}
		used(t, s, ws, 57)
		s.Forget(ws, "k")
		used(t, s, ws, 7)
	})
}
