package lifecycle

import (
	"context"
	"fmt"
	"slices"
	"time"
)

// line is those who wait for a sandbox' turn, while somebody has it. It belongs to the
// key, so that the order survives a sandbox that dies and is made again.
type line struct {
	waiting []chan struct{} // closed when its turn has come; the first is next
}

// takeTurn waits until all who came before have had their turn. Whoever gets no error
// must see to it that passTurnLocked is called.
func (m *Manager) takeTurn(ctx context.Context, id keyID) error {
	m.mu.Lock()
	l := m.lines[id]
	if l == nil {
		m.lines[id] = &line{}
		m.mu.Unlock()
		return nil
	}
	if len(l.waiting) >= m.opts.Settings.MaxQueued {
		m.mu.Unlock()
		return &CapacityError{
			Message:    fmt.Sprintf("%d commands wait for their turn in sandbox %q, which is as many as may", len(l.waiting), id.key),
			RetryAfter: time.Second,
		}
	}
	turn := make(chan struct{})
	l.waiting = append(l.waiting, turn)
	m.hurryLocked(id)
	m.mu.Unlock()
	var err error
	select {
	case <-turn:
		return nil
	case <-ctx.Done():
		err = context.Cause(ctx)
	case <-m.tending.Done():
		err = errClosing
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if i := slices.Index(l.waiting, turn); i >= 0 {
		l.waiting = slices.Delete(l.waiting, i, i+1)
	} else { // it came at that very moment
		m.passTurnLocked(id)
	}
	return err
}

// passTurn gives the turn to the next in the line.
func (m *Manager) passTurn(id keyID) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.passTurnLocked(id)
}

func (m *Manager) passTurnLocked(id keyID) {
	l := m.lines[id]
	if len(l.waiting) == 0 {
		delete(m.lines, id)
		return
	}
	close(l.waiting[0])
	l.waiting = slices.Delete(l.waiting, 0, 1)
}
