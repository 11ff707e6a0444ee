package e2e

import (
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/proxy/apitype"
)

var boxCases = []boxCase{
	{"can't be killed", false, boxNotKilled}, // first, as it waits long
	{"stopped process", false, boxStop},
	{"keys", false, boxKeys},
	{"full", false, boxFull},
	{"spec", true, boxSpec},
	{"end", true, boxEnd},
	{"links", true, boxLinks},
	{"swapped link", true, boxSwappedLink},
	{"swapped directory", true, boxSwappedDir},
}

// boxSpec asks for a value in each field of a sandbox.
func boxSpec(r *boxRow) {
	dir, rw, ro := r.own("dir"), r.own("rw"), r.own("ro")
	write(r.T, filepath.Join(dir, "file"), "here")
	link := filepath.Join(r.root, r.key, "link")
	must(r, os.Symlink("dir", link))
	sb := r.create(apitype.SandboxRequest{
		Image: new(otherImage), Network: new("lab"), HostPath: &link, HostPathMode: new("rw"), MountPath: new("/data/../srv//work/./x/"),
		ExtraMounts: []apitype.MountRequest{{HostPath: rw, MountPath: "/rw", Mode: "rw"}, {HostPath: ro + "/../ro", MountPath: "/ro"}},
		CPUs:        new(0.25), MemoryMB: new(int64(64)), PidsLimit: new(int64(40)), ReadOnlyRootfs: new(false),
		Env: map[string]string{"Z": "a b=c\nd", "PINNED": "mine", "EMPTY": ""}, TTL: new(apitype.Duration(30 * time.Minute)), IdleTTL: new(apitype.Duration(5 * time.Minute)),
	})
	s := sb.Spec
	held := r.sh(`cd /sys/fs/cgroup; if [ -e cgroup.controllers ]; then cat cpu.max memory.max pids.max
		else cat cpu/cpu.cfs_quota_us cpu/cpu.cfs_period_us memory/memory.limit_in_bytes pids/pids.max; fi`)
	if got := strings.Join(strings.Fields(held), " "); got != "25000 100000 67108864 40" || s.CPUs != 0.25 || s.MemoryMB != 64 || s.PidsLimit != 40 {
		r.Errorf("the kernel holds it to %q: %+v", got, s)
	}
	if sb.Endpoint == nil || s.Network != "lab" || !strings.Contains(r.sh("ip -4 addr show eth0"), "inet "+sb.Endpoint.IP+"/") {
		r.Errorf("the network: %+v", sb)
	}
	mounts := []apitype.Mount{{HostPath: ro, MountPath: "/ro", Mode: "ro"}, {HostPath: rw, MountPath: "/rw", Mode: "rw"}}
	if s.HostPath != link || s.MountPath != "/srv/work/x" || !slices.Equal(s.ExtraMounts, mounts) {
		r.Errorf("the mounts: %+v", s)
	}
	for path, host := range map[string]string{"/srv/work/x": dir, "/rw": rw, "/ro": ro} {
		r.wantMounted(path, host)
	}
	if got := r.sh(`echo "$Z|$PINNED|${EMPTY-unset}|$WHICH"; pwd; cat file; touch made /rw/made /root-made`); got != "a b=c\nd|by-policy||other\n/srv/work/x\nhere" {
		r.Errorf("the sandbox says %q", got)
	}
	r.fails("touch /ro/made")
	r.fails("mount -o remount,rw /ro; touch /ro/made")
	for path, there := range map[string]bool{dir + "/made": true, rw + "/made": true, ro + "/made": false, r.inside("/root-made"): true} {
		if exists(path) != there {
			r.Errorf("%s is there: %t", path, !there)
		}
	}
	if len(sb.Overridden) != 1 || sb.Overridden[0].Rule != "env.pin" || !slices.Equal(s.EnvNames, []string{"EMPTY", "PINNED", "Z"}) {
		r.Errorf("the environment: %+v", sb)
	}
	if sb.ExpiresAt.Sub(sb.CreatedAt) != 30*time.Minute || sb.IdleExpiresAt == nil || sb.IdleExpiresAt.Sub(sb.LastUsedAt) != 5*time.Minute || sb.Deadline.Sub(sb.CreatedAt) != 24*time.Hour {
		r.Errorf("the end: %+v", sb)
	}
	if res := r.exec(apitype.ExecRequest{Command: apitype.Command{"pwd"}, Cwd: "/srv/work/x/../x/new/deep"}); res.Stdout != "/srv/work/x/new/deep\n" || !exists(dir+"/new/deep") {
		r.Errorf("a working directory that is missing: %+v", res)
	}
}

// boxKeys makes sandboxes with the oddest keys that there may be. TestOutsideOfTheDocument
// of sandboxapi has those that are refused.
func boxKeys(r *boxRow) {
	long := strings.Repeat("k", 128)
	for sent, key := range map[string]string{"%20%09" + r.key + "-spaced%0A%20": r.key + "-spaced", long: long, "9" + r.key + "._:-A": "9" + r.key + "._:-A"} {
		x := r.s.sandbox(r.ctx, r.T, key)
		if status, answer := r.raw(http.MethodPut, sent, "{}"); status != http.StatusCreated || answer["key"] != key || x.sh("echo in") != "in" {
			r.Errorf("%q: %d %v", sent, status, answer)
		}
	}
}

// boxFull has more sandboxes asked for at once than there may be.
func boxFull(r *boxRow) {
	s := r.serve(r.T, "full", "", "BERM_SANDBOX_MAX_SANDBOXES=2")
	var all sync.WaitGroup
	var made atomic.Int32
	for i := range 6 {
		x := r.on(s, fmt.Sprint("at-once-", i))
		all.Go(func() {
			_, err := x.c.Create(r.ctx, x.key, apitype.SandboxRequest{})
			if err == nil {
				made.Add(1)
			} else if x.wantError(err, http.StatusTooManyRequests, "capacity"); refusal(err).RetryAfter <= 0 {
				r.Errorf("there is no Retry-After: %v", err)
			}
		})
	}
	all.Wait()
	if there := containersOf(r.T, r.e, s.server); made.Load() != 2 || there != 2 {
		r.Errorf("%d sandboxes were made, and there are %d containers", made.Load(), there)
	}
}

// boxEnd checks that a sandbox ends at expires_at, whatever runs in it.
func boxEnd(r *boxRow) {
	sb := r.create(apitype.SandboxRequest{TTL: new(apitype.Duration(2 * time.Second)), Env: r.mark()})
	if _, err := r.c.StartExec(r.ctx, r.key, apitype.ExecRequest{Command: apitype.Command{"sleep", "300"}}); err != nil {
		r.Log(err) // on a machine so busy that it has ended already
	}
	until(r, "the container to go", func() bool {
		_, err := r.s.rt.Inspect(r.ctx, sb.ContainerID)
		return err != nil && len(r.marked()) == 0
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

// boxLinks checks that what is mounted is what a path led to when it was judged.
func boxLinks(r *boxRow) {
	base, a, b := r.own(), r.own("a"), r.own("b")
	out := makeDir(r, r.dir, "outside-"+r.key)
	in, away, etc := base+"/in", base+"/away", base+"/etc"
	must(r, os.Symlink(a, in), os.Symlink(out, away), os.Symlink("/etc", etc))
	r.create(apitype.SandboxRequest{HostPath: &in})
	r.wantMounted("/workspace", a)
	must(r, os.Remove(in), os.Symlink(b, in))
	r.wantMounted("/workspace", a)
	_, err := r.c.Create(r.ctx, r.key, apitype.SandboxRequest{HostPath: &in}) // which is another directory by now
	if p := r.wantError(err, http.StatusConflict, "sandbox_conflict"); len(p.Differences) != 1 || p.Differences[0].Current != a || p.Differences[0].Requested != b {
		r.Errorf("%+v", p.Differences)
	}
	x := r.on(r.main, "refused")
	if p := x.refused(apitype.SandboxRequest{HostPath: &away}, "mounts.allowed_roots"); strings.Contains(fmt.Sprint(p), out) {
		r.Errorf("the answer says where the link leads: %+v", p)
	}
	x.refused(apitype.SandboxRequest{HostPath: &etc}, "mounts.always_refused")
	x.refused(apitype.SandboxRequest{HostPath: new(r.main.stateDir())}, "mounts.always_refused")
	x.wantNone()
	x.create(apitype.SandboxRequest{HostPath: new(away + "/../a")}) // which is cleaned before links are followed
	x.wantMounted("/workspace", a)
}

func boxSwappedLink(r *boxRow) {
	base, out := r.own(), makeDir(r, r.dir, "outside-"+r.key)
	must(r, os.Symlink("good", base+"/link"), os.Symlink(out, base+"/evil"))
	r.swap(base+"/link", base+"/evil", out)
}

func boxSwappedDir(r *boxRow) {
	base, out := r.own(), makeDir(r, r.dir, "outside-"+r.key)
	must(r, os.Symlink(out, base+"/evil"))
	r.swap(base+"/good", base+"/evil", out)
}

// swap exchanges two names again and again, and creates sandboxes of one of them
// meanwhile: each has the directory with the file allowed in it, or is refused.
func (r *boxRow) swap(path, evil, outside string) {
	write(r.T, filepath.Join(r.own("good"), "allowed"), "")
	write(r.T, filepath.Join(outside, "secret"), "")
	var stop atomic.Bool
	var swapper sync.WaitGroup
	swapper.Go(func() {
		for !stop.Load() {
			if err := unix.Renameat2(unix.AT_FDCWD, path, unix.AT_FDCWD, evil, unix.RENAME_EXCHANGE); err != nil {
				r.Error(err)
				return
			}
			time.Sleep(rand.N(200 * time.Microsecond)) // a create takes a hundred times that
		}
	})
	defer func() {
		stop.Store(true)
		swapper.Wait()
	}()
	made, refused := 0, 0
	for i := 0; made < 4 && i < 100; i++ { // of those made, half would have the wrong one
		x := r.on(r.main, fmt.Sprint(i))
		sb, err := x.c.Create(r.ctx, x.key, apitype.SandboxRequest{HostPath: &path})
		switch {
		case err == nil:
			made++
			if got := x.sh("ls /workspace"); got != "allowed" || sb.Enforcement.Mounts != "held" {
				r.Errorf("the sandbox has %q, %s", got, sb.Enforcement.Mounts)
			}
		case refusal(err).Status == http.StatusForbidden, refusal(err).Code == "sandbox_start_failed":
			refused++
		default:
			r.Errorf("%v", err)
		}
		must(r, second(x.c.Delete(r.ctx, x.key)))
	}
	r.Logf("%d made, %d refused", made, refused)
}

// boxNotKilled checks that a command that can't be killed takes its sandbox along. One in a
// frozen control group can't be, where the kernel's version 1 is in use.
func boxNotKilled(r *boxRow) {
	if !exists("/sys/fs/cgroup/freezer") {
		r.Skip("there is nothing that can't be killed")
	}
	r.create(apitype.SandboxRequest{})
	on, terminated := r.inside("/tmp/on"), regexp.MustCompile(`msg=sandbox_terminated tenant=\S+ key=`+r.key+" ")
	for timeout := int64(3); ; timeout *= 2 { // until it is frozen in time
		over := make(chan *apitype.ExecResult, 1)
		go func() {
			res, err := r.c.Exec(r.ctx, r.key, apitype.ExecRequest{
				Command: shell("touch /tmp/on; echo begun; sleep 300; true"), Timeout: apitype.SecondsOf(timeout), Env: r.mark(),
			})
			if err != nil {
				r.Error(err)
			}
			over <- res
		}()
		until(r, "the command to run", func() bool { return exists(on) || len(over) > 0 })
		thaw, frozen := r.freeze(r.marked())
		if frozen {
			until(r, "the sandbox to be given up", func() bool {
				return terminated.MatchString(r.s.log.String()) || len(over) > 0
			})
		}
		thaw()
		res := <-over
		if res != nil && !frozen {
			r.sh("rm -f /tmp/on")
			continue
		}
		if res == nil || res.Status != "timed_out" || !res.SessionTerminated || res.ExitCode != nil || res.Stdout != "begun\n" {
			r.Errorf("%+v", res)
		}
		break
	}
	r.wantNone()
	until(r, "its processes to be gone", func() bool { return len(r.marked()) == 0 })
}

// freeze keeps processes of the sandbox from everything, their end included. It tells
// whether there were any.
func (x boxSandbox) freeze(processes []seen) (thaw func(), frozen bool) {
	x.t.Helper()
	dir := makeDir(x.t, "/sys/fs/cgroup/freezer", "berm-box-"+filepath.Base(x.s.dir)+"-"+x.key)
	put := func(file string, v any) error {
		return os.WriteFile(filepath.Join(dir, file), []byte(fmt.Sprint(v)), 0)
	}
	thaw = sync.OnceFunc(func() {
		if err := put("freezer.state", "THAWED"); err != nil {
			x.t.Error(err)
		}
		until(x.t, "the frozen control group to be empty", func() bool { return os.Remove(dir) == nil || !exists(dir) })
	})
	x.t.Cleanup(thaw)
	for _, p := range processes {
		frozen = put("cgroup.procs", p.pid) == nil || frozen // else it has ended
	}
	must(x.t, put("freezer.state", "FROZEN"))
	until(x.t, "them to be frozen", func() bool { return readString(x.t, filepath.Join(dir, "freezer.state")) == "FROZEN" })
	return thaw, frozen && readString(x.t, filepath.Join(dir, "cgroup.procs")) != ""
}

// boxStop checks that a stop closes the input, sends TERM to the group, and kills what is left
// after 5 s.
func boxStop(r *boxRow) {
	start := func(id, script string) {
		r.Helper()
		must(r, second(r.c.StartProcess(r.ctx, r.key, apitype.ProcessRequest{ProcessID: id, Command: "sh", Args: []string{"-c", script}, Env: r.mark()})))
		until(r, "it to run", func() bool { return exists(r.inside("/tmp/" + id)) })
	}
	stop := func(id string) *apitype.Process {
		r.Helper()
		p, err := r.c.StopProcess(r.ctx, r.key, id)
		if err != nil || p.State != "exited" {
			r.Fatalf("%+v, %v", p, err)
		}
		if got := r.marked(); len(got) > 0 {
			r.Errorf("of %s are left: %v", id, got)
		}
		return p
	}
	r.create(apitype.SandboxRequest{})
	// The input is closed first: it is over before the signal, or with it.
	start("input", "trap 'echo signal >> /tmp/how' TERM; touch /tmp/input; cat; echo closed >> /tmp/how; exit 4")
	if p := stop("input"); p.ExitCode == nil || *p.ExitCode != 4 || !strings.Contains(r.sh("cat /tmp/how"), "closed") {
		r.Errorf("%+v: %s", p, r.sh("cat /tmp/how"))
	}
	// All of the group get the signal.
	start("group", `trap 'wait; exit 6' TERM; sh -c "trap 'touch /tmp/child; exit' TERM; touch /tmp/group; while :; do sleep 0.1; done" & while :; do sleep 0.1; done`)
	if p := stop("group"); p.ExitCode == nil || *p.ExitCode != 6 || !exists(r.inside("/tmp/child")) {
		r.Errorf("%+v", p)
	}
	// Who doesn't mind it is killed, with all descendants, but not before.
	start("deaf", `trap '' TERM; (setsid sleep 301 &); sleep 302 & touch /tmp/deaf; while :; do sleep 0.1; done`)
	begun := time.Now()
	if p := stop("deaf"); p.Signal != 9 {
		r.Errorf("%+v", p)
	}
	if took := time.Since(begun); took < 5*time.Second {
		r.Errorf("it was killed after %s", took)
	}
	if got := r.sh("ps -o args"); strings.Contains(got, "sleep 30") {
		r.Errorf("still there:\n%s", got)
	}
	stop("deaf") // once more is no error
}
