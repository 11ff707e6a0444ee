package chat

import (
	"context"
	"sync"
)

// maxTrash is how many staging directories may wait to be removed.
const maxTrash = 1000

// trash is what is removed while nobody waits for it, one after the other.
type trash struct {
	ctx   context.Context // until Close
	stop  context.CancelFunc
	slots chan struct{} // one for each that waits, or is being removed
	turn  sync.Mutex    // held while one is removed
	group sync.WaitGroup
}

func newTrash() *trash {
	t := &trash{slots: make(chan struct{}, maxTrash)}
	t.ctx, t.stop = context.WithCancel(context.Background())
	return t
}

// discard removes a staging directory in a while, however much it holds. If too many wait
// for that, the caller removes this one. After Close it stays until the next start.
func (s *Service) discard(ctx context.Context, id string) {
	if !s.removeLater(id) {
		s.unstage(context.WithoutCancel(ctx), id)
	}
}

func (s *Service) removeLater(id string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	t := s.trash
	if t.ctx.Err() != nil {
		return true
	}
	select {
	case t.slots <- struct{}{}:
	default:
		return false
	}
	t.group.Go(func() {
		defer func() { <-t.slots }()
		t.turn.Lock()
		defer t.turn.Unlock()
		if t.ctx.Err() == nil {
			_ = s.at(stepDiscarding)
			s.unstage(t.ctx, id)
		}
	})
	return true
}

// Close ends the removal of what deleted chats held, and waits until it has ended, or the
// context is done, whose cause it returns then. What is left goes at the next start, and so
// does what is deleted from then on. It may be called more than once.
func (s *Service) Close(ctx context.Context) error {
	s.mu.Lock()
	s.trash.stop()
	s.mu.Unlock()
	done := make(chan struct{})
	go func() {
		s.trash.group.Wait()
		close(done)
	}()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
