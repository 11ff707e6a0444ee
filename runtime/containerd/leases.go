package containerd

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/containerd/containerd/v2/core/leases"
)

// labelHolder names the process that holds a lease during a call. Leases of containers don't
// have it.
const labelHolder = labelPrefix + "holder"

// callLease is the prefix of the IDs of leases with labelHolder.
const callLease = "call-"

// underWay holds the IDs of the leases that calls of this process use.
var underWay sync.Map

// holder returns a name that identifies this process, even among later processes with the same pid.
func holder() (string, error) {
	p, err := readProcess(os.Getpid())
	if err != nil {
		return "", fmt.Errorf("look at this process: %w", err)
	}
	return fmt.Sprintf("%d-%d", p.pid, p.start), nil
}

// holderGone reports whether the process that a holder names has ended. It returns false for a
// malformed name: the lease expires anyway.
func holderGone(name string) bool {
	number, start, found := strings.Cut(name, "-")
	pid, perr := strconv.Atoi(number)
	begun, serr := strconv.ParseUint(start, 10, 64)
	if !found || perr != nil || serr != nil {
		return false
	}
	now, err := readProcess(pid)
	return errors.Is(err, fs.ErrNotExist) || err == nil && now.start != begun
}

// sweepLeases deletes the leases of this root whose holders have ended, and those of this
// process that no call uses. The engine's collector then removes what they kept.
func (r *Runtime) sweepLeases(ctx context.Context) error {
	own, err := holder()
	if err != nil {
		return err
	}
	service := r.client.LeasesService()
	held, err := service.List(ctx, "labels."+strconv.Quote(labelRoot)+"=="+strconv.Quote(r.opts.Root)+",labels."+strconv.Quote(labelHolder))
	if err != nil {
		return err
	}
	var errs []error
	for _, l := range held {
		name := l.Labels[labelHolder]
		if _, used := underWay.Load(l.ID); name == own && used || name != own && !holderGone(name) {
			continue
		}
		if err := absent(service.Delete(ctx, l, leases.SynchronousDelete)); err != nil {
			errs = append(errs, fmt.Errorf("lease %s: %w", l.ID, err))
		}
	}
	return errors.Join(errs...)
}

// withLease runs f with a lease that keeps all that f makes from the engine's collector. It deletes the
// lease after f. If that fails, a sweep deletes the lease, or it expires.
func (r *Runtime) withLease(ctx context.Context, expiry time.Duration, f func(context.Context) error) error {
	service := r.client.LeasesService()
	name, err := holder()
	if err != nil {
		return err
	}
	lease := leases.Lease{ID: callLease + newID()}
	underWay.Store(lease.ID, true)
	defer underWay.Delete(lease.ID)
	// The engine may make the lease even if the call is cancelled.
	lingering, cancel := r.linger(r.namespaced(ctx))
	_, err = service.Create(lingering, leases.WithID(lease.ID), leases.WithExpiration(expiry),
		leases.WithLabel(labelRoot, r.opts.Root), leases.WithLabel(labelHolder, name))
	cancel()
	if err != nil {
		return failure(ctx, "take a lease", err)
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTimeout)
		defer cancel()
		if err := absent(service.Delete(r.namespaced(ctx), lease)); err != nil {
			r.log.WarnContext(ctx, "lease_left", "lease", lease.ID, "error", err)
		}
	}()
	return f(leases.WithLease(r.namespaced(ctx), lease.ID))
}
