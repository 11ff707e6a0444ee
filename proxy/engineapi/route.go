package engineapi

import (
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/proxy/engineapi/body"
	"github.com/bermhq/berm/proxy/engineapi/upstream"
)

// route is one endpoint of the Engine API that callers may use.
type route struct {
	method   string
	template string // "/containers/{id}/json"
	query    params
	body     bool             // a request may have a body
	upload   bool             // the body is an archive
	op       string           // operation that the profile must allow; empty is none
	filters  []string         // filters that its query may have
	change   bool             // it changes something
	since    upstream.Version // the first API version that has it; 0 is the oldest
	serve    func(*call) error

	segments []string // of the template
	at       int      // index of the name in segments; -1 is none
	long     bool     // the name may have slashes, as an image's: docker inspect tries it on other kinds too
}

// unmatched is the route of requests that no other route matches.
var unmatched = &route{template: "unmatched", serve: func(*call) error { return notFound("page not found") }}

// routes are all endpoints that callers may use. Requests for others are refused.
var routes = compile([]route{
	{method: http.MethodGet, template: "/_ping", serve: pingEngine},
	{method: http.MethodHead, template: "/_ping", serve: pingEngine},
	{method: http.MethodGet, template: "/version", serve: engineVersions},
	{method: http.MethodGet, template: "/info", serve: engineInfo},
	{method: http.MethodGet, template: "/system/df", query: params{"type*": nil, "verbose": nil}, since: 25, serve: diskUsage},
	{method: http.MethodGet, template: "/containers/json", query: params{
		"all": boolean, "limit": limit, "size": boolean, "before": nil, "since": nil, "trunc_cmd": nil,
	}, filters: []string{"ancestor", "before", "since", "exited", "expose", "health", "id", "is-task", "label", "name", "network", "publish", "status", "volume"}, serve: listContainers},
	{method: http.MethodGet, template: "/containers/{id}/json", query: params{"size": boolean}, serve: inspectContainer},
	{method: http.MethodPost, template: "/containers/{id}/stop", query: params{"t": stopTime, "signal": signal}, change: true, serve: onContainer(stopContainer)},
	{method: http.MethodPost, template: "/containers/{id}/kill", query: params{"signal": signal}, change: true, serve: onContainer(killContainer)},
	{method: http.MethodPost, template: "/containers/{id}/pause", change: true, serve: forwardContainer},
	{method: http.MethodPost, template: "/containers/{id}/unpause", change: true, serve: forwardContainer},
	{method: http.MethodPost, template: "/containers/{id}/rename", query: params{"name": nil}, change: true, serve: onContainer(renameContainer)},
	{method: http.MethodDelete, template: "/containers/{id}", query: params{"v": boolean, "force": boolean, "link": noLinks}, change: true, serve: onContainer(removeContainer)},
	{method: http.MethodPost, template: "/containers/prune", filters: []string{"until", "label", "label!"}, change: true, since: 25, serve: pruneContainers},
	{method: http.MethodGet, template: "/containers/{id}/export", op: policy.OpArchive, serve: inContainer(exportContainer)},
	{method: http.MethodHead, template: "/containers/{id}/archive", query: params{"path": nil}, op: policy.OpArchive, serve: inContainer(statArchive)},
	{method: http.MethodGet, template: "/containers/{id}/archive", query: params{"path": nil}, op: policy.OpArchive, serve: inContainer(getArchive)},
	{method: http.MethodPut, template: "/containers/{id}/archive", query: params{"path": nil, "noOverwriteDirNonDir": boolean, "copyUIDGID": boolean}, body: true, upload: true, change: true, op: policy.OpArchive, serve: inContainer(putArchive)},
	{method: http.MethodPost, template: "/containers/create", query: params{"name": nil, "platform": platform}, body: true, change: true, serve: decoded(createContainer)},
	{method: http.MethodPost, template: "/containers/{id}/start", query: params{"detachKeys": detachKeys, "checkpoint": unoffered, "checkpoint-dir": unoffered}, change: true, serve: onContainer(startContainer)},
	{method: http.MethodPost, template: "/containers/{id}/restart", query: params{"t": stopTime, "signal": signal}, change: true, serve: onContainer(startContainer)},
	{method: http.MethodPost, template: "/containers/{id}/update", body: true, change: true, serve: decoded(updateContainer)},
	{method: http.MethodPost, template: "/containers/{id}/exec", body: true, op: policy.OpExec, change: true, serve: decoded(createExec)},
	{method: http.MethodPost, template: "/exec/{id}/start", body: true, op: policy.OpExec, change: true, serve: decoded(startExec)},
	{method: http.MethodPost, template: "/exec/{id}/resize", query: consoleSize, serve: forwardExec},
	{method: http.MethodGet, template: "/exec/{id}/json", serve: forwardExec},
	{method: http.MethodPost, template: "/containers/{id}/attach", query: attachParams, change: true, serve: inContainer(attachContainer)},
	{method: http.MethodGet, template: "/containers/{id}/attach/ws", query: attachParams, change: true, serve: inContainer(attachWS)},
	{method: http.MethodPost, template: "/containers/{id}/resize", query: consoleSize, serve: forwardContainer},
	{method: http.MethodGet, template: "/containers/{id}/logs", query: params{
		"follow": boolean, "stdout": boolean, "stderr": boolean, "timestamps": boolean, "since": moment, "until": moment, "tail": moment, "details": boolean,
	}, serve: onContainer(containerLogs)},
	{method: http.MethodGet, template: "/containers/{id}/stats", query: params{"stream": boolean, "one-shot": boolean}, serve: onContainer(containerStats)},
	{method: http.MethodGet, template: "/containers/{id}/top", query: params{"ps_args": psOptions}, serve: forwardContainer},
	{method: http.MethodGet, template: "/containers/{id}/changes", serve: forwardContainer},
	{method: http.MethodPost, template: "/containers/{id}/wait", query: params{"condition": like(waitCondition, "invalid condition")}, serve: onContainer(waitContainer)},
	{method: http.MethodGet, template: "/networks", filters: []string{"dangling", "driver", "id", "label", "name", "scope", "type"}, serve: listNetworks},
	{method: http.MethodPost, template: "/networks/create", body: true, change: true, serve: decoded(createNetwork)},
	{method: http.MethodGet, template: "/networks/{id}", query: params{"verbose": nil, "scope": nil}, serve: inspectNetwork},
	{method: http.MethodDelete, template: "/networks/{id}", change: true, serve: removeNetwork},
	{method: http.MethodPost, template: "/networks/{id}/connect", body: true, change: true, serve: decoded(connectNetwork)},
	{method: http.MethodPost, template: "/networks/{id}/disconnect", body: true, change: true, serve: decoded(disconnectNetwork)},
	{method: http.MethodPost, template: "/networks/prune", change: true, since: 25, filters: []string{"until", "label", "label!"}, serve: pruneNetworks},
	{method: http.MethodGet, template: "/volumes", filters: []string{"dangling", "driver", "label", "name"}, serve: listVolumes},
	{method: http.MethodPost, template: "/volumes/create", body: true, change: true, serve: decoded(createVolume)},
	{method: http.MethodGet, template: "/volumes/{name}", serve: inspectVolume},
	{method: http.MethodDelete, template: "/volumes/{name}", query: params{"force": boolean}, change: true, serve: removeVolume},
	{method: http.MethodPost, template: "/volumes/prune", change: true, since: 25, filters: []string{"label", "label!", "all"}, serve: pruneVolumes},
	{method: http.MethodGet, template: "/images/json", query: params{"all": boolean, "digests": boolean, "shared-size": boolean, "manifests": boolean}, filters: []string{"before", "dangling", "label", "reference", "since", "until"}, serve: listImages},
	{method: http.MethodPost, template: "/images/create", query: params{
		"fromImage": nil, "tag": nil, "platform": platform, "fromSrc": nil, "repo": nil, "message": short, "changes*": nil,
	}, body: true, upload: true, change: true, serve: createImage},
	{method: http.MethodGet, template: "/images/{image}/json", query: params{"manifests": boolean, "platform": ociPlatform}, serve: inspectImage},
	{method: http.MethodGet, template: "/images/{image}/history", query: params{"platform": ociPlatform}, serve: imageHistory},
	{method: http.MethodPost, template: "/images/{image}/tag", query: params{"repo": nil, "tag": nil}, change: true, serve: tagImage},
	{method: http.MethodPost, template: "/images/load", query: params{"quiet": boolean, "platform*": unoffered}, op: policy.OpLoad, change: true, body: true, upload: true, serve: loadImages},
	{method: http.MethodPost, template: "/images/{image}/push", query: params{"tag": nil, "platform": unoffered}, op: policy.OpPush, change: true, body: true, serve: pushImage},
	{method: http.MethodGet, template: "/distribution/{image}/json", op: policy.OpPull, since: 30, serve: distribution},
	{method: http.MethodPost, template: "/auth", op: policy.OpLogin, change: true, body: true, serve: decoded(login)},
	{method: http.MethodDelete, template: "/images/{image}", query: params{"force": boolean, "noprune": boolean, "platforms*": unoffered}, change: true, serve: removeImage},
	{method: http.MethodGet, template: "/images/{image}/get", query: params{"platform": ociPlatform}, op: policy.OpArchive, serve: saveImage},
	{method: http.MethodGet, template: "/images/get", query: params{"names*": nil, "platform": ociPlatform}, op: policy.OpArchive, serve: saveImages},
	{
		method: http.MethodPost, template: "/build", body: true, upload: true, op: policy.OpBuild, change: true, serve: buildImage,
		query: params{
			"dockerfile": nil, "t*": nil, "q": nil, "nocache": boolean, "pull": nil, "rm": nil, "forcerm": nil, "memory": nil, "memswap": nil, "cpushares": nil,
			"cpuperiod": nil, "cpuquota": nil, "buildargs": nil, "shmsize": nil, "labels": nil, "networkmode": nil, "platform": platform,
			"target": like(baseImage, "the target is no stage's name"), "version": builder, "buildid": nil,
			"cpusetcpus": never, "cpusetmems": never, "cachefrom": nil, "ulimits": nil, "cgroupparent": never, "extrahosts*": nil, "remote": never,
			"squash": never, "isolation": never, "session": never, "outputs": never, "securityopt*": never,
		},
	},
	{
		method: http.MethodPost, template: "/commit", body: true, op: policy.OpCommit, change: true, serve: commit,
		query: params{"container": nil, "repo": nil, "tag": nil, "comment": short, "author": short, "pause": nil, "changes*": nil},
	},
	{method: http.MethodPost, template: "/images/prune", change: true, since: 25, filters: []string{"dangling", "until", "label", "label!"}, serve: pruneImages},
	{method: http.MethodPost, template: "/build/prune", change: true, since: 31, serve: pruneBuilds,
		query: params{"filters": nil, "all": nil, "keep-storage": nil, "reserved-space": nil, "max-used-space": nil, "min-free-space": nil}},
	{method: http.MethodPost, template: "/grpc", change: true, serve: serveBuildKit},
	{method: http.MethodPost, template: "/session", change: true, serve: serveSession},
	{method: http.MethodGet, template: "/plugins", serve: noPlugins},
	{method: http.MethodGet, template: "/plugins/{image}/json", serve: noPlugin},
	{method: http.MethodGet, template: "/events", query: params{"since": moment, "until": moment}, filters: []string{"config", "container", "daemon", "event", "image", "label", "network", "plugin", "scope", "type", "volume"}, serve: streamEvents},
})

// attachParams are the parameters of attaches.
var attachParams = params{"detachKeys": detachKeys, "logs": boolean, "stream": boolean, "stdin": boolean, "stdout": boolean, "stderr": boolean}

func compile(list []route) []route {
	for i := range list {
		rt := &list[i]
		rt.segments = strings.Split(rt.template[1:], "/")
		rt.at = slices.IndexFunc(rt.segments, func(s string) bool { return s[0] == '{' })
		rt.long = strings.Contains(rt.template, "{image}") ||
			rt.method == http.MethodGet && slices.Contains([]string{"/containers/{id}/json", "/networks/{id}", "/volumes/{name}"}, rt.template)
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

// decoded serves a call with its decoded body. The body is one strict JSON object, in which null means a
// field that is left out.
func decoded[T any](serve func(c *call, asked *T) error) func(*call) error {
	return func(c *call) error {
		var asked T
		if err := decode(c, &asked); err != nil {
			return err
		}
		return serve(c, &asked)
	}
}

// decode decodes the body. Some clients send one object as query and body. So the body may also have the
// route's parameters, and other parameters of the query if they are empty. Engines ignore both there.
func decode(c *call, v any) error {
	names := sortedKeys(c.route.query)
	for i := range names {
		names[i] = strings.TrimSuffix(names[i], "*")
	}
	for name, values := range c.r.URL.Query() {
		if slices.Contains(emptyValues, values[0]) {
			names = append(names, name)
		}
	}
	return proxy.DecodeNulls(c.w, c.r, proxy.MaxBody, v, names...)
}

// onContainer serves a call on a container of the caller's. Serve gets the same request for the engine,
// and the container's ID.
func onContainer(serve func(c *call, a upstream.Ask, id string) error) func(*call) error {
	return func(c *call) error {
		id, err := c.containerID(c.name)
		if err != nil {
			return err
		}
		return serve(c, c.askFor(id), id)
	}
}

// inContainer is onContainer for calls that run or read something in a container. It refuses a container
// that bars forbids to the caller, except in mode audit.
func inContainer(serve func(c *call, a upstream.Ask, id string) error) func(*call) error {
	return onContainer(func(c *call, a upstream.Ask, id string) error {
		if err := refuseUnconfined(c); err != nil {
			return err
		}
		return serve(c, a, id)
	})
}

// askFor returns the call's request for the engine, on the object with this ID.
func (c *call) askFor(id string) upstream.Ask {
	path := slices.Clone(c.route.segments)
	path[c.route.at] = id
	return upstream.Ask{Path: "/" + strings.Join(path, "/"), Query: c.passed}
}

// forwardContainer forwards a call on a container of the caller's.
var forwardContainer = onContainer(func(c *call, a upstream.Ask, _ string) error { return c.forward(a, false) })

// maxName bounds each segment of a path, in bytes.
const maxName = 512

// segment is a part of a path between slashes: as it was sent, and with its escapes decoded once. Only
// names may have escapes.
type segment struct{ raw, name string }

// splitPath splits a path as it was sent into an optional version, and segments. It refuses paths that
// the engine would redirect, clean, or read differently.
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
func (c *call) match() (_ *route, err error) {
	if isPreface(c.r) {
		c.version, err = c.engine.Max(c.ctx)
		return prefaceRoute, err
	}
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
		if err := absentSwarm(c.r.Method, segments); err != nil {
			return nil, err
		}
		return nil, denied("endpoints.unknown", "", fmt.Sprintf("%s %s is not an endpoint that may be used", method(c.r), body.Shorten(raw)),
			"the endpoints of docs/engine-proxy.md")
	}
	if c.version, err = c.engine.Negotiate(c.ctx, v); err != nil {
		return nil, err
	}
	if c.version < rt.since {
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
	at := rt.at
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

// literally reports whether segments are those of a template, without escapes.
func literally(template []string, segments []segment) bool {
	return slices.EqualFunc(template, segments, func(want string, s segment) bool { return s.raw == want })
}
