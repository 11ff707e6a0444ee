// Package portproxy passes HTTP requests on to ports in sandboxes. It takes the server at a
// port for hostile: to Berm, to Berm's other callers, and to the browser that shows its answers
// under Berm's host name.
package portproxy

import (
	"context"
	"errors"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/runtime"
)

const (
	maxHeader    = 64 << 10    // bytes of an answer's header
	stall        = time.Minute // for one write to a caller who doesn't read
	cookiePrefix = "berm-port-"
)

// Options describe one request to pass on. All fields but Signed and Tokenless are mandatory.
type Options struct {
	Dial         func(ctx context.Context, port int) (runtime.Conn, error)
	Port         int
	Prefix, Tail string        // the two parts of the request's escaped path; the port gets Tail
	Timeout      time.Duration // for each write to the port, and then for its answer to begin
	Signed       bool          // a signed URL authorizes the request, not a token
	Tokenless    bool          // callers need no token, so any page in a browser can send requests
	// StripCredentials removes the credentials with which Berm authenticated the caller.
	StripCredentials func(h http.Header, ours bool)
}

// passage is one request on its way to a port.
type passage struct {
	Options
	conn   *patientConn
	failed error
}

// Serve answers a request, or returns an error before it has answered anything. Each request
// gets a new connection. The port could close a kept one just as a request goes out that
// can't be repeated.
func (o Options) Serve(w http.ResponseWriter, r *http.Request) error {
	p := &passage{Options: o}
	p.Tokenless = o.Tokenless || o.Signed
	path, err := url.PathUnescape(p.Tail)
	if err != nil {
		return proxy.Malformed("the path can't be decoded")
	}
	if dotted(path) {
		return proxy.Malformed(`the port's path has "." or ".." for a segment, which who passes it on could resolve; only others may be in it`)
	}
	rc := http.NewResponseController(w)
	_ = rc.SetReadDeadline(time.Time{}) // the body may take any time
	// Otherwise the server reads the rest of the body before an early answer, which is then
	// lost (golang/go#40747). Only HTTP/1 needs this.
	_ = rc.EnableFullDuplex()
	if r.Header.Get("Upgrade") != "" {
		ctx, stop := proxy.UntilDrain(r.Context())
		defer stop()
		r = r.WithContext(ctx)
	}
	common := w.Header().Clone() // the headers that the Gate sets on every answer
	for name := range common {
		w.Header().Del(name)
	}
	rp := &httputil.ReverseProxy{
		Transport: &http.Transport{
			DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
				c, err := p.Dial(ctx, p.Port)
				if err != nil {
					return nil, &dialError{err}
				}
				p.conn = newPatientConn(c, p.Timeout)
				return p.conn, nil
			},
			DisableKeepAlives: true, DisableCompression: true,
			ResponseHeaderTimeout: p.Timeout, MaxResponseHeaderBytes: maxHeader,
			ReadBufferSize: 32 << 10, WriteBufferSize: 32 << 10,
		},
		FlushInterval: -1,
		ErrorLog:      log.New(io.Discard, "", 0), // the Gate logs the error
		Rewrite: func(pr *httputil.ProxyRequest) {
			pr.Out.URL = &url.URL{
				Scheme: "http", Host: p.host(), Path: path, RawPath: p.Tail,
				RawQuery: pr.In.URL.RawQuery, ForceQuery: pr.In.URL.ForceQuery,
			}
			pr.Out.Host = p.host()
			p.cleanRequest(pr)
		},
		ModifyResponse: func(res *http.Response) error {
			if res.StatusCode == http.StatusSwitchingProtocols {
				p.conn.switched()
			}
			p.cleanResponse(res, r, common)
			return nil
		},
		ErrorHandler: func(_ http.ResponseWriter, _ *http.Request, err error) { p.failed = err },
	}
	p.pass(rp, w, r)
	if p.failed == nil {
		return nil
	}
	clear(w.Header())
	for name, values := range common {
		w.Header()[name] = values
	}
	return portFault(p.failed)
}

// dotted reports whether a decoded path has "." or ".." for a segment. Some servers take a
// backslash for a slash.
func dotted(path string) bool {
	for _, segment := range strings.FieldsFunc(path, func(c rune) bool { return c == '/' || c == '\\' }) {
		if segment == "." || segment == ".." {
			return true
		}
	}
	return false
}

// pass answers the request by rp. Nothing reads the request's body after pass has returned.
func (p *passage) pass(rp *httputil.ReverseProxy, w http.ResponseWriter, r *http.Request) {
	pw := &portWriter{ResponseWriter: w, rc: http.NewResponseController(w), p: p}
	defer func() {
		if pw.tunnel != nil {
			pw.tunnel.stop()
		}
	}()
	if r.ContentLength != 0 {
		pw.body = &portBody{ReadCloser: r.Body}
		last := proxy.LastRequest(r)
		r = r.WithContext(r.Context()) // a copy
		r.Body = pw.body
		whole := false // the answer was sent to its end
		defer func() { pw.endBody(whole && last) }()
		rp.ServeHTTP(pw, r)
		whole = true
		return
	}
	rp.ServeHTTP(pw, r)
}

// dialError is an error of reaching the port, not of the server that listens there.
type dialError struct{ error }

// portFault returns the error that the caller gets for a request that the port didn't answer.
func portFault(err error) error {
	if dial, ok := errors.AsType[*dialError](err); ok {
		return dial.error
	}
	if timeout, ok := errors.AsType[net.Error](err); ok && timeout.Timeout() {
		return &proxy.Fault{Status: http.StatusGatewayTimeout, Code: "port_timeout", Title: "No answer in time",
			Detail: "what listens at the port took the request, and didn't answer in time", Cause: err}
	}
	return &proxy.Fault{Status: http.StatusBadGateway, Code: "port_failed", Title: "No answer",
		Detail: "what listens at the port broke off before it had answered, or doesn't speak HTTP", Cause: err}
}

// host returns the Host header that the port's server expects.
func (p *passage) host() string { return net.JoinHostPort("localhost", strconv.Itoa(p.Port)) }

// cleanRequest removes Berm's credentials, and headers with which a caller could forge its origin.
func (p *passage) cleanRequest(pr *httputil.ProxyRequest) {
	h := pr.Out.Header
	for name := range h {
		if strings.HasPrefix(name, "X-Forwarded-") || slices.Contains([]string{"X-Real-Ip", "Forwarded"}, name) {
			h.Del(name)
		}
	}
	p.StripCredentials(h, !p.Signed)
	pr.SetXForwarded()
	h.Set("X-Request-Id", proxy.ExchangeOf(pr.In.Context()).RequestID)
	origin := pr.In.Header.Get("Origin")
	if origin != "" && (origin == h.Get("X-Forwarded-Proto")+"://"+pr.In.Host || p.Signed && origin == "null") {
		h.Set("Origin", "http://"+p.host()) // a page of the port itself sends the request
	}
	if p.Tokenless {
		// The browser's other cookies for this host name belong to other services.
		h.Del("Cookie")
		for _, c := range pr.In.Cookies() {
			if name, ok := strings.CutPrefix(c.Name, cookiePrefix); ok && name != "" {
				pr.Out.AddCookie(&http.Cookie{Name: name, Value: c.Value, Quoted: c.Quoted})
			}
		}
		h["Authorization"] = slices.DeleteFunc(h["Authorization"], func(v string) bool {
			scheme, _, _ := strings.Cut(v, " ")
			return slices.Contains(browserSchemes, strings.ToLower(scheme))
		})
	}
	if p.Signed {
		h.Del("Referer") // has the signature
	} else {
		h.Set("X-Forwarded-Prefix", p.Prefix)
	}
}

// originWide are headers whose effect goes beyond their answer. A browser would apply them to
// all of Berm's origin, or a web server before Berm would act on them.
var originWide = []string{
	"Accept-Ch", "Alt-Svc", "Clear-Site-Data", "Critical-Ch", "Expect-Ct", "Nel", "Origin-Agent-Cluster", "Public-Key-Pins",
	"Report-To", "Reporting-Endpoints", "Service-Worker-Allowed", "Set-Login", "Speculation-Rules", "Strict-Transport-Security",
	"Supports-Loading-Mode", "X-Lighttpd-Send-File", "X-Sendfile",
}

// authentication are headers that make a browser ask its user for credentials, which it then
// keeps for the whole origin. cleanResponse removes them from tokenless answers only: a caller
// with a token is no browser.
var authentication = []string{"Www-Authenticate", "Authentication-Info", "Proxy-Authenticate", "Proxy-Authentication-Info"}

// browserSchemes are the schemes with which browsers send such credentials to any port below
// that origin.
var browserSchemes = []string{"basic", "digest", "negotiate", "ntlm"}

// cleanResponse confines an answer to the port. By the sandbox directive, a browser gives the
// port's pages an opaque origin, so that their scripts can't use Berm's API.
func (p *passage) cleanResponse(res *http.Response, r *http.Request, common http.Header) {
	h := res.Header
	for _, name := range originWide {
		h.Del(name)
	}
	for name := range h {
		if strings.HasPrefix(name, "X-Accel-") || name == "Surrogate-Control" || strings.HasSuffix(name, "-Cache-Control") {
			h.Del(name)
		}
	}
	cookies := res.Cookies()
	h.Del("Set-Cookie")
	for _, c := range cookies {
		if strings.HasPrefix(strings.ToLower(c.Name), "__host-") { // such a cookie must be for the whole host
			continue
		}
		if p.Tokenless {
			c.Name = cookiePrefix + c.Name
		}
		c.Domain, c.Path = "", p.Prefix+"/"
		if v := c.String(); v != "" {
			h.Add("Set-Cookie", v)
		}
	}
	if loc := h.Get("Location"); loc != "" {
		h.Set("Location", p.outside(loc, r))
	}
	h.Add("Content-Security-Policy", "sandbox allow-scripts allow-forms allow-popups allow-modals allow-downloads")
	if p.Tokenless {
		for _, name := range authentication {
			h.Del(name)
		}
	}
	keep := storable(h)
	for name, values := range common { // has Cache-Control: no-store, since the URL doesn't show whose answer it is
		h[name] = values
	}
	if !p.Signed {
		return
	}
	if keep {
		h.Set("Cache-Control", "private, no-cache")
	}
	h.Set("Referrer-Policy", "no-referrer") // the URL itself is the credential
	if r.Header.Get("Origin") == "null" {   // the origin of the port's own pages
		for name := range h {
			if strings.HasPrefix(name, "Access-Control-") {
				h.Del(name)
			}
		}
		h.Set("Access-Control-Allow-Origin", "null")
		h.Set("Access-Control-Expose-Headers", "*")
	}
}

// storable reports whether an answer allows caches to keep it.
func storable(h http.Header) bool {
	said := strings.ToLower(strings.Join(h.Values("Cache-Control"), ","))
	return strings.Trim(said, ", ") != "" && !strings.Contains(said, "no-store")
}

// outside translates a URL of the port into one of Berm's.
func (p *passage) outside(location string, r *http.Request) string {
	u, err := url.Parse(location)
	if err != nil {
		return location
	}
	if u.Host != "" {
		if name := strings.ToLower(u.Host); name != p.host() && name != strings.ToLower(r.Host) || u.Scheme != "http" && u.Scheme != "https" {
			return location // another server
		}
		u.Scheme, u.Host, u.User = "", "", nil
		if u.Path == "" {
			u.Path = "/"
		}
	}
	if !strings.HasPrefix(u.Path, "/") || strings.HasPrefix(u.EscapedPath(), p.Prefix+"/") {
		return u.String()
	}
	tail := u.EscapedPath()
	u.Path, u.RawPath = "", ""
	return p.Prefix + tail + u.String()
}

// portWriter sets a deadline for each write, and drops informational answers.
type portWriter struct {
	http.ResponseWriter
	rc     *http.ResponseController
	p      *passage
	body   *portBody // nil if there is none
	sent   bool      // the header
	tunnel *tunnel   // once the connection has switched to another protocol
}

func (w *portWriter) WriteHeader(status int) {
	if status < 200 {
		return
	}
	if w.body != nil && !w.body.all.Load() {
		// The rest of the body must not be read as the next request.
		w.Header().Set("Connection", "close")
	}
	w.sent = true
	w.ResponseWriter.WriteHeader(status)
}

func (w *portWriter) Write(b []byte) (int, error) {
	_ = w.rc.SetWriteDeadline(time.Now().Add(stall)) // an in-process writer has none
	return w.ResponseWriter.Write(b)
}

// Unwrap lets http.ResponseController through.
func (w *portWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// portBody is the body of a request to a port, which may answer before it has read all of
// it. The transport's goroutine may read the body after the answer. portBody then fails its
// reads, so that they don't disturb the server's own.
type portBody struct {
	io.ReadCloser
	all atomic.Bool // was read

	mu   sync.Mutex
	over bool
}

func (b *portBody) Read(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.over {
		return 0, http.ErrBodyReadAfterClose
	}
	n, err := b.ReadCloser.Read(p)
	if errors.Is(err, io.EOF) {
		b.all.Store(true)
	}
	return n, err
}

// Close does nothing: the server closes the body.
func (b *portBody) Close() error { return nil }

// endBody ends the transport's reads of the body, and lets the server read some of the rest.
// If the connection closed with unread bytes, the caller would lose the answer. With drain,
// endBody reads the rest itself, because the server won't.
func (w *portWriter) endBody(drain bool) {
	b := w.body
	if b.all.Load() {
		return
	}
	_ = w.rc.SetReadDeadline(time.Now()) // an in-process reader has none
	b.mu.Lock()
	defer b.mu.Unlock()
	b.over = true
	_ = w.rc.SetReadDeadline(time.Now().Add(proxy.BodyLinger))
	if drain {
		if w.sent {
			_ = w.rc.Flush()
		}
		_, _ = io.Copy(io.Discard, b.ReadCloser)
	}
}

// patientConn lets a port answer after it has stopped reading. As long as an answer may still
// come, failed writes report success. patientConn reads nothing before the first write, since
// the transport would log an unsolicited answer.
type patientConn struct {
	runtime.Conn
	over    atomic.Bool  // it was read to its end
	moves   atomic.Int64 // counts reads, and the beginnings and ends of writes
	writing atomic.Bool
	deaf    atomic.Bool // a write failed, and no other may follow
	asked   chan struct{}
	ask     func() // closes it

	mu    sync.Mutex
	limit time.Duration // of one write; 0 is none
}

func newPatientConn(c runtime.Conn, limit time.Duration) *patientConn {
	asked := make(chan struct{})
	return &patientConn{Conn: c, asked: asked, ask: sync.OnceFunc(func() { close(asked) }), limit: limit}
}

// switched removes the limit of writes, after the connection has switched to another protocol.
func (c *patientConn) switched() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.limit = 0
	_ = c.SetWriteDeadline(time.Time{})
}

func (c *patientConn) Read(b []byte) (int, error) {
	<-c.asked
	n, err := c.Conn.Read(b)
	c.moves.Add(1)
	if err != nil {
		c.over.Store(true)
	}
	return n, err
}

func (c *patientConn) Write(b []byte) (int, error) {
	c.ask()
	n, err := c.write(b)
	if err != nil && !c.over.Load() {
		return len(b), nil
	}
	return n, err
}

func (c *patientConn) write(b []byte) (int, error) {
	if c.deaf.Load() {
		return 0, net.ErrClosed
	}
	c.mu.Lock()
	if c.limit > 0 {
		_ = c.SetWriteDeadline(time.Now().Add(c.limit))
	}
	c.mu.Unlock()
	c.moves.Add(1)
	c.writing.Store(true)
	n, err := c.Conn.Write(b)
	c.writing.Store(false)
	c.moves.Add(1)
	if err != nil {
		c.deaf.Store(true)
	}
	return n, err
}

func (c *patientConn) Close() error {
	c.ask()
	return c.Conn.Close()
}
