package chat

import "context"

// maxTrash is how many staging directories may wait to be removed.
const maxTrash = 1000

// discard removes a staging directory in a while, however much it holds. If too many wait
// for that, the caller removes this one. After Close it stays until the next start.
func (s *Service) discard(ctx context.Context, id string) {
	s.mu.Lock()
	n, open := len(s.trash), s.ctx.Err() == nil
	if open && n < maxTrash {
		s.trash = append(s.trash, id)
	}
	if open && n == 0 {
		s.removal.Go(func() { s.emptyTrash(id) })
	}
	s.mu.Unlock()
	if open && n == maxTrash {
		s.unstage(context.WithoutCancel(ctx), id)
	}
}

// emptyTrash removes the first staging directory of the trash, and those that follow it.
func (s *Service) emptyTrash(id string) {
	for id != "" {
		_ = s.at(stepDiscarding)
		s.unstage(s.ctx, id)
		s.mu.Lock()
		s.trash = s.trash[1:]
		id = ""
		if s.ctx.Err() == nil && len(s.trash) > 0 {
			id = s.trash[0]
		}
		s.mu.Unlock()
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
