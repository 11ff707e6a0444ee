package engineapi

import (
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"github.com/bermhq/berm/proxy/engineapi/body"

	"github.com/bermhq/berm/proxy/engineapi/upstream"

	"github.com/bermhq/berm/proxy"
)

// maxName bounds each segment of a path, in bytes.
const maxName = 512

// segment is a part of a path between slashes, as it was sent and with its escapes
// decoded once. Only names may have any.
type segment struct{ raw, name string }

// splitPath reads a request's path as it was sent: an optional version, and segments.
// What the engine would redirect, clean, or read otherwise than it looks is refused.
func splitPath(raw string) (v upstream.Version, segments []segment, err error) {
	bad := func(why string) (upstream.Version, []segment, error) {
		return 0, nil, proxy.Malformed("the path " + why)
	}
	if !strings.HasPrefix(raw, "/") || len(raw) > 4096 {
		return bad("is not absolute, or too long")
	}
	for i, part := range strings.Split(raw[1:], "/") {
		name, err := url.PathUnescape(part)
		if err != nil {
			return bad("has an escape that is none")
		}
		switch {
		case name == "":
			return bad("has an empty segment")
		case name == "." || name == "..":
			return bad("has a dot segment")
		case strings.ContainsAny(name, "/\\%?#") || !printable(name) || len(name) > maxName:
			return bad("has a segment with characters that no name has")
		}
		if n, ok := upstream.ParseVersion(part); i == 0 && ok {
			v = n
			continue
		}
		segments = append(segments, segment{part, name})
	}
	if len(segments) == 0 {
		return bad("names no endpoint")
	}
	return v, segments, nil
}

func printable(s string) bool {
	for _, c := range []byte(s) {
		if c <= ' ' || c >= 0x7f {
			return false
		}
	}
	return true
}

// match finds the route of the request, and the name in its path.
func (c *call) match() (*route, error) {
	raw := c.r.URL.EscapedPath()
	if c.r.URL.Host != "" || c.r.URL.Opaque != "" || c.r.URL.Fragment != "" || c.r.URL.RawFragment != "" {
		return nil, proxy.Malformed("the request is for a proxy")
	}
	if target, _, _ := strings.Cut(c.r.RequestURI, "?"); target != raw {
		return nil, proxy.Malformed("the path has an escape where none is needed")
	}
	v, segments, err := splitPath(raw)
	if err != nil {
		return nil, err
	}
	rt, name := lookup(c.r.Method, segments)
	if rt == nil {
		return nil, denied("endpoints.unknown", "", fmt.Sprintf("%s %s is not an endpoint that may be used", method(c.r), body.Shorten(raw)),
			"the endpoints of docs/engine-proxy.md")
	}
	if c.version, err = c.engine.Negotiate(c.ctx, v); err != nil {
		return nil, err
	}
	if c.version < rt.since || rt.until != 0 && c.version > rt.until {
		return nil, denied("endpoints.version", "", fmt.Sprintf("%s %s is not in version %s of the API", method(c.r), rt.template, c.version), "another version")
	}
	c.name = name
	return rt, nil
}

// lookup matches a method and a path with the table. A template has at most one name,
// which may span several segments if it is an image's.
func lookup(method string, segments []segment) (*route, string) {
	for i := range routes {
		if rt := &routes[i]; rt.method == method {
			if name, ok := rt.fits(segments); ok {
				return rt, name
			}
		}
	}
	return nil, ""
}

func (rt *route) fits(segments []segment) (name string, ok bool) {
	at := slices.IndexFunc(rt.segments, func(s string) bool { return s[0] == '{' })
	if at < 0 {
		return "", literally(rt.segments, segments)
	}
	after := rt.segments[at+1:]
	end := len(segments) - len(after)
	if end <= at || !rt.long && end != at+1 {
		return "", false
	}
	if !literally(rt.segments[:at], segments[:at]) || !literally(after, segments[end:]) {
		return "", false
	}
	for _, s := range segments[at:end] {
		name += "/" + s.name
	}
	return name[1:], true
}

// literally tells whether segments are those of a template, without escapes.
func literally(template []string, segments []segment) bool {
	return slices.EqualFunc(template, segments, func(want string, s segment) bool { return s.raw == want })
}

// parse reads the query, and looks at what the headers say of the body.
func (c *call) parse() error {
	query, err := parseQuery(c.r.URL.RawQuery, c.route.query)
	if err != nil {
		return err
	}
	c.query = query
	h := c.r.Header
	if h.Get("Content-Encoding") != "" || len(h.Values("Content-Type")) > 1 {
		return proxy.Malformed("the body is encoded, or has several types")
	}
	if c.route.body == noBody && c.r.ContentLength != 0 {
		return proxy.Malformed(c.route.method + " " + c.route.template + " takes no body")
	}
	return nil
}

// parseQuery reads a query of which every parameter has to be known, and is there
// once, unless it is marked as repeatable with a "*".
func parseQuery(raw string, known []string) (url.Values, error) {
	if len(raw) > 64<<10 || strings.Contains(raw, ";") {
		return nil, proxy.Malformed("the query is too long, or has a semicolon")
	}
	q, err := url.ParseQuery(raw)
	if err != nil {
		return nil, proxy.Malformed("the query is not well-formed")
	}
	for name, values := range q {
		switch {
		case slices.Contains(known, name+"*"):
		case !slices.Contains(known, name):
			return nil, denied("endpoints.query", name, fmt.Sprintf("the query parameter %q is not known", body.Shorten(name)), "one of: "+strings.ReplaceAll(strings.Join(known, ", "), "*", ""))
		case len(values) > 1:
			return nil, proxy.Malformed(fmt.Sprintf("the query parameter %q is there %d times", name, len(values)))
		}
	}
	return q, nil
}

// flag reads a query parameter as the engine reads a boolean.
func (c *call) flag(name string) bool {
	s := strings.ToLower(strings.TrimSpace(c.query.Get(name)))
	return !(s == "" || s == "0" || s == "no" || s == "false" || s == "none")
}

// number reads a query parameter that is a whole number; 0 if it isn't there.
func (c *call) number(name string) (int64, error) {
	if c.query.Get(name) == "" {
		return 0, nil
	}
	n, err := strconv.ParseInt(c.query.Get(name), 10, 64)
	if err != nil {
		return 0, proxy.Malformed(fmt.Sprintf("the query parameter %q is not a whole number", name))
	}
	return n, nil
}

func method(r *http.Request) string { return body.Shorten(r.Method) }
