package e2e

import (
	"net/http"
	"os"
	"path/filepath"
	"strings"

	"github.com/bermhq/berm/proxy/apitype"
	"github.com/bermhq/berm/proxy/client"
)

// How much a workspace may hold.
var boxQuotas = []boxCase{
	{"before a command", quotaBefore},
	{"after a command", quotaAfterCommand},
	{"without a mount", quotaWithoutMount},
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
