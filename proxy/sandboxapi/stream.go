package sandboxapi

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"time"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/proxy/apitype"
	"github.com/bermhq/berm/runtime"
)

const (
	eventStream = "text/event-stream"
	heartbeat   = 15 * time.Second
	sendStall   = time.Minute // for one event or message to a caller that doesn't read
	maxEvent    = 64 << 10    // bytes of output in one event or message
)

// maxUnused is how many bytes of a body are let through to a call that has none.
const maxUnused = 4 << 10

// skipBody reads a body that means nothing to its end. Until that has come, net/http
// doesn't look at the connection, and a call that takes long can't see its caller leave.
func skipBody(w http.ResponseWriter, r *http.Request) error {
	if _, err := io.Copy(io.Discard, http.MaxBytesReader(w, r.Body, maxUnused)); err != nil {
		return &proxy.Fault{Status: http.StatusBadRequest, Code: "malformed", Title: "Malformed request",
			Detail: "this call has no body; one of up to 4 KiB is ignored", Cause: err}
	}
	_ = http.NewResponseController(w).SetReadDeadline(time.Time{}) // an in-process writer has none
	return nil
}

// source is what can be followed: a lifecycle.ExecStream or ProcessStream.
type source interface {
	Next() (runtime.Chunk, error)
	io.Writer
	CloseWrite() error
	io.Closer
}

// followed is a source, what it is of, and what its end came to.
type followed struct {
	source
	start apitype.StreamEvent // its first event; Seq is after which place the output begins
	told  place               // by an earlier stream; or anywhere
	exit  func() apitype.Exit // once Next has said io.EOF
	kill  func()              // called when the caller goes away; nil lets it run on
	until *int64              // ends the stream there, without an exit; nil is at its end
}

// streamOptions are how a stream is to look.
type streamOptions struct {
	json bool // lines of JSON rather than server-sent events
	raw  bool // bytes rather than text
}

// acceptedStream returns the form of stream that the caller accepts before any other,
// or "" if it accepts none.
func acceptedStream(r *http.Request) string {
	for _, v := range r.Header.Values("Accept") {
		for part := range strings.SplitSeq(v, ",") {
			mt, _, _ := strings.Cut(part, ";")
			if mt = strings.ToLower(strings.TrimSpace(mt)); mt == ndjson || mt == eventStream {
				return mt
			}
		}
	}
	return ""
}

func streamOptionsOf(r *http.Request, q url.Values) (streamOptions, error) {
	raw, err := boolQuery(q, "raw")
	return streamOptions{json: acceptedStream(r) == ndjson, raw: raw}, err
}

// stream answers what is followed, event by event, and closes it. Output goes out as
// soon as it is there; what piles up while the caller reads goes out in larger events,
// and no more than a little piles up before the source has to wait.
func (a *api) stream(w http.ResponseWriter, r *http.Request, f followed, opts streamOptions) error {
	ctx := r.Context()
	if f.kill == nil { // it can be taken up again, so it need not hold up a server that goes down
		var stop context.CancelFunc
		ctx, stop = proxy.UntilDrain(ctx)
		defer stop()
	}
	p := startPump(f.source)
	defer p.stop()

	rc := http.NewResponseController(w)
	e := &eventWriter{w: w, rc: rc, opts: opts, within: deadline{rc: rc, most: sendStall}}
	defer context.AfterFunc(ctx, e.within.last)()
	err := a.copyEvents(ctx, e, p, f)
	if err == nil {
		return nil
	}
	if errors.Is(err, proxy.ErrGoingDown) { // said, and broken off all the same
		_ = e.last(&apitype.StreamEvent{Event: apitype.EventGoingDown})
	}
	if f.kill != nil {
		defer f.kill()
		p.stop()
	}
	panic(http.ErrAbortHandler) // so that nobody takes this for the end
}

func (a *api) copyEvents(ctx context.Context, e *eventWriter, p *pump, f followed) error {
	e.seq.reach(f.start.Seq)
	e.seq.start(f.told)
	if err := e.begin(f.start); err != nil {
		return err
	}
	beat := time.NewTimer(a.heartbeat)
	defer beat.Stop()
	for {
		if len(p.ready) == 0 { // else more of it goes out at once
			if err := e.flush(); err != nil {
				return err
			}
		}
		beat.Reset(a.heartbeat)
		if f.until != nil && e.seq.last >= *f.until {
			return e.rest()
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-beat.C:
			if err := e.beat(); err != nil {
				return err
			}
		case <-p.ready:
			b, end := p.take()
			for _, c := range b.pieces {
				if err := e.output(c); err != nil {
					return err
				}
			}
			p.give(b)
			switch {
			case errors.Is(end, io.EOF):
				return e.exit(f.exit())
			case errdefs.IsAborted(end): // said in words, or the two would take turns for ever
				return e.last(&apitype.StreamEvent{Event: apitype.EventTakenOver})
			case end != nil:
				return errors.Join(end, e.flush())
			}
		}
	}
}

// deadline is that of writes to a caller that may not read: most for each, and once the
// stream is to end, a moment for all that is left.
type deadline struct {
	rc    *http.ResponseController
	most  time.Duration
	mu    sync.Mutex
	ended bool
}

func (d *deadline) next() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.ended {
		_ = d.rc.SetWriteDeadline(time.Now().Add(d.most)) // an in-process writer has none
	}
}

// last is also for the write that is under way.
func (d *deadline) last() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.ended = true
	_ = d.rc.SetWriteDeadline(time.Now().Add(lastWrite))
}

// eventWriter writes the events of one stream. Not safe for concurrent use.
type eventWriter struct {
	w      http.ResponseWriter
	rc     *http.ResponseController
	opts   streamOptions
	within deadline
	buf    bytes.Buffer // of one event
	text   [2]utf8Holder
	seq    position
}

// begin writes the header, and the first event.
func (e *eventWriter) begin(start apitype.StreamEvent) error {
	h := e.w.Header()
	ct := eventStream
	if e.opts.json {
		ct = ndjson
	}
	h.Set("Content-Type", ct)
	h.Set("X-Accel-Buffering", "no") // some proxies hold back what comes in parts, unless told
	e.within.next()
	e.w.WriteHeader(http.StatusOK)
	return e.event(&start)
}

func (e *eventWriter) flush() error {
	e.within.next()
	if err := e.rc.Flush(); !errors.Is(err, http.ErrNotSupported) {
		return err
	}
	return nil
}

// event writes an event. Its Seq and Resume are set here.
func (e *eventWriter) event(ev *apitype.StreamEvent) error {
	at := e.seq.place()
	ev.Seq, ev.Resume = at.seq(), at.resume()
	e.buf.Reset()
	if !e.opts.json {
		e.buf.WriteString("id: ")
		e.buf.WriteString(at.String())
		e.buf.WriteString("\nevent: ")
		e.buf.WriteString(ev.Event)
		e.buf.WriteString("\ndata: ")
	}
	enc := json.NewEncoder(&e.buf)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(ev); err != nil {
		return err
	}
	if !e.opts.json {
		e.buf.WriteByte('\n')
	}
	e.within.next()
	_, err := e.w.Write(e.buf.Bytes())
	return err
}

// output writes a piece of output. What ends within a character is held back in part.
func (e *eventWriter) output(c runtime.Chunk) error {
	ev, i := apitype.StreamEvent{Event: apitype.EventStdout}, streamOf(c)
	if c.Stderr {
		ev.Event = apitype.EventStderr
	}
	e.seq.reach(c.Seq)
	if c = e.seq.told.fresh(c); len(c.Data) == 0 {
		return nil
	}
	if e.opts.raw {
		ev.DataBase64 = c.Data
		return e.event(&ev)
	}
	ev.Data = e.text[i].add(c.Data)
	e.seq.hold(i, len(e.text[i].held), c)
	if ev.Data == "" {
		return nil
	}
	return e.event(&ev)
}

// rest writes what was held back and won't be completed any more.
func (e *eventWriter) rest() error {
	for i, name := range []string{apitype.EventStdout, apitype.EventStderr} {
		if data := e.text[i].rest(); data != "" {
			e.seq.release(i)
			if err := e.event(&apitype.StreamEvent{Event: name, Data: data}); err != nil {
				return err
			}
		}
	}
	return e.flush()
}

func (e *eventWriter) exit(x apitype.Exit) error {
	if err := e.rest(); err != nil {
		return err
	}
	return e.last(&apitype.StreamEvent{Event: apitype.EventExit, Exit: &x})
}

// last writes the event after which there is none.
func (e *eventWriter) last(ev *apitype.StreamEvent) error {
	if err := e.event(ev); err != nil {
		return err
	}
	return e.flush()
}

func (e *eventWriter) beat() error {
	if e.opts.json {
		return e.event(&apitype.StreamEvent{Event: apitype.EventHeartbeat})
	}
	e.within.next()
	_, err := io.WriteString(e.w, ": heartbeat\n\n")
	return err
}
