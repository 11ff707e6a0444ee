package agent

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/agent/wire"
)

// Dial connects to a TCP port on the container's own loopback interface.
func (r *Runtime) Dial(ctx context.Context, id string, port int) (runtime.Conn, error) {
	nc, err := r.dial(ctx, id, port)
	if err != nil {
		return nil, fmt.Errorf("dial port %d of container %s: %w", port, id, err)
	}
	return nc, nil
}

func (r *Runtime) dial(ctx context.Context, id string, port int) (*portConn, error) {
	if port < 1 || port > 1<<16-1 {
		return nil, runtime.Invalid("there is no such port: 1 to 65535 are")
	}
	x, err := r.open(ctx, id, &wire.Request{Op: wire.OpDial, Port: port})
	if err != nil {
		return nil, err
	}
	if err := x.outlive(context.WithoutCancel(ctx)); err != nil {
		return nil, err
	}
	return &portConn{x: x, port: portAddr{id, port}}, nil
}

// portConn is a connection to a port. If a deadline interrupts the read of a frame, x.r goes on in the
// middle of it.
type portConn struct {
	x    *call
	port portAddr

	closed  atomic.Bool
	reading sync.Mutex
	rest    []byte // received, but not read yet
	end     error  // the error of further Reads

	writing sync.Mutex
	ended   bool // CloseWrite was called
}

func (p *portConn) Read(b []byte) (int, error) {
	p.reading.Lock()
	defer p.reading.Unlock()
	for {
		switch {
		case p.closed.Load():
			return 0, net.ErrClosed
		case len(p.rest) > 0:
			n := copy(b, p.rest)
			p.rest = p.rest[n:]
			return n, nil
		case p.end != nil:
			return 0, p.end
		}
		kind, payload, err := p.x.r.Next()
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded) && !p.closed.Load():
			return 0, err
		case err == nil && kind == wire.KindData:
			p.rest = payload
		case err == nil && kind == wire.KindEnd: // and the caller may go on writing
			p.end = io.EOF
		default:
			p.end = io.ErrUnexpectedEOF
			p.x.drop()
		}
	}
}

func (p *portConn) Write(b []byte) (int, error) {
	p.writing.Lock()
	defer p.writing.Unlock()
	if p.ended {
		return 0, net.ErrClosed
	}
	sent := 0
	for part := range slices.Chunk(b, wire.MaxData) {
		if err := p.x.w.Send(wire.KindData, part); err != nil {
			return sent, err
		}
		sent += len(part)
	}
	return sent, nil
}

// CloseWrite closes the writing side. Reads go on.
func (p *portConn) CloseWrite() error {
	p.writing.Lock()
	defer p.writing.Unlock()
	if p.ended {
		return nil
	}
	p.ended = true
	return p.x.w.Send(wire.KindEnd, nil)
}

func (p *portConn) Close() error {
	p.closed.Store(true)
	_ = p.x.nc.SetDeadline(past) // ends Reads and Writes that wait
	p.x.drop()
	return nil
}

func (p *portConn) LocalAddr() net.Addr  { return p.port }
func (p *portConn) RemoteAddr() net.Addr { return p.port }

func (p *portConn) SetDeadline(t time.Time) error     { return p.x.nc.SetDeadline(t) }
func (p *portConn) SetReadDeadline(t time.Time) error { return p.x.nc.SetReadDeadline(t) }

// SetWriteDeadline sets the deadline of Writes. A Write that it cuts short breaks the connection.
func (p *portConn) SetWriteDeadline(t time.Time) error { return p.x.nc.SetWriteDeadline(t) }

// portAddr is a port of a container.
type portAddr struct {
	container string
	port      int
}

func (portAddr) Network() string  { return "tcp" }
func (a portAddr) String() string { return a.container + ":" + strconv.Itoa(a.port) }
