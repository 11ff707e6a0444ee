package agent

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/agent/wire"
	"github.com/bermhq/berm/runtime/runtimetest"
)

// TestStrangers checks that nobody is let in while nobody knows who the first process is. The
// first sweep finds out.
func TestStrangers(t *testing.T) {
	b := newFixture(t)
	id := b.create(t, "x")
	must(t, b.Close())
	b.open(t)
	b.serve(t, "x", prints("", 5))
	b.mu.Lock()
	box := b.containers[dirName("x")]
	b.mu.Unlock()
	if n := box.connections(); n > 0 || box.accepts {
		t.Errorf("%d were let in", n)
	}
	must(t, b.Sweep(t.Context()))
	await(t, "the program to be let in", box.waits)
	if !box.pidIs(os.Getpid()) {
		t.Error("another is the first process")
	}
	if res, err := b.Exec(t.Context(), id, runtime.Exec{Command: []string{"x"}}); err != nil || res.ExitCode != 5 {
		t.Errorf("%+v, %v", res, err)
	}
}

func TestDirectories(t *testing.T) {
	b := newFixture(t)
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
	must(t, b.Close(), os.Mkdir(filepath.Join(b.root, dirName("stray")), 0o755),
		os.MkdirAll(filepath.Join(b.root, dirName("deaf"), wire.Socket, "x"), 0o755))
	b.open(t)
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
	b := newFixture(t)
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
