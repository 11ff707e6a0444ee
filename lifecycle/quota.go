package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/lifecycle/hostdir"
	"github.com/bermhq/berm/policy"
)

// quotaLeft is a *QuotaError when the sandbox's workspace is over its own quota, or its
// chat's workspace over that one's. With changed, something in the sandbox may have
// written since it was measured last.
func (m *Manager) quotaLeft(ctx context.Context, sb Sandbox, changed bool) error {
	if _, _, err := m.workspaceUse(ctx, sb); err != nil {
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

// errExchanged says that a path doesn't lead to the directory that a sandbox mounts.
var errExchanged = errors.New("the directory was exchanged")

// openWorkspace opens the directory of a sandbox's own quota without following links, and
// returns its identity. It returns nil without a quota. It fails if a sandbox that may run
// mounts another directory.
func openWorkspace(sb Sandbox) (_ *os.Root, inode string, err error) {
	dir, _ := workspace(sb.Spec)
	if dir == "" {
		return nil, "", nil
	}
	f, err := OpenDir(dir)
	if err == nil {
		defer f.Close()
		inode, err = inodeOf(f)
	}
	// The next container of one that is stopped mounts what is there then.
	if mounted := sb.WorkspaceInode; mounted != "" && sb.Status != StatusStopped && (err != nil || inode != mounted) {
		err = errExchanged
	}
	if err != nil {
		return nil, "", fmt.Errorf("open workspace %s: %w", dir, err)
	}
	root, err := os.OpenRoot(fmt.Sprintf("/proc/self/fd/%d", f.Fd()))
	return root, inode, err
}

// OpenDir opens a directory by a path without symbolic links.
func OpenDir(path string) (*os.File, error) {
	fd, err := unix.Openat2(unix.AT_FDCWD, path, &unix.OpenHow{
		Flags:   unix.O_RDONLY | unix.O_DIRECTORY | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS,
	})
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: path, Err: err}
	}
	return os.NewFile(uintptr(fd), path), nil
}

// inodeOf identifies an open directory on this host.
func inodeOf(f *os.File) (string, error) {
	var st unix.Stat_t
	err := unix.Fstat(int(f.Fd()), &st)
	return fmt.Sprintf("%d:%d", st.Dev, st.Ino), err
}

// sameWorkspace fails if the engine is about to mount another directory than the one that
// the quota counts. Only a path of the Holder's own can be compared.
func sameWorkspace(sb Sandbox, mounts []policy.Mount, sources []string) error {
	dir, _ := workspace(sb.Spec)
	for i, mt := range mounts {
		if dir == "" || mt.MountPath != sb.Spec.MountPath || sources[i] == mt.Source {
			continue
		}
		f, err := OpenDir(sources[i])
		if err != nil {
			return err
		}
		defer f.Close()
		if inode, err := inodeOf(f); err != nil || inode != sb.WorkspaceInode {
			return errors.Join(errExchanged, err)
		}
	}
	return nil
}

// workspaceUse measures the sandbox's workspace, in bytes; a quota of 0 is none. It walks
// the directory that the sandbox mounts, wherever that is by now. Over the quota, or if the
// directory can't be found or measured, it is a *QuotaError.
func (m *Manager) workspaceUse(ctx context.Context, sb Sandbox) (used, quota int64, err error) {
	dir, quota := workspace(sb.Spec)
	if dir == "" {
		return 0, 0, nil
	}
	m.mu.Lock()
	root := m.workspaces[sb.SessionID]
	m.mu.Unlock()
	if root == nil || sb.Status == StatusStopped {
		if root, _, err = openWorkspace(sb); errors.Is(err, errExchanged) {
			return 0, 0, &QuotaError{QuotaBytes: quota}
		}
		if err != nil {
			return 0, 0, err
		}
		defer root.Close()
	}
	used, err = hostdir.Sizes(ctx, root)
	switch {
	case errors.Is(err, os.ErrClosed): // the sandbox has just gone
		return 0, quota, nil
	case err != nil && !errors.Is(err, hostdir.ErrUnbounded):
		return 0, 0, err
	case used > quota || err != nil:
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
