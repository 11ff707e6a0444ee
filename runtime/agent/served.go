package agent

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/agent/wire"
)

const (
	serveTime = 15 * time.Second // for a program that the engine starts, until it says Hello
	maxServed = 16               // sessions by stdio in a container
)

// served has the fields of a session whose program the engine started. The session ends once it has no
// operations and no processes. Its program then kills all that it started. If it may have failed to, a
// second program does.
type served struct {
	id    string // the container's
	user  string
	stdio runtime.Stdio

	// Guarded by the container's mu.
	uses   int // operations under way
	linger *time.Timer
	silent bool // the program doesn't react

	over chan struct{} // closed when the program and its processes are gone, or can't be killed
	err  error         // why some may still run; set before over is closed
}

// servedKey identifies a session by its container and user.
type servedKey struct {
	id, user string
}

// serve returns the session of a user, and starts the program if there is none. The caller
// must release the session.
func (b *container) serve(ctx context.Context, id, user string) (*session, error) {
	unlock, err := b.r.serving.Lock(ctx, servedKey{id, user})
	if err != nil {
		return nil, runtime.Ended(ctx)
	}
	defer unlock()
	if s := b.join(user); s != nil {
		return s, nil
	}
	s, err := b.startServe(ctx, id, user)
	if err != nil {
		return nil, err
	}
	b.mu.Lock()
	switch {
	case len(b.served) >= maxServed:
		err = runtime.WithClass(errdefs.ErrResourceExhausted, fmt.Errorf("commands of %d users run in the container, and no more may", maxServed))
	case b.taskLocked(s.finish):
		b.served[user] = s
	default:
		err = errGone
	}
	b.mu.Unlock()
	if err != nil {
		s.hangUp()
		s.finish()
		return nil, err
	}
	return s, nil
}

// errGone is the error for a container that was removed, or whose Runtime was closed.
var errGone = runtime.Unavailable(errors.New("the container is gone, or this client of the engine is closed"))

// startProgram makes the engine start a program, unless the container is paused. The backend
// allows no pause while it starts one.
func (b *container) startProgram(ctx context.Context, id string, p runtime.Program) (runtime.Stdio, error) {
	if err := b.excuse(ctx); err != nil {
		return nil, err
	}
	return b.r.Engine.Start(ctx, id, p)
}

// join returns the session of a user, or nil. The caller must release the session.
func (b *container) join(user string) *session {
	b.mu.Lock()
	defer b.mu.Unlock()
	s := b.served[user]
	if s != nil {
		s.useLocked()
	}
	return s
}

// use begins a use of a session, which release ends.
func (s *session) use() {
	if s.served != nil {
		s.b.mu.Lock()
		defer s.b.mu.Unlock()
		s.useLocked()
	}
}

func (s *session) useLocked() {
	s.served.uses++
	if s.served.linger != nil {
		s.served.linger.Stop()
		s.served.linger = nil
	}
}

// release ends a use of a session. One that was dialled ends.
func (s *session) release() {
	s.b.mu.Lock()
	defer s.b.mu.Unlock()
	if s.served == nil {
		s.hangUp()
		delete(s.b.used, s)
		return
	}
	s.served.uses--
	s.lingerLocked()
}

// lingerLocked ends an unused session after pace.linger, unless it is used by then.
func (s *session) lingerLocked() {
	x := s.served
	if x.uses > 0 || s.ownsLocked() || s.b.served[x.user] != s || x.linger != nil {
		return
	}
	x.linger = time.AfterFunc(s.b.r.pace.linger, func() {
		s.b.mu.Lock()
		defer s.b.mu.Unlock()
		if x.uses == 0 && !s.ownsLocked() {
			s.endLocked()
		}
	})
}

// ownsLocked reports whether a session has processes that weren't forgotten.
func (s *session) ownsLocked() bool {
	return slices.Contains(slices.Collect(maps.Values(s.b.owners)), s)
}

// end ends a session: no operation begins on it any more.
func (s *session) end() {
	s.b.mu.Lock()
	defer s.b.mu.Unlock()
	s.endLocked()
}

func (s *session) endLocked() {
	if s.b.served[s.served.user] == s {
		delete(s.b.served, s.served.user)
	}
	s.hangUp()
}

// fail ends a session whose program doesn't react, and waits until its processes are gone.
// The error says why some may still run.
func (s *session) fail() error {
	s.silence()
	<-s.served.over // finish bounds it
	return s.served.err
}

// silence ends a session whose program doesn't react.
func (s *session) silence() {
	s.b.mu.Lock()
	defer s.b.mu.Unlock()
	s.served.silent = true
	s.endLocked()
}

// errNoProgram is the error for a container that was made without the program.
var errNoProgram = runtime.WithClass(errdefs.ErrNotImplemented, errors.New("the container has no agent; recreate it"))

// startServe starts the program, and reads its Hello.
func (b *container) startServe(ctx context.Context, id, user string) (*session, error) {
	stdio, err := b.startProgram(ctx, id, runtime.Program{Command: []string{runtime.AgentProgram, "serve"}, User: user})
	if errdefs.IsNotFound(err) {
		if _, gone := b.inspect(ctx); gone == nil { // the container is there, so the program is missing
			err = errNoProgram
		}
	}
	if err != nil {
		return nil, err
	}
	s := &session{b: b, carrier: stdio, served: &served{id: id, user: user, stdio: stdio, uses: 1, over: make(chan struct{})}}
	stop := context.AfterFunc(ctx, s.hangUp)
	err = b.r.guard(func() error { return s.greet(serveTime) })
	if stop() && err == nil {
		return s, nil
	}
	s.hangUp()
	if ctx.Err() != nil {
		return nil, runtime.Ended(ctx)
	}
	ctx, cancel := context.WithTimeout(ctx, b.r.pace.leave)
	defer cancel()
	code, stderr, werr := stdio.Wait(ctx)
	switch {
	case errdefs.IsFailedPrecondition(err): // errOutdated
		return nil, err
	case werr != nil:
		return nil, runtime.Precondition("the container's agent doesn't answer: %w", errors.Join(err, werr))
	case code == wire.ExitNoThread && strings.Contains(stderr, wire.NoThread):
		return nil, runtime.ErrNoRoom
	case code == 126 || code == 127 || code == 2:
		return nil, errNoProgram
	}
	return nil, runtime.Precondition("the container's agent ended with code %d: %.200q", code, stderr)
}

// finish waits for a session to end, and kills what its program leaves.
func (s *session) finish() {
	b := s.b
	_ = b.r.guard(func() error { s.watch(); return nil })
	x := s.served
	b.mu.Lock()
	s.endLocked()
	leave := b.r.pace.leave
	if x.silent {
		leave = b.r.pace.drain
	}
	b.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), leave)
	code, _, err := x.stdio.Wait(ctx)
	cancel()
	if err != nil || code != 0 { // else it has killed all that it started
		x.err = b.r.guard(s.killServe)
	}
	if x.err != nil {
		b.r.log.Error("agent_not_killed", "container_id", x.id, "user", x.user, "error", x.err)
	}
	close(x.over)
	b.mu.Lock()
	defer b.mu.Unlock()
	maps.DeleteFunc(b.owners, func(_ string, owner *session) bool { return owner == s })
}

// watch returns when the session ends. It ends one whose program doesn't answer pings.
func (s *session) watch() {
	b := s.b
	ticks := time.NewTicker(b.r.pace.ping)
	defer ticks.Stop()
	for {
		select {
		case <-s.mux.CloseChan():
			return
		case <-ticks.C:
		}
		answered := make(chan struct{})
		b.r.tasks.Go(func() {
			defer close(answered)
			_ = b.r.guard(func() error { _, err := s.mux.Ping(); return err }) // Ping gives up after pace.ready
		})
		select {
		case <-answered:
			continue
		case <-s.mux.CloseChan():
			return
		case <-time.After(b.r.pace.pong):
		}
		if !s.paused() {
			b.r.log.Warn("agent_silent", "container_id", s.served.id, "user", s.served.user)
			s.silence()
		}
	}
}

// killServe starts a second program that kills a session's program and all its descendants.
func (s *session) killServe() error {
	b, x := s.b, s.served
	ctx, cancel := context.WithTimeout(context.Background(), b.r.pace.kill)
	defer cancel()
	stdio, err := b.startProgram(ctx, x.id, runtime.Program{
		Command: []string{runtime.AgentProgram, "kill", strconv.Itoa(s.hello.PID), strconv.FormatUint(s.hello.Begun, 10)}, User: x.user,
	})
	code, stderr := 0, ""
	if err == nil {
		defer func() { _ = stdio.Close() }()
		code, stderr, err = stdio.Wait(ctx)
	}
	if err == nil && code == 0 {
		return nil
	}
	if c, ierr := b.r.Inspect(ctx, x.id); errdefs.IsNotFound(ierr) || ierr == nil && c.State != runtime.StateRunning && c.State != runtime.StatePaused {
		return nil // all in the container is dead
	}
	if err == nil {
		err = fmt.Errorf("%.200q", stderr)
	}
	return err
}
