package chat

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/containerd/errdefs"
	"github.com/google/uuid"

	"github.com/bermhq/berm/lifecycle"
)

// Ensure answers a chat, and makes it, its directory and its history if there is none. What
// a sandbox of this key has written before is the chat's from then on. *ConflictError if it
// belongs to another workspace.
func (s *Service) Ensure(ctx context.Context, tenant, chatID, workspaceID string) (c Chat, made bool, err error) {
	defer func() { s.metrics.count("make", err) }()
	id, err := lifecycle.ParseKey(chatID)
	if err != nil {
		return Chat{}, false, err
	}
	w, err := s.opts.Workspaces.Get(ctx, tenant, workspaceID)
	if err != nil {
		return Chat{}, false, err
	}
	unlock, err := s.lock(ctx, key{tenant, id})
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

// Get answers a chat.
func (s *Service) Get(ctx context.Context, tenant, chatID string) (Chat, error) {
	return s.chat(ctx, tenant, chatID)
}

// List lists a workspace's chats by ID, those after a given one, at most limit; more tells
// whether there are others.
func (s *Service) List(ctx context.Context, tenant, workspaceID, after string, limit int) (chats []Chat, more bool, err error) {
	if _, err := s.opts.Workspaces.Get(ctx, tenant, workspaceID); err != nil {
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
	c, err := s.chat(ctx, tenant, chatID)
	if err != nil {
		return err
	}
	id := deletion + uuid.NewString()
	s.hold(id)
	var left []string // staging directories
	err = s.opts.Sandboxes.WithoutSandbox(ctx, tenant, c.ID, func(ctx context.Context) error {
		left, err = s.moveAway(ctx, c, id)
		return err
	})
	if err != nil {
		s.letGo(id)
		return err
	}
	s.log.InfoContext(ctx, "chat_deleted", c.attrs()...)
	for _, id := range append(left, id) {
		s.discard(ctx, id)
	}
	return nil
}

// moveAway takes a chat from its place, with its records, and answers the staging
// directories of changes that are none any more.
func (s *Service) moveAway(ctx context.Context, c Chat, id string) (left []string, err error) {
	unlock, err := s.lock(ctx, c.key())
	if err != nil {
		return nil, err
	}
	defer unlock()
	now, err := s.chat(ctx, c.Tenant, c.ID)
	if err != nil {
		return nil, err
	}
	ctx = context.WithoutCancel(ctx) // from here on it is all or nothing
	defer s.opts.Quotas.Changed(c.Tenant, c.ID)
	// Noted first, so that a process that dies has deleted all of it, or nothing.
	change := Change{ID: id, Tenant: c.Tenant, ChatID: c.ID}
	if err := s.opts.Store.PutChange(ctx, change); err != nil {
		return nil, storeError(err)
	}
	var path string
	away := filepath.Join(s.root, stagingDir, id)
	if err = s.at(stepDeleting); err == nil {
		path, err = lifecycle.ChatDir(s.root, c.Tenant, c.ID)
	}
	if err == nil {
		err = os.Rename(path, away)
	}
	moved := err == nil
	if moved {
		err = errors.Join(s.syncParents(path), s.syncParents(away))
	}
	if errors.Is(err, fs.ErrNotExist) {
		err = nil // gone before: there are only records
	}
	if err == nil {
		err = s.at(stepMovedAway)
	}
	if err == nil {
		err = storeError(s.opts.Store.DeleteChat(ctx, c.Tenant, c.ID))
	}
	if err != nil {
		if moved {
			err = errors.Join(err, os.Rename(away, path))
		}
		return nil, errors.Join(err, storeError(s.opts.Store.FinishChange(ctx, change, nil)))
	}
	w, err := s.opts.Workspaces.Get(ctx, c.Tenant, now.WorkspaceID)
	if err == nil {
		s.opts.Quotas.Forget(w, c.ID)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, change := range s.pending[c.key()] {
		left = append(left, change.ID)
	}
	delete(s.pending, c.key())
	return left, nil
}

// maxPage is the most that is listed at once.
const maxPage = 10_000

func bounded(limit int) int { return max(1, min(limit, maxPage)) }
