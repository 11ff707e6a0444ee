package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/agent/wire"
)

// Bounds of a program's reports of processes.
const (
	maxListed  = 1024
	maxCommand = 4 << 10 // bytes, and a separator for each argument
)

func wireStart(p runtime.Process) *wire.Start {
	start := &wire.Start{
		ID: p.ID, Label: p.Label, Command: p.Command, Env: p.Env, Dir: p.WorkingDir, Stdin: p.Stdin,
		TTY: p.TTY, Rows: p.Rows, Cols: p.Cols, Once: p.Once, KeepBytes: p.KeepBytes,
	}
	if p.Follow != nil {
		start.Follow = wireFollow(*p.Follow)
	}
	if start.TimeoutMS = p.Timeout.Milliseconds(); p.Timeout > 0 {
		start.TimeoutMS = max(start.TimeoutMS, 1)
	} else if p.Timeout < 0 {
		start.TimeoutMS = -1
	}
	return start
}

// plausible reports whether a program's report of a process can be true. It bounds every
// number.
func plausible(p *wire.ProcessInfo) bool {
	size := 0
	for _, arg := range p.Command {
		size += len(arg) + 1
	}
	return size <= maxCommand+1 && p.PID >= 0 && p.PID <= maxID && p.ExitCode >= 0 && p.ExitCode <= 255 && p.Signal >= 0 && p.Signal <= wire.MaxSignal && len(p.Label) <= wire.MaxLabel &&
		bounded(p.CPUTime, p.PeakMemoryBytes, p.FirstSeq, p.NextSeq) && p.FirstSeq <= p.NextSeq && p.StartedAt >= 0 && p.EndedAt >= 0
}

// bounded reports whether numbers are from 0 to wire.MaxNumber.
func bounded(numbers ...int64) bool {
	return !slices.ContainsFunc(numbers, func(n int64) bool { return n < 0 || n > wire.MaxNumber })
}

// process decodes the program's report of the process with an ID, or of any process if id is
// empty.
func (s *session) process(payload []byte, id string) (runtime.ProcessInfo, error) {
	info, err := parseProcess(payload, id)
	info.User = fmt.Sprintf("%d:%d", s.hello.UID, s.hello.GID)
	return info, err
}

func parseProcess(payload []byte, id string) (runtime.ProcessInfo, error) {
	var p wire.ProcessInfo
	if err := wire.Decode(payload, &p); err != nil {
		return runtime.ProcessInfo{}, err
	}
	if !plausible(&p) || id != "" && p.ID != id || wire.CheckID(p.ID) != nil {
		return runtime.ProcessInfo{}, fmt.Errorf("%w: what a process is", wire.ErrProtocol)
	}
	return runtime.ProcessInfo{
		ID: p.ID, Label: p.Label, Command: p.Command, PID: p.PID, Running: p.Running, TTY: p.TTY,
		StartedAt: fromNanoseconds(p.StartedAt), EndedAt: fromNanoseconds(p.EndedAt),
		ExitCode: p.ExitCode, Signal: p.Signal, TimedOut: p.TimedOut, Killed: p.Killed, OOMKilled: p.OOMKilled, NotKilled: p.NotKilled,
		CPUTime: time.Duration(p.CPUTime), PeakMemoryBytes: p.PeakMemoryBytes, FirstSeq: p.FirstSeq, NextSeq: p.NextSeq,
	}, nil
}

func fromNanoseconds(n int64) time.Time {
	if n == 0 {
		return time.Time{}
	}
	return time.Unix(0, n).UTC()
}

// about adds to an error which operation on which process failed.
func about(what, id, process string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s process %q in container %s: %w", what, process, id, err)
}

// errNoProcess is the error for a process that no program has.
var errNoProcess = runtime.WithClass(errdefs.ErrNotFound, errors.New("there is no such process"))

// owner returns the served session of a process, or nil if it has none.
func (b *container) owner(process string) *session {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.owners[process]
}

// reach begins an operation on a process, on a session with the program that started it. Other
// programs don't know the process.
func (r *Runtime) reach(ctx context.Context, id string, req *wire.Request) (*call, error) {
	b, err := r.container(ctx, id)
	if err != nil {
		return nil, err
	}
	return b.reach(ctx, id, b.owner(req.Process.ID), req)
}

// reach begins an operation on a process of a session. A nil s stands for a dialled session.
func (b *container) reach(ctx context.Context, id string, s *session, req *wire.Request) (*call, error) {
	if s != nil && s.served != nil {
		s.use()
		x, err := b.begin(ctx, id, s, req)
		if errors.Is(err, errDead) || errors.Is(err, errSilent) {
			err = b.lost(ctx, s, err)
		}
		return x, err
	}
	if b.socketless() {
		return nil, errNoProcess
	}
	return b.start(ctx, id, req, b.take)
}

// lost waits until the processes of a session are gone. The session has ended, or its program is
// silent. The error says what became of its processes.
func (b *container) lost(ctx context.Context, s *session, err error) error {
	if errors.Is(err, errSilent) && !b.runs(ctx) {
		return cmp.Or(b.excuse(ctx), errLost) // it is paused, or was
	}
	if why := s.fail(); why != nil {
		return notKilled(runtime.Interrupted("out of reach"), why)
	}
	return errVanished
}

// errVanished is the error for a process whose session has ended, and that is gone.
var errVanished = runtime.Interrupted("lost")

// Start starts a process. If its session is served by a program that the engine started, the
// process ends with this Runtime.
func (r *Runtime) Start(ctx context.Context, id string, p runtime.Process) (runtime.ProcessInfo, runtime.Follower, error) {
	info, f, err := r.start(ctx, id, p)
	if err != nil || f == nil { // a nil *follower would be a non-nil Follower
		return info, nil, about("start", id, p.ID, err)
	}
	return info, f, nil
}

func (r *Runtime) start(ctx context.Context, id string, p runtime.Process) (runtime.ProcessInfo, *follower, error) {
	if strings.HasPrefix(p.ID, runPrefix) {
		return runtime.ProcessInfo{}, nil, runtime.Invalid("the process ID %.200q begins with %q", p.ID, runPrefix)
	}
	start := wireStart(p)
	if err := start.Check(); err != nil {
		return runtime.ProcessInfo{}, nil, runtime.Invalid("%w", err)
	}
	b, err := r.container(ctx, id)
	if err != nil {
		return runtime.ProcessInfo{}, nil, err
	}
	unlock, err := r.naming.Lock(ctx, servedKey{id, p.ID})
	if err != nil {
		return runtime.ProcessInfo{}, nil, runtime.Ended(ctx)
	}
	defer unlock()
	if p.User != "" || b.hasServed() { // else the program refuses an ID that it knows
		switch _, err := r.Process(ctx, id, p.ID); {
		case err == nil:
			return runtime.ProcessInfo{}, nil, runtime.WithClass(errdefs.ErrAlreadyExists, errors.New("there is one of this ID; forget it first"))
		case !errdefs.IsNotFound(err):
			return runtime.ProcessInfo{}, nil, err
		}
	}
	x, err := b.open(ctx, id, p.User, &wire.Request{Op: wire.OpStart, Start: start}, false)
	if err != nil {
		return runtime.ProcessInfo{}, nil, err
	}
	s := x.s
	b.own(s, p.ID)
	var info runtime.ProcessInfo
	var f *follower
	if p.Follow == nil {
		info, err = x.only(p.ID)
	} else {
		how := *p.Follow
		how.From = 0
		f, info, err = r.newFollower(ctx, x, id, p.ID, how)
	}
	if err != nil {
		b.disown(p.ID)
	}
	return info, f, err
}

// own records that a process belongs to a session, if that is a served one.
func (b *container) own(s *session, process string) {
	if s.served == nil {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.owners[process] = s
	for e := range b.events {
		b.taskLocked(func() { e.watch(s) })
	}
}

// disown forgets the session of a process.
func (b *container) disown(process string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if s := b.owners[process]; s != nil {
		delete(b.owners, process)
		s.lingerLocked()
	}
}

// process waits for the program's report of a process, in a frame of a kind.
func (x *call) process(kind wire.Kind, id string) (runtime.ProcessInfo, error) {
	x.within(time.Now().Add(x.b.r.pace.answer))
	payload, err := x.expect(kind)
	if err != nil {
		return runtime.ProcessInfo{}, err
	}
	info, err := x.s.process(payload, id)
	if err != nil {
		return runtime.ProcessInfo{}, x.unexpected(err.Error())
	}
	x.within(time.Time{})
	return info, nil
}

// only is process for an operation whose only answer is the report.
func (x *call) only(id string) (runtime.ProcessInfo, error) {
	info, err := x.process(wire.KindResult, id)
	if err == nil {
		x.done(false)
	}
	return info, err
}

// Process returns what the program reports of a process.
func (r *Runtime) Process(ctx context.Context, id, process string) (runtime.ProcessInfo, error) {
	x, err := r.reach(ctx, id, &wire.Request{Op: wire.OpProcess, Process: &wire.Process{ID: process}})
	var info runtime.ProcessInfo
	if err == nil {
		info, err = x.only(process)
	}
	return info, about("look at", id, process, err)
}

// ListProcesses returns all processes.
func (r *Runtime) ListProcesses(ctx context.Context, id string) ([]runtime.ProcessInfo, error) {
	soon, cancel := context.WithTimeout(ctx, r.pace.answer)
	defer cancel()
	e, err := r.openEvents(soon, id)
	if err != nil {
		return nil, fmt.Errorf("list the processes of container %s: %w", id, err)
	}
	defer context.AfterFunc(soon, func() {
		if ctx.Err() != nil {
			e.end(fmt.Errorf("list the processes of container %s: %w", id, runtime.Ended(ctx)))
		}
		e.end(errLost)
	})()
	defer func() { _ = e.Close() }()
	return e.Next()
}

// serving returns the served sessions that have processes.
func (b *container) serving() []*session {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.DeleteFunc(slices.Collect(maps.Values(b.served)), func(s *session) bool { return !s.ownsLocked() })
}

// hasServed reports whether there is any process of a served session.
func (b *container) hasServed() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.owners) > 0
}

// control does an operation on a process that has no answer.
func (r *Runtime) control(ctx context.Context, what, id string, req *wire.Request) error {
	x, err := r.reach(ctx, id, req)
	if err == nil {
		x.within(time.Now().Add(r.pace.answer))
		err = x.result()
	}
	return about(what, id, req.Process.ID, err)
}

// Signal sends a signal to a process' group.
func (r *Runtime) Signal(ctx context.Context, id, process string, signal int) error {
	if err := wire.CheckSignal(signal); err != nil {
		return about("signal", id, process, runtime.Invalid("%w", err))
	}
	req := &wire.Request{Op: wire.OpSignal, Process: &wire.Process{ID: process, Signal: signal}}
	return r.control(ctx, "signal", id, req)
}

// Kill kills a process with all its descendants.
func (r *Runtime) Kill(ctx context.Context, id, process string) error {
	b, err := r.container(ctx, id)
	if err == nil {
		err = b.kill(ctx, id, b.owner(process), process)
	}
	return about("kill", id, process, err)
}

// kill kills a process; s is as in reach.
func (b *container) kill(ctx context.Context, id string, s *session, process string) error {
	x, err := b.reach(ctx, id, s, &wire.Request{Op: wire.OpKill, Process: &wire.Process{ID: process}})
	if err == nil {
		x.within(time.Now().Add(b.r.pace.answer))
		if err = x.result(); x.s.served != nil && errors.Is(err, runtime.ErrInterrupted) {
			err = b.lost(ctx, x.s, err)
		}
	}
	failure, refused := errors.AsType[*wire.Failure](err)
	switch {
	case errors.Is(err, errVanished):
		return nil
	case refused && failure.Class == wire.ClassNotKilled:
		return runtime.WithClass(errors.Join(errdefs.ErrInternal, runtime.ErrNotKilled), failure)
	}
	return err
}

// Resize sets the size of a process' terminal.
func (r *Runtime) Resize(ctx context.Context, id, process string, rows, cols int) error {
	if err := wire.CheckSize(rows, cols); err != nil {
		return about("resize the terminal of", id, process, runtime.Invalid("%w", err))
	}
	req := &wire.Request{Op: wire.OpResize, Process: &wire.Process{ID: process, Rows: rows, Cols: cols}}
	return r.control(ctx, "resize the terminal of", id, req)
}

// Forget drops a process that has ended, with its output.
func (r *Runtime) Forget(ctx context.Context, id, process string) error {
	err := r.control(ctx, "forget", id, &wire.Request{Op: wire.OpForget, Process: &wire.Process{ID: process}})
	if errdefs.IsNotFound(err) && errors.Is(err, errNoProcess) {
		return nil
	}
	if b := r.known(id); b != nil && err == nil {
		b.disown(process)
	}
	return err
}
