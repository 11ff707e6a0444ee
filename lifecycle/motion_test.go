package lifecycle_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/lifecycle"
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

// What isn't a file takes no room, and nothing waits for it.
func TestQuotaOfSpecialFiles(t *testing.T) {
	dir := t.TempDir()
	l, err := net.Listen("unix", filepath.Join(dir, "socket"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	err = errors.Join(
		unix.Mkfifo(filepath.Join(dir, "fifo"), 0o600),
		os.Symlink("fifo", filepath.Join(dir, "to-fifo")),
		os.Symlink(".", filepath.Join(dir, "to-itself")),
		os.Symlink("nowhere", filepath.Join(dir, "to-nothing")),
		os.WriteFile(filepath.Join(dir, "full"), make([]byte, 1<<20), 0o600),
	)
	if err != nil {
		t.Fatal(err)
	}
	if got, want := measured(t, dir).used(), int64(1<<20+len("fifo")+len(".")+len("nowhere")); got != want {
		t.Errorf("%d bytes are used, want %d", got, want)
	}
}

// What lies deeper than a path can be long counts, too.
func TestQuotaOfADeepTree(t *testing.T) {
	dir := t.TempDir()
	root, err := os.OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = root.RemoveAll(strings.Repeat("d", 200)); _ = root.Close() }()
	deep := ""
	for len(deep) < 2*unix.PathMax {
		deep = filepath.Join(deep, strings.Repeat("d", 200))
		if err := root.Mkdir(deep, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if err := root.WriteFile(filepath.Join(deep, "big"), make([]byte, 2<<20), 0o600); err != nil {
		t.Fatal(err)
	}
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
		if err := errors.Join(os.Mkdir(tree, 0o700), unix.Mkfifo(pipe, 0o600)); err != nil {
			t.Fatal(err)
		}
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
