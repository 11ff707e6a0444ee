package portproxy

import (
	"bufio"
	"net"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/proxy"
)

// stuckTimes is how many times as long as a port may take for a part of a request it may
// leave input of another protocol alone.
const stuckTimes = 10

// tunnel watches a connection that has switched to another protocol. One side may end
// what it sends and still be answered; but nobody may be left there, and then the other
// side can keep the connection for as long as it likes, by just doing nothing. So once a
// side has ended, it is closed after some time in which not a byte has moved. That a
// caller has left may not show while all is full of what the port doesn't take, and so
// that is given up in the end, too.
type tunnel struct {
	caller net.Conn
	port   *patientConn
	idle   time.Duration
	done   chan struct{}
	ended  proxy.Tasks
}

func newTunnel(caller net.Conn, port *patientConn, idle time.Duration) *tunnel {
	t := &tunnel{caller: caller, port: port, idle: idle, done: make(chan struct{})}
	t.ended.Abort = func() {
		_ = caller.Close()
		_ = port.Close()
	}
	t.ended.Go(t.watch)
	return t
}

// stop ends the watch.
func (t *tunnel) stop() {
	close(t.done)
	t.ended.Wait()
}

func (t *tunnel) watch() {
	tick := time.NewTicker(max(t.idle/10, time.Millisecond))
	defer tick.Stop()
	moves, gone, since := int64(-1), false, time.Now()
	for {
		select {
		case <-t.done:
			return
		case <-tick.C:
		}
		if n, left := t.port.moves.Load(), t.port.over.Load() || hungUp(t.caller); n != moves || left != gone {
			moves, gone, since = n, left, time.Now()
		}
		quiet := time.Since(since)
		if gone && quiet >= t.idle || t.port.writing.Load() && quiet >= stuckTimes*t.idle {
			_ = t.caller.Close()
			_ = t.port.Close()
			return
		}
	}
}

// hungUp tells whether the other side of a connection sends no more, also while nobody
// reads what it has sent.
func hungUp(c net.Conn) bool {
	sc, ok := c.(syscall.Conn)
	if !ok {
		return false // an in-process one
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return true
	}
	fds := []unix.PollFd{{Events: unix.POLLRDHUP}}
	err = raw.Control(func(fd uintptr) {
		fds[0].Fd = int32(fd)
		_, _ = unix.Poll(fds, 0) // if it is interrupted, the next look tells
	})
	return err != nil || fds[0].Revents != 0
}

// Hijack gives the caller's connection to who switches protocols.
func (w *portWriter) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	conn, buf, err := w.rc.Hijack()
	if err == nil {
		w.tunnel = newTunnel(conn, w.p.conn, w.p.Timeout)
	}
	return conn, buf, err
}
