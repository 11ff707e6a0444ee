package containerd

import (
	"errors"
	"io"
	"io/fs"
	"os"
	"testing"
	"time"
)

// TestSweepPrograms checks that a sweep ends programs whose client was killed, at any stage, and no others.
func TestSweepPrograms(t *testing.T) {
	r := newRuntime(t, shared.Get(t))
	id := sandbox(t, r)
	live, reads, ignores := start(t, r, id, "/bin/cat"), start(t, r, id, "/bin/cat"), start(t, r, id, "/bin/sleep", "70000")
	for _, s := range []*stdio{reads, ignores} { // as the kernel does for a process that is killed
		for _, f := range []io.Closer{s.stdin, s.stdout, s.stderr} {
			_ = f.Close()
		}
		s.place.release()
	}
	half, err := newStdio(t.Context(), r, id)
	must(t, err)
	half.closeSpare()
	half.place.release()
	waited := make(chan error, 1)
	go func() { // as the shim does for its input
		f, err := os.Open(half.place.file("stdin"))
		_ = f.Close()
		waited <- err
	}()
	must(t, newRuntime(t, shared.Get(t)).Sweep(t.Context()))
	for name, s := range map[string]*stdio{"one that reads": reads, "one that doesn't": ignores, "one that wasn't started": half} {
		if _, err := os.Lstat(s.place.dir); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s is left", name)
		}
	}
	select {
	case err := <-waited:
		if err != nil && !errors.Is(err, fs.ErrNotExist) { // it came too late
			t.Error(err)
		}
	case <-time.After(10 * time.Second):
		t.Error("who waits at the lost pipes waits on")
	}
	if code, _, err := ignores.Wait(t.Context()); code != 137 || err != nil {
		t.Errorf("one that doesn't read: exit code %d, %v", code, err)
	}
	echo(t, live)
	_ = live.Close()
	if code, _, err := live.Wait(t.Context()); code != 0 || err != nil {
		t.Errorf("another client's: exit code %d, %v", code, err)
	}
}
