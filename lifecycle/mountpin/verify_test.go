package mountpin

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/policy"
)

// This process stands for the container: it has the pins mounted.
func TestVerify(t *testing.T) {
	p := pinner(t)
	dir, other := filepath.Join(t.TempDir(), "a b#"), t.TempDir()
	makeDir(t, dir, "mine")
	sources, release, err := p.Hold(context.Background(), "s #\\", []policy.Mount{mount(dir), mount(other)})
	must(t, err)
	defer func() {
		if err := release(); err != nil {
			t.Error(err)
		}
	}()
	must(t, unix.Mount("", sources[1], "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""))
	link := filepath.Join(t.TempDir(), "link")
	must(t, os.Symlink(sources[0], link))
	pinned := func(source, target string, readOnly bool) Pinned {
		t.Helper()
		m, err := NewPinned(source, target, readOnly)
		must(t, err)
		return m
	}
	for name, tt := range map[string]struct {
		mounts []Pinned
		want   error
	}{
		"as held":          {[]Pinned{pinned(sources[0], sources[0], false), pinned(sources[1], sources[1], true)}, nil},
		"through a link":   {[]Pinned{pinned(sources[0], link, false)}, nil},
		"none":             {nil, nil},
		"any mount":        {[]Pinned{{Target: sources[0]}}, nil},
		"any, by a link":   {[]Pinned{{Target: link}}, ErrExchanged},
		"writable":         {[]Pinned{pinned(sources[0], sources[0], true)}, ErrExchanged},
		"writable, a link": {[]Pinned{pinned(sources[0], link, true)}, ErrExchanged},
		"another":          {[]Pinned{pinned(sources[0], sources[1], false)}, ErrExchanged},
		"twice":            {[]Pinned{pinned(sources[0], link, false), pinned(sources[0], link, false)}, ErrExchanged},
		"no mount at all":  {[]Pinned{pinned(t.TempDir(), other, false)}, ErrExchanged},
	} {
		if err := Verify(os.Getpid(), tt.mounts); !errors.Is(err, tt.want) {
			t.Errorf("%s: %v, want %v", name, err, tt.want)
		}
	}

	cmd := exec.Command("cat")
	in, err := cmd.StdinPipe()
	must(t, err)
	must(t, cmd.Start())
	fd, err := unix.PidfdOpen(cmd.Process.Pid, 0)
	must(t, err)
	defer unix.Close(fd)
	must(t, in.Close())
	if _, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, -1); err != nil {
		t.Fatal(err)
	}
	held := []Pinned{pinned(sources[0], sources[0], false)}
	if err := Verify(cmd.Process.Pid, held); !errors.Is(err, ErrGone) {
		t.Errorf("a process that nobody has waited for: %v", err)
	}
	must(t, cmd.Wait())
	if err := Verify(cmd.Process.Pid, held); !errors.Is(err, ErrGone) {
		t.Errorf("a process that is gone: %v", err)
	}
}

// headless is set for a process whose first thread has ended while another waits for input.
const headless = "MOUNTPIN_TEST_HEADLESS"

func TestMain(m *testing.M) {
	if os.Getenv(headless) == "" {
		os.Exit(m.Run())
	}
	go func() {
		state := ""
		for state != "Z" {
			stat, err := os.ReadFile(fmt.Sprintf("/proc/self/task/%d/stat", os.Getpid()))
			if err != nil {
				os.Exit(1)
			}
			_, rest, _ := strings.Cut(string(stat), ") ")
			state, _, _ = strings.Cut(rest, " ")
		}
		fmt.Println(state)
		_, _ = io.Copy(io.Discard, os.Stdin)
		os.Exit(0)
	}()
	_, _, _ = unix.Syscall(unix.SYS_EXIT, 0, 0, 0) // of this thread alone
}

func init() {
	if os.Getenv(headless) != "" {
		runtime.LockOSThread() // the first one
	}
}

// A process whose first thread has ended has no root to look into, but runs on: it isn't gone.
func TestVerifyHeadless(t *testing.T) {
	t.Parallel()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), headless+"=1")
	in, err := cmd.StdinPipe()
	must(t, err)
	out, err := cmd.StdoutPipe()
	must(t, err)
	must(t, cmd.Start())
	if line, err := bufio.NewReader(out).ReadString('\n'); line != "Z\n" {
		t.Errorf("it says %q, %v", line, err)
	}
	if err := Verify(cmd.Process.Pid, []Pinned{{Target: "/"}}); err == nil || errors.Is(err, ErrGone) {
		t.Errorf("while it runs: %v", err)
	}
	if err := errors.Join(in.Close(), cmd.Wait()); err != nil {
		t.Error(err)
	}
}
