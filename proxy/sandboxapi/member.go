package sandboxapi

import (
	"cmp"
	"context"
	"net/http"
	"net/url"
	"regexp"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/proxy/apitype"
	"github.com/bermhq/berm/proxy/stream"
)

const maxSide = 4096 // rows or columns of a terminal

var memberID = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_.:-]{0,122}$`)

// member is a command or a process of a sandbox, as a path names it.
type member struct{ tenant, key, id string }

func memberOf(r *http.Request, name string) member {
	tenant, key := target(r)
	return member{tenant, key, param(r, name)}
}

func checkID(field, id string) error {
	if !memberID.MatchString(id) {
		return &lifecycle.InvalidError{Field: field, Message: "must be up to 123 letters, digits and _.:-, of which the first is a letter or digit"}
	}
	return nil
}

// followable is the output of a command or process.
type followable[T any] interface {
	stream.Source
	Ended() T // once Next has said io.EOF
}

// members are the calls that commands and processes have alike.
type members[T any] struct {
	a      *api
	param  string // of the path
	list   func(ctx context.Context, tenant, key string) ([]T, error)
	get    func(ctx context.Context, tenant, key, id string) (T, error)
	signal func(ctx context.Context, tenant, key, id string, signal int) error
	resize func(ctx context.Context, tenant, key, id string, rows, cols int) error
	reader func(ctx context.Context, m member, from int64) (followable[T], error) // of the output
	attach func(ctx context.Context, m member, from int64, takeOver bool) (followable[T], error)
	listed func([]T) any
	shown  func(T) (answer any, session string)
	start  func(T) (first apitype.StreamEvent, begin, end int64) // and which output is kept
	exit   func(T) apitype.Exit
}

func (a *api) execs() members[lifecycle.Execution] {
	m := a.manager
	attach := func(ctx context.Context, at member, from int64, _ bool) (followable[lifecycle.Execution], error) {
		return m.AttachExec(ctx, at.tenant, at.key, at.id, from) // the newest takes over
	}
	return members[lifecycle.Execution]{
		a: a, param: "exec", list: m.Executions, get: m.Execution, signal: m.SignalExec, resize: m.ResizeExec, attach: attach,
		reader: func(ctx context.Context, at member, from int64) (followable[lifecycle.Execution], error) {
			return attach(ctx, at, from, true)
		},
		listed: func(list []lifecycle.Execution) any { return apitype.ExecutionList{Execs: each(list, execution)} },
		shown:  func(x lifecycle.Execution) (any, string) { return execution(x), x.SessionID },
		start: func(x lifecycle.Execution) (apitype.StreamEvent, int64, int64) {
			shown := execution(x)
			return apitype.StreamEvent{Event: apitype.EventStart, Execution: &shown}, x.FirstSeq, x.NextSeq
		},
		exit: func(x lifecycle.Execution) apitype.Exit { return execution(x).Exit },
	}
}

func (a *api) processes() members[lifecycle.Process] {
	m := a.manager
	return members[lifecycle.Process]{
		a: a, param: "process", list: m.Processes, get: m.Process, signal: m.SignalProcess, resize: m.ResizeProcess,
		reader: func(ctx context.Context, at member, from int64) (followable[lifecycle.Process], error) {
			return m.FollowProcess(ctx, at.tenant, at.key, at.id, from) // beside whoever is attached
		},
		attach: func(ctx context.Context, at member, from int64, takeOver bool) (followable[lifecycle.Process], error) {
			return m.AttachProcess(ctx, at.tenant, at.key, at.id, from, takeOver)
		},
		listed: func(list []lifecycle.Process) any { return apitype.ProcessList{Processes: each(list, process)} },
		shown:  func(p lifecycle.Process) (any, string) { return process(p), p.SessionID },
		start: func(p lifecycle.Process) (apitype.StreamEvent, int64, int64) {
			shown := process(p)
			return apitype.StreamEvent{Event: apitype.EventStart, Process: &shown}, p.FirstSeq, p.NextSeq
		},
		exit: processExit,
	}
}

// acceptedStream returns the form in which the caller wants output streamed, or "".
func acceptedStream(r *http.Request) string { return stream.Accepted(r, stream.SSE, stream.NDJSON) }

func (a *api) streamOptions(r *http.Request, q url.Values) (stream.Options, error) {
	raw, err := boolQuery(q, "raw")
	return stream.Options{Form: cmp.Or(acceptedStream(r), stream.SSE), Raw: raw, Heartbeat: a.heartbeat}, err
}

// from is where a stream begins, and how it ends.
type from struct {
	stream.Place
	kill func() // called when the caller goes away; nil lets it run on
	now  bool   // ends with what is there already
}

// streamed answers the output of one. With always, it follows whether that is asked for or
// not.
func (c members[T]) streamed(always bool) proxy.Handler {
	return func(w http.ResponseWriter, r *http.Request) error {
		m := memberOf(r, c.param)
		q := r.URL.Query()
		follow, err := boolQuery(q, "follow")
		if err != nil {
			return err
		}
		opts, err := c.a.streamOptions(r, q)
		if err != nil {
			return err
		}
		place, err := stream.After(r, q)
		if err != nil {
			return err
		}
		if err := skipBody(w, r); err != nil {
			return err
		}
		v, err := c.get(r.Context(), m.tenant, m.key, m.id)
		if err != nil {
			return err
		}
		now := !always && !follow && c.exit(v).Status == processRunning
		return c.follow(w, r, m, v, from{Place: place, now: now}, opts)
	}
}

func (c members[T]) follow(w http.ResponseWriter, r *http.Request, m member, v T, at from, opts stream.Options) error {
	s, err := c.reader(r.Context(), m, at.Seq())
	if err != nil {
		return err
	}
	start, begin, end := c.start(v)
	if start.Seq = at.Seq(); at.Place == stream.Anywhere {
		start.Seq = max(begin, 0)
	}
	out := stream.Output{Source: s, Start: start, Told: at.Place, Exit: func() apitype.Exit { return c.exit(s.Ended()) }, Kill: at.kill}
	if at.now {
		out.Until = &end
	}
	return stream.Follow(w, r, out, opts)
}

// attached connects a WebSocket to one.
func (c members[T]) attached(w http.ResponseWriter, r *http.Request) error {
	m := memberOf(r, c.param)
	takeOver, err := boolQuery(r.URL.Query(), "take_over")
	if err != nil {
		return err
	}
	return stream.Attach(w, r, stream.Attachable{
		Open: func(ctx context.Context, from int64) (stream.Source, func() apitype.AttachEnd, error) {
			s, err := c.attach(ctx, m, from, takeOver)
			return s, func() apitype.AttachEnd {
				x := c.exit(s.Ended())
				return apitype.AttachEnd{
					ExitCode: x.ExitCode, Signal: x.Signal, Status: x.Status, QuotaExceeded: x.WorkspaceQuota != nil && x.WorkspaceQuota.Exceeded,
				}
			}, err
		},
		Signal: func(ctx context.Context, n int) error { return c.signal(ctx, m.tenant, m.key, m.id, n) },
		Resize: func(ctx context.Context, size apitype.ResizeRequest) error {
			if err := checkResize(size); err != nil {
				return err
			}
			return c.resize(ctx, m.tenant, m.key, m.id, size.Rows, size.Cols)
		},
	}, c.a.heartbeat)
}

// each is never nil.
func each[T, S any](list []T, f func(T) S) []S {
	out := make([]S, len(list))
	for i, v := range list {
		out[i] = f(v)
	}
	return out
}

func (c members[T]) all(w http.ResponseWriter, r *http.Request) error {
	tenant, key := target(r)
	list, err := c.list(r.Context(), tenant, key)
	return reply(w, http.StatusOK, c.listed(list), err)
}

// one answers what a call says of one.
func (c members[T]) one(call func(ctx context.Context, tenant, key, id string) (T, error)) proxy.Handler {
	return func(w http.ResponseWriter, r *http.Request) error {
		m := memberOf(r, c.param)
		v, err := call(r.Context(), m.tenant, m.key, m.id)
		if err != nil {
			return err
		}
		answer, session := c.shown(v)
		proxy.ExchangeOf(r.Context()).SessionID = session
		return reply(w, http.StatusOK, answer, nil)
	}
}

// after does something to one, and answers it.
func (c members[T]) after(do func(ctx context.Context, m member, w http.ResponseWriter, r *http.Request) error) proxy.Handler {
	return func(w http.ResponseWriter, r *http.Request) error {
		m := memberOf(r, c.param)
		if err := c.a.exists(r); err != nil {
			return err
		}
		if err := do(r.Context(), m, w, r); err != nil {
			return err
		}
		return c.one(c.get)(w, r)
	}
}

func (c members[T]) signaled(ctx context.Context, m member, w http.ResponseWriter, r *http.Request) error {
	var body apitype.SignalRequest
	if err := proxy.DecodeBody(w, r, proxy.MaxBody, false, &body); err != nil {
		return err
	}
	if body.Signal == 0 {
		return &lifecycle.InvalidError{Field: "signal", Message: "is mandatory"}
	}
	return c.signal(ctx, m.tenant, m.key, m.id, int(body.Signal))
}

func (c members[T]) resized(ctx context.Context, m member, w http.ResponseWriter, r *http.Request) error {
	var body apitype.ResizeRequest
	if err := proxy.DecodeBody(w, r, proxy.MaxBody, false, &body); err != nil {
		return err
	}
	if err := checkResize(body); err != nil {
		return err
	}
	return c.resize(ctx, m.tenant, m.key, m.id, body.Rows, body.Cols)
}

func checkResize(b apitype.ResizeRequest) error {
	if b.Rows < 1 || b.Rows > maxSide || b.Cols < 1 || b.Cols > maxSide {
		return &lifecycle.InvalidError{Field: "rows", Message: "rows and cols must be from 1 to 4,096"}
	}
	return nil
}
