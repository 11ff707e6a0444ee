package e2e

import (
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/proxy/apitype"
	"github.com/bermhq/berm/proxy/client"
)

// What of the host may be mounted.
var boxMounts = []boxCase{
	{"allowed roots", mountRoots},
	{"shared root", mountShared},
	{"disabled", mountDisabled},
	{"default workspace", mountDefault},
	{"default workspace outside", mountDefaultOutside},
	{"links", mountLinks},
	{"swapped link", mountSwappedLink},
	{"swapped directory", mountSwappedDir},
	{"always refused", mountAlwaysRefused},
	{"denials", mountDenials},
}

func hostPath(path string) string { return `{"host_path": ` + asJSON(path) + `}` }

func mountRoots(r *boxRow) {
	below := r.makeDir(r, "roots", "root", r.key, "deep", "below")
	r.makeDir(r, "roots", "root-beside")
	write(r.T, filepath.Join(below, "file"), "")
	for name, dir := range map[string]string{"root": r.root, "below": below} {
		x := r.on(r.main, name)
		x.create(apitype.SandboxRequest{HostPath: &dir})
		x.wantMounted("/workspace", dir)
	}
	r.wantRefused(hostPath(filepath.Dir(r.root)), 403, "mounts.allowed_roots", "host_path")                    // above
	r.wantRefused(hostPath(r.root+"-beside"), 403, "mounts.allowed_roots", "host_path")                        // spelled alike
	r.wantRefused(hostPath(r.root+"/../root-beside"), 403, "mounts.allowed_roots", "host_path")                // by dots
	r.wantRefused(hostPath("/no/such/place"), 403, "mounts.allowed_roots", "host_path")                        // neither there nor allowed
	r.wantRefused(hostPath(filepath.Join(below, "file")), 403, "mounts.not_a_directory", "host_path")          // a file
	r.wantRefused(hostPath(filepath.Join(below, "file", "below")), 403, "mounts.not_a_directory", "host_path") // below a file
	r.wantRefused(hostPath(filepath.Join(below, "none")), 403, "mounts.not_a_directory", "host_path")
	if exists(filepath.Join(below, "none")) {
		r.Error("a directory that is missing was made")
	}
	r.wantNone()
}

// Without allowed roots, the shared root is the one.
func mountShared(r *boxRow) {
	dir := r.makeDir(r, "shared-root", r.key)
	x, refused := r.on(r.shared, "below"), r.on(r.shared, "refused")
	x.create(apitype.SandboxRequest{HostPath: &dir})
	x.wantMounted("/workspace", dir)
	refused.wantRefused(hostPath(r.root), 403, "mounts.allowed_roots", "host_path")
	refused.wantNone()
}

func mountDisabled(r *boxRow) {
	x := r.on(r.bare, "disabled")
	for _, dir := range []string{r.root, "/srv", "/no/such"} {
		x.wantRefused(hostPath(dir), 403, "mounts.disabled", "host_path")
		x.wantRefused(`{"extra_mounts": [{"host_path": `+asJSON(dir)+`, "mount_path": "/x"}]}`, 403, "mounts.disabled", "extra_mounts[0].host_path")
	}
	_, err := x.c.Create(r.ctx, x.key, apitype.SandboxRequest{HostPath: &r.root})
	if p := x.wantError(err, http.StatusForbidden, "policy_denied"); !strings.Contains(p.Detail, "host mounts are disabled") {
		r.Errorf("%+v", p)
	}
	x.wantNone()
}

// The default workspace is made at the start.
func mountDefault(r *boxRow) {
	dir := filepath.Join(r.dir, "shared-root", "default")
	if info, err := os.Stat(dir); err != nil || !info.IsDir() {
		r.Fatalf("the default workspace: %v", err)
	}
	x := r.on(r.shared, "default")
	if sb := x.create(apitype.SandboxRequest{}); sb.Spec.HostPath != dir || x.sh("pwd") != "/workspace" {
		r.Errorf("%+v", sb.Spec)
	}
	x.wantMounted("/workspace", dir)

	configured := filepath.Join(r.dir, "wide-default", "made")
	x = r.on(r.wide, "configured")
	x.create(apitype.SandboxRequest{})
	x.wantMounted("/workspace", configured)

	unmade := filepath.Join(r.root, r.key, "default")
	r.serveEnds("mounts: {allowed_roots: ["+r.root+"], default_workspace: "+unmade+"}\nprofiles: {mine: {extends: nosuch}}\n", "there is no profile")
	if exists(unmade) {
		r.Error("it was made for a policy that is refused")
	}
}

// mountDefaultOutside starts servers whose default workspace isn't under an allowed root.
func mountDefaultOutside(r *boxRow) {
	outside := filepath.Join(r.dir, "outside-"+r.key)
	if err := errors.Join(os.Mkdir(outside, 0o755), os.Symlink(outside, filepath.Join(r.root, r.key+"-out"))); err != nil {
		r.Fatal(err)
	}
	for _, dir := range []string{outside + "/made", r.root + "/../../outside-" + r.key + "/made", r.root + "/" + r.key + "-out/made", "/etc/made"} {
		r.serveEnds("mounts: {allowed_roots: ["+r.root+"], default_workspace: "+dir+"}\n", "the default workspace can't be")
	}
	if entries, err := os.ReadDir(outside); err != nil || len(entries) > 0 || exists("/etc/made") {
		r.Errorf("made: %v, %v", entries, err)
	}
}

// serveEnds starts a server whose policy is refused, for a reason.
func (r *boxRow) serveEnds(policy, why string) {
	r.Helper()
	dir, err := os.MkdirTemp(r.dir, "refused-")
	if err != nil {
		r.Fatal(err)
	}
	file := filepath.Join(dir, "policy.yaml")
	write(r.T, file, "version: 1\n"+policy)
	serve := exec.CommandContext(r.ctx, bin, "serve", "--listen", "127.0.0.1:0", "--state-dir", filepath.Join(dir, "state"), "--policy", file)
	serve.Env = append(os.Environ(), r.e.config.env()...)
	if out, err := serve.CombinedOutput(); err == nil || r.ctx.Err() != nil || !strings.Contains(string(out), why) {
		r.Errorf("%s: %v: %s", policy, err, out)
	}
}

// What is mounted is what a path led to when it was judged.
func mountLinks(r *boxRow) {
	base := r.makeDir(r, "roots", "root", r.key)
	a, b := r.makeDir(r, "roots", "root", r.key, "a"), r.makeDir(r, "roots", "root", r.key, "b")
	out := r.makeDir(r, "outside-"+r.key)
	in, away, etc, loop := base+"/in", base+"/away", base+"/etc", base+"/loop"
	if err := errors.Join(os.Symlink(a, in), os.Symlink(out, away), os.Symlink("/etc", etc), os.Symlink("loop", loop)); err != nil {
		r.Fatal(err)
	}
	r.create(apitype.SandboxRequest{HostPath: &in})
	r.wantMounted("/workspace", a)
	if err := errors.Join(os.Remove(in), os.Symlink(b, in)); err != nil {
		r.Fatal(err)
	}
	r.wantMounted("/workspace", a)
	_, err := r.c.Create(r.ctx, r.key, apitype.SandboxRequest{HostPath: &in}) // which is another directory by now
	if p := r.wantError(err, http.StatusConflict, "sandbox_conflict"); len(p.Differences) != 1 || p.Differences[0].Current != a || p.Differences[0].Requested != b {
		r.Errorf("%+v", p.Differences)
	}
	x := r.on(r.main, "refused")
	x.wantRefused(hostPath(away), 403, "mounts.allowed_roots", "host_path")
	x.wantRefused(hostPath(etc), 403, "mounts.always_refused", "host_path")
	x.wantRefused(hostPath(etc+"/ssl"), 403, "mounts.always_refused", "host_path")
	x.wantRefused(hostPath(loop), 403, "mounts.not_a_directory", "host_path")
	_, err = r.c.Create(r.ctx, x.key, apitype.SandboxRequest{HostPath: &away})
	if p := r.wantError(err, http.StatusForbidden, "policy_denied"); strings.Contains(fmt.Sprint(p), out) {
		r.Errorf("the answer says where the link leads: %+v", p)
	}
	x.wantNone()
	x.create(apitype.SandboxRequest{HostPath: new(away + "/../a")}) // which is cleaned before links are followed
	x.wantMounted("/workspace", a)
}

// swap exchanges two names again and again, and creates sandboxes of one of them
// meanwhile: each has the directory with the file allowed in it, or is refused.
func (r *boxRow) swap(path, evil string) {
	var stop atomic.Bool
	var swapper sync.WaitGroup
	swapper.Go(func() {
		for !stop.Load() {
			if err := unix.Renameat2(unix.AT_FDCWD, path, unix.AT_FDCWD, evil, unix.RENAME_EXCHANGE); err != nil {
				r.Error(err)
				return
			}
		}
	})
	made, refused := 0, 0
	for i := 0; made < 4 && i < 100; i++ { // of those made, half would have the wrong one
		x := r.on(r.main, fmt.Sprint(i))
		sb, err := x.c.Create(r.ctx, x.key, apitype.SandboxRequest{HostPath: &path})
		var no *client.Error
		switch {
		case err == nil:
			made++
			if got := x.sh("ls /workspace"); got != "allowed" || sb.Enforcement.Mounts != "held" {
				r.Errorf("the sandbox has %q, %s", got, sb.Enforcement.Mounts)
			}
		case errors.As(err, &no) && (no.Status == http.StatusForbidden || no.Code == "sandbox_start_failed"):
			refused++
		default:
			r.Errorf("%v", err)
		}
		if _, err := x.c.Delete(r.ctx, x.key); err != nil {
			r.Error(err)
		}
	}
	stop.Store(true)
	swapper.Wait()
	r.Logf("%d made, %d refused", made, refused)
}

func (r *boxRow) swapped() (base string) {
	base = r.makeDir(r, "roots", "root", r.key)
	write(r.T, filepath.Join(r.makeDir(r, "roots", "root", r.key, "good"), "allowed"), "")
	write(r.T, filepath.Join(r.makeDir(r, "outside-"+r.key), "secret"), "")
	return base
}

func mountSwappedLink(r *boxRow) {
	base := r.swapped()
	if err := errors.Join(os.Symlink("good", base+"/link"), os.Symlink(filepath.Join(r.dir, "outside-"+r.key), base+"/evil")); err != nil {
		r.Fatal(err)
	}
	r.swap(base+"/link", base+"/evil")
}

func mountSwappedDir(r *boxRow) {
	base := r.swapped()
	if err := os.Symlink(filepath.Join(r.dir, "outside-"+r.key), base+"/evil"); err != nil {
		r.Fatal(err)
	}
	r.swap(base+"/good", base+"/evil")
}

// mountAlwaysRefused asks a server that allows all of the fixture's directory for them.
func mountAlwaysRefused(r *boxRow) {
	x := r.on(r.wide, "refused")
	refused := []string{
		"/", "/etc", "/etc/ssl", "/proc", "/proc/1", "/sys", "/sys/fs/cgroup", "/dev", "/dev/shm", "/root", "/boot", "/run", "/run/lock", "/var/run",
		"/var/lib/docker", "/var/lib/docker/x", "/var/lib/containerd", "/var", "/var/lib", "//etc/", "/usr/../etc", "/./", "/tmp/../run",
		r.wide.stateDir(), filepath.Dir(r.wide.stateDir()),
	}
	socket := strings.TrimPrefix(r.e.config.Address, "unix://")
	for _, path := range append(refused, socket, filepath.Dir(socket)) {
		x.wantRefused(hostPath(path), 403, "mounts.always_refused", "host_path")
		x.wantRefused(`{"extra_mounts": [{"host_path": `+asJSON(path)+`, "mount_path": "/x"}]}`, 403, "mounts.always_refused", "extra_mounts[0].host_path")
	}
	x.wantNone()
	dir := r.makeDir(r, "anywhere-"+r.key)
	x.create(apitype.SandboxRequest{HostPath: &dir})
	x.wantMounted("/workspace", dir)
}

// Every denial names the path, the rule, and what would be allowed; all of them at once.
func mountDenials(r *boxRow) {
	_, err := r.c.Create(r.ctx, r.key, apitype.SandboxRequest{HostPath: new("/srv/secret"), Network: new("nosuch"), ExtraMounts: []apitype.MountRequest{
		{HostPath: "/etc", MountPath: "/etc2"}, {HostPath: r.root + "/none", MountPath: "/none"},
	}})
	p := r.wantError(err, http.StatusForbidden, "policy_denied")
	var rules []string
	for _, reason := range p.Reasons {
		rules = append(rules, reason.Rule)
		if !strings.Contains(reason.Message, reason.Value) || !strings.Contains(p.Detail, reason.Message) ||
			reason.Field != "network" && !strings.Contains(reason.Allowed, r.root) {
			r.Errorf("%+v", reason)
		}
	}
	if want := []string{"networks.unknown", "mounts.allowed_roots", "mounts.always_refused", "mounts.not_a_directory"}; !slices.Equal(rules, want) {
		r.Errorf("rules %v, want %v", rules, want)
	}
	r.wantNone()
}
