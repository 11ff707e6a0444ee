package chat

import (
	"context"
	"os"
)

// lock is a chat's: whoever changes its directory by the API has it. It is never held
// while a caller's body streams.
type lock struct {
	turn  chan struct{} // holds one element while somebody has it
	users int           // that have it or wait for it; guarded by Service.mu
}

// lock waits for a chat's lock. Without an error, unlock must be called.
func (s *Service) lock(ctx context.Context, k key) (unlock func(), err error) {
	s.mu.Lock()
	l := s.locks[k]
	if l == nil {
		l = &lock{turn: make(chan struct{}, 1)}
		s.locks[k] = l
	}
	l.users++
	s.mu.Unlock()
	leave := func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if l.users--; l.users == 0 {
			delete(s.locks, k)
		}
	}
	select {
	case l.turn <- struct{}{}:
		return func() { <-l.turn; leave() }, nil
	case <-ctx.Done():
		leave()
		return nil, context.Cause(ctx)
	}
}

// enter takes a chat's lock, sees that the chat is the same as before and that no change
// of it is half done, and opens its directory. Without an error, leave must be called.
func (s *Service) enter(ctx context.Context, c Chat) (dir *os.Root, leave func(), err error) {
	dir, half, leave, err := s.enterHalf(ctx, c)
	if err == nil && half != nil {
		leave()
		return nil, nil, half.err
	}
	return dir, leave, err
}

// unfinished are the changes of a chat that can't be finished now.
type unfinished struct {
	err   error           // why
	names map[string]bool // of the files that come with them
}

// has tells why a file must be left to changes that come first; nil if none has to do with
// it.
func (u *unfinished) has(name string) error {
	if u == nil || !u.names[name] {
		return nil
	}
	return u.err
}

// enterHalf is enter for what adds nothing, and so goes on beside a change that is half done,
// if only not with its files: half is nil if there is none. What is deleted may be the room
// that it wants for.
func (s *Service) enterHalf(ctx context.Context, c Chat) (dir *os.Root, half *unfinished, leave func(), err error) {
	unlock, err := s.lock(ctx, c.key())
	if err != nil {
		return nil, nil, nil, err
	}
	defer func() {
		if err != nil {
			unlock()
		}
	}()
	now, err := s.chat(ctx, c.Tenant, c.ID)
	if err != nil {
		return nil, nil, nil, err
	}
	if !now.CreatedAt.Equal(c.CreatedAt) || now.WorkspaceID != c.WorkspaceID {
		return nil, nil, nil, &NotFoundError{ID: c.ID} // deleted meanwhile, and made again
	}
	half = s.finishPending(ctx, c)
	dir, err = s.layout(ctx, c, false)
	if err != nil {
		return nil, nil, nil, err
	}
	return dir, half, func() { _ = dir.Close(); unlock() }, nil
}
