package engineapi

import (
	"context"
	"fmt"
	"net/http"
	"sync"

	"github.com/bermhq/berm/proxy"
)

const (
	maxActs  = 64 // starts, restarts and stops of one tenant's that go on at a time
	maxStops = 8  // stops of one container that go on at a time
)

// turns lets one start or restart of each container go on at a time.
type turns struct {
	mu   sync.Mutex
	held map[string]chan struct{} // by the container's ID, and one of a tenant's count of execs; closed when it is over
}

// take waits for the container's turn, or until ctx ends.
func (t *turns) take(ctx context.Context, id string) (leave func(), err error) {
	for {
		t.mu.Lock()
		before, held := t.held[id]
		if !held {
			if t.held == nil {
				t.held = map[string]chan struct{}{}
			}
			over := make(chan struct{})
			t.held[id] = over
			t.mu.Unlock()
			return func() {
				t.mu.Lock()
				delete(t.held, id)
				t.mu.Unlock()
				close(over)
			}, nil
		}
		t.mu.Unlock()
		select {
		case <-before:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// act counts what starts, restarts or stops a container until leave is called, as the
// engine goes on with it also when the caller has left.
func (c *call) act(key string, most int64) (leave func(), err error) {
	all := "acts " + c.caller.Tenant
	leave = func() { c.rooms.leave(all); c.rooms.leave(key) }
	if one, every := c.rooms.enter(key), c.rooms.enter(all); one > most || every > maxActs {
		leave()
		return nil, &proxy.Fault{Status: http.StatusTooManyRequests, Code: "capacity", Title: "At capacity",
			Detail: fmt.Sprintf("%d starts, restarts and stops go on, which is the most that one tenant may have, or %d stops of this container", maxActs, maxStops)}
	}
	return leave, nil
}
