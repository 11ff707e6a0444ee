package main

import (
	"bytes"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/runtime/runtimetest"
)

// insideCLI has a sandbox, "mine".
func insideCLI(t *testing.T) {
	t.Helper()
	t.Setenv("BERM_URL", startAPI(t))
	t.Setenv("BERM_TOKEN", testToken)
	step{args: "sandbox create mine", stdout: []string{"created"}}.run(t)
}

func TestExecCommand(t *testing.T) {
	insideCLI(t)
	large := strings.Repeat("0123456789abcdef", 64<<10) // more than is kept
	for _, s := range []step{
		{args: "sandbox exec mine -- sh -c 'echo out; echo err >&2; exit 3'", code: 3, stdout: []string{"out\n"}, stderr: []string{"err\n"}},
		{args: "sandbox exec mine -i -- cat", stdin: large, stdout: []string{large}},
		{args: "sandbox exec mine -- cat", stdin: "not for it"},
		{args: "sandbox exec mine -e A=1 -w /tmp -- sh -c 'env; pwd'", stdout: []string{"A=1\n", "/tmp\n"}},
		{args: "sandbox exec mine -- nosuch", code: 127, stderr: []string{"nosuch"}},
		{args: "sandbox exec mine --timeout 1s -- sh -c 'echo begun; sleep 60'", code: 124, stdout: []string{"begun\n"}, stderr: []string{"killed after 1s"}},
		{args: "sandbox exec mine -d --id job -- sleep 60", stdout: []string{"job\n"}},
		{args: "sandbox exec mine -d --id job -o json -- sleep 60", stdout: []string{`"exec_id": "job"`, `"existing": true`}},
		{args: "sandbox ps mine", stdout: []string{"exec   job", "running", "sleep 60"}},
		{args: "sandbox exec mine -d --id done -- true", stdout: []string{"done\n"}},
		{args: "sandbox exec mine --id named -- echo once", stdout: []string{"once\n"}},
		{args: "sandbox exec mine --id named -- echo once", stdout: []string{"once\n"}},
		{args: "sandbox ps mine --all", stdout: []string{"named", "completed (0)"}},
		{args: "sandbox ps mine -o json", stdout: []string{`"exec_id": "job"`, `"processes": []`}},

		{args: "sandbox exec mine -d -i -- cat", code: 2, stderr: []string{"--detach can't go together"}},
		{args: "sandbox exec mine -t -o json -- cat", code: 2, stderr: []string{"--tty can't go together"}},
		{args: "sandbox exec mine --id x -o json -- cat", code: 2, stderr: []string{"--id can't go together"}},
		{args: "sandbox exec mine -t -- cat", code: 2, stderr: []string{"needs a terminal as standard input"}},
		{args: "sandbox exec mine --id /x -- cat", code: 125, stderr: []string{"exec_id"}},
		{args: "sandbox exec mine -e NOT_THERE_AT_ALL -- cat", code: 125, stderr: []string{"no such variable"}},
		{args: "sandbox shell mine", code: 2, stderr: []string{"needs a terminal as standard input"}},
	} {
		s.run(t)
	}
}

// Without Berm's program in the sandbox, nothing runs in it.
func TestWithoutAgent(t *testing.T) {
	engine := runtimetest.NewFake(runtimetest.FakeOptions{Fail: func(op, _ string) error {
		if op == "exec" || strings.HasPrefix(op, "process") || strings.HasPrefix(op, "file") {
			return errdefs.ErrNotImplemented
		}
		return nil
	}})
	t.Setenv("BERM_URL", startAPIOn(t, engine))
	t.Setenv("BERM_TOKEN", testToken)
	for _, s := range []step{
		{args: "sandbox create mine", stdout: []string{"created"}},
		{args: "sandbox exec mine -- true", code: 125, stderr: []string{"not_supported"}},
		{args: "sandbox exec mine -o json -- true", code: 125, stderr: []string{"not_supported"}},
		{args: "sandbox exec mine -d -- sleep 60", code: 125, stderr: []string{"not_supported"}},
		{args: "sandbox process start mine -- sleep 60", code: 1, stderr: []string{"not_supported"}},
		{args: "sandbox files ls mine /tmp", code: 1, stderr: []string{"not_supported"}},
	} {
		s.run(t)
	}
}

// watched is output that can be waited for.
type watched struct {
	mu   sync.Mutex
	buf  bytes.Buffer
	more chan struct{}
}

func newWatched() *watched { return &watched{more: make(chan struct{}, 1)} }

func (w *watched) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.buf.Write(p)
	select {
	case w.more <- struct{}{}:
	default:
	}
	return len(p), nil
}

// until waits for a text.
func (w *watched) until(t *testing.T, text string) {
	t.Helper()
	timeout := time.After(30 * time.Second)
	for {
		w.mu.Lock()
		got := w.buf.String()
		w.mu.Unlock()
		if strings.Contains(got, text) {
			return
		}
		select {
		case <-w.more:
		case <-timeout:
			t.Fatalf("the output is %q, want %q in it", got, text)
		}
	}
}

func TestProcessCommands(t *testing.T) {
	insideCLI(t)
	for _, s := range []step{
		{args: "sandbox process list mine", stdout: []string{"ID", "STATUS"}},
		{args: "sandbox process start mine -- sleep 60", stdout: []string{"default: running"}},
		{args: "sandbox process start mine -- sleep 60", code: 1, stderr: []string{"default"}},
		{args: "sandbox process start mine --replace -- sleep 61", stdout: []string{"default: running"}},
		{args: "sandbox process start mine --id web --ready-line up -e A=1 -w /tmp -- sh -c 'env; pwd; echo it is up; echo wrong >&2; exit 4'", stdout: []string{"web: "}},
		{args: "sandbox process start mine --id never --ready-line up --ready-timeout 1s -- sleep 60", code: 1, stdout: []string{"never: running"}, stderr: []string{"didn't get ready"}},
		{args: "sandbox process wait mine web", code: 4, stdout: []string{"web: exited (4)"}},
		{args: "sandbox process list mine", stdout: []string{"web", "exited (4)", `sh -c "env; pwd;`, "sleep 61"}},
		{args: "sandbox process list mine -o json", stdout: []string{`"process_id": "web"`}},
		{args: "sandbox ps mine", stdout: []string{"process   default   running"}},
		{args: "sandbox process logs mine web", stdout: []string{"A=1\n", "/tmp\n", "it is up\n"}, stderr: []string{"wrong\n"}},
		{args: "sandbox process logs mine web --follow -o json", stdout: []string{`"event":"start"`, `"event":"exit"`, `"exit_code":4`}},
		{args: "sandbox process logs mine", stdout: []string{""}},
		{args: "sandbox process attach mine web --no-stdin", code: 4, stdout: []string{"it is up\n"}, stderr: []string{"wrong\n"}},
		{args: "sandbox process signal mine default TERM", stdout: []string{"default: "}},
		{args: "sandbox process wait mine", code: 143, stdout: []string{"default: exited"}},
		{args: "sandbox process signal mine default NOSUCH", code: 2, stderr: []string{"must be a signal's name"}},
		{args: "sandbox process stop mine never", stdout: []string{"never: exited"}},
		{args: "sandbox process wait mine nosuch", code: 125, stderr: []string{"nosuch"}},
		{args: "sandbox process start mine", code: 2, stderr: []string{"requires at least 2"}},
		{args: "sandbox process", code: 2, stderr: []string{"say what to do"}},

		{args: "sandbox process start mine --id tools -- cat", stdout: []string{"tools: running"}},
		{args: "sandbox process attach mine tools", stdin: "to it", stdout: []string{"to it"}},
		{args: "sandbox process list mine -o json", stdout: []string{`"process_id": "tools"`}},
	} {
		s.run(t)
	}
}
