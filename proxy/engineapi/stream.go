package engineapi

import (
	"context"
	"crypto/tls"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"time"

	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/proxy/engineapi/upstream"
)

// maxStreams bounds the streams of one tenant at a time: hijacked connections, and answers that go on
// until the caller leaves. Each holds two file descriptors and up to 200 KiB.
const maxStreams = 256

// hijack connects the caller with the engine in both directions, until one of them is gone or the
// server goes down. The engine's command may go on after that.
func (c *call) hijack(a upstream.Ask) error {
	if err := c.untilEnd(c.enter("streams", maxStreams)); err != nil {
		return err
	}
	up, fromEngine, told, err := c.engine.Upgrade(c.ctx, c.completed(a))
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
		return nil // no listener has other connections, and the caller can't get an error any more
	}
	stop := context.AfterFunc(c.ctx, func() {
		_ = up.Close()
		_ = caller.SetWriteDeadline(time.Now().Add(c.hangupGrace))
	})
	defer stop()
	if err := errors.Join(caller.SetDeadline(time.Time{}), c.greet(caller, told)); err != nil {
		return nil // the caller is gone
	}
	c.writeAudit(nil) // before the stream, which may go on for days
	// The server's reader is only good for its buffered bytes. It would cancel the request when the caller
	// ends its input.
	p := pipe{caller: caller, engine: up, fromCaller: upstream.Behind(buffered.Reader, conn), fromEngine: io.TeeReader(fromEngine, c.closeMessage), grace: c.hangupGrace, linger: linger}
	c.closeMessage.begin(told.Get("Content-Type"))
	p.run(func() []byte {
		if !proxy.GoingDown(c.ctx) {
			return nil
		}
		p.linger = c.hangupGrace
		return c.closeMessage.word(farewell)
	})
	return nil
}

// greet answers as the engine does, with status 101 if the caller asked for an upgrade.
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

const (
	hangupPoll  = 250 * time.Millisecond // how often the caller's connection is polled
	hangupGrace = 500 * time.Millisecond // for the engine to read the last input of a caller that left
	linger      = 5 * time.Second        // for a caller to close its side after the engine has closed
)

// pipe is a caller's connection joined with one to the engine.
type pipe struct {
	caller, engine         upstream.Half
	fromCaller, fromEngine io.Reader // the connections, after what was read of them before
	grace, linger          time.Duration
}

// run copies in both directions, and passes on the end of the caller's input. It closes both
// connections and returns when the engine has ended its output, or the caller is gone. It sends
// the bytes that last returns after the engine's output.
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

// input copies the caller's input to its end.
func (p *pipe) input() {
	if _, err := copyPooled(p.engine, p.fromCaller); err == nil {
		_ = p.engine.CloseWrite()
		return
	}
	// Either the engine takes no more input, or the caller is gone.
	if _, err := copyPooled(io.Discard, p.fromCaller); err != nil {
		_ = p.engine.Close()
	}
}

func copyPooled(w io.Writer, r io.Reader) (int64, error) {
	buf := buffers.Get().(*[]byte)
	defer buffers.Put(buf)
	return io.CopyBuffer(struct{ io.Writer }{w}, struct{ io.Reader }{r}, *buf)
}

// awaitHangup waits until the peer has closed its connection, and not only ended its input. It returns
// false if ended is closed before. The peer's input needn't be read.
//
// A unix socket shows a hangup at once. Over TLS, a peer ends its input by a message, so a peer that ends
// its TCP connection is gone. Over plain TCP, only a write shows it: of the engine's output, or the
// kernel's keep-alive. Over both, a hangup comes after the peer's input, and shows only once there is
// room for that.
func awaitHangup(conn net.Conn, ended <-chan struct{}) bool {
	var events int16
	if t, ok := conn.(*tls.Conn); ok {
		conn, events = t.NetConn(), unix.POLLRDHUP
	}
	tick := time.NewTicker(hangupPoll)
	defer tick.Stop()
	for {
		select {
		case <-ended:
			return false
		case <-tick.C:
		}
		if proxy.HungUp(conn, events) {
			return true
		}
	}
}

// farewell is the message to callers of a server that goes down.
var farewell = "berm: " + proxy.ErrGoingDown.Error()

const frameHead = 8 // bytes of a frame's header: the stream, three zeros, the length of the data

// closeMessage writes the last message of a stream that the server or the engine breaks off. It learns
// the stream's format from all bytes sent to the caller, which are written to it too. A nil closeMessage
// writes empty messages.
type closeMessage struct {
	form streamForm
	head []byte // of the frame under way
	left uint32 // bytes of the frame that are still to come
	mid  bool   // the last line hasn't ended
}

type streamForm int

const (
	unknown   streamForm = iota // framed, unless something shows that it is raw
	framed                      // bytes of stdout and stderr in frames
	terminal                    // bytes of a terminal
	textLine                    // one line, with nothing before it
	jsonLines                   // messages of progress
)

// begin sets the format by the engine's Content-Type. Engines before API 1.42 send the same type
// for all formats.
func (p *closeMessage) begin(contentType string) {
	if p != nil && p.form == unknown && contentType == "application/vnd.docker.multiplexed-stream" {
		p.form = framed
	}
}

// Write notes bytes that the caller is sent. It never fails.
func (p *closeMessage) Write(b []byte) (int, error) {
	n := len(b)
	if p == nil || n == 0 {
		return n, nil
	}
	p.mid = b[n-1] != '\n'
	for p.form <= framed && len(b) > 0 {
		if p.left > 0 {
			some := min(int64(p.left), int64(len(b)))
			b, p.left = b[some:], p.left-uint32(some)
			continue
		}
		some := min(frameHead-len(p.head), len(b))
		p.head, b = append(p.head, b[:some]...), b[some:]
		if len(p.head) < frameHead {
			break
		}
		if p.head[0] > 3 || p.head[1]|p.head[2]|p.head[3] != 0 {
			p.form = terminal
			break
		}
		p.form, p.left, p.head = framed, binary.BigEndian.Uint32(p.head[4:]), p.head[:0]
	}
	return n, nil
}

// word returns the message in the stream's format. It returns nothing where clients would mistake
// the message for output.
func (p *closeMessage) word(message string) []byte {
	if p == nil {
		return nil
	}
	switch {
	case p.form == framed && p.left == 0 && len(p.head) == 0:
		frame := binary.BigEndian.AppendUint32([]byte{2, 0, 0, 0}, uint32(len(message)+1))
		return append(frame, message+"\n"...)
	case p.form == terminal:
		return []byte("\r\n" + message + "\r\n")
	case p.form == textLine:
		return []byte(message + "\n")
	case p.form == jsonLines && !p.mid:
		b, _ := json.Marshal(map[string]any{"error": message, "errorDetail": map[string]string{"message": message}})
		return append(b, '\n')
	}
	return nil
}
