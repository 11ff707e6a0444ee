package main

import (
	"os"
	"runtime"
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
	path, err := lookUp("crun")
	if err == nil {
		err = hideUnified()
	}
	if err == nil {
		err = syscall.Exec(path, append([]string{"crun"}, args...), os.Environ())
	}
	return complain("crun: "+reason(err), exitNotExecutable)
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
