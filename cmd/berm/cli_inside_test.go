package main

import (
	"strings"
	"testing"

	"github.com/bermhq/berm/runtime/runtimetest/check"
)

// insideCLI has a sandbox, "mine".
func insideCLI(t *testing.T) {
	t.Helper()
	t.Setenv("BERM_URL", startAPI(t))
	t.Setenv("BERM_TOKEN", testToken)
	check.Step{Args: "sandbox create mine", Stdout: []string{"created"}}.Run(t, berm)
}

func TestExecCommand(t *testing.T) {
	insideCLI(t)
	large := strings.Repeat("0123456789abcdef", 64<<10) // more than is kept
	for _, s := range []check.Step{
		{Args: "sandbox exec mine -- sh -c 'echo out; echo err >&2; exit 3'", Code: 3, Stdout: []string{"out\n"}, Stderr: []string{"err\n"}},
		{Args: "sandbox exec mine -i -- cat", Stdin: large, Stdout: []string{large}},
		{Args: "sandbox exec mine -- cat", Stdin: "not for it"},
		{Args: "sandbox exec mine -e A=1 -w /tmp -- sh -c 'env; pwd'", Stdout: []string{"A=1\n", "/tmp\n"}},
		{Args: "sandbox exec mine -- nosuch", Code: 127, Stderr: []string{"nosuch"}},
		{Args: "sandbox exec mine --timeout 1s -- sh -c 'echo begun; sleep 60'", Code: 124, Stdout: []string{"begun\n"}, Stderr: []string{"killed after 1s"}},
		{Args: "sandbox exec mine -d --id job -- sleep 60", Stdout: []string{"job\n"}},
		{Args: "sandbox exec mine -d --id job -o json -- sleep 60", Stdout: []string{`"exec_id": "job"`, `"existing": true`}},
		{Args: "sandbox ps mine", Stdout: []string{"exec   job", "running", "sleep 60"}},
		{Args: "sandbox exec mine -d --id done -- true", Stdout: []string{"done\n"}},
		{Args: "sandbox exec mine --id named -- echo once", Stdout: []string{"once\n"}},
		{Args: "sandbox exec mine --id named -- echo once", Stdout: []string{"once\n"}},
		{Args: "sandbox ps mine --all", Stdout: []string{"named", "completed (0)"}},
		{Args: "sandbox ps mine -o json", Stdout: []string{`"exec_id": "job"`, `"processes": []`}},

		{Args: "sandbox exec mine -d -i -- cat", Code: 2, Stderr: []string{"--detach can't go together"}},
		{Args: "sandbox exec mine -t -o json -- cat", Code: 2, Stderr: []string{"--tty can't go together"}},
		{Args: "sandbox exec mine --id x -o json -- cat", Code: 2, Stderr: []string{"--id can't go together"}},
		{Args: "sandbox exec mine -t -- cat", Code: 2, Stderr: []string{"needs a terminal as standard input"}},
		{Args: "sandbox exec mine --id /x -- cat", Code: 125, Stderr: []string{"exec_id"}},
		{Args: "sandbox exec mine -e NOT_THERE_AT_ALL -- cat", Code: 125, Stderr: []string{"no such variable"}},
		{Args: "sandbox shell mine", Code: 2, Stderr: []string{"needs a terminal as standard input"}},
	} {
		s.Run(t, berm)
	}
}

func TestProcessCommands(t *testing.T) {
	insideCLI(t)
	for _, s := range []check.Step{
		{Args: "sandbox process list mine", Stdout: []string{"ID", "STATUS"}},
		{Args: "sandbox process start mine -- sleep 60", Stdout: []string{"default: running"}},
		{Args: "sandbox process start mine -- sleep 60", Code: 1, Stderr: []string{"default"}},
		{Args: "sandbox process start mine --replace -- sleep 61", Stdout: []string{"default: running"}},
		{Args: "sandbox process start mine --id web --ready-line up -e A=1 -w /tmp -- sh -c 'env; pwd; echo it is up; echo wrong >&2; exit 4'", Stdout: []string{"web: "}},
		{Args: "sandbox process start mine --id never --ready-line up --ready-timeout 1s -- sleep 60", Code: 1, Stdout: []string{"never: running"}, Stderr: []string{"didn't get ready"}},
		{Args: "sandbox process wait mine web", Code: 4, Stdout: []string{"web: exited (4)"}},
		{Args: "sandbox process list mine", Stdout: []string{"web", "exited (4)", `sh -c "env; pwd;`, "sleep 61"}},
		{Args: "sandbox process list mine -o json", Stdout: []string{`"process_id": "web"`}},
		{Args: "sandbox ps mine", Stdout: []string{"process   default   running"}},
		{Args: "sandbox process logs mine web", Stdout: []string{"A=1\n", "/tmp\n", "it is up\n"}, Stderr: []string{"wrong\n"}},
		{Args: "sandbox process logs mine web --follow -o json", Stdout: []string{`"event":"start"`, `"event":"exit"`, `"exit_code":4`}},
		{Args: "sandbox process logs mine", Stdout: []string{""}},
		{Args: "sandbox process attach mine web --no-stdin", Code: 4, Stdout: []string{"it is up\n"}, Stderr: []string{"wrong\n"}},
		{Args: "sandbox process signal mine default TERM", Stdout: []string{"default: "}},
		{Args: "sandbox process wait mine", Code: 143, Stdout: []string{"default: exited"}},
		{Args: "sandbox process signal mine default NOSUCH", Code: 2, Stderr: []string{"must be a signal's name"}},
		{Args: "sandbox process stop mine never", Stdout: []string{"never: exited"}},
		{Args: "sandbox process wait mine nosuch", Code: 125, Stderr: []string{"nosuch"}},
		{Args: "sandbox process start mine", Code: 2, Stderr: []string{"requires at least 2"}},
		{Args: "sandbox process", Code: 2, Stderr: []string{"say what to do"}},

		{Args: "sandbox process start mine --id tools -- cat", Stdout: []string{"tools: running"}},
		{Args: "sandbox process attach mine tools", Stdin: "to it", Stdout: []string{"to it"}},
		{Args: "sandbox process list mine -o json", Stdout: []string{`"process_id": "tools"`}},
	} {
		s.Run(t, berm)
	}
}
