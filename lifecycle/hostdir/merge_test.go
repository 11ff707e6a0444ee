package hostdir

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
)

func TestMerge(t *testing.T) {
	t.Parallel()
	outside, _ := grown(t, "canary")
	from, a := grown(t, "a", "b", "c", "e", "d/", "d/old/", "d/old/f", "d/new/", "d/new/g", "d/link->x", "whole/", "whole/h", "empty/")
	to, b := grown(t, "b->"+outside+"/canary", "c|", "e->nowhere", "d/", "d/kept", "d/old/", "d/old/kept", "empty/", "kept")
	must(t, os.Chmod(filepath.Join(from, "whole"), 0o711))
	for _, name := range []string{"d", "empty"} {
		must(t, os.Chmod(filepath.Join(to, name), 0o770))
	}
	if os.Getuid() == 0 {
		must(t, os.Chown(filepath.Join(from, "whole"), 1234, 4321))
	}
	want := tree(t, to)
	maps.Copy(want, tree(t, from))
	must(t, CheckMerge(a, b))
	for range 2 { // the second time there is nothing left to do
		must(t, Merge(a, b))
		if got := tree(t, to); !maps.Equal(got, want) {
			t.Errorf("got %q\nwant %q", got, want)
		}
		if left := tree(t, from); len(left) > 0 {
			t.Errorf("left: %v", left)
		}
	}
	if got := tree(t, outside); got["canary"] != "canary" {
		t.Errorf("a link was followed: %q", got)
	}
	for name, mode := range map[string]os.FileMode{"whole": 0o711, "d": 0o770, "empty": 0o770} {
		fi, err := os.Lstat(filepath.Join(to, name))
		if err != nil || fi.Mode().Perm() != mode {
			t.Errorf("%s: %v, %v", name, fi.Mode(), err)
		}
	}
	if st, err := lstatAt(open(t, b), "whole"); err != nil || os.Getuid() == 0 && (st.Uid != 1234 || st.Gid != 4321) {
		t.Errorf("%d:%d, %v", st.Uid, st.Gid, err)
	}
}

func TestMergeInTheWay(t *testing.T) {
	t.Parallel()
	outside, _ := grown(t, "sub/", "sub/canary")
	for name, c := range map[string]struct {
		from, to []string
		names    string
	}{
		"file on directory":       {[]string{"a", "x"}, []string{"x/"}, "x"},
		"link on directory":       {[]string{"x->a"}, []string{"x/"}, "x"},
		"directory on file":       {[]string{"x/"}, []string{"x"}, "x"},
		"directory on link":       {[]string{"x/", "x/sub/", "x/sub/a"}, []string{"x->" + outside}, "x"},
		"directory on fifo":       {[]string{"x/"}, []string{"x|"}, "x"},
		"deep file on directory":  {[]string{"d/e/", "d/e/x"}, []string{"d/e/x/"}, "d/e/x"},
		"deep directory on link":  {[]string{"d/e/x/", "d/e/x/f"}, []string{"d/e/", "d/e/x->" + outside}, "d/e/x"},
		"deep directory on wrong": {[]string{"d/e/x/f/"}, []string{"d/e/", "d/e/x"}, "d/e/x"},
	} {
		_, a := grown(t, c.from...)
		to, b := grown(t, c.to...)
		before := tree(t, to)
		err := CheckMerge(a, b)
		var file *FileError
		if !errors.As(err, &file) || file.Name != c.names || !errors.Is(err, errdefs.ErrFailedPrecondition) {
			t.Errorf("%s: check: %v", name, err)
		}
		if after := tree(t, to); !maps.Equal(before, after) {
			t.Errorf("%s: check changed it: %q", name, after)
		}
		if err := Merge(a, b); !errors.As(err, &file) || file.Name != c.names {
			t.Errorf("%s: merge: %v", name, err)
		}
	}
	if got := tree(t, outside); len(got) != 2 || got["sub/canary"] == "" {
		t.Errorf("a link was followed: %q", got)
	}
}

func TestMergeSameFile(t *testing.T) {
	t.Parallel()
	from, a := grown(t, "a")
	to, b := grown(t)
	must(t, os.Link(from+"/a", to+"/a"))
	must(t, Merge(a, b))
	if len(tree(t, from)) > 0 || tree(t, to)["a"] != "a" {
		t.Errorf("%q, %q", tree(t, from), tree(t, to))
	}
}

func TestMergeSwapped(t *testing.T) {
	t.Parallel()
	outside, _ := grown(t, "d/", "d/e/", "d/e/canary", "e/", "canary")
	before := tree(t, outside)
	_, b := grown(t, "d/", "d/e/", "file", "out->"+outside, "out2->"+outside+"/d", "other/", "other/e/")
	top, d, other := open(t, b), below(t, b, "d"), below(t, b, "other")
	swapping(t, swap{top, "d", "out2"}, swap{d, "e", "away"}, swap{top, "d", "other"}, swap{d, "e", "out"}, swap{other, "e", "out2"}, swap{top, "d", "file"},
		swap{top, "d", "out"}, swap{d, "e", "file"}, swap{d, "away", "e"})
	done, refused := 0, 0
	for n := range 150 {
		from, a := grown(t, "d/", "d/e/", fmt.Sprintf("d/e/f%d", n%3), "d/g")
		err := CheckMerge(a, b)
		if err == nil {
			err = Merge(a, b)
		}
		switch {
		case err == nil:
			done++
			if left := tree(t, from); len(left) > 0 {
				t.Fatalf("left: %v", left)
			}
		case isFileError(err, errdefs.ErrFailedPrecondition):
			refused++
		default:
			t.Fatal(err)
		}
	}
	if after := tree(t, outside); !maps.Equal(before, after) {
		t.Errorf("outside has changed: %q", after)
	}
	if done == 0 || refused == 0 {
		t.Errorf("%d done, %d refused: nothing was tried", done, refused)
	}
}

// A directory that vanishes while it is merged into doesn't stop the merge.
func TestMergeVanishing(t *testing.T) {
	t.Parallel()
	base, root := quick(t)
	to := filepath.Join(base, "tree")
	b := rootOf(t, to)
	end, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		for {
			select {
			case <-end:
				return
			default:
				_ = os.Mkdir(to+"/d", 0o755)
				_ = os.RemoveAll(to + "/d")
			}
		}
	}()
	defer func() { close(end); <-ended }()
	for range 300 {
		plant(t, base, "from/d/", "from/d/a", "from/d/b")
		a, err := os.OpenRoot(base + "/from")
		must(t, err)
		err = Merge(a, b)
		_ = a.Close()
		if err != nil && !isFileError(err, errdefs.ErrFailedPrecondition) {
			t.Fatal(err)
		}
		must(t, Remove(context.Background(), root, "from"))
	}
}

// What goes out as an archive comes in again.
func TestArchiveRoundTrip(t *testing.T) {
	t.Parallel()
	from, a := grown(t, "a", "history.md", "d/", "d/\xff", "d/e/", "link->/etc/passwd", "d/up->..", strings.Repeat("x", 255))
	var buf bytes.Buffer
	must(t, Tar(t.Context(), a, &buf, 0))
	staged, s := grown(t)
	must(t, Untar(t.Context(), &buf, s, plain))
	to, b := grown(t, "kept", "a", "d/")
	want := tree(t, to)
	maps.Copy(want, tree(t, from))
	must(t, Merge(s, b))
	if got := tree(t, to); !maps.Equal(got, want) || len(tree(t, staged)) > 0 {
		t.Errorf("got %q\nwant %q", got, want)
	}
}
