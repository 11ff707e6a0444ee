// Package client is Berm's Go SDK: it calls the REST API, waits where the server
// asks for it, and gives errors a type.
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
	// Token to show; empty shows none.
	Token string
	// HTTPClient to send with, redirects apart, which are never followed. Nil has
	// one made; it is mandatory to leave it nil for a unix socket.
	HTTPClient *http.Client
	// Retries after answers that ask for them (429 and 503 with Retry-After) of calls
	// that can be repeated. 0 is 4; less than 0 is none.
	Retries int
}

// Client calls one server. It is safe for many goroutines.
type Client struct {
	base    string
	token   string
	http    *http.Client
	retries int
}

// New checks the options.
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
	// A redirect would carry the token to wherever it points.
	hc.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	c.http = &hc
	return c, nil
}

// Error is an answer that says no.
type Error struct {
	Status     int             // of HTTP
	Code       string          // the problem's; empty if the answer was none of Berm's
	Problem    apitype.Problem // what the server said
	RetryAfter time.Duration   // 0 unless the server asks for a retry
}

// Error gives the server's words.
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
	body         any               // to be sent as JSON; nil is none
	size         int64             // bytes, of what upload sends; 0: not known, unless its reader tells
	out          any               // pointer to decode the answer into; nil leaves the body to the caller
	again        func(*Error) bool // whether it may be repeated after this error
}

// repeatable calls may be made again after whatever error that asks for it.
func repeatable(*Error) bool { return true }

func never(*Error) bool { return false }

// reply is an answer that says yes.
type reply struct {
	status     int
	retryAfter time.Duration
	header     http.Header
	body       io.ReadCloser // with a call that has no out
}

// do makes a call, again where the server asks for it.
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
		var apiErr *Error
		if !errors.As(err, &apiErr) || apiErr.RetryAfter == 0 || !call.again(apiErr) || retries <= 0 {
			return rep, err
		}
		if waitErr := wait(ctx, apiErr.RetryAfter); waitErr != nil {
			return reply{}, errors.Join(waitErr, err)
		}
	}
}

// request is what is sent for a call.
func (c *Client) request(ctx context.Context, call call, body io.Reader) (*http.Request, error) {
	if err := checkPath(call.path); err != nil {
		return nil, err
	}
	u := c.base + call.path
	if len(call.query) > 0 {
		u += "?" + call.query.Encode()
	}
	req, err := http.NewRequestWithContext(ctx, call.method, u, body)
	if err != nil {
		return nil, err
	}
	maps.Copy(req.Header, call.header)
	c.authorize(req.Header)
	return req, nil
}

func (c *Client) once(ctx context.Context, call call, body []byte) (reply, error) {
	req, err := c.request(ctx, call, bytes.NewReader(body))
	if err != nil {
		return reply{}, err
	}
	if call.body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return reply{}, err
	}
	rep := reply{status: resp.StatusCode, retryAfter: retryAfter(resp), header: resp.Header}
	if resp.StatusCode/100 == 2 && call.out == nil {
		rep.body = resp.Body
		return rep, nil
	}
	defer func() { _ = resp.Body.Close() }()
	data, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer+1))
	if err != nil {
		return reply{}, fmt.Errorf("read answer: %w", err)
	}
	if len(data) > maxAnswer {
		return reply{}, fmt.Errorf("read answer: it is larger than %d bytes", maxAnswer)
	}
	if resp.StatusCode/100 != 2 {
		return reply{}, errorOf(resp, data)
	}
	if err := json.Unmarshal(data, call.out); err != nil {
		return reply{}, fmt.Errorf("decode answer: %w", err)
	}
	return rep, nil
}

// upload sends all of r. It is never repeated. A call without out has nothing answered.
func (c *Client) upload(ctx context.Context, call call, r io.Reader) error {
	req, err := c.request(ctx, call, r)
	if err != nil {
		return err
	}
	if call.size > 0 {
		req.ContentLength = call.size
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }()
	data, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
	switch {
	case err != nil:
		return fmt.Errorf("read answer: %w", err)
	case resp.StatusCode/100 != 2:
		return errorOf(resp, data)
	case call.out == nil:
		return nil
	}
	if err := json.Unmarshal(data, call.out); err != nil {
		return fmt.Errorf("decode answer: %w", err)
	}
	return nil
}

// authorize shows the token.
func (c *Client) authorize(h http.Header) {
	if c.token != "" {
		h.Set("Authorization", "Bearer "+c.token)
	}
}

// out makes a call and decodes its answer.
func out[T any](ctx context.Context, c *Client, call call) (*T, error) {
	var v T
	call.out = &v
	if _, err := c.do(ctx, call); err != nil {
		return nil, err
	}
	return &v, nil
}

// pages gives the items of a list, page by page. It ends after the first error.
func pages[Page, T any](ctx context.Context, c *Client, path string, q url.Values, of func(*Page) (items []T, next string, err error)) iter.Seq2[T, error] {
	return func(yield func(T, error) bool) {
		var none T
		q := maps.Clone(q) // so that the sequence can be run twice
		for {
			page, err := out[Page](ctx, c, call{method: http.MethodGet, path: path, query: q, again: repeatable})
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

func errorOf(resp *http.Response, data []byte) *Error {
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

// wait waits, and a little longer, so that many callers don't come back at once.
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
