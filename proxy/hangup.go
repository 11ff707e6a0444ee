package proxy

import (
	"net"
	"syscall"

	"golang.org/x/sys/unix"
)

// HungUp reports whether a connection has one of the events of poll(2), has failed, or has
// lost its peer. It does so even while bytes of the peer are unread. It returns false for an
// in-process connection.
func HungUp(c net.Conn, events int16) bool {
	sc, ok := c.(syscall.Conn)
	if !ok {
		return false
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return true
	}
	fds := []unix.PollFd{{Events: events}}
	err = raw.Control(func(fd uintptr) {
		fds[0].Fd = int32(fd)
		_, _ = unix.Poll(fds, 0) // after an interrupt, the caller's next call sees the event
	})
	return err != nil || fds[0].Revents != 0 // Control fails once Berm has closed the connection
}
