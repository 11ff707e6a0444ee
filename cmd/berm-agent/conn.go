package main

import (
	"errors"
	"io"
	"os"
	"sync/atomic"
	"time"

	"github.com/hashicorp/yamux"

	"github.com/bermhq/berm/runtime/agent/wire"
)

// carrier carries one operation: it is a socket, or a yamux stream.
type carrier interface {
	io.ReadWriteCloser
	// gone reports whether Berm has hung up. It reads nothing. No other goroutine may read meanwhile.
	gone() bool
}

// conn is one operation's connection with Berm.
type conn struct {
	carrier
	r *wire.Reader
	w *wire.Writer
	// after, unless nil, runs after the operation. sent says whether Berm was sent a Result or Failure.
	after func(sent bool)
	// next, unless nil, gets the next Request.
	next chan request
	// hungUp, unless nil, is called if Berm hangs up.
	hungUp atomic.Pointer[func()]
}

// request is a Request, or why there is none.
type request struct {
	payload []byte
	err     error
}

// newConn makes the conn of a carrier.
func newConn(s carrier) *conn {
	return &conn{carrier: s, w: wire.NewWriter(s)} // request makes the reader
}

// request waits for the next Request. Meanwhile, c keeps nothing of the last operation.
func (c *conn) request() ([]byte, error) {
	c.w, c.after = wire.NewWriter(c), nil
	c.hungUp.Store(nil)
	if next := c.next; next != nil {
		c.next = nil
		got := <-next
		return got.payload, got.err
	}
	c.r = wire.NewReader(c)
	return c.r.Expect(wire.KindRequest)
}

// watch calls f if Berm hangs up during the rest of the operation, which can't read from c any more.
func (c *conn) watch(f func()) {
	next, r := make(chan request, 1), wire.NewReader(c)
	c.r = r // the one before keeps a large request
	c.next = next
	c.hungUp.Store(&f)
	go func() {
		payload, err := r.Expect(wire.KindRequest)
		next <- request{payload, err}
		if f := c.hungUp.Load(); err != nil && f != nil {
			(*f)()
		}
	}()
}

// handler does an operation. It changes nothing before it calls ready. A nil result is sent as an empty
// Result. failureOf converts an error for Berm; errGone only ends the stream.
type handler func(c *conn, req *wire.Request) (result any, err error)

// ready tells Berm that the operation can begin, and waits for Go. Its error is errGone.
func (c *conn) ready() error {
	err := c.send(wire.KindReady, nil)
	if err == nil {
		if _, failed := c.r.Expect(wire.KindGo); failed != nil {
			err = errGone
		}
	}
	return err
}

// send sends a frame. Its error is errGone.
func (c *conn) send(kind wire.Kind, payload []byte) error {
	if c.w.Send(kind, payload) != nil {
		return errGone
	}
	return nil
}

// item sends one of many answers. Its error is errGone.
func (c *conn) item(v any) error {
	if c.w.SendJSON(wire.KindItem, v) != nil {
		return errGone
	}
	return nil
}

// errGone says that Berm has hung up.
var errGone = errors.New("the connection is gone")

// muxStream is a yamux stream.
type muxStream struct{ *yamux.Stream }

// gone returns false while something that Berm sent is left to read.
func (s muxStream) gone() bool {
	_ = s.SetReadDeadline(time.Unix(1, 0)) // can't fail
	_, err := s.Read(nil)
	_ = s.SetReadDeadline(time.Time{})
	return err != nil && !errors.Is(err, yamux.ErrTimeout)
}

// writeTime is how long Berm may read nothing before the session ends. A stream that is closed on this
// side waits for Berm without limit, as Berm may read slowly.
const writeTime = time.Minute

// greet sends Hello.
func (srv *server) greet(w *wire.Writer) error {
	return w.SendJSON(wire.KindHello, wire.Hello{
		Version: wire.Version, UID: os.Getuid(), GID: os.Getgid(), PID: os.Getpid(), Begun: srv.begun,
	})
}

// session serves Berm on the streams of a yamux session until that ends.
func (srv *server) session(c io.ReadWriteCloser) error {
	if err := srv.greet(wire.NewWriter(c)); err != nil {
		return err
	}
	mux, err := yamux.Server(&wire.Joined{ReadWriteCloser: c}, wire.Mux(writeTime, 0))
	if err != nil {
		return err
	}
	defer func() { _ = mux.Close() }()
	for {
		stream, err := mux.AcceptStream()
		if err != nil {
			return err
		}
		go func() {
			c := newConn(muxStream{stream})
			payload, err := c.request()
			srv.talk(c, payload, err)
		}()
	}
}

// talk does one operation after another until there is no Request, and closes c.
func (srv *server) talk(c *conn, payload []byte, err error) {
	for err == nil && srv.serve(c, payload) {
		payload, err = c.request()
	}
	_ = c.Close()
}

// serve does an operation. It returns whether Berm may request another one.
func (srv *server) serve(c *conn, payload []byte) bool {
	defer srv.tidy.Reset(quiet)
	var req wire.Request
	if wire.Decode(payload, &req) != nil {
		return false
	}
	var result any
	var err error
	if h := srv.handler(req.Op); h != nil {
		result, err = h(c, &req)
	} else {
		err = &wire.Failure{Class: wire.ClassUnsupported, Message: "there is no operation " + quote(string(req.Op))}
	}
	failed := err != nil
	switch {
	case errors.Is(err, errGone):
	case failed:
		err = c.w.SendJSON(wire.KindFailure, failureOf(err))
	case result == nil:
		err = c.w.Send(wire.KindResult, []byte("{}"))
	default:
		err = c.w.SendJSON(wire.KindResult, result)
	}
	if c.after != nil {
		c.after(err == nil)
	}
	return err == nil && !req.Op.Last(failed)
}
