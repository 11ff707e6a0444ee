package containerd

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/containerd/errdefs"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"github.com/opencontainers/runtime-spec/specs-go/features"
	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/containerd/image"
	"github.com/bermhq/berm/runtime/containerd/network"
)

// The ranges are above what useradd gives to subordinate users (to 600100000), systemd to
// containers (to 1879048191) and SSSD to a domain's users (to 2000200000), and below systemd's
// foreign users (from 2147352576).
const (
	firstRange = 0x7740 << 16 // 2000683008
	rangeCount = 2048
	rangeSize  = 1 << 16

	// rangeClaims holds a link for each range that any instance on this host uses. The link's name is
	// the first ID, its target the container's rangeFile.
	rangeClaims = "/run/berm-userns"
	rangeFile   = "range"  // in a container's directory, holds the first ID
	usernsFile  = "userns" // beside it, the namespace is mounted there
)

// usernsLimits are a container's limits of what the kernel counts per user, by their names in
// /proc/sys/user.
var usernsLimits = []string{
	"max_inotify_instances=128", "max_inotify_watches=65536", "max_fanotify_groups=128", "max_fanotify_marks=65536",
}

// noUserNS returns why no container can have a user namespace of its own, or "" if one can. It
// asks the engine until the answer is "".
func (r *Runtime) noUserNS(ctx context.Context) (string, error) {
	if r.userNS.Load() {
		return "", nil
	}
	if b, err := os.ReadFile("/proc/sys/user/max_user_namespaces"); err != nil || string(b) == "0\n" {
		return "it needs a kernel with user namespaces, and user.max_user_namespaces above 0", nil
	}
	info, err := r.client.RuntimeInfo(ctx, runcShim, nil)
	switch {
	case errdefs.IsNotImplemented(native(err)):
		return "it needs containerd 2 or newer", nil
	case err != nil:
		return "", err
	}
	f, _ := info.Features.(*features.Features)
	if f == nil || f.Linux == nil || f.Linux.MountExtensions == nil || f.Linux.MountExtensions.IDMap == nil ||
		f.Linux.MountExtensions.IDMap.Enabled == nil || !*f.Linux.MountExtensions.IDMap.Enabled {
		return "it needs runc 1.2 or newer", nil
	}
	p, err := r.snapshotter(ctx)
	if err != nil {
		return "", err
	}
	if !slices.Contains(p.GetCapabilities(), "remap-ids") {
		return "the snapshotter " + r.opts.Snapshotter + " can't map IDs: it needs overlayfs on Linux 5.19 or newer, on a file system with idmapped mounts such as ext4 or XFS", nil
	}
	r.userNS.Store(true)
	return "", nil
}

// checkUserNS returns an error if the container can't have a user namespace of its own.
func (c *creation) checkUserNS(ctx context.Context) error {
	refuse := func(why string) error {
		return runtime.Invalid("userns: auto can't be had: %s; or leave the key out of the profile", why)
	}
	if c.class.name != runcShim || c.class.binary != "" {
		return refuse("the runtime class must be runc")
	}
	if err := inRange(c.account); err != nil {
		return err
	}
	why, err := c.r.noUserNS(ctx)
	if why != "" {
		err = refuse(why)
	}
	return err
}

// inRange returns an error for IDs that a container with a Spec.UserNS doesn't have.
func inRange(a image.Account) error {
	for _, id := range append(slices.Clone(a.Groups), a.UID, a.GID) {
		if id >= rangeSize {
			return runtime.Invalid("there is no user or group %d with userns: auto: the last is %d", id, rangeSize-1)
		}
	}
	return nil
}

// claimRange claims a range of IDs for a container, and returns the first ID. The claim ends
// when the container's directory, its last part, is removed. A lock keeps instances on the
// same host from choosing at the same time.
func (r root) claimRange(ctx context.Context, p *place, claims string) (int, error) {
	if err := os.MkdirAll(claims, 0o700); err != nil {
		return 0, err
	}
	unlock, err := network.LockDir(ctx, claims)
	if err != nil {
		return 0, err
	}
	defer unlock()
	taken, err := accountRanges("/etc/passwd", "/etc/group", "/etc/subuid", "/etc/subgid")
	if err != nil {
		return 0, err
	}
	take := func(first string) error {
		n, err := strconv.ParseUint(first, 10, 32)
		taken = append(taken, idRange{n, rangeSize})
		return err
	}
	claimed, err := os.ReadDir(claims)
	if err != nil {
		return 0, err
	}
	for _, claim := range claimed {
		link := filepath.Join(claims, claim.Name())
		target, err := os.Readlink(link)
		if err == nil {
			_, err = os.Lstat(target)
		}
		if errors.Is(err, fs.ErrNotExist) { // its container is gone
			err = os.RemoveAll(link)
		} else {
			_ = take(claim.Name()) // other names are no ranges
		}
		if err != nil {
			return 0, err
		}
	}
	// After a restart of the host, the links are gone, but not the containers' directories.
	ids, err := r.places()
	if err != nil {
		return 0, err
	}
	for _, id := range ids {
		b, err := os.ReadFile(r.path("containers", id, rangeFile))
		if errors.Is(err, fs.ErrNotExist) || err == nil && len(b) == 0 { // nothing was made with it
			continue
		}
		if err = errors.Join(err, take(string(b))); err != nil {
			return 0, fmt.Errorf("the range of container %s: %w", id, err)
		}
	}
	first, err := freeRange(taken)
	if err != nil {
		return 0, err
	}
	name := strconv.FormatUint(first, 10)
	if err := os.WriteFile(p.file(rangeFile), []byte(name), 0o600); err != nil {
		return 0, err
	}
	return int(first), os.Symlink(p.file(rangeFile), filepath.Join(claims, name)) //nolint:gosec // it has 31 bits
}

// idRange is a range of the host's IDs.
type idRange struct{ first, count uint64 }

// freeRange returns the first ID of a range that none of taken overlaps.
func freeRange(taken []idRange) (uint64, error) {
	used := make([]bool, rangeCount)
	for _, t := range taken {
		for i := range used {
			first := uint64(firstRange + i*rangeSize)
			used[i] = used[i] || t.first < first+rangeSize && first < t.first+t.count
		}
	}
	i := slices.Index(used, false)
	if i < 0 {
		return 0, runtime.WithClass(errdefs.ErrResourceExhausted, fmt.Errorf("userns: auto: all %d ranges of IDs, from %d on, are taken: remove sandboxes", rangeCount, firstRange))
	}
	return uint64(firstRange + i*rangeSize), nil
}

// accountRanges returns the IDs of the host's own users and groups in files such as passwd and
// subuid. It ignores a missing file.
func accountRanges(files ...string) (out []idRange, err error) {
	for _, file := range files {
		b, err := os.ReadFile(file)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
		for line := range strings.Lines(string(b)) {
			fields := strings.Split(strings.TrimSpace(line), ":")
			if len(fields) < 3 {
				continue
			}
			at, count := fields[2], uint64(1)
			if strings.Contains(filepath.Base(file), "sub") {
				at = fields[1]
				if count, err = strconv.ParseUint(fields[2], 10, 32); err != nil {
					return nil, fmt.Errorf("read %s: %w", file, err)
				}
			}
			if first, err := strconv.ParseUint(at, 10, 32); err == nil { // a line such as "+::" has none
				out = append(out, idRange{first, count})
			}
		}
	}
	return out, nil
}

// makeUserNS makes the container's user namespace, and in it the network namespace if the
// container is on a network. In a network namespace of another user namespace, the container
// couldn't mount /sys, and its added capabilities would have no effect. Berm's firewall rules
// aren't in the container's network namespace.
func (c *creation) makeUserNS(ctx context.Context) (netns string, err error) {
	if c.ids, err = c.r.root.claimRange(ctx, c.place, rangeClaims); err != nil {
		return "", err
	}
	path, err := c.r.agentPath()
	if err != nil {
		return "", err
	}
	agent, err := os.Open(path) // in a directory that the program's user can't enter
	if err != nil {
		return "", err
	}
	defer func() { _ = agent.Close() }()
	cmd := exec.CommandContext(ctx, "/proc/self/fd/3", append([]string{"userns"}, usernsLimits...)...)
	cmd.ExtraFiles, cmd.Env = []*os.File{agent}, []string{}
	ids := []syscall.SysProcIDMap{{HostID: c.ids, Size: rangeSize}}
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWUSER, UidMappings: ids, GidMappings: ids, GidMappingsEnableSetgroups: true,
		Credential: &syscall.Credential{}, // root of the namespace
	}
	if c.spec.Network != "" {
		cmd.SysProcAttr.Cloneflags |= syscall.CLONE_NEWNET
	}
	var failed strings.Builder
	cmd.Stderr = &failed
	in, err := cmd.StdinPipe()
	if err != nil {
		return "", err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return "", err
	}
	if err := runtime.OnThread(func() error {
		if err := becomeOwner(c.ids); err != nil {
			return err
		}
		return cmd.Start()
	}); err != nil {
		return "", runtime.Precondition("userns: auto: make a user namespace, which the kernel, or RestrictNamespaces of Berm's unit, may forbid: %w", err)
	}
	_, err = bufio.NewReader(out).ReadString('\n') // its limits are set
	if err == nil {
		netns, err = c.pinUserNS(cmd.Process.Pid)
	}
	_ = in.Close()
	if ended := cmd.Wait(); ended != nil && (err == nil || errors.Is(err, io.EOF)) {
		err = fmt.Errorf("userns: auto: set the limits of the user namespace: %w: %s", ended, failed.String())
	}
	return netns, err
}

// becomeOwner makes an ID of the host the owner of the user namespaces that this thread makes. The
// kernel also counts a namespace's resources against its owner. The thread keeps its capabilities.
func becomeOwner(id int) error {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var caps [2]unix.CapUserData
	if err := unix.Capget(&header, &caps[0]); err != nil {
		return err
	}
	keep := ^uintptr(0)                                                      // -1
	for _, call := range []uintptr{unix.SYS_SETRESGID, unix.SYS_SETRESUID} { // of this thread only, unlike syscall's
		if _, _, errno := unix.RawSyscall(call, keep, uintptr(id), keep); errno != 0 {
			return errno
		}
	}
	return unix.Capset(&header, &caps[0])
}

// pinUserNS mounts the namespaces of a process, so that they outlive it. It returns the path of
// the network namespace, or "" without a network.
func (c *creation) pinUserNS(pid int) (netns string, err error) {
	from := fmt.Sprintf("/proc/%d/ns/", pid)
	pin := c.place.file(usernsFile)
	if err := os.WriteFile(pin, nil, 0o600); err != nil {
		return "", err
	}
	if err := unix.Mount(from+"user", pin, "", unix.MS_BIND, ""); err != nil {
		return "", fmt.Errorf("pin the user namespace: %w", err)
	}
	sources := []string{c.place.dir, c.agent}
	if dir := c.agentDir(); dir != "" {
		sources = append(sources, dir)
	}
	for _, m := range c.spec.Mounts {
		sources = append(sources, m.Source)
	}
	for _, source := range sources {
		if err := tryIDMap(source, pin); err != nil {
			return "", err
		}
	}
	if c.spec.Network == "" {
		return "", nil
	}
	return c.r.networks.MakeNetns(c.id, from+"net")
}

// tryIDMap returns an error if a path's file system doesn't support idmapped mounts.
func tryIDMap(path, userns string) error {
	ns, err := os.Open(userns)
	if err != nil {
		return err
	}
	defer func() { _ = ns.Close() }()
	tree, err := unix.OpenTree(unix.AT_FDCWD, path, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return &fs.PathError{Op: "open_tree", Path: path, Err: err}
	}
	defer func() { _ = unix.Close(tree) }()
	err = unix.MountSetattr(tree, "", unix.AT_EMPTY_PATH, &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_IDMAP, Userns_fd: uint64(ns.Fd())})
	if err != nil {
		return runtime.Invalid("userns: auto can't be had: the file system of %s has no idmapped mounts (%w): use another, such as ext4 or XFS; or leave the key out of the profile", path, err)
	}
	return nil
}

// mapIDs puts the container's user namespace and ID mappings into the spec. They hold for its
// bind mounts, too.
func (c *creation) mapIDs(s *specs.Spec) {
	if c.ids == 0 {
		return
	}
	ids := []specs.LinuxIDMapping{{HostID: uint32(c.ids), Size: rangeSize}} //nolint:gosec // it has 31 bits
	s.Linux.UIDMappings, s.Linux.GIDMappings = ids, ids
	s.Linux.Namespaces = append(s.Linux.Namespaces, specs.LinuxNamespace{Type: specs.UserNamespace, Path: c.place.file(usernsFile)})
	for i := range s.Mounts {
		if s.Mounts[i].Type == "bind" {
			s.Mounts[i].UIDMappings, s.Mounts[i].GIDMappings = ids, ids
		}
	}
}
