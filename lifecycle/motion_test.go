package lifecycle_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/policy"
)

// measured is a world with a sandbox k on dir, with a quota of one MiB.
func measured(t *testing.T, dir string) *world {
	t.Helper()
	w := newWorld(t, setup{policy: "version: 1\nmounts: {allowed_roots: [" + dir + "]}\n"})
	req := request("k")
	req.Request.HostPath, req.Request.WorkspaceQuotaMB = ptr(dir), ptr(int64(1))
	w.create(req)
	return w
}

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
				req := request(key)
				req.Request.HostPath, req.Request.WorkspaceQuotaMB = ptr(dir), ptr(int64(1))
				w.create(req)
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
	req := request("k")
	req.Request.HostPath, req.Request.WorkspaceQuotaMB = ptr(dir), ptr(int64(1))
	if _, err := w.Create(t.Context(), req); err == nil || !strings.Contains(err.Error(), "exchanged") || len(w.fake.Containers()) != 0 {
		t.Errorf("create: %v, %d containers", err, len(w.fake.Containers()))
	}
}

// What isn't a file takes no room, and nothing waits for it.
func TestQuotaOfSpecialFiles(t *testing.T) {
	dir := t.TempDir()
	l, err := net.Listen("unix", filepath.Join(dir, "socket"))
	must(t, err)
	defer l.Close()
	must(t,
		unix.Mkfifo(filepath.Join(dir, "fifo"), 0o600),
		os.Symlink("fifo", filepath.Join(dir, "to-fifo")),
		os.Symlink(".", filepath.Join(dir, "to-itself")),
		os.Symlink("nowhere", filepath.Join(dir, "to-nothing")),
		os.WriteFile(filepath.Join(dir, "full"), make([]byte, 1<<20), 0o600),
	)
	if got, want := measured(t, dir).used(), int64(1<<20+len("fifo")+len(".")+len("nowhere")); got != want {
		t.Errorf("%d bytes are used, want %d", got, want)
	}
}

// What lies deeper than a path can be long counts, too.
func TestQuotaOfADeepTree(t *testing.T) {
	dir := t.TempDir()
	root, err := os.OpenRoot(dir)
	must(t, err)
	defer func() { _ = root.RemoveAll(strings.Repeat("d", 200)); _ = root.Close() }()
	deep := ""
	for len(deep) < 2*unix.PathMax {
		deep = filepath.Join(deep, strings.Repeat("d", 200))
		must(t, root.Mkdir(deep, 0o700))
	}
	must(t, root.WriteFile(filepath.Join(deep, "big"), make([]byte, 2<<20), 0o600))
	if got := measured(t, dir).used(); got != 2<<20 {
		t.Errorf("%d bytes are used, want %d", got, 2<<20)
	}
}

// A workspace that changes while it is measured is measured all the same: what
// vanishes is skipped, and nobody waits for a fifo that took a directory's place.
func TestQuotaOfATreeInMotion(t *testing.T) {
	dir := t.TempDir()
	const n = 100
	place := func(i int) (string, string) {
		return filepath.Join(dir, fmt.Sprintf("tree%d", i)), filepath.Join(dir, fmt.Sprintf("pipe%d", i))
	}
	for i := range n {
		tree, pipe := place(i)
		must(t, os.Mkdir(tree, 0o700), unix.Mkfifo(pipe, 0o600))
	}
	w := measured(t, dir)
	var stop atomic.Bool
	var movers sync.WaitGroup
	defer func() { stop.Store(true); movers.Wait() }()
	movers.Go(func() {
		for !stop.Load() {
			for i := range n {
				tree, pipe := place(i)
				if err := unix.Renameat2(unix.AT_FDCWD, tree, unix.AT_FDCWD, pipe, unix.RENAME_EXCHANGE); err != nil {
					t.Error(err)
					return
				}
			}
		}
	})
	movers.Go(func() {
		for !stop.Load() {
			for i := range n {
				_ = os.WriteFile(filepath.Join(dir, fmt.Sprint("file", i)), []byte("x"), 0o600)
			}
			for i := range n {
				_ = os.Remove(filepath.Join(dir, fmt.Sprint("file", i)))
			}
		}
	})
	done := make(chan int64)
	go func() {
		defer close(done)
		for range 20 {
			done <- w.used()
		}
	}()
	for {
		select {
		case used, more := <-done:
			if !more {
				return
			}
			if used != 0 {
				t.Errorf("%d bytes are over the quota", used)
			}
		case <-time.After(20 * time.Second):
			t.Fatal("the measurement hangs")
		}
	}
}
