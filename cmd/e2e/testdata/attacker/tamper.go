package main

import (
	"errors"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// traces are ways to get at the first process.
func traces() []attempt {
	area := make([]byte, 64)
	remote := []unix.RemoteIovec{{Base: uintptr(0x400000), Len: len(area)}}
	local := []unix.Iovec{{Base: &area[0], Len: uint64(len(area))}}
	open := func(path string, flags int) func() error {
		return func() error {
			fd, err := unix.Open(path, flags, 0)
			if err != nil {
				return err
			}
			defer func() { _ = unix.Close(fd) }()
			if _, err := unix.Read(fd, area); err != nil {
				return err
			}
			return nil
		}
	}
	all := []attempt{
		{"ptrace attach", func() error { return unix.PtraceAttach(1) }},
		{"ptrace seize", func() error { return unix.PtraceSeize(1) }},
		{"write its memory", func() error { _, err := unix.ProcessVMWritev(1, local, remote, 0); return err }},
		{"read its memory", func() error { _, err := unix.ProcessVMReadv(1, local, remote, 0); return err }},
		{"take its file", func() error {
			pidfd, err := unix.PidfdOpen(1, 0)
			if err != nil {
				return err
			}
			for fd := range 64 {
				if _, err = unix.PidfdGetfd(pidfd, fd, 0); err == nil {
					return nil
				}
			}
			return err
		}},
		{"follow its files", func() error {
			entries, err := os.ReadDir("/proc/1/fd") // which may be listed
			for _, e := range entries {
				if _, err = os.Readlink("/proc/1/fd/" + e.Name()); err == nil {
					return nil
				}
			}
			return err
		}},
		{"list its mappings", func() error { _, err := os.ReadDir("/proc/1/map_files"); return err }},
		{"follow its root", func() error { _, err := os.ReadDir("/proc/1/root/"); return err }},
		{"follow its directory", func() error { _, err := os.ReadDir("/proc/1/cwd/"); return err }},
		{"open its program", open("/proc/1/exe", unix.O_RDONLY)},
		{"enter its mounts", func() error {
			fd, err := unix.Open("/proc/1/ns/mnt", unix.O_RDONLY, 0)
			if err != nil {
				return err
			}
			return unix.Setns(fd, 0)
		}},
		{"read /proc/1/mem", open("/proc/1/mem", unix.O_RDONLY)},
		{"write /proc/1/mem", open("/proc/1/mem", unix.O_RDWR)},
		{"read /proc/1/environ", open("/proc/1/environ", unix.O_RDONLY)},
		{"read /proc/1/auxv", open("/proc/1/auxv", unix.O_RDONLY)},
		{"read /proc/1/maps", open("/proc/1/maps", unix.O_RDONLY)},
		{"read /proc/1/syscall", open("/proc/1/syscall", unix.O_RDONLY)},
		{"read /proc/1/stack", open("/proc/1/stack", unix.O_RDONLY)},
		{"use what was inherited", inherited},
	}
	return all
}

// inherited looks for files that this process was given besides the usual three.
func inherited() error {
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return err
	}
	for _, e := range entries {
		n, err := strconv.Atoi(e.Name())
		if err != nil || n <= 2 {
			continue
		}
		flags, err := unix.FcntlInt(uintptr(n), unix.F_GETFD, 0)
		if err == nil && flags&unix.FD_CLOEXEC == 0 { // this program's own would be closed
			return nil
		}
	}
	return errors.New("nothing was")
}

const (
	program = "/sbin/berm-init"
	dir     = "/run/berm"
	socket  = dir + "/s"
)

// tampers are ways to change what is Berm's in the sandbox, or to leave by it.
func tampers() []attempt {
	write := func(path string, flags int) func() error {
		return func() error {
			fd, err := unix.Open(path, flags, 0o755)
			if err == nil {
				_ = unix.Close(fd)
			}
			return err
		}
	}
	var all []attempt
	for _, path := range []string{program, socket, dir} {
		all = append(all, []attempt{
			{"unlink " + path, func() error { return unix.Unlink(path) }},
			{"rmdir " + path, func() error { return unix.Rmdir(path) }},
			{"rename " + path, func() error { return unix.Rename(path, path+"x") }},
			{"replace " + path, func() error {
				if err := os.WriteFile("/tmp/own", []byte("#!/bin/sh\n"), 0o755); err != nil { //nolint:gosec // it is to be run
					return err
				}
				return unix.Rename("/tmp/own", path)
			}},
			{"exchange " + path, func() error {
				return unix.Renameat2(unix.AT_FDCWD, "/tmp", unix.AT_FDCWD, path, unix.RENAME_EXCHANGE)
			}},
			{"chmod " + path, func() error { return unix.Chmod(path, 0o777) }},
			{"chown " + path, func() error { return unix.Chown(path, 1, 1) }},
			{"touch " + path, func() error { return unix.Utimes(path, make([]unix.Timeval, 2)) }},
			{"xattr " + path, func() error { return unix.Setxattr(path, "user.x", []byte("x"), 0) }},
			{"remount " + path, func() error { return unix.Mount("", path, "", unix.MS_REMOUNT|unix.MS_BIND, "") }},
			{"mount over " + path, func() error { return unix.Mount("/tmp", path, "", unix.MS_BIND, "") }},
			{"unmount " + path, func() error { return unix.Unmount(path, unix.MNT_DETACH) }},
			{"clone the mount of " + path, func() error { _, err := unix.OpenTree(unix.AT_FDCWD, path, unix.OPEN_TREE_CLONE); return err }},
			{"unlock the mount of " + path, func() error {
				return unix.MountSetattr(unix.AT_FDCWD, path, 0, &unix.MountAttr{Attr_clr: unix.MOUNT_ATTR_RDONLY})
			}},
			{"open a handle of " + path, func() error { return byHandle(path) }},
		}...)
	}
	return append(all, []attempt{
		{"write the program", write(program, unix.O_WRONLY)},
		{"truncate the program", func() error { return unix.Truncate(program, 0) }},
		{"write what init runs", write("/proc/1/exe", unix.O_WRONLY)},
		{"link the program", func() error { return unix.Link(program, "/tmp/link") }},
		{"link the socket", func() error { return unix.Link(socket, "/tmp/link") }},
		{"make a file", write(dir+"/x", unix.O_WRONLY|unix.O_CREAT)},
		{"make a directory", func() error { return unix.Mkdir(dir+"/x", 0o755) }},
		{"make a link", func() error { return unix.Symlink("/", dir+"/x") }},
		{"make a fifo", func() error { return unix.Mkfifo(dir+"/x", 0o644) }},
		{"make a nameless file", write(dir, unix.O_WRONLY|unix.O_TMPFILE)},
		{"listen beside it", func() error {
			fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM, 0)
			if err != nil {
				return err
			}
			return unix.Bind(fd, &unix.SockaddrUnix{Name: dir + "/t"})
		}},
		{"make a device", func() error {
			if err := unix.Mknod("/tmp/disk", unix.S_IFBLK|0o600, int(unix.Mkdev(8, 0))); err != nil {
				return err
			}
			return write("/tmp/disk", unix.O_RDONLY)()
		}},
		{"find others above it", func() error { return others(dir + "/..") }},
		{"read the host's disk", hostDisk},
		{"unshare mounts", func() error { return unix.Unshare(unix.CLONE_NEWNS) }},
		{"unshare users", func() error { return unix.Unshare(unix.CLONE_NEWUSER) }},
		{"change root", func() error { return unix.Chroot("/tmp") }},
		{"freeze the group", func() error { return os.WriteFile("/sys/fs/cgroup/cgroup.freeze", []byte("1"), 0o644) }},
		{"leave the group", func() error { return os.Mkdir("/sys/fs/cgroup/x", 0o755) }},
		{"set the core pattern", write("/proc/sys/kernel/core_pattern", unix.O_WRONLY)},
		{"press a key", write("/proc/sysrq-trigger", unix.O_WRONLY)},
	}...)
}

// byHandle opens a file by its handle, which asks no mount and no directory.
func byHandle(path string) error {
	handle, _, err := unix.NameToHandleAt(unix.AT_FDCWD, path, 0)
	if err != nil {
		return err
	}
	at, err := unix.Open(path, unix.O_PATH, 0)
	if path == dir {
		at, err = unix.Open(path, unix.O_RDONLY, 0)
	}
	if err != nil {
		return err
	}
	_, err = unix.OpenByHandleAt(at, handle, unix.O_RDONLY)
	return err
}

// others looks for sockets of other sandboxes.
func others(above string) error {
	entries, err := os.ReadDir(above)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if _, err := os.Stat(above + "/" + e.Name() + "/s"); err == nil && e.Name() != "berm" {
			return nil
		}
		if len(e.Name()) == 32 { // as Berm names them
			return nil
		}
	}
	return errors.New("there are none")
}

// hostDisk opens the device below a mount, by every device node that there is.
func hostDisk() error {
	entries, err := os.ReadDir("/dev")
	if err != nil {
		return err
	}
	for _, e := range entries {
		var st unix.Stat_t
		if unix.Stat("/dev/"+e.Name(), &st) == nil && st.Mode&unix.S_IFMT == unix.S_IFBLK {
			return nil
		}
	}
	return errors.New("there is none")
}
