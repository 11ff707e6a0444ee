package lifecycle

import (
	"context"
	"errors"
	"slices"
	"strings"

	"github.com/bermhq/berm/lifecycle/hostdir"
	"github.com/bermhq/berm/policy"
)

// Quotas enforces the quotas of sandboxes and of their chats' workspaces. A sandbox's chat has
// the sandbox's key, and the directory that the sandbox mounts. Quotas must be safe for
// concurrent use, and must not call the Service.
type Quotas interface {
	// Attach registers a sandbox that is about to run. If it fails, the sandbox must not run.
	// It returns the identity of Subject.Dir, as in Subject.Inode.
	Attach(ctx context.Context, s Subject) (inode string, err error)
	// Detach unregisters a session, whose sandbox can't write any more. It ignores an unknown
	// session.
	Detach(sessionID string)
	// Used measures the directory of a sandbox's own quota, in bytes. It is 0 without a quota.
	// The error is a *QuotaError if the directory is over the quota, was exchanged, or is too
	// large to be measured.
	Used(ctx context.Context, s Subject) (int64, error)
	// Left returns a *QuotaError if the sandbox is over its own quota, or its chat's workspace
	// is over its quota. Changed says that the sandbox may have written to the chat's
	// directory, so that it must be measured again.
	Left(ctx context.Context, s Subject, changed bool) error
	// Enforcement returns "hard" or "soft": how the sandbox's own quota is enforced, or else
	// that of its chat's workspace. It is empty without a quota. For a sandbox with its own
	// quota it makes no calls, so the Registry's lock may be held.
	Enforcement(s Subject) string
	// Shared reports whether workspaces have a quota. It makes no calls.
	Shared() bool
	// Sweep removes the limits that are left of sandboxes that are gone.
	Sweep(ctx context.Context) error
}

// Subject describes a sandbox to Quotas.
type Subject struct {
	Tenant, Key string
	SessionID   string
	Dirs        []string // directories that it may write to: absolute, without symbolic links
	Dir         string   // the directory that its own quota counts; empty without one
	Inode       string   // the device and inode that Dir must have; empty: any
	QuotaBytes  int64    // of Dir
	Exempt      bool     // the kernel exempts it from quotas
	Resumed     bool     // an earlier process made it, so it may be running already
	Stopped     bool     // it has no container; the next one mounts the directory that Dir then is
}

func subject(sb Sandbox) Subject {
	s := Subject{Tenant: sb.Tenant, Key: sb.Key, SessionID: sb.SessionID}
	for _, mt := range sb.Spec.Mounts {
		if mt.Mode != "ro" {
			s.Dirs = append(s.Dirs, mt.Local)
		}
	}
	s.Dir, s.QuotaBytes = workspace(sb.Spec)
	// ext4 exempts processes with CAP_SYS_RESOURCE from quotas.
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

// sameWorkspace fails if the engine is about to mount another directory than the one that the
// quota counts. It checks only sources that the Holder has replaced: others may still change.
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
