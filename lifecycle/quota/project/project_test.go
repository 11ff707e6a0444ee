package project

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"unsafe"

	"github.com/containerd/errdefs"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/lifecycle/hostdir"
	"github.com/bermhq/berm/runtime/runtimetest/check"
)

// recorder stands in for a kernel that has project quotas.
type recorder struct {
	err   map[string]error // of a call
	flags uint16

	bytes, inodes uint64

	mu    sync.Mutex
	attrs map[uint64]fsxattr // by inode
	calls []string
}

func (r *recorder) call(format string, args ...any) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	text := fmt.Sprintf(format, args...)
	r.calls = append(r.calls, text)
	name, _, _ := strings.Cut(text, " ")
	return r.err[name]
}

func inode(fd int) (uint64, error) {
	var st unix.Stat_t
	err := unix.Fstat(fd, &st)
	return st.Ino, err
}

func (r *recorder) attr(fd int) (fsxattr, error) {
	ino, err := inode(fd)
	return r.attrs[ino], errors.Join(err, r.err["attr"])
}

func (r *recorder) setAttr(fd int, a fsxattr) error {
	ino, err := inode(fd)
	if err := errors.Join(err, r.call("setAttr %#x", a.Flags)); err != nil {
		return err
	}
	r.attrs[ino] = a
	return nil
}

func (r *recorder) state() (uint16, error) { return r.flags, r.err["state"] }

func (r *recorder) used(project uint32) (bytes, inodes uint64, err error) {
	return r.bytes, r.inodes, r.call("used %d", project)
}

func (r *recorder) set(project uint32, blocks uint64) error {
	return r.call("set %#x %d", project, blocks)
}

var must = check.Must // ends a test if a step of its own fails

// standIn has Quotas of a directory with a recorder.
func standIn(t *testing.T, dir string) (*Quotas, *recorder, *os.File) {
	t.Helper()
	f, err := os.Open(dir)
	must(t, err)
	t.Cleanup(func() { must(t, f.Close()) })
	var st unix.Stat_t
	must(t, unix.Fstat(int(f.Fd()), &st))
	r := &recorder{attrs: map[uint64]fsxattr{}}
	return &Quotas{dir: f, dev: st.Dev, kernel: r}, r, f
}

func TestOpenRefuses(t *testing.T) {
	t.Parallel()
	const on = stateAccounted | stateEnforced
	for name, tt := range map[string]struct {
		err    map[string]error
		flags  uint16
		reason string
	}{
		"no projects":    {map[string]error{"attr": unix.ENOTTY}, on, "files have no project in this file system"},
		"no quotas":      {map[string]error{"state": unix.ENOSYS}, 0, "it isn't mounted with prjquota, or"},
		"other quotas":   {nil, 1, "it isn't mounted with prjquota"},
		"only counted":   {nil, stateAccounted, "not held to their limits"},
		"no privileges":  {map[string]error{"set": unix.EPERM}, on, "CAP_SYS_ADMIN"},
		"no files":       {map[string]error{"setAttr": unix.EOPNOTSUPP}, on, "files can't be put into a project"},
		"nothing behind": {nil, on, "doesn't hold"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, r, f := standIn(t, t.TempDir())
			r.err, r.flags = tt.err, tt.flags
			q, err := find(f, r)
			if len(r.calls) > 0 { // looking asks the kernel, and tells it nothing
				t.Errorf("calls %q", r.calls)
			}
			if err == nil {
				err = q.Try(f)
			}
			if !errdefs.IsNotImplemented(err) || !strings.Contains(fmt.Sprint(err), tt.reason) || !strings.Contains(fmt.Sprint(err), f.Name()) {
				t.Errorf("%v; want one of %s", err, tt.reason)
			}
			for _, cause := range tt.err {
				if !errors.Is(err, cause) {
					t.Errorf("%v hides %v", err, cause)
				}
			}
			entries, err := os.ReadDir(f.Name())
			if must(t, err); len(entries) != 0 {
				t.Errorf("%v were left", entries)
			}
		})
	}
}

// Whatever these directories are in, the answer is one of two.
func TestOpenHere(t *testing.T) {
	t.Parallel()
	for _, dir := range []string{t.TempDir(), "/dev/shm", "/proc", "/sys"} {
		q, err := openQuotas(dir)
		switch {
		case err == nil:
			must(t, q.Close())
		case !errdefs.IsNotImplemented(err) && !errors.Is(err, fs.ErrNotExist):
			t.Error(err)
		}
	}
	if _, err := openQuotas(filepath.Join(t.TempDir(), "missing")); !errors.Is(err, fs.ErrNotExist) || errdefs.IsNotImplemented(err) {
		t.Error(err)
	}
}

func TestLimitAndUsed(t *testing.T) {
	t.Parallel()
	q, r, _ := standIn(t, t.TempDir())
	for _, bytes := range []int64{0, 1, 1023, 1024, 2047, 1 << 40} {
		must(t, q.Limit(7, bytes))
	}
	if diff := cmp.Diff([]string{"set 0x7 0", "set 0x7 1", "set 0x7 1", "set 0x7 1", "set 0x7 1", "set 0x7 1073741824"}, r.calls); diff != "" {
		t.Error(diff)
	}
	r.bytes = 1 << 63
	if got, err := q.Used(7); got != 1<<63-1 || err != nil {
		t.Errorf("%d, %v: what doesn't fit must not be little", got, err)
	}
	for _, project := range []uint32{0, Probe, 1<<32 - 1} {
		_, err := q.Used(project)
		for _, err := range []error{err, q.Limit(project, 1), q.Adopt(q.dir, project)} {
			if !errdefs.IsInvalidArgument(err) {
				t.Errorf("project %d: %v", project, err)
			}
		}
	}
	for _, tt := range []struct {
		bytes, inodes uint64
		free          bool
	}{{0, 0, true}, {4096, 1, false}, {0, 1, false}, {4096, 0, false}} {
		r.bytes, r.inodes = tt.bytes, tt.inodes
		if free, err := q.Free(7); free != tt.free || err != nil {
			t.Errorf("%+v: %v, %v", tt, free, err)
		}
	}
	if _, err := q.Free(0); !errdefs.IsInvalidArgument(err) {
		t.Error(err)
	}
	if err := q.Limit(7, -1); !errdefs.IsInvalidArgument(err) {
		t.Error(err)
	}
	r.err = map[string]error{"set": unix.EIO, "used": unix.EIO}
	if _, err := q.Used(7); !errors.Is(err, unix.EIO) {
		t.Error(err)
	}
	if free, err := q.Free(7); free || !errors.Is(err, unix.EIO) {
		t.Error(free, err)
	}
	if err := q.Limit(7, 1); !errors.Is(err, unix.EIO) {
		t.Error(err)
	}
}

func TestAdopt(t *testing.T) {
	t.Parallel()
	dir, outside := t.TempDir(), t.TempDir()
	must(t, os.MkdirAll(dir+"/a/b/.c", 0o700), os.WriteFile(outside+"/secret", nil, 0o600),
		os.WriteFile(dir+"/f", []byte("x"), 0o400), os.WriteFile(dir+"/a/b/.c/\xff\n", nil, 0o600), os.Link(dir+"/f", dir+"/a/g"),
		os.Symlink(outside, dir+"/out"), os.Symlink(outside+"/secret", dir+"/a/out"), os.Symlink("..", dir+"/a/up"),
		unix.Mkfifo(dir+"/fifo", 0o600), unix.Mknod(dir+"/socket", unix.S_IFSOCK|0o600, 0))
	q, r, f := standIn(t, dir)
	must(t, q.Adopt(f, 7))

	want := map[uint64]fsxattr{}
	for name, flags := range map[string]uint32{".": flagInherit, "a": flagInherit, "a/b": flagInherit, "a/b/.c": flagInherit, "f": 0, "a/b/.c/\xff\n": 0} {
		var st unix.Stat_t
		must(t, unix.Stat(filepath.Join(dir, name), &st))
		want[st.Ino] = fsxattr{Flags: flags, Project: 7}
	}
	if diff := cmp.Diff(want, r.attrs); diff != "" {
		t.Error(diff)
	}
	if r.calls[0] != "setAttr 0x200" {
		t.Errorf("%s came before the directory: what is made meanwhile is in no project", r.calls[0])
	}

	r.calls = nil
	if must(t, q.Adopt(f, 7)); len(r.calls) != 0 {
		t.Errorf("again: %v", r.calls)
	}
	before := maps.Clone(r.attrs)
	must(t, q.Adopt(f, 8))
	for ino, a := range before {
		if got := r.attrs[ino]; got.Project != 8 || got.Flags != a.Flags {
			t.Errorf("%+v became %+v", a, got)
		}
	}
}

// What a tree has to itself is taken, and let go of without a trace.
func TestTakeAndDrop(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	must(t, os.MkdirAll(dir+"/tree/a/b", 0o700), os.WriteFile(dir+"/tree/f", nil, 0o600), os.Link(dir+"/tree/f", dir+"/tree/a/g"),
		os.WriteFile(dir+"/tree/a/b/f", nil, 0o600), os.Symlink("f", dir+"/tree/l"))
	q, r, _ := standIn(t, dir)
	tree, err := os.Open(dir + "/tree")
	must(t, err)
	defer tree.Close()
	ctx := t.Context()
	must(t, q.Take(ctx, tree, 7), q.Take(ctx, tree, 7))
	if len(r.attrs) != 5 {
		t.Errorf("%+v", r.attrs)
	}
	for ino, a := range r.attrs {
		if a.Project != 7 {
			t.Errorf("%d: %+v", ino, a)
		}
	}
	if err := q.Take(ctx, tree, 8); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "belongs to project 7") {
		t.Errorf("what is another's was taken: %v", err)
	}
	must(t, q.Drop(ctx, tree, 8))
	for ino, a := range r.attrs {
		if a.Project != 7 {
			t.Errorf("another's was dropped: %d: %+v", ino, a)
		}
	}
	must(t, q.Drop(ctx, tree, 7))
	for ino, a := range r.attrs {
		if a != (fsxattr{}) {
			t.Errorf("%d: %+v was left", ino, a)
		}
	}
	ended, cancel := context.WithCancelCause(ctx)
	cancel(fs.ErrClosed)
	if err, other := q.Take(ended, tree, 7), q.Drop(ended, tree, 7); !errors.Is(err, fs.ErrClosed) || !errors.Is(other, fs.ErrClosed) {
		t.Errorf("nobody waits, and yet it is walked: %v, %v", err, other)
	}
	must(t, os.Link(dir+"/tree/a/b/f", dir+"/elsewhere"))
	if err := q.Take(ctx, tree, 7); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "another name") {
		t.Errorf("a file that is elsewhere as well was taken: %v", err)
	}
	if err := errors.Join(q.Take(ctx, tree, 0), q.Drop(ctx, tree, Probe)); !errdefs.IsInvalidArgument(err) {
		t.Error(err)
	}
}

func TestAdoptFails(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	must(t, os.WriteFile(dir+"/f", nil, 0o600))
	for name, tt := range map[string]struct {
		change func(*Quotas, *recorder)
		text   string
	}{
		"refused": {func(_ *Quotas, r *recorder) { r.err = map[string]error{"setAttr": unix.EPERM} }, "operation not permitted"},
		"refused for a file": {func(q *Quotas, r *recorder) {
			must(t, q.assign(int(q.dir.Fd()), 7, true))
			r.err = map[string]error{"setAttr": unix.EDQUOT}
		}, `"f": disk quota exceeded`},
		"another file system": {func(q *Quotas, _ *recorder) { q.dev++ }, "it is in another file system"},
	} {
		t.Run(name, func(t *testing.T) {
			q, r, f := standIn(t, dir)
			tt.change(q, r)
			err := q.Adopt(f, 7)
			if err == nil || !strings.Contains(err.Error(), tt.text) || !strings.Contains(err.Error(), dir) || errors.Is(err, hostdir.ErrUnbounded) {
				t.Error(err)
			}
		})
	}
}

func TestFollow(t *testing.T) {
	t.Parallel()
	_, r, dir := standIn(t, t.TempDir())
	_, other, like := standIn(t, t.TempDir())
	ino, err := inode(int(like.Fd()))
	must(t, err)
	for _, plain := range []fsxattr{{}, {Project: 7}} {
		r.attrs[ino] = plain
		if must(t, follow(r, dir, like)); len(r.calls) != 0 {
			t.Errorf("%+v was followed: %v", plain, r.calls)
		}
	}
	r.attrs[ino] = fsxattr{Flags: flagInherit | 1, Project: 7}
	must(t, follow(r, dir, like))
	at, err := inode(int(dir.Fd()))
	if must(t, err); r.attrs[at] != (fsxattr{Flags: flagInherit, Project: 7}) {
		t.Errorf("%+v", r.attrs[at])
	}
	r.err = map[string]error{"setAttr": unix.EPERM}
	if err := follow(r, dir, like); !errors.Is(err, unix.EPERM) {
		t.Error(err)
	}
	other.err = map[string]error{"attr": unix.ENOTTY}
	must(t, follow(other, dir, like), Follow(dir, like))
}

func TestUnprivileged(t *testing.T) {
	t.Parallel()
	effective := func() (set uint32) {
		header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
		var caps [2]unix.CapUserData
		must(t, unix.Capget(&header, &caps[0]))
		return caps[0].Effective
	}
	var within uint32
	if err := unprivileged(func() error { within = effective(); return unix.EDQUOT }); !errors.Is(err, unix.EDQUOT) {
		t.Error(err)
	}
	if want := effective() &^ (1 << unix.CAP_SYS_RESOURCE); within != want {
		t.Errorf("%#x, want %#x", within, want)
	}
}

func TestKernelNumbers(t *testing.T) {
	if unsafe.Sizeof(fsxattr{}) != 28 || unsafe.Sizeof(dqblk{}) != 72 || unsafe.Offsetof(dqblk{}.Valid) != 64 {
		t.Errorf("fsxattr has %d bytes, dqblk %d", unsafe.Sizeof(fsxattr{}), unsafe.Sizeof(dqblk{}))
	}
	if ioctlSetAttr&0x1fffffff != 0x1c5820 || ioctlGetAttr&0x1fffffff != 0x1c581f || ioctlSetAttr>>29 == ioctlGetAttr>>29 {
		t.Errorf("%#x, %#x", ioctlSetAttr, ioctlGetAttr)
	}
}

func TestDeviceOf(t *testing.T) {
	t.Parallel()
	var st unix.Stat_t
	must(t, unix.Stat("/proc", &st))
	if got, err := deviceOf(st.Dev); got != "" || err != nil {
		t.Errorf("/proc is on %s, %v", got, err)
	}
}
