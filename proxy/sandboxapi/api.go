// Package sandboxapi is a REST API that gives every key a sandbox. It translates between
// HTTP and lifecycle, and decides nothing itself. The OpenAPI document that it serves
// describes the API.
package sandboxapi

import (
	"cmp"
	"context"
	"errors"
	"io"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/julienschmidt/httprouter"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/proxy/apitype"
	"github.com/bermhq/berm/runtime"
)

// Options configure the API.
type Options struct {
	Manager     manager               // mandatory: a *lifecycle.Service
	Workspaces  workspaces            // a *quota.Service; nil: calls on workspaces and chats answer an error
	Chats       chats                 // a *chat.Service; nil likewise
	Policy      func() *policy.Policy // mandatory: the policy in force, for the status
	Gate        proxy.GateOptions     // Fail and AnyOrigin are the API's own
	Version     string                // shown in the status and by the health calls
	Gatherer    prometheus.Gatherer   // what /metrics shows; nil: there is no /metrics
	SigningKey  []byte                // of signed URLs, at least 32 bytes; nil: a random key for this process
	Heartbeat   time.Duration         // silence after which a stream sends a heartbeat; 0 is 15 s
	PortTimeout time.Duration         // for each write to a port, and then for its answer to begin; 0 is a minute
}

// manager is what the API needs of *lifecycle.Service.
type manager interface {
	Create(ctx context.Context, req lifecycle.CreateRequest) (lifecycle.CreateResult, error)
	Get(ctx context.Context, tenant, key string) (lifecycle.Sandbox, error)
	List(ctx context.Context, tenant string, opts lifecycle.ListOptions) ([]lifecycle.Sandbox, string, error)
	Delete(ctx context.Context, tenant, key string) (lifecycle.DeleteResult, error)
	Renew(ctx context.Context, tenant, key string, ttl time.Duration) (lifecycle.Sandbox, error)
	Pause(ctx context.Context, tenant, key string) (lifecycle.Sandbox, error)
	Resume(ctx context.Context, tenant, key string) (lifecycle.Sandbox, error)

	Exec(ctx context.Context, req lifecycle.ExecRequest) (lifecycle.ExecResult, error)
	Logs(ctx context.Context, tenant, key string, opts runtime.LogOptions, stdout, stderr io.Writer) error
	Stats(ctx context.Context, tenant, key string) (runtime.Stats, error)

	Start(ctx context.Context, req lifecycle.StartRequest) (lifecycle.Process, lifecycle.Stream, error)
	Process(ctx context.Context, ref lifecycle.ProcessRef) (lifecycle.Process, error)
	Processes(ctx context.Context, ref lifecycle.ProcessRef) ([]lifecycle.Process, error)
	Follow(ctx context.Context, ref lifecycle.ProcessRef, req lifecycle.FollowRequest) (lifecycle.Stream, error)
	Write(ctx context.Context, ref lifecycle.ProcessRef, r io.Reader, end bool) error
	Signal(ctx context.Context, ref lifecycle.ProcessRef, signal int) error
	Resize(ctx context.Context, ref lifecycle.ProcessRef, rows, cols int) error
	Kill(ctx context.Context, ref lifecycle.ProcessRef) (lifecycle.Process, error)
	Stop(ctx context.Context, ref lifecycle.ProcessRef) (lifecycle.Process, error)
	Wait(ctx context.Context, ref lifecycle.ProcessRef) (lifecycle.Process, error)

	Files(ctx context.Context, tenant, key string) (*lifecycle.Access, error)
	Ports(ctx context.Context, tenant, key string) (*lifecycle.Access, error)

	Ready(ctx context.Context) error
	Status(ctx context.Context, tenant string) lifecycle.ServiceStatus
}

// api has a handler for each call.
type api struct {
	Options
	gate   *proxy.Gate
	signer signer
}

const (
	base       = "/api/v1/sandboxes"
	one        = base + "/{key}"
	oneExec    = one + "/execs/{exec}"
	oneProcess = one + "/processes/{process}"
	legacyPath = "/api/v1/create"
)

// colons turns a path's template into the router's syntax: {key} into :key.
var colons = strings.NewReplacer("{", ":", "}", "")

// New checks the options and returns the API's handler. It is meant for
// proxy.Serve, and safe for many goroutines.
func New(opts Options) (http.Handler, error) {
	if opts.Manager == nil || opts.Policy == nil {
		return nil, errors.New("sandboxapi: Manager and Policy are mandatory")
	}
	opts.Gate.Fail = writeFault
	opts.Gate.AnyOrigin = func(r *http.Request) bool {
		return strings.HasPrefix(r.URL.Path, signedPrefix) || strings.HasPrefix(r.URL.Path, filePrefix)
	}
	gate, err := proxy.NewGate(opts.Gate)
	if err != nil {
		return nil, err
	}
	sign, err := newSigner(opts.SigningKey)
	if err != nil {
		return nil, err
	}
	opts.Heartbeat, opts.PortTimeout = cmp.Or(opts.Heartbeat, 15*time.Second), cmp.Or(opts.PortTimeout, time.Minute)
	a := &api{Options: opts, gate: gate, signer: sign}

	rt := httprouter.New()
	rt.RedirectTrailingSlash, rt.RedirectFixedPath, rt.HandleOPTIONS = false, false, false
	rt.NotFound = gate.Refuse(&proxy.Fault{Status: http.StatusNotFound, Code: "no_route", Title: "No such path",
		Detail: "there is nothing under this path; see /docs"})
	rt.MethodNotAllowed = gate.Refuse(&proxy.Fault{Status: http.StatusMethodNotAllowed, Code: "method_not_allowed", Title: "Method not allowed",
		Detail: "this path doesn't know the method; the Allow header lists those that it knows"})
	handle := func(method, path string, scope proxy.Scope, h proxy.Handler, queries ...string) {
		quiet := scope == proxy.ScopeNone && path != signedPorts && path != signedFiles || path == "/metrics"
		rt.Handler(method, colons.Replace(path), gate.Handle(proxy.Route{Name: path, Scope: scope, Quiet: quiet}, checked(h, queries)))
	}
	a.routeSandboxes(handle)
	a.routeMembers(handle)
	a.routeFiles(handle)
	a.routePorts(handle)
	a.routeStorage(handle)
	handle("POST", legacyPath, proxy.ScopeSandboxesWrite, a.legacyCreate, anyQuery)
	handle("GET", "/api/v1/status", proxy.ScopeStatusRead, a.status)
	handle("GET", "/api/v1/errors", proxy.ScopeStatusRead, a.errors)
	handle("GET", "/api/v1/health", proxy.ScopeNone, a.health, anyQuery)
	handle("GET", "/healthz", proxy.ScopeNone, a.health, anyQuery)
	handle("GET", "/readyz", proxy.ScopeNone, a.ready, anyQuery)
	handle("GET", "/openapi.json", proxy.ScopeNone, a.openAPI, anyQuery)
	handle("GET", "/docs", proxy.ScopeNone, a.page, anyQuery)
	if opts.Gatherer != nil {
		metrics := promhttp.HandlerFor(opts.Gatherer, promhttp.HandlerOpts{
			ErrorHandling: promhttp.PanicOnError, // the Gate answers the panic
		})
		handle("GET", "/metrics", proxy.ScopeStatusRead, func(w http.ResponseWriter, r *http.Request) error {
			metrics.ServeHTTP(w, r)
			return nil
		}, anyQuery)
	}
	return gate.Wrap(guard(rt, gate)), nil
}

// routing adds the handler of a method and path. Queries are the parameters that the call takes.
type routing func(method, path string, scope proxy.Scope, h proxy.Handler, queries ...string)

func (a *api) routeSandboxes(handle routing) {
	handle("PUT", one, proxy.ScopeSandboxesWrite, withBody(true, a.put))
	handle("GET", one, proxy.ScopeSandboxesRead, a.get)
	handle("DELETE", one, proxy.ScopeSandboxesWrite, a.delete)
	handle("GET", base, proxy.ScopeSandboxesRead, a.list, "status", "limit", "cursor", metadataQuery)
	handle("POST", one+"/renew", proxy.ScopeSandboxesWrite, a.existing(withBody(true, a.renew)))
	handle("POST", one+"/pause", proxy.ScopeSandboxesWrite, a.change(manager.Pause))
	handle("POST", one+"/resume", proxy.ScopeSandboxesWrite, a.change(manager.Resume))
	handle("GET", one+"/logs", proxy.ScopeSandboxesRead, a.logs, "follow", "tail", "since", "timestamps", "stream")
	handle("GET", one+"/stats", proxy.ScopeSandboxesRead, a.stats)
}

// routeMembers adds the handlers of commands and processes.
func (a *api) routeMembers(handle routing) {
	const scope = proxy.ScopeSandboxesExec
	execs, processes := a.execs(), a.managed()
	handle("POST", one+"/exec", scope, a.existingOrMade(a.exec), "raw")
	handle("POST", one+"/execs", scope, a.existingOrMade(a.startExec), "stream", "raw")
	handle("GET", one+"/execs", scope, execs.all)
	handle("GET", oneExec, scope, execs.one(a.Manager.Process))
	handle("DELETE", oneExec, scope, execs.one(a.Manager.Kill))
	handle("POST", oneExec+"/signal", scope, changeMember(execs, members.signaled))
	handle("POST", oneExec+"/resize", scope, changeMember(execs, members.resized))
	handle("POST", oneExec+"/stdin", scope, a.execStdin, "close")
	handle("PUT", oneExec+"/stdin", scope, a.execStdin, "close")
	handle("GET", oneExec+"/stream", scope, execs.stream, "after", "raw")
	handle("GET", oneExec+"/attach", scope, execs.attached, "frames", "after")
	handle("POST", one+"/processes", scope, a.existingOrMade(withBody(false, a.startProcess)))
	handle("GET", one+"/processes", scope, processes.all)
	handle("GET", oneProcess, scope, processes.one(a.Manager.Process))
	handle("DELETE", oneProcess, scope, processes.one(a.Manager.Stop))
	handle("POST", oneProcess+"/signal", scope, changeMember(processes, members.signaled))
	handle("POST", oneProcess+"/resize", scope, changeMember(processes, members.resized))
	handle("POST", oneProcess+"/wait", scope, a.waitProcess, "timeout")
	handle("GET", oneProcess+"/logs", scope, processes.logs, "follow", "after", "raw")
	handle("GET", oneProcess+"/attach", scope, processes.attached, "frames", "after", "take_over")
}

// anyQuery allows all parameters. The handler checks them itself, or ignores them.
const anyQuery = "*"

// checked refuses unknown query parameters, and a path with a malformed key. It sets the
// Exchange's Key to the path's key.
func checked(h proxy.Handler, queries []string) proxy.Handler {
	return func(w http.ResponseWriter, r *http.Request) error {
		if err := checkTarget(r, queries); err != nil {
			return err
		}
		return h(w, r)
	}
}

func checkTarget(r *http.Request, queries []string) error {
	if !slices.Contains(queries, anyQuery) {
		if err := knownQuery(r, queries...); err != nil {
			return err
		}
	}
	for _, p := range httprouter.ParamsFromContext(r.Context()) {
		if p.Key != "key" && p.Key != "chat_id" {
			continue
		}
		var err error
		if proxy.ExchangeOf(r.Context()).Key, err = lifecycle.ParseKey(p.Value); err != nil {
			return err
		}
	}
	return nil
}

// withBody decodes the JSON of a call's body for h. An optional body that is left out is the
// zero value.
func withBody[T any](optional bool, h func(w http.ResponseWriter, r *http.Request, body T) error) proxy.Handler {
	return func(w http.ResponseWriter, r *http.Request) error {
		var body T
		if err := proxy.DecodeBody(w, r, proxy.MaxBody, optional, &body); err != nil {
			return err
		}
		return h(w, r, body)
	}
}

// existing fails unless the caller's tenant has a sandbox under the key. It checks that before
// h reads the body, which takes memory.
func (a *api) existing(h proxy.Handler) proxy.Handler {
	return func(w http.ResponseWriter, r *http.Request) error {
		tenant, key := target(r)
		if _, err := a.Manager.Get(r.Context(), tenant, key); err != nil {
			return err
		}
		return h(w, r)
	}
}

// existingOrMade is existing for a call whose body may ask for a new sandbox. It lets every
// caller through that may make one.
func (a *api) existingOrMade(h proxy.Handler) proxy.Handler {
	return func(w http.ResponseWriter, r *http.Request) error {
		if proxy.Require(r, proxy.ScopeSandboxesWrite) == nil {
			return h(w, r)
		}
		return a.existing(h)(w, r)
	}
}

// guard refuses encoded slashes in Berm's part of a path. The router matches the decoded path,
// and would split a segment there.
func guard(next http.Handler, gate *proxy.Gate) http.Handler {
	refuse := gate.Refuse(proxy.Malformed("the path contains an encoded slash"))
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.Contains(strings.ToLower(ownPath(r.URL.EscapedPath())), "%2f") {
			refuse.ServeHTTP(w, r)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// target returns the caller's tenant, and the key of the sandbox or chat that the path names.
func target(r *http.Request) (tenant, key string) {
	ex := proxy.ExchangeOf(r.Context())
	return ex.Caller.Tenant, ex.Key
}

// writeFault writes an error as a problem of RFC 9457. For the legacy call, it writes the
// shape of the older service.
func writeFault(w http.ResponseWriter, r *http.Request, f proxy.Fault) {
	if r.URL.Path == legacyPath {
		_ = reply(w, f.Status, apitype.LegacyError{Detail: f.Detail}, nil)
		return
	}
	p := apitype.Problem{
		Type: "https://github.com/bermhq/berm/blob/main/docs/api.md#" + f.Code, Title: f.Title, Status: f.Status, Detail: f.Detail,
		Instance: instance(r), Code: f.Code, RequestID: proxy.ExchangeOf(r.Context()).RequestID,
	}
	for _, d := range f.Differences {
		p.Differences = append(p.Differences, apitype.Difference(d))
	}
	for _, x := range f.Reasons {
		p.Reasons = append(p.Reasons, apitype.Reason{Rule: x.Rule, Field: x.Field, Value: x.Value, Allowed: x.Allowed, Message: x.Message})
	}
	if f.Result != nil {
		res := execResult(*f.Result)
		p.Result = &res
	}
	p.FirstSeq = f.FirstSeq
	_ = proxy.WriteJSON(w, f.Status, "application/problem+json", p)
}

// instance returns the request's path. For a signed URL it returns only the part before the
// signature, which is a secret, since errors end up in logs.
func instance(r *http.Request) string {
	for _, prefix := range []string{signedPrefix, filePrefix} {
		if strings.HasPrefix(r.URL.Path, prefix) {
			return prefix
		}
	}
	return ownPath(r.URL.EscapedPath())
}
