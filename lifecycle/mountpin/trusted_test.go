package mountpin

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/policy"
)

// world is a Trusted, and what there is beside it.
type world struct {
	*Trusted
	root, dir string
	inUse     []policy.Mount
}

// newWorld trusts the directories a and b of its root, of which all may be mounted.
func newWorld(t *testing.T) *world {
	t.Helper()
	root, err := filepath.EvalSymlinks(t.TempDir())
	must(t, err)
	for _, dir := range []string{"a/x/y", "b/x", "c/x"} {
		makeDir(t, filepath.Join(root, dir), "mine")
	}
	pol, err := policy.Parse([]byte("version: 1\nmounts: {allowed_roots: ["+root+"], trusted_roots: ["+root+"/a, "+root+"/b]}"), policy.Options{})
	must(t, err)
	w := &world{root: root, dir: filepath.Join(t.TempDir(), "trusted")}
	w.Trusted = NewTrusted(w.dir, pol.Unheld, func(context.Context) ([]policy.Mount, error) { return w.inUse, nil })
	return w
}

func (w *world) mount(path, mode string) policy.Mount {
	m := mount(filepath.Join(w.root, path))
	m.Mode = mode
	return m
}

// try holds one mount, and releases it if that succeeds.
func (w *world) try(t *testing.T, m policy.Mount) error {
	t.Helper()
	sources, release, err := w.Hold(context.Background(), "try", []policy.Mount{m})
	if err != nil {
		return err
	}
	if !slices.Equal(sources, []string{m.Source}) {
		t.Errorf("sources %v", sources)
	}
	return release()
}

func denied(err error) bool {
	var d *policy.DeniedError
	return errors.As(err, &d) && strings.Contains(err.Error(), "mounts.trusted_roots") && strings.Contains(err.Error(), "CAP_SYS_ADMIN")
}

func TestTrusted(t *testing.T) {
	w := newWorld(t)
	if err := w.try(t, w.mount("a/x", "ro")); err != nil {
		t.Errorf("read-only in a trusted root: %v", err)
	}
	for _, m := range []policy.Mount{w.mount("c/x", "ro"), w.mount("c", "rw"), w.mount("a/x", "rw")} {
		if err := w.try(t, m); !denied(err) {
			t.Errorf("%s %s: %v", m.Source, m.Mode, err)
		}
	}
	// Mounts that are being made count, in either order, and so do those of one container.
	for _, pair := range [][2]policy.Mount{{w.mount("a", "rw"), w.mount("a/x", "ro")}, {w.mount("a/x", "ro"), w.mount("a", "rw")}} {
		if _, _, err := w.Hold(t.Context(), "both", pair[:]); !denied(err) {
			t.Errorf("both in one: %v", err)
		}
	}
	_, release, err := w.Hold(t.Context(), "one", []policy.Mount{w.mount("b/x", "ro")})
	must(t, err)
	if err := w.try(t, w.mount("b", "rw")); !denied(err) {
		t.Errorf("around one that is being made: %v", err)
	}
	if _, _, err := w.Hold(t.Context(), "one", nil); !errors.Is(err, os.ErrExist) {
		t.Errorf("a name twice: %v", err)
	}
	must(t, release())
	w.inUse = []policy.Mount{w.mount("b/x", "ro")}
	if err := w.try(t, w.mount("b", "rw")); !denied(err) {
		t.Errorf("around one that exists: %v", err)
	}
	w.inUse = nil

	// A directory that was ever writable isn't trusted until the host starts again: a process
	// may have passed a descriptor of it on.
	if err := w.try(t, w.mount("b", "rw")); err != nil {
		t.Fatalf("a root, writable: %v", err)
	}
	w.Trusted = NewTrusted(w.dir, w.judge, w.Claims.InUse)
	must(t, os.Mkdir(filepath.Join(w.dir, "an earlier boot"), 0o700), w.Clean())
	if left, err := os.ReadDir(w.dir); err != nil || len(left) != 1 {
		t.Errorf("left: %v, %v", left, err)
	}
	if err := w.try(t, w.mount("b/x", "ro")); !denied(err) {
		t.Errorf("in one that was writable: %v", err)
	}
	pinner := &Pinner{dir: t.TempDir(), Mark: w.Mark}
	if _, free, err := pinner.Hold(t.Context(), "held", nil); err != nil || free() != nil {
		t.Errorf("nothing to hold: %v", err)
	}
	if _, _, err := pinner.Hold(t.Context(), "missing", []policy.Mount{w.mount("a/missing", "rw")}); err == nil {
		t.Error("held what isn't there")
	}
	if err := w.try(t, w.mount("a/missing/x", "ro")); !denied(err) {
		t.Errorf("in one that was held writable: %v", err)
	}
	for _, mode := range []string{"ro", "rw"} {
		if err := w.try(t, w.mount("b", mode)); err != nil {
			t.Errorf("that one itself, %s: %v", mode, err)
		}
	}

	broken := errors.New("the engine is away")
	w.Claims.InUse = func(context.Context) ([]policy.Mount, error) { return nil, broken }
	if err := w.try(t, w.mount("a/x", "ro")); !errors.Is(err, broken) {
		t.Errorf("without knowing of the others: %v", err)
	}
}

// A swapper that exchanges the directory with a link, again and again, comes by nothing: the
// path that is judged is the path that is opened, and what is below a trusted root isn't writable
// for anybody who is judged.
func TestTrustedAgainstSwapper(t *testing.T) {
	w := newWorld(t)
	outside := t.TempDir()
	link := filepath.Join(w.root, "link")
	must(t, os.Symlink(outside, link))
	victim := w.mount("c/x", "ro")
	trusted := w.mount("a/x", "ro")
	for range 200 {
		for _, path := range []string{victim.Source, trusted.Source} {
			must(t, unix.Renameat2(unix.AT_FDCWD, path, unix.AT_FDCWD, link, unix.RENAME_EXCHANGE))
			if err := w.try(t, victim); !denied(err) {
				t.Fatalf("one that isn't trusted: %v", err)
			}
			if err := w.try(t, trusted); (err == nil) != (path == victim.Source) || err != nil && !errors.Is(err, ErrExchanged) {
				t.Fatalf("one whose path is a link: %v", err)
			}
			must(t, unix.Renameat2(unix.AT_FDCWD, path, unix.AT_FDCWD, link, unix.RENAME_EXCHANGE))
		}
	}
}
