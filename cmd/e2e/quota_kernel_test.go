package e2e

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/lifecycle/quota/project"
	"github.com/bermhq/berm/proxy/apitype"
	"github.com/bermhq/berm/proxy/client"
	"github.com/bermhq/berm/runtime/runtimetest/check"
	"github.com/bermhq/berm/runtime/runtimetest/engine"
)

// kernelPatience is how long anything may take here: an emulated machine is slow.
const kernelPatience = 10 * time.Minute

const (
	firstCeiling = 0x63000000 // where the projects of sandboxes' own directories begin
	mebibyte     = 1 << 20
)

// A whole server has the kernel hold quotas; make quota-vm has a file system where it can.
func TestKernelServer(t *testing.T) {
	at := os.Getenv("BERM_PROJECT_DIR")
	if at == "" {
		t.Skip("needs a directory with project quotas in BERM_PROJECT_DIR")
	}
	engine.Require(t, "containerd")
	// Without a network, the engine takes no more than a kernel.
	e := startEngine(t, "containerd", engine.Options{NoNetns: true, StartTimeout: kernelPatience})
	e.config.CallTimeout = kernelPatience
	for _, tt := range []struct {
		name string
		test func(b *quotaFixture)
	}{
		{"sandbox", kernelHoldsSandbox},
		{"chats", kernelHoldsChats},
		{"required", kernelRequired},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := check.Value(os.MkdirTemp(at, "server-"))(t)
			t.Cleanup(func() {
				if err := os.RemoveAll(dir); err != nil {
					t.Error(err)
				}
			})
			ctx, cancel := context.WithTimeout(t.Context(), kernelPatience)
			defer cancel()
			tt.test(&quotaFixture{T: t, ctx: ctx, e: e, dir: dir})
		})
	}
}

// quotaFixture is a directory on a file system with project quotas, and a server.
type quotaFixture struct {
	*testing.T
	ctx    context.Context
	e      *testEngine
	dir    string
	server *server
	c      *client.Client
}

// configure makes a server that may mount what is below the directory.
func (b *quotaFixture) configure(env ...string) *server {
	b.Helper()
	server := newServer(b, b.e, b.e.dir(b), testImage)
	server.policy(b, "mounts: {allowed_roots: ["+b.dir+"]}\n")
	server.env = append(server.env, env...)
	server.patience = kernelPatience
	return server
}

// serve starts one.
func (b *quotaFixture) serve(env ...string) {
	b.Helper()
	b.server = b.configure(env...)
	b.start()
	b.c = b.server.client(b, nil)
}

func (b *quotaFixture) start() {
	b.Helper()
	if err := b.server.run(b.ctx); err != nil {
		b.Fatalf("%v\n%s", err, b.server.logTail())
	}
}

// crash kills the server, and starts it again after what happens meanwhile.
func (b *quotaFixture) crash(meanwhile func()) {
	b.Helper()
	b.server.Kill()
	meanwhile()
	b.start()
}

// create makes a sandbox whose quota the kernel has to hold.
func (b *quotaFixture) create(key string, req apitype.SandboxRequest) *apitype.Sandbox {
	b.Helper()
	sb := check.Value(b.c.Create(b.ctx, key, req))(b)
	b.wantHeld(sb)
	return sb
}

func (b *quotaFixture) wantHeld(sb *apitype.Sandbox) {
	b.Helper()
	if sb.Status != "running" || sb.Enforcement.WorkspaceQuota != "hard" {
		b.Fatalf("%+v", sb)
	}
}

func (b *quotaFixture) get(key string) *apitype.Sandbox {
	b.Helper()
	return check.Value(b.c.Get(b.ctx, key))(b)
}

// sh runs what must go well.
func (b *quotaFixture) sh(key, script string) string {
	b.Helper()
	res, err := b.c.Exec(b.ctx, key, apitype.ExecRequest{Command: shell(script), Timeout: apitype.SecondsOf(300)})
	if err != nil || !res.OK {
		b.Fatalf("%s: %+v, %v", script, res, err)
	}
	return res.Stdout
}

// full runs what has to fail there and then as the kernel has no room for it; it isn't over
// the quota by that, and the sandbox goes on.
func (b *quotaFixture) full(key, script string) {
	b.Helper()
	var st unix.Statfs_t
	must(b, unix.Statfs(b.dir, &st))
	says := "Disk quota exceeded"
	if st.Type == unix.XFS_SUPER_MAGIC {
		says = "No space left on device"
	}
	before := b.get(key)
	res, err := b.c.Exec(b.ctx, key, apitype.ExecRequest{Command: shell(script), Timeout: apitype.SecondsOf(300)})
	if err != nil || res.Status != "completed" || res.OK || !strings.Contains(res.Stderr, says) {
		b.Fatalf("%s: %+v, %v; want %s", script, res, err, says)
	}
	sb := b.get(key)
	if b.wantHeld(sb); sb.SessionID != before.SessionID || sb.ContainerID != before.ContainerID {
		b.Errorf("it was made again: %+v, %+v", before, sb)
	}
}

func (b *quotaFixture) wantFullFile(path string, limit int64) {
	b.Helper()
	info := check.Value(os.Stat(path))(b)
	b.Logf("%s has %d bytes, of %d", filepath.Base(path), info.Size(), limit)
	if info.Size() > limit || info.Size() < limit-64<<10 {
		b.Errorf("%s has %d bytes below a limit of %d", path, info.Size(), limit)
	}
}

// want507 checks that a call had no room, and left a file as it was.
func (b *quotaFixture) want507(err error, path, content string, codes ...string) {
	b.Helper()
	wantCode(b.T, err, codes...)
	if p := refusal(err).Problem; p.Status != http.StatusInsufficientStorage {
		b.Errorf("%+v", p)
	}
	if got, err := os.ReadFile(path); err != nil || string(got) != content {
		b.Errorf("%s is %.100q, %v", path, got, err)
	}
}

// ceilings reads the limits of the projects of sandboxes' own directories, in bytes.
func (b *quotaFixture) ceilings() map[uint32]int64 {
	b.Helper()
	const nextQuota, projectQuota, block = 0x800009, 2, 1024 // Q_GETNEXTQUOTA, PRJQUOTA, QIF_DQBLKSIZE
	dir := check.Value(os.Open(b.dir))(b)
	defer func() { _ = dir.Close() }()
	limits := map[uint32]int64{}
	for from := uint32(firstCeiling); ; {
		var next struct { // if_nextdqblk of linux/quota.h
			Hard      uint64
			_         [7]uint64
			_, Number uint32
		}
		_, _, code := unix.Syscall6(unix.SYS_QUOTACTL_FD, dir.Fd(), nextQuota<<8|projectQuota, uintptr(from), uintptr(unsafe.Pointer(&next)), 0, 0)
		if code == unix.ENOENT {
			return limits
		}
		if code != 0 {
			b.Fatal(code)
		}
		if next.Hard != 0 {
			limits[next.Number] = int64(next.Hard) * block
		}
		from = next.Number + 1
	}
}

// ceiling answers the project of the only directory that is held.
func (b *quotaFixture) ceiling(limit int64) uint32 {
	b.Helper()
	limits := b.ceilings()
	for number, has := range limits {
		if len(limits) == 1 && has == limit {
			return number
		}
	}
	b.Fatalf("the limits are %v", limits)
	return 0
}

func (b *quotaFixture) quotas() *project.Quotas {
	b.Helper()
	q := check.Value(project.Find(b.dir))(b)
	b.Cleanup(func() { _ = q.Close() })
	return q
}

// wantLetGo waits until no directory is held, and nothing is of the project any more.
func (b *quotaFixture) wantLetGo(number uint32) {
	b.Helper()
	q := b.quotas()
	b.await(func() bool {
		free := check.Value(q.Free(number))(b)
		return free && len(b.ceilings()) == 0
	})
}

func (b *quotaFixture) await(done func() bool) {
	b.Helper()
	for !done() {
		select {
		case <-b.ctx.Done():
			b.Fatal(context.Cause(b.ctx), b.ceilings())
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// work makes a directory with a file.
func (b *quotaFixture) work(name string) (dir, kept string) {
	b.Helper()
	dir = makeDir(b, b.dir, name)
	kept = filepath.Join(dir, "kept")
	write(b.T, kept, "kept")
	return dir, kept
}

// kernelHoldsSandbox has a sandbox run against its own quota.
func kernelHoldsSandbox(b *quotaFixture) {
	const quota = mebibyte
	dir, kept := b.work("work")
	b.serve()
	b.create("own", apitype.SandboxRequest{HostPath: &dir, WorkspaceQuotaMB: new(int64(1))})
	number := b.ceiling(quota)

	b.full("own", "cat /dev/zero > /workspace/much")
	b.wantFullFile(dir+"/much", quota)
	if got := b.sh("own", "cat /workspace/kept"); got != "kept" {
		b.Errorf("a command in a full workspace reads %q", got)
	}
	b.full("own", "echo more > /workspace/more")
	for _, much := range []int{1, 64 << 10} {
		_, err := b.c.WriteFile(b.ctx, "own", "/workspace/kept", strings.NewReader(strings.Repeat("x", much)), client.WriteOptions{})
		b.want507(err, kept, "kept", "quota_exceeded", "no_space")
		b.Logf("an upload of %d: %v", much, err)
	}
	b.wantFullFile(dir+"/much", quota)
	must(b, b.c.RemoveFile(b.ctx, "own", "/workspace/much", false))
	if got := b.sh("own", "echo more > /workspace/more && cat /workspace/more"); got != "more\n" {
		b.Errorf("after some was freed, a command answers %q", got)
	}

	// All that there is may be used.
	q := b.quotas()
	used := check.Value(q.Used(number))(b)
	blocks := (quota - used) >> 12
	b.sh("own", fmt.Sprintf("dd if=/dev/zero of=/workspace/rest bs=4k count=%d conv=fsync", blocks))
	if used, err := q.Used(number); err != nil || used != quota {
		b.Errorf("%d bytes are used, %v", used, err)
	}
	b.sh("own", "echo full is fine")
	b.full("own", "echo more > /workspace/little")

	// The next server goes on with it.
	b.crash(func() {})
	b.wantHeld(b.get("own"))
	b.full("own", "echo more > /workspace/little")
	must(b, second(b.c.Delete(b.ctx, "own")))
	b.wantLetGo(number)
	for name, size := range map[string]int64{"kept": 4, "more": 5, "rest": blocks << 12} {
		if info, err := os.Stat(filepath.Join(dir, name)); err != nil || info.Size() != size {
			b.Errorf("%s: %+v, %v", name, info, err)
		}
	}
}

// kernelHoldsChats has sandboxes and uploads run against the quota of their workspace.
func kernelHoldsChats(b *quotaFixture) {
	const quotaMB, quota = 4, 4 * mebibyte
	root := filepath.Join(b.dir, "chats")
	b.serve("BERM_SANDBOX_CHATS_ROOT="+root, "BERM_SANDBOX_CREATE_ROOTS=true", "BERM_STORAGE_PROJECT_QUOTAS=required",
		fmt.Sprintf("BERM_STORAGE_WORKSPACE_QUOTA_MB=%d", quotaMB))
	space := map[string]string{}
	for chat, user := range map[string]string{"one": "user", "two": "user", "other": "other"} {
		w := check.Value(b.c.EnsureWorkspace(b.ctx, user))(b)
		must(b, second(b.c.EnsureChat(b.ctx, chat, w.WorkspaceID)))
		space[user] = w.WorkspaceID
	}
	put := func(chat, name, content string) error {
		return second(b.c.PutChatFile(b.ctx, chat, name, strings.NewReader(content), client.PutChatFileOptions{}))
	}
	used := func(user string) int64 {
		b.Helper()
		usage := check.Value(b.c.WorkspaceUsage(b.ctx, space[user]))(b)
		if usage.Enforcement != "hard" || usage.QuotaBytes == nil || *usage.QuotaBytes != quota || usage.UsedBytes > quota {
			b.Errorf("%+v", usage)
		}
		return usage.UsedBytes
	}
	b.create("one", apitype.SandboxRequest{})
	b.create("two", apitype.SandboxRequest{})
	must(b, put("one", "kept", "kept"))
	b.full("one", "cat /dev/zero > /chat/much")
	b.wantFullFile(filepath.Join(root, "one", "much"), quota)
	if n := used("user"); n < quota-64<<10 {
		b.Errorf("%d bytes are used", n)
	}
	b.full("two", "cat /dev/zero > /chat/more")
	for _, chat := range []string{"one", "two"} {
		b.want507(put(chat, "kept", strings.Repeat("x", 100<<10)), filepath.Join(root, "one", "kept"), "kept", "workspace_quota_exceeded")
	}
	if err := put("other", "kept", strings.Repeat("x", quota/2)); err != nil || used("other") < quota/2 {
		b.Errorf("another workspace: %v", err)
	}

	b.crash(func() {})
	b.wantHeld(b.get("one"))
	b.full("one", "cat /dev/zero > /chat/more")
	must(b, b.c.DeleteChatFile(b.ctx, "one", "much"))
	b.sh("two", "echo again > /chat/again")

	// What is replaced makes room.
	for i := range 3 {
		if err := put("two", "large", strings.Repeat(fmt.Sprint(i), quota/4*3)); err != nil {
			b.Errorf("a large file, %d: %v", i, err)
		}
	}
	if err := errors.Join(b.c.DeleteChatFile(b.ctx, "two", "large"),
		second(b.c.PutHistory(b.ctx, "two", strings.NewReader(strings.Repeat("h", quota/4*3)))),
		second(b.c.AppendHistory(b.ctx, "two", strings.NewReader("more")))); err != nil {
		b.Errorf("a long history: %v", err)
	}
	if n := used("user"); n < quota/4*3 {
		b.Errorf("%d bytes are used", n)
	}
	for _, chat := range []string{"one", "two"} {
		must(b, second(b.c.Delete(b.ctx, chat)), b.c.DeleteChat(b.ctx, chat))
		if _, err := os.Stat(filepath.Join(root, chat)); !errors.Is(err, fs.ErrNotExist) {
			b.Error(err)
		}
	}
	b.await(func() bool { return used("user") < 64<<10 })
	if len(b.ceilings()) > 0 {
		b.Error(b.ceilings())
	}
}

// kernelRequired has servers refuse to start where the kernel can't hold workspaces.
func kernelRequired(b *quotaFixture) {
	for _, lacking := range filepath.SplitList(os.Getenv("BERM_PROJECT_LACKING")) {
		root := check.Value(os.MkdirTemp(lacking, "chats-"))(b)
		server := b.configure("BERM_SANDBOX_CHATS_ROOT="+root, "BERM_STORAGE_PROJECT_QUOTAS=required")
		err := server.run(b.ctx)
		server.stop()
		why := "storage.project_quotas is required, but the kernel can't hold workspaces to their quotas here: project quotas for " + root
		if log := server.logTail(); err == nil || server.ProcessState.ExitCode() != 1 || !strings.Contains(log, why) {
			b.Errorf("on %s: %v\n%s", lacking, err, log)
		} else {
			b.Log(log)
		}
		must(b, os.RemoveAll(root))
	}
}
