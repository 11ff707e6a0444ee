package containerd

import (
	"errors"
	"io/fs"
	"os"
	"testing"
	"time"
)

// A sweep takes the pipes of a command that nobody is at, and not those of one that
// another process runs: its output would be gone.
func TestSweepPipes(t *testing.T) {
	r, id := remainsRuntime(t), newID()
	if err := os.MkdirAll(r.path("containers", id), 0o700); err != nil {
		t.Fatal(err)
	}
	var made [2]*pipes
	for i := range made {
		var err error
		if made[i], err = newPipes(t.Context(), r.path("containers", id, "exec", string(rune('a'+i))), true); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(made[i].close)
	}
	lost, other := made[0], made[1]
	lost.place.release() // as the kernel does for a process that is killed
	// So the shim waits for input.
	waited := make(chan error, 1)
	go func() {
		f, err := os.Open(lost.file("stdin"))
		_ = f.Close()
		waited <- err
	}()
	for range 2 {
		if err := r.sweepPipes(t.Context(), []string{id}); err != nil {
			t.Error(err)
		}
	}
	if !gone(r.path("containers", id, "exec", "a")) {
		t.Error("the lost command's pipes are left")
	}
	select {
	case err := <-waited:
		if err != nil && !errors.Is(err, fs.ErrNotExist) { // it came too late
			t.Error(err)
		}
	case <-time.After(10 * time.Second):
		t.Error("who waits at the lost pipes waits on")
	}
	for _, name := range []string{"owner", "stdin", "stdout", "stderr"} {
		if gone(other.file(name)) {
			t.Errorf("%s of another process's command was taken", name)
		}
	}
	r.freePipes(id)()
	other.close()
	if !gone(r.path("containers", id, "exec", "b")) {
		t.Error("the command's own end left its pipes")
	}
}
