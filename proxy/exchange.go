package proxy

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"runtime/debug"
	"strconv"
	"strings"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
)

// Exchange is one request and its answer. It belongs to the request's goroutine.
type Exchange struct {
	RequestID string
	Caller    Caller // empty until authenticated
	// Handlers set these for the log line. Empty ones are left out.
	Key, SessionID, ContainerID string

	start   time.Time
	route   string
	quiet   bool
	unnamed bool // the route needs no token, so the caller is unknown
	fault   Fault
	cause   error

	bodies *Bodies
	body   *Lease // of the memory for the request's body; nil before it is read
}

// KeepBody hands the lease of the memory for the request's body over to its caller, which
// must release the lease. If KeepBody isn't called, the lease ends with the request.
func (ex *Exchange) KeepBody() *Lease {
	l := ex.body
	ex.body = nil
	return l
}

// Wrap gives every request its Exchange, span, metric and log line. It refuses requests whose
// Host or Origin isn't allowed, and turns a panic into an answer.
func (g *Gate) Wrap(next http.Handler) http.Handler {
	return http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		ex := &Exchange{RequestID: requestID(r), start: time.Now(), route: "unmatched", bodies: g.opts.Bodies}
		ctx := g.continued(r)
		ctx, span := g.tracer.Start(ctx, method(r), trace.WithSpanKind(trace.SpanKindServer))
		r = r.WithContext(context.WithValue(ctx, exchangeKey{}, ex))
		w := &writer{ResponseWriter: rw}
		w.Header().Set("X-Request-Id", ex.RequestID)
		w.Header().Set("X-Content-Type-Options", "nosniff")
		w.Header().Set("Cache-Control", "no-store")
		// net/http silently ignores a Content-Length beside a Transfer-Encoding. A proxy that
		// goes by the length would take bytes of the body for another request. So the
		// connection carries no other request.
		if len(r.TransferEncoding) > 0 || !r.ProtoAtLeast(1, 1) {
			w.Header().Set("Connection", "close")
		}

		defer func() {
			broken := g.recovered(w, r, recover())
			ex.body.Release()
			g.finish(w, r, ex, span)
			if broken {
				panic(http.ErrAbortHandler)
			}
		}()
		boundBody(w, r, bodyTimeout)
		if err := g.admit(r); err != nil {
			g.fail(w, r, err)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// maxTraceState bounds a caller's tracestate in bytes, since Berm passes it on to engines and
// commands. W3C Trace Context asks to pass on at least this much.
const maxTraceState = 512

// continued returns a request's context with the W3C trace context of its headers. It leaves
// out malformed parts, and a tracestate that is too long.
func (g *Gate) continued(r *http.Request) context.Context {
	ctx := g.trace.Extract(r.Context(), propagation.HeaderCarrier(r.Header))
	if sc := trace.SpanContextFromContext(ctx); len(sc.TraceState().String()) > maxTraceState {
		ctx = trace.ContextWithRemoteSpanContext(ctx, sc.WithTraceState(trace.TraceState{}))
	}
	return ctx
}

// recovered logs the panic v, if there was one, and answers it with an error. It returns
// true if an answer had begun already, so that the connection must be broken off instead.
func (g *Gate) recovered(w *writer, r *http.Request, v any) (broken bool) {
	ex := ExchangeOf(r.Context())
	if v == nil {
		return false
	}
	if err, ok := v.(error); ok && errors.Is(err, http.ErrAbortHandler) {
		ex.cause = errors.New("the answer was broken off")
		return true
	}
	g.Panicked(r.Context(), v)
	if w.status != 0 {
		ex.cause = errors.New("panic in mid-answer")
		return true
	}
	g.fail(w, r, errors.New("panic"))
	return false
}

// Panicked counts and logs a panic of a request. V is the value that recover returned.
func (g *Gate) Panicked(ctx context.Context, v any) {
	stack := debug.Stack()
	if p, ok := v.(*taskPanic); ok {
		v, stack = p.value, p.stack
	}
	g.metrics.panics.Inc()
	ex := ExchangeOf(ctx)
	g.opts.Logger.ErrorContext(ctx, "http_panic", "request_id", ex.RequestID, "route", ex.route, "panic", fmt.Sprint(v), "stack", string(stack))
}

// finish records the exchange in its metric, span and log line.
func (g *Gate) finish(w *writer, r *http.Request, ex *Exchange, span trace.Span) {
	if w.status == 0 {
		w.status = http.StatusOK
	}
	took := time.Since(ex.start)
	g.metrics.duration.WithLabelValues(ex.route, method(r), strconv.Itoa(w.status)).Observe(took.Seconds())

	if span.IsRecording() {
		span.SetName(method(r) + " " + ex.route)
		span.SetAttributes(
			attribute.String("http.request.method", method(r)),
			attribute.String("http.route", ex.route),
			attribute.Int("http.response.status_code", w.status),
			attribute.String("berm.request_id", ex.RequestID),
		)
		if w.status >= 500 {
			span.SetStatus(codes.Error, ex.fault.Code)
		}
	}
	span.End()

	level := slog.LevelInfo
	switch {
	case w.status >= 500:
		level = slog.LevelError
	case ex.quiet:
		level = slog.LevelDebug
	}
	if !g.opts.Logger.Enabled(r.Context(), level) {
		return
	}
	attrs := []slog.Attr{
		slog.String("request_id", ex.RequestID), slog.String("method", method(r)), slog.String("route", ex.route),
		slog.Int("status", w.status), slog.Int64("duration_ms", took.Milliseconds()), slog.String("remote", r.RemoteAddr),
	}
	for _, a := range [][2]string{
		{"tenant", ex.Caller.Tenant}, {"token_name", ex.Caller.Name},
		{"key", ex.Key}, {"session_id", ex.SessionID}, {"container_id", ex.ContainerID}, {"code", ex.fault.Code},
	} {
		if a[1] != "" {
			attrs = append(attrs, slog.String(a[0], a[1]))
		}
	}
	if ex.cause != nil {
		attrs = append(attrs, slog.String("error", cut(ex.cause.Error(), maxMessage)))
	}
	g.opts.Logger.LogAttrs(r.Context(), level, "http_request", attrs...)
}

// method returns the request's method for metrics and logs, or OTHER for an unknown one.
func method(r *http.Request) string {
	switch r.Method {
	case http.MethodGet, http.MethodHead, http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete, http.MethodOptions:
		return r.Method
	}
	return "OTHER"
}

// hostAllowed reports whether the Host header names this server: by a loopback name or
// address, the address that the request came in on, or a configured name. Over a unix
// socket any Host is allowed.
func (g *Gate) hostAllowed(r *http.Request) bool {
	local, _ := r.Context().Value(http.LocalAddrContextKey).(net.Addr)
	if local != nil && local.Network() == "unix" {
		return true
	}
	host := strings.ToLower(r.Host)
	if h, _, err := net.SplitHostPort(host); err == nil {
		host = h
	}
	host = strings.TrimSuffix(strings.TrimPrefix(host, "["), "]")
	if g.hosts[host] {
		return true
	}
	ip := net.ParseIP(host)
	if ip == nil {
		return false
	}
	tcp, ok := local.(*net.TCPAddr)
	return ip.IsLoopback() || ok && ip.Equal(tcp.IP)
}

// writer records the status of the answer.
type writer struct {
	http.ResponseWriter
	status int
}

func (w *writer) WriteHeader(status int) {
	if w.status == 0 && (status >= 200 || status == http.StatusSwitchingProtocols) {
		w.status = status
	}
	w.ResponseWriter.WriteHeader(status)
}

func (w *writer) Write(b []byte) (int, error) {
	if w.status == 0 {
		w.status = http.StatusOK
	}
	return w.ResponseWriter.Write(b)
}

// ReadFrom lets io.Copy use the server's sendfile.
func (w *writer) ReadFrom(r io.Reader) (int64, error) {
	if w.status == 0 {
		w.status = http.StatusOK
	}
	return io.Copy(w.ResponseWriter, r)
}

// Unwrap makes the server's writer available to http.ResponseController.
func (w *writer) Unwrap() http.ResponseWriter { return w.ResponseWriter }
