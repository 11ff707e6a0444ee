package image

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/runtime"
)

// MissingDirs returns the given directories, clean and absolute, that an image doesn't have. It caches
// the result.
func (s *Store) MissingDirs(ctx context.Context, img *Image, dirs []string) ([]string, error) {
	if len(dirs) == 0 {
		return nil, nil
	}
	key := strings.Join(append([]string{img.target.Digest.String()}, dirs...), "\x00")
	if missing, ok := s.dirs.Get(key); ok {
		return missing, nil
	}
	missing, err := runtime.Together(ctx, &s.flights, "dirs "+key, readTimeout, func(ctx context.Context) (missing []string, err error) {
		err = s.viewImage(ctx, img.ChainID, func(root string) error {
			for _, dir := range dirs {
				there, err := existsBelow(root, dir)
				if err != nil {
					return fmt.Errorf("look for directory %.100q: %w", dir, err)
				}
				if !there {
					missing = append(missing, dir)
				}
			}
			return nil
		})
		return missing, err
	})
	if err == nil {
		s.dirs.Put(key, missing, int64(len(key))) // callers and images choose the key's length
	}
	return missing, err
}

// OpenIn opens a path as a process would whose root is the directory root. Resolve has further
// RESOLVE_ flags. A concurrent rename makes the kernel return EAGAIN for a path with "..". A
// sandbox can keep that up, so OpenIn tries at most 100 times.
func OpenIn(root int, name string, flags, resolve uint64) (fd int, err error) {
	how := &unix.OpenHow{Flags: flags | unix.O_CLOEXEC, Resolve: unix.RESOLVE_IN_ROOT | resolve}
	for range 100 {
		if fd, err = unix.Openat2(root, name, how); !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EINTR) {
			break
		}
	}
	return fd, err
}

// existsBelow reports whether a root file system has anything at a path.
func existsBelow(root, name string) (bool, error) {
	dir, err := unix.Open(root, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return false, err
	}
	defer func() { _ = unix.Close(dir) }()
	fd, err := OpenIn(dir, name, unix.O_PATH, unix.RESOLVE_NO_MAGICLINKS)
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) {
		return false, nil
	}
	for _, unusable := range []error{unix.ELOOP, unix.ENAMETOOLONG, unix.EINVAL} { // the last is a zero byte
		if errors.Is(err, unusable) {
			return false, runtime.Invalid("%w", err)
		}
	}
	if err != nil {
		return false, err
	}
	return true, unix.Close(fd)
}

// readBelow reads a file below a root that isn't trusted. A file counts as empty unless it is a
// regular file, on the root's own file system, of at most maxAccountFile bytes.
func readBelow(root int, name string) ([]byte, error) {
	// Other mounts are excluded: a link into /proc could lead to files that are changed by reading.
	fd, err := OpenIn(root, name, unix.O_PATH, unix.RESOLVE_NO_MAGICLINKS|unix.RESOLVE_NO_XDEV)
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
	// Open it only now: opening a pipe would wait, and opening a device could have effects.
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

// viewImage calls f with a directory where an image's root file system can be read. F must read
// it on its own thread.
func (s *Store) viewImage(ctx context.Context, chainID string, f func(root string) error) error {
	return s.opts.Lease(ctx, viewLease, func(ctx context.Context) (err error) {
		snapshotter := s.opts.Client.SnapshotService(s.opts.Snapshotter)
		key := "berm-view-" + rand.Text()
		mounts, err := snapshotter.View(ctx, key, chainID)
		if err != nil {
			return err
		}
		defer func() {
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTimeout)
			defer cancel()
			// If this fails, the engine's collector removes it after the lease's end.
			if err := snapshotter.Remove(ctx, key); err != nil && !errdefs.IsNotFound(err) {
				s.opts.Logger.WarnContext(ctx, "view_left", "snapshot", key, "error", err)
			}
		}()
		return withMounts(mounts, s.opts.Root, f)
	})
}

// withMounts calls f with the directory of a root file system. It mounts the file system for
// f's thread only, over a directory that must exist. A single layer needs no mount.
func withMounts(mounts []mount.Mount, over string, f func(root string) error) error {
	if len(mounts) == 1 && slices.Contains([]string{"bind", "rbind"}, mounts[0].Type) {
		return f(mounts[0].Source)
	}
	return runtime.OnThread(func() (err error) {
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

// mountHere mounts in this thread's mount namespace. It makes the paths of an overlay's layers
// relative, so that they fit into a page. Otherwise mount.Mount.Mount would mount on another
// thread, and so in the host's mount namespace.
func mountHere(m mount.Mount, target string) error {
	m.Options = slices.Clone(m.Options)
	if i := slices.IndexFunc(m.Options, func(o string) bool { return strings.HasPrefix(o, "lowerdir=") }); m.Type == "overlay" && i >= 0 {
		dirs := strings.Split(strings.TrimPrefix(m.Options[i], "lowerdir="), ":")
		// All layers of the overlayfs snapshotter are at …/snapshots/ID/fs.
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
