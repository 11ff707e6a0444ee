package sandboxapi

import (
	"context"
	"net/http"
	"net/url"
	"time"

	"github.com/google/uuid"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/proxy/apitype"
	"github.com/bermhq/berm/proxy/stream"
)

// killTimeout bounds the kill of a command whose caller went away.
const killTimeout = 30 * time.Second

// startExec starts a command, and streams it if that is asked for.
func (a *api) startExec(w http.ResponseWriter, r *http.Request) error {
	q := r.URL.Query()
	streamed, err := boolQuery(q, "stream")
	if err != nil {
		return err
	}
	opts, req, err := a.startRequest(w, r, q)
	if err != nil {
		return err
	}
	req.Follow = streamed || acceptedStream(r) != ""
	p, s, err := a.Manager.Start(r.Context(), req)
	if err != nil {
		return err
	}
	a.execs().started(w, r, p)
	switch {
	case req.Follow:
		return a.follow(w, r, p, s, nil, opts)
	case p.Existing:
		return reply(w, http.StatusOK, execution(p), nil)
	}
	return reply(w, http.StatusCreated, execution(p), nil)
}

// execStreamed runs a command to its end and streams its output. If the caller goes away, it
// kills the command, unless the command has an ID by which the caller can resume.
func (a *api) execStreamed(w http.ResponseWriter, r *http.Request) error {
	opts, req, err := a.startRequest(w, r, r.URL.Query())
	if err != nil {
		return err
	}
	req.Follow = true
	var kill func()
	if req.ID == "" {
		req.ID, req.NewID = uuid.NewString(), true // so that it can be killed even if its start isn't answered
		req.Once = true
		kill = func() {
			ctx, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), killTimeout)
			defer cancel()
			// If Kill fails, the command still ends with its timeout or its sandbox.
			_, _ = a.Manager.Kill(ctx, lifecycle.ProcessRef{Tenant: req.Tenant, Key: req.Key, Kind: lifecycle.KindExec, ID: req.ID})
		}
	}
	p, s, err := a.Manager.Start(r.Context(), req)
	if err != nil {
		if kill != nil && r.Context().Err() != nil {
			kill()
		}
		return err
	}
	proxy.ExchangeOf(r.Context()).SessionID = p.SessionID
	err = a.follow(w, r, p, s, kill, opts)
	if err != nil && kill != nil {
		kill()
	}
	return err
}

// follow streams a command. S is nil for a command that existed before the request: follow
// opens its stream.
func (a *api) follow(w http.ResponseWriter, r *http.Request, p lifecycle.Process, s lifecycle.Stream, kill func(), opts stream.Options) error {
	if s == nil {
		tenant, key := target(r)
		var err error
		s, err = a.Manager.Follow(r.Context(), lifecycle.ProcessRef{Tenant: tenant, Key: key, Kind: lifecycle.KindExec, ID: p.ID},
			lifecycle.FollowRequest{From: -1, Attach: true, TakeOver: true})
		if err != nil {
			return err
		}
	}
	out := a.execs().output(s, p, -1)
	out.Kill = kill
	return stream.Follow(w, r, out, opts)
}

// startRequest reads the body of a command that is to be started.
func (a *api) startRequest(w http.ResponseWriter, r *http.Request, q url.Values) (stream.Options, lifecycle.StartRequest, error) {
	var req lifecycle.StartRequest
	opts, err := a.streamOptions(r, q)
	if err != nil {
		return opts, req, err
	}
	var body apitype.ExecRequest
	if err := proxy.DecodeBody(w, r, maxExecBody, false, &body); err != nil {
		return opts, req, err
	}
	if body.OutputLimit != nil {
		return opts, req, &lifecycle.InvalidError{Field: "output_limit", Message: "is for answers that are whole; nothing of a stream is left out"}
	}
	opts.Raw = opts.Raw || body.Raw
	body.Raw = false
	exec, err := execRequest(r, body)
	if err != nil {
		return opts, req, err
	}
	return opts, lifecycle.StartRequest{
		ExecRequest: exec, ID: body.ExecID, OpenStdin: body.StdinOpen, TTY: body.TTY, Rows: body.Rows, Cols: body.Cols, KeepBytes: body.KeepBytes,
		Taken: proxy.ExchangeOf(r.Context()).KeepBody().Release,
	}, nil
}

// execStdin streams the request's body to a command's input.
func (a *api) execStdin(w http.ResponseWriter, r *http.Request) error {
	end, err := boolQuery(r.URL.Query(), "close")
	if err != nil {
		return err
	}
	ctx, stop := proxy.UntilDrain(r.Context())
	defer stop()
	body := newUpload(w, r)
	defer body.done()
	err = a.Manager.Write(ctx, a.execs().ref(r), body, end)
	if body.err != nil {
		return body.err
	}
	if err != nil {
		return proxy.Explained(ctx, err)
	}
	return reply(w, http.StatusOK, apitype.Written{Bytes: body.n}, nil)
}

func execution(x lifecycle.Process) apitype.Execution {
	return apitype.Execution{
		ExecID: x.ID, SessionID: x.SessionID, Backend: x.Backend, Command: append([]string{}, x.Command...), TTY: x.TTY,
		Exit: apitype.Exit{
			Status: string(x.Status), ExitCode: x.ExitCode, Signal: x.Signal, DurationMS: since(x.StartedAt, x.EndedAt),
			CPUTimeMS: x.CPUTime.Milliseconds(), PeakMemoryBytes: x.PeakMemoryBytes,
			WorkspaceQuota: workspaceQuota(x.QuotaEnforcement, x.QuotaExceeded),
		},
		StartedAt: x.StartedAt.UTC(), EndedAt: timeOrNil(x.EndedAt),
		Timeout: apitype.Duration(x.Timeout), Overridden: overrides(x.Overridden),
		Created: x.Created, Recreated: x.Recreated, Existing: x.Existing, FirstSeq: x.FirstSeq, NextSeq: x.NextSeq,
	}
}

// since returns the milliseconds from start to end, or to now if end is zero.
func since(start, end time.Time) int64 {
	if end.IsZero() {
		end = time.Now()
	}
	return max(end.Sub(start), 0).Milliseconds()
}

func timeOrNil(t time.Time) *time.Time {
	if t.IsZero() {
		return nil
	}
	t = t.UTC()
	return &t
}
