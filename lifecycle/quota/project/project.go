// Package project has the kernel hold directories to quotas: every file of a file system
// may belong to a project, which is a number, and the file system refuses what would take
// more than the project's limit.
//
// The numbers are the caller's, but for Probe; 0 is that of files which belong to none.
// They are the file system's, and other users of project quotas on it, like a
// container engine, share them.
//
// ext4 offers this with its features project and quota (mkfs.ext4 -O project,quota, or
// tune2fs while it isn't mounted) and the mount option prjquota, XFS with the mount option
// prjquota. A process that isn't privileged gets EDQUOT from ext4, and ENOSPC from XFS; a
// write is cut short before it fails. ext4 doesn't hold one with CAP_SYS_RESOURCE, as root
// has it, to any quota. What counts are the blocks that are allocated, for directories
// and the file system's own records too, in whole blocks.
package project

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"runtime"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/lifecycle/hostdir"
)

// Probe is the project by which Try finds out whether limits hold. It keeps a small
// limit, and has no files otherwise.
const Probe uint32 = 0x61ffffff

// Sizes of the probe, in bytes. What is written is more than a file system's blocks and
// what it reserves besides leave of the limit.
const (
	probeLimit = 128 << 10
	probeWrite = 4 << 20
)

// unsupported says why there are no project quotas for a directory. It is of errdefs'
// NotImplemented class. The cause is the kernel's answer, and may be nil.
func unsupported(dir *os.File, reason string, cause error) error {
	if cause == nil {
		return fmt.Errorf("project quotas for %s: %w: %s", dir.Name(), errdefs.ErrNotImplemented, reason)
	}
	return fmt.Errorf("project quotas for %s: %w: %s: %w", dir.Name(), errdefs.ErrNotImplemented, reason, cause)
}

// Quotas are the project quotas of one file system. It is safe for concurrent use.
type Quotas struct {
	dir    *os.File // in the file system
	dev    uint64
	kernel kernel
}

// Find asks the kernel whether the file system of a directory holds projects to their
// limits. If it says no, the error is of errdefs' NotImplemented class. Find writes nothing,
// so the directory may be full. The caller closes the Quotas.
func Find(dir string) (*Quotas, error) {
	f, err := os.OpenFile(dir, os.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return nil, err
	}
	k, err := newSystem(f)
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	q, err := find(f, k)
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return q, nil
}

func find(dir *os.File, k kernel) (*Quotas, error) {
	q := &Quotas{dir: dir, kernel: k}
	var st unix.Stat_t
	if err := unix.Fstat(int(dir.Fd()), &st); err != nil {
		return nil, fmt.Errorf("look at %s: %w", dir.Name(), err)
	}
	q.dev = st.Dev
	if _, err := k.attr(int(dir.Fd())); err != nil {
		return nil, unsupported(dir, "files have no project in this file system", err)
	}
	switch flags, err := k.state(); {
	case err != nil:
		return nil, unsupported(dir, "it isn't mounted with prjquota, or the kernel can't do it", err)
	case flags&stateAccounted == 0:
		return nil, unsupported(dir, "it isn't mounted with prjquota", nil)
	case flags&stateEnforced == 0:
		return nil, unsupported(dir, "projects are counted, but not held to their limits", nil)
	}
	return q, nil
}

// Try finds out whether limits hold in an open directory of the file system, by filling a
// project. It is of errdefs' NotImplemented class if the kernel or this process's privileges don't
// allow it, or the directory is full. What it makes for that has no name, and goes with the
// process.
func (q *Quotas) Try(dir *os.File) error {
	reason, err := "limits can't be set; that takes CAP_SYS_ADMIN", q.kernel.set(Probe, probeLimit/block)
	if err == nil {
		reason, err = q.probe(dir)
	}
	if reason != "" {
		return unsupported(dir, reason, err)
	}
	return nil
}

// probe fills a file of the probe's project. It returns what went wrong; empty if the
// limit held.
func (q *Quotas) probe(dir *os.File) (reason string, cause error) {
	fd, err := unix.Openat(int(dir.Fd()), ".", unix.O_TMPFILE|unix.O_RDWR|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return "no file can be made to try it with", err
	}
	f := os.NewFile(uintptr(fd), dir.Name())
	defer f.Close()
	write := func() error {
		_, err := f.WriteAt(make([]byte, probeWrite), 0)
		return err
	}
	if err := write(); err != nil { // else it could be that which fails below
		return "there isn't enough space to try it", err
	}
	if err := f.Truncate(0); err != nil {
		return "it can't be tried", err
	}
	if err := q.assign(fd, Probe, false); err != nil {
		return "files can't be put into a project", err
	}
	err = unprivileged(write)
	switch {
	case err == nil:
		return "a limit was set, and doesn't hold", nil
	case !errors.Is(err, unix.EDQUOT) && !errors.Is(err, unix.ENOSPC):
		return "it can't be tried", err
	}
	return "", nil
}

// unprivileged calls f without CAP_SYS_RESOURCE, with which ext4 ignores limits.
func unprivileged(f func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // and if the thread doesn't get its capability back, it ends with the goroutine
		done <- func() error {
			header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
			var had [2]unix.CapUserData
			if err := unix.Capget(&header, &had[0]); err != nil {
				return fmt.Errorf("read capabilities: %w", err)
			}
			less := had
			less[0].Effective &^= 1 << unix.CAP_SYS_RESOURCE
			if err := unix.Capset(&header, &less[0]); err != nil {
				return fmt.Errorf("drop a capability: %w", err)
			}
			err := f()
			if unix.Capset(&header, &had[0]) == nil {
				runtime.UnlockOSThread()
			}
			return err
		}()
	}()
	return <-done
}

// Close releases the file system. Nothing else may be called afterwards.
func (q *Quotas) Close() error { return q.dir.Close() }

// Limit sets the limit of a project, in bytes; 0 is none. It is rounded down to whole
// kilobytes, but not to 0. One that is less than the project takes is no error: the
// project doesn't get anything more.
func (q *Quotas) Limit(project uint32, bytes int64) error {
	if err := valid(project); err != nil {
		return err
	}
	if bytes < 0 {
		return errdefs.ErrInvalidArgument.WithMessage(fmt.Sprintf("a limit of %d bytes", bytes))
	}
	blocks := uint64(bytes) / block
	if bytes > 0 {
		blocks = max(blocks, 1)
	}
	if err := q.kernel.set(project, blocks); err != nil {
		return fmt.Errorf("limit project %d to %d bytes: %w", project, bytes, err)
	}
	return nil
}

// Used is what a project's files take, in bytes: 0 for one that was never used.
func (q *Quotas) Used(project uint32) (int64, error) {
	if err := valid(project); err != nil {
		return 0, err
	}
	used, _, err := q.kernel.used(project)
	if err != nil {
		return 0, fmt.Errorf("look how much project %d uses: %w", project, err)
	}
	return int64(min(used, math.MaxInt64)), nil
}

// Free reports whether no file is of a project, be it an empty one.
func (q *Quotas) Free(project uint32) (bool, error) {
	if err := valid(project); err != nil {
		return false, err
	}
	used, inodes, err := q.kernel.used(project)
	if err != nil {
		return false, fmt.Errorf("look whether project %d is used: %w", project, err)
	}
	return used == 0 && inodes == 0, nil
}

// Adopt puts an open directory, and the directories and regular files below it, into a
// project; what is made in them from then on belongs to it as well. Somebody may be
// changing the tree meanwhile: links aren't followed, only regular files and directories
// are opened, and what is moved within the tree is found, or the kernel refuses to move
// it. Links, fifos and sockets that are there stay where they are; they take no blocks to
// speak of. It takes in what is over the project's limit. After an error, a part of the
// tree may belong to the project; it may be called again, also for a tree that belongs to
// it already, which is a matter of reading. hostdir.ErrUnbounded if the tree is too large.
func (q *Quotas) Adopt(dir *os.File, project uint32) error {
	return q.each(context.Background(), dir, project, func(fd int, directory bool) error { return q.assign(fd, project, directory) }, nil)
}

// maxLinked bounds how many files with several names are remembered.
const maxLinked = 1 << 18

// Take is Adopt for a tree that nobody else is to have a part in. It is of errdefs'
// FailedPrecondition class if something in it belongs to another project, or has a name
// outside of the tree as well. After an error, the context's cause among them, Drop undoes
// what was done.
func (q *Quotas) Take(ctx context.Context, dir *os.File, project uint32) error {
	names := map[uint64]uint64{} // how many weren't found, of files with several, by inode
	err := q.each(ctx, dir, project, func(fd int, directory bool) error {
		attr, err := q.kernel.attr(fd)
		if err != nil {
			return err
		}
		if attr.Project != 0 && attr.Project != project {
			return errdefs.ErrFailedPrecondition.WithMessage(fmt.Sprintf("a part of it belongs to project %d", attr.Project))
		}
		if len(names) > maxLinked {
			return errdefs.ErrFailedPrecondition.WithMessage("too many files in it have several names")
		}
		return q.assign(fd, project, directory)
	}, func(st *unix.Stat_t) {
		if st.Nlink < 2 {
			return
		}
		if _, known := names[st.Ino]; !known {
			names[st.Ino] = uint64(st.Nlink) //nolint:unconvert // smaller on other architectures
		}
		names[st.Ino] = max(names[st.Ino], 1) - 1
	})
	if err != nil {
		return err
	}
	for _, left := range names {
		if left > 0 {
			return errdefs.ErrFailedPrecondition.WithMessage("a file in it has another name elsewhere")
		}
	}
	return nil
}

// Drop takes what belongs to a project, of an open directory and what is below it, out of
// it, so that nothing is inherited any more. Errors are as Adopt's, or the context's cause.
func (q *Quotas) Drop(ctx context.Context, dir *os.File, project uint32) error {
	return q.each(ctx, dir, project, func(fd int, _ bool) error {
		var st unix.Stat_t
		if err := unix.Fstat(fd, &st); err != nil || st.Dev != q.dev {
			return err // another file system's never was in it
		}
		attr, err := q.kernel.attr(fd)
		if err != nil || attr.Project != project {
			return err
		}
		attr.Project = 0
		attr.Flags &^= flagInherit
		return q.kernel.setAttr(fd, attr)
	}, nil)
}

// each calls do with every directory and regular file of a tree, and found, unless it is
// nil, with what is known of a file before it is opened.
func (q *Quotas) each(ctx context.Context, dir *os.File, project uint32, do func(fd int, directory bool) error, found func(*unix.Stat_t)) error {
	err := valid(project)
	if err != nil {
		return err
	}
	err = hostdir.Walk(ctx, dir, hostdir.Visitor{
		Directory: func(fd int, _ string) error { return do(fd, true) },
		File: func(e *hostdir.Entry) error {
			if e.Stat.Mode&unix.S_IFMT != unix.S_IFREG {
				return nil
			}
			if found != nil {
				found(&e.Stat)
			}
			f, _, err := e.Open()
			if err != nil {
				return err
			}
			defer f.Close()
			if err := do(int(f.Fd()), false); err != nil {
				return fmt.Errorf("%q: %w", e.Name, err)
			}
			return nil
		},
	})
	if err != nil {
		return fmt.Errorf("put %s into project %d, or take it out: %w", dir.Name(), project, err)
	}
	return nil
}

// Follow puts an open directory, and what is made in it from then on, into the project of
// another if that keeps files of other projects from being moved in, as one does that was
// adopted once, whether or not limits hold now. It takes no Quotas.
func Follow(dir, like *os.File) error { return follow(&system{}, dir, like) }

func follow(k kernel, dir, like *os.File) error {
	want, err := k.attr(int(like.Fd()))
	if err != nil || want.Flags&flagInherit == 0 {
		return nil // the file system has no projects, or the directory takes all
	}
	attr, err := k.attr(int(dir.Fd()))
	if err == nil {
		attr.Project = want.Project
		attr.Flags |= flagInherit
		err = k.setAttr(int(dir.Fd()), attr)
	}
	if err != nil {
		return fmt.Errorf("put %s into the project of %s: %w", dir.Name(), like.Name(), err)
	}
	return nil
}

// assign puts one file or directory into a project, if it isn't in it.
func (q *Quotas) assign(fd int, project uint32, directory bool) error {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return err
	}
	if st.Dev != q.dev {
		return errors.New("it is in another file system")
	}
	attr, err := q.kernel.attr(fd)
	if err != nil {
		return err
	}
	want := attr
	want.Project = project
	if directory {
		want.Flags |= flagInherit
	}
	if want == attr {
		return nil
	}
	return q.kernel.setAttr(fd, want)
}

func valid(project uint32) error {
	if project == 0 || project == Probe || project == math.MaxUint32 {
		return errdefs.ErrInvalidArgument.WithMessage(fmt.Sprintf("%d is no project to be used", project))
	}
	return nil
}
