package client

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"maps"
	"net/http"
	"net/url"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/bermhq/berm/proxy/apitype"
)

const (
	ndjson     = "application/x-ndjson"
	maxEvent   = 8 << 20                // bytes of one event
	maxSilence = time.Minute            // without any line, not even a heartbeat
	firstPause = 100 * time.Millisecond // before a stream is resumed; it doubles each time
	maxPause   = 5 * time.Second
)

// ErrTakenOver ends a stream that another follower has taken over.
var ErrTakenOver = errors.New("somebody else follows the command now")

// errBroken ends a stream that broke off.
var errBroken = errors.New("the stream broke off")

// errGoingDown ends a stream that broke off because the server went down.
var errGoingDown = fmt.Errorf("%w: the server is going down", errBroken)

// StreamOptions set where a stream begins, and the form of its output.
type StreamOptions struct {
	// After is the Seq after which the output begins. Nil begins with the first output
	// that is kept.
	After *int64
	Raw   bool // output in DataBase64, rather than as text in Data
}

func (o StreamOptions) query() url.Values {
	q := url.Values{}
	if o.After != nil {
		q.Set("after", strconv.FormatInt(*o.After, 10))
	}
	set(q, "raw", o.Raw)
	return q
}

// ExecStream runs a command and yields its output as it comes, from an EventStart to an
// EventExit. It leaves out heartbeats. The command ends when the stream ends or the caller
// breaks the loop, unless the request has an ExecID. With an ExecID, ExecStream resumes a
// stream that breaks off, up to Options.Retries times in a row without output. The sequence
// ends after the first error, and can be run once.
func (c *Client) ExecStream(ctx context.Context, key string, req apitype.ExecRequest) iter.Seq2[apitype.StreamEvent, error] {
	first := call{method: http.MethodPost, path: at("sandboxes", key, "exec"), body: req, again: unlessNamed(req.ExecID)}
	if req.ExecID == "" {
		return c.events(ctx, first, nil)
	}
	return c.events(ctx, first, &call{method: http.MethodGet, path: at("sandboxes", key, "execs", req.ExecID, "stream"), query: StreamOptions{Raw: req.Raw}.query()})
}

// FollowExec yields the output of a command as ExecStream does. It takes over from an earlier
// follower. The command goes on when the caller breaks the loop.
func (c *Client) FollowExec(ctx context.Context, key, execID string, opts StreamOptions) iter.Seq2[apitype.StreamEvent, error] {
	stream := call{method: http.MethodGet, path: at("sandboxes", key, "execs", execID, "stream"), query: opts.query()}
	return c.events(ctx, stream, &stream)
}

// FollowProcess yields the output of a managed process as ExecStream does. It doesn't disturb
// a caller that is attached to the process.
func (c *Client) FollowProcess(ctx context.Context, key, processID string, opts StreamOptions) iter.Seq2[apitype.StreamEvent, error] {
	logs := call{method: http.MethodGet, path: at("sandboxes", key, "processes", processID, "logs"), query: opts.query()}
	logs.query.Set("follow", "true")
	return c.events(ctx, logs, &logs)
}

// ProcessLogs yields the kept output of a managed process, and doesn't wait for more. It yields
// an EventExit only if the process has ended.
func (c *Client) ProcessLogs(ctx context.Context, key, processID string, opts StreamOptions) iter.Seq2[apitype.StreamEvent, error] {
	logs := call{method: http.MethodGet, path: at("sandboxes", key, "processes", processID, "logs"), query: opts.query()}
	return func(yield func(apitype.StreamEvent, error) bool) {
		s := &eventStream{c: c, yield: yield}
		if _, err := s.read(ctx, logs); err != nil && !errors.Is(err, io.EOF) && !s.left {
			yield(apitype.StreamEvent{}, err)
		}
	}
}

// events yields the events of the stream of the call first, and of streams that resume it.
// Resume is the call to resume with, to which events adds the place in the output. Nil means
// that the stream can't be resumed.
func (c *Client) events(ctx context.Context, first call, resume *call) iter.Seq2[apitype.StreamEvent, error] {
	return func(yield func(apitype.StreamEvent, error) bool) {
		s := &eventStream{c: c, yield: yield, seq: -1}
		next, pause := first, firstPause
		for tries := 0; ; tries++ {
			more, err := s.read(ctx, next)
			switch {
			case s.left || err == nil:
				return
			case errors.Is(err, io.EOF):
				err = errBroken // a stream without an EventExit isn't whole
			}
			if more {
				tries, pause = 0, firstPause
			}
			if _, refused := errors.AsType[*Error](err); refused || errors.Is(err, ErrTakenOver) || ctx.Err() != nil || resume == nil || s.seq < 0 || tries >= c.retries {
				yield(apitype.StreamEvent{}, err)
				return
			}
			if waitErr := wait(ctx, pause); waitErr != nil {
				yield(apitype.StreamEvent{}, errors.Join(waitErr, err))
				return
			}
			pause = min(2*pause, maxPause)
			next = *resume
			next.query = maps.Clone(resume.query)
			next.query.Set("after", strconv.FormatInt(s.seq, 10))
		}
	}
}

// eventStream yields the events of one stream after another.
type eventStream struct {
	c     *Client
	yield func(apitype.StreamEvent, error) bool
	seq   int64 // of the last event; -1 before the first
	left  bool  // the caller wants no more
}

// read reads one stream. It returns nil after an EventExit or when the caller wants no more,
// and io.EOF if the stream ended without an EventExit. More reports whether it yielded an
// event other than EventStart.
func (s *eventStream) read(ctx context.Context, call call) (more bool, err error) {
	call.header = http.Header{"Accept": {ndjson}}
	err = lines(ctx, s.c, call, "", maxSilence, func(ev apitype.StreamEvent) (bool, error) {
		again := s.seq >= 0
		s.seq = ev.Seq
		switch ev.Event {
		case apitype.EventHeartbeat:
			return true, nil
		case apitype.EventTakenOver:
			return false, ErrTakenOver
		case apitype.EventGoingDown:
			return false, errGoingDown
		case apitype.EventStart:
			if again {
				return true, nil
			}
		default:
			more = true
		}
		s.left = !s.yield(ev, nil)
		return !s.left && ev.Event != apitype.EventExit, nil
	})
	return more, err
}

// lines makes a call and decodes the lines of its answer that begin with prefix, and passes
// them to f. It returns once f wants no more or fails, and io.EOF at the end of the answer.
// It returns errBroken if no line comes for the time silence, where 0 is any time.
func lines[T any](ctx context.Context, c *Client, call call, prefix string, silence time.Duration, f func(T) (more bool, err error)) error {
	call.stream = true
	rep, err := c.do(ctx, call)
	if err != nil {
		return err
	}
	defer func() { _ = rep.Body.Close() }()
	var silent atomic.Bool
	alarm := time.AfterFunc(time.Hour, func() {
		silent.Store(true)
		_ = rep.Body.Close()
	})
	defer alarm.Stop()
	scan := bufio.NewScanner(rep.Body)
	scan.Buffer(nil, maxEvent)
	scan.Split(wholeLines)
	for {
		if alarm.Stop(); silence > 0 { // the time that f takes doesn't count
			alarm.Reset(silence)
		}
		if !scan.Scan() {
			break
		}
		data, ok := bytes.CutPrefix(scan.Bytes(), []byte(prefix))
		if !ok {
			continue
		}
		var v T
		if err := json.Unmarshal(data, &v); err != nil {
			return fmt.Errorf("decode event: %w", err)
		}
		alarm.Stop()
		if more, err := f(v); err != nil || !more {
			return err
		}
	}
	switch {
	case silent.Load():
		return fmt.Errorf("%w: nothing came for %s", errBroken, silence)
	case scan.Err() != nil:
		return fmt.Errorf("%w: %w", errBroken, scan.Err())
	}
	return io.EOF
}

// wholeLines is a bufio.SplitFunc for lines. It drops a last line without an end.
func wholeLines(data []byte, atEOF bool) (advance int, token []byte, err error) {
	if i := bytes.IndexByte(data, '\n'); i >= 0 {
		return i + 1, data[:i], nil
	}
	if atEOF {
		return len(data), nil, nil
	}
	return 0, nil, nil
}
