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

// FileAnswer is all that an operation on files answered.
type FileAnswer struct {
	Files   []runtime.FileInfo
	Matches []runtime.FileMatch
	Out     bytes.Buffer
}

// DoFile does an operation that ends by itself, and gathers its answer.
func DoFile(ctx context.Context, files runtime.Insider, id string, op runtime.FileOp, in io.Reader) (*FileAnswer, error) {
	a := new(FileAnswer)
	return a, files.File(ctx, id, op, a.IO(in))
}

// IO reads from in and gathers the answer.
func (a *FileAnswer) IO(in io.Reader) runtime.FileIO {
	return runtime.FileIO{
		In: in, Out: &a.Out,
		Info:  func(f runtime.FileInfo) error { a.Files = append(a.Files, f); return nil },
		Match: func(m runtime.FileMatch) error { a.Matches = append(a.Matches, m); return nil },
	}
}

// Info is the file of an answer that has one.
func (a *FileAnswer) Info() runtime.FileInfo {
	if len(a.Files) != 1 {
		return runtime.FileInfo{}
	}
	return a.Files[0]
}

// Paths are those of the files.
func (a *FileAnswer) Paths() (paths []string) {
	for _, f := range a.Files {
		paths = append(paths, f.Path)
	}
	return paths
}

// file does an operation that ends by itself.
func (b *fixture) file(id string, op runtime.FileOp, in io.Reader) (*FileAnswer, error) {
	return DoFile(b.ctx, b.rt, id, op, in)
}

func (b *fixture) stat(id, path string) (runtime.FileInfo, error) {
	a, err := b.file(id, runtime.FileOp{Verb: runtime.FileStat, Path: path}, nil)
	return a.Info(), err
}

// write does a FileWrite that must succeed.
func (b *fixture) write(t *testing.T, id string, op runtime.FileOp, content string) runtime.FileInfo {
	t.Helper()
	op.Verb = runtime.FileWrite
	a, err := b.file(id, op, strings.NewReader(content))
	must(t, err)
	return a.Info()
}

func (b *fixture) read(t *testing.T, id, path string, offset, length int64) string {
	t.Helper()
	a, err := b.file(id, runtime.FileOp{Verb: runtime.FileRead, Path: path, Offset: offset, Length: length}, nil)
	must(t, err)
	return a.Out.String()
}

func testFiles(t *testing.T, b *fixture, id string) {
	info := b.write(t, id, runtime.FileOp{Path: "/tmp/a/b/file", Mode: 0o640, Parents: true}, "0123456789")
	if info.Path != "/tmp/a/b/file" || info.Size != 10 || info.Mode != 0o640 || time.Since(info.ModTime).Abs() > time.Minute {
		t.Errorf("written: %+v", info)
	}
	if again, err := b.stat(id, "/tmp/a/b/file"); err != nil || again != info {
		t.Errorf("%+v, %v, was %+v", again, err, info)
	}
	for _, tt := range []struct {
		offset, length int64
		want           string
	}{{0, -1, "0123456789"}, {3, -1, "3456789"}, {3, 4, "3456"}, {8, 100, "89"}, {10, -1, ""}, {2, 0, ""}} {
		if got := b.read(t, id, "/tmp/a/b/file", tt.offset, tt.length); got != tt.want {
			t.Errorf("%d bytes from %d on: %q, want %q", tt.length, tt.offset, got, tt.want)
		}
	}
	var seen runtime.FileInfo
	refusal := errors.New("too large")
	err := b.rt.File(b.ctx, id, runtime.FileOp{Verb: runtime.FileRead, Path: "/tmp/a/b/file", Length: -1},
		runtime.FileIO{Out: io.Discard, Info: func(f runtime.FileInfo) error { seen = f; return refusal }})
	if !errors.Is(err, refusal) || seen.Size != 10 {
		t.Errorf("refused: %v, %+v", err, seen)
	}
	b.write(t, id, runtime.FileOp{Path: "/tmp/a/b/file", Append: true}, "abc")
	if got := b.read(t, id, "/tmp/a/b/file", 0, -1); got != "0123456789abc" {
		t.Errorf("appended: %q", got)
	}
	if info := b.write(t, id, runtime.FileOp{Path: "/tmp/a/b/file", Mode: 0o600}, "new"); info.Mode != 0o640 || info.Size != 3 {
		t.Errorf("written again: %+v", info)
	}
	// A write that breaks off changes nothing.
	broken := io.MultiReader(strings.NewReader("half"), readerFunc(func([]byte) (int, error) { return 0, refusal }))
	if _, err := b.file(id, runtime.FileOp{Verb: runtime.FileWrite, Path: "/tmp/a/b/file"}, broken); !errors.Is(err, refusal) {
		t.Errorf("a broken write: %v", err)
	}
	if got := b.read(t, id, "/tmp/a/b/file", 0, -1); got != "new" {
		t.Errorf("after a write that broke off: %q", got)
	}
	_, err = b.file(id, runtime.FileOp{Verb: runtime.FileRead, Path: "/tmp/a/b/file", Offset: 100, Length: 5}, nil)
	class(t, "read past the end", err, errdefs.IsOutOfRange, "OutOfRange")
	// Large enough to fill every buffer.
	if _, err := b.file(id, runtime.FileOp{Verb: runtime.FileWrite, Path: "/tmp/large"}, zeros(3<<20)); err != nil {
		t.Error(err)
	}
	if got := b.read(t, id, "/tmp/large", 0, -1); len(got) != 3<<20 {
		t.Errorf("%d bytes of %d", len(got), 3<<20)
	}

	do := func(op runtime.FileOp) error {
		_, err := b.file(id, op, nil)
		return err
	}
	if err := errors.Join(
		do(runtime.FileOp{Verb: runtime.FileMkdir, Path: "/tmp/dir", Mode: 0o750}),
		do(runtime.FileOp{Verb: runtime.FileMkdir, Path: "/tmp/deep/er", Parents: true}),
		do(runtime.FileOp{Verb: runtime.FileMove, Path: "/tmp/a/b/file", To: "/tmp/dir/moved"}),
		do(runtime.FileOp{Verb: runtime.FileCopy, Path: "/tmp/dir", To: "/tmp/tree"}),
		do(runtime.FileOp{Verb: runtime.FileRemove, Path: "/tmp/dir/moved"}),
		do(runtime.FileOp{Verb: runtime.FileRemove, Path: "/tmp/dir"}),
	); err != nil {
		t.Error(err)
	}
	if got := b.read(t, id, "/tmp/tree/moved", 0, -1); got != "new" {
		t.Errorf("copied: %q", got)
	}
	b.write(t, id, runtime.FileOp{Path: "/tmp/other"}, "other")
	must(t, do(runtime.FileOp{Verb: runtime.FileMove, Path: "/tmp/other", To: "/tmp/tree/moved", Replace: true}))

	_, err = b.stat(id, "/tmp/none")
	class(t, "stat of none", err, errdefs.IsNotFound, "NotFound")
	_, err = b.stat(noID, "/tmp")
	class(t, "stat in none", err, errdefs.IsNotFound, "NotFound")
	_, err = b.file(id, runtime.FileOp{Verb: runtime.FileWrite, Path: "/tmp/large", NoClash: true}, strings.NewReader(""))
	class(t, "write without a clash", err, errdefs.IsAlreadyExists, "AlreadyExists")
	_, err = b.file(id, runtime.FileOp{Verb: runtime.FileWrite, Path: "/tmp/none/x"}, strings.NewReader("x"))
	class(t, "write below nothing", err, errdefs.IsNotFound, "NotFound")
	class(t, "mkdir where there is one", do(runtime.FileOp{Verb: runtime.FileMkdir, Path: "/tmp/tree"}), errdefs.IsAlreadyExists, "AlreadyExists")
	class(t, "move onto another", do(runtime.FileOp{Verb: runtime.FileMove, Path: "/tmp/large", To: "/tmp/tree/moved"}), errdefs.IsAlreadyExists, "AlreadyExists")
	class(t, "copy onto another", do(runtime.FileOp{Verb: runtime.FileCopy, Path: "/tmp/large", To: "/tmp/tree/moved"}), errdefs.IsAlreadyExists, "AlreadyExists")
	class(t, "remove a full directory", do(runtime.FileOp{Verb: runtime.FileRemove, Path: "/tmp/tree"}), errdefs.IsFailedPrecondition, "FailedPrecondition")
	for _, path := range []string{"", "relative", "/" + strings.Repeat("x/", 2048), "/zero\x00byte"} {
		_, err := b.stat(id, path)
		class(t, path, err, errdefs.IsInvalidArgument, "InvalidArgument")
	}
	must(t, do(runtime.FileOp{Verb: runtime.FileRemove, Path: "/tmp/tree", Recursive: true}))
}

type readerFunc func([]byte) (int, error)

func (f readerFunc) Read(p []byte) (int, error) { return f(p) }

func testFileLists(t *testing.T, b *fixture, id string) {
	for _, path := range []string{"/tmp/l/b.txt", "/tmp/l/a.go", "/tmp/l/sub/c.txt", "/tmp/l/sub/sub/d.txt"} {
		b.write(t, id, runtime.FileOp{Path: path, Parents: true}, "first of "+path+"\nNeedle here\nneedle there\n")
	}
	list := func(op runtime.FileOp) []string {
		t.Helper()
		op.Path = "/tmp/l"
		a, err := b.file(id, op, nil)
		must(t, err)
		return a.Paths()
	}
	for depth, want := range map[int][]string{
		1: {"/tmp/l/a.go", "/tmp/l/b.txt", "/tmp/l/sub"},
		2: {"/tmp/l/a.go", "/tmp/l/b.txt", "/tmp/l/sub", "/tmp/l/sub/c.txt", "/tmp/l/sub/sub"},
	} {
		got := list(runtime.FileOp{Verb: runtime.FileList, Depth: depth})
		if !slices.Equal(got, want) {
			t.Errorf("to depth %d: %q", depth, got)
		}
	}
	for pattern, want := range map[string][]string{
		"*.txt": {"/tmp/l/b.txt"}, "**/*.txt": {"/tmp/l/b.txt", "/tmp/l/sub/c.txt", "/tmp/l/sub/sub/d.txt"}, "none*": nil,
	} {
		got := list(runtime.FileOp{Verb: runtime.FileGlob, Pattern: pattern, Limit: 100})
		slices.Sort(got)
		if !slices.Equal(got, want) {
			t.Errorf("%s: %q", pattern, got)
		}
	}
	if got := list(runtime.FileOp{Verb: runtime.FileGlob, Pattern: "**", Limit: 2}); len(got) != 2 {
		t.Errorf("two of all: %q", got)
	}
	for name, tt := range map[string]struct {
		search runtime.FileOp
		want   int
	}{
		"pattern":     {runtime.FileOp{Pattern: "^needle .*"}, 4},
		"literal":     {runtime.FileOp{Pattern: "^needle", Literal: true}, 0},
		"ignore case": {runtime.FileOp{Pattern: "needle", IgnoreCase: true}, 8},
		"include":     {runtime.FileOp{Pattern: "needle", Include: "*.go"}, 1},
		"limit":       {runtime.FileOp{Pattern: "needle", Limit: 2}, 2},
	} {
		tt.search.Verb, tt.search.Path = runtime.FileSearch, "/tmp/l"
		a, err := b.file(id, tt.search, nil)
		for _, m := range a.Matches {
			if m.Line < 2 || !strings.Contains(strings.ToLower(m.Text), "needle") || !strings.HasPrefix(m.Path, "/tmp/l/") {
				t.Errorf("%s: %+v", name, m)
			}
		}
		if err != nil || len(a.Matches) != tt.want {
			t.Errorf("%s: %d, %v; want %d", name, len(a.Matches), err, tt.want)
		}
	}
	_, err := b.file(id, runtime.FileOp{Verb: runtime.FileSearch, Path: "/tmp/l", Pattern: "("}, nil)
	class(t, "a pattern that is none", err, errdefs.IsInvalidArgument, "InvalidArgument")
	enough := errors.New("enough")
	err = b.rt.File(b.ctx, id, runtime.FileOp{Verb: runtime.FileList, Path: "/tmp/l", Depth: 9},
		runtime.FileIO{Info: func(runtime.FileInfo) error { return enough }})
	if !errors.Is(err, enough) {
		t.Errorf("a list that is broken off: %v", err)
	}
}

func testFilesWatched(t *testing.T, b *fixture, id string) {
	b.write(t, id, runtime.FileOp{Path: "/tmp/w/sub/x", Parents: true}, "")
	ctx, cancel := context.WithCancel(b.ctx)
	defer cancel()
	ready, done := make(chan struct{}), make(chan error, 1)
	var seen []string
	go func() {
		op := runtime.FileOp{Verb: runtime.FileWatch, Path: "/tmp/w", Recursive: true}
		done <- b.rt.File(ctx, id, op, runtime.FileIO{Event: func(e runtime.FileEvent) error {
			seen = append(seen, e.Type+" "+e.Path)
			switch e.Type {
			case runtime.FileReady:
				close(ready)
			case "remove":
				cancel()
			}
			return nil
		}})
	}()
	select {
	case <-ready:
	case err := <-done:
		t.Fatal(err)
	}
	b.write(t, id, runtime.FileOp{Path: "/tmp/w/sub/new"}, "x")
	if _, err := b.file(id, runtime.FileOp{Verb: runtime.FileRemove, Path: "/tmp/w/sub/new"}, nil); err != nil {
		t.Error(err)
	}
	if err := <-done; err != nil || seen[0] != "ready " || !slices.Contains(seen, "remove /tmp/w/sub/new") {
		t.Errorf("%v, %q", err, seen)
	}
	_, err := b.file(id, runtime.FileOp{Verb: runtime.FileWatch, Path: "/tmp/none"}, nil)
	class(t, "watch of none", err, errdefs.IsNotFound, "NotFound")
}

func testTar(t *testing.T, b *fixture, id string) {
	b.write(t, id, runtime.FileOp{Path: "/tmp/t/one", Parents: true, Mode: 0o600}, "content of one")
	b.write(t, id, runtime.FileOp{Path: "/tmp/t/sub/two", Parents: true}, strings.Repeat("two", 100_000))
	packed, err := b.file(id, runtime.FileOp{Verb: runtime.FileTarRead, Path: "/tmp/t"}, nil)
	must(t, err)
	var names []string
	for r := tar.NewReader(bytes.NewReader(packed.Out.Bytes())); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		must(t, err)
		names = append(names, strings.TrimSuffix(h.Name, "/"))
	}
	slices.Sort(names)
	if !slices.Equal(names, []string{"t", "t/one", "t/sub", "t/sub/two"}) {
		t.Errorf("packed: %q", names)
	}
	if _, err := b.file(id, runtime.FileOp{Verb: runtime.FileMkdir, Path: "/tmp/into", Mode: 0o755}, nil); err != nil {
		t.Fatal(err)
	}
	unpack := func(archive io.Reader) error {
		_, err := b.file(id, runtime.FileOp{Verb: runtime.FileTarWrite, Path: "/tmp/into"}, archive)
		return err
	}
	must(t, unpack(&packed.Out))
	if got := b.read(t, id, "/tmp/into/t/one", 0, -1); got != "content of one" {
		t.Errorf("unpacked: %q", got)
	}
	if got := b.read(t, id, "/tmp/into/t/sub/two", 0, -1); len(got) != 300_000 {
		t.Errorf("unpacked: %d bytes", len(got))
	}
	if err := unpack(strings.NewReader("garbage")); err == nil {
		t.Error("garbage was unpacked")
	}
}

// testFilesOfOthers: files are seen with the rights of the container's user, and links
// lead where they lead inside.
func testFilesOfOthers(t *testing.T, b *fixture) {
	spec := b.spec()
	spec.User, spec.ReadOnlyRootfs = "1000:1000", true
	spec.Tmpfs = []runtime.Tmpfs{{Target: "/tmp", SizeBytes: 1 << 20}}
	c := b.create(t, spec)
	info := b.write(t, c.ID, runtime.FileOp{Path: "/tmp/mine"}, "x")
	if info.UID != 1000 || info.GID != 1000 {
		t.Errorf("%+v", info)
	}
	b.shell(t, c.ID, "ln -s mine /tmp/link; ln -s none /tmp/dangling; mkfifo /tmp/pipe; mkdir -m 0 /tmp/closed; printf x >$(printf '/tmp/odd\\377\\n')")
	if got, err := b.stat(c.ID, "/tmp/link"); err != nil || got.Size != 1 || !got.Mode.IsRegular() {
		t.Errorf("a link: %+v, %v", got, err)
	}
	modes := map[string]fs.FileMode{}
	a, err := b.file(c.ID, runtime.FileOp{Verb: runtime.FileList, Path: "/tmp", Depth: 1}, nil)
	for _, f := range a.Files {
		modes[strings.TrimPrefix(f.Path, "/tmp/")] = f.Mode.Type()
		if f.Path == "/tmp/link" && f.Target != "mine" {
			t.Errorf("%+v", f)
		}
	}
	for name, want := range map[string]fs.FileMode{
		"mine": 0, "link": fs.ModeSymlink, "dangling": fs.ModeSymlink, "pipe": fs.ModeNamedPipe, "closed": fs.ModeDir, "odd\xff": 0,
	} {
		if got, ok := modes[name]; !ok || got != want {
			t.Errorf("%q is %v, %t, %v", name, got, ok, err)
		}
	}
	_, err = b.file(c.ID, runtime.FileOp{Verb: runtime.FileWrite, Path: "/tmp/closed/x"}, strings.NewReader("x"))
	class(t, "write into a closed directory", err, errdefs.IsPermissionDenied, "PermissionDenied")
	_, err = b.file(c.ID, runtime.FileOp{Verb: runtime.FileWrite, Path: "/etc/passwd"}, strings.NewReader("x"))
	class(t, "write to a read-only root", err, errdefs.IsPermissionDenied, "PermissionDenied")
	_, err = b.file(c.ID, runtime.FileOp{Verb: runtime.FileWrite, Path: "/tmp/full"}, zeros(2<<20))
	class(t, "write more than there is room for", err, errdefs.IsResourceExhausted, "ResourceExhausted")
	if _, err := b.file(c.ID, runtime.FileOp{Verb: runtime.FileRead, Path: "/tmp/pipe", Length: -1}, nil); err == nil {
		t.Error("a pipe was read")
	}
}
