package chat

import (
	"context"
	"errors"
	"io/fs"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/lifecycle/hostdir"
)

// Report is what Check did.
type Report struct {
	Chats    int // that were looked at
	Finished int // changes that an earlier process had begun
	Adopted  int // files that had no record, and have one now
	Dropped  int // records whose file was gone
	Removed  int // left-over directories and files of unfinished changes
	Remade   int // chats whose directory was gone, and is empty now
	Failed   int // chats that couldn't be looked at
}

// Check brings records and content together, of every chat. It is meant for start-up, and
// may go on while the chats are used.
func (s *Service) Check(ctx context.Context) (Report, error) {
	s.mu.Lock()
	r := s.ended
	s.ended = Report{} // told once
	s.mu.Unlock()
	removed, err := s.removeOrphans(ctx)
	r.Removed += removed
	if err != nil {
		return r, err
	}
	err = s.opts.Store.EachChat(ctx, func(c Chat) error {
		r.Chats++
		err := s.checkChat(ctx, c, &r)
		switch {
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case err != nil && !isNoChat(err):
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

// isNoChat tells that a chat was deleted meanwhile.
func isNoChat(err error) bool {
	var none *NotFoundError
	return errors.As(err, &none)
}

// removeOrphans removes the staging directories that nobody uses: of changes that an earlier
// process didn't come to, and of chats that it was removing.
func (s *Service) removeOrphans(ctx context.Context) (removed int, err error) {
	staging, err := s.openStaging()
	if err != nil {
		return 0, err
	}
	defer staging.Close()
	d, err := hostdir.Top(staging)
	if err != nil {
		return 0, err
	}
	defer d.Close()
	var failed []error
	err = hostdir.Each(d, func(name string) error {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if s.held(name) {
			return nil
		}
		err := hostdir.Remove(ctx, staging, name)
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err != nil {
			failed = append(failed, err) // others can go nevertheless
			return nil
		}
		removed++
		return nil
	})
	s.metrics.repaired("removed", removed)
	if len(failed) > 0 {
		s.log.ErrorContext(ctx, "staging_not_removed", "number", len(failed), "error", failed[0])
	}
	return removed, err
}

func (s *Service) checkChat(ctx context.Context, c Chat, r *Report) error {
	if err := s.checkLayout(ctx, c, r); err != nil {
		return err
	}
	dir, err := s.open(ctx, c)
	if err != nil {
		return err
	}
	defer dir.Close()
	// It may have been made when there were no project quotas, or while one was to be adopted
	// this process may have been killed.
	unheld := s.adopt(ctx, c, dir)
	var adopted, dropped int
	defer func() {
		r.Adopted += adopted
		r.Dropped += dropped
		if adopted+dropped > 0 {
			s.log.WarnContext(ctx, "chat_repaired", append(c.attrs(), "adopted", adopted, "dropped", dropped)...)
		}
	}()
	for after, more := "", true; more; {
		p, err := readPage(ctx, dir, after, maxPage, s.most)
		if err != nil {
			return err
		}
		_, d, err := s.compare(ctx, c, p, after)
		if err != nil {
			return err
		}
		if len(d.missing)+len(d.stale) > 0 {
			fresh, gone, err := s.repair(ctx, c, d)
			adopted += len(fresh)
			dropped += gone
			if err != nil {
				return err
			}
		}
		if more = p.more; more {
			after = p.names[len(p.names)-1]
		}
	}
	return unheld
}

// checkLayout sees that a chat has its directory and its history.
func (s *Service) checkLayout(ctx context.Context, c Chat, r *Report) error {
	dir, err := Open(s.root, c.Tenant, c.ID)
	if err == nil {
		_, err := dir.Lstat(HistoryName)
		if _ = dir.Close(); !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	} else if !errdefs.IsNotFound(err) {
		return err
	}
	gone := err != nil
	_, _, leave, err := s.enterHalf(ctx, c) // which makes what is missing
	if err != nil {
		return err
	}
	leave()
	if gone {
		r.Remade++
		s.metrics.repaired("remade", 1)
	}
	return nil
}
