package lifecycle_test

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/iotest"
	"testing/synctest"
	"time"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/runtimetest"
)

func (w *world) files(key string) *lifecycle.Access {
	w.t.Helper()
	f, err := w.Files(context.Background(), "a", key)
	must(w.t, err)
	return f
}

func write(f *lifecycle.Access, name, content string) error {
	return do(f, runtime.FileOp{Verb: runtime.FileWrite, Path: name}, runtime.FileIO{In: strings.NewReader(content)})
}

func do(f *lifecycle.Access, op runtime.FileOp, fio runtime.FileIO) error {
	return f.File(context.Background(), op, fio)
}

func stat(f *lifecycle.Access, name string) error {
	return do(f, runtime.FileOp{Verb: runtime.FileStat, Path: name}, runtime.FileIO{})
}

// list ends at the error of visit.
func list(f *lifecycle.Access, name string, visit func(runtime.FileInfo) error) error {
	return do(f, runtime.FileOp{Verb: runtime.FileList, Path: name, Depth: 1}, runtime.FileIO{Info: visit})
}

// change does an operation that has no content and no answer.
func change(f *lifecycle.Access, verb runtime.FileVerb, from, to string) error {
	return do(f, runtime.FileOp{Verb: verb, Path: from, To: to}, runtime.FileIO{})
}

func TestFilesOfASandbox(t *testing.T) {
	w := newWorld(t, setup{})
	ctx := t.Context()
	if _, err := w.Files(ctx, "a", "k"); !errorIs[*lifecycle.NotFoundError](err) {
		t.Fatalf("without a sandbox: %v", err)
	}
	sb := w.create(request("k")).Sandbox
	if _, err := w.Files(ctx, "b", "k"); !errorIs[*lifecycle.NotFoundError](err) {
		t.Errorf("another tenant's: %v", err)
	}
	f := w.files("k")
	if f.SessionID() != sb.SessionID {
		t.Errorf("session %s, want %s", f.SessionID(), sb.SessionID)
	}
	must(t, write(f, "/tmp/x", "hello"), write(f, "/tmp/w", ""))
	var b bytes.Buffer
	if err := do(f, runtime.FileOp{Verb: runtime.FileRead, Path: "/tmp/x", Offset: 1, Length: 3}, runtime.FileIO{Out: &b}); err != nil || b.String() != "ell" {
		t.Errorf("got %q, %v", b.String(), err)
	}

	var file *lifecycle.FileError
	var invalid *lifecycle.InvalidError
	err := stat(f, "/tmp/none")
	if !errors.As(err, &file) || !errdefs.IsNotFound(err) || file.Path != "/tmp/none" || errorIs[*lifecycle.NotFoundError](err) {
		t.Errorf("a file that isn't there: %v", err)
	}
	err = change(f, runtime.FileCopy, "/tmp/w", "/tmp/x")
	if !errors.As(err, &file) || !errdefs.IsAlreadyExists(err) || file.Path != "/tmp/x" {
		t.Errorf("a file in the way: %v", err)
	}
	if err := change(f, runtime.FileRemove, "/tmp", ""); !errors.As(err, &file) || !errdefs.IsFailedPrecondition(err) {
		t.Errorf("a directory that isn't empty: %v", err)
	}
	if err := list(f, "/tmp/x", nil); !errors.As(err, &invalid) {
		t.Errorf("a list of a file: %v", err)
	}
	for _, name := range []string{"", "x", "/a\x00", "/" + strings.Repeat("x", 4096)} {
		if err := stat(f, name); !errors.As(err, &invalid) {
			t.Errorf("%.10q: %v", name, err)
		}
		if err := change(f, runtime.FileMove, "/tmp/x", name); !errors.As(err, &invalid) || invalid.Field != "to" {
			t.Errorf("%.10q: %v", name, err)
		}
	}
	if got := w.fake.Calls("file_stat"); got != 1 {
		t.Errorf("%d calls of stat; malformed paths went through", got)
	}

	// What comes from the caller's side goes back to it as it is.
	boo := errors.New("boo")
	for name, err := range map[string]error{
		"reader": do(f, runtime.FileOp{Verb: runtime.FileWrite, Path: "/tmp/y"}, runtime.FileIO{In: iotest.ErrReader(boo)}),
		"open":   do(f, runtime.FileOp{Verb: runtime.FileRead, Path: "/tmp/x"}, runtime.FileIO{Info: func(runtime.FileInfo) error { return boo }}),
		"item":   list(f, "/tmp", func(runtime.FileInfo) error { return boo }),
		"tar":    do(f, runtime.FileOp{Verb: runtime.FileTarRead, Path: "/tmp"}, runtime.FileIO{Out: brokenWriter{boo}}),
	} {
		if !errors.Is(err, boo) || err.Error() != "boo" {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := stat(f, "/tmp/y"); !errdefs.IsNotFound(err) {
		t.Errorf("half a file was left: %v", err)
	}

	must(t, second(w.Pause(ctx, "a", "k")))
	if err := stat(f, "/tmp/x"); !errorIs[*lifecycle.StateError](err) {
		t.Errorf("paused: %v", err)
	}
}

var watch = runtime.FileOp{Verb: runtime.FileWatch, Path: "/", Recursive: true}

type brokenWriter struct{ err error }

func (w brokenWriter) Write([]byte) (int, error) { return 0, w.err }

// TestFilesOfAFullWorkspace checks that space can be freed, and isn't filled further.
func TestFilesOfAFullWorkspace(t *testing.T) {
	dir := t.TempDir()
	w := newWorld(t, setup{policy: "version: 1\nmounts: {allowed_roots: [" + dir + "]}\n"})
	ctx := t.Context()
	old := w.create(mounting("k", dir, 2)).Sandbox.SessionID
	f := w.files("k")
	var quota *lifecycle.QuotaError
	// A write brings no more than there is room for.
	if err := do(f, runtime.FileOp{Verb: runtime.FileWrite, Path: "/workspace/x"}, runtime.FileIO{In: bytes.NewReader(make([]byte, 2<<20))}); err != nil {
		t.Errorf("up to the quota: %v", err)
	}
	err := do(f, runtime.FileOp{Verb: runtime.FileWrite, Path: "/workspace/y"}, runtime.FileIO{In: bytes.NewReader(make([]byte, 2<<20+1))})
	if !errors.As(err, &quota) || quota.UsedBytes <= quota.QuotaBytes {
		t.Errorf("one byte more: %v", err)
	}
	if err := stat(f, "/workspace/y"); !errdefs.IsNotFound(err) {
		t.Errorf("it was written: %v", err)
	}

	big := filepath.Join(dir, "big")
	must(t, os.WriteFile(big, make([]byte, 3<<20), 0o600))
	for name, err := range map[string]error{
		"write": write(f, "/workspace/z", ""),
		"mkdir": change(f, runtime.FileMkdir, "/workspace/z", ""),
		"copy":  change(f, runtime.FileCopy, "/workspace/x", "/workspace/z"),
		"tar":   do(f, runtime.FileOp{Verb: runtime.FileTarWrite, Path: "/workspace"}, runtime.FileIO{In: strings.NewReader("")}),
	} {
		if !errors.As(err, &quota) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := change(f, runtime.FileMove, "/workspace/x", "/workspace/z"); err != nil {
		t.Errorf("move: %v", err)
	}

	// Stopped over its quota, it is made again for its files, and for nothing else.
	must(t, w.fake.Remove(ctx, w.fake.Containers()[0].ID))
	w.eventually("stopped", func() bool { return w.status("k") == lifecycle.StatusStopped })
	if _, err := w.Exec(ctx, lifecycle.ExecRequest{Tenant: "a", Key: "k", Command: []string{"true"}}); !errors.As(err, &quota) {
		t.Errorf("a command: %v", err)
	}
	f = w.files("k")
	if f.SessionID() == old {
		t.Error("it wasn't made again")
	}
	if err := write(f, "/workspace/z", ""); !errors.As(err, &quota) {
		t.Errorf("write: %v", err)
	}
	if err := list(f, "/workspace", func(runtime.FileInfo) error { return nil }); err != nil {
		t.Error(err)
	}
	if err := change(f, runtime.FileMkdir, "/tmp/d", ""); !errors.As(err, &quota) {
		t.Errorf("mkdir elsewhere: %v", err)
	}
	if err := os.Remove(big); err != nil { // the engine in memory doesn't see the host's directory
		t.Fatal(err)
	}
	if err := write(f, "/workspace/z", "x"); err != nil {
		t.Errorf("with space freed: %v", err)
	}
}

func TestFilesKeepFromIdlingOut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, setup{})
		req := request("k")
		req.Request.IdleTTL = ptr(time.Minute)
		w.create(req)
		f := w.files("k")
		time.Sleep(50 * time.Second)
		must(t, write(f, "/tmp/x", "x"))
		time.Sleep(50 * time.Second)
		if got := w.status("k"); got != lifecycle.StatusRunning {
			t.Fatalf("50 s after a write: %s", got)
		}
		ctx, cancel := context.WithCancel(context.Background())
		done := later(func() error {
			return f.File(ctx, watch, runtime.FileIO{Event: func(runtime.FileEvent) error { return nil }})
		})
		time.Sleep(10 * time.Minute)
		if swept := w.sweep(); swept.Expired != 0 || w.status("k") != lifecycle.StatusRunning {
			t.Fatal("it idled out under a watch")
		}
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
		time.Sleep(59 * time.Second)
		if got := w.status("k"); got != lifecycle.StatusRunning {
			t.Errorf("59 s after a watch: %s", got)
		}
		time.Sleep(time.Second)
		if err := stat(f, "/"); !errorIs[*lifecycle.NotFoundError](err) {
			t.Errorf("expired: %v", err)
		}
		if swept := w.sweep(); swept.Cleaned != 1 {
			t.Errorf("swept %+v", swept)
		}
	})
}

func TestFilesCallsAreCapped(t *testing.T) {
	w := newWorld(t, setup{})
	w.create(request("k"))
	f := w.files("k")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ready, done := make(chan struct{}), make(chan error)
	const most = 64
	for range most {
		go func() {
			done <- f.File(ctx, watch, runtime.FileIO{Event: func(runtime.FileEvent) error { ready <- struct{}{}; return nil }})
		}()
	}
	for range most {
		<-ready
	}
	if err := stat(f, "/"); !errorIs[*lifecycle.CapacityError](err) {
		t.Errorf("one more: %v", err)
	}
	cancel()
	for range most {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	if err := stat(f, "/"); err != nil {
		t.Errorf("after they had ended: %v", err)
	}
}

// deaf is an engine that doesn't tell of what happens.
type deaf struct{ *runtimetest.Fake }

func (deaf) Watch(ctx context.Context, _ map[string]string, ready func(), _ func(runtime.Event)) error {
	ready()
	<-ctx.Done()
	return nil
}

// TestDeadContainerUnseen checks that a use finds out that the container is dead, and doesn't take
// it for a file or port that isn't there.
func TestDeadContainerUnseen(t *testing.T) {
	w := newWorld(t, setup{wrap: func(f *runtimetest.Fake) runtime.AgentRuntime { return deaf{f} }})
	w.create(request("k"))
	f := w.files("k")
	die := func() { must(t, w.fake.Remove(t.Context(), w.fake.Containers()[0].ID)) }
	die()
	var state *lifecycle.StateError
	if err := stat(f, "/tmp"); !errors.As(err, &state) || state.Status != lifecycle.StatusStopped || w.status("k") != lifecycle.StatusStopped {
		t.Errorf("a file: %v", err)
	}
	again := w.files("k")
	if err := stat(again, "/tmp"); err != nil || again.SessionID() == f.SessionID() {
		t.Errorf("the next: %v", err)
	}
	die()
	if res := w.exec("k", "true"); !res.Recreated || !res.OK() {
		t.Errorf("a command: %+v", res)
	}
	p := w.ports("k")
	die()
	if _, err := p.Dial(t.Context(), 80); !errorIs[*lifecycle.StateError](err) {
		t.Errorf("a port: %v", err)
	}
}

func TestFilesWithoutAnAgent(t *testing.T) {
	var cant *lifecycle.UnsupportedError
	for class, want := range map[error]any{
		errdefs.ErrNotImplemented: &cant, errdefs.ErrUnavailable: new(*lifecycle.UnavailableError),
		errdefs.ErrPermissionDenied: new(*lifecycle.FileError), errdefs.ErrResourceExhausted: new(*lifecycle.FileError),
		errors.Join(errdefs.ErrFailedPrecondition, runtime.ErrInterrupted): new(*lifecycle.UnavailableError),
	} {
		w := newWorld(t, setup{fake: runtimetest.FakeOptions{Fail: func(op, _ string) error {
			if op == "file_stat" || op == "dial" {
				return class
			}
			return nil
		}}})
		w.create(request("k"))
		if err := stat(w.files("k"), "/"); !errors.As(err, want) || !errors.Is(err, class) {
			t.Errorf("%v: %v", class, err)
		}
	}
}
