package main

import (
	"fmt"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/runtime/agent/wire"
)

func TestDir(t *testing.T) {
	dir := t.TempDir()
	plant(t, dir, map[string]string{
		"b": "12", "a/x": "1", "a/s/y": "1", "a.b": "", "bad\xff": "", "link": "->a", "out": "->/", "pipe": "|", "empty/": "", ".hidden": "",
	})
	for name, tt := range map[string]struct {
		path  string
		depth int
		want  []string
		class wire.Class
	}{
		"alone":       {depth: 1, want: []string{".hidden", "a", "a.b", "b", "bad\xff", "empty", "link", "out", "pipe"}},
		"no depth":    {want: []string{".hidden", "a", "a.b", "b", "bad\xff", "empty", "link", "out", "pipe"}},
		"two":         {depth: 2, want: []string{".hidden", "a", "a/s", "a/x", "a.b", "b", "bad\xff", "empty", "link", "out", "pipe"}},
		"all":         {depth: 1000, want: []string{".hidden", "a", "a/s", "a/s/y", "a/x", "a.b", "b", "bad\xff", "empty", "link", "out", "pipe"}},
		"empty":       {path: "/empty", depth: 3},
		"slash":       {path: "/a/s//", depth: 3, want: []string{"y"}},
		"of a link":   {path: "/link", depth: 3, want: []string{"s", "s/y", "x"}},
		"of a file":   {path: "/b", class: wire.ClassInvalid},
		"of a pipe":   {path: "/pipe", class: wire.ClassInvalid},
		"of nothing":  {path: "/none", class: wire.ClassNotFound},
		"no such one": {depth: -1, class: wire.ClassInvalid},
	} {
		t.Run(name, func(t *testing.T) {
			a := operate(t, wire.OpDir, &wire.File{Path: []byte(dir + tt.path), Depth: tt.depth}, nil)
			if tt.class != "" {
				a.fails(t, tt.class)
				return
			}
			equal(t, a.succeeds(t).names(t, strings.TrimRight(dir+tt.path, "/")), tt.want)
		})
	}
	a := operate(t, wire.OpDir, &wire.File{Path: []byte(dir)}, nil)
	for _, item := range a.items {
		info := decode[wire.FileInfo](t, item)
		base := filepath.Base(string(info.Path))
		if want := map[string]string{"link": "a", "out": "/"}[base]; string(info.Target) != want {
			t.Errorf("%s: target %q", base, info.Target)
		}
		if base == "b" && (info.Size != 2 || info.Mode != unix.S_IFREG|0o644) {
			t.Errorf("%+v", info)
		}
	}
}

// The kernel's own directories are in the root's list, but not what is in them; nor what
// this user may not see.
func TestDirOfTheRoot(t *testing.T) {
	mustRoot(t)
	dir := t.TempDir()
	open(t, dir)
	plant(t, dir, map[string]string{"a/x": "", "b/x": ""})
	for name, flags := range map[string]uintptr{"proc": unix.MS_RDONLY, "sysfs": unix.MS_RDONLY} {
		if err := os.Mkdir(dir+"/"+name, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := unix.Mount(name, dir+"/"+name, name, flags, ""); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := unix.Unmount(dir+"/"+name, unix.MNT_DETACH); err != nil {
				t.Error(err)
			}
		})
	}
	if err := os.Chmod(dir+"/a", 0o700); err != nil {
		t.Fatal(err)
	}
	want := []string{"a", "b", "b/x", "proc", "sysfs"}
	equal(t, operateAs(t, 1234, wire.OpDir, &wire.File{Path: []byte(dir), Depth: 5}, nil).succeeds(t).names(t, dir), want)
	equal(t, operateAs(t, 1234, wire.OpGlob, &wire.File{Path: []byte(dir), Pattern: "**"}, nil).succeeds(t).names(t, dir), want)
	if a := operate(t, wire.OpSearch, &wire.File{Path: []byte(dir), Pattern: "Linux"}, nil).succeeds(t); len(a.items) > 0 {
		t.Errorf("%q", a.items)
	}
	operate(t, wire.OpSearch, &wire.File{Path: []byte("/proc/self"), Pattern: "Linux"}, nil).fails(t, wire.ClassInvalid, "kernel")
	operate(t, wire.OpTarRead, &wire.File{Path: []byte("/proc/self")}, nil).fails(t, wire.ClassInvalid, "kernel")
	operateAs(t, 1234, wire.OpTarRead, &wire.File{Path: []byte(dir)}, nil).fails(t, wire.ClassPermission, dir+"/a")
	operateAs(t, 1234, wire.OpDir, &wire.File{Path: []byte(dir + "/a")}, nil).fails(t, wire.ClassPermission)
	// Mounts stay, and so does what they hold.
	operate(t, wire.OpRemove, &wire.File{Path: []byte(dir + "/proc"), Recursive: true}, nil).fails(t, wire.ClassPrecondition, "mounted")
	operate(t, wire.OpRemove, &wire.File{Path: []byte(dir), Recursive: true}, nil).fails(t, wire.ClassPrecondition, "mounted")
	operate(t, wire.OpMove, &wire.File{Path: []byte(dir + "/proc"), To: []byte(dir + "/c")}, nil).fails(t, wire.ClassPrecondition, "mounted")
	operate(t, wire.OpCopy, &wire.File{Path: []byte(dir), To: []byte(dir + "-copy")}, nil).succeeds(t)
	left := in(t, dir+"-copy")
	for _, name := range []string{"proc", "sysfs"} {
		if !slices.Contains(left, name) {
			t.Errorf("%s wasn't copied", name)
		}
	}
	if len(left) > 6 {
		t.Errorf("copied: %q", left)
	}
}

// Deeper than a path can be long.
func deep(t *testing.T, dir string, depth int) {
	t.Helper()
	name := strings.Repeat("d", 200)
	fd, err := unix.Open(dir, unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	for range depth {
		next := -1
		if err = unix.Mkdirat(fd, name, 0o755); err == nil {
			next, err = unix.Openat(fd, name, unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		}
		_ = unix.Close(fd)
		if err != nil {
			t.Fatal(err)
		}
		fd = next
	}
	_ = unix.Close(fd)
}

func TestDeepTree(t *testing.T) {
	dir := t.TempDir()
	plant(t, dir, map[string]string{"t/": "", "t/a": "x", "t/z": "x"})
	deep(t, dir+"/t", 100)
	a := operate(t, wire.OpDir, &wire.File{Path: []byte(dir + "/t"), Depth: 1 << 30}, nil).succeeds(t)
	if n := len(a.items); n < 15 || n > 25 {
		t.Errorf("%d items", n)
	}
	operate(t, wire.OpSearch, &wire.File{Path: []byte(dir), Pattern: "y"}, nil).succeeds(t)
	operate(t, wire.OpGlob, &wire.File{Path: []byte(dir), Pattern: "**/y"}, nil).succeeds(t)
	operate(t, wire.OpTarRead, &wire.File{Path: []byte(dir + "/t")}, nil).fails(t, wire.ClassInvalid)
	operate(t, wire.OpCopy, &wire.File{Path: []byte(dir + "/t"), To: []byte(dir + "/c")}, nil).fails(t, wire.ClassInvalid)
	operate(t, wire.OpRemove, &wire.File{Path: []byte(dir + "/t"), Recursive: true}, nil).succeeds(t)
	equal(t, in(t, dir), nil)
}

// Files come and go while they are listed, packed and removed.
func TestVanishingFiles(t *testing.T) {
	dir := t.TempDir()
	plant(t, dir, map[string]string{"keep": "x"})
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			default:
			}
			name := fmt.Sprintf("%s/d%d", dir, i%7)
			_ = os.MkdirAll(name+"/e", 0o755)
			_ = os.WriteFile(name+"/e/f", []byte("x"), 0o644)
			_ = os.Symlink("/", name+"/e/g")
			_ = os.RemoveAll(fmt.Sprintf("%s/d%d", dir, (i+3)%7))
		}
	}()
	for range 40 {
		operate(t, wire.OpDir, &wire.File{Path: []byte(dir), Depth: 9}, nil).succeeds(t)
		operate(t, wire.OpGlob, &wire.File{Path: []byte(dir), Pattern: "**/f"}, nil).succeeds(t)
		operate(t, wire.OpSearch, &wire.File{Path: []byte(dir), Pattern: "x"}, nil).succeeds(t)
		operate(t, wire.OpTarRead, &wire.File{Path: []byte(dir)}, nil).succeeds(t)
	}
	close(stop)
	<-stopped
}

func TestGlob(t *testing.T) {
	dir := t.TempDir()
	plant(t, dir, map[string]string{
		"a.go": "", "b.txt": "", "src/c.go": "", "src/deep/d.go": "", "src/deep/er/e.go": "", "src/[x]": "", "link": "->src", "bad\xff.go": "",
	})
	for pattern, want := range map[string][]string{
		"*.go":                       {"a.go", "bad\xff.go"},
		"**/*.go":                    {"a.go", "bad\xff.go", "src/c.go", "src/deep/d.go", "src/deep/er/e.go"},
		"**/**/*.go":                 {"a.go", "bad\xff.go", "src/c.go", "src/deep/d.go", "src/deep/er/e.go"},
		"src/*/*.go":                 {"src/deep/d.go"},
		"src/**/e.go":                {"src/deep/er/e.go"},
		"src/**":                     {"src/[x]", "src/c.go", "src/deep", "src/deep/d.go", "src/deep/er", "src/deep/er/e.go"},
		"./src//c.go":                {"src/c.go"},
		"src/\\[x\\]":                {"src/[x]"},
		"[ab].*":                     {"a.go", "b.txt"},
		"link":                       {"link"},
		"link/*":                     nil,
		"none":                       nil,
		"**/deep/**":                 {"src/deep/d.go", "src/deep/er", "src/deep/er/e.go"},
		"**/er":                      {"src/deep/er"},
		"src/**/deep/**/e.go":        {"src/deep/er/e.go"},
		strings.Repeat("**/*/", 20):  nil,
		strings.Repeat("*", 4000):    {"a.go", "b.txt", "bad\xff.go", "link", "src"},
		strings.Repeat("?*", 1000):   nil,
		strings.Repeat("**/", 200):   {"a.go", "b.txt", "bad\xff.go", "link", "src", "src/[x]", "src/c.go", "src/deep", "src/deep/d.go", "src/deep/er", "src/deep/er/e.go"},
		strings.Repeat("**/d*/", 10): nil,
	} {
		a := operate(t, wire.OpGlob, &wire.File{Path: []byte(dir), Pattern: pattern}, nil).succeeds(t)
		if got := a.names(t, dir); !slices.Equal(got, want) {
			t.Errorf("%.100s: %q, want %q", pattern, got, want)
		}
	}
	for _, pattern := range []string{"", "/", "/etc/*", "../*", "a/../b", "[", "a/[", "**/[x", ".", strings.Repeat("a/", 64), strings.Repeat("x", 4097)} {
		a := operate(t, wire.OpGlob, &wire.File{Path: []byte(dir), Pattern: pattern}, nil)
		if a.fails(t, wire.ClassInvalid); a.ready {
			t.Errorf("%.100q was said only after Ready", pattern)
		}
	}
	for limit, want := range map[int]int{1: 1, 3: 3, 0: 5, 1000: 5} {
		a := operate(t, wire.OpGlob, &wire.File{Path: []byte(dir), Pattern: "**/*.go", Limit: limit}, nil).succeeds(t)
		if len(a.items) != want {
			t.Errorf("limit %d: %d", limit, len(a.items))
		}
	}
	operate(t, wire.OpGlob, &wire.File{Path: []byte(dir), Pattern: "*", Limit: -1}, nil).fails(t, wire.ClassInvalid)
	operate(t, wire.OpGlob, &wire.File{Path: []byte(dir + "/a.go"), Pattern: "*"}, nil).fails(t, wire.ClassInvalid)
}

// A pattern matches as its meaning, tried out, has it.
func FuzzGlob(f *testing.F) {
	for _, seed := range [][2]string{{"**/*.go", "a/b.go"}, {"a/**/b", "a/b"}, {"**", "x/y"}, {"a*/**/[bc]/**", "ab/x/c/d"}, {"**/a/**/a", "a/a/a"}} {
		f.Add(seed[0], seed[1])
	}
	f.Fuzz(func(t *testing.T, pattern, name string) {
		g, err := parseGlob(pattern)
		elements := strings.Split(name, "/")
		if err != nil || len(g) > 12 || len(elements) > 12 || slices.Contains(elements, "") {
			return
		}
		p := g.start()
		for i, element := range elements {
			if i > 0 && !g.goesOn(p) {
				p = 0
				break
			}
			p = g.next(p, element)
		}
		if got, want := g.matched(p), matches(g, elements); got != want {
			t.Errorf("%q of %q: %t, want %t", name, g, got, want)
		}
	})
}

func matches(g glob, elements []string) bool {
	switch {
	case len(g) == 0:
		return len(elements) == 0
	case g[0] == anyDirs:
		return matches(g[1:], elements) || len(elements) > 0 && matches(g, elements[1:])
	case len(elements) == 0:
		return false
	}
	ok, err := path.Match(g[0], elements[0])
	return err == nil && ok && matches(g[1:], elements[1:])
}
