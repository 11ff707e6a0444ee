package containerd

import (
	"os"
	"slices"
	"testing"
	"time"
)

func TestOwnProcs(t *testing.T) {
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
		if got := ownProcs(c.cgroups); !slices.Equal(got, c.want) {
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

func TestSpeedMoves(t *testing.T) {
	procs, err := openOwnProcs()
	if err == nil {
		_ = procs.Close()
	} else if os.Geteuid() == 0 {
		t.Errorf("this process was found in no cgroup: %v", err)
	}
	cgroups := func() string {
		b, err := os.ReadFile("/proc/self/cgroup")
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	before := cgroups()
	r := &Runtime{}
	first, second := r.speedMoves(), r.speedMoves()
	time.Sleep(3 * moveInterval)
	first()
	if os.Geteuid() == 0 && r.commands.chores != 1 {
		t.Errorf("%d goroutines see to it", r.commands.chores)
	}
	second()
	r.commands.wait()
	if after := cgroups(); after != before {
		t.Errorf("this process was moved: before\n%s\nafter\n%s", before, after)
	}
	if r.commands.chores != 0 {
		t.Error("it hasn't ended")
	}
}
