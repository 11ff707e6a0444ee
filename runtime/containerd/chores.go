package containerd

import (
	"sync"
	"time"
)

// closeTimeout is how long Close waits for chores.
const closeTimeout = 5 * time.Second

// chores runs work that outlives the calls that began it.
type chores struct {
	mu   sync.Mutex
	n    int
	idle chan struct{} // closed when the last one under way ends
}

// background runs f in a goroutine that only Close waits for.
func (c *chores) background(f func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.n == 0 {
		c.idle = make(chan struct{})
	}
	c.n++
	go func() {
		f()
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.n--; c.n == 0 {
			close(c.idle)
		}
	}()
}

// wait waits until no chore runs, for at most closeTimeout.
func (c *chores) wait() {
	c.mu.Lock()
	idle := c.idle
	c.mu.Unlock()
	if idle == nil {
		return
	}
	select {
	case <-idle:
	case <-time.After(closeTimeout):
	}
}
