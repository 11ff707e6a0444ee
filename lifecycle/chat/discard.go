package chat

import (
	"context"
)

// maxTrash is how many staging directories may wait to be removed.
const maxTrash = 1000

// trash is what is to be removed while nobody waits for it. Guarded by Service.mu.
type trash struct {
	names  []string           // of staging directories
	stop   context.CancelFunc // of the goroutine that removes them
	done   chan struct{}      // closed once that has ended; nil while there is none
	closed bool
}

// discard has a staging directory that is in use removed in a while, however much it holds.
// If too many wait for that, the caller removes this one.
func (s *Service) discard(ctx context.Context, id string) {
	if !s.throwAway(id) {
		s.unstage(context.WithoutCancel(ctx), id)
	}
}

func (s *Service) throwAway(id string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	t := &s.trash
	switch {
	case t.closed: // it goes at the next start
		delete(s.staged, id)
		return true
	case len(t.names) >= maxTrash:
		return false
	}
	t.names = append(t.names, id)
	if t.done == nil {
		var ctx context.Context
		ctx, t.stop = context.WithCancel(context.Background())
		t.done = make(chan struct{})
		go s.empty(ctx, t.done)
	}
	return true
}

// empty removes what was discarded until there is nothing left, or the context is done.
func (s *Service) empty(ctx context.Context, done chan struct{}) {
	defer close(done)
	for {
		id, ok := s.nextTrash(ctx)
		if !ok {
			return
		}
		_ = s.at(stepDiscarding)
		s.unstage(ctx, id)
	}
}

// nextTrash takes out what is to be removed next; if that is nothing, somebody else has to
// see to what comes from then on.
func (s *Service) nextTrash(ctx context.Context) (id string, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	t := &s.trash
	if len(t.names) > 0 && ctx.Err() == nil {
		id, t.names = t.names[0], t.names[1:]
		return id, true
	}
	for _, id := range t.names {
		delete(s.staged, id)
	}
	t.stop()
	t.names, t.stop, t.done = nil, nil, nil
	return "", false
}

// Close ends the removal of what deleted chats held, and waits until it has ended, or the
// context is done, whose cause it answers then. What is left goes at the next start, and so
// does what is deleted from then on. It may be called more than once.
func (s *Service) Close(ctx context.Context) error {
	s.mu.Lock()
	s.trash.closed = true
	done := s.trash.done
	if done != nil {
		s.trash.stop()
	}
	s.mu.Unlock()
	if done == nil {
		return nil
	}
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
