package docker

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/runtime"
)

// killTimeout is for the whole of it, the proof included.
const killTimeout = 5 * time.Second

// killScript runs in the container, as the command's own user. The engine can't
// kill an exec, and its process ids mean nothing outside of its host.
//
// It must never run with more privileges than the command had: the shell is the
// container's, and whoever owns the container may have written it. For the same
// reason its word is taken for the descendants only, which such an owner could hide
// in other ways too; that the command itself has ended is the engine's word.
//
//go:embed kill.sh
var killScript string

var errHidden = errors.New("some may have hidden where they come from")

// kill ends a command with all its descendants. Nil means that they are gone.
func (x *execution) kill(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), killTimeout)
	defer cancel()
	err := x.killTree(ctx)
	if err != nil && errdefs.IsFailedPrecondition(x.alive(ctx)) {
		return nil // all in the container is dead
	}
	return err
}

func (x *execution) killTree(ctx context.Context) error {
	// Wait for a start that is under way.
	if _, err := x.poll(ctx, func(st execState) bool { return st.Pid != 0 || st.over() }); err != nil {
		return err
	}
	err := x.script(ctx, "marked")
	if err != nil && !errors.Is(err, errHidden) {
		return err
	}
	soon, cancel := context.WithTimeout(ctx, killTimeout/5)
	defer cancel()
	if _, notOver := x.poll(soon, execState.over); notOver == nil {
		return err
	}
	// It has changed its own environment.
	if err := x.script(ctx, "root"); err != nil {
		return err
	}
	_, err = x.poll(ctx, execState.over)
	return err
}

// poll asks for the command's state until it is as wanted.
func (x *execution) poll(ctx context.Context, want func(execState) bool) (execState, error) {
	for delay := time.Millisecond; ; delay = min(2*delay, exitTick) {
		st, err := x.inspect(ctx)
		if err != nil || want(st) {
			return st, err
		}
		select {
		case <-ctx.Done():
			return st, errors.New("the engine says that it runs on")
		case <-time.After(delay):
		}
	}
}

// script runs the kill script in one of its modes.
func (x *execution) script(ctx context.Context, mode string) error {
	age := int(x.s.now().Sub(x.began)/time.Second) + 1
	y := x.r.newExecution(x.s, x.container, x.user)
	leave, err := x.r.gates.Enter(ctx, y.container, y.settled)
	if err != nil {
		return err
	}
	defer leave()
	err = y.start(ctx, runtime.Exec{
		Command:    []string{"/bin/sh", "-c", killScript, "sh", markerEnv + "=" + x.marker, strconv.Itoa(age), mode},
		WorkingDir: "/",
		User:       x.user,
	})
	if err != nil {
		return err
	}
	err = y.wait(ctx)
	y.drain()
	switch {
	case err != nil:
		return err
	case y.refusal != nil:
		return errors.New("the container has no /bin/sh that would run, or no room for another process")
	case y.result.ExitCode == 4:
		return errHidden
	case y.result.ExitCode != 0:
		return fmt.Errorf("some survived (code %d)", y.result.ExitCode)
	}
	return nil
}
