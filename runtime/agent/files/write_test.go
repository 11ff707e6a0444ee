package files

import (
	"archive/tar"
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/runtime/agent/wire"
)

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
				return 0, cmp.Or(tt.does(dir+"/f"), io.EOF)
			}))
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

// TestRemoveWideTree has more directories that aren't empty than one look at them gives.
func TestRemoveWideTree(t *testing.T) {
	dir := t.TempDir()
	for i := range 500 {
		must(t, os.MkdirAll(fmt.Sprintf("%s/t/%s%d/y", dir, strings.Repeat("x", i%200), i), 0o755))
	}
	operate(t, wire.OpRemove, &wire.File{Path: []byte(dir + "/t"), Recursive: true}, "").succeeds(t)
	equal(t, in(t, dir), nil)
}
