package containerd

import (
	"bytes"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"
)

// moveInterval is below the time after which the kernel is slow again: 16 ms at least, where
// that was measured (HZ=250).
const moveInterval = 8 * time.Millisecond

// speedMoves keeps the kernel quick to take processes into cgroups until stop is called.
//
// Whoever puts a process into a cgroup waits for a grace period of RCU first, five to ten
// milliseconds, unless somebody has done so just before (cgroup_threadgroup_rwsem in the
// kernel's kernel/cgroup/cgroup.c). An OCI runtime does when half of its work is done. So this
// process is put where it is, again and again, from the moment at which the engine is asked
// to start one, and the one wait goes on beside the other. Where that can't be done, nothing
// is: it takes longer then.
func (r *Runtime) speedMoves() (stop func()) {
	m := &r.moves
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.wanted == 0 {
		done := make(chan struct{})
		m.done = done
		r.commands.background(func() { stay(done) })
	}
	m.wanted++
	return func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		if m.wanted--; m.wanted == 0 {
			close(m.done)
		}
	}
}

// moves is how many want moves to be quick.
type moves struct {
	mu     sync.Mutex
	wanted int
	done   chan struct{} // closed when none does any more
}

// stay puts this process into the cgroup that it is in, until done is closed, or somebody
// else puts it into another one.
func stay(done <-chan struct{}) {
	own, err := os.ReadFile(ownCgroups)
	if err != nil {
		return
	}
	procs, err := openProcs(string(own), os.Getpid())
	if err != nil {
		return
	}
	defer func() { _ = procs.Close() }()
	tick := time.NewTicker(moveInterval)
	defer tick.Stop()
	for {
		if now, err := os.ReadFile(ownCgroups); err != nil || !bytes.Equal(now, own) {
			return
		}
		if _, err := procs.WriteString("0"); err != nil { // whoever writes it
			return
		}
		select {
		case <-tick.C:
		case <-done:
			return
		}
	}
}

const ownCgroups = "/proc/self/cgroup"

// openProcs opens the list of processes of a cgroup that a process is in, by its cgroups.
func openProcs(cgroups string, pid int) (*os.File, error) {
	for _, file := range procsFiles(cgroups) {
		// A path as a cgroup namespace has it may be another cgroup's on the host.
		if procs, err := os.ReadFile(file); err == nil && lists(procs, pid) {
			return os.OpenFile(file, os.O_WRONLY, 0)
		}
	}
	return nil, fs.ErrNotExist
}

// procsFiles are files that may list a process, by its cgroups.
func procsFiles(cgroups string) []string {
	var out []string
	for line := range strings.Lines(cgroups) {
		fields := strings.SplitN(strings.TrimSuffix(line, "\n"), ":", 3)
		if len(fields) < 3 || strings.HasSuffix(fields[2], " (deleted)") {
			continue
		}
		switch fields[1] {
		case "":
			out = append(out, filepath.Join(cgroupRoot, "unified", fields[2], "cgroup.procs"), filepath.Join(cgroupRoot, fields[2], "cgroup.procs"))
		case "pids":
			out = append(out, filepath.Join(cgroupRoot, "pids", fields[2], "cgroup.procs"))
		}
	}
	return out
}

// lists tells whether a line is the number.
func lists(procs []byte, pid int) bool {
	for line := range bytes.Lines(procs) {
		if string(bytes.TrimSuffix(line, []byte("\n"))) == strconv.Itoa(pid) {
			return true
		}
	}
	return false
}
