// Package keylock locks by key: one lock for each value of a key, for as long as
// somebody uses it.
package keylock

import (
	"context"
	"sync"
)

// Map is a set of locks, one for each key. The zero value is ready for use, by many
// goroutines at once. A lock that nobody holds or waits for takes no memory.
type Map[K comparable] struct {
	mu    sync.Mutex
	locks map[K][]chan struct{} // the waiters of each held lock, first come first
}

// Lock acquires the lock of a key. Waiters acquire it in the order in which they came.
// The error is context.Cause(ctx), if ctx ends first; the lock isn't held then. Unlock
// releases the lock; only its first call does anything.
func (m *Map[K]) Lock(ctx context.Context, key K) (unlock func(), err error) {
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	m.mu.Lock()
	waiters, held := m.locks[key]
	if !held {
		m.hold(key)
		m.mu.Unlock()
		return m.unlock(key), nil
	}
	turn := make(chan struct{})
	m.locks[key] = append(waiters, turn)
	m.mu.Unlock()
	select {
	case <-turn:
		return m.unlock(key), nil
	case <-ctx.Done():
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for i, w := range m.locks[key] {
		if w == turn {
			m.locks[key] = append(m.locks[key][:i:i], m.locks[key][i+1:]...)
			return nil, context.Cause(ctx)
		}
	}
	m.next(key) // the lock came as ctx ended
	return nil, context.Cause(ctx)
}

// TryLock acquires the lock of a key if nobody holds it.
func (m *Map[K]) TryLock(key K) (unlock func(), ok bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if _, held := m.locks[key]; held {
		return nil, false
	}
	m.hold(key)
	return m.unlock(key), true
}

// Waiting returns how many callers wait for the lock of a key.
func (m *Map[K]) Waiting(key K) int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.locks[key])
}

func (m *Map[K]) hold(key K) {
	if m.locks == nil {
		m.locks = map[K][]chan struct{}{}
	}
	m.locks[key] = nil
}

func (m *Map[K]) unlock(key K) func() {
	return sync.OnceFunc(func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		m.next(key)
	})
}

// next hands the lock to the first waiter, or frees it. The caller holds m.mu.
func (m *Map[K]) next(key K) {
	waiters := m.locks[key]
	if len(waiters) == 0 {
		delete(m.locks, key)
		return
	}
	m.locks[key] = waiters[1:]
	close(waiters[0])
}
