package runtimetest

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	goruntime "runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/runtime"
)

// kernelCases need commands that run in a kernel.
func kernelCases() []contractCase {
	return []contractCase{
		{"agent/user", testExecUser},
		{"agent/exec like the engine's", testExecAlike},
		{"agent/files of others", testFilesOfOthers},
		{"agent/process outlives its client", testProcessOutlives},
		inOne("agent/serve", (*fixture).spec,
			containerCase{"process of another user", testProcessUser},
			containerCase{"stopped", testServeStopped},
			containerCase{"started while paused", testServePaused},
			containerCase{"impostor", testImpostor},
		),
		inOne("agent/with a kernel", (*fixture).spec,
			containerCase{"process killed with its tree", testProcessKilled},
			containerCase{"process with a terminal", testProcessTerminal},
			containerCase{"dial", testDial},
		),
		inOne("agent/not reached", (*fixture).unreached,
			containerCase{"no directory", testAgentAlone},
			containerCase{"any", testAgentOff},
			containerCase{"signaled", testProcessSignaled},
			containerCase{"with a terminal", testProcessTerminal},
			containerCase{"with input", testProcessInput},
		),
		{"create/agent", testAgent},
		{"create/agent below a tmpfs", testAgentTmpfs},
		{"stats/counts", testStatsCounts},
		{"logs/any text", testLogsText},
		{"logs/flood", testLogsFlood},
		{"watch/out of memory", testWatchOOM},
		{"watch/command out of memory", testWatchExecOOM},
		{"network/internal and isolated", testNetworkReach},
		{"exec/no room", testExecNoRoom},
		{"exec/container ends slowly", testExecContainerEndsSlowly},
		{"create/missing program", testCreateMissingProgram},
		{"create/mounts", testMounts},
		{"create/tmpfs", testTmpfs},
		{"create/read-only root", testReadOnlyRoot},
		inOne("create/confined", (*fixture).spec,
			containerCase{"privileges", testPrivileges},
			containerCase{"kernel interfaces", testKernelInterfaces},
			containerCase{"no network", testNoNetwork},
			containerCase{"orphans are reaped", testReaped},
			containerCase{"open files", testOpenFiles},
			containerCase{"sys and proc", testSysProc},
			containerCase{"no limits", testNoLimits},
		),
		{"create/capability added, limits above the host", testCapabilityAdded},
		{"create/namespaces", testNamespaces},
		{"create/limits", testLimits},
		{"create/canceled", testCreateCanceled},
	}
}

// testCreateMissingProgram allows for engines that start the init process before
// they know: then the container ends as a shell would have it.
func testCreateMissingProgram(t *testing.T, b *fixture) {
	for _, program := range []string{"no-such-program", "/etc/passwd"} {
		spec := b.spec()
		spec.Command = []string{program}
		c, err := b.rt.Create(b.ctx, spec)
		if err == nil {
			if c = b.awaitState(t, c.ID, runtime.StateExited); c.ExitCode != 126 && c.ExitCode != 127 {
				t.Errorf("%s: exit code %d", program, c.ExitCode)
			}
			continue
		}
		class(t, program, err, errdefs.IsInvalidArgument, "InvalidArgument")
		if cs := b.list(t); len(cs) != 0 {
			t.Errorf("%s: left behind: %+v", program, cs)
		}
	}
}

// mountOptions finds a mount point's line of mountinfo; options are the mount's own.
func (b *fixture) mountOptions(t *testing.T, id, target string) (options []string, line string) {
	t.Helper()
	for line := range strings.Lines(b.output(t, id, "cat", "/proc/self/mountinfo")) {
		if fields := strings.Fields(line); len(fields) > 6 && fields[4] == target {
			return strings.Split(fields[5], ","), line
		}
	}
	t.Fatalf("nothing is mounted at %s", target)
	return nil, ""
}

func testMounts(t *testing.T, b *fixture) {
	writable, readonly := t.TempDir(), t.TempDir()
	must(t, os.Chmod(writable, 0o777))
	must(t, os.WriteFile(filepath.Join(readonly, "file"), []byte("from outside"), 0o644))
	spec := b.spec()
	spec.ReadOnlyRootfs = true
	spec.Mounts = []runtime.Mount{
		{Source: writable, Target: "/writable"},
		{Source: readonly, Target: "/deep/read only", ReadOnly: true},
	}
	c := b.create(t, spec)
	b.shell(t, c.ID, "echo from inside >/writable/file")
	if got, err := os.ReadFile(filepath.Join(writable, "file")); string(got) != "from inside\n" {
		t.Errorf("written inside, read outside: %q, %v", got, err)
	}
	if got := b.shell(t, c.ID, "cat '/deep/read only/file'"); got != "from outside" {
		t.Errorf("written outside, read inside: %q", got)
	}
	if got := b.shell(t, c.ID, "echo x >'/deep/read only/file'"); !strings.Contains(got, "Read-only") {
		t.Errorf("writing to a read-only mount: %q", got)
	}
	for target, mode := range map[string]string{"/writable": "rw", `/deep/read\040only`: "ro"} {
		options, line := b.mountOptions(t, c.ID, target)
		if !slices.Contains(options, mode) {
			t.Errorf("%s isn't %s: %s", target, mode, line)
		}
		if strings.Contains(line, "shared:") || strings.Contains(line, "master:") {
			t.Errorf("%s isn't private: %s", target, line)
		}
	}
}

func testTmpfs(t *testing.T, b *fixture) {
	spec := b.spec()
	spec.ReadOnlyRootfs = true
	spec.User = "1000:1000"
	spec.Tmpfs = []runtime.Tmpfs{{Target: "/tmp", SizeBytes: 1 << 20}, {Target: "/scratch", SizeBytes: 4 << 20}}
	c := b.create(t, spec)
	for target, size := range map[string]string{"/tmp": "size=1024k", "/scratch": "size=4096k"} {
		options, line := b.mountOptions(t, c.ID, target)
		for _, want := range []string{"rw", "nosuid", "nodev"} {
			if !slices.Contains(options, want) {
				t.Errorf("%s lacks %s: %s", target, want, line)
			}
		}
		if !strings.Contains(line, size) {
			t.Errorf("%s lacks %s: %s", target, size, line)
		}
		if got := b.output(t, c.ID, "stat", "-c", "%a", target); got != "1777" {
			t.Errorf("%s has mode %s", target, got)
		}
	}
	if got := b.shell(t, c.ID, "dd if=/dev/zero of=/tmp/big bs=1M count=3"); !strings.Contains(got, "No space") {
		t.Errorf("writing 3 MiB into one: %s", got)
	}
}

func testReadOnlyRoot(t *testing.T, b *fixture) {
	for _, readonly := range []bool{true, false} {
		spec := b.spec()
		spec.ReadOnlyRootfs = readonly
		spec.WorkingDir = "/made/for/this"
		c := b.create(t, spec)
		if got := b.output(t, c.ID, "pwd"); got != spec.WorkingDir {
			t.Errorf("read-only %t: directory %s", readonly, got)
		}
		for _, dir := range []string{"/", "/etc", "/bin", "/tmp", "/root", "/dev", "/run", "/made/for/this"} {
			got := b.shell(t, c.ID, "test ! -d "+dir+" || touch "+dir+"/probe && echo done")
			if refused := strings.Contains(got, "Read-only"); refused != readonly && dir != "/dev" && dir != "/run" {
				t.Errorf("read-only %t: touch in %s: %s", readonly, dir, got)
			}
		}
		// /dev is a tmpfs of the engine's.
		if options, line := b.mountOptions(t, c.ID, "/dev"); !slices.Contains(options, "nosuid") {
			t.Errorf("/dev can hold set-user-id files: %s", line)
		}
	}
}

// status reads a process's status file.
func (b *fixture) status(t *testing.T, id, pid string) map[string]string {
	t.Helper()
	status := make(map[string]string)
	for line := range strings.Lines(b.output(t, id, "cat", "/proc/"+pid+"/status")) {
		name, value, _ := strings.Cut(line, ":")
		status[name] = strings.TrimSpace(value)
	}
	return status
}

// mainPid is the pid of the main process in the container, which may have an init
// process above it.
func (b *fixture) mainPid(t *testing.T, id string) (pid string) {
	t.Helper()
	b.await(t, "the main process", func() bool { // init starts it when it has started itself
		for line := range strings.Lines(b.output(t, id, "ps", "-o", "pid,args")) {
			p, args, _ := strings.Cut(strings.TrimSpace(line), " ")
			if strings.TrimSpace(args) == "sleep 100000" {
				pid = p
			}
		}
		return pid != ""
	})
	return pid
}

func testPrivileges(t *testing.T, b *fixture, id string) {
	for _, pid := range []string{"self", "1", b.mainPid(t, id)} {
		status := b.status(t, id, pid)
		for _, set := range []string{"CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"} {
			if strings.Trim(status[set], "0") != "" || status[set] == "" {
				t.Errorf("process %s: %s is %s", pid, set, status[set])
			}
		}
		if status["NoNewPrivs"] != "1" || status["Seccomp"] != "2" {
			t.Errorf("process %s: NoNewPrivs %s, Seccomp %s", pid, status["NoNewPrivs"], status["Seccomp"])
		}
	}
	// None of them does harm if it succeeds, as it might in a container that is no boundary.
	for _, script := range []string{
		"mount -t tmpfs none /tmp", "umount /proc", "unshare -U true", "chown 1:1 /etc/passwd", "chroot / true",
		"mknod /tmp/null c 1 3", "hostname $(hostname)", "ip link set lo mtu 1400", "nice -n -5 true",
	} {
		if got := b.shell(t, id, script+" && echo succeeded"); strings.Contains(got, "succeeded") {
			t.Errorf("%s as root: %s", script, got)
		}
	}
}

func testCapabilityAdded(t *testing.T, b *fixture) {
	spec := b.spec()
	spec.CapAdd, spec.CPUs = []string{"CAP_NET_BIND_SERVICE"}, 4096
	c := b.create(t, spec)
	for _, pid := range []string{"self", b.mainPid(t, c.ID)} {
		status := b.status(t, c.ID, pid)
		for _, set := range []string{"CapEff", "CapBnd"} {
			if got := status[set]; got != "0000000000000400" {
				t.Errorf("process %s: %s is %s", pid, set, got)
			}
		}
	}
	info, err := b.rt.Info(b.ctx)
	must(t, err)
	if got := b.cpuLimit(t, c.ID); got != float64(info.CPUs) || info.CPUs < goruntime.NumCPU() {
		t.Errorf("cpus: %v of the host's %d", got, info.CPUs)
	}
}

func testNamespaces(t *testing.T, b *fixture) {
	names := []string{"cgroup", "ipc", "mnt", "net", "pid", "uts"}
	seen := make(map[string]bool)
	for _, ns := range names {
		host, err := os.Readlink("/proc/self/ns/" + ns)
		must(t, err)
		seen[host] = true
	}
	for range 2 {
		own := strings.Fields(b.shell(t, b.create(t, b.spec()).ID, "cd /proc/self/ns && for ns in "+strings.Join(names, " ")+"; do readlink $ns; done"))
		for _, ns := range own {
			if seen[ns] {
				t.Errorf("%s is the host's or another container's, too", ns)
			}
			seen[ns] = true
		}
		if len(own) != len(names) {
			t.Errorf("namespaces: %q", own)
		}
	}
}

func testKernelInterfaces(t *testing.T, b *fixture, id string) {
	keep := func(file string) string { return fmt.Sprintf("v=$(cat %s) && echo $v >%s", file, file) }
	for _, script := range []string{ // as harmless
		"echo h >/proc/sysrq-trigger", keep("/proc/sys/kernel/panic"), keep("/sys/kernel/mm/transparent_hugepage/defrag"),
		"mkdir /sys/fs/cgroup/escape || mkdir /sys/fs/cgroup/*/escape",
		"chmod 755 /sys/fs/cgroup && mkdir /sys/fs/cgroup/escape", "head -c 1 /proc/kcore | grep -q .",
		"ls /sys/firmware/* ", "test -s /proc/keys", "test -s /proc/timer_list",
	} {
		if got := b.shell(t, id, "("+script+") && echo succeeded"); strings.Contains(got, "succeeded") {
			t.Errorf("%s: %s", script, got)
		}
	}
}

// cgroup reads a limit from inside, under its name in version 1 or 2.
func (b *fixture) cgroup(t *testing.T, id, v1, v2 string) string {
	t.Helper()
	return b.shell(t, id, fmt.Sprintf("cat /sys/fs/cgroup/%s 2>/dev/null || cat /sys/fs/cgroup/%s", v2, v1))
}

func testLimits(t *testing.T, b *fixture) {
	spec := b.spec()
	spec.CPUs, spec.MemoryBytes, spec.PidsLimit = 0.5, 64<<20, 33
	c := b.create(t, spec)
	info, err := b.rt.Info(b.ctx)
	must(t, err)
	swap := b.cgroup(t, c.ID, "memory/memory.memsw.limit_in_bytes", "memory.swap.max")
	if want := map[string]string{"1": "67108864", "2": "0"}[info.CgroupVersion]; swap != want && !strings.Contains(swap, "No such file") {
		t.Errorf("memory and swap: %s, want %s", swap, want)
	}
	if got := b.cgroup(t, c.ID, "memory/memory.limit_in_bytes", "memory.max"); got != "67108864" {
		t.Errorf("memory: %s", got)
	}
	if got := b.cgroup(t, c.ID, "pids/pids.max", "pids.max"); got != "33" {
		t.Errorf("pids: %s", got)
	}
	if got := b.cpuLimit(t, c.ID); got != 0.5 {
		t.Errorf("cpus: %v", got)
	}
	if got := b.shell(t, c.ID, "for i in $(seq 60); do sleep 1000 & done"); !strings.Contains(got, "can't fork") {
		t.Errorf("60 processes under a limit of 33: %s", got)
	}
}

// cpuLimit is in cores.
func (b *fixture) cpuLimit(t *testing.T, id string) float64 {
	t.Helper()
	text := b.shell(t, id, "cat /sys/fs/cgroup/cpu.max 2>/dev/null || cat /sys/fs/cgroup/cpu/cpu.cfs_quota_us /sys/fs/cgroup/cpu/cpu.cfs_period_us")
	var quota, period float64
	if _, err := fmt.Sscan(text, &quota, &period); err != nil {
		t.Fatalf("cpu limit %q: %v", text, err)
	}
	return quota / period
}

func testReaped(t *testing.T, b *fixture, id string) {
	b.shell(t, id, "for i in 1 2 3 4 5; do (sleep 0.1 & ) ; done")
	b.await(t, "the orphans to be reaped", func() bool {
		ps := b.output(t, id, "ps", "-o", "stat,args")
		return !strings.Contains(ps, "sleep 0.1") && !strings.Contains(ps, "[sleep]") && !strings.Contains(ps, "Z ")
	})
}

func testNoNetwork(t *testing.T, b *fixture, id string) {
	if ip := b.inspect(t, id).IP; ip != "" {
		t.Errorf("address %s", ip)
	}
	up := b.shell(t, id, "for i in /sys/class/net/*; do test $(($(cat $i/flags) & 1)) = 0 || basename $i; done")
	if up != "lo" {
		t.Errorf("interfaces that are up: %s", up)
	}
	if got := b.shell(t, id, "cat /proc/net/route | tail -n +2"); got != "" {
		t.Errorf("routes: %s", got)
	}
	if got := b.shell(t, id, "echo hello | nc -l -p 7777 >/tmp/got & for i in 1 2 3 4 5 6 7 8 9; do usleep 100000; nc 127.0.0.1 7777 </dev/null && break; done"); !strings.Contains(got, "hello") {
		t.Errorf("over loopback: %s", got)
	}
}

// testCreateCanceled ends the context at many stages of a create.
func testCreateCanceled(t *testing.T, b *fixture) {
	var made, failed int
	for delay := time.Millisecond; delay < 2*time.Second && made < 2; delay = 2*delay + time.Millisecond {
		ctx, cancel := context.WithTimeout(b.ctx, delay)
		c, err := b.rt.Create(ctx, b.spec())
		cancel()
		if err == nil {
			made++
			must(t, b.rt.Remove(b.ctx, c.ID))
		} else {
			failed++
			class(t, fmt.Sprintf("create ended after %s", delay), err, errdefs.IsDeadlineExceeded, "DeadlineExceeded")
		}
		if cs := b.list(t); len(cs) != 0 {
			t.Fatalf("create ended after %s left %+v", delay, cs)
		}
	}
	if failed == 0 {
		t.Errorf("none of %d creates was cut short: the test proves nothing", made)
	}
}
