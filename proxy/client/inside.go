package client

import (
	"context"
	"io"
	"net/http"
	"net/url"
	"time"

	"github.com/bermhq/berm/proxy/apitype"
)

// Exec runs a command to its end. The call is repeated only when the server had no room for
// it, so that the command never runs twice.
func (c *Client) Exec(ctx context.Context, key string, req apitype.ExecRequest) (*apitype.ExecResult, error) {
	return post[apitype.ExecResult](ctx, c, at("sandboxes", key, "exec"), req, unlessFull)
}

// LogOptions select a part of a sandbox's log.
type LogOptions struct {
	Follow     bool
	Tail       int       // last lines only; 0 is all
	Since      time.Time // zero is from the start
	Timestamps bool
	Stream     string // "stdout" or "stderr"; empty is both
}

// Logs opens the output of the sandbox's main process. The caller closes the reader.
func (c *Client) Logs(ctx context.Context, key string, opts LogOptions) (io.ReadCloser, error) {
	q := url.Values{}
	set(q, "follow", opts.Follow)
	set(q, "tail", max(opts.Tail, 0))
	if !opts.Since.IsZero() {
		q.Set("since", opts.Since.UTC().Format(time.RFC3339Nano))
	}
	set(q, "timestamps", opts.Timestamps)
	set(q, "stream", opts.Stream)
	return c.open(ctx, at("sandboxes", key, "logs"), q, 0, 0)
}

// Stats returns a sandbox's use of resources.
func (c *Client) Stats(ctx context.Context, key string) (*apitype.Stats, error) {
	return get[apitype.Stats](ctx, c, at("sandboxes", key, "stats"), nil)
}

// Status returns the state of the service.
func (c *Client) Status(ctx context.Context) (*apitype.Status, error) {
	return get[apitype.Status](ctx, c, at("status"), nil)
}

// Errors returns the tenant's recent errors, newest first.
func (c *Client) Errors(ctx context.Context) ([]apitype.ErrorEntry, error) {
	list, err := value[apitype.ErrorList](ctx, c, call{method: http.MethodGet, path: at("errors")})
	return list.Errors, err
}

// Ready returns nil if the service can make and use sandboxes. The call is never repeated.
func (c *Client) Ready(ctx context.Context) error {
	_, err := c.do(ctx, call{method: http.MethodGet, path: "/readyz", out: &apitype.Health{}, again: never})
	return err
}
