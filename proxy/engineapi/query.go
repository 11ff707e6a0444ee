package engineapi

import (
	"encoding/json"
	"fmt"
	"math"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/proxy/engineapi/body"
)

// parse parses the query, and checks the headers that describe the body.
func (c *call) parse() (err error) {
	var dropped int
	if c.query, c.passed, dropped, err = parseQuery(c.r.URL.RawQuery, c.route.query); err != nil {
		return err
	}
	c.metrics.dropped.WithLabelValues(c.route.template).Add(float64(dropped))
	if c.route.filters != nil {
		if c.filter, err = parseFilters(c.query.Get("filters"), c.route.filters); err != nil {
			return err
		}
		hideFilters(c, c.filter)
	}
	h := c.r.Header
	// Engines ignore this header, which docker-py sends, and look at an archive's first bytes.
	if h.Get("Content-Encoding") != "" && !c.route.upload || len(h.Values("Content-Type")) > 1 {
		return proxy.Malformed("the body is encoded, or has several types")
	}
	if !c.route.body && c.r.ContentLength != 0 {
		return dropBody(c)
	}
	return nil
}

// dropBody reads and checks the body of a route that takes none. Some clients send an empty object, null,
// or parameters of the query again. The engine ignores all of these.
func dropBody(c *call) error {
	var repeated *map[string]json.RawMessage // null is nil
	err := proxy.DecodeBody(c.w, c.r, maxFormBody, true, &repeated)
	sent := c.r.URL.Query()
	if repeated == nil {
		repeated = &map[string]json.RawMessage{}
	}
	for name := range *repeated {
		if !sent.Has(name) {
			err = fmt.Errorf("%q isn't in the query", name)
		}
	}
	if err != nil {
		return proxy.Unreadable(c.route.method+" "+c.route.template+" takes no body", proxy.FaultOf(err).Cause)
	}
	return nil
}

// maxFormBody bounds the bodies of dropBody, in bytes.
const maxFormBody = 64 << 10

// params are the query parameters that a route knows, with their checks. A check gets a value that isn't
// empty, and returns the value for the engine, or "" to leave it out. A parameter without a check is the
// route's to handle. If its name has no "*", the first value counts, as to the engine. A route that
// changes something knows all parameters of any engine from API 1.24 on.
type params map[string]func(name, value string) (string, error)

// parseQuery parses a query. Query has the known parameters, and passed the checked values for the
// engine. Dropped counts the others: an engine would ignore them, or they only select what a read shows.
func parseQuery(raw string, known params) (query, passed url.Values, dropped int, err error) {
	if len(raw) > 64<<10 || strings.Contains(raw, ";") {
		return nil, nil, 0, proxy.Malformed("the query is too long, or has a semicolon")
	}
	if query, err = url.ParseQuery(raw); err != nil {
		return nil, nil, 0, proxy.Malformed("the query is not well-formed")
	}
	passed = url.Values{}
	for _, name := range sortedKeys(query) {
		check, one := known[name]
		if !one {
			var many bool
			if check, many = known[name+"*"]; !many {
				delete(query, name)
				dropped++
				continue
			}
		} else {
			query[name] = query[name][:1]
		}
		for _, value := range query[name] {
			if check == nil || value == "" {
				continue
			}
			if value, err = check(name, value); err != nil {
				return nil, nil, 0, err
			}
			if value != "" {
				passed.Add(name, value)
			}
		}
	}
	return query, passed, dropped, nil
}

// isTrue reads a boolean as the engine does.
func isTrue(s string) bool {
	s = strings.ToLower(strings.TrimSpace(s))
	return !(s == "" || s == "0" || s == "no" || s == "false" || s == "none")
}

// flag reads a query parameter that is a boolean.
func (c *call) flag(name string) bool { return isTrue(c.query.Get(name)) }

// boolean passes true on as "1", and leaves false out.
func boolean(_, value string) (string, error) {
	if isTrue(value) {
		return "1", nil
	}
	return "", nil
}

// like returns a check that passes on values that match a pattern.
func like(pattern *regexp.Regexp, refusal string) func(name, value string) (string, error) {
	return func(_, value string) (string, error) {
		if !pattern.MatchString(value) {
			return "", proxy.Malformed(refusal + ": " + body.Shorten(value))
		}
		return value, nil
	}
}

// between returns a check that passes on whole numbers from least to most.
func between(least, most int64) func(name, value string) (string, error) {
	return func(name, value string) (string, error) {
		n, err := strconv.ParseInt(value, 10, 64)
		if err != nil || n < least || n > most {
			return "", proxy.Malformed(fmt.Sprintf("the query parameter %q is not a whole number from %d to %d", name, least, most))
		}
		return strconv.FormatInt(n, 10), nil
	}
}

var (
	// instant is a time as the engine takes it: RFC 3339, or seconds with a fraction, or a
	// duration before now.
	instant  = regexp.MustCompile(`^[-+0-9A-Za-z:.]{1,64}$`)
	moment   = like(instant, "a query parameter is neither a time nor a number")
	signal   = like(regexp.MustCompile(`^(SIG)?[A-Z0-9+-]{1,12}$`), "Invalid signal")
	platform = like(body.Platform, "the platform is none")
	// consoleSize is a terminal's height and width.
	consoleSize = params{"h": between(0, math.MaxUint16), "w": between(0, math.MaxUint16)}
)

// emptyValues are the values of parameters that ask for nothing.
var emptyValues = []string{"", "0", "false", "[]", "{}", "null"}

// unoffered refuses a parameter that would change what an engine does.
func unoffered(name, value string) (string, error) {
	if slices.Contains(emptyValues, value) {
		return "", nil
	}
	return "", denied("endpoints.query", name, fmt.Sprintf("the parameter %q is not offered here", name), "the parameter left out")
}

// ociPlatform passes on one platform of an image, as {"os": "linux", "architecture": "arm64"}.
func ociPlatform(_, value string) (string, error) {
	var p ocispec.Platform
	if err := proxy.DecodeJSON([]byte(value), &p); err != nil {
		return "", proxy.Malformed("the platform is not a JSON object with os and architecture")
	}
	text, err := json.Marshal(p)
	return string(text), err
}

// stopTime passes on how many seconds a container may take to stop. It replaces -1, which is no limit, by
// body.MaxStopSeconds.
func stopTime(name, value string) (string, error) {
	if value, err := between(-1, body.MaxStopSeconds)(name, value); err != nil || value != "-1" {
		return value, err
	}
	return strconv.Itoa(body.MaxStopSeconds), nil
}

// detachKeys passes on a key sequence such as "ctrl-p,ctrl-q".
func detachKeys(_, keys string) (string, error) {
	if len(keys) > 64 || !printable(keys) {
		return "", proxy.Malformed("the detach keys are none")
	}
	return keys, nil
}

func method(r *http.Request) string { return body.Shorten(r.Method) }
