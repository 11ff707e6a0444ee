package mountpin

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/lifecycle/hostdir"
)

// ErrGone says that the process to be verified has ended.
var ErrGone = errors.New("the process has ended")

// Pinned is a mount as its container must have it.
type Pinned struct {
	Target   string // in the container: absolute and clean
	ReadOnly bool
	Dev, Ino uint64 // of the directory or file; an Ino of 0 allows any mount at exactly Target
}

// NewPinned describes the mount of a held directory or file. Source is what Hold returned, and
// must still be held.
func NewPinned(source, target string, readOnly bool) (Pinned, error) {
	f, err := hostdir.OpenAny(source)
	if err != nil {
		return Pinned{}, err
	}
	defer f.Close()
	st, err := statx(int(f.Fd()), source)
	if err != nil {
		return Pinned{}, err
	}
	return Pinned{target, readOnly, device(st), st.Ino}, nil
}

// Verify compares the mounts of a container, whose first process is pid, with those that were
// held. It returns ErrExchanged if one is missing, is another directory, or is writable but
// must not be. It returns ErrGone if the process has ended. The pid is in this process's PID
// namespace. Verify needs CAP_SYS_PTRACE.
//
// If nothing is mounted at a target, the target may lead through a symbolic link of the image,
// which may have changed since. Then Verify accepts any other mount point of the directory.
func Verify(pid int, mounts []Pinned) error {
	if len(mounts) == 0 {
		return nil
	}
	process, err := unix.PidfdOpen(pid, 0)
	if errors.Is(err, unix.ESRCH) {
		return ErrGone
	}
	if err != nil {
		return os.NewSyscallError("pidfd_open", err)
	}
	defer unix.Close(process)
	if err = verify(pid, mounts); err != nil && ended(pid, process) {
		return ErrGone
	}
	return err
}

// exitTimeout bounds how long ended waits for a process that has given up its root.
const exitTimeout = 2 * time.Second

// ended reports whether a process has ended. It waits for a process that has given up its
// root, which is the first part of exiting. If only the first thread exits, the process goes
// on.
func ended(pid, process int) bool {
	var wait time.Duration
	if _, err := os.Readlink("/proc/" + strconv.Itoa(pid) + "/root"); errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) {
		wait = exitTimeout
	}
	for until := time.Now().Add(wait); ; {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(process), Events: unix.POLLIN}}, int(max(0, time.Until(until).Milliseconds())))
		if !errors.Is(err, unix.EINTR) {
			return err == nil && n == 1
		}
	}
}

func verify(pid int, mounts []Pinned) error {
	proc := "/proc/" + strconv.Itoa(pid)
	root, err := unix.Open(proc+"/root", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return &fs.PathError{Op: "open", Path: proc + "/root", Err: err}
	}
	defer unix.Close(root)
	table, err := os.Open(proc + "/mountinfo")
	if err != nil {
		return err
	}
	defer func() { _ = table.Close() }()
	points, err := mountinfo.GetMountsFromReader(table, nil)
	if err != nil {
		return err
	}
	for _, m := range mounts {
		if m.Ino == 0 {
			if !slices.ContainsFunc(points, func(p *mountinfo.Info) bool { return p.Mountpoint == m.Target }) {
				return fmt.Errorf("mount at %s: %w", m.Target, ErrExchanged)
			}
			continue
		}
		i := slices.IndexFunc(points, func(p *mountinfo.Info) bool { return p.Mountpoint == m.Target && has(root, p, m) })
		if i < 0 && !slices.ContainsFunc(points, func(p *mountinfo.Info) bool { return p.Mountpoint == m.Target }) {
			i = slices.IndexFunc(points, func(p *mountinfo.Info) bool { return has(root, p, m) })
		}
		if i < 0 {
			return fmt.Errorf("mount at %s: %w", m.Target, ErrExchanged)
		}
		points[i].ID = 0 // one mount serves one target
	}
	return nil
}

// has reports whether the mount p is the topmost at its path, and has m's directory and mode.
func has(root int, p *mountinfo.Info, m Pinned) bool {
	if m.ReadOnly && !slices.Contains(strings.Split(p.Options, ","), "ro") || p.ID == 0 {
		return false
	}
	fd, err := unix.Openat2(root, p.Mountpoint, &unix.OpenHow{
		Flags:   unix.O_PATH | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS,
	})
	if err != nil {
		return false
	}
	defer unix.Close(fd)
	st, err := statx(fd, p.Mountpoint)
	return err == nil && st.Mnt_id == uint64(p.ID) && device(st) == m.Dev && st.Ino == m.Ino
}

// statx returns the stat of an open file with its mount ID. It needs Linux 5.8.
func statx(fd int, path string) (st unix.Statx_t, err error) {
	err = unix.Statx(fd, "", unix.AT_EMPTY_PATH, unix.STATX_INO|unix.STATX_MNT_ID, &st)
	if err == nil && st.Mask&unix.STATX_MNT_ID == 0 {
		err = unix.ENOSYS
	}
	if err != nil {
		return st, &fs.PathError{Op: "statx", Path: path, Err: err}
	}
	return st, nil
}

func device(st unix.Statx_t) uint64 { return unix.Mkdev(st.Dev_major, st.Dev_minor) }
