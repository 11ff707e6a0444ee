package files

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/runtime/agent/wire"
)

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
	if Does(wire.OpPing) || Does("what") {
		t.Error("an operation of others is known")
	}
	equal(t, in(t, dir), nil)
}

func TestStat(t *testing.T) {
	dir := t.TempDir()
	plant(t, dir, map[string]string{"bad\xff": "12345", "link": "->bad\xff", "dangling": "->no", "pipe": "|", "loop": "->loop", "d/": ""})
	for name, want := range map[string]string{
		"bad\xff": "100644 5", "link": "100644 5", "pipe": "10644 0", "d": "40755", "d/": "40755",
		"dangling": "not_found", "loop": "invalid", "link/x": "invalid",
	} {
		c := operate(t, wire.OpStat, file4(dir+"/"+name), "")
		if c.failure != nil {
			if string(c.failure.Class) != want || c.ready {
				t.Errorf("%s: %+v", name, c.failure)
			}
			continue
		}
		got := c.result
		if text := fmt.Sprintf("%o %d", got.Mode, got.Size); !strings.HasPrefix(text, want) || string(got.Path) != trim(dir+"/"+name) ||
			got.UID != os.Getuid() || time.Since(time.Unix(0, got.ModTime)).Abs() > time.Hour {
			t.Errorf("%s: %s, %+v", name, text, got)
		}
	}
}

func TestRead(t *testing.T) {
	dir := t.TempDir()
	long := strings.Repeat("0123456789", 30_000)
	plant(t, dir, map[string]string{
		"f": "0123456789", "empty": "", "long": long, "link": "->f", "pipe": "|", "d/": "", "dangling": "->no", "loop": "->loop", "b\xff": "x",
		"to pipe": "->pipe", "to zero": "->/dev/zero",
	})
	l, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM, 0)
	must(t, err)
	defer func() { _ = unix.Close(l) }()
	must(t, unix.Bind(l, &unix.SockaddrUnix{Name: dir + "/socket"}))
	for name, tt := range map[string]struct {
		path           string
		offset, length int64
		want           string
		class          wire.Class
		says           string
	}{
		"whole":              {path: "f", length: -1, want: "0123456789"},
		"nothing of it":      {path: "f", want: ""},
		"a part":             {path: "f", offset: 3, length: 4, want: "3456"},
		"the end":            {path: "f", offset: 8, length: 100, want: "89"},
		"at the end":         {path: "f", offset: 10, length: -1, want: ""},
		"beyond the end":     {path: "f", offset: 11, length: -1, class: wire.ClassOutOfRange, says: "10"},
		"far beyond":         {path: "f", offset: 1 << 62, length: 1 << 62, class: wire.ClassOutOfRange},
		"empty":              {path: "empty", length: -1, want: ""},
		"many frames":        {path: "long", length: -1, want: long},
		"many frames' end":   {path: "long", offset: 70_001, length: 200_000, want: long[70_001:270_001]},
		"link":               {path: "link", length: -1, want: "0123456789"},
		"bad UTF-8":          {path: "b\xff", length: -1, want: "x"},
		"pipe":               {path: "pipe", length: -1, class: wire.ClassInvalid, says: "a pipe"},
		"link to a pipe":     {path: "to pipe", length: -1, class: wire.ClassInvalid, says: "a pipe"},
		"device":             {path: "to zero", length: 10, class: wire.ClassInvalid, says: "a device"},
		"socket":             {path: "socket", length: -1, class: wire.ClassInvalid, says: "a socket"},
		"directory":          {path: "d", length: -1, class: wire.ClassInvalid, says: "a directory"},
		"dangling":           {path: "dangling", length: -1, class: wire.ClassNotFound},
		"loop":               {path: "loop", length: -1, class: wire.ClassInvalid, says: "symbolic links"},
		"slash":              {path: "f/", length: -1, class: wire.ClassInvalid},
		"made up":            {path: "/proc/version", length: -1, want: content(t, "/proc/version")},
		"made up, in part":   {path: "/proc/self/environ", length: 0, want: ""},
		"made up, from afar": {path: "/proc/version", offset: 6, length: 7, want: "version"},
	} {
		t.Run(name, func(t *testing.T) {
			path := dir + "/" + tt.path
			if tt.path[0] == '/' {
				path = tt.path
			}
			c := operate(t, wire.OpRead, &wire.File{Path: []byte(path), Offset: tt.offset, Length: tt.length}, "")
			if tt.class != "" {
				if c.fails(t, tt.class, tt.says); c.ready {
					t.Error("it was said only after Ready")
				}
				return
			}
			if c.succeeds(t); c.data.String() != tt.want || len(c.files) != 1 || string(c.files[0].Path) != path {
				t.Errorf("%d bytes, want %d; %+v", c.data.Len(), len(tt.want), c.files)
			}
		})
	}
	t.Run("one that waits", func(t *testing.T) { // the kernel's log has no end
		mustRoot(t)
		c := operate(t, wire.OpRead, &wire.File{Path: []byte("/proc/kmsg"), Length: -1}, "")
		if c.failure != nil && c.failure.Class != wire.ClassPermission {
			t.Errorf("%v", c.failure)
		}
	})
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

func TestList(t *testing.T) {
	dir := t.TempDir()
	plant(t, dir, map[string]string{
		"b": "12", "a/x": "1", "a/s/y": "1", "a.b": "", "bad\xff": "", "link": "->a", "out": "->/", "pipe": "|", "empty/": "", ".hidden": "",
	})
	flat := []string{".hidden", "a", "a.b", "b", "bad\xff", "empty", "link", "out", "pipe"}
	for name, tt := range map[string]struct {
		path  string
		depth int
		want  []string
		class wire.Class
	}{
		"alone":     {depth: 1, want: flat},
		"no depth":  {want: flat},
		"two":       {depth: 2, want: slices.Insert(slices.Clone(flat), 2, "a/s", "a/x")},
		"all":       {depth: 1000, want: slices.Insert(slices.Clone(flat), 2, "a/s", "a/s/y", "a/x")},
		"empty":     {path: "/empty", depth: 3},
		"slash":     {path: "/a/s//", depth: 3, want: []string{"y"}},
		"of a link": {path: "/link", depth: 3, want: []string{"s", "s/y", "x"}},
		"of a file": {path: "/b", class: wire.ClassInvalid},
		"of a pipe": {path: "/pipe", class: wire.ClassInvalid},
	} {
		c := operate(t, wire.OpDir, &wire.File{Path: []byte(dir + tt.path), Depth: tt.depth}, "")
		if tt.class != "" {
			c.fails(t, tt.class)
			continue
		}
		if got := c.succeeds(t).names(strings.TrimRight(dir+tt.path, "/")); !slices.Equal(got, tt.want) {
			t.Errorf("%s: %q", name, got)
		}
		for _, f := range c.files {
			if want := map[string]string{"link": "a", "out": "/"}[string(f.Path[strings.LastIndexByte(string(f.Path), '/')+1:])]; string(f.Target) != want {
				t.Errorf("%s leads to %q", f.Path, f.Target)
			}
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
