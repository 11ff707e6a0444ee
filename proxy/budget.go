package proxy

import (
	"context"
	"net/http"
	"sync"
	"time"

	"golang.org/x/sync/semaphore"
)

// budgetWait is how long Resize waits for other leases to give bytes back.
const budgetWait = 10 * time.Second

// Budget bounds the bytes that requests hold, for each tenant and in all. A nil Budget
// bounds nothing. It is safe for many goroutines.
type Budget struct {
	what  string // name of the bytes, for errors
	share int64  // of one tenant
	all   *semaphore.Weighted

	mu      sync.Mutex
	tenants map[string]*tenantShare
}

// tenantShare is one tenant's part of a Budget. The release of its last lease deletes it.
type tenantShare struct {
	*semaphore.Weighted
	leases int
}

// NewBudget makes a Budget of total bytes, of which one tenant may hold share. What names
// the bytes in errors.
func NewBudget(what string, total, share int64) *Budget {
	return &Budget{what: what, share: share, all: semaphore.NewWeighted(total), tenants: map[string]*tenantShare{}}
}

// Lease begins a lease of no bytes. The caller releases it. A nil Budget gives a nil
// Lease, which may be used like any other.
func (b *Budget) Lease(tenant string) *Lease {
	if b == nil {
		return nil
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	s := b.tenants[tenant]
	if s == nil {
		s = &tenantShare{Weighted: semaphore.NewWeighted(b.share)}
		b.tenants[tenant] = s
	}
	s.leases++
	return &Lease{b: b, tenant: tenant, share: s}
}

// Lease is a part of a Budget. It belongs to one goroutine at a time.
type Lease struct {
	b      *Budget
	tenant string
	share  *tenantShare // nil once released
	n      int64
}

// Resize makes the lease n bytes large. It waits up to 10 s for bytes that other leases
// hold, and then fails with a Fault of status 429. A lease that can't grow keeps its size.
func (l *Lease) Resize(ctx context.Context, n int64) error {
	if l == nil || l.share == nil || n == l.n {
		return nil
	}
	if n < l.n {
		l.share.Release(l.n - n)
		l.b.all.Release(l.n - n)
		l.n = n
		return nil
	}
	full := &Fault{Status: http.StatusTooManyRequests, Code: "capacity", Title: "At capacity",
		Detail: "other requests hold the " + l.b.what + " that one tenant, or all together, may hold", RetryAfter: retrySoon}
	if n > l.b.share {
		return full
	}
	waiting, cancel := context.WithTimeout(ctx, budgetWait)
	defer cancel()
	err := l.share.Acquire(waiting, n-l.n)
	if err == nil {
		if err = l.b.all.Acquire(waiting, n-l.n); err != nil {
			l.share.Release(n - l.n)
		}
	}
	switch {
	case ctx.Err() != nil && err != nil:
		return context.Cause(ctx)
	case err != nil:
		return full
	}
	l.n = n
	return nil
}

// Release gives all bytes back. Further calls do nothing.
func (l *Lease) Release() {
	if l == nil || l.share == nil {
		return
	}
	_ = l.Resize(context.Background(), 0) // which can't fail
	l.b.mu.Lock()
	defer l.b.mu.Unlock()
	if l.share.leases--; l.share.leases == 0 {
		delete(l.b.tenants, l.tenant)
	}
	l.share = nil
}

// Bodies bounds the memory of requests' bodies and of commands' output. Bodies of up to
// MaxBody bytes have a budget of their own, so that larger ones don't keep them out. A nil
// Bodies bounds nothing.
type Bodies struct{ small, large, output *Budget }

// NewBodies returns Bodies for a server with 512 MB of memory. The budgets add up to
// 256 MiB: Go's garbage collector may need half as much again.
func NewBodies() *Bodies {
	const what = "memory for request bodies"
	return &Bodies{small: NewBudget(what, 64<<20, 16<<20), large: NewBudget(what, 96<<20, 48<<20), output: NewBudget("memory for output", 96<<20, 48<<20)}
}

// lease begins a lease for a body of at most the given number of bytes.
func (b *Bodies) lease(tenant string, most int64) *Lease {
	switch {
	case b == nil:
		return nil
	case most > MaxBody:
		return b.large.Lease(tenant)
	}
	return b.small.Lease(tenant)
}

const (
	outputStart  = 16 << 10 // bytes that a command's output may take without a lease
	outputCopies = 3        // of kept output: the bytes, their text and the answer
)

// LeaseOutput leases memory for the output of a command. Keep leases memory for further bytes.
// Once it has failed, it always fails. Both functions are safe for many goroutines. The first
// bytes need no lease: otherwise commands that print much could keep those of other tenants
// from running.
func (ex *Exchange) LeaseOutput(ctx context.Context) (keep func(bytes int) error, release func()) {
	if ex.bodies == nil {
		return nil, func() {}
	}
	lease := ex.bodies.output.Lease(ex.Caller.Tenant)
	var mu sync.Mutex
	var held int64
	var full error
	keep = func(bytes int) error {
		mu.Lock()
		defer mu.Unlock()
		if full == nil {
			held += int64(bytes) * outputCopies
			full = lease.Resize(ctx, max(held-outputStart, 0))
		}
		return full
	}
	release = func() {
		mu.Lock()
		defer mu.Unlock()
		lease.Release()
	}
	return keep, release
}
