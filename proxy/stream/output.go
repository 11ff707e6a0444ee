package stream

import (
	"context"
	"errors"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/proxy/apitype"
	"github.com/bermhq/berm/runtime"
)

const maxEvent = 64 << 10 // bytes of output in one event or message

// Source is the output and input of a process: a lifecycle.Stream. Its chunks end between
// characters.
type Source interface {
	Next() (runtime.Chunk, error)
	io.Writer
	CloseWrite() error
	io.Closer
}

// Output is a source with the first and last event of its stream.
type Output struct {
	Source
	Start apitype.StreamEvent // the first event; the output begins after its Seq
	Exit  func() apitype.Exit // called once Next has returned io.EOF
	Kill  func()              // called when the caller goes away; nil lets the command run on
	Until *int64              // the seq at which the stream ends without an exit; nil follows the output to its end
}

// Options are how a stream looks.
type Options struct {
	Form      string        // SSE or NDJSON
	Raw       bool          // bytes rather than text
	Heartbeat time.Duration // silence after which the stream sends a heartbeat
}

// Follow answers with the output, event by event, and closes the source. It sends output at
// once, and gathers output that comes during a write into larger events. A full batch makes
// the source wait. If the stream breaks off, Follow panics with http.ErrAbortHandler.
func Follow(w http.ResponseWriter, r *http.Request, out Output, opts Options) error {
	ctx := r.Context()
	if out.Kill == nil { // the caller can resume the stream, so it need not delay a drain
		var stop context.CancelFunc
		ctx, stop = proxy.UntilDrain(ctx)
		defer stop()
	}
	p := startPump(out.Source)
	defer p.stop()

	// Some proxies buffer an answer in parts without this header.
	e := &eventWriter{Events: NewEvents(w, opts.Form, "X-Accel-Buffering", "no"), opts: opts, seq: out.Start.Seq}
	defer e.Until(ctx)()
	err := e.copy(ctx, p, out)
	if err == nil {
		return nil
	}
	if errors.Is(err, proxy.ErrGoingDown) { // the answer is broken off after this event all the same
		_ = e.last(&apitype.StreamEvent{Event: apitype.EventGoingDown})
	}
	if out.Kill != nil {
		defer out.Kill()
		p.stop()
	}
	panic(http.ErrAbortHandler) // a client must not take this for the end
}

func (e *eventWriter) copy(ctx context.Context, p *pump, out Output) error {
	if err := e.event(&out.Start); err != nil {
		return err
	}
	beat := time.NewTimer(e.opts.Heartbeat)
	defer beat.Stop()
	for {
		if len(p.ready) == 0 { // else more of it goes out at once
			if err := e.Flush(); err != nil {
				return err
			}
		}
		beat.Reset(e.opts.Heartbeat)
		if out.Until != nil && e.seq >= *out.Until {
			return e.Flush()
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-beat.C:
			if err := e.beat(); err != nil {
				return err
			}
		case <-p.ready:
			pieces, end := p.take()
			for _, c := range pieces {
				if err := e.output(c); err != nil {
					return err
				}
			}
			switch {
			case errors.Is(end, io.EOF):
				x := out.Exit()
				return e.last(&apitype.StreamEvent{Event: apitype.EventExit, Exit: &x})
			case errdefs.IsAborted(end): // without this event, two followers would take over from each other for ever
				return e.last(&apitype.StreamEvent{Event: apitype.EventTakenOver})
			case end != nil:
				return errors.Join(end, e.Flush())
			}
		}
	}
}

// eventWriter writes the events of one stream. Not safe for concurrent use.
type eventWriter struct {
	*Events
	opts Options
	seq  int64 // output was sent up to here
}

// event writes an event, and sets its Seq.
func (e *eventWriter) event(ev *apitype.StreamEvent) error {
	ev.Seq = e.seq
	return e.Event(strconv.FormatInt(e.seq, 10), ev.Event, ev)
}

// output writes a piece of output.
func (e *eventWriter) output(c runtime.Chunk) error {
	ev := apitype.StreamEvent{Event: streamName(c.Stderr)}
	if e.opts.Raw {
		ev.DataBase64 = c.Data
	} else {
		ev.Data = strings.ToValidUTF8(string(c.Data), "\ufffd")
	}
	e.seq = c.Seq
	return e.event(&ev)
}

// streamName returns the name of an event of output.
func streamName(stderr bool) string {
	if stderr {
		return apitype.EventStderr
	}
	return apitype.EventStdout
}

// last writes the final event and flushes.
func (e *eventWriter) last(ev *apitype.StreamEvent) error {
	if err := e.event(ev); err != nil {
		return err
	}
	return e.Flush()
}

func (e *eventWriter) beat() error {
	if e.opts.Form == NDJSON {
		return e.event(&apitype.StreamEvent{Event: apitype.EventHeartbeat})
	}
	return e.Beat()
}
