// Package program runs the program under test beside the tests.
package program

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// Output gathers what a process says, and lets a test wait for it.
type Output struct {
	mu   sync.Mutex
	all  string
	seen int           // of all, up to the end of what was last waited for
	more chan struct{} // has an element if there is more than there was
}

// NewOutput makes one.
func NewOutput() *Output { return &Output{more: make(chan struct{}, 1)} }

func (o *Output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.all += string(p)
	select {
	case o.more <- struct{}{}:
	default:
	}
	return len(p), nil
}

func (o *Output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.all
}

// Wait returns once the text has been said since the last wait.
func (o *Output) Wait(t testing.TB, text string) {
	t.Helper()
	for timeout := time.After(time.Minute); ; {
		o.mu.Lock()
		at := strings.Index(o.all[o.seen:], text)
		if at >= 0 {
			o.seen += at + len(text)
		}
		o.mu.Unlock()
		if at >= 0 {
			return
		}
		select {
		case <-o.more:
		case <-timeout:
			t.Fatalf("it doesn't say %q:\n%s", text, o)
		}
	}
}

// Child is a program that runs beside a test.
type Child struct {
	*exec.Cmd
	Log   *Output       // both streams
	Ended chan struct{} // closed at its end
	err   error         // of the end
}

// Start runs a program, which ends with this process at the latest: its thread lives as long
// as the program does, as the signal of the parent's death comes when the thread that forked
// ends.
func Start(cmd *exec.Cmd, log *Output) (*Child, error) {
	p := &Child{Cmd: cmd, Log: log, Ended: make(chan struct{})}
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	started := make(chan error)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err == nil {
			p.err = cmd.Wait()
			close(p.Ended)
		}
	}()
	if err := <-started; err != nil {
		return nil, fmt.Errorf("start %s: %w", cmd.Path, err)
	}
	return p, nil
}

// Wait waits for the end, and returns what is wrong with it.
func (p *Child) Wait() error {
	<-p.Ended
	return p.err
}

// Kill ends the process as a crash would.
func (p *Child) Kill() {
	_ = p.Process.Kill() // fails if it has ended
	<-p.Ended
}

// Stop ends the process as an operator would, and kills it if that takes too long.
func (p *Child) Stop() error {
	_ = p.Process.Signal(syscall.SIGTERM) // fails if it has ended
	select {
	case <-p.Ended:
	case <-time.After(45 * time.Second): // more than what is in flight has
		p.Kill()
	}
	return p.err
}

// Ready asks again and again, until the answer is yes or the process or ctx ends.
func (p *Child) Ready(ctx context.Context, ready func() bool) error {
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for !ready() {
		select {
		case <-tick.C:
		case <-p.Ended:
			return errors.New("it ended while it started")
		case <-ctx.Done():
			return fmt.Errorf("it didn't get ready: %w", ctx.Err())
		}
	}
	return nil
}
