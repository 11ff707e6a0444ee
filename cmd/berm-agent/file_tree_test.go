package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/runtime/agent/wire"
)

func TestRemove(t *testing.T) {
	for name, tt := range map[string]struct {
		path      string
		recursive bool
		class     wire.Class
		gone      string
	}{
		"file":                 {path: "f", gone: "f"},
		"bad UTF-8":            {path: "b\xff", gone: "b\xff"},
		"pipe":                 {path: "pipe", gone: "pipe"},
		"link":                 {path: "link", gone: "link"},
		"link to a directory":  {path: "out", recursive: true, gone: "out"},
		"dangling":             {path: "dangling", gone: "dangling"},
		"empty directory":      {path: "empty", gone: "empty"},
		"with a slash":         {path: "empty/", gone: "empty"},
		"directory":            {path: "d", class: wire.ClassPrecondition},
		"tree":                 {path: "d", recursive: true, gone: "d"},
		"file, recursive":      {path: "f", recursive: true, gone: "f"},
		"missing":              {path: "none", recursive: true, class: wire.ClassNotFound},
		"below a file":         {path: "f/x", class: wire.ClassInvalid},
		"itself":               {path: "d/.", recursive: true, class: wire.ClassInvalid},
		"above":                {path: "d/..", recursive: true, class: wire.ClassInvalid},
		"the root":             {path: "/", recursive: true, class: wire.ClassInvalid},
		"the root, with words": {path: "///", recursive: true, class: wire.ClassInvalid},
		"what can't be":        {path: "/proc/self/status", class: wire.ClassPermission},
	} {
		t.Run(name, func(t *testing.T) {
			dir, elsewhere := t.TempDir(), t.TempDir()
			plant(t, elsewhere, map[string]string{"precious": "x"})
			plant(t, dir, map[string]string{
				"f": "x", "b\xff": "x", "pipe": "|", "link": "->f", "out": "->" + elsewhere, "dangling": "->none", "empty/": "", "d/a/b/c": "x",
				"d/out": "->" + elsewhere, "d/e/": "", "d/a/pipe": "|", "d/f": "x",
			})
			before := in(t, dir)
			path := tt.path
			if path[0] != '/' {
				path = dir + "/" + path
			}
			a := operate(t, wire.OpRemove, &wire.File{Path: []byte(path), Recursive: tt.recursive}, nil)
			var want []string
			if tt.class != "" {
				a.fails(t, tt.class)
				want = before
			} else {
				a.succeeds(t)
				for _, name := range before {
					if name != tt.gone && !strings.HasPrefix(name, tt.gone+"/") {
						want = append(want, name)
					}
				}
			}
			equal(t, in(t, dir), want)
			equal(t, in(t, elsewhere), []string{"precious"})
		})
	}
}

func TestRemoveWideTree(t *testing.T) {
	dir := t.TempDir()
	for i := range 3000 {
		name := dir + "/t/" + strings.Repeat("x", i%200) + string(rune('a'+i/200))
		if err := os.MkdirAll(name+"/y", 0o755); err != nil {
			t.Fatal(err)
		}
	}
	operate(t, wire.OpRemove, &wire.File{Path: []byte(dir + "/t"), Recursive: true}, nil).succeeds(t)
	equal(t, in(t, dir), nil)
}

func TestRemoveByAnotherUser(t *testing.T) {
	mustRoot(t)
	dir := t.TempDir()
	open(t, dir)
	plant(t, dir, map[string]string{"d/theirs/x": "x"})
	if err := os.Chmod(dir+"/d", 0o777); err != nil {
		t.Fatal(err)
	}
	operateAs(t, 1234, wire.OpRemove, &wire.File{Path: []byte(dir + "/d/theirs"), Recursive: true}, nil).fails(t, wire.ClassPermission, "d/theirs/x")
	operateAs(t, 1234, wire.OpRemove, &wire.File{Path: []byte(dir + "/d")}, nil).fails(t, wire.ClassPermission)
	equal(t, in(t, dir), []string{"d", "d/theirs", "d/theirs/x"})
}

// Moves within a file system and to another, and copies, leave the same there.
func TestRelocate(t *testing.T) {
	other := smallDisk(t, "8m")
	for name, tt := range map[string]struct {
		from, to string
		replace  bool
		class    wire.Class
		want     string // content, or target of a link; "/" is a directory
	}{
		"file":                {from: "f", to: "new", want: "content"},
		"bad UTF-8":           {from: "f", to: "n\xff", want: "content"},
		"file there":          {from: "f", to: "g", class: wire.ClassExists},
		"file replaced":       {from: "f", to: "g", replace: true, want: "content"},
		"link":                {from: "link", to: "new", want: "f"},
		"dangling link":       {from: "dangling", to: "new", want: "none"},
		"over a link":         {from: "f", to: "dangling", replace: true, want: "content"},
		"over a link, not":    {from: "f", to: "dangling", class: wire.ClassExists},
		"tree":                {from: "d", to: "new/", want: "/"},
		"tree there":          {from: "d", to: "empty", class: wire.ClassExists},
		"tree over an empty":  {from: "d", to: "empty", replace: true, want: "/"},
		"tree over another":   {from: "empty", to: "d", replace: true, class: wire.ClassPrecondition},
		"tree over a file":    {from: "d", to: "f", replace: true, class: wire.ClassInvalid},
		"file over a tree":    {from: "f", to: "empty", replace: true, class: wire.ClassInvalid},
		"into itself":         {from: "d", to: "d/a/new", class: wire.ClassInvalid},
		"into itself, linked": {from: "d", to: "to d/new", class: wire.ClassInvalid},
		"onto itself":         {from: "d", to: "d", replace: true, class: wire.ClassPrecondition},
		"missing":             {from: "none", to: "new", class: wire.ClassNotFound},
		"into nothing":        {from: "f", to: "none/new", class: wire.ClassNotFound},
		"into a file":         {from: "f", to: "g/new", class: wire.ClassInvalid},
		"to no name":          {from: "f", to: "d/..", class: wire.ClassInvalid},
		"to the root":         {from: "d", to: "//", replace: true, class: wire.ClassInvalid},
		"the root":            {from: "/", to: "new", class: wire.ClassInvalid},
		"name too long":       {from: "f", to: strings.Repeat("n", 256), class: wire.ClassInvalid},
	} {
		for _, kind := range []string{"copy", "move", "move away"} {
			t.Run(kind+" "+name, func(t *testing.T) {
				dir := t.TempDir()
				toDir := dir
				files := map[string]string{
					"f": "content", "g": "other", "link": "->f", "dangling": "->none", "empty/": "", "d/a/x": "x", "d/l": "->/etc", "d/a/ro/y": "y", "to d": "->d",
				}
				plant(t, dir, files)
				if kind == "move away" {
					if strings.Contains(name, "self") {
						return // what is on another file system isn't in itself
					}
					toDir = filepath.Join(other, strings.ReplaceAll(name, "/", "_"))
					plant(t, toDir, files)
				}
				old := time.Unix(1_000_000_000, 123_456_789)
				for name, mode := range map[string]os.FileMode{"f": 0o751, "d/a/ro": 0o555, "d/a/x": 0o600} {
					if err := os.Chmod(dir+"/"+name, mode); err != nil {
						t.Fatal(err)
					}
					if err := os.Chtimes(dir+"/"+name, old, old); err != nil {
						t.Fatal(err)
					}
				}
				from, to := dir+"/"+tt.from, toDir+"/"+tt.to
				if tt.from == "/" {
					from = "/"
				}
				if tt.to == "//" {
					to = "//"
				}
				before, beforeThere := in(t, dir), in(t, toDir)
				op := wire.OpMove
				if kind == "copy" {
					op = wire.OpCopy
				}
				a := operate(t, op, &wire.File{Path: []byte(from), To: []byte(to), Replace: tt.replace}, nil)
				if tt.class != "" {
					a.fails(t, tt.class)
					equal(t, in(t, dir), before)
					equal(t, in(t, toDir), beforeThere)
					return
				}
				a.succeeds(t)
				if _, err := os.Lstat(from); os.IsNotExist(err) == (kind == "copy") {
					t.Errorf("where it was: %v", err)
				}
				switch info, err := os.Lstat(to); {
				case err != nil:
					t.Error(err)
				case tt.want == "/":
					equal(t, in(t, strings.TrimSuffix(to, "/")), []string{"a", "a/ro", "a/ro/y", "a/x", "l"})
					for name, mode := range map[string]os.FileMode{"a/ro": 0o555 | os.ModeDir, "a/x": 0o600} {
						if info, err := os.Stat(to + "/" + name); err != nil || info.Mode() != mode || !info.ModTime().Equal(old) {
							t.Errorf("%s: %v, %v, %v", name, info.Mode(), info.ModTime(), err)
						}
					}
				case info.Mode().IsRegular():
					if got := content(t, to); got != tt.want || info.Mode() != 0o751 || !info.ModTime().Equal(old) {
						t.Errorf("%q, %v, %v", got, info.Mode(), info.ModTime())
					}
				default:
					if got, err := os.Readlink(to); got != tt.want {
						t.Errorf("%q, %v", got, err)
					}
				}
				for _, name := range append(in(t, dir), in(t, toDir)...) {
					if strings.Contains(name, tempPrefix) {
						t.Errorf("%s is left", name)
					}
				}
			})
		}
	}
}

func TestCopySpecial(t *testing.T) {
	dir := t.TempDir()
	plant(t, dir, map[string]string{"pipe": "|", "d/a/x": "x", "d/z": "|"})
	a := operate(t, wire.OpCopy, &wire.File{Path: []byte(dir + "/pipe"), To: []byte(dir + "/new")}, nil)
	if a.fails(t, wire.ClassInvalid, "a pipe"); a.ready {
		t.Error("it was said only after Ready")
	}
	operate(t, wire.OpCopy, &wire.File{Path: []byte(dir + "/d"), To: []byte(dir + "/new")}, nil).fails(t, wire.ClassInvalid, "d/z", "a pipe")
	operate(t, wire.OpMove, &wire.File{Path: []byte(dir + "/pipe"), To: []byte(dir + "/moved")}, nil).succeeds(t)
	operate(t, wire.OpCopy, &wire.File{Path: []byte("/proc/version"), To: []byte(dir + "/version")}, nil).succeeds(t)
	if got := content(t, dir+"/version"); got != content(t, "/proc/version") {
		t.Errorf("%q", got)
	}
	equal(t, in(t, dir), []string{"d", "d/a", "d/a/x", "d/z", "moved", "version"})
}

// Nothing is left of what doesn't fit, whatever its permissions, and what was to be
// moved stays.
func TestRelocateToAFullDisk(t *testing.T) {
	mustRoot(t)
	dir, small := t.TempDir(), smallDisk(t, "512k")
	open(t, dir)
	plant(t, dir, map[string]string{"t/a/ro/x": "x", "t/b": strings.Repeat("x", 1<<20), "t/l": "->b"})
	if err := os.Chmod(dir+"/t/a/ro", 0o555); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(small, 0o777); err != nil {
		t.Fatal(err)
	}
	open(t, filepath.Dir(small))
	if err := filepath.WalkDir(dir+"/t", func(name string, _ os.DirEntry, err error) error {
		if err == nil {
			err = unix.Lchown(name, 1234, 1234)
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	before := in(t, dir)
	for _, op := range []wire.Op{wire.OpCopy, wire.OpMove} {
		operateAs(t, 1234, op, &wire.File{Path: []byte(dir + "/t"), To: []byte(small + "/t")}, nil).fails(t, wire.ClassExhausted)
		equal(t, in(t, small), nil)
		equal(t, in(t, dir), before)
	}
	// A move says when it has come only half of the way.
	if err := os.Truncate(dir+"/t/b", 10); err != nil {
		t.Fatal(err)
	}
	operateAs(t, 1234, wire.OpMove, &wire.File{Path: []byte(dir + "/t"), To: []byte(small + "/t")}, nil).fails(t, wire.ClassPermission, "it is copied there")
}
