package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"syscall"
	"testing"
	"testing/iotest"

	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/proxy/apitype"
)

// openPTY makes a pair: what is written to the keyboard is read from the terminal, and
// the other way round.
func openPTY(t *testing.T) (keyboard, tty *os.File) {
	t.Helper()
	keyboard, err := os.OpenFile("/dev/ptmx", os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = keyboard.Close() })
	if err := unix.IoctlSetPointerInt(int(keyboard.Fd()), unix.TIOCSPTLCK, 0); err != nil {
		t.Fatal(err)
	}
	n, err := unix.IoctlGetInt(int(keyboard.Fd()), unix.TIOCGPTN)
	if err != nil {
		t.Fatal(err)
	}
	tty, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = tty.Close() })
	setSize(t, tty, 33, 77)
	return keyboard, tty
}

func setSize(t *testing.T, tty *os.File, rows, cols uint16) {
	t.Helper()
	if err := unix.IoctlSetWinsize(int(tty.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Row: rows, Col: cols}); err != nil {
		t.Fatal(err)
	}
}

// echoes tells whether the terminal is as it is at first, and not raw.
func echoes(t *testing.T, tty *os.File) bool {
	t.Helper()
	state, err := unix.IoctlGetTermios(int(tty.Fd()), unix.TCGETS)
	if err != nil {
		t.Fatal(err)
	}
	return state.Lflag&unix.ECHO != 0 && state.Lflag&unix.ISIG != 0
}

func TestTerminal(t *testing.T) {
	_, tty := openPTY(t)
	term, err := terminalOf(tty, tty)
	if err != nil {
		t.Fatal(err)
	}
	if size := term.size(); size.Rows != 33 || size.Cols != 77 {
		t.Errorf("the size is %+v", size)
	}
	restore, err := term.raw()
	if err != nil {
		t.Fatal(err)
	}
	if echoes(t, tty) {
		t.Error("a raw terminal echoes")
	}
	restore()
	if !echoes(t, tty) {
		t.Error("the terminal stays raw")
	}

	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	sizes := make(chan apitype.ResizeRequest)
	defer onResize(ctx, func() { sizes <- term.size() })()
	setSize(t, tty, 40, 100)
	if err := syscall.Kill(os.Getpid(), syscall.SIGWINCH); err != nil {
		t.Fatal(err)
	}
	if size := <-sizes; size.Rows != 40 || size.Cols != 100 {
		t.Errorf("the new size is %+v", size)
	}
}

func TestNoTerminal(t *testing.T) {
	_, tty := openPTY(t)
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = null.Close() }()
	for name, tt := range map[string]struct {
		in  io.Reader
		out io.Writer
	}{
		"no file for input":      {strings.NewReader(""), tty},
		"no file for output":     {tty, io.Discard},
		"no terminal for input":  {null, tty},
		"no terminal for output": {tty, null},
	} {
		if _, err := terminalOf(tt.in, tt.out); err == nil || !strings.Contains(err.Error(), "needs a terminal") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestForwardSignals(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	sent, left := make(chan apitype.Signal), make(chan syscall.Signal)
	defer forwardSignals(ctx, func(s apitype.Signal) { sent <- s }, func(s syscall.Signal) { left <- s })()
	send := func(s syscall.Signal) {
		t.Helper()
		if err := syscall.Kill(os.Getpid(), s); err != nil {
			t.Fatal(err)
		}
	}
	for _, s := range []syscall.Signal{syscall.SIGUSR1, syscall.SIGUSR2, syscall.SIGHUP} {
		send(s)
		if got := <-sent; got != apitype.Signal(s) {
			t.Errorf("signal %d came as %d", s, got)
		}
	}
	// As often as it takes within a second.
	for {
		send(syscall.SIGUSR1)
		select {
		case s := <-left:
			if s != syscall.SIGUSR1 {
				t.Errorf("left with signal %d", s)
			}
			return
		case <-sent:
		}
	}
}

func TestDetachReader(t *testing.T) {
	for in, want := range map[string]struct {
		out      string
		detached bool
	}{
		"":               {"", false},
		"abc":            {"abc", false},
		"abc\x10\x11def": {"abc", true},
		"\x10\x11":       {"", true},
		"\x10":           {"\x10", false},
		"a\x10b\x11c":    {"a\x10b\x11c", false},
		"\x10\x10\x11":   {"\x10", true},
		"\x11\x10":       {"\x11\x10", false},
		"\x11":           {"\x11", false},
		"a\x10\x10b":     {"a\x10\x10b", false},
	} {
		for how, r := range map[string]io.Reader{
			"whole":               strings.NewReader(in),
			"byte by byte":        iotest.OneByteReader(strings.NewReader(in)),
			"data with the error": iotest.DataErrReader(strings.NewReader(in)),
			"half":                iotest.HalfReader(strings.NewReader(in)),
		} {
			var out bytes.Buffer
			_, err := io.Copy(&out, &detachReader{r: r})
			if out.String() != want.out || errors.Is(err, errDetached) != want.detached || err != nil && !want.detached {
				t.Errorf("%q %s: %q, %v", in, how, out.String(), err)
			}
		}
	}
}
