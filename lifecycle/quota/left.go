package quota

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/lifecycle/hostdir"
)

// Used implements lifecycle.Quotas. It measures the directory that the sandbox mounts, even if
// that was moved.
func (s *Service) Used(ctx context.Context, sub lifecycle.Subject) (used int64, err error) {
	if sub.Dir == "" {
		return 0, nil
	}
	var root *os.Root
	if known := s.subject(sub.SessionID); known != nil && !sub.Stopped {
		root = known.root
	}
	if root == nil {
		if root, _, err = openOwn(sub); errors.Is(err, errExchanged) {
			return 0, &lifecycle.QuotaError{QuotaBytes: sub.QuotaBytes}
		}
		if err != nil {
			return 0, err
		}
		defer root.Close()
	}
	used, err = hostdir.Sizes(ctx, root)
	switch {
	case errors.Is(err, os.ErrClosed): // the sandbox has just gone
		return 0, nil
	case err != nil && !errors.Is(err, hostdir.ErrUnbounded):
		return 0, err
	case used > sub.QuotaBytes || err != nil:
		return 0, &lifecycle.QuotaError{UsedBytes: used, QuotaBytes: sub.QuotaBytes}
	}
	return used, nil
}

// Left implements lifecycle.Quotas. Errors also include *lifecycle.UnavailableError.
func (s *Service) Left(ctx context.Context, sub lifecycle.Subject, changed bool) error {
	if _, err := s.Used(ctx, sub); err != nil {
		return err
	}
	if !s.Shared() {
		return nil
	}
	w, there, err := s.owner(ctx, sub)
	if err != nil {
		return err
	}
	sum := s.total
	if !there {
		w, sum = Workspace{ID: keysOf(sub.Tenant), Tenant: sub.Tenant}, s.keysTotal
	}
	a := s.use(w)
	defer s.unuse(a)
	a.sandboxed(sub.Key, changed)
	t, err := sum(ctx, a, w, sub.Key)
	if quota := s.opts.QuotaBytes; err == nil && (t.chat != "" || t.used > quota) {
		if !changed { // files may have been removed since
			return s.Left(ctx, lifecycle.Subject{Tenant: sub.Tenant, Key: sub.Key, SessionID: sub.SessionID}, true)
		}
		return &lifecycle.QuotaError{UsedBytes: t.used, QuotaBytes: quota}
	}
	return err
}

// owner returns the workspace of a sandbox's chat. It returns false if the key is no chat. For an
// attached sandbox, it asks the store once.
func (s *Service) owner(ctx context.Context, sub lifecycle.Subject) (w Workspace, chat bool, err error) {
	s.mu.Lock()
	known, changes := s.subjects[sub.SessionID], s.changes
	if known != nil && known.owner != nil {
		defer s.mu.Unlock()
		return *known.owner, known.owner.ID != "", nil
	}
	s.mu.Unlock()
	w, err = s.opts.Store.WorkspaceOf(ctx, sub.Tenant, sub.Key)
	if err != nil && !errdefs.IsNotFound(err) {
		return Workspace{}, false, Unavailable(ctx, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if known != nil && changes == s.changes {
		known.owner = &w
	}
	return w, w.ID != "", nil
}

// Changed must be called whenever a chat may have been put into the store, or removed from it.
func (s *Service) Changed(tenant, chatID string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.changes++
	for _, sub := range s.subjects {
		if sub.of == (chatKey{tenant, chatID}) {
			sub.owner = nil
		}
	}
}

// storeTimeout bounds a call of the store that has no context of a caller.
const storeTimeout = 5 * time.Second

// Enforcement implements lifecycle.Quotas. It also returns "" if the store fails.
func (s *Service) Enforcement(sub lifecycle.Subject) string {
	switch {
	case sub.Dir != "":
		s.mu.Lock()
		defer s.mu.Unlock()
		if known := s.subjects[sub.SessionID]; known != nil && known.held {
			return "hard"
		}
		return "soft"
	case !s.Shared():
		return ""
	}
	ctx, cancel := context.WithTimeout(context.Background(), storeTimeout)
	defer cancel()
	_, there, err := s.owner(ctx, sub)
	switch {
	case err != nil:
		return ""
	case !there:
		return "soft"
	}
	return s.enforcement()
}

// Adopt puts a chat's directory into the workspace's project, if there are project quotas. It
// does so even without a quota, as there may be one later. If it fails, the chat is measured
// instead, and later calls about the workspace try again, at most once a minute. The error is a
// *lifecycle.UnavailableError.
func (s *Service) Adopt(w Workspace, chatID string, dir *os.Root) error {
	if s.projects == nil {
		return nil
	}
	a := s.use(w)
	defer s.unuse(a)
	err := s.adopt(a, w, dir)
	if err == nil {
		a.hold(chatID)
		return nil
	}
	a.keep.Store(true)
	a.mu.Lock()
	defer a.mu.Unlock()
	a.unheld[chatID] = time.Now()
	return err
}

func (s *Service) adopt(a *account, w Workspace, dir *os.Root) error {
	err := s.limit(a, w)
	if err == nil {
		err = hostdir.With(dir, func(f *os.File) error { return s.projects.Adopt(f, w.Project) })
	}
	return ofWorkspace(w, err)
}

// limit sets a workspace's limit in the kernel, once for each account. The kernel may have
// another limit, of an earlier configuration.
func (s *Service) limit(a *account, w Workspace) error {
	if a.limited.Load() {
		return nil
	}
	err := s.projects.Limit(w.Project, s.opts.QuotaBytes)
	a.limited.Store(err == nil)
	return ofWorkspace(w, err)
}

// Stage prepares a new directory for files that will be moved into a chat's directory. With
// project quotas, it has no project until Reservation.Staged. The error is a
// *lifecycle.UnavailableError.
func (s *Service) Stage(w Workspace, dir, chat *os.Root) error {
	if s.projects != nil {
		return nil
	}
	return ofWorkspace(w, hostdir.With(dir, func(d *os.File) error {
		return hostdir.With(chat, func(c *os.File) error { return s.follow(d, c) })
	}))
}

// ofWorkspace returns the error that callers get for a failed call of the kernel.
func ofWorkspace(w Workspace, err error) error {
	var away *lifecycle.UnavailableError
	if err == nil || errors.As(err, &away) {
		return err
	}
	return &lifecycle.UnavailableError{Err: fmt.Errorf("workspace %s: %w", w.ID, err)}
}

// over returns the *FullError of a workspace.
func (s *Service) over(w Workspace, t total) error {
	return &FullError{WorkspaceID: w.ID, UsedBytes: t.used, QuotaBytes: s.opts.QuotaBytes, Chat: t.chat}
}
