package main

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"
)

// unifiedCgroup is where a host with hybrid cgroups has the hierarchy of version 2.
const unifiedCgroup = "/sys/fs/cgroup/unified"

// What is mounted over it takes the directories that crun makes for a container, and ends
// with it. Where nothing is mounted they would stay on the host for good.
const (
	coverFlags   = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC
	coverOptions = "size=64k,mode=755"
)

// becomeCrun makes this process crun, on the host: "--root DIR …", as an engine's shim
// calls its OCI runtime. crun refuses to work with hybrid cgroups, so that it is
// started where the hierarchy of version 2, in which no container is limited, isn't
// seen. It comes back only when that can't be done, with the exit code.
func becomeCrun(args []string) int {
	if deleted(args) {
		return 0
	}
	path, err := lookUp("crun")
	if err == nil {
		err = hideUnified()
	}
	if err == nil {
		args = append([]string{"crun"}, args...)
		if sealed, err := seal(path); err == nil {
			_ = syscall.Exec(sealed, args, os.Environ())
		}
		err = syscall.Exec(path, args, os.Environ())
	}
	return complain("crun: "+reason(err), exitNotExecutable)
}

// deleted tells whether all that crun is asked for is to be sure that nothing is left of a
// container of which it knows nothing any more: "--root DIR … delete --force ID". Shims have
// that done after each container's end.
func deleted(args []string) bool {
	rest := args[max(len(args)-3, 0):]
	if len(args) < 5 || rest[0] != "delete" || rest[1] != "--force" {
		return false
	}
	_, err := os.Lstat(filepath.Join(args[1], rest[2]))
	return errors.Is(err, fs.ErrNotExist)
}

// hideUnified takes this thread, and what it becomes, to a mount namespace where the
// hierarchy isn't seen. The host's mounts, and those made there from now on, are.
func hideUnified() error {
	runtime.LockOSThread() // for good
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return err
	}
	if err := unix.Mount("", "/", "", unix.MS_SLAVE|unix.MS_REC, ""); err != nil {
		return err
	}
	return unix.Mount("tmpfs", unifiedCgroup, "tmpfs", coverFlags, coverOptions)
}

// seal copies a program to where nobody can change it any more, and answers the copy's
// path. crun runs from such a place only, out of the reach of what it lets into a container:
// started elsewhere it makes the copy itself, and starts anew.
func seal(path string) (string, error) {
	program, err := os.ReadFile(path)
	if err != nil {
		return "", err
	}
	if !bytes.HasPrefix(program, []byte("\x7fELF")) { // a script's interpreter can't open it any more
		return "", syscall.ENOEXEC
	}
	fd, err := unix.MemfdCreate("crun", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING|unix.MFD_EXEC)
	if errors.Is(err, unix.EINVAL) { // before Linux 6.3
		fd, err = unix.MemfdCreate("crun", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	}
	if err != nil {
		return "", err
	}
	copied := "/proc/self/fd/" + strconv.Itoa(fd)
	if err := os.WriteFile(copied, program, 0); err != nil {
		return "", err
	}
	_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_SEAL|unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_WRITE)
	return copied, err
}
