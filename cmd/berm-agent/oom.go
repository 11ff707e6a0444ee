package main

import (
	"bytes"
	"os"
	"strconv"
)

// oomCounter counts the processes that the kernel killed for want of memory in the
// control group of this process. Many goroutines may use it.
type oomCounter struct{ f *os.File }

// openOOM returns nil if the kernel has no such count.
func openOOM() *oomCounter {
	for _, path := range []string{"/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control"} {
		if f, err := os.Open(path); err == nil {
			c := &oomCounter{f}
			if c.count() >= 0 {
				return c
			}
			_ = f.Close()
		}
	}
	return nil
}

// count returns the number of killed processes, or -1 if it isn't known.
func (c *oomCounter) count() int {
	if c == nil {
		return -1
	}
	var b [1 << 10]byte
	n := 0
	_ = kernel.do(func() (err error) { n, err = c.f.ReadAt(b[:], 0); return err }) // io.EOF
	for line := range bytes.Lines(b[:n]) {
		if name, value, ok := bytes.Cut(bytes.TrimSpace(line), []byte(" ")); ok && string(name) == "oom_kill" {
			if count, err := strconv.Atoi(string(value)); err == nil {
				return count
			}
		}
	}
	return -1
}
