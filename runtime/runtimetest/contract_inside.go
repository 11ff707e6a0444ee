package runtimetest

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/runtime"
)

// insideCases look at what a process in a container sees.
func insideCases() []contractCase {
	return []contractCase{
		{"create/environment", testEnvironment},
		{"create/groups", testGroups},
		{"create/files of the network", testEtcFiles},
		{"create/devices", testDevices},
		{"create/mounts below a mount", testMountsBelow},
		{"create/image volumes", testImageVolumes},
		{"create/runtime class", testRuntimeClass},
		{"create/main process killed", testMainKilled},
	}
}

// environ is the environment that a process was started with.
func (b *fixture) environ(t *testing.T, id, pid string) map[string]string {
	t.Helper()
	env := make(map[string]string)
	for v := range strings.SplitSeq(b.output(t, id, "cat", "/proc/"+pid+"/environ"), "\x00") {
		name, value, _ := strings.Cut(v, "=")
		env[name] = value
	}
	return env
}

func testEnvironment(t *testing.T, b *fixture) {
	for _, tt := range []struct{ user, home, other, otherHome string }{
		{"", "/root", "1000:1000", "/"},
		{"1000:1000", "/", "0:0", "/root"},
	} {
		spec := b.spec()
		spec.User = tt.user
		c := b.create(t, spec)
		host := b.output(t, c.ID, "hostname")
		if host == "" {
			t.Error("no host name was chosen")
		}
		for _, pid := range []string{"self", b.mainPid(t, c.ID)} {
			env := b.environ(t, c.ID, pid)
			if env["PATH"] == "" || env["HOSTNAME"] != host || env["HOME"] != tt.home {
				t.Errorf("user %q, process %s on %s: %q", tt.user, pid, host, env)
			}
		}
		got, _, _ := b.run(t, c.ID, runtime.Exec{Command: []string{"sh", "-c", "echo $HOME"}, User: tt.other})
		if got != tt.otherHome+"\n" {
			t.Errorf("a command as user %s has the home %q, want %q", tt.other, got, tt.otherHome)
		}
	}
}

func testGroups(t *testing.T, b *fixture) {
	spec := b.spec()
	spec.User = "1234:4321"
	c := b.create(t, spec)
	groups := b.status(t, c.ID, b.mainPid(t, c.ID))
	if got := strings.Fields(groups["Gid"]); !slices.Equal(got, []string{"4321", "4321", "4321", "4321"}) {
		t.Errorf("the main process' group: %v", got)
	}
	for _, got := range strings.Fields(groups["Groups"]) {
		if got != "4321" {
			t.Errorf("the main process is in group %s, too", got)
		}
	}
	for user, want := range map[string]string{"": "4321", "7:8": "8", "7": "0", "0:0": "0"} {
		got, _, _ := b.run(t, c.ID, runtime.Exec{Command: []string{"id", "-G"}, User: user})
		for g := range strings.FieldsSeq(got) {
			if g != want {
				t.Errorf("a command as user %q is in groups %q, want %s", user, got, want)
			}
		}
	}
}

func testEtcFiles(t *testing.T, b *fixture) {
	must(t, b.rt.EnsureNetwork(b.ctx, runtime.Network{Name: b.name, Labels: b.labels}))
	for _, network := range []string{"", b.name} {
		spec := b.spec()
		spec.Hostname, spec.Network, spec.ReadOnlyRootfs = "some-host", network, true
		c := b.create(t, spec)
		t.Cleanup(func() { // before the network
			if err := b.rt.Remove(b.ctx, c.ID); err != nil && b.ctx.Err() == nil {
				t.Error(err)
			}
		})
		if got := b.output(t, c.ID, "cat", "/etc/hostname"); got != "some-host" {
			t.Errorf("network %q: /etc/hostname %q", network, got)
		}
		hosts := make(map[string]string) // addresses by name
		for line := range strings.Lines(b.output(t, c.ID, "cat", "/etc/hosts")) {
			fields := strings.Fields(line)
			for _, name := range fields[min(1, len(fields)):] {
				if hosts[name] == "" {
					hosts[name] = fields[0]
				}
			}
		}
		if hosts["localhost"] != "127.0.0.1" || network != "" && hosts["some-host"] != c.IP {
			t.Errorf("network %q, address %s: /etc/hosts %v", network, c.IP, hosts)
		}
		for line := range strings.Lines(b.output(t, c.ID, "cat", "/etc/resolv.conf")) {
			if fields := strings.Fields(line); len(fields) > 0 && fields[0] == "nameserver" && len(fields) != 2 {
				t.Errorf("network %q: /etc/resolv.conf has %q", network, line)
			}
		}
	}
}

func testOpenFiles(t *testing.T, b *fixture, id string) {
	for line := range strings.Lines(b.output(t, id, "cat", "/proc/"+b.mainPid(t, id)+"/limits")) {
		rest, ok := strings.CutPrefix(line, "Max open files")
		if !ok {
			continue
		}
		for _, limit := range strings.Fields(rest)[:2] {
			if n, err := strconv.Atoi(limit); err != nil || n < 1024 {
				t.Errorf("the main process: %s", line)
			}
		}
	}
	for _, kind := range []string{"-Sn", "-Hn"} {
		got := b.shell(t, id, "ulimit "+kind)
		if n, err := strconv.Atoi(got); err != nil || n < 1024 {
			t.Errorf("a command: ulimit %s is %s", kind, got)
		}
	}
}

func testDevices(t *testing.T, b *fixture) {
	spec := b.spec()
	spec.ReadOnlyRootfs = true
	c := b.create(t, spec)
	known := []string{"null", "zero", "full", "random", "urandom", "tty", "console", "ptmx", "pts/ptmx"}
	for dev := range strings.FieldsSeq(b.output(t, c.ID, "find", "/dev", "-type", "b", "-o", "-type", "c")) {
		if !slices.Contains(known, strings.TrimPrefix(dev, "/dev/")) {
			t.Errorf("there is a device %s", dev)
		}
	}
	if got := b.shell(t, c.ID, "echo x >/dev/null && head -c 4 /dev/zero | wc -c && head -c 4 /dev/urandom | wc -c && readlink /dev/stdin"); got != "4\n4\n/proc/self/fd/0" {
		t.Errorf("the usual ones: %q", got)
	}
	for target, typ := range map[string]string{"/dev/shm": "tmpfs", "/dev/mqueue": "mqueue", "/dev/pts": "devpts", "/dev": "tmpfs"} {
		options, line := b.mountOptions(t, c.ID, target)
		if !strings.Contains(line, " - "+typ+" ") || !slices.Contains(options, "nosuid") {
			t.Errorf("%s is no %s, or can hold set-user-id files: %s", target, typ, line)
		}
		if most := fmt.Sprintf("max=%d", b.Terminals); typ == "devpts" && b.Terminals > 0 && !strings.Contains(line, most) {
			t.Errorf("the kernel doesn't hold it to %s: %s", most, line)
		}
	}
	if _, line := b.mountOptions(t, c.ID, "/dev/shm"); !strings.Contains(line, "size=65536k") {
		t.Errorf("/dev/shm has another size than 64 MiB: %s", line)
	}
	if got := b.shell(t, c.ID, "touch /dev/shm/file && echo done"); got != "done" {
		t.Errorf("writing to /dev/shm: %s", got)
	}
}

func testSysProc(t *testing.T, b *fixture, id string) {
	for _, target := range []string{"/sys", "/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"} {
		if _, err := os.Stat(target); err != nil {
			continue // this kernel has none
		}
		if options, line := b.mountOptions(t, id, target); !slices.Contains(options, "ro") {
			t.Errorf("%s can be written: %s", target, line)
		}
	}
	for _, target := range []string{"/proc", "/sys"} {
		if options, line := b.mountOptions(t, id, target); !slices.Contains(options, "nosuid") || !slices.Contains(options, "nodev") {
			t.Errorf("%s: %s", target, line)
		}
	}
	for _, masked := range []string{"/proc/acpi", "/proc/scsi", "/proc/latency_stats", "/proc/timer_stats", "/proc/sched_debug", "/sys/firmware"} {
		// Absent, an empty directory or an empty file.
		if got := b.shell(t, id, fmt.Sprintf("if test -d %[1]s; then ls -A %[1]s; elif test -e %[1]s; then head -c 10 %[1]s; fi", masked)); got != "" {
			t.Errorf("%s shows %q", masked, got)
		}
	}
	got := b.shell(t, id, `exec 2>/dev/null
		find /sys/fs/cgroup -type f | while read -r f; do (: >>"$f") && echo "$f"; done | head -n 3
		find /sys/fs/cgroup -type d | while read -r d; do mkdir "$d/new" && echo "$d"; done | head -n 3`)
	if got != "" {
		t.Errorf("cgroups can be written: %s", got)
	}
}

// testNoLimits: zero is none, not nothing.
func testNoLimits(t *testing.T, b *fixture, id string) {
	if got := b.cgroup(t, id, "pids/pids.max", "pids.max"); got != "max" {
		t.Errorf("pids: %s", got)
	}
	memory := b.cgroup(t, id, "memory/memory.limit_in_bytes", "memory.max")
	if n, err := strconv.ParseInt(memory, 10, 64); memory != "max" && (err != nil || n < 1<<60) {
		t.Errorf("memory: %s", memory)
	}
	if got := b.shell(t, id, "cat /sys/fs/cgroup/cpu.max 2>/dev/null || cat /sys/fs/cgroup/cpu/cpu.cfs_quota_us"); got != "-1" && !strings.HasPrefix(got, "max") {
		t.Errorf("cpus: %s", got)
	}
}

// testMountsBelow: what is mounted below a source was never judged, and stays outside.
func testMountsBelow(t *testing.T, b *fixture) {
	source := t.TempDir()
	below := filepath.Join(source, "below")
	must(t, os.Mkdir(below, 0o755))
	if out, err := exec.CommandContext(b.ctx, "mount", "-t", "tmpfs", "-o", "size=64k", "none", below).CombinedOutput(); err != nil {
		t.Fatalf("mount: %v: %s", err, out)
	}
	t.Cleanup(func() {
		if out, err := exec.Command("umount", "--lazy", below).CombinedOutput(); err != nil {
			t.Errorf("umount: %v: %s", err, out)
		}
	})
	must(t, os.WriteFile(filepath.Join(below, "secret"), nil, 0o644))
	for _, readonly := range []bool{true, false} {
		spec := b.spec()
		spec.Mounts = []runtime.Mount{{Source: source, Target: "/mnt", ReadOnly: readonly}}
		if b.UserNS || b.Class == "crun" { // they would show it
			_, err := b.rt.Create(b.ctx, spec)
			class(t, "something mounted below a source", err, errdefs.IsInvalidArgument, "InvalidArgument")
			continue
		}
		c := b.create(t, spec)
		if got := b.shell(t, c.ID, "ls /mnt/below"); got != "" {
			t.Errorf("read-only %t: inside is %q", readonly, got)
		}
	}
}

// testImageVolumes: an image may declare places of its own, but a read-only root is one.
func testImageVolumes(t *testing.T, b *fixture) {
	for _, readonly := range []bool{true, false} {
		spec := b.spec()
		spec.Image, spec.ReadOnlyRootfs, spec.User = b.Configured, readonly, "0:0"
		spec.Tmpfs = []runtime.Tmpfs{{Target: "/home", SizeBytes: 1 << 20}}
		c := b.create(t, spec)
		if got := b.shell(t, c.ID, "touch /home/x && test -d /var/data && echo done"); got != "done" {
			t.Errorf("read-only %t: a tmpfs over a volume: %s", readonly, got)
		}
		if got := b.shell(t, c.ID, "touch /var/data/x && echo done"); (got != "done") != readonly {
			t.Errorf("read-only %t: writing to a volume: %s", readonly, got)
		}
	}
}

func testRuntimeClass(t *testing.T, b *fixture) {
	spec := b.spec()
	spec.RuntimeClass = "runc" // every engine has it
	b.alive(t, b.create(t, spec).ID)
	spec = b.spec()
	spec.RuntimeClass = "no-such-class"
	_, err := b.rt.Create(b.ctx, spec)
	class(t, "an unknown class", err, errdefs.IsInvalidArgument, "InvalidArgument")
	if err != nil && !strings.Contains(err.Error(), spec.RuntimeClass) {
		t.Errorf("the error doesn't name the class: %v", err)
	}
	if cs := b.list(t); len(cs) != 1 {
		t.Errorf("left behind: %+v", cs)
	}
}

func testMainKilled(t *testing.T, b *fixture) {
	for signal, want := range map[string]int{"KILL": 137, "TERM": 143} {
		spec := b.spec()
		spec.Command = []string{"sh", "-c", "sleep 0.2; kill -" + signal + " $$"}
		c := b.awaitState(t, b.create(t, spec).ID, runtime.StateExited)
		if c.ExitCode != want || c.OOMKilled {
			t.Errorf("by itself, with %s: exit code %d, OOMKilled %t", signal, c.ExitCode, c.OOMKilled)
		}
	}
	c := b.create(t, b.spec())
	kill := []string{"kill", "-KILL", b.mainPid(t, c.ID)}
	if _, err := b.rt.Exec(b.ctx, c.ID, runtime.Exec{Command: kill}); err != nil && !errors.Is(err, runtime.ErrInterrupted) {
		t.Error(err)
	}
	if c = b.awaitState(t, c.ID, runtime.StateExited); c.ExitCode != 137 || c.OOMKilled || c.FinishedAt.IsZero() {
		t.Errorf("by a command: %+v", c)
	}
	// The init process above it passes on what it is sent, and ends as it did.
	spec := b.spec()
	spec.Command = []string{"sh", "-c", "trap 'exit 9' USR1; echo 'sleep 100000' >/dev/null; while true; do sleep 0.1; done"}
	c = b.create(t, spec)
	b.await(t, "the signal to be caught", func() bool {
		_, err := b.rt.Exec(b.ctx, c.ID, runtime.Exec{Command: []string{"kill", "-USR1", "1"}})
		return err != nil || b.inspect(t, c.ID).State == runtime.StateExited
	})
	if c = b.awaitState(t, c.ID, runtime.StateExited); c.ExitCode != 9 {
		t.Errorf("by a signal to init: exit code %d", c.ExitCode)
	}
}
