package sandboxapi

import (
	"context"
	"io"
	"net/http"
	"strconv"
	"time"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/proxy/apitype"
	"github.com/bermhq/berm/proxy/stream"
	"github.com/bermhq/berm/runtime"
)

const (
	maxTail    = 1_000_000
	beginAfter = 250 * time.Millisecond // the answer's header, if there is nothing to say yet
)

// logs streams what the sandbox's main process printed.
func (a *api) logs(w http.ResponseWriter, r *http.Request) error {
	tenant, key := target(r)
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
	text := stream.NewResponse(w, "Content-Type", "text/plain; charset=utf-8")
	var events *stream.Events
	if wantsNDJSON(r) {
		events = stream.NewEvents(w, stream.NDJSON)
		text = events.Response
	}
	defer text.Until(ctx)()
	if opts.Follow {
		// Errors come at once. The header tells the follower of a quiet sandbox that it follows.
		timer := time.AfterFunc(beginAfter, text.Begin)
		defer timer.Stop()
	}
	var stdout, stderr io.Writer
	if streams != "stderr" {
		stdout = &logWriter{text: text, events: events, name: "stdout"}
	}
	if streams != "stdout" {
		stderr = &logWriter{text: text, events: events, name: "stderr"}
	}
	err = a.Manager.Logs(ctx, tenant, key, opts, stdout, stderr)
	if proxy.GoingDown(ctx) {
		err = proxy.ErrGoingDown // even for nil: the follower must not take this for the sandbox's end
		if events != nil && events.Begun() {
			_ = events.SendEvent("", "", apitype.LogChunk{Stream: apitype.EventGoingDown})
		}
	}
	return text.End(err)
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

func wantsNDJSON(r *http.Request) bool { return stream.Accepted(r, stream.NDJSON) != "" }

// logWriter is one of the two streams of a log.
type logWriter struct {
	text   *stream.Response
	events *stream.Events // nil unless lines of JSON are wanted
	name   string
	held   stream.Text
}

func (l *logWriter) Write(b []byte) (int, error) {
	if l.events == nil {
		return len(b), l.text.Send(b)
	}
	data := l.held.Add(b)
	if data == "" {
		return len(b), nil
	}
	return len(b), l.events.SendEvent("", "", apitype.LogChunk{Stream: l.name, Data: data})
}
