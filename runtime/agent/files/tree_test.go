package files

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

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
			c := operate(t, wire.OpRemove, &wire.File{Path: []byte(path), Recursive: tt.recursive}, "")
			var want []string
			if tt.class != "" {
				c.fails(t, tt.class)
				want = before
			} else {
				c.succeeds(t)
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
		must(t, os.MkdirAll(name+"/y", 0o755))
	}
	operate(t, wire.OpRemove, &wire.File{Path: []byte(dir + "/t"), Recursive: true}, "").succeeds(t)
	equal(t, in(t, dir), nil)
}

// Moves within a file system and to another, and copies, leave the same there.
func TestRelocate(t *testing.T) {
	other := t.TempDir()
	mount(t, "tmpfs", other, "size=8m")
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
					must(t, os.Chmod(dir+"/"+name, mode), os.Chtimes(dir+"/"+name, old, old))
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
				c := operate(t, op, &wire.File{Path: []byte(from), To: []byte(to), Replace: tt.replace}, "")
				if tt.class != "" {
					c.fails(t, tt.class)
					equal(t, in(t, dir), before)
					equal(t, in(t, toDir), beforeThere)
					return
				}
				c.succeeds(t)
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
				noTemp(t, dir, toDir)
			})
		}
	}
}

func TestCopySpecial(t *testing.T) {
	dir := t.TempDir()
	plant(t, dir, map[string]string{"pipe": "|", "d/a/x": "x", "d/z": "|"})
	c := operate(t, wire.OpCopy, &wire.File{Path: []byte(dir + "/pipe"), To: []byte(dir + "/new")}, "")
	if c.fails(t, wire.ClassInvalid, "a pipe"); c.ready {
		t.Error("it was said only after Ready")
	}
	operate(t, wire.OpCopy, &wire.File{Path: []byte(dir + "/d"), To: []byte(dir + "/new")}, "").fails(t, wire.ClassInvalid, "d/z", "a pipe")
	operate(t, wire.OpMove, &wire.File{Path: []byte(dir + "/pipe"), To: []byte(dir + "/moved")}, "").succeeds(t)
	operate(t, wire.OpCopy, &wire.File{Path: []byte("/proc/version"), To: []byte(dir + "/version")}, "").succeeds(t)
	if got := content(t, dir+"/version"); got != content(t, "/proc/version") {
		t.Errorf("%q", got)
	}
	equal(t, in(t, dir), []string{"d", "d/a", "d/a/x", "d/z", "moved", "version"})
}

func TestMkdir(t *testing.T) {
	dir := t.TempDir()
	plant(t, dir, map[string]string{"file": "x", "d/": "", "link": "->d", "dangling": "->no"})
	for name, tt := range map[string]struct {
		path    string
		mode    uint32
		parents bool
		class   wire.Class
		want    os.FileMode
	}{
		"new":                {path: "new", want: 0o755},
		"mode":               {path: "open", mode: 0o777, want: 0o777},
		"slash":              {path: "slash/", mode: 0o700, want: 0o700},
		"setuid":             {path: "bits", mode: 0o6750, want: 0o750},
		"there":              {path: "d", class: wire.ClassExists},
		"there is fine":      {path: "link", parents: true, want: 0o755},
		"no parent":          {path: "a/b/c", class: wire.ClassNotFound},
		"parents":            {path: "e/b/c", mode: 0o711, parents: true, want: 0o711},
		"file there":         {path: "file", parents: true, class: wire.ClassExists},
		"below a file":       {path: "file/x", parents: true, class: wire.ClassInvalid},
		"dangling link":      {path: "dangling", parents: true, class: wire.ClassExists},
		"below a dangling":   {path: "dangling/x", parents: true, class: wire.ClassInvalid},
		"name too long":      {path: strings.Repeat("n", 256), class: wire.ClassInvalid},
		"bad UTF-8":          {path: "\xff\xfe", want: 0o755},
		"parents too long":   {path: "f/" + strings.Repeat("n", 256), parents: true, class: wire.ClassInvalid},
		"nowhere in /proc":   {path: "/proc/x", class: wire.ClassNotFound},
		"the root":           {path: "/", class: wire.ClassExists},
		"the root, parents":  {path: "/", parents: true, want: 0},
		"through a new link": {path: "link/z/z", parents: true, want: 0o755},
	} {
		t.Run(name, func(t *testing.T) {
			full := dir + "/" + tt.path
			if strings.HasPrefix(tt.path, "/") {
				full = tt.path
			}
			c := operate(t, wire.OpMkdir, &wire.File{Path: []byte(full), Mode: tt.mode, Parents: tt.parents}, "")
			if tt.class != "" {
				c.fails(t, tt.class)
				return
			}
			c.succeeds(t)
			if info, err := os.Stat(full); err != nil || !info.IsDir() || tt.want != 0 && info.Mode()&^os.ModeDir != tt.want {
				t.Errorf("%v, %v", info, err)
			}
		})
	}
}
