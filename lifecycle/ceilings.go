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

// enter makes a sandbox known that is about to be there, and notes whose quotas have
// become soft of it.
func (m *Manager) enter(ctx context.Context, o Occupant) error {
	if m.opts.Ceilings == nil {
		return nil
	}
	softened, err := m.opts.Ceilings.Enter(ctx, o)
	m.mu.Lock()
	for _, s := range m.slots {
		if r := s.record; r != nil && slices.Contains(softened, r.sb.SessionID) {
			r.sb.Enforcement.WorkspaceQuota = m.quotaEnforcement(r.sb)
		}
	}
	m.mu.Unlock()
	return err
}

func (m *Manager) leave(sessionID string) {
	m.mu.Lock()
	root := m.workspaces[sessionID]
	delete(m.workspaces, sessionID)
	m.mu.Unlock()
	if root != nil {
		_ = root.Close() // it was only read
	}
	if m.opts.Ceilings != nil {
		m.opts.Ceilings.Leave(sessionID)
	}
}

// resume makes the sandboxes known that an earlier process has left. The error is the
// context's cause: then some of them aren't, and would lose their limits to the sweep.
func (m *Manager) resume(ctx context.Context) error {
	var all []*record
	m.mu.Lock()
	for _, s := range m.slots {
		if s.record != nil {
			all = append(all, s.record)
		}
	}
	m.mu.Unlock()
	for _, r := range all {
		sb := m.snapshot(r)
		o := occupant(sb)
		o.Resumed = true
		root, inode, err := openWorkspace(sb)
		if err != nil {
			o.Workspace = "" // nor is it held, as it is another directory
		}
		if root != nil {
			o.Root = root
			m.mu.Lock()
			m.workspaces[sb.SessionID], r.sb.WorkspaceInode = root, inode
			m.mu.Unlock()
		}
		err = m.enter(ctx, o)
		if ctx.Err() != nil {
			break
		}
		if err != nil { // no reason to leave all others alone
			m.log.WarnContext(ctx, "sandbox_quota_unsure", append(sandboxAttrs(sb), "error", err)...)
		}
		if dir, _ := workspace(sb.Spec); dir != "" {
			m.mu.Lock()
			r.sb.Enforcement.WorkspaceQuota = m.quotaEnforcement(r.sb)
			m.mu.Unlock()
		}
	}
	return context.Cause(ctx)
}

// SweepCeilings undoes what is left of the limits of sandboxes that are gone.
func (m *Manager) SweepCeilings(ctx context.Context) error {
	if m.opts.Ceilings == nil || m.available() != nil {
		return nil
	}
	return m.opts.Ceilings.Sweep(ctx)
}
