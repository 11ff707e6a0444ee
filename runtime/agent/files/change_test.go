package files

import (
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/bermhq/berm/runtime/agent/wire"
)

var oldTime = time.Unix(1_000_000_000, 123_456_789)

// state describes all that is below a directory.
func state(t *testing.T, dir string) map[string]string {
	t.Helper()
	all := make(map[string]string)
	for _, name := range in(t, dir) {
		info, err := os.Lstat(dir + "/" + name)
		must(t, err)
		what := fmt.Sprintf("%o", info.Mode().Perm())
		switch info.Mode().Type() {
		case fs.ModeDir:
			what += "/"
		case fs.ModeSymlink:
			target, err := os.Readlink(dir + "/" + name)
			must(t, err)
			what = "->" + target
		case 0:
			if info.Size() > 20 {
				what += fmt.Sprint(" ", info.Size())
			} else {
				what += " " + content(t, dir+"/"+name)
			}
		default:
			what += "|"
		}
		switch {
		case info.ModTime().Equal(oldTime):
			what += " old"
		case info.ModTime().Equal(oldTime.Truncate(time.Second)):
			what += " old s"
		}
		all[name] = what
	}
	return all
}

// changes describes what has changed in a directory.
func changes(before, after map[string]string) string {
	names := maps.Clone(before)
	maps.Copy(names, after)
	var out []string
	for _, name := range slices.Sorted(maps.Keys(names)) {
		was, is := before[name], after[name]
		switch {
		case is == "":
			out = append(out, "-"+name)
		case was != is:
			out = append(out, name+": "+is)
		}
	}
	return strings.Join(out, ", ")
}

// TestChange has the operations that change files. A path is below the test's directory,
// unless it begins with a slash; below "other" is another file system.
func TestChange(t *testing.T) {
	mustRoot(t)
	big := strings.Repeat("big ", 100_000)
	long := strings.Repeat("n", 256)
	const write, mkdir, remove, move, copied = wire.OpWrite, wire.OpMkdir, wire.OpRemove, wire.OpMove, wire.OpCopy
	adj := content(t, "/proc/self/oom_score_adj")
	for _, tt := range []struct {
		op     wire.Op
		path   string
		f      wire.File // To is like path
		upload string
		want   string // the changes; or the failure's class, words, and "late" if it began
	}{
		{write, "new", wire.File{}, "x", "new: 644 x"},
		{write, "new", wire.File{}, "", "new: 644 "},
		{write, "new", wire.File{}, big, "new: 644 400000"},
		{write, "new", wire.File{Mode: 0o777}, "x", "new: 777 x"},
		{write, "new", wire.File{Mode: 0o6711}, "x", "new: 711 x"},
		{write, "\xff\n", wire.File{}, "x", "\xff\n: 644 x"},
		{write, "g", wire.File{Mode: 0o600}, "x", "g: 750 x"},
		{write, "link", wire.File{}, "x", "f: 751 x"},
		{write, "link2", wire.File{}, "x", "f: 751 x"},
		{write, "dangling", wire.File{}, "", "not_found, symbolic link"},
		{write, "loop", wire.File{}, "", "invalid, symbolic links"},
		{write, "pipe", wire.File{}, "", "invalid, a pipe"},
		{write, "pipe", wire.File{Append: true}, "", "invalid, a pipe"},
		{write, "null", wire.File{Append: true}, "", "invalid, a device"},
		{write, "oom", wire.File{Append: true}, "7", "invalid, kernel, late"},
		{write, "oom", wire.File{}, "7", "permission, directory"},
		{write, "d", wire.File{}, "", "invalid, a directory"},
		{write, "new/", wire.File{}, "", "invalid, a directory"},
		{write, "d/..", wire.File{}, "", "invalid, a directory"},
		{write, "a/b/new", wire.File{}, "", "not_found"},
		{write, "a/b/new", wire.File{Parents: true}, "x", "a: 755/, a/b: 755/, a/b/new: 644 x"},
		{write, "g/b/new", wire.File{Parents: true}, "", "invalid"},
		{write, "dangling/new", wire.File{Parents: true}, "", "invalid, late"},
		{write, "g", wire.File{Append: true}, "x", "g: 750 otherx"},
		{write, "a/new", wire.File{Append: true, Parents: true, Mode: 0o600}, big, "a: 755/, a/new: 600 400000"},
		{write, "link2", wire.File{Append: true}, "x", "f: 751 contentx"},
		{write, "dangling", wire.File{Append: true}, "", "not_found, symbolic link"},
		{write, "new", wire.File{NoClash: true}, "x", "new: 644 x"},
		{write, "g", wire.File{NoClash: true}, "", "exists"},
		{write, "dangling", wire.File{NoClash: true}, "", "exists"},
		{write, "g", wire.File{NoClash: true, Append: true}, "", "exists"},
		{write, long, wire.File{}, "", "invalid"},
		{write, long[1:], wire.File{}, "x", long[1:] + ": 644 x"},

		{mkdir, "new", wire.File{}, "", "new: 755/"},
		{mkdir, "new/", wire.File{Mode: 0o777}, "", "new: 777/"},
		{mkdir, "new", wire.File{Mode: 0o6750}, "", "new: 750/"},
		{mkdir, "d", wire.File{}, "", "exists"},
		{mkdir, "to d", wire.File{Parents: true}, "", ""},
		{mkdir, "a/b/c", wire.File{}, "", "not_found"},
		{mkdir, "e/b/c", wire.File{Mode: 0o711, Parents: true}, "", "e: 755/, e/b: 755/, e/b/c: 711/"},
		{mkdir, "to d/z/z", wire.File{Parents: true}, "", "d/z: 755/, d/z/z: 755/"},
		{mkdir, "g", wire.File{Parents: true}, "", "exists"},
		{mkdir, "g/x", wire.File{Parents: true}, "", "invalid"},
		{mkdir, "dangling", wire.File{Parents: true}, "", "exists"},
		{mkdir, "dangling/x", wire.File{Parents: true}, "", "invalid, late"},
		{mkdir, long, wire.File{}, "", "invalid"},
		{mkdir, "/proc/x", wire.File{}, "", "not_found, late"},
		{mkdir, "/", wire.File{}, "", "exists"},
		{mkdir, "/", wire.File{Parents: true}, "", ""},

		{remove, "g", wire.File{Recursive: true}, "", "-g"},
		{remove, "pipe", wire.File{}, "", "-pipe"},
		{remove, "link", wire.File{}, "", "-link"},
		{remove, "out", wire.File{Recursive: true}, "", "-out"},
		{remove, "dangling", wire.File{}, "", "-dangling"},
		{remove, "empty/", wire.File{}, "", "-empty"},
		{remove, "d", wire.File{}, "", "precondition, late"},
		{remove, "d", wire.File{Recursive: true}, "", "-d, -d/a, -d/a/ro, -d/a/ro/y, -d/a/x, -d/l, -d/out"},
		{remove, "none", wire.File{Recursive: true}, "", "not_found"},
		{remove, "g/x", wire.File{}, "", "invalid"},
		{remove, "d/.", wire.File{Recursive: true}, "", "invalid"},
		{remove, "d/..", wire.File{Recursive: true}, "", "invalid"},
		{remove, "///", wire.File{Recursive: true}, "", "invalid, root"},
		{remove, "/proc/self/status", wire.File{}, "", "permission, late"},

		{copied, "f", wire.File{To: []byte("new")}, "", "new: 751 content old"},
		{move, "f", wire.File{To: []byte("n\xff")}, "", "-f, n\xff: 751 content old"},
		{move, "f", wire.File{To: []byte("other/new")}, "", "-f, other/new: 751 content old"},
		{copied, "f", wire.File{To: []byte("g")}, "", "exists"},
		{move, "f", wire.File{To: []byte("g")}, "", "exists"},
		{copied, "f", wire.File{To: []byte("g"), Replace: true}, "", "g: 751 content old"},
		{move, "f", wire.File{To: []byte("g"), Replace: true}, "", "-f, g: 751 content old"},
		{move, "link", wire.File{To: []byte("new")}, "", "-link, new: ->f"},
		{move, "link", wire.File{To: []byte("other/new")}, "", "-link, other/new: ->f"},
		{copied, "dangling", wire.File{To: []byte("new")}, "", "new: ->none"},
		{copied, "f", wire.File{To: []byte("dangling"), Replace: true}, "", "dangling: 751 content old"},
		{move, "f", wire.File{To: []byte("dangling")}, "", "exists"},
		{copied, "d/a", wire.File{To: []byte("new/")}, "", "new: 755/, new/ro: 555/ old, new/ro/y: 644 y, new/x: 600 x old"},
		{copied, "d/a", wire.File{To: []byte("empty"), Replace: true}, "", "empty/ro: 555/ old, empty/ro/y: 644 y, empty/x: 600 x old"},
		{move, "d/a", wire.File{To: []byte("empty"), Replace: true}, "", "-d/a, -d/a/ro, -d/a/ro/y, -d/a/x, empty/ro: 555/ old, empty/ro/y: 644 y, empty/x: 600 x old"},
		{move, "d/a", wire.File{To: []byte("other/new")}, "", "-d/a, -d/a/ro, -d/a/ro/y, -d/a/x, other/new: 755/, other/new/ro: 555/ old, other/new/ro/y: 644 y, other/new/x: 600 x old"},
		{copied, "d", wire.File{To: []byte("empty")}, "", "exists"},
		{copied, "empty", wire.File{To: []byte("d"), Replace: true}, "", "precondition"},
		{move, "empty", wire.File{To: []byte("d"), Replace: true}, "", "precondition"},
		{move, "d", wire.File{To: []byte("f"), Replace: true}, "", "invalid"},
		{copied, "f", wire.File{To: []byte("empty"), Replace: true}, "", "invalid"},
		{move, "d", wire.File{To: []byte("d/a/new")}, "", "invalid, in the directory itself, late"},
		{copied, "d", wire.File{To: []byte("d/a/new")}, "", "invalid, in the directory itself, late"},
		{copied, "d", wire.File{To: []byte("to d/new")}, "", "invalid, in the directory itself, late"},
		{move, "d", wire.File{To: []byte("d"), Replace: true}, "", "precondition"},
		{copied, "none", wire.File{To: []byte("new")}, "", "not_found"},
		{move, "f", wire.File{To: []byte("none/new")}, "", "not_found"},
		{move, "f", wire.File{To: []byte("g/new")}, "", "invalid"},
		{move, "f", wire.File{To: []byte("d/..")}, "", "invalid"},
		{move, "d", wire.File{To: []byte("//"), Replace: true}, "", "invalid, root"},
		{copied, "/", wire.File{To: []byte("new")}, "", "invalid, root"},
		{copied, "f", wire.File{To: []byte(long)}, "", "invalid"},
		{copied, "pipe", wire.File{To: []byte("new")}, "", "invalid, a pipe"},
		{move, "pipe", wire.File{To: []byte("new")}, "", "new: 644|, -pipe"},
		{copied, "special", wire.File{To: []byte("new")}, "", "invalid, special/z, a pipe, late"},
		{copied, "/proc/sys/kernel/ostype", wire.File{To: []byte("new")}, "", "new: 444 Linux\n"},
	} {
		t.Run(fmt.Sprintf("%s %.20q %+.60q %t", tt.op, tt.path, tt.f.To, tt.f.Parents), func(t *testing.T) {
			dir, elsewhere := t.TempDir(), t.TempDir()
			plant(t, elsewhere, map[string]string{"precious": "x"})
			plant(t, dir, map[string]string{
				"f": "content", "g": "other", "link": "->f", "link2": "->" + dir + "/link", "dangling": "->none", "loop": "->loop", "empty/": "", "to d": "->d",
				"d/a/x": "x", "d/a/ro/y": "y", "d/l": "->/etc", "d/out": "->" + elsewhere, "out": "->" + elsewhere,
				"pipe": "|", "special/a/x": "x", "special/z": "|", "null": "->/dev/null", "oom": "->/proc/self/oom_score_adj", "other/": "",
			})
			if strings.HasPrefix(string(tt.f.To), "other/") {
				mount(t, "tmpfs", dir+"/other", "size=8m,mode=755")
			}
			for name, mode := range map[string]os.FileMode{"f": 0o751, "d/a/ro": 0o555, "d/a/x": 0o600, "g": 0o750} {
				must(t, os.Chmod(dir+"/"+name, mode))
				if name != "g" {
					must(t, os.Chtimes(dir+"/"+name, oldTime, oldTime))
				}
			}
			f := tt.f
			for _, path := range []struct {
				to   *[]byte
				name string
			}{{&f.Path, tt.path}, {&f.To, string(tt.f.To)}} {
				if *path.to = []byte(path.name); !filepath.IsAbs(path.name) {
					*path.to = []byte(dir + "/" + path.name)
				}
			}
			before := state(t, dir)
			c := operate(t, tt.op, &f, tt.upload)
			got := changes(before, state(t, dir))
			equal(t, in(t, elsewhere), []string{"precious"})
			if c.failure == nil {
				if got != tt.want {
					t.Errorf("%s; want %s", got, tt.want)
				}
				if tt.op == write && (string(c.result.Path) != string(f.Path) || int(c.result.Size) != len(content(t, string(f.Path)))) {
					t.Errorf("%+v", c.result)
				}
				return
			}
			words, late := strings.CutSuffix(tt.want, ", late")
			class, words, _ := strings.Cut(words, ", ")
			c.fails(t, wire.Class(class), strings.Split(words, ", ")...)
			if got != "" || c.ready != late || content(t, "/proc/self/oom_score_adj") != adj {
				t.Errorf("it began: %t; changed: %s", c.ready, got)
			}
		})
	}
}
