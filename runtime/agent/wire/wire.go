// Package wire is what Berm and its program in a sandbox say to each other: frames on
// a byte stream, one operation at a time. It imports nothing but the standard library,
// as it is in every sandbox.
//
// The program dials and says Hello. Then, any number of times: Berm sends a Request,
// the program answers Ready or Failure, and Berm says Go; before that nothing has been
// done, and a Berm that hangs up instead was never there. From then on both may send
// Data and End, and the program Output and Item, until it ends the operation with
// Result or Failure. The connection can be used again if Berm had ended its own side by
// then, or the operation takes no input.
package wire

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"sync"
)

// Version is of the protocol. The two sides of a connection have the same.
const Version = 1

// Socket is the name of Berm's socket in its directory.
const Socket = "s"

// Kind is the kind of a frame.
type Kind byte

// The kinds. J are in JSON, with a type of this package.
const (
	KindHello   Kind = iota + 1 // J, from the program: Hello
	KindRequest                 // J, from Berm: Request
	KindReady                   // from the program
	KindGo                      // from Berm
	KindData                    // from both: bytes
	KindEnd                     // from both: no more Data from this side
	KindOutput                  // from the program: an Output
	KindItem                    // J, from the program: one of many answers
	KindResult                  // J, from the program: the end
	KindFailure                 // J, from the program: the other end, a Failure
)

// Bounds of a frame's payload.
const (
	MaxData    = 64 << 10
	MaxMessage = 256 << 10
	MaxRequest = 8 << 20 // a command of the most bytes, as JSON has it

	outputHead = 9
	frameHead  = 5
)

// limit is how long a frame of a kind may be; 0 is for no such kind.
func limit(kind Kind) uint32 {
	switch kind {
	case KindRequest:
		return MaxRequest
	case KindHello, KindItem, KindResult, KindFailure:
		return MaxMessage
	case KindData:
		return MaxData
	case KindOutput:
		return outputHead + MaxData
	case KindReady, KindGo, KindEnd:
		return 1 // and no byte is in it
	}
	return 0
}

// ErrProtocol is the error for what can't be understood. The connection is of no use
// after it.
var ErrProtocol = errors.New("what came isn't of the protocol")

// Reader reads frames. It isn't safe for several goroutines.
type Reader struct {
	r   *bufio.Reader
	buf []byte
}

// NewReader reads from r through a buffer of its own.
func NewReader(r io.Reader) *Reader { return &Reader{r: bufio.NewReaderSize(r, 4<<10)} }

// keepBuffer is the largest that a Reader keeps from one frame to the next.
const keepBuffer = outputHead + MaxData

// Next reads a frame. The payload is good until the next call. The error is io.EOF
// between two frames only.
func (r *Reader) Next() (Kind, []byte, error) {
	var head [frameHead]byte
	if _, err := io.ReadFull(r.r, head[:]); err != nil {
		return 0, nil, err
	}
	kind, size := Kind(head[0]), binary.BigEndian.Uint32(head[1:])
	switch most := limit(kind); {
	case most == 0:
		return 0, nil, fmt.Errorf("%w: a frame of kind %d", ErrProtocol, kind)
	case most == 1 && size > 0, size > most:
		return 0, nil, fmt.Errorf("%w: %d bytes in a frame of kind %d", ErrProtocol, size, kind)
	case kind == KindOutput && size < outputHead:
		return 0, nil, fmt.Errorf("%w: an output of %d bytes", ErrProtocol, size)
	}
	payload, err := r.payload(int(size))
	if errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	return kind, payload, err
}

// payload grows the buffer only as bytes come: a size alone costs its sender nothing.
func (r *Reader) payload(size int) ([]byte, error) {
	if cap(r.buf) > keepBuffer {
		r.buf = nil
	}
	r.buf = r.buf[:0]
	for len(r.buf) < size {
		have := len(r.buf)
		step := min(size-have, max(keepBuffer, have))
		if cap(r.buf) < have+step {
			r.buf = append(make([]byte, 0, have+step), r.buf...)
		}
		r.buf = r.buf[:have+step]
		if _, err := io.ReadFull(r.r, r.buf[have:]); err != nil {
			return nil, err
		}
	}
	return r.buf, nil
}

// Expect reads a frame of one kind.
func (r *Reader) Expect(kind Kind) ([]byte, error) {
	got, payload, err := r.Next()
	if err == nil && got != kind {
		err = fmt.Errorf("%w: a frame of kind %d in place of one of kind %d", ErrProtocol, got, kind)
	}
	return payload, err
}

// Decode reads JSON. Fields that this version does not know are left alone.
func Decode(payload []byte, v any) error {
	if err := json.Unmarshal(payload, v); err != nil { // a later version may say more
		return fmt.Errorf("%w: %w", ErrProtocol, err)
	}
	return nil
}

// Writer writes frames, each with one call of Write. Many goroutines may use it.
type Writer struct {
	mu  sync.Mutex
	w   io.Writer
	buf []byte
}

// NewWriter writes to w.
func NewWriter(w io.Writer) *Writer { return &Writer{w: w} }

// Send writes a frame of the parts' bytes.
func (w *Writer) Send(kind Kind, parts ...[]byte) error {
	size := 0
	for _, p := range parts {
		size += len(p)
	}
	if most := limit(kind); uint64(size) > uint64(most) {
		return fmt.Errorf("%w: %d bytes for a frame of kind %d", ErrProtocol, size, kind)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.buf = append(w.buf[:0], byte(kind), 0, 0, 0, 0)
	binary.BigEndian.PutUint32(w.buf[1:], uint32(size))
	for _, p := range parts {
		w.buf = append(w.buf, p...)
	}
	_, err := w.w.Write(w.buf)
	if cap(w.buf) > 2*keepBuffer {
		w.buf = nil
	}
	return err
}

// SendJSON writes a frame of v in JSON.
func (w *Writer) SendJSON(kind Kind, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return w.Send(kind, b)
}

// SendOutput writes an Output.
func (w *Writer) SendOutput(o Output) error {
	var head [outputHead]byte
	if o.Stderr {
		head[0] = 1
	}
	binary.BigEndian.PutUint64(head[1:], uint64(o.Seq))
	return w.Send(KindOutput, head[:], o.Data)
}

// Output is what a process printed.
type Output struct {
	Seq    int64 // bytes of both streams up to the end of this
	Stderr bool
	Data   []byte
}

// ParseOutput takes a frame of KindOutput apart. Data is part of the payload.
func ParseOutput(payload []byte) (Output, error) {
	if len(payload) < outputHead || payload[0] > 1 {
		return Output{}, fmt.Errorf("%w: an output", ErrProtocol)
	}
	o := Output{Seq: int64(binary.BigEndian.Uint64(payload[1:])), Stderr: payload[0] == 1, Data: payload[outputHead:]}
	if o.Seq < int64(len(o.Data)) {
		return Output{}, fmt.Errorf("%w: an output that begins before the first", ErrProtocol)
	}
	return o, nil
}
