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

// Ensure returns a chat. If there is none, it makes the chat, its directory and its history.
// Files that a sandbox of this key wrote before become the chat's. The error is a
// *ConflictError if the chat belongs to another workspace.
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
		// The directory comes first. If Berm dies before the chat is stored, it is a sandbox's.
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

// List lists at most limit of a workspace's chats, sorted by ID, with IDs above after. More
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

// Delete removes a chat with all its files. It fails with a *lifecycle.ActiveError if the chat
// has a live sandbox. When it returns, the chat is gone for good. The disk space of its files is
// freed later, at the next start at the latest.
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

// deleted is the prefix of staging directories for deleted chats. The chat is in it as
// tenant/chat, so that the next start can delete the chat's row if this process dies first.
// Earlier versions had the prefix "deleted-", and the chat's files directly in the directory.
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
	ctx = context.WithoutCancel(ctx) // finish even if the caller leaves
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
		err = nil // without a directory, only the rows must go
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

// finishDeletions deletes the rows of chats that an earlier process has moved away. It keeps a
// chat that has a directory, since that was made again or put back.
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

// maxPage is the maximum number of entries in one page of a list.
const maxPage = 10_000

func bounded(limit int) int { return max(1, min(limit, maxPage)) }
