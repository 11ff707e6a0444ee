package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestStateIsForOneProcess(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "deep", "state")
	first, err := openState(dir)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := openState(dir); err == nil || !strings.Contains(err.Error(), dir) {
		t.Errorf("a second one got %v", err)
	}
	if err := first.announce(stateAddress, "127.0.0.1:1"); err != nil {
		t.Fatal(err)
	}
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	third, err := openState(dir)
	if err != nil {
		t.Fatalf("the lock wasn't given back: %v", err)
	}
	defer func() { _ = third.Close() }()
	if _, err := os.Stat(filepath.Join(dir, "address")); !os.IsNotExist(err) {
		t.Errorf("the address of a killed server is still there: %v", err)
	}
	info, err := os.Stat(dir)
	if err != nil {
		t.Fatal(err)
	}
	if got := info.Mode().Perm(); got != 0o700 {
		t.Errorf("the directory's mode is %o, want 700", got)
	}
}

func TestOwner(t *testing.T) {
	dir := t.TempDir()
	st, err := openState(dir)
	if err != nil {
		t.Fatal(err)
	}
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
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	if len(entries) != 2 {
		t.Errorf("the directory holds %v, want lock and instance", entries)
	}
}
