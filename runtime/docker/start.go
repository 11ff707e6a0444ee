package docker

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errhttp"
	"github.com/docker/docker/api/types"
	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/pkg/stdcopy"

	"github.com/bermhq/berm/runtime"
)

const (
	// stderrGrace is how long Wait waits for standard error after the program's end.
	stderrGrace = time.Second

	// endPatience is how long a program may take to end after its input has ended.
	endPatience = 20 * time.Second

	// startTick and waitTick are the longest intervals between two polls of the engine, for the start
	// and for the end of a program.
	startTick = 50 * time.Millisecond
	waitTick  = 4 * time.Second

	maxRefusal = 8 << 10 // bytes of the engine's error that are read
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
	x := &program{r: r, s: s, container: id}
	if err := x.start(ctx, callCtx, p); err != nil {
		r.forget(s, err)
		return nil, fmt.Errorf("%s: %w", op, err)
	}
	return newStdio(x), nil
}

// program is an exec of the engine. The errors of its methods are classed.
type program struct {
	r         *Runtime
	s         *session
	container string
	id        string
	conn      io.ReadWriteCloser
}

func (x *program) start(ctx, callCtx context.Context, p runtime.Program) error {
	// A start in a frozen cgroup would hang, with the container's lock held by the engine. So a
	// pause waits for this lock, too.
	unlock, err := x.r.starts.Lock(callCtx, x.container)
	if err != nil {
		return classify(ctx, callCtx.Err())
	}
	defer unlock()
	made, err := x.s.ContainerExecCreate(callCtx, x.container, container.ExecOptions{
		User: p.User, WorkingDir: "/", Cmd: p.Command, AttachStdin: true, AttachStdout: true, AttachStderr: true,
	})
	if err != nil {
		return classify(ctx, err)
	}
	x.id = made.ID
	// From here on the engine may start the program even if ctx ends.
	startCtx, cancel := runtime.Linger(ctx, x.r.timeout)
	defer cancel()
	if x.conn, err = x.attach(startCtx); err != nil {
		// The engine answers 500 if the container ended after the exec was created.
		if errdefs.IsInternal(err) && errdefs.IsFailedPrecondition(x.alive(ctx)) {
			return runtime.Precondition("the container isn't running")
		}
		return classify(ctx, err)
	}
	st, err := x.started(startCtx)
	if err == nil && st.refused() {
		err = x.refusal(ctx, startCtx, p.Command[0])
	} else if err == nil && ctx.Err() != nil {
		err = runtime.Ended(ctx)
	}
	if err != nil {
		_ = x.conn.Close() // ends the program's input
	}
	return classify(ctx, err)
}

// attach starts the exec, and takes over the connection. It doesn't use the client's function, which
// waits forever for a hung engine, and hides the status of a refusal.
func (x *program) attach(ctx context.Context) (io.ReadWriteCloser, error) {
	body, err := json.Marshal(container.ExecStartOptions{})
	if err != nil {
		return nil, fmt.Errorf("encode the start: %w", err)
	}
	u := x.r.url.JoinPath("v"+x.s.info.APIVersion, "exec", x.id, "start")
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, u.String(), bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Connection", "Upgrade")
	req.Header.Set("Upgrade", "tcp")
	resp, err := x.s.http.RoundTrip(req)
	if err != nil {
		return nil, err
	}
	if conn, ok := resp.Body.(io.ReadWriteCloser); ok && resp.StatusCode == http.StatusSwitchingProtocols {
		return conn, nil
	}
	defer func() { _ = resp.Body.Close() }()
	var refusal types.ErrorResponse
	if err := json.NewDecoder(io.LimitReader(resp.Body, maxRefusal)).Decode(&refusal); err != nil {
		refusal.Message = resp.Status
	}
	return nil, runtime.WithClass(errhttp.ToNative(resp.StatusCode), errors.New(refusal.Message))
}

// execState is the engine's state of an exec.
type execState struct{ container.ExecInspect }

// over reports whether the program has ended, or couldn't be started.
func (st execState) over() bool { return !st.Running && (st.Pid != 0 || st.ExitCode != 0) }

// refused reports whether the engine couldn't start the program. Until the engine has tried, the
// exit code is 0.
func (st execState) refused() bool { return !st.Running && st.Pid == 0 && st.ExitCode != 0 }

func (x *program) inspect(ctx context.Context) (execState, error) {
	callCtx, cancel := context.WithTimeout(ctx, x.r.timeout)
	defer cancel()
	res, err := x.s.ContainerExecInspect(callCtx, x.id)
	return execState{res}, classify(ctx, err)
}

// started waits until the engine has started the program, or failed to.
func (x *program) started(ctx context.Context) (execState, error) {
	for delay := time.Millisecond; ; delay = min(2*delay, startTick) {
		st, err := x.inspect(ctx)
		if err != nil || st.Pid != 0 || st.over() {
			return st, err
		}
		select {
		case <-ctx.Done():
			return st, ctx.Err()
		case <-time.After(delay):
		}
	}
}

// alive returns a FailedPrecondition if the container has ended or was removed.
func (x *program) alive(ctx context.Context) error {
	callCtx, cancel := context.WithTimeout(ctx, x.r.timeout)
	defer cancel()
	c, err := inspect(callCtx, x.s, x.container)
	switch {
	case errdefs.IsNotFound(err):
		return runtime.Interrupted("removed")
	case err != nil:
		return classify(ctx, err)
	case c.State != runtime.StateRunning && c.State != runtime.StatePaused:
		return runtime.Interrupted("dead")
	}
	return nil
}

// refusal returns the error of a program that the engine couldn't start. The engine sends its
// message in place of the program's output.
func (x *program) refusal(ctx, startCtx context.Context, path string) error {
	stop := context.AfterFunc(startCtx, func() { _ = x.conn.Close() })
	defer stop()
	var said runtime.Head
	_, _ = stdcopy.StdCopy(&said, &said, io.LimitReader(x.conn, maxRefusal))
	if errdefs.IsFailedPrecondition(x.alive(ctx)) {
		return runtime.Precondition("the container isn't running")
	}
	if runtime.BlamesProgram(said.String(), path) {
		return runtime.WithClass(errdefs.ErrNotFound, fmt.Errorf("the container has no program %s that can be executed", path))
	}
	callCtx, cancel := context.WithTimeout(ctx, x.r.timeout)
	defer cancel()
	if lacksFirst(callCtx, x.s, x.container) {
		return runtime.Precondition("the container isn't running any more")
	}
	return runtime.ErrNoRoom
}

// stdio is a runtime.Stdio on the connection of an exec.
type stdio struct {
	*program
	writing sync.Mutex
	out     *io.PipeReader
	stderr  runtime.Head
	copied  chan struct{} // closed when no more output comes
}

func newStdio(x *program) *stdio {
	out, in := io.Pipe()
	s := &stdio{program: x, out: out, copied: make(chan struct{})}
	go func() {
		defer close(s.copied)
		_ = in.CloseWithError(runtime.Guard(x.r.log, func() error {
			_, err := stdcopy.StdCopy(unread{in}, &s.stderr, x.conn)
			return err
		}))
	}()
	return s
}

// unread discards writes once the pipe's reader is closed.
type unread struct{ *io.PipeWriter }

func (w unread) Write(p []byte) (int, error) {
	_, _ = w.PipeWriter.Write(p) // fails only once the reader is closed
	return len(p), nil
}

// Read reads the program's standard output.
func (s *stdio) Read(p []byte) (int, error) { return s.out.Read(p) }

// Write writes to the program's standard input.
func (s *stdio) Write(p []byte) (int, error) {
	s.writing.Lock()
	defer s.writing.Unlock()
	return s.conn.Write(p)
}

// Close ends the program's input and drops its output. The connection stays open for up to
// endPatience, as the engine would otherwise forget how the program ended.
func (s *stdio) Close() error {
	_ = s.out.Close()
	half, ok := s.conn.(types.CloseWriter)
	if !ok || !s.writing.TryLock() { // a Write under way may wait forever
		return s.conn.Close()
	}
	defer s.writing.Unlock()
	if half.CloseWrite() != nil {
		return s.conn.Close()
	}
	go func() {
		select {
		case <-s.copied:
		case <-time.After(endPatience):
		}
		_ = s.conn.Close()
	}()
	return nil
}

// Wait waits for the program's end, and returns how it ended.
func (s *stdio) Wait(ctx context.Context) (int, string, error) {
	st, err := s.end(ctx)
	if err != nil {
		return 0, s.stderr.String(), fmt.Errorf("wait for program in container %s: %w", s.container, err)
	}
	select {
	case <-s.copied:
	case <-ctx.Done():
	case <-time.After(stderrGrace):
	}
	return st.ExitCode, s.stderr.String(), nil
}

// end polls the engine until the program has ended. It polls more often once the output has
// ended.
func (s *stdio) end(ctx context.Context) (execState, error) {
	copied := s.copied
	for delay := 10 * time.Millisecond; ; delay = min(2*delay, waitTick) {
		st, err := s.inspect(ctx)
		switch {
		case errdefs.IsNotFound(err):
			return st, runtime.Interrupted("removed")
		case err != nil || st.over():
			return st, err
		}
		// The engine may never learn of the ends of a dead container's programs.
		if err := s.alive(ctx); err != nil {
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
