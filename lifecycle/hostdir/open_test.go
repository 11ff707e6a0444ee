package hostdir

import (
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// grown is a directory with a root of its own.
func grown(t *testing.T, paths ...string) (string, *os.Root) {
	t.Helper()
	dir := t.TempDir()
	plant(t, dir, paths...)
	return dir, rootOf(t, dir)
}

func rootOf(t testing.TB, dir string) *os.Root {
	t.Helper()
	root, err := os.OpenRoot(dir)
	must(t, err)
	t.Cleanup(func() { _ = root.Close() })
	return root
}

// plant makes directories ("a/"), links ("a->target"), fifos ("a|") and files, which have
// their path for content.
func plant(t *testing.T, dir string, paths ...string) {
	t.Helper()
	for _, path := range paths {
		full := filepath.Join(dir, path)
		name, target, link := strings.Cut(path, "->")
		var err error
		switch {
		case link:
			err = os.Symlink(target, filepath.Join(dir, name))
		case strings.HasSuffix(path, "/"):
			err = os.MkdirAll(full, 0o755)
		case strings.HasSuffix(path, "|"):
			err = unix.Mkfifo(strings.TrimSuffix(full, "|"), 0o644)
		default:
			err = os.WriteFile(full, []byte(path), 0o644)
		}
		must(t, err)
	}
}

// tree tells what is below a directory: "" for a directory, "->target" for a link, the
// content of a file, and "?" for another kind.
func tree(t *testing.T, dir string) map[string]string {
	t.Helper()
	all := map[string]string{}
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || path == dir {
			return err
		}
		what := "?"
		switch d.Type() {
		case fs.ModeDir:
			what = ""
		case fs.ModeSymlink:
			target, err := os.Readlink(path)
			if err != nil {
				return err
			}
			what = "->" + target
		case 0:
			content, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			what = string(content)
		}
		all[strings.TrimPrefix(path, dir+"/")] = what
		return nil
	})
	must(t, err)
	return all
}

func isFileError(err, class error) bool {
	var e *FileError
	return errors.As(err, &e) && errors.Is(err, class)
}

func isTooLarge(err error) bool {
	var e *TooLargeError
	return errors.As(err, &e)
}

func isRefused(err error) bool {
	var e *ArchiveError
	return errors.As(err, &e)
}

func open(t *testing.T, root *os.Root) *os.File {
	t.Helper()
	f, err := Top(root)
	must(t, err)
	t.Cleanup(func() { _ = f.Close() })
	return f
}

func below(t *testing.T, root *os.Root, name string) *os.File {
	t.Helper()
	f, err := openDirAt(open(t, root), name)
	must(t, err)
	t.Cleanup(func() { _ = f.Close() })
	return f
}

// swap exchanges what is in a directory with what is at the top, or moves it there.
type swap struct {
	dir      *os.File
	name, at string
}

// swapping has the swaps done over and over until the test ends; the first tells the top.
// They go by handles: through a link they would change what it leads to.
func swapping(t *testing.T, swaps ...swap) {
	var wg sync.WaitGroup
	end := make(chan struct{})
	wg.Go(func() {
		for i := 0; ; i++ {
			select {
			case <-end:
				return
			default:
			}
			s, top := swaps[i%len(swaps)], swaps[0].dir
			err := unix.Renameat2(int(s.dir.Fd()), s.name, int(top.Fd()), s.at, unix.RENAME_EXCHANGE)
			if errors.Is(err, unix.ENOENT) {
				_ = unix.Renameat2(int(s.dir.Fd()), s.name, int(top.Fd()), s.at, unix.RENAME_NOREPLACE)
				_ = unix.Renameat2(int(top.Fd()), s.at, int(s.dir.Fd()), s.name, unix.RENAME_NOREPLACE)
			}
		}
	})
	t.Cleanup(func() { close(end); wg.Wait() })
}

func TestOpenRegular(t *testing.T) {
	t.Parallel()
	dir, root := grown(t, "file", "dir/", "dir/file", "inside->file", "outside->/etc/passwd", "nowhere->gone", "sub->dir", "fifo|")
	if l, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM, 0); err != nil {
		t.Fatal(err)
	} else {
		defer unix.Close(l)
		must(t, unix.Bind(l, &unix.SockaddrUnix{Name: filepath.Join(dir, "socket")}))
	}
	hostile := []string{"dir", "inside", "outside", "nowhere", "fifo", "socket"}
	if unix.Mknod(filepath.Join(dir, "device"), unix.S_IFCHR|0o600, int(unix.Mkdev(1, 3))) == nil {
		hostile = append(hostile, "device")
	}
	for _, name := range hostile {
		if f, _, err := OpenRegular(root, name); !isFileError(err, errdefs.ErrFailedPrecondition) {
			t.Errorf("%s: %v, %v", name, f, err)
		}
	}
	for _, name := range []string{"", ".", "..", "gone", "inside/", "sub/file", "dir/file", "../file", "a\x00b", strings.Repeat("x", 256), dir + "/file"} {
		var gone *NotFoundError
		if f, _, err := OpenRegular(root, name); !errors.As(err, &gone) {
			t.Errorf("%q: %v, %v", name, f, err)
		}
	}
	f, fi, err := OpenRegular(root, "file")
	must(t, err)
	defer f.Close()
	content, err := io.ReadAll(f)
	if err != nil || string(content) != "file" || fi.Name() != "file" || fi.Size() != 4 {
		t.Errorf("%q, %v, %s with %d bytes", content, err, fi.Name(), fi.Size())
	}
	if _, err := f.Write([]byte("x")); err == nil {
		t.Error("it can be written to")
	}
}

func TestOpenRegularLeased(t *testing.T) {
	t.Parallel()
	dir, root := grown(t, "file")
	f, err := os.OpenFile(filepath.Join(dir, "file"), os.O_RDWR, 0)
	must(t, err)
	defer f.Close()
	if _, err := unix.FcntlInt(f.Fd(), unix.F_SETLEASE, unix.F_WRLCK); err != nil {
		t.Skip("no leases on this file system:", err)
	}
	if _, _, err := OpenRegular(root, "file"); !isFileError(err, errdefs.ErrFailedPrecondition) {
		t.Errorf("%v, want a FileError", err)
	}
}

func TestOpenRegularSwapped(t *testing.T) {
	t.Parallel()
	outside, _ := grown(t, "canary")
	_, root := grown(t, "file", "keep", "fifo|", "dir/", "link->"+outside+"/canary")
	top := open(t, root)
	swapping(t, swap{top, "file", "link"}, swap{top, "file", "fifo"}, swap{top, "file", "keep"}, swap{top, "file", "dir"})
	opened := 0
	for range 20_000 {
		f, _, err := OpenRegular(root, "file")
		if err != nil {
			if !isFileError(err, errdefs.ErrFailedPrecondition) {
				t.Fatal(err)
			}
			continue
		}
		content, err := io.ReadAll(f)
		_ = f.Close()
		if err != nil || string(content) != "file" && string(content) != "keep" {
			t.Fatalf("read %q, %v", content, err)
		}
		opened++
	}
	if opened == 0 || opened == 20_000 {
		t.Errorf("opened %d times: nothing was tried", opened)
	}
}
