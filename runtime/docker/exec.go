package docker

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"time"

	"github.com/containerd/errdefs"
	"github.com/docker/docker/api/types/container"
	"github.com/google/uuid"

	"github.com/bermhq/berm/runtime"
)

const (
	// markerEnv is set for each command, with a value of its own, and inherited by
	// its descendants: it is how they are told from other processes.
	markerEnv = "BERM_EXEC_ID"

	// exitTick is how often the engine is asked whether a command has ended while
	// its output is open.
	exitTick = 400 * time.Millisecond

	exitSIGKILL = 128 + 9
)

// Exec runs a command in a running container, to its end.
//
// OOMKilled means that the command ended with code 137 and that the kernel killed
// some process in the container for want of memory while it ran.
//
// Two things hold it up that it can't help: a Stdout or Stderr that blocks, and, in
// a goroutine that outlives the call, a Stdin whose Read does.
func (r *Runtime) Exec(ctx context.Context, id string, e runtime.Exec) (runtime.ExecResult, error) {
	op := "run command in container " + id
	if err := checkID(id); err != nil {
		return runtime.ExecResult{}, fmt.Errorf("run command in container %q: %w", id, err)
	}
	if err := runtime.CheckExec(e); err != nil {
		return runtime.ExecResult{}, fmt.Errorf("%s: %w", op, err)
	}
	connectCtx, cancel := context.WithTimeout(ctx, r.timeout)
	s, err := r.connect(connectCtx)
	cancel()
	if err != nil {
		return runtime.ExecResult{}, r.failure(ctx, nil, op, err)
	}
	res, err := r.exec(ctx, s, id, e)
	if err != nil {
		r.forget(s, err)
		return runtime.ExecResult{}, fmt.Errorf("%s: %w", op, err)
	}
	return res, nil
}

// execution is one command, from its start to its end. Its errors are classed.
type execution struct {
	r         *Runtime
	s         *session
	container string
	user      string
	marker    string
	id        string    // the engine's
	began     time.Time // on the engine's clock

	asked chan struct{} // closed when the engine has been asked to start it

	conn   *stream
	output *output
	read   chan struct{} // closed when no more output comes

	result  runtime.ExecResult
	refusal []byte // what the engine said if it could not start the process; else nil
}

// run starts a command and waits for its end, or for that of ctx and then kills it.
func (r *Runtime) run(ctx context.Context, s *session, id string, e runtime.Exec) (*execution, error) {
	x := r.newExecution(s, id, e.User)
	leave, err := r.gates.Enter(ctx, id, x.settled)
	if err != nil {
		return x, runtime.Ended(ctx)
	}
	defer leave()
	if err := x.start(ctx, e); err != nil {
		return x, err
	}
	err = x.wait(ctx)
	if err != nil && ctx.Err() != nil {
		err = runtime.Ended(ctx)
		if why := x.kill(ctx); why != nil {
			err = notKilled(err, why)
		}
	} else if errdefs.IsUnavailable(err) {
		err = notKilled(err, errors.New("the engine is gone"))
	}
	x.drain()
	if err == nil && x.output.err != nil {
		err = fmt.Errorf("deliver output: %w", x.output.err)
	}
	return x, err
}

func (r *Runtime) newExecution(s *session, container, user string) *execution {
	return &execution{
		r: r, s: s, container: container, user: user, marker: uuid.NewString(), began: s.now(),
		asked: make(chan struct{}),
	}
}

// notKilled adds to an error that processes may still run, without changing its class.
func notKilled(err, why error) error {
	return fmt.Errorf("%w; %w: %v", err, runtime.ErrNotKilled, why) //nolint:errorlint // why has a class of its own
}

// interrupted is the error of a command whose container ended under it.
func interrupted(how string) error {
	return runtime.WithClass(
		errors.Join(errdefs.ErrFailedPrecondition, runtime.ErrInterrupted),
		fmt.Errorf("%w: it is %s", runtime.ErrInterrupted, how),
	)
}

func (x *execution) start(ctx context.Context, e runtime.Exec) error {
	callCtx, cancel := context.WithTimeout(ctx, x.r.timeout)
	defer cancel()
	made, err := x.s.ContainerExecCreate(callCtx, x.container, container.ExecOptions{
		User:         e.User,
		AttachStdin:  e.Stdin != nil,
		AttachStdout: true,
		AttachStderr: true,
		Env:          slices.Concat(e.Env, []string{markerEnv + "=" + x.marker}),
		WorkingDir:   e.WorkingDir,
		Cmd:          e.Command,
	})
	if err != nil {
		return classify(ctx, err)
	}
	if ctx.Err() != nil {
		return runtime.Ended(ctx)
	}
	x.id = made.ID
	// From here on the command may run, so that the answer is waited for.
	startCtx, cancelStart := x.r.linger(ctx)
	defer cancelStart()
	if x.conn, err = x.r.hijack(startCtx, x.s, x.id); err != nil {
		// The engine answers 500 if the container ended after the exec was created.
		if errdefs.IsInternal(err) && errdefs.IsFailedPrecondition(x.alive(ctx)) {
			return runtime.Precondition("the container isn't running")
		}
		var dial *net.OpError
		if answered(err) || errors.As(err, &dial) && dial.Op == "dial" {
			return classify(ctx, err)
		}
		return notKilled(classify(ctx, err), err)
	}
	close(x.asked)
	x.output = &output{stdout: e.Stdout, stderr: e.Stderr, refused: func() bool {
		st, err := x.inspect(context.WithoutCancel(ctx))
		return err == nil && st.refused()
	}}
	x.read = make(chan struct{})
	go func() {
		defer close(x.read)
		x.output.copy(x.conn)
	}()
	if e.Stdin != nil {
		go func() {
			_, _ = io.Copy(x.conn, e.Stdin)
			_ = x.conn.closeWrite()
		}()
	}
	return nil
}

// wait waits for the command's end, and says how it ended.
func (x *execution) wait(ctx context.Context) error {
	tick := time.NewTicker(exitTick)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return runtime.Ended(ctx)
		case <-x.read:
			st, err := x.exit(ctx)
			if err != nil {
				return err
			}
			return x.conclude(ctx, st)
		case <-tick.C:
			// An engine that doesn't answer now may later; if it is gone, so is the stream.
			st, err := x.inspect(ctx)
			if err == nil && st.over() {
				x.drain()
				return x.conclude(ctx, st)
			}
			if errdefs.IsNotFound(err) {
				return interrupted("removed")
			}
		}
	}
}

// exit waits for the end of a command that has closed its output.
func (x *execution) exit(ctx context.Context) (execState, error) {
	for delay := time.Millisecond; ; delay = min(2*delay, exitTick) {
		st, err := x.inspect(ctx)
		switch {
		case errdefs.IsNotFound(err):
			return st, interrupted("removed")
		case err != nil || st.over():
			return st, err
		}
		if delay > 50*time.Millisecond {
			// The engine may never hear of the ends of a dead container's commands.
			if err := x.alive(ctx); err != nil {
				return st, err
			}
		}
		select {
		case <-ctx.Done():
			return st, runtime.Ended(ctx)
		case <-time.After(delay):
		}
	}
}

// conclude makes the result of a state that is over.
func (x *execution) conclude(ctx context.Context, st execState) error {
	x.result.ExitCode = st.ExitCode
	if st.refused() {
		x.refusal = x.output.held
		if x.refusal == nil {
			x.refusal = []byte{}
		}
		return nil
	}
	if st.ExitCode != exitSIGKILL {
		return nil
	}
	// Killed: by whom, it doesn't say.
	callCtx, cancel := context.WithTimeout(ctx, x.r.timeout)
	defer cancel()
	delay := fateDelay
	if lacksFirst(callCtx, x.s, x.container) {
		delay = max(fateDelay, min(fateDelayLate, x.r.timeout/2)) // which the call has
	}
	f, err := fateSince(callCtx, x.s, x.container, x.began, delay)
	if err != nil {
		return classify(ctx, err)
	}
	if f.died {
		return interrupted("dead")
	}
	x.result.OOMKilled = f.oom
	return x.alive(ctx)
}

// alive is a FailedPrecondition when the container isn't.
func (x *execution) alive(ctx context.Context) error {
	callCtx, cancel := context.WithTimeout(ctx, x.r.timeout)
	defer cancel()
	c, err := inspect(callCtx, x.s, x.container)
	switch {
	case errdefs.IsNotFound(err):
		return interrupted("removed")
	case err != nil:
		return classify(ctx, err)
	case c.State != runtime.StateRunning && c.State != runtime.StatePaused:
		return interrupted("dead")
	}
	return nil
}

// execState is what the engine knows of a command.
type execState struct{ container.ExecInspect }

// over tells whether it has ended, or never was.
func (st execState) over() bool { return !st.Running && (st.Pid != 0 || st.ExitCode != 0) }

// refused tells whether the engine couldn't start it. Just before its start, the
// exit code is 0 still.
func (st execState) refused() bool { return !st.Running && st.Pid == 0 && st.ExitCode != 0 }

// settled returns when the engine is done with starting the command.
func (x *execution) settled(ctx context.Context) error {
	select {
	case <-x.asked:
	case <-ctx.Done():
		return ctx.Err()
	}
	for delay := time.Millisecond; ; delay = min(2*delay, exitTick) {
		if st, err := x.inspect(ctx); err == nil && (st.Pid != 0 || st.over()) {
			return nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(delay):
		}
	}
}

func (x *execution) inspect(ctx context.Context) (execState, error) {
	callCtx, cancel := context.WithTimeout(ctx, x.r.timeout)
	defer cancel()
	res, err := x.s.ContainerExecInspect(callCtx, x.id)
	return execState{res}, classify(ctx, err)
}
