package chat

import (
	"context"
)

// CrashAt makes a Service that tells at which step of a change it is; an error stops it
// there.
func CrashAt(ctx context.Context, opts Options, at func(step string) error) (*Service, error) {
	return start(ctx, opts, func(s step) error { return at(string(s)) })
}

// Steps are those of what is written, in their order.
func Steps() []string {
	return []string{string(stepStaged), string(stepReserved), string(stepRecorded), string(stepMerged)}
}

// SetMost has a chat have no more files that are listed.
func (s *Service) SetMost(n int) { s.most = n }

// Locked reports whether somebody holds a chat's lock.
func (s *Service) Locked(c Chat) bool {
	unlock, ok := s.locks.TryLock(c.key())
	if ok {
		unlock()
	}
	return !ok
}

// Settle waits until all that deleted chats held is removed.
func (s *Service) Settle() { s.removal.Wait() }

// Ending is done once it has been asked so many times.
type Ending struct {
	context.Context
	Left int
}

// Err tells whether it is done.
func (e *Ending) Err() error {
	if e.Left--; e.Left < 0 {
		return context.Canceled
	}
	return nil
}
