package main

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// frame is one of the protocol between Berm and its program, whatever size it claims.
func frame(kind byte, size int, payload string) []byte {
	return append(binary.BigEndian.AppendUint32([]byte{kind}, uint32(size)), payload...)
}

// Kinds of frames, as the package wire has them.
const (
	kindHello  = 1
	kindReady  = 3
	kindOutput = 7
	kindItem   = 8
	kindResult = 9
)

var hello = func() []byte {
	text := fmt.Sprintf(`{"version":4,"uid":%d,"gid":%d}`, os.Getuid(), os.Getgid())
	return frame(kindHello, len(text), text)
}()

// impostors are what says that it is Berm's program, and isn't. They take turns, each
// with a connection.
var impostors = []func(c *net.UnixConn){
	// A right greeting, and no answer to anything.
	func(c *net.UnixConn) { send(c, hello) },
	// No greeting either.
	func(*net.UnixConn) {},
	func(c *net.UnixConn) {
		send(c, hello)
		send(c, bytes.Repeat([]byte("\xff\x00garbage"), 1<<12))
	},
	func(c *net.UnixConn) {
		send(c, hello)
		for _, size := range []int{1<<32 - 1, 256 << 10} {
			send(c, frame(kindItem, size, "x"))
		}
	},
	func(c *net.UnixConn) { send(c, frame(kindHello, 256<<10, `{"version":4,"x":"`)) },
	// All the answers that a command needs, without having been asked, and output of
	// the last place there is.
	func(c *net.UnixConn) {
		out := "\x00\x7f\xff\xff\xff\xff\xff\xff\xfflie"
		send(c, hello)
		for range 64 {
			send(c, frame(kindReady, 0, ""))
			send(c, frame(kindOutput, len(out), out))
			send(c, frame(kindResult, 2, "{}"))
		}
	},
	// Files, which whoever reads has to keep or close.
	func(c *net.UnixConn) {
		raw, err := c.SyscallConn()
		must(err)
		null, err := os.Open("/dev/null")
		must(err)
		defer func() { _ = null.Close() }()
		fds := make([]int, 250)
		for i := range fds {
			fds[i] = int(null.Fd())
		}
		_ = raw.Write(func(fd uintptr) bool {
			_ = unix.Sendmsg(int(fd), hello, unix.UnixRights(fds...), nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
			return true
		})
	},
}

func send(c *net.UnixConn, b []byte) {
	_ = c.SetWriteDeadline(time.Now().Add(time.Second))
	_, _ = c.Write(b)
}

// impostor dials Berm's socket as often as it can, keeps up to 300 connections, and
// counts what Berm says to it.
func impostor() {
	const most = 300
	var heard atomic.Int64
	var open sync.WaitGroup
	room := make(chan struct{}, most)
	for n := 0; !over(); {
		select {
		case room <- struct{}{}:
		case <-time.After(10 * time.Millisecond):
			continue
		}
		c, err := net.DialUnix("unix", nil, &net.UnixAddr{Net: "unix", Name: socket})
		if err != nil { // nobody takes more
			<-room
			time.Sleep(time.Millisecond)
			continue
		}
		if n == 0 {
			begun()
		}
		act := impostors[n%len(impostors)]
		n++
		open.Go(func() {
			defer func() { _ = c.Close(); <-room }()
			act(c)
			_ = c.SetReadDeadline(time.Now().Add(time.Minute))
			n, _ := io.Copy(io.Discard, c)
			heard.Add(n)
		})
	}
	fmt.Printf("heard %d\n", heard.Load())
}
