package mountpin

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/runtime/runtimetest/check"
)

func pinner(t *testing.T) *Pinner {
	t.Helper()
	p, err := NewPinner(filepath.Join(t.TempDir(), "pins"))
	if errors.Is(err, unix.EPERM) && os.Getenv("BERM_REQUIRE") == "" {
		t.Skip("pinning needs CAP_SYS_ADMIN")
	}
	must(t, err)
	return p
}

func makeDir(t *testing.T, path, file string) {
	t.Helper()
	must(t, os.MkdirAll(path, 0o755))
	must(t, os.WriteFile(filepath.Join(path, file), nil, 0o644))
}

func mount(path string) policy.Mount { return policy.Mount{Source: path, Local: path} }

// swap puts a symbolic link to elsewhere in the place of a directory.
func swap(t *testing.T, path, elsewhere string) {
	t.Helper()
	must(t, os.Rename(path, path+".was"))
	must(t, os.Symlink(elsewhere, path))
}

func TestPinSurvivesSwap(t *testing.T) {
	p := pinner(t)
	dir, secret := filepath.Join(t.TempDir(), "work"), t.TempDir()
	makeDir(t, dir, "mine")
	makeDir(t, secret, "secret")
	sources, release, err := p.Hold(context.Background(), "s", []policy.Mount{mount(dir)})
	must(t, err)
	swap(t, dir, secret)
	if _, err := os.Stat(filepath.Join(sources[0], "mine")); err != nil {
		t.Errorf("the pinned directory lost its content: %v", err)
	}
	if _, err := os.Stat(filepath.Join(sources[0], "secret")); err == nil {
		t.Error("the swap got through")
	}
	must(t, release())
	if _, err := os.Stat(filepath.Join(dir+".was", "mine")); err != nil {
		t.Errorf("release touched the directory: %v", err)
	}
	nothingLeft(t, p)
}

func nothingLeft(t *testing.T, p *Pinner) {
	t.Helper()
	if left, err := os.ReadDir(p.dir); err != nil || len(left) > 0 {
		t.Errorf("left in the pin directory: %v, %v", left, err)
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	must(t, err)
	if strings.Contains(string(mounts), p.dir) {
		t.Error("a mount is left below the pin directory")
	}
}

// A release that fails is tried again by the next hold, so that the name can be held again.
func TestReleaseAgain(t *testing.T) {
	p := pinner(t)
	mounts := []policy.Mount{mount(t.TempDir())}
	_, release, err := p.Hold(t.Context(), "s", mounts)
	must(t, err)
	stuck := filepath.Join(p.dir, "s", "stuck")
	makeDir(t, stuck, "inside")
	if err := release(); err == nil {
		t.Fatal("released what can't be removed")
	}
	if _, _, err := p.Hold(t.Context(), "s", mounts); !errors.Is(err, os.ErrExist) {
		t.Errorf("while it can't be released: %v", err)
	}
	must(t, os.RemoveAll(stuck))
	_, release, err = p.Hold(t.Context(), "s", mounts)
	if err != nil {
		t.Fatalf("once it can: %v", err)
	}
	if _, _, err := p.Hold(t.Context(), "s", mounts); !errors.Is(err, os.ErrExist) {
		t.Errorf("held twice: %v", err)
	}
	if err := release(); err != nil {
		t.Error(err)
	}
	nothingLeft(t, p)
}

func TestSwappedBeforeHold(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "work", "sub")
	makeDir(t, dir, "mine")
	swap(t, filepath.Dir(dir), t.TempDir())
	p := pinner(t)
	if _, _, err := p.Hold(context.Background(), "s", []policy.Mount{mount(dir)}); !errors.Is(err, ErrExchanged) {
		t.Errorf("Pinner.Hold through a symbolic link: %v", err)
	}
	nothingLeft(t, p)
}

// A file is held like a directory, if it is one and has no other name.
func TestPinFiles(t *testing.T) {
	p, dir := pinner(t), t.TempDir()
	makeDir(t, dir, "file")
	file := mount(filepath.Join(dir, "file"))
	file.File = true
	must(t, os.WriteFile(file.Local, []byte("mine"), 0o600))
	sources, release, err := p.Hold(t.Context(), "s", []policy.Mount{file, mount(dir)})
	must(t, err)
	swap(t, file.Local, "/etc/passwd")
	if b, err := os.ReadFile(sources[0]); string(b) != "mine" {
		t.Errorf("held: %q, %v", b, err)
	}
	must(t, release())
	nothingLeft(t, p)
	for name, tt := range map[string]struct {
		put  func() error
		want error
	}{
		"link":      {func() error { return os.Symlink("file.was", file.Local) }, ErrExchanged},
		"hard link": {func() error { return os.Link(file.Local+".was", file.Local) }, ErrLinked},
		"directory": {func() error { return os.Mkdir(file.Local, 0o700) }, ErrExchanged},
		"fifo":      {func() error { return unix.Mkfifo(file.Local, 0o600) }, ErrExchanged},
		"socket":    {func() error { return unix.Mknod(file.Local, unix.S_IFSOCK|0o600, 0) }, ErrExchanged},
		"nothing":   {func() error { return nil }, os.ErrNotExist},
	} {
		must(t, os.RemoveAll(file.Local), tt.put())
		if _, _, err := p.Hold(t.Context(), "s", []policy.Mount{file}); !errors.Is(err, tt.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, _, err := p.Hold(t.Context(), "s", []policy.Mount{mount(file.Local + ".was")}); !errors.Is(err, ErrExchanged) {
		t.Errorf("a file in the place of a directory: %v", err)
	}
	nothingLeft(t, p)
}

func TestOpenBelow(t *testing.T) {
	dir := t.TempDir()
	makeDir(t, filepath.Join(dir, "a/b"), "file")
	must(t, os.Symlink("a", filepath.Join(dir, "link")), os.Symlink("file", filepath.Join(dir, "a/b/link")), os.Mkdir(filepath.Join(dir, "m"), 0o700),
		unix.Mkfifo(filepath.Join(dir, "fifo"), 0o600))
	must(t, unix.Mount("tmpfs", filepath.Join(dir, "m"), "tmpfs", 0, ""))
	defer func() { _ = unix.Unmount(filepath.Join(dir, "m"), unix.MNT_DETACH) }()
	for rel, want := range map[string][2]bool{ // as a directory, as a file
		"a": {true, false}, "a/b": {true, false}, "a/b/file": {false, true}, "link": {}, "link/b": {}, "a/b/link": {}, "..": {}, "a/../..": {}, "m": {}, "fifo": {}, "none": {},
	} {
		for i, file := range []bool{false, true} {
			f, err := OpenBelow(dir, rel, file)
			if (err == nil) != want[i] {
				t.Errorf("%s, file %v: %v", rel, file, err)
			}
			if err == nil {
				must(t, f.Close())
			}
		}
	}
}

func TestPinRefusesMappedPath(t *testing.T) {
	p := pinner(t)
	dir := t.TempDir()
	if _, _, err := p.Hold(context.Background(), "s", []policy.Mount{{Source: "/srv/elsewhere", Local: dir}}); err == nil {
		t.Error("a mapped path was pinned")
	}
	nothingLeft(t, p)
}

func TestPinSeesNoSubmounts(t *testing.T) {
	p := pinner(t)
	dir := t.TempDir()
	sub := filepath.Join(dir, "sub")
	makeDir(t, sub, "under")
	must(t, unix.Mount("tmpfs", sub, "tmpfs", 0, ""))
	defer func() {
		if err := unix.Unmount(sub, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	}()
	sources, release, err := p.Hold(context.Background(), "s", []policy.Mount{mount(dir)})
	must(t, err)
	if _, err := os.Stat(filepath.Join(sources[0], "sub", "under")); err != nil {
		t.Errorf("a file system below the directory came along: %v", err)
	}
	must(t, release())
}

func TestCleanTakesWhatTheDeadLeft(t *testing.T) {
	p := pinner(t)
	dir := t.TempDir()
	makeDir(t, dir, "mine")
	for _, session := range []string{"a", "b"} {
		if _, _, err := p.Hold(context.Background(), session, []policy.Mount{mount(dir), mount(dir)}); err != nil {
			t.Fatal(err)
		}
	}
	// One was killed between making the directory and mounting on it.
	makeDir(t, filepath.Join(p.dir, "c"), "x")
	must(t, os.Remove(filepath.Join(p.dir, "c", "x")))
	must(t, os.Mkdir(filepath.Join(p.dir, "c", "0"), 0o700))
	must(t, p.Clean())
	nothingLeft(t, p)
	if _, err := os.Stat(filepath.Join(dir, "mine")); err != nil {
		t.Errorf("cleaning touched the directory: %v", err)
	}
}

// Trying makes nothing, and comes to what a pinner comes to.
func TestTry(t *testing.T) {
	dir := t.TempDir()
	_, want := NewPinner(filepath.Join(t.TempDir(), "pins"))
	if got := Try(dir); (got == nil) != (want == nil) || errors.Is(got, unix.EPERM) != errors.Is(want, unix.EPERM) {
		t.Errorf("%v, and a pinner: %v", got, want)
	}
	if err := Try(filepath.Join(dir, "none")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a directory that isn't there: %v", err)
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) > 0 {
		t.Errorf("left: %v, %v", entries, err)
	}
}

var must = check.Must // ends a test if a step of its own fails
