package e2e

import (
	"fmt"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/bermhq/berm/proxy/apitype"
)

// What a sandbox can be asked to be.
var boxSpecs = []boxCase{
	{"key", specKey},
	{"image", specImage},
	{"network", specNetwork},
	{"host_path", specHostPath},
	{"host_path_mode", specHostPathMode},
	{"mount_path", specMountPath},
	{"extra_mounts", specExtraMounts},
	{"cpus", specCPUs},
	{"memory_mb", specMemory},
	{"pids_limit", specPids},
	{"read_only_rootfs", specReadOnly},
	{"workspace_quota_mb", specQuota},
	{"env", specEnv},
	{"ttl", specTTL},
	{"end", specEnd},
	{"working directory below a mount", specCwdMounted},
	{"working directory without a mount", specCwdFree},
}

func specKey(r *boxRow) {
	long := strings.Repeat("k", 128)
	for sent, key := range map[string]string{"%20%09" + r.key + "-spaced%0A%20": r.key + "-spaced", long: long, "9" + r.key + "._:-A": "9" + r.key + "._:-A"} {
		x := r.s.sandbox(r.ctx, r.T, key)
		if status, answer := r.raw(http.MethodPut, sent, "{}"); status != http.StatusCreated || answer["key"] != key {
			r.Errorf("%q: %d %v", sent, status, answer)
		}
		if x.sh("echo in") != "in" {
			r.Errorf("there is no sandbox %q", key)
		}
	}
	for _, key := range []string{"-a", "_a", ".a", ":a", "a b", "a\x00", "é", "a\nb", " ", long + "k", "a?b", "a%b"} {
		if status, answer := r.raw(http.MethodPut, url.PathEscape(key), "{}"); status != http.StatusUnprocessableEntity || answer["code"] != "validation" {
			r.Errorf("%q: %d %v", key, status, answer)
		}
	}
	if status, answer := r.raw(http.MethodPut, "a%2Fb", "{}"); status != http.StatusBadRequest {
		r.Errorf("a slash: %d %v", status, answer)
	}
}

func specImage(r *boxRow) {
	own, x := r.on(r.bare, "default"), r.on(r.main, "other")
	if sb := own.create(apitype.SandboxRequest{}); sb.Spec.Image != "python:3.11-slim" || own.sh("echo $WHICH") != "default" {
		r.Errorf("without an image: %+v", sb.Spec)
	}
	if sb := x.create(apitype.SandboxRequest{Image: new("berm.local/other:1")}); sb.Spec.Image != otherImage || x.sh("echo $WHICH") != "other" {
		r.Errorf("with an image: %+v", sb.Spec)
	}
	if sb := r.create(apitype.SandboxRequest{Image: new("")}); sb.Spec.Image != testImage || r.sh("echo $WHICH") != "" {
		r.Errorf("the server's image: %+v", sb.Spec)
	}
}

func specNetwork(r *boxRow) {
	for name, want := range map[string][]string{"": {"lo"}, "off": {"lo"}, "on": {"eth0", "lo"}, "lab": {"eth0", "lo"}} {
		x := r.on(r.main, "net"+name)
		sb := x.create(apitype.SandboxRequest{Network: &name})
		got := x.interfaces()
		slices.Sort(got)
		if !slices.Equal(slices.DeleteFunc(got, tunnel), want) {
			r.Errorf("network %q: interfaces %v, want %v", name, got, want)
		}
		if name == "" {
			name = "off"
		}
		if sb.Spec.Network != name || (sb.Endpoint != nil) != (len(want) == 2) {
			r.Errorf("network %q: %+v", name, sb)
		}
		if sb.Endpoint != nil && !strings.Contains(x.sh("ip -4 addr show eth0"), "inet "+sb.Endpoint.IP+"/") {
			r.Errorf("network %q: the sandbox hasn't the address %s", name, sb.Endpoint.IP)
		}
	}
}

// tunnel reports whether an interface is one that some kernels have in every network namespace.
func tunnel(name string) bool { return name != "lo" && name != "eth0" }

func specHostPath(r *boxRow) {
	dir := r.makeDir(r, "roots", "root", r.key, "dir")
	r.makeDir(r, "roots", "root", r.key, "other")
	link := filepath.Join(r.root, r.key, "link")
	if err := os.Symlink("dir", link); err != nil {
		r.Fatal(err)
	}
	write(r.T, filepath.Join(dir, "file"), "here")
	for asked, shown := range map[string]string{filepath.Dir(dir) + "//other/../dir/./": dir, link: link} {
		x := r.on(r.main, filepath.Base(shown))
		sb := x.create(apitype.SandboxRequest{HostPath: &asked})
		if sb.Spec.HostPath != shown || sb.Spec.HostPathMode != "rw" || x.sh("cat /workspace/file") != "here" {
			r.Errorf("%s: %+v", asked, sb.Spec)
		}
		x.wantMounted("/workspace", dir)
	}
	none := r.on(r.main, "none")
	if status, answer := none.raw(http.MethodPut, none.key, `{"host_path": null}`); status != http.StatusCreated || none.mountOptions("/workspace") != "" {
		r.Errorf("null: %d %v", status, answer)
	}
	for i, body := range []string{`{"host_path": null}`, `{"host_path": ""}`} { // left out: see mountDefault
		x := r.on(r.shared, fmt.Sprint("default", i))
		if status, answer := x.raw(http.MethodPut, x.key, body); status != http.StatusCreated {
			r.Errorf("%s: %d %v", body, status, answer)
		}
		x.wantMounted("/workspace", filepath.Join(r.dir, "shared-root", "default"))
	}
}

func specHostPathMode(r *boxRow) {
	dir := r.makeDir(r, "roots", "root", r.key)
	file := filepath.Join(dir, "file")
	for _, mode := range []string{"", "rw", "ro", "none"} {
		x := r.on(r.main, "mode"+mode)
		req := apitype.SandboxRequest{HostPath: &dir, HostPathMode: &mode}
		if mode == "none" {
			req.ExtraMounts = []apitype.MountRequest{{HostPath: dir, MountPath: "/extra"}}
		}
		sb := x.create(req)
		switch mode {
		case "none":
			o := slices.IndexFunc(sb.Overridden, func(o apitype.Override) bool { return o.Field == "host_path" })
			if x.mountOptions("/workspace")+x.mountOptions("/extra") != "" || sb.Spec.HostPath != "" || o < 0 || len(sb.Overridden) != 2 {
				r.Errorf("none: %+v", sb)
			}
		case "ro":
			x.fails("touch /workspace/file")
			x.fails("mount -o remount,rw /workspace; touch /workspace/file")
			if exists(file) || !strings.HasPrefix(x.mountOptions("/workspace"), "ro,") {
				r.Errorf("ro: %s", x.mountOptions("/workspace"))
			}
		default:
			x.sh("touch /workspace/file")
			if !exists(file) || sb.Spec.HostPathMode != "rw" {
				r.Errorf("mode %q: %+v", mode, sb.Spec)
			}
			_ = os.Remove(file)
		}
	}
}

func specMountPath(r *boxRow) {
	dir := r.makeDir(r, "roots", "root", r.key)
	for asked, want := range map[string]string{"": "/workspace", "/data/../srv//work/./x/": "/srv/work/x"} {
		x := r.on(r.main, filepath.Base(want))
		sb := x.create(apitype.SandboxRequest{HostPath: &dir, MountPath: &asked})
		x.wantMounted(want, dir)
		if sb.Spec.MountPath != want || x.sh("pwd") != want {
			r.Errorf("%q: %+v", asked, sb.Spec)
		}
	}
}

func specExtraMounts(r *boxRow) {
	a, b, c := r.makeDir(r, "roots", "root", r.key, "a"), r.makeDir(r, "roots", "root", r.key, "b"), r.makeDir(r, "roots", "root", r.key, "c")
	sb := r.create(apitype.SandboxRequest{HostPath: &a, ExtraMounts: []apitype.MountRequest{
		{HostPath: b, MountPath: "/b", Mode: "rw"}, {HostPath: c + "/../c", MountPath: "/c"},
	}})
	if want := []apitype.Mount{{HostPath: b, MountPath: "/b", Mode: "rw"}, {HostPath: c, MountPath: "/c", Mode: "ro"}}; !slices.Equal(sb.Spec.ExtraMounts, want) {
		r.Errorf("extra mounts %+v", sb.Spec.ExtraMounts)
	}
	r.wantMounted("/workspace", a)
	r.wantMounted("/b", b)
	r.wantMounted("/c", c)
	r.sh("touch /b/file")
	r.fails("touch /c/file")
	if !exists(b+"/file") || exists(c+"/file") {
		r.Error("the modes aren't as asked for")
	}
}

func specCPUs(r *boxRow) {
	x := r.on(r.main, "quarter")
	if sb := r.create(apitype.SandboxRequest{}); sb.Spec.CPUs != 1 || r.limits().cpus != 1 {
		r.Errorf("%+v, %+v", sb.Spec, r.limits())
	}
	if sb := x.create(apitype.SandboxRequest{CPUs: new(0.25)}); sb.Spec.CPUs != 0.25 || x.limits().cpus != 0.25 {
		r.Errorf("%+v, %+v", sb.Spec, x.limits())
	}
}

func specMemory(r *boxRow) {
	x := r.on(r.main, "least")
	if sb := r.create(apitype.SandboxRequest{}); sb.Spec.MemoryMB != 512 || r.limits().memoryMB != 512 {
		r.Errorf("%+v, %+v", sb.Spec, r.limits())
	}
	if sb := x.create(apitype.SandboxRequest{MemoryMB: new(int64(32))}); sb.Spec.MemoryMB != 32 || x.limits().memoryMB != 32 || x.sh("echo lives") != "lives" {
		r.Errorf("%+v, %+v", sb.Spec, x.limits())
	}
}

func specPids(r *boxRow) {
	x := r.on(r.main, "few")
	if sb := r.create(apitype.SandboxRequest{}); sb.Spec.PidsLimit != 128 || r.limits().pids != 128 {
		r.Errorf("%+v, %+v", sb.Spec, r.limits())
	}
	if sb := x.create(apitype.SandboxRequest{PidsLimit: new(int64(40))}); sb.Spec.PidsLimit != 40 || x.limits().pids != 40 {
		r.Errorf("%+v, %+v", sb.Spec, x.limits())
	}
	// It holds: a shell that can't fork ends, and what it had started goes on.
	res := x.exec(apitype.ExecRequest{Command: shell("i=0; while test $i -lt 60; do sleep 30 & i=$((i+1)); done; echo all"), Timeout: apitype.SecondsOf(20)})
	if strings.Contains(res.Stdout, "all") {
		r.Errorf("60 processes under a limit of 40: %+v", res)
	}
}

func specReadOnly(r *boxRow) {
	x := r.on(r.main, "writable")
	if sb := r.create(apitype.SandboxRequest{}); !sb.Spec.ReadOnlyRootfs || sb.Spec.TmpfsMB != 64 {
		r.Errorf("%+v", sb.Spec)
	}
	r.fails("touch /file")
	r.fails("echo x > /bin/sh")
	if got := r.mountOptions("/tmp"); !strings.Contains(got, " tmpfs ") || !strings.Contains(got, "size=65536k") {
		r.Errorf("/tmp is %q", got)
	}
	r.sh("dd if=/dev/zero of=/tmp/most bs=1M count=60")
	r.fails("dd if=/dev/zero of=/tmp/more bs=1M count=10")
	if sb := x.create(apitype.SandboxRequest{ReadOnlyRootfs: new(false)}); sb.Spec.ReadOnlyRootfs || sb.Spec.TmpfsMB != 0 {
		r.Errorf("%+v", sb.Spec)
	}
	if got := x.mountOptions("/tmp"); got != "" {
		r.Errorf("with a writable root, /tmp is %q", got)
	}
	if x.sh("echo written > /file; cat /file") != "written" || !exists(x.inside("/file")) {
		r.Error("a writable root isn't")
	}
	r.on(r.main, "refused").wantRefused(`{"read_only_rootfs": "true"}`, 422, "", "")
}

func specQuota(r *boxRow) {
	dir := r.makeDir(r, "roots", "root", r.key)
	sb := r.create(apitype.SandboxRequest{HostPath: &dir})
	if sb.Spec.WorkspaceQuotaMB != 0 || sb.Enforcement.WorkspaceQuota != "" {
		r.Errorf("without a quota: %+v", sb)
	}
	r.sh("dd if=/dev/zero of=/workspace/much bs=1M count=8")
	r.sh("echo unlimited")
}

func specEnv(r *boxRow) {
	const hush = "c3ntry"
	sb := r.create(apitype.SandboxRequest{Env: map[string]string{"_a1": hush, "Z": "a b=c\nd", "PINNED": "mine", "EMPTY": ""}})
	if want := []string{"EMPTY", "PINNED", "Z", "_a1"}; !slices.Equal(sb.Spec.EnvNames, want) {
		r.Errorf("names %v", sb.Spec.EnvNames)
	}
	if len(sb.Overridden) != 1 || sb.Overridden[0].Rule != "env.pin" {
		r.Errorf("overridden: %+v", sb.Overridden)
	}
	if got := r.sh(`echo "$_a1|$Z|$PINNED|${EMPTY-unset}"`); got != hush+"|a b=c\nd|by-policy|" {
		r.Errorf("the sandbox has %q", got)
	}
	res := r.exec(apitype.ExecRequest{Command: shell(`echo "$_a1|$Z|$PINNED"`), Env: map[string]string{"Z": "own", "PINNED": "mine"}})
	if res.Stdout != hush+"|own|by-policy\n" || len(res.Overridden) != 1 || res.Overridden[0].Rule != "env.pin" {
		r.Errorf("a command's: %+v", res)
	}
	if _, answer := r.raw(http.MethodGet, r.key, ""); strings.Contains(fmt.Sprint(answer), hush) {
		r.Errorf("a value is shown: %v", answer)
	}
	x := r.on(r.main, "refused")
	for _, name := range []string{"", "1A", "A-B", "A B", "A=B", "é", "A\x00"} {
		x.wantRefused(fmt.Sprintf(`{"env": {%s: "x"}}`, asJSON(name)), 422, "env.syntax", "env."+shownName(name))
	}
	x.wantRefused(`{"env": {"A": "\u0000"}}`, 422, "env.syntax", "env.A")
	x.wantRefused(`{"env": {"BERM_X": "x"}}`, 403, "env.reserved", "env.BERM_X")
	x.wantRefused(`{"env": {"DENIED_X": "x"}}`, 403, "env.deny", "env.DENIED_X")
	x.wantRefused(`{"env": ["A=x"]}`, 422, "", "")
	x.wantNone()
	_, err := r.c.Exec(r.ctx, r.key, apitype.ExecRequest{Command: shell("touch /tmp/ran"), Env: map[string]string{"DENIED_X": hush}})
	if p := r.wantError(err, http.StatusForbidden, "policy_denied"); strings.Contains(fmt.Sprint(p), hush) || exists(r.inside("/tmp/ran")) {
		r.Errorf("%+v", p)
	}
}

func specTTL(r *boxRow) {
	sb := r.create(apitype.SandboxRequest{})
	if sb.ExpiresAt.Sub(sb.CreatedAt) != time.Hour || sb.IdleExpiresAt != nil || sb.Deadline.Sub(sb.CreatedAt) != 24*time.Hour {
		r.Errorf("left out: %+v", sb)
	}
	x := r.on(r.shared, "own")
	sb = x.create(apitype.SandboxRequest{TTL: new(apitype.Duration(30 * time.Minute)), IdleTTL: new(apitype.Duration(5 * time.Minute))})
	if sb.ExpiresAt.Sub(sb.CreatedAt) != 30*time.Minute || sb.IdleExpiresAt == nil || sb.IdleExpiresAt.Sub(sb.LastUsedAt) != 5*time.Minute || sb.Deadline.Sub(sb.CreatedAt) != 2*time.Hour {
		r.Errorf("given: %+v", sb)
	}
	renewed, err := x.c.Renew(r.ctx, x.key, time.Hour)
	if err != nil || renewed.ExpiresAt.Sub(sb.CreatedAt) < time.Hour || renewed.ExpiresAt.After(time.Now().Add(time.Hour)) {
		r.Errorf("renewed: %+v, %v", renewed, err)
	}
	if renewed, err = x.c.Renew(r.ctx, x.key, 50*time.Hour); err != nil || !renewed.ExpiresAt.Equal(sb.Deadline) {
		r.Errorf("renewed past the deadline: %+v, %v", renewed, err)
	}
	much := r.on(r.shared, "much")
	sb = much.create(apitype.SandboxRequest{TTL: new(apitype.Duration(3 * time.Hour))})
	if !sb.ExpiresAt.Equal(sb.Deadline) || sb.Deadline.Sub(sb.CreatedAt) != 2*time.Hour || len(sb.Overridden) != 1 || sb.Overridden[0].Rule != "ttl.max_lifetime" {
		r.Errorf("more than may be: %+v", sb)
	}
}

// A sandbox ends at expires_at, whatever runs in it.
func specEnd(r *boxRow) {
	sb := r.create(apitype.SandboxRequest{TTL: new(apitype.Duration(2 * time.Second)), Env: map[string]string{"BOX_MARK": r.key}})
	if _, err := r.c.StartExec(r.ctx, r.key, apitype.ExecRequest{Command: apitype.Command{"sleep", "300"}}); err != nil {
		r.Log(err) // on a machine so busy that it has ended already
	}
	until(r, "the container to go", func() bool {
		_, err := r.s.rt.Inspect(r.ctx, sb.ContainerID)
		return err != nil && len(r.marked("BOX_MARK", r.key)) == 0
	})
	if time.Now().Before(sb.ExpiresAt) {
		r.Errorf("it ended before %s", sb.ExpiresAt)
	}
	until(r, "the sandbox to be gone", func() bool {
		_, err := r.c.Get(r.ctx, r.key)
		return err != nil
	})
	r.wantNone()
}

func specCwdMounted(r *boxRow) {
	dir := r.makeDir(r, "roots", "root", r.key)
	r.create(apitype.SandboxRequest{HostPath: &dir})
	for cwd, want := range map[string]string{
		"": "/workspace", "/workspace": "/workspace", "/workspace/": "/workspace", "/workspace/new/deep": "/workspace/new/deep",
		"/workspace/a/../b": "/workspace/b", "/etc/../workspace/c": "/workspace/c",
	} {
		if res := r.exec(apitype.ExecRequest{Command: apitype.Command{"pwd"}, Cwd: cwd}); res.Stdout != want+"\n" {
			r.Errorf("%q: %+v", cwd, res)
		}
	}
	if !exists(dir + "/new/deep") {
		r.Error("a working directory that is missing isn't made")
	}
	for _, cwd := range []string{"/workspace/../etc", "/workspacex", "/", "/tmp", "/workspace/../workspacex"} {
		_, err := r.c.Exec(r.ctx, r.key, apitype.ExecRequest{Command: shell("touch /workspace/ran"), Cwd: cwd})
		if p := r.wantError(err, http.StatusForbidden, "policy_denied"); len(p.Reasons) != 1 || p.Reasons[0].Rule != "cwd.outside_mount" {
			r.Errorf("%q: %+v", cwd, p)
		}
		_, err = r.c.StartProcess(r.ctx, r.key, apitype.ProcessRequest{Command: "touch", Args: []string{"/workspace/ran"}, Cwd: cwd})
		r.wantError(err, http.StatusForbidden, "policy_denied")
	}
	for _, cwd := range []string{"workspace", ".", "/workspace/\x00"} {
		_, err := r.c.Exec(r.ctx, r.key, apitype.ExecRequest{Command: shell("touch /workspace/ran"), Cwd: cwd})
		r.wantError(err, http.StatusUnprocessableEntity, "validation")
	}
	if exists(dir + "/ran") {
		r.Error("a command ran in a directory that was refused")
	}
}

func specCwdFree(r *boxRow) {
	dir := r.makeDir(r, "roots", "root", r.key)
	for name, req := range map[string]apitype.SandboxRequest{"without": {}, "none": {HostPath: &dir, HostPathMode: new("none")}} {
		x := r.on(r.main, name)
		x.create(req)
		for _, cwd := range []string{"/", "/etc", "/workspacex/../tmp", "/tmp/new/deep", "/usr/../bin"} {
			if res := x.exec(apitype.ExecRequest{Command: apitype.Command{"pwd"}, Cwd: cwd}); res.Stdout != filepath.Clean(cwd)+"\n" {
				r.Errorf("%s, %q: %+v", name, cwd, res)
			}
		}
		if !exists(x.inside("/tmp/new/deep")) {
			r.Errorf("%s: a working directory that is missing isn't made", name)
		}
	}
	x := r.on(r.main, "writable")
	x.create(apitype.SandboxRequest{ReadOnlyRootfs: new(false)})
	if res := x.exec(apitype.ExecRequest{Command: apitype.Command{"pwd"}, Cwd: "/made/here"}); res.Stdout != "/made/here\n" {
		r.Errorf("in a writable root: %+v", res)
	}
}
