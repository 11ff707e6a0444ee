package agent

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/yamux"

	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/agent/wire"
)

const (
	maxID      = 1 << 31 // of users and groups
	streamStay = time.Second
)

// session is a connection that the program in a container dialled, for one operation at a time. Or, if
// the engine started the program, it is a yamux session over its stdio, for all operations.
//
// The other side is hostile. A stream buffers at most its window, 256 KiB. A container has at
// most wire.MaxStreams operations and spareStreams, and only Berm begins them. A stream that Berm
// has closed ends within streamStay.
type session struct {
	b     *container
	hello wire.Hello

	// Of one that was dialled.
	conn stream
	pid  int    // of the process that dialled
	user string // as whom the operation is to be done; empty is the container's own

	// Of one that the engine started.
	served  *served // nil for one that was dialled
	carrier io.ReadWriteCloser
	mux     *yamux.Session
	stuck   atomic.Bool  // opening the last stream timed out
	lost    atomic.Int64 // streams that couldn't be opened, but that yamux still counts
}

// errOutdated is the error for a program of an older version.
var errOutdated = runtime.Precondition("the container's agent is of another version of Berm; recreate the container")

// greet reads the Hello of a program that the engine started, and begins the session. If that fails, it
// closes the carrier.
func (s *session) greet(within time.Duration) error {
	timer := time.AfterFunc(within, s.hangUp)
	err := s.readHello()
	if !timer.Stop() && err == nil {
		err = os.ErrDeadlineExceeded
	}
	if err != nil {
		s.hangUp()
	}
	return err
}

func (s *session) readHello() error {
	r := bufio.NewReader(s.carrier) // wire.NewReader uses this buffer, so none of it is lost
	payload, err := wire.NewReader(r).Expect(wire.KindHello)
	if err == nil {
		err = s.meet(payload)
	}
	if err != nil {
		return err
	}
	s.mux, err = yamux.Client(struct {
		io.Reader
		io.WriteCloser
	}{&inbound{r: r}, &wire.Joined{ReadWriteCloser: s.carrier}}, wire.Mux(s.b.r.pace.ready, streamStay))
	return err
}

// meet decodes Hello. The error is errOutdated, errUnfit, or wire.ErrProtocol.
func (s *session) meet(payload []byte) error {
	if err := wire.Decode(payload, &s.hello); err != nil {
		return err
	}
	switch h := s.hello; {
	case h.Version != wire.Version:
		return errOutdated
	case h.UID < 0 || h.UID > maxID || h.GID < 0 || h.GID > maxID || h.PID < 0 || h.PID > maxID:
		return fmt.Errorf("%w: user %d, group %d, process %d", wire.ErrProtocol, h.UID, h.GID, h.PID)
	case !s.fits():
		return errUnfit
	}
	return nil
}

// hangUp ends the session. It doesn't wait.
func (s *session) hangUp() {
	if s.served == nil {
		_ = s.conn.Close()
		return
	}
	_ = s.carrier.Close()
}

// paused reports whether the container is paused or doesn't run, as the engine says.
func (s *session) paused() bool {
	ctx, cancel := context.WithTimeout(context.Background(), s.b.r.pace.ready)
	defer cancel()
	return !s.b.runs(ctx)
}

// greeted reports whether Hello was read.
func (s *session) greeted() bool { return s.hello.Version != 0 }

// fits reports whether the program runs as the user that the operation needs.
func (s *session) fits() bool {
	uid, gid, both := strings.Cut(s.user, ":")
	return s.user == "" || uid == strconv.Itoa(s.hello.UID) && (!both || gid == strconv.Itoa(s.hello.GID))
}

// spareStreams is how many streams are reserved for kills.
const spareStreams = 16

// stream carries one operation: it is a *net.UnixConn or a *muxStream.
type stream interface {
	net.Conn
	// CloseWrite tells the program that Berm sends no more. Reads go on.
	CloseWrite() error
}

// open returns the stream of an operation. The error is errDead, errSilent, or errBusy if the
// container has too many.
func (s *session) open(op wire.Op) (stream, error) {
	most := wire.MaxStreams
	if op == wire.OpKill {
		most += spareStreams
	}
	if s.served == nil {
		if streams(s.b) > most { // which counts this one
			return nil, errBusy
		}
		return s.conn, nil
	}
	n := s.b.opening.Add(1)
	defer s.b.opening.Add(-1)
	if streams(s.b)+int(n) > most {
		return nil, errBusy
	}
	if s.stuck.Load() && s.paused() {
		return nil, errSilent
	}
	st, err := s.mux.OpenStream()
	switch {
	case errors.Is(err, yamux.ErrConnectionWriteTimeout):
		s.stuck.Store(true)
		s.lost.Add(1)
		return nil, errSilent
	case err != nil:
		s.end()
		return nil, errDead
	}
	s.stuck.Store(false)
	return &muxStream{Stream: st}, nil
}

// inbound passes yamux frames on, each once it is complete. yamux locks a stream while it
// reads a frame. A Read that waits for that lock ends neither by a deadline nor by Close.
//
// inbound refuses frames that only Berm may send. For a frame that opens a stream, yamux would
// allocate; for a ping, it would start a goroutine.
type inbound struct {
	r    io.Reader
	head [12]byte
	rest []byte        // of the head
	data *bytes.Buffer // unread data of the frame; nil if none
}

const maxMuxData = 256 << 10 // of a frame: a stream's window

var muxData = sync.Pool{New: func() any { return new(bytes.Buffer) }}

func (in *inbound) Read(p []byte) (int, error) {
	if len(in.rest) == 0 && in.data == nil {
		if err := in.next(); err != nil {
			return 0, err
		}
	}
	if len(in.rest) > 0 {
		n := copy(p, in.rest)
		in.rest = in.rest[n:]
		return n, nil
	}
	n, err := in.data.Read(p)
	if in.data.Len() == 0 {
		muxData.Put(in.data)
		in.data = nil
	}
	return n, err
}

// next reads a frame. It allocates memory only as the data arrives.
func (in *inbound) next() error {
	if _, err := io.ReadFull(in.r, in.head[:]); err != nil {
		return err
	}
	const data, syn = 0, 1
	if binary.BigEndian.Uint16(in.head[2:])&syn != 0 {
		return fmt.Errorf("%w: a stream or a ping", wire.ErrProtocol)
	}
	if size := binary.BigEndian.Uint32(in.head[8:]); in.head[1] == data && size > 0 {
		if size > maxMuxData {
			return fmt.Errorf("%w: %d bytes of data in a frame", wire.ErrProtocol, size)
		}
		buf := muxData.Get().(*bytes.Buffer)
		buf.Reset()
		if _, err := io.CopyN(buf, in.r, int64(size)); err != nil {
			return err
		}
		in.data = buf
	}
	in.rest = in.head[:]
	return nil
}

// muxStream is a yamux stream. Once a deadline has passed, Read and Write fail at once, even if
// data or room is there.
type muxStream struct {
	*yamux.Stream
	reading, writing atomic.Int64 // deadlines in nanoseconds since 1970; 0 is none
}

func (s *muxStream) Read(p []byte) (int, error) { return timed(&s.reading, s.Stream.Read, p) }

// maxPiece is how many bytes one Write passes to yamux. yamux copies each frame, as large as
// the window that the other side offers, and queues up to 64.
const maxPiece = 2 * wire.MaxData

func (s *muxStream) Write(p []byte) (sent int, err error) {
	for err == nil && sent < len(p) {
		var n int
		n, err = timed(&s.writing, s.Stream.Write, p[sent:min(sent+maxPiece, len(p))])
		sent += n
	}
	return sent, err
}

func timed(deadline *atomic.Int64, do func([]byte) (int, error), p []byte) (int, error) {
	if d := deadline.Load(); d != 0 && time.Now().UnixNano() >= d {
		return 0, os.ErrDeadlineExceeded
	}
	n, err := do(p)
	if errors.Is(err, yamux.ErrTimeout) || errors.Is(err, yamux.ErrConnectionWriteTimeout) {
		err = os.ErrDeadlineExceeded
	}
	return n, err
}

// CloseWrite is Close, after which a yamux stream can still be read.
func (s *muxStream) CloseWrite() error { return s.Close() }

func (s *muxStream) SetDeadline(t time.Time) error {
	return errors.Join(s.SetReadDeadline(t), s.SetWriteDeadline(t))
}

func (s *muxStream) SetReadDeadline(t time.Time) error {
	s.reading.Store(nanoseconds(t))
	return s.Stream.SetReadDeadline(t)
}

func (s *muxStream) SetWriteDeadline(t time.Time) error {
	s.writing.Store(nanoseconds(t))
	return s.Stream.SetWriteDeadline(t)
}

func nanoseconds(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixNano()
}
