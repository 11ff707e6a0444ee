package containerd

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/runtime"
)

// runcRoot is the directory of runc's state, as containerd's runc shim sets it.
const runcRoot = "/run/containerd/runc"

// shimSockets is the directory of the shims' sockets, of all engines.
const shimSockets = "/run/containerd/s"

// shim is the engine's process for one container. The engine loses track of it if the engine
// or the client ends while the container's task is being made or removed.
type shim struct {
	process
	id     string // of the container
	bundle string // the container's directory, below the engine's
}

// remains finds and removes what containers have on the host besides the engine's records.
type remains struct {
	namespace, address, cgroupParent string // as in Options
	log                              *slog.Logger
}

// shims returns the shims of this engine and namespace, which it finds by their arguments.
func (h remains) shims() ([]shim, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	var out []shim
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		p, err := readProcess(pid)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		id := h.shimOf(p)
		if id == "" {
			continue
		}
		// A shim runs in its bundle. Skip one that has just ended.
		bundle, err := os.Readlink(fmt.Sprintf("/proc/%d/cwd", pid))
		if err == nil {
			out = append(out, shim{process: p, id: id, bundle: bundle})
		}
	}
	return out, nil
}

// shimOf returns the id of the container whose shim a process is. It is empty for any other
// process. A process in a container may have the same arguments as a shim, but isn't in the
// host's process namespace.
func (h remains) shimOf(p process) string {
	line, err := readLimited(fmt.Sprintf("/proc/%d/cmdline", p.pid), 4096)
	if err != nil || !bytes.Contains(line, []byte(h.namespace)) {
		return ""
	}
	args := strings.Split(string(line), "\x00")
	if !strings.HasPrefix(filepath.Base(args[0]), "containerd-shim-") || !hostsOwn(p.pid) {
		return ""
	}
	given := map[string]string{}
	for i := 1; i+1 < len(args); i += 2 {
		if !strings.HasPrefix(args[i], "-") {
			break // a flag without a value came before
		}
		given[strings.TrimLeft(args[i], "-")] = args[i+1]
	}
	if given["namespace"] != h.namespace || !samePath(given["address"], h.address) || !idPattern.MatchString(given["id"]) {
		return ""
	}
	return given["id"]
}

func samePath(a, b string) bool {
	x, err := os.Stat(a)
	if err != nil {
		return a == b // the engine may be away, and its socket with it
	}
	y, err := os.Stat(b)
	return err == nil && os.SameFile(x, y)
}

// hostsOwn reports whether a process is in this one's process namespace, and so in no
// container.
func hostsOwn(pid int) bool {
	return samePath("/proc/self/ns/pid", fmt.Sprintf("/proc/%d/ns/pid", pid))
}

// remove removes the parts of a container that the engine doesn't know: its shims, its cgroups
// with their processes, the mounts of its root file system, runc's state, and the shim's
// sockets. The engine must have no task of the container.
func (h remains) remove(ctx context.Context, id string) error {
	running, err := h.shims()
	if err != nil {
		return err
	}
	var bundles []string
	for _, s := range running {
		if s.id != id {
			continue
		}
		// Kill the shim first, as it could make more of what is removed below.
		if err := h.killShim(ctx, s); err != nil {
			return err
		}
		bundles = append(bundles, s.bundle)
	}
	if err := h.removeCgroups(ctx, id); err != nil {
		return err
	}
	suffix := filepath.Join("io.containerd.runtime.v2.task", h.namespace, id)
	mounted, err := unmountSuffix(filepath.Join("/", suffix, "rootfs"))
	if err != nil {
		return err
	}
	for _, rootfs := range mounted {
		bundles = append(bundles, filepath.Dir(rootfs))
	}
	var errs []error
	for _, bundle := range bundles {
		if strings.HasSuffix(bundle, "/"+suffix) { // nothing is mounted below it any more
			errs = append(errs, os.RemoveAll(bundle))
		}
	}
	errs = append(errs, os.RemoveAll(filepath.Join(runcRoot, h.namespace, id)), h.removeSockets(id))
	return errors.Join(errs...)
}

// removeSockets removes the sockets of a killed shim, including the one for debugging. Their names
// derive from the engine's address, as in SocketAddress of containerd's pkg/shim. It misses them if the
// engine knows its own socket by another path.
func (h remains) removeSockets(id string) error {
	var errs []error
	for _, of := range []string{id, id + "/debug"} {
		name := sha256.Sum256([]byte(filepath.Join(h.address, h.namespace, of)))
		err := os.Remove(filepath.Join(shimSockets, hex.EncodeToString(name[:])))
		if !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// killShim kills a shim. The writer of the container's log then reads its pipes to the end,
// and ends.
func (h remains) killShim(ctx context.Context, s shim) error {
	killed, err := killIf(s.pid, func() (bool, error) {
		now, err := readProcess(s.pid)
		return err == nil && now.same(s.process), nil
	})
	if !killed {
		return err // nil if it is gone
	}
	h.log.WarnContext(ctx, "stray_shim_killed", "container_id", s.id, "pid", s.pid)
	return await(ctx, func() (bool, error) {
		now, err := readProcess(s.pid)
		if errors.Is(err, fs.ErrNotExist) {
			return true, nil
		}
		return err == nil && (!now.same(s.process) || now.over()), err
	})
}

// killIf kills the process with a pid if it is the right one. Right runs when no other
// process can get the pid any more.
func killIf(pid int, right func() (bool, error)) (killed bool, err error) {
	fd, err := unix.PidfdOpen(pid, 0)
	if errors.Is(err, unix.ESRCH) || errors.Is(err, unix.EINVAL) { // the latter is a thread that isn't its process's first
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("open process %d: %w", pid, err)
	}
	defer func() { _ = unix.Close(fd) }()
	if ok, err := right(); !ok || err != nil {
		return false, err
	}
	if err := unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
		return false, fmt.Errorf("kill process %d: %w", pid, err)
	}
	return true, nil
}

// await is runtime.Poll for what takes a few milliseconds.
func await(ctx context.Context, done func() (bool, error)) error {
	return runtime.Poll(ctx, 5*time.Millisecond, done)
}

// cgroups returns a container's cgroups, of version 2 and of all hierarchies of version 1.
func (h remains) cgroups(id string) ([]string, error) {
	own := filepath.Join(h.cgroupParent, id)
	found, err := filepath.Glob(filepath.Join(cgroupRoot, "*", own))
	if err != nil {
		return nil, err
	}
	if _, err := os.Stat(filepath.Join(cgroupRoot, own)); err == nil {
		found = append(found, filepath.Join(cgroupRoot, own))
	}
	return found, nil
}

// removeCgroups kills all that is in a container's cgroups, and removes them.
func (h remains) removeCgroups(ctx context.Context, id string) error {
	roots, err := h.cgroups(id)
	if err != nil || len(roots) == 0 {
		return err
	}
	var dirs []string
	for _, root := range roots {
		if err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
			if err == nil && d.IsDir() {
				dirs = append(dirs, path)
			}
			if errors.Is(err, fs.ErrNotExist) {
				return nil
			}
			return err
		}); err != nil {
			return err
		}
	}
	slices.Reverse(dirs) // children first
	return await(ctx, func() (bool, error) {
		gone := true
		for _, dir := range dirs {
			if err := killCgroup(dir); err != nil {
				return false, err
			}
			switch err := os.Remove(dir); {
			case err == nil, errors.Is(err, fs.ErrNotExist):
			case errors.Is(err, unix.EBUSY): // the processes are still ending
				gone = false
			default:
				return false, err
			}
		}
		return gone, nil
	})
}

// killCgroup kills the processes in a cgroup. Only the engine's OCI runtime puts processes
// there.
func killCgroup(dir string) error {
	pids, err := cgroupProcesses(dir)
	if err != nil {
		return err
	}
	for _, pid := range pids {
		if _, err := killMember(dir, pid); err != nil {
			return err
		}
	}
	// In version 1 a frozen process doesn't die. Elsewhere there is no such file.
	err = os.WriteFile(filepath.Join(dir, "freezer.state"), []byte("THAWED"), 0)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrPermission) || errors.Is(err, unix.ENODEV) {
		return nil
	}
	return err
}

// cgroupProcesses lists the processes of a cgroup. A missing cgroup has none.
func cgroupProcesses(dir string) ([]int, error) {
	b, err := readLimited(filepath.Join(dir, "cgroup.procs"), 1<<20)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENODEV) || errors.Is(err, unix.EOPNOTSUPP) {
		return nil, nil // the cgroup is gone, or lists only threads
	}
	if err != nil {
		return nil, err
	}
	var pids []int
	for field := range strings.FieldsSeq(string(b)) {
		if pid, err := strconv.Atoi(field); err == nil && pid > 0 { // 0 is a process that isn't visible here
			pids = append(pids, pid)
		}
	}
	return pids, nil
}

// killMember kills a process if it is in a cgroup.
func killMember(dir string, pid int) (killed bool, err error) {
	return killIf(pid, func() (bool, error) {
		pids, err := cgroupProcesses(dir)
		return slices.Contains(pids, pid), err
	})
}

// killFirst kills a container's first process, and so all of them, without the engine. It
// returns false for a process that isn't in the container's cgroup, or is in the host's
// process namespace, as the program of a virtual machine is.
func (h remains) killFirst(id string, pid int) (killed bool, err error) {
	dirs, err := h.cgroups(id)
	if err != nil || len(dirs) == 0 || hostsOwn(pid) {
		return false, err
	}
	return killMember(dirs[0], pid)
}

// unmountSuffix detaches the mounts whose paths have a suffix, and returns the paths.
func unmountSuffix(suffix string) (points []string, err error) {
	mounts, err := mountinfo.GetMounts(func(m *mountinfo.Info) (skip, stop bool) { return !strings.HasSuffix(m.Mountpoint, suffix), false })
	if err != nil {
		return nil, err
	}
	for _, m := range slices.Backward(mounts) { // topmost first
		err := unix.Unmount(m.Mountpoint, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
		if err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
			return nil, fmt.Errorf("unmount %s: %w", m.Mountpoint, err)
		}
		points = append(points, m.Mountpoint)
	}
	return points, nil
}
