package lifecycle

import (
	"context"
	"errors"
	"slices"
	"strings"

	"github.com/bermhq/berm/lifecycle/hostdir"
	"github.com/bermhq/berm/policy"
)

// Quotas holds sandboxes to their own quotas, and to those of the workspaces that their
// chats belong to. A sandbox's chat has its key, and the directory that the sandbox mounts.
// Quotas must be safe for concurrent use, and must not call the Manager.
type Quotas interface {
	// Attach makes a sandbox known that is about to run, which must not if that fails.
	Attach(ctx context.Context, s Subject) (Attachment, error)
	// Detach says that a session's sandbox can't write any more. An unknown session is no
	// error.
	Detach(sessionID string)
	// Used measures the directory of a sandbox's own quota, in bytes; 0 without one. Over
	// the quota, or if the directory isn't the sandbox's or can't be measured, it is a
	// *QuotaError.
	Used(ctx context.Context, s Subject) (int64, error)
	// Left is a *QuotaError if the sandbox is over its own quota, or its chat's workspace
	// over that one's. With changed, the chat's directory is measured anew: something in the
	// sandbox may have written to it.
	Left(ctx context.Context, s Subject, changed bool) error
	// Enforcement is "hard" or "soft", as in Enforcement: how the sandbox's own quota is
	// held, else that of its chat's workspace; empty without both. For a sandbox with its
	// own it asks nobody, so that the Manager's lock may be held.
	Enforcement(s Subject) string
	// Shared reports whether workspaces have a quota. It asks nobody.
	Shared() bool
	// Sweep undoes what is left of sandboxes that are gone.
	Sweep(ctx context.Context) error
}

// Subject is a sandbox, as Quotas know it.
type Subject struct {
	Tenant, Key string
	SessionID   string
	Dirs        []string // that it may write to: absolute, without symbolic links
	Dir         string   // that its own quota counts; empty without one
	Inode       string   // what Dir has to be; empty: anything
	QuotaBytes  int64    // of Dir
	Exempt      bool     // the kernel wouldn't hold it to a quota
	Resumed     bool     // another process made it: it may be running already
	Stopped     bool     // its next container mounts what Dir leads to then
}

// Attachment is what Attach found out.
type Attachment struct {
	Inode string   // what Subject.Dir is
	Soft  []string // the sessions whose own quotas the kernel doesn't hold any more, as this one shares their directories
}

func subject(sb Sandbox) Subject {
	s := Subject{Tenant: sb.Tenant, Key: sb.Key, SessionID: sb.SessionID}
	for _, mt := range sb.Spec.Mounts {
		if mt.Mode != "ro" {
			s.Dirs = append(s.Dirs, mt.Local)
		}
	}
	s.Dir, s.QuotaBytes = workspace(sb.Spec)
	// With that capability, ext4 holds nobody to a quota.
	s.Exempt = slices.ContainsFunc(sb.Spec.CapAdd, func(c string) bool { return strings.HasSuffix(c, "SYS_RESOURCE") })
	if s.Stopped = sb.Status == StatusStopped; !s.Stopped {
		s.Inode = sb.WorkspaceInode
	}
	return s
}

// workspace returns the directory that a sandbox's own quota counts, and the quota in
// bytes.
func workspace(spec policy.Spec) (dir string, quota int64) {
	if spec.WorkspaceQuotaMB <= 0 {
		return "", 0
	}
	for _, mt := range spec.Mounts {
		if mt.MountPath == spec.MountPath {
			return mt.Local, spec.WorkspaceQuotaMB << 20
		}
	}
	return "", 0
}

// errNoQuotas is the answer where nothing could hold a quota.
var errNoQuotas = errors.New("the sandbox has a quota, and there are no Quotas")

// attach makes a sandbox known that is about to run, and notes whose quotas have become
// soft. It returns the identity of the directory that the sandbox's own quota counts.
func (m *Manager) attach(ctx context.Context, s Subject) (inode string, err error) {
	if m.opts.Quotas == nil {
		if s.Dir != "" {
			return "", errNoQuotas
		}
		return "", nil
	}
	got, err := m.opts.Quotas.Attach(ctx, s)
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, slot := range m.slots {
		if r := slot.record; r != nil && slices.Contains(got.Soft, r.sb.SessionID) {
			r.sb.Enforcement.WorkspaceQuota = m.quotaEnforcement(r.sb)
		}
	}
	return got.Inode, err
}

// detach says that a session's sandbox can't write any more.
func (m *Manager) detach(sessionID string) {
	if m.opts.Quotas != nil {
		m.opts.Quotas.Detach(sessionID)
	}
}

// resume attaches the sandboxes that an earlier process has left. The error is the
// context's cause: then some of them aren't attached, and would lose their limits to the
// sweep.
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
		s := subject(sb)
		s.Resumed = true
		inode, err := m.attach(ctx, s)
		if ctx.Err() != nil {
			break
		}
		if err != nil { // no reason to leave all others alone
			m.log.WarnContext(ctx, "sandbox_quota_unsure", append(sandboxAttrs(sb), "error", err)...)
		}
		if s.Dir == "" {
			continue
		}
		m.mu.Lock()
		if inode != "" {
			r.sb.WorkspaceInode = inode
		}
		r.sb.Enforcement.WorkspaceQuota = m.quotaEnforcement(r.sb)
		m.mu.Unlock()
	}
	return context.Cause(ctx)
}

// SweepQuotas undoes what is left of the limits of sandboxes that are gone.
func (m *Manager) SweepQuotas(ctx context.Context) error {
	if m.opts.Quotas == nil || m.available() != nil {
		return nil
	}
	return m.opts.Quotas.Sweep(ctx)
}

// quotaLeft is a *QuotaError when the sandbox is over its own quota, or its chat's
// workspace over that one's. With changed, something in the sandbox may have written since
// it was measured last.
func (m *Manager) quotaLeft(ctx context.Context, sb Sandbox, changed bool) error {
	return m.left(ctx, subject(sb), changed)
}

// chatLeft is quotaLeft for the workspace of the sandbox's chat only.
func (m *Manager) chatLeft(ctx context.Context, sb Sandbox, changed bool) error {
	return m.left(ctx, Subject{Tenant: sb.Tenant, Key: sb.Key}, changed)
}

func (m *Manager) left(ctx context.Context, s Subject, changed bool) error {
	switch {
	case m.opts.Quotas != nil:
		return m.opts.Quotas.Left(ctx, s, changed)
	case s.Dir != "":
		return errNoQuotas
	}
	return nil
}

// workspaceUse measures the directory of the sandbox's own quota, in bytes; a quota of 0 is
// none.
func (m *Manager) workspaceUse(ctx context.Context, sb Sandbox) (used, quota int64, err error) {
	s := subject(sb)
	switch {
	case s.Dir == "":
		return 0, 0, nil
	case m.opts.Quotas == nil:
		return 0, 0, errNoQuotas
	}
	used, err = m.opts.Quotas.Used(ctx, s)
	return used, s.QuotaBytes, err
}

// mayHaveQuota reports whether there may be something to measure. It asks nobody, so that
// mu may be held.
func (m *Manager) mayHaveQuota(sb Sandbox) bool {
	dir, _ := workspace(sb.Spec)
	return dir != "" || m.opts.Quotas != nil && m.opts.Quotas.Shared()
}

// quotaEnforcement is how the sandbox's own quota is held, else that of its chat's
// workspace; empty without both. Of a sandbox that has its own it asks nobody.
func (m *Manager) quotaEnforcement(sb Sandbox) string {
	if m.opts.Quotas == nil {
		return ""
	}
	return m.opts.Quotas.Enforcement(subject(sb))
}

// enforced notes how the quota is held that the sandbox has turned out to be over: its
// directory may have become a chat's since it was made. Commands that aren't over any
// don't wait for who would have to be asked.
func (m *Manager) enforced(rec *record, sb Sandbox) Sandbox {
	if sb.Enforcement.WorkspaceQuota != "" {
		return sb
	}
	now := m.quotaEnforcement(sb)
	m.mu.Lock()
	defer m.mu.Unlock()
	rec.sb.Enforcement.WorkspaceQuota, sb.Enforcement.WorkspaceQuota = now, now
	return sb
}

// sameWorkspace fails if the engine is about to mount another directory than the one that
// the quota counts. Only a path of the Holder's own can be compared.
func sameWorkspace(sb Sandbox, mounts []policy.Mount, sources []string) error {
	dir, _ := workspace(sb.Spec)
	for i, mt := range mounts {
		if dir == "" || mt.MountPath != sb.Spec.MountPath || sources[i] == mt.Source {
			continue
		}
		f, err := hostdir.OpenDir(sources[i])
		if err != nil {
			return err
		}
		defer f.Close()
		if inode, err := hostdir.Inode(f); err != nil || inode != sb.WorkspaceInode {
			return errors.Join(errors.New("the directory was exchanged"), err)
		}
	}
	return nil
}

// quotaAfter measures after a command. Over the quota, the sandbox is stopped and
// the result says so; its files stay.
func (m *Manager) quotaAfter(ctx context.Context, rec *record, sb Sandbox, res *ExecResult) error {
	ctx = context.WithoutCancel(ctx) // nobody escapes it by going away
	var over *QuotaError
	err := m.quotaLeft(ctx, sb, true)
	if !errors.As(err, &over) {
		return err
	}
	sb = m.enforced(rec, sb)
	res.QuotaExceeded, res.QuotaEnforcement = true, sb.Enforcement.WorkspaceQuota
	return m.stopOverQuota(ctx, rec, sb)
}

// stopOverQuota stops a sandbox whose workspace is over its quota; its files stay.
func (m *Manager) stopOverQuota(ctx context.Context, rec *record, sb Sandbox) error {
	m.log.WarnContext(ctx, "workspace_quota_exceeded", append(sandboxAttrs(sb), "quota_mb", sb.Spec.WorkspaceQuotaMB, "enforcement", sb.Enforcement.WorkspaceQuota)...)
	id := keyID{sb.Tenant, sb.Key}
	if _, err := m.hold(ctx, id, false); err != nil {
		return err
	}
	defer m.drop(id)
	if m.recordOf(id) != rec {
		return nil
	}
	if err := m.remove(ctx, sb.ContainerID); err != nil {
		return err
	}
	m.containerGone(sb.ContainerID)
	return nil
}
