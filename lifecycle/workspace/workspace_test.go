package workspace

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/lifecycle/quota"
)

// rows is a store in memory.
type rows struct {
	quota.Store
	all     []Workspace
	failing error
}

func (r *rows) Projects(context.Context) ([]quota.Project, error) { return nil, nil }

func (r *rows) find(is func(Workspace) bool) (Workspace, error) {
	if r.failing != nil {
		return Workspace{}, r.failing
	}
	for _, w := range r.all {
		if is(w) {
			return w, nil
		}
	}
	return Workspace{}, errdefs.ErrNotFound
}

func (r *rows) EnsureWorkspace(_ context.Context, w Workspace) (Workspace, bool, error) {
	got, err := r.find(func(o Workspace) bool { return o.Tenant == w.Tenant && o.UserID == w.UserID })
	if !errdefs.IsNotFound(err) {
		return got, false, err
	}
	r.all = append(r.all, w)
	return w, true, nil
}

func (r *rows) Workspace(_ context.Context, tenant, id string) (Workspace, error) {
	return r.find(func(o Workspace) bool { return o.Tenant == tenant && o.ID == id })
}

func newService(t *testing.T, r *rows) *Service {
	t.Helper()
	quotas, err := quota.New(t.Context(), quota.Options{Store: r, Off: true})
	if err != nil {
		t.Fatal(err)
	}
	s, err := New(r, quotas)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestUsers(t *testing.T) {
	t.Parallel()
	s := newService(t, &rows{})
	for name, id := range map[string]string{
		"empty": "", "long": strings.Repeat("u", 256), "dot": ".", "dots": "..", "slash": "a/b", "backslash": `a\b`, "null": "a\x00",
		"newline": "a\n", "delete": "a\x7f", "c1": "a\u0085", "no UTF-8": "a\xff",
	} {
		_, made, err := s.Ensure(t.Context(), "t", id)
		var invalid *lifecycle.InvalidError
		if made || !errors.As(err, &invalid) || invalid.Field != "user_id" {
			t.Errorf("%s: %v", name, err)
		}
	}
	for _, id := range []string{"x", "...", "a b", "ä@例.org", strings.Repeat("u", 255), "'--", "%2f"} {
		one, made, err := s.Ensure(t.Context(), "t", id)
		if err != nil || !made || one.UserID != id || one.Tenant != "t" || len(one.ID) != 36 || one.CreatedAt.Location() != time.UTC {
			t.Errorf("%q: %+v, %v, %v", id, one, made, err)
		}
		again, made, err := s.Ensure(t.Context(), "t", id)
		if err != nil || made || again != one {
			t.Errorf("%q again: %+v, %v, %v", id, again, made, err)
		}
		got, err := s.Get(t.Context(), "t", one.ID)
		if err != nil || got != one {
			t.Errorf("%q: %+v, %v", id, got, err)
		}
		var missing *NotFoundError
		if _, err := s.Get(t.Context(), "other", one.ID); !errors.As(err, &missing) || missing.ID != one.ID {
			t.Errorf("another tenant's: %v", err)
		}
	}
}

func TestFailures(t *testing.T) {
	t.Parallel()
	r := &rows{failing: errors.New("the disk is gone")}
	s := newService(t, r)
	calls := map[string]func(context.Context) error{
		"ensure": func(ctx context.Context) error { _, _, err := s.Ensure(ctx, "t", "u"); return err },
		"get":    func(ctx context.Context) error { _, err := s.Get(ctx, "t", "w"); return err },
		"usage":  func(ctx context.Context) error { _, err := s.Usage(ctx, "t", "w"); return err },
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	for name, call := range calls {
		var away *lifecycle.UnavailableError
		if err := call(t.Context()); !errors.As(err, &away) || !errors.Is(err, r.failing) {
			t.Errorf("%s: %v", name, err)
		}
		if err := call(ended); !errors.Is(err, context.Canceled) {
			t.Errorf("%s, cancelled: %v", name, err)
		}
	}
	if _, err := New(nil, nil); err == nil {
		t.Error("made of nothing")
	}
}
