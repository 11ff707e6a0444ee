package sandboxapi

import (
	"context"
	"errors"
	"net/http"
	"time"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/proxy/apitype"
)

// startProcess starts a managed process, and answers when it is ready.
func (a *api) startProcess(w http.ResponseWriter, r *http.Request, body apitype.ProcessRequest) error {
	req, err := processRequest(r, body)
	if err != nil {
		return err
	}
	p, _, err := a.Manager.Start(r.Context(), req)
	if err != nil {
		return err
	}
	a.managed().started(w, r, p)
	return reply(w, http.StatusCreated, process(p), nil)
}

func processRequest(r *http.Request, b apitype.ProcessRequest) (lifecycle.StartRequest, error) {
	tenant, key := target(r)
	req := lifecycle.StartRequest{
		Kind: lifecycle.KindManaged, ID: b.ProcessID, Replace: b.Replace, TTY: b.TTY, Rows: b.Rows, Cols: b.Cols,
		ExecRequest: lifecycle.ExecRequest{
			Tenant: tenant, Key: key, Command: append([]string{b.Command}, b.Args...), Env: b.Env, WorkingDir: b.Cwd,
		},
	}
	if b.Ready != nil {
		req.Ready = &lifecycle.Readiness{Port: b.Ready.Port, Line: b.Ready.Line}
		if b.Ready.Timeout != nil {
			if req.Ready.Timeout = time.Duration(*b.Ready.Timeout); req.Ready.Timeout <= 0 {
				return req, &lifecycle.InvalidError{Field: "ready.timeout", Message: "must be more than 0"}
			}
		}
	}
	var err error
	req.Create, err = sandboxRequest(r, key, b.Sandbox)
	return req, err
}

// maxWait is how long a caller can wait for a process in one call.
const maxWait = time.Hour

// waitProcess answers a process once it has ended, or as it is when the timeout runs
// out before.
func (a *api) waitProcess(w http.ResponseWriter, r *http.Request) error {
	ref := a.managed().ref(r)
	d := apitype.Duration(maxWait)
	if q := r.URL.Query(); q.Has("timeout") {
		if err := d.UnmarshalJSON([]byte(`"` + q.Get("timeout") + `"`)); err != nil || d <= 0 {
			return &lifecycle.InvalidError{Field: "timeout", Message: `must be more than 0: whole seconds, or a string like "1h30m"`}
		}
	}
	if err := skipBody(w, r); err != nil {
		return err
	}
	ctx, stop := proxy.UntilDrain(r.Context())
	defer stop()
	ctx, cancel := context.WithTimeout(ctx, min(time.Duration(d), maxWait))
	defer cancel()
	p, err := a.Manager.Wait(ctx, ref)
	if err != nil && errors.Is(ctx.Err(), context.DeadlineExceeded) {
		p, err = a.Manager.Process(r.Context(), ref)
	}
	if err != nil {
		return proxy.Explained(ctx, err)
	}
	return reply(w, http.StatusOK, process(p), nil)
}

func process(p lifecycle.Process) apitype.Process {
	return apitype.Process{
		ProcessID: p.ID, SessionID: p.SessionID, Command: append([]string{}, p.Command...), TTY: p.TTY, State: state(p), Ready: p.Ready,
		ExitCode: p.ExitCode, Signal: p.Signal, StartedAt: p.StartedAt.UTC(), EndedAt: timeOrNil(p.EndedAt),
		Stderr: p.Stderr, Attached: p.Attached, FirstSeq: p.FirstSeq, NextSeq: p.NextSeq,
	}
}

// state returns the state of a managed process.
func state(p lifecycle.Process) string {
	if p.Running() {
		return "running"
	}
	return "exited"
}

func processExit(p lifecycle.Process) apitype.Exit {
	return apitype.Exit{Status: state(p), ExitCode: p.ExitCode, Signal: p.Signal, DurationMS: since(p.StartedAt, p.EndedAt)}
}
