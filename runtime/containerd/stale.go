package containerd

import (
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// freeTime is how long the pipes of lost commands are held open: a shim that waits at
// one goes on to the next at once.
const freeTime = 100 * time.Millisecond

// sweepPatience is how long a lost command may take to end after its input has.
const sweepPatience = time.Second

// freePipes opens the pipes of commands that nobody is at: of a client that was killed
// while it had them started. The shim waits there for the other end, and answers
// nothing else about the container meanwhile, until the call's deadline.
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

// lostCommands are those of a container whose pipes are there, and that no process
// runs, be it this one or another on the same root. The caller releases them.
func (r root) lostCommands(id string) []*place {
	dir := r.path("containers", id, "exec")
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil // most containers have never run one
	}
	var out []*place
	for _, e := range entries {
		// An error is that it is being removed.
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
			// Both ends at once, so that it waits for nobody.
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
