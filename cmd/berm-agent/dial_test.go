package main

import (
	"bytes"
	"errors"
	"io"
	"net"
	"slices"
	"strconv"
	"strings"
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

func dialRequest(port int) *wire.Request { return &wire.Request{Op: wire.OpDial, Port: port} }

func echo(c *net.TCPConn) {
	_, _ = io.Copy(c, c)
	_ = c.Close()
}

// TestDial has a server of version 6, and more data than is on the way.
func TestDial(t *testing.T) {
	k, a, ended := begun(t, dialRequest(listen(t, "tcp6", "[::1]:0", echo)))
	data := bytes.Repeat([]byte("0123456789abcdef"), 1<<16)
	sent := make(chan error, 1)
	go func() {
		var err error
		for part := range slices.Chunk(data, wire.MaxData) {
			err = errors.Join(err, k.w.Send(wire.KindData, part))
		}
		sent <- errors.Join(err, k.w.Send(wire.KindEnd, nil))
	}()
	for k.next(a) {
	}
	must(t, <-sent, <-ended)
	if !bytes.Equal(a.stdout.Bytes(), data) || !a.end {
		t.Errorf("%d bytes came back of %d; End: %t", a.stdout.Len(), len(data), a.end)
	}
}

// The other side may end long before Berm.
func TestDialHalfClosed(t *testing.T) {
	k, a, ended := begun(t, dialRequest(listen(t, "tcp4", "127.0.0.1:0", func(c *net.TCPConn) {
		_, _ = c.Write([]byte("all of hello"))
		_ = c.CloseWrite()
		b, _ := io.ReadAll(c)
		if string(b) != "hello" {
			_ = c.SetLinger(0) // a reset: the test fails
		}
		_ = c.Close()
	})))
	for !a.end {
		k.next(a)
	}
	must(t, k.w.Send(wire.KindData, []byte("hello")), k.w.Send(wire.KindEnd, nil))
	for k.next(a) {
	}
	if err := <-ended; err != nil || a.stdout.String() != "all of hello" {
		t.Errorf("%q, %v", &a.stdout, err)
	}
}

func TestDialFails(t *testing.T) {
	refused := func(port int, class wire.Class, words string) {
		t.Helper()
		k, _ := fileTalk(t, false)
		if a, ok := k.request(dialRequest(port)); ok || a.class() != class || !strings.Contains(a.failure.Message, words) {
			t.Errorf("port %d: %+v", port, a.failure)
		}
	}
	for _, port := range []int{-1, 0, 65536, 1 << 40} {
		refused(port, wire.ClassInvalid, strconv.Itoa(port))
	}
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	must(t, err)
	port := l.Addr().(*net.TCPAddr).Port
	must(t, l.Close())
	refused(port, wire.ClassPrecondition, "nobody listens at port "+strconv.Itoa(port))
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
			k, _ := fileTalk(t, false)
			a, ok := k.begin(dialRequest(listen(t, "tcp4", "127.0.0.1:0", serve)))
			for more := ok; more; more = k.next(a) {
				_ = k.w.Send(wire.KindData, []byte("hello")) // it may be over
			}
			if a.class() != wire.ClassAborted {
				t.Errorf("%+v", a.failure)
			}
		})
	}
}

// A Berm that takes nothing is sent nothing more, and one that hangs up frees the port's side.
func TestDialBackpressure(t *testing.T) {
	t.Parallel()
	took, gone := make(chan int64, 1), make(chan struct{})
	stop := make(chan struct{})
	port := listen(t, "tcp4", "127.0.0.1:0", func(c *net.TCPConn) {
		_ = c.SetReadBuffer(32 << 10)
		go func() { // floods
			var n int64
			for {
				_ = c.SetWriteDeadline(time.Now().Add(300 * time.Millisecond))
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
	k, _, ended := begun(t, dialRequest(port))
	if n := <-took; n > 64<<20 {
		t.Errorf("%d bytes were taken that nobody wanted", n)
	}
	must(t, k.stream.Close())
	if err := <-ended; !errors.Is(err, errGone) {
		t.Errorf("%v", err)
	}
	close(stop)
	<-gone
}

// Berm hangs up while the other side takes nothing, and says nothing.
func TestDialStalled(t *testing.T) {
	t.Parallel()
	port := listen(t, "tcp4", "127.0.0.1:0", func(c *net.TCPConn) {
		t.Cleanup(func() { _ = c.Close() })
	})
	k, _, ended := begun(t, dialRequest(port))
	must(t, k.stream.SetWriteDeadline(time.Now().Add(300*time.Millisecond)))
	for k.w.Send(wire.KindData, make([]byte, wire.MaxData)) == nil {
	}
	must(t, k.stream.Close())
	if <-ended == nil {
		t.Error("it went well")
	}
}
