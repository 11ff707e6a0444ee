package agent

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/agent/wire"
)

// overtime is how long after the caller's deadline the program ends a command by itself,
// if Berm isn't there any more to do so.
const overtime = 15 * time.Second

const farAway = 365 * 24 * time.Hour // a deadline that is none

// Exec runs a command in a running container, to its end.
//
// A session that breaks under a command without input is made again, if the program dials,
// and the command goes on where it was. If that can't be, or it has input, it is killed, and
// the error is ErrInterrupted; also ErrNotKilled if that couldn't be either.
//
// Two things delay it without bound: a Stdout or Stderr that blocks, and, in a goroutine
// that outlives the call, a Stdin whose Read does.
func (r *Runtime) Exec(ctx context.Context, id string, e runtime.Exec) (runtime.ExecResult, error) {
	res, err := r.exec(ctx, id, e)
	if err != nil {
		err = fmt.Errorf("run command in container %s: %w", id, err)
	}
	return res, err
}

func validateExec(e runtime.Exec) error {
	if err := runtime.CheckExec(e); err != nil {
		return err
	}
	return validateText(slices.Concat(e.Command, e.Env, []string{e.WorkingDir}))
}

// validateText refuses what would arrive as something else.
func validateText(all []string) error {
	for _, s := range all {
		if strings.IndexByte(s, 0) >= 0 || !utf8.ValidString(s) {
			return runtime.Invalid("a command, its environment and its directory are UTF-8 without zero bytes, which %.100q is not", s)
		}
	}
	return nil
}

// run is a command under way.
type run struct {
	*call
	e       runtime.Exec
	process string // its ID
	seq     int64  // output that was delivered
	info    *wire.ProcessInfo
	deliver error // of Stdout or Stderr
	kept    bool  // by the program, until it is told to forget it
}

// The ways in which following a command ends early.
var (
	errBroken  = errors.New("the connection to the container's agent broke")
	errDeliver = errors.New("output can't be delivered")
)

func (r *Runtime) exec(ctx context.Context, id string, e runtime.Exec) (runtime.ExecResult, error) {
	if err := validateExec(e); err != nil {
		return runtime.ExecResult{}, err
	}
	if ctx.Err() != nil {
		return runtime.ExecResult{}, runtime.Ended(ctx)
	}
	b, err := r.container(ctx, id)
	if err != nil {
		return runtime.ExecResult{}, err
	}
	if b.paused.Load() { // or was, when Berm last heard of it
		b.ask(ctx)
		if b.paused.Load() {
			return runtime.ExecResult{}, runtime.Precondition("the container is paused")
		}
	}
	x := &run{e: e, process: r.nextRun()}
	start := &wire.Start{ID: x.process, Command: e.Command, Env: e.Env, Dir: e.WorkingDir, Stdin: e.Stdin != nil}
	if deadline, ok := ctx.Deadline(); ok && time.Until(deadline) < farAway {
		start.TimeoutMS = (max(time.Until(deadline), 0) + overtime).Milliseconds()
	}
	x.call, err = b.open(ctx, id, e.User, &wire.Request{Op: wire.OpRun, Start: start}, true)
	if err != nil {
		return runtime.ExecResult{}, err
	}
	if e.Stdin != nil {
		go x.feed(x.conn)
	}
	if err := x.wait(ctx); err != nil {
		return runtime.ExecResult{}, err
	}
	return runtime.ExecResult{
		ExitCode: x.info.ExitCode, OOMKilled: x.info.OOMKilled,
		CPUTime: time.Duration(x.info.CPUTime), PeakMemoryBytes: x.info.PeakMemoryBytes,
	}, nil
}

// feed copies the input, and lives as long as its Read takes.
func (x *run) feed(c *conn) {
	buf := buffers.Get().(*[wire.MaxData]byte)
	defer buffers.Put(buf)
	for {
		n, err := x.e.Stdin.Read(buf[:])
		if n > 0 {
			if _, err := c.input(buf[:n]); err != nil {
				return
			}
		}
		if err != nil {
			_ = c.w.Send(wire.KindEnd)
			return
		}
	}
}

// wait follows the command to its end, whatever happens to the connection.
func (x *run) wait(ctx context.Context) error {
	for rejoined := 0; ; rejoined++ {
		before := x.seq
		err := x.follow()
		switch {
		case err == nil:
			x.done()
			x.forget(ctx)
			return nil
		case ctx.Err() != nil:
			return x.kill(ctx, runtime.Ended(ctx))
		case errors.Is(err, errDeliver):
			return x.kill(ctx, fmt.Errorf("deliver output: %w", x.deliver))
		}
		var failure *wire.Failure
		if errors.As(err, &failure) {
			x.done()
			return x.refused(ctx, failure)
		}
		x.drop()
		x.kept = true
		if x.seq > before {
			rejoined = 0
		}
		next, err := x.rejoin(ctx, rejoined)
		if err != nil {
			return err
		}
		x.call = next
	}
}

// follow delivers output until the command has ended: then there is info.
func (x *run) follow() error {
	for {
		kind, payload, err := x.r.Next()
		if err != nil {
			return fmt.Errorf("%w: %w", errBroken, err)
		}
		switch kind {
		case wire.KindOutput:
			o, err := wire.ParseOutput(payload)
			if err != nil || o.Seq-int64(len(o.Data)) != x.seq {
				return fmt.Errorf("%w: output of another place than %d", errBroken, x.seq)
			}
			x.seq = o.Seq
			to := x.e.Stdout
			if o.Stderr {
				to = x.e.Stderr
			}
			if to == nil || x.deliver != nil {
				continue
			}
			if _, x.deliver = to.Write(o.Data); x.deliver != nil {
				return errDeliver
			}
		case wire.KindResult:
			info, err := parseEnded(payload)
			if err != nil {
				return fmt.Errorf("%w: %w", errBroken, err)
			}
			x.info = info
			return nil
		case wire.KindFailure:
			failure, err := parseFailure(payload)
			if err != nil {
				return fmt.Errorf("%w: %w", errBroken, err)
			}
			return failure
		default:
			return fmt.Errorf("%w: a frame of kind %d", errBroken, kind)
		}
	}
}

// refused is the error of a command that the program has given up.
func (x *run) refused(ctx context.Context, failure *wire.Failure) error {
	switch {
	case x.kept || x.seq > 0 || failure.Class == wire.ClassAborted || failure.Class == wire.ClassOutOfRange:
		x.kept = true
		return x.abandon(ctx, interrupted("not telling all of the command's output any more"))
	case failure.Class == wire.ClassExhausted:
		return fmt.Errorf("%w: %w", runtime.ErrNoRoom, failure)
	}
	return failed(failure)
}

// parseEnded reads how a command ended.
func parseEnded(payload []byte) (*wire.ProcessInfo, error) {
	info := new(wire.ProcessInfo)
	if err := wire.Decode(payload, info); err != nil {
		return nil, err
	}
	if info.Running || !plausible(info) {
		return nil, fmt.Errorf("%w: how a command ended", wire.ErrProtocol)
	}
	return info, nil
}

// forget has the program drop a command that it keeps because its connection ended first.
func (x *run) forget(ctx context.Context) {
	if !x.kept {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), x.b.r.pace.drain)
	defer cancel()
	if request, err := encode(&wire.Request{Op: wire.OpForget, Process: &wire.Process{ID: x.process}}); err == nil {
		_ = x.b.settle(ctx, x.id, x.s, request) // it keeps so many only anyway
	}
}

// interrupted is the error of a command whose container ended under it.
func interrupted(how string) error {
	return runtime.WithClass(
		errors.Join(errdefs.ErrFailedPrecondition, runtime.ErrInterrupted),
		fmt.Errorf("%w: it is %s", runtime.ErrInterrupted, how),
	)
}

// notKilled adds to an error that processes may still run, without changing its class.
func notKilled(err, why error) error {
	return fmt.Errorf("%w; %w: %v", err, runtime.ErrNotKilled, why) //nolint:errorlint // why has a class of its own
}

// rejoin takes the command up again after its connection broke. With input, nobody
// knows how much of that has arrived.
func (x *run) rejoin(ctx context.Context, tries int) (*call, error) {
	if x.e.Stdin != nil || tries >= 3 || x.s.served != nil {
		return nil, x.abandon(ctx, interrupted("out of reach"))
	}
	next, err := x.b.rejoin(ctx, x.id, x.process, x.seq, x.s.pid)
	var refusal *wire.Failure
	switch {
	case err == nil: // even if ctx has ended by now: kill closes it
		return next, nil
	case errors.As(err, &refusal):
		return nil, x.abandon(ctx, interrupted("not telling all of the command's output any more"))
	case errors.Is(err, errAbsent):
		return nil, x.abandon(ctx, interrupted("out of reach"))
	case ctx.Err() != nil:
		return nil, x.abandon(ctx, runtime.Ended(ctx))
	}
	return nil, err
}

// rejoin attaches to a process whose connection broke, from a place in its output on.
// Pid is of who was at its other end. The error is ErrInterrupted when the container has
// ended, errAbsent, a *wire.Failure, the context's, or Unavailable with ErrNotKilled.
func (b *container) rejoin(ctx context.Context, id, process string, seq int64, pid int) (*call, error) {
	request, err := encode(&wire.Request{Op: wire.OpAttach, Process: &wire.Process{ID: process, From: seq}})
	if err != nil {
		return nil, err
	}
	soon, cancel := context.WithTimeout(ctx, b.r.pace.rejoin)
	defer cancel()
	away := false
	for delay := time.Millisecond; soon.Err() == nil; delay = min(2*delay, 200*time.Millisecond) {
		c, err := b.inspect(soon)
		switch {
		case errdefs.IsNotFound(err):
			return nil, interrupted("removed")
		case err != nil:
			away = away || errdefs.IsUnavailable(err)
		case c.State != runtime.StateRunning && c.State != runtime.StatePaused:
			return nil, interrupted("dead")
		case c.Pid != 0 && pid != 0 && c.Pid != pid:
			return nil, interrupted("another by now") // somebody has restarted it
		default:
			away = false
			x, err := b.start(soon, id, request, b.take)
			var refusal *wire.Failure
			switch {
			case errors.As(err, &refusal):
				return nil, refusal
			case err == nil && x.release():
				return x.under(ctx), nil
			case err == nil:
				x.drop()
			}
		}
		select {
		case <-soon.Done():
		case <-b.done:
			return nil, b.left()
		case <-time.After(delay):
		}
	}
	switch {
	case ctx.Err() != nil:
		return nil, runtime.Ended(ctx)
	case away:
		return nil, notKilled(runtime.Unavailable(errBroken), errors.New("the engine is gone"))
	}
	return nil, errAbsent
}

// left is the error of a command whose container is closed.
func (b *container) left() error {
	b.r.mu.Lock()
	defer b.r.mu.Unlock()
	if b.r.closed {
		return notKilled(errClosed, errors.New("nobody is there to do it"))
	}
	return interrupted("removed")
}

// under puts a call that was released under another context.
func (x *call) under(ctx context.Context) *call { return newCall(ctx, x.b, x.id, x.conn) }

// abandon kills a command that has no connection any more.
func (x *run) abandon(ctx context.Context, err error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), x.b.r.pace.kill)
	defer cancel()
	why := x.killTree(ctx, func() bool { return true })
	if errdefs.IsUnavailable(why) {
		err = runtime.Unavailable(errBroken)
	}
	if why != nil {
		return notKilled(err, why)
	}
	x.forget(ctx)
	return err
}

// kill ends a command with all its descendants, and delivers the last of its output.
// The error is err, or says also that it couldn't.
func (x *run) kill(ctx context.Context, err error) error {
	x.release()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), x.b.r.pace.kill)
	defer cancel()
	// It may not have begun yet, although it was told to, or be over.
	over := func() bool {
		_ = x.nc.SetDeadline(time.Now().Add(50 * time.Millisecond))
		return x.over()
	}
	if why := x.killTree(ctx, over); why != nil {
		x.drop()
		return notKilled(err, why)
	}
	_ = x.nc.SetDeadline(time.Now().Add(x.b.r.pace.drain))
	if x.over() {
		x.done()
	} else {
		x.drop()
		x.kept = true
		x.forget(ctx)
	}
	return err
}

// over reads on, and tells whether the command is known to be over.
func (x *run) over() bool {
	if x.info != nil {
		return true
	}
	err := x.follow()
	for errors.Is(err, errDeliver) { // once
		err = x.follow()
	}
	return err == nil
}

// killTree has the program kill the command, through another connection. Over tells
// what to make of a command that the program doesn't know.
func (x *run) killTree(ctx context.Context, over func() bool) error {
	request, err := encode(&wire.Request{Op: wire.OpKill, Process: &wire.Process{ID: x.process}})
	if err != nil {
		return err
	}
	for {
		err := x.b.settle(ctx, x.id, x.s, request)
		var refusal *wire.Failure
		switch {
		case err == nil:
			return nil
		case errors.As(err, &refusal) && refusal.Class == wire.ClassNotFound:
			if over() {
				return nil
			}
		case errors.As(err, &refusal):
			return refusal
		}
		c, err := x.b.inspect(ctx)
		switch {
		case errdefs.IsNotFound(err), err == nil && c.State != runtime.StateRunning && c.State != runtime.StatePaused:
			return nil // all in the container is dead
		case err == nil && c.State == runtime.StatePaused:
			return errors.New("the container is paused")
		case x.s.served != nil && refusal == nil:
			return x.s.fail()
		}
		select {
		case <-ctx.Done():
			if errdefs.IsUnavailable(err) {
				return err
			}
			return errSilent
		case <-x.b.done:
			return errClosed
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// settle does an operation that has no input and no answer, on a session if that is a served
// one, or else on any that was dialled. A refusal is a *wire.Failure.
func (b *container) settle(ctx context.Context, id string, s *session, request []byte) error {
	var x *call
	var err error
	if s.served == nil {
		x, err = b.start(ctx, id, request, b.take)
	} else {
		b.mu.Lock()
		b.useLocked(s)
		b.mu.Unlock()
		x, err = b.begin(ctx, id, s, request)
	}
	if err != nil {
		return err
	}
	x.within(time.Now().Add(b.r.pace.answer))
	kind, payload, err := x.r.Next()
	switch {
	case err == nil && kind == wire.KindResult:
		x.done()
		return nil
	case err == nil && kind == wire.KindFailure:
		var refusal *wire.Failure
		if refusal, err = parseFailure(payload); err == nil {
			x.done()
			return refusal
		}
	}
	x.drop()
	if ctx.Err() != nil {
		return runtime.Ended(ctx)
	}
	return errBroken
}

// maxTidied is how many commands tidy has forgotten at a time.
const maxTidied = 64

// tidy has the program forget commands of an earlier Runtime that have ended, not all of
// many at once. True when there is none any more.
func (b *container) tidy(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, b.r.pace.ready)
	defer cancel()
	b.r.mu.Lock()
	id := b.id
	b.r.mu.Unlock()
	if !b.connected() || id == "" {
		return false
	}
	request, err := encode(&wire.Request{Op: wire.OpList})
	if err != nil {
		return false
	}
	x, err := b.start(ctx, id, request, b.take)
	if err != nil {
		return false
	}
	var over []string
	more := false
	err = x.items(maxListed, func(payload []byte) error {
		info, err := parseProcess(payload, "")
		if err == nil && strings.HasPrefix(info.ID, runPrefix) && !strings.HasPrefix(info.ID, b.r.runs) {
			if info.Running || len(over) >= maxTidied {
				more = true
			} else {
				over = append(over, info.ID)
			}
		}
		return err
	})
	for _, process := range over {
		request, _ := encode(&wire.Request{Op: wire.OpForget, Process: &wire.Process{ID: process}}) // of strings
		if err == nil {
			err = b.settle(ctx, id, x.s, request)
		}
	}
	return err == nil && !more
}
