package e2e

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// wantNoParts checks that nothing of sandboxes is left below the servers' directories,
// nor on a containerd and its host, once what ends by itself, such as shims and
// what the collector of containerd is at, has had its time.
func (e *testEngine) wantNoParts(t *testing.T, servers []*demoServer) {
	t.Helper()
	deadline := time.Now().Add(15 * time.Second)
	for {
		left := e.parts(t, servers)
		if len(left) == 0 {
			return
		}
		if time.Now().After(deadline) {
			t.Errorf("left behind:\n%s", strings.Join(left, "\n"))
			return
		}
		time.Sleep(100 * time.Millisecond)
	}
}

// parts tells of all that sandboxes left.
func (e *testEngine) parts(t *testing.T, servers []*demoServer) []string {
	t.Helper()
	var left []string
	for _, server := range servers {
		left = append(left, agentDirs(server.stateDir())...)
		if e.containerd == nil {
			continue
		}
		root := filepath.Join(server.stateDir(), "containerd")
		found, err := e.containerd.Leftovers(t.Context(), root)
		if err != nil {
			t.Fatal(err)
		}
		left = append(left, found...)
		networks, err := filepath.Glob(filepath.Join(root, "networks", "*"))
		if err != nil {
			t.Fatal(err)
		}
		left = append(left, networks...)
	}
	if e.containerd == nil {
		return left
	}
	left = append(left, e.roots(t)...)
	return append(left, e.links(t)...)
}

// roots are the root file systems of containers, mounted in the engine's directory.
func (e *testEngine) roots(t *testing.T) []string {
	t.Helper()
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	var left []string
	for line := range strings.Lines(string(mounts)) {
		if strings.Contains(line, e.containerd.Dir()+"/") && strings.Contains(line, "/rootfs ") {
			left = append(left, "mount "+strings.TrimSpace(line))
		}
	}
	return left
}

// links are the interfaces and the firewall's rules of the engine's network namespace.
func (e *testEngine) links(t *testing.T) []string {
	t.Helper()
	if e.containerd.Netns() == "" {
		return nil
	}
	var left []string
	for _, command := range []string{"ip -o link", "iptables-save"} {
		args := append([]string{"--net=" + e.containerd.Netns()}, strings.Fields(command)...)
		out, err := exec.CommandContext(t.Context(), "nsenter", args...).Output()
		if err != nil {
			t.Fatalf("%s: %v", command, err)
		}
		for line := range strings.Lines(string(out)) {
			if lower := strings.ToLower(line); strings.Contains(lower, "berm") || strings.Contains(lower, "veth") {
				left = append(left, command+": "+strings.TrimSpace(line))
			}
		}
	}
	return left
}
