package main

import (
	"errors"
	"fmt"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/runtime/agent/wire"
)

// watch starts a watch, and waits until it is ready.
func watch(t *testing.T, dir string, recursive bool) *session {
	t.Helper()
	s := begin(t, &wire.Request{Op: wire.OpWatch, File: &wire.File{Path: []byte(dir), Recursive: recursive}}, 0)
	a := &reply{}
	s.next(a)
	s.next(a)
	if len(a.items) != 1 || decode[wire.FileEvent](t, a.items[0]).Type != eventReady {
		t.Fatalf("it isn't ready: %q, %v", a.items, a.failure)
	}
	return s
}

// until gives the events up to one.
func (s *session) until(dir, last string) (events []string) {
	s.t.Helper()
	for {
		a := &reply{}
		if s.next(a); len(a.items) == 0 {
			s.t.Fatalf("it ended, after %q, before %q: %v", events, last, a.failure)
		}
		e := decode[wire.FileEvent](s.t, a.items[0])
		text := e.Type
		if len(e.Path) > 0 {
			text += " " + string(e.Path)[min(len(dir), len(e.Path)):]
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

func (s *session) stop() {
	s.t.Helper()
	if err := s.w.Send(wire.KindEnd); err != nil {
		s.t.Fatal(err)
	}
	a := &reply{}
	for s.next(a) {
	}
	if err := s.wait(); err != nil || s.input || a.result == nil {
		s.t.Errorf("%v, input %t, result %s", err, s.input, a.result)
	}
}

func TestWatch(t *testing.T) {
	dir := t.TempDir()
	plant(t, dir, map[string]string{"f": "x", "d/inner": "x", "out": "->/tmp"})
	s := watch(t, dir+"/", false)
	step := func(last string, want []string, err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		equal(t, s.until(dir, last), want)
	}
	step("modify /f", []string{"modify /f"}, os.Truncate(dir+"/f", 100))
	step("attrib /f", []string{"attrib /f"}, os.Chmod(dir+"/f", 0o600))
	step("create /g", []string{"rename /f", "create /g"}, os.Rename(dir+"/f", dir+"/g"))
	step("remove /g", []string{"remove /g"}, os.Remove(dir+"/g"))
	if err := os.WriteFile(dir+"/d/inner", []byte("unseen"), 0o644); err != nil {
		t.Fatal(err)
	}
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
	s := watch(t, dir, true)
	if err := os.WriteFile(dir+"/a/b/f", []byte("longer"), 0o644); err != nil {
		t.Fatal(err)
	}
	equal(t, s.until(dir, "modify /a/b/f"), []string{"modify /a/b/f"})
	// What comes into new directories before they are watched is told of all the same.
	plant(t, dir, map[string]string{"n/o/p/q": "x"})
	seen := s.until(dir, "create /n/o/p/q")
	for _, want := range []string{"create /n/", "create /n/o/", "create /n/o/p/"} {
		if !contains(seen, want) {
			t.Errorf("%s isn't in %q", want, seen)
		}
	}
	// Directories that move are known by their new names.
	if err := os.Rename(dir+"/n", dir+"/m"); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(dir+"/m/o/p/z", nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if seen := s.until(dir, "create /m/o/p/z"); !contains(seen, "rename /n/") || !contains(seen, "create /m/") {
		t.Errorf("%q", seen)
	}
	elsewhere := t.TempDir()
	if err := os.Rename(dir+"/m", elsewhere+"/m"); err != nil {
		t.Fatal(err)
	}
	if seen := s.until(dir, "rename /m/"); contains(seen, "create /m/") {
		t.Logf("told twice: %q", seen)
	}
	if err := os.WriteFile(elsewhere+"/m/o/p/unseen", nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(dir+"/last", 0o755); err != nil {
		t.Fatal(err)
	}
	for _, e := range s.until(dir, "create /last/") {
		if e != "create /last/" && e != "attrib /m/" {
			t.Errorf("what is elsewhere is seen: %s", e)
		}
	}
	s.stop()
}

func contains(all []string, one string) bool {
	for _, s := range all {
		if s == one {
			return true
		}
	}
	return false
}

func TestWatchOverflows(t *testing.T) {
	mustRoot(t)
	limit := maxWatches
	if b, err := os.ReadFile("/proc/sys/fs/inotify/max_user_watches"); err == nil {
		var most int
		if _, err := fmt.Sscan(string(b), &most); err == nil {
			limit = min(limit, most)
		}
	}
	dir := t.TempDir()
	for i := range limit + 10 {
		if err := os.Mkdir(fmt.Sprintf("%s/%05d", dir, i), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	s := begin(t, &wire.Request{Op: wire.OpWatch, File: &wire.File{Path: []byte(dir), Recursive: true}}, 0)
	a := &reply{}
	for len(a.items) < 2 {
		s.next(a)
	}
	if first, second := decode[wire.FileEvent](t, a.items[0]), decode[wire.FileEvent](t, a.items[1]); first.Type != eventReady || second.Type != eventOverflow {
		t.Errorf("%+v, %+v", first, second)
	}
	// Those that are watched are.
	if err := os.WriteFile(dir+"/00001/f", nil, 0o644); err != nil {
		t.Fatal(err)
	}
	equal(t, s.until(dir, "create /00001/f"), []string{"create /00001/f"})
	s.stop()
}

// Berm takes no events for a while.
func TestWatchQueueOverflows(t *testing.T) {
	dir := t.TempDir()
	s := watch(t, dir, false)
	for i := range 60_000 { // the kernel keeps 16,384, and the socket some
		name := fmt.Sprintf("%s/%d", dir, i%2)
		fd, err := unix.Open(name, unix.O_CREAT|unix.O_CLOEXEC|unix.O_WRONLY, 0o644)
		if err != nil {
			t.Fatal(err)
		}
		_ = unix.Close(fd)
		if err := os.Remove(name); err != nil {
			t.Fatal(err)
		}
	}
	s.until(dir, "overflow")
	s.stop()
}

func TestWatchFails(t *testing.T) {
	dir := t.TempDir()
	plant(t, dir, map[string]string{"f": "x", "pipe": "|"})
	for name, class := range map[string]wire.Class{"f": wire.ClassInvalid, "pipe": wire.ClassInvalid, "none": wire.ClassNotFound} {
		operate(t, wire.OpWatch, &wire.File{Path: []byte(dir + "/" + name)}, nil).fails(t, class)
	}
	s := watch(t, dir, true)
	if err := s.w.Send(wire.KindData, []byte("what")); err != nil { // it takes none
		t.Fatal(err)
	}
	if err := s.wait(); !errors.Is(err, errGone) {
		t.Errorf("%v", err)
	}
}

// What this user may not see is left out, and no reason to look again.
func TestWatchByAnotherUser(t *testing.T) {
	mustRoot(t)
	dir := t.TempDir()
	open(t, dir)
	plant(t, dir, map[string]string{"secret/": "", "z/": ""})
	if err := os.Chmod(dir+"/secret", 0o700); err != nil {
		t.Fatal(err)
	}
	s := begin(t, &wire.Request{Op: wire.OpWatch, File: &wire.File{Path: []byte(dir), Recursive: true}}, 1234)
	a := &reply{}
	for len(a.items) == 0 {
		s.next(a)
	}
	plant(t, dir, map[string]string{"secret/x": "", "z/x": ""})
	if first := s.until(dir, "create /z/x")[0]; first != "create /z/x" {
		t.Errorf("%s", first)
	}
	s.stop()
}
