package chat

import "context"

// maxTrash is how many staging directories may wait to be removed.
const maxTrash = 1000

// discard removes a staging directory in a while, however much it holds. If too many wait
// for that, the caller removes this one. After Close it stays until the next start.
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

// Close ends the removal of what deleted chats held, and waits until it has ended, or the
// context is done, whose cause it returns then. What is left goes at the next start, and so
// does what is deleted from then on. It may be called more than once.
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
