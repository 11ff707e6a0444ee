package engineapi

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/propagation"

	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/runtime"
)

const (
	bufferSize  = 64 << 10
	maxAnswer   = 64 << 20         // of an engine's answer that is read whole
	versionTTL  = 30 * time.Second // how long the engine's version is believed
	askTimeout  = 30 * time.Second // of the door's own questions
	undoTimeout = 30 * time.Second // of taking back what must not be
)

// engine is the container engine behind the door.
type engine struct {
	dial      func(context.Context) (net.Conn, error)
	transport *http.Transport

	mu      sync.Mutex
	version atomic.Pointer[engineVersion]
	host    atomic.Pointer[engineHost] // nil is not known yet

	known atomic.Pointer[engineRelease]
	ended atomic.Uint64 // connections that have ended
}

// countedConn counts its end.
type countedConn struct {
	net.Conn
	ended *atomic.Uint64
}

func (c countedConn) Close() error {
	c.ended.Add(1)
	return c.Conn.Close()
}

type engineVersion struct {
	max  version
	when time.Time
}

func newEngine(dial func(context.Context) (net.Conn, error)) *engine {
	e := &engine{dial: dial}
	e.transport = &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			conn, err := dial(ctx)
			if err != nil {
				return nil, err
			}
			return countedConn{conn, &e.ended}, nil
		},
		DisableCompression:  true,
		MaxIdleConns:        256,
		MaxIdleConnsPerHost: 256,
		IdleConnTimeout:     30 * time.Second,
		ReadBufferSize:      bufferSize,
		WriteBufferSize:     bufferSize,
	}
	return e
}

// ask is a request that the door makes.
type ask struct {
	method  string
	version version // 0: without one
	path    string  // decoded
	query   url.Values
	header  http.Header
	body    io.Reader // nil is none
	length  int64     // of body; -1 is not known
}

func (e *engine) request(ctx context.Context, a ask) (*http.Request, error) {
	path := a.path
	if a.version != 0 {
		path = "/v" + a.version.String() + path
	}
	u := &url.URL{Scheme: "http", Host: "docker", Path: path, RawQuery: a.query.Encode()}
	req, err := http.NewRequestWithContext(ctx, a.method, u.String(), a.body)
	if err != nil {
		return nil, fmt.Errorf("%s %s: %w", a.method, a.path, err)
	}
	for name, values := range a.header {
		req.Header[name] = values
	}
	req.Header["User-Agent"] = []string{"berm"}
	propagation.TraceContext{}.Inject(ctx, propagation.HeaderCarrier(req.Header))
	if a.body != nil {
		req.ContentLength = a.length
	}
	return req, nil
}

// send gives the engine a request. Whatever it answers is an answer; the error says
// that it can't be reached. The caller closes the body.
func (e *engine) send(ctx context.Context, a ask) (*http.Response, error) {
	req, err := e.request(ctx, a)
	if err != nil {
		return nil, err
	}
	resp, err := e.transport.RoundTrip(req)
	if err != nil {
		return nil, unavailable(ctx, err)
	}
	return resp, nil
}

func unavailable(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return &proxy.Fault{Status: http.StatusServiceUnavailable, Code: "backend_unavailable", Title: "Engine unavailable",
		Detail: "the container engine can't be reached", RetryAfter: 2 * time.Second, Cause: err}
}

// failure makes an error of an answer that is one, and closes it. A 304 is one as well.
func failure(resp *http.Response) error {
	defer func() { _ = resp.Body.Close() }()
	body, _ := io.ReadAll(io.LimitReader(resp.Body, bufferSize))
	var told struct{ Message string }
	_ = json.Unmarshal(body, &told)
	if told.Message == "" {
		told.Message = http.StatusText(resp.StatusCode)
	}
	return &engineError{status: resp.StatusCode, message: told.Message}
}

// engineError is an error that the engine answered with.
type engineError struct {
	status  int
	message string
}

func (e *engineError) Error() string { return e.message }

// As lets the gate answer it as it came.
func (e *engineError) As(target any) bool {
	f, ok := target.(**proxy.Fault)
	if ok {
		*f = &proxy.Fault{Status: e.status, Code: "engine_error", Title: "The engine's answer", Detail: e.message}
	}
	return ok
}

// statusOf is the status of an engine's error; 0 for any other.
func statusOf(err error) int {
	var e *engineError
	if errors.As(err, &e) {
		return e.status
	}
	return 0
}

// get asks for JSON, within the door's own time.
func (e *engine) get(ctx context.Context, v version, path string, query url.Values, into any) error {
	return e.do(ctx, ask{method: http.MethodGet, version: v, path: path, query: query}, into)
}

// post sends in as JSON, if it isn't nil, and reads the answer into out, unless that is nil.
func (e *engine) post(ctx context.Context, v version, path string, query url.Values, in, out any) error {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	return e.slowPost(ctx, v, path, query, in, out)
}

// slowPost is post for as long as ctx lasts.
func (e *engine) slowPost(ctx context.Context, v version, path string, query url.Values, in, out any) error {
	a := ask{method: http.MethodPost, version: v, path: path, query: query}
	if in != nil {
		body, err := json.Marshal(in)
		if err != nil {
			return fmt.Errorf("encode the request: %w", err)
		}
		a.body, a.length, a.header = bytes.NewReader(body), int64(len(body)), http.Header{"Content-Type": {"application/json"}}
	}
	return e.doSlow(ctx, a, out)
}

// do sends a request and reads its answer whole. An answer of 300 or more is an error.
func (e *engine) do(ctx context.Context, a ask, into any) error {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	return e.doSlow(ctx, a, into)
}

// doSlow is do for as long as ctx lasts.
func (e *engine) doSlow(ctx context.Context, a ask, into any) error {
	resp, err := e.send(ctx, a)
	if err != nil {
		return err
	}
	if resp.StatusCode >= 300 {
		return failure(resp)
	}
	defer func() { _ = resp.Body.Close() }()
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer+1))
	switch {
	case err != nil:
		return unavailable(ctx, err)
	case len(body) > maxAnswer:
		return fmt.Errorf("%s %s: the engine's answer is over %d bytes", a.method, a.path, maxAnswer)
	case into == nil:
		return nil
	}
	if raw, ok := into.(*json.RawMessage); ok { // the caller decodes it
		*raw = body
		return nil
	}
	if err := json.Unmarshal(body, into); err != nil {
		return fmt.Errorf("%s %s: the engine's answer can't be read: %w", a.method, a.path, err)
	}
	return nil
}

// maxEntry bounds one entry of a list of the engine's, in bytes.
const maxEntry = 16 << 20

// each asks for a list and gives one entry after the other to f, so that no list is too
// long, whoever filled it. The answer is a list, or an object with lists, whose names f
// gets; what else is in that is left out.
func (e *engine) each(ctx context.Context, v version, path string, query url.Values, f func(list string, entry json.RawMessage) error) error {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	return e.eachSlow(ctx, v, path, query, f)
}

// eachSlow is each for as long as ctx lasts.
func (e *engine) eachSlow(ctx context.Context, v version, path string, query url.Values, f func(list string, entry json.RawMessage) error) error {
	resp, err := e.send(ctx, ask{method: http.MethodGet, version: v, path: path, query: query})
	if err != nil {
		return err
	}
	if resp.StatusCode >= 300 {
		return failure(resp)
	}
	defer func() { _ = resp.Body.Close() }()
	err = eachEntry(resp.Body, f)
	if err != nil && ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if err != nil {
		return fmt.Errorf("GET %s: %w", path, err)
	}
	return nil
}

// eachEntry gives f the entries of the lists of an answer.
func eachEntry(body io.Reader, f func(list string, entry json.RawMessage) error) error {
	bounded := &io.LimitedReader{R: body}
	return (&lister{bounded: bounded, dec: json.NewDecoder(bounded), f: f}).read()
}

// lister reads the lists of an answer.
type lister struct {
	bounded *io.LimitedReader
	dec     *json.Decoder
	f       func(list string, entry json.RawMessage) error
}

func (l *lister) token() (json.Token, error) {
	l.bounded.N = maxEntry
	return l.dec.Token()
}

func (l *lister) read() error {
	token, err := l.token()
	if err != nil || token != json.Delim('{') {
		return l.value("", token, err)
	}
	for {
		name, err := l.token()
		if err != nil || name == json.Delim('}') {
			return err
		}
		token, err := l.token()
		if err := l.value(fmt.Sprint(name), token, err); err != nil {
			return err
		}
	}
}

// value reads the rest of what begins with a token.
func (l *lister) value(name string, first json.Token, err error) error {
	if err == nil && first == json.Delim('[') {
		return l.entries(name)
	}
	for depth := 0; err == nil; first, err = l.token() {
		switch first {
		case json.Delim('{'), json.Delim('['):
			depth++
		case json.Delim('}'), json.Delim(']'):
			depth--
		}
		if depth == 0 {
			return nil
		}
	}
	return err
}

func (l *lister) entries(name string) error {
	for {
		l.bounded.N = maxEntry
		if !l.dec.More() {
			_, err := l.token() // the list's end, or what is wrong
			return err
		}
		var entry json.RawMessage
		if err := l.dec.Decode(&entry); err != nil {
			return err
		}
		if err := l.f(name, entry); err != nil {
			return err
		}
	}
}

// negotiate gives the version in which the engine is spoken to for a client that asks
// for one; 0 is a client that names none, and takes the newest.
func (e *engine) negotiate(ctx context.Context, asked version) (version, error) {
	most, err := e.max(ctx)
	switch {
	case err != nil:
		return 0, err
	case asked == 0:
		return most, nil
	case asked < oldest:
		return 0, malformed(fmt.Sprintf("client version %s is too old. Minimum supported API version is %s, please upgrade your client to a newer version", asked, oldest))
	case asked > most:
		return 0, malformed(fmt.Sprintf("client version %s is too new. Maximum supported API version is %s", asked, most))
	}
	return asked, nil
}

// max is the newest version that both the engine and the door know.
func (e *engine) max(ctx context.Context) (version, error) {
	if known := e.version.Load(); known != nil && time.Since(known.when) < versionTTL {
		return known.max, nil
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if known := e.version.Load(); known != nil && time.Since(known.when) < versionTTL {
		return known.max, nil
	}
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	resp, err := e.send(ctx, ask{method: http.MethodGet, path: "/_ping"})
	if err != nil {
		return 0, err
	}
	_, _ = io.Copy(io.Discard, io.LimitReader(resp.Body, bufferSize))
	_ = resp.Body.Close()
	v, ok := parseVersion("v" + resp.Header.Get("Api-Version"))
	if !ok || v < oldest {
		return 0, unavailable(ctx, fmt.Errorf("the engine's API version is %q", resp.Header.Get("Api-Version")))
	}
	e.version.Store(&engineVersion{max: min(v, newest), when: time.Now()})
	return min(v, newest), nil
}

// engineHost is the engine's host.
type engineHost struct {
	cpus    int64
	seccomp string // the SecurityOpt of the containers that the door makes; empty for the engine's own profile
	shown   []byte // seccomp as inspect shows it, with the comma before it
}

// hostInfo asks the engine for its host once.
func (e *engine) hostInfo(ctx context.Context, v version) (*engineHost, error) {
	if h := e.host.Load(); h != nil {
		return h, nil
	}
	var info struct {
		NCPU            int64
		Architecture    string
		SecurityOptions []string
	}
	if err := e.get(ctx, v, "/info", nil, &info); err != nil {
		return nil, err
	}
	if info.NCPU < 1 {
		return nil, errors.New("info: the engine's answer has no CPUs")
	}
	h := &engineHost{cpus: info.NCPU}
	if ownSeccomp(info.SecurityOptions) {
		var err error
		if h.seccomp, err = runtime.SeccompOption(runtime.GoArch(info.Architecture)); err != nil {
			return nil, fmt.Errorf("info: %w", err)
		}
		h.shown = []byte(`,"` + inJSON(h.seccomp) + `"`)
	}
	e.host.Store(h)
	return h, nil
}

// withoutProfile removes Berm's seccomp profile from an inspected container.
func (e *engine) withoutProfile(raw json.RawMessage) json.RawMessage {
	if h := e.host.Load(); h != nil && len(h.shown) > 0 {
		return bytes.Replace(raw, h.shown, nil, 1)
	}
	return raw
}

// ownSeccomp reports whether containers get Berm's seccomp profile: the engine has seccomp,
// and its operator hasn't given it a profile. Engines before 17.05 name no profile.
func ownSeccomp(options []string) bool {
	for _, o := range options { // "name=seccomp,profile=default"
		if o == "seccomp" {
			return true
		}
		if rest, ok := strings.CutPrefix(o, "name=seccomp"); ok {
			profile := strings.TrimPrefix(rest, ",profile=")
			return !strings.Contains(profile, "/")
		}
	}
	return false
}
