package chat

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/google/uuid"
	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/lifecycle/hostdir"
	"github.com/bermhq/berm/lifecycle/quota"
	"github.com/bermhq/berm/policy"
)

// stagingDir is the directory below the root for files that aren't in a chat's directory yet,
// or any more. No chat's ID begins with a dot, and no sandbox mounts it. It is made before the
// first chat and never removed. So a root without it isn't the root of the store's chats.
const stagingDir = ".staging"

// copyBuffer is how many bytes of a body are in memory at a time.
const copyBuffer = 256 << 10

// flushEvery is after how many bytes the kernel begins to write them to the disk, so that the
// sync at the end is short.
const flushEvery = 8 << 20

func (s *Service) makeStaging(ctx context.Context) error {
	path := filepath.Join(s.root, stagingDir)
	_, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		if err = s.checkNew(ctx); err == nil {
			err = os.Mkdir(path, 0o700)
		}
	}
	if err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("make the staging directory: %w", err)
	}
	fi, err := os.Lstat(path)
	if err != nil {
		return err
	}
	if !fi.IsDir() {
		return fmt.Errorf("%s is not a directory", path)
	}
	if err := os.Chmod(path, 0o700); err != nil {
		return err
	}
	return s.syncParents(path)
}

// checkNew refuses a root that was never used if the store has chats. Their files are then
// elsewhere, such as on a file system that isn't mounted, and all their records would be
// dropped.
func (s *Service) checkNew(ctx context.Context) error {
	some := errors.New("there are chats")
	err := s.opts.Store.EachChat(ctx, func(Chat) error { return some })
	if !errors.Is(err, some) {
		return storeError(err)
	}
	return fmt.Errorf("there are chats, but %s has no directory %s, and so isn't where they are: mount the file system that holds them there; "+
		"if what they held is lost for good, make the directory %[2]s in it, and they will be empty", s.root, stagingDir)
}

func (s *Service) openStaging() (*os.Root, error) {
	return os.OpenRoot(filepath.Join(s.root, stagingDir))
}

// newStaging returns a name for a staging directory of this Service.
func (s *Service) newStaging() string { return s.run + "-" + uuid.NewString() }

// unstage removes a staging directory. The next start removes what is left when it fails, or
// when the context ends.
func (s *Service) unstage(ctx context.Context, id string) {
	staging, err := s.openStaging()
	if err == nil {
		err = errors.Join(removeStaged(ctx, staging, id), staging.Close())
	}
	if err != nil && ctx.Err() == nil {
		s.log.WarnContext(ctx, "staging_not_removed", "staging", id, "error", err)
	}
}

// removeStaged removes a staging directory. It first renames that of a deleted chat: a half
// removed one could no longer be taken for the chat.
func removeStaged(ctx context.Context, staging *os.Root, id string) error {
	if name, ok := strings.CutPrefix(id, deleted); ok {
		if err := staging.Rename(id, name); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		id = name
	}
	return hostdir.Remove(ctx, staging, id)
}

// stage has files that will be moved into a chat's directory. It belongs to one goroutine.
type stage struct {
	s     *Service
	id    string // its directory's name
	chat  Chat
	space quota.Workspace
	dir   *os.Root
	owner *policy.Owner
	room  *quota.Reservation
	bytes int64 // in it
	asked int64 // bytes that there is room for
	files []staged

	inexact bool // it, or what it replaces, may have directories or links
}

// staged is a file at the top of a stage.
type staged struct {
	PutFile
	record bool // it is an attachment
	info   fs.FileInfo
}

// stage reserves room for n bytes, which replace other bytes, and makes a staging directory
// for them. Unless it returns an error, the caller must call end.
func (s *Service) stage(ctx context.Context, c Chat, n, replaced int64) (_ *stage, err error) {
	st := &stage{s: s, id: s.newStaging(), chat: c, asked: n}
	if st.space, err = s.opts.Quotas.Workspace(ctx, c.Tenant, c.WorkspaceID); err != nil {
		return nil, err
	}
	dir, err := s.open(ctx, c)
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	if st.owner, err = s.ownerOf(dir); err != nil {
		return nil, err
	}
	if st.room, err = s.opts.Quotas.Reserve(ctx, st.space, c.ID, n, replaced); err != nil {
		return nil, err
	}
	if err := st.make(dir); err != nil {
		st.end(ctx)
		return nil, st.writeError(ctx, "the staging directory", err)
	}
	return st, nil
}

func (st *stage) make(chat *os.Root) error {
	staging, err := st.s.openStaging()
	if err != nil {
		return err
	}
	defer staging.Close()
	if err := staging.Mkdir(st.id, 0o700); err != nil {
		return err
	}
	if st.dir, err = staging.OpenRoot(st.id); err != nil {
		return err
	}
	return st.s.opts.Quotas.Stage(st.space, st.dir, chat)
}

// end releases the reservation, and removes the staging directory.
func (st *stage) end(ctx context.Context) {
	st.room.Release()
	if st.dir != nil {
		_ = st.dir.Close()
	}
	st.s.unstage(context.WithoutCancel(ctx), st.id)
}

// enlist puts the staged files into the workspace's project. Otherwise the kernel would refuse
// to move them into the chat's directory.
func (st *stage) enlist(ctx context.Context) error {
	return st.writeError(ctx, "the staging directory", st.room.Staged(ctx, st.dir, st.bytes))
}

// grow reserves room for so many bytes in all.
func (st *stage) grow(ctx context.Context, bytes int64) error {
	if bytes > st.asked {
		if err := st.room.Grow(ctx, bytes); err != nil {
			return err
		}
		st.asked = bytes
	}
	return nil
}

// write makes a file of what it reads from r. R must have size bytes, unless size is negative,
// and at most limit bytes, unless limit is 0.
func (st *stage) write(ctx context.Context, name string, size, limit int64, r io.Reader) (fs.FileInfo, error) {
	if limit > 0 && size > limit {
		return nil, &TooLargeError{Limit: limit}
	}
	if size > 0 {
		if err := st.grow(ctx, st.bytes+size); err != nil {
			return nil, err
		}
	}
	f, err := st.dir.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if errors.Is(err, fs.ErrExist) {
		return nil, &lifecycle.InvalidError{Field: "name", Message: fmt.Sprintf("%q is given twice", name)}
	}
	if err != nil {
		return nil, st.writeError(ctx, name, err)
	}
	err = st.fill(ctx, f, size, limit, r)
	var fi fs.FileInfo
	if err == nil {
		err = errors.Join(give(f, st.owner), f.Sync())
		if err == nil {
			fi, err = f.Stat()
		}
		err = st.writeError(ctx, name, err)
	}
	if cerr := f.Close(); err == nil && cerr != nil {
		err = st.writeError(ctx, name, cerr)
	}
	if err == nil {
		st.bytes += fi.Size()
	}
	return fi, err
}

func (st *stage) fill(ctx context.Context, f *os.File, size, limit int64, r io.Reader) error {
	w := &filler{st: st, ctx: ctx, f: f, size: size, limit: limit}
	defer func() { st.s.metrics.written.Add(float64(w.n)) }()
	buf := st.s.buffers.Get().(*bufio.Writer)
	defer st.s.buffers.Put(buf)
	buf.Reset(w)
	defer buf.Reset(nil)
	if _, err := buf.ReadFrom(r); err != nil {
		return err
	}
	if err := buf.Flush(); err != nil {
		return err
	}
	if w.n < size {
		return sizeError(size, "fewer")
	}
	return nil
}

// filler writes a staged file, of at most limit bytes unless that is 0.
type filler struct {
	st          *stage
	ctx         context.Context // of the one call
	f           *os.File
	size, limit int64
	n, flushed  int64
}

func (w *filler) Write(p []byte) (int, error) {
	total := w.n + int64(len(p))
	switch {
	case w.ctx.Err() != nil:
		return 0, context.Cause(w.ctx)
	case w.size >= 0 && total > w.size:
		return 0, sizeError(w.size, "more")
	case w.limit > 0 && total > w.limit:
		return 0, &TooLargeError{Limit: w.limit}
	}
	if err := w.st.grow(w.ctx, w.st.bytes+total); err != nil {
		return 0, err
	}
	if _, err := w.f.Write(p); err != nil {
		return 0, w.st.writeError(w.ctx, filepath.Base(w.f.Name()), err)
	}
	if w.n = total; w.n-w.flushed >= flushEvery {
		// The sync at the end returns the error of this, too.
		_ = unix.SyncFileRange(int(w.f.Fd()), w.flushed, w.n-w.flushed, unix.SYNC_FILE_RANGE_WRITE)
		w.flushed = w.n
	}
	return len(p), nil
}

func sizeError(size int64, than string) error {
	return &lifecycle.InvalidError{Field: "size", Message: fmt.Sprintf("%d bytes were announced, and %s came", size, than)}
}

// writeError returns the error of a failed write. For EDQUOT, it is a *quota.FullError of the
// workspace.
func (st *stage) writeError(ctx context.Context, name string, err error) error {
	if !errors.Is(err, syscall.EDQUOT) {
		return hostdir.OfSpace(name, err)
	}
	over := &quota.FullError{WorkspaceID: st.space.ID}
	if u, err := st.s.opts.Quotas.Usage(ctx, st.chat.Tenant, st.space.ID); err == nil {
		over.UsedBytes, over.QuotaBytes = u.UsedBytes, u.QuotaBytes
	}
	return over
}
