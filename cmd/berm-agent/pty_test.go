package main

import (
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/runtime/agent/wire"
)

func TestTerminal(t *testing.T) {
	for user, uid := range users {
		t.Run(user, func(t *testing.T) { tryTerminal(t, uid) })
	}
}

func tryTerminal(t *testing.T, uid int) {
	s := newSandbox(t, uid)
	k, other := s.accept(), s.accept()
	a, ok := k.begin(command(wire.Start{
		ID: "x", TTY: true, Stdin: true, Rows: 10, Cols: 30,
		Command: []string{"sh", "-c", `trap 'stty size' WINCH; trap 'echo int' INT; tty >/dev/tty; stty size; echo err >&2; echo $TERM
			until read line && echo "<$line>"; do :; done; read line; echo "end $?"; exit 3`},
	}))
	if !ok {
		t.Fatal(a.failure)
	}
	until := func(text string) {
		t.Helper()
		for !strings.Contains(a.stdout.String(), text) {
			if !k.next(a) {
				t.Fatalf("it ended before %q: %q, %+v", text, &a.stdout, a.info)
			}
		}
	}
	until("xterm\r\n")
	if out := a.stdout.String(); !strings.HasPrefix(out, "/dev/pts/") || !strings.Contains(out, "\r\n10 30\r\nerr\r\n") {
		t.Errorf("%q", out)
	}
	other.sure(&wire.Request{Op: wire.OpResize, Process: &wire.Process{ID: "x", Rows: 20, Cols: 60}})
	until("\n20 60\r\n")
	other.sure(&wire.Request{Op: wire.OpSignal, Process: &wire.Process{ID: "x", Signal: int(unix.SIGINT)}})
	until("int\r\n")
	in := k.input("x")
	in.write("hello\n")
	until("<hello>\r\n")
	in.end() // once, and the input isn't closed for good
	for k.next(a) {
	}
	if a.failure != nil || a.info.ExitCode != 3 || !a.info.TTY || a.stderr.Len() != 0 || !strings.HasSuffix(a.stdout.String(), "end 1\r\n") {
		t.Errorf("%q, %+v, %+v", &a.stdout, a.info, a.failure)
	}
}

// A program that takes its terminal as it is, as most do, waits at it.
func TestTerminalWaits(t *testing.T) {
	k := newSandbox(t, 0).accept()
	a, ok := k.begin(command(wire.Start{ID: "x", TTY: true, Stdin: true, Command: []string{"cat"}}))
	if !ok || !k.next(a) {
		t.Fatal(a.failure)
	}
	in := k.input("x")
	in.write("hello\n")
	for !strings.Contains(a.stdout.String(), "hello\r\nhello\r\n") {
		if !k.next(a) {
			t.Fatalf("it ended: %q, %+v", &a.stdout, a.info)
		}
	}
	in.end()
	for k.next(a) {
	}
	if a.failure != nil || a.info.ExitCode != 0 {
		t.Errorf("%q, %+v, %+v", &a.stdout, a.info, a.failure)
	}
}
