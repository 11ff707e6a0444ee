package runtimetest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/runtime"
)

// over is closed when the container's main process ends; f.mu is held, and it runs.
func (c *fakeContainer) over() <-chan struct{} {
	if c.ended == nil {
		c.ended = make(chan struct{})
	}
	return c.ended
}

// Listen has all containers listen at a port: each connection that Dial makes is handed
// to serve, in a goroutine of its own, with a CloseWrite method like the other end's. Nil
// stops.
func (f *Fake) Listen(port int, serve func(net.Conn)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if serve == nil {
		delete(f.ports, port)
		return
	}
	f.ports[port] = serve
}

// Dial implements runtime.Insider. Nobody listens but for Listen.
func (f *Fake) Dial(ctx context.Context, id string, port int) (runtime.Conn, error) {
	if port < 1 || port > 65535 {
		return nil, runtime.Invalid("port %d", port)
	}
	return inside(ctx, f, "dial", id, func(c *fakeContainer) (runtime.Conn, error) {
		serve := f.ports[port]
		if serve == nil {
			return nil, fmt.Errorf("nobody listens at port %d of %s: %w", port, id, errdefs.ErrFailedPrecondition)
		}
		ours, theirs := connPair()
		if c.conns == nil {
			c.conns = map[*pairConn]struct{}{}
		}
		c.conns[theirs] = struct{}{}
		go func() {
			serve(theirs)
			f.mu.Lock()
			defer f.mu.Unlock()
			delete(c.conns, theirs)
		}()
		return ours, nil
	})
}

// pairConn is one end of a connection each direction of which can be closed by itself.
type pairConn struct {
	net.Conn          // what it reads from
	out      net.Conn // what it writes to
}

func connPair() (a, b *pairConn) {
	toA, fromB := net.Pipe()
	toB, fromA := net.Pipe()
	return &pairConn{toA, fromA}, &pairConn{toB, fromB}
}

func (c *pairConn) Write(b []byte) (int, error) { return c.out.Write(b) }
func (c *pairConn) CloseWrite() error           { return c.out.Close() }
func (c *pairConn) Close() error                { return errors.Join(c.Conn.Close(), c.out.Close()) }

func (c *pairConn) SetWriteDeadline(t time.Time) error { return c.out.SetWriteDeadline(t) }
func (c *pairConn) SetDeadline(t time.Time) error {
	return errors.Join(c.SetReadDeadline(t), c.out.SetWriteDeadline(t))
}

// cutOff ends what goes on inside a container with it; f.mu is held.
func (c *fakeContainer) cutOff() {
	c.endProcesses()
	for conn := range c.conns {
		_ = conn.Close()
	}
	if c.ended != nil {
		close(c.ended)
		c.ended = nil
	}
}
