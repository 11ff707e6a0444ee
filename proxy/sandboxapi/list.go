package sandboxapi

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/proxy/apitype"
)

const (
	maxLimit      = 100
	metadataQuery = "metadata."
)

var statuses = []lifecycle.Status{
	lifecycle.StatusStarting, lifecycle.StatusRunning, lifecycle.StatusPaused, lifecycle.StatusStopping,
	lifecycle.StatusStopped, lifecycle.StatusFailed, lifecycle.StatusExpired,
}

// list answers a page of the tenant's sandboxes.
func (a *api) list(w http.ResponseWriter, r *http.Request) error {
	tenant := proxy.ExchangeOf(r.Context()).Caller.Tenant
	opts, err := listOptions(r, tenant)
	if err != nil {
		return err
	}
	page, last, err := a.Manager.List(r.Context(), tenant, opts)
	if err != nil {
		return err
	}
	out := apitype.SandboxList{Sandboxes: each(page, sandbox)}
	if last != "" {
		out.NextCursor = cursor{Tenant: tenant, After: last}.String()
	}
	return reply(w, http.StatusOK, out, nil)
}

func listOptions(r *http.Request, tenant string) (lifecycle.ListOptions, error) {
	opts := lifecycle.ListOptions{}
	q := r.URL.Query()
	for name := range q {
		if md, ok := strings.CutPrefix(name, metadataQuery); ok {
			if md == "" {
				return opts, &lifecycle.InvalidError{Field: name, Message: "names no metadata"}
			}
			if opts.Metadata == nil {
				opts.Metadata = map[string]string{}
			}
			opts.Metadata[md] = q.Get(name)
		}
	}
	if q.Has("status") {
		opts.Status = lifecycle.Status(q.Get("status"))
		if !slices.Contains(statuses, opts.Status) {
			return opts, &lifecycle.InvalidError{Field: "status", Message: fmt.Sprintf("must be one of %v", statuses)}
		}
	}
	var err error
	opts.Limit, opts.After, err = pageQuery(q, tenant, maxLimit)
	if err == nil && opts.After != "" {
		if key, bad := lifecycle.ParseKey(opts.After); bad != nil || key != opts.After {
			err = badCursor()
		}
	}
	return opts, err
}

// pageQuery returns the page that a query asks for: at most limit items, after the item named
// after. Most is the default and the maximum of limit. An empty after is the first page.
func pageQuery(q url.Values, tenant string, most int) (limit int, after string, err error) {
	limit = most
	if q.Has("limit") {
		limit, err = strconv.Atoi(q.Get("limit"))
		if err != nil || limit < 1 || limit > most {
			return 0, "", &lifecycle.InvalidError{Field: "limit", Message: fmt.Sprintf("must be a whole number from 1 to %d", most)}
		}
	}
	if q.Has("cursor") {
		c, err := parseCursor(q.Get("cursor"))
		if err != nil || c.Tenant != tenant || c.After == "" {
			return 0, "", badCursor()
		}
		after = c.After
	}
	return limit, after, nil
}

func badCursor() error {
	return &lifecycle.InvalidError{Field: "cursor", Message: "must be the next_cursor of an earlier answer"}
}

// cursor is the place at which a list continues. It gives access to nothing that the caller
// couldn't have asked for, so it needs no signature.
type cursor struct {
	Tenant string `json:"t"`
	After  string `json:"a"`
}

func (c cursor) String() string {
	b, _ := json.Marshal(c) // two strings can't fail
	return base64.RawURLEncoding.EncodeToString(b)
}

func parseCursor(s string) (cursor, error) {
	var c cursor
	b, err := base64.RawURLEncoding.Strict().DecodeString(s)
	if err != nil {
		return c, err
	}
	return c, proxy.DecodeJSON(b, &c)
}

// knownQuery refuses a query string that doesn't parse, repeats a parameter, or has a
// parameter not in names. A name with a dot at its end matches every parameter with that prefix.
func knownQuery(r *http.Request, names ...string) error {
	q, err := url.ParseQuery(r.URL.RawQuery)
	if err != nil {
		return proxy.Malformed("the query string can't be parsed")
	}
	for name, values := range q {
		known := slices.ContainsFunc(names, func(n string) bool {
			return name == n || strings.HasSuffix(n, ".") && strings.HasPrefix(name, n)
		})
		if !known {
			return proxy.Malformed(fmt.Sprintf("unknown query parameter %q", name))
		}
		if len(values) > 1 {
			return proxy.Malformed(fmt.Sprintf("query parameter %q is there twice", name))
		}
	}
	return nil
}

func boolQuery(q url.Values, name string) (bool, error) {
	switch q.Get(name) {
	case "true":
		return true, nil
	case "false":
		return false, nil
	case "":
		if !q.Has(name) {
			return false, nil
		}
	}
	return false, &lifecycle.InvalidError{Field: name, Message: "must be true or false"}
}

// timeQuery reads a parameter that is a time, or a duration before now.
func timeQuery(q url.Values, name string) (time.Time, error) {
	s := q.Get(name)
	if !q.Has(name) {
		return time.Time{}, nil
	}
	if t, err := time.Parse(time.RFC3339Nano, s); err == nil {
		return t, nil
	}
	if d, err := time.ParseDuration(s); err == nil && d >= 0 {
		return time.Now().Add(-d), nil
	}
	return time.Time{}, &lifecycle.InvalidError{Field: name, Message: `must be an RFC 3339 time, or how long ago, like "10m"`}
}
