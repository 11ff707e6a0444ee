package network

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/runtime"
)

// MakeNetns makes a network namespace for a container. If from isn't empty, it takes the namespace at
// from, which has no interfaces. It returns the path where the namespace is mounted.
func (m *Manager) MakeNetns(id, from string) (string, error) {
	path := m.path("netns", id)
	err := os.MkdirAll(m.path("netns"), 0o700)
	var f *os.File
	if err == nil {
		f, err = os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_RDONLY, 0o600)
	}
	if err != nil {
		return "", fmt.Errorf("make a network namespace: %w", err)
	}
	_ = f.Close() // nothing was written
	err = runtime.OnThread(func() (err error) {
		if from == "" {
			err = unix.Unshare(unix.CLONE_NEWNET)
		} else {
			err = enterNetns(from)
		}
		if err == nil {
			err = disableIPv6("all", "default")
		}
		if err == nil {
			err = unix.Mount("/proc/thread-self/ns/net", path, "", unix.MS_BIND, "")
		}
		return err
	})
	if err != nil {
		return "", errors.Join(fmt.Errorf("make a network namespace: %w", err), RemoveNetns(path))
	}
	return path, nil
}

// disableIPv6 disables IPv6 on interfaces of this thread's network namespace. The firewall
// has no rules for it.
func disableIPv6(interfaces ...string) error {
	for _, name := range interfaces {
		err := setSysctl("ipv6/conf/"+name+"/disable_ipv6", "1")
		if err != nil && !errors.Is(err, fs.ErrNotExist) { // a kernel without IPv6 has no such file
			return err
		}
	}
	return nil
}

// setSysctl sets a sysctl of this thread's network namespace, unless it has the value.
func setSysctl(name, value string) error {
	path := "/proc/sys/net/" + name
	if b, err := os.ReadFile(path); err == nil && string(b) == value+"\n" {
		return nil
	}
	return os.WriteFile(path, []byte(value), 0o600)
}

// isNetns reports whether a network namespace is mounted at a path.
func isNetns(path string) (bool, error) {
	var stat unix.Statfs_t
	err := unix.Statfs(path, &stat)
	if errors.Is(err, unix.ENOENT) {
		return false, nil
	}
	return err == nil && stat.Type == unix.NSFS_MAGIC, err
}

// RemoveNetns unmounts a namespace, which ends with the last process in it.
func RemoveNetns(path string) error {
	for {
		err := unix.Unmount(path, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
		if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT) {
			break // nothing is mounted there any more
		}
		if err != nil {
			return fmt.Errorf("unmount %s: %w", path, err)
		}
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// onHost runs f, and the programs that f starts, on a thread in the network namespace of the
// bridges. After the context ends, it waits for f for the grace, and then leaves it.
func (m *Manager) onHost(ctx context.Context, f func(context.Context) error) error {
	done := make(chan error, 1)
	go func() {
		if m.opts.Netns == "" {
			done <- f(ctx)
			return
		}
		done <- runtime.OnThread(func() error {
			if err := enterNetns(m.opts.Netns); err != nil {
				return err
			}
			return f(ctx)
		})
	}()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
	}
	late := time.NewTimer(runtime.Grace)
	defer late.Stop()
	select {
	case err := <-done:
		return err
	case <-late.C:
		return runtime.Unavailable(errors.New("the host's networking hangs"))
	}
}

func enterNetns(path string) error {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return runtime.Precondition("network namespace %s: %w", path, err)
	}
	if err := errors.Join(unix.Setns(fd, unix.CLONE_NEWNET), unix.Close(fd)); err != nil {
		return fmt.Errorf("enter network namespace %s: %w", path, err)
	}
	return nil
}
