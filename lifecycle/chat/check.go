package chat

import (
	"context"
	"errors"
	"io/fs"
	"strings"

	"github.com/bermhq/berm/lifecycle"
)

// Report counts what Check did.
type Report struct {
	Chats    int // chats that were checked
	Finished int // deletions that an earlier process had begun
	Dropped  int // records whose file was gone
	Removed  int // left-over staging directories
	Failed   int // chats that couldn't be checked
}

// Check drops the records of all chats that have no file, makes missing directories and
// histories, and removes staging directories of earlier processes. It is meant for the start,
// and may run while the chats are used.
func (s *Service) Check(ctx context.Context) (Report, error) {
	s.mu.Lock()
	r := s.ended
	s.ended = Report{} // reported once
	s.mu.Unlock()
	removed, err := s.removeOrphans(ctx)
	r.Removed += removed
	if err != nil {
		return r, err
	}
	err = s.opts.Store.EachChat(ctx, func(c Chat) error {
		r.Chats++
		err := s.checkChat(ctx, c, &r)
		_, gone := errors.AsType[*NotFoundError](err) // it was deleted meanwhile
		switch {
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case err != nil && !gone:
			r.Failed++
			s.log.ErrorContext(ctx, "chat_check_failed", append(c.attrs(), "error", err)...)
		}
		return nil
	})
	if ctx.Err() != nil {
		return r, context.Cause(ctx)
	}
	return r, storeError(err)
}

// removeOrphans removes the staging directories of earlier processes.
func (s *Service) removeOrphans(ctx context.Context) (removed int, err error) {
	staging, err := s.openStaging()
	if err != nil {
		return 0, err
	}
	defer staging.Close()
	entries, err := fs.ReadDir(staging.FS(), ".")
	if err != nil {
		return 0, err
	}
	var failed []error
	defer func() {
		s.metrics.repaired("removed", removed)
		if len(failed) > 0 {
			s.log.ErrorContext(ctx, "staging_not_removed", "number", len(failed), "error", failed[0])
		}
	}()
	for _, e := range entries {
		if strings.HasPrefix(strings.TrimPrefix(e.Name(), deleted), s.run) {
			continue
		}
		err := removeStaged(ctx, staging, e.Name())
		if ctx.Err() != nil {
			return removed, context.Cause(ctx)
		}
		if err != nil { // continue with the others
			failed = append(failed, err)
			continue
		}
		removed++
	}
	return removed, nil
}

func (s *Service) checkChat(ctx context.Context, c Chat, r *Report) error {
	_, err := lifecycle.ChatDir(s.root, c.Tenant, c.ID)
	gone := errors.Is(err, fs.ErrNotExist)
	dir, leave, err := s.enter(ctx, c) // which makes what is missing
	if err != nil {
		return err
	}
	if gone {
		s.metrics.repaired("remade", 1)
	}
	dropped, err := s.prune(ctx, c, dir, "", "")
	leave()
	r.Dropped += dropped
	s.metrics.repaired("dropped", dropped)
	if dropped > 0 {
		s.log.WarnContext(ctx, "chat_repaired", append(c.attrs(), "dropped", dropped)...)
	}
	if err != nil {
		return err
	}
	// It may have been made when there were no project quotas, or by a process that was
	// killed before it adopted the directory. This may take long.
	if dir, err = s.open(ctx, c); err != nil {
		return err
	}
	defer dir.Close()
	return s.adopt(ctx, c, dir)
}
