package containerd

import (
	"errors"
	"io/fs"
	"os"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestProcsFiles(t *testing.T) {
	for _, c := range []struct {
		name, cgroups string
		want          []string
	}{
		{"version 2", "0::/system.slice/berm.service\n", []string{
			"/sys/fs/cgroup/unified/system.slice/berm.service/cgroup.procs", "/sys/fs/cgroup/system.slice/berm.service/cgroup.procs",
		}},
		{"hybrid", "9:name=systemd:/a\n8:pids:/b:c\n4:memory:/d\n0::/\n", []string{
			"/sys/fs/cgroup/pids/b:c/cgroup.procs", "/sys/fs/cgroup/unified/cgroup.procs", "/sys/fs/cgroup/cgroup.procs",
		}},
		{"removed", "0::/gone (deleted)\n", nil},
		{"none", "\nnonsense\n", nil},
	} {
		if got := procsFiles(c.cgroups); !slices.Equal(got, c.want) {
			t.Errorf("%s: %q", c.name, got)
		}
	}
}

func TestLists(t *testing.T) {
	for procs, want := range map[string]bool{"1\n12\n3\n": true, "12": true, "1\n2\n123\n": false, "": false} {
		if lists([]byte(procs), 12) != want {
			t.Errorf("%q", procs)
		}
	}
}

// Where a process isn't listed, nothing is written.
func TestOpenProcs(t *testing.T) {
	own, err := os.ReadFile(ownCgroups)
	if err != nil {
		t.Fatal(err)
	}
	if procs, err := openProcs(string(own), 1<<30); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a process that isn't there: %v, %v", procs, err)
	}
	procs, err := openProcs(string(own), os.Getpid())
	if err == nil {
		_ = procs.Close()
	} else if os.Geteuid() == 0 && !errors.Is(err, unix.EROFS) {
		t.Errorf("this process was found in no cgroup: %v", err)
	}
}

func TestSpeedMoves(t *testing.T) {
	cgroups := func() string {
		b, err := os.ReadFile(ownCgroups)
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	before := cgroups()
	r := &Runtime{}
	chores := func() int {
		r.commands.mu.Lock()
		defer r.commands.mu.Unlock()
		return r.commands.chores
	}
	first, second := r.speedMoves(), r.speedMoves()
	if n := chores(); n > 1 {
		t.Errorf("%d goroutines see to it", n)
	}
	time.Sleep(3 * moveInterval)
	first()
	second()
	r.commands.wait()
	if after := cgroups(); after != before {
		t.Errorf("this process was moved: before\n%s\nafter\n%s", before, after)
	}
	if n := chores(); n != 0 {
		t.Errorf("%d goroutines are left", n)
	}
}
