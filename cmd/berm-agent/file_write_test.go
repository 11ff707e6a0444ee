package main

import (
	"bytes"
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/runtime/agent/wire"
)

func TestWrite(t *testing.T) {
	big := strings.Repeat("big ", 100_000)
	for name, tt := range map[string]struct {
		file   wire.File // Path is below the directory
		upload string
		at     string // where it is then, if not at Path
		want   string
		mode   os.FileMode
		class  wire.Class
		says   string
		late   bool // the failure comes after Ready
	}{
		"new":                    {file: wire.File{Path: []byte("new")}, upload: "x", want: "x", mode: 0o644},
		"new, empty":             {file: wire.File{Path: []byte("new")}, mode: 0o644},
		"new, big":               {file: wire.File{Path: []byte("new")}, upload: big, want: big, mode: 0o644},
		"new, mode":              {file: wire.File{Path: []byte("new"), Mode: 0o777}, upload: "x", want: "x", mode: 0o777},
		"new, setuid":            {file: wire.File{Path: []byte("new"), Mode: 0o6711}, upload: "x", want: "x", mode: 0o711},
		"bad UTF-8":              {file: wire.File{Path: []byte("\xff\n")}, upload: "x", want: "x", mode: 0o644},
		"replaced":               {file: wire.File{Path: []byte("script"), Mode: 0o600}, upload: "x", want: "x", mode: 0o750},
		"through a link":         {file: wire.File{Path: []byte("link")}, upload: "x", at: "d/inner", want: "x", mode: 0o644},
		"through links":          {file: wire.File{Path: []byte("link2")}, upload: "x", at: "d/inner", want: "x", mode: 0o644},
		"dangling":               {file: wire.File{Path: []byte("dangling")}, class: wire.ClassNotFound, says: "symbolic link"},
		"loop":                   {file: wire.File{Path: []byte("loop")}, class: wire.ClassInvalid, says: "symbolic links"},
		"pipe":                   {file: wire.File{Path: []byte("pipe")}, class: wire.ClassInvalid, says: "a pipe"},
		"pipe, append":           {file: wire.File{Path: []byte("pipe"), Append: true}, class: wire.ClassInvalid, says: "a pipe"},
		"device":                 {file: wire.File{Path: []byte("null"), Append: true}, class: wire.ClassInvalid, says: "a device"},
		"of the kernel":          {file: wire.File{Path: []byte("oom"), Append: true}, upload: "7", class: wire.ClassInvalid, says: "kernel", late: true},
		"of the kernel, whole":   {file: wire.File{Path: []byte("oom")}, upload: "7", class: wire.ClassPermission, says: "directory"},
		"directory":              {file: wire.File{Path: []byte("d")}, class: wire.ClassInvalid, says: "a directory"},
		"slash":                  {file: wire.File{Path: []byte("new/")}, class: wire.ClassInvalid, says: "a directory"},
		"above":                  {file: wire.File{Path: []byte("d/..")}, class: wire.ClassInvalid, says: "a directory"},
		"no parent":              {file: wire.File{Path: []byte("a/b/new")}, class: wire.ClassNotFound},
		"parents":                {file: wire.File{Path: []byte("a/b/new"), Parents: true}, upload: "x", want: "x", mode: 0o644},
		"parents, a file":        {file: wire.File{Path: []byte("script/b/new"), Parents: true}, class: wire.ClassInvalid},
		"parents, dangling":      {file: wire.File{Path: []byte("dangling/new"), Parents: true}, class: wire.ClassInvalid, late: true},
		"append":                 {file: wire.File{Path: []byte("script"), Append: true}, upload: "x", want: "oldx", mode: 0o750},
		"append, new":            {file: wire.File{Path: []byte("a/new"), Append: true, Parents: true, Mode: 0o600}, upload: big, want: big, mode: 0o600},
		"append, link":           {file: wire.File{Path: []byte("link2"), Append: true}, upload: "x", at: "d/inner", want: "ix", mode: 0o644},
		"append, dangling":       {file: wire.File{Path: []byte("dangling"), Append: true}, class: wire.ClassNotFound, says: "symbolic link"},
		"no clash":               {file: wire.File{Path: []byte("new"), NoClash: true}, upload: "x", want: "x", mode: 0o644},
		"clash":                  {file: wire.File{Path: []byte("script"), NoClash: true}, class: wire.ClassExists},
		"clash with a link":      {file: wire.File{Path: []byte("dangling"), NoClash: true}, class: wire.ClassExists},
		"clash, append":          {file: wire.File{Path: []byte("script"), NoClash: true, Append: true}, class: wire.ClassExists},
		"name too long":          {file: wire.File{Path: []byte(strings.Repeat("n", 256))}, class: wire.ClassInvalid},
		"name as long as can be": {file: wire.File{Path: []byte(strings.Repeat("n", 255))}, upload: "x", want: "x", mode: 0o644},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			plant(t, dir, map[string]string{
				"script": "old", "d/inner": "i", "link": "->d/inner", "link2": "->" + dir + "/link", "dangling": "->d/none", "loop": "->loop",
				"pipe": "|", "null": "->/dev/null", "oom": "->/proc/self/oom_score_adj",
			})
			if err := os.Chmod(dir+"/script", 0o750); err != nil {
				t.Fatal(err)
			}
			before := in(t, dir)
			adj := content(t, "/proc/self/oom_score_adj")
			f := tt.file
			f.Path = []byte(dir + "/" + string(tt.file.Path))
			a := operate(t, wire.OpWrite, &f, append([]byte{}, tt.upload...))
			if tt.class != "" {
				a.fails(t, tt.class, tt.says)
				if a.ready != tt.late {
					t.Errorf("Ready: %t", a.ready)
				}
				equal(t, in(t, dir), before)
				if got := content(t, "/proc/self/oom_score_adj"); got != adj {
					t.Errorf("the kernel has been told %q", got)
				}
				return
			}
			a.succeeds(t)
			path := string(f.Path)
			if tt.at != "" {
				path = dir + "/" + tt.at
			}
			if got := content(t, path); got != tt.want {
				t.Errorf("%d bytes, want %d", len(got), len(tt.want))
			}
			info, err := os.Lstat(path)
			if err != nil || info.Mode() != tt.mode {
				t.Errorf("%v, %v; want %v", info.Mode(), err, tt.mode)
			}
			if got := decode[wire.FileInfo](t, a.result); string(got.Path) != string(f.Path) || got.Size != int64(len(tt.want)) {
				t.Errorf("%+v", got)
			}
			if info, err := os.Lstat(dir + "/link"); err != nil || info.Mode().Type() != os.ModeSymlink {
				t.Errorf("the link: %v, %v", info, err)
			}
			for _, name := range in(t, dir) {
				if strings.Contains(name, tempPrefix) {
					t.Errorf("%s is left", name)
				}
			}
		})
	}
}

// begun starts a write, and waits until something is on its way.
func begun(t *testing.T, f *wire.File, dir string) *session {
	t.Helper()
	s := begin(t, &wire.Request{Op: wire.OpWrite, File: f}, 0)
	if s.next(&reply{}); s.w.Send(wire.KindData, []byte("half")) != nil {
		t.Fatal("no Data")
	}
	await(t, "a temporary file", func() bool {
		for _, name := range in(t, dir) {
			if isTempName(name) {
				return true
			}
		}
		return false
	})
	return s
}

func TestWriteIsWholeOrNot(t *testing.T) {
	dir := t.TempDir()
	plant(t, dir, map[string]string{"f": "old"})
	s := begun(t, &wire.File{Path: []byte(dir + "/f")}, dir)
	if got := content(t, dir+"/f"); got != "old" {
		t.Errorf("it is %q meanwhile", got)
	}
	if err := s.file.Close(); err != nil {
		t.Fatal(err)
	}
	if err := s.wait(); !errors.Is(err, errGone) {
		t.Errorf("%v", err)
	}
	equal(t, in(t, dir), []string{"f"})
	if got := content(t, dir+"/f"); got != "old" {
		t.Errorf("it is %q then", got)
	}
}

// What comes to be there meanwhile isn't lost to who asked for no clash, and a
// directory to nobody.
func TestWriteMeetsAnother(t *testing.T) {
	for name, tt := range map[string]struct {
		noClash bool
		make    func(string) error
		class   wire.Class
	}{
		"file":      {true, func(name string) error { return os.WriteFile(name, []byte("first"), 0o644) }, wire.ClassExists},
		"link":      {true, func(name string) error { return os.Symlink("none", name) }, wire.ClassExists},
		"directory": {false, func(name string) error { return os.Mkdir(name, 0o755) }, wire.ClassInvalid},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			s := begun(t, &wire.File{Path: []byte(dir + "/f"), NoClash: tt.noClash}, dir)
			if err := tt.make(dir + "/f"); err != nil {
				t.Fatal(err)
			}
			if err := s.w.Send(wire.KindEnd); err != nil {
				t.Fatal(err)
			}
			a := &reply{}
			s.next(a)
			if a.fails(t, tt.class); s.wait() == nil || s.input {
				t.Error("the input has ended")
			}
			equal(t, in(t, dir), []string{"f"})
		})
	}
}

func TestWriteOnAFullDisk(t *testing.T) {
	dir := smallDisk(t, "256k")
	plant(t, dir, map[string]string{"f": "old"})
	upload := bytes.Repeat([]byte("x"), 1<<20)
	operate(t, wire.OpWrite, &wire.File{Path: []byte(dir + "/f")}, upload).fails(t, wire.ClassExhausted, "no space left")
	equal(t, in(t, dir), []string{"f"})
	if got := content(t, dir+"/f"); got != "old" {
		t.Errorf("%q", got)
	}
	// It reads on no more, and says so.
	s := begin(t, &wire.Request{Op: wire.OpWrite, File: &wire.File{Path: []byte(dir + "/g")}}, 0)
	a := &reply{}
	s.next(a)
	for s.w.Send(wire.KindData, upload[:50_000]) == nil {
		select {
		case err := <-s.ended:
			if f := failureOf(err); f.Class != wire.ClassExhausted || !s.input {
				t.Errorf("%v; input: %t", f, s.input)
			}
			return
		default:
		}
	}
}

func TestWriteByAnotherUser(t *testing.T) {
	mustRoot(t)
	const user = 1234
	dir := t.TempDir()
	open(t, dir)
	plant(t, dir, map[string]string{"f": "old", "mine": "old", "d/f": "old", "d/shared": "old"})
	for name, err := range map[string]error{
		"the directory":   os.Chmod(dir+"/d", 0o777),
		"one's own":       os.Chown(dir+"/mine", user, user),
		"a shared file":   os.Chmod(dir+"/d/shared", 0o666),
		"a file's group":  os.Chown(dir+"/d/shared", 77, user),
		"nobody's to use": os.Chmod(dir+"/d/f", 0o644),
	} {
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
	}
	write := func(name string) *reply {
		return operateAs(t, user, wire.OpWrite, &wire.File{Path: []byte(dir + "/" + name)}, []byte("new"))
	}
	write("f").fails(t, wire.ClassPermission)
	write("new").fails(t, wire.ClassPermission, "directory")
	write("mine").fails(t, wire.ClassPermission, "directory")
	write("d/f").fails(t, wire.ClassPermission)
	write("d/new").succeeds(t)
	write("d/shared").succeeds(t) // the owner can't be kept, the group can
	if info, err := os.Stat(dir + "/d/shared"); err != nil || info.Mode() != 0o666 || content(t, dir+"/d/shared") != "new" {
		t.Errorf("%v, %v", info, err)
	}
	var st unix.Stat_t
	if err := unix.Stat(dir+"/d/shared", &st); err != nil || st.Gid != user {
		t.Errorf("group %d, %v", st.Gid, err)
	}
	// Root keeps the owner.
	operate(t, wire.OpWrite, &wire.File{Path: []byte(dir + "/mine")}, []byte("new")).succeeds(t)
	if err := unix.Stat(dir+"/mine", &st); err != nil || st.Uid != user || st.Gid != user {
		t.Errorf("owner %d, group %d, %v", st.Uid, st.Gid, err)
	}
}

// What a program that was killed has left behind goes, and nothing else.
func TestWriteSweeps(t *testing.T) {
	dir := t.TempDir()
	old := []string{".berm-0123456789abcdef", ".berm-0123456789abcdee", ".berm-0123456789abcdeg", ".berm-0123", "other", ".berm-0000000000000000"}
	for _, name := range old {
		plant(t, dir, map[string]string{name: "x"})
		if err := os.Chtimes(dir+"/"+name, time.Time{}, time.Now().Add(-2*staleAfter)); err != nil {
			t.Fatal(err)
		}
	}
	plant(t, dir, map[string]string{".berm-1111111111111111": "young", ".berm-2222222222222222": "|", ".berm-3333333333333333": "->other"})
	f, err := os.Open(dir + "/.berm-0123456789abcdee")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil { // it is being written
		t.Fatal(err)
	}
	swept.dirs = nil // an inode's number may have been another directory's
	operate(t, wire.OpWrite, &wire.File{Path: []byte(dir + "/new")}, []byte("x")).succeeds(t)
	equal(t, in(t, dir), []string{
		".berm-0123", ".berm-0123456789abcdee", ".berm-0123456789abcdeg", ".berm-1111111111111111", ".berm-2222222222222222",
		".berm-3333333333333333", "new", "other",
	})
}
