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
)

func pinner(t *testing.T) *Pinner {
	t.Helper()
	p, err := NewPinner(filepath.Join(t.TempDir(), "pins"))
	if errors.Is(err, unix.EPERM) && os.Getenv("BERM_REQUIRE") == "" {
		t.Skip("pinning needs CAP_SYS_ADMIN")
	}
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func makeDir(t *testing.T, path, file string) {
	t.Helper()
	if err := os.MkdirAll(path, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(path, file), nil, 0o644); err != nil {
		t.Fatal(err)
	}
}

func mount(path string) policy.Mount { return policy.Mount{Source: path, Local: path} }

// swap puts a symbolic link to elsewhere in the place of a directory.
func swap(t *testing.T, path, elsewhere string) {
	t.Helper()
	if err := os.Rename(path, path+".was"); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(elsewhere, path); err != nil {
		t.Fatal(err)
	}
}

func TestPinSurvivesSwap(t *testing.T) {
	p := pinner(t)
	dir, secret := filepath.Join(t.TempDir(), "work"), t.TempDir()
	makeDir(t, dir, "mine")
	makeDir(t, secret, "secret")
	sources, release, err := p.Hold(context.Background(), "s", []policy.Mount{mount(dir)})
	if err != nil {
		t.Fatal(err)
	}
	swap(t, dir, secret)
	if _, err := os.Stat(filepath.Join(sources[0], "mine")); err != nil {
		t.Errorf("the pinned directory lost its content: %v", err)
	}
	if _, err := os.Stat(filepath.Join(sources[0], "secret")); err == nil {
		t.Error("the swap got through")
	}
	if err := release(); err != nil {
		t.Fatal(err)
	}
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
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(mounts), p.dir) {
		t.Error("a mount is left below the pin directory")
	}
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
	if _, _, err := (Verifier{}).Hold(context.Background(), "s", []policy.Mount{mount(dir)}); !errors.Is(err, ErrExchanged) {
		t.Errorf("Verifier.Hold through a symbolic link: %v", err)
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
	if err := unix.Mount("tmpfs", sub, "tmpfs", 0, ""); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := unix.Unmount(sub, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	}()
	sources, release, err := p.Hold(context.Background(), "s", []policy.Mount{mount(dir)})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(sources[0], "sub", "under")); err != nil {
		t.Errorf("a file system below the directory came along: %v", err)
	}
	if err := release(); err != nil {
		t.Fatal(err)
	}
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
	if err := os.Remove(filepath.Join(p.dir, "c", "x")); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(p.dir, "c", "0"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := p.Clean(); err != nil {
		t.Fatal(err)
	}
	nothingLeft(t, p)
	if _, err := os.Stat(filepath.Join(dir, "mine")); err != nil {
		t.Errorf("cleaning touched the directory: %v", err)
	}
}

func TestVerifier(t *testing.T) {
	for _, tt := range []struct {
		name string
		do   func(t *testing.T, dir string)
		ok   bool
	}{
		{"untouched", func(*testing.T, string) {}, true},
		{"content changed", func(t *testing.T, dir string) { makeDir(t, dir, "new") }, true},
		{"symlink", func(t *testing.T, dir string) { swap(t, dir, t.TempDir()) }, false},
		{"other directory", func(t *testing.T, dir string) {
			if err := os.Rename(dir, dir+".was"); err != nil {
				t.Fatal(err)
			}
			makeDir(t, dir, "x")
		}, false},
		{"removed", func(t *testing.T, dir string) {
			if err := os.Rename(dir, dir+".was"); err != nil {
				t.Fatal(err)
			}
		}, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "work")
			makeDir(t, dir, "mine")
			sources, release, err := (Verifier{}).Hold(context.Background(), "s", []policy.Mount{mount(dir)})
			if err != nil {
				t.Fatal(err)
			}
			if sources[0] != dir {
				t.Errorf("source %s, want %s", sources[0], dir)
			}
			tt.do(t, dir)
			if err := release(); (err == nil) != tt.ok || err != nil && !errors.Is(err, ErrExchanged) {
				t.Errorf("release: %v", err)
			}
		})
	}
}

// Whoever can write to a parent can exchange the directory while the engine looks
// for it, and bring it back before it is compared.
func TestVerifierKeepsOutWhoCouldExchange(t *testing.T) {
	root := t.TempDir()
	in := func(path, mode string) policy.Mount {
		dir := filepath.Join(root, path)
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		return policy.Mount{HostPath: dir, Source: dir, Local: dir, Mode: mode}
	}
	for _, tt := range []struct {
		name         string
		there, asked policy.Mount
		ok           bool
	}{
		{"below a writable one", in("a", "rw"), in("a/x", "ro"), false},
		{"far below a writable one", in("a", "rw"), in("a/x/y", "rw"), false},
		{"below a read-only one", in("a", "ro"), in("a/x", "rw"), true},
		{"the same", in("a", "rw"), in("a", "rw"), true},
		{"around a writable one", in("a/x", "rw"), in("a", "rw"), true},
		{"a name that begins alike", in("a", "rw"), in("ab", "rw"), true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			v := NewVerifier(func(session string) []policy.Mount {
				if session != "s" {
					t.Errorf("asked about session %q", session)
				}
				return []policy.Mount{tt.there}
			})
			_, release, err := v.Hold(context.Background(), "s", []policy.Mount{tt.asked})
			var denied *policy.DeniedError
			if (err == nil) != tt.ok || err != nil && !errors.As(err, &denied) {
				t.Fatalf("Hold: %v", err)
			}
			if err == nil {
				if err := release(); err != nil {
					t.Error(err)
				}
			}
		})
	}
	t.Run("while another is being mounted", func(t *testing.T) {
		v := NewVerifier(func(string) []policy.Mount { return nil })
		_, release, err := v.Hold(context.Background(), "s", []policy.Mount{in("a/x", "ro")})
		if err != nil {
			t.Fatal(err)
		}
		if _, _, err := v.Hold(context.Background(), "t", []policy.Mount{in("a", "rw")}); err == nil {
			t.Error("a sandbox got the parent of a directory that was being mounted")
		}
		if err := release(); err != nil {
			t.Fatal(err)
		}
		if _, _, err := v.Hold(context.Background(), "t", []policy.Mount{in("a", "rw")}); err != nil {
			t.Errorf("afterwards: %v", err)
		}
	})
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
