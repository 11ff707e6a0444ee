// Package proxy holds what Berm's APIs share. It listens and drains, authenticates
// callers, and checks the Host and Origin headers. It gives every request an ID, a span,
// a log line and a metric, decodes bodies strictly, and turns errors into answers.
package proxy

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strings"

	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"
)

// Handler serves a request. The Gate answers, logs and remembers an error that the handler
// returns. A handler that has begun its answer returns nil.
type Handler func(w http.ResponseWriter, r *http.Request) error

// GateOptions configure a Gate.
type GateOptions struct {
	// Tokens that callers may show. Without any, all callers are let in, as tenant "default"
	// with every scope.
	Tokens      *Tokens
	TokenHeader string   // header that carries a token; empty is X-API-Token
	Hosts       []string // further names that the Host header may carry, without port
	Origins     []string // values that the Origin header may have; none by default
	// AnyOrigin reports whether a request may come from a page of any origin. It is for
	// requests whose URL alone authorizes them, not a browser's cookie or a token. Nil
	// allows none.
	AnyOrigin func(r *http.Request) bool
	// Fail writes the body of an error in the API's own shape. Mandatory.
	Fail     func(w http.ResponseWriter, r *http.Request, f Fault)
	Bodies   *Bodies               // memory for bodies, shared with other Gates; nil is NewBodies
	Logger   *slog.Logger          // nil discards
	Registry prometheus.Registerer // nil: metrics aren't exported
	Tracer   trace.TracerProvider  // nil: no spans
}

// Gate authenticates, logs and measures the requests of an API before its handlers run. It is
// safe for many goroutines.
type Gate struct {
	opts    GateOptions
	hosts   map[string]bool
	metrics *metrics
	tracer  trace.Tracer
	trace   propagation.TraceContext
	ring    *ring
}

// NewGate checks the options and returns a Gate.
func NewGate(opts GateOptions) (*Gate, error) {
	if opts.Fail == nil {
		return nil, errors.New("proxy: Fail is missing")
	}
	opts.TokenHeader = cmp.Or(opts.TokenHeader, "X-API-Token")
	if strings.EqualFold(opts.TokenHeader, "Authorization") || strings.ContainsAny(opts.TokenHeader, " :\r\n") {
		return nil, fmt.Errorf("proxy: %q can't be the header of tokens", opts.TokenHeader)
	}
	opts.Logger = cmp.Or(opts.Logger, slog.New(slog.DiscardHandler))
	opts.Tracer = cmp.Or[trace.TracerProvider](opts.Tracer, noop.NewTracerProvider())
	opts.Bodies = cmp.Or(opts.Bodies, NewBodies())
	m, err := newMetrics(opts.Registry)
	if err != nil {
		return nil, err
	}
	g := &Gate{
		opts: opts, hosts: map[string]bool{"localhost": true}, metrics: m,
		tracer: opts.Tracer.Tracer("github.com/bermhq/berm/proxy"), ring: newRing(),
	}
	for _, h := range opts.Hosts {
		g.hosts[strings.ToLower(h)] = true
	}
	return g, nil
}

// Route is how the Gate treats the requests of one handler.
type Route struct {
	Name  string // the path's template, for metrics, logs and spans
	Scope Scope  // that the token must have; ScopeNone needs no token
	Quiet bool   // requests are logged at debug level, for probes and scrapes
}

// Handle passes the route's requests to h if the caller's token allows the route's scope.
func (g *Gate) Handle(rt Route, h Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		ex := ExchangeOf(r.Context())
		ex.route, ex.quiet, ex.unnamed = rt.Name, rt.Quiet, rt.Scope == ScopeNone
		if rt.Scope != ScopeNone {
			c, err := g.authenticate(r)
			if err != nil {
				g.fail(w, r, err)
				return
			}
			ex.Caller = c
			if !c.Allows(rt.Scope) {
				g.fail(w, r, missingScope(rt.Scope))
				return
			}
		}
		if err := h(w, r); err != nil {
			g.fail(w, r, err)
		}
	})
}

// Refuse returns a handler that answers every request with err, for unknown paths and methods.
func (g *Gate) Refuse(err error) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { g.fail(w, r, err) })
}

// fail answers an error, and records it for the log line and for RecentErrors.
func (g *Gate) fail(w http.ResponseWriter, r *http.Request, err error) {
	ex := ExchangeOf(r.Context())
	f := FaultOf(Explained(r.Context(), err))
	// net/http also cancels the context when a read passes its deadline. That caller is
	// still there.
	if r.Context().Err() != nil && !GoingDown(r.Context()) && !errors.Is(f.Cause, os.ErrDeadlineExceeded) {
		f = Fault{Status: StatusClientClosed, Code: "canceled", Title: "Request cancelled", Detail: "the caller went away", Cause: err}
	}
	ex.fault, ex.cause = f, &f
	if ex.Caller.Tenant != "" && f.Status != StatusClientClosed {
		g.ring.add(ex.Caller.Tenant, RecentError{
			Time: ex.start.UTC(), Code: f.Code, Status: f.Status, Message: cut(f.Detail, maxMessage),
			Route: ex.route, Key: ex.Key, RequestID: ex.RequestID, unnamed: ex.unnamed,
		})
	}
	if f.Status == http.StatusUnauthorized {
		w.Header().Set("WWW-Authenticate", "Bearer")
	}
	SetRetryAfter(w, f.RetryAfter)
	if !errors.Is(f.Cause, os.ErrDeadlineExceeded) { // a caller that was too slow gets no more time
		boundBody(w, r, BodyLinger)
	}
	g.opts.Fail(w, r, f)
	if !errors.Is(f.Cause, os.ErrDeadlineExceeded) {
		drain(w, r)
	}
}

// RecentErrors returns the tenant's last errors, at most 50, newest first.
func (g *Gate) RecentErrors(tenant string) []RecentError { return g.ring.recent(tenant) }

// admit refuses a request whose Host or Origin isn't allowed. A hostile page in a browser
// can reach this address under its own host name, by DNS rebinding, or from its own origin.
func (g *Gate) admit(r *http.Request) error {
	if !g.hostAllowed(r) {
		return &Fault{
			Status: http.StatusMisdirectedRequest, Code: "host_refused", Title: "Host refused",
			Detail: "the Host header names a host that this server doesn't answer for; add it to the allowed hosts",
		}
	}
	if g.opts.AnyOrigin != nil && g.opts.AnyOrigin(r) {
		return nil
	}
	if o := r.Header.Values("Origin"); len(o) > 0 && (len(o) > 1 || !slices.Contains(g.opts.Origins, o[0])) {
		return &Fault{
			Status: http.StatusForbidden, Code: "origin_refused", Title: "Origin refused",
			Detail: "requests from this web origin are not allowed; add it to the allowed origins",
		}
	}
	return nil
}

var saneID = regexp.MustCompile(`^[0-9A-Za-z_.:/+=-]{1,128}$`)

// requestID returns the caller's request ID if it is well-formed, or else a new one.
func requestID(r *http.Request) string {
	id := r.Header.Get("X-Request-Id")
	if saneID.MatchString(id) {
		return id
	}
	return uuid.NewString()
}

type exchangeKey struct{}

// ExchangeOf returns the Exchange of the request that ctx belongs to. Outside of a Gate it
// returns a new, empty one.
func ExchangeOf(ctx context.Context) *Exchange {
	if ex, ok := ctx.Value(exchangeKey{}).(*Exchange); ok {
		return ex
	}
	return &Exchange{}
}
