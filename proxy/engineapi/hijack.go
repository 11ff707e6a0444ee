package engineapi

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"time"

	"github.com/bermhq/berm/proxy/engineapi/upstream"

	"github.com/bermhq/berm/proxy"
)

// maxStreams bounds what one tenant may keep open at a time: connections taken over, and
// answers that go on until the caller leaves. Each holds two files and up to 200 KiB.
const maxStreams = 256

// hijack connects the caller with the engine, both ways, until one of them is gone, or the
// server: then what goes on in the engine does so without the caller.
func (c *call) hijack(a upstream.Ask) error {
	leave, err := c.enter("streams", maxStreams)
	if err != nil {
		return err
	}
	defer leave()
	if a.Method == "" {
		a.Method = c.r.Method
	}
	a.Version = c.version
	up, fromEngine, told, err := c.engine.Upgrade(c.ctx, a)
	if err != nil {
		return err
	}
	defer func() { _ = up.Close() }()
	conn, buffered, err := http.NewResponseController(c.w).Hijack()
	if err != nil {
		return fmt.Errorf("take the caller's connection over: %w", err)
	}
	defer func() { _ = conn.Close() }()
	caller, ok := conn.(upstream.Half)
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
	p := pipe{caller: caller, engine: up, fromCaller: upstream.Behind(buffered.Reader, conn), fromEngine: fromEngine, grace: c.hangupGrace, linger: linger}
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
