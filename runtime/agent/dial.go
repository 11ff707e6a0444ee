package agent

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/agent/wire"
)

// Dial connects to a TCP port on the container's own loopback interface.
func (r *Runtime) Dial(ctx context.Context, id string, port int) (net.Conn, error) {
	nc, err := r.dial(ctx, id, port)
	if err != nil {
		return nil, fmt.Errorf("dial port %d of container %s: %w", port, id, err)
	}
	return nc, nil
}

func (r *Runtime) dial(ctx context.Context, id string, port int) (net.Conn, error) {
	if port < 1 || port > 1<<16-1 {
		return nil, runtime.Invalid("there is no such port: 1 to 65535 are")
	}
	x, err := r.open(ctx, id, &wire.Request{Op: wire.OpDial, Port: port})
	if err != nil {
		return nil, err
	}
	if x, err = x.outlive(context.WithoutCancel(ctx)); err != nil {
		return nil, err
	}
	near, far := net.Pipe()
	p := &portConn{Conn: near, x: x, port: portAddr{id, port}}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		p.drop()
		return nil, errClosed
	}
	over := make(chan struct{})
	r.tasks.Go(func() {
		defer close(over)
		p.copy(far)
	})
	r.tasks.Go(func() { // what the caller doesn't read would hold copy up
		select {
		case <-over:
		case <-x.b.done:
			_ = near.Close()
		}
	})
	return p, nil
}

// portConn is a connection to a port. What comes is handed on through a pipe, so that a
// deadline can't cut a frame in two.
type portConn struct {
	net.Conn // to read from
	x        *call
	port     portAddr

	closing sync.Once
	broken  atomic.Bool // what came isn't all
	writing sync.Mutex
	ended   bool // for writing
}

// copy hands on what comes, until the other side or the caller has enough.
func (p *portConn) copy(to net.Conn) {
	defer func() { _ = to.Close() }()
	for {
		kind, payload, err := p.x.r.Next()
		if err != nil || kind != wire.KindData {
			if err == nil && kind == wire.KindEnd {
				return // and the caller may go on writing
			}
			p.broken.Store(err != nil || kind != wire.KindResult)
			p.drop()
			return
		}
		if _, err := to.Write(payload); err != nil {
			return
		}
	}
}

func (p *portConn) drop() { p.closing.Do(p.x.drop) }

func (p *portConn) Read(b []byte) (int, error) {
	n, err := p.Conn.Read(b)
	switch {
	case errors.Is(err, io.ErrClosedPipe):
		err = net.ErrClosed
	case errors.Is(err, io.EOF) && p.broken.Load():
		err = io.ErrUnexpectedEOF
	}
	return n, err
}

func (p *portConn) Write(b []byte) (int, error) {
	p.writing.Lock()
	defer p.writing.Unlock()
	if p.ended {
		return 0, net.ErrClosed
	}
	return p.x.input(b)
}

// CloseWrite ends what is written; reading goes on.
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
	p.drop() // also what Write waits for
	return p.Conn.Close()
}

func (p *portConn) LocalAddr() net.Addr  { return p.port }
func (p *portConn) RemoteAddr() net.Addr { return p.port }

func (p *portConn) SetDeadline(t time.Time) error {
	return errors.Join(p.SetReadDeadline(t), p.SetWriteDeadline(t))
}

// SetWriteDeadline is for Writes. One that it cuts short breaks the connection.
func (p *portConn) SetWriteDeadline(t time.Time) error { return p.x.nc.SetWriteDeadline(t) }

// portAddr is a port of a container.
type portAddr struct {
	container string
	port      int
}

func (portAddr) Network() string  { return "tcp" }
func (a portAddr) String() string { return a.container + ":" + strconv.Itoa(a.port) }
