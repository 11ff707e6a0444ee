package lifecycle

import (
	"context"
	"os"
	"slices"
	"strings"
)

// Ceilings has the kernel hold sandboxes' own workspaces to their quotas, where it can and
// nobody else has a part in them. It must be safe for many goroutines, and calls nothing of
// the Manager's.
type Ceilings interface {
	// Enter says that a sandbox is about to be there, which must not be if that fails. It
	// answers the sessions whose workspaces aren't held any more, as this one shares them.
	Enter(ctx context.Context, o Occupant) (softened []string, err error)
	// Leave says that a session's sandbox can't write any more; its limit is lifted. A
	// session that isn't known is no error.
	Leave(sessionID string)
	// Holds tells whether the kernel holds the session's workspace now. It asks nobody, so
	// that the Manager's lock may be held.
	Holds(sessionID string) bool
	// Sweep undoes what is left of sandboxes that aren't there any more.
	Sweep(ctx context.Context) error
}

// Occupant is a sandbox, as Ceilings know it.
type Occupant struct {
	SessionID  string
	Dirs       []string // that it may write to: absolute, without symbolic links
	Workspace  string   // the one of them that has a quota; empty if none has
	Root       *os.Root // the workspace; nil: its path is opened
	QuotaBytes int64    // of the workspace
	Resumed    bool     // another process made it: it may be running already
}

func occupant(sb Sandbox) Occupant {
	o := Occupant{SessionID: sb.SessionID}
	for _, mt := range sb.Spec.Mounts {
		if mt.Mode != "ro" {
			o.Dirs = append(o.Dirs, mt.Local)
		}
	}
	// With that capability, ext4 holds nobody to a quota.
	exempt := slices.ContainsFunc(sb.Spec.CapAdd, func(c string) bool { return strings.HasSuffix(c, "SYS_RESOURCE") })
	if dir, quota := workspace(sb.Spec); slices.Contains(o.Dirs, dir) && !exempt {
		o.Workspace, o.QuotaBytes = dir, quota
	}
	return o
}

// enter makes a sandbox known that is about to be there, and returns the sessions whose quotas
// have become soft of it.
func (q *quotas) enter(ctx context.Context, o Occupant) (softened []string, err error) {
	if q.opts.Ceilings == nil {
		return nil, nil
	}
	return q.opts.Ceilings.Enter(ctx, o)
}

func (q *quotas) leave(sessionID string) {
	q.mu.Lock()
	root := q.workspaces[sessionID]
	delete(q.workspaces, sessionID)
	q.mu.Unlock()
	if root != nil {
		_ = root.Close() // it was only read
	}
	if q.opts.Ceilings != nil {
		q.opts.Ceilings.Leave(sessionID)
	}
}

// resume makes the sandboxes known that an earlier process has left. The error is the
// context's cause: then some of them aren't, and would lose their limits to the sweep.
func (c *reconciler) resume(ctx context.Context) error {
	m := c.registry
	for _, r := range m.all() {
		sb := m.snapshot(r)
		o := occupant(sb)
		o.Resumed = true
		root, inode, err := openWorkspace(sb)
		if err != nil {
			o.Workspace = "" // nor is it held, as it is another directory
		}
		if root != nil {
			o.Root = root
			m.quotas.keep(sb.SessionID, root)
			m.mu.Lock()
			r.sb.WorkspaceInode = inode
			m.mu.Unlock()
		}
		softened, err := m.quotas.enter(ctx, o)
		m.softened(softened)
		if ctx.Err() != nil {
			break
		}
		if err != nil { // no reason to leave all others alone
			m.log.WarnContext(ctx, "sandbox_quota_unsure", append(sandboxAttrs(sb), "error", err)...)
		}
		if dir, _ := workspace(sb.Spec); dir != "" {
			m.mu.Lock()
			r.sb.Enforcement.WorkspaceQuota = m.quotas.quotaEnforcement(r.sb)
			m.mu.Unlock()
		}
	}
	return context.Cause(ctx)
}

// SweepCeilings undoes what is left of the limits of sandboxes that are gone.
func (c *collector) SweepCeilings(ctx context.Context) error {
	ceilings := c.engine.opts.Ceilings
	if ceilings == nil || c.registry.available() != nil {
		return nil
	}
	return ceilings.Sweep(ctx)
}
