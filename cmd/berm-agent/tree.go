package main

import (
	"bytes"
	"errors"
	"maps"
	"os"
	"strconv"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// childReaper reaps this process's children: supervisors, orphans, and the container's command if this
// process is PID 1.
type childReaper struct {
	main int // pid of the command; 0 for none

	// mu is held while a supervisor is forked and while children are reaped. So while it is
	// held, each pid in the map is still a supervisor's, alive or not.
	mu          sync.Mutex
	supervisors map[int]bool
}

// add forks a supervisor.
func (n *childReaper) add(fork func() (*supervisor, error)) (*supervisor, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	s, err := fork()
	if err != nil {
		return nil, err
	}
	n.supervisors[s.pid] = true
	return s, nil
}

// reap reaps every child that has ended. If the command is among them, it returns the status.
func (n *childReaper) reap() (status syscall.WaitStatus, ended bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for {
		got, s, err := endedChild()
		switch {
		case errors.Is(err, syscall.EINTR):
		case err != nil || got <= 0:
			return status, ended
		case got == n.main:
			status, ended = s, true
		default:
			delete(n.supervisors, got)
		}
	}
}

// endedChild reaps one child that has ended, if any has. It never waits, and so needs no
// other thread.
func endedChild() (pid int, status syscall.WaitStatus, err error) {
	var s int32
	got, _, errno := syscall.RawSyscall6(syscall.SYS_WAIT4, ^uintptr(0), uintptr(unsafe.Pointer(&s)), syscall.WNOHANG, 0, 0, 0)
	if errno != 0 {
		return 0, 0, errno
	}
	return int(got), syscall.WaitStatus(s), nil
}

// signal signals a supervisor. It returns false if the supervisor is gone.
func (n *childReaper) signal(pid int, sig syscall.Signal) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.supervisors[pid] && kill(pid, sig) == nil
}

// task is a process as /proc describes it.
type task struct {
	pid, parent int
	state       byte
	threads     int
	start       uint64 // in ticks since the machine was started
}

// over reports whether a process has ended, whether or not it was reaped. A process whose
// first thread alone has ended is in state Z too, but has other threads.
func (t task) over() bool { return t.state == 'X' || t.state == 'Z' && t.threads <= 1 }

// ticksPerSecond is USER_HZ, which has been 100 on every machine since Linux 2.4.
const ticksPerSecond = 100

// ticksNow returns the start of a process that started now, in ticks.
func ticksNow() uint64 {
	return uint64(sinceBoot() / (time.Second / ticksPerSecond))
}

// tasks returns all visible processes, by pid.
func tasks() (map[int]task, error) {
	kernel.Lock()
	defer kernel.Unlock()
	dir, err := os.Open("/proc")
	if err != nil {
		return nil, err
	}
	defer func() { _ = dir.Close() }()
	names, err := dir.Readdirnames(-1)
	if err != nil {
		return nil, err
	}
	all := map[int]task{}
	for _, name := range names {
		pid, err := strconv.Atoi(name)
		if err != nil {
			continue
		}
		if t, ok := readTask(pid); ok {
			all[pid] = t
		}
	}
	return all, nil
}

func readTask(pid int) (task, bool) {
	fd, err := unix.Open("/proc/"+strconv.Itoa(pid)+"/stat", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return task{}, false
	}
	defer func() { _ = unix.Close(fd) }()
	var b [1 << 10]byte
	n, err := unix.Read(fd, b[:])
	if err != nil {
		return task{}, false
	}
	return parseTask(b[:n])
}

// parseTask parses a stat file as proc_pid_stat(5) describes it. The name may hold any bytes.
func parseTask(b []byte) (t task, ok bool) {
	open, end := bytes.IndexByte(b, ' '), bytes.LastIndexByte(b, ')')
	if open < 0 || end < 0 {
		return t, false
	}
	rest := bytes.Fields(b[end+1:])
	if len(rest) < 20 || len(rest[0]) != 1 {
		return t, false
	}
	var errs [4]error
	t.state = rest[0][0]
	t.pid, errs[0] = strconv.Atoi(string(b[:open]))
	t.parent, errs[1] = strconv.Atoi(string(rest[1]))
	t.threads, errs[2] = strconv.Atoi(string(rest[17]))
	t.start, errs[3] = strconv.ParseUint(string(rest[19]), 10, 64)
	return t, errors.Join(errs[:]...) == nil
}

// trees returns the roots and their descendants, without processes that have ended.
func trees(all map[int]task, roots map[int]bool) map[int]task {
	out := below(all, roots)
	for pid := range roots {
		if t, ok := all[pid]; ok && !t.over() {
			out[pid] = t
		}
	}
	return out
}

// below returns the descendants of roots, without the roots and processes that have ended.
func below(all map[int]task, roots map[int]bool) map[int]task {
	in := map[int]bool{}
	var isIn func(pid, depth int) bool
	isIn = func(pid, depth int) bool {
		if known, ok := in[pid]; ok {
			return known
		}
		t, ok := all[pid]
		// The list wasn't read at one moment, so it may even have a cycle.
		is := ok && depth < len(all) && (roots[t.parent] || isIn(t.parent, depth+1))
		in[pid] = is
		return is
	}
	out := map[int]task{}
	for pid, t := range all {
		if !t.over() && !roots[pid] && isIn(pid, 0) {
			out[pid] = t
		}
	}
	return out
}

// killTimeout bounds a kill of a whole tree.
const killTimeout = 5 * time.Second

// killBelow kills all descendants of a supervisor, and leaves the supervisor stopped: it ends
// by itself once it is continued. It returns false if some aren't gone by the deadline.
func (n *childReaper) killBelow(pid int, deadline time.Time) bool {
	// Otherwise the supervisor could end before its descendants, which would lose their parent.
	if !n.signal(pid, unix.SIGSTOP) {
		return true
	}
	roots := map[int]bool{pid: true}
	return killAll(deadline, func(all map[int]task) map[int]task { return below(all, roots) })
}

// killOrphans kills the orphans that this process has adopted and that started since a time, with their
// descendants. They include all descendants of a supervisor that was killed.
func (n *childReaper) killOrphans(since uint64, deadline time.Time) bool {
	return killAll(deadline, func(all map[int]task) map[int]task { return n.orphans(all, since) })
}

func (n *childReaper) orphans(all map[int]task, since uint64) map[int]task {
	n.mu.Lock()
	defer n.mu.Unlock()
	roots, own := map[int]bool{}, os.Getpid()
	for pid, t := range all {
		if t.parent == own && pid != n.main && !n.supervisors[pid] && t.start >= since {
			roots[pid] = true
		}
	}
	return trees(all, roots)
}

// killAll kills the processes that prey picks, until it picks none. It stops all of them
// before it kills any: a killed process would make room for the forks of others. It returns
// false if some are left at the deadline.
func killAll(deadline time.Time, prey func(all map[int]task) map[int]task) bool {
	stopped := map[int]uint64{}
	for delay := time.Millisecond; ; {
		all, err := tasks()
		if err != nil {
			return false
		}
		found, fresh := prey(all), false
		if len(found) == 0 {
			return true
		}
		for pid, t := range found {
			if start, ok := stopped[pid]; !ok || start != t.start {
				stopped[pid], fresh = t.start, true
				_ = kill(pid, unix.SIGSTOP) // without effect, the process stays in prey's next pick
			}
		}
		late := time.Now().After(deadline)
		if fresh && !late {
			continue
		}
		for pid := range found {
			_ = kill(pid, unix.SIGKILL)
		}
		if late {
			return false
		}
		time.Sleep(delay)
		delay = min(2*delay, 50*time.Millisecond)
	}
}

// runKill implements "kill PID BEGUN": it kills a serve process and its descendants. Hello has both
// values. If that process has ended, runKill kills all that PID 1 has adopted and that started since
// BEGUN. That includes the descendants. It returns 1 if some are left.
func runKill(args []string) int {
	if len(args) != 2 {
		return complain("usage: berm-agent kill PID BEGUN", exitUsage)
	}
	pid, err := strconv.Atoi(args[0])
	begun, err2 := strconv.ParseUint(args[1], 10, 64)
	if err != nil || err2 != nil || pid <= 1 {
		return complain("kill "+args[0]+" "+args[1]+": no process", exitUsage)
	}
	if !killServe(pid, begun) {
		return complain("kill "+args[0]+": some processes are not gone", 1)
	}
	return 0
}

// serveTask returns the task of a serve process, and whether it runs.
func serveTask(pid int, begun uint64) (t task, there bool) {
	_ = kernel.do(func() error { t, there = readTask(pid); return nil })
	return t, there && !t.over() && t.start <= begun
}

// killServe kills a serve process and its descendants. It returns false if some may be left. That
// includes a process that it couldn't stop first, which may have lost children.
func killServe(pid int, begun uint64) bool {
	deadline := time.Now().Add(killTimeout)
	late := time.Now().Add(killTimeout / 2)
	stopped := true
	root, there := serveTask(pid, begun)
	// A process that is about to end may have lost its children already. Wait until it has
	// stopped or ended.
	for there && root.state != 'T' {
		if time.Now().After(late) {
			stopped = false
			break
		}
		_ = kill(pid, unix.SIGSTOP)
		time.Sleep(time.Millisecond)
		root, there = serveTask(pid, begun)
	}
	seen := map[int]uint64{}
	killed := killAll(deadline, func(all map[int]task) map[int]task {
		if t, ok := all[pid]; len(seen) == 0 && (!ok || t.start != root.start) {
			there = false // somebody else has killed it
		}
		roots := map[int]bool{}
		for id, t := range all {
			switch {
			case there:
				roots[id] = id == pid && t.start == root.start
			default:
				roots[id] = t.parent == 1 && t.start >= begun && kill(id, 0) == nil
			}
			// A process that has lost its parent isn't below the root any more.
			if start, ok := seen[id]; ok && start == t.start {
				roots[id] = true
			}
		}
		maps.DeleteFunc(roots, func(_ int, is bool) bool { return !is })
		out := trees(all, roots)
		for id, t := range out {
			seen[id] = t.start
		}
		return out
	})
	return killed && stopped
}
