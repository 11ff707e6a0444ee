package runtimetest

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/runtime"
)

// follow gives all the output that is to come, each stream with its mark.
func follow(t *testing.T, a runtime.Attachment) string {
	t.Helper()
	var out strings.Builder
	for {
		chunk, err := a.Next()
		if errors.Is(err, io.EOF) {
			return out.String()
		}
		if err != nil {
			t.Fatal(err)
		}
		if chunk.Stderr {
			out.WriteString("!")
		}
		out.Write(chunk.Data)
	}
}

func TestFakeProcesses(t *testing.T) {
	for _, tt := range []struct {
		name, script string
		spec         runtime.Process
		end          func(context.Context, *Fake, string) error
		output       string
		want         runtime.ProcessInfo
		took         time.Duration
	}{
		{name: "ends", script: "echo a; echo b >&2; sleep 1; exit 3", output: "a\n!b\n", want: runtime.ProcessInfo{ExitCode: 3}, took: time.Second},
		{name: "terminal", script: "echo a; echo b >&2", spec: runtime.Process{TTY: true}, output: "a\nb\n", want: runtime.ProcessInfo{TTY: true}},
		{name: "not found", script: "what", output: "!sh: not found\n", want: runtime.ProcessInfo{ExitCode: 127}},
		{name: "no input", script: "cat", want: runtime.ProcessInfo{}},
		{name: "timeout", script: "sleep infinity", spec: runtime.Process{Timeout: time.Minute}, want: runtime.ProcessInfo{TimedOut: true, Signal: 9, ExitCode: 137}, took: time.Minute},
		{name: "killed", script: "sleep infinity", end: func(ctx context.Context, f *Fake, id string) error { return f.Kill(ctx, id, "p") }, want: runtime.ProcessInfo{Killed: true, Signal: 9, ExitCode: 137}},
		{name: "signal", script: "sleep infinity", end: func(ctx context.Context, f *Fake, id string) error { return f.Signal(ctx, id, "p", 15) }, want: runtime.ProcessInfo{Signal: 15, ExitCode: 143}},
		{name: "signal ignored", script: "trap '' TERM INT; sleep 7", end: func(ctx context.Context, f *Fake, id string) error { return f.Signal(ctx, id, "p", 15) }, want: runtime.ProcessInfo{}, took: 7 * time.Second},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := NewFake(FakeOptions{})
				c := mustCreate(t, f, runtime.Spec{Name: "a"})
				tt.spec.ID, tt.spec.Command = "p", []string{"sh", "-c", tt.script}
				start := time.Now()
				if info, err := f.Start(t.Context(), c.ID, tt.spec); err != nil || !info.Running {
					t.Fatalf("%+v, %v", info, err)
				}
				a, err := f.Attach(t.Context(), c.ID, "p", 0)
				if err != nil {
					t.Fatal(err)
				}
				synctest.Wait()
				if tt.end != nil {
					if err := tt.end(t.Context(), f, c.ID); err != nil {
						t.Fatal(err)
					}
				}
				if got := follow(t, a); got != tt.output {
					t.Errorf("output %q, want %q", got, tt.output)
				}
				got := a.Info()
				if took := time.Since(start); took != tt.took || got.EndedAt.Sub(got.StartedAt) != took {
					t.Errorf("it took %s, want %s", took, tt.took)
				}
				if got.Running || got.ExitCode != tt.want.ExitCode || got.Signal != tt.want.Signal || got.Killed != tt.want.Killed ||
					got.TimedOut != tt.want.TimedOut || got.TTY != tt.want.TTY || got.CPUTime == 0 || got.PeakMemoryBytes == 0 {
					t.Errorf("%+v", got)
				}
				if err := f.Signal(t.Context(), c.ID, "p", 15); !errdefs.IsFailedPrecondition(err) {
					t.Errorf("a signal afterwards: %v", err)
				}
				if err := f.Forget(t.Context(), c.ID, "p"); err != nil {
					t.Error(err)
				}
				if _, err := f.Process(t.Context(), c.ID, "p"); !errdefs.IsNotFound(err) {
					t.Errorf("forgotten: %v", err)
				}
			})
		})
	}
}

func TestFakeAttach(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := NewFake(FakeOptions{})
		c := mustCreate(t, f, runtime.Spec{Name: "a"})
		if _, err := f.Start(t.Context(), c.ID, runtime.Process{ID: "cat", Command: []string{"cat"}, Stdin: true, KeepBytes: 10}); err != nil {
			t.Fatal(err)
		}
		if _, err := f.Start(t.Context(), c.ID, runtime.Process{ID: "cat", Command: []string{"cat"}}); !errdefs.IsAlreadyExists(err) {
			t.Errorf("twice: %v", err)
		}
		attach := func(from int64) runtime.Attachment {
			a, err := f.Attach(t.Context(), c.ID, "cat", from)
			if err != nil {
				t.Fatal(err)
			}
			return a
		}
		first := attach(0)
		taken := make(chan error)
		go func() {
			_, err := first.Next()
			taken <- err
		}()
		synctest.Wait()
		second := attach(0)
		if err := <-taken; !errdefs.IsAborted(err) {
			t.Errorf("taken over: %v", err)
		}
		if _, err := first.Write([]byte("x")); !errdefs.IsAborted(err) {
			t.Errorf("input from the one before: %v", err)
		}
		// While somebody is attached, nothing is lost; the process waits instead.
		sent := strings.Repeat("0123456789", 20_000)
		go func() {
			_, err := io.Copy(second, strings.NewReader(sent))
			taken <- errors.Join(err, second.CloseWrite())
		}()
		synctest.Wait()
		if info, err := f.Process(t.Context(), c.ID, "cat"); err != nil || info.NextSeq != 10 || info.FirstSeq != 0 {
			t.Errorf("held up: %+v, %v", info, err)
		}
		if got := follow(t, second); got != sent {
			t.Errorf("%d bytes of %d came", len(got), len(sent))
		}
		if err := <-taken; err != nil {
			t.Error(err)
		}
		if info := second.Info(); info.NextSeq != int64(len(sent)) || info.FirstSeq != info.NextSeq-10 || info.Running {
			t.Errorf("%+v", info)
		}
		if _, err := f.Attach(t.Context(), c.ID, "cat", 0); !errdefs.IsOutOfRange(err) {
			t.Errorf("from the beginning: %v", err)
		}
		if got := follow(t, attach(-1)); got != "0123456789" {
			t.Errorf("all there is: %q", got)
		}
		if _, err := attach(-1).Write([]byte("x")); !errdefs.IsFailedPrecondition(err) {
			t.Errorf("input for one that has ended: %v", err)
		}
	})
}

// TestFakeInsideEnds: what goes on in a container ends with it, and with the engine
// only for who asked.
func TestFakeInsideEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := NewFake(FakeOptions{})
		f.Listen(80, func(c net.Conn) { _, _ = io.Copy(c, c) })
		c := mustCreate(t, f, runtime.Spec{Name: "a"})
		if _, err := f.Start(t.Context(), c.ID, runtime.Process{ID: "p", Command: []string{"sleep", "infinity"}}); err != nil {
			t.Fatal(err)
		}
		wait := func() (attached, watched chan error) {
			attached, watched = make(chan error, 1), make(chan error, 1)
			a, err := f.Attach(t.Context(), c.ID, "p", 0)
			if err != nil {
				t.Fatal(err)
			}
			go func() {
				_, err := a.Next()
				attached <- err
			}()
			go func() { watched <- f.WatchFiles(t.Context(), c.ID, "/tmp", true, nil, nil) }()
			synctest.Wait()
			return attached, watched
		}
		attached, watched := wait()
		f.SetDown(true)
		if err := <-attached; !errdefs.IsUnavailable(err) {
			t.Errorf("attached to one whose engine went down: %v", err)
		}
		if err := <-watched; !errdefs.IsUnavailable(err) {
			t.Errorf("watched when the engine went down: %v", err)
		}
		f.SetDown(false)
		attached, watched = wait()
		conn, err := f.Dial(t.Context(), c.ID, 80)
		if err != nil {
			t.Fatal(err)
		}
		f.Die(c.ID)
		if err := <-attached; !errors.Is(err, runtime.ErrInterrupted) {
			t.Errorf("attached to one whose container died: %v", err)
		}
		if err := <-watched; !errors.Is(err, runtime.ErrInterrupted) {
			t.Errorf("watched when the container died: %v", err)
		}
		if _, err := conn.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
			t.Errorf("the connection: %v", err)
		}
		if _, err := f.ListProcesses(t.Context(), c.ID); !errdefs.IsFailedPrecondition(err) {
			t.Errorf("afterwards: %v", err)
		}
	})
}

func TestFakeDial(t *testing.T) {
	f := NewFake(FakeOptions{})
	c := mustCreate(t, f, runtime.Spec{Name: "a"})
	if _, err := f.Dial(t.Context(), c.ID, 80); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("nobody listens: %v", err)
	}
	var served sync.WaitGroup
	served.Add(1)
	f.Listen(80, func(c net.Conn) {
		defer served.Done()
		in, _ := io.ReadAll(c)
		_, _ = fmt.Fprintf(c, "got %s", in)
		_ = c.Close()
	})
	conn, err := f.Dial(t.Context(), c.ID, 80)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(conn, "this"); err != nil {
		t.Fatal(err)
	}
	if err := conn.(interface{ CloseWrite() error }).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(conn); err != nil || string(got) != "got this" {
		t.Errorf("%q, %v", got, err)
	}
	served.Wait()
}

func TestFakeFiles(t *testing.T) {
	ctx := t.Context()
	f := NewFake(FakeOptions{})
	c := mustCreate(t, f, runtime.Spec{Name: "a", User: "7:8", WorkingDir: "/work"})
	write := func(w runtime.FileWrite, data string) error {
		_, err := f.WriteFile(ctx, c.ID, w, strings.NewReader(data))
		return err
	}
	read := func(name string, offset, length int64) (string, error) {
		var out strings.Builder
		err := f.ReadFile(ctx, c.ID, name, offset, length, nil, &out)
		return out.String(), err
	}
	list := func(name string, depth int) (names string) {
		if err := f.ListDir(ctx, c.ID, name, depth, func(i runtime.FileInfo) error {
			names += strings.TrimPrefix(i.Path, name) + " "
			return nil
		}); err != nil {
			t.Error(err)
		}
		return names
	}
	for _, step := range []struct {
		what string
		do   func() error
		is   func(error) bool // nil: no error
	}{
		{"write", func() error { return write(runtime.FileWrite{Path: "/work/a"}, "one\ntwo\n") }, nil},
		{"append", func() error { return write(runtime.FileWrite{Path: "/work/a", Append: true}, "three\n") }, nil},
		{"write again", func() error { return write(runtime.FileWrite{Path: "/work/a", NoClash: true}, "") }, errdefs.IsAlreadyExists},
		{"write below a file", func() error { return write(runtime.FileWrite{Path: "/work/a/b"}, "") }, errdefs.IsInvalidArgument},
		{"write nowhere", func() error { return write(runtime.FileWrite{Path: "/work/d/e/f"}, "") }, errdefs.IsNotFound},
		{"write with directories", func() error { return write(runtime.FileWrite{Path: "/work/d/e/f", Mkdir: true}, "f") }, nil},
		{"write to a directory", func() error { return write(runtime.FileWrite{Path: "/work/d"}, "") }, errdefs.IsInvalidArgument},
		{"read a directory", func() error { _, err := read("/work", 0, -1); return err }, errdefs.IsInvalidArgument},
		{"read past the end", func() error { _, err := read("/work/a", 99, -1); return err }, errdefs.IsOutOfRange},
		{"read nothing", func() error { _, err := read("/none", 0, -1); return err }, errdefs.IsNotFound},
		{"relative", func() error { _, err := f.Stat(ctx, c.ID, "work"); return err }, errdefs.IsInvalidArgument},
		{"mkdir twice", func() error { return f.Mkdir(ctx, c.ID, "/work/d", 0o700, false) }, errdefs.IsAlreadyExists},
		{"mkdir parents", func() error { return f.Mkdir(ctx, c.ID, "/work/x/y", 0o700, true) }, nil},
		{"mkdir parents twice", func() error { return f.Mkdir(ctx, c.ID, "/work/x/y", 0o700, true) }, nil},
		{"copy into itself", func() error { return f.Copy(ctx, c.ID, "/work/d", "/work/d/e/g", false) }, errdefs.IsInvalidArgument},
		{"copy", func() error { return f.Copy(ctx, c.ID, "/work/d", "/work/d2", false) }, nil},
		{"copy over", func() error { return f.Copy(ctx, c.ID, "/work/d", "/work/d2", false) }, errdefs.IsAlreadyExists},
		{"copy over one that isn't empty", func() error { return f.Copy(ctx, c.ID, "/work/d", "/work/d2", true) }, errdefs.IsFailedPrecondition},
		{"move", func() error { return f.Move(ctx, c.ID, "/work/d2/e/f", "/work/b", false) }, nil},
		{"remove", func() error { return f.RemoveFile(ctx, c.ID, "/work/d", false) }, errdefs.IsFailedPrecondition},
		{"remove all", func() error { return f.RemoveFile(ctx, c.ID, "/work/d", true) }, nil},
	} {
		if err := step.do(); step.is == nil && err != nil || step.is != nil && !step.is(err) {
			t.Errorf("%s: %v", step.what, err)
		}
	}
	if got := list("/work", 9); got != "/a /b /d2 /d2/e /x /x/y " {
		t.Errorf("list: %s", got)
	}
	if got := list("/work", 1); got != "/a /b /d2 /x " {
		t.Errorf("flat: %s", got)
	}
	if got, err := read("/work/./a", 4, 5); err != nil || got != "two\nt" {
		t.Errorf("%q, %v", got, err)
	}
	if info, err := f.Stat(ctx, c.ID, "/work/a"); err != nil || info.Size != 14 || info.Mode != 0o644 || info.UID != 7 || info.GID != 8 {
		t.Errorf("%+v, %v", info, err)
	}
	var found []string
	if err := f.Glob(ctx, c.ID, "/", "**/y", 10, func(i runtime.FileInfo) error { found = append(found, i.Path); return nil }); err != nil {
		t.Error(err)
	}
	if err := f.Search(ctx, c.ID, runtime.FileSearch{Path: "/work", Pattern: "T", IgnoreCase: true, Limit: 2}, func(m runtime.FileMatch) error {
		found = append(found, fmt.Sprintf("%s:%d:%s", m.Path, m.Line, m.Text))
		return nil
	}); err != nil {
		t.Error(err)
	}
	if got := strings.Join(found, " "); got != "/work/x/y /work/a:2:two /work/a:3:three" {
		t.Errorf("found %s", got)
	}
}

func TestFakeTar(t *testing.T) {
	ctx := t.Context()
	f := NewFake(FakeOptions{})
	c := mustCreate(t, f, runtime.Spec{Name: "a"})
	var in bytes.Buffer
	archive := tar.NewWriter(&in)
	for _, h := range []tar.Header{
		{Typeflag: tar.TypeDir, Name: "d/", Mode: 0o755}, {Typeflag: tar.TypeReg, Name: "d/f", Mode: 0o600, Size: 2},
		{Typeflag: tar.TypeSymlink, Name: "out", Linkname: "/etc"}, {Typeflag: tar.TypeReg, Name: "out/x", Mode: 0o600, Size: 2},
	} {
		if err := archive.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		if h.Size > 0 {
			if _, err := archive.Write([]byte("hi")); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := archive.Close(); err != nil {
		t.Fatal(err)
	}
	_ = f.WriteTar(ctx, c.ID, "/tmp", &in)
	if _, err := f.Stat(ctx, c.ID, "/etc/x"); !errdefs.IsNotFound(err) {
		t.Errorf("it went out of the directory: %v", err)
	}
	var out bytes.Buffer
	if err := f.ReadTar(ctx, c.ID, "/tmp/d", &out); err != nil {
		t.Fatal(err)
	}
	var got []string
	for r := tar.NewReader(&out); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, fmt.Sprintf("%s %d", h.Name, h.Size))
	}
	if s := strings.Join(got, ", "); s != "d/ 0, d/f 2" {
		t.Errorf("packed %s", s)
	}
	bad := tar.NewWriter(&in)
	if err := errors.Join(bad.WriteHeader(&tar.Header{Name: "../x"}), bad.Close()); err != nil {
		t.Fatal(err)
	}
	if err := f.WriteTar(ctx, c.ID, "/tmp", &in); !errdefs.IsInvalidArgument(err) {
		t.Errorf("a name that leads out: %v", err)
	}
}

func TestFakeWatchFiles(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := NewFake(FakeOptions{})
		c := mustCreate(t, f, runtime.Spec{Name: "a"})
		ctx, cancel := context.WithCancel(t.Context())
		watch := func(recursive bool) (<-chan error, *[]string) {
			var seen []string
			done, ready := make(chan error, 1), make(chan struct{})
			go func() {
				done <- f.WatchFiles(ctx, c.ID, "/tmp", recursive, func() { close(ready) }, func(e runtime.FileEvent) error {
					seen = append(seen, e.Type+" "+e.Path)
					return nil
				})
			}()
			<-ready
			return done, &seen
		}
		all, deep := watch(true)
		some, flat := watch(false)
		for _, name := range []string{"/tmp/a", "/tmp/a", "/tmp/d/b", "/etc/c"} {
			if _, err := f.WriteFile(t.Context(), c.ID, runtime.FileWrite{Path: name, Mkdir: true}, strings.NewReader("")); err != nil {
				t.Fatal(err)
			}
		}
		if err := f.RemoveFile(t.Context(), c.ID, "/tmp/a", false); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		cancel()
		if err := errors.Join(<-all, <-some); err != nil {
			t.Error(err)
		}
		if got := strings.Join(*deep, ", "); got != "create /tmp/a, modify /tmp/a, create /tmp/d/b, remove /tmp/a" {
			t.Errorf("deep: %s", got)
		}
		if got := strings.Join(*flat, ", "); got != "create /tmp/a, modify /tmp/a, remove /tmp/a" {
			t.Errorf("flat: %s", got)
		}
	})
}

func TestFakeExecPath(t *testing.T) {
	f := NewFake(FakeOptions{ExecPath: runtime.PathAgent})
	c := mustCreate(t, f, runtime.Spec{Name: "a"})
	got, err := f.Exec(t.Context(), c.ID, runtime.Exec{Command: []string{"true"}})
	if err != nil || got.Path != runtime.PathAgent || got.CPUTime == 0 || got.PeakMemoryBytes == 0 {
		t.Errorf("%+v, %v", got, err)
	}
}
