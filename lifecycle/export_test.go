package lifecycle

import "time"

// What package lifecycle_test needs to see.

// Split is split.
var Split = split

// TextCapture is textCapture.
type TextCapture struct{ textCapture }

// NewTextCapture returns a capture of at most limit code points.
func NewTextCapture(limit int) *TextCapture {
	return &TextCapture{textCapture{limit: limit}}
}

// Collected is collected.
func (c *TextCapture) Collected() (string, bool) { return c.collected() }

// Held counts what the Service remembers: keys, containers, creates under way, and ended
// containers that a create may ask for.
func (s *Service) Held() [4]int {
	r := s.Registry
	r.mu.Lock()
	defer r.mu.Unlock()
	return [4]int{len(r.slots), len(r.containers), len(r.making), len(r.ended)}
}

// Turn reports whether a command of a tenant's sandbox has the turn.
func (s *Service) Turn(tenant, key string) bool {
	unlock, free := s.turns.TryLock(keyID{tenant, key})
	if free {
		unlock()
	}
	return !free
}

// Streams counts the processes of a tenant's sandbox that are followed.
func (s *Service) Streams(tenant, key string) int {
	rec, _ := s.recordOf(keyID{tenant, key})
	m := monitorOf(rec)
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(m.streams)
}

// LabelTimeout reads the timeout from what a sandbox says is a label, and KindOf the
// kind and the caller's name from what it says is an ID.
func LabelTimeout(s string) time.Duration { return parseLabel(s).timeout() }

// KindOf is kindOf.
func KindOf(s string) (string, string) {
	k, id := kindOf(s)
	return string(k), id
}

// HasSandbox tells whether the key has a sandbox, or one is being made: its directory
// may change at any time.
func (s *Service) HasSandbox(tenant, key string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	x := s.slots[keyID{tenant, key}]
	return x != nil && (x.record != nil || x.pending != nil)
}
