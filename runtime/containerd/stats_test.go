package containerd

import (
	"testing"
	"time"

	cgroup1 "github.com/containerd/cgroups/v3/cgroup1/stats"
	cgroup2 "github.com/containerd/cgroups/v3/cgroup2/stats"
	"github.com/google/go-cmp/cmp"

	"github.com/bermhq/berm/runtime"
)

func TestFromMetrics(t *testing.T) {
	for _, tt := range []struct {
		name    string
		metrics any
		want    runtime.Stats
		ok      bool
	}{
		{"version 1", &cgroup1.Metrics{
			CPU:  &cgroup1.CPUStat{Usage: &cgroup1.CPUUsage{Total: 1_500_000_000}},
			Pids: &cgroup1.PidsStat{Current: 3, Limit: 10},
			Memory: &cgroup1.MemoryStat{
				Usage: &cgroup1.MemoryEntry{Usage: 1000, Limit: 5000}, InactiveFile: 1, TotalInactiveFile: 400,
			},
		}, runtime.Stats{CPUUsage: 1500 * time.Millisecond, Pids: 3, MemoryBytes: 600, MemoryLimitBytes: 5000}, true},
		{"version 2", &cgroup2.Metrics{
			CPU:    &cgroup2.CPUStat{UsageUsec: 1_500_000},
			Pids:   &cgroup2.PidsStat{Current: 3},
			Memory: &cgroup2.MemoryStat{Usage: 1000, UsageLimit: 1 << 63, InactiveFile: 400},
		}, runtime.Stats{CPUUsage: 1500 * time.Millisecond, Pids: 3, MemoryBytes: 600, MemoryLimitBytes: 1 << 62}, true},
		{"more cache than use", &cgroup2.Metrics{Memory: &cgroup2.MemoryStat{Usage: 1000, InactiveFile: 1001}}, runtime.Stats{MemoryBytes: 1000}, true},
		{"nothing", &cgroup1.Metrics{}, runtime.Stats{}, true},
		{"of another kind", "", runtime.Stats{}, false},
	} {
		got, err := fromMetrics(tt.metrics)
		if (err == nil) != tt.ok {
			t.Errorf("%s: error %v", tt.name, err)
		}
		if diff := cmp.Diff(tt.want, got); diff != "" {
			t.Errorf("%s: (-want +got)\n%s", tt.name, diff)
		}
	}
}

func TestParseTraffic(t *testing.T) {
	const heading = "Inter-|   Receive  |  Transmit\n face |bytes    packets |bytes\n"
	for _, tt := range []struct {
		name, dev string
		rx, tx    int64
		ok        bool
	}{
		{"none", heading, 0, 0, true},
		{"loopback", heading + "    lo: 7 1 0 0 0 0 0 0 7 1 0 0 0 0 0 0\n", 0, 0, true},
		{"two", heading + "  eth0: 100 1 0 0 0 0 0 0 20 1 0 0 0 0 0 0\n  eth1:3 1 0 0 0 0 0 0 4 1 0 0 0 0 0 0\n", 103, 24, true},
		{"cut short", heading + "  eth0: 100 1\n", 0, 0, false},
		{"no number", heading + "  eth0: x 1 0 0 0 0 0 0 20 1 0 0 0 0 0 0\n", 0, 0, false},
	} {
		rx, tx, err := parseTraffic(tt.dev)
		if rx != tt.rx || tx != tt.tx || (err == nil) != tt.ok {
			t.Errorf("%s: %d, %d, %v", tt.name, rx, tx, err)
		}
	}
}

func TestParseOOM(t *testing.T) {
	for words, want := range map[string]uint64{
		"oom_kill_disable 0\nunder_oom 0\noom_kill 3\n":               3,
		"low 0\nhigh 0\nmax 7\noom 1\noom_kill 2\noom_group_kill 0\n": 2,
		"oom_kill_disable 0\nunder_oom 0\n":                           0,
		"":                                                            0,
	} {
		if got, err := parseOOM(words); err != nil || got != want {
			t.Errorf("%q: %d, %v; want %d", words, got, err, want)
		}
	}
	if _, err := parseOOM("oom_kill many"); err == nil {
		t.Error("many was understood")
	}
}
