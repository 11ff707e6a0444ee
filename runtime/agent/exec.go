package agent

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/agent/wire"
)

// overtime is how long after the caller's deadline the program itself kills a command, in case
// Berm is gone.
const overtime = 15 * time.Second

const farAway = 365 * 24 * time.Hour // stands for no deadline

// Exec runs a command in a running container, to its end. The command isn't listed as a
// process. The program kills it if the connection breaks. Then the error is ErrInterrupted, and
// also ErrNotKilled if the command may still run.
//
// A Stdout or Stderr that blocks delays Exec without bound. A Stdin whose Read blocks only
// delays a goroutine, which outlives the call.
func (r *Runtime) Exec(ctx context.Context, id string, e runtime.Exec) (runtime.ExecResult, error) {
	res, err := r.exec(ctx, id, e)
	if err != nil {
		err = fmt.Errorf("run command in container %s: %w", id, err)
	}
	return res, err
}

// run is a command under way.
type run struct {
	*call
	output
	e       runtime.Exec
	begun   bool                  // the program has sent an Item or output
	deliver error                 // of Stdout or Stderr
	feeding context.Context       // of feed; ends with the command
	starved atomic.Pointer[error] // why there is no Stdin
}

var errBroken = errors.New("the connection to the container's agent broke")

func (r *Runtime) exec(ctx context.Context, id string, e runtime.Exec) (runtime.ExecResult, error) {
	x := &run{e: e, output: output{proc: runPrefix + rand.Text()}}
	start := &wire.Start{
		ID: x.proc, Command: e.Command, Env: e.Env, Dir: e.WorkingDir, Stdin: e.Stdin != nil,
		Exec: true, Follow: &wire.Follow{Lossless: true},
	}
	if deadline, ok := ctx.Deadline(); ok && time.Until(deadline) < farAway {
		start.TimeoutMS = (max(time.Until(deadline), 0) + overtime).Milliseconds()
	}
	if err := start.Check(); err != nil {
		return runtime.ExecResult{}, runtime.Invalid("%w", err)
	}
	b, err := r.container(ctx, id)
	if err != nil {
		return runtime.ExecResult{}, err
	}
	var stop context.CancelFunc
	x.feeding, stop = context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	x.call, err = b.open(ctx, id, e.User, &wire.Request{Op: wire.OpStart, Start: start}, true)
	if err == nil {
		err = x.wait(ctx)
	}
	if err != nil {
		return runtime.ExecResult{}, err
	}
	return runtime.ExecResult{
		ExitCode: x.info.ExitCode, OOMKilled: x.info.OOMKilled, CPUTime: x.info.CPUTime, PeakMemoryBytes: x.info.PeakMemoryBytes,
	}, nil
}

// wait follows the command to its end.
func (x *run) wait(ctx context.Context) error {
	err := x.follow()
	switch {
	case err == nil && x.e.Stdin == nil:
		x.done(false)
		return nil
	case err == nil:
		x.drop() // feed may set its deadline
		return nil
	case ctx.Err() != nil:
		return x.kill(ctx, runtime.Ended(ctx))
	case x.deliver != nil:
		return x.kill(ctx, fmt.Errorf("deliver output: %w", x.deliver))
	case x.starved.Load() != nil:
		return x.kill(ctx, fmt.Errorf("open its input: %w", *x.starved.Load()))
	}
	x.drop()
	switch {
	case !refused(err) || x.begun:
		return x.abandon(ctx)
	case errdefs.IsResourceExhausted(err):
		return fmt.Errorf("%w: %w", runtime.ErrNoRoom, err)
	}
	return err
}

// follow delivers output until the command has ended, or delivery fails.
func (x *run) follow() error {
	if x.e.Stdin != nil && !x.begun {
		if err := x.begin(x.call); err != nil {
			return err
		}
		x.begun = true
		go func() { _ = x.b.r.guard(x.feed) }()
	}
	for {
		chunk, err := x.read(x.call)
		switch {
		case errors.Is(err, errEnd):
			return nil
		case err != nil:
			return err
		}
		x.begun = true
		to := x.e.Stdout
		if chunk.Stderr {
			to = x.e.Stderr
		}
		if to == nil || x.deliver != nil {
			continue
		}
		if _, x.deliver = to.Write(chunk.Data); x.deliver != nil {
			return x.deliver
		}
	}
}

// feed copies Stdin to the command. It can't return before a Read of Stdin has.
func (x *run) feed() error {
	var in *input
	call, err := x.b.reach(x.feeding, x.id, x.s, &wire.Request{Op: wire.OpInput, Process: &wire.Process{ID: x.proc}})
	if err == nil {
		in, err = newInput(x.feeding, call, x.proc)
	}
	if err != nil {
		if !errdefs.IsFailedPrecondition(err) && !errdefs.IsNotFound(err) { // else it has ended
			x.starved.Store(&err)
			_ = x.nc.SetReadDeadline(past)
		}
		return err
	}
	closeInput := sync.OnceFunc(func() { _ = in.Close() })
	defer closeInput()
	defer context.AfterFunc(x.feeding, closeInput)()
	buf := buffers.Get().(*[wire.MaxData]byte)
	defer buffers.Put(buf)
	// Without WriterTo, which would bypass the buffer. CloseWrite returns the error of a Write.
	_, _ = io.CopyBuffer(struct{ io.Writer }{in}, struct{ io.Reader }{x.e.Stdin}, buf[:])
	return in.CloseWrite()
}

// notKilled adds to an error that processes may still run, without changing its class.
func notKilled(err, why error) error {
	return fmt.Errorf("%w; %w: %v", err, runtime.ErrNotKilled, why) //nolint:errorlint // why has a class of its own
}

// abandon kills a command whose connection broke. The program does so, too, once it notices.
func (x *run) abandon(ctx context.Context) error {
	why := x.killTree(ctx)
	switch {
	case why == nil:
		return runtime.Interrupted("out of reach")
	case errdefs.IsUnavailable(why):
		return notKilled(runtime.Unavailable(errBroken), why)
	}
	return notKilled(runtime.Interrupted("out of reach"), why)
}

// kill kills a command with all its descendants, and delivers the last of its output. It returns err,
// which says ErrNotKilled as well if some may still run.
func (x *run) kill(ctx context.Context, err error) error {
	x.release()
	defer x.drop()
	if !x.begun {
		x.drop() // if it hasn't been started by now, it won't be
	}
	if why := x.killTree(ctx); why != nil {
		return notKilled(err, why)
	}
	_ = x.nc.SetDeadline(time.Now().Add(x.b.r.pace.drain))
	if x.begun {
		_ = x.follow()
	}
	return err
}

// killTree makes the program kill the command, through another stream.
func (x *run) killTree(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), x.b.r.pace.kill)
	defer cancel()
	for {
		err := x.b.kill(ctx, x.id, x.s, x.proc)
		switch {
		case err == nil, errdefs.IsNotFound(err) && !errors.Is(err, errNoProcess): // the command, or its container
			return nil
		case errors.Is(err, runtime.ErrNotKilled):
			return err
		}
		c, err := x.b.inspect(ctx)
		switch {
		case errdefs.IsNotFound(err), err == nil && c.State != runtime.StateRunning && c.State != runtime.StatePaused:
			return nil // all in the container is dead
		case err == nil && c.State == runtime.StatePaused:
			return errors.New("the container is paused")
		}
		select {
		case <-ctx.Done():
			if errdefs.IsUnavailable(err) {
				return err
			}
			return errSilent
		case <-x.b.ctx.Done():
			return errClosed
		case <-time.After(20 * time.Millisecond):
		}
	}
}
