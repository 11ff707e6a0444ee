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
	return []string{string(stepStaged), string(stepReserved), string(stepIntended), string(stepMerged), string(stepFinished)}
}

// Repair is what is done about files that seem to have no record, and the other way about.
func (s *Service) Repair(ctx context.Context, c Chat, missing []string, stale []File) (adopted []File, dropped int, err error) {
	return s.repair(ctx, c, drift{missing: missing, stale: stale})
}

// SetMost has a chat have no more files that are listed.
func (s *Service) SetMost(n int) { s.most = n }

// Locks is how many locks are held or waited for, and staging directories in use.
func (s *Service) Locks() (locks, staged int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.locks), len(s.staged)
}

// Settle waits until all that deleted chats held is removed.
func (s *Service) Settle() {
	for {
		s.mu.Lock()
		done := s.trash.done
		s.mu.Unlock()
		if done == nil {
			return
		}
		<-done
	}
}

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
