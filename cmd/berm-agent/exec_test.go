package main

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
)

// tree makes a directory with what a search comes across.
func tree(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	for name, mode := range map[string]os.FileMode{"run": 0o755, "bin/run": 0o755, "bin/data": 0o644, "first/data": 0o644, "second/data": 0o755, "first/later/x": 0o644} {
		name = filepath.Join(dir, name)
		must(t, os.MkdirAll(filepath.Dir(name), 0o755))
		must(t, os.WriteFile(name, []byte("no program of any kind"), mode))
	}
	return dir
}

func TestLookUp(t *testing.T) {
	dir := tree(t)
	t.Chdir(dir)
	for _, tt := range []struct {
		name, path, want string
		err              error
	}{
		{name: "run", path: dir + "/bin", want: dir + "/bin/run"},
		{name: "run", path: "/nowhere:" + dir + "/first:" + dir + "/bin", want: dir + "/bin/run"},
		{name: "data", path: dir + "/first:" + dir + "/second", want: dir + "/second/data"},
		{name: "data", path: dir + "/first:" + dir + "/bin", err: syscall.EACCES},
		{name: "later", path: dir + "/first", err: syscall.ENOENT},
		{name: "missing", path: dir + "/bin", err: syscall.ENOENT},
		{name: "run", path: "", err: syscall.ENOENT},
		{name: "run", path: ":", err: syscall.ENOENT},
		{name: "run", path: "/nowhere:", err: syscall.ENOENT},
		{name: "", path: dir + "/bin", err: syscall.ENOENT},
		{name: "bin/run", path: "", want: "bin/run"},
		{name: "./data", path: dir + "/bin", err: syscall.ENOENT},
		{name: dir + "/bin/data", err: syscall.EACCES},
		{name: dir + "/bin", err: syscall.EISDIR},
		{name: dir + "/bin/run/below", err: syscall.ENOENT},
	} {
		t.Setenv("PATH", tt.path)
		got, err := lookUp(tt.name)
		if !errors.Is(err, tt.err) || err == nil && got != tt.want {
			t.Errorf("%q in %q: %q, %v; want %q, %v", tt.name, tt.path, got, err, tt.want, tt.err)
		}
	}
}

// What only crun leaves to be done.
func TestHome(t *testing.T) {
	for _, tt := range []struct {
		env  []string
		want string
	}{{[]string{}, "/"}, {[]string{"HOME="}, "/"}, {[]string{"HOME=/root"}, "/root"}} {
		cmd := exec.CommandContext(t.Context(), agent, "init", "/", "--", "/bin/sh", "-c", "echo $HOME")
		cmd.Env = tt.env
		if out, err := cmd.CombinedOutput(); err != nil || string(out) != tt.want+"\n" {
			t.Errorf("with %q: home %q, want %q; %v", tt.env, out, tt.want, err)
		}
	}
	t.Setenv("HOME", "")
	k, _ := serveStdio(t)
	if a := k.run("x", "echo $HOME"); a.stdout.String() != "/\n" {
		t.Errorf("of a command: home %q", &a.stdout)
	}
}
