package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/runtime/runtimetest/engine"
)

// writer is a log's writer, as containerd's shim starts it.
type writer struct {
	cmd            *exec.Cmd
	dir            string
	stdout, stderr *os.File
}

func startWriter(t *testing.T, dir string, limit int) *writer {
	t.Helper()
	w := &writer{dir: dir}
	var ends [3]*os.File // the writer's
	var ready *os.File
	var errs [3]error
	ends[0], w.stdout, errs[0] = os.Pipe()
	ends[1], w.stderr, errs[1] = os.Pipe()
	ready, ends[2], errs[2] = os.Pipe()
	must(t, errs[:]...)
	w.cmd = exec.Command(agent, "max", strconv.Itoa(limit), "log", dir)
	w.cmd.Env = []string{"CONTAINER_ID=x", "CONTAINER_NAMESPACE=y"}
	w.cmd.ExtraFiles = ends[:]
	startCmd(t, w.cmd)
	for _, f := range ends {
		_ = f.Close()
	}
	t.Cleanup(func() {
		_ = w.stdout.Close() // it may be closed
		_ = w.stderr.Close()
		_ = ready.Close()
	})
	// The byte is for the scheme binary-v2, the end for binary.
	must(t, ready.SetReadDeadline(time.Now().Add(10*time.Second)))
	if b, err := io.ReadAll(ready); err != nil || len(b) != 1 {
		t.Fatalf("ready: %q, %v", b, err)
	}
	return w
}

// end closes the container's side and waits for the writer.
func (w *writer) end(t *testing.T) {
	t.Helper()
	must(t, w.stdout.Close())
	must(t, w.stderr.Close())
	must(t, w.cmd.Wait())
}

func (w *writer) print(t *testing.T, f *os.File, text string) {
	t.Helper()
	must(t, f.SetWriteDeadline(time.Now().Add(10*time.Second)))
	if _, err := f.WriteString(text); err != nil {
		t.Fatalf("the container waits for its log: %v", err)
	}
}

func readLog(t *testing.T, dir, name string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(dir, name))
	if err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	return string(b)
}

var stamp = regexp.MustCompile(`(?m)^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{9}Z `)

// records are those of a log, without their times.
func records(t *testing.T, dir string) []string {
	t.Helper()
	var out []string
	for line := range strings.Lines(readLog(t, dir, "log.1") + readLog(t, dir, "log")) {
		at := stamp.FindString(line)
		when, err := time.Parse(time.RFC3339Nano, strings.TrimSpace(at))
		if err != nil || time.Since(when).Abs() > time.Minute {
			t.Fatalf("time of %.100q: %v", line, err)
		}
		out = append(out, strings.TrimPrefix(strings.TrimSuffix(line, "\n"), at))
	}
	return out
}

func TestLogFormat(t *testing.T) {
	long := strings.Repeat("x", maxPart)
	for name, tt := range map[string]struct {
		printed string
		want    []string
	}{
		"nothing":          {"", nil},
		"lines":            {"one\ntwo\n", []string{"F one", "F two"}},
		"empty lines":      {"\n\n", []string{"F ", "F "}},
		"no end":           {"one\ntwo", []string{"F one", "P two"}},
		"any bytes":        {"\x00 \xff\r\n", []string{"F \x00 \xff\r"}},
		"just a part":      {long, []string{"P " + long}},
		"as long as one":   {long + "\n", []string{"F " + long}},
		"longer by a byte": {long + "y\n", []string{"P " + long, "F y"}},
		"three parts":      {long + long + "y\nz\n", []string{"P " + long, "P " + long, "F y", "F z"}},
	} {
		t.Run(name, func(t *testing.T) {
			w := startWriter(t, t.TempDir(), 1<<20)
			w.print(t, w.stdout, tt.printed)
			w.end(t)
			var want []string
			for _, line := range tt.want {
				want = append(want, "stdout "+line)
			}
			if diff := cmp.Diff(want, records(t, w.dir)); diff != "" {
				t.Errorf("want -, got +\n%s", diff)
			}
		})
	}
}

func TestLogPartsArriveInTime(t *testing.T) {
	w := startWriter(t, t.TempDir(), 1<<20)
	begun := time.Now()
	w.print(t, w.stdout, "user@host$ ")
	w.print(t, w.stderr, "line\n")
	await(t, "a part of a line", func() bool { return len(records(t, w.dir)) == 2 })
	if took := time.Since(begun); took < partDelay {
		t.Errorf("a part was written after %s: its end wasn't waited for", took)
	}
	w.print(t, w.stdout, "ls\n")
	await(t, "its end", func() bool { return len(records(t, w.dir)) == 3 })
	w.print(t, w.stderr, "the ")
	w.print(t, w.stderr, "end")
	w.end(t) // at once, whatever waits
	want := []string{"stderr F line", "stdout P user@host$ ", "stdout F ls", "stderr P the end"}
	if diff := cmp.Diff(want, records(t, w.dir)); diff != "" {
		t.Errorf("want -, got +\n%s", diff)
	}
}

// The shim asks for the end as soon as it has closed the pipes.
func TestLogOutlivesSignals(t *testing.T) {
	w := startWriter(t, t.TempDir(), 1<<20)
	for _, sig := range []syscall.Signal{unix.SIGTERM, unix.SIGINT, unix.SIGHUP} {
		must(t, w.cmd.Process.Signal(sig))
		w.print(t, w.stdout, sig.String()+"\n")
		await(t, "a record after "+sig.String(), func() bool { return strings.Contains(readLog(t, w.dir, "log"), sig.String()) })
	}
	w.end(t)
}

func TestLogLock(t *testing.T) {
	w := startWriter(t, t.TempDir(), 1<<20)
	f, err := os.Open(filepath.Join(w.dir, "lock"))
	must(t, err)
	defer func() { _ = f.Close() }()
	if err := unix.Flock(int(f.Fd()), unix.LOCK_SH|unix.LOCK_NB); !errors.Is(err, unix.EWOULDBLOCK) {
		t.Errorf("the lock of a writer that lives: %v", err)
	}
	w.end(t)
	if err := unix.Flock(int(f.Fd()), unix.LOCK_SH|unix.LOCK_NB); err != nil {
		t.Errorf("the lock of one that has ended: %v", err)
	}
	for _, name := range []string{"log", "lock"} {
		if info, err := os.Stat(filepath.Join(w.dir, name)); err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("%s: %v, %v", name, info, err)
		}
	}
}

// sizes adds up what a log takes, as far as can be told while it is rotated.
func sizes(dir string) (sum int64) {
	for _, name := range []string{"log", "log.1"} {
		if info, err := os.Stat(filepath.Join(dir, name)); err == nil {
			sum += info.Size()
		}
	}
	return sum
}

func TestLogIsBounded(t *testing.T) {
	for name, tt := range map[string]struct {
		limit int
		text  func(i int) string
	}{
		"short lines": {64 << 10, func(i int) string { return fmt.Sprintf("%d\n", i) }},
		"long lines":  {64 << 10, func(i int) string { return fmt.Sprintf("%d%s\n", i, strings.Repeat("x", 1000)) }},
		"huge lines":  {100_001, func(i int) string { return fmt.Sprintf("%d%s\n", i, strings.Repeat("x", 40_000)) }},
		"no lines":    {64 << 10, func(int) string { return strings.Repeat("x", 3000) }},
		"a tiny log":  {minBytes, func(i int) string { return fmt.Sprintf("%d%s\n", i, strings.Repeat("x", 2000)) }},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := startWriter(t, t.TempDir(), tt.limit)
			var all strings.Builder
			for i := 0; all.Len() < 20*tt.limit; i++ {
				text := tt.text(i)
				all.WriteString(text)
				w.print(t, w.stdout, text)
				if i%50 == 0 {
					if size := sizes(w.dir); size > int64(tt.limit) {
						t.Fatalf("%d bytes, the bound is %d", size, tt.limit)
					}
				}
			}
			w.end(t)
			if size := sizes(w.dir); size > int64(tt.limit) || size < int64(tt.limit)/2 {
				t.Errorf("%d bytes are kept, the bound is %d", size, tt.limit)
			}
			var kept strings.Builder
			for _, r := range records(t, w.dir) {
				text := strings.TrimPrefix(r, "stdout ")
				kept.WriteString(text[2:])
				if text[0] == 'F' {
					kept.WriteByte('\n')
				}
			}
			if !strings.HasSuffix(all.String(), kept.String()) {
				t.Error("what is kept isn't the end of what was printed")
			}
		})
	}
}

func TestLogOnAFullDisk(t *testing.T) {
	engine.Require(t, "containerd") // root, to mount a small file system
	dir := t.TempDir()
	must(t, unix.Mount("tmpfs", dir, "tmpfs", 0, "size=128k"))
	t.Cleanup(func() {
		must(t, unix.Unmount(dir, unix.MNT_DETACH))
	})
	fill := func() error { return os.WriteFile(filepath.Join(dir, "filler"), make([]byte, 120<<10), 0o600) }
	must(t, fill())
	w := startWriter(t, dir, 1<<20)
	line := strings.Repeat("x", 700) + "\n"
	w.print(t, w.stdout, strings.Repeat(line, 1000)) // far more than there is room and pipe
	must(t, os.Remove(filepath.Join(dir, "filler")))
	await(t, "records after there is room", func() bool {
		w.print(t, w.stdout, "room\n")
		return strings.Contains(readLog(t, dir, "log"), "stdout F room\n")
	})
	w.end(t)
	for _, r := range records(t, dir) { // each begins on a line of its own
		if text := strings.TrimPrefix(r, "stdout F "); text != "room" && !strings.HasPrefix(line, text) {
			t.Errorf("a record that nobody printed: %.100q", r)
		}
	}
}

// A container that is being removed must not be held up, nor come back.
func TestLogWithoutADirectory(t *testing.T) {
	for name, gone := range map[string]bool{"from the start": true, "later": false} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "log")
			if !gone {
				must(t, os.Mkdir(dir, 0o700))
			}
			w := startWriter(t, dir, 64<<10)
			must(t, os.RemoveAll(dir))
			w.print(t, w.stderr, strings.Repeat("into the void\n", 50_000))
			w.end(t)
			if _, err := os.Stat(dir); !os.IsNotExist(err) {
				t.Errorf("the directory is back: %v", err)
			}
		})
	}
}

// The bound holds when a file can't be put aside, until it can.
func TestLogThatCantBeRotated(t *testing.T) {
	t.Parallel()
	w := startWriter(t, t.TempDir(), minBytes)
	obstacle := filepath.Join(w.dir, "log.1")
	must(t, os.MkdirAll(filepath.Join(obstacle, "x"), 0o700))
	until := time.Now().Add(retryDelay * 5 / 4) // it tries again after a while
	for time.Now().Before(until) {
		w.print(t, w.stdout, "line\n")
	}
	if info, err := os.Stat(filepath.Join(w.dir, "log")); err != nil || info.Size() > minBytes/2 {
		t.Fatalf("log: %v, %v", info, err)
	}
	must(t, os.RemoveAll(obstacle))
	await(t, "the next file", func() bool {
		w.print(t, w.stdout, "again\n")
		return strings.Contains(readLog(t, w.dir, "log"), "again")
	})
	w.end(t)
}

// No text is lost or added, however reads cut it up.
func FuzzStream(f *testing.F) {
	f.Add([]byte("one\ntwo"), uint8(3), uint8(2))
	f.Add(bytes.Repeat([]byte("x"), 1000), uint8(200), uint8(16))
	f.Add([]byte("\n\n\nx\n"), uint8(1), uint8(1))
	f.Fuzz(func(t *testing.T, text []byte, chunk, part uint8) {
		dir := t.TempDir()
		j := &journal{dir: dir, half: 64 << 20}
		j.open()
		defer func() { _ = j.f.Close() }()
		s := &stream{name: "stderr"}
		limit := int(part) + 1
		for piece := range slices.Chunk(text, int(chunk)+1) {
			s.take(j, piece, limit, time.Now())
		}
		s.flush(j, time.Now())
		j.flush()
		var got []byte
		for _, r := range records(t, dir) {
			body := strings.TrimPrefix(r, "stderr ")
			if len(body)-2 > limit {
				t.Fatalf("a part of %d bytes, at most %d", len(body)-2, limit)
			}
			got = append(got, body[2:]...)
			if body[0] == 'F' {
				got = append(got, '\n')
			}
		}
		if !bytes.Equal(got, text) {
			t.Fatalf("%q became %q", text, got)
		}
	})
}
