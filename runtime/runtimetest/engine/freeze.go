package engine

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Freeze stops a daemon, as if it hung. It returns when the last of its threads has stopped,
// which may be a while after the signal. Thaw continues it, also if Freeze failed.
func Freeze(pid int) (thaw func() error, err error) {
	thaw = func() error { return unix.Kill(pid, unix.SIGCONT) }
	if err := unix.Kill(pid, unix.SIGSTOP); err != nil {
		return thaw, err
	}
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
		still, err := frozen(pid)
		if still || err != nil {
			return thaw, err
		}
		if time.Now().After(deadline) {
			return thaw, fmt.Errorf("process %d doesn't stop", pid)
		}
	}
}

func frozen(pid int) (bool, error) {
	stats, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid))
	if err != nil {
		return false, err
	}
	if len(stats) == 0 {
		return false, fmt.Errorf("there is no process %d", pid)
	}
	for _, path := range stats {
		b, err := os.ReadFile(path)
		if err != nil { // it has just ended
			return false, nil //nolint:nilerr // the next look tells
		}
		_, after, _ := strings.Cut(string(b), ") ") // no name of a daemon's thread has that
		if !strings.HasPrefix(after, "T") {
			return false, nil
		}
	}
	return true, nil
}
