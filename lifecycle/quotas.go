package lifecycle

import (
	"os"
	"sync"
)

// quotas knows the quotas of sandboxes and of chats' workspaces. It knows no records.
type quotas struct {
	opts *Options

	mu         sync.Mutex
	workspaces map[string]*os.Root // directories with a quota of their own, by session
}

func newQuotas(opts *Options) *quotas {
	return &quotas{opts: opts, workspaces: map[string]*os.Root{}}
}

// keep keeps the workspace of a session open until leave.
func (q *quotas) keep(sessionID string, root *os.Root) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.workspaces[sessionID] = root
}
