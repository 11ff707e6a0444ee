package main

import (
	"errors"
	"io"

	"github.com/bermhq/berm/runtime/agent/wire"
)

// conn is a connection with Berm, which one operation at a time has for itself.
type conn struct {
	r *wire.Reader
	w *wire.Writer
	c io.Closer
	// out is what w writes to.
	out io.Writer
	// drain, unless nil, takes the rest of what Berm sends for an operation that has
	// ended, in place of input; false if Berm never ends that.
	drain func() bool
	// sent is called once, when the Result of the operation under way has been sent.
	sent func()
	// input is whether the operation under way takes Data, and hasn't had its End.
	input bool
}

// handler does an operation. What can be known to be wrong it says before it calls
// ready, and does nothing before. It answers what Result is to carry, nil for nothing;
// an error that is a *wire.Failure is sent as it is, others by failureOf. errGone means
// that the connection is of no use any more.
type handler func(c *conn, req *wire.Request) (result any, err error)

// ready tells Berm that the operation can begin, and waits for its word.
func (c *conn) ready() error {
	if err := c.w.Send(wire.KindReady); err != nil {
		return errGone
	}
	if _, err := c.r.Expect(wire.KindGo); err != nil {
		return errGone
	}
	return nil
}

// errGone says that Berm has hung up.
var errGone = errors.New("the connection is gone")
