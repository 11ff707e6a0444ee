package engineapi

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/bermhq/berm/proxy/engineapi/body"

	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/proxy/engineapi/upstream"

	"github.com/bermhq/berm/lifecycle"
)

// filters are the values of a list's filters, by name.
type filters map[string][]string

// maxFilters bounds the values of all filters together.
const maxFilters = 256

// parseFilters reads filters, of which every name has to be known. Both forms are taken that
// clients write: a list of values, and a map of them to true.
func parseFilters(text string, known []string) (filters, error) {
	out := filters{}
	if text == "" {
		return out, nil
	}
	var names map[string]json.RawMessage
	if err := strictJSON([]byte(text), &names); err != nil {
		return nil, proxy.Malformed("the filters are not one JSON object")
	}
	total := 0
	for name, raw := range names {
		if !slices.Contains(known, name) {
			return nil, denied("endpoints.filter", name, fmt.Sprintf("the filter %q is not known", body.Shorten(name)), "one of: "+strings.Join(known, ", "))
		}
		values, err := filterValues(raw)
		if err != nil {
			return nil, proxy.Malformed(fmt.Sprintf("the filter %q is neither a list of texts nor a map of them to true", name))
		}
		if total += len(values); total > maxFilters {
			return nil, proxy.Malformed(fmt.Sprintf("there are more than %d filters", maxFilters))
		}
		out[name] = values
	}
	return out, nil
}

func filterValues(raw json.RawMessage) ([]string, error) {
	var list []string
	if len(raw) > 0 && raw[0] == '[' {
		return list, strictJSON(raw, &list)
	}
	var set map[string]bool
	if err := strictJSON(raw, &set); err != nil {
		return nil, err
	}
	for value, on := range set {
		if !on {
			return nil, fmt.Errorf("%q is false", value)
		}
	}
	return slices.Sorted(maps.Keys(set)), nil
}

// String is the filters as the engine reads them in a query.
func (f filters) String() string {
	sets := make(map[string]map[string]bool, len(f))
	for name, values := range f {
		sets[name] = make(map[string]bool, len(values))
		for _, v := range values {
			sets[name][v] = true
		}
	}
	text, err := json.Marshal(sets)
	if err != nil {
		return "" // maps of texts can be encoded
	}
	return string(text)
}

// listOwn relays a list of what the caller owns. The engine selects by the labels, whoever put
// them there, so that each entry's seal is checked.
func listOwn(c *call, kind lifecycle.ObjectKind, path string, query url.Values) error {
	resp, err := c.open(upstream.Ask{Path: path, Query: query})
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }()
	c.close(nil)
	resp.Header.Del("Content-Length")
	c.head(resp)
	defer c.hurry()()
	write := func(text string) {
		if _, err := io.WriteString(c.w, text); err != nil {
			panic(http.ErrAbortHandler)
		}
	}
	next, last := "[", "]\n"
	if kind == lifecycle.ObjectVolume {
		next, last = `{"Volumes":[`, "],\"Warnings\":null}\n"
	}
	write(next)
	next = ""
	restarting := c.restarts.Waiting() > 0
	err = upstream.EachEntry(resp.Body, func(list string, entry json.RawMessage) error {
		own, err := ownEntry(c, kind, list, entry)
		if own && kind == lifecycle.ObjectContainer {
			entry = shown(entry)
			if restarting {
				entry, err = showRestarts(c, entry)
			}
		}
		if own && err == nil {
			write(next + string(entry))
			next = ","
		}
		return err
	})
	if err != nil {
		panic(http.ErrAbortHandler) // or a part would be taken for the whole
	}
	write(last)
	return nil
}

// labelled is what tells whose an entry of a list is.
type labelled struct {
	ID     string `json:"Id"`
	Name   string // of a volume
	Labels map[string]string
}

// ownEntry reports whether an entry of a list is the caller's.
func ownEntry(c *call, kind lifecycle.ObjectKind, list string, entry json.RawMessage) (bool, error) {
	var is labelled
	if list == "Warnings" {
		return false, nil
	}
	if err := json.Unmarshal(entry, &is); err != nil {
		return false, err
	}
	switch kind {
	case lifecycle.ObjectContainer:
		return c.ownContainer(is.ID, is.Labels)
	case lifecycle.ObjectImage:
		return ownImage(c, is.Labels), nil
	}
	return c.own(kind, cmp.Or(is.ID, is.Name), is.Labels), nil
}

// onlyOwn adds what keeps a list to the caller's own. Labels that are asked for go on
// top, as all of them have to match.
func (c *call) onlyOwn(f filters) filters {
	f["label"] = append(f["label"], c.ownLabels()...)
	return f
}
