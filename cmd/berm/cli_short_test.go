package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"github.com/bermhq/berm/cmd/berm/config"
)

func TestShortCommands(t *testing.T) {
	insideCLI(t)
	dir := t.TempDir()
	write(t, filepath.Join(dir, "in"), "content")
	t.Chdir(dir)
	for _, s := range []step{
		{args: "ps", stdout: []string{"KEY", "mine", "running"}},
		{args: "ps -q", stdout: []string{"mine\n"}},
		{args: "sandbox ls -q", stdout: []string{"mine\n"}},
		{args: "exec mine -d --id job -- sleep 60", stdout: []string{"job\n"}},
		{args: "exec mine -- exit 7", code: 7},
		{args: "ps mine", stdout: []string{"exec   job", "sleep 60"}},
		{args: "ps mine -q", stdout: []string{"job\n"}},
		{args: "sandbox process start mine --id web -- echo printed", stdout: []string{"web"}},
		{args: "sandbox process wait mine web", stdout: []string{"web"}},
		{args: "logs mine web", stdout: []string{"printed\n"}},
		{args: "sandbox process list mine -q", stdout: []string{"web\n"}},
		{args: "stats mine", stdout: []string{"CPU SECONDS", "mine"}},
		{args: "stats mine -o json", stdout: []string{`"key": "mine"`, `"memory_bytes"`}},
		{args: "stats nosuch mine", code: 1, stdout: []string{"mine"}, stderr: []string{"nosuch"}},
		{args: "pause mine", stdout: []string{"mine: paused"}},
		{args: "resume mine", stdout: []string{"mine: running"}},
		{args: "cp in mine:/tmp/"},
		{args: "cp mine:/tmp/in -", stdout: []string{"content"}},
		{args: "cp mine:/tmp/in out"},
		{args: "cp - mine:/tmp/typed", stdin: "typed"},
		{args: "cp mine:/tmp/typed ."},
		{args: "cp in out", code: 2, stderr: []string{"KEY:PATH"}},
		{args: "cp mine:/a mine:/b", code: 2, stderr: []string{"KEY:PATH"}},
		{args: "cp mine:/ .", code: 2, stderr: []string{"no file's name"}},
		{args: "cp - mine:/tmp/", code: 2, stderr: []string{"no name of its own"}},
	} {
		s.run(t)
	}
	for name, want := range map[string]string{"out": "content", "typed": "typed"} {
		if got, err := os.ReadFile(name); string(got) != want {
			t.Errorf("%s is %q, %v", name, got, err)
		}
	}
}

func TestFormat(t *testing.T) {
	insideCLI(t)
	for _, s := range []step{
		{args: "sandbox ls --format '{{.Key}} is {{.Status}}'", stdout: []string{"mine is running\n"}},
		{args: "ps -o '{{json .Spec.Network}}'", stdout: []string{"\"off\"\n"}},
		{args: "sandbox show mine -o '{{.Key}}'", stdout: []string{"mine\n"}},
		{args: "ps --format json", stdout: []string{`"key": "mine"`}},
		{args: "ps -o '{{.Nothing}}'", code: 2, stderr: []string{"--output: "}},
		{args: "ps -o '{{'", code: 2, stderr: []string{"--output: "}},
		{args: "ps --format yaml", code: 2, stderr: []string{"want table or json, or a Go template"}},
	} {
		s.run(t)
	}
	// A file's name is a stranger's text.
	step{args: "sandbox files mkdir mine '/tmp/a\x1b[2J'"}.run(t)
	for _, args := range [][]string{{"sandbox", "files", "ls", "mine", "/tmp", "--format", "{{.Path}}"}, {"sandbox", "files", "find", "mine", "/tmp", "*", "--format", "{{.Path}}"}} {
		stdout, stderr, code := berm(t, "", args...)
		if code != 0 || !strings.Contains(stdout, "/tmp/a\uFFFD[2J\n") {
			t.Errorf("%v: exit code %d: %q %s", args, code, stdout, stderr)
		}
	}
	stdout, _, code := berm(t, "", "exec", "mine", "--format", "{{.ExitCode}} {{.Stdout}}", "--", "sh", "-c", "echo out; exit 3")
	if code != 3 || stdout != "3 out\n\n" {
		t.Errorf("exec by a template: exit code %d: %q", code, stdout)
	}
}

func TestCompletion(t *testing.T) {
	insideCLI(t)
	step{args: "sandbox process start mine --id web -- sleep 60", stdout: []string{"web"}}.run(t)
	for args, want := range map[string]string{
		"exec ":                      "mine",
		"stats mine ":                "mine",
		"sandbox show ":              "mine",
		"logs mine ":                 "web",
		"sandbox process stop mine ": "web",
		"sandbox show mine ":         "",
		"sandbox create ":            "mine",
		"sandbox ls --output ":       "json",
		"sandbox files ls mine ":     "",
	} {
		stdout, _, code := berm(t, "", append([]string{cobra.ShellCompRequestCmd}, strings.Split(args, " ")...)...)
		if has := strings.Contains(stdout, "mine") || strings.Contains(stdout, "web") || strings.Contains(stdout, "json"); code != 0 || !strings.Contains(stdout, want) || has != (want != "") {
			t.Errorf("%q completes to %q", args, stdout)
		}
	}
	t.Setenv("BERM_URL", "http://127.0.0.1:1")
	if stdout, _, _ := berm(t, "", cobra.ShellCompRequestCmd, "exec", ""); strings.Contains(stdout, "mine") {
		t.Errorf("without a server: %q", stdout)
	}
}

func TestNear(t *testing.T) {
	t.Parallel()
	for args, want := range map[string]string{
		"sandbox creat":        "did you mean create?",
		"sandbox proces list":  "did you mean process?",
		"serv":                 "serve",
		"sandbox nothing-near": "unknown command",
	} {
		if _, stderr, code := berm(t, "", strings.Fields(args)...); code != config.ExitUsage || !strings.Contains(stderr, want) {
			t.Errorf("%s: exit code %d: %s", args, code, stderr)
		}
	}
}

func TestVersionFlag(t *testing.T) {
	t.Parallel()
	if stdout, _, code := berm(t, "", "--version"); code != 0 || stdout != config.VersionLine()+"\n" {
		t.Errorf("exit code %d: %q", code, stdout)
	}
}

// There is a man page for each command, and the program's has the exit codes.
func TestMan(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "man1")
	if _, stderr, code := berm(t, "", "man", dir); code != 0 {
		t.Fatalf("exit code %d: %s", code, stderr)
	}
	for _, name := range []string{"berm-exec.1", "berm-sandbox-process-start.1", "berm-serve.1"} {
		if page, _ := read(t, dir, name); !strings.HasPrefix(page, ".nh\n.TH ") {
			t.Errorf("%s: %.80q", name, page)
		}
	}
	if page, _ := read(t, dir, "berm.1"); !strings.Contains(page, "Exit codes") {
		t.Errorf("no exit codes:\n%s", page)
	}
}
