package main

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

func TestDeleted(t *testing.T) {
	root := t.TempDir()
	if err := os.Mkdir(filepath.Join(root, "there"), 0o700); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		args []string
		want bool
	}{
		{[]string{"--root", root, "--log", "/x", "--log-format", "json", "delete", "--force", "gone"}, true},
		{[]string{"--root", root, "delete", "--force", "gone"}, true},
		{[]string{"--root", root, "delete", "--force", "there"}, false},
		{[]string{"--root", root, "delete", "gone"}, false}, // crun says that it isn't there
		{[]string{"--root", root, "kill", "--force", "gone"}, false},
		{[]string{"--root", root + "\x00", "delete", "--force", "gone"}, false},
		{[]string{"delete", "--force", "gone"}, false},
		{[]string{"--root"}, false},
	} {
		if deleted(c.args) != c.want {
			t.Errorf("%q", c.args)
		}
	}
}

func TestSeal(t *testing.T) {
	program := filepath.Join(t.TempDir(), "program")
	want := append([]byte("\x7fELF"), bytes.Repeat([]byte("x"), 1_000_000)...)
	if err := os.WriteFile(program, want, 0o700); err != nil { //nolint:gosec // a program
		t.Fatal(err)
	}
	sealed, err := seal(program)
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(sealed, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	got, err := os.ReadFile(sealed)
	if err != nil || !bytes.Equal(got, want) {
		t.Errorf("%d bytes of %d, %v", len(got), len(want), err)
	}
	for what, err := range map[string]error{
		"written": second(f.WriteAt([]byte("x"), 0)), "cut": f.Truncate(1), "extended": f.Truncate(1 << 20),
		"opened for more seals": second(unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, 0)),
	} {
		if err == nil {
			t.Errorf("it can be %s", what)
		}
	}
}

// What isn't the kernel's own kind of program has to run from where it is.
func TestSealScript(t *testing.T) {
	script := filepath.Join(t.TempDir(), "script")
	if err := os.WriteFile(script, []byte("#!/bin/sh\n"), 0o700); err != nil { //nolint:gosec // a program
		t.Fatal(err)
	}
	if sealed, err := seal(script); err == nil {
		t.Errorf("it is %s", sealed)
	}
}

func second(_ int, err error) error { return err }
