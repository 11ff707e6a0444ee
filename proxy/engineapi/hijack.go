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
	"time"

	"github.com/bermhq/berm/proxy"
)

// maxStreams bounds what one tenant may keep open at a time: connections taken over, and
// answers that go on until the caller leaves. Each holds two files and up to 200 KiB.
const maxStreams = 256

// stream counts one more connection that stays open. The caller calls leave at its end.
func (c *call) stream() (leave func(), err error) {
	return c.enter("streams", maxStreams)
}

// half is a connection of which one direction can be closed alone.
type half interface {
	net.Conn
	CloseWrite() error
}

// upgrade sends a request whose answer takes the connection over. Any other answer is an
// error. The caller closes the connection, and reads what the engine says from the reader;
// the header is the answer's.
func (e *engine) upgrade(ctx context.Context, a ask) (half, io.Reader, http.Header, error) {
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
	br := bufio.NewReader(conn)
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
	return conn, behind(br, conn), resp.Header, nil
}

// behind reads what is buffered of a connection, then the connection.
func behind(buffered *bufio.Reader, conn net.Conn) io.Reader {
	rest, _ := buffered.Peek(buffered.Buffered())
	return io.MultiReader(bytes.NewReader(bytes.Clone(rest)), conn)
}

// hijack connects the caller with the engine, both ways, until one of them is gone, or the
// server: then what goes on in the engine does so without the caller.
func (c *call) hijack(a ask) error {
	leave, err := c.stream()
	if err != nil {
		return err
	}
	defer leave()
	if a.method == "" {
		a.method = c.r.Method
	}
	a.version = c.version
	up, fromEngine, told, err := c.engine.upgrade(c.ctx, a)
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
	stop := context.AfterFunc(c.ctx, func() {
		_ = up.Close()
		_ = caller.SetWriteDeadline(time.Now().Add(c.hangupGrace))
	})
	defer stop()
	if err := errors.Join(caller.SetDeadline(time.Time{}), c.greet(caller, told)); err != nil {
		return nil // the caller is gone
	}
	c.close(nil) // now, as the connection may stay for days
	// Past what is buffered, that reader would take the end of the caller's input for the
	// end of the request.
	p := pipe{caller: caller, engine: up, fromCaller: behind(buffered.Reader, conn), fromEngine: fromEngine, grace: c.hangupGrace, linger: linger}
	if c.closeMessage != nil {
		if c.closeMessage.form == unknown {
			c.closeMessage.form = formOf(told.Get("Content-Type"))
		}
		p.fromEngine = io.TeeReader(fromEngine, c.closeMessage)
	}
	p.run(func() []byte {
		if !proxy.GoingDown(c.ctx) {
			return nil
		}
		p.linger = c.hangupGrace
		return c.closeMessage.word()
	})
	return nil
}

// greet answers as the engine does to one who asked for an upgrade, and to one who didn't.
func (c *call) greet(caller net.Conn, told http.Header) error {
	kind := told.Get("Content-Type")
	if kind == "" {
		kind = "application/vnd.docker.raw-stream"
	}
	head := "HTTP/1.1 200 OK\r\nContent-Type: " + kind + "\r\n"
	switch {
	case told.Get("Sec-Websocket-Accept") != "":
		head = "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: " + told.Get("Sec-Websocket-Accept") + "\r\n"
	case c.r.Header.Get("Upgrade") != "":
		head = "HTTP/1.1 101 UPGRADED\r\nContent-Type: " + kind + "\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n"
	}
	_, err := io.WriteString(caller, head+"Api-Version: "+c.version.String()+"\r\n\r\n")
	return err
}
