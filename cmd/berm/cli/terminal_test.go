package cli

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"strings"
	"syscall"
	"testing"
	"testing/iotest"

	"github.com/bermhq/berm/proxy/apitype"
	"github.com/bermhq/berm/runtime/runtimetest/pty"
)

func TestNoTerminal(t *testing.T) {
	_, tty := pty.Open(t)
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
