package sandboxapi

import (
	"context"
	"net/http"
	"regexp"

	"github.com/julienschmidt/httprouter"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/proxy/apitype"
)

const maxSide = 4096 // rows or columns of a terminal

var memberID = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_.:-]{0,122}$`)

// member is a command or a process of a sandbox, as a path names it.
type member struct{ tenant, key, id string }

// member gives what the path names, and refuses a query that the call doesn't have.
func (a *api) member(r *http.Request, param string, queries ...string) (member, error) {
	tenant, key, err := a.key(r, queries...)
	if err != nil {
		return member{}, err
	}
	m := member{tenant, key, httprouter.ParamsFromContext(r.Context()).ByName(param)}
	return m, checkID(param+"_id", m.id)
}

func checkID(field, id string) error {
	if !memberID.MatchString(id) {
		return &lifecycle.InvalidError{Field: field, Message: "must be up to 123 letters, digits and _.:-, of which the first is a letter or digit"}
	}
	return nil
}

// members are the calls that commands and processes have alike.
type members[T any] struct {
	a      *api
	param  string // of the path
	list   func(ctx context.Context, tenant, key string) ([]T, error)
	get    func(ctx context.Context, tenant, key, id string) (T, error)
	signal func(ctx context.Context, tenant, key, id string, signal int) error
	resize func(ctx context.Context, tenant, key, id string, rows, cols int) error
	listed func([]T) any
	shown  func(T) (answer any, session string)
}

func (a *api) execs() members[lifecycle.Execution] {
	m := a.manager
	return members[lifecycle.Execution]{
		a: a, param: "exec", list: m.Executions, get: m.Execution, signal: m.SignalExec, resize: m.ResizeExec,
		listed: func(list []lifecycle.Execution) any { return apitype.ExecutionList{Execs: each(list, execution)} },
		shown:  func(x lifecycle.Execution) (any, string) { return execution(x), x.SessionID },
	}
}

func (a *api) processes() members[lifecycle.Process] {
	m := a.manager
	return members[lifecycle.Process]{
		a: a, param: "process", list: m.Processes, get: m.Process, signal: m.SignalProcess, resize: m.ResizeProcess,
		listed: func(list []lifecycle.Process) any { return apitype.ProcessList{Processes: each(list, process)} },
		shown:  func(p lifecycle.Process) (any, string) { return process(p), p.SessionID },
	}
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
	tenant, key, err := c.a.key(r)
	if err != nil {
		return err
	}
	list, err := c.list(r.Context(), tenant, key)
	if err != nil {
		return err
	}
	return proxy.WriteJSON(w, http.StatusOK, jsonType, c.listed(list))
}

// one answers what a call says of one.
func (c members[T]) one(call func(ctx context.Context, tenant, key, id string) (T, error)) proxy.Handler {
	return func(w http.ResponseWriter, r *http.Request) error {
		m, err := c.a.member(r, c.param)
		if err != nil {
			return err
		}
		v, err := call(r.Context(), m.tenant, m.key, m.id)
		if err != nil {
			return err
		}
		answer, session := c.shown(v)
		proxy.ExchangeOf(r.Context()).SessionID = session
		return proxy.WriteJSON(w, http.StatusOK, jsonType, answer)
	}
}

// after does something to one, and answers it.
func (c members[T]) after(do func(ctx context.Context, m member, w http.ResponseWriter, r *http.Request) error) proxy.Handler {
	return func(w http.ResponseWriter, r *http.Request) error {
		m, err := c.a.member(r, c.param)
		if err != nil {
			return err
		}
		if err := c.a.exists(r, m.tenant, m.key); err != nil {
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
