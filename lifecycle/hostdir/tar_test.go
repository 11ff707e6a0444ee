package hostdir

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// archived reads an archive: names with tree's values.
func archived(t *testing.T, r io.Reader) map[string]string {
	t.Helper()
	all := map[string]string{}
	for tr := tar.NewReader(r); ; {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return all
		}
		must(t, err)
		if h.Uid != 0 || h.Gid != 0 || h.Uname != "" || h.Gname != "" {
			t.Errorf("%s has an Give: %+v", h.Name, h)
		}
		if _, ok := all[h.Name]; ok {
			t.Errorf("%s is there twice", h.Name)
		}
		content, err := io.ReadAll(tr)
		must(t, err)
		switch h.Typeflag {
		case tar.TypeReg, tar.TypeDir:
			all[h.Name] = string(content)
		case tar.TypeSymlink:
			all[h.Name] = "->" + h.Linkname
		default:
			t.Errorf("%s is of type %q", h.Name, h.Typeflag)
		}
	}
}

func TestArchive(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("l", 255)
	dir, root := grown(t, "a", "d/", "d/e/", "d/e/f", "\xff\n\\", "link->/etc/passwd", "loop->.", "d/up->../..", "d/fifo|", "ö", long+"/",
		long+"/"+long, "far->"+strings.Repeat("x/", 2000))
	must(t, os.Link(filepath.Join(dir, "a"), filepath.Join(dir, "hard")))
	for name, at := range map[string]time.Time{"a": time.Unix(-5, 7), "d": time.Unix(1<<33, 9)} {
		must(t, os.Chtimes(filepath.Join(dir, name), at, at))
	}
	must(t, os.Chmod(filepath.Join(dir, "a"), os.ModeSetuid|0o751))
	var b bytes.Buffer
	must(t, Tar(t.Context(), root, &b, 0))
	want := map[string]string{}
	for name, what := range tree(t, dir) {
		switch what {
		case "":
			name += "/"
		case "?":
			continue
		}
		want[name] = what
	}
	if got := archived(t, bytes.NewReader(b.Bytes())); !maps.Equal(got, want) {
		t.Errorf("got %q\nwant %q", got, want)
	}
	for tr := tar.NewReader(&b); ; {
		h, err := tr.Next()
		if err != nil {
			t.Fatal("no file a")
		}
		if h.Name == "a" {
			if h.Mode != 0o751 || h.ModTime.Unix() != -5 {
				t.Errorf("mode %o, modified %v", h.Mode, h.ModTime)
			}
			break
		}
	}
}

func TestArchiveBounds(t *testing.T) {
	t.Parallel()
	_, root := grown(t, "d/", "d/4444")
	var b bytes.Buffer
	if err := Tar(t.Context(), root, &b, 6); err != nil {
		t.Error(err)
	}
	b.Reset()
	err := Tar(t.Context(), root, &b, 5)
	if !isTooLarge(err) || !strings.Contains(err.Error(), `"d"`) || b.Len() > 0 {
		t.Errorf("%v after %d bytes", err, b.Len())
	}

	dir, root := grown(t, "small")
	for _, name := range []string{"huge", "huger"} { // together more than there are numbers
		must(t, os.WriteFile(filepath.Join(dir, name), nil, 0o644))
		must(t, os.Truncate(filepath.Join(dir, name), 1<<43))
	}
	for _, limit := range []int64{1 << 43, 1 << 40} {
		if err := Tar(t.Context(), root, &b, limit); !isTooLarge(err) {
			t.Error(err)
		}
	}
	if err := (&packer{limit: math.MaxInt64, total: 1 << 62, path: []string{"."}}).add("x", 1<<62); !isTooLarge(err) {
		t.Errorf("sizes overflow: %v", err)
	}
}

func TestArchiveDeep(t *testing.T) {
	t.Parallel()
	_, root := grown(t, strings.Repeat("d/", maxDepth-1), strings.Repeat("d/", maxDepth-1)+"f")
	if err := Tar(t.Context(), root, io.Discard, 0); err != nil {
		t.Error(err)
	}
	dir, root := quick(t)
	deepen(t, filepath.Join(dir, "tree"), 20_000)
	var b bytes.Buffer
	err := Tar(t.Context(), root, &b, 0)
	if !isTooLarge(err) || len(err.Error()) > 200 || b.Len() > 0 {
		t.Errorf("%v after %d bytes", err, b.Len())
	}
}

// changed has a file change once its header has been written.
type changed struct {
	bytes.Buffer
	name   string
	change func()
}

func (c *changed) Write(p []byte) (int, error) {
	n, err := c.Buffer.Write(p)
	if c.change != nil && bytes.Contains(c.Bytes(), []byte(c.name)) {
		c.change()
		c.change = nil
	}
	return n, err
}

func TestArchiveOfChangingFile(t *testing.T) {
	t.Parallel()
	const size = 1 << 20
	for name, to := range map[string]int64{"shrinks": size / 2, "grows": size * 2, "vanishes": 0} {
		dir, root := grown(t)
		path := filepath.Join(dir, name)
		content := strings.Repeat("x", size)
		must(t, os.WriteFile(path, []byte(content), 0o644))
		w := &changed{name: name, change: func() {
			if err := os.Truncate(path, to); err != nil {
				t.Error(err)
			}
		}}
		if err := Tar(t.Context(), root, w, 0); err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		got := archived(t, &w.Buffer)[name]
		want := content
		if to < size { // what had been read when it changed is there
			kept := max(int(to), len(strings.TrimRight(got, "\x00")))
			want = content[:kept] + strings.Repeat("\x00", size-kept)
			if kept == size {
				t.Errorf("%s: nothing was tried", name)
			}
		}
		if got != want {
			t.Errorf("%s: other content, of %d bytes", name, len(got))
		}
	}
}

type failing struct{ error }

func (f failing) Write([]byte) (int, error) { return 0, f.error }

func TestArchiveWriterFails(t *testing.T) {
	t.Parallel()
	_, root := grown(t, "a")
	broken := errors.New("gone")
	if err := Tar(t.Context(), root, failing{broken}, 0); !errors.Is(err, broken) {
		t.Errorf("%v, want the writer's", err)
	}
}

func TestArchiveSwapped(t *testing.T) {
	t.Parallel()
	outside, _ := grown(t, "canary", "below/", "below/canary")
	_, root := grown(t, "d/", "d/file", "d/sub/", "d/sub/file", "file", "fifo|", "out->"+outside, "leak->"+outside+"/canary")
	top, d := open(t, root), below(t, root, "d")
	swapping(t, swap{top, "d", "out"}, swap{top, "file", "leak"}, swap{top, "file", "fifo"}, swap{top, "d", "file"}, swap{d, "sub", "out"}, swap{d, "file", "leak"})
	kinds := map[string]bool{}
	for range 1000 {
		var b bytes.Buffer
		must(t, Tar(t.Context(), root, &b, 0))
		for tr := tar.NewReader(&b); ; {
			h, err := tr.Next()
			if errors.Is(err, io.EOF) {
				break
			}
			must(t, err)
			kinds[fmt.Sprintf("%s %c", h.Name, h.Typeflag)] = true
			content, err := io.ReadAll(tr)
			if err != nil || strings.Contains(h.Name, "canary") || strings.Contains(string(content), "canary") {
				t.Fatalf("%s holds %q, %v", h.Name, content, err)
			}
		}
	}
	if len(kinds) < 10 {
		t.Errorf("nothing was tried: %v", slices.Collect(maps.Keys(kinds)))
	}
}
