package policy

import (
	"errors"
	"os"
	"path/filepath"
	goruntime "runtime"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

func TestOwner(t *testing.T) {
	for asked, want := range map[string]*Owner{
		"": nil, "1000:1000": {1000, 1000}, "0:0": {0, 0}, "2147483647:7": {2147483647, 7},
		"1000": {-1, -1}, "a:b": {-1, -1}, "1:": {-1, -1}, ":1": {-1, -1}, "-1:1": {-1, -1}, "1:2:3": {-1, -1}, "2147483648:1": {-1, -1}, "1:4294967295": {-1, -1},
	} {
		p, err := Parse([]byte("version: 1\nmounts: {owner: \""+asked+"\"}"), Options{})
		switch {
		case want != nil && want.UID < 0:
			if err == nil || !strings.Contains(err.Error(), "mounts.owner: is \""+asked+"\", must be two numbers with a colon (uid:gid)") {
				t.Errorf("%q: %v", asked, err)
			}
		case err != nil || (want == nil) != (p.Owner() == nil) || want != nil && *p.Owner() != *want:
			t.Errorf("%q: %+v, %v", asked, p.Owner(), err)
		}
	}
}

// asRoot skips a test that can't give files away.
func asRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("only root can give files away")
	}
}

// withoutChown calls f while this thread lacks CAP_CHOWN.
func withoutChown(t *testing.T, f func()) {
	t.Helper()
	asRoot(t)
	goruntime.LockOSThread()
	defer goruntime.UnlockOSThread()
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var all [2]unix.CapUserData
	must(t, unix.Capget(&header, &all[0]))
	less := all
	less[0].Effective &^= 1 << unix.CAP_CHOWN
	must(t, unix.Capset(&header, &less[0]))
	defer func() {
		must(t, unix.Capset(&header, &all[0]))
	}()
	f()
}

// wantOwner checks the owner of what a path itself stands for.
func wantOwner(t *testing.T, path string, uid, gid int) {
	t.Helper()
	fi, err := os.Lstat(path)
	if err != nil {
		t.Error(err)
		return
	}
	if st := fi.Sys().(*syscall.Stat_t); int(st.Uid) != uid || int(st.Gid) != gid {
		t.Errorf("%s belongs to %d:%d, want %d:%d", path, st.Uid, st.Gid, uid, gid)
	}
}

func TestMakeDirGives(t *testing.T) {
	asRoot(t)
	base := t.TempDir()
	must(t, os.Mkdir(filepath.Join(base, "there"), 0o700))
	for range 2 {
		must(t, MakeDir(base, "there/a/b", &Owner{1234, 4321}))
	}
	wantOwner(t, filepath.Join(base, "there"), 0, 0)
	wantOwner(t, filepath.Join(base, "there/a"), 1234, 4321)
	wantOwner(t, filepath.Join(base, "there/a/b"), 1234, 4321)
	must(t, MakeDir(base, "own", nil))
	wantOwner(t, filepath.Join(base, "own"), 0, 0)
}

// A directory that a sandbox has put in the place of a new one isn't given away.
func TestMakeDirGivesNothingElse(t *testing.T) {
	asRoot(t)
	base, outside := t.TempDir(), t.TempDir()
	must(t, os.MkdirAll(filepath.Join(base, "full/x"), 0o700), os.Mkdir(filepath.Join(base, "empty"), 0o700), os.Symlink("empty", filepath.Join(base, "inside")), os.Symlink(outside, filepath.Join(base, "link")), os.WriteFile(filepath.Join(base, "file"), nil, 0o600), unix.Mkfifo(filepath.Join(base, "fifo"), 0o600))
	root, err := os.OpenRoot(base)
	must(t, err)
	defer root.Close()
	for _, name := range []string{"full", "link", "inside", "file", "fifo"} {
		if err := giveEmpty(root, name, &Owner{1234, 4321}); err == nil {
			t.Errorf("%s was given away", name)
		}
		wantOwner(t, filepath.Join(base, name), 0, 0)
	}
	wantOwner(t, filepath.Join(base, "empty"), 0, 0)
	if err := MakeDir(base, "link/new", &Owner{1234, 4321}); err == nil {
		t.Error("a directory was made through a link")
	}
	if _, err := os.Lstat(filepath.Join(outside, "new")); err == nil {
		t.Error("a directory was made outside")
	}
	wantOwner(t, outside, 0, 0)
}

func TestGiveRefused(t *testing.T) {
	base := t.TempDir()
	withoutChown(t, func() {
		var refused *OwnerError
		_, err := Parse([]byte("version: 1\nmounts: {allowed_roots: ["+base+"], default_workspace: "+base+"/w, owner: '1234:4321'}"), Options{})
		if err == nil || !strings.Contains(err.Error(), "Berm may not give what it makes to 1234:4321, the policy's mounts.owner: run it as root, or with CAP_CHOWN") {
			t.Errorf("the policy: %v", err)
		}
		if err := MakeDir(base, "w", &Owner{1234, 4321}); !errors.As(err, &refused) || refused.Owner != (Owner{1234, 4321}) {
			t.Errorf("the error: %v", err)
		}
		if _, err := os.Lstat(base + "/w"); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("what couldn't be given away is there: %v", err)
		}
		if err := MakeDir(base, "w", &Owner{0, 0}); err != nil {
			t.Errorf("to itself: %v", err)
		}
	})
}
