package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/runtime"
)

// Bounds of connections to ports.
const (
	maxPortConns = 256 // open at once to one sandbox
	dialTimeout  = 5 * time.Second
)

// PortAccess is the way to the TCP ports of one sandbox, on its own loopback interface,
// whatever its network. It is safe for many goroutines.
type PortAccess struct {
	m    *Manager
	rec  *record
	sb   Sandbox
	into dialer
}

// dialer is what ports need of a runtime.Insider.
type dialer interface {
	Dial(ctx context.Context, id string, port int) (net.Conn, error)
}

var _ dialer = runtime.Insider(nil)

// Ports finds the sandbox whose ports are to be used: *NotFoundError if there is none,
// and *StateError, beside the sandbox, if it doesn't run, as nobody would listen in one
// that is made again.
func (m *Manager) Ports(ctx context.Context, tenant, key string) (*PortAccess, error) {
	key, err := ParseKey(key)
	if err != nil {
		return nil, err
	}
	if err := m.available(); err != nil {
		return nil, err
	}
	into, ok := m.opts.Runtime.(dialer)
	if !ok {
		return nil, &UnsupportedError{Key: key}
	}
	id := keyID{tenant, key}
	rec := m.recordOf(id)
	if rec == nil {
		if rec, err = m.madeSoon(ctx, id); err != nil {
			return nil, err
		}
	}
	p := &PortAccess{m: m, rec: rec, sb: m.snapshot(rec), into: into}
	return p, p.running(p.sb)
}

// SessionID is the sandbox's; a later call of Ports may find another.
func (p *PortAccess) SessionID() string { return p.sb.SessionID }

func (p *PortAccess) running(sb Sandbox) error {
	switch sb.Status {
	case StatusRunning:
		return nil
	case StatusExpired:
		return &NotFoundError{Key: sb.Key}
	}
	return &StateError{Key: sb.Key, Status: sb.Status, Want: "its ports need it running"}
}

// Dial connects to a port, within five seconds. Every byte that the connection carries
// counts as a use of the sandbox; the connection alone doesn't. It has a CloseWrite
// method.
//
// Errors: *InvalidError, *PortError when nobody listens, *StateError, *NotFoundError,
// *CapacityError, *UnsupportedError, *UnavailableError.
func (p *PortAccess) Dial(ctx context.Context, port int) (net.Conn, error) {
	if port < 1 || port > 65535 {
		return nil, &InvalidError{Field: "port", Message: "must be from 1 to 65535"}
	}
	if err := p.begin(); err != nil {
		return nil, err
	}
	var c net.Conn
	dialCtx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	err := p.m.call(dialCtx, "dial", func(ctx context.Context) error {
		var err error
		c, err = p.into.Dial(ctx, p.sb.ContainerID, port)
		return err
	})
	if err != nil {
		p.end()
		return nil, p.failed(ctx, port, err)
	}
	return &portConn{Conn: c, p: p}, nil
}

// begin makes sure of a place for one more connection.
func (p *PortAccess) begin() error {
	p.m.mu.Lock()
	defer p.m.mu.Unlock()
	if err := p.running(p.rec.snapshotLocked(time.Now())); err != nil {
		return err
	}
	return p.rec.enterLocked(&p.rec.conns, maxPortConns, "connections to its ports")
}

func (p *PortAccess) end() {
	p.m.mu.Lock()
	defer p.m.mu.Unlock()
	p.rec.conns--
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
	switch dead := p.m.lookAgain(ctx, p.rec, p.sb); {
	case errors.Is(dead, errNeverStarted):
		return &StateError{Key: p.sb.Key, Status: StatusStopped, Want: "its ports need it running"}
	case dead != nil:
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

// portConn notes each use, and its end.
type portConn struct {
	net.Conn
	p    *PortAccess
	once sync.Once
}

func (c *portConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if n > 0 {
		c.p.m.touch(c.p.rec)
	}
	return n, err
}

func (c *portConn) Write(b []byte) (int, error) {
	n, err := c.Conn.Write(b)
	if n > 0 {
		c.p.m.touch(c.p.rec)
	}
	return n, err
}

// CloseWrite ends what is sent, and leaves what comes.
func (c *portConn) CloseWrite() error {
	if h, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return h.CloseWrite()
	}
	return errors.ErrUnsupported
}

func (c *portConn) Close() error {
	c.once.Do(c.p.end)
	return c.Conn.Close()
}
