package agent

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/agent/wire"
	"github.com/bermhq/berm/runtime/runtimetest"
)

// While nobody knows who the first process is, the others in its container are let in
// slowly, and drive nobody out.
func TestStrangers(t *testing.T) {
	slow := hurry
	slow.hello, slow.reject = time.Minute, time.Hour
	b := newBedOf(t, slow)
	box := b.known(b.create(t, "x"))
	box.meet(runtime.Container{})
	for range 3 * maxStrangers {
		b.dial(t, "x")
	}
	await(t, "the first to be let in", func() bool { return box.connections() == maxStrangers })
	time.Sleep(50 * time.Millisecond) // for those that shouldn't be
	if n := box.connections(); n != maxStrangers {
		t.Errorf("%d were let in at once, want %d", n, maxStrangers)
	}

	b = newBed(t)
	b.engine.setPid(1)
	box = b.known(b.create(t, "x"))
	box.meet(runtime.Container{})
	for range maxSessions {
		b.greeted(t, "x")
	}
	await(t, "them to be let in", func() bool { return box.connections() == maxSessions })
	if late := b.greeted(t, "x"); !late.hungUp() || box.connections() != maxSessions {
		t.Error("one more was let in, or drove another out")
	}
}

// The first sweep finds out who the first processes are.
func TestSweepMeets(t *testing.T) {
	b := newBed(t)
	id := b.create(t, "x")
	must(t, b.Close())
	b.open(t)
	must(t, b.Sweep(t.Context()))
	if box := b.known(id); box == nil || !box.pidIs(os.Getpid()) {
		t.Error("it isn't known")
	}
}

func TestDirectories(t *testing.T) {
	b := newBed(t)
	dirs := func() int {
		entries, err := os.ReadDir(b.root)
		must(t, err)
		return len(entries)
	}
	id := b.create(t, "x")
	_, err := b.Create(t.Context(), runtime.Spec{Name: "x", Image: "none", Command: []string{"x"}})
	if err == nil || dirs() != 1 {
		t.Errorf("of a name that is taken: %v, and %d directories", err, dirs())
	}
	if _, err := b.Create(t.Context(), runtime.Spec{Name: "y", Image: "none", Command: []string{"x"}}); err == nil || dirs() != 1 {
		t.Errorf("of an image that isn't there: %v, and %d directories", err, dirs())
	}
	off, err := b.Create(t.Context(), runtime.Spec{Name: "off", Image: "berm.local/busybox:latest", Agent: &runtime.Agent{}})
	if err != nil || dirs() != 1 {
		t.Errorf("without a directory: %v, and %d directories", err, dirs())
	}
	info, err := os.Stat(filepath.Join(b.root, dirName("x"), wire.Socket))
	if err != nil || info.Mode().Perm() != 0o666 {
		t.Errorf("%v, %v", info, err)
	}
	for _, id := range []string{id, off.ID} {
		if err := b.Remove(t.Context(), id); err != nil || dirs() != 0 && id == off.ID {
			t.Errorf("removed: %v, and %d directories", err, dirs())
		}
	}
	// Behind Berm's back.
	id = b.create(t, "z")
	kept := b.create(t, "kept")
	must(t, b.engine.Remove(t.Context(), id))
	must(t, os.Mkdir(filepath.Join(b.root, dirName("stray")), 0o755))
	if err := b.Sweep(t.Context()); err != nil || dirs() != 1 {
		t.Errorf("swept: %v, and %d directories", err, dirs())
	}
	b.serve(t, "kept", prints("", 0))
	if res, err := b.Exec(t.Context(), kept, runtime.Exec{Command: []string{"true"}}); err != nil {
		t.Errorf("%+v, %v", res, err)
	}
}

// The program has room under any limit of processes, and no limit stays none.
func TestLeastLimit(t *testing.T) {
	b := newBed(t)
	for name, agent := range map[string]*runtime.Agent{"with-a-socket": nil, "without": {}} {
		for asked, want := range map[int64]int64{0: 0, 1: minPids, minPids: minPids, 128: 128} {
			spec := runtime.Spec{Name: fmt.Sprint(name, asked), Image: runtimetest.DefaultImage, Command: []string{"sleep"}, PidsLimit: asked, Agent: agent}
			if _, err := b.Create(t.Context(), spec); err != nil {
				t.Fatal(err)
			}
			if got := b.engine.spec.PidsLimit; got != want {
				t.Errorf("%s: %d became %d, want %d", name, asked, got, want)
			}
		}
	}
}
