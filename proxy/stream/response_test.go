package stream

import (
	"errors"
	"net/http"
	"net/http/httptest"
	"testing"
)

// end tells whether an answer was broken off.
func end(s *Response, with error) (aborted bool, err error) {
	defer func() {
		v := recover()
		aborted = v == http.ErrAbortHandler //nolint:errorlint // the very value
		if v != nil && !aborted {
			panic(v)
		}
	}()
	return false, s.End(with)
}

func TestResponse(t *testing.T) {
	boo := errors.New("boo")
	for name, tt := range map[string]struct {
		write   string
		err     error
		status  int // of an answer that has begun
		aborted bool
	}{
		"nothing":        {"", nil, 200, false},
		"bytes":          {"x", nil, 200, false},
		"error":          {"", boo, 0, false},
		"error too late": {"x", boo, 200, true},
	} {
		w := httptest.NewRecorder()
		w.Code = 0
		s := NewResponse(w, "Content-Type", "text/x")
		if tt.write != "" {
			if _, err := s.Write([]byte(tt.write)); err != nil {
				t.Error(err)
			}
		}
		aborted, err := end(s, tt.err)
		if aborted != tt.aborted || !aborted && !errors.Is(err, tt.err) || w.Code != tt.status || w.Body.String() != tt.write {
			t.Errorf("%s: %v, aborted %t, status %d", name, err, aborted, w.Code)
		}
		if got := w.Header().Get("Content-Type") != ""; got != (tt.status != 0) {
			t.Errorf("%s: it has a header: %t", name, got)
		}
		if s.Begin(); s.Begun() != (tt.status != 0) {
			t.Errorf("%s: it began after its end", name)
		}
	}
}

func TestEvents(t *testing.T) {
	for form, want := range map[string]string{
		SSE:    "id: 7\nevent: some\ndata: {\"a\":\"<\\n\"}\n\nevent: unknown\ndata: 1\n\n: heartbeat\n\n",
		NDJSON: "{\"a\":\"<\\n\"}\n1\n: heartbeat\n\n",
	} {
		w := httptest.NewRecorder()
		s := NewEvents(w, form)
		err := errors.Join(s.Event("7", "some", map[string]string{"a": "<\n"}), s.SendEvent("", "a\nb", 1), s.Beat())
		if got := w.Body.String(); err != nil || got != want || w.Header().Get("Content-Type") != form {
			t.Errorf("%s: %q, %v", form, got, err)
		}
	}
}

func TestAccepted(t *testing.T) {
	for accept, want := range map[string]string{
		"": "", "*/*": "", "text/event-stream": SSE, "application/json, Application/X-NDJSON;q=1, text/event-stream": NDJSON,
	} {
		r := httptest.NewRequest(http.MethodGet, "/", nil)
		r.Header.Set("Accept", accept)
		if got := Accepted(r, SSE, NDJSON); got != want {
			t.Errorf("%q: %q", accept, got)
		}
	}
}
