package client

import (
	"context"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"github.com/bermhq/berm/proxy/apitype"
)

// Exec runs a command to its end. It is repeated only when there was no room for
// it, so that it never runs twice.
func (c *Client) Exec(ctx context.Context, key string, req apitype.ExecRequest) (*apitype.ExecResult, error) {
	var res apitype.ExecResult
	again := func(e *Error) bool { return e.Code == "capacity" }
	if _, err := c.do(ctx, call{method: http.MethodPost, path: pathOf(key, "/exec"), body: req, out: &res, again: again}); err != nil {
		return nil, err
	}
	return &res, nil
}

// LogOptions choose from a sandbox's log.
type LogOptions struct {
	Follow     bool
	Tail       int       // last lines only; 0 is all
	Since      time.Time // zero is from the start
	Timestamps bool
	Stream     string // "stdout" or "stderr"; empty is both
}

// Logs opens what the sandbox's main process printed. The caller closes it.
func (c *Client) Logs(ctx context.Context, key string, opts LogOptions) (io.ReadCloser, error) {
	q := url.Values{}
	if opts.Follow {
		q.Set("follow", "true")
	}
	if opts.Tail > 0 {
		q.Set("tail", strconv.Itoa(opts.Tail))
	}
	if !opts.Since.IsZero() {
		q.Set("since", opts.Since.UTC().Format(time.RFC3339Nano))
	}
	if opts.Timestamps {
		q.Set("timestamps", "true")
	}
	if opts.Stream != "" {
		q.Set("stream", opts.Stream)
	}
	rep, err := c.do(ctx, call{method: http.MethodGet, path: pathOf(key, "/logs"), query: q, again: repeatable})
	if err != nil {
		return nil, err
	}
	return rep.body, nil
}

// Stats measures a sandbox.
func (c *Client) Stats(ctx context.Context, key string) (*apitype.Stats, error) {
	var out apitype.Stats
	if _, err := c.do(ctx, call{method: http.MethodGet, path: pathOf(key, "/stats"), out: &out, again: repeatable}); err != nil {
		return nil, err
	}
	return &out, nil
}

// Status tells how the service is.
func (c *Client) Status(ctx context.Context) (*apitype.Status, error) {
	var out apitype.Status
	if _, err := c.do(ctx, call{method: http.MethodGet, path: "/api/v1/status", out: &out, again: repeatable}); err != nil {
		return nil, err
	}
	return &out, nil
}

// Errors answers the tenant's recent errors, newest first.
func (c *Client) Errors(ctx context.Context) ([]apitype.ErrorEntry, error) {
	var out apitype.ErrorList
	if _, err := c.do(ctx, call{method: http.MethodGet, path: "/api/v1/errors", out: &out, again: repeatable}); err != nil {
		return nil, err
	}
	return out.Errors, nil
}

// Ready is nil when the service can make and use sandboxes. It asks once.
func (c *Client) Ready(ctx context.Context) error {
	_, err := c.do(ctx, call{method: http.MethodGet, path: "/readyz", out: &apitype.Health{}, again: never})
	return err
}
