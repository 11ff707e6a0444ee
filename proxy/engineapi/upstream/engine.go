// Package upstream talks to the container engine behind the engine proxy.
package upstream

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/docker/docker/api/types"
	"go.opentelemetry.io/otel/propagation"

	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/runtime"
)

// Sizes and times of talking to the engine.
const (
	BufferSize  = 64 << 10         // bytes of a buffer for a connection or a copy
	answerSize  = 32 << 10         // bytes of the buffer that an answer is first read into
	MaxAnswer   = 64 << 20         // bytes of an answer that is read whole
	AskTimeout  = 30 * time.Second // for one of the proxy's own requests
	UndoTimeout = 30 * time.Second // for the removal of an object that must not stay
)

// Version is a version 1.N of the Engine API, as N.
type Version int

// The versions that the proxy knows.
const (
	Oldest Version = 24 // of Docker 1.12
	Newest Version = 51 // of Docker 28
)

func (v Version) String() string { return "1." + strconv.Itoa(int(v)) }

// ParseVersion parses a version like "v1.41". It takes no other spelling.
func ParseVersion(s string) (Version, bool) {
	minor, ok := strings.CutPrefix(s, "v1.")
	if !ok || len(minor) != 2 || minor[0] == '0' {
		return 0, false
	}
	n, err := strconv.ParseUint(minor, 10, 8)
	return Version(n), err == nil
}

// Engine is the container engine behind the proxy. It is safe for many goroutines.
type Engine struct {
	Transport *http.Transport // makes all requests but upgrades
	name      string          // in messages to callers
	dial      func(context.Context) (net.Conn, error)

	version fact[Version]
	host    fact[*Host]
	release fact[types.Version]
	ended   atomic.Uint64 // connections that have ended
}

// fact caches an answer of the engine about itself. It expires once a connection has ended, as
// all connections do when the engine restarts.
type fact[T any] struct{ known atomic.Pointer[knownFact[T]] }

type knownFact[T any] struct {
	value T
	ended uint64 // connections that had ended before
}

// of returns the fact, and asks the engine unless the fact is cached.
func (f *fact[T]) of(e *Engine, ask func() (T, error)) (T, error) {
	ended := e.ended.Load()
	if known := f.known.Load(); known != nil && known.ended == ended {
		return known.value, nil
	}
	value, err := ask()
	if err == nil {
		f.known.Store(&knownFact[T]{value, ended})
	}
	return value, err
}

// countedConn adds one to ended when it is closed.
type countedConn struct {
	net.Conn
	ended *atomic.Uint64
}

func (c countedConn) Close() error {
	c.ended.Add(1)
	return c.Conn.Close()
}

// New returns an engine, which needn't be up. Messages to callers have its name.
func New(name string, dial func(context.Context) (net.Conn, error)) *Engine {
	e := &Engine{name: name, dial: dial}
	e.Transport = &http.Transport{
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
		ReadBufferSize:      BufferSize,
		WriteBufferSize:     BufferSize,
	}
	return e
}

// Ask is a request to the engine.
type Ask struct {
	Method  string
	Version Version // 0: without one
	Path    string  // decoded
	Query   url.Values
	Header  http.Header
	Body    io.Reader // nil is none
	Length  int64     // of body; -1 is not known
	JSON    any       // body as a value to encode; nil is none
	Long    bool      // Do and Each wait as long as their context lasts, not for AskTimeout
}

func (e *Engine) request(ctx context.Context, a Ask) (*http.Request, error) {
	path := a.Path
	if a.Version != 0 {
		path = "/v" + a.Version.String() + path
	}
	if a.JSON != nil {
		text, err := json.Marshal(a.JSON)
		if err != nil {
			return nil, fmt.Errorf("encode the request: %w", err)
		}
		a.Body, a.Length, a.Header = bytes.NewReader(text), int64(len(text)), http.Header{"Content-Type": {"application/json"}}
	}
	req, err := http.NewRequestWithContext(ctx, a.Method, "http://docker", a.Body)
	if err != nil {
		return nil, fmt.Errorf("%s %s: %w", a.Method, a.Path, err)
	}
	req.URL.Path, req.URL.RawQuery = path, a.Query.Encode()
	for name, values := range a.Header {
		req.Header[name] = values
	}
	req.Header["User-Agent"] = []string{"berm"}
	propagation.TraceContext{}.Inject(ctx, propagation.HeaderCarrier(req.Header))
	if a.Body != nil {
		req.ContentLength = a.Length
	}
	return req, nil
}

// Send sends a request to the engine. It returns any answer, whatever its status, and fails only
// if the engine can't be reached. The caller closes the answer's body.
func (e *Engine) Send(ctx context.Context, a Ask) (*http.Response, error) {
	req, err := e.request(ctx, a)
	if err != nil {
		return nil, err
	}
	resp, err := e.Transport.RoundTrip(req)
	if err != nil {
		return nil, e.Unavailable(ctx, err)
	}
	return resp, nil
}

// Open is Send, except that it returns an *Error for a status of 300 or more.
func (e *Engine) Open(ctx context.Context, a Ask) (*http.Response, error) {
	resp, err := e.Send(ctx, a)
	if err == nil && resp.StatusCode >= 300 {
		return nil, Failure(resp)
	}
	return resp, err
}

// Unavailable returns the fault of an engine that doesn't answer, or the cause of ctx if that has
// ended.
func (e *Engine) Unavailable(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return proxy.Unreachable(e.name, err)
}

// Failure returns an *Error with the status and message of an answer of 300 or more, and closes
// the answer.
func Failure(resp *http.Response) error {
	defer func() { _ = resp.Body.Close() }()
	body, _ := io.ReadAll(io.LimitReader(resp.Body, BufferSize))
	var told struct{ Message string }
	_ = json.Unmarshal(body, &told)
	if told.Message == "" {
		told.Message = http.StatusText(resp.StatusCode)
	}
	return &Error{Status: resp.StatusCode, Message: told.Message}
}

// Error is an error that the engine answered with.
type Error struct {
	Status  int
	Message string
}

func (e *Error) Error() string { return e.Message }

// As makes the Gate answer the engine's status and message unchanged.
func (e *Error) As(target any) bool {
	f, ok := target.(**proxy.Fault)
	if ok {
		*f = &proxy.Fault{Status: e.Status, Code: "engine_error", Title: "The engine's answer", Detail: e.Message}
	}
	return ok
}

// StatusOf returns the status of an *Error, or 0 for any other error.
func StatusOf(err error) int {
	if e, ok := errors.AsType[*Error](err); ok {
		return e.Status
	}
	return 0
}

// Get sends a GET and decodes the answer's JSON into into, as Do does.
func (e *Engine) Get(ctx context.Context, v Version, path string, query url.Values, into any) error {
	return e.Do(ctx, Ask{Method: http.MethodGet, Version: v, Path: path, Query: query}, into)
}

// Post sends in as JSON, if it isn't nil, and reads the answer into out, unless that is nil.
func (e *Engine) Post(ctx context.Context, v Version, path string, query url.Values, in, out any) error {
	return e.Do(ctx, Ask{Method: http.MethodPost, Version: v, Path: path, Query: query, JSON: in}, out)
}

// bound limits ctx to the time that the request may take.
func (a *Ask) bound(ctx context.Context) (context.Context, context.CancelFunc) {
	if a.Long {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(ctx, AskTimeout)
}

// Do sends a request, and decodes the whole answer into into unless that is nil. It returns an
// *Error for a status of 300 or more.
func (e *Engine) Do(ctx context.Context, a Ask, into any) error {
	ctx, cancel := a.bound(ctx)
	defer cancel()
	resp, err := e.Open(ctx, a)
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }()
	answer := bytes.NewBuffer(make([]byte, 0, answerSize))
	_, err = answer.ReadFrom(io.LimitReader(resp.Body, MaxAnswer+1))
	body := answer.Bytes()
	switch {
	case err != nil:
		return e.Unavailable(ctx, err)
	case len(body) > MaxAnswer:
		return fmt.Errorf("%s %s: the engine's answer is over %d bytes", a.Method, a.Path, MaxAnswer)
	case into == nil:
		return nil
	}
	if raw, ok := into.(*json.RawMessage); ok { // the caller decodes it
		*raw = body
		return nil
	}
	if err := json.Unmarshal(body, into); err != nil {
		return fmt.Errorf("%s %s: the engine's answer can't be read: %w", a.Method, a.Path, err)
	}
	return nil
}

// maxEntry bounds one entry of a list of the engine's, in bytes.
const maxEntry = 16 << 20

// Each asks for a list and passes one entry after the other to f, so that a list may have any
// length. The answer is a list, or an object with lists. F gets the name of an object's list.
// Each skips other fields of the object.
func (e *Engine) Each(ctx context.Context, a Ask, f func(list string, entry json.RawMessage) error) error {
	ctx, cancel := a.bound(ctx)
	defer cancel()
	a.Method = http.MethodGet
	resp, err := e.Open(ctx, a)
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }()
	return e.EachEntry(ctx, a.Path, resp.Body, f)
}

// EachEntry passes f the entries of the lists in the answer to a GET.
func (e *Engine) EachEntry(ctx context.Context, path string, body io.Reader, f func(list string, entry json.RawMessage) error) error {
	bounded := &io.LimitedReader{R: body}
	err := (&lister{bounded: bounded, dec: json.NewDecoder(bounded), f: f}).read()
	if err != nil && ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if _, lost := errors.AsType[net.Error](err); lost || errors.Is(err, io.ErrUnexpectedEOF) {
		return e.Unavailable(ctx, err)
	}
	if err != nil {
		return fmt.Errorf("GET %s: %w", path, err)
	}
	return nil
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

// value reads the rest of a value that begins with the token first.
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

// Negotiate returns the API version in which to ask the engine for a client that asks for one.
// For 0, a client that names none, it returns Max.
func (e *Engine) Negotiate(ctx context.Context, asked Version) (Version, error) {
	most, err := e.Max(ctx)
	switch {
	case err != nil:
		return 0, err
	case asked == 0:
		return most, nil
	case asked < Oldest:
		return 0, proxy.Malformed(fmt.Sprintf("client version %s is too old. Minimum supported API version is %s, please upgrade your client to a newer version", asked, Oldest))
	case asked > most:
		return 0, proxy.Malformed(fmt.Sprintf("client version %s is too new. Maximum supported API version is %s", asked, most))
	}
	return asked, nil
}

// Max returns the newest version that both the engine and the proxy support.
func (e *Engine) Max(ctx context.Context) (Version, error) {
	return e.version.of(e, func() (Version, error) {
		ctx, cancel := context.WithTimeout(ctx, AskTimeout)
		defer cancel()
		resp, err := e.Send(ctx, Ask{Method: http.MethodGet, Path: "/_ping"})
		if err != nil {
			return 0, err
		}
		_, _ = io.Copy(io.Discard, io.LimitReader(resp.Body, BufferSize))
		_ = resp.Body.Close()
		v, ok := ParseVersion("v" + resp.Header.Get("Api-Version"))
		if !ok || v < Oldest {
			return 0, e.Unavailable(ctx, fmt.Errorf("the engine's API version is %q", resp.Header.Get("Api-Version")))
		}
		return min(v, Newest), nil
	})
}

// Host is what the proxy knows of the engine's host.
type Host struct {
	CPUs    int64
	Seccomp string // the SecurityOpt of the containers that the proxy makes; empty for the engine's own profile
	shown   []byte // Seccomp as inspect shows it, with the comma before it
}

// HostInfo asks the engine for its host.
func (e *Engine) HostInfo(ctx context.Context, v Version) (*Host, error) {
	return e.host.of(e, func() (*Host, error) {
		var info struct {
			NCPU            int64
			Architecture    string
			SecurityOptions []string
		}
		if err := e.Get(ctx, v, "/info", nil, &info); err != nil {
			return nil, err
		}
		if info.NCPU < 1 {
			return nil, errors.New("info: the engine's answer has no CPUs")
		}
		h := &Host{CPUs: info.NCPU}
		if !ownSeccomp(info.SecurityOptions) {
			return h, nil
		}
		var err error
		if h.Seccomp, err = runtime.SeccompOption(runtime.GoArch(info.Architecture)); err != nil {
			return nil, fmt.Errorf("info: %w", err)
		}
		text, err := json.Marshal(h.Seccomp)
		h.shown = append([]byte(","), text...)
		return h, err
	})
}

// KnowsHost reports whether HostInfo was answered before.
func (e *Engine) KnowsHost() bool { return e.host.known.Load() != nil }

// WithoutProfile removes Berm's seccomp profile from an inspected container, once HostInfo was
// answered. It may use an expired answer, since all engines of an architecture get the same
// profile.
func (e *Engine) WithoutProfile(inspected []byte) []byte {
	known := e.host.known.Load()
	if known == nil || len(known.value.shown) == 0 {
		return inspected
	}
	at := bytes.Index(inspected, known.value.shown)
	if at < 0 {
		return inspected
	}
	short := slices.Concat(inspected[:at], inspected[at+len(known.value.shown):])
	before, host, _ := proxy.CutField(short, "HostConfig")
	ahead, options, _ := proxy.CutField(host, "SecurityOpt")
	if begin := len(before) + len(ahead); at <= begin || at >= begin+len(options) { // it is in another field
		return inspected
	}
	return short
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

// Release returns the engine's own version, like "20.10.24".
func (e *Engine) Release(ctx context.Context) (string, error) {
	r, err := e.releases(ctx)
	return r.Version, err
}

// Runc returns the version of runc, like "1.1.5", or "" if it isn't the engine's default runtime.
func (e *Engine) Runc(ctx context.Context) (string, error) {
	r, err := e.releases(ctx)
	for _, c := range r.Components {
		if c.Name == "runc" {
			return c.Version, err
		}
	}
	return "", err
}

func (e *Engine) releases(ctx context.Context) (types.Version, error) {
	return e.release.of(e, func() (told types.Version, err error) {
		err = e.Get(ctx, 0, "/version", nil, &told)
		told.Version = cmp.Or(told.Version, "unknown")
		return told, err
	})
}
