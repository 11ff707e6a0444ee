package logs

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/runtimetest/engine"
)

// logWriter is the agent, as containerd's shim starts it.
func logWriter(t *testing.T, dir string, limit int) (stdout *os.File, end func()) {
	t.Helper()
	program, err := engine.BuildAgent(t.Context())
	must(t, err)
	path, err := runtime.PutProgram(filepath.Join(t.TempDir(), "bin"), program)
	must(t, err)
	out, stdout, err := os.Pipe()
	must(t, err)
	null, err := os.Open(os.DevNull)
	must(t, err)
	ready, done, err := os.Pipe()
	must(t, err)
	var cmd *exec.Cmd
	for { // a process that another test is just starting may have the program open
		cmd = exec.Command(path, "log", dir, "max", strconv.Itoa(limit))
		cmd.ExtraFiles = []*os.File{out, null, done}
		if err = cmd.Start(); !errors.Is(err, unix.ETXTBSY) {
			break
		}
	}
	must(t, err)
	for _, f := range cmd.ExtraFiles {
		_ = f.Close()
	}
	ended := false
	end = func() {
		if ended {
			return
		}
		ended = true
		_ = stdout.Close()
		must(t, cmd.Wait())
	}
	t.Cleanup(end)
	if _, err := io.ReadAll(ready); err != nil {
		t.Fatal(err)
	}
	_ = ready.Close()
	return stdout, end
}

// numbers takes lines that are numbers, and notes where one doesn't follow the one before.
type numbers struct {
	rest   []byte
	last   atomic.Int64
	missed int
	wrong  string
}

func (n *numbers) Write(b []byte) (int, error) {
	n.rest = append(n.rest, b...)
	for {
		line, more, ok := bytes.Cut(n.rest, []byte("\n"))
		if !ok {
			return len(b), nil
		}
		n.rest = more
		i, err := strconv.ParseInt(string(line), 10, 64)
		if last := n.last.Load(); err != nil || i <= last {
			n.wrong = fmt.Sprintf("after %d: %q", last, line)
		} else if i != last+1 {
			n.missed++
		}
		n.last.Store(i)
	}
}

// followFor follows a log until the returned function is called.
func followFor(t *testing.T, dir string, to io.Writer) (stop func()) {
	t.Helper()
	p := newPrinter(runtime.LogOptions{}, to, nil)
	changed, unwatch := watchDir(dir)
	if changed == nil {
		t.Fatal("the directory can't be watched")
	}
	f, err := followLog(dir, p)
	must(t, err)
	over, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		defer f.close()
		defer unwatch()
		for last := false; ; {
			if err := f.copy(t.Context()); err != nil {
				t.Error(err)
				return
			}
			if last {
				return
			}
			select {
			case <-changed:
			case <-over:
				last = true
			}
		}
	}()
	return func() { close(over); <-done }
}

func TestFollowAcrossRotations(t *testing.T) {
	const lines = 60_000 // of less than 64 bytes each, as they are kept
	for name, tt := range map[string]struct {
		limit int
		lead  int64 // of the writer, at most
	}{
		// Nothing is rotated away before it is read, so nothing may be missed.
		"slow writer": {8 << 10, 8 << 10 / 64 / 4},
		"fast writer": {64 << 10, lines},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			stdout, end := logWriter(t, dir, tt.limit)
			var got numbers
			stop := followFor(t, dir, &got)
			deadline := time.Now().Add(time.Minute)
			for i := int64(1); i <= lines; i++ {
				for i-got.last.Load() > tt.lead {
					if time.Now().After(deadline) {
						t.Fatalf("line %d doesn't come", got.last.Load()+1)
					}
					time.Sleep(100 * time.Microsecond) // until the follower has come up
				}
				if _, err := fmt.Fprintln(stdout, i); err != nil {
					t.Fatal(err)
				}
			}
			end()
			stop()
			if got.wrong != "" || got.last.Load() != lines {
				t.Errorf("the last line is %d of %d; %s", got.last.Load(), lines, got.wrong)
			}
			if tt.lead < lines && got.missed > 0 {
				t.Errorf("lines are missing in %d places", got.missed)
			}
		})
	}
}

// Whenever a log is opened, what its files hold is in one piece.
func TestOpenLogBetweenRotations(t *testing.T) {
	dir := t.TempDir()
	stdout, end := logWriter(t, dir, 16<<10)
	over := make(chan struct{})
	go func() {
		defer close(over)
		for i := 1; i <= 100_000; i++ {
			if _, err := fmt.Fprintln(stdout, i); err != nil {
				t.Error(err)
				return
			}
		}
	}()
	for writing := true; writing; {
		select {
		case <-over:
			writing = false
		default:
		}
		var got numbers
		p := newPrinter(runtime.LogOptions{}, &got, nil)
		must(t, printLog(t.Context(), dir, p))
		if got.wrong != "" || got.missed > 1 { // before the first
			t.Fatalf("%d gaps; %s", got.missed, got.wrong)
		}
	}
	end()
}

func TestFollowEndsWithTheDirectory(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "log")
	must(t, os.Mkdir(dir, 0o700))
	writeLog(t, dir, "log", logLines(0, "stdout F one"))
	var out bytes.Buffer
	p := newPrinter(runtime.LogOptions{}, &out, nil)
	f, err := followLog(dir, p)
	must(t, err)
	defer f.close()
	if f.gone() {
		t.Error("gone before it is")
	}
	must(t, os.RemoveAll(dir))
	if err := f.copy(t.Context()); err != nil || out.String() != "one\n" || !f.gone() {
		t.Errorf("%q, gone %t, %v", &out, f.gone(), err)
	}
}

// What came between the last look at a file and its being put aside is seen too.
func TestFollowReadsToTheEndOfAFile(t *testing.T) {
	dir := t.TempDir()
	writeLog(t, dir, "log", logLines(0, "stdout F one"))
	var out bytes.Buffer
	p := newPrinter(runtime.LogOptions{}, &out, nil)
	f, err := followLog(dir, p)
	must(t, err)
	defer f.close()
	if err := f.copy(t.Context()); err != nil || out.String() != "one\n" {
		t.Fatalf("%q, %v", &out, err)
	}
	writeLog(t, dir, "log", logLines(0, "stdout F one", "stdout F two")) // the same file
	must(t, os.Rename(filepath.Join(dir, "log"), filepath.Join(dir, "log.1")))
	writeLog(t, dir, "log", logLines(2, "stdout F three"))
	complete := false
	if more, err := f.rotated(&complete); !more || !complete || len(f.files) != 1 || err != nil {
		t.Errorf("at a rotation: more %t, complete %t, %d files, %v", more, complete, len(f.files), err)
	}
	if err := f.copy(t.Context()); err != nil || out.String() != "one\ntwo\nthree\n" {
		t.Errorf("%q, %v", &out, err)
	}
}
