package e2e

import (
	"bytes"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"github.com/bermhq/berm/cmd/e2e/program"
	"github.com/bermhq/berm/runtime/runtimetest/check"
	"github.com/bermhq/berm/runtime/runtimetest/pty"
)

// The command line on real processes and terminals.
func TestCommandLineInside(t *testing.T) {
	e := commonEngine(t, "docker")
	server := newServer(t, e, e.dir(t), testImage)
	server.start(t)
	t.Setenv("BERM_URL", server.url)
	t.Setenv("BERM_TOKEN", server.token)
	t.Setenv("TERM", "vt100")
	large := strings.Repeat("0123456789abcde\n", 256<<10)
	for _, s := range []check.Step{
		{Args: "sandbox create mine", Stdout: []string{"created"}},
		{Args: "sandbox exec mine -i -- cat", Stdin: large, Stdout: []string{large}},
		{Args: "sandbox exec mine -i -- head -n1", Stdin: large, Stdout: []string{"0123456789abcde\n"}},
		{Args: "sandbox exec mine -- sh -c 'kill -9 $$'", Code: 137},
	} {
		s.Run(t, berm)
	}

	code := typeAt(t, func(keyboard *os.File, screen *program.Output) {
		typed := func(line, want string) {
			_, _ = keyboard.WriteString(line)
			screen.Wait(t, want)
		}
		typed("stty size; echo term=$TERM\r", "33 77\r\nterm=vt100")
		pty.SetSize(t, keyboard, 40, 100)
		// The size goes by a call of its own: it is there some time after.
		typed("until test \"$(stty size)\" = '40 100'; do :; done; echo re''sized\r", "resized")
		typed("echo sl''eeping; sleep 60\r", "sleeping") // by when keys aren't the shell's any more
		typed("\x03", "^C")
		// A second shell is another process, and two keys detach from it.
		if code := typeAt(t, func(keyboard *os.File, screen *program.Output) {
			_, _ = keyboard.WriteString("echo se''cond\r")
			screen.Wait(t, "second")
			check.Step{Args: "sandbox ps mine", Stdout: []string{"shell-1   running", "shell-2   running"}}.Run(t, berm)
			_, _ = keyboard.WriteString("\x10\x11")
		}, "sandbox", "shell", "mine"); code != 0 {
			t.Errorf("detaching ended with %d", code)
		}
		check.Step{Args: "sandbox ps mine", Stdout: []string{"shell-2   running"}}.Run(t, berm)
		typed("exit 5\r", "exit 5")
	}, "sandbox", "shell", "mine")
	if code != 5 {
		t.Errorf("the shell ended with %d, want 5", code)
	}
	code = typeAt(t, func(keyboard *os.File, screen *program.Output) {
		screen.Wait(t, "terminal\r\n")
		_, _ = keyboard.WriteString("typed\r") // and it comes back as it is typed
		screen.Wait(t, "typed\r\ntyped\r\n")
		_, _ = keyboard.WriteString("\x04") // the end of the input
	}, "sandbox", "exec", "mine", "-it", "--", "sh", "-c", "test -t 0 && echo terminal; cat; exit 6")
	if code != 6 {
		t.Errorf("the command ended with %d, want 6", code)
	}

	out := program.NewOutput()
	cmd := exec.CommandContext(t.Context(), bin, "sandbox", "exec", "mine", "--", "sh", "-c", "trap 'exit 9' INT; echo begun; while :; do sleep 0.01; done")
	cmd.Stdout = out
	must(t, cmd.Start())
	out.Wait(t, "begun")
	must(t, cmd.Process.Signal(os.Interrupt))
	if _ = cmd.Wait(); cmd.ProcessState.ExitCode() != 9 {
		t.Errorf("after INT the command ended with %s, want 9", cmd.ProcessState)
	}
	check.Step{Args: "sandbox rm mine", Stdout: []string{"deleted"}}.Run(t, berm)
}

// typeAt runs the program on a terminal of its own, and what play types there.
func typeAt(t *testing.T, play func(keyboard *os.File, screen *program.Output), args ...string) (code int) {
	t.Helper()
	keyboard, tty := pty.Open(t)
	screen := program.NewOutput()
	go func() { _, _ = io.Copy(screen, keyboard) }()
	var errs bytes.Buffer
	cmd := exec.CommandContext(t.Context(), bin, args...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = tty, tty, &errs
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	must(t, cmd.Start())
	until(t, "the terminal is raw", func() bool { return !pty.Echoes(t, tty) })
	play(keyboard, screen)
	_ = cmd.Wait() // the exit code says all
	if !pty.Echoes(t, tty) {
		t.Errorf("berm %v leaves the terminal raw", args)
	}
	if errs.Len() > 0 {
		t.Logf("berm %v: %s", args, &errs)
	}
	return cmd.ProcessState.ExitCode()
}
