// Package stream sends answers that go out as they are made: bytes, lines of JSON,
// server-sent events, and the messages of a WebSocket. It follows the output of commands
// and processes in these forms.
package stream

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"
)

// The forms of a stream.
const (
	SSE    = "text/event-stream"
	NDJSON = "application/x-ndjson"
)

const (
	stall     = time.Minute // for one write or message to a caller that doesn't read
	lastWrite = time.Second // for a write under way when the server goes down
)

// Accepted returns which of the forms the caller accepts before the others, or "" if it
// accepts none.
func Accepted(r *http.Request, forms ...string) string {
	for _, v := range r.Header.Values("Accept") {
		for part := range strings.SplitSeq(v, ",") {
			mt, _, _ := strings.Cut(part, ";")
			if mt = strings.ToLower(strings.TrimSpace(mt)); slices.Contains(forms, mt) {
				return mt
			}
		}
	}
	return ""
}

// Response is an answer that begins with its first write: until then, an error can still
// be answered. Each write has a minute. A Response is safe for many goroutines.
type Response struct {
	Status int // 0 is 200; set it before the first write

	w      http.ResponseWriter
	rc     *http.ResponseController
	header []string // names and values
	within deadline

	mu    sync.Mutex
	begun bool
	ended bool
	err   error // of the first write that failed: the caller is gone
}

// NewResponse returns an answer with a header of names and values, which is set when it
// begins.
func NewResponse(w http.ResponseWriter, header ...string) *Response {
	rc := http.NewResponseController(w)
	return &Response{w: w, rc: rc, header: header, within: deadline{rc: rc}}
}

// Header is that of the answer.
func (s *Response) Header() http.Header { return s.w.Header() }

// Until bounds all writes to a second once ctx ends, the one under way included.
func (s *Response) Until(ctx context.Context) (stop func() bool) {
	return context.AfterFunc(ctx, s.within.last)
}

// Begin sends the header now, unless the answer has ended.
func (s *Response) Begin() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.ended {
		_ = s.flush() // a caller who is gone shows at the next write
	}
}

func (s *Response) begin() {
	if s.begun {
		return
	}
	s.begun = true
	for i := 0; i < len(s.header); i += 2 {
		s.w.Header().Set(s.header[i], s.header[i+1])
	}
	s.within.next()
	s.w.WriteHeader(max(s.Status, http.StatusOK))
}

// Begun reports whether the header was sent.
func (s *Response) Begun() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.begun
}

// Write fails for good when the caller is gone.
func (s *Response) Write(b []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.write(b)
}

func (s *Response) write(b []byte) (n int, err error) {
	if s.err != nil {
		return 0, s.err
	}
	s.begin()
	s.within.next()
	n, s.err = s.w.Write(b)
	return n, s.err
}

// Flush sends what was written.
func (s *Response) Flush() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.flush()
}

func (s *Response) flush() error {
	if s.err != nil {
		return s.err
	}
	s.begin()
	s.within.next()
	if err := s.rc.Flush(); !errors.Is(err, http.ErrNotSupported) { // an in-process writer may have none
		s.err = err
	}
	return s.err
}

// Send writes and flushes.
func (s *Response) Send(b []byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, err := s.write(b); err != nil {
		return err
	}
	return s.flush()
}

// End returns an error that can still be answered. Once the answer has begun, an error
// breaks it off, so that no part is taken for the whole.
func (s *Response) End(err error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ended = true
	switch {
	case err != nil && !s.begun:
		return err
	case err != nil:
		panic(http.ErrAbortHandler)
	}
	s.begin()
	return nil
}

// deadline is that of writes to a caller that may not read: a minute for each, and once
// the stream is to end, a moment for all that is left.
type deadline struct {
	rc    *http.ResponseController
	mu    sync.Mutex
	ended bool
}

func (d *deadline) next() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.ended {
		_ = d.rc.SetWriteDeadline(time.Now().Add(stall)) // an in-process writer has none
	}
}

// last is also for the write that is under way.
func (d *deadline) last() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.ended = true
	_ = d.rc.SetWriteDeadline(time.Now().Add(lastWrite))
}

// Events is a Response of events, each of which has JSON.
type Events struct {
	*Response
	form string
	buf  bytes.Buffer // of one event; belongs to mu
}

// NewEvents returns an answer in a form, SSE or NDJSON.
func NewEvents(w http.ResponseWriter, form string, header ...string) *Events {
	return &Events{Response: NewResponse(w, append([]string{"Content-Type", form}, header...)...), form: form}
}

// Event writes an event. Lines have neither its ID nor its name; SSE leaves out an empty
// ID.
func (s *Events) Event(id, name string, v any) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.buf.Reset()
	if s.form == SSE {
		if id != "" {
			s.buf.WriteString("id: " + id + "\n")
		}
		s.buf.WriteString("event: " + word(name) + "\ndata: ")
	}
	enc := json.NewEncoder(&s.buf)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		return err
	}
	if s.form == SSE {
		s.buf.WriteByte('\n')
	}
	_, err := s.write(s.buf.Bytes())
	return err
}

// SendEvent writes an event and flushes.
func (s *Events) SendEvent(id, name string, v any) error {
	if err := s.Event(id, name, v); err != nil {
		return err
	}
	return s.Flush()
}

// Beat shows that a stream of SSE lives, with a comment.
func (s *Events) Beat() error { return s.Send([]byte(": heartbeat\n\n")) }

// BeatUntil beats every so often until ctx ends or the caller is gone.
func (s *Events) BeatUntil(ctx context.Context, every time.Duration) {
	t := time.NewTicker(every)
	defer t.Stop()
	for {
		select {
		case <-t.C:
			if s.Beat() != nil {
				return
			}
		case <-ctx.Done():
			return
		}
	}
}

// word lets no name through that could begin another line.
func word(s string) string {
	for _, r := range s {
		if (r < 'a' || r > 'z') && r != '_' {
			return "unknown"
		}
	}
	return s
}
