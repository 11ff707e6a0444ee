package agent

import (
	"context"
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

// errEnd says that a process has ended, with its output.
var errEnd = errors.New("the process has ended")

// output reads the output of a process from calls.
type output struct {
	proc string              // the process's ID
	seq  int64               // the Seq of the last output that was read
	info runtime.ProcessInfo // set at the process's end
}

// read returns the next output. Its error is errEnd, a *wire.Failure, wire.ErrProtocol,
// or the connection's.
func (o *output) read(x *call) (runtime.Chunk, error) {
	for {
		kind, payload, err := x.frame()
		if err != nil {
			return runtime.Chunk{}, err
		}
		switch kind {
		case wire.KindOutput:
			out, err := wire.ParseOutput(payload)
			if err != nil {
				return runtime.Chunk{}, err
			}
			if out.Seq-int64(len(out.Data)) != o.seq {
				return runtime.Chunk{}, fmt.Errorf("%w: output of another place than %d", wire.ErrProtocol, o.seq)
			}
			if o.seq = out.Seq; len(out.Data) > 0 {
				return runtime.Chunk{Seq: out.Seq, Stderr: out.Stderr, Data: out.Data}, nil
			}
		case wire.KindResult:
			info, err := x.s.process(payload, o.proc)
			if err == nil && info.Running {
				err = fmt.Errorf("%w: the end of a process that runs", wire.ErrProtocol)
			}
			if err != nil {
				return runtime.Chunk{}, err
			}
			o.info = info
			return runtime.Chunk{}, errEnd
		default:
			return runtime.Chunk{}, fmt.Errorf("%w: a frame of kind %d", wire.ErrProtocol, kind)
		}
	}
}

// begin waits until the program follows the process. Its errors are those of read.
func (o *output) begin(x *call) error {
	kind, payload, err := x.frame()
	if err == nil && kind != wire.KindItem {
		err = fmt.Errorf("%w: a frame of kind %d", wire.ErrProtocol, kind)
	}
	if err == nil {
		_, err = x.s.process(payload, o.proc)
	}
	return err
}

func wireFollow(f runtime.Follow) *wire.Follow {
	return &wire.Follow{From: f.From, Lossless: f.Lossless, Exclusive: f.Exclusive, TakeOver: f.TakeOver}
}

// Follow follows a process. Ctx only bounds the start. The follower lasts until it is closed,
// and reconnects if its connection breaks.
func (r *Runtime) Follow(ctx context.Context, id, process string, f runtime.Follow) (runtime.Follower, error) {
	if f.From < runtime.FromFirst {
		return nil, about("follow", id, process, runtime.Invalid("output can't be had from %d on: 0 is the beginning", f.From))
	}
	x, err := r.reach(ctx, id, &wire.Request{Op: wire.OpFollow, Process: &wire.Process{ID: process, Follow: wireFollow(f)}})
	var out *follower
	if err == nil {
		out, _, err = r.newFollower(ctx, x, id, process, f)
	}
	if err != nil {
		return nil, about("follow", id, process, err)
	}
	return out, nil
}

// newFollower waits until the program follows the process, and takes over the call.
func (r *Runtime) newFollower(ctx context.Context, x *call, id, process string, how runtime.Follow) (*follower, runtime.ProcessInfo, error) {
	info, err := x.process(wire.KindItem, process)
	if err == nil && how.From >= 0 && info.FirstSeq != how.From {
		err = x.unexpected("output of another place")
	}
	if err != nil {
		return nil, info, err
	}
	f := &follower{r: r, id: id, how: how, output: output{proc: process, seq: info.FirstSeq}}
	f.ctx, f.cancel = context.WithCancelCause(context.WithoutCancel(ctx))
	if err := x.outlive(f.ctx); err != nil {
		return nil, info, err
	}
	f.x.Store(x)
	return f, info, nil
}

// follower follows a process that the program knows.
type follower struct {
	r      *Runtime
	id     string
	how    runtime.Follow
	ctx    context.Context // ends with Close
	cancel context.CancelCauseFunc
	x      atomic.Pointer[call]

	// Next alone uses these.
	output
	err error
}

// errLeft is the error of a follower or an input that was closed.
var errLeft = runtime.Precondition("it was closed")

func (f *follower) Next() (runtime.Chunk, error) {
	for f.err == nil {
		x := f.x.Load()
		chunk, err := f.read(x)
		switch {
		case err == nil:
			return chunk, nil
		case errors.Is(err, errEnd):
			f.err = io.EOF
		case refused(err):
			f.err = about("follow", f.id, f.proc, err)
		}
		x.drop()
		if f.err == nil {
			f.err = f.again(x, err)
		}
	}
	return runtime.Chunk{}, f.err
}

// again follows once more after the connection broke.
func (f *follower) again(x *call, err error) error {
	switch {
	case f.ctx.Err() != nil:
		return errLeft
	case errors.Is(err, wire.ErrProtocol):
		return about("follow", f.id, f.proc, x.broken(err))
	case x.s.served != nil:
		return about("follow", f.id, f.proc, x.b.lost(f.ctx, x.s, err))
	}
	next, err := x.b.rejoin(f.ctx, f.id, f.output, f.how, x.s.pid)
	if f.ctx.Err() != nil {
		if next != nil {
			next.drop()
		}
		return errLeft
	}
	if err != nil {
		return about("follow", f.id, f.proc, err)
	}
	f.x.Store(next)
	if f.ctx.Err() != nil { // Close may have ended the old call alone
		next.drop()
		return errLeft
	}
	return nil
}

func (f *follower) Info() runtime.ProcessInfo { return f.info }

func (f *follower) Close() error {
	f.x.Load().leave(f.cancel)
	return nil
}

// leave ends the operation and its context. It waits up to pace.drain for the program to
// notice, which then frees what the operation held.
func (x *call) leave(cancel context.CancelCauseFunc) {
	x.stop()
	cancel(errLeft)
	x.closing.Do(func() {
		_ = x.nc.CloseWrite()
		_ = x.nc.SetReadDeadline(time.Now().Add(x.b.r.pace.drain))
		_, _ = io.Copy(io.Discard, x.nc)
		_ = x.nc.Close()
		x.unuse()
	})
}

// Input opens the input of a process. Ctx only bounds the opening.
func (r *Runtime) Input(ctx context.Context, id, process string) (runtime.Input, error) {
	x, err := r.reach(ctx, id, &wire.Request{Op: wire.OpInput, Process: &wire.Process{ID: process}})
	var in *input
	if err == nil {
		in, err = newInput(ctx, x, process)
	}
	if err != nil {
		return nil, about("open the input of", id, process, err)
	}
	return in, nil
}

// newInput waits until the input is open, and takes over the call.
func newInput(ctx context.Context, x *call, process string) (*input, error) {
	x.within(time.Now().Add(x.b.r.pace.answer))
	_, err := x.expect(wire.KindReady)
	if err != nil {
		return nil, err
	}
	x.within(time.Time{})
	in := &input{x: x, process: process}
	in.ctx, in.cancel = context.WithCancelCause(context.WithoutCancel(ctx))
	return in, x.outlive(in.ctx)
}

// input is the open input of a process.
type input struct {
	x       *call
	process string
	ctx     context.Context // ends with Close
	cancel  context.CancelCauseFunc

	mu  sync.Mutex
	err error
}

// Write returns when the process has taken the bytes. If it fails, the process may have taken
// more bytes than it returns.
func (in *input) Write(p []byte) (int, error) {
	in.mu.Lock()
	defer in.mu.Unlock()
	sent := 0
	for sent < len(p) && in.err == nil {
		part := p[sent:min(sent+wire.MaxData, len(p))]
		unsent := in.x.w.Send(wire.KindData, part)
		if err := in.x.reply(unsent, func() error { _, err := in.x.expect(wire.KindReady); return err }); err != nil {
			in.fail(err)
		} else {
			sent += len(part)
		}
	}
	return sent, in.err
}

func (in *input) CloseWrite() error {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.err != nil {
		return in.err
	}
	unsent := in.x.w.Send(wire.KindEnd, nil)
	if err := in.x.reply(unsent, in.x.result); err != nil {
		in.fail(err)
		return in.err
	}
	in.err = about("write to", in.x.id, in.process, runtime.Precondition("the input is closed"))
	return nil
}

func (in *input) fail(err error) {
	if in.ctx.Err() != nil {
		err = errLeft
	}
	in.err = about("write to", in.x.id, in.process, err)
}

func (in *input) Close() error {
	in.x.leave(in.cancel)
	return nil
}

// rejoin follows a process again after the connection broke. Pid is that of the program on the old
// connection. The error is classed.
func (b *container) rejoin(ctx context.Context, id string, out output, how runtime.Follow, pid int) (*call, error) {
	how.From = out.seq
	request := &wire.Request{Op: wire.OpFollow, Process: &wire.Process{ID: out.proc, Follow: wireFollow(how)}}
	soon, cancel := context.WithTimeout(ctx, b.r.pace.rejoin)
	defer cancel()
	away := false
	for delay := 20 * time.Millisecond; ; delay = min(2*delay, 200*time.Millisecond) {
		// Wait before the first attempt, too: the program may end each stream at once.
		select {
		case <-soon.Done():
			switch {
			case ctx.Err() != nil:
				return nil, runtime.Ended(ctx)
			case away:
				return nil, runtime.Unavailable(errBroken)
			}
			return nil, errLost
		case <-b.ctx.Done():
			return nil, b.left()
		case <-time.After(delay):
		}
		c, err := b.inspect(soon)
		switch {
		case errdefs.IsNotFound(err):
			return nil, runtime.Interrupted("removed")
		case err != nil:
			away = away || errdefs.IsUnavailable(err)
		case c.State != runtime.StateRunning && c.State != runtime.StatePaused:
			return nil, runtime.Interrupted("dead")
		case c.Pid != 0 && pid != 0 && c.Pid != pid:
			return nil, runtime.Interrupted("another by now") // the container was restarted
		default:
			away = false
			x, err := b.start(soon, id, request, b.take)
			if err == nil {
				if _, err = x.process(wire.KindItem, out.proc); err == nil {
					err = x.outlive(ctx)
				}
				if err == nil {
					return x, nil
				}
			}
			// The exclusive follower that exists may be this one.
			if refused(err) && !errdefs.IsAlreadyExists(err) {
				return nil, err
			}
		}
	}
}

// left is the error for a container that is closed.
func (b *container) left() error {
	b.r.mu.Lock()
	defer b.r.mu.Unlock()
	if b.r.closed {
		return errClosed
	}
	return runtime.Interrupted("removed")
}
