package main

import (
	"errors"
	"io"
	"os"
	"time"

	"github.com/hashicorp/yamux"

	"github.com/bermhq/berm/runtime/agent/wire"
)

// conn is the stream of one operation.
type conn struct {
	r *wire.Reader
	w *wire.Writer
	c io.Closer
	// after, unless nil, runs after the operation. sent says whether Berm was sent a Result or Failure.
	after func(sent bool)
}

// newConn makes the conn of a stream.
func newConn(stream io.ReadWriteCloser) *conn {
	return &conn{r: wire.NewReader(stream), w: wire.NewWriter(stream), c: stream}
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

// gone reports whether Berm has hung up. It reads nothing. No other goroutine may read meanwhile.
func (c *conn) gone() bool {
	s, ok := c.c.(*yamux.Stream)
	if !ok {
		return false
	}
	_ = s.SetReadDeadline(time.Unix(1, 0)) // can't fail
	_, err := s.Read(nil)
	_ = s.SetReadDeadline(time.Time{})
	return err != nil && !errors.Is(err, yamux.ErrTimeout)
}

// writeTime is how long Berm may read nothing before the session ends. A stream that is closed on this
// side waits for Berm without limit, as Berm may read slowly.
const writeTime = time.Minute

// session serves Berm over a connection until that ends.
func (srv *server) session(c io.ReadWriteCloser) error {
	hello := wire.Hello{Version: wire.Version, UID: os.Getuid(), GID: os.Getgid(), PID: os.Getpid(), Begun: srv.begun}
	if err := wire.NewWriter(c).SendJSON(wire.KindHello, hello); err != nil {
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
		go srv.serve(newConn(stream))
	}
}

// serve does the operation of a stream.
func (srv *server) serve(c *conn) {
	defer func() {
		_ = c.c.Close()
		srv.tidy.Reset(quiet)
	}()
	payload, err := c.r.Expect(wire.KindRequest)
	if err != nil {
		return
	}
	var req wire.Request
	if wire.Decode(payload, &req) != nil {
		return
	}
	var result any
	if h := srv.handler(req.Op); h != nil {
		result, err = h(c, &req)
	} else {
		err = &wire.Failure{Class: wire.ClassUnsupported, Message: "there is no operation " + quote(string(req.Op))}
	}
	switch {
	case errors.Is(err, errGone):
	case err != nil:
		err = c.w.SendJSON(wire.KindFailure, failureOf(err))
	case result == nil:
		err = c.w.Send(wire.KindResult, []byte("{}"))
	default:
		err = c.w.SendJSON(wire.KindResult, result)
	}
	if c.after != nil {
		c.after(err == nil)
	}
}
