package e2e

import (
	"io"
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/bermhq/berm/runtime/runtimetest/pty"
)

// The command line on real processes and terminals.
func TestCommandLineInside(t *testing.T) { onEachEngine(t, testCommandLineInside) }

func testCommandLineInside(t *testing.T, kind string) {
	e := commonEngine(t, kind)
	server := newServer(t, e, e.dir(t), testImage)
	server.start(t)
	t.Setenv("BERM_URL", server.url)
	t.Setenv("BERM_TOKEN", server.token)
	t.Setenv("TERM", "vt100")
	large := strings.Repeat("0123456789abcde\n", 256<<10)
	for _, s := range []step{
		{args: "sandbox create mine", stdout: []string{"created"}},
		{args: "sandbox exec mine -i -- cat", stdin: large, stdout: []string{large}},
		{args: "sandbox exec mine -i -- head -n1", stdin: large, stdout: []string{"0123456789abcde\n"}},
		{args: "sandbox exec mine -- sh -c 'kill -9 $$'", code: 137},
		{args: "sandbox exec mine --timeout 1s -- sh -c 'echo begun; sleep 60'", code: 124, stdout: []string{"begun\n"}, stderr: []string{"killed after 1s"}},
		{args: "sandbox exec mine -- sh -c 'echo out; echo err >&2; exit 3'", code: 3, stdout: []string{"out\n"}, stderr: []string{"err\n"}},
		{args: "sandbox exec mine -- nosuch", code: 127, stderr: []string{"nosuch"}},
	} {
		s.run(t)
	}

	code := typeAt(t, func(keyboard *os.File, screen *watched) {
		typed := func(line, want string) {
			_, _ = keyboard.WriteString(line)
			screen.until(t, want)
		}
		typed("stty size; echo term=$TERM\r", "33 77\r\nterm=vt100")
		pty.SetSize(t, keyboard, 40, 100)
		if err := syscall.Kill(os.Getpid(), syscall.SIGWINCH); err != nil {
			t.Fatal(err)
		}
		// The size goes by a call of its own: it is there some time after.
		typed("until test \"$(stty size)\" = '40 100'; do :; done; echo re''sized\r", "resized")
		typed("echo sl''eeping; sleep 60\r", "sleeping") // by when keys aren't the shell's any more
		typed("\x03", "^C")
		typed("exit 5\r", "exit 5")
	}, "sandbox", "shell", "mine")
	if code != 5 {
		t.Errorf("the shell ended with %d, want 5", code)
	}
	code = typeAt(t, func(keyboard *os.File, screen *watched) {
		screen.until(t, "terminal\r\n")
		_, _ = keyboard.WriteString("\x04") // the end of the input
	}, "sandbox", "exec", "mine", "-it", "--", "sh", "-c", "test -t 0 && echo terminal; cat; exit 6")
	if code != 6 {
		t.Errorf("the command ended with %d, want 6", code)
	}

	out := newWatched()
	done := make(chan int)
	go func() {
		done <- run(t.Context(), []string{"sandbox", "exec", "mine", "--", "sh", "-c", "trap 'exit 9' INT; echo begun; while :; do sleep 0.01; done"}, nil, out, io.Discard)
	}()
	out.until(t, "begun")
	if err := syscall.Kill(os.Getpid(), syscall.SIGINT); err != nil {
		t.Fatal(err)
	}
	if code := <-done; code != 9 {
		t.Errorf("after INT the command ended with %d, want 9", code)
	}
	step{args: "sandbox rm mine", stdout: []string{"deleted"}}.run(t)
}
