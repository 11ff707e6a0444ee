package engine

import (
	"bufio"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// testOwnerKilled has a process of its own start an engine in a directory, and kills it.
// The watchdog, or the next engine's start if that is killed first, leaves nothing.
func testOwnerKilled(t *testing.T, signal unix.Signal, first, again func(dir string)) {
	if dir := os.Getenv("BERM_ENGINE_TEST_DIR"); dir != "" {
		first(dir)
		_, _ = fmt.Println(watchdog.pid, t.TempDir())
		select {}
	}
	for _, tt := range []struct {
		name     string
		watchdog bool
	}{{"alone", true}, {"with its watchdog", false}} {
		t.Run(tt.name, func(t *testing.T) {
			base, err := os.MkdirTemp("", "berm") // t.TempDir's paths are too long
			must(t, err)
			t.Cleanup(func() { _ = os.RemoveAll(base) })
			parent, _, _ := strings.Cut(t.Name(), "/")
			cmd := exec.Command(os.Args[0], "-test.run=^"+parent+"$")
			cmd.Env = append(os.Environ(), "BERM_ENGINE_TEST_DIR="+base, "TMPDIR="+base)
			cmd.Stderr = t.Output()
			out, err := cmd.StdoutPipe()
			must(t, err)
			must(t, cmd.Start())
			var pid int
			var temporary string
			if _, err := fmt.Fscanln(bufio.NewReader(out), &pid, &temporary); err != nil {
				t.Error(err)
			}
			places, _ := filepath.Glob(filepath.Join(base, "berm*")) // the pattern is good
			var left, paths []string
			for _, dir := range places {
				p := &place{dir: dir, name: filepath.Base(dir)}
				left = append(left, leftovers(t, p)...)
				paths = append(paths, elsewhere(p)...)
			}
			if len(places) != 2 || len(left) < 4 || len(paths) == 0 || !strings.HasPrefix(temporary, base+"/"+tempPrefix) {
				t.Errorf("nothing to clean up: %v, %v, %v, %s", places, left, paths, temporary)
			}
			if !tt.watchdog {
				_ = unix.Kill(pid, unix.SIGKILL)
			}
			must(t, cmd.Process.Signal(signal))
			_ = cmd.Wait() // it was killed
			if tt.watchdog {
				for deadline := time.Now().Add(20 * time.Second); runs(pid) && time.Now().Before(deadline); {
					time.Sleep(10 * time.Millisecond)
				}
			} else {
				again(base)
			}
			for _, dir := range places {
				for _, what := range leftovers(t, &place{dir: dir, name: filepath.Base(dir)}) {
					t.Errorf("left behind: %s", what)
				}
			}
			for _, path := range slices.DeleteFunc(paths, func(path string) bool { return !exists(path) }) {
				t.Errorf("left behind: %s", path)
			}
		})
	}
}

// elsewhere gives what there is in directories that all engines share.
func elsewhere(p *place) []string {
	paths := make(map[string]bool)
	p.noteShared(paths)
	maps.DeleteFunc(paths, func(path string, _ bool) bool { return !exists(path) })
	return slices.Collect(maps.Keys(paths))
}

func runs(pid int) bool {
	_, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", pid)) // a zombie has none
	return err == nil
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}
