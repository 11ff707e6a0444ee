package files

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/runtime/agent/wire"
	"github.com/bermhq/berm/runtime/runtimetest/check"
)

var errHungUp = errors.New("hung up")

// caller is a Peer that keeps what it gets.
type caller struct {
	sync.Mutex
	ready   bool
	files   []*wire.FileInfo
	matches []*wire.FileMatch
	data    bytes.Buffer
	result  *wire.FileInfo
	failure *wire.Failure

	upload io.Reader // none is empty
	events chan *wire.FileEvent
	// got is called with each thing that comes; its error is what the operation gets.
	got     func(what string) error
	reading bool
}

func (c *caller) take(what string) error {
	if c.got == nil {
		return nil
	}
	return c.got(what)
}

func (c *caller) Ready() error {
	c.ready = true
	return c.take("ready")
}

func (c *caller) Item(v any) error {
	switch v := v.(type) {
	case *wire.FileInfo:
		c.files = append(c.files, v)
	case *wire.FileMatch:
		v.Text = bytes.Clone(v.Text)
		c.matches = append(c.matches, v)
	case *wire.FileEvent:
		c.Unlock()
		defer c.Lock()
		c.events <- v
	}
	return c.take("item")
}

func (c *caller) Write(p []byte) (int, error) {
	n, _ := c.data.Write(p)
	return n, c.take("data")
}

func (c *caller) Read(p []byte) (int, error) {
	if c.upload == nil {
		return 0, io.EOF
	}
	c.reading = true
	c.Unlock()
	n, err := c.upload.Read(p)
	c.Lock()
	c.reading = false
	return n, err
}

// Alive isn't called during a Read.
func (c *caller) Alive() error {
	if c.reading {
		return errors.New("it was asked during a Read")
	}
	return nil
}

// do does an operation as a user.
func (c *caller) do(uid int, op wire.Op, f *wire.File) error {
	done := make(chan error)
	go func() {
		if uid != 0 {
			// The thread ends with the goroutine, and nothing else runs on it.
			runtime.LockOSThread()
			for _, call := range [][2]uintptr{{unix.SYS_SETGROUPS, 0}, {unix.SYS_SETRESGID, uintptr(uid)}, {unix.SYS_SETRESUID, uintptr(uid)}} {
				if _, _, e := unix.RawSyscall(call[0], call[1], call[1], call[1]); e != 0 {
					done <- e
					return
				}
			}
		}
		result, err := Do(OwnRoot, c, op, f)
		c.result, _ = result.(*wire.FileInfo)
		if err != nil {
			c.failure = Failure(err)
		}
		done <- err
	}()
	return <-done
}

// operate does an operation with an upload.
func operate(t *testing.T, op wire.Op, f *wire.File, upload string) *caller {
	return operateAs(t, 0, op, f, upload)
}

func operateAs(t *testing.T, uid int, op wire.Op, f *wire.File, upload string) *caller {
	t.Helper()
	c := &caller{upload: strings.NewReader(upload)}
	_ = c.do(uid, op, f) // it is the failure
	return c
}

// fails checks that an operation failed in a certain way.
func (c *caller) fails(t *testing.T, class wire.Class, words ...string) {
	t.Helper()
	if c.failure == nil {
		t.Error("it was done")
		return
	}
	if c.failure.Class != class {
		t.Errorf("%s: %s; want %s", c.failure.Class, c.failure.Message, class)
	}
	for _, w := range words {
		if !strings.Contains(c.failure.Message, w) {
			t.Errorf("%q doesn't say %q", c.failure.Message, w)
		}
	}
}

func (c *caller) succeeds(t *testing.T) *caller {
	t.Helper()
	if c.failure != nil {
		t.Errorf("%s: %s", c.failure.Class, c.failure.Message)
	}
	return c
}

// names returns the files' paths below a directory.
func (c *caller) names(dir string) (names []string) {
	for _, f := range c.files {
		names = append(names, strings.TrimPrefix(string(f.Path), strings.TrimSuffix(dir, "/")+"/"))
	}
	return names
}

func file4(path string) *wire.File { return &wire.File{Path: []byte(path)} }

// mustRoot ends a test that needs root, as the tests of engines do.
func mustRoot(t *testing.T) {
	t.Helper()
	if os.Getuid() != 0 {
		if os.Getenv("BERM_REQUIRE") != "" {
			t.Fatal("this test has to be run by root")
		}
		t.Skip("this test has to be run by root")
	}
}

var must = check.Must // ends a test if a step of its own fails

// mount mounts a file system until the test ends.
func mount(t *testing.T, kind, dir, data string) {
	t.Helper()
	mustRoot(t)
	must(t, unix.Mount(kind, dir, kind, 0, data))
	t.Cleanup(func() {
		must(t, unix.Unmount(dir, unix.MNT_DETACH))
	})
}

// open lets other users into a test's directory.
func open(t *testing.T, dir string) string {
	t.Helper()
	for up := dir; up != os.TempDir() && up != "/"; up = filepath.Dir(up) {
		must(t, os.Chmod(up, 0o755))
	}
	return dir
}

// plant makes files by what they are: a name that ends in / is a directory, "->" a link to
// what follows, "|" a pipe, anything else content.
func plant(t testing.TB, dir string, files map[string]string) {
	t.Helper()
	for name, what := range files {
		full := filepath.Join(dir, name)
		err := os.MkdirAll(filepath.Dir(full), 0o755)
		link, isLink := strings.CutPrefix(what, "->")
		switch {
		case err != nil:
		case strings.HasSuffix(name, "/"):
			err = os.MkdirAll(full, 0o755)
		case isLink:
			err = os.Symlink(link, full)
		case what == "|":
			err = unix.Mkfifo(full, 0o644)
		default:
			err = os.WriteFile(full, []byte(what), 0o644)
		}
		must(t, err)
	}
}

func content(t testing.TB, name string) string {
	t.Helper()
	b, err := os.ReadFile(name)
	must(t, err)
	return string(b)
}

// in lists all that is below a directory.
func in(t testing.TB, dir string) (names []string) {
	t.Helper()
	err := filepath.WalkDir(dir, func(name string, _ os.DirEntry, err error) error {
		if name != dir {
			names = append(names, strings.TrimPrefix(name, dir+"/"))
		}
		return err
	})
	must(t, err)
	return names
}

func equal(t testing.TB, got, want []string) {
	t.Helper()
	if !slices.Equal(got, want) {
		t.Errorf("%.2000s, want %.2000s", fmt.Sprintf("%q", got), fmt.Sprintf("%q", want))
	}
}

func TestFailure(t *testing.T) {
	at := func(err error) error { return &fs.PathError{Op: "open", Path: "/a", Err: err} }
	_, match := path.Match("[", "a")
	for _, tt := range []struct {
		err     error
		class   wire.Class
		message string
	}{
		{at(unix.EPERM), wire.ClassPermission, `"/a": operation not permitted`},
		{at(unix.EROFS), wire.ClassPermission, `"/a": read-only file system`},
		{at(unix.EDQUOT), wire.ClassExhausted, `"/a": disk quota exceeded`},
		{at(unix.EMFILE), wire.ClassExhausted, `"/a": too many open files`},
		{at(unix.EISDIR), wire.ClassInvalid, `"/a": is a directory`},
		{at(unix.EBUSY), wire.ClassPrecondition, `"/a": it is in use, or a file system is mounted there`},
		{at(unix.EIO), wire.ClassInternal, `"/a": input/output error`},
		{&os.LinkError{Op: "rename", Old: "/a", New: "/b", Err: unix.EXDEV}, wire.ClassInternal, `"/a" to "/b": it is on another file system`},
		{unix.ECONNRESET, wire.ClassAborted, "connection reset by peer"},
		{unix.ENOMEM, wire.ClassExhausted, "cannot allocate memory"},
		{match, wire.ClassInvalid, "syntax error in pattern"},
		{errors.New("what else"), wire.ClassInternal, "what else"},
		{fmt.Errorf("wrapped: %w", Invalid("no %d", 1)), wire.ClassInvalid, "no 1"},
		{failed(wire.ClassExists, "/a\n\xff", "is %s", "there"), wire.ClassExists, `"/a\n\xff": is there`},
		{failed(wire.ClassExists, strings.Repeat("x", 5000), "long"), wire.ClassExists, `"` + strings.Repeat("x", 256) + `"…: long`},
	} {
		if got := Failure(tt.err); got.Class != tt.class || got.Message != tt.message {
			t.Errorf("%v: %s, %s; want %s, %s", tt.err, got.Class, got.Message, tt.class, tt.message)
		}
	}
}
