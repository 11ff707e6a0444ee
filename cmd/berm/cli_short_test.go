package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"github.com/bermhq/berm/cmd/berm/config"
	"github.com/bermhq/berm/runtime/runtimetest/check"
)

func TestShortCommands(t *testing.T) {
	insideCLI(t)
	dir := t.TempDir()
	write(t, filepath.Join(dir, "in"), "content")
	t.Chdir(dir)
	for _, s := range []check.Step{
		{Args: "ps", Stdout: []string{"KEY", "mine", "running"}},
		{Args: "ps -q", Stdout: []string{"mine\n"}},
		{Args: "sandbox ls -q", Stdout: []string{"mine\n"}},
		{Args: "exec mine -d --id job -- sleep 60", Stdout: []string{"job\n"}},
		{Args: "exec mine -- exit 7", Code: 7},
		{Args: "ps mine", Stdout: []string{"exec   job", "sleep 60"}},
		{Args: "ps mine -q", Stdout: []string{"job\n"}},
		{Args: "sandbox process start mine --id web -- echo printed", Stdout: []string{"web"}},
		{Args: "sandbox process wait mine web", Stdout: []string{"web"}},
		{Args: "logs mine web", Stdout: []string{"printed\n"}},
		{Args: "sandbox process list mine -q", Stdout: []string{"web\n"}},
		{Args: "stats mine", Stdout: []string{"CPU SECONDS", "mine"}},
		{Args: "stats mine -o json", Stdout: []string{`"key": "mine"`, `"memory_bytes"`}},
		{Args: "stats nosuch mine", Code: 1, Stdout: []string{"mine"}, Stderr: []string{"nosuch"}},
		{Args: "pause mine", Stdout: []string{"mine: paused"}},
		{Args: "resume mine", Stdout: []string{"mine: running"}},
		{Args: "cp in mine:/tmp/"},
		{Args: "cp mine:/tmp/in -", Stdout: []string{"content"}},
		{Args: "cp mine:/tmp/in out"},
		{Args: "cp - mine:/tmp/typed", Stdin: "typed"},
		{Args: "cp mine:/tmp/typed ."},
		{Args: "cp in out", Code: 2, Stderr: []string{"KEY:PATH"}},
		{Args: "cp mine:/a mine:/b", Code: 2, Stderr: []string{"KEY:PATH"}},
		{Args: "cp mine:/ .", Code: 2, Stderr: []string{"no file's name"}},
		{Args: "cp - mine:/tmp/", Code: 2, Stderr: []string{"no name of its own"}},
	} {
		s.Run(t, berm)
	}
	for name, want := range map[string]string{"out": "content", "typed": "typed"} {
		if got, err := os.ReadFile(name); string(got) != want {
			t.Errorf("%s is %q, %v", name, got, err)
		}
	}
}

func TestFormat(t *testing.T) {
	insideCLI(t)
	for _, s := range []check.Step{
		{Args: "sandbox ls --format '{{.Key}} is {{.Status}}'", Stdout: []string{"mine is running\n"}},
		{Args: "ps -o '{{json .Spec.Network}}'", Stdout: []string{"\"off\"\n"}},
		{Args: "sandbox show mine -o '{{.Key}}'", Stdout: []string{"mine\n"}},
		{Args: "ps --format json", Stdout: []string{`"key": "mine"`}},
		{Args: "ps -o '{{.Nothing}}'", Code: 2, Stderr: []string{"--output: "}},
		{Args: "ps -o '{{'", Code: 2, Stderr: []string{"--output: "}},
		{Args: "ps --format yaml", Code: 2, Stderr: []string{"want table or json, or a Go template"}},
	} {
		s.Run(t, berm)
	}
	// A file's name is a stranger's text.
	check.Step{Args: "sandbox files mkdir mine '/tmp/a\x1b[2J'"}.Run(t, berm)
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
	check.Step{Args: "sandbox process start mine --id web -- sleep 60", Stdout: []string{"web"}}.Run(t, berm)
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
		"sandbox creat":         "did you mean create?",
		"sandbox procress list": "did you mean process?",
		"serv":                  "serve",
		"sandbox nothing-near":  "unknown command",
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
