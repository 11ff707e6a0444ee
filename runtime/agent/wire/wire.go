// Package wire is the protocol between Berm and its program in a sandbox.
//
// The program sends Hello. Over the socket, a connection is for one operation after another. Over
// stdio, a yamux session follows, on which Berm opens a stream for each. Berm sends a Request, the
// program answers Ready or Failure, and Berm sends Go. The program does nothing before that. Then
// both may send Data and End, and the program Output and Item. The program ends the operation with
// Result or Failure. It closes the connection then if Op.Last says so. Berm closes it earlier to
// cancel the operation.
package wire

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"sync"
	"unicode/utf8"
)

// Version is the protocol's version. Version 3 had a yamux session on the socket, too.
const Version = 4 // runtime.AgentVersion

// The exit code and message of the agent's program when it can't create a thread, because
// the container is at its limit of processes. Both are those of Go's runtime.
const (
	ExitNoThread = 2
	NoThread     = "runtime: failed to create new OS thread"
)

// Socket is the name of Berm's socket in its directory.
const Socket = "s"

// Spares is how many connections the program keeps on the socket that wait for their first operation.
const Spares = 4

// Kind is the kind of a frame.
type Kind byte

// The kinds. J marks a payload in JSON, of a type in this package.
const (
	KindHello   Kind = iota + 1 // J, from the program: Hello
	KindRequest                 // J, from Berm: Request
	KindReady                   // from the program: the operation can begin
	KindGo                      // from Berm
	KindData                    // from both: bytes
	KindEnd                     // from both: no more Data from this side
	KindOutput                  // from the program: an Output
	KindItem                    // J, from the program: one of many answers
	KindResult                  // J, from the program: the operation has ended
	KindFailure                 // J, from the program: the operation has failed, a Failure
)

// Bounds of a frame's payload.
const (
	MaxHello   = 4 << 10
	MaxData    = 64 << 10
	MaxMessage = 256 << 10
	MaxRequest = 8 << 20 // enough for the longest command, in JSON

	// MaxNumber bounds sizes, places in an output and times, so that the sum of a few
	// doesn't overflow.
	MaxNumber = 1 << 60

	outputHead = 9
	frameHead  = 5
)

// check returns an error if a frame of this kind can't have a payload of this size.
func check(kind Kind, size uint64) error {
	var least, most uint64
	switch kind {
	case KindRequest:
		most = MaxRequest
	case KindHello:
		most = MaxHello
	case KindItem, KindResult, KindFailure:
		most = MaxMessage
	case KindData:
		most = MaxData
	case KindOutput:
		least, most = outputHead, outputHead+MaxData
	case KindReady, KindGo, KindEnd:
	default:
		return fmt.Errorf("%w: a frame of kind %d", ErrProtocol, kind)
	}
	if size < least || size > most {
		return fmt.Errorf("%w: %d bytes in a frame of kind %d, which has %d to %d", ErrProtocol, size, kind, least, most)
	}
	return nil
}

// ErrProtocol says that the other side broke the protocol. The connection can't be used
// after it.
var ErrProtocol = errors.New("what came isn't of the protocol")

// Reader reads frames. It isn't safe for several goroutines.
type Reader struct {
	r    *bufio.Reader
	head [frameHead]byte
	got  int    // bytes of the head
	buf  []byte // the part of the payload read so far
}

// NewReader reads from r through a buffer of its own.
func NewReader(r io.Reader) *Reader { return &Reader{r: bufio.NewReaderSize(r, 4<<10)} }

// keepBuffer is the size of the largest buffer that a Reader keeps from one frame to the next.
const keepBuffer = outputHead + MaxData

// Next reads a frame. The payload is valid until the next call. The error is io.EOF only between two
// frames. If a deadline ends a call, the next call goes on where that one stopped, even in the middle
// of a frame. Next refuses a Request, the largest kind of frame; Expect reads it.
func (r *Reader) Next() (Kind, []byte, error) { return r.whole(0) }

func (r *Reader) whole(want Kind) (Kind, []byte, error) {
	err := r.next(want)
	if errors.Is(err, io.EOF) && r.got > 0 {
		err = io.ErrUnexpectedEOF
	}
	if err != nil {
		return 0, nil, err
	}
	r.got = 0
	return Kind(r.head[0]), r.buf, nil
}

func (r *Reader) next(want Kind) error {
	if r.got == 0 {
		if cap(r.buf) > keepBuffer {
			r.buf = nil
		}
		r.buf = r.buf[:0]
	}
	n, err := io.ReadFull(r.r, r.head[r.got:])
	r.got += n
	if err != nil {
		return err
	}
	kind, size := Kind(r.head[0]), binary.BigEndian.Uint32(r.head[1:])
	if err := check(kind, uint64(size)); err != nil {
		return err
	}
	if kind == KindRequest && want != kind {
		return fmt.Errorf("%w: a request", ErrProtocol)
	}
	return r.payload(int(size))
}

// payload reads a payload. The buffer grows only as bytes arrive: claiming a size costs nothing.
func (r *Reader) payload(size int) error {
	for len(r.buf) < size {
		have := len(r.buf)
		step := min(size-have, max(keepBuffer, have))
		if cap(r.buf) < have+step {
			r.buf = append(make([]byte, 0, have+step), r.buf...)
		}
		n, err := io.ReadFull(r.r, r.buf[have:have+step])
		r.buf = r.buf[:have+n]
		if err != nil {
			return err
		}
	}
	return nil
}

// Expect reads a frame of one kind.
func (r *Reader) Expect(kind Kind) ([]byte, error) {
	got, payload, err := r.whole(kind)
	if err == nil && got != kind {
		err = fmt.Errorf("%w: a frame of kind %d in place of one of kind %d", ErrProtocol, got, kind)
	}
	return payload, err
}

// Decode reads JSON. It ignores fields that this version doesn't know.
func Decode(payload []byte, v any) error {
	if err := json.Unmarshal(payload, v); err != nil {
		return fmt.Errorf("%w: %w", ErrProtocol, err)
	}
	return nil
}

// Writer writes frames, each with one call of Write. Many goroutines may use it. Once a
// Write has failed, every Send fails, as half a frame may have been written.
type Writer struct {
	mu  sync.Mutex
	w   io.Writer
	buf []byte
	err error
}

// NewWriter writes to w.
func NewWriter(w io.Writer) *Writer { return &Writer{w: w} }

// Send writes a frame.
func (w *Writer) Send(kind Kind, payload []byte) error {
	if err := check(kind, uint64(len(payload))); err != nil {
		return err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.err != nil {
		return w.err
	}
	w.buf = append(w.buf[:0], byte(kind), 0, 0, 0, 0)
	binary.BigEndian.PutUint32(w.buf[1:], uint32(len(payload)))
	w.buf = append(w.buf, payload...)
	_, w.err = w.w.Write(w.buf)
	if cap(w.buf) > 2*keepBuffer {
		w.buf = nil
	}
	return w.err
}

// SendJSON writes a frame of v in JSON.
func (w *Writer) SendJSON(kind Kind, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return w.Send(kind, b)
}

// OutputFrame is a buffer for a whole frame of an Output, so that its data isn't copied.
type OutputFrame [frameHead + outputHead + MaxData]byte

// Data returns the part of the buffer for the data.
func (f *OutputFrame) Data() []byte { return f[frameHead+outputHead:] }

// SendFrame writes an Output whose data is the beginning of f.Data().
func (w *Writer) SendFrame(f *OutputFrame, o Output) error {
	size := outputHead + len(o.Data)
	if err := check(KindOutput, uint64(size)); err != nil {
		return err
	}
	f[0] = byte(KindOutput)
	binary.BigEndian.PutUint32(f[1:], uint32(size))
	o.head(f[frameHead:])
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.err == nil {
		_, w.err = w.w.Write(f[:frameHead+size])
	}
	return w.err
}

// Output is a piece of a process's output.
type Output struct {
	Seq    int64 // bytes of both streams up to the end of Data
	Stderr bool
	Data   []byte
}

// head writes the fields before the data.
func (o Output) head(b []byte) {
	b[0] = 0
	if o.Stderr {
		b[0] = 1
	}
	binary.BigEndian.PutUint64(b[1:], uint64(o.Seq))
}

// Cut returns at most the first most bytes of a text. It doesn't split a character.
func Cut[T string | []byte](text T, most int) T {
	if len(text) <= most {
		return text
	}
	end := most
	for end > max(most-utf8.UTFMax, 0) && !utf8.RuneStart(text[end]) {
		end--
	}
	return text[:end]
}

// ParseOutput decodes the payload of a KindOutput. The Output's Data is part of the payload.
func ParseOutput(payload []byte) (Output, error) {
	if len(payload) < outputHead || payload[0] > 1 {
		return Output{}, fmt.Errorf("%w: an output", ErrProtocol)
	}
	o := Output{Seq: int64(binary.BigEndian.Uint64(payload[1:])), Stderr: payload[0] == 1, Data: payload[outputHead:]}
	if o.Seq < int64(len(o.Data)) || o.Seq > MaxNumber {
		return Output{}, fmt.Errorf("%w: an output that ends at %d", ErrProtocol, o.Seq)
	}
	return o, nil
}
