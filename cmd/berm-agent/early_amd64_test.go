package main

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

// ran is what a run of the program comes to, and whether Go began in it, of which it
// tells by GODEBUG.
type ran struct {
	Stdout, Stderr string
	Code           int
}

func ranTo(t *testing.T, dir string, env []string, args ...string) (out ran, began bool) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), agent, args...)
	cmd.Dir, cmd.Env = dir, append(env, "GODEBUG=inittrace=1")
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); cmd.ProcessState == nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(stderr.String()) {
		if strings.HasPrefix(line, "init ") {
			began = true
		} else {
			out.Stderr += line
		}
	}
	out.Stdout, out.Code = stdout.String(), cmd.ProcessState.ExitCode()
	return out, began
}

// What is done before Go begins comes to what Go does: a directory that is relative is left to it.
func TestBecomeEarly(t *testing.T) {
	dir := tree(t)
	for name, text := range map[string]string{
		"bin/tell":      "#!/bin/sh\nprintf '<%s>' \"$@\" \"$HOME\" \"$PATH\"; pwd",
		"lost/tell":     "#!/no/such/shell\n",
		"second/run":    "#!/bin/sh\necho second",
		"first/dir/run": "",
	} {
		name = filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, []byte(text), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	path := func(dirs ...string) string {
		for i, d := range dirs {
			if d != "" && d[0] != '/' {
				dirs[i] = filepath.Join(dir, d)
			}
		}
		return "PATH=" + strings.Join(dirs, ":")
	}
	long := strings.Repeat("/x", 4096)
	for _, tt := range []struct {
		name  string
		env   []string
		args  []string
		early bool
	}{
		{"plain", []string{path("bin")}, []string{"tell", "a b", "", "-c"}, true},
		{"no arguments", []string{path("bin")}, []string{"tell"}, true},
		{"by its path", []string{"PATH=/nowhere"}, []string{dir + "/bin/tell", "x"}, true},
		{"by a path from the directory", nil, []string{"bin/tell"}, true},
		{"missing before", []string{path("nowhere", "bin/tell", "first", "", long, "bin")}, []string{"tell"}, true},
		{"the last is empty", []string{path("bin", "")}, []string{"tell"}, true},
		{"as long as it may be", []string{"PATH=" + dir + strings.Repeat("/.", (4000-len(dir))/2) + "/second"}, []string{"run"}, true},
		{"too long", []string{"PATH=" + long}, []string{"tell"}, false},
		{"no list", nil, []string{"tell"}, false},
		{"an empty list", []string{"PATH="}, []string{"tell"}, false},
		{"not here", []string{path("", "")}, []string{"tell"}, false},
		{"missing", []string{path("bin")}, []string{"missing"}, false},
		{"missing, by its path", nil, []string{dir + "/missing"}, false},
		{"its interpreter is missing", []string{path("lost", "bin")}, []string{"tell"}, false},
		{"no program before", []string{path("first", "first/later", "second")}, []string{"data"}, false},
		{"can't be run", []string{path("first")}, []string{"data"}, false},
		{"a directory", []string{path("first", "second")}, []string{"dir"}, false},
		{"of no known kind", []string{path("bin", "second")}, []string{"run"}, false},
		{"no name", []string{path("bin")}, []string{""}, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			env := append([]string{"HOME=/h"}, tt.env...)
			want, began := ranTo(t, dir, env, append([]string{"exec", ".", "--"}, tt.args...)...)
			if !began {
				t.Error("Go isn't asked")
			}
			got, began := ranTo(t, "/", env, append([]string{"exec", dir, "--"}, tt.args...)...)
			if diff := cmp.Diff(want, got); diff != "" || began == tt.early {
				t.Errorf("Go began: %t; (-want +got)\n%s", began, diff)
			}
			if tt.early && (got.Code != 0 || got.Stdout == "") {
				t.Errorf("%+v", got)
			}
		})
	}
	for _, tt := range []struct {
		name string
		env  []string
		args []string
	}{
		{"no home", []string{path("bin")}, []string{"exec", dir, "--", "tell"}},
		{"an empty home", []string{path("bin"), "HOME="}, []string{"exec", dir, "--", "tell"}},
		{"no directory", []string{path("bin"), "HOME=/"}, []string{"exec", dir + "/nowhere", "--", "tell"}},
		{"no command", []string{path("bin"), "HOME=/"}, []string{"exec", dir, "--"}},
		{"no dashes", []string{path("bin"), "HOME=/"}, []string{"exec", dir, "tell", "tell"}},
		{"dashes and more", []string{path("bin"), "HOME=/"}, []string{"exec", dir, "--x", "tell"}},
		{"another word", []string{path("bin"), "HOME=/"}, []string{"execute", dir, "--", "tell"}},
		{"nothing", nil, nil},
	} {
		if got, began := ranTo(t, "/", tt.env, tt.args...); !began {
			t.Errorf("%s: Go isn't asked: %+v", tt.name, got)
		}
	}
}

// crun sees nothing of the hierarchy, and leaves nothing below it.
func TestCrunEarly(t *testing.T) {
	var fs unix.Statfs_t
	if err := unix.Statfs(unifiedCgroup, &fs); err != nil || fs.Type != unix.CGROUP2_SUPER_MAGIC || os.Getuid() != 0 {
		t.Skip("needs root, and a host with hybrid cgroups")
	}
	dir := t.TempDir()
	script := "#!/bin/sh\nls " + unifiedCgroup + "; mkdir " + unifiedCgroup + "/left; echo $*; exit 3"
	if err := os.WriteFile(dir+"/crun", []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	for range 2 { // what one leaves there, the next one doesn't find
		got, began := ranTo(t, "/", []string{"PATH=/nowhere:" + dir + ":/usr/bin:/bin"}, "--root", "/x", "state", "y")
		if want := (ran{Stdout: "--root /x state y\n", Code: 3}); got != want || began {
			t.Errorf("Go began: %t; %+v, want %+v", began, got, want)
		}
	}
	if err := os.WriteFile(dir+"/crun", []byte("no program of any kind"), 0o755); err != nil {
		t.Fatal(err)
	}
	got, began := ranTo(t, "/", []string{"PATH=" + dir}, "--root", "/x", "state", "y")
	if want := (ran{Stderr: "berm-agent: crun: exec format error\n", Code: exitNotExecutable}); got != want || !began {
		t.Errorf("Go began: %t; %+v, want %+v", began, got, want)
	}
}
