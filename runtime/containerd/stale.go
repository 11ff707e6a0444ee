package containerd

import (
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// freeTime is how long the pipes of lost programs are held open. A shim that waits at one
// opens them one after the other, at once.
const freeTime = 100 * time.Millisecond

// sweepPatience is how long a lost program may take to end after its input has ended.
const sweepPatience = time.Second

// freePipes opens the pipes of programs whose client was killed while it started them. Until
// then, or its call's deadline, the shim waits for the other end, and answers no other call
// about the container.
func (r root) freePipes(id string) (letGo func()) {
	lost := r.lostCommands(id)
	files := openPipes(lost)
	return func() {
		closePipes(files)
		for _, p := range lost {
			p.release()
		}
	}
}

// lostCommands returns the places of programs in a container that no process on this root
// owns. The caller releases them.
func (r root) lostCommands(id string) []*place {
	dir := r.path("containers", id, "exec")
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil // most containers never ran a program
	}
	var out []*place
	for _, e := range entries {
		// On an error, the directory is being removed.
		if p, err := lockPlace(filepath.Join(dir, e.Name())); err == nil && p != nil {
			out = append(out, p)
		}
	}
	return out
}

func openPipes(lost []*place) []*os.File {
	var out []*os.File
	for _, p := range lost {
		for _, name := range []string{"stdin", "stdout", "stderr"} {
			// Both ends at once, so that open doesn't wait.
			f, err := os.OpenFile(p.file(name), os.O_RDWR|unix.O_NONBLOCK|unix.O_NOFOLLOW, 0)
			if err == nil {
				out = append(out, f)
			}
		}
	}
	return out
}

func closePipes(files []*os.File) {
	for _, f := range files {
		_ = f.Close()
	}
}
