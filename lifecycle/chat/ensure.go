package chat

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"time"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/lifecycle"
)

// Ensure returns a chat, and makes it, its directory and its history if there is none. What
// a sandbox of this key has written before is the chat's from then on. *ConflictError if it
// belongs to another workspace.
func (s *Service) Ensure(ctx context.Context, tenant, chatID, workspaceID string) (c Chat, made bool, err error) {
	defer func() { s.metrics.count("make", err) }()
	id, err := lifecycle.ParseKey(chatID)
	if err != nil {
		return Chat{}, false, err
	}
	w, err := s.opts.Quotas.Workspace(ctx, tenant, workspaceID)
	if err != nil {
		return Chat{}, false, err
	}
	unlock, err := s.locks.Lock(ctx, key{tenant, id})
	if err != nil {
		return Chat{}, false, err
	}
	defer unlock()
	c, err = s.opts.Store.Chat(ctx, tenant, id)
	if made = errdefs.IsNotFound(err); made {
		// The directory comes first: without a chat it is a sandbox's, as it may have been.
		c = Chat{Tenant: tenant, ID: id, WorkspaceID: w.ID, CreatedAt: time.Now().UTC()}
		var dir *os.Root
		if dir, err = s.layout(ctx, c, true); err != nil {
			return Chat{}, false, err
		}
		_ = dir.Close()
		c, made, err = s.opts.Store.EnsureChat(ctx, c)
		s.opts.Quotas.Changed(tenant, id)
	}
	if err != nil {
		return Chat{}, false, storeError(err)
	}
	if c.WorkspaceID != w.ID {
		return Chat{}, false, &ConflictError{ID: id, WorkspaceID: c.WorkspaceID}
	}
	if made {
		s.log.InfoContext(ctx, "chat_made", c.attrs()...)
	}
	return c, made, nil
}

// List lists a workspace's chats by ID, those after a given one, at most limit; more
// says that there are others.
func (s *Service) List(ctx context.Context, tenant, workspaceID, after string, limit int) (chats []Chat, more bool, err error) {
	if _, err := s.opts.Quotas.Workspace(ctx, tenant, workspaceID); err != nil {
		return nil, false, err
	}
	limit = bounded(limit)
	chats, err = s.opts.Store.Chats(ctx, tenant, workspaceID, after, limit+1)
	if err != nil {
		return nil, false, storeError(err)
	}
	if more = len(chats) > limit; more {
		chats = chats[:limit]
	}
	return chats, more, nil
}

// Delete removes a chat with all that it holds. *lifecycle.ActiveError if it has a live
// sandbox. When it returns, the chat is gone for good; the space that its files take is
// given back afterwards, at the next start at the latest.
func (s *Service) Delete(ctx context.Context, tenant, chatID string) (err error) {
	defer func() { s.metrics.count("delete", err) }()
	c, err := s.Get(ctx, tenant, chatID)
	if err != nil {
		return err
	}
	id := deleted + s.newStaging()
	err = s.opts.Sandboxes.WithoutSandbox(ctx, tenant, c.ID, func(ctx context.Context) error { return s.moveAway(ctx, c, id) })
	if err != nil {
		return err
	}
	s.log.InfoContext(ctx, "chat_deleted", c.attrs()...)
	s.discard(ctx, id)
	return nil
}

// deleted begins the name of a staging directory that a chat was moved to, as
// tenant/chat. The next start deletes the chat's row if this process doesn't come to it.
// Earlier versions named theirs "deleted-", and had the chat's content right in there.
const deleted = "away-"

// moveAway moves a chat's directory to a staging directory, and deletes the chat's row.
func (s *Service) moveAway(ctx context.Context, c Chat, id string) (err error) {
	unlock, err := s.locks.Lock(ctx, c.key())
	if err != nil {
		return err
	}
	defer unlock()
	now, err := s.Get(ctx, c.Tenant, c.ID)
	if err != nil {
		return err
	}
	ctx = context.WithoutCancel(ctx) // from here on it is all or nothing
	defer s.opts.Quotas.Changed(c.Tenant, c.ID)
	staging := filepath.Join(s.root, stagingDir, id)
	moved := false
	defer func() {
		if err != nil && !moved {
			s.unstage(ctx, id)
		}
	}()
	if err := os.MkdirAll(filepath.Join(staging, c.Tenant), 0o700); err != nil {
		return err
	}
	if err := s.at(stepDeleting); err != nil {
		return err
	}
	away := filepath.Join(staging, c.Tenant, c.ID)
	from, err := lifecycle.ChatDir(s.root, c.Tenant, c.ID)
	if err == nil {
		err = os.Rename(from, away)
	}
	moved = err == nil
	if moved {
		err = errors.Join(s.syncParents(from), s.syncParents(away), s.at(stepMovedAway))
	}
	if errors.Is(err, fs.ErrNotExist) {
		err = nil // gone before: there are only rows
	}
	if err == nil {
		err = storeError(s.opts.Store.DeleteChat(ctx, c.Tenant, c.ID))
		if _, there := s.Get(ctx, c.Tenant, c.ID); errdefs.IsNotFound(there) {
			err = nil // a commit can take effect and report an error
		}
	}
	if err != nil && moved {
		back := os.Rename(away, from)
		moved = back != nil
		return errors.Join(err, back, s.syncParents(from))
	}
	if err != nil {
		return err
	}
	if w, err := s.opts.Quotas.Workspace(ctx, c.Tenant, now.WorkspaceID); err == nil {
		s.opts.Quotas.Forget(w, c.ID)
	}
	return nil
}

// finishDeletions deletes the rows of chats that an earlier process has moved away. A chat
// that has a directory was made again, or put back.
func (s *Service) finishDeletions(ctx context.Context) error {
	moved, err := fs.Glob(os.DirFS(filepath.Join(s.root, stagingDir)), deleted+"*/*/*")
	for _, name := range moved {
		tenant, id := path.Base(path.Dir(name)), path.Base(name)
		if _, there := lifecycle.ChatDir(s.root, tenant, id); !errors.Is(there, fs.ErrNotExist) {
			continue
		}
		_, failed := s.opts.Store.Chat(ctx, tenant, id)
		if errdefs.IsNotFound(failed) {
			continue
		}
		if failed == nil {
			s.ended.Finished++
			failed = s.opts.Store.DeleteChat(ctx, tenant, id)
		}
		err = errors.Join(err, failed)
	}
	return storeError(err)
}

// maxPage is the most that is listed at once.
const maxPage = 10_000

func bounded(limit int) int { return max(1, min(limit, maxPage)) }
