// Package client is Berm's Go SDK. It calls the REST API, retries when the server asks for
// it, and returns typed errors.
package client

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"maps"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/bermhq/berm/proxy/apitype"
)

const (
	maxAnswer      = 64 << 20
	defaultRetries = 4
	maxWait        = time.Minute
)

// Options configure a Client.
type Options struct {
	// BaseURL of the server: http://…, https://… or unix:///path/of/socket. Mandatory.
	BaseURL string
	// Token to send; empty sends none.
	Token string
	// HTTPClient sends the requests. New copies it, and makes the copy follow no
	// redirects. Nil is a default client. It must be nil for a unix socket.
	HTTPClient *http.Client
	// Retries is how often a call that can be repeated is repeated after answers that ask
	// for it: 429 and 503 with Retry-After. 0 is 4; less than 0 is none.
	Retries int
}

// Client calls one server. It is safe for many goroutines.
type Client struct {
	base    string
	token   string
	http    *http.Client
	retries int
}

// New checks the options and returns a Client.
func New(opts Options) (*Client, error) {
	u, err := url.Parse(opts.BaseURL)
	if err != nil {
		return nil, fmt.Errorf("base URL: %w", err)
	}
	c := &Client{base: strings.TrimSuffix(opts.BaseURL, "/"), token: opts.Token, retries: opts.Retries}
	if c.retries == 0 {
		c.retries = defaultRetries
	}
	var hc http.Client
	if opts.HTTPClient != nil {
		hc = *opts.HTTPClient
	}
	switch {
	case u.Scheme == "unix" && u.Host == "" && strings.HasPrefix(u.Path, "/"):
		if opts.HTTPClient != nil {
			return nil, errors.New("HTTPClient can't be used with a unix socket")
		}
		c.base = "http://localhost"
		hc.Transport = &http.Transport{
			DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
				return new(net.Dialer).DialContext(ctx, "unix", u.Path)
			},
			MaxIdleConnsPerHost: 16, IdleConnTimeout: time.Minute,
		}
	case (u.Scheme == "http" || u.Scheme == "https") && u.Host != "":
	default:
		return nil, errors.New("base URL: must be http://…, https://… or unix:///path")
	}
	// A redirect could send the token to another server.
	hc.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	c.http = &hc
	return c, nil
}

// Error is an answer whose status isn't 2xx.
type Error struct {
	Status     int             // of HTTP
	Code       string          // the problem's; empty if the answer has no problem of Berm's
	Problem    apitype.Problem // what the server said
	RetryAfter time.Duration   // 0 unless the server asks for a retry
}

// Error returns the server's message.
func (e *Error) Error() string {
	if e.Problem.Detail == "" {
		return fmt.Sprintf("the server answered %d %s", e.Status, http.StatusText(e.Status))
	}
	return fmt.Sprintf("%s (%s, request %s)", e.Problem.Detail, e.Code, e.Problem.RequestID)
}

// call is one request to be made.
type call struct {
	method, path string
	query        url.Values
	header       http.Header
	body         any               // sent as JSON; nil is none
	upload       io.Reader         // sent as it is, once, in place of a body
	size         int64             // bytes of upload; 0: not known, or known from the reader's type
	out          any               // pointer to decode the answer into; nil drops the answer
	stream       bool              // leaves the answer's body to the caller
	again        func(*Error) bool // whether to repeat it after this error; nil is always
}

// at joins the escaped parts to the path of a call.
func at(parts ...string) string {
	path := "/api/v1"
	for _, part := range parts {
		path += "/" + url.PathEscape(part)
	}
	return path
}

// unlessFull is a call's again for calls that must not run twice. It repeats one only after
// the code capacity, when the server hasn't begun the call.
func unlessFull(e *Error) bool { return e.Code == "capacity" }

func never(*Error) bool { return false }

// reply is an answer with a status of 2xx. Its body is open only if the call is a stream.
type reply struct{ *http.Response }

// do makes a call, and repeats it when the server asks for that and the call allows it.
func (c *Client) do(ctx context.Context, call call) (reply, error) {
	var body []byte
	if call.body != nil {
		var err error
		if body, err = json.Marshal(call.body); err != nil {
			return reply{}, fmt.Errorf("encode request: %w", err)
		}
	}
	for retries := c.retries; ; retries-- {
		rep, err := c.once(ctx, call, body)
		apiErr, ok := errors.AsType[*Error](err)
		if !ok || apiErr.RetryAfter == 0 || call.upload != nil || call.again != nil && !call.again(apiErr) || retries <= 0 {
			return rep, err
		}
		if waitErr := wait(ctx, apiErr.RetryAfter); waitErr != nil {
			return reply{}, errors.Join(waitErr, err)
		}
	}
}

// request makes the HTTP request of a call.
func (c *Client) request(ctx context.Context, call call, body []byte) (*http.Request, error) {
	if err := checkPath(call.path); err != nil {
		return nil, err
	}
	u := c.base + call.path
	if len(call.query) > 0 {
		u += "?" + call.query.Encode()
	}
	content := call.upload
	if content == nil {
		content = bytes.NewReader(body)
	}
	req, err := http.NewRequestWithContext(ctx, call.method, u, content)
	if err != nil {
		return nil, err
	}
	if call.size > 0 {
		req.ContentLength = call.size
	}
	maps.Copy(req.Header, call.header)
	if call.body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	c.authorize(req.Header)
	return req, nil
}

func (c *Client) once(ctx context.Context, call call, body []byte) (reply, error) {
	req, err := c.request(ctx, call, body)
	if err != nil {
		return reply{}, err
	}
	resp, err := c.http.Do(req)
	if err != nil || resp.StatusCode/100 == 2 && call.stream {
		return reply{resp}, err
	}
	defer func() { _ = resp.Body.Close() }()
	data, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer+1))
	switch {
	case err != nil:
		return reply{}, fmt.Errorf("read answer: %w", err)
	case len(data) > maxAnswer:
		return reply{}, fmt.Errorf("read answer: it is larger than %d bytes", maxAnswer)
	case resp.StatusCode/100 != 2:
		return reply{}, ErrorOf(resp, data)
	case call.out == nil:
		return reply{resp}, nil
	}
	if err := json.Unmarshal(data, call.out); err != nil {
		return reply{}, fmt.Errorf("decode answer: %w", err)
	}
	return reply{resp}, nil
}

// done makes a call and drops its answer.
func (c *Client) done(ctx context.Context, call call) error {
	_, err := c.do(ctx, call)
	return err
}

// authorize sets the token in a request's header, if there is one.
func (c *Client) authorize(h http.Header) {
	if c.token != "" {
		h.Set("Authorization", "Bearer "+c.token)
	}
}

// value makes a call and decodes its answer.
func value[T any](ctx context.Context, c *Client, call call) (v T, err error) {
	call.out = &v
	_, err = c.do(ctx, call)
	return v, err
}

// out is value for large answers. It returns a pointer, which is nil with an error.
func out[T any](ctx context.Context, c *Client, call call) (*T, error) {
	v, err := value[T](ctx, c, call)
	if err != nil {
		return nil, err
	}
	return &v, nil
}

// get is out for a GET.
func get[T any](ctx context.Context, c *Client, path string, q url.Values) (*T, error) {
	return out[T](ctx, c, call{method: http.MethodGet, path: path, query: q})
}

// post is out for a POST with a JSON body, nil for none. Again is as in call.
func post[T any](ctx context.Context, c *Client, path string, body any, again func(*Error) bool) (*T, error) {
	return out[T](ctx, c, call{method: http.MethodPost, path: path, body: body, again: again})
}

// set sets a parameter unless v is the zero value.
func set[T comparable](q url.Values, name string, v T) {
	var zero T
	if v != zero {
		q.Set(name, fmt.Sprint(v))
	}
}

// pages yields the items of a list, page by page. It ends after the first error.
func pages[Page, T any](ctx context.Context, c *Client, path string, q url.Values, of func(*Page) (items []T, next string, err error)) iter.Seq2[T, error] {
	return func(yield func(T, error) bool) {
		var none T
		q := maps.Clone(q) // so that the sequence can be run twice
		for {
			page, err := get[Page](ctx, c, path, q)
			if err != nil {
				yield(none, err)
				return
			}
			items, next, err := of(page)
			for _, item := range items {
				if !yield(item, nil) {
					return
				}
			}
			if err != nil {
				yield(none, err)
			}
			if err != nil || next == "" {
				return
			}
			q.Set("cursor", next)
		}
	}
}

// ErrorOf returns the error of an answer whose status isn't 2xx, such as that of a refused
// Handshake. Data is the answer's body.
func ErrorOf(resp *http.Response, data []byte) *Error {
	e := &Error{Status: resp.StatusCode}
	if resp.StatusCode == http.StatusTooManyRequests || resp.StatusCode == http.StatusServiceUnavailable {
		e.RetryAfter = retryAfter(resp)
	}
	if strings.HasPrefix(resp.Header.Get("Content-Type"), "application/problem+json") && json.Unmarshal(data, &e.Problem) == nil {
		e.Code = e.Problem.Code
	}
	return e
}

func retryAfter(resp *http.Response) time.Duration {
	n, err := strconv.Atoi(resp.Header.Get("Retry-After"))
	if err != nil || n < 0 {
		return 0
	}
	return min(time.Duration(n)*time.Second, maxWait)
}

// wait waits for d plus at random up to a tenth of it, so that many callers don't retry at once.
func wait(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d + rand.N(d/10+1))
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
