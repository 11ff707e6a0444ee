package sandboxapi

import (
	"cmp"
	"context"
	"net/http"
	"net/url"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/proxy/apitype"
	"github.com/bermhq/berm/proxy/stream"
)

// members holds the handlers that commands and managed processes share.
type members struct {
	a      *api
	kind   lifecycle.Kind
	path   string // below the sandbox's path
	param  string // the path's parameter that holds the ID
	listed func([]lifecycle.Process) any
	shown  func(lifecycle.Process) any
	exit   func(lifecycle.Process) apitype.Exit
}

func (a *api) execs() members {
	return members{
		a: a, kind: lifecycle.KindExec, path: "/execs/", param: "exec",
		listed: func(list []lifecycle.Process) any { return apitype.ExecutionList{Execs: each(list, execution)} },
		shown:  func(p lifecycle.Process) any { return execution(p) },
		exit:   func(p lifecycle.Process) apitype.Exit { return execution(p).Exit },
	}
}

func (a *api) managed() members {
	return members{
		a: a, kind: lifecycle.KindManaged, path: "/processes/", param: "process", exit: processExit,
		listed: func(list []lifecycle.Process) any { return apitype.ProcessList{Processes: each(list, process)} },
		shown:  func(p lifecycle.Process) any { return process(p) },
	}
}

// ref returns the reference to the process that the path names.
func (c members) ref(r *http.Request) lifecycle.ProcessRef {
	tenant, key := target(r)
	return lifecycle.ProcessRef{Tenant: tenant, Key: key, Kind: c.kind, ID: param(r, c.param)}
}

// started sets the header of an answer about a process that was started.
func (c members) started(w http.ResponseWriter, r *http.Request, p lifecycle.Process) {
	proxy.ExchangeOf(r.Context()).SessionID = p.SessionID
	_, key := target(r)
	w.Header().Set("Location", base+"/"+url.PathEscape(key)+c.path+url.PathEscape(p.ID))
}

// acceptedStream returns the form in which the caller wants output streamed, or "".
func acceptedStream(r *http.Request) string { return stream.Accepted(r, stream.SSE, stream.NDJSON) }

func (a *api) streamOptions(r *http.Request, q url.Values) (stream.Options, error) {
	raw, err := boolQuery(q, "raw")
	return stream.Options{Form: cmp.Or(acceptedStream(r), stream.SSE), Raw: raw, Heartbeat: a.Heartbeat}, err
}

// stream answers the output of a command.
func (c members) stream(w http.ResponseWriter, r *http.Request) error {
	return c.streamed(w, r, lifecycle.FollowRequest{Attach: true, TakeOver: true}, false)
}

// logs answers the kept output of a managed process. With follow, it goes on to the output's end.
func (c members) logs(w http.ResponseWriter, r *http.Request) error {
	follow, err := boolQuery(r.URL.Query(), "follow")
	if err != nil {
		return err
	}
	return c.streamed(w, r, lifecycle.FollowRequest{}, !follow) // beside a caller who is attached
}

// streamed answers the output of a process. With now, it ends after the output so far.
func (c members) streamed(w http.ResponseWriter, r *http.Request, req lifecycle.FollowRequest, now bool) error {
	q := r.URL.Query()
	opts, err := c.a.streamOptions(r, q)
	if err != nil {
		return err
	}
	req.From, err = stream.After(r, q)
	if err != nil {
		return err
	}
	if err := skipBody(w, r); err != nil {
		return err
	}
	ref := c.ref(r)
	p, err := c.a.Manager.Process(r.Context(), ref)
	if err != nil {
		return err
	}
	s, err := c.a.Manager.Follow(r.Context(), ref, req)
	if err != nil {
		return err
	}
	out := c.output(s, p, req.From)
	if now && p.Running() {
		out.Until = &p.NextSeq
	}
	return stream.Follow(w, r, out, opts)
}

// output returns a stream's source, its first event, and how it ended.
func (c members) output(s lifecycle.Stream, p lifecycle.Process, from int64) stream.Output {
	start := apitype.StreamEvent{Event: apitype.EventStart, Seq: from}
	if from < 0 {
		start.Seq = max(p.FirstSeq, 0)
	}
	switch shown := c.shown(p).(type) {
	case apitype.Execution:
		start.Execution = &shown
	case apitype.Process:
		start.Process = &shown
	}
	return stream.Output{Source: s, Start: start, Exit: func() apitype.Exit { return c.exit(s.Ended()) }}
}

// attached connects a WebSocket to a process.
func (c members) attached(w http.ResponseWriter, r *http.Request) error {
	takeOver, err := boolQuery(r.URL.Query(), "take_over")
	if err != nil {
		return err
	}
	ref := c.ref(r)
	return stream.Attach(w, r, stream.Attachable{
		Open: func(ctx context.Context, from int64) (stream.Source, func() apitype.AttachEnd, error) {
			s, err := c.a.Manager.Follow(ctx, ref, lifecycle.FollowRequest{
				From: from, Attach: true, TakeOver: takeOver || c.kind == lifecycle.KindExec, // the newest takes over
			})
			return s, func() apitype.AttachEnd {
				x := c.exit(s.Ended())
				return apitype.AttachEnd{
					ExitCode: x.ExitCode, Signal: x.Signal, Status: x.Status, QuotaExceeded: x.WorkspaceQuota != nil && x.WorkspaceQuota.Exceeded,
				}
			}, err
		},
		Signal: func(ctx context.Context, n int) error { return c.a.Manager.Signal(ctx, ref, n) },
		Resize: func(ctx context.Context, size apitype.ResizeRequest) error {
			return c.a.Manager.Resize(ctx, ref, size.Rows, size.Cols)
		},
	}, c.a.Heartbeat)
}

// each returns f of every item. Its result is never nil, so that JSON has [] rather than null.
func each[T, S any](list []T, f func(T) S) []S {
	out := make([]S, len(list))
	for i, v := range list {
		out[i] = f(v)
	}
	return out
}

func (c members) all(w http.ResponseWriter, r *http.Request) error {
	list, err := c.a.Manager.Processes(r.Context(), c.ref(r))
	return reply(w, http.StatusOK, c.listed(list), err)
}

// one returns a handler that answers the process that call returns.
func (c members) one(call func(context.Context, lifecycle.ProcessRef) (lifecycle.Process, error)) proxy.Handler {
	return func(w http.ResponseWriter, r *http.Request) error {
		p, err := call(r.Context(), c.ref(r))
		if err != nil {
			return err
		}
		proxy.ExchangeOf(r.Context()).SessionID = p.SessionID
		return reply(w, http.StatusOK, c.shown(p), nil)
	}
}

// changeMember returns a handler that does something to a process, and then answers the process.
func changeMember[T any](c members, do func(members, *http.Request, T) error) proxy.Handler {
	return c.a.existing(withBody(false, func(w http.ResponseWriter, r *http.Request, body T) error {
		if err := do(c, r, body); err != nil {
			return err
		}
		return c.one(c.a.Manager.Process)(w, r)
	}))
}

func (c members) signaled(r *http.Request, body apitype.SignalRequest) error {
	return c.a.Manager.Signal(r.Context(), c.ref(r), int(body.Signal))
}

func (c members) resized(r *http.Request, body apitype.ResizeRequest) error {
	return c.a.Manager.Resize(r.Context(), c.ref(r), body.Rows, body.Cols)
}
