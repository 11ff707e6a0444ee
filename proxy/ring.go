package proxy

import (
	"slices"
	"sync"
	"time"
)

const (
	ringSize    = 50 // errors for each tenant
	ringUnnamed = 10 // of these, errors of requests without a token: anyone with a signed URL can cause them
)

// RecentError is one answered error.
type RecentError struct {
	Time      time.Time
	Code      string
	Status    int
	Message   string
	Route     string
	Key       string // empty where there is none
	RequestID string
	unnamed   bool // the request had no token
}

// ring holds the last errors of each tenant separately, so that no tenant can push out
// another's.
type ring struct {
	mu sync.Mutex
	m  map[string][]RecentError // oldest first
}

func newRing() *ring { return &ring{m: map[string][]RecentError{}} }

func (r *ring) add(tenant string, e RecentError) {
	r.mu.Lock()
	defer r.mu.Unlock()
	s, unnamed := r.m[tenant], 0
	for _, old := range s {
		if old.unnamed {
			unnamed++
		}
	}
	switch oldest := slices.IndexFunc(s, func(old RecentError) bool { return old.unnamed }); {
	case e.unnamed && unnamed >= ringUnnamed:
		s = slices.Delete(s, oldest, oldest+1)
	case len(s) == ringSize:
		s = slices.Delete(s, 0, 1)
	}
	r.m[tenant] = append(s, e)
}

func (r *ring) recent(tenant string) []RecentError {
	r.mu.Lock()
	defer r.mu.Unlock()
	out := slices.Clone(r.m[tenant])
	slices.Reverse(out)
	return out
}
