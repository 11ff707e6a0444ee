package engineapi

import (
	"slices"
	"strings"

	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/proxy/engineapi/upstream"
)

// bodyKind is what body a route takes.
type bodyKind int

const (
	noBody bodyKind = iota
	jsonBody
	tarBody
	anyBody // what the client says to a hijacked connection
)

// route is one endpoint of the Engine API that callers may use.
type route struct {
	method   string
	template string // "/containers/{id}/json"
	query    params
	body     bodyKind
	op       string           // what the profile must allow; empty is nothing
	filters  []string         // filters that its query may have
	change   bool             // it changes something
	since    upstream.Version // the API versions that have it, from and to; 0 is no bound
	until    upstream.Version
	serve    func(*call) error

	segments []string // of the template
	at       int      // which of them is the name; -1 is none
	long     bool     // the name is an image's, and may have slashes
}

// unmatched stands for every request that is no route's.
var unmatched = &route{template: "unmatched", serve: func(*call) error { return notFound("page not found") }}

// routes are all endpoints that there are; whatever isn't among them is refused.
var routes = compile(slices.Concat(
	systemRoutes(),
	containerRoutes(),
	createRoutes(),
	execRoutes(),
	attachRoutes(),
	networkRoutes(),
	volumeRoutes(),
	imageRoutes(),
	buildRoutes(),
	commitRoutes(),
	pruneRoutes(),
	eventRoutes(),
))

func compile(list []route) []route {
	for i := range list {
		rt := &list[i]
		rt.segments = strings.Split(rt.template[1:], "/")
		rt.at = slices.IndexFunc(rt.segments, func(s string) bool { return s[0] == '{' })
		rt.long = strings.Contains(rt.template, "{image}")
		if rt.filters != nil && rt.query == nil {
			rt.query = params{}
		}
		if rt.filters != nil {
			rt.query["filters"] = nil
		}
	}
	return list
}

// run serves a call of the route.
func (rt *route) run(c *call) error {
	if rt.op != "" {
		if err := c.operation(rt.op); err != nil {
			return err
		}
	}
	return rt.serve(c)
}

// decoded serves a call with its body decoded, one strict JSON object in which null is what
// is left out.
func decoded[T any](serve func(c *call, asked *T) error) func(*call) error {
	return func(c *call) error {
		var asked T
		if err := proxy.DecodeNulls(c.w, c.r, proxy.MaxBody, &asked); err != nil {
			return err
		}
		return serve(c, &asked)
	}
}

// onContainer serves a call on a container of the caller's. Serve gets the request that is
// the same to the engine, and the container's ID.
func onContainer(serve func(c *call, a upstream.Ask, id string) error) func(*call) error {
	return func(c *call) error {
		id, err := c.containerID(c.name)
		if err != nil {
			return err
		}
		return serve(c, c.askFor(id), id)
	}
}

// inContainer is onContainer for what runs or reads in a container, which isn't for those
// whom the policy binds if it was denied, and made in mode audit.
func inContainer(serve func(c *call, a upstream.Ask, id string) error) func(*call) error {
	return onContainer(func(c *call, a upstream.Ask, id string) error {
		if err := refuseUnconfined(c); err != nil {
			return err
		}
		return serve(c, a, id)
	})
}

// askFor is the call's request of an object with an ID.
func (c *call) askFor(id string) upstream.Ask {
	path := slices.Clone(c.route.segments)
	path[c.route.at] = id
	return upstream.Ask{Path: "/" + strings.Join(path, "/"), Query: c.passed}
}

// forwardContainer asks the engine the same of a container of the caller's.
var forwardContainer = onContainer(func(c *call, a upstream.Ask, _ string) error { return c.forward(a, false) })
