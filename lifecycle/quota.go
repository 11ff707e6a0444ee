package lifecycle

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"syscall"
	"time"

	"github.com/bermhq/berm/policy"
)

// Bounds of one measurement. A workspace that can't be measured within them counts
// as full: a tenant must not escape its quota by making it hard to count.
const (
	maxWalkEntries = 1_000_000
	maxWalkTime    = 10 * time.Second
)

// quotaLeft is a *QuotaError when the sandbox's workspace is over its quota.
func (m *Manager) quotaLeft(ctx context.Context, sb Sandbox) error {
	_, _, err := workspaceUse(ctx, sb)
	return err
}

// workspaceUse measures the sandbox's workspace, in bytes; a quota of 0 is none. Over
// the quota it is a *QuotaError.
func workspaceUse(ctx context.Context, sb Sandbox) (used, quota int64, err error) {
	dir, quota := workspace(sb.Spec)
	if dir == "" {
		return 0, 0, nil
	}
	used, err = measure(ctx, dir)
	if err != nil && !errors.Is(err, errUnbounded) {
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
	err := m.quotaLeft(ctx, sb)
	if !errors.As(err, &over) {
		return err
	}
	res.QuotaExceeded = true
	return m.stopOverQuota(ctx, rec, sb)
}

// stopOverQuota stops a sandbox whose workspace is over its quota; its files stay.
func (m *Manager) stopOverQuota(ctx context.Context, rec *record, sb Sandbox) error {
	m.log.WarnContext(ctx, "workspace_quota_exceeded", append(sandboxAttrs(sb), "quota_mb", sb.Spec.WorkspaceQuotaMB)...)
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

var errUnbounded = errors.New("too much to measure")

// tree opens directories only: whoever opened a fifo that has just taken a
// directory's place would wait for as long as the tenant likes.
type tree struct{ root *os.Root }

func (t tree) Open(name string) (fs.File, error) {
	return t.root.OpenFile(name, os.O_RDONLY|syscall.O_DIRECTORY, 0)
}

// measure adds up the sizes of the regular files and symbolic links below dir. A
// file with several links counts once, links are never followed, and what vanishes
// meanwhile is skipped. The error is errUnbounded when the bounds were hit.
func measure(ctx context.Context, dir string) (int64, error) {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return 0, err
	}
	defer root.Close()
	type file struct{ dev, ino uint64 }
	var (
		used    int64
		entries int
		linked  = map[file]struct{}{}
		until   = time.Now().Add(maxWalkTime)
	)
	err = fs.WalkDir(tree{root}, ".", func(_ string, d fs.DirEntry, err error) error {
		entries++
		switch {
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case entries > maxWalkEntries, entries%1024 == 0 && time.Now().After(until):
			return errUnbounded
		}
		if err != nil || !(d.Type().IsRegular() || d.Type()&fs.ModeSymlink != 0) {
			return nil // vanished, unreadable, or nothing that takes room
		}
		fi, err := d.Info()
		if err != nil {
			return nil
		}
		if st, ok := fi.Sys().(*syscall.Stat_t); ok && st.Nlink > 1 {
			f := file{st.Dev, st.Ino}
			if _, seen := linked[f]; seen {
				return nil
			}
			linked[f] = struct{}{}
		}
		used += fi.Size()
		return nil
	})
	return used, err
}
