package project

import (
	"errors"
	"fmt"
	"os"
	"unsafe"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// fsxattr is struct fsxattr of linux/fs.h.
type fsxattr struct {
	Flags   uint32
	Extents [2]uint32 // a hint for their size, and how many there are
	Project uint32
	Rest    [3]uint32 // another hint, and padding
}

// dqblk is struct if_dqblk of linux/quota.h.
type dqblk struct {
	Hard, Soft uint64 // blocks
	Used       uint64 // bytes
	_          [2]uint64
	Inodes     uint64 // used
	_          [2]uint64
	Valid      uint32
	_          uint32
}

// From linux/fs.h, linux/quota.h and linux/dqblk_xfs.h.
const (
	// The direction's bits differ between architectures, and are those of FS_IOC_SETFLAGS.
	directionBits = 0xe0000000
	ioctlSetAttr  = unix.FS_IOC_SETFLAGS&directionBits | unsafe.Sizeof(fsxattr{})<<16 | 'X'<<8 | 32
	ioctlGetAttr  = unix.FS_IOC_GETFLAGS&directionBits | unsafe.Sizeof(fsxattr{})<<16 | 'X'<<8 | 31

	flagInherit = 0x200 // FS_XFLAG_PROJINHERIT

	projectQuota = 2          // PRJQUOTA
	quotaGet     = 0x800007   // Q_GETQUOTA
	quotaSet     = 0x800008   // Q_SETQUOTA
	quotaState   = 'X'<<8 + 5 // Q_XGETQSTAT
	validLimits  = 1          // QIF_BLIMITS
	block        = 1024       // bytes; QIF_DQBLKSIZE

	stateAccounted = 1 << 4 // FS_QUOTA_PDQ_ACCT
	stateEnforced  = 1 << 5 // FS_QUOTA_PDQ_ENFD
)

// kernel has the kernel's calls that Quotas use.
type kernel interface {
	attr(fd int) (fsxattr, error)
	setAttr(fd int, a fsxattr) error
	state() (flags uint16, err error)
	used(project uint32) (bytes, inodes uint64, err error)
	set(project uint32, blocks uint64) error
}

// system is the kernel, with a directory of the file system.
type system struct {
	dir    *os.File
	device *byte // the file system's, as a C string; nil where the kernel takes the directory
}

// newSystem finds out how to name the file system to the kernel. Since Linux 5.14 a handle
// suffices, unless this process is in a sandbox whose filter refuses that call. Otherwise the
// name is the path of the file system's device.
func newSystem(dir *os.File) (*system, error) {
	s := &system{dir: dir}
	if _, err := s.state(); !errors.Is(err, unix.ENOSYS) && !errors.Is(err, unix.EPERM) {
		return s, nil
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(dir.Fd()), &st); err != nil {
		return nil, fmt.Errorf("look at %s: %w", dir.Name(), err)
	}
	device, err := deviceOf(st.Dev)
	if device != "" {
		s.device, err = unix.BytePtrFromString(device)
	}
	return s, err
}

// deviceOf returns the path of the block device with a mounted file system; empty if there is none.
func deviceOf(dev uint64) (string, error) {
	mounts, err := mountinfo.GetMounts(nil)
	for _, m := range mounts {
		var st unix.Stat_t
		if unix.Mkdev(uint32(m.Major), uint32(m.Minor)) == dev && unix.Stat(m.Source, &st) == nil && st.Mode&unix.S_IFMT == unix.S_IFBLK && st.Rdev == dev {
			return m.Source, nil
		}
	}
	return "", err
}

func (s *system) attr(fd int) (fsxattr, error) {
	var a fsxattr
	err := errno(unix.Syscall(unix.SYS_IOCTL, uintptr(fd), ioctlGetAttr, uintptr(unsafe.Pointer(&a))))
	return a, err
}

func (s *system) setAttr(fd int, a fsxattr) error {
	return errno(unix.Syscall(unix.SYS_IOCTL, uintptr(fd), ioctlSetAttr, uintptr(unsafe.Pointer(&a))))
}

func (s *system) state() (uint16, error) {
	var st [20]uint64 // struct fs_quota_stat is smaller: a version, flags in the third and fourth byte, figures
	err := s.quotactl(quotaState, 0, unsafe.Pointer(&st))
	return (*[2]uint16)(unsafe.Pointer(&st))[1], err
}

func (s *system) used(project uint32) (bytes, inodes uint64, err error) {
	var q dqblk
	err = s.quotactl(quotaGet, project, unsafe.Pointer(&q))
	if errors.Is(err, unix.ENOENT) { // XFS's answer for an unused project
		return 0, 0, nil
	}
	return q.Used, q.Inodes, err
}

func (s *system) set(project uint32, blocks uint64) error {
	return s.quotactl(quotaSet, project, unsafe.Pointer(&dqblk{Hard: blocks, Valid: validLimits}))
}

func (s *system) quotactl(command uintptr, project uint32, arg unsafe.Pointer) error {
	command = command<<8 | projectQuota
	if s.device != nil {
		return errno(unix.Syscall6(unix.SYS_QUOTACTL, command, uintptr(unsafe.Pointer(s.device)), uintptr(project), uintptr(arg), 0, 0))
	}
	return errno(unix.Syscall6(unix.SYS_QUOTACTL_FD, s.dir.Fd(), command, uintptr(project), uintptr(arg), 0, 0))
}

func errno(_, _ uintptr, err unix.Errno) error {
	if err == 0 {
		return nil
	}
	return err
}
