package containerd

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"sync"
	"time"

	"github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"
	"github.com/containerd/typeurl/v2"
	"github.com/google/uuid"
	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/runtime"
)

const (
	// exitTick is how often a running command is looked at, and silenceTimeout how
	// long the engine may keep its end to itself.
	exitTick       = 500 * time.Millisecond
	silenceTimeout = 10 * time.Second

	// fateDelay is for how long a container's end may follow that of a command in it
	// which was killed, if the same hand killed both.
	fateDelay = 200 * time.Millisecond

	// disposeTimeout is how long the engine is asked to forget a command, which it
	// doesn't before its descendants have let go of its output or 10 s are over, and
	// closeTimeout how long Close waits for that.
	disposeTimeout = 30 * time.Second
	closeTimeout   = 5 * time.Second
)

// commands is what a Runtime knows of them all.
type commands struct {
	gates runtime.Gates

	mu     sync.Mutex
	mains  map[string]*mainProcess // by container
	chores int
	idle   chan struct{} // closed when the last chore under way ends
}

// background runs what nobody waits for but Close.
func (c *commands) background(f func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.chores == 0 {
		c.idle = make(chan struct{})
	}
	c.chores++
	go func() {
		f()
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.chores--; c.chores == 0 {
			close(c.idle)
		}
	}()
}

// wait waits for a moment without chores, within reason.
func (c *commands) wait() {
	c.mu.Lock()
	idle := c.idle
	c.mu.Unlock()
	if idle == nil {
		return
	}
	select {
	case <-idle:
	case <-time.After(closeTimeout):
	}
}

// execution is one command, from its start to its end. Its errors are classed.
type execution struct {
	r  *Runtime
	id string // of the container
	c  *container
	command
	marker  string          // also the engine's name for it
	settled context.Context // ends when the engine is done with starting it
	settle  context.CancelFunc

	pipes  *pipes
	ended  <-chan end
	hunt   *hunt    // nil when its processes can't be seen from here
	oom    oomCount // before it was started
	result runtime.ExecResult
}

// end is how the engine says that a command has ended.
type end struct {
	code uint32
	err  error
}

type oomCount struct {
	kills uint64
	err   error
}

// run runs a command to its end, or to that of ctx, and then kills it.
func (r *Runtime) run(ctx context.Context, id string, c command) (*execution, error) {
	x, err := r.runOnce(ctx, id, c)
	if errors.Is(err, errRefused) { // it was paused that moment, say, and runs again
		c.ask = true
		x, err = r.runOnce(ctx, id, c)
	}
	return x, err
}

// errRefused says that an engine which wasn't asked for the container takes no command for it.
var errRefused = errors.New("the engine refused the command")

func (r *Runtime) runOnce(ctx context.Context, id string, c command) (*execution, error) {
	x := &execution{r: r, id: id, command: c, marker: uuid.NewString()}
	x.settled, x.settle = context.WithCancel(context.Background())
	defer x.settle()
	leave, err := r.commands.gates.Enter(ctx, id, func(ctx context.Context) error {
		select {
		case <-x.settled.Done():
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	})
	if err != nil {
		return x, runtime.Ended(ctx)
	}
	defer leave()
	callCtx, cancel := r.bounded(ctx)
	x.c, err = r.running(callCtx, id, c.ask)
	cancel()
	if err != nil {
		return x, classify(ctx, err)
	}
	defer x.c.close()
	if c.mode == "" && c.WorkingDir != "" && !c.dirMade && !x.c.hasDir(c.WorkingDir) {
		return x, errNoDir
	}
	waitCtx, cancel := context.WithCancel(r.namespaced(context.WithoutCancel(ctx))) // see bounded
	defer cancel()
	started, err := x.start(ctx, waitCtx)
	x.settle()
	if !started || err != nil {
		return x, err
	}
	err = x.wait(ctx)
	if err != nil && !errors.Is(err, runtime.ErrInterrupted) {
		if why := x.kill(ctx); why != nil {
			err = notKilled(err, why)
		}
	}
	x.pipes.drain(x.outlived)
	if err == nil && x.result.ExitCode == runtime.ExitNoThread && x.pipes.stderr.begins(runtime.NoThread) && x.pipes.stdout.bytes.Load() == 0 {
		err = runtime.ErrNoRoom
	}
	x.dispose(ctx)
	if err == nil && x.pipes.err() != nil {
		err = fmt.Errorf("deliver output: %w", x.pipes.err())
	}
	return x, err
}

// notKilled adds to an error that processes may still run, without changing its class.
func notKilled(err, why error) error {
	return fmt.Errorf("%w; %w: %v", err, runtime.ErrNotKilled, why) //nolint:errorlint // why has a class of its own
}

// errInterrupted is the error of a command whose container ended under it.
var errInterrupted = runtime.WithClass(errors.Join(errdefs.ErrFailedPrecondition, runtime.ErrInterrupted), runtime.ErrInterrupted)

// start has the engine start the command, and wait for its end until waitCtx ends. Unless
// it was started, nothing of it is left, or the error says so.
func (x *execution) start(ctx, waitCtx context.Context) (started bool, err error) {
	process := x.process(&x.c.process, x.marker)
	if err := become(process, x.c.pid, x.User); err != nil {
		return false, classify(ctx, err)
	}
	if x.c.gone() { // and then its pid may be another's
		return false, runtime.Precondition("the container isn't running")
	}
	spec, err := typeurl.MarshalAnyToProto(process)
	if err != nil {
		return false, fmt.Errorf("encode the command: %w", err)
	}
	if x.pipes, err = newPipes(ctx, x.r.path("containers", x.id, "exec", x.marker), x.Stdin != nil); err != nil {
		if errors.Is(err, fs.ErrNotExist) { // its directory goes with the container
			return false, runtime.Precondition("the container has no directory here: it is being removed, or another root's")
		}
		if ctx.Err() != nil {
			return false, runtime.Ended(ctx)
		}
		return false, fmt.Errorf("make the command's pipes: %w", err)
	}
	defer func() {
		if !started {
			x.pipes.close()
		}
	}()
	if ctx.Err() != nil {
		return false, runtime.Ended(ctx)
	}
	// What is asked of the engine from here on it does in any case, so that its answers
	// are waited for.
	callCtx, cancel := x.r.linger(x.r.namespaced(ctx))
	defer cancel()
	req := &tasks.ExecProcessRequest{
		ContainerID: x.id, ExecID: x.marker, Spec: spec,
		Stdout: x.pipes.file("stdout"), Stderr: x.pipes.file("stderr"),
	}
	if x.Stdin != nil {
		req.Stdin = x.pipes.file("stdin")
	}
	_, err = x.r.client.TaskService().Exec(callCtx, req)
	if err = errgrpc.ToNative(err); err == nil && ctx.Err() != nil {
		err = runtime.Ended(ctx)
	}
	if err != nil {
		x.dispose(ctx)
		if x.c.known && unexplained(err) {
			return false, errRefused
		}
		return false, x.refusal(ctx, err)
	}
	return x.begin(ctx, callCtx, waitCtx)
}

// begin is the second half of start; callCtx is for the engine's answer.
func (x *execution) begin(ctx, callCtx, waitCtx context.Context) (started bool, err error) {
	since, err := ticks()
	if err != nil {
		return false, err
	}
	if x.c.habitat != nil {
		x.hunt = &hunt{habitat: x.c.habitat, name: markerEnv, value: x.marker, since: since, alone: func(ctx context.Context) (func(), error) {
			return x.r.commands.gates.Close(ctx, x.id)
		}}
	}
	x.oom.kills, x.oom.err = x.r.oomCount(callCtx, x.id)
	x.awaitEnd(waitCtx) // it may be over before the engine says that it has begun
	res, err := x.r.client.TaskService().Start(callCtx, &tasks.StartRequest{ContainerID: x.id, ExecID: x.marker})
	if err = errgrpc.ToNative(err); err != nil {
		x.dispose(ctx)
		answered := !errdefs.IsUnavailable(err) && !errdefs.IsDeadlineExceeded(err) && !errdefs.IsCanceled(err)
		out := x.refusal(ctx, err)
		// The engine may have failed after it had started the process.
		if answered && x.hunt == nil {
			return false, out
		}
		if why := x.kill(ctx); why != nil {
			out = notKilled(errors.Join(out, err), why)
		} else if !answered {
			out = notKilled(out, errors.New("the engine may be starting it still"))
		}
		return false, out
	}
	x.pipes.copyOut(x.Stdout, x.Stderr)
	if x.hunt != nil {
		x.root(int(res.Pid), since)
	}
	if x.Stdin != nil {
		go x.feed(ctx)
	}
	return true, nil
}

// root tells the hunt of the command's first process, unless it has ended already.
func (x *execution) root(pid int, since uint64) {
	p, err := readProcess(pid)
	if err == nil && p.start >= since && x.c.ns.has(pid) {
		x.hunt.root = p
	}
}

// feed gives the command its input. The engine holds an end of that pipe too.
func (x *execution) feed(ctx context.Context) {
	x.pipes.copyIn(x.Stdin)
	select {
	case <-x.pipes.closed:
		return
	default:
	}
	ctx, cancel := x.r.bounded(context.WithoutCancel(ctx))
	defer cancel()
	_, err := x.r.client.TaskService().CloseIO(ctx, &tasks.CloseIORequest{ContainerID: x.id, ExecID: x.marker, Stdin: true})
	if err = errgrpc.ToNative(err); err != nil && !errdefs.IsNotFound(err) {
		x.r.log.DebugContext(ctx, "stdin_not_closed", "container_id", x.id, "error", err)
	}
}

// unexplained tells whether the container has to be looked at to know what an error means.
// What OCI runtimes say comes without a class.
func unexplained(err error) bool {
	return !runtime.HasClass(err) && (errdefs.IsUnknown(err) || errdefs.IsNotFound(err) || errdefs.IsFailedPrecondition(err))
}

// refusal says why the engine didn't start the command. A program that isn't there is
// no reason: the agent is, and says so.
func (x *execution) refusal(ctx context.Context, err error) error {
	if !unexplained(err) {
		return classify(ctx, err)
	}
	callCtx, cancel := x.r.linger(x.r.namespaced(ctx))
	defer cancel()
	if _, err := x.r.runningPid(callCtx, x.id); err != nil {
		return classify(ctx, err)
	}
	if x.c.gone() {
		return runtime.Precondition("the container isn't running")
	}
	if !errdefs.IsUnknown(err) {
		return classify(ctx, err)
	}
	// It names files of the host.
	x.r.log.WarnContext(ctx, "command_not_started", "container_id", x.id, "error", err)
	return runtime.ErrNoRoom
}

// awaitEnd asks the engine for the command's end.
func (x *execution) awaitEnd(ctx context.Context) {
	ended := make(chan end, 1)
	x.ended = ended
	go func() {
		res, err := x.r.client.TaskService().Wait(ctx, &tasks.WaitRequest{ContainerID: x.id, ExecID: x.marker})
		ended <- end{res.GetExitStatus(), errgrpc.ToNative(err)}
	}()
}

// wait waits for the command's end, and says how it ended.
func (x *execution) wait(ctx context.Context) error {
	tick := time.NewTicker(exitTick)
	defer tick.Stop()
	var over time.Time // when it was seen to be
	for {
		select {
		case <-ctx.Done():
			return runtime.Ended(ctx)
		case e := <-x.ended:
			if e.err == nil {
				return x.conclude(ctx, int(e.code))
			}
			return x.lost(ctx, e.err)
		case now := <-tick.C:
			// An engine that has gone breaks the connection; one that hangs doesn't.
			if x.hunt == nil {
				continue
			}
			switch p, err := readProcess(x.hunt.root.pid); {
			case err == nil && p.same(x.hunt.root) && !p.over():
			case over.IsZero():
				over = now
			case now.Sub(over) > min(silenceTimeout, x.r.opts.CallTimeout):
				return runtime.Unavailable(errors.New("the engine doesn't say how the command ended"))
			}
		}
	}
}

// lost is the error of a command that the engine has lost.
func (x *execution) lost(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return runtime.Ended(ctx)
	}
	if x.c.gone() {
		return errInterrupted
	}
	callCtx, cancel := x.r.bounded(ctx)
	defer cancel()
	if _, why := x.r.task(callCtx, x.id); errdefs.IsNotFound(why) || errdefs.IsFailedPrecondition(why) {
		return errInterrupted
	}
	if errdefs.IsNotFound(err) { // of the command, not of its container
		err = runtime.Unavailable(errors.New("the engine has lost the command"))
	}
	return classify(ctx, err)
}

// conclude makes the result of a command that has ended.
func (x *execution) conclude(ctx context.Context, code int) error {
	x.result.ExitCode = code
	if code != exitSIGKILL {
		return nil
	}
	// Killed: by whom, it doesn't say.
	if x.c.gone() {
		return errInterrupted
	}
	callCtx, cancel := x.r.bounded(ctx)
	defer cancel()
	kills, err := x.r.oomCount(callCtx, x.id)
	if x.result.OOMKilled = x.oom.err == nil && err == nil && kills > x.oom.kills; x.result.OOMKilled {
		return nil
	}
	// Whoever ends a container may end the commands in it first.
	for until := time.Now().Add(fateDelay); ; {
		if x.c.gone() {
			return errInterrupted
		}
		if ctx.Err() != nil || time.Now().After(until) {
			break
		}
		time.Sleep(fateDelay / 20)
	}
	if _, err := x.r.task(callCtx, x.id); err != nil {
		return x.lost(ctx, err)
	}
	return nil
}

// kill ends the command with all its descendants. Nil means that they are gone.
func (x *execution) kill(ctx context.Context) error {
	x.settle()
	if x.hunt != nil {
		return x.hunt.kill(ctx)
	}
	// All that is left is to ask the engine, for the first of them.
	ctx, cancel := context.WithTimeout(x.r.namespaced(context.WithoutCancel(ctx)), killTimeout)
	defer cancel()
	_, err := x.r.client.TaskService().Kill(ctx, &tasks.KillRequest{ContainerID: x.id, ExecID: x.marker, Signal: uint32(unix.SIGKILL)})
	if err = errgrpc.ToNative(err); err != nil && !errdefs.IsNotFound(err) {
		return err
	}
	return errUnseen
}

// outlived tells whether processes of the command may have outlived its first.
func (x *execution) outlived() bool { return x.hunt == nil || x.hunt.any() }

// dispose has the engine forget the command, once it has ended.
func (x *execution) dispose(ctx context.Context) {
	ctx = x.r.namespaced(context.WithoutCancel(ctx))
	x.r.commands.background(func() {
		ctx, cancel := context.WithTimeout(ctx, disposeTimeout)
		defer cancel()
		defer x.pipes.finish(ctx)
		for delay := 10 * time.Millisecond; ; delay = min(2*delay, time.Second) {
			_, err := x.r.client.TaskService().DeleteProcess(ctx, &tasks.DeleteProcessRequest{ContainerID: x.id, ExecID: x.marker})
			if err = errgrpc.ToNative(err); err == nil || errdefs.IsNotFound(err) {
				return
			}
			select {
			case <-time.After(delay):
			case <-ctx.Done(): // it goes with the container
				x.r.log.DebugContext(ctx, "command_not_disposed", "container_id", x.id, "error", err)
				return
			}
		}
	})
}
