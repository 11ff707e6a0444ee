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
	maxReason  = 1 << 10 // bytes of a Failure's message that callers get
	maxRetries = 4       // sessions that one operation tries
)

// call is an operation under way, on a connection or stream of its own. Once its context ends, reads and
// writes of the stream fail.
type call struct {
	s       *session
	b       *container
	id      string // the container's
	op      wire.Op
	nc      stream
	r       *wire.Reader
	w       *wire.Writer
	ctx     context.Context
	closing sync.Once
	stop    func() bool
	stopped chan struct{} // closed when the context has ended and the stream's deadline is set
	idle    bool          // it has released its use of the session
}

// Errors of a call that can't begin. The program has done nothing then.
var (
	errDead   = errors.New("the session was dead")
	errSilent = errors.New("the program is silent")
	errBusy   = runtime.WithClass(errdefs.ErrResourceExhausted,
		fmt.Errorf("%d operations are under way in the container, and no more may", wire.MaxStreams))
)

// past is a deadline in the past.
var past = time.Unix(1, 0)

// begin sends a request on a session, waits for Ready, and sends Go. It takes over the
// caller's use of the session. The error is errDead, errSilent, errUnfit, or classed.
func (b *container) begin(ctx context.Context, id string, s *session, req *wire.Request) (*call, error) {
	payload, err := json.Marshal(req)
	if err == nil && len(payload) > wire.MaxRequest {
		err = runtime.Invalid("the request has %d bytes, and may have %d", len(payload), wire.MaxRequest)
	}
	var nc stream
	if err == nil {
		nc, err = s.open(req.Op)
	}
	if err != nil {
		if s.served == nil {
			b.giveBack(s)
		} else {
			s.release()
		}
		return nil, err
	}
	x := &call{s: s, b: b, id: id, op: req.Op, nc: nc, r: wire.NewReader(nc), w: wire.NewWriter(nc)}
	x.bind(ctx)
	if err = x.request(payload); err == nil {
		return x, nil
	}
	if refused(err) || errors.Is(err, errUnfit) {
		x.done(true)
		return nil, err
	}
	x.drop()
	if ctx.Err() != nil {
		err = runtime.Ended(ctx)
	}
	return nil, err
}

// bind makes the end of ctx fail the call.
func (x *call) bind(ctx context.Context) {
	stopped := make(chan struct{})
	x.ctx, x.stopped = ctx, stopped
	x.stop = context.AfterFunc(ctx, func() {
		_ = x.nc.SetDeadline(past)
		close(stopped)
	})
}

// within sets the stream's deadline; the zero time is none. It keeps the deadline in the
// past once the context has ended.
func (x *call) within(t time.Time) {
	_ = x.nc.SetDeadline(t)
	if x.ctx.Err() != nil {
		_ = x.nc.SetDeadline(past)
	}
}

func (x *call) request(request []byte) error {
	asked := time.Now()
	var kind wire.Kind
	err := x.patiently(asked, x.greet)
	if err == nil {
		x.within(asked.Add(x.b.r.pace.ready))
		err = x.w.Send(wire.KindRequest, request)
	}
	if err == nil {
		err = x.patiently(asked, func() (err error) { kind, _, err = x.frame(); return err })
	}
	switch {
	case refused(err) || errors.Is(err, errOutdated) || errors.Is(err, errUnfit):
		return err
	case err != nil:
		return absent(err)
	case kind != wire.KindReady:
		return errDead
	}
	if x.ctx.Err() != nil {
		return runtime.Ended(x.ctx) // the operation never began
	}
	x.within(asked.Add(x.b.r.pace.ready)) // the program has answered, so it gets the whole time
	_ = x.w.Send(wire.KindGo, nil)        // may arrive even if this fails, so the operation counts as begun
	x.within(time.Time{})
	return nil
}

// patiently reads an answer. It asks the engine when the program has been silent for a while, and waits on
// if the container runs.
func (x *call) patiently(asked time.Time, read func() error) error {
	x.within(asked.Add(x.b.r.pace.look))
	err := read()
	if errors.Is(err, os.ErrDeadlineExceeded) && x.ctx.Err() == nil && x.b.runs(x.ctx) {
		x.within(asked.Add(x.b.r.pace.ready))
		err = read()
	}
	return err
}

// greet reads the Hello of a session that was dialled, if it hasn't been read.
func (x *call) greet() error {
	if x.s.greeted() {
		return nil
	}
	payload, err := x.r.Expect(wire.KindHello)
	if err != nil {
		return err
	}
	return x.s.meet(payload)
}

func absent(err error) error {
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return errSilent
	}
	return errDead
}

// runs reports whether the container runs and isn't paused. It asks the engine, and returns
// true if the engine can't tell.
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

// done ends a call whose Result or Failure was read. Another one may use its session, so nothing may use
// x.nc any more.
func (x *call) done(failed bool) {
	if x.s.served == nil && !x.op.Last(failed) && x.stop() {
		x.closing.Do(func() {
			_ = x.nc.SetDeadline(time.Time{})
			x.b.giveBack(x.s)
		})
		return
	}
	x.drop()
}

// drop ends a call, and cancels the operation if it is still under way.
func (x *call) drop() {
	x.stop()
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

// release detaches the call from its context. It returns false if the context has ended. It
// may be called once.
func (x *call) release() bool {
	if x.stop() {
		return true
	}
	<-x.stopped
	return false
}

// outlive binds the call to another context. If the context that the call began with has ended, outlive
// ends the call and returns an error.
func (x *call) outlive(ctx context.Context) error {
	if !x.release() {
		x.drop()
		return runtime.Ended(x.ctx)
	}
	x.bind(ctx)
	return nil
}

// frame reads a frame. It returns a Failure as an error, a *wire.Failure. Other errors are
// wire.ErrProtocol, or the connection's.
func (x *call) frame() (wire.Kind, []byte, error) {
	kind, payload, err := x.r.Next()
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

// refused reports whether an error is a Failure that the program sent.
func refused(err error) bool {
	_, is := errors.AsType[*wire.Failure](err)
	return is
}

// open begins an operation in a container.
func (r *Runtime) open(ctx context.Context, id string, req *wire.Request) (*call, error) {
	b, err := r.container(ctx, id)
	if err != nil {
		return nil, err
	}
	return b.open(ctx, id, "", req, true)
}

// open begins an operation as a user; empty is the container's own. If the program doesn't answer on
// its socket and anyway is set, the engine starts another program. The error is classed.
func (b *container) open(ctx context.Context, id, user string, req *wire.Request, anyway bool) (*call, error) {
	if !b.socketless() {
		x, err := b.start(ctx, id, req, func(ctx context.Context) (*session, error) {
			s, err := b.take(ctx)
			if err != nil {
				return nil, err
			}
			if s.user = user; s.greeted() && !s.fits() {
				b.giveBack(s)
				return nil, errUnfit
			}
			return s, nil
		})
		switch {
		case errors.Is(err, errUnfit):
		case !errors.Is(err, errLost):
			b.missed.Store(false)
			return x, err
		default:
			if !b.missed.Swap(true) {
				b.r.log.WarnContext(ctx, "agent_absent", "container_id", id)
			}
			if !anyway {
				return nil, err
			}
		}
	}
	return b.start(ctx, id, req, func(ctx context.Context) (*session, error) { return b.serve(ctx, id, user) })
}

// errUnfit says that the program runs as another user than the requested one.
var errUnfit = errors.New("the program has another user")

// errLost is the error for a container whose program doesn't answer.
var errLost = runtime.Unavailable(errors.New("the container's agent doesn't answer"))

// start tries a request on up to maxRetries sessions, until it finds one that isn't dead. If
// none answers, the error is that of excuse, or else errLost. Other errors are errUnfit, or
// classed.
func (b *container) start(ctx context.Context, id string, req *wire.Request, session func(context.Context) (*session, error)) (*call, error) {
	for dead := 0; dead < maxRetries && (dead == 0 || b.runs(ctx)); dead++ {
		s, err := session(ctx)
		if errors.Is(err, errLost) {
			break
		}
		if err != nil {
			return nil, err
		}
		x, err := b.begin(ctx, id, s, req)
		if errors.Is(err, errSilent) {
			if s.served != nil && !s.paused() {
				s.hangUp()
			}
			break
		}
		if !errors.Is(err, errDead) {
			return x, err
		}
		if s.served == nil { // the container may have been restarted
			b.ask(ctx)
		}
	}
	return nil, cmp.Or(b.excuse(ctx), errLost)
}

// excuse returns an error if the engine can explain why the program doesn't answer: the
// container is paused or doesn't run, or the engine can't find it.
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

// reply reads the answer to what was sent. If sending failed, the answer may tell why the program takes no
// more.
func (x *call) reply(unsent error, read func() error) error {
	if errors.Is(unsent, os.ErrDeadlineExceeded) {
		return x.broken(unsent)
	}
	err := read()
	if err == nil && unsent != nil {
		err = x.broken(unsent)
	}
	return err
}

// broken returns the error for a connection that failed during an operation. It is the
// context's, or that of excuse. Otherwise it is FailedPrecondition and ErrInterrupted: a
// breach of the protocol, too, is the container's fault.
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

// next reads a frame of the operation. It returns a Failure as an error. Every error ends
// the call.
func (x *call) next() (wire.Kind, []byte, error) {
	kind, payload, err := x.frame()
	if err == nil {
		return kind, payload, nil
	}
	if refused(err) {
		x.done(true)
		return 0, nil, err
	}
	err = x.broken(err)
	x.drop()
	return 0, nil, err
}

// unexpected ends a call after a frame that the protocol doesn't allow there.
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
		x.done(false)
	}
	return err
}

// buffers have the size of the largest Data of a frame.
var buffers = sync.Pool{New: func() any { return new([wire.MaxData]byte) }}
