package lifecycle

import "time"

// What the fuzzers of package lifecycle_test need to see.

// Split is split.
var Split = split

// TextCollector is textCollector.
type TextCollector struct{ textCollector }

// NewTextCollector returns a collector of at most limit code points.
func NewTextCollector(limit int) *TextCollector {
	return &TextCollector{textCollector{limit: limit}}
}

// Collected is collected.
func (c *TextCollector) Collected() (string, bool) { return c.collected() }

// Held counts what the manager remembers: keys, containers, creates under way,
// ended containers that somebody may ask about, and keys where somebody has the turn.
func (m *Manager) Held() [5]int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return [5]int{len(m.slots), len(m.containers), len(m.making), len(m.ended), len(m.lines)}
}

// Hubs counts the holds on processes of a tenant's sandbox.
func (m *Manager) Hubs(tenant, key string) int {
	rec := m.recordOf(keyID{tenant, key})
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(rec.inside.hubs)
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
func (m *Manager) HasSandbox(tenant, key string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	s := m.slots[keyID{tenant, key}]
	return s != nil && (s.record != nil || s.flight != nil)
}
