package docker

import (
	"context"
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/pkg/stdcopy"

	"github.com/bermhq/berm/runtime"
)

var _ runtime.Starter = (*Runtime)(nil)

const (
	// stderrGrace is how long the last of a program's standard error may follow its end.
	stderrGrace = time.Second

	// endPatience is how long a program may take to end after its input has.
	endPatience = 20 * time.Second
)

// Start starts a program in a running container. Its working directory is "/": an OCI
// runtime that enters another one can be led out of the container (CVE-2024-21626).
func (r *Runtime) Start(ctx context.Context, id string, p runtime.Program) (runtime.Stdio, error) {
	op := "start program in container " + id
	if err := checkID(id); err != nil {
		return nil, fmt.Errorf("start program in container %q: %w", id, err)
	}
	if err := runtime.CheckProgram(p); err != nil {
		return nil, fmt.Errorf("%s: %w", op, err)
	}
	callCtx, cancel := context.WithTimeout(ctx, r.timeout)
	defer cancel()
	s, err := r.connect(callCtx)
	if err != nil {
		return nil, r.failure(ctx, nil, op, err)
	}
	started, err := r.startProgram(ctx, callCtx, s, id, p)
	if err != nil {
		r.forget(s, err)
		return nil, fmt.Errorf("%s: %w", op, err)
	}
	return started, nil
}

// startProgram starts a program. Its errors are classed.
func (r *Runtime) startProgram(ctx, callCtx context.Context, s *session, id string, p runtime.Program) (*stdio, error) {
	leave, err := r.gates.Enter(callCtx, id, func(ctx context.Context) error { // leaving settles it
		<-ctx.Done()
		return ctx.Err()
	})
	if err != nil {
		return nil, classify(ctx, err)
	}
	defer leave()
	made, err := s.ContainerExecCreate(callCtx, id, container.ExecOptions{
		User: p.User, WorkingDir: "/", Cmd: p.Command, AttachStdin: true, AttachStdout: true, AttachStderr: true,
	})
	if err != nil {
		return nil, classify(ctx, err)
	}
	// The engine may start it from here on, even if ctx ends. No pause may come in between.
	startCtx, cancel := r.linger(ctx)
	defer cancel()
	x := &execution{r: r, s: s, container: id, id: made.ID, began: s.now()}
	if x.conn, err = r.hijack(startCtx, s, made.ID); err != nil {
		return nil, x.notStarted(ctx, err)
	}
	st, err := x.poll(startCtx, func(st execState) bool { return st.Pid != 0 || st.over() })
	if err == nil && st.refused() {
		err = x.refusedProgram(ctx, startCtx, p.Command[0])
	} else if err == nil && ctx.Err() != nil {
		err = runtime.Ended(ctx)
	}
	if err != nil {
		_ = x.conn.Close() // and so its input ends
		return nil, classify(ctx, err)
	}
	return newStdio(x), nil
}

// notStarted is the error of an exec whose start the engine didn't accept.
func (x *execution) notStarted(ctx context.Context, err error) error {
	// The engine answers 500 if the container ended after the exec was created.
	if errdefs.IsInternal(err) && errdefs.IsFailedPrecondition(x.alive(ctx)) {
		return runtime.Precondition("the container isn't running")
	}
	return classify(ctx, err)
}

// refusedProgram is the error of a program that the engine couldn't start. The engine's
// words come as the program's output would.
func (x *execution) refusedProgram(ctx, startCtx context.Context, program string) error {
	stop := context.AfterFunc(startCtx, func() { _ = x.conn.Close() })
	defer stop()
	var said runtime.Head
	_, _ = stdcopy.StdCopy(&said, &said, io.LimitReader(x.conn, maxRefusal))
	switch {
	case errdefs.IsFailedPrecondition(x.alive(ctx)):
		return runtime.Precondition("the container isn't running")
	case runtime.BlamesProgram(said.String(), program):
		return runtime.WithClass(errdefs.ErrNotFound, fmt.Errorf("the container has no program %s that can be executed", program))
	}
	return x.noRoom(ctx)
}

// stdio is a runtime.Stdio on the connection of an exec.
type stdio struct {
	x       *execution
	writing sync.Mutex
	out     *io.PipeReader
	stderr  runtime.Head
	copied  chan struct{} // closed when no more output comes
}

func newStdio(x *execution) *stdio {
	out, in := io.Pipe()
	s := &stdio{x: x, out: out, copied: make(chan struct{})}
	go func() {
		defer close(s.copied)
		_, err := stdcopy.StdCopy(unread{in}, &s.stderr, x.conn)
		_ = in.CloseWithError(err)
	}()
	return s
}

// unread drops what is written once nobody reads the pipe.
type unread struct{ *io.PipeWriter }

func (w unread) Write(p []byte) (int, error) {
	_, _ = w.PipeWriter.Write(p) // it fails only then
	return len(p), nil
}

// Read reads the program's standard output.
func (s *stdio) Read(p []byte) (int, error) { return s.out.Read(p) }

// Write writes to the program's standard input.
func (s *stdio) Write(p []byte) (int, error) {
	s.writing.Lock()
	defer s.writing.Unlock()
	return s.x.conn.Write(p)
}

// Close ends the program's input and drops its output. The connection outlives that, or
// the engine would forget how the program ended.
func (s *stdio) Close() error {
	_ = s.out.Close()
	if !s.writing.TryLock() { // what is being written, the program may never read
		return s.x.conn.Close()
	}
	defer s.writing.Unlock()
	if s.x.conn.closeWrite() != nil {
		return s.x.conn.Close()
	}
	go func() {
		select {
		case <-s.copied:
		case <-time.After(endPatience):
		}
		_ = s.x.conn.Close()
	}()
	return nil
}

// waitTick is how often the engine is asked at least whether a program has ended.
const waitTick = 4 * time.Second

// Wait waits for the program's end, and returns how it ended.
func (s *stdio) Wait(ctx context.Context) (int, string, error) {
	st, err := s.end(ctx)
	if err != nil {
		return 0, s.stderr.String(), fmt.Errorf("wait for program in container %s: %w", s.x.container, err)
	}
	select {
	case <-s.copied:
	case <-ctx.Done():
	case <-time.After(stderrGrace):
	}
	return st.ExitCode, s.stderr.String(), nil
}

// end asks the engine until the program has ended: more often once its output has.
func (s *stdio) end(ctx context.Context) (execState, error) {
	copied := s.copied
	for delay := 10 * time.Millisecond; ; delay = min(2*delay, waitTick) {
		st, err := s.x.inspect(ctx)
		switch {
		case errdefs.IsNotFound(err):
			return st, interrupted("removed")
		case err != nil || st.over():
			return st, err
		}
		// The engine may never learn of the ends of a dead container's programs.
		if err := s.x.alive(ctx); err != nil {
			return st, err
		}
		select {
		case <-ctx.Done():
			return st, runtime.Ended(ctx)
		case <-copied:
			copied, delay = nil, time.Millisecond
		case <-time.After(delay):
		}
	}
}
