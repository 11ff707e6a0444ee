package runtimetest

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/runtime"
)

// follow gives all the output that is to come, each stream with its mark.
func follow(t *testing.T, a runtime.Follower) string {
	t.Helper()
	var out strings.Builder
	for {
		chunk, err := a.Next()
		if errors.Is(err, io.EOF) {
			return out.String()
		}
		must(t, err)
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
				tt.spec.Follow = new(runtime.Follow)
				info, a, err := f.Start(t.Context(), c.ID, tt.spec)
				if err != nil || !info.Running {
					t.Fatalf("%+v, %v", info, err)
				}
				synctest.Wait()
				if tt.end != nil {
					must(t, tt.end(t.Context(), f, c.ID))
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
				must(t, f.Forget(t.Context(), c.ID, "p"))
				if _, err := f.Process(t.Context(), c.ID, "p"); !errdefs.IsNotFound(err) {
					t.Errorf("forgotten: %v", err)
				}
			})
		})
	}
}

// TestFakeInsideEnds: what goes on in a container ends with it, and with the engine
// only for who asked.
func TestFakeInsideEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := NewFake(FakeOptions{Files: t.TempDir()})
		f.Listen(80, func(c net.Conn) { _, _ = io.Copy(c, c) })
		c := mustCreate(t, f, runtime.Spec{Name: "a"})
		if _, _, err := f.Start(t.Context(), c.ID, runtime.Process{ID: "p", Command: []string{"sleep", "infinity"}, Stdin: true}); err != nil {
			t.Fatal(err)
		}
		wait := func() map[string]chan error {
			w, err := f.Follow(t.Context(), c.ID, "p", runtime.Follow{Exclusive: true})
			in, err2 := f.Input(t.Context(), c.ID, "p")
			events, err3 := f.Events(t.Context(), c.ID)
			must(t, errors.Join(err, err2, err3))
			if _, err := events.Next(); err != nil {
				t.Error(err)
			}
			ended := map[string]chan error{}
			for what, do := range map[string]func() error{
				"followed": func() error { _, err := w.Next(); return err },
				"written":  func() error { _, err := in.Write(make([]byte, 1<<20)); return err },
				"events":   func() error { _, err := events.Next(); return err },
				"watched": func() error {
					ignore := func(runtime.FileEvent) error { return nil }
					return f.File(t.Context(), c.ID, runtime.FileOp{Verb: runtime.FileWatch, Path: "/tmp"}, runtime.FileIO{Event: ignore})
				},
			} {
				end := make(chan error, 1)
				ended[what] = end
				go func() { end <- do() }()
			}
			synctest.Wait()
			return ended
		}
		ended := wait()
		f.SetDown(true)
		for what, end := range ended {
			if err := <-end; !errdefs.IsUnavailable(err) {
				t.Errorf("%s when the engine went down: %v", what, err)
			}
		}
		f.SetDown(false)
		ended = wait()
		conn, err := f.Dial(t.Context(), c.ID, 80)
		must(t, err)
		f.Die(c.ID)
		for what, end := range ended {
			if err := <-end; !errors.Is(err, runtime.ErrInterrupted) {
				t.Errorf("%s when the container died: %v", what, err)
			}
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
	must(t, err)
	if _, err := io.WriteString(conn, "this"); err != nil {
		t.Fatal(err)
	}
	must(t, conn.CloseWrite())
	if got, err := io.ReadAll(conn); err != nil || string(got) != "got this" {
		t.Errorf("%q, %v", got, err)
	}
	served.Wait()
}

// TestFakeFiles: what the contract suite doesn't ask of a Fake's files. No link leads out
// of a container, and a file is the container's user's.
func TestFakeFiles(t *testing.T) {
	dir := t.TempDir()
	f := NewFake(FakeOptions{Files: dir})
	c := mustCreate(t, f, runtime.Spec{Name: "a", User: "7:8", WorkingDir: "/work"})
	do := func(verb runtime.FileVerb, path, in string) (*FileAnswer, error) {
		return DoFile(t.Context(), f, c.ID, runtime.FileOp{Verb: verb, Path: path, Length: -1, Depth: 1, Parents: true, Recursive: true}, strings.NewReader(in))
	}
	secret := filepath.Join(dir, "secret")
	var archive bytes.Buffer
	w := tar.NewWriter(&archive)
	for name, target := range map[string]string{"absolute": dir, "above": "../../../../.." + dir, "file": secret} {
		must(t, w.WriteHeader(&tar.Header{Typeflag: tar.TypeSymlink, Name: name, Linkname: target}))
	}
	must(t, errors.Join(os.WriteFile(secret, []byte("precious"), 0o600), w.Close()))
	if _, err := do(runtime.FileTarWrite, "/work", archive.String()); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{"/work/absolute/secret", "/work/above/secret", "/work/file", secret, "/work/../../../.." + secret} {
		for _, verb := range []runtime.FileVerb{runtime.FileStat, runtime.FileRead, runtime.FileList, runtime.FileTarRead} {
			if a, err := do(verb, path, ""); !errdefs.IsNotFound(err) && (verb != runtime.FileTarRead || err != nil || strings.Contains(a.Out.String(), "precious")) {
				t.Errorf("%s %s: %v", verb, path, err)
			}
		}
	}
	for _, path := range []string{"/work/absolute/x", "/work/above/x", "/work/file", "/work/../../x"} {
		_, _ = do(runtime.FileWrite, path, "x") // there, but inside
		_, _ = do(runtime.FileMkdir, path+"/d/e", "")
		_, _ = do(runtime.FileRemove, path, "")
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 2 {
		t.Errorf("outside there is %v, %v", left, err)
	}
	if b, err := os.ReadFile(secret); string(b) != "precious" {
		t.Errorf("%q, %v", b, err)
	}
	a, err := do(runtime.FileWrite, "/work/a", "x")
	if info := a.Info(); err != nil || info.UID != 7 || info.GID != 8 || info.Mode != 0o644 {
		t.Errorf("%+v, %v", info, err)
	}
	must(t, f.Remove(t.Context(), c.ID))
	if left, err := os.ReadDir(dir); err != nil || len(left) != 1 {
		t.Errorf("afterwards there is %v, %v", left, err)
	}
}

func TestFakeWatchFiles(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := NewFake(FakeOptions{Files: t.TempDir()})
		c := mustCreate(t, f, runtime.Spec{Name: "a"})
		ctx, cancel := context.WithCancel(t.Context())
		watch := func(recursive bool) (<-chan error, *[]string) {
			var seen []string
			done, ready := make(chan error, 1), make(chan struct{})
			go func() {
				op := runtime.FileOp{Verb: runtime.FileWatch, Path: "/tmp", Recursive: recursive}
				done <- f.File(ctx, c.ID, op, runtime.FileIO{Event: func(e runtime.FileEvent) error {
					if e.Type == runtime.FileReady {
						close(ready)
						return nil
					}
					seen = append(seen, e.Type+" "+e.Path)
					return nil
				}})
			}()
			<-ready
			return done, &seen
		}
		all, deep := watch(true)
		some, flat := watch(false)
		for _, name := range []string{"/tmp/a", "/tmp/a", "/tmp/d/b", "/etc/c"} {
			op := runtime.FileOp{Verb: runtime.FileWrite, Path: name, Parents: true}
			if _, err := DoFile(t.Context(), f, c.ID, op, strings.NewReader("")); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := DoFile(t.Context(), f, c.ID, runtime.FileOp{Verb: runtime.FileRemove, Path: "/tmp/a"}, nil); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		cancel()
		must(t, errors.Join(<-all, <-some))
		if got := strings.Join(*deep, ", "); got != "create /tmp/a, modify /tmp/a, create /tmp/d, create /tmp/d/b, remove /tmp/a" {
			t.Errorf("deep: %s", got)
		}
		if got := strings.Join(*flat, ", "); got != "create /tmp/a, modify /tmp/a, create /tmp/d, remove /tmp/a" {
			t.Errorf("flat: %s", got)
		}
	})
}

func TestFakeMeasures(t *testing.T) {
	f := NewFake(FakeOptions{Measures: true})
	c := mustCreate(t, f, runtime.Spec{Name: "a"})
	got, err := f.Exec(t.Context(), c.ID, runtime.Exec{Command: []string{"true"}})
	if err != nil || got.CPUTime == 0 || got.PeakMemoryBytes == 0 {
		t.Errorf("%+v, %v", got, err)
	}
}
