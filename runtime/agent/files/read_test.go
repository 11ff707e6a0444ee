package files

import (
	"bytes"
	"fmt"
	"os"
	"path"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/runtime/agent/wire"
)

// answer describes what an operation that changes nothing answered.
func (c *caller) answer(dir string) string {
	var out []string
	for _, f := range c.files {
		name := strings.TrimPrefix(string(f.Path), dir+"/")
		if len(f.Target) > 0 {
			name += "->" + string(f.Target)
		}
		out = append(out, name)
	}
	for _, m := range c.matches {
		out = append(out, fmt.Sprintf("%s:%d:%s", strings.TrimPrefix(string(m.Path), dir+"/"), m.Line, m.Text))
	}
	return strings.Join(out, " ")
}

// TestAnswer has the operations that change nothing. A path is below the test's directory,
// unless it begins with a slash.
func TestAnswer(t *testing.T) {
	dir := t.TempDir()
	plant(t, dir, map[string]string{
		"r/f": "0123456789", "r/empty": "", "r/link": "->f", "r/pipe": "|", "r/d/": "", "r/dangling": "->no", "r/loop": "->loop", "r/b\xff": "x", "r/zero": "->/dev/zero",
		"l/b": "12", "l/a/x": "1", "l/a/s/y": "1", "l/a.b": "", "l/bad\xff": "", "l/link": "->a", "l/out": "->/", "l/pipe": "|", "l/empty/": "", "l/.hidden": "",
		"g/a.go": "", "g/b.txt": "", "g/src/c.go": "", "g/src/deep/d.go": "", "g/src/deep/er/e.go": "", "g/src/[x]": "", "g/link": "->src", "g/bad\xff.go": "",
		"s/a.txt": "one\ntwo\nThree\r\nlast one", "s/b.go": "a.b\naxb\n", "s/s/c.txt": "\n\none", "s/bin": "one\x00one\n", "s/late bin": strings.Repeat("x\n", 5000) + "\x00\none",
		"s/pipe": "|", "s/link": "->a.txt", "s/out": "->/", "s/zero": "->/dev/zero", "s/u\xff": "\xff one\n", "s/empty": "",
	})
	l, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM, 0)
	must(t, err)
	defer func() { _ = unix.Close(l) }()
	must(t, unix.Bind(l, &unix.SockaddrUnix{Name: dir + "/r/socket"}))
	const stat, read, list, glob, search = wire.OpStat, wire.OpRead, wire.OpDir, wire.OpGlob, wire.OpSearch
	const flat, gos, all = "a.b b bad\xff empty link->a out->/ pipe", "a.go bad\xff.go", "src/c.go src/deep src/deep/d.go src/deep/er src/deep/er/e.go"
	for _, tt := range []struct {
		op   wire.Op
		path string
		f    wire.File
		want string // the answer, or the failure's class and words
	}{
		{stat, "r/b\xff", wire.File{}, "100644 1"},
		{stat, "r/link", wire.File{}, "100644 10"},
		{stat, "r/pipe", wire.File{}, "10644 0"},
		{stat, "r/zero", wire.File{}, "20666 0"},
		{stat, "r/dangling", wire.File{}, "not_found"},
		{stat, "r/loop", wire.File{}, "invalid"},
		{stat, "r/link/x", wire.File{}, "invalid"},

		{read, "r/f", wire.File{Length: -1}, "0123456789"},
		{read, "r/f", wire.File{}, ""},
		{read, "r/f", wire.File{Offset: 3, Length: 4}, "3456"},
		{read, "r/f", wire.File{Offset: 8, Length: 100}, "89"},
		{read, "r/f", wire.File{Offset: 10, Length: -1}, ""},
		{read, "r/f", wire.File{Offset: 11, Length: -1}, "out_of_range, 10"},
		{read, "r/f", wire.File{Offset: 1 << 62, Length: 1 << 62}, "out_of_range"},
		{read, "r/f", wire.File{Offset: -1, Length: 1}, "invalid"},
		{read, "r/empty", wire.File{Length: -1}, ""},
		{read, "r/link", wire.File{Length: -1}, "0123456789"},
		{read, "r/b\xff", wire.File{Length: -1}, "x"},
		{read, "r/pipe", wire.File{Length: -1}, "invalid, a pipe"},
		{read, "r/zero", wire.File{Length: 10}, "invalid, a device"},
		{read, "r/socket", wire.File{Length: -1}, "invalid, a socket"},
		{read, "r/d", wire.File{Length: -1}, "invalid, a directory"},
		{read, "r/dangling", wire.File{Length: -1}, "not_found"},
		{read, "r/loop", wire.File{Length: -1}, "invalid, symbolic links"},
		{read, "r/f/", wire.File{Length: -1}, "invalid"},
		{read, "/proc/version", wire.File{Length: -1}, content(t, "/proc/version")},
		{read, "/proc/self/environ", wire.File{}, ""},
		{read, "/proc/version", wire.File{Offset: 6, Length: 7}, "version"},

		{list, "l", wire.File{}, ".hidden a " + flat},
		{list, "l", wire.File{Depth: 2}, ".hidden a a/s a/x " + flat},
		{list, "l", wire.File{Depth: 1000}, ".hidden a a/s a/s/y a/x " + flat},
		{list, "l/empty", wire.File{Depth: 3}, ""},
		{list, "l/link//", wire.File{Depth: 3}, "s s/y x"},
		{list, "l/b", wire.File{}, "invalid"},
		{list, "l/pipe", wire.File{}, "invalid"},

		{glob, "g", wire.File{Pattern: "*.go"}, gos},
		{glob, "g", wire.File{Pattern: "**/*.go"}, gos + " src/c.go src/deep/d.go src/deep/er/e.go"},
		{glob, "g", wire.File{Pattern: "**/**/*.go", Limit: 3}, gos + " src/c.go"},
		{glob, "g", wire.File{Pattern: "src/*/*.go"}, "src/deep/d.go"},
		{glob, "g", wire.File{Pattern: "src/**/e.go"}, "src/deep/er/e.go"},
		{glob, "g", wire.File{Pattern: "src/**"}, "src/[x] " + all},
		{glob, "g", wire.File{Pattern: "./src//c.go"}, "src/c.go"},
		{glob, "g", wire.File{Pattern: "src/\\[x\\]"}, "src/[x]"},
		{glob, "g", wire.File{Pattern: "[ab].*"}, "a.go b.txt"},
		{glob, "g", wire.File{Pattern: "link"}, "link->src"},
		{glob, "g", wire.File{Pattern: "link/*"}, ""},
		{glob, "g", wire.File{Pattern: "**/er"}, "src/deep/er"},
		{glob, "g", wire.File{Pattern: "src/**/deep/**/e.go"}, "src/deep/er/e.go"},
		{glob, "g", wire.File{Pattern: strings.Repeat("**/*/", 20)}, ""},
		{glob, "g", wire.File{Pattern: strings.Repeat("?*", 1000)}, ""},
		{glob, "g", wire.File{Pattern: strings.Repeat("**/", 200)}, "a.go b.txt bad\xff.go link->src src src/[x] " + all},
		{glob, "g", wire.File{Pattern: strings.Repeat("**/d*/", 10)}, ""},
		{glob, "g/a.go", wire.File{Pattern: "*"}, "invalid"},
		{glob, "g", wire.File{}, "invalid"},
		{glob, "g", wire.File{Pattern: "."}, "invalid"},
		{glob, "g", wire.File{Pattern: "/etc/*"}, "invalid, absolute"},
		{glob, "g", wire.File{Pattern: "../*"}, "invalid, out of the directory"},
		{glob, "g", wire.File{Pattern: "a/../b"}, "invalid, out of the directory"},
		{glob, "g", wire.File{Pattern: "**/[x"}, "invalid"},
		{glob, "g", wire.File{Pattern: strings.Repeat("a/", 64)}, "invalid, 64"},

		{search, "s", wire.File{Pattern: "one"}, "a.txt:1:one a.txt:4:last one late bin:5002:one s/c.txt:3:one u\xff:1:\xff one"},
		{search, "s", wire.File{Pattern: "^.*ee$"}, "a.txt:3:Three"},
		{search, "s", wire.File{Pattern: "THREE", IgnoreCase: true}, "a.txt:3:Three"},
		{search, "s", wire.File{Pattern: "a.b", Literal: true}, "b.go:1:a.b"},
		{search, "s", wire.File{Pattern: "A.B", Literal: true, IgnoreCase: true}, "b.go:1:a.b"},
		{search, "s", wire.File{Pattern: "TWO|a.b", IgnoreCase: true}, "a.txt:2:two b.go:1:a.b b.go:2:axb"},
		{search, "s", wire.File{Pattern: "one", Include: "*.txt"}, "a.txt:1:one a.txt:4:last one s/c.txt:3:one"},
		{search, "s", wire.File{Pattern: "one", Limit: 2}, "a.txt:1:one a.txt:4:last one"},
		{search, "s/a.txt", wire.File{Pattern: "tw"}, "/s/a.txt:2:two"},
		{search, "s/link", wire.File{Pattern: "tw"}, "/s/link:2:two"},
		{search, "s/bin", wire.File{Pattern: "one"}, ""},
		{search, "s/s", wire.File{Pattern: "^$"}, "c.txt:1: c.txt:2:"},
		{search, "s", wire.File{Pattern: "(x+x+)+y"}, ""},
		{search, "s", wire.File{Pattern: "("}, "invalid"},
		{search, "s", wire.File{Pattern: "a)(b", IgnoreCase: true}, "invalid"},
		{search, "s", wire.File{Pattern: "((x{1000}){1000}){1000}"}, "invalid"},
		{search, "s", wire.File{Pattern: strings.Repeat("(", 5000) + strings.Repeat(")", 5000)}, "invalid"},
		{search, "s/pipe", wire.File{Pattern: "x"}, "invalid"},
		{search, "s/zero", wire.File{Pattern: "x"}, "invalid"},
	} {
		f, path := tt.f, dir+"/"+tt.path
		if tt.path[0] == '/' {
			path = tt.path
		}
		if f.Path = []byte(path); f.Limit == 0 {
			f.Limit = 1000
		}
		c := operate(t, tt.op, &f, "")
		got := c.answer(trim(path))
		switch {
		case c.failure != nil:
			class, words, _ := strings.Cut(tt.want, ", ")
			if c.fails(t, wire.Class(class), words); c.ready {
				t.Error("it began")
			}
			got = tt.want
		case tt.op == stat:
			got = fmt.Sprintf("%o %d", c.result.Mode, c.result.Size)
			if time.Since(time.Unix(0, c.result.ModTime)).Abs() > time.Hour && tt.path != "r/zero" || string(c.result.Path) != path {
				t.Errorf("%+v", c.result)
			}
		case tt.op == read:
			if got != path {
				t.Errorf("it is %s", got)
			}
			got = c.data.String()
		}
		if strings.TrimPrefix(got, dir) != tt.want || t.Failed() {
			t.Fatalf("%s %s %.100q: %q; want %q", tt.op, tt.path, tt.f.Pattern, got, tt.want)
		}
	}
	if os.Getuid() == 0 { // one that waits: the kernel's log has no end
		operate(t, read, &wire.File{Path: []byte("/proc/kmsg"), Length: -1}, "")
	}
}

func TestSearchLongLines(t *testing.T) {
	dir := t.TempDir()
	var file bytes.Buffer
	file.WriteString(strings.Repeat("x", maxLine-4) + "deep" + "beyond\n") // 1
	file.WriteString("é" + strings.Repeat("é", 100_000) + " deep\n")       // 2
	file.WriteString(strings.Repeat("y", 3*maxLine) + "\n")                // 3
	file.WriteString("deep\n")                                             // 4
	file.WriteString(strings.Repeat("z", wire.MaxData-1) + "\n")           // 5: just the buffer
	file.WriteString(strings.Repeat("z", wire.MaxData) + "\n")             // 6
	file.WriteString("\xff" + strings.Repeat("\xbf", 2*maxText) + "deep")  // 7
	must(t, os.WriteFile(dir+"/f", file.Bytes(), 0o644))
	lines := func(pattern string) (numbers []int) {
		for _, m := range operate(t, wire.OpSearch, &wire.File{Path: []byte(dir), Pattern: pattern, Limit: 1000}, "").succeeds(t).matches {
			if len(m.Text) > maxText || m.Line == 2 && (!utf8.Valid(m.Text) || len(m.Text) < maxText-1) {
				t.Errorf("line %d: %d bytes", m.Line, len(m.Text))
			}
			numbers = append(numbers, m.Line)
		}
		return numbers
	}
	for pattern, want := range map[string]string{"deep": "[1 2 4 7]", "beyond": "[]", "^y*$": "[3]", "^z*$": "[5 6]", "xdeep$": "[1]"} {
		if got := fmt.Sprint(lines(pattern)); got != want {
			t.Errorf("%s: %s, want %s", pattern, got, want)
		}
	}
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

// TestPaths checks what all operations refuse before they begin.
func TestPaths(t *testing.T) {
	dir := t.TempDir()
	long := dir
	for len(long) < maxPath-1 {
		long += "/" + strings.Repeat("x", min(200, maxPath-1-len(long)))
	}
	for op := range ops {
		for path, class := range map[string]wire.Class{
			"etc/passwd": wire.ClassInvalid, "": wire.ClassInvalid, dir + "/a\x00b": wire.ClassInvalid, long + "yz": wire.ClassInvalid, long + "y": wire.ClassInvalid,
			dir + "/no\xff": wire.ClassNotFound,
		} {
			if class == wire.ClassNotFound && (op == wire.OpWrite || op == wire.OpMkdir) {
				continue
			}
			c := operate(t, op, &wire.File{Path: []byte(path), To: []byte(path), Pattern: "x"}, "")
			if c.fails(t, class); c.ready {
				t.Errorf("%s of %.300q began", op, path)
			}
		}
		operate(t, op, nil, "").fails(t, wire.ClassInvalid)
	}
	if Does(wire.OpStart) || Does("what") {
		t.Error("an operation of others is known")
	}
	equal(t, in(t, dir), nil)
}

// TestChangingFile: a file that changes while it is read has an end, and an archive of it
// is whole.
func TestChangingFile(t *testing.T) {
	const size = 4 << 20
	for name, to := range map[string]int64{"grows": 2 * size, "shrinks": 1000} {
		for _, op := range []wire.Op{wire.OpRead, wire.OpTarRead} {
			t.Run(string(op)+" "+name, func(t *testing.T) {
				path := t.TempDir() + "/f"
				must(t, os.WriteFile(path, make([]byte, size), 0o644))
				c := &caller{}
				c.got = func(what string) error {
					if what == "data" && c.data.Len() < 100_000 {
						must(t, os.Truncate(path, to))
					}
					return nil
				}
				must(t, c.do(0, op, &wire.File{Path: []byte(path), Length: -1}))
				got := c.data.Len()
				if op == wire.OpTarRead {
					names := unpacked(t, c.data.Bytes())
					equal(t, names, []string{fmt.Sprintf("f %d", size)})
				} else if got > size || name == "grows" && got < size {
					t.Errorf("%d bytes", got)
				}
			})
		}
	}
}

// TestMounts: the kernel's own directories are in lists, but not what is in them; nor what
// this user may not see. Mounts stay, and so does what they hold.
func TestMounts(t *testing.T) {
	mustRoot(t)
	dir := open(t, t.TempDir())
	plant(t, dir, map[string]string{"a/x": "", "b/x": "", "proc/": "", "sysfs/": ""})
	mount(t, "proc", dir+"/proc", "")
	mount(t, "sysfs", dir+"/sysfs", "")
	must(t, os.Chmod(dir+"/a", 0o700))
	want := []string{"a", "b", "b/x", "proc", "sysfs"}
	equal(t, operateAs(t, 1234, wire.OpDir, &wire.File{Path: []byte(dir), Depth: 5}, "").succeeds(t).names(dir), want)
	equal(t, operateAs(t, 1234, wire.OpGlob, &wire.File{Path: []byte(dir), Pattern: "**"}, "").succeeds(t).names(dir), want)
	if c := operate(t, wire.OpSearch, &wire.File{Path: []byte(dir), Pattern: "Linux"}, "").succeeds(t); len(c.matches) > 0 {
		t.Errorf("%+v", c.matches)
	}
	operate(t, wire.OpSearch, &wire.File{Path: []byte("/proc/self"), Pattern: "Linux"}, "").fails(t, wire.ClassInvalid, "kernel")
	operate(t, wire.OpTarRead, file4("/proc/self"), "").fails(t, wire.ClassInvalid, "kernel")
	operateAs(t, 1234, wire.OpTarRead, file4(dir), "").fails(t, wire.ClassPermission, dir+"/a")
	operateAs(t, 1234, wire.OpDir, file4(dir+"/a"), "").fails(t, wire.ClassPermission)
	for _, path := range []string{dir + "/proc", dir} {
		operate(t, wire.OpRemove, &wire.File{Path: []byte(path), Recursive: true}, "").fails(t, wire.ClassPrecondition, "mounted")
	}
	operate(t, wire.OpMove, &wire.File{Path: []byte(dir + "/proc"), To: []byte(dir + "/c")}, "").fails(t, wire.ClassPrecondition, "mounted")
	operate(t, wire.OpCopy, &wire.File{Path: []byte(dir), To: []byte(dir + "-copy")}, "").succeeds(t)
	if left := in(t, dir+"-copy"); len(left) > 6 || !slices.Contains(left, "proc") || !slices.Contains(left, "sysfs") {
		t.Errorf("copied: %q", left)
	}
}

// TestDeepTree has a tree that is deeper than a path can be long.
func TestDeepTree(t *testing.T) {
	dir := t.TempDir()
	plant(t, dir, map[string]string{"t/": "", "t/a": "x", "t/z": "x"})
	name := strings.Repeat("d", 200)
	fd, err := unix.Open(dir+"/t", unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	must(t, err)
	for range 100 {
		must(t, unix.Mkdirat(fd, name, 0o755))
		next, err := unix.Openat(fd, name, unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		must(t, err, unix.Close(fd))
		fd = next
	}
	must(t, unix.Close(fd))
	c := operate(t, wire.OpDir, &wire.File{Path: []byte(dir + "/t"), Depth: 1 << 30}, "").succeeds(t)
	if n := len(c.files); n < 15 || n > 25 {
		t.Errorf("%d files", n)
	}
	operate(t, wire.OpSearch, &wire.File{Path: []byte(dir), Pattern: "y"}, "").succeeds(t)
	operate(t, wire.OpGlob, &wire.File{Path: []byte(dir), Pattern: "**/y"}, "").succeeds(t)
	operate(t, wire.OpTarRead, file4(dir+"/t"), "").fails(t, wire.ClassInvalid)
	operate(t, wire.OpCopy, &wire.File{Path: []byte(dir + "/t"), To: []byte(dir + "/c")}, "").fails(t, wire.ClassInvalid)
	operate(t, wire.OpRemove, &wire.File{Path: []byte(dir + "/t"), Recursive: true}, "").succeeds(t)
	equal(t, in(t, dir), nil)
}

// TestVanishingFiles: files come and go while they are listed, packed and copied.
func TestVanishingFiles(t *testing.T) {
	dir, to := t.TempDir(), t.TempDir()
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
	for i := range 40 {
		operate(t, wire.OpDir, &wire.File{Path: []byte(dir), Depth: 9}, "").succeeds(t)
		operate(t, wire.OpGlob, &wire.File{Path: []byte(dir), Pattern: "**/f"}, "").succeeds(t)
		operate(t, wire.OpSearch, &wire.File{Path: []byte(dir), Pattern: "x"}, "").succeeds(t)
		operate(t, wire.OpTarRead, file4(dir), "").succeeds(t)
		operate(t, wire.OpCopy, &wire.File{Path: []byte(dir), To: fmt.Appendf(nil, "%s/%d", to, i)}, "").succeeds(t)
	}
	close(stop)
	<-stopped
}
