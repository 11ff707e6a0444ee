package runtimetest

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"io"
	"io/fs"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/runtime"
)

func (b *bed) write(t *testing.T, id string, w runtime.FileWrite, content string) runtime.FileInfo {
	t.Helper()
	info, err := b.inside().WriteFile(b.ctx, id, w, strings.NewReader(content))
	if err != nil {
		t.Fatal(err)
	}
	return info
}

func (b *bed) read(t *testing.T, id, path string, offset, length int64) string {
	t.Helper()
	var out bytes.Buffer
	if err := b.inside().ReadFile(b.ctx, id, path, offset, length, nil, &out); err != nil {
		t.Fatal(err)
	}
	return out.String()
}

func testFiles(t *testing.T, b *bed) {
	c, in := b.create(t, b.spec()), b.inside()
	info := b.write(t, c.ID, runtime.FileWrite{Path: "/tmp/a/b/file", Mode: 0o640, Mkdir: true}, "0123456789")
	if info.Path != "/tmp/a/b/file" || info.Size != 10 || info.Mode != 0o640 || time.Since(info.ModTime).Abs() > time.Minute {
		t.Errorf("written: %+v", info)
	}
	if again, err := in.Stat(b.ctx, c.ID, "/tmp/a/b/file"); err != nil || again != info {
		t.Errorf("%+v, %v, was %+v", again, err, info)
	}
	for _, tt := range []struct {
		offset, length int64
		want           string
	}{{0, -1, "0123456789"}, {3, -1, "3456789"}, {3, 4, "3456"}, {8, 100, "89"}, {10, -1, ""}, {2, 0, ""}} {
		if got := b.read(t, c.ID, "/tmp/a/b/file", tt.offset, tt.length); got != tt.want {
			t.Errorf("%d bytes from %d on: %q, want %q", tt.length, tt.offset, got, tt.want)
		}
	}
	var seen runtime.FileInfo
	refusal := errors.New("too large")
	err := in.ReadFile(b.ctx, c.ID, "/tmp/a/b/file", 0, -1, func(f runtime.FileInfo) error { seen = f; return refusal }, io.Discard)
	if !errors.Is(err, refusal) || seen.Size != 10 {
		t.Errorf("refused: %v, %+v", err, seen)
	}
	b.write(t, c.ID, runtime.FileWrite{Path: "/tmp/a/b/file", Append: true}, "abc")
	if got := b.read(t, c.ID, "/tmp/a/b/file", 0, -1); got != "0123456789abc" {
		t.Errorf("appended: %q", got)
	}
	if info := b.write(t, c.ID, runtime.FileWrite{Path: "/tmp/a/b/file", Mode: 0o600}, "new"); info.Mode != 0o640 || info.Size != 3 {
		t.Errorf("written again: %+v", info)
	}
	// A write that breaks off changes nothing.
	broken := io.MultiReader(strings.NewReader("half"), readerFunc(func([]byte) (int, error) { return 0, refusal }))
	if _, err := in.WriteFile(b.ctx, c.ID, runtime.FileWrite{Path: "/tmp/a/b/file"}, broken); !errors.Is(err, refusal) {
		t.Errorf("a broken write: %v", err)
	}
	if got := b.read(t, c.ID, "/tmp/a/b/file", 0, -1); got != "new" {
		t.Errorf("after a write that broke off: %q", got)
	}
	err = in.ReadFile(b.ctx, c.ID, "/tmp/a/b/file", 100, 5, nil, io.Discard)
	class(t, "read past the end", err, errdefs.IsOutOfRange, "OutOfRange")
	// Large enough to fill every buffer.
	var large bytes.Buffer
	if _, err := in.WriteFile(b.ctx, c.ID, runtime.FileWrite{Path: "/tmp/large"}, zeros(3<<20)); err != nil {
		t.Error(err)
	}
	if err := in.ReadFile(b.ctx, c.ID, "/tmp/large", 0, -1, nil, &large); err != nil || large.Len() != 3<<20 {
		t.Errorf("%d bytes of %d, %v", large.Len(), 3<<20, err)
	}

	do := func(err error) {
		t.Helper()
		if err != nil {
			t.Error(err)
		}
	}
	do(in.Mkdir(b.ctx, c.ID, "/tmp/dir", 0o750, false))
	do(in.Mkdir(b.ctx, c.ID, "/tmp/deep/er", 0, true))
	do(in.Move(b.ctx, c.ID, "/tmp/a/b/file", "/tmp/dir/moved", false))
	do(in.Copy(b.ctx, c.ID, "/tmp/dir", "/tmp/tree", false))
	do(in.RemoveFile(b.ctx, c.ID, "/tmp/dir/moved", false))
	do(in.RemoveFile(b.ctx, c.ID, "/tmp/dir", false))
	if got := b.read(t, c.ID, "/tmp/tree/moved", 0, -1); got != "new" {
		t.Errorf("copied: %q", got)
	}
	b.write(t, c.ID, runtime.FileWrite{Path: "/tmp/other"}, "other")
	do(in.Move(b.ctx, c.ID, "/tmp/other", "/tmp/tree/moved", true))

	_, err = in.Stat(b.ctx, c.ID, "/tmp/none")
	class(t, "stat of none", err, errdefs.IsNotFound, "NotFound")
	_, err = in.Stat(b.ctx, noID, "/tmp")
	class(t, "stat in none", err, errdefs.IsNotFound, "NotFound")
	_, err = in.WriteFile(b.ctx, c.ID, runtime.FileWrite{Path: "/tmp/large", NoClash: true}, strings.NewReader(""))
	class(t, "write without a clash", err, errdefs.IsAlreadyExists, "AlreadyExists")
	_, err = in.WriteFile(b.ctx, c.ID, runtime.FileWrite{Path: "/tmp/none/x"}, strings.NewReader("x"))
	class(t, "write below nothing", err, errdefs.IsNotFound, "NotFound")
	class(t, "mkdir where there is one", in.Mkdir(b.ctx, c.ID, "/tmp/tree", 0, false), errdefs.IsAlreadyExists, "AlreadyExists")
	class(t, "move onto another", in.Move(b.ctx, c.ID, "/tmp/large", "/tmp/tree/moved", false), errdefs.IsAlreadyExists, "AlreadyExists")
	class(t, "copy onto another", in.Copy(b.ctx, c.ID, "/tmp/large", "/tmp/tree/moved", false), errdefs.IsAlreadyExists, "AlreadyExists")
	class(t, "remove a full directory", in.RemoveFile(b.ctx, c.ID, "/tmp/tree", false), errdefs.IsFailedPrecondition, "FailedPrecondition")
	for _, path := range []string{"", "relative", "/" + strings.Repeat("x/", 2048), "/zero\x00byte"} {
		_, err := in.Stat(b.ctx, c.ID, path)
		class(t, path, err, errdefs.IsInvalidArgument, "InvalidArgument")
	}
	do(in.RemoveFile(b.ctx, c.ID, "/tmp/tree", true))
}

type readerFunc func([]byte) (int, error)

func (f readerFunc) Read(p []byte) (int, error) { return f(p) }

func testFileLists(t *testing.T, b *bed) {
	c, in := b.create(t, b.spec()), b.inside()
	for _, path := range []string{"/tmp/l/b.txt", "/tmp/l/a.go", "/tmp/l/sub/c.txt", "/tmp/l/sub/sub/d.txt"} {
		b.write(t, c.ID, runtime.FileWrite{Path: path, Mkdir: true}, "first of "+path+"\nNeedle here\nneedle there\n")
	}
	gather := func(call func(func(runtime.FileInfo) error) error) []string {
		t.Helper()
		var paths []string
		if err := call(func(f runtime.FileInfo) error { paths = append(paths, f.Path); return nil }); err != nil {
			t.Error(err)
		}
		return paths
	}
	for depth, want := range map[int][]string{
		1: {"/tmp/l/a.go", "/tmp/l/b.txt", "/tmp/l/sub"},
		2: {"/tmp/l/a.go", "/tmp/l/b.txt", "/tmp/l/sub", "/tmp/l/sub/c.txt", "/tmp/l/sub/sub"},
	} {
		got := gather(func(f func(runtime.FileInfo) error) error { return in.ListDir(b.ctx, c.ID, "/tmp/l", depth, f) })
		if !slices.Equal(got, want) {
			t.Errorf("to depth %d: %q", depth, got)
		}
	}
	for pattern, want := range map[string][]string{
		"*.txt": {"/tmp/l/b.txt"}, "**/*.txt": {"/tmp/l/b.txt", "/tmp/l/sub/c.txt", "/tmp/l/sub/sub/d.txt"}, "none*": nil,
	} {
		got := gather(func(f func(runtime.FileInfo) error) error { return in.Glob(b.ctx, c.ID, "/tmp/l", pattern, 100, f) })
		slices.Sort(got)
		if !slices.Equal(got, want) {
			t.Errorf("%s: %q", pattern, got)
		}
	}
	if got := gather(func(f func(runtime.FileInfo) error) error { return in.Glob(b.ctx, c.ID, "/tmp/l", "**", 2, f) }); len(got) != 2 {
		t.Errorf("two of all: %q", got)
	}
	for name, tt := range map[string]struct {
		search runtime.FileSearch
		want   int
	}{
		"pattern":     {runtime.FileSearch{Path: "/tmp/l", Pattern: "^needle .*"}, 4},
		"literal":     {runtime.FileSearch{Path: "/tmp/l", Pattern: "^needle", Literal: true}, 0},
		"ignore case": {runtime.FileSearch{Path: "/tmp/l", Pattern: "needle", IgnoreCase: true}, 8},
		"include":     {runtime.FileSearch{Path: "/tmp/l", Pattern: "needle", Include: "*.go"}, 1},
		"limit":       {runtime.FileSearch{Path: "/tmp/l", Pattern: "needle", Limit: 2}, 2},
	} {
		n := 0
		err := in.Search(b.ctx, c.ID, tt.search, func(m runtime.FileMatch) error {
			n++
			if m.Line < 2 || !strings.Contains(strings.ToLower(m.Text), "needle") || !strings.HasPrefix(m.Path, "/tmp/l/") {
				t.Errorf("%s: %+v", name, m)
			}
			return nil
		})
		if err != nil || n != tt.want {
			t.Errorf("%s: %d, %v; want %d", name, n, err, tt.want)
		}
	}
	err := in.Search(b.ctx, c.ID, runtime.FileSearch{Path: "/tmp/l", Pattern: "("}, func(runtime.FileMatch) error { return nil })
	class(t, "a pattern that is none", err, errdefs.IsInvalidArgument, "InvalidArgument")
	enough := errors.New("enough")
	if err := in.ListDir(b.ctx, c.ID, "/tmp/l", 9, func(runtime.FileInfo) error { return enough }); !errors.Is(err, enough) {
		t.Errorf("a list that is broken off: %v", err)
	}
}

func testFilesWatched(t *testing.T, b *bed) {
	c, in := b.create(t, b.spec()), b.inside()
	b.write(t, c.ID, runtime.FileWrite{Path: "/tmp/w/sub/x", Mkdir: true}, "")
	ctx, cancel := context.WithCancel(b.ctx)
	defer cancel()
	ready, done := make(chan struct{}), make(chan error, 1)
	var seen []string
	go func() {
		done <- in.WatchFiles(ctx, c.ID, "/tmp/w", true, func() { close(ready) }, func(e runtime.FileEvent) error {
			seen = append(seen, e.Type+" "+e.Path)
			if e.Type == "remove" {
				cancel()
			}
			return nil
		})
	}()
	select {
	case <-ready:
	case err := <-done:
		t.Fatal(err)
	}
	b.write(t, c.ID, runtime.FileWrite{Path: "/tmp/w/sub/new"}, "x")
	if err := in.RemoveFile(b.ctx, c.ID, "/tmp/w/sub/new", false); err != nil {
		t.Error(err)
	}
	if err := <-done; err != nil || !slices.Contains(seen, "remove /tmp/w/sub/new") {
		t.Errorf("%v, %q", err, seen)
	}
	err := in.WatchFiles(b.ctx, c.ID, "/tmp/none", false, nil, func(runtime.FileEvent) error { return nil })
	class(t, "watch of none", err, errdefs.IsNotFound, "NotFound")
}

func testTar(t *testing.T, b *bed) {
	c, in := b.create(t, b.spec()), b.inside()
	b.write(t, c.ID, runtime.FileWrite{Path: "/tmp/t/one", Mkdir: true, Mode: 0o600}, "content of one")
	b.write(t, c.ID, runtime.FileWrite{Path: "/tmp/t/sub/two", Mkdir: true}, strings.Repeat("two", 100_000))
	var archive bytes.Buffer
	if err := in.ReadTar(b.ctx, c.ID, "/tmp/t", &archive); err != nil {
		t.Fatal(err)
	}
	var names []string
	for r := tar.NewReader(bytes.NewReader(archive.Bytes())); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		names = append(names, strings.TrimSuffix(h.Name, "/"))
	}
	slices.Sort(names)
	if !slices.Equal(names, []string{"t", "t/one", "t/sub", "t/sub/two"}) {
		t.Errorf("packed: %q", names)
	}
	if err := in.Mkdir(b.ctx, c.ID, "/tmp/into", 0o755, false); err != nil {
		t.Fatal(err)
	}
	if err := in.WriteTar(b.ctx, c.ID, "/tmp/into", &archive); err != nil {
		t.Fatal(err)
	}
	if got := b.read(t, c.ID, "/tmp/into/t/one", 0, -1); got != "content of one" {
		t.Errorf("unpacked: %q", got)
	}
	if got := b.read(t, c.ID, "/tmp/into/t/sub/two", 0, -1); len(got) != 300_000 {
		t.Errorf("unpacked: %d bytes", len(got))
	}
	// Nothing outside of the directory.
	for _, name := range []string{"../escaped", "/tmp/escaped", "sub/../../escaped"} {
		var evil bytes.Buffer
		w := tar.NewWriter(&evil)
		_ = w.WriteHeader(&tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o644, Size: 1})
		_, _ = w.Write([]byte("x"))
		_ = w.Close()
		_ = in.WriteTar(b.ctx, c.ID, "/tmp/into", &evil) // refused, or put inside
		if _, err := in.Stat(b.ctx, c.ID, "/tmp/escaped"); !errdefs.IsNotFound(err) {
			t.Fatalf("%s was put outside: %v", name, err)
		}
	}
	if err := in.WriteTar(b.ctx, c.ID, "/tmp/into", strings.NewReader("garbage")); err == nil {
		t.Error("garbage was unpacked")
	}
}

// testFilesOfOthers: files are seen with the rights of the container's user, and links
// lead where they lead inside.
func testFilesOfOthers(t *testing.T, b *bed) {
	spec := b.spec()
	spec.User, spec.ReadOnlyRootfs = "1000:1000", true
	spec.Tmpfs = []runtime.Tmpfs{{Target: "/tmp", SizeBytes: 1 << 20}}
	c, in := b.create(t, spec), b.inside()
	info := b.write(t, c.ID, runtime.FileWrite{Path: "/tmp/mine"}, "x")
	if info.UID != 1000 || info.GID != 1000 {
		t.Errorf("%+v", info)
	}
	b.shell(t, c.ID, "ln -s mine /tmp/link; ln -s none /tmp/dangling; mkfifo /tmp/pipe; mkdir -m 0 /tmp/closed; printf x >$(printf '/tmp/odd\\377\\n')")
	if got, err := in.Stat(b.ctx, c.ID, "/tmp/link"); err != nil || got.Size != 1 || !got.Mode.IsRegular() {
		t.Errorf("a link: %+v, %v", got, err)
	}
	modes := map[string]fs.FileMode{}
	err := in.ListDir(b.ctx, c.ID, "/tmp", 1, func(f runtime.FileInfo) error {
		modes[strings.TrimPrefix(f.Path, "/tmp/")] = f.Mode.Type()
		if f.Path == "/tmp/link" && f.Target != "mine" {
			t.Errorf("%+v", f)
		}
		return nil
	})
	for name, want := range map[string]fs.FileMode{
		"mine": 0, "link": fs.ModeSymlink, "dangling": fs.ModeSymlink, "pipe": fs.ModeNamedPipe, "closed": fs.ModeDir, "odd\xff": 0,
	} {
		if got, ok := modes[name]; !ok || got != want {
			t.Errorf("%q is %v, %t, %v", name, got, ok, err)
		}
	}
	_, err = in.WriteFile(b.ctx, c.ID, runtime.FileWrite{Path: "/tmp/closed/x"}, strings.NewReader("x"))
	class(t, "write into a closed directory", err, errdefs.IsPermissionDenied, "PermissionDenied")
	_, err = in.WriteFile(b.ctx, c.ID, runtime.FileWrite{Path: "/etc/passwd"}, strings.NewReader("x"))
	class(t, "write to a read-only root", err, errdefs.IsPermissionDenied, "PermissionDenied")
	_, err = in.WriteFile(b.ctx, c.ID, runtime.FileWrite{Path: "/tmp/full"}, zeros(2<<20))
	class(t, "write more than there is room for", err, errdefs.IsResourceExhausted, "ResourceExhausted")
	err = in.ReadFile(b.ctx, c.ID, "/tmp/pipe", 0, -1, nil, io.Discard)
	if err == nil {
		t.Error("a pipe was read")
	}
}
