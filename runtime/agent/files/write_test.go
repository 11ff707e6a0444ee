package files

import (
	"archive/tar"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/runtime/agent/wire"
)

// noTemp checks that nothing of this program's own is left.
func noTemp(t *testing.T, dirs ...string) {
	t.Helper()
	for _, dir := range dirs {
		for _, name := range in(t, dir) {
			if strings.Contains(name, tempPrefix) {
				t.Errorf("%s is left", name)
			}
		}
	}
}

func TestWrite(t *testing.T) {
	big := strings.Repeat("big ", 100_000)
	for name, tt := range map[string]struct {
		file   string // below the directory
		f      wire.File
		upload string
		at     string // where it is then, if not at Path
		want   string
		mode   os.FileMode
		class  wire.Class
		says   string
		late   bool // the failure comes after Ready
	}{
		"new":                    {file: "new", upload: "x", want: "x", mode: 0o644},
		"new, empty":             {file: "new", mode: 0o644},
		"new, big":               {file: "new", upload: big, want: big, mode: 0o644},
		"new, mode":              {file: "new", f: wire.File{Mode: 0o777}, upload: "x", want: "x", mode: 0o777},
		"new, setuid":            {file: "new", f: wire.File{Mode: 0o6711}, upload: "x", want: "x", mode: 0o711},
		"bad UTF-8":              {file: "\xff\n", upload: "x", want: "x", mode: 0o644},
		"replaced":               {file: "script", f: wire.File{Mode: 0o600}, upload: "x", want: "x", mode: 0o750},
		"through a link":         {file: "link", upload: "x", at: "d/inner", want: "x", mode: 0o644},
		"through links":          {file: "link2", upload: "x", at: "d/inner", want: "x", mode: 0o644},
		"dangling":               {file: "dangling", class: wire.ClassNotFound, says: "symbolic link"},
		"loop":                   {file: "loop", class: wire.ClassInvalid, says: "symbolic links"},
		"pipe":                   {file: "pipe", class: wire.ClassInvalid, says: "a pipe"},
		"pipe, append":           {file: "pipe", f: wire.File{Append: true}, class: wire.ClassInvalid, says: "a pipe"},
		"device":                 {file: "null", f: wire.File{Append: true}, class: wire.ClassInvalid, says: "a device"},
		"of the kernel":          {file: "oom", f: wire.File{Append: true}, upload: "7", class: wire.ClassInvalid, says: "kernel", late: true},
		"of the kernel, whole":   {file: "oom", upload: "7", class: wire.ClassPermission, says: "directory"},
		"directory":              {file: "d", class: wire.ClassInvalid, says: "a directory"},
		"slash":                  {file: "new/", class: wire.ClassInvalid, says: "a directory"},
		"above":                  {file: "d/..", class: wire.ClassInvalid, says: "a directory"},
		"no parent":              {file: "a/b/new", class: wire.ClassNotFound},
		"parents":                {file: "a/b/new", f: wire.File{Parents: true}, upload: "x", want: "x", mode: 0o644},
		"parents, a file":        {file: "script/b/new", f: wire.File{Parents: true}, class: wire.ClassInvalid},
		"parents, dangling":      {file: "dangling/new", f: wire.File{Parents: true}, class: wire.ClassInvalid, late: true},
		"append":                 {file: "script", f: wire.File{Append: true}, upload: "x", want: "oldx", mode: 0o750},
		"append, new":            {file: "a/new", f: wire.File{Append: true, Parents: true, Mode: 0o600}, upload: big, want: big, mode: 0o600},
		"append, link":           {file: "link2", f: wire.File{Append: true}, upload: "x", at: "d/inner", want: "ix", mode: 0o644},
		"append, dangling":       {file: "dangling", f: wire.File{Append: true}, class: wire.ClassNotFound, says: "symbolic link"},
		"no clash":               {file: "new", f: wire.File{NoClash: true}, upload: "x", want: "x", mode: 0o644},
		"clash":                  {file: "script", f: wire.File{NoClash: true}, class: wire.ClassExists},
		"clash with a link":      {file: "dangling", f: wire.File{NoClash: true}, class: wire.ClassExists},
		"clash, append":          {file: "script", f: wire.File{NoClash: true, Append: true}, class: wire.ClassExists},
		"name too long":          {file: strings.Repeat("n", 256), class: wire.ClassInvalid},
		"name as long as can be": {file: strings.Repeat("n", 255), upload: "x", want: "x", mode: 0o644},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			plant(t, dir, map[string]string{
				"script": "old", "d/inner": "i", "link": "->d/inner", "link2": "->" + dir + "/link", "dangling": "->d/none", "loop": "->loop",
				"pipe": "|", "null": "->/dev/null", "oom": "->/proc/self/oom_score_adj",
			})
			must(t, os.Chmod(dir+"/script", 0o750))
			before, adj := in(t, dir), content(t, "/proc/self/oom_score_adj")
			f := tt.f
			f.Path = []byte(dir + "/" + tt.file)
			c := operate(t, wire.OpWrite, &f, tt.upload)
			noTemp(t, dir)
			if tt.class != "" {
				if c.fails(t, tt.class, tt.says); c.ready != tt.late {
					t.Errorf("Ready: %t", c.ready)
				}
				equal(t, in(t, dir), before)
				if got := content(t, "/proc/self/oom_score_adj"); got != adj {
					t.Errorf("the kernel has been told %q", got)
				}
				return
			}
			c.succeeds(t)
			path := string(f.Path)
			if tt.at != "" {
				path = dir + "/" + tt.at
			}
			if got := content(t, path); got != tt.want {
				t.Errorf("%d bytes, want %d", len(got), len(tt.want))
			}
			if info, err := os.Lstat(path); err != nil || info.Mode() != tt.mode {
				t.Errorf("%v, %v; want %v", info.Mode(), err, tt.mode)
			}
			if string(c.result.Path) != string(f.Path) || c.result.Size != int64(len(tt.want)) {
				t.Errorf("%+v", c.result)
			}
			if info, err := os.Lstat(dir + "/link"); err != nil || info.Mode().Type() != os.ModeSymlink {
				t.Errorf("the link: %v, %v", info, err)
			}
		})
	}
}

type readerFunc func([]byte) (int, error)

func (f readerFunc) Read(p []byte) (int, error) { return f(p) }

// TestWriteMeetsAnother: a file is written whole or not at all. What comes to be there
// meanwhile isn't lost to who asked for no clash, and a directory to nobody.
func TestWriteMeetsAnother(t *testing.T) {
	for name, tt := range map[string]struct {
		noClash bool
		does    func(string) error // while half of the file is written
		class   wire.Class
		left    []string
	}{
		"hangs up":  {false, func(string) error { return errHungUp }, wire.ClassInternal, nil},
		"file":      {true, func(name string) error { return os.WriteFile(name, []byte("first"), 0o644) }, wire.ClassExists, []string{"f"}},
		"link":      {true, func(name string) error { return os.Symlink("none", name) }, wire.ClassExists, []string{"f"}},
		"directory": {false, func(name string) error { return os.Mkdir(name, 0o755) }, wire.ClassInvalid, []string{"f"}},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			c := &caller{}
			c.upload = io.MultiReader(strings.NewReader("half"), readerFunc(func([]byte) (int, error) {
				if there := in(t, dir); len(there) != 1 || !isTempName(there[0]) {
					t.Errorf("meanwhile there is %q", there)
				}
				return 0, errors.Join(tt.does(dir+"/f"), io.EOF)
			}))
			if name == "hangs up" {
				c.upload = io.MultiReader(strings.NewReader("half"), readerFunc(func([]byte) (int, error) { return 0, errHungUp }))
			}
			_ = c.do(0, wire.OpWrite, &wire.File{Path: []byte(dir + "/f"), NoClash: tt.noClash}) // it is the failure
			c.fails(t, tt.class)
			equal(t, in(t, dir), tt.left)
		})
	}
}

// TestFullDisk: what doesn't fit is told, and nothing is left of it, whatever its
// permissions; what was to be replaced or moved stays.
func TestFullDisk(t *testing.T) {
	mustRoot(t)
	const user = 1234
	dir, small := open(t, t.TempDir()), open(t, t.TempDir())
	mount(t, "tmpfs", small, "size=512k,mode=777")
	big := strings.Repeat("x", 1<<20)
	plant(t, small, map[string]string{"f": "old"})
	must(t, os.Chmod(small+"/f", 0o666))
	c := operate(t, wire.OpWrite, file4(small+"/f"), big)
	c.fails(t, wire.ClassExhausted, "no space left")
	if rest, _ := io.ReadAll(c.upload); len(rest) == 0 {
		t.Error("it has read on")
	}
	equal(t, in(t, small), []string{"f"})
	if got := content(t, small+"/f"); got != "old" {
		t.Errorf("%q", got)
	}
	must(t, os.Remove(small+"/f"))
	plant(t, dir, map[string]string{"t/a/ro/x": "x", "t/b": big, "t/l": "->b"})
	must(t, os.Chmod(dir+"/t/a/ro", 0o555), filepath.WalkDir(dir+"/t", func(name string, _ os.DirEntry, err error) error {
		return errors.Join(err, unix.Lchown(name, user, user))
	}))
	before := in(t, dir)
	for _, op := range []wire.Op{wire.OpCopy, wire.OpMove} {
		operateAs(t, user, op, &wire.File{Path: []byte(dir + "/t"), To: []byte(small + "/t")}, "").fails(t, wire.ClassExhausted)
		equal(t, in(t, small), nil)
		equal(t, in(t, dir), before)
	}
	// A move says when it has come only half of the way.
	must(t, os.Truncate(dir+"/t/b", 10))
	operateAs(t, user, wire.OpMove, &wire.File{Path: []byte(dir + "/t"), To: []byte(small + "/t")}, "").fails(t, wire.ClassPermission, "it is copied there")
	must(t, os.RemoveAll(small+"/t"))
	// An archive is unpacked as far as it goes.
	archive := pack(t, tar.Header{Name: "a", Uname: "x"}, tar.Header{Name: "d/b", Uname: big})
	operate(t, wire.OpTarWrit, file4(small), string(archive)).fails(t, wire.ClassExhausted, "d/b", "no space left")
	equal(t, in(t, small), []string{"a", "d"})
}

// TestOtherUser: files are another user's.
func TestOtherUser(t *testing.T) {
	mustRoot(t)
	const user = 1234
	dir := open(t, t.TempDir())
	plant(t, dir, map[string]string{"secret": "", "f": "old", "mine": "old", "d/f": "old", "d/shared": "old", "d/theirs/x": "x"})
	must(t, os.Chmod(dir+"/secret", 0o600), os.Chmod(dir+"/d", 0o777), os.Chown(dir+"/mine", user, user),
		os.Chmod(dir+"/d/shared", 0o666), os.Chown(dir+"/d/shared", 77, user))
	operateAs(t, user, wire.OpRead, file4(dir+"/secret"), "").fails(t, wire.ClassPermission, "secret")
	operateAs(t, user, wire.OpRemove, &wire.File{Path: []byte(dir + "/d/theirs"), Recursive: true}, "").fails(t, wire.ClassPermission, "d/theirs/x")
	operateAs(t, user, wire.OpRemove, file4(dir+"/d"), "").fails(t, wire.ClassPermission)
	write := func(name string) *caller { return operateAs(t, user, wire.OpWrite, file4(dir+"/"+name), "new") }
	write("f").fails(t, wire.ClassPermission)
	write("new").fails(t, wire.ClassPermission, "directory")
	write("mine").fails(t, wire.ClassPermission, "directory")
	write("d/f").fails(t, wire.ClassPermission)
	write("d/new").succeeds(t)
	write("d/shared").succeeds(t)                                   // the owner can't be kept, the group can
	operate(t, wire.OpWrite, file4(dir+"/mine"), "new").succeeds(t) // root keeps the owner
	for name, want := range map[string][2]uint32{"d/shared": {user, user}, "mine": {user, user}} {
		var st unix.Stat_t
		if err := unix.Stat(dir+"/"+name, &st); err != nil || st.Uid != want[0] || st.Gid != want[1] || content(t, dir+"/"+name) != "new" {
			t.Errorf("%s: owner %d, group %d, %v", name, st.Uid, st.Gid, err)
		}
	}
}

// TestWriteSweeps: what a program that was killed has left behind goes, and nothing else.
func TestWriteSweeps(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{".berm-0123456789abcdef", ".berm-0123456789abcdee", ".berm-0123456789abcdeg", ".berm-0123", "other", ".berm-0000000000000000"} {
		plant(t, dir, map[string]string{name: "x"})
		must(t, os.Chtimes(dir+"/"+name, time.Time{}, time.Now().Add(-2*staleAfter)))
	}
	plant(t, dir, map[string]string{".berm-1111111111111111": "young", ".berm-2222222222222222": "|", ".berm-3333333333333333": "->other"})
	f, err := os.Open(dir + "/.berm-0123456789abcdee")
	must(t, err)
	defer func() { _ = f.Close() }()
	must(t, unix.Flock(int(f.Fd()), unix.LOCK_EX)) // it is being written
	swept.dirs = nil                               // an inode's number may have been another directory's
	operate(t, wire.OpWrite, file4(dir+"/new"), "x").succeeds(t)
	equal(t, in(t, dir), []string{
		".berm-0123", ".berm-0123456789abcdee", ".berm-0123456789abcdeg", ".berm-1111111111111111", ".berm-2222222222222222",
		".berm-3333333333333333", "new", "other",
	})
}
