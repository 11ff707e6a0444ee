package portproxy

import (
	"bufio"
	"net"
	"time"

	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/proxy"
)

// stuckTimes is for how many timeouts a port may leave bytes of a tunnel unread.
const stuckTimes = 10

// tunnel watches a connection that has switched to another protocol. A side may close its
// direction and still wait for an answer. So tunnel closes the connection only once a side has
// ended and no byte has moved for a timeout. Without that, the other side could keep the
// connection forever. While the port doesn't read, tunnel may not see that the caller left.
// It closes a connection whose write to the port is stuck for ten timeouts as well.
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
		if n, left := t.port.moves.Load(), t.port.over.Load() || proxy.HungUp(t.caller, unix.POLLRDHUP); n != moves || left != gone {
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

// Hijack returns the caller's connection and begins to watch it.
func (w *portWriter) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	conn, buf, err := w.rc.Hijack()
	if err == nil {
		w.tunnel = newTunnel(conn, w.p.conn, w.p.Timeout)
	}
	return conn, buf, err
}
