package containerd

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	goruntime "runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/runtime/runtimetest/engine"
)

// headless makes this program one whose first thread ends and whose others live on.
const headless = "BERM_TEST_HEADLESS"

// hopping makes this program one that forks and ends, again and again.
const hopping = "BERM_TEST_HOPPING"

func init() {
	for hops := os.Getenv(hopping) != ""; hops; {
		if pid, _, _ := unix.RawSyscall(unix.SYS_CLONE, uintptr(unix.SIGCHLD), 0, 0); pid != 0 {
			_, _, _ = unix.RawSyscall(unix.SYS_EXIT_GROUP, 0, 0, 0)
		}
	}
	if os.Getenv(headless) != "" {
		goruntime.LockOSThread() // the first thread, in here
		go func() { select {} }()
		go func() { time.Sleep(time.Hour) }()
		_, _, _ = unix.RawSyscall(unix.SYS_EXIT, 0, 0, 0)
	}
}

// newHabitat starts a process namespace whose first process only sleeps.
func newHabitat(t *testing.T) *habitat {
	t.Helper()
	engine.Require(t, "containerd") // and so root, on Linux
	cmd := exec.Command("sleep", "100000")
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWPID, Pdeathsig: unix.SIGKILL}
	goruntime.LockOSThread() // for Pdeathsig
	t.Cleanup(goruntime.UnlockOSThread)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	f := freezer{filepath.Join(cgroupRoot, "freezer", fmt.Sprintf("berm-kill-%d", cmd.Process.Pid)), true}
	if _, err := os.Stat(filepath.Dir(f.dir)); err != nil {
		f = freezer{filepath.Join(cgroupRoot, filepath.Base(f.dir)), false}
	}
	if err := os.Mkdir(f.dir, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		if err := await(ctx, func() (bool, error) { return os.Remove(f.dir) == nil, killCgroup(f.dir) }); err != nil {
			t.Error(err)
		}
	})
	if err := os.WriteFile(f.dir+"/cgroup.procs", []byte(strconv.Itoa(cmd.Process.Pid)), 0); err != nil {
		t.Fatal(err)
	}
	p, err := readProcess(cmd.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	ns, err := openPidNamespace(p.pid)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(ns.close)
	return &habitat{init: p, ns: ns, freezer: f}
}

// enter starts a shell in the habitat, and waits for it to say that it is ready.
func (h *habitat) enter(t *testing.T, marker, script string) {
	t.Helper()
	cmd := exec.Command("sh", "-c", `echo $$ > "$0"/cgroup.procs && exec "$@"`, h.freezer.dir,
		"nsenter", "-t", fmt.Sprint(h.init.pid), "-p", "--", "sh", "-c", h.own(script+"\necho ready; sleep 70001"))
	cmd.Env = append(os.Environ(), markerEnv+"="+marker)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = out.Close()
		_ = cmd.Wait()
	})
	var seen []byte
	for buf := make([]byte, 100); !bytes.Contains(seen, []byte("ready")); {
		n, err := out.Read(buf)
		if err != nil {
			t.Fatalf("%s: %v", seen, err)
		}
		seen = append(seen, buf[:n]...)
	}
}

// outsider starts a process with the marker that isn't in the habitat.
func outsider(t *testing.T, marker string) process {
	t.Helper()
	cmd := exec.Command("sleep", "50001")
	cmd.Env = []string{markerEnv + "=" + marker}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	p, err := readProcess(cmd.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// own makes what a script sleeps for this habitat's own, host-wide.
func (h *habitat) own(script string) string {
	return strings.ReplaceAll(script, "7000", fmt.Sprintf("7%07d", h.init.pid))
}

// names are those of the host's living processes that a script of this habitat
// started, and without a name those without a first thread.
func (h *habitat) names(t *testing.T) []string {
	t.Helper()
	all, err := processes()
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for pid, p := range all {
		line, err := readLimited(fmt.Sprintf("/proc/%d/cmdline", pid), 1<<10)
		name := strings.Trim(strings.ReplaceAll(string(line), "\x00", " "), " ")
		if err == nil && !strings.HasPrefix(name, "nsenter") && strings.Contains(name, h.own("7000")) || p.threads > 1 && p.size == 0 && h.ns.has(pid) {
			out = append(out, name)
		}
	}
	slices.Sort(out)
	return out
}

// await waits for a process of a kind.
func (h *hunt) await(t *testing.T, is func(process) bool) {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); ; {
		all, err := h.look()
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range all {
			if is(p) {
				return
			}
		}
		if time.Now().After(deadline) {
			t.Fatal("waited in vain for a process")
		}
	}
}

func (h *habitat) hunt(t *testing.T, marker string) *hunt {
	t.Helper()
	var since uint64
	for begun, err := ticks(); since <= begun; since, err = ticks() { // so that what is older is that for sure
		if err != nil {
			t.Fatal(err)
		}
	}
	return &hunt{habitat: h, name: markerEnv, value: marker, since: since}
}

func TestHunt(t *testing.T) {
	for _, tt := range []struct {
		name, script string
		want         error
		left         []string
	}{
		{name: "tree", script: "sleep 70002 & (sleep 70003; true) &"},
		{name: "setsid", script: "setsid sleep 70002 & (setsid sleep 70003 &)"},
		{name: "orphans with the marker", script: "(sleep 70002 &)"},
		{name: "stopped", script: "sleep 70002 & kill -STOP $!"},
		{name: "children without the marker", script: "env -i sleep 70002 & env -i sh -c 'sleep 70003 & sleep 70004' &"},
		{name: "first thread gone", script: headless + "=1 /proc/self/exe &"},
		// Each forks and ends at once, so that a list of processes is old when it is read.
		{name: "hops", script: "for i in 1 2 3 4 5 6 7 8; do " + hopping + "=1 /proc/self/exe 70005 & done"},
		{name: "a namespace below", script: "unshare -p -f sleep 70002 & unshare -p -f env -i sh -c 'sleep 70003 & sleep 70004' &"},
		{name: "orphans that hide", script: "(env -i sleep 70002 &)", want: errHidden, left: []string{"sleep 70002"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			h := newHabitat(t)
			h.enter(t, "another", "(sleep 70009 &)") // an orphan, as the main process is
			hunt := h.hunt(t, "mine")
			self, err := os.Executable()
			if err != nil {
				t.Fatal(err)
			}
			outside := outsider(t, "mine")
			h.enter(t, "mine", strings.ReplaceAll(tt.script, "/proc/self/exe", self))
			if strings.Contains(tt.script, headless) {
				hunt.await(t, func(p process) bool { return p.state == 'Z' && p.threads > 1 })
			}
			others := append([]string{"sh -c (sleep 70009 &)\necho ready; sleep 70001", "sleep 70009", "sleep 70001"}, tt.left...)
			for i, name := range others {
				others[i] = h.own(name)
			}
			if before := h.names(t); len(before) <= len(others) {
				t.Fatalf("only these were begun: %q", before)
			}
			if err := hunt.kill(t.Context()); !errors.Is(err, tt.want) {
				t.Errorf("error %v, want %v", err, tt.want)
			}
			got := h.names(t)
			slices.Sort(others)
			if !slices.Equal(got, others) {
				t.Errorf("left: %q, want %q", got, others)
			}
			if p, err := readProcess(outside.pid); err != nil || p.over() || p.state == 'T' {
				t.Errorf("a process outside that has the marker: %+v, %v", p, err)
			}
		})
	}
}

// Nothing in a frozen container changes, and one that is paused stays so.
func TestFreeze(t *testing.T) {
	h := newHabitat(t)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	h.enter(t, "mine", "for i in 1 2 3 4; do "+hopping+"=1 "+self+" & done")
	pids := func() []int {
		found, err := cgroupProcesses(h.freezer.dir)
		if err != nil {
			t.Fatal(err)
		}
		slices.Sort(found)
		return found
	}
	thaw, err := h.freezer.freeze(t.Context())
	if err != nil || thaw == nil {
		t.Fatal(thaw == nil, err)
	}
	before := pids()
	for range 100 {
		if now := pids(); !slices.Equal(now, before) {
			t.Fatalf("%v after %v", now, before)
		}
	}
	if again, err := h.freezer.freeze(t.Context()); err != nil || again != nil {
		t.Errorf("a container that is paused: %v, %v", again == nil, err)
	}
	thaw()
	if asked, err := h.freezer.asked(); err != nil || asked {
		t.Errorf("after the thaw: %t, %v", asked, err)
	}
}

// A number may be another process's by the time it is used.
func TestSignalSpares(t *testing.T) {
	h := newHabitat(t)
	h.enter(t, "mine", "true")
	hunt := h.hunt(t, "mine")
	all, err := hunt.look()
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range all {
		p.start++
		if err := hunt.signal(p, unix.SIGKILL); err != nil {
			t.Error(err)
		}
	}
	outside, nested := outsider(t, "mine"), outsider(t, "mine")
	nested.nested, nested.parent = true, h.init.pid
	for _, p := range []process{outside, nested} {
		if err := hunt.signal(p, unix.SIGKILL); err != nil {
			t.Error(err)
		}
	}
	time.Sleep(50 * time.Millisecond) // a signal that was sent would have come
	if got := h.names(t); len(got) != 2 {
		t.Errorf("left of two: %q", got)
	}
	for _, p := range []process{outside, nested} {
		if p, err := readProcess(p.pid); err != nil || p.over() {
			t.Errorf("a process outside: %+v, %v", p, err)
		}
	}
}

func TestOpenHabitat(t *testing.T) {
	h := newHabitat(t)
	own := filepath.Base(h.freezer.dir)
	for _, tt := range []struct {
		name, container string
		pid             int
		want            error
	}{
		{"as it should be", own, h.init.pid, nil},
		{"in another cgroup", strings.Repeat("0", 64), h.init.pid, errUnseen},
		{"in our own namespace", own, os.Getpid(), errUnseen},
		{"gone", own, 1 << 22, fs.ErrNotExist},
	} {
		got, err := openHabitat(tt.container, tt.pid)
		if !errors.Is(err, tt.want) {
			t.Errorf("%s: error %v, want %v", tt.name, err, tt.want)
		}
		if err == nil {
			if got.dead() {
				t.Errorf("%s: dead", tt.name)
			}
			got.close()
		}
	}
	if err := unix.Kill(h.init.pid, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(10 * time.Second); !h.dead(); {
		if time.Now().After(deadline) {
			t.Fatal("a habitat without its first process isn't dead")
		}
	}
}
