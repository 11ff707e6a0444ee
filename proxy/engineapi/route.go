package engineapi

import (
	"slices"
	"strings"

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
	template string   // "/containers/{id}/json"
	query    []string // parameters that it knows; one with a "*" may be there more than once
	body     bodyKind
	change   bool             // it changes something
	since    upstream.Version // the API versions that have it, from and to; 0 is no bound
	until    upstream.Version
	serve    func(*call) error

	segments []string // of the template
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
		rt.long = strings.Contains(rt.template, "{image}")
	}
	return list
}
