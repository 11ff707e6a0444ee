package mountpin

import (
	"context"
	"fmt"
	"io/fs"
	"slices"
	"sync"

	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/runtime"
)

// Claims records which containers mount which directories, for the sandbox API and the engine
// proxy. It is safe for many goroutines.
type Claims struct {
	// InUse returns the mounts of all containers that exist. Mandatory.
	InUse func(context.Context) ([]policy.Mount, error)

	mu     sync.Mutex
	making map[string][]policy.Mount
	uses   []*Use // in the order in which they began to wait
}

// Enter claims the mounts of a container that is about to be created or started, under its
// name. It returns the mounts of all containers, its own included. Of two containers that
// enter at once, at least one gets the other's mounts. InUse must return a container before
// its claim is released.
func (c *Claims) Enter(ctx context.Context, name string, mounts []policy.Mount) (all []policy.Mount, release func(), err error) {
	c.mu.Lock()
	if c.making == nil {
		c.making = map[string][]policy.Mount{}
	}
	if _, busy := c.making[name]; busy {
		c.mu.Unlock()
		return nil, nil, fmt.Errorf("claim mounts of %s: %w", name, fs.ErrExist)
	}
	c.making[name] = mounts
	for _, m := range c.making {
		all = append(all, m...)
	}
	c.mu.Unlock()
	release = func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		delete(c.making, name)
	}
	there, err := c.InUse(ctx)
	if err != nil {
		release()
		return nil, nil, fmt.Errorf("find out what other containers mount: %w", err)
	}
	return append(all, there...), release, nil
}

// Use is a start of a container or an archive call, with what it mounts.
type Use struct {
	ID      string // the container's, or a sandbox's session
	Archive bool
	Alone   bool            // keep the start apart from other starts, too
	Volumes map[string]bool // by name; true if writable
	Binds   []policy.Mount

	over chan struct{} // closed when the use has ended
}

// Writes reports whether u can write to something that o mounts.
func (u *Use) Writes(o *Use) bool {
	for name, writable := range u.Volumes {
		if _, there := o.Volumes[name]; there && writable {
			return true
		}
	}
	return slices.ContainsFunc(u.Binds, func(m policy.Mount) bool {
		return m.Mode != "ro" && slices.ContainsFunc(o.Binds, func(n policy.Mount) bool {
			return runtime.Below(m.Source, n.Source) || runtime.Below(n.Source, m.Source)
		})
	})
}

// Use keeps starts and archive calls of a shared mount apart. It waits until all earlier uses
// that conflict with u have ended, or until ctx ends. Starts don't wait for starts, unless one
// is Alone. Archive calls don't wait for archive calls.
func (c *Claims) Use(ctx context.Context, u *Use) (leave func(), err error) {
	u.over = make(chan struct{})
	var before []*Use
	c.mu.Lock()
	for _, o := range c.uses {
		if (o.Archive != u.Archive || o.Alone || u.Alone) && (o.ID == u.ID || o.Writes(u) || u.Writes(o)) {
			before = append(before, o)
		}
	}
	c.uses = append(c.uses, u)
	c.mu.Unlock()
	leave = func() {
		c.mu.Lock()
		c.uses = slices.DeleteFunc(c.uses, func(o *Use) bool { return o == u })
		c.mu.Unlock()
		close(u.over)
	}
	for _, o := range before {
		select {
		case <-o.over:
		case <-ctx.Done():
			leave()
			return nil, context.Cause(ctx)
		}
	}
	return leave, nil
}

// Start is Use for a sandbox that is about to be created.
func (c *Claims) Start(ctx context.Context, sessionID string, mounts []policy.Mount) (leave func(), err error) {
	return c.Use(ctx, &Use{ID: sessionID, Binds: mounts})
}
