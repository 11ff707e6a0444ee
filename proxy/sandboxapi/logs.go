package sandboxapi

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/proxy/apitype"
	"github.com/bermhq/berm/runtime"
)

const (
	ndjson     = "application/x-ndjson"
	maxTail    = 1_000_000
	logStall   = time.Minute            // for one write to a caller that doesn't read
	beginAfter = 250 * time.Millisecond // the answer's header, if there is nothing to say yet
)

// logs streams what the sandbox's main process printed.
func (a *api) logs(w http.ResponseWriter, r *http.Request) error {
	tenant, key, err := a.key(r, "follow", "tail", "since", "timestamps", "stream")
	if err != nil {
		return err
	}
	opts, streams, err := logOptions(r)
	if err != nil {
		return err
	}
	if err := skipBody(w, r); err != nil {
		return err
	}
	ctx := r.Context()
	if opts.Follow {
		var stop context.CancelFunc
		ctx, stop = proxy.UntilDrain(ctx)
		defer stop()
	}
	rc := http.NewResponseController(w)
	s := &logStream{w: w, rc: rc, within: deadline{rc: rc, most: logStall}, json: wantsNDJSON(r)}
	defer context.AfterFunc(ctx, s.within.last)()
	if opts.Follow {
		// Errors come at once; a quiet sandbox's follower wants to know that it follows.
		timer := time.AfterFunc(beginAfter, s.begin)
		defer timer.Stop()
	}
	var stdout, stderr io.Writer
	if streams != "stderr" {
		stdout = &streamWriter{s: s, name: "stdout"}
	}
	if streams != "stdout" {
		stderr = &streamWriter{s: s, name: "stderr"}
	}
	err = a.manager.Logs(ctx, tenant, key, opts, stdout, stderr)
	if proxy.GoingDown(ctx) {
		err = proxy.ErrGoingDown // also if there was none: its follower must not take this for the sandbox's end
	}
	return s.end(err)
}

func logOptions(r *http.Request) (opts runtime.LogOptions, streams string, err error) {
	q := r.URL.Query()
	if q.Has("tail") {
		opts.Tail, err = strconv.Atoi(q.Get("tail"))
		if err != nil || opts.Tail < 1 || opts.Tail > maxTail {
			return opts, "", &lifecycle.InvalidError{Field: "tail", Message: "must be a whole number from 1 to " + strconv.Itoa(maxTail)}
		}
	}
	streams = "both"
	if q.Has("stream") {
		streams = q.Get("stream")
		if streams != "stdout" && streams != "stderr" && streams != "both" {
			return opts, "", &lifecycle.InvalidError{Field: "stream", Message: "must be stdout, stderr or both"}
		}
	}
	var errs [3]error
	opts.Follow, errs[0] = boolQuery(q, "follow")
	opts.Timestamps, errs[1] = boolQuery(q, "timestamps")
	opts.Since, errs[2] = timeQuery(q, "since")
	for _, err := range errs {
		if err != nil {
			return opts, "", err
		}
	}
	return opts, streams, nil
}

func wantsNDJSON(r *http.Request) bool {
	for _, v := range r.Header.Values("Accept") {
		for part := range strings.SplitSeq(v, ",") {
			if mt, _, _ := strings.Cut(part, ";"); strings.TrimSpace(mt) == ndjson {
				return true
			}
		}
	}
	return false
}

// logStream is the answer that both streams are written to.
type logStream struct {
	mu     sync.Mutex
	w      http.ResponseWriter
	rc     *http.ResponseController
	within deadline
	json   bool
	begun  bool
	ended  bool
	err    error // of the first write that failed: the caller is gone
}

// begin sends the header.
func (s *logStream) begin() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.begun && !s.ended {
		s.header()
		_ = s.rc.Flush() // an in-process writer may have none
	}
}

func (s *logStream) header() {
	s.begun = true
	ct := "text/plain; charset=utf-8"
	if s.json {
		ct = ndjson
	}
	s.w.Header().Set("Content-Type", ct)
	s.within.next()
	s.w.WriteHeader(http.StatusOK)
}

func (s *logStream) write(b []byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil {
		return s.err
	}
	if !s.begun {
		s.header()
	}
	s.within.next()
	if _, s.err = s.w.Write(b); s.err == nil {
		if err := s.rc.Flush(); !errors.Is(err, http.ErrNotSupported) {
			s.err = err
		}
	}
	return s.err
}

// end answers an error if nothing has been answered yet; later, the only way to
// tell of one is to break off, but that JSON has room for a word of the server's end.
func (s *logStream) end(err error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ended = true
	switch {
	case err != nil && !s.begun:
		return err
	case err != nil:
		if s.json && s.err == nil && errors.Is(err, proxy.ErrGoingDown) {
			s.within.next()
			_, _ = s.w.Write([]byte(`{"stream":"` + apitype.EventGoingDown + `","data":""}` + "\n"))
			_ = s.rc.Flush()
		}
		panic(http.ErrAbortHandler)
	case !s.begun:
		s.header()
	}
	return nil
}

// streamWriter is one of the two streams.
type streamWriter struct {
	s    *logStream
	name string
	rest []byte // an incomplete character, at the end of the last write
}

func (w *streamWriter) Write(b []byte) (int, error) {
	if !w.s.json {
		return len(b), w.s.write(b)
	}
	data := append(w.rest, b...)
	whole := len(data) - incomplete(data)
	w.rest = append([]byte(nil), data[whole:]...)
	if whole == 0 {
		return len(b), nil
	}
	line, err := json.Marshal(apitype.LogChunk{Stream: w.name, Data: strings.ToValidUTF8(string(data[:whole]), "\ufffd")})
	if err != nil {
		return 0, err
	}
	return len(b), w.s.write(append(line, '\n'))
}

// incomplete is how many bytes at the end begin a character but don't end it.
func incomplete(b []byte) int {
	for n := 1; n < utf8.UTFMax && n <= len(b); n++ {
		c := b[len(b)-n]
		if utf8.RuneStart(c) {
			if c >= utf8.RuneSelf && !utf8.FullRune(b[len(b)-n:]) {
				return n
			}
			return 0
		}
	}
	return 0
}
