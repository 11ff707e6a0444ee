package containerd

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	goruntime "runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/errdefs"
	"github.com/moby/sys/user"
	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/runtime"
)

const (
	// maxAccountFile bounds what is read of a file of accounts. A larger one counts
	// as empty.
	maxAccountFile = 4 << 20
	// readTimeout bounds the reading of an image's files of accounts, which goes on
	// when its callers have given up, and viewLease is how long the engine keeps the
	// view of one that was cut short by the end of this process.
	readTimeout = time.Minute
	viewLease   = 5 * time.Minute
)

// account is who a process is.
type account struct {
	uid, gid uint32
	groups   []uint32 // the primary one first
}

// accountFiles are what /etc/passwd and /etc/group hold; nothing where there is none.
type accountFiles struct{ passwd, group []byte }

// resolve finds a user as Docker does; empty is 0.
func (f *accountFiles) resolve(name string) (account, error) {
	u, err := user.GetExecUser(name, nil, bytes.NewReader(f.passwd), bytes.NewReader(f.group))
	if err != nil {
		return account{}, runtime.Invalid("user %q: %w", name, err)
	}
	// The primary group is among them, or a process could drop it, and with it what
	// a file's mode denies to that group.
	groups := append([]int{u.Gid}, u.Sgids...)
	for _, id := range append(groups, u.Uid) {
		// What the files say wasn't checked, and 1<<32 would be root.
		if id < 0 || id > math.MaxInt32 {
			return account{}, runtime.Invalid("user %q: the id %d can't be used", name, id)
		}
	}
	out := account{uid: uint32(u.Uid), gid: uint32(u.Gid)} //nolint:gosec // checked above
	for _, gid := range groups {
		if g := uint32(gid); !slices.Contains(out.groups, g) { //nolint:gosec // the same
			out.groups = append(out.groups, g)
		}
	}
	return out, nil
}

// isNumeric tells whether a user is "uid:gid", for which no files are needed.
func isNumeric(name string) bool {
	uid, gid, _ := strings.Cut(name, ":")
	_, uidErr := strconv.ParseUint(uid, 10, 32)
	_, gidErr := strconv.ParseUint(gid, 10, 32)
	return uidErr == nil && gidErr == nil
}

// imageAccount resolves a user ("", "uid", "uid:gid", "name", "name:group") in an
// image; empty is the image's own, and root where it has none. A name that the image
// doesn't know is InvalidArgument. It is part of a call, which classes other errors.
func (r *Runtime) imageAccount(ctx context.Context, img *image, name string) (account, error) {
	if name == "" {
		name = img.config.User
	}
	if isNumeric(name) || img.chainID == "" {
		return new(accountFiles).resolve(name)
	}
	files := r.images.accountsOf(img.chainID)
	if files == nil {
		read, err := r.images.fly(ctx, "accounts "+img.chainID, readTimeout, func(ctx context.Context) (any, error) {
			return r.readAccounts(ctx, img.chainID)
		})
		if err != nil {
			return account{}, fmt.Errorf("read the image's accounts: %w", err)
		}
		files = read.(*accountFiles)
		r.images.keepAccounts(img.chainID, files)
	}
	return files.resolve(name)
}

func (c *imageCache) accountsOf(chainID string) *accountFiles {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.accounts[chainID]
}

func (c *imageCache) keepAccounts(chainID string, files *accountFiles) {
	if len(files.passwd)+len(files.group) > maxCachedBytes {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.accounts == nil || len(c.accounts) >= maxCachedImages {
		c.accounts = map[string]*accountFiles{}
	}
	c.accounts[chainID] = files
}

// readAccounts reads an image's files.
func (r *Runtime) readAccounts(ctx context.Context, chainID string) (files *accountFiles, err error) {
	err = r.viewImage(ctx, chainID, func(root string) (err error) {
		files, err = readRoot(root)
		return err
	})
	return files, err
}

// viewImage runs f with the directory where an image's root file system can be read,
// by f's thread only.
func (r *Runtime) viewImage(ctx context.Context, chainID string, f func(root string) error) error {
	return r.withLease(ctx, viewLease, func(ctx context.Context) (err error) {
		snapshotter := r.client.SnapshotService(r.opts.Snapshotter)
		key := "berm-view-" + rand.Text()
		mounts, err := snapshotter.View(ctx, key, chainID)
		if err != nil {
			return err
		}
		defer func() {
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTimeout)
			defer cancel()
			// When it fails, the end of the lease has the collector do it.
			if err := snapshotter.Remove(ctx, key); err != nil && !errdefs.IsNotFound(err) {
				r.log.WarnContext(ctx, "view_left", "snapshot", key, "error", err)
			}
		}()
		return withMounts(mounts, r.opts.Root, f)
	})
}

// withMounts runs f with the directory where a root file system is. It is mounted for
// f's thread only, over a directory that has to exist.
func withMounts(mounts []mount.Mount, over string, f func(root string) error) error {
	if len(mounts) == 1 && slices.Contains([]string{"bind", "rbind"}, mounts[0].Type) {
		// A single layer is a directory as it stands.
		return f(mounts[0].Source)
	}
	return onThread(func() (err error) {
		if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
			return fmt.Errorf("leave the mount namespace: %w", err)
		}
		if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
			return fmt.Errorf("make mounts private: %w", err)
		}
		mounted := 0
		defer func() {
			for range mounted {
				err = errors.Join(err, unix.Unmount(over, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW))
			}
		}()
		for _, m := range mounts {
			if err := mountHere(m, over); err != nil {
				return err
			}
			mounted++
		}
		return f(over)
	})
}

// mountHere mounts in this thread's namespace. mount.Mount.Mount does it on another
// thread, which would be the host's namespace, when an overlay has so many layers
// that their paths don't fit into a page; so here they are relative from the start.
func mountHere(m mount.Mount, target string) error {
	m.Options = slices.Clone(m.Options)
	if i := slices.IndexFunc(m.Options, func(o string) bool { return strings.HasPrefix(o, "lowerdir=") }); m.Type == "overlay" && i >= 0 {
		dirs := strings.Split(strings.TrimPrefix(m.Options[i], "lowerdir="), ":")
		// Those of overlayfs are …/snapshots/ID/fs, all of them.
		base := filepath.Dir(filepath.Dir(dirs[0]))
		for j, dir := range dirs {
			rel, err := filepath.Rel(base, dir)
			if err != nil {
				return fmt.Errorf("mount the image: %w", err)
			}
			dirs[j] = rel
		}
		if err := unix.Chdir(base); err != nil {
			return fmt.Errorf("enter %s: %w", base, err)
		}
		lower := "lowerdir=" + strings.Join(dirs, ":")
		if size := len(strings.Join(m.Options, ",")) - len(m.Options[i]) + len(lower); size >= os.Getpagesize()-512 {
			return runtime.Precondition("the image has too many layers (%d) to be mounted", len(dirs))
		}
		m.Options[i] = lower
	}
	if err := m.Mount(target); err != nil {
		return fmt.Errorf("mount the image: %w", err)
	}
	return nil
}

// onThread runs f on a thread that may be changed as f likes: it ends with f. It is
// not the process's first one, which doesn't end, and is what others see of it in /proc.
func onThread(f func() error) error {
	done := make(chan error, 1)
	go func() {
		goruntime.LockOSThread()
		if unix.Gettid() == unix.Getpid() {
			done <- onThread(f)
			goruntime.UnlockOSThread()
			return
		}
		done <- f()
	}()
	return <-done
}

// processAccount resolves a user ("uid", "uid:gid", names too) in the root file
// system of a process of this host. What a sandbox may have put there neither hangs
// the call nor leads it out. The caller makes sure that the pid is still the one that
// it means. A name that isn't known is InvalidArgument, a process that is gone
// FailedPrecondition.
func processAccount(pid uint32, name string) (account, error) {
	if isNumeric(name) {
		return new(accountFiles).resolve(name)
	}
	files, err := readRoot(fmt.Sprintf("/proc/%d/root", pid))
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ESRCH) {
		return account{}, runtime.Precondition("process %d is gone", pid)
	}
	if err != nil {
		return account{}, err
	}
	return files.resolve(name)
}

// readRoot reads the files of accounts below a directory.
func readRoot(path string) (*accountFiles, error) {
	root, err := unix.Open(path, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open root file system %s: %w", path, err)
	}
	defer func() { _ = unix.Close(root) }()
	files := new(accountFiles)
	if files.passwd, err = readBelow(root, "etc/passwd"); err == nil {
		files.group, err = readBelow(root, "etc/group")
	}
	return files, err
}

// readBelow reads a file below a root that somebody else made. What isn't a regular
// file of that file system, of at most maxAccountFile bytes, counts as empty.
func readBelow(root int, name string) ([]byte, error) {
	// Other mounts are out: a link into /proc leads to files whose reading has effects.
	fd, err := openIn(root, name, unix.O_PATH, unix.RESOLVE_NO_MAGICLINKS|unix.RESOLVE_NO_XDEV)
	for _, none := range []error{unix.ENOENT, unix.ENOTDIR, unix.ELOOP, unix.EXDEV, unix.ENAMETOOLONG, unix.EAGAIN} {
		if errors.Is(err, none) {
			return nil, nil
		}
	}
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", name, err)
	}
	defer func() { _ = unix.Close(fd) }()
	var stat unix.Stat_t
	if err := unix.Fstat(fd, &stat); err != nil {
		return nil, fmt.Errorf("inspect %s: %w", name, err)
	}
	if stat.Mode&unix.S_IFMT != unix.S_IFREG || stat.Size > maxAccountFile {
		return nil, nil
	}
	// Only now is it opened: opening a pipe waits, and a device may act on it.
	f, err := os.OpenFile(fmt.Sprintf("/proc/self/fd/%d", fd), os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", name, err)
	}
	defer func() { _ = f.Close() }()
	b, err := io.ReadAll(io.LimitReader(f, stat.Size))
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", name, err)
	}
	return b, nil
}
