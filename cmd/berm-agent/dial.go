package main

import (
	"errors"
	"io"
	"os"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/runtime/agent/wire"
)

const (
	dialTimeout = 5 * time.Second
	// stallCheck is how often toPort checks that Berm is still connected, while the port's program
	// reads nothing.
	stallCheck = 2 * time.Second
)

func dialPort(c *conn, req *wire.Request) (any, error) {
	if req.Port < 1 || req.Port > 65535 {
		return nil, invalid("the port %d is none: they go from 1 to 65535", req.Port)
	}
	s, err := dial(req.Port)
	if err != nil {
		return nil, err
	}
	defer func() { _ = s.Close() }()
	if err := c.ready(); err != nil {
		return nil, err
	}
	in := make(chan error, 1)
	go func() {
		err := toPort(&upload{conn: c}, s)
		in <- err
		if err != nil {
			_ = s.Close() // fromPort ends
		}
	}()
	if err := fromPort(c, s); err != nil {
		select {
		case first := <-in:
			if first != nil && !errors.Is(err, errGone) {
				return nil, first
			}
		default:
		}
		return nil, err
	}
	return nil, <-in
}

// toPort copies Data to the port, and ends its writing side at End.
func toPort(up *upload, s *pollable) error {
	for {
		b, err := up.next()
		if errors.Is(err, io.EOF) {
			return shutDown(s)
		}
		if err != nil {
			return err
		}
		for len(b) > 0 {
			_ = s.SetWriteDeadline(time.Now().Add(stallCheck)) // sockets support deadlines
			n, err := s.Write(b)
			b = b[n:]
			if errors.Is(err, os.ErrDeadlineExceeded) && !up.gone() {
				continue
			}
			if err != nil {
				return broken(err)
			}
		}
	}
}

// fromPort sends what the port's program writes as Data, and then End.
func fromPort(c *conn, s *pollable) error {
	buf := buffers.Get().(*[wire.MaxData]byte)
	defer buffers.Put(buf)
	for {
		n, err := s.Read(buf[:])
		if n > 0 && c.send(wire.KindData, buf[:n]) != nil {
			return errGone
		}
		if errors.Is(err, io.EOF) {
			return c.send(wire.KindEnd, nil)
		}
		if err != nil {
			return broken(err)
		}
	}
}

func broken(err error) error {
	return &wire.Failure{Class: wire.ClassAborted, Message: "the connection was broken off inside: " + reason(err)}
}

// shutDown closes the writing side of s.
func shutDown(s *pollable) error {
	raw, err := s.SyscallConn()
	if err != nil {
		return broken(err)
	}
	_ = raw.Control(func(fd uintptr) { _ = unix.Shutdown(int(fd), unix.SHUT_WR) }) // a read reports a failure
	return nil
}

// dial connects to a port of 127.0.0.1, or else of ::1.
func dial(port int) (*pollable, error) {
	s, err := connect(&unix.SockaddrInet4{Port: port, Addr: [4]byte{127, 0, 0, 1}}, unix.AF_INET)
	if err == nil {
		return s, nil
	}
	six := &unix.SockaddrInet6{Port: port}
	six.Addr[15] = 1
	if s, err6 := connect(six, unix.AF_INET6); err6 == nil {
		return s, nil
	}
	if errors.Is(err, unix.ECONNREFUSED) || errors.Is(err, unix.ENETUNREACH) || errors.Is(err, unix.EADDRNOTAVAIL) {
		return nil, &wire.Failure{Class: wire.ClassPrecondition, Message: "nobody listens at port " + strconv.Itoa(port)}
	}
	return nil, &wire.Failure{Class: failureOf(err).Class, Message: "port " + strconv.Itoa(port) + ": " + reason(err)}
}

// connect connects to a port or to Berm. Waiting takes no thread.
func connect(to unix.Sockaddr, family int) (*pollable, error) {
	fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	_ = kernel.do(func() error { return unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1) }) // lower latency, if this is TCP
	try := func() error { return kernel.do(func() error { return unix.Connect(fd, to) }) }
	err = try()
	s := socket(os.NewFile(uintptr(fd), "socket"))
	raw, failed := s.SyscallConn()
	if failed != nil {
		return nil, failed
	}
	_ = s.SetWriteDeadline(time.Now().Add(dialTimeout)) // sockets support deadlines
	if waiting(err) {
		// Once the socket is writable, a second connect returns the result of the first.
		if late := raw.Write(func(uintptr) bool {
			if err = try(); errors.Is(err, unix.EISCONN) {
				err = nil
			}
			return !waiting(err)
		}); late != nil {
			err = unix.ETIMEDOUT
		}
	}
	_ = s.SetWriteDeadline(time.Time{})
	if err != nil {
		_ = s.Close()
		return nil, err
	}
	return s, nil
}

func waiting(err error) bool {
	return errors.Is(err, unix.EINPROGRESS) || errors.Is(err, unix.EALREADY) || errors.Is(err, unix.EINTR)
}
