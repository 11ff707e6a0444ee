// Package pipes gives servers connections in memory, so that tests run on a clock of their own.
package pipes

import (
	"net"
	"sync"
)

// Listener accepts the connections that a test hands to it.
type Listener struct {
	conns  chan net.Conn
	closed chan struct{}
	once   sync.Once
}

// Listen makes a listener.
func Listen() *Listener { return &Listener{conns: make(chan net.Conn), closed: make(chan struct{})} }

// Dial returns the client's end of a connection that holds nothing between its ends.
func (l *Listener) Dial() net.Conn {
	client, server := net.Pipe()
	l.Hand(server)
	return client
}

// Hand has the server accept a connection. It closes the connection and returns false if the
// listener is closed.
func (l *Listener) Hand(c net.Conn) bool {
	select {
	case l.conns <- c:
		return true
	case <-l.closed:
		_ = c.Close()
		return false
	}
}

// Accept waits for a connection.
func (l *Listener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.closed:
		return nil, net.ErrClosed
	}
}

// Close ends Accept and Hand.
func (l *Listener) Close() error {
	l.once.Do(func() { close(l.closed) })
	return nil
}

// Addr returns the address of a unix socket.
func (l *Listener) Addr() net.Addr { return &net.UnixAddr{Name: "pipe", Net: "unix"} }
