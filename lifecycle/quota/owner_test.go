package quota

import (
	"context"
	"testing"

	"github.com/containerd/errdefs"
)

// asked is a store that counts, and lets something happen while it is asked.
type asked struct {
	*world
	times  int
	during func()
}

func (a *asked) WorkspaceOf(ctx context.Context, tenant, chatID string) (Workspace, error) {
	a.times++
	w, err := a.world.WorkspaceOf(ctx, tenant, chatID)
	if a.during != nil {
		a.during()
	}
	return w, err
}

// Whose chat an attached sandbox' key is, is asked once, and again when that may have changed.
func TestOwner(t *testing.T) {
	w := newWorld()
	store := &asked{world: w}
	s, ws := w.service(t, setup{QuotaBytes: 10})
	s.opts.Store = store
	for _, chat := range []string{"c", "d", "e"} {
		must(t, second(s.Attach(t.Context(), of("t", chat))))
	}
	owner := func(chat string, want bool, times int) {
		t.Helper()
		got, there, err := s.owner(t.Context(), of("t", chat))
		if err != nil || there != want || there && got != ws || store.times != times {
			t.Errorf("%s: %+v, %t, %v, the store was asked %d times", chat, got, there, err, store.times)
		}
	}
	owner("c", false, 1)
	owner("c", false, 1)
	w.set(func() { w.chats["c"] = ws.ID })
	owner("c", false, 1)
	s.Changed("t", "c")
	owner("c", true, 2)
	owner("c", true, 2)
	w.set(func() { delete(w.chats, "c") })
	s.Changed("t", "c")
	owner("c", false, 3)

	// An answer that was overtaken isn't kept, whichever chat it was about.
	store.during = func() {
		w.set(func() { w.chats["d"] = ws.ID })
		s.Changed("t", "d")
	}
	owner("d", false, 4)
	store.during = nil
	owner("d", true, 5)

	// Neither is an error.
	w.set(func() { w.failing = context.DeadlineExceeded })
	if _, _, err := s.owner(t.Context(), of("t", "e")); !errdefs.IsUnavailable(err) {
		t.Errorf("a store that fails: %v", err)
	}
	w.set(func() { w.failing = nil })
	owner("e", false, 7)
}
