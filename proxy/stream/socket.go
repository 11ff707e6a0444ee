package stream

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"time"

	"github.com/coder/websocket"
	"github.com/containerd/errdefs"
	"golang.org/x/net/http/httpguts"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/proxy/apitype"
	"github.com/bermhq/berm/runtime"
)

const (
	maxMessage = 1 << 20          // bytes of an incoming message
	maxControl = 4 << 10          // bytes of a message that isn't input
	pongStall  = 15 * time.Second // for the answer to a ping; the second one missed in a row ends the attachment

	// statusTakenOver is the close status of an attachment that another one has taken over.
	statusTakenOver = websocket.StatusCode(4001)
)

var (
	errCallerGone = errors.New("the caller went away")
	errNotLines   = errors.New("a binary message came in an attachment in lines")
)

// Attachable is a process that a WebSocket can attach to.
type Attachable struct {
	Open   func(ctx context.Context, from int64) (src Source, end func() apitype.AttachEnd, err error)
	Signal func(ctx context.Context, signal int) error
	Resize func(ctx context.Context, size apitype.ResizeRequest) error
}

// Attach connects a WebSocket to a process until one of them ends. It pings the caller at the
// interval ping.
func Attach(w http.ResponseWriter, r *http.Request, to Attachable, ping time.Duration) error {
	q := r.URL.Query()
	lines := false
	switch frames := q.Get("frames"); {
	case frames == "lines":
		lines = true
	case q.Has("frames") && frames != "bytes":
		return &lifecycle.InvalidError{Field: "frames", Message: "must be bytes or lines"}
	}
	from, err := after(r, q)
	if err != nil {
		return err
	}
	if !lines {
		if err := from.one(); err != nil {
			return err
		}
	}
	if !wantsWebSocket(r) {
		w.Header().Set("Upgrade", "websocket")
		return &proxy.Fault{Status: http.StatusUpgradeRequired, Code: "upgrade_required", Title: "WebSocket needed",
			Detail: "this call needs a WebSocket handshake of version 13, over HTTP/1.1"}
	}
	ctx, stop := proxy.UntilDrain(r.Context())
	defer stop()
	src, end, err := to.Open(ctx, from.Seq())
	if err != nil {
		return err
	}
	// The gate has looked at the Origin already.
	c, err := websocket.Accept(w, r, &websocket.AcceptOptions{InsecureSkipVerify: true})
	if err != nil {
		_ = src.Close()
		return nil //nolint:nilerr // Accept has answered
	}
	at := &socket{c: c, src: src, to: to, lines: lines, from: from}
	at.run(ctx, ping, end)
	return nil
}

// wantsWebSocket reports whether a handshake can succeed. Attach asks before it opens the
// source: that may already take over from another attachment.
func wantsWebSocket(r *http.Request) bool {
	has := func(name, token string) bool { return httpguts.HeaderValuesContainsToken(r.Header.Values(name), token) }
	return r.ProtoMajor == 1 && r.ProtoAtLeast(1, 1) && has("Connection", "upgrade") && has("Upgrade", "websocket") &&
		r.Header.Get("Sec-WebSocket-Version") == "13" && len(r.Header.Values("Sec-WebSocket-Key")) == 1
}

// socket is a WebSocket and the process that it is attached to.
type socket struct {
	c     *websocket.Conn
	src   Source
	to    Attachable
	lines bool
	from  Place
	buf   bytes.Buffer // of the outgoing message
	// busy is true while input waits for the process to read. No pong can be read then.
	busy atomic.Bool
}

// run copies until the process ends, the caller goes away, another attachment takes over,
// or ctx ends. It leaves no goroutine behind.
func (at *socket) run(ctx context.Context, beat time.Duration, end func() apitype.AttachEnd) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	at.c.SetReadLimit(maxMessage)
	all := proxy.Tasks{Abort: func() { cancel(errPanic) }}
	defer all.Wait()
	// Closing the source ends its Next and Write. Closing the connection ends reads from it.
	defer context.AfterFunc(ctx, func() { _ = at.src.Close() })()
	all.Go(func() { cancel(at.input(ctx)) })
	all.Go(func() { cancel(at.ping(ctx, beat)) })

	err := at.output(ctx)
	var status websocket.StatusCode
	var reason string
	switch cause := context.Cause(ctx); {
	case errors.Is(err, io.EOF):
		b, _ := json.Marshal(end())
		status, reason = websocket.StatusNormalClosure, string(b)
	case errors.Is(cause, errNotLines):
		status, reason = websocket.StatusUnsupportedData, cause.Error()
	case errors.Is(cause, errCallerGone):
		_ = at.src.Close()
		_ = at.c.CloseNow()
		return
	case errors.Is(cause, errPanic):
		status, reason = websocket.StatusInternalError, proxy.FaultOf(cause).Code
	case cause != nil:
		status, reason = websocket.StatusGoingAway, "the server is going down"
	case errdefs.IsAborted(err):
		status, reason = statusTakenOver, "another attachment has taken over"
	default:
		status, reason = websocket.StatusInternalError, proxy.FaultOf(err).Code
	}
	_ = at.src.Close()
	_ = at.c.Close(status, reason) // waits for the other side, but not for long
	cancel(nil)
}

// outlasting derives a context for a write of at most d, which ends a second after ctx
// does. If it ended with ctx, the connection would close without a close frame.
func outlasting(ctx context.Context, d time.Duration) (context.Context, context.CancelFunc) {
	out, cancel := context.WithTimeout(context.WithoutCancel(ctx), d)
	stop := context.AfterFunc(ctx, func() { time.AfterFunc(lastWrite, cancel) })
	return out, func() { stop(); cancel() }
}

// ping keeps proxies from closing an idle connection, and fails when the caller is gone.
func (at *socket) ping(ctx context.Context, every time.Duration) error {
	t := time.NewTicker(every)
	defer t.Stop()
	for missed := 0; missed < 2; {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-t.C:
		}
		wait, cancel := outlasting(ctx, pongStall)
		err := at.c.Ping(wait)
		late := wait.Err() != nil
		cancel()
		switch {
		case err == nil || late && at.busy.Load():
			missed = 0
		default:
			missed++
		}
	}
	return errCallerGone
}

// output sends the output. It returns io.EOF at the output's end, or the error of a read or
// a write.
func (at *socket) output(ctx context.Context) error {
	split := newSplitter(at.from)
	line := func(p piece) error {
		l := apitype.AttachLine{Stream: streamName(p.stderr), Seq: p.seq, Line: strings.ToValidUTF8(string(p.data), "\ufffd"), Partial: p.partial}
		if place := split.place(); place[0] != p.seq || place[1] != p.seq {
			l.Resume = place.String()
		}
		return at.sendJSON(ctx, l)
	}
	for begun := false; ; begun = true {
		c, err := at.src.Next()
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err != nil {
			if errors.Is(err, io.EOF) && at.lines {
				if err := split.rest(line); err != nil {
					return err
				}
			}
			return err
		}
		if at.lines {
			err = split.feed(c, line)
		} else {
			if !begun {
				err = at.sendJSON(ctx, apitype.AttachStart{Seq: c.Seq - int64(len(c.Data))})
			}
			if err == nil {
				err = at.sendBytes(ctx, c)
			}
		}
		if err != nil {
			return err
		}
	}
}

func (at *socket) sendBytes(ctx context.Context, c runtime.Chunk) error {
	stream := byte(1)
	if c.Stderr {
		stream = 2
	}
	for data := c.Data; len(data) > 0; {
		n := min(len(data), maxEvent)
		at.buf.Reset()
		at.buf.WriteByte(stream)
		at.buf.Write(data[:n])
		if err := at.send(ctx, websocket.MessageBinary, at.buf.Bytes()); err != nil {
			return err
		}
		data = data[n:]
	}
	return nil
}

func (at *socket) sendJSON(ctx context.Context, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return at.send(ctx, websocket.MessageText, b)
}

// send sends a message. A caller that doesn't read blocks the process, and loses the
// connection after a minute.
func (at *socket) send(ctx context.Context, t websocket.MessageType, b []byte) error {
	out, cancel := outlasting(ctx, stall)
	defer cancel()
	if err := at.c.Write(out, t, b); err != nil {
		return errors.Join(errCallerGone, err)
	}
	return nil
}

// input handles the caller's messages until the connection ends.
func (at *socket) input(ctx context.Context) error {
	buf := make([]byte, 32<<10)
	for {
		// If the read ended with ctx, the connection would close without a close frame.
		t, r, err := at.c.Reader(context.WithoutCancel(ctx))
		if err != nil {
			return errCallerGone
		}
		var refused error
		switch {
		case t == websocket.MessageBinary && at.lines:
			return errNotLines
		case t == websocket.MessageText && !at.lines:
			refused, err = at.control(ctx, r)
		default:
			refused, err = at.pass(r, buf)
		}
		if err != nil {
			return errCallerGone
		}
		if refused != nil && ctx.Err() == nil {
			f := proxy.FaultOf(refused)
			var msg apitype.AttachError
			msg.Error.Code, msg.Error.Detail = f.Code, f.Detail
			if err := at.sendJSON(ctx, msg); err != nil {
				return err
			}
		}
	}
}

// pass writes a message to the process's input. Once a write has failed, it drops the rest of
// the message. It returns a failed write as refused, and a failed read of the message as err.
func (at *socket) pass(r io.Reader, buf []byte) (refused, err error) {
	write := func(b []byte) {
		if refused == nil {
			at.busy.Store(true)
			_, refused = at.src.Write(b)
			at.busy.Store(false)
		}
	}
	for {
		n, err := r.Read(buf)
		if n > 0 {
			write(buf[:n])
		}
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return refused, err
		}
	}
	if at.lines {
		write([]byte("\n"))
	}
	return refused, nil
}

// control executes the command in a text message. Refused is an error to send to the caller.
// Err means that the message couldn't be read.
func (at *socket) control(ctx context.Context, r io.Reader) (refused, err error) {
	b, err := io.ReadAll(io.LimitReader(r, maxControl+1))
	if err != nil {
		return nil, err
	}
	if _, err := io.Copy(io.Discard, r); err != nil {
		return nil, err
	}
	if len(b) > maxControl {
		return &http.MaxBytesError{Limit: maxControl}, nil
	}
	var m apitype.AttachControl
	if err := proxy.DecodeJSON(b, &m); err != nil {
		return err, nil
	}
	switch {
	case m.Resize != nil && m.Signal == nil && !m.CloseStdin:
		return at.to.Resize(ctx, *m.Resize), nil
	case m.Signal != nil && m.Resize == nil && !m.CloseStdin:
		return at.to.Signal(ctx, int(*m.Signal)), nil
	case m.CloseStdin && m.Resize == nil && m.Signal == nil:
		return at.src.CloseWrite(), nil
	}
	return &lifecycle.InvalidError{Message: "a text message must be one of resize, signal and close_stdin; input is binary"}, nil
}
