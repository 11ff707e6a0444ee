package chat

import "context"

// maxTrash is how many staging directories may wait to be removed.
const maxTrash = 1000

// discard removes a staging directory in the background. If too many directories wait, it
// removes this one at once. After Close, the directory stays until the next start.
func (s *Service) discard(ctx context.Context, id string) {
	s.mu.Lock()
	open := s.ctx.Err() == nil
	waits := open && s.trash.TryAcquire(1)
	if waits {
		s.removal.Go(func() {
			defer s.trash.Release(1)
			s.emptying.Lock()
			defer s.emptying.Unlock()
			if s.ctx.Err() == nil {
				_ = s.at(stepDiscarding)
				s.unstage(s.ctx, id)
			}
		})
	}
	s.mu.Unlock()
	if open && !waits {
		s.unstage(context.WithoutCancel(ctx), id)
	}
}

// Close ends the removal of deleted chats' files, and waits for that. It returns the context's
// cause if ctx ends first. The next start removes files that are left, and files of chats that
// are deleted after Close. Close may be called more than once.
func (s *Service) Close(ctx context.Context) error {
	s.mu.Lock()
	s.stop()
	s.mu.Unlock()
	done := make(chan struct{})
	go func() {
		s.removal.Wait()
		close(done)
	}()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
