package runtime

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestOnThread checks that nobody else runs on a thread that was changed.
func TestOnThread(t *testing.T) {
	own, err := os.Readlink("/proc/self/ns/mnt")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error)
	for range 50 {
		go func() { done <- OnThread(func() error { return unix.Unshare(unix.CLONE_NEWNS) }) }()
	}
	for range 50 {
		if err := <-done; err != nil {
			t.Fatal(err)
		}
	}
	tasks, err := filepath.Glob("/proc/self/task/*/ns/mnt")
	if err != nil {
		t.Fatal(err)
	}
	deadline := time.Now().Add(10 * time.Second)
	for _, task := range tasks {
		for ns, err := os.Readlink(task); err == nil && ns != own; ns, err = os.Readlink(task) {
			if time.Now().After(deadline) {
				t.Fatalf("%s stays in another namespace", task)
			}
			time.Sleep(time.Millisecond) // threads take a moment to end
		}
	}
}
