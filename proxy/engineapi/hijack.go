package engineapi

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// half is a connection of which one direction can be closed alone.
type half interface {
	net.Conn
	CloseWrite() error
}

// upgrade sends a request whose answer takes the connection over. Any other answer is an
// error. The caller closes the connection; what the engine said after its answer's header
// is still in the reader.
func (e *engine) upgrade(ctx context.Context, a ask) (half, *bufio.Reader, *http.Response, error) {
	req, err := e.request(ctx, a)
	if err != nil {
		return nil, nil, nil, err
	}
	if req.Header.Get("Upgrade") == "" {
		req.Header.Set("Connection", "Upgrade")
		req.Header.Set("Upgrade", "tcp")
	}
	dialled, err := e.dial(ctx)
	if err != nil {
		return nil, nil, nil, unavailable(ctx, err)
	}
	conn, ok := dialled.(half)
	if !ok {
		_ = dialled.Close()
		return nil, nil, nil, fmt.Errorf("a connection of type %T can't be closed on one side", dialled)
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	br := bufio.NewReaderSize(conn, bufferSize)
	if err := req.Write(conn); err != nil {
		_ = conn.Close()
		return nil, nil, nil, unavailable(ctx, err)
	}
	resp, err := http.ReadResponse(br, req)
	if err != nil {
		_ = conn.Close()
		return nil, nil, nil, unavailable(ctx, err)
	}
	if resp.StatusCode != http.StatusSwitchingProtocols {
		defer func() { _ = conn.Close() }()
		if resp.StatusCode < 300 {
			_ = resp.Body.Close()
			return nil, nil, nil, fmt.Errorf("%s %s: the engine didn't take the connection over", a.method, a.path)
		}
		return nil, nil, nil, failure(resp)
	}
	return conn, br, resp, nil
}

// hijack connects the caller with the engine, both ways, until one of them is gone. Stdin
// says that the caller's end of sending isn't the end of all.
func (c *call) hijack(a ask, stdin bool) error {
	if a.method == "" {
		a.method = c.r.Method
	}
	a.version = c.version
	up, fromEngine, resp, err := c.engine.upgrade(c.ctx, a)
	if err != nil {
		return err
	}
	defer func() { _ = up.Close() }()
	conn, buffered, err := http.NewResponseController(c.w).Hijack()
	if err != nil {
		return fmt.Errorf("take the caller's connection over: %w", err)
	}
	defer func() { _ = conn.Close() }()
	caller, ok := conn.(half)
	if !ok {
		return nil // nobody can be told any more; listeners have only such connections
	}
	if err := errors.Join(caller.SetDeadline(time.Time{}), c.greet(caller, resp)); err != nil {
		return nil // the caller is gone
	}
	stop := context.AfterFunc(c.ctx, func() { _ = caller.Close(); _ = up.Close() })
	defer stop()
	// Past what is buffered, that reader would take the end of the caller's input for the
	// end of the request.
	rest, _ := buffered.Peek(buffered.Reader.Buffered())
	pump(caller, io.MultiReader(bytes.NewReader(rest), conn), up, fromEngine, stdin)
	return nil
}

// greet answers as the engine does to one who asked for an upgrade, and to one who didn't.
func (c *call) greet(caller net.Conn, resp *http.Response) error {
	kind := resp.Header.Get("Content-Type")
	if kind == "" {
		kind = "application/vnd.docker.raw-stream"
	}
	head := "HTTP/1.1 200 OK\r\nContent-Type: " + kind + "\r\n"
	switch c.r.Header.Get("Upgrade") {
	case "":
	case "websocket":
		head = "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: " + resp.Header.Get("Sec-Websocket-Accept") + "\r\n"
	default:
		head = "HTTP/1.1 101 UPGRADED\r\nContent-Type: " + kind + "\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n"
	}
	_, err := io.WriteString(caller, head+"Api-Version: "+c.version.String()+"\r\n\r\n")
	return err
}

// pump copies both ways. It returns when the engine has said all, or the caller is gone.
func pump(caller half, fromCaller io.Reader, up half, fromEngine io.Reader, stdin bool) {
	var wg sync.WaitGroup
	defer wg.Wait()
	ended := make(chan struct{}) // the engine's side
	wg.Go(func() {
		_, err := copyPooled(up, fromCaller)
		if !stdin || err != nil {
			_ = up.Close() // it wasn't its input that ended, but the caller
			return
		}
		_ = up.CloseWrite()
		awaitHangup(caller, ended)
		_ = up.Close()
	})
	_, _ = copyPooled(caller, fromEngine)
	close(ended)
	_ = caller.Close()
}

func copyPooled(w io.Writer, r io.Reader) (int64, error) {
	buf := buffers.Get().(*[]byte)
	defer buffers.Put(buf)
	return io.CopyBuffer(struct{ io.Writer }{w}, struct{ io.Reader }{r}, *buf)
}

// hangupPoll is how often a caller that has ended its input is looked at.
const hangupPoll = 250 * time.Millisecond

// awaitHangup waits until a connection whose peer has ended its input is closed by the
// peer altogether, as far as the kernel can tell: at once for a unix socket. It returns
// when ended is closed, too.
func awaitHangup(conn net.Conn, ended <-chan struct{}) {
	sc, ok := conn.(syscall.Conn)
	if !ok {
		<-ended
		return
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return
	}
	tick := time.NewTicker(hangupPoll)
	defer tick.Stop()
	for {
		select {
		case <-ended:
			return
		case <-tick.C:
		}
		gone := true
		err := raw.Control(func(fd uintptr) {
			fds := []unix.PollFd{{Fd: int32(fd)}}
			_, err := unix.Poll(fds, 0)
			gone = err == nil && fds[0].Revents&(unix.POLLHUP|unix.POLLERR|unix.POLLNVAL) != 0
		})
		if err != nil || gone {
			return
		}
	}
}
