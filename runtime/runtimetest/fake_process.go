package runtimetest

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/agent/wire"
)

// fakeProcess is a process of a container. All its fields but the first ones, which
// don't change, belong to f.mu.
type fakeProcess struct {
	f      *Fake
	c      *fakeContainer
	ctx    context.Context
	cancel context.CancelCauseFunc
	spec   runtime.Process

	info      runtime.ProcessInfo
	err       error // ErrNotKilled, once it has ended
	gone      bool  // with its container
	out       *wire.Ring
	in        []byte
	inEnded   bool
	writer    *fakeInput
	followers map[*fakeFollower]bool
	ignored   []int         // signals
	changed   chan struct{} // closed and replaced when any of these does
}

var (
	errKilled = errors.New("killed")
	errTimed  = errors.New("timed out")
)

// signalled is why a process ends of a signal.
type signalled int

func (s signalled) Error() string { return fmt.Sprintf("signal %d", int(s)) }

const (
	fakeKeep = 64 << 10
	// Input that a process doesn't take, before its writer has to wait.
	fakeInputSize = 64 << 10
	fakeChunk     = 32 << 10

	fakeCPUTime = time.Millisecond
	fakePeak    = 1 << 20
)

// notify wakes whoever waits for the process; f.mu is held.
func (p *fakeProcess) notify() {
	close(p.changed)
	p.changed = make(chan struct{})
}

// inside is call for one in a container that runs.
func inside[T any](ctx context.Context, f *Fake, op, id string, work func(*fakeContainer) (T, error)) (T, error) {
	return call(ctx, f, op, id, func() (T, error) {
		c, err := f.running(op, id)
		if err != nil {
			return *new(T), err
		}
		return work(c)
	})
}

// running finds a container that runs; f.mu is held.
func (f *Fake) running(op, id string) (*fakeContainer, error) {
	c, err := f.find(id)
	if err == nil && c.info.State != runtime.StateRunning {
		err = fmt.Errorf("%s in %s, which is %s: %w", op, id, c.info.State, errdefs.ErrFailedPrecondition)
	}
	return c, err
}

// with is inside for one on a process.
func with[T any](ctx context.Context, f *Fake, op, id, process string, work func(*fakeProcess) (T, error)) (T, error) {
	return inside(ctx, f, op, id, func(c *fakeContainer) (T, error) {
		p := c.process(process)
		if p == nil {
			return *new(T), fmt.Errorf("process %q in %s: %w", process, id, errdefs.ErrNotFound)
		}
		return work(p)
	})
}

func (c *fakeContainer) process(id string) *fakeProcess {
	for _, p := range c.processes {
		if p.spec.ID == id {
			return p
		}
	}
	return nil
}

// Start implements runtime.Processes. The commands are those of Exec, with their
// process in a goroutine of its own until it ends, or its container does. "trap ” TERM",
// say, has a process of them ignore a signal.
func (f *Fake) Start(ctx context.Context, id string, spec runtime.Process) (runtime.ProcessInfo, runtime.Follower, error) {
	var follower *fakeFollower
	info, err := inside(ctx, f, "process_start", id, func(c *fakeContainer) (runtime.ProcessInfo, error) {
		p, err := f.start(c, spec)
		if err != nil {
			return runtime.ProcessInfo{}, fmt.Errorf("start process in %s: %w", id, err)
		}
		if spec.Follow != nil {
			how := *spec.Follow
			how.From = 0
			follower, err = p.follow(how) // of a new process
		}
		return p.tell(), err
	})
	switch {
	case follower == nil:
		return info, nil, err
	case err != nil:
		_ = follower.Close()
		return info, nil, err
	}
	return info, follower, nil
}

// start starts a process; f.mu is held.
func (f *Fake) start(c *fakeContainer, spec runtime.Process) (*fakeProcess, error) {
	asked := &wire.Start{
		ID: spec.ID, Label: spec.Label, Command: spec.Command, Env: spec.Env, Dir: spec.WorkingDir,
		Rows: spec.Rows, Cols: spec.Cols, KeepBytes: spec.KeepBytes, TimeoutMS: spec.Timeout.Milliseconds(),
	}
	if err := asked.Check(); err != nil {
		return nil, runtime.Invalid("%w", err)
	}
	if c.process(spec.ID) != nil {
		return nil, fmt.Errorf("process %q is there: %w", spec.ID, errdefs.ErrAlreadyExists)
	}
	spec.Command, spec.Env = slices.Clone(spec.Command), slices.Clone(spec.Env)
	p := &fakeProcess{
		f: f, c: c, spec: spec, changed: make(chan struct{}), inEnded: !spec.Stdin, followers: map[*fakeFollower]bool{},
		out: wire.NewRing(cmp.Or(spec.KeepBytes, fakeKeep)),
	}
	p.ctx, p.cancel = context.WithCancelCause(context.Background())
	c.pids++
	p.info = runtime.ProcessInfo{
		ID: spec.ID, Label: spec.Label, Command: spec.Command, PID: c.pids + 1, User: c.user(spec.User), Running: true, TTY: spec.TTY, StartedAt: time.Now(),
	}
	var timer *time.Timer
	if spec.Timeout > 0 {
		timer = time.AfterFunc(spec.Timeout, func() { p.cancel(errTimed) })
	}
	c.processes = append(c.processes, p)
	c.tellOf(p)
	info := c.info
	go func() {
		p.run(c, info)
		if timer != nil {
			timer.Stop()
		}
	}()
	return p, nil
}

// run runs a process to its end.
func (p *fakeProcess) run(c *fakeContainer, info runtime.Container) {
	e := runtime.Exec{Command: p.spec.Command, Env: p.spec.Env, WorkingDir: p.spec.WorkingDir, Stdin: fakeInputOf{p}}
	e.Stdout, e.Stderr = fakeOutputOf{p, false}, fakeOutputOf{p, !p.spec.TTY}
	if ignored, script, ok := parseTrap(p.spec.Command); ok {
		e.Command = []string{"sh", "-c", script}
		p.f.mu.Lock()
		p.ignored = ignored
		p.f.mu.Unlock()
	}
	result, err := p.f.run(p.ctx, c, info, e)
	p.f.mu.Lock()
	defer p.f.mu.Unlock()
	end := &p.info
	end.Running, end.EndedAt = false, time.Now()
	end.CPUTime, end.PeakMemoryBytes = fakeCPUTime, fakePeak
	end.ExitCode, end.OOMKilled = result.ExitCode, result.OOMKilled
	if errors.Is(err, runtime.ErrNotKilled) {
		p.err = err
	}
	var sig signalled
	switch cause := context.Cause(p.ctx); {
	case errors.Is(cause, errKilled):
		end.Killed, end.Signal = true, 9
	case errors.Is(cause, errTimed):
		end.TimedOut, end.Signal = true, 9
	case errors.As(cause, &sig):
		end.Signal = int(sig)
	}
	if end.Signal > 0 {
		end.ExitCode = 128 + end.Signal
	}
	p.cancel(nil)
	p.inEnded = true
	p.out.Flush()
	p.notify()
	c.tellOf(p)
}

// parseTrap takes a trap from the beginning of a script.
func parseTrap(argv []string) (ignored []int, script string, ok bool) {
	if len(argv) != 3 || argv[1] != "-c" {
		return nil, "", false
	}
	first, rest, _ := strings.Cut(argv[2], ";")
	fields := strings.Fields(first)
	if len(fields) < 3 || fields[0] != "trap" || fields[1] != "''" {
		return nil, "", false
	}
	numbers := map[string]int{"HUP": 1, "INT": 2, "QUIT": 3, "USR1": 10, "USR2": 12, "TERM": 15}
	for _, name := range fields[2:] {
		ignored = append(ignored, numbers[name])
	}
	return ignored, rest, true
}

// user is the "uid:gid" of a process.
func (c *fakeContainer) user(of string) string {
	user := cmp.Or(of, c.spec.User, "0:0")
	if user == "nobody" { // any other name is as it is
		user = "65534:65534"
	}
	if !strings.Contains(user, ":") {
		user += ":0"
	}
	return user
}

// tell is what is known now; f.mu is held.
func (p *fakeProcess) tell() runtime.ProcessInfo {
	out := p.info
	out.FirstSeq, out.NextSeq = p.out.Bounds()
	return out
}

// Process implements runtime.Processes.
func (f *Fake) Process(ctx context.Context, id, process string) (runtime.ProcessInfo, error) {
	return with(ctx, f, "process", id, process, func(p *fakeProcess) (runtime.ProcessInfo, error) { return p.tell(), nil })
}

// ListProcesses implements runtime.Processes.
func (f *Fake) ListProcesses(ctx context.Context, id string) ([]runtime.ProcessInfo, error) {
	return inside(ctx, f, "process_list", id, func(c *fakeContainer) ([]runtime.ProcessInfo, error) {
		out := make([]runtime.ProcessInfo, 0, len(c.processes))
		for _, p := range c.processes {
			out = append(out, p.tell())
		}
		return out, nil
	})
}

// harmless are the signals that a program which doesn't ask for them doesn't end of:
// CHLD, CONT, STOP, TSTP, TTIN, TTOU, URG, WINCH. Nothing is stopped here.
var harmless = []int{17, 18, 19, 20, 21, 22, 23, 28}

// Signal implements runtime.Processes.
func (f *Fake) Signal(ctx context.Context, id, process string, signal int) error {
	if err := wire.CheckSignal(signal); err != nil {
		return runtime.Invalid("%w", err)
	}
	_, err := with(ctx, f, "process_signal", id, process, func(p *fakeProcess) (struct{}, error) {
		switch {
		case !p.info.Running:
			return struct{}{}, fmt.Errorf("process %q has ended: %w", process, errdefs.ErrFailedPrecondition)
		case !slices.Contains(harmless, signal) && !slices.Contains(p.ignored, signal):
			p.cancel(signalled(signal))
		}
		return struct{}{}, nil
	})
	return err
}

// Kill implements runtime.Processes.
func (f *Fake) Kill(ctx context.Context, id, process string) error {
	_, err := with(ctx, f, "process_kill", id, process, func(p *fakeProcess) (struct{}, error) {
		p.cancel(errKilled)
		for p.info.Running && !p.gone {
			changed, down := p.changed, f.down
			f.mu.Unlock()
			var err error
			select {
			case <-changed:
			case <-down:
				err = errDown
			case <-ctx.Done():
				err = ctxError(ctx)
			}
			f.mu.Lock()
			if err != nil {
				return struct{}{}, fmt.Errorf("kill process %q: %w", process, err)
			}
		}
		return struct{}{}, p.err
	})
	return err
}

// Resize implements runtime.Processes.
func (f *Fake) Resize(ctx context.Context, id, process string, rows, cols int) error {
	if err := wire.CheckSize(rows, cols); err != nil {
		return runtime.Invalid("%w", err)
	}
	_, err := with(ctx, f, "process_resize", id, process, func(p *fakeProcess) (struct{}, error) {
		if !p.info.Running || !p.spec.TTY {
			return struct{}{}, fmt.Errorf("process %q has ended, or no terminal: %w", process, errdefs.ErrFailedPrecondition)
		}
		p.spec.Rows, p.spec.Cols = rows, cols
		return struct{}{}, nil
	})
	return err
}

// Forget implements runtime.Processes.
func (f *Fake) Forget(ctx context.Context, id, process string) error {
	_, err := inside(ctx, f, "process_forget", id, func(c *fakeContainer) (struct{}, error) {
		p := c.process(process)
		if p != nil && p.info.Running {
			return struct{}{}, fmt.Errorf("process %q runs: %w", process, errdefs.ErrFailedPrecondition)
		}
		c.processes = slices.DeleteFunc(c.processes, func(q *fakeProcess) bool { return q == p })
		return struct{}{}, nil
	})
	return err
}

// endProcesses ends a container's processes with it; f.mu is held.
func (c *fakeContainer) endProcesses() {
	c.leaveProcesses(errDied)
	for _, p := range c.processes {
		p.gone = true
		p.cancel(errDied)
		p.notify()
	}
	c.processes = nil
}

// running counts processes; f.mu is held.
func (c *fakeContainer) running() (n int64) {
	for _, p := range c.processes {
		if p.info.Running {
			n++
		}
	}
	return n
}
