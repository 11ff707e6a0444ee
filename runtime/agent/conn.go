package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/agent/wire"
)

const (
	maxHello   = 4 << 10 // bytes read before a Hello is complete
	maxReason  = 1 << 10 // bytes of a Failure's message that are handed on
	maxID      = 1 << 31 // of users and groups
	maxRetries = 32      // connections that one operation finds dead
)

// conn is a connection with the program, which one operation at a time has for itself.
type conn struct {
	nc  net.Conn
	r   *wire.Reader
	w   *wire.Writer
	pid int // of who dialled; 0 for one that the engine started
	uid int
	gid int
	// control says that the program knows wire.Start's.
	control bool
	served  *served   // the engine's exec at its other end; nil for one that was dialled
	since   time.Time // it is idle; with the box's lock
}

func newConn(nc net.Conn) *conn { return &conn{nc: nc, w: wire.NewWriter(nc)} }

// greet reads Hello.
func (c *conn) greet(within time.Duration) error {
	if err := c.nc.SetReadDeadline(time.Now().Add(within)); err != nil {
		return err
	}
	first := &opening{from: c.nc, left: maxHello}
	c.r = wire.NewReader(first)
	payload, err := c.r.Expect(wire.KindHello)
	if err != nil {
		return err
	}
	first.left = -1
	var hello wire.Hello
	if err := wire.Decode(payload, &hello); err != nil {
		return err
	}
	switch {
	case hello.Version != wire.Version:
		return fmt.Errorf("it speaks version %d of the protocol, and not %d", hello.Version, wire.Version)
	case hello.UID < 0 || hello.UID > maxID || hello.GID < 0 || hello.GID > maxID:
		return fmt.Errorf("%w: user %d, group %d", wire.ErrProtocol, hello.UID, hello.GID)
	}
	c.uid, c.gid, c.control = hello.UID, hello.GID, hello.Control
	return c.nc.SetReadDeadline(time.Time{})
}

// opening lets no more through than a Hello needs, until it was read.
type opening struct {
	from io.Reader
	left int // -1 is no limit
}

func (o *opening) Read(p []byte) (int, error) {
	if o.left < 0 {
		return o.from.Read(p)
	}
	if o.left == 0 {
		return 0, fmt.Errorf("%w: a Hello of more than %d bytes", wire.ErrProtocol, maxHello)
	}
	n, err := o.from.Read(p[:min(len(p), o.left)])
	o.left -= n
	return n, err
}

// call is an operation under way. Its context's end makes what waits for the
// connection fail.
type call struct {
	*conn
	b       *box
	id      string // the container's
	ctx     context.Context
	spoiled bool // it can't be used for another call, however this one ends
	stop    func() bool
	stopped chan struct{} // closed when the end of the context has come through
	free    bool          // of its context
	ended   bool          // the context came first
}

// The ways a call can fail to begin; nothing has been done then.
var (
	errDead   = errors.New("the connection was dead")
	errSilent = errors.New("the program is silent")
)

// past is a deadline that is over.
var past = time.Unix(1, 0)

// begin makes a request, and returns when the program has been told to go. The
// connection is the call's from then on; with an error it is done with. Other errors
// than errDead, errSilent and the context's are a *wire.Failure.
func (b *box) begin(ctx context.Context, id string, c *conn, request []byte) (*call, error) {
	x := &call{conn: c, b: b, id: id, ctx: ctx, stopped: make(chan struct{})}
	x.stop = context.AfterFunc(ctx, func() {
		_ = c.nc.SetDeadline(past)
		close(x.stopped)
	})
	err := x.request(request)
	if err == nil {
		return x, nil
	}
	var failure *wire.Failure
	if errors.As(err, &failure) {
		x.done()
		return nil, failure
	}
	x.drop()
	if ctx.Err() != nil {
		return nil, runtime.Ended(ctx)
	}
	return nil, err
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
	kind, payload, err := x.r.Next()
	if errors.Is(err, os.ErrDeadlineExceeded) && x.ctx.Err() == nil && x.b.runs(x.ctx) {
		x.within(asked.Add(x.b.r.pace.ready))
		kind, payload, err = x.r.Next()
	}
	switch {
	case err != nil:
		return absent(err)
	case kind == wire.KindFailure:
		failure, err := parseFailure(payload)
		if err != nil {
			return errDead
		}
		return failure
	case kind != wire.KindReady:
		return errDead
	}
	if x.ctx.Err() != nil {
		return runtime.Ended(x.ctx) // and it never was
	}
	x.within(asked.Add(x.b.r.pace.ready)) // it has answered: the wait for that is over
	if err := x.w.Send(wire.KindGo); err != nil {
		return absent(err)
	}
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
func (b *box) runs(ctx context.Context) bool {
	c, err := b.inspect(ctx)
	return err == nil && c.State == runtime.StateRunning || err != nil && !errdefs.IsNotFound(err)
}

func (b *box) inspect(ctx context.Context) (runtime.Container, error) {
	b.r.mu.Lock()
	id := b.id
	b.r.mu.Unlock()
	if id == "" {
		return runtime.Container{}, runtime.WithClass(errdefs.ErrNotFound, errors.New("the container is gone"))
	}
	return b.r.Inspect(ctx, id)
}

// done ends a call after which the connection can be used again.
func (x *call) done() {
	x.release()
	if x.served != nil || x.spoiled || x.r.Interrupted() {
		x.drop()
		return
	}
	if x.nc.SetDeadline(time.Time{}) != nil {
		x.drop()
		return
	}
	x.b.put(x.conn)
}

// drop ends a call and its connection.
func (x *call) drop() {
	x.stop()
	if x.served != nil {
		x.served.end()
		return
	}
	x.b.lose(x.conn)
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

// parseFailure reads a Failure.
func parseFailure(payload []byte) (*wire.Failure, error) {
	f := new(wire.Failure)
	if err := wire.Decode(payload, f); err != nil {
		return nil, err
	}
	if len(f.Message) > maxReason {
		cut := f.Message[:maxReason]
		for len(cut) > 0 && !utf8.ValidString(cut) {
			cut = cut[:len(cut)-1]
		}
		f.Message = cut
	}
	return f, nil
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

// open begins an operation in a container, through its program or, where that isn't
// reached, one that the engine starts for it.
func (r *Runtime) open(ctx context.Context, id string, req *wire.Request) (*call, error) {
	if ctx.Err() != nil {
		return nil, runtime.Ended(ctx)
	}
	b, err := r.box(ctx, id)
	if err != nil {
		return nil, err
	}
	x, err := r.openIn(ctx, b, id, req)
	if errors.Is(err, errAbsent) {
		err = b.excuse(ctx)
		if err == nil {
			x, err = r.openServed(ctx, b, id, req)
		}
	}
	return x, err
}

// openIn is open by way of the socket: errAbsent when nobody answers there.
func (r *Runtime) openIn(ctx context.Context, b *box, id string, req *wire.Request) (*call, error) {
	request, err := json.Marshal(req)
	if err != nil {
		return nil, err
	}
	if len(request) > wire.MaxRequest {
		return nil, runtime.Invalid("the request has %d bytes, and may have %d", len(request), wire.MaxRequest)
	}
	x, err := b.start(ctx, id, request, nil)
	var failure *wire.Failure
	if errors.As(err, &failure) {
		return nil, failed(failure)
	}
	return x, err
}

// errUnfit says that the program is there, and isn't the one to do what is asked for.
var errUnfit = errors.New("the program has another user, or can't")

// start makes a request on one connection after the other, until one isn't dead. Fit,
// when not nil, says whether a connection's program will do. The error is errAbsent,
// errUnfit, the context's or a *wire.Failure.
func (b *box) start(ctx context.Context, id string, request []byte, fit func(*conn) bool) (*call, error) {
	if b.socketless() {
		return nil, errAbsent
	}
	for dead := range maxRetries {
		if dead > 0 && !b.connected() && !b.runs(ctx) {
			return nil, errAbsent // which is why
		}
		c, err := b.take(ctx)
		if err != nil {
			return nil, err
		}
		if fit != nil && !fit(c) {
			b.put(c)
			return nil, errUnfit
		}
		x, err := b.begin(ctx, id, c, request)
		switch {
		case errors.Is(err, errDead):
		case errors.Is(err, errSilent):
			return nil, errAbsent
		default:
			return x, err
		}
	}
	return nil, errAbsent
}

// excuse is the error for a container in which nobody answers, if it is no wonder.
func (b *box) excuse(ctx context.Context) error {
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
	kind, payload, err := x.r.Next()
	if err == nil && kind == wire.KindFailure {
		var f *wire.Failure
		if f, err = parseFailure(payload); err == nil {
			x.drop() // it may wait for the rest of an input
			return 0, nil, failed(f)
		}
	}
	if err != nil {
		err = x.broken(err)
		x.drop()
		return 0, nil, err
	}
	return kind, payload, nil
}

// unexpected ends a call in which something came that has no place there.
func (x *call) unexpected(what string) error {
	err := x.broken(fmt.Errorf("%w: %s", wire.ErrProtocol, what))
	x.drop()
	return err
}

// result waits for the end of an operation that has no other answer.
func (x *call) result(v any) error {
	kind, payload, err := x.next()
	if err != nil {
		return err
	}
	if kind != wire.KindResult {
		return x.unexpected("something else than a result")
	}
	return x.conclude(payload, v)
}

// conclude reads a result; the connection is free after it.
func (x *call) conclude(payload []byte, v any) error {
	if v != nil {
		if err := wire.Decode(payload, v); err != nil {
			return x.unexpected("a result that can't be read")
		}
	}
	x.done()
	return nil
}

// items hands on the Items of an operation, at most so many, until its Result. The
// error of f ends it.
func (x *call) items(most int, f func(payload []byte) error) error {
	for n := 0; ; n++ {
		kind, payload, err := x.next()
		switch {
		case err != nil:
			return err
		case kind == wire.KindResult:
			return x.conclude(payload, nil)
		case kind != wire.KindItem:
			return x.unexpected("something else than an item")
		case n >= most:
			return x.unexpected("more items than were asked for")
		}
		if err := f(payload); err != nil {
			if errors.Is(err, wire.ErrProtocol) {
				return x.unexpected(err.Error())
			}
			x.drop()
			return err
		}
	}
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
