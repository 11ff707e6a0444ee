package agent

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/agent/wire"
)

const (
	maxReason  = 1 << 10 // bytes of a Failure's message that are handed on
	maxRetries = 4       // sessions that one operation finds dead
)

// conn is the stream of an operation.
type conn struct {
	s  *session
	nc *stream
	r  *wire.Reader
	w  *wire.Writer
}

// call is an operation under way. Its context's end makes what waits for the
// connection fail.
type call struct {
	*conn
	b       *container
	id      string // the container's
	ctx     context.Context
	closing sync.Once
	stop    func() bool
	stopped chan struct{} // closed when the end of the context has come through
	free    bool          // of its context
	ended   bool          // the context came first
	idle    bool          // it keeps no session
}

// The ways a call can fail to begin; nothing has been done then.
var (
	errDead   = errors.New("the session was dead")
	errSilent = errors.New("the program is silent")
	errBusy   = runtime.WithClass(errdefs.ErrResourceExhausted,
		fmt.Errorf("%d operations are under way in the container, and no more may", wire.MaxStreams))
)

// past is a deadline that is over.
var past = time.Unix(1, 0)

// begin makes a request on a session, and returns when the program has been told to go. It
// takes over the caller's use of the session. The error is errDead, errSilent, a *wire.Failure,
// or classed.
func (b *container) begin(ctx context.Context, id string, s *session, req *wire.Request) (*call, error) {
	payload, err := json.Marshal(req)
	if err == nil && len(payload) > wire.MaxRequest {
		err = runtime.Invalid("the request has %d bytes, and may have %d", len(payload), wire.MaxRequest)
	}
	var c *conn
	if err == nil {
		c, err = s.open(req.Op)
	}
	if err != nil {
		s.release()
		return nil, err
	}
	x := newCall(ctx, b, id, c)
	if err = x.request(payload); err == nil {
		return x, nil
	}
	x.drop()
	if _, refused := errors.AsType[*wire.Failure](err); !refused && ctx.Err() != nil {
		err = runtime.Ended(ctx)
	}
	return nil, err
}

func newCall(ctx context.Context, b *container, id string, c *conn) *call {
	x := &call{conn: c, b: b, id: id, ctx: ctx, stopped: make(chan struct{})}
	x.stop = context.AfterFunc(ctx, func() {
		_ = c.nc.SetDeadline(past)
		close(x.stopped)
	})
	return x
}

// within sets deadlines; the zero time is none. The context's end has the last word.
func (x *call) within(t time.Time) {
	_ = x.nc.SetDeadline(t)
	if x.ctx.Err() != nil {
		_ = x.nc.SetDeadline(past)
	}
}

func (x *call) request(request []byte) error {
	asked := time.Now()
	x.within(asked.Add(x.b.r.pace.ready))
	if err := x.w.Send(wire.KindRequest, request); err != nil {
		return absent(err)
	}
	x.within(asked.Add(x.b.r.pace.look))
	kind, _, err := x.frame()
	if errors.Is(err, os.ErrDeadlineExceeded) && x.ctx.Err() == nil && x.b.runs(x.ctx) {
		x.within(asked.Add(x.b.r.pace.ready))
		kind, _, err = x.frame()
	}
	_, refused := errors.AsType[*wire.Failure](err)
	switch {
	case refused:
		return err
	case err != nil:
		return absent(err)
	case kind != wire.KindReady:
		return errDead
	}
	if x.ctx.Err() != nil {
		return runtime.Ended(x.ctx) // and it never was
	}
	x.within(asked.Add(x.b.r.pace.ready)) // it has answered: the wait for that is over
	_ = x.w.Send(wire.KindGo, nil)        // it may have come even if this fails: what begins here has begun
	x.within(time.Time{})
	return nil
}

func absent(err error) error {
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return errSilent
	}
	return errDead
}

// runs tells whether the engine says that the container runs, and isn't frozen. One that
// it says nothing of does.
func (b *container) runs(ctx context.Context) bool {
	c, err := b.inspect(ctx)
	return err == nil && c.State == runtime.StateRunning || err != nil && !errdefs.IsNotFound(err)
}

func (b *container) inspect(ctx context.Context) (runtime.Container, error) {
	b.r.mu.Lock()
	id := b.id
	b.r.mu.Unlock()
	if id == "" {
		return runtime.Container{}, runtime.WithClass(errdefs.ErrNotFound, errors.New("the container is gone"))
	}
	return b.r.Inspect(ctx, id)
}

// done ends a call.
func (x *call) done() {
	x.release()
	x.close()
}

// drop ends a call, and cancels the operation if that goes on.
func (x *call) drop() {
	x.stop()
	x.close()
}

func (x *call) close() {
	x.closing.Do(func() {
		_ = x.nc.Close()
		x.unuse()
	})
}

func (x *call) unuse() {
	if !x.idle {
		x.s.release()
	}
}

// release takes the call out of its context's hands. False means that it has ended.
func (x *call) release() bool {
	if !x.free {
		x.free = true
		if x.ended = !x.stop(); x.ended {
			<-x.stopped
		}
	}
	return !x.ended
}

// outlive puts a call that has begun under another context than the one it began with. The
// error says that this one has ended, and the call with it.
func (x *call) outlive(ctx context.Context) (*call, error) {
	if !x.release() {
		x.drop()
		return nil, runtime.Ended(x.ctx)
	}
	return newCall(ctx, x.b, x.id, x.conn), nil
}

// frame reads a frame. A Failure is a *wire.Failure; other errors are wire.ErrProtocol, or the
// connection's.
func (c *conn) frame() (wire.Kind, []byte, error) {
	kind, payload, err := c.r.Next()
	if err != nil || kind != wire.KindFailure {
		return kind, payload, err
	}
	f := new(wire.Failure)
	if err := wire.Decode(payload, f); err != nil {
		return 0, nil, err
	}
	f.Message = wire.Cut(f.Message, maxReason)
	return 0, nil, f
}

// classes are those of errors that Failures become.
var classes = map[wire.Class]error{
	wire.ClassNotFound:     errdefs.ErrNotFound,
	wire.ClassExists:       errdefs.ErrAlreadyExists,
	wire.ClassInvalid:      errdefs.ErrInvalidArgument,
	wire.ClassPrecondition: errdefs.ErrFailedPrecondition,
	wire.ClassPermission:   errdefs.ErrPermissionDenied,
	wire.ClassExhausted:    errdefs.ErrResourceExhausted,
	wire.ClassOutOfRange:   errdefs.ErrOutOfRange,
	wire.ClassNotKilled:    errors.Join(errdefs.ErrInternal, runtime.ErrNotKilled),
	wire.ClassAborted:      errdefs.ErrAborted,
	wire.ClassUnsupported:  errdefs.ErrNotImplemented,
}

// failed makes an error of a Failure.
func failed(f *wire.Failure) error {
	class := classes[f.Class]
	if class == nil {
		class = errdefs.ErrInternal
	}
	return runtime.WithClass(class, f)
}

// open begins an operation in a container.
func (r *Runtime) open(ctx context.Context, id string, req *wire.Request) (*call, error) {
	b, err := r.container(ctx, id)
	if err != nil {
		return nil, err
	}
	return b.open(ctx, id, "", req, true)
}

// open begins an operation as a user; empty is the container's own. Where the program
// doesn't answer at its socket, the engine starts one if anyway is set. The error is classed.
func (b *container) open(ctx context.Context, id, user string, req *wire.Request, anyway bool) (*call, error) {
	if !b.socketless() {
		x, err := b.start(ctx, id, req, func(ctx context.Context) (*session, error) {
			s, err := b.take(ctx)
			if err == nil && !s.fits(user) {
				err = errUnfit
			}
			return s, err
		})
		switch {
		case errors.Is(err, errUnfit):
		case !errors.Is(err, errLost):
			b.missed.Store(false)
			return x, classed(err)
		default:
			if !b.missed.Swap(true) {
				b.r.log.WarnContext(ctx, "agent_absent", "container_id", id)
			}
			if !anyway {
				return nil, err
			}
		}
	}
	x, err := b.start(ctx, id, req, func(ctx context.Context) (*session, error) { return b.serve(ctx, id, user) })
	return x, classed(err)
}

// classed gives a Failure its class.
func classed(err error) error {
	if failure, ok := errors.AsType[*wire.Failure](err); ok {
		return failed(failure)
	}
	return err
}

// errUnfit says that the program has another user than is asked for.
var errUnfit = errors.New("the program has another user")

// errLost is for a container whose program doesn't answer.
var errLost = runtime.Unavailable(errors.New("the container's agent doesn't answer"))

// start makes a request on one session after the other, until one isn't dead. If none
// answers, the error says why that is no wonder, or is errLost. Others are errUnfit, a
// *wire.Failure, or classed.
func (b *container) start(ctx context.Context, id string, req *wire.Request, session func(context.Context) (*session, error)) (*call, error) {
	for dead := 0; dead < maxRetries && (dead == 0 || b.connected() || b.runs(ctx)); dead++ {
		s, err := session(ctx)
		if errors.Is(err, errLost) {
			break
		}
		if err != nil {
			return nil, err
		}
		x, err := b.begin(ctx, id, s, req)
		if errors.Is(err, errSilent) {
			if !s.paused() {
				s.hangUp()
			}
			break
		}
		if !errors.Is(err, errDead) {
			return x, err
		}
	}
	return nil, cmp.Or(b.excuse(ctx), errLost)
}

// excuse is the error for a container in which nobody answers, if it is no wonder.
func (b *container) excuse(ctx context.Context) error {
	c, err := b.inspect(ctx)
	switch {
	case err != nil:
		return err
	case c.State == runtime.StatePaused:
		return runtime.Precondition("the container is paused")
	case c.State != runtime.StateRunning:
		return runtime.Precondition("the container isn't running")
	}
	return nil
}

// broken is the error for a connection that failed in an operation. What isn't of the
// protocol is a matter of the container, and its state isn't as it should be:
// FailedPrecondition and ErrInterrupted.
func (x *call) broken(err error) error {
	if x.ctx.Err() != nil {
		return runtime.Ended(x.ctx)
	}
	ctx, cancel := context.WithTimeout(x.ctx, x.b.r.pace.ready)
	defer cancel()
	if why := x.b.excuse(ctx); why != nil && !errdefs.IsUnavailable(why) && ctx.Err() == nil {
		return why
	}
	return runtime.WithClass(
		errors.Join(errdefs.ErrFailedPrecondition, runtime.ErrInterrupted),
		fmt.Errorf("the container's agent broke off: %w", err),
	)
}

// next reads a frame of the operation. A Failure is an error, after which the call is
// over, as it is after any other.
func (x *call) next() (wire.Kind, []byte, error) {
	kind, payload, err := x.frame()
	if err == nil {
		return kind, payload, nil
	}
	if failure, ok := errors.AsType[*wire.Failure](err); ok {
		err = failed(failure)
	} else {
		err = x.broken(err)
	}
	x.drop() // it may wait for the rest of an input
	return 0, nil, err
}

// unexpected ends a call in which something came that has no place there.
func (x *call) unexpected(what string) error {
	err := x.broken(fmt.Errorf("%w: %s", wire.ErrProtocol, what))
	x.drop()
	return err
}

// expect reads a frame of one kind.
func (x *call) expect(kind wire.Kind) ([]byte, error) {
	got, payload, err := x.next()
	if err == nil && got != kind {
		err = x.unexpected(fmt.Sprintf("a frame of kind %d in place of one of kind %d", got, kind))
	}
	return payload, err
}

// result waits for the end of an operation that has no other answer.
func (x *call) result() error {
	_, err := x.expect(wire.KindResult)
	if err == nil {
		x.done()
	}
	return err
}

// input sends bytes as Data.
func (c *conn) input(p []byte) (int, error) {
	sent := 0
	for sent < len(p) {
		part := p[sent:min(sent+wire.MaxData, len(p))]
		if err := c.w.Send(wire.KindData, part); err != nil {
			return sent, err
		}
		sent += len(part)
	}
	return sent, nil
}

// buffers are of a frame's most data.
var buffers = sync.Pool{New: func() any { return new([wire.MaxData]byte) }}
