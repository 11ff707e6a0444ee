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

// PortAccess connects to the TCP ports of one sandbox, on the sandbox's own loopback interface,
// whatever its network. It is safe for many goroutines.
type PortAccess struct {
	registry *Registry
	rec      *record
	sb       Sandbox
}

// Ports returns access to the ports of a sandbox. It fails with a *NotFoundError if there is
// none. If the sandbox doesn't run, it returns a *StateError beside the access: nothing would
// listen in a new container.
func (r *Registry) Ports(ctx context.Context, tenant, key string) (*PortAccess, error) {
	id, err := r.open(tenant, key)
	if err != nil {
		return nil, err
	}
	rec, sb, err := r.recordSoon(ctx, id)
	if err != nil {
		return nil, err
	}
	p := &PortAccess{registry: r, rec: rec, sb: sb}
	return p, usePort.check(p.sb)
}

// SessionID is the sandbox's; a later call of Ports may find another.
func (p *PortAccess) SessionID() string { return p.sb.SessionID }

// Dial connects to a port, within five seconds. Each transfer over the connection counts as a
// use of the sandbox; the connection alone doesn't.
//
// Errors: *InvalidError, *PortError when nobody listens, *StateError, *NotFoundError,
// *CapacityError, *UnsupportedError, *UnavailableError.
func (p *PortAccess) Dial(ctx context.Context, port int) (runtime.Conn, error) {
	if port < 1 || port > 65535 {
		return nil, &InvalidError{Field: "port", Message: "must be from 1 to 65535"}
	}
	access, err := p.registry.acquire(p.rec, usePort)
	if err != nil {
		return nil, err
	}
	dialCtx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	c, err := ask(dialCtx, p.registry.engine, "dial", func(ctx context.Context) (runtime.Conn, error) {
		return p.registry.opts.Runtime.Dial(ctx, p.sb.ContainerID, port)
	})
	if err != nil {
		access.Close()
		return nil, p.failed(ctx, port, err)
	}
	return &portConn{Conn: c, access: access}, nil
}

func (p *PortAccess) failed(ctx context.Context, port int, err error) error {
	switch {
	case errdefs.IsNotImplemented(err):
		return &UnsupportedError{Key: p.sb.Key, Err: err}
	case errors.Is(err, context.DeadlineExceeded), errdefs.IsDeadlineExceeded(err):
		return &PortError{Port: port, Message: "nobody took the connection in time"}
	case errdefs.IsUnavailable(err):
		return &UnavailableError{Err: fmt.Errorf("dial port %d in sandbox %s: %w", port, p.sb.Key, err)}
	case !errdefs.IsNotFound(err) && !errdefs.IsFailedPrecondition(err) && !errdefs.IsInternal(err):
		return fmt.Errorf("dial port %d in sandbox %s: %w", port, p.sb.Key, err)
	}
	if dead := p.registry.checkAlive(ctx, p.rec, p.sb, "its ports need it running"); dead != nil {
		return dead
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
	c.access.Close()
	return c.Conn.Close()
}
