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

	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/lifecycle/hostdir"
)

// ErrGone says that the process to be verified has ended.
var ErrGone = errors.New("the process has ended")

// Pinned is a mount as its container must have it.
type Pinned struct {
	Target   string // in the container: absolute and clean
	ReadOnly bool
	Dev, Ino uint64 // of the directory or file; 0: of none in particular, but no link may lead to it
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

// Verify compares the mounts of a container, whose first process is pid, with those
// that were held. It returns ErrExchanged if one is missing, is another directory, or can be
// written to though it must not. It returns ErrGone if the process has ended. The pid
// must be of this process's PID namespace; reading it needs CAP_SYS_PTRACE.
//
// A target that leads through a symbolic link of the image matches any mount point of the
// container that has the directory, for the link may have changed since the start.
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

// exitTimeout bounds how long a process takes to end once it has given up its root.
const exitTimeout = 2 * time.Second

// ended reports whether a process has ended. One that is exiting gives up its root before it
// counts as ended, and is waited for: if only its first thread exits, the others run on.
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
	points, err := mountPoints(proc + "/mountinfo")
	if err != nil {
		return err
	}
	for _, m := range mounts {
		if m.Ino == 0 {
			if !slices.ContainsFunc(points, func(p point) bool { return p.path == m.Target }) {
				return fmt.Errorf("mount at %s: %w", m.Target, ErrExchanged)
			}
			continue
		}
		i := slices.IndexFunc(points, func(p point) bool { return p.path == m.Target && p.has(root, m) })
		if i < 0 && !slices.ContainsFunc(points, func(p point) bool { return p.path == m.Target }) {
			i = slices.IndexFunc(points, func(p point) bool { return p.has(root, m) })
		}
		if i < 0 {
			return fmt.Errorf("mount at %s: %w", m.Target, ErrExchanged)
		}
		points[i].id = 0 // one mount serves one target
	}
	return nil
}

// point is a mount point of another process.
type point struct {
	id       uint64
	path     string
	readOnly bool
}

// has reports whether the mount is the topmost at its path and as m must be.
func (p point) has(root int, m Pinned) bool {
	if m.ReadOnly && !p.readOnly || p.id == 0 {
		return false
	}
	fd, err := unix.Openat2(root, p.path, &unix.OpenHow{
		Flags:   unix.O_PATH | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS,
	})
	if err != nil {
		return false
	}
	defer unix.Close(fd)
	st, err := statx(fd, p.path)
	return err == nil && st.Mnt_id == p.id && device(st) == m.Dev && st.Ino == m.Ino
}

// octal undoes the escapes of mountinfo.
var octal = strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\043`, "#", `\134`, `\`)

// mountPoints reads a mountinfo file.
func mountPoints(name string) ([]point, error) {
	data, err := os.ReadFile(name)
	if err != nil {
		return nil, err
	}
	var out []point
	for line := range strings.Lines(string(data)) {
		fields := strings.Fields(line)
		if len(fields) < 6 {
			return nil, fmt.Errorf("%s: malformed line", name)
		}
		id, err := strconv.ParseUint(fields[0], 10, 64)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		out = append(out, point{id, octal.Replace(fields[4]), slices.Contains(strings.Split(fields[5], ","), "ro")})
	}
	return out, nil
}

// statx needs Linux 5.8, which tells the mount.
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
