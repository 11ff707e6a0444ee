package lifecycle

import (
	"context"
	"errors"
	"os"

	"github.com/bermhq/berm/lifecycle/usage"
	"github.com/bermhq/berm/policy"
)

// quotaLeft is a *QuotaError when the sandbox's workspace is over its own quota, or its
// chat's workspace over that one's. With changed, something in the sandbox may have
// written since it was measured last.
func (m *Manager) quotaLeft(ctx context.Context, sb Sandbox, changed bool) error {
	if _, _, err := workspaceUse(ctx, sb); err != nil {
		return err
	}
	return m.chatLeft(ctx, sb, changed)
}

// chatLeft is a *QuotaError when the workspace of the sandbox's chat is over its quota.
func (m *Manager) chatLeft(ctx context.Context, sb Sandbox, changed bool) error {
	if m.opts.Workspaces == nil {
		return nil
	}
	err := m.opts.Workspaces.Left(ctx, sb.Tenant, sb.Key, changed)
	var over *QuotaError
	if !changed && errors.As(err, &over) { // what was in the way may have been removed
		err = m.opts.Workspaces.Left(ctx, sb.Tenant, sb.Key, true)
	}
	return err
}

// touched has the chat of a key measured before it next counts. It may be called with mu
// held.
func (m *Manager) touched(id keyID) {
	if m.opts.Workspaces != nil {
		m.opts.Workspaces.Touched(id.tenant, id.key)
	}
}

// mayHaveQuota tells whether there may be something to measure. It asks nobody, so that
// it can be called with mu held.
func (m *Manager) mayHaveQuota(sb Sandbox) bool {
	dir, _ := workspace(sb.Spec)
	return dir != "" || m.opts.Workspaces != nil
}

// quotaEnforcement is how the sandbox's own quota is held, else that of its chat's
// workspace; empty without both. Of a sandbox that has its own it asks nobody.
func (m *Manager) quotaEnforcement(sb Sandbox) string {
	if dir, _ := workspace(sb.Spec); dir != "" {
		if m.opts.Ceilings != nil && m.opts.Ceilings.Holds(sb.SessionID) {
			return "hard"
		}
		return "soft"
	}
	if m.opts.Workspaces == nil {
		return ""
	}
	return m.opts.Workspaces.Enforcement(sb.Tenant, sb.Key)
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

// workspaceUse measures the sandbox's workspace, in bytes; a quota of 0 is none. Over
// the quota it is a *QuotaError.
func workspaceUse(ctx context.Context, sb Sandbox) (used, quota int64, err error) {
	dir, quota := workspace(sb.Spec)
	if dir == "" {
		return 0, 0, nil
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return 0, 0, err
	}
	defer root.Close()
	used, err = usage.Sizes(ctx, root)
	if err != nil && !errors.Is(err, usage.ErrUnbounded) {
		return 0, 0, err
	}
	if used > quota || err != nil {
		return 0, 0, &QuotaError{UsedBytes: used, QuotaBytes: quota}
	}
	return used, quota, nil
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

// workspace answers the directory that a quota counts, and the quota in bytes.
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
