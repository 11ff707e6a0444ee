package lifecycle

import (
	"context"
	"regexp"
	"strings"

	"github.com/google/uuid"
)

var keyPattern = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_.:-]{0,127}$`)

// ParseKey checks a key and brings it into its canonical form: trimmed, and
// lower case if it is a UUID in its usual 36-character form.
func ParseKey(s string) (string, error) {
	s = strings.TrimSpace(s)
	if !keyPattern.MatchString(s) {
		return "", &InvalidError{Field: "key", Message: "must match [A-Za-z0-9][A-Za-z0-9_.:-]{0,127}"}
	}
	if len(s) == 36 {
		if id, err := uuid.Parse(s); err == nil {
			return id.String(), nil
		}
	}
	return s, nil
}

// keyID names a key of a tenant: two tenants may use the same key.
type keyID struct{ tenant, key string }

// slot is everything that the Manager knows of one key. It is guarded by
// Manager.mu and freed once it is empty.
type slot struct {
	busy    chan struct{} // closed when the operation that holds the key ends; nil when nobody does
	flight  *flight       // the create that holds the key, if that is what holds it
	record  *record       // the live sandbox, if there is one
	failure *failure      // how the last create failed, if nobody has been told yet
}

// hold takes a key for one operation that changes it, and waits for its turn.
// With join, a create that is under way is answered instead of waited for.
// Whoever gets no flight and no error must call drop.
func (m *Manager) hold(ctx context.Context, id keyID, join bool) (*flight, error) {
	for {
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		m.mu.Lock()
		s := m.slots[id]
		if s == nil {
			s = &slot{}
			m.slots[id] = s
		}
		if s.busy == nil {
			s.busy = make(chan struct{})
			m.mu.Unlock()
			return nil, nil
		}
		if join && s.flight != nil {
			f := s.flight
			m.mu.Unlock()
			return f, nil
		}
		busy := s.busy
		m.mu.Unlock()
		select {
		case <-busy:
		case <-ctx.Done():
		}
	}
}

// drop lets go of a key that hold took.
func (m *Manager) drop(id keyID) {
	m.mu.Lock()
	defer m.mu.Unlock()
	s := m.slots[id]
	close(s.busy)
	s.busy, s.flight = nil, nil
	m.freeLocked(id, s)
}

// freeLocked forgets a slot that holds nothing any more.
func (m *Manager) freeLocked(id keyID, s *slot) {
	if s.busy == nil && s.record == nil && s.failure == nil {
		delete(m.slots, id)
	}
}
