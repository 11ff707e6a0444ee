package client

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/bermhq/berm/proxy/apitype"
)

// Port returns a client whose requests all go to a port of a sandbox, whatever host their URL
// names, such as http://localhost/path. The client follows no redirects. If c has a token, it
// replaces a request's own Authorization header. Use a PortURL for a port that needs that
// header.
func (c *Client) Port(key string, port int) *http.Client {
	return &http.Client{
		Transport:     portTransport{c: c, path: at("sandboxes", key, "ports", strconv.Itoa(port))},
		CheckRedirect: c.http.CheckRedirect,
	}
}

// ErrDotSegment says that a path has "." or ".." as a segment, escaped or not. The path is
// that of a port's URL, or has a key, an ID or a file's name as a part. A proxy on the way
// could resolve the segment, so that the request reached another path of Berm's API. The
// client has sent nothing.
var ErrDotSegment = errors.New(`the path has "." or ".." for a segment; only others may be in it`)

// dotSegment reports whether an escaped path has "." or ".." as a segment.
func dotSegment(escaped string) (bool, error) {
	decoded, err := url.PathUnescape(escaped)
	if err != nil {
		return false, err
	}
	for segment := range strings.SplitSeq(strings.ReplaceAll(decoded, `\`, "/"), "/") {
		if segment == "." || segment == ".." {
			return true, nil
		}
	}
	return false, nil
}

// checkPath refuses a call's path with a dot segment or an empty segment. With one of these,
// a key, an ID or a name of the caller's could change which call the path means.
func checkPath(escaped string) error {
	switch dots, err := dotSegment(escaped); {
	case err != nil:
		return err
	case dots:
		return fmt.Errorf("%s: %w", escaped, ErrDotSegment)
	case strings.Contains(escaped, "//"), strings.HasSuffix(escaped, "/"):
		return fmt.Errorf("%s: a key, an ID or a name is empty", escaped)
	}
	return nil
}

// portTransport sends requests by way of Berm.
type portTransport struct {
	c    *Client
	path string
}

// RoundTrip implements http.RoundTripper. It may fail with ErrDotSegment.
func (t portTransport) RoundTrip(r *http.Request) (*http.Response, error) {
	out, err := t.request(r)
	if err != nil {
		if r.Body != nil {
			_ = r.Body.Close()
		}
		return nil, err
	}
	next := t.c.http.Transport
	if next == nil {
		next = http.DefaultTransport
	}
	return next.RoundTrip(out)
}

// request returns the request to Berm that stands for r.
func (t portTransport) request(r *http.Request) (*http.Request, error) {
	tail := r.URL.EscapedPath()
	if !strings.HasPrefix(tail, "/") {
		tail = "/" + tail
	}
	switch dots, err := dotSegment(tail); {
	case err != nil:
		return nil, err
	case dots:
		return nil, ErrDotSegment
	}
	if r.URL.ForceQuery || r.URL.RawQuery != "" {
		tail += "?" + r.URL.RawQuery
	}
	u, err := url.Parse(t.c.base + t.path + tail)
	if err != nil {
		return nil, err
	}
	out := r.Clone(r.Context())
	out.URL, out.Host = u, ""
	t.c.authorize(out.Header)
	return out, nil
}

// PortURL signs a URL that lets anyone who has it use a port of a sandbox without a token. It
// is valid for ttl, from one second to seven days, where 0 is an hour. It ends with the sandbox.
func (c *Client) PortURL(ctx context.Context, key string, port int, ttl time.Duration) (*apitype.PortURL, error) {
	req := apitype.PortURLRequest{Port: port}
	if ttl != 0 {
		req.TTL = new(apitype.Duration(ttl))
	}
	return post[apitype.PortURL](ctx, c, at("sandboxes", key, "urls"), req, nil)
}
