package sandboxapi

import (
	"context"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"errors"
	"net/http"
	"strconv"
	"unicode/utf16"
	"unicode/utf8"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/proxy/apitype"
	"github.com/bermhq/berm/runtime"
)

// The third form of a stream is bytes as they are, in the frames of the Docker Engine: for
// who wants much output, and for tools that know them already. Each has a head, of the
// stream's number, three zeros, and how many bytes follow. The place is counted by who
// reads, from that of the first event on.
const (
	multiplexed = apitype.Multiplexed
	frameHead   = 8
	frameEvent  = 3 // the number of the last frame, an event in JSON
)

// Forms of a stream, as Accept asks for them.
var (
	eventForms = []string{ndjson, eventStream}
	execForms  = []string{ndjson, eventStream, multiplexed}
)

// frame writes one.
func (e *eventWriter) frame(number byte, data []byte) error {
	var head [frameHead]byte
	head[0] = number
	binary.BigEndian.PutUint32(head[4:], uint32(len(data))) //nolint:gosec // of a batch at most
	e.within.next()
	if _, err := e.w.Write(head[:]); err != nil || len(data) == 0 {
		return err
	}
	_, err := e.w.Write(data)
	return err
}

// outputFrame is output in the form of frames.
func (e *eventWriter) outputFrame(c runtime.Chunk) error {
	e.seq.reach(c.Seq)
	return e.frame(byte(1+streamOf(c)), c.Data)
}

// startHeader puts an event into a header: before the output there is no room for it in
// the frames, of which other programs know but two numbers. The command is left out: it
// may be longer than what is between allows of a header.
func startHeader(h http.Header, start apitype.StreamEvent) error {
	if start.Execution != nil {
		x := *start.Execution
		x.Command = []string{}
		start.Execution = &x
	}
	b, err := json.Marshal(start)
	if err != nil {
		return err
	}
	h.Set(apitype.StartHeader, string(asciiJSON(b)))
	return nil
}

// asciiJSON escapes what a header can't have.
func asciiJSON(b []byte) []byte {
	const hex = "0123456789abcdef"
	out := make([]byte, 0, len(b))
	for len(b) > 0 {
		r, size := utf8.DecodeRune(b)
		b = b[size:]
		if r < utf8.RuneSelf && r != 0x7f {
			out = append(out, byte(r))
			continue
		}
		for _, u := range utf16.AppendRune(nil, r) {
			out = append(out, '\\', 'u', hex[u>>12], hex[u>>8&15], hex[u>>4&15], hex[u&15])
		}
	}
	return out
}

// attachExact attaches to a command, and gives the very place after which its output
// begins, whatever was dropped meanwhile.
func (a *api) attachExact(ctx context.Context, m member, x lifecycle.Execution, from place) (lifecycle.ExecStream, place, error) {
	if from.resume() != "" {
		return nil, from, &lifecycle.InvalidError{Field: "after", Message: "must be one place for bytes, of which nothing is held back"}
	}
	at := startsAt(from, x.FirstSeq)
	for tries := 0; ; tries++ {
		s, err := a.manager.AttachExec(ctx, m.tenant, m.key, m.id, at)
		var gone *lifecycle.GoneError
		if from != anywhere || tries == 5 || !errors.As(err, &gone) || gone.FirstSeq <= at {
			return s, place{at, at}, err
		}
		at = gone.FirstSeq
	}
}

// encode writes an event in JSON, with a line's end. Output, of which there may be much,
// doesn't take the long way.
func (e *eventWriter) encode(ev *apitype.StreamEvent) error {
	if ev.Data == "" && ev.DataBase64 == nil {
		enc := json.NewEncoder(&e.buf)
		enc.SetEscapeHTML(false)
		return enc.Encode(ev)
	}
	e.buf.Grow(2*len(ev.Data) + base64.StdEncoding.EncodedLen(len(ev.DataBase64)) + 128)
	e.buf.Write(appendOutput(e.buf.AvailableBuffer(), ev))
	return nil
}

func appendOutput(b []byte, ev *apitype.StreamEvent) []byte {
	b = appendString(append(b, `{"event":`...), ev.Event)
	b = strconv.AppendInt(append(b, `,"seq":`...), ev.Seq, 10)
	if ev.Resume != "" {
		b = appendString(append(b, `,"resume":`...), ev.Resume)
	}
	if ev.Data != "" {
		b = appendString(append(b, `,"data":`...), ev.Data)
	}
	if ev.DataBase64 != nil {
		b = base64.StdEncoding.AppendEncode(append(b, `,"data_base64":"`...), ev.DataBase64)
		b = append(b, '"')
	}
	return append(b, '}', '\n')
}

// appendString writes valid UTF-8 as JSON.
func appendString(b []byte, s string) []byte {
	const hex = "0123456789abcdef"
	b = append(b, '"')
	done := 0
	for i := range len(s) {
		c := s[i]
		if c >= ' ' && c != '"' && c != '\\' {
			continue
		}
		b = append(b, s[done:i]...)
		done = i + 1
		switch c {
		case '"', '\\':
			b = append(b, '\\', c)
		case '\n':
			b = append(b, '\\', 'n')
		case '\r':
			b = append(b, '\\', 'r')
		case '\t':
			b = append(b, '\\', 't')
		default:
			b = append(b, '\\', 'u', '0', '0', hex[c>>4], hex[c&15])
		}
	}
	return append(append(b, s[done:]...), '"')
}
