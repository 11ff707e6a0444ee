package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/agent/wire"
)

const serveTime = 15 * time.Second // for the engine to start the program

// Exit codes of a program that isn't there, can't be run, or is too old to serve.
var unserved = map[int]bool{2: true, 126: true, 127: true}

// served is the program, started by the engine beside what is in the container, with a
// connection to it in place of its input and output.
type served struct {
	mine   net.Conn
	leave  time.Duration // for it to end by itself
	ending sync.Once
	ctx    context.Context    // ends with it
	cancel context.CancelFunc // kills it with its descendants
	done   chan struct{}      // closed when it has ended
	code   int                // with done
	err    error              // with done
}

// end hangs up. Then it ends by itself; one that doesn't, as it was stopped, is killed.
func (s *served) end() {
	s.ending.Do(func() {
		_ = s.mine.Close()
		timer := time.AfterFunc(s.leave, s.cancel)
		context.AfterFunc(s.ctx, func() { timer.Stop() })
	})
}

// serve starts the program in a container.
func (r *Runtime) serve(ctx context.Context, id string) (*conn, error) {
	mine, its := net.Pipe()
	execCtx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	s := &served{mine: mine, leave: r.pace.leave, ctx: execCtx, cancel: cancel, done: make(chan struct{})}
	r.mu.Lock()
	if r.closed {
		r.mu.Unlock()
		cancel()
		return nil, errClosed
	}
	r.served[s] = struct{}{}
	r.tasks.Go(func() {
		defer func() {
			close(s.done)
			r.mu.Lock()
			defer r.mu.Unlock()
			delete(r.served, s)
		}()
		defer cancel()
		res, err := r.Engine.Exec(execCtx, id, runtime.Exec{Command: []string{runtime.AgentProgram, "serve"}, Stdin: its, Stdout: its})
		s.code, s.err = res.ExitCode, err
		_ = its.Close()
	})
	r.mu.Unlock()

	c := newConn(mine)
	c.served = s
	stop := context.AfterFunc(ctx, func() { _ = mine.Close() })
	err := c.greet(serveTime)
	if stop() && err == nil {
		return c, nil
	}
	s.end()
	if ctx.Err() != nil {
		return nil, runtime.Ended(ctx)
	}
	select {
	case <-s.done:
	case <-time.After(s.leave):
		cancel()
		return nil, runtime.Precondition("the container's agent doesn't answer: %w", err)
	}
	switch {
	case s.err != nil:
		return nil, s.err
	case unserved[s.code]:
		return nil, runtime.WithClass(errdefs.ErrNotImplemented, errors.New("the container has no agent, or one that is too old"))
	}
	return nil, runtime.Precondition("the container's agent ended with code %d: %w", s.code, err)
}

// openServed is open by way of the engine.
func (r *Runtime) openServed(ctx context.Context, b *box, id string, req *wire.Request) (*call, error) {
	request, err := json.Marshal(req)
	if err != nil {
		return nil, err
	}
	c, err := r.serve(ctx, id)
	if err != nil {
		return nil, err
	}
	x, err := b.begin(ctx, id, c, request)
	var failure *wire.Failure
	switch {
	case errors.As(err, &failure):
		return nil, failed(failure)
	case errors.Is(err, errDead), errors.Is(err, errSilent):
		return nil, runtime.Precondition("the container's agent: %w", err)
	case err != nil:
		return nil, fmt.Errorf("begin: %w", err)
	}
	return x, nil
}
