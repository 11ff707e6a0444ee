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
// Quotas must be safe for concurrent use, and must not call the Service.
type Quotas interface {
	// Attach makes a sandbox known that is about to run, which must not if that fails. It
	// returns what Subject.Dir is.
	Attach(ctx context.Context, s Subject) (inode string, err error)
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
	// own it asks nobody, so that the Registry's lock may be held.
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
