// Package project sets quotas of directories in the kernel. Every file may belong to a
// project, which is a number. The file system refuses writes beyond the project's limit.
//
// The caller chooses the numbers, except Probe. Files without a project have number 0. All
// users of project quotas on a file system, such as a container engine, share its numbers.
//
// ext4 needs its features project and quota (mkfs.ext4 -O project,quota, or tune2fs while it
// isn't mounted) and the mount option prjquota. XFS needs the mount option prjquota. Beyond
// the limit, an unprivileged process gets EDQUOT from ext4, and ENOSPC from XFS. The write
// before may be short. ext4 exempts processes with CAP_SYS_RESOURCE, such as root's. Allocated
// blocks count, including those of directories and of the file system's own records.
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

// Probe is the project by which Try finds out whether limits hold. It keeps a small limit, and
// has files only during Try.
const Probe uint32 = 0x61ffffff

// Sizes of the probe, in bytes. The write exceeds the limit even if the file system rounds up
// to its blocks.
const (
	probeLimit = 128 << 10
	probeWrite = 4 << 20
)

// unsupported returns an error in errdefs' NotImplemented class, which says why a directory has
// no project quotas. The cause is the kernel's answer, and may be nil.
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

// Find asks the kernel whether the file system of a directory enforces project limits. If it
// doesn't, the error is in errdefs' NotImplemented class. Find writes nothing, so the file
// system may be full. The caller must close the Quotas.
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

// Try finds out whether limits hold in an open directory of the file system: it fills a file
// of the project Probe. The file has no name, so it can't outlive the process. The error is in
// errdefs' NotImplemented class. It says that limits don't hold, that this process lacks
// privileges, or that the file system is full.
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

// probe fills a file of the project Probe. It returns what went wrong, or "" if the limit held.
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
	if err := write(); err != nil { // otherwise a full disk would look like a limit below
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

// Limit sets the limit of a project, in bytes; 0 is none. It rounds down to whole kilobytes,
// but not to 0. A limit below the project's use is no error: the project can't grow then.
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

// Used returns how many bytes a project's files take. It is 0 for a project that was never
// used.
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

// Free reports whether a project has no file, not even an empty one.
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
// project, even beyond its limit. New files in these directories inherit the project. Existing
// links, fifos and sockets keep theirs; they take almost no blocks.
//
// A sandbox may change the tree meanwhile. Adopt follows no link, and opens only regular files
// and directories. It finds files that are moved within the tree, unless the kernel refuses
// the move.
//
// After an error, a part of the tree may belong to the project. Adopt may be called again; on
// a tree that belongs to the project already, it only reads. The error is
// hostdir.ErrUnbounded if the tree is too large.
func (q *Quotas) Adopt(dir *os.File, project uint32) error {
	return q.each(context.Background(), dir, project, func(fd int, directory bool) error { return q.assign(fd, project, directory) }, nil)
}

// maxLinked bounds how many files with several names Take remembers.
const maxLinked = 1 << 18

// Take is Adopt for a tree that nobody else shares. The error is in errdefs'
// FailedPrecondition class if a file in it belongs to another project, or has another name
// outside of the tree. After any error, including the context's cause, Drop undoes the change.
func (q *Quotas) Take(ctx context.Context, dir *os.File, project uint32) error {
	names := map[uint64]uint64{} // of files with several names, how many weren't found; by inode
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

// Drop takes an open directory, and the files below it, out of a project. New files don't
// inherit the project any more. Errors are as Adopt's, or the context's cause.
func (q *Quotas) Drop(ctx context.Context, dir *os.File, project uint32) error {
	return q.each(ctx, dir, project, func(fd int, _ bool) error {
		var st unix.Stat_t
		if err := unix.Fstat(fd, &st); err != nil || st.Dev != q.dev {
			return err // a file of another file system was never in it
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

// each calls do with every directory and regular file of a tree. If found isn't nil, each
// calls it with the stat of a file before it opens the file.
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

// Follow puts an open directory, and new files in it, into the project of the directory like,
// if like was adopted into one. Otherwise the kernel would refuse to move the files there,
// whether or not limits hold now. Follow needs no Quotas.
func Follow(dir, like *os.File) error { return follow(&system{}, dir, like) }

func follow(k kernel, dir, like *os.File) error {
	want, err := k.attr(int(like.Fd()))
	if err != nil || want.Flags&flagInherit == 0 {
		return nil // the file system has no projects, or like takes files of any project
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
