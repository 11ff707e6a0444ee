package containerd

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/containerd/image"
)

// vet checks from the host a container that was made but not started. It refuses one whose image or
// mounts misled the OCI runtime.
//
// The image decides where a mount ends up: /workspace may be a link to /dev. The runtime then
// masks files of /proc with what the mount has at /dev/null, which may be a link.
func (c *creation) vet(pid uint32, linux *specs.Linux) error {
	if c.class.name != runcShim {
		return nil // such a runtime has its own kernel, and none of this is the host's
	}
	root, err := unix.Open(fmt.Sprintf("/proc/%d/root", pid), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("look at what was made: %w", err)
	}
	defer func() { _ = unix.Close(root) }()
	if c.ids != 0 && !samePath(fmt.Sprintf("/proc/%d/ns/user", pid), c.place.file(usernsFile)) {
		return errors.New("the container isn't in its own user namespace")
	}
	for _, path := range []string{"/proc", "/sys"} {
		if err := vetPath(root, path, isKernels); err != nil {
			return err
		}
	}
	for _, path := range linux.MaskedPaths {
		if err := vetPath(root, path, isMasked); err != nil {
			return err
		}
	}
	for _, path := range linux.ReadonlyPaths {
		if err := vetPath(root, path, isReadOnly); err != nil {
			return err
		}
	}
	if err := vetCgroups(root); err != nil {
		return err
	}
	return c.vetAgent(root)
}

// vetCgroups returns an error if a container can write to a hierarchy of cgroups, which has
// its limits.
func vetCgroups(root int) error {
	fd, err := image.OpenIn(root, cgroupRoot, unix.O_RDONLY|unix.O_DIRECTORY, unix.RESOLVE_NO_SYMLINKS)
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("look at %s: %w", cgroupRoot, err)
	}
	dir := os.NewFile(uintptr(fd), cgroupRoot)
	defer func() { _ = dir.Close() }()
	entries, err := dir.ReadDir(-1)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if path := filepath.Join(cgroupRoot, e.Name()); e.IsDir() {
			if err := vetPath(root, path, isReadOnly); err != nil {
				return fmt.Errorf("a container could change its limits: %w", err)
			}
		}
	}
	return nil
}

var errAstray = errors.New("the image, or what is mounted, covers a place of the kernel's or Berm's own")

// vetPath returns an error if a path exists and good refuses it.
func vetPath(root int, path string, good func(unix.Stat_t, unix.Statfs_t) bool) error {
	fd, err := image.OpenIn(root, path, unix.O_PATH|unix.O_NOFOLLOW, unix.RESOLVE_NO_SYMLINKS)
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	if errors.Is(err, unix.ELOOP) || errors.Is(err, unix.ENOTDIR) {
		return runtime.Invalid("%s: %w", path, errAstray)
	}
	if err != nil {
		return fmt.Errorf("look at %s: %w", path, err)
	}
	defer func() { _ = unix.Close(fd) }()
	var stat unix.Stat_t
	var fs unix.Statfs_t
	if err := errors.Join(unix.Fstat(fd, &stat), unix.Fstatfs(fd, &fs)); err != nil {
		return fmt.Errorf("look at %s: %w", path, err)
	}
	if !good(stat, fs) {
		return runtime.Invalid("%s: %w", path, errAstray)
	}
	return nil
}

func isKernels(_ unix.Stat_t, fs unix.Statfs_t) bool {
	return fs.Type == unix.PROC_SUPER_MAGIC || fs.Type == unix.SYSFS_MAGIC
}

func isReadOnly(_ unix.Stat_t, fs unix.Statfs_t) bool { return fs.Flags&unix.ST_RDONLY != 0 }

// isMasked reports whether a file below /proc or /sys is masked.
func isMasked(stat unix.Stat_t, fs unix.Statfs_t) bool {
	if stat.Mode&unix.S_IFMT == unix.S_IFDIR {
		return !isKernels(stat, fs) && isReadOnly(stat, fs)
	}
	return stat.Mode&unix.S_IFMT == unix.S_IFCHR && stat.Rdev == unix.Mkdev(1, 3) // /dev/null
}

// vetAgent returns an error if the container's first program isn't the agent.
func (c *creation) vetAgent(root int) error {
	var want, got unix.Stat_t
	if err := unix.Stat(c.agent, &want); err != nil {
		return &os.PathError{Op: "stat", Path: c.agent, Err: err}
	}
	fd, err := image.OpenIn(root, runtime.AgentProgram, unix.O_PATH, unix.RESOLVE_NO_MAGICLINKS)
	if err != nil {
		return runtime.Invalid("%s: %w: %w", runtime.AgentProgram, errAstray, err)
	}
	defer func() { _ = unix.Close(fd) }()
	if err := unix.Fstat(fd, &got); err != nil {
		return fmt.Errorf("look at %s: %w", runtime.AgentProgram, err)
	}
	if got.Dev != want.Dev || got.Ino != want.Ino {
		return runtime.Invalid("%s: %w", runtime.AgentProgram, errAstray)
	}
	return nil
}
