package files

import (
	"fmt"
	"io"
	"os"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/runtime/agent/wire"
)

// watcher is a watch under way.
type watcher struct {
	*caller
	t    *testing.T
	dir  string
	end  *io.PipeWriter // its close ends the watch
	done chan error
}

// watch starts a watch, and waits until it is ready.
func watch(t *testing.T, uid int, dir string, recursive bool) *watcher {
	t.Helper()
	in, end := io.Pipe()
	w := &watcher{caller: &caller{upload: in, events: make(chan *wire.FileEvent)}, t: t, dir: trim(dir), end: end, done: make(chan error, 1)}
	go func() { w.done <- w.do(uid, wire.OpWatch, &wire.File{Path: []byte(dir), Recursive: recursive}) }()
	if seen := w.until("ready"); len(seen) != 1 {
		t.Fatalf("it begins with %q", seen)
	}
	return w
}

// until gives the events up to one.
func (w *watcher) until(last string) (events []string) {
	w.t.Helper()
	for {
		var e *wire.FileEvent
		select {
		case e = <-w.events:
		case err := <-w.done:
			w.t.Fatalf("it ended, after %q, before %q: %v", events, last, err)
		}
		text := e.Type
		if len(e.Path) > 0 {
			text += " " + string(e.Path)[min(len(w.dir), len(e.Path)):]
		}
		if e.Dir {
			text += "/"
		}
		if len(events) == 0 || events[len(events)-1] != text {
			events = append(events, text)
		}
		if text == last {
			return events
		}
	}
}

// stop ends the watch.
func (w *watcher) stop() {
	w.t.Helper()
	must(w.t, w.end.Close())
	for {
		select {
		case <-w.events:
		case err := <-w.done:
			if err != nil {
				w.t.Error(err)
			}
			return
		}
	}
}

func TestWatch(t *testing.T) {
	dir := t.TempDir()
	plant(t, dir, map[string]string{"f": "x", "d/inner": "x", "out": "->/tmp"})
	s := watch(t, 0, dir+"/", false)
	step := func(last string, want []string, err error) {
		t.Helper()
		must(t, err)
		equal(t, s.until(last), want)
	}
	step("modify /f", []string{"modify /f"}, os.Truncate(dir+"/f", 100))
	step("attrib /f", []string{"attrib /f"}, os.Chmod(dir+"/f", 0o600))
	step("create /g", []string{"rename /f", "create /g"}, os.Rename(dir+"/f", dir+"/g"))
	step("remove /g", []string{"remove /g"}, os.Remove(dir+"/g"))
	must(t, os.WriteFile(dir+"/d/inner", []byte("unseen"), 0o644))
	step("create /n\xff/", []string{"create /n\xff/"}, os.Mkdir(dir+"/n\xff", 0o755))
	step("attrib /", []string{"attrib /"}, os.Chmod(dir, 0o700))
	step("remove /", []string{"remove /d/", "remove /n\xff/", "remove /out", "remove /"}, removeInOrder(dir))
	s.stop()
}

func removeInOrder(dir string) error {
	for _, name := range []string{"/d/inner", "/d", "/n\xff", "/out", ""} {
		if err := os.Remove(dir + name); err != nil {
			return err
		}
	}
	return nil
}

func TestWatchTree(t *testing.T) {
	dir := t.TempDir()
	plant(t, dir, map[string]string{"a/b/f": "x", "to a": "->a"})
	s := watch(t, 0, dir, true)
	must(t, os.WriteFile(dir+"/a/b/f", []byte("longer"), 0o644))
	equal(t, s.until("modify /a/b/f"), []string{"modify /a/b/f"})
	// What comes into new directories before they are watched is told of all the same.
	plant(t, dir, map[string]string{"n/o/p/q": "x"})
	seen := s.until("create /n/o/p/q")
	for _, want := range []string{"create /n/", "create /n/o/", "create /n/o/p/"} {
		if !slices.Contains(seen, want) {
			t.Errorf("%s isn't in %q", want, seen)
		}
	}
	// A tree that comes as a whole may be large.
	large := t.TempDir()
	for i := range 600 {
		must(t, os.MkdirAll(fmt.Sprintf("%s/%d", large, i), 0o755))
	}
	must(t, os.Rename(large, dir+"/large"))
	if seen := s.until("create /large/99/"); len(seen) != 601 {
		t.Errorf("%d events", len(seen))
	}
	// Directories that move are known by their new names.
	must(t, os.Rename(dir+"/n", dir+"/m"))
	must(t, os.WriteFile(dir+"/m/o/p/z", nil, 0o644))
	if seen := s.until("create /m/o/p/z"); !slices.Contains(seen, "rename /n/") || !slices.Contains(seen, "create /m/") {
		t.Errorf("%q", seen)
	}
	elsewhere := t.TempDir()
	must(t, os.Rename(dir+"/m", elsewhere+"/m"))
	if seen := s.until("rename /m/"); slices.Contains(seen, "create /m/") {
		t.Logf("told twice: %q", seen)
	}
	must(t, os.WriteFile(elsewhere+"/m/o/p/unseen", nil, 0o644))
	must(t, os.Mkdir(dir+"/last", 0o755))
	for _, e := range s.until("create /last/") {
		if e != "create /last/" && e != "attrib /m/" {
			t.Errorf("what is elsewhere is seen: %s", e)
		}
	}
	s.stop()
}

func TestWatchOverflows(t *testing.T) {
	limit := maxWatches
	if b, err := os.ReadFile("/proc/sys/fs/inotify/max_user_watches"); err == nil {
		var most int
		if _, err := fmt.Sscan(string(b), &most); err == nil {
			limit = min(limit, most)
		}
	}
	dir := t.TempDir()
	mount(t, "tmpfs", dir, "size=64m,mode=755") // a disk would take ten seconds
	for i := range limit + 10 {
		must(t, os.Mkdir(fmt.Sprintf("%s/%05d", dir, i), 0o755))
	}
	s := watch(t, 0, dir, true)
	equal(t, s.until("overflow"), []string{"overflow"})
	// Those that are watched are.
	must(t, os.WriteFile(dir+"/00001/f", nil, 0o644))
	equal(t, s.until("create /00001/f"), []string{"create /00001/f"})
	s.stop()
}

// Berm takes no events for a while.
func TestWatchQueueOverflows(t *testing.T) {
	dir := t.TempDir()
	mount(t, "tmpfs", dir, "size=1m,mode=755")
	s := watch(t, 0, dir, false)
	for i := range 60_000 { // the kernel keeps 16,384, and the socket some
		name := fmt.Sprintf("%s/%d", dir, i%2)
		fd, err := unix.Open(name, unix.O_CREAT|unix.O_CLOEXEC|unix.O_WRONLY, 0o644)
		must(t, err)
		_ = unix.Close(fd)
		must(t, os.Remove(name))
	}
	s.until("overflow")
	s.stop()
}

func TestWatchFails(t *testing.T) {
	dir := t.TempDir()
	plant(t, dir, map[string]string{"f": "x", "pipe": "|"})
	for name, class := range map[string]wire.Class{"f": wire.ClassInvalid, "pipe": wire.ClassInvalid, "none": wire.ClassNotFound} {
		operate(t, wire.OpWatch, file4(dir+"/"+name), "").fails(t, class)
	}
	s := watch(t, 0, dir, true)
	if _, err := s.end.Write([]byte("w")); err != nil { // it takes none
		t.Fatal(err)
	}
	if err := <-s.done; err == nil {
		t.Error("it took content")
	}
}

// What this user may not see is left out, and no reason to look again.
func TestWatchByAnotherUser(t *testing.T) {
	mustRoot(t)
	dir := t.TempDir()
	open(t, dir)
	plant(t, dir, map[string]string{"secret/": "", "z/": ""})
	must(t, os.Chmod(dir+"/secret", 0o700))
	s := watch(t, 1234, dir, true)
	plant(t, dir, map[string]string{"secret/x": "", "z/x": ""})
	if first := s.until("create /z/x")[0]; first != "create /z/x" {
		t.Errorf("%s", first)
	}
	s.stop()
}
