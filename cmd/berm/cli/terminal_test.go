package cli

import (
	"context"
	"io"
	"os"
	"strings"
	"syscall"
	"testing"

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
