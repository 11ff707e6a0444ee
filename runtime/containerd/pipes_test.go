package containerd

import (
	"bytes"
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/bermhq/berm/runtime"
)

// testPipes opens pipes, and the ends that the engine's shim would.
func testPipes(t *testing.T, stdin bool) (p *pipes, stdout, stderr *os.File) {
	t.Helper()
	p, err := newPipes(t.Context(), filepath.Join(t.TempDir(), "exec", "x"), stdin)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.close)
	ends := make([]*os.File, 2)
	for i, name := range []string{"stdout", "stderr"} {
		if ends[i], err = os.OpenFile(p.file(name), os.O_WRONLY, 0); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = ends[i].Close() })
	}
	return p, ends[0], ends[1]
}

func outlived() bool { return true }

func TestPipesOutput(t *testing.T) {
	p, stdout, stderr := testPipes(t, false)
	var gotOut, gotErr bytes.Buffer
	p.copyOut(&gotOut, &gotErr)
	long := strings.Repeat("0123456789", 100_000)
	for f, text := range map[*os.File]string{stdout: long, stderr: "error"} {
		if _, err := io.WriteString(f, text); err != nil {
			t.Fatal(err)
		}
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
	}
	p.drain(outlived)
	if gotOut.String() != long || gotErr.String() != "error" || p.err() != nil {
		t.Errorf("%d bytes and %q, %v", gotOut.Len(), &gotErr, p.err())
	}
	if p.finish(t.Context()); !gone(filepath.Dir(p.file("x"))) {
		t.Error("the pipes are still there")
	}
}

func gone(path string) bool {
	_, err := os.Lstat(path)
	return errors.Is(err, fs.ErrNotExist)
}

// A descendant may keep the output open, silent or not.
func TestPipesDrain(t *testing.T) {
	for _, silent := range []bool{true, false} {
		p, stdout, _ := testPipes(t, false)
		var got bytes.Buffer
		p.copyOut(&got, nil)
		if _, err := io.WriteString(stdout, "the command's"); err != nil {
			t.Fatal(err)
		}
		end := make(chan struct{})
		if !silent {
			go func() {
				defer close(end)
				for { // a descendant that is never done
					if _, err := stdout.Write(make([]byte, 10_000)); err != nil {
						return
					}
				}
			}()
		}
		begun := time.Now()
		p.drain(outlived)
		if took := time.Since(begun); took > time.Second {
			t.Errorf("silent %t: took %s", silent, took)
		}
		if !bytes.HasPrefix(got.Bytes(), []byte("the command's")) {
			t.Errorf("silent %t: %.20q", silent, got.Bytes())
		}
		had := got.Len()
		for n := p.stdout.bytes.Load(); !silent && p.stdout.bytes.Load() < n+1<<20; { // the descendant isn't held up
			time.Sleep(time.Millisecond)
		}
		if got.Len() != had {
			t.Errorf("silent %t: %d bytes came afterwards", silent, got.Len()-had)
		}
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		p.finish(ended)
		if !silent {
			<-end
		}
	}
}

// A shim may be late, where nothing else can be what the output isn't at its end for.
func TestPipesLate(t *testing.T) {
	p, stdout, stderr := testPipes(t, false)
	var got bytes.Buffer
	p.copyOut(&got, nil)
	asked := make(chan struct{})
	go func() {
		<-asked
		time.Sleep(2 * drainStep)
		_, _ = io.WriteString(stdout, "late")
		_, _ = stdout.Close(), stderr.Close()
	}()
	p.drain(func() bool {
		close(asked)
		return false
	})
	if got.String() != "late" {
		t.Errorf("%q", &got)
	}
}

type brokenWriter struct{ err error }

func (w brokenWriter) Write([]byte) (int, error) { return 0, w.err }

// A caller's writer that fails mustn't stop the command.
func TestPipesBrokenWriter(t *testing.T) {
	p, stdout, stderr := testPipes(t, false)
	broken := errors.New("broken")
	p.copyOut(brokenWriter{broken}, nil)
	if _, err := stdout.Write(make([]byte, 1<<20)); err != nil {
		t.Error(err)
	}
	_, _ = stdout.Close(), stderr.Close()
	p.drain(outlived)
	if err := p.err(); !errors.Is(err, broken) {
		t.Errorf("error %v", err)
	}
}

func TestPipesInput(t *testing.T) {
	const text = "all of it"
	t.Run("late reader", func(t *testing.T) {
		p, _, _ := testPipes(t, true)
		done := make(chan struct{})
		go func() {
			defer close(done)
			p.copyIn(strings.NewReader(text))
		}()
		time.Sleep(30 * time.Millisecond) // what is written before there is a reader would be lost
		f, err := os.Open(p.file("stdin"))
		if err != nil {
			t.Fatal(err)
		}
		if got, err := io.ReadAll(f); string(got) != text || err != nil {
			t.Errorf("%q, %v", got, err)
		}
		<-done
	})
	t.Run("no reader", func(t *testing.T) {
		p, _, _ := testPipes(t, true)
		done := make(chan struct{})
		go func() {
			defer close(done)
			p.copyIn(strings.NewReader(text))
		}()
		p.endInput()
		<-done
	})
	t.Run("reader that doesn't read", func(t *testing.T) {
		p, _, _ := testPipes(t, true)
		f, err := os.OpenFile(p.file("stdin"), os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = f.Close() }()
		done := make(chan struct{})
		go func() {
			defer close(done)
			p.copyIn(bytes.NewReader(make([]byte, 1<<20)))
		}()
		p.endInput()
		<-done
	})
}

// The directory of a container that is gone isn't made again.
func TestPipesWithoutContainer(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "gone")
	if _, err := newPipes(t.Context(), filepath.Join(dir, "exec", "x"), false); !errors.Is(err, fs.ErrNotExist) || !gone(dir) {
		t.Errorf("error %v", err)
	}
}

func TestPipesBeginning(t *testing.T) {
	p, stdout, stderr := testPipes(t, false)
	p.copyOut(nil, nil)
	for _, part := range []string{runtime.NoThread[:10], runtime.NoThread[10:], strings.Repeat("x", 1000)} {
		if _, err := io.WriteString(stderr, part); err != nil {
			t.Fatal(err)
		}
	}
	_, _ = stdout.Close(), stderr.Close()
	p.drain(outlived)
	if !p.stderr.begins(runtime.NoThread) || p.stdout.begins(runtime.NoThread) || len(p.stderr.head) > headSize {
		t.Errorf("it begins with %q, and %q", p.stderr.head, p.stdout.head)
	}
}
