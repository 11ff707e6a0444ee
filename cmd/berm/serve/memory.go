package serve

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"runtime/debug"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// trimEvery is how often a server trims itself. It costs a few milliseconds.
const trimEvery = 30 * time.Second

// trimLoop trims the process until its context ends.
func trimLoop(ctx context.Context, log *slog.Logger) error {
	tick := time.NewTicker(trimEvery)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			if err := trim(); err != nil {
				log.DebugContext(ctx, "memory_not_trimmed", "error", err)
			}
		case <-ctx.Done():
			return nil
		}
	}
}

// trim returns memory to the kernel: memory that the garbage collector has freed, and pages of
// the program's code. The kernel maps code in clusters around each place that ran once. Pages
// that run again come back from the page cache.
func trim() error {
	debug.FreeOSMemory()
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		return err
	}
	program, err := os.Readlink("/proc/self/exe")
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(maps)) {
		fields := strings.Fields(line)
		// Only code is certainly the same in memory as in the file.
		if len(fields) != 6 || fields[5] != program || fields[1] != "r-xp" {
			continue
		}
		var from, to uintptr
		if _, err := fmt.Sscanf(fields[0], "%x-%x", &from, &to); err != nil {
			return fmt.Errorf("read /proc/self/maps: %w", err)
		}
		if _, _, errno := unix.Syscall(unix.SYS_MADVISE, from, to-from, unix.MADV_DONTNEED); errno != 0 {
			return fmt.Errorf("give pages back: %w", errno)
		}
	}
	return nil
}
