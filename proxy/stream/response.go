// Package stream sends answers piece by piece: as bytes, lines of JSON, server-sent events, or
// the messages of a WebSocket. It streams the output of commands and processes in these forms.
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

// Accepted returns the first of the forms in the request's Accept header, or "" if it has
// none of them. It ignores quality values.
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

// Response is an answer whose header goes out with the first write. Until then, the handler
// can still answer an error. Each write may take a minute. A Response is safe for many
// goroutines.
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

// Header returns the answer's header.
func (s *Response) Header() http.Header { return s.w.Header() }

// Until gives all further writes one second together once ctx ends, including a write under
// way. Stop undoes it.
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

// Write writes b. After the first error, it fails with that error for good.
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

// End ends the answer. If the answer hasn't begun, End returns err, which can still be
// answered. Otherwise an error breaks the connection off, so that the caller doesn't take a
// part for the whole: End panics with http.ErrAbortHandler.
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

// deadline sets the deadlines of writes: a minute for each, and after last one second for all
// that are left.
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

// last sets the final deadline. It also holds for a write under way.
func (d *deadline) last() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.ended = true
	_ = d.rc.SetWriteDeadline(time.Now().Add(lastWrite))
}

// Events is a Response that sends events whose data is JSON.
type Events struct {
	*Response
	form string
	buf  bytes.Buffer // of one event; belongs to mu
}

// NewEvents returns an answer in a form, SSE or NDJSON.
func NewEvents(w http.ResponseWriter, form string, header ...string) *Events {
	return &Events{Response: NewResponse(w, append([]string{"Content-Type", form}, header...)...), form: form}
}

// Event writes an event with v as JSON. In the form NDJSON it leaves out ID and name, and in
// the form SSE an empty ID.
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

// Beat sends a comment of SSE as a heartbeat.
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

// word returns s if it has only lower-case letters and underscores, or else "unknown". A name
// with a line's end could forge another field of the event.
func word(s string) string {
	for _, r := range s {
		if (r < 'a' || r > 'z') && r != '_' {
			return "unknown"
		}
	}
	return s
}
