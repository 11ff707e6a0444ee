package main

import (
	"bytes"
	"errors"
	"io"
	"net"
	"strconv"
	"testing"
	"time"

	"github.com/bermhq/berm/runtime/agent/wire"
)

// listen serves connections at a port of the loopback interface.
func listen(t *testing.T, network, address string, serve func(*net.TCPConn)) int {
	t.Helper()
	l, err := net.Listen(network, address)
	must(t, err)
	done := make(chan struct{})
	t.Cleanup(func() {
		_ = l.Close()
		<-done
	})
	go func() {
		defer close(done)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			serve(c.(*net.TCPConn))
		}
	}()
	return l.Addr().(*net.TCPAddr).Port
}

func beginDial(t *testing.T, port int) (*session, *reply) {
	t.Helper()
	s, a := begin(t, &wire.Request{Op: wire.OpDial, Port: port}), &reply{}
	s.next(a)
	return s, a
}

func echo(c *net.TCPConn) {
	_, _ = io.Copy(c, c)
	_ = c.Close()
}

func TestDial(t *testing.T) {
	for name, network := range map[string][2]string{"version 4": {"tcp4", "127.0.0.1:0"}, "version 6": {"tcp6", "[::1]:0"}} {
		t.Run(name, func(t *testing.T) {
			s, a := beginDial(t, listen(t, network[0], network[1], echo))
			data := bytes.Repeat([]byte("0123456789abcdef"), 1<<16)
			sent := make(chan error, 1)
			go func() {
				var err error
				for part := data; len(part) > 0 && err == nil; {
					n := min(len(part), wire.MaxData)
					err = s.w.Send(wire.KindData, part[:n])
					part = part[n:]
				}
				sent <- errors.Join(err, s.w.Send(wire.KindEnd, nil))
			}()
			for s.next(a) {
			}
			if err := <-sent; err != nil {
				t.Error(err)
			}
			if a.succeeds(t); !bytes.Equal(a.data, data) || !a.end {
				t.Errorf("%d bytes came back of %d; End: %t", len(a.data), len(data), a.end)
			}
			if err := s.wait(); err != nil {
				t.Error(err)
			}
		})
	}
}

// One side may end long before the other.
func TestDialHalfClosed(t *testing.T) {
	for name, tt := range map[string]struct {
		serve     func(*net.TCPConn)
		bermFirst bool
	}{
		"by Berm": {serve: func(c *net.TCPConn) {
			b, _ := io.ReadAll(c) // up to the end
			_, _ = c.Write(append([]byte("all of "), b...))
			_ = c.Close()
		}, bermFirst: true},
		"by the other": {serve: func(c *net.TCPConn) {
			_, _ = c.Write([]byte("all of hello"))
			_ = c.CloseWrite()
			b, _ := io.ReadAll(c)
			if string(b) != "hello" {
				_ = c.SetLinger(0) // a reset: the test fails
			}
			_ = c.Close()
		}},
	} {
		t.Run(name, func(t *testing.T) {
			s, a := beginDial(t, listen(t, "tcp4", "127.0.0.1:0", tt.serve))
			say := func() {
				must(t, s.w.Send(wire.KindData, []byte("hello")))
				must(t, s.w.Send(wire.KindEnd, nil))
			}
			if tt.bermFirst {
				say()
			}
			for !a.end {
				s.next(a)
			}
			if !tt.bermFirst {
				say()
			}
			for s.next(a) {
			}
			if a.succeeds(t); string(a.data) != "all of hello" {
				t.Errorf("%q", a.data)
			}
			if err := s.wait(); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestDialFails(t *testing.T) {
	for _, port := range []int{-1, 0, 65536, 1 << 40} {
		s, a := begin(t, &wire.Request{Op: wire.OpDial, Port: port}), &reply{}
		s.next(a)
		a.fails(t, wire.ClassInvalid, strconv.Itoa(port))
	}
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	must(t, err)
	port := l.Addr().(*net.TCPAddr).Port
	must(t, l.Close())
	_, a := beginDial(t, port)
	if a.fails(t, wire.ClassPrecondition, "nobody listens at port "+strconv.Itoa(port)); a.ready {
		t.Error("it was said only after Ready")
	}
}

func TestDialReset(t *testing.T) {
	for name, serve := range map[string]func(*net.TCPConn){
		"at once": func(c *net.TCPConn) {
			_ = c.SetLinger(0)
			_ = c.Close()
		},
		"with data unread": func(c *net.TCPConn) {
			_, _ = c.Read(make([]byte, 1))
			_ = c.SetLinger(0)
			_ = c.Close()
		},
	} {
		t.Run(name, func(t *testing.T) {
			s, a := begin(t, &wire.Request{Op: wire.OpDial, Port: listen(t, "tcp4", "127.0.0.1:0", serve)}), &reply{}
			for more := s.next(a); more; more = s.next(a) {
				if a.ready {
					_ = s.w.Send(wire.KindData, []byte("hello")) // it may be over
				}
			}
			a.fails(t, wire.ClassAborted, "")
			if s.wait() == nil {
				t.Error("it has ended well")
			}
		})
	}
}

// Who takes nothing is sent nothing more, either way, and a Berm that hangs up frees
// the port's side.
func TestDialBackpressure(t *testing.T) {
	took, gone := make(chan int64, 1), make(chan struct{})
	stop := make(chan struct{})
	port := listen(t, "tcp4", "127.0.0.1:0", func(c *net.TCPConn) {
		_ = c.SetReadBuffer(32 << 10)
		go func() { // floods
			var n int64
			for {
				_ = c.SetWriteDeadline(time.Now().Add(time.Second))
				m, err := c.Write(make([]byte, 64<<10))
				if n += int64(m); err != nil {
					break
				}
			}
			took <- n
			<-stop
			_ = c.SetDeadline(time.Now().Add(20 * time.Second))
			_, _ = io.Copy(io.Discard, c)
			_ = c.Close()
			close(gone)
		}()
	})
	s, _ := beginDial(t, port)
	if n := <-took; n > 64<<20 {
		t.Errorf("%d bytes were taken that nobody wanted", n)
	}
	must(t, s.file.SetWriteDeadline(time.Now().Add(time.Second)))
	sent := 0
	for ; sent < 64<<20; sent += wire.MaxData {
		if s.w.Send(wire.KindData, make([]byte, wire.MaxData)) != nil {
			break
		}
	}
	if sent >= 64<<20 {
		t.Errorf("%d bytes were sent to who takes nothing", sent)
	}
	must(t, s.file.Close())
	if err := s.wait(); !errors.Is(err, errGone) {
		t.Errorf("%v", err)
	}
	close(stop)
	<-gone
}

// Berm hangs up while the other side takes nothing, and says nothing.
func TestDialStalled(t *testing.T) {
	port := listen(t, "tcp4", "127.0.0.1:0", func(c *net.TCPConn) {
		t.Cleanup(func() { _ = c.Close() })
	})
	s, _ := beginDial(t, port)
	must(t, s.file.SetWriteDeadline(time.Now().Add(time.Second)))
	for s.w.Send(wire.KindData, make([]byte, wire.MaxData)) == nil {
	}
	must(t, s.file.Close())
	if err := s.wait(); err == nil {
		t.Error("it went well")
	}
}
