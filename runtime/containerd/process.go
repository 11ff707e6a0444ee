package containerd

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"
)

// process is a process of this host, as it was at one moment. The start tells it from
// another process that gets its pid later.
type process struct {
	pid     int
	state   byte
	threads int
	start   uint64 // in ticks of 1/100 s since the host's boot
	size    uint64 // of its address space
}

// readProcess reads the state of a process. The error is fs.ErrNotExist if there is none.
func readProcess(pid int) (process, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if errors.Is(err, unix.ESRCH) {
		err = fs.ErrNotExist
	}
	if err != nil {
		return process{}, err
	}
	return parseStat(pid, b)
}

// parseStat reads /proc/PID/stat, see proc_pid_stat(5). The process chose the name in it: any bytes, in
// parentheses.
func parseStat(pid int, stat []byte) (process, error) {
	fields := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:])
	if len(fields) < 21 || len(fields[0]) != 1 {
		return process{}, fmt.Errorf("the kernel's words on process %d can't be understood", pid)
	}
	p := process{pid: pid, state: fields[0][0]}
	var errs [3]error
	p.threads, errs[0] = strconv.Atoi(string(fields[17]))
	p.start, errs[1] = strconv.ParseUint(string(fields[19]), 10, 64)
	p.size, errs[2] = strconv.ParseUint(string(fields[20]), 10, 64)
	return p, errors.Join(errs[:]...)
}

// over reports whether a process has ended, or is ending and does nothing more. A process
// whose first thread has ended lives on in its other threads.
func (p process) over() bool {
	ended := p.state == 'Z' || p.state == 'X' || p.state == 'x' || p.size == 0
	return ended && p.threads <= 1
}

// ends reports whether all threads that a process still has are on their way out, and have let
// go of its memory. The first process of a PID namespace stays so, with its last thread, until
// nothing is left in there (zap_pid_ns_processes in the kernel's kernel/pid_namespace.c).
func (p process) ends() bool {
	if p.size != 0 {
		return false
	}
	dir := fmt.Sprintf("/proc/%d/task", p.pid)
	tasks, err := os.ReadDir(dir)
	if err != nil {
		return errors.Is(err, fs.ErrNotExist)
	}
	for _, t := range tasks {
		stat, err := os.ReadFile(filepath.Join(dir, t.Name(), "stat"))
		if err != nil {
			continue // it has ended
		}
		if thread, err := parseStat(p.pid, stat); err != nil || thread.size != 0 {
			return false
		}
	}
	return true
}

// same reports whether p and q are one process.
func (p process) same(q process) bool { return p.pid == q.pid && p.start == q.start }

// readLimited reads the beginning of a file.
func readLimited(name string, limit int64) ([]byte, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	return io.ReadAll(io.LimitReader(f, limit))
}
