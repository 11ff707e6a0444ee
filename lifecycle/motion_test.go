package lifecycle_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/policy"
)

// used is what a command without effect is told to be in use, if it is too much.
func (w *world) used() int64 {
	w.t.Helper()
	_, err := w.Exec(context.Background(), lifecycle.ExecRequest{Tenant: "a", Key: "k", Command: []string{"true"}})
	var quota *lifecycle.QuotaError
	switch {
	case err == nil:
		return 0
	case !errors.As(err, &quota):
		w.t.Error(err)
		return -1
	}
	return quota.UsedBytes
}

// The quota counts the directory that the sandbox mounts, wherever it is moved, and tells
// nothing of what takes its place.
func TestQuotaOfAMovedWorkspace(t *testing.T) {
	for name, put := range map[string]func(foreign, at string) error{
		"nothing":     func(string, string) error { return nil },
		"a link":      os.Symlink,
		"a directory": os.Rename,
	} {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			dir, moved, foreign := filepath.Join(root, "dir"), filepath.Join(root, "moved"), filepath.Join(root, "foreign")
			size := func(at string, bytes int64) {
				t.Helper()
				must(t, os.MkdirAll(at, 0o700), os.WriteFile(filepath.Join(at, "f"), make([]byte, bytes), 0o600))
			}
			size(dir, 0)
			size(foreign, 5<<20)
			w := newWorld(t, setup{policy: "version: 1\nmounts: {allowed_roots: [" + root + "]}\n"})
			for _, key := range []string{"k", "stays", "quiet"} {
				w.create(mounting(key, dir, 1))
			}
			must(t, os.Rename(dir, moved), put(foreign, dir))
			if got := w.used(); got != 0 {
				t.Errorf("moved: %d bytes are used", got)
			}
			size(moved, 3<<20)
			if got := w.used(); got != 3<<20 {
				t.Errorf("filled: %d bytes are used", got)
			}
			size(moved, 0)
			w.stop()
			w = newWorld(t, setup{engine: w.fake, store: w.store, policy: "version: 1\nmounts: {allowed_roots: [" + root + "]}\n"})
			_, err := w.Exec(context.Background(), lifecycle.ExecRequest{Tenant: "a", Key: "stays", Command: []string{"true"}})
			var quota *lifecycle.QuotaError
			if !errors.As(err, &quota) || quota.UsedBytes != 0 {
				t.Errorf("after a restart: %v", err)
			}
			must(t, os.RemoveAll(dir), os.Rename(moved, dir))
			if res := w.exec("quiet", "true"); !res.OK() || res.QuotaExceeded {
				t.Errorf("back in its place: %+v", res)
			}
		})
	}
}

// elsewhere is a Holder that has the engine mount another directory.
type elsewhere struct{ dir string }

func (e elsewhere) Hold(_ context.Context, _ string, mounts []policy.Mount) ([]string, func() error, error) {
	return slices.Repeat([]string{e.dir}, len(mounts)), func() error { return nil }, nil
}
func (elsewhere) Clean() error { return nil }
func (elsewhere) Mode() string { return "held" }

// The directory that is measured is the one that is mounted.
func TestQuotaOfAnExchangedWorkspace(t *testing.T) {
	dir := t.TempDir()
	w := newWorld(t, setup{policy: "version: 1\nmounts: {allowed_roots: [" + dir + "]}\n", holder: elsewhere{t.TempDir()}})
	if _, err := w.Create(t.Context(), mounting("k", dir, 1)); err == nil || !strings.Contains(err.Error(), "exchanged") || len(w.fake.Containers()) != 0 {
		t.Errorf("create: %v, %d containers", err, len(w.fake.Containers()))
	}
}
