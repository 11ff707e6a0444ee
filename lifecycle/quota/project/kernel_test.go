package project

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// The environment of the tests that need a file system with project quotas: a directory
// in one, which make quota-vm has, directories that offer none, though files have projects
// there, and what a process of the tests' own is to do.
const (
	dirEnv     = "BERM_PROJECT_DIR"
	lackingEnv = "BERM_PROJECT_LACKING"
	taskEnv    = "BERM_PROJECT_TASK"
)

func TestMain(m *testing.M) {
	if task := os.Getenv(taskEnv); task != "" {
		fmt.Print(do(strings.Fields(task)))
		return
	}
	os.Exit(m.Run())
}

// openQuotas is Find and Try.
func openQuotas(dir string) (*Quotas, error) {
	q, err := Find(dir)
	if err != nil {
		return nil, err
	}
	if err := q.Try(q.dir); err != nil {
		return nil, errors.Join(err, q.Close())
	}
	return q, nil
}

// do does a task as a sandbox's process may, and answers what came of it.
func do(task []string) string {
	answer := "done"
	failed := func(err error) {
		if code := syscall.Errno(0); errors.As(err, &code) {
			answer = unix.ErrnoName(code)
		} else if err != nil {
			answer = err.Error()
		}
	}
	switch task[0] {
	case "fill": // a file, until that fails
		f, err := os.Create(task[1])
		failed(err)
		total := 0
		for err == nil {
			var n int
			n, err = f.Write(make([]byte, 1000))
			total += n
			failed(err)
		}
		return fmt.Sprintf("%d %s", total, answer)
	case "leave":
		f, err := os.Open(task[1])
		failed(err)
		failed((&system{}).setAttr(int(f.Fd()), fsxattr{}))
	case "unmark":
		f, err := os.Open(task[1])
		failed(err)
		flags, err := unix.IoctlGetUint32(int(f.Fd()), unix.FS_IOC_GETFLAGS)
		failed(err)
		failed(unix.IoctlSetPointerInt(int(f.Fd()), unix.FS_IOC_SETFLAGS, int(flags&^0x20000000)))
	case "move":
		failed(os.Rename(task[1], task[2]))
	case "link":
		failed(os.Link(task[1], task[2]))
	case "make":
		failed(os.WriteFile(task[1], []byte("x"), 0o600))
	case "mkdir":
		failed(os.Mkdir(task[1], 0o700))
	default:
		answer = "what?"
	}
	return answer
}

// tenant does a task as a user without privileges.
func tenant(t *testing.T, task ...string) string {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = []string{taskEnv + "=" + strings.Join(task, " ")}
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 1000, Gid: 1000}, Pdeathsig: syscall.SIGKILL}
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %v: %s", task, err, out)
	}
	return string(out)
}

// kernelFixture is a directory with project quotas, and one in it that belongs to a user and
// to a project.
func kernelFixture(t *testing.T) (q *Quotas, dir, mine string) {
	t.Helper()
	if os.Getenv(dirEnv) == "" {
		t.Skip("needs a directory with project quotas in " + dirEnv)
	}
	dir, err := os.MkdirTemp(os.Getenv(dirEnv), "fixture-")
	must(t, err, os.Chmod(dir, 0o755)) //nolint:gosec // another user's process goes in
	t.Cleanup(func() { must(t, os.RemoveAll(dir)) })
	q, err = openQuotas(dir)
	must(t, err)
	t.Cleanup(func() { must(t, q.Close()) })
	mine = filepath.Join(dir, "mine")
	must(t, os.Mkdir(mine, 0o700), os.Chown(mine, 1000, 1000))
	adopt(t, q, mine, 7)
	must(t, q.Limit(7, 0))
	return q, dir, mine
}

func adopt(t *testing.T, q *Quotas, dir string, project uint32) {
	t.Helper()
	f, err := os.Open(dir)
	must(t, err, q.Adopt(f, project), f.Close())
}

func (q *Quotas) mustUse(t *testing.T, project uint32) int64 {
	t.Helper()
	used, err := q.Used(project)
	must(t, err)
	return used
}

func isNoRoom(answer string) bool { return answer == "EDQUOT" || answer == "ENOSPC" }

func TestKernelLacks(t *testing.T) {
	for _, dir := range filepath.SplitList(os.Getenv(lackingEnv)) {
		_, err := openQuotas(dir)
		if !errdefs.IsNotImplemented(err) {
			t.Errorf("%s: %v", dir, err)
		}
		t.Log(err)
	}
}

func TestKernelLimits(t *testing.T) {
	q, dir, mine := kernelFixture(t)
	const limit = 1 << 20
	must(t, q.Limit(7, limit))
	total, answer, _ := strings.Cut(tenant(t, "fill", mine+"/f"), " ")
	n, err := strconv.Atoi(total)
	must(t, err)
	if n > limit || n < limit-64<<10 || !isNoRoom(answer) {
		t.Errorf("%d bytes were written below a limit of %d, then %s", n, limit, answer)
	}
	used := q.mustUse(t, 7)
	if used > limit || used < int64(n) {
		t.Errorf("%d bytes are used", used)
	}
	t.Logf("limit %d: wrote %d, then %s; %d used", limit, n, answer, used)
	if got := tenant(t, "fill", mine+"/g"); !strings.HasPrefix(got, "0 ") || !isNoRoom(got[2:]) {
		t.Errorf("another file got %s", got)
	}

	must(t, os.Truncate(mine+"/f", 0))
	must(t, q.Limit(7, limit/2))
	if got := tenant(t, "make", mine+"/h"); got != "done" {
		t.Errorf("after some was freed: %s", got)
	}
	must(t, os.WriteFile(dir+"/others", make([]byte, 2*limit), 0o600)) // of no project
	if n, unknown := q.mustUse(t, 7), q.mustUse(t, 12345); n > limit/4 || unknown != 0 {
		t.Errorf("%d bytes are used after it was freed, %d of a project that isn't", n, unknown)
	}
}

func TestKernelStaging(t *testing.T) {
	q, dir, mine := kernelFixture(t)
	staged := func(name string, project uint32) string {
		at := filepath.Join(dir, name)
		must(t, os.Mkdir(at, 0o700))
		if project != 0 {
			adopt(t, q, at, project)
		}
		must(t, os.WriteFile(at+"/f", []byte("x"), 0o600), os.Mkdir(at+"/d", 0o700), os.WriteFile(at+"/d/f", []byte("x"), 0o600), os.Symlink("x", at+"/l"))
		return at
	}
	right, none, other := staged("right", 7), staged("none", 0), staged("other", 8)
	for _, name := range []string{"f", "d", "l"} {
		must(t, os.Rename(right+"/"+name, mine+"/"+name))
		for _, at := range []string{none, other} {
			if err := os.Rename(at+"/"+name, mine+"/moved"); !errors.Is(err, unix.EXDEV) {
				t.Errorf("%s came from %s: %v", name, at, err)
			}
		}
	}
	if err := os.Link(other+"/f", mine+"/linked"); !errors.Is(err, unix.EXDEV) {
		t.Error(err)
	}
	must(t, os.Mkdir(dir+"/follows", 0o700))
	follows, err := os.Open(dir + "/follows")
	must(t, err)
	into, err := os.Open(mine)
	must(t, err, Follow(follows, into), follows.Close(), into.Close())
	must(t, os.WriteFile(dir+"/follows/f", nil, 0o600), os.Rename(dir+"/follows/f", mine+"/moved"))
	must(t, os.Rename(mine+"/d", none+"/back")) // out of a project is free: it isn't any workspace's
}

func TestKernelAdopts(t *testing.T) {
	q, dir, _ := kernelFixture(t)
	tree := filepath.Join(dir, "tree")
	at := tree
	for i := range 100 { // deeper than the handles that are held
		must(t, os.Mkdir(at, 0o755), os.WriteFile(at+"/f", make([]byte, 10_000), 0o600), os.Symlink("f", at+"/l"), unix.Mkfifo(at+"/p", 0o600)) //nolint:gosec // another user's process goes in
		must(t, os.Chown(at, 1000, 1000), os.Chown(at+"/f", 1000, 1000))
		at += "/" + strconv.Itoa(i)
	}
	must(t, q.Limit(9, 100_000)) // less than it takes
	adopt(t, q, tree, 9)
	if used := q.mustUse(t, 9); used < 100*10_000 {
		t.Errorf("%d bytes are used", used)
	}
	deep := filepath.Dir(at)
	if got := tenant(t, "make", deep+"/new"); !isNoRoom(got) {
		t.Errorf("over the limit, a file was %s", got)
	}
	must(t, q.Limit(9, 10<<20))
	for _, task := range []string{"mkdir " + deep + "/sub", "make " + deep + "/sub/f", "move " + deep + "/sub/f " + tree + "/f"} {
		if got := tenant(t, strings.Fields(task)...); got != "done" {
			t.Errorf("%s: %s", task, got)
		}
	}
	err := filepath.WalkDir(tree, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.IsDir() && !d.Type().IsRegular() {
			return err
		}
		f, err := os.Open(path)
		must(t, err)
		a, err := q.kernel.attr(int(f.Fd()))
		if must(t, err, f.Close()); a.Project != 9 || d.IsDir() && a.Flags&flagInherit == 0 {
			t.Errorf("%s: %+v", path, a)
		}
		return nil
	})
	must(t, err)
}

// A directory that was taken is held to its limit; one that was let go of takes anything
// from anywhere.
func TestKernelTakesAndDrops(t *testing.T) {
	q, dir, mine := kernelFixture(t)
	must(t, q.Limit(7, 0))
	f, err := os.Open(mine)
	must(t, err)
	defer f.Close()
	for range 2 {
		must(t, q.Drop(t.Context(), f, 7), os.WriteFile(mine+"/f", make([]byte, 50_000), 0o600), os.Chown(mine+"/f", 1000, 1000))
		if used := q.mustUse(t, 7); used != 0 {
			t.Errorf("%d bytes are used after it was dropped", used)
		}
		must(t, q.Take(t.Context(), f, 7), q.Limit(7, 1<<20))
		if got := tenant(t, "fill", mine+"/g"); !isNoRoom(got[strings.Index(got, " ")+1:]) {
			t.Errorf("over the limit: %s", got)
		}
		if used := q.mustUse(t, 7); used < 50_000 || used > 1<<20 {
			t.Errorf("%d bytes are used", used)
		}
		must(t, q.Limit(7, 0))
		if got := tenant(t, "make", mine+"/h"); got != "done" {
			t.Errorf("after the limit was lifted: %s", got)
		}
	}
	must(t, q.Drop(t.Context(), f, 7), os.WriteFile(dir+"/other", nil, 0o600), os.Rename(dir+"/other", mine+"/other"))
	empty, err := os.Create(dir + "/empty")
	must(t, err)
	defer empty.Close()
	for _, of := range []uint32{0, 7} {
		must(t, q.assign(int(empty.Fd()), of, false))
		if free, err := q.Free(7); free != (of == 0) || err != nil || q.mustUse(t, 7) != 0 {
			t.Errorf("an empty file is in project %d, and 7 is free: %v, %v", of, free, err)
		}
	}
	must(t, os.Link(mine+"/f", dir+"/again"))
	if err := q.Take(t.Context(), f, 7); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("a file that is elsewhere as well was taken: %v", err)
	}
}

// Without a filter of system calls a file's owner leaves its project, which is why
// sandboxes have one.
func TestKernelOwnerLeaves(t *testing.T) {
	_, dir, mine := kernelFixture(t)
	for _, task := range []string{"mkdir " + mine + "/d", "make " + mine + "/f", "leave " + mine + "/f", "unmark " + mine + "/d"} {
		if got := tenant(t, strings.Fields(task)...); got != "done" {
			t.Errorf("%s: %s", task, got)
		}
	}
	must(t, os.WriteFile(dir+"/f", nil, 0o600), os.Chmod(dir, 0o777)) //nolint:gosec // as the name says
	if got := tenant(t, "move", dir+"/f", mine+"/in"); got != "EXDEV" {
		t.Errorf("a file of no project came in: %s", got)
	}
}

// Kernels before 5.14 want the device.
func TestKernelByDevice(t *testing.T) {
	q, dir, mine := kernelFixture(t)
	must(t, os.WriteFile(mine+"/f", make([]byte, 50_000), 0o600))
	device, err := deviceOf(q.dev)
	if device == "" {
		t.Fatalf("no device for %s: %v", dir, err)
	}
	name, err := unix.BytePtrFromString(device)
	must(t, err)
	q.kernel = &system{dir: q.dir, device: name}
	must(t, q.Limit(7, 100_000))
	if used := q.mustUse(t, 7); used < 50_000 || used > 100_000 {
		t.Errorf("%d bytes are used", used)
	}
	if got := tenant(t, "fill", mine+"/g"); !isNoRoom(got[strings.Index(got, " ")+1:]) {
		t.Error(got)
	}
	flags, err := q.kernel.state()
	if must(t, err); flags&stateEnforced == 0 {
		t.Errorf("%#x", flags)
	}
}
