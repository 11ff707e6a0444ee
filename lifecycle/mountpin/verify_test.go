package mountpin

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
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
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := release(); err != nil {
			t.Error(err)
		}
	}()
	if err := unix.Mount("", sources[1], "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""); err != nil {
		t.Fatal(err)
	}
	link := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(sources[0], link); err != nil {
		t.Fatal(err)
	}
	pinned := func(source, target string, readOnly bool) Pinned {
		t.Helper()
		m, err := NewPinned(source, target, readOnly)
		if err != nil {
			t.Fatal(err)
		}
		return m
	}
	for name, tt := range map[string]struct {
		mounts []Pinned
		want   error
	}{
		"as held":          {[]Pinned{pinned(sources[0], sources[0], false), pinned(sources[1], sources[1], true)}, nil},
		"through a link":   {[]Pinned{pinned(sources[0], link, false)}, nil},
		"none":             {nil, nil},
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
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	fd, err := unix.PidfdOpen(cmd.Process.Pid, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := in.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, -1); err != nil {
		t.Fatal(err)
	}
	held := []Pinned{pinned(sources[0], sources[0], false)}
	if err := Verify(cmd.Process.Pid, held); !errors.Is(err, ErrGone) {
		t.Errorf("a process that nobody has waited for: %v", err)
	}
	if err := cmd.Wait(); err != nil {
		t.Fatal(err)
	}
	if err := Verify(cmd.Process.Pid, held); !errors.Is(err, ErrGone) {
		t.Errorf("a process that is gone: %v", err)
	}
}
