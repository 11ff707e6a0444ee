package policy

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"testing"
)

func TestResolveDir(t *testing.T) {
	base := tree(t)
	for p, want := range map[string]string{"data": "data", "data/in": "data/a/b", "rootlink": "real"} {
		if got, err := ResolveDir(filepath.Join(base, p)); err != nil || got != filepath.Join(base, want) {
			t.Errorf("%s: %s %v", p, got, err)
		}
	}
	if _, err := ResolveDir(base + "/data/file"); !errors.Is(err, syscall.ENOTDIR) {
		t.Errorf("file: %v", err)
	}
	if _, err := ResolveDir(base + "/gone"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("missing: %v", err)
	}
}

func TestOnRootFS(t *testing.T) {
	if on, err := OnRootFS("/"); !on || err != nil {
		t.Errorf("/: %v %v", on, err)
	}
	if on, err := OnRootFS("/proc"); on || err != nil {
		t.Errorf("/proc: %v %v", on, err)
	}
	if _, err := OnRootFS("/gone/missing"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("missing: %v", err)
	}
}

func TestReadSecret(t *testing.T) {
	file := filepath.Join(t.TempDir(), "secret")
	for content, want := range map[string]string{"a": "a", "a\n": "a", "a\r\n": "a", "a\n\n": "a\n", " a ": " a "} {
		must(t, os.WriteFile(file, []byte(content), 0o600))
		if got, err := ReadSecret(SecretSource{File: file}); got != want || err != nil {
			t.Errorf("%q: %q %v", content, got, err)
		}
	}
	if _, err := ReadSecret(SecretSource{File: file + "x"}); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("missing file: %v", err)
	}
	t.Setenv("POLICY_TEST_SECRET", "x")
	if got, err := ReadSecret(SecretSource{Env: "POLICY_TEST_SECRET"}); got != "x" || err != nil {
		t.Errorf("%q %v", got, err)
	}
	if _, err := ReadSecret(SecretSource{Env: "POLICY_TEST_GONE"}); err == nil {
		t.Error("a missing variable is no error")
	}
}
