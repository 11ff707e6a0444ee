package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/runtime"
)

// dialTimeout is how long a port may take to accept a connection.
const dialTimeout = 5 * time.Second

// Dial connects within five seconds to a TCP port on the sandbox's loopback interface. It works
// with any network. Each transfer over the connection restarts the sandbox's idle time. An idle
// connection doesn't keep the sandbox from idling out.
//
// Errors: *InvalidError, *PortError if no process listens, *StateError, *NotFoundError,
// *CapacityError, *UnsupportedError, *UnavailableError.
func (a *Access) Dial(ctx context.Context, port int) (runtime.Conn, error) {
	if port < 1 || port > 65535 {
		return nil, &InvalidError{Field: "port", Message: "must be from 1 to 65535"}
	}
	_, leave, err := a.registry.acquire(a.rec, usePort)
	if err != nil {
		return nil, err
	}
	dialCtx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	c, err := ask(dialCtx, a.registry.engine, "dial", func(ctx context.Context) (runtime.Conn, error) {
		return a.registry.opts.Runtime.Dial(ctx, a.sb.ContainerID, port)
	})
	if err != nil {
		leave()
		return nil, a.portFailed(ctx, port, err)
	}
	return &portConn{Conn: c, access: a, leave: leave}, nil
}

func (a *Access) portFailed(ctx context.Context, port int, err error) error {
	if errors.Is(err, context.DeadlineExceeded) || errdefs.IsDeadlineExceeded(err) {
		return &PortError{Port: port, Message: "nobody took the connection in time"}
	}
	if other := a.registry.explain(ctx, a.rec, a.sb, fmt.Sprintf("port %d", port), "its ports need it running", err); other != nil {
		return other
	}
	return &PortError{Port: port, Message: "nobody listens at it"}
}

// PortError says that a port of a running sandbox can't be reached. It is in errdefs'
// FailedPrecondition class.
type PortError struct {
	Port    int
	Message string
}

// Error names the port.
func (e *PortError) Error() string {
	return fmt.Sprintf("port %d in the sandbox: %s", e.Port, e.Message)
}

// FailedPrecondition puts the error into errdefs' FailedPrecondition class.
func (*PortError) FailedPrecondition() {}

// portConn counts each transfer as a use of the sandbox.
type portConn struct {
	runtime.Conn
	access *Access
	leave  func()
}

func (c *portConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if n > 0 {
		c.access.registry.touch(c.access.rec)
	}
	return n, err
}

func (c *portConn) Write(b []byte) (int, error) {
	n, err := c.Conn.Write(b)
	if n > 0 {
		c.access.registry.touch(c.access.rec)
	}
	return n, err
}

func (c *portConn) Close() error {
	c.leave()
	return c.Conn.Close()
}
