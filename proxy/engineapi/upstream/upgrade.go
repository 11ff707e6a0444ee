package upstream

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"time"
)

// Half is a connection whose write side can be closed alone.
type Half interface {
	net.Conn
	CloseWrite() error
}

// Upgrade sends a request that upgrades the connection. It fails if the engine doesn't switch
// protocols. It returns the connection, which the caller closes, a reader of what the engine
// sends, and the answer's header.
func (e *Engine) Upgrade(ctx context.Context, a Ask) (Half, io.Reader, http.Header, error) {
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
		return nil, nil, nil, e.Unavailable(ctx, err)
	}
	conn, ok := dialled.(Half)
	if !ok {
		_ = dialled.Close()
		return nil, nil, nil, fmt.Errorf("a connection of type %T can't be closed on one side", dialled)
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	br := bufio.NewReader(conn)
	if err := req.Write(conn); err != nil {
		_ = conn.Close()
		return nil, nil, nil, e.Unavailable(ctx, err)
	}
	resp, err := http.ReadResponse(br, req)
	if err != nil {
		_ = conn.Close()
		return nil, nil, nil, e.Unavailable(ctx, err)
	}
	if resp.StatusCode != http.StatusSwitchingProtocols {
		defer func() { _ = conn.Close() }()
		if resp.StatusCode < 300 {
			_ = resp.Body.Close()
			return nil, nil, nil, fmt.Errorf("%s %s: the engine didn't take the connection over", a.Method, a.Path)
		}
		return nil, nil, nil, Failure(resp)
	}
	return conn, Behind(br, conn), resp.Header, nil
}

// Behind returns a reader of the bytes that are buffered of a connection, and then of the
// connection.
func Behind(buffered *bufio.Reader, conn net.Conn) io.Reader {
	rest, _ := buffered.Peek(buffered.Buffered())
	return io.MultiReader(bytes.NewReader(bytes.Clone(rest)), conn)
}
