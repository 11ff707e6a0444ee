package serve

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/bermhq/berm/runtime/runtimetest/check"
)

func TestStateIsForOneProcess(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "deep", "state")
	first := check.Value(openState(dir))(t)
	if _, err := openState(dir); err == nil || !strings.Contains(err.Error(), dir) {
		t.Errorf("a second one got %v", err)
	}
	must(t, first.put(StateAddress, "127.0.0.1:1"))
	must(t, first.Close())
	third, err := openState(dir)
	if err != nil {
		t.Fatalf("the lock wasn't given back: %v", err)
	}
	defer func() { _ = third.Close() }()
	if _, err := os.Stat(filepath.Join(dir, "address")); !os.IsNotExist(err) {
		t.Errorf("the address of a killed server is still there: %v", err)
	}
	info := check.Value(os.Stat(dir))(t)
	if got := info.Mode().Perm(); got != 0o700 {
		t.Errorf("the directory's mode is %o, want 700", got)
	}
}

func TestSealKey(t *testing.T) {
	st := check.Value(openState(t.TempDir()))(t)
	defer func() { _ = st.Close() }()
	made := check.Value(st.sealKey())(t)
	path := filepath.Join(st.dir, StateSealKey)
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the file: %v, %v", info, err)
	}
	if again, err := st.sealKey(); err != nil || string(again) != string(made) {
		t.Errorf("a second time: %x, %v, want %x", again, err, made)
	}
	// A damaged key must not be replaced: nothing that was made would be known.
	for _, text := range []string{"", "x\n", strings.Repeat("00", 31)} {
		write(t, path, text)
		if _, err := st.sealKey(); err == nil || !strings.Contains(err.Error(), "restore it") {
			t.Errorf("%q: %v", text, err)
		}
	}
}

func TestOwner(t *testing.T) {
	dir := t.TempDir()
	st := check.Value(openState(dir))(t)
	defer func() { _ = st.Close() }()
	if got, err := st.owner("mine"); err != nil || got != "mine" {
		t.Errorf("configured: %q, %v", got, err)
	}
	made, err := st.owner("")
	if err != nil || made == "" {
		t.Fatalf("made: %q, %v", made, err)
	}
	if again, err := st.owner(""); err != nil || again != made {
		t.Errorf("a second time: %q, %v, want %q", again, err, made)
	}
	// A damaged id must not be replaced: every sandbox would be orphaned.
	write(t, filepath.Join(dir, "instance"), "x\n")
	if got, err := st.owner(""); err == nil {
		t.Errorf("a damaged id gave %q", got)
	}
	entries := check.Value(os.ReadDir(dir))(t)
	if len(entries) != 2 {
		t.Errorf("the directory holds %v, want lock and instance", entries)
	}
}
