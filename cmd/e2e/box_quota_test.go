package e2e

import (
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/proxy/apitype"
	"github.com/bermhq/berm/proxy/client"
)

// How much a workspace may hold.
var boxQuotas = []boxCase{
	{"what counts", quotaCounts},
	{"before a command", quotaBefore},
	{"after a command", quotaAfterCommand},
	{"without a mount", quotaWithoutMount},
	{"bounded", quotaBounded},
	{"in motion", quotaInMotion},
}

const mebibyte = 1 << 20

// limited makes a sandbox whose workspace may hold a mebibyte.
func (r *boxRow) limited(dir string) *apitype.Sandbox {
	r.Helper()
	sb := r.create(apitype.SandboxRequest{HostPath: &dir, WorkspaceQuotaMB: new(int64(1)), ExtraMounts: []apitype.MountRequest{
		{HostPath: r.makeDir(r, "roots", "root", r.key+"-extra"), MountPath: "/extra", Mode: "rw"},
	}})
	if sb.Enforcement.WorkspaceQuota != "soft" && sb.Enforcement.WorkspaceQuota != "hard" {
		r.Errorf("enforcement: %+v", sb.Enforcement)
	}
	return sb
}

// A workspace that holds exactly what it may, if things are counted as they should be.
func quotaCounts(r *boxRow) {
	dir := r.makeDir(r, "roots", "root", r.key)
	big := filepath.Join(r.makeDir(r, "outside-"+r.key), "big")
	link := strings.Repeat("x", 100)
	for file, size := range map[string]int64{big: 4 * mebibyte, dir + "/file": mebibyte/2 - 100 - int64(len(big)), dir + "/sparse": mebibyte / 2} {
		if err := errors.Join(os.WriteFile(file, nil, 0o600), os.Truncate(file, size)); err != nil {
			r.Fatal(err)
		}
	}
	r.makeDir(r, "roots", "root", r.key, "sub", "dir") // directories are nothing
	if err := errors.Join(
		os.Link(dir+"/sparse", dir+"/sub/again"), os.Link(dir+"/sparse", dir+"/sub/dir/again"), // once
		os.Symlink(link, dir+"/sub/dangling"), os.Symlink(big, dir+"/big"), // as long as they are themselves
	); err != nil {
		r.Fatal(err)
	}
	r.limited(dir)
	r.sh("dd if=/dev/zero of=/extra/much bs=1M count=3") // another mount isn't the workspace
	r.sh("echo full is fine")
	res, err := r.c.Exec(r.ctx, r.key, apitype.ExecRequest{Command: shell("echo >> /workspace/file; echo over")})
	if p := r.wantError(err, http.StatusInsufficientStorage, "quota_exceeded"); p.Result == nil || p.Result.Stdout != "over\n" {
		r.Errorf("a byte more: %+v, %+v", res, p)
	}
}

func quotaBefore(r *boxRow) {
	dir := r.makeDir(r, "roots", "root", r.key)
	sb := r.limited(dir)
	write(r.T, dir+"/much", strings.Repeat("x", mebibyte+1))
	for range 2 {
		_, err := r.c.Exec(r.ctx, r.key, apitype.ExecRequest{Command: shell("touch /extra/ran")})
		if p := r.wantError(err, http.StatusInsufficientStorage, "quota_exceeded"); p.Result != nil {
			r.Errorf("%+v", p)
		}
		_, err = r.c.StartExec(r.ctx, r.key, apitype.ExecRequest{Command: shell("touch /extra/ran")})
		r.wantError(err, http.StatusInsufficientStorage, "quota_exceeded")
		_, err = r.c.StartProcess(r.ctx, r.key, apitype.ProcessRequest{Command: "touch", Args: []string{"/extra/ran"}})
		r.wantError(err, http.StatusInsufficientStorage, "quota_exceeded")
	}
	if exists(filepath.Join(r.root, r.key+"-extra", "ran")) {
		r.Error("something was started")
	}
	if now := r.get(); now.SessionID != sb.SessionID || now.Status != "running" {
		r.Errorf("%+v", now)
	}
	if err := os.Truncate(dir+"/much", mebibyte); err != nil {
		r.Fatal(err)
	}
	r.sh("echo exactly full")
}

func quotaAfterCommand(r *boxRow) {
	dir := r.makeDir(r, "roots", "root", r.key)
	sb := r.limited(dir)
	_, err := r.c.Exec(r.ctx, r.key, apitype.ExecRequest{
		Command: shell("dd if=/dev/zero of=/workspace/much bs=1M count=2 2>/dev/null; echo kept > /workspace/little; echo out; echo err >&2; exit 5"),
	})
	p := r.wantError(err, http.StatusInsufficientStorage, "quota_exceeded")
	if !strings.HasPrefix(p.Detail, "workspace quota exceeded after execution") {
		r.Errorf("%+v", p)
	}
	if res := p.Result; res == nil || res.Status != "completed" || res.ExitCode == nil || *res.ExitCode != 5 || res.Stdout != "out\n" || res.Stderr != "err\n" || res.SessionID != sb.SessionID {
		r.Errorf("the result: %+v", p.Result)
	}
	if c, err := r.s.rt.Inspect(r.ctx, sb.ContainerID); err == nil && c.Pid != 0 {
		r.Errorf("the container runs: %+v", c)
	}
	if now := r.get(); now.Status != "stopped" || now.SessionID != sb.SessionID {
		r.Errorf("%+v", now)
	}
	if info, err := os.Stat(dir + "/much"); err != nil || info.Size() != 2*mebibyte || readString(r.T, dir+"/little") != "kept" {
		r.Errorf("the files: %v", err)
	}
	_, err = r.c.Exec(r.ctx, r.key, apitype.ExecRequest{Command: shell("rm /workspace/much")})
	r.wantError(err, http.StatusInsufficientStorage, "quota_exceeded")
	// A files call frees space; one that adds is refused.
	_, err = r.c.WriteFile(r.ctx, r.key, "/workspace/more", strings.NewReader("x"), client.WriteOptions{})
	r.wantError(err, http.StatusInsufficientStorage, "quota_exceeded")
	if err := r.c.RemoveFile(r.ctx, r.key, "/workspace/much", false); err != nil {
		r.Fatal(err)
	}
	if got := r.sh("cat /workspace/little"); got != "kept" || exists(dir+"/much") || exists(dir+"/more") {
		r.Errorf("afterwards: %q", got)
	}
}

// Without a workspace there is nothing to count.
func quotaWithoutMount(r *boxRow) {
	sb := r.create(apitype.SandboxRequest{WorkspaceQuotaMB: new(int64(1))})
	r.sh("dd if=/dev/zero of=/tmp/much bs=1M count=4")
	r.sh("echo fine")
	if sb.Enforcement.WorkspaceQuota != "" {
		r.Errorf("what is said to be enforced: %+v", sb.Enforcement)
	}
}

// quotaBounded has more in the workspace than is ever counted, though none of it takes
// room: that is as if it were full.
func quotaBounded(r *boxRow) {
	const each, places = 20_000, 51 // together over a million
	dir := r.makeDir(r, "roots", "root", r.key)
	crowd := r.makeDir(r, "roots", "root", r.key, "crowd")
	r.limited(dir)
	r.sh("echo there is room")
	// All of it goes with the file system in which it is.
	if err := unix.Mount("none", crowd, "tmpfs", 0, ""); err != nil {
		r.Fatal(err)
	}
	part := filepath.Join(crowd, "part")
	unmount := sync.OnceFunc(func() {
		if err := unix.Unmount(crowd, unix.MNT_DETACH); err != nil {
			r.Error(err)
		}
	})
	r.Cleanup(unmount)
	if err := errors.Join(unix.Mount("", crowd, "", unix.MS_PRIVATE, ""), os.Mkdir(part, 0o755), unix.Mkfifo(part+"/0", 0o600)); err != nil {
		r.Fatal(err)
	}
	for i := 1; i < each; i++ {
		if err := os.Link(part+"/0", fmt.Sprint(part, "/", i)); err != nil {
			r.Fatal(err)
		}
	}
	r.sh("echo so much can be counted")
	for i := 1; i < places; i++ {
		place := fmt.Sprint(part, i)
		if err := errors.Join(os.Mkdir(place, 0o755), unix.Mount(part, place, "", unix.MS_BIND, "")); err != nil {
			r.Fatal(err)
		}
	}
	_, err := r.c.Exec(r.ctx, r.key, apitype.ExecRequest{Command: shell("touch /extra/ran")})
	r.wantError(err, http.StatusInsufficientStorage, "quota_exceeded")
	if exists(filepath.Join(r.root, r.key+"-extra", "ran")) {
		r.Error("it was started")
	}
	unmount()
	r.sh("echo there is room again")
}

// quotaInMotion has a workspace change while it is measured: what vanishes is nothing.
func quotaInMotion(r *boxRow) {
	dir := r.makeDir(r, "roots", "root", r.key)
	r.limited(dir)
	var stop atomic.Bool
	var mover sync.WaitGroup
	mover.Go(func() {
		for i := 0; !stop.Load(); i++ {
			below := fmt.Sprint(dir, "/", i%8)
			if err := errors.Join(os.MkdirAll(below, 0o755), os.WriteFile(below+"/file", []byte("x"), 0o600), os.RemoveAll(below)); err != nil {
				r.Error(err)
				return
			}
		}
	})
	for range 10 {
		r.sh("echo there is room")
	}
	stop.Store(true)
	mover.Wait()
}
