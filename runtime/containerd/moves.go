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

// moveInterval is well below the time after which the kernel is slow again, some 16 ms.
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

// stay puts this process into the cgroup that it is in, until done is closed.
func stay(done <-chan struct{}) {
	own, err := openOwnProcs()
	if err != nil {
		return
	}
	defer func() { _ = own.Close() }()
	tick := time.NewTicker(moveInterval)
	defer tick.Stop()
	for {
		if _, err := own.WriteString("0"); err != nil { // whoever writes it
			return
		}
		select {
		case <-tick.C:
		case <-done:
			return
		}
	}
}

// openOwnProcs opens the list of processes of a cgroup that this process is in.
func openOwnProcs() (*os.File, error) {
	own, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return nil, err
	}
	for _, file := range ownProcs(string(own)) {
		// A path as a cgroup namespace has it may be another cgroup's on the host.
		if procs, err := os.ReadFile(file); err == nil && lists(procs, os.Getpid()) {
			return os.OpenFile(file, os.O_WRONLY, 0)
		}
	}
	return nil, fs.ErrNotExist
}

// ownProcs are files that may list this process, by its /proc/self/cgroup.
func ownProcs(cgroups string) []string {
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
