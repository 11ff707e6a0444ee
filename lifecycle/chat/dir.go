package chat

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/lifecycle/hostdir"
	"github.com/bermhq/berm/policy"
)

// openDir opens a chat's directory. The error is a *NotFoundError if there is none. Nothing
// outside of this chat can be opened through the handle.
func (s *Service) openDir(c Chat) (*os.Root, error) {
	path, err := lifecycle.ChatDir(s.root, c.Tenant, c.ID)
	if err == nil {
		var dir *os.Root
		if dir, err = os.OpenRoot(path); err == nil {
			return dir, nil
		}
	}
	if errors.Is(err, fs.ErrNotExist) {
		return nil, &NotFoundError{ID: c.ID}
	}
	return nil, fmt.Errorf("open the directory of chat %q: %w", c.ID, err)
}

// open opens a chat's directory for reading. It makes the directory again if it is gone.
func (s *Service) open(ctx context.Context, c Chat) (*os.Root, error) {
	dir, err := s.openDir(c)
	if !errdefs.IsNotFound(err) {
		return dir, err
	}
	_, leave, err := s.enter(ctx, c)
	if err != nil {
		return nil, err
	}
	defer leave()
	return s.openDir(c)
}

// enter acquires a chat's lock, checks that the chat is still the same, and opens its
// directory. Unless it returns an error, the caller must call leave.
func (s *Service) enter(ctx context.Context, c Chat) (dir *os.Root, leave func(), err error) {
	unlock, err := s.locks.Lock(ctx, c.key())
	if err != nil {
		return nil, nil, err
	}
	defer func() {
		if err != nil {
			unlock()
		}
	}()
	now, err := s.Get(ctx, c.Tenant, c.ID)
	if err != nil {
		return nil, nil, err
	}
	if !now.CreatedAt.Equal(c.CreatedAt) || now.WorkspaceID != c.WorkspaceID {
		return nil, nil, &NotFoundError{ID: c.ID} // deleted meanwhile, and made again
	}
	if dir, err = s.layout(ctx, c, false); err != nil {
		return nil, nil, err
	}
	return dir, func() { _ = dir.Close(); unlock() }, nil
}

// layout opens a chat's directory. It makes the directory and the history if they are missing.
// If adopt is true, or the directory was missing, it puts the directory under the workspace's
// quota. The caller holds the chat's lock.
func (s *Service) layout(ctx context.Context, c Chat, adopt bool) (_ *os.Root, err error) {
	dir, err := s.openDir(c)
	missing := errdefs.IsNotFound(err)
	if missing {
		path, err := lifecycle.MakeChatDir(s.root, c.Tenant, c.ID, s.opts.Sandboxes.Owner())
		if err != nil {
			return nil, fmt.Errorf("make the directory of chat %q: %w", c.ID, hostdir.OfSpace(c.ID, err))
		}
		if err := s.syncParents(path); err != nil {
			return nil, err
		}
		if !adopt {
			s.log.WarnContext(ctx, "chat_directory_remade", c.attrs()...)
		}
		dir, err = s.openDir(c)
		if err != nil {
			return nil, err
		}
	} else if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			_ = dir.Close()
		}
	}()
	if missing || adopt {
		if err := s.adopt(ctx, c, dir); err != nil {
			return nil, err
		}
	}
	return dir, s.makeHistory(dir)
}

// adopt puts a directory under the quota of a chat's workspace.
func (s *Service) adopt(ctx context.Context, c Chat, dir *os.Root) error {
	w, err := s.opts.Quotas.Workspace(ctx, c.Tenant, c.WorkspaceID)
	if err != nil {
		return err
	}
	return s.opts.Quotas.Adopt(w, c.ID, dir)
}

// makeHistory makes an empty history if there is nothing of its name.
func (s *Service) makeHistory(dir *os.Root) error {
	if _, err := dir.Lstat(HistoryName); err == nil || !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	o, err := s.ownerOf(dir)
	if err != nil {
		return err
	}
	f, err := dir.OpenFile(HistoryName, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if errors.Is(err, fs.ErrExist) {
		return nil // the sandbox has made it, maybe as a link
	}
	if err != nil {
		return hostdir.OfSpace(HistoryName, err)
	}
	if err = errors.Join(give(f, o), f.Sync(), f.Close()); err != nil {
		return errors.Join(err, dir.Remove(HistoryName)) // otherwise the next call would keep it
	}
	return hostdir.With(dir, (*os.File).Sync)
}

// ownerOf returns the owner for files that the service puts into a chat's directory: the
// policy's, or else the directory's own.
func (s *Service) ownerOf(dir *os.Root) (*policy.Owner, error) {
	if o := s.opts.Sandboxes.Owner(); o != nil {
		return o, nil
	}
	fi, err := dir.Lstat(".")
	if err != nil {
		return nil, err
	}
	st := fi.Sys().(*syscall.Stat_t)
	return &policy.Owner{UID: int(st.Uid), GID: int(st.Gid)}, nil
}

// give makes a new file readable for all, and gives it to the owner.
func give(f *os.File, o *policy.Owner) error {
	if err := f.Chmod(0o644); err != nil { // while it is Berm's own
		return err
	}
	return o.Give(f)
}

// syncParents makes the entries of a directory, and of those above it up to the root, durable.
func (s *Service) syncParents(path string) error {
	for path != s.root {
		path = filepath.Dir(path)
		d, err := os.Open(path)
		if err != nil {
			return err
		}
		if err := errors.Join(d.Sync(), d.Close()); err != nil {
			return err
		}
	}
	return nil
}

// unlink removes files, durably, and returns how many. It keeps a directory that has replaced
// a file.
func unlink(dir *os.Root, names []string) (n int, err error) {
	if len(names) == 0 {
		return 0, nil
	}
	err = hostdir.With(dir, func(d *os.File) error {
		for _, name := range names {
			done, err := hostdir.Unlink(d, name)
			if err != nil {
				return err
			}
			if done {
				n++
			}
		}
		return d.Sync()
	})
	return n, err
}

// counted returns by how much a file changes its chat's size, as hostdir counts it. A sparse
// file counts as its blocks. A file with several links counts as 0, as it may stay.
func counted(fi fs.FileInfo) int64 {
	if linked(fi) {
		return 0
	}
	return min(fi.Size(), fi.Sys().(*syscall.Stat_t).Blocks*512)
}

func linked(fi fs.FileInfo) bool { return fi.Sys().(*syscall.Stat_t).Nlink > 1 }

func (c Chat) attrs() []any {
	return []any{"tenant", c.Tenant, "chat_id", c.ID, "workspace_id", c.WorkspaceID}
}
