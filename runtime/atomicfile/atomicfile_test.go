package atomicfile

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"syscall"
	"testing"
)

func TestWrite(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "file")
	want := func(text string, mode os.FileMode) {
		t.Helper()
		b, err := os.ReadFile(path)
		if err != nil || string(b) != text {
			t.Errorf("got %q, %v, want %q", b, err, text)
		}
		if info, err := os.Stat(path); err != nil || info.Mode() != mode {
			t.Errorf("mode %v, %v, want %v", info.Mode(), err, mode)
		}
		if entries, err := os.ReadDir(dir); err != nil || len(entries) != 1 {
			t.Errorf("left over: %v, %v", entries, err)
		}
	}
	if err := WriteString(path, 0o600, "one"); err != nil {
		t.Fatal(err)
	}
	want("one", 0o600)
	if err := WriteString(path, 0o755, "two"); err != nil {
		t.Fatal(err)
	}
	want("two", 0o755)
	failed := errors.New("failed")
	err := Write(path, 0o600, func(w io.Writer) error {
		_, _ = io.WriteString(w, "half")
		return failed
	})
	if !errors.Is(err, failed) {
		t.Errorf("got %v, want the error of write", err)
	}
	want("two", 0o755)
	if err := WriteString(dir, 0o600, "x"); !errors.Is(err, syscall.EISDIR) {
		t.Errorf("a directory: %v", err)
	}
	if err := WriteString(filepath.Join(dir, "none", "file"), 0o600, "x"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("without the directory: %v", err)
	}
}
