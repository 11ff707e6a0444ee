package engineapi

import (
	"crypto/tls"
	"io"
	"net"
	"syscall"
	"time"

	"github.com/bermhq/berm/proxy/engineapi/upstream"

	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/proxy"
)

const (
	hangupPoll  = 250 * time.Millisecond // how often a caller's connection is looked at
	hangupGrace = 500 * time.Millisecond // for the engine to take what a caller said before it left
	linger      = 5 * time.Second        // for a caller to end its side after the engine has ended all
)

// pipe is a caller's connection joined with one to the engine.
type pipe struct {
	caller, engine         upstream.Half
	fromCaller, fromEngine io.Reader // the connections, after what was read of them before
	grace, linger          time.Duration
}

// run copies both ways, the end of the caller's input too. It returns when the engine
// has said all or the caller is gone, and both connections are closed. The caller is told
// the last word, if there is one, after all that the engine said.
func (p *pipe) run(last func() []byte) {
	ended := make(chan struct{})
	wg := proxy.Tasks{Abort: func() {
		_ = p.engine.Close()
		_ = p.caller.Close()
	}}
	wg.Go(p.input)
	wg.Go(func() {
		if awaitHangup(p.caller, ended) {
			_ = p.engine.SetDeadline(time.Now().Add(p.grace))
		}
	})
	_, _ = copyPooled(p.caller, p.fromEngine)
	close(ended)
	_ = p.engine.Close()
	_, _ = p.caller.Write(last())
	// Closing while there is unread input would reset the connection, and the caller
	// lose what it hasn't read yet.
	_ = p.caller.CloseWrite()
	_ = p.caller.SetReadDeadline(time.Now().Add(p.linger))
	wg.Wait()
	_ = p.caller.Close()
}

// input takes what the caller says, until it has said all.
func (p *pipe) input() {
	if _, err := copyPooled(p.engine, p.fromCaller); err == nil {
		_ = p.engine.CloseWrite()
		return
	}
	// Either the engine takes no more, and the rest is for nobody, or the caller is gone.
	if _, err := copyPooled(io.Discard, p.fromCaller); err != nil {
		_ = p.engine.Close()
	}
}

func copyPooled(w io.Writer, r io.Reader) (int64, error) {
	buf := buffers.Get().(*[]byte)
	defer buffers.Put(buf)
	return io.CopyBuffer(struct{ io.Writer }{w}, struct{ io.Reader }{r}, *buf)
}

// awaitHangup tells whether the peer of a connection has gone altogether, not only ended
// its input; false is that ended was closed before. It needn't read what the peer said.
//
// A unix socket tells at once. Over TLS a peer ends its input by a message, so that one
// whose TCP connection has ended is gone. Over plain TCP it is only seen when something
// is sent: when the engine says something, or by the kernel's keep-alive. Over both, the
// end comes after what the peer said, and isn't seen before there is room for that.
func awaitHangup(conn net.Conn, ended <-chan struct{}) bool {
	signs := int16(unix.POLLHUP | unix.POLLERR | unix.POLLNVAL)
	if t, ok := conn.(*tls.Conn); ok {
		conn, signs = t.NetConn(), signs|unix.POLLRDHUP
	}
	sc, ok := conn.(syscall.Conn)
	if !ok {
		return false
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return false
	}
	tick := time.NewTicker(hangupPoll)
	defer tick.Stop()
	for {
		select {
		case <-ended:
			return false
		case <-tick.C:
		}
		gone := false
		err := raw.Control(func(fd uintptr) {
			fds := []unix.PollFd{{Fd: int32(fd), Events: signs}}
			_, err := unix.Poll(fds, 0)
			gone = err == nil && fds[0].Revents&signs != 0
		})
		if err != nil || gone {
			return true // an error is that it is closed by us
		}
	}
}
