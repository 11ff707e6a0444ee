package containerd

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/runtime"
)

// missingDirs are those of the given directories, clean and absolute, that an image
// doesn't have. Known once, they are remembered.
func (r *Runtime) missingDirs(ctx context.Context, img *image, dirs []string) ([]string, error) {
	if len(dirs) == 0 {
		return nil, nil
	}
	key := strings.Join(append([]string{img.target.Digest.String()}, dirs...), "\x00")
	if missing, ok := r.images.missing(key); ok {
		return missing, nil
	}
	found, err := r.images.fly(ctx, "dirs "+key, readTimeout, func(ctx context.Context) (any, error) {
		var missing []string
		err := r.viewImage(ctx, img.chainID, func(root string) error {
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
	if err != nil {
		return nil, err
	}
	missing := found.([]string)
	r.images.keepMissing(key, missing)
	return missing, nil
}

// openIn opens a path as a process whose root is the directory root does; resolve holds
// further RESOLVE_ flags. A rename at the same moment makes the kernel unsure of ".." and can
// be made to last, so that openIn tries 100 times.
func openIn(root int, name string, flags, resolve uint64) (fd int, err error) {
	how := &unix.OpenHow{Flags: flags | unix.O_CLOEXEC, Resolve: unix.RESOLVE_IN_ROOT | resolve}
	for range 100 {
		if fd, err = unix.Openat2(root, name, how); !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EINTR) {
			break
		}
	}
	return fd, err
}

// existsBelow tells whether a root file system has anything at a path.
func existsBelow(root, name string) (bool, error) {
	dir, err := unix.Open(root, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return false, err
	}
	defer func() { _ = unix.Close(dir) }()
	fd, err := openIn(dir, name, unix.O_PATH, unix.RESOLVE_NO_MAGICLINKS)
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

func (c *imageCache) missing(key string) ([]string, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	dirs, ok := c.dirs[key]
	return dirs, ok
}

func (c *imageCache) keepMissing(key string, dirs []string) {
	if len(key) > maxCachedBytes { // callers and images choose what is in it
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.dirs == nil || len(c.dirs) >= maxCachedImages {
		c.dirs = map[string][]string{}
	}
	c.dirs[key] = dirs
}
