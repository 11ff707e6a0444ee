package logs

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/google/go-cmp/cmp"

	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/runtimetest/check"
)

// logLines makes a log's file: at second i of a minute, the i-th record.
func logLines(from int, records ...string) string {
	var b strings.Builder
	for i, r := range records {
		fmt.Fprintf(&b, "2026-01-02T03:04:%02d.000000000Z %s\n", from+i, r)
	}
	return b.String()
}

func writeLog(t *testing.T, dir, name, text string) {
	t.Helper()
	must(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600))
}

func TestPrintLog(t *testing.T) {
	dir := t.TempDir()
	writeLog(t, dir, "log.1", logLines(0, "stdout F one", "stderr P two, ", "stdout F ", "stderr P in parts, ", "stdout P three, "))
	writeLog(t, dir, "log", logLines(5, "stderr F of many", "stdout F over files", "stdout P unended")+
		"2026-01-02T03:04:09.000000000Z stdout F is being writ")
	second := func(n int) time.Time { return time.Date(2026, 1, 2, 3, 4, n, 0, time.UTC) }
	for name, tt := range map[string]struct {
		opts           runtime.LogOptions
		stdout, stderr string
	}{
		"all":                       {runtime.LogOptions{}, "one\n\nthree, over files\nunended", "two, in parts, of many\n"},
		"tail 1":                    {runtime.LogOptions{Tail: 1}, "unended", ""},
		"tail 2":                    {runtime.LogOptions{Tail: 2}, "three, over files\nunended", ""},
		"tail 4":                    {runtime.LogOptions{Tail: 4}, "\nthree, over files\nunended", "two, in parts, of many\n"},
		"tail of more":              {runtime.LogOptions{Tail: 100}, "one\n\nthree, over files\nunended", "two, in parts, of many\n"},
		"since":                     {runtime.LogOptions{Since: second(2)}, "\nthree, over files\nunended", ""},
		"since in a line's middle":  {runtime.LogOptions{Since: second(5)}, "unended", ""},
		"since after all":           {runtime.LogOptions{Since: second(8)}, "", ""},
		"since, and a tail of that": {runtime.LogOptions{Since: second(1), Tail: 3}, "\nthree, over files\nunended", ""},
		"with times": {runtime.LogOptions{Timestamps: true, Since: second(1)},
			"2026-01-02T03:04:02.000000000Z \n2026-01-02T03:04:04.000000000Z three, over files\n2026-01-02T03:04:07.000000000Z unended",
			"2026-01-02T03:04:01.000000000Z two, in parts, of many\n"},
	} {
		t.Run(name, func(t *testing.T) {
			var stdout, stderr bytes.Buffer
			p := newPrinter(tt.opts, &stdout, &stderr)
			must(t, printLog(t.Context(), dir, p))
			if diff := cmp.Diff([]string{tt.stdout, tt.stderr}, []string{stdout.String(), stderr.String()}); diff != "" {
				t.Errorf("want -, got +\n%s", diff)
			}
		})
	}
	t.Run("in order", func(t *testing.T) {
		var both bytes.Buffer
		p := newPrinter(runtime.LogOptions{}, &both, &both)
		must(t, printLog(t.Context(), dir, p))
		if want := "one\ntwo, \nin parts, three, of many\nover files\nunended"; both.String() != want {
			t.Errorf("%q, want %q", &both, want)
		}
	})
	if err := printLog(t.Context(), dir, &logPrinter{}); err != nil {
		t.Errorf("to nowhere: %v", err)
	}
	t.Run("a writer that fails", func(t *testing.T) {
		p := newPrinter(runtime.LogOptions{}, failingWriter{}, nil)
		if err := printLog(t.Context(), dir, p); !errors.Is(err, errWriter) {
			t.Error(err)
		}
	})
	t.Run("canceled", func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := printLog(ctx, dir, &logPrinter{}); !errdefs.IsCanceled(err) {
			t.Error(err)
		}
	})
}

var errWriter = errors.New("the writer is full")

type failingWriter struct{}

func (failingWriter) Write([]byte) (int, error) { return 0, errWriter }

func TestScannerPassesOverWhatIsNoRecord(t *testing.T) {
	var got []string
	var s logScanner
	text := "2026-01-02T03:04:05Z stdout F one\n" +
		"2026-01-02T03:04:05Z std\n" + "\n" + "x stdout F no time\n" +
		"2026-01-02T03:04:05Z stdin F x\n" + "2026-01-02T03:04:05Z stdout X x\n" +
		"2026-01-02T03:04:05Z stdout F " + strings.Repeat("x", maxRecord) + "\n" +
		"2026-01-02T03:04:05Z stderr P two\n"
	for _, b := range []byte(text) {
		err := s.feed([]byte{b}, func(r logRecord) error {
			got = append(got, fmt.Sprintf("%d %t %s", r.stream, r.partial, r.text))
			return nil
		})
		must(t, err)
	}
	if diff := cmp.Diff([]string{"0 false one", "1 true two"}, got); diff != "" {
		t.Errorf("want -, got +\n%s", diff)
	}
}

// However a file is cut up by reads, the same records come out.
func FuzzScanner(f *testing.F) {
	f.Add([]byte(logLines(0, "stdout F one", "stderr P two", "stdin F three", "")), uint16(5))
	f.Add([]byte("\n \n  \n   F \n"), uint16(1))
	f.Fuzz(func(t *testing.T, text []byte, chunk uint16) {
		scan := func(size int) (out []string) {
			var s logScanner
			for len(text) > 0 {
				n := min(size, len(text))
				err := s.feed(text[:n], func(r logRecord) error {
					if r.time.IsZero() && !bytes.HasPrefix(r.stamp, []byte("0001-01-01T")) || r.stream>>1 != 0 || bytes.ContainsRune(r.text, '\n') {
						t.Fatalf("%+v", r)
					}
					out = append(out, fmt.Sprintf("%s %d %t %q", r.stamp, r.stream, r.partial, r.text))
					return nil
				})
				must(t, err)
				text = text[n:]
			}
			return out
		}
		whole := text
		want := scan(len(text))
		text = whole
		if diff := cmp.Diff(want, scan(int(chunk)+1)); diff != "" {
			t.Errorf("whole -, in pieces +\n%s", diff)
		}
	})
}

func TestAwaitWriter(t *testing.T) {
	dir := t.TempDir()
	if err := AwaitWriter(t.Context(), dir); err != nil {
		t.Errorf("without a writer: %v", err)
	}
	_, end := logWriter(t, dir, 1<<20)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := AwaitWriter(ctx, dir); !errdefs.IsDeadlineExceeded(err) {
		t.Errorf("a writer that lives: %v", err)
	}
	done := make(chan error)
	go func() { done <- AwaitWriter(t.Context(), dir) }()
	end()
	if err := <-done; err != nil {
		t.Errorf("one that ends: %v", err)
	}
}

var must = check.Must // ends a test if a step of its own fails
