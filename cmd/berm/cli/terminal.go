package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/moby/term"

	"github.com/bermhq/berm/proxy/apitype"
)

// terminal is the caller's terminal.
type terminal struct {
	in, out uintptr // file descriptors
}

// terminalOf returns the terminal of an input and an output. It fails unless both are
// terminals.
func terminalOf(in io.Reader, out io.Writer) (*terminal, error) {
	inFD, ok := term.GetFdInfo(in)
	if !ok {
		return nil, errors.New("--tty needs a terminal as standard input")
	}
	outFD, ok := term.GetFdInfo(out)
	if !ok {
		return nil, errors.New("--tty needs a terminal as standard output")
	}
	return &terminal{inFD, outFD}, nil
}

// raw turns off line editing and signals of keys. Restore turns them on again.
func (t *terminal) raw() (restore func(), err error) {
	state, err := term.MakeRaw(t.in)
	if err != nil {
		return nil, fmt.Errorf("make the terminal raw: %w", err)
	}
	return func() { _ = term.RestoreTerminal(t.in, state) }, nil
}

// size is 0, 0 if the terminal doesn't know.
func (t *terminal) size() apitype.ResizeRequest {
	size, err := term.GetWinsize(t.out)
	if err != nil {
		return apitype.ResizeRequest{}
	}
	return apitype.ResizeRequest{Rows: int(size.Height), Cols: int(size.Width)}
}

// forwarded are the signals that go on to the command.
var forwarded = []os.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT, syscall.SIGUSR1, syscall.SIGUSR2}

// impatient is how often a signal has to come within a second to end this program.
const impatient = 3

// forwardSignals sends signals on until ctx ends. It calls leave for a signal that comes
// impatient times. The caller has to call stop.
func forwardSignals(ctx context.Context, send func(apitype.Signal), leave func(syscall.Signal)) (stop func()) {
	var last syscall.Signal
	var since time.Time
	count := 0
	return onSignals(ctx, forwarded, func(sig syscall.Signal) (more bool) {
		if sig != last || time.Since(since) > time.Second {
			last, since, count = sig, time.Now(), 0
		}
		if count++; count >= impatient {
			leave(sig)
			return false
		}
		send(apitype.Signal(sig))
		return true
	})
}

// onResize calls f whenever the terminal's size changes, until ctx ends. The caller has to
// call stop.
func onResize(ctx context.Context, f func()) (stop func()) {
	return onSignals(ctx, []os.Signal{syscall.SIGWINCH}, func(syscall.Signal) (more bool) { f(); return true })
}

// onSignals calls f for each signal, until f returns false or ctx ends. The caller has to call
// stop.
func onSignals(ctx context.Context, signals []os.Signal, f func(syscall.Signal) (more bool)) (stop func()) {
	came := make(chan os.Signal, 16)
	signal.Notify(came, signals...)
	go func() {
		for more := true; more; {
			select {
			case s := <-came:
				sig, _ := s.(syscall.Signal)
				more = f(sig)
			case <-ctx.Done():
				return
			}
		}
	}()
	return func() { signal.Stop(came) }
}

// detachKeys leave the process running: Ctrl-P Ctrl-Q, as Docker has it.
var detachKeys = []byte{'P' & 0x1f, 'Q' & 0x1f}

var errDetached = errors.New("detached")
