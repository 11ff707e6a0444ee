package quota_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/containerd/errdefs"
	"github.com/google/go-cmp/cmp"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/lifecycle/quota"
	"github.com/bermhq/berm/lifecycle/quota/project"
	"github.com/bermhq/berm/lifecycle/store"
	"github.com/bermhq/berm/runtime/runtimetest/check"
)

const (
	first = 0x63000000
	limit = 1 << 20
)

// disk stands in for a file system that has project quotas. Of a tree it knows the
// directory only.
type disk struct {
	mu     sync.Mutex
	limits map[uint32]int64
	tags   map[string]uint32
	used   map[uint32]bool  // by somebody else
	fail   map[string]error // of a call
	taking func()           // is called by Take
	trying func()           // is called by Try
	drops  int              // calls of Drop
}

// path is where a directory is.
func path(dir *os.File) string {
	p, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", dir.Fd()))
	if err != nil {
		panic(err)
	}
	return p
}

func (d *disk) Used(uint32) (int64, error) { return 0, nil }

func (d *disk) Adopt(*os.File, uint32) error { return nil }

func newDisk() *disk {
	return &disk{limits: map[uint32]int64{}, tags: map[string]uint32{}, used: map[uint32]bool{}, fail: map[string]error{}}
}

func (d *disk) find(string) (quota.Projects, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d, d.fail["find"]
}

func (d *disk) failing(call string, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.fail[call] = err
}

func (d *disk) Limit(project uint32, bytes int64) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.fail["limit"] == nil {
		d.limits[project] = bytes
	}
	return d.fail["limit"]
}

// Try fails in a directory that is held, as the kernel may in one that is full.
func (d *disk) Try(dir *os.File) error {
	if d.trying != nil {
		d.trying()
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.limits[d.tags[path(dir)]] > 0 {
		return errdefs.ErrNotImplemented
	}
	return d.fail["try"]
}

func (d *disk) Free(project uint32) (bool, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return !d.used[project], d.fail["free"]
}

func (d *disk) Take(ctx context.Context, dir *os.File, project uint32) error {
	d.mu.Lock()
	taking := d.taking
	d.mu.Unlock()
	if taking != nil {
		taking()
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.tags[path(dir)] != 0 && d.tags[path(dir)] != project {
		return errdefs.ErrFailedPrecondition
	}
	d.tags[path(dir)] = project // a part of it, if that fails
	return errors.Join(d.fail["take"], context.Cause(ctx))
}

func (d *disk) Drop(ctx context.Context, dir *os.File, project uint32) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.drops++
	if err := errors.Join(d.fail["drop"], context.Cause(ctx)); err != nil {
		return err
	}
	if d.tags[path(dir)] == project {
		delete(d.tags, path(dir))
	}
	return nil
}

// fixture is a service with directories.
type fixture struct {
	*quota.Service
	t    *testing.T
	root string
	disk *disk
	path string // of the store
	opts quota.Options
}

func newFixture(t *testing.T) *fixture {
	t.Helper()
	root, err := filepath.EvalSymlinks(t.TempDir())
	must(t, err)
	b := &fixture{t: t, root: root, disk: newDisk(), path: filepath.Join(t.TempDir(), "berm.db")}
	b.opts = quota.Options{Find: b.disk.find, Root: b.dir("chats")}
	b.restart()
	return b
}

// restart is another process that has the same store.
func (b *fixture) restart() {
	b.t.Helper()
	db, err := store.Open(b.t.Context(), store.Options{Path: b.path})
	must(b.t, err)
	b.t.Cleanup(func() { _ = db.Close() }) // a temporary one
	b.opts.Store = db
	b.Service, err = quota.New(b.t.Context(), b.opts)
	must(b.t, err)
}

func (b *fixture) dir(name string) string {
	b.t.Helper()
	dir := filepath.Join(b.root, name)
	must(b.t, os.MkdirAll(dir, 0o755))
	return dir
}

// enter has a sandbox that may write to directories, the first of which has the quota
// unless that is 0.
func (b *fixture) enter(session string, bytes int64, dirs ...string) {
	b.t.Helper()
	b.enterAs(lifecycle.Subject{SessionID: session, QuotaBytes: bytes}, dirs...)
}

func (b *fixture) enterAs(o lifecycle.Subject, dirs ...string) {
	b.t.Helper()
	for _, name := range dirs {
		o.Dirs = append(o.Dirs, b.dir(name))
	}
	if o.QuotaBytes > 0 {
		o.Dir = o.Dirs[0]
	}
	if _, err := b.Attach(b.t.Context(), o); err != nil {
		b.t.Fatalf("%s: %v", o.SessionID, err)
	}
}

// holds reports whether the kernel holds a session's own quota.
func (b *fixture) holds(session string) bool {
	return b.Enforcement(lifecycle.Subject{SessionID: session, Dir: "/x"}) == "hard"
}

func (b *fixture) sweep() {
	b.t.Helper()
	must(b.t, b.Sweep(b.t.Context()))
}

// want compares what is held, and what the disk has.
func (b *fixture) want(what string, held []string, tags map[string]uint32, limits map[uint32]int64) {
	b.t.Helper()
	got := map[string]uint32{}
	b.disk.mu.Lock()
	for dir, p := range b.disk.tags {
		rel, err := filepath.Rel(b.root, dir)
		must(b.t, err)
		got[rel] = p
	}
	gotLimits := maps.Clone(b.disk.limits)
	b.disk.mu.Unlock()
	maps.DeleteFunc(gotLimits, func(_ uint32, bytes int64) bool { return bytes == 0 })
	var holds []string
	for _, session := range []string{"a", "b", "c"} {
		if b.holds(session) {
			holds = append(holds, session)
		}
	}
	if d := cmp.Diff(held, holds); d != "" {
		b.t.Errorf("%s: held %s", what, d)
	}
	if d := cmp.Diff(tags, got); d != "" && len(tags)+len(got) > 0 {
		b.t.Errorf("%s: tags %s", what, d)
	}
	if d := cmp.Diff(limits, gotLimits); d != "" && len(limits)+len(gotLimits) > 0 {
		b.t.Errorf("%s: limits %s", what, d)
	}
}

type (
	tags   = map[string]uint32
	limits = map[uint32]int64
)

// A workspace is held for as long as its sandbox is there, and nothing is left after it.
func TestComesAndGoes(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	b.enter("a", limit, "x", "extra")
	b.enter("b", 2*limit, "y")
	b.enter("c", 0, "z")
	b.sweep()
	b.want("there", []string{"a", "b"}, tags{"x": first, "y": first + 1}, limits{first: limit, first + 1: 2 * limit})
	b.Detach("a")
	b.want("gone", []string{"b"}, tags{"x": first, "y": first + 1}, limits{first + 1: 2 * limit})
	b.enter("c", 3*limit, "x") // the same directory's next
	b.want("passed on", []string{"b", "c"}, tags{"x": first, "y": first + 1}, limits{first: 3 * limit, first + 1: 2 * limit})
	b.Detach("c")
	b.Detach("b")
	b.Detach("nobody")
	b.sweep()
	b.want("swept", nil, nil, nil)
	b.enter("a", limit, "x")
	b.want("anew", []string{"a"}, tags{"x": first + 2}, limits{first + 2: limit}) // no number comes back
}

// No sandbox is held to another's limit, whichever comes first.
func TestShared(t *testing.T) {
	t.Parallel()
	for name, other := range map[string]string{"same": "x", "above": ".", "below": "x/sub/sub"} {
		for _, bytes := range []int64{0, limit} {
			b := newFixture(t)
			b.enter("a", limit, "x")
			b.enter("b", limit, "xx")
			b.enter("c", bytes, "elsewhere", other)
			if b.holds("a") || b.holds("b") != (other != ".") || b.disk.limits[first] != 0 || b.holds("c") != (bytes > 0) {
				t.Errorf("%s: %v, %v, %v; limits %v", name, b.holds("a"), b.holds("b"), b.holds("c"), b.disk.limits)
			}
			b.Detach("c")
			b.sweep()
			if b.holds("a") || b.disk.limits[first] != 0 {
				t.Errorf("%s: what was shared once may be elsewhere", name)
			}
			b.Detach("a")
			b.Detach("b")
			b.sweep()
			b.want(name, nil, nil, nil)

			b.enter("b", bytes, other)
			b.enter("a", limit, "x")
			if b.holds("a") || b.holds("b") {
				t.Errorf("%s, the other way round: %v, %v", name, b.holds("a"), b.holds("b"))
			}
		}
	}
}

// What chats have, and what has been somebody else's, is let be.
func TestOthersProjects(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	b.enter("a", limit, "chats/sub")
	b.enter("b", limit, ".")
	b.want("chats", nil, nil, nil)
	b.Detach("a")
	b.Detach("b")
	b.disk.tags[b.dir("x")] = 7
	b.enter("a", limit, "x")
	b.want("another's", nil, tags{"x": 7}, nil)
	for i := range uint32(20) {
		b.disk.used[first+1+i] = true
	}
	b.enter("b", limit, "y")
	b.want("too many numbers in use", nil, tags{"x": 7}, nil)
	b.enter("c", limit, "z")
	b.want("numbers in use", []string{"c"}, tags{"x": 7, "z": first + 21}, limits{first + 21: limit})
}

// A sandbox that comes while a tree is being taken isn't held to its limit.
func TestSharedMeanwhile(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	b.disk.taking = func() {
		b.disk.taking = nil
		b.enter("b", 0, "x/sub")
		b.sweep() // leaves alone what is being taken
	}
	b.enter("a", limit, "x")
	b.want("shared", nil, tags{"x": first}, nil)
	b.Detach("a")
	b.sweep()
	b.want("still occupied", nil, tags{"x": first}, nil)
	b.Detach("b")
	b.sweep()
	b.want("left", nil, nil, nil)
}

// Whatever fails leaves nothing behind that holds anybody to anything.
func TestFails(t *testing.T) {
	t.Parallel()
	for _, call := range []string{"find", "try", "free", "take", "limit"} {
		b := newFixture(t)
		b.disk.failing(call, errdefs.ErrNotImplemented)
		o := lifecycle.Subject{SessionID: "a", Dirs: []string{b.dir("x")}, Dir: b.dir("x"), QuotaBytes: limit}
		_, err := b.Attach(t.Context(), o)
		if (err != nil) != (call == "free") || err != nil && !errdefs.IsUnavailable(err) {
			t.Errorf("%s: %v", call, err)
		}
		if call != "limit" { // else the whole tree has it, and so nothing is in the way of who moves files
			b.want(call+" failed", nil, nil, nil)
		}
		b.disk.failing(call, nil)
		b.Detach("a")
		b.sweep()
		b.want(call, nil, nil, nil)
		b.enter("a", limit, "x")
		if !b.holds("a") {
			t.Errorf("%s: it isn't held once that is over", call)
		}
	}
	b := newFixture(t)
	b.enter("a", limit, "x")
	b.disk.failing("limit", errors.New("broken"))
	if _, err := b.Attach(t.Context(), lifecycle.Subject{SessionID: "b", Dirs: []string{b.dir("x")}}); !errdefs.IsUnavailable(err) {
		t.Errorf("a sandbox may come below another's limit: %v", err)
	}
	b.Detach("a")
	if err := b.Sweep(t.Context()); err == nil || b.holds("a") {
		t.Errorf("%v", err)
	}
	b.disk.failing("limit", nil)
	b.sweep()
	b.want("at last", nil, nil, nil)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := b.Attach(ctx, lifecycle.Subject{SessionID: "c", Dirs: []string{b.dir("x")}, Dir: b.dir("x"), QuotaBytes: 1}); !errors.Is(err, context.Canceled) {
		t.Errorf("nobody waits for it: %v", err)
	}
}

// A tree that is too large to be walked has a soft limit, and holds up nobody again and
// again.
func TestTooLarge(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := newFixture(t)
		tooLarge := errors.New("too large")
		b.disk.failing("take", tooLarge)
		b.disk.failing("drop", tooLarge)
		for _, session := range []string{"a", "b"} {
			b.enter(session, limit, "x")
			b.want(session+" entered", nil, tags{"x": first}, nil)
			b.Detach(session)
		}
		b.sweep()
		b.sweep()
		if b.disk.drops != 1 {
			t.Errorf("it was walked %d times within the hour", b.disk.drops)
		}
		b.disk.limits[first] = limit // as if that hadn't been lifted
		b.sweep()
		b.want("swept", nil, tags{"x": first}, nil)
		time.Sleep(time.Hour)
		if err := b.Sweep(t.Context()); !errors.Is(err, tooLarge) || b.disk.drops != 2 {
			t.Errorf("after an hour: %v, %d", err, b.disk.drops)
		}
		b.disk.failing("take", nil)
		b.disk.failing("drop", nil)
		time.Sleep(time.Hour)
		b.sweep()
		b.want("smaller", nil, nil, nil)

		ctx, cancel := context.WithCancel(t.Context())
		b.disk.taking = cancel
		o := lifecycle.Subject{SessionID: "c", Dirs: []string{b.dir("x")}, Dir: b.dir("x"), QuotaBytes: limit}
		if _, err := b.Attach(ctx, o); !errors.Is(err, context.Canceled) {
			t.Errorf("nobody waits for it: %v", err)
		}
		b.want("cut off", nil, tags{"x": first + 1}, nil)
		b.sweep()
		b.want("cut off, and swept", nil, nil, nil)
	})
}

// Who may write nowhere doesn't wait for those who do.
func TestLeaveWaitsForNobody(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	trying, on := make(chan struct{}), make(chan struct{})
	b.disk.trying = func() { close(trying); <-on }
	done := make(chan struct{})
	go func() { defer close(done); b.enter("a", limit, "x") }()
	<-trying
	if _, err := b.Attach(t.Context(), lifecycle.Subject{SessionID: "b"}); err != nil {
		t.Error(err)
	}
	b.Detach("b")
	close(on)
	<-done
	b.want("entered", []string{"a"}, tags{"x": first}, limits{first: limit})
}

// What a crash left holds nobody who comes later, though nothing more is held, or can't be.
func TestLeftLimit(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(*fixture){
		"off":       func(b *fixture) { b.opts.Off = true },
		"no longer": func(b *fixture) { b.disk.failing("find", errdefs.ErrNotImplemented) },
		"can't be opened": func(b *fixture) {
			must(t, os.Remove(b.dir("x")), os.Symlink("/", filepath.Join(b.root, "x")))
		},
	} {
		b := newFixture(t)
		b.enter("a", limit, "x")
		change(b)
		b.restart()
		dir := filepath.Join(b.root, "x")
		o := lifecycle.Subject{SessionID: "b", Dirs: []string{dir}, Dir: dir, QuotaBytes: 2 * limit, Resumed: name == "can't be opened"}
		if _, err := b.Attach(t.Context(), o); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		known, err := b.opts.Store.Projects(t.Context())
		if err != nil || len(known) != 1 || known[0].SessionID != "" || b.holds("b") {
			t.Errorf("%s: %+v, %v", name, known, err)
		}
		if name != "no longer" {
			b.want(name, nil, tags{"x": first}, nil)
		}
	}
}

// After a crash, what lives on is held again, and the rest is released.
func TestRestart(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	b.enter("a", limit, "x")
	b.enter("b", limit, "y")
	b.enter("c", limit, "z")
	b.restart()
	b.enterAs(lifecycle.Subject{SessionID: "a", QuotaBytes: limit, Resumed: true}, "x")
	b.enterAs(lifecycle.Subject{SessionID: "c", QuotaBytes: limit, Resumed: true}, "z")
	b.sweep()
	b.want("restart", []string{"a", "c"}, tags{"x": first, "z": first + 2}, limits{first: limit, first + 2: limit})

	b.restart()
	b.enterAs(lifecycle.Subject{SessionID: "b", QuotaBytes: limit, Resumed: true}, "x") // whoever was held there
	b.enterAs(lifecycle.Subject{SessionID: "c", QuotaBytes: limit, Resumed: true}, "z")
	b.want("another's", []string{"c"}, tags{"x": first, "z": first + 2}, limits{first + 2: limit})
	b.Detach("b")
	b.sweep()
	b.enter("a", limit, "x")
	b.want("anew", []string{"a", "c"}, tags{"x": first + 3, "z": first + 2}, limits{first + 3: limit, first + 2: limit})

	b.enter("b", 0, "x") // from now on it is shared
	must(t, os.Rename(b.dir("z"), filepath.Join(b.root, "moved")))
	b.opts.Off = true
	b.restart()
	b.enterAs(lifecycle.Subject{SessionID: "a", QuotaBytes: limit, Resumed: true}, "x")
	b.enter("b", limit, "y")
	must(t, os.RemoveAll(filepath.Join(b.root, "z")))
	b.sweep()
	b.want("off", nil, tags{"x": first + 3, "z": first + 2}, nil) // where it was moved, no limit holds
	b.Detach("a")
	b.sweep()
	b.want("all gone", nil, tags{"z": first + 2}, nil)
	left, err := b.opts.Store.Projects(t.Context())
	if err != nil || len(left) != 0 {
		t.Errorf("%v, %v", left, err)
	}
}

// The kernel itself holds a workspace, and releases it; make quota-vm has one that can.
func TestKernelHolds(t *testing.T) {
	at := os.Getenv("BERM_PROJECT_DIR")
	if at == "" {
		t.Skip("needs a directory with project quotas in BERM_PROJECT_DIR")
	}
	b := newFixture(t)
	var err error
	b.root, err = os.MkdirTemp(at, "ceiling-")
	must(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(b.root) }) // the machine is about to go
	b.opts.Find = func(dir string) (quota.Projects, error) { return project.Find(dir) }
	b.restart()
	fill := func(name string, kb int) bool {
		t.Helper()
		cmd := exec.Command("/bin/busybox", "dd", "if=/dev/zero", "of="+filepath.Join(b.root, name, "f"), "bs=1k", fmt.Sprint("count=", kb))
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 1000, Gid: 1000}}
		out, err := cmd.CombinedOutput()
		t.Logf("%s: %s%v", name, out, err)
		return err == nil
	}
	for _, name := range []string{"", "x", "x/sub", "y"} {
		if err := os.Chmod(b.dir(name), 0o777); err != nil { //nolint:gosec // another user writes there
			t.Fatal(err)
		}
	}
	b.enter("a", limit, "x")
	if !b.holds("a") || fill("x", 2048) || !fill("y", 2048) || fill("x/sub", 1) {
		t.Error("it isn't held")
	}
	b.restart()
	b.enterAs(lifecycle.Subject{SessionID: "a", QuotaBytes: limit, Resumed: true}, "x")
	if !b.holds("a") || fill("x", 2048) {
		t.Error("it isn't held after a restart, while it is full")
	}
	b.enter("b", 0, "x/sub")
	if b.holds("a") || !fill("x", 2048) {
		t.Error("it is held though it is shared")
	}
	b.Detach("a")
	b.Detach("b")
	b.sweep()
	b.enter("c", 4*limit, "x")
	if !b.holds("c") || fill("x", 8192) || !fill("x", 3000) {
		t.Error("the next one isn't held to its own")
	}
	b.Detach("c")
	if !fill("x", 8192) {
		t.Error("a limit was left behind")
	}
	b.sweep()
	if left, err := b.opts.Store.Projects(t.Context()); err != nil || len(left) > 0 {
		t.Errorf("%v, %v", left, err)
	}
}

// A key is live while any of its sandboxes is attached.
func TestLive(t *testing.T) {
	t.Parallel()
	b := newFixture(t)
	live := func(want bool) {
		t.Helper()
		if got := quota.Live(b.Service, "t", "k"); got != want || quota.Live(b.Service, "other", "k") {
			t.Errorf("live is %v", got)
		}
	}
	live(false)
	for _, session := range []string{"a", "b", "b"} {
		if _, err := b.Attach(t.Context(), lifecycle.Subject{Tenant: "t", Key: "k", SessionID: session}); err != nil {
			t.Fatal(err)
		}
		live(true)
	}
	b.Detach("a")
	live(true)
	for range 2 {
		b.Detach("b")
		live(false)
	}
}

var must = check.Must // ends a test if a step of its own fails
