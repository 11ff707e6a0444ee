package hostdir

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// deepen makes a chain of directories below dir, each with a file and a sibling.
func deepen(t *testing.T, dir string, levels int) {
	t.Helper()
	fd, err := unix.Open(dir, unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	must(t, err)
	for range levels {
		_ = unix.Mkdirat(fd, "0", 0o755)
		must(t, unix.Mkdirat(fd, "1", 0o755))
		next, err := unix.Openat(fd, "1", unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		_ = unix.Close(fd)
		must(t, err)
		fd = next
		f, err := unix.Openat(fd, "file", unix.O_CREAT|unix.O_CLOEXEC, 0o644)
		must(t, err)
		_ = unix.Close(f)
	}
	_ = unix.Close(fd)
}

// quick is a fastDir with a directory called tree.
func quick(t *testing.T) (string, *os.Root) {
	t.Helper()
	dir := fastDir(t)
	root := rootOf(t, dir)
	t.Cleanup(func() { must(t, Remove(context.Background(), root, "tree")) }) // too deep for others
	plant(t, dir, "tree/")
	return dir, root
}

func gone(t *testing.T, path string) {
	t.Helper()
	if _, err := os.Lstat(path); !os.IsNotExist(err) {
		t.Errorf("%s is still there: %v", path, err)
	}
}

func TestRemoveTree(t *testing.T) {
	t.Parallel()
	outside, _ := grown(t, "canary")
	dir, root := grown(t, "other", "file", "link->"+outside, "fifo|", "tree/", "tree/1", "tree/2/", "tree/2/3/", "tree/2/3/4", "tree/2/3/link->"+outside,
		"tree/a/b/c/d/", "tree/a/b/c/e/", "tree/a/b/f/", "tree/a/fifo|", "tree/empty/")
	for _, name := range []string{"missing", "file", "link", "fifo", "tree", "tree"} {
		if err := Remove(context.Background(), root, name); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		gone(t, filepath.Join(dir, name))
	}
	for _, name := range []string{"", ".", "..", "tree/2", "/"} {
		if err := Remove(context.Background(), root, name); err == nil {
			t.Errorf("%q could be removed", name)
		}
	}
	if got := tree(t, dir); len(got) != 1 || got["other"] == "" {
		t.Errorf("left: %v", got)
	}
	if tree(t, outside)["canary"] == "" {
		t.Error("a link was followed")
	}
}

func TestRemoveDeepTree(t *testing.T) {
	t.Parallel()
	dir, root := quick(t)
	deepen(t, filepath.Join(dir, "tree"), 20_000)
	must(t, Remove(context.Background(), root, "tree"))
	gone(t, filepath.Join(dir, "tree"))
}

// A directory of many directories.
func TestRemoveWideTree(t *testing.T) {
	t.Parallel()
	dir, root := quick(t)
	for i := range 5000 {
		must(t, os.MkdirAll(fmt.Sprintf("%s/tree/a/%d/x/y", dir, i), 0o755))
	}
	must(t, Remove(context.Background(), root, "tree"))
	gone(t, filepath.Join(dir, "tree"))
}

// It ends with its context, wherever it is, and the next one goes on from there.
func TestRemoveEnds(t *testing.T) {
	t.Parallel()
	planted := []string{"tree/"}
	for i := range 20 {
		planted = append(planted, fmt.Sprintf("tree/d/e/f/%d/", i), fmt.Sprintf("tree/d/e/f/%d/x", i), fmt.Sprintf("tree/d/%d", i), fmt.Sprintf("tree/%d", i))
	}
	dir, root := grown(t, planted...)
	calls, before := 0, len(tree(t, dir))
	for {
		ctx, cancel := context.WithCancel(t.Context())
		asked := 0
		err := Remove(hooked{ctx, func() {
			if asked++; asked > 10 {
				cancel()
			}
		}}, root, "tree")
		if err == nil {
			break
		}
		left := len(tree(t, dir))
		if calls++; !errors.Is(err, context.Canceled) || before-left > 10 || calls > 1000 {
			t.Fatalf("%v, with %d left of %d", err, left, before)
		}
		before = left
	}
	if calls < 5 {
		t.Errorf("it ended %d times", calls)
	}
	gone(t, filepath.Join(dir, "tree"))
}
