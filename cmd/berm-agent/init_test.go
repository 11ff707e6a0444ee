package main

import (
	"bufio"
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/runtime/runtimetest/engine"
)

func TestInitExit(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string, mode os.FileMode) string {
		path := filepath.Join(dir, name)
		must(t, os.WriteFile(path, []byte(text), mode))
		return path
	}
	plain := write("plain", "text", 0o644)
	script := write("script", "exit $#\n", 0o755)
	lost := write("lost", "#!/no/such/interpreter\n", 0o755)
	write("true", "not executable, so the next true in PATH is taken", 0o644)
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
	for name, tt := range map[string]struct {
		command []string
		code    int
		stderr  string
	}{
		"success":             {[]string{"true"}, 0, ""},
		"failure":             {[]string{"sh", "-c", "exit 7"}, 7, ""},
		"killed":              {[]string{"sh", "-c", "kill -KILL $$"}, 137, ""},
		"arguments":           {[]string{"sh", "-c", `echo "$@" >&2`, "0", "--", "-a"}, 0, "-- -a\n"},
		"no such program":     {[]string{"no-such-program"}, 127, "berm-agent: no-such-program: not found\n"},
		"below a file":        {[]string{plain + "/x"}, 127, "berm-agent: " + plain + "/x: not found\n"},
		"no interpreter":      {[]string{lost}, 127, "berm-agent: " + lost + ": not found\n"},
		"not executable":      {[]string{plain}, 126, "berm-agent: " + plain + ": permission denied\n"},
		"script without a #!": {[]string{script, "a", "b"}, 2, ""},
	} {
		t.Run(name, func(t *testing.T) {
			cmd := exec.Command(agent, append([]string{"init", "/", "--"}, tt.command...)...)
			var stderr bytes.Buffer
			cmd.Stderr = &stderr
			if code := exitOf(t, cmd.Run()); code != tt.code || stderr.String() != tt.stderr {
				t.Errorf("exit code %d, %q; want %d, %q", code, &stderr, tt.code, tt.stderr)
			}
		})
	}
}

// startInit runs a shell script below the agent, until it has printed "ready".
func startInit(t *testing.T, cmd *exec.Cmd) *bufio.Reader {
	t.Helper()
	stdout, err := cmd.StdoutPipe()
	must(t, err)
	startCmd(t, cmd)
	t.Cleanup(func() { // before the init is killed: outside of a process namespace its child lives on
		for _, pid := range children(cmd.Process.Pid) {
			_ = unix.Kill(pid, unix.SIGKILL)
		}
	})
	out := bufio.NewReader(stdout)
	if line, err := out.ReadString('\n'); line != "ready\n" {
		t.Fatalf("%q, %v", line, err)
	}
	return out
}

func TestInitForwardsSignals(t *testing.T) {
	names := []string{"HUP", "INT", "QUIT", "USR1", "USR2", "ALRM", "CONT", "TSTP", "TTIN", "TTOU", "WINCH", "PIPE", "SYS", "TERM"}
	script := "for s in " + strings.Join(names, " ") + `; do trap "echo $s" $s; done; echo ready; while :; do sleep 0.01; done`
	cmd := exec.Command(agent, "init", "/", "--", "sh", "-c", script)
	out := startInit(t, cmd)
	for _, name := range names {
		must(t, cmd.Process.Signal(unix.SignalNum("SIG"+name)))
		if got, err := out.ReadString('\n'); got != name+"\n" {
			t.Fatalf("%s: %q, %v", name, got, err)
		}
	}
	var ended error
	done := make(chan struct{})
	go func() { ended = cmd.Wait(); close(done) }()
	kids := children(cmd.Process.Pid)
	if len(kids) != 1 {
		t.Fatalf("children: %v", kids)
	}
	must(t, unix.Kill(kids[0], unix.SIGSEGV))
	<-done
	if code := exitOf(t, ended); code != 128+int(unix.SIGSEGV) {
		t.Errorf("exit code %d", code)
	}
}

// children are a process's, those that have ended and wait to be reaped too.
func children(pid int) []int {
	var out []int
	files, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid)) // the pattern is good
	for _, f := range files {
		b, _ := os.ReadFile(f) // a thread that is gone has none
		for field := range strings.FieldsSeq(string(b)) {
			if child, err := strconv.Atoi(field); err == nil {
				out = append(out, child)
			}
		}
	}
	return out
}

func TestInitReaps(t *testing.T) {
	engine.Require(t, "containerd") // root, for a pid namespace
	cmd := exec.Command(agent, "init", "/", "--", "sh", "-c",
		`i=0; while [ $i -lt 200 ]; do (sleep 0.0$((i % 10)) &); i=$((i + 1)); done; echo ready; exec sleep 1000`)
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWPID}
	startInit(t, cmd)
	await(t, "all orphans to be reaped", func() bool { return len(children(cmd.Process.Pid)) == 1 })
	must(t, cmd.Process.Signal(unix.SIGTERM))
	if code := exitOf(t, cmd.Wait()); code != 128+int(unix.SIGTERM) {
		t.Errorf("exit code %d", code)
	}
}

// What init itself was started with is no concern of the command's.
func TestInitGivesCleanSignals(t *testing.T) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var blocked, old unix.Sigset_t
	blocked.Val[0] = 1 << (unix.SIGUSR1 - 1)
	must(t, unix.PthreadSigmask(unix.SIG_BLOCK, &blocked, &old))
	defer func() { _ = unix.PthreadSigmask(unix.SIG_SETMASK, &old, nil) }()
	signal.Ignore(unix.SIGUSR2)
	defer signal.Reset(unix.SIGUSR2)
	signals := func(command ...string) string {
		out, err := exec.Command(command[0], command[1:]...).Output()
		must(t, err)
		// The first 31 only: those above are a C library's own, and nobody can set them.
		var sets []string
		for _, m := range regexp.MustCompile(`Sig(Blk|Ign|Cgt):\t[0-9a-f]+([0-9a-f]{8})\b`).FindAllSubmatch(out, -1) {
			set, err := strconv.ParseUint(string(m[2]), 16, 32)
			must(t, err)
			sets = append(sets, fmt.Sprintf("%s %x", m[1], set&0x7fffffff))
		}
		return strings.Join(sets, " ")
	}
	const show = "/proc/self/status"
	// Whoever runs the tests may have had more ignored: nohup, say.
	if got := signals("cat", show); !regexp.MustCompile(`^Blk 200 Ign [0-9a-f]*[89a-f][0-9a-f]{2} Cgt 0$`).MatchString(got) {
		t.Fatalf("without init: %q", got)
	}
	if got, want := signals(agent, "init", "/", "--", "cat", show), "Blk 0 Ign 0 Cgt 0"; got != want {
		t.Errorf("below init: %q, want %q", got, want)
	}
}

func TestInitCantBeTraced(t *testing.T) {
	engine.Require(t, "containerd") // root, to be another user
	cmd := exec.Command(agent, "init", "/", "--", "sh", "-c", "echo ready; exec sleep 1000")
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	startInit(t, cmd)
	kids := children(cmd.Process.Pid)
	if len(kids) != 1 {
		t.Fatalf("children: %v", kids)
	}
	// The kernel gives these files to root for a process that mayn't be traced.
	for pid, uid := range map[int]uint32{cmd.Process.Pid: 0, kids[0]: 65534} {
		var stat unix.Stat_t
		if err := unix.Stat(fmt.Sprintf("/proc/%d/environ", pid), &stat); err != nil || stat.Uid != uid {
			t.Errorf("environ belongs to %d, want %d: %v", stat.Uid, uid, err)
		}
	}
	if group, err := unix.Getpgid(kids[0]); err != nil || group != kids[0] {
		t.Errorf("process group %d of %d: %v", group, kids[0], err)
	}
}

// TestInitIsSmall bounds what every sandbox pays: its limits count these too.
func TestInitIsSmall(t *testing.T) {
	cmd := exec.Command(agent, "init", "/", "--", "sh", "-c", "echo ready; exec sleep 1000")
	startInit(t, cmd)
	threads, anon := status(t, cmd.Process.Pid, "Threads"), anonymous(t, cmd.Process.Pid)
	t.Logf("%d threads, %d KiB of its own", threads, anon)
	if threads > 8 || anon > 2<<10 {
		t.Error("that is too much")
	}
}
