package client

import (
	"context"
	"iter"
	"net/http"
	"net/url"
	"time"

	"github.com/bermhq/berm/proxy/apitype"
)

// Create returns the sandbox of a key, and creates it if there is none. It waits while the
// image is being pulled. The sandbox's Result says what Create did.
func (c *Client) Create(ctx context.Context, key string, req apitype.SandboxRequest) (*apitype.Sandbox, error) {
	return c.CreateFunc(ctx, key, req, func(*apitype.Sandbox) {})
}

// CreateFunc is Create, but calls waiting with each answer during the image's pull, whose
// progress is in Pull.
func (c *Client) CreateFunc(ctx context.Context, key string, req apitype.SandboxRequest, waiting func(*apitype.Sandbox)) (*apitype.Sandbox, error) {
	for {
		sb, again, err := c.create(ctx, key, req)
		if err != nil || again == 0 {
			return sb, err
		}
		waiting(sb)
		if err := wait(ctx, again); err != nil {
			return nil, err
		}
	}
}

// CreateNoWait is Create, but doesn't wait for the image. It then returns a sandbox with status
// "starting" and the progress of the pull in Pull.
func (c *Client) CreateNoWait(ctx context.Context, key string, req apitype.SandboxRequest) (*apitype.Sandbox, error) {
	sb, _, err := c.create(ctx, key, req)
	return sb, err
}

// create makes one call. If the image is still being pulled, it also returns when to ask again.
func (c *Client) create(ctx context.Context, key string, req apitype.SandboxRequest) (*apitype.Sandbox, time.Duration, error) {
	var sb apitype.Sandbox
	rep, err := c.do(ctx, call{method: http.MethodPut, path: at("sandboxes", key), body: req, out: &sb})
	if err != nil {
		return nil, 0, err
	}
	if rep.StatusCode == http.StatusAccepted {
		return &sb, max(retryAfter(rep.Response), time.Second), nil
	}
	return &sb, 0, nil
}

// Get returns the sandbox of a key.
func (c *Client) Get(ctx context.Context, key string) (*apitype.Sandbox, error) {
	return get[apitype.Sandbox](ctx, c, at("sandboxes", key), nil)
}

// Renew moves a sandbox's expiry to ttl from now; 0 is the sandbox's own TTL.
func (c *Client) Renew(ctx context.Context, key string, ttl time.Duration) (*apitype.Sandbox, error) {
	var req apitype.RenewRequest
	if ttl != 0 {
		req.TTL = new(apitype.Duration(ttl))
	}
	return post[apitype.Sandbox](ctx, c, at("sandboxes", key, "renew"), req, nil)
}

// Pause freezes a sandbox's processes.
func (c *Client) Pause(ctx context.Context, key string) (*apitype.Sandbox, error) {
	return post[apitype.Sandbox](ctx, c, at("sandboxes", key, "pause"), nil, nil)
}

// Resume unfreezes a sandbox's processes.
func (c *Client) Resume(ctx context.Context, key string) (*apitype.Sandbox, error) {
	return post[apitype.Sandbox](ctx, c, at("sandboxes", key, "resume"), nil, nil)
}

// Delete removes a sandbox. It is no error if there is none: Result is "not_found" then.
func (c *Client) Delete(ctx context.Context, key string) (*apitype.DeleteResult, error) {
	return out[apitype.DeleteResult](ctx, c, call{method: http.MethodDelete, path: at("sandboxes", key)})
}

// ListOptions select sandboxes.
type ListOptions struct {
	Status   string            // empty is any
	Metadata map[string]string // all of these must match
	PageSize int               // 1 to 100; 0 is 100
}

// List yields the tenant's sandboxes in the order of their keys, page by page. The sequence
// ends after the first error.
func (c *Client) List(ctx context.Context, opts ListOptions) iter.Seq2[apitype.Sandbox, error] {
	q := url.Values{}
	set(q, "status", opts.Status)
	set(q, "limit", opts.PageSize)
	for name, v := range opts.Metadata {
		q.Set("metadata."+name, v)
	}
	return pages(ctx, c, at("sandboxes"), q, func(page *apitype.SandboxList) ([]apitype.Sandbox, string, error) {
		return page.Sandboxes, page.NextCursor, nil
	})
}
