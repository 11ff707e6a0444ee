package proxy

import (
	"sync"
	"time"
)

// ringSize is how many errors are remembered for each tenant.
const ringSize = 50

// RecentError is one answered error.
type RecentError struct {
	Time      time.Time
	Code      string
	Status    int
	Message   string
	Route     string
	Key       string // empty where there is none
	RequestID string
}

// ring remembers each tenant's last errors apart, so that one tenant can't push
// out another's.
type ring struct {
	mu sync.Mutex
	m  map[string][]RecentError // oldest first
}

func newRing() *ring { return &ring{m: map[string][]RecentError{}} }

func (r *ring) add(tenant string, e RecentError) {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := append(r.m[tenant], e)
	if len(s) > ringSize {
		s = append(s[:0], s[len(s)-ringSize:]...)
	}
	r.m[tenant] = s
}

func (r *ring) recent(tenant string) []RecentError {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := r.m[tenant]
	out := make([]RecentError, 0, len(s))
	for i := len(s) - 1; i >= 0; i-- {
		out = append(out, s[i])
	}
	return out
}
