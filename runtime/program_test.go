package runtime

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/bermhq/berm/runtime/atomicfile"
)

func TestPutProgram(t *testing.T) {
	program := []byte("\x7fELF and so on")
	for name, before := range map[string]func(path string) error{
		"nothing there": func(string) error { return nil },
		"as it is":      func(path string) error { return os.WriteFile(path, program, 0o755) },
		"other bytes":   func(path string) error { return os.WriteFile(path, []byte("\x7fELF and so ON"), 0o755) },
		"cut off":       func(path string) error { return os.WriteFile(path, program[:5], 0o755) },
		"longer":        func(path string) error { return os.WriteFile(path, append(program, 'x'), 0o755) },
		"a symlink": func(path string) error {
			other := filepath.Join(filepath.Dir(path), "other")
			if err := os.WriteFile(other, program, 0o755); err != nil {
				return err
			}
			return os.Symlink(other, path)
		},
		"others may write": func(path string) error {
			if err := os.WriteFile(path, program, 0o755); err != nil {
				return err
			}
			return os.Chmod(path, 0o777) //nolint:gosec // that is what is tested
		},
		"somebody else's": func(path string) error {
			if err := os.WriteFile(path, program, 0o755); err != nil || os.Geteuid() != 0 {
				return err
			}
			return os.Chown(path, 65534, 65534)
		},
		"left by one that died": func(path string) error {
			left := filepath.Join(filepath.Dir(path), atomicfile.TempPrefix+"1")
			if err := os.WriteFile(left, program[:5], 0o600); err != nil {
				return err
			}
			return os.Chtimes(left, time.Time{}, time.Now().Add(-2*staleAfter))
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "bin")
			must(t, os.Mkdir(dir, 0o700))
			path := filepath.Join(dir, "berm-agent-0123")
			must(t, before(path))
			must(t, putProgram(path, program))
			info, err := os.Lstat(path)
			must(t, err)
			if b, err := os.ReadFile(path); err != nil || string(b) != string(program) || info.Mode() != 0o755 || !ours(info) {
				t.Errorf("%q, %s, %v", b, info.Mode(), err)
			}
			if left, err := filepath.Glob(filepath.Join(dir, atomicfile.TempPrefix+"*")); err != nil || len(left) > 0 {
				t.Errorf("left over: %v, %v", left, err)
			}
		})
	}
}

func TestPutProgramWhereOthersWrite(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "bin")
	must(t, os.Mkdir(dir, 0o700))
	if err := os.Chmod(dir, 0o777); err != nil { //nolint:gosec // that is what is tested
		t.Fatal(err)
	}
	if err := putProgram(filepath.Join(dir, "berm-agent-0123"), []byte("x")); err == nil {
		t.Error("a directory where anybody writes was good enough")
	}
}

func TestPutProgramName(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "bin")
	path, err := PutProgram(dir, []byte("x"))
	if err != nil || path != filepath.Join(dir, "berm-agent-2d711642b726") {
		t.Errorf("%s, %v", path, err)
	}
}
