package engineapi

import (
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strings"

	"github.com/bermhq/berm/proxy/engineapi/body"

	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/proxy/engineapi/upstream"

	"github.com/bermhq/berm/lifecycle"
)

func containerRoutes() []route {
	const one = "/containers/{id}"
	post := func(what string, query ...string) route {
		return route{method: http.MethodPost, template: one + "/" + what, query: query, change: true}
	}
	with := func(rt route, serve func(*call) error) route {
		rt.serve = serve
		return rt
	}
	return []route{
		{method: http.MethodGet, template: "/containers/json", query: []string{"all", "limit", "size", "filters", "before", "since", "trunc_cmd"}, serve: listContainers},
		{method: http.MethodGet, template: one + "/json", query: []string{"size"}, serve: inspectContainer},
		with(post("stop", "t", "signal"), stopContainer),
		with(post("kill", "signal"), signalContainer),
		with(post("pause"), signalContainer),
		with(post("unpause"), signalContainer),
		with(post("rename", "name"), renameContainer),
		{method: http.MethodDelete, template: one, query: []string{"v", "force", "link"}, change: true, serve: removeContainer},
		{method: http.MethodPost, template: "/containers/prune", query: []string{"filters"}, change: true, since: 25, serve: pruneContainers},
		{method: http.MethodGet, template: one + "/export", serve: exportContainer},
		{method: http.MethodHead, template: one + "/archive", query: []string{"path"}, serve: statArchive},
		{method: http.MethodGet, template: one + "/archive", query: []string{"path"}, serve: getArchive},
		{method: http.MethodPut, template: one + "/archive", query: []string{"path", "noOverwriteDirNonDir", "copyUIDGID"}, body: tarBody, change: true, serve: putArchive},
	}
}

// noImageID is no image's.
var noImageID = "sha256:" + strings.Repeat("0", 64)

// listContainers has the engine leave out what isn't the caller's.
func listContainers(c *call) error {
	f, err := c.filters("ancestor", "before", "since", "exited", "expose", "health", "id", "label", "name", "network", "publish", "status", "volume")
	if err != nil {
		return err
	}
	query := url.Values{}
	for _, name := range []string{"all", "size"} {
		if c.flag(name) {
			query.Set(name, "1")
		}
	}
	if n, err := c.number("limit"); err != nil || n < -1 {
		return proxy.Malformed(`the query parameter "limit" is not a number of containers`)
	} else if n > 0 {
		query.Set("limit", c.query.Get("limit"))
	}
	for _, name := range []string{"before", "since"} {
		if ref := c.query.Get(name); ref != "" {
			f[name] = append(f[name], ref)
		}
		for i, ref := range f[name] { // or it would tell whether somebody else's is there
			if f[name][i], err = c.containerID(ref); err != nil {
				return err
			}
		}
	}
	if err := byAskedPath(c, f); err != nil {
		return err
	}
	for i, ref := range f["ancestor"] { // or it would tell what others' images are named, or their IDs
		img, err := seenImage(c, ref)
		switch {
		case err != nil:
			return err
		case img == nil:
			f["ancestor"][i] = noImageID
		default:
			f["ancestor"][i] = img.ID
		}
	}
	query.Set("filters", c.onlyOwn(f).String())
	return listOwn(c, lifecycle.ObjectContainer, "/containers/json", query)
}

// inspectContainer shows a container as it was asked for, without the values of variables
// that the policy keeps back.
func inspectContainer(c *call) error {
	if _, err := c.engine.HostInfo(c.ctx, c.version); err != nil {
		c.log.DebugContext(c.ctx, "engine_api_info_failed", "error", err) // the profile is shown
	}
	ct, raw, err := c.container(c.name)
	if err != nil {
		return err
	}
	if c.flag("size") {
		query := url.Values{"size": {"1"}}
		if err := c.engine.Get(c.ctx, c.version, "/containers/"+ct.ID+"/json", query, &raw); err != nil {
			return err
		}
		raw = c.engine.WithoutProfile(raw)
	}
	values := restarted(c, ct.ID)
	if env, changed := redactEnv(c, ct.Config.Env); changed {
		values["Config"] = replacing{"Env": env}
	}
	if raw = (&listed{Labels: ct.Config.Labels, Mounts: ct.Mounts}).shown(raw); len(values) > 0 {
		if raw, err = values.in(raw); err != nil {
			return err
		}
	}
	return c.answer(http.StatusOK, raw)
}

// redacted stands for what the caller may not see.
const redacted = "[redacted]"

// redactEnv gives an environment as the caller may see it, and tells whether that differs.
func redactEnv(c *call, env []string) (shown []string, changed bool) {
	shown = make([]string, len(env))
	for i, e := range env {
		name, _, _ := strings.Cut(e, "=")
		shown[i] = e
		if c.rules.Redacted(c.caller.Profile, name) {
			shown[i], changed = name+"="+redacted, true
		}
	}
	return shown, changed
}

// signalContainer kills, pauses or resumes.
func signalContainer(c *call) error {
	id, err := c.containerID(c.name)
	if err != nil {
		return err
	}
	query := url.Values{}
	if signal := c.query.Get("signal"); signal != "" {
		if !signalName.MatchString(signal) {
			return proxy.Malformed("Invalid signal: " + body.Shorten(signal))
		}
		query.Set("signal", signal)
	}
	what := c.route.segments[len(c.route.segments)-1]
	a := upstream.Ask{Path: "/containers/" + id + "/" + what, Query: query}
	if what == "kill" {
		return killContainer(c, a, id)
	}
	return c.forward(a, false)
}

func renameContainer(c *call) error {
	id, err := c.containerID(c.name)
	if err != nil {
		return err
	}
	name := strings.TrimPrefix(c.query.Get("name"), "/")
	if !objectName.MatchString(name) {
		return proxy.Malformed("Invalid container name (" + body.Shorten(name) + "), only [a-zA-Z0-9][a-zA-Z0-9_.-] are allowed")
	}
	if err := errors.Join(idName(name), sharedName(name)); err != nil {
		return err
	}
	err = c.engine.Post(c.ctx, c.version, "/containers/"+id+"/rename", url.Values{"name": {name}}, nil, nil)
	if upstream.StatusOf(err) == http.StatusConflict {
		return nameTaken(name)
	}
	if err != nil {
		return err
	}
	return c.done()
}

// nameTaken doesn't say by whom, as the engine would.
func nameTaken(name string) error {
	return conflict(fmt.Sprintf("Conflict. The container name %q is already in use. You have to remove (or rename) that container to be able to reuse that name.", "/"+name))
}

func removeContainer(c *call) error {
	if c.flag("link") {
		return denied("endpoints.query", "link", "links between containers can't be removed, as there are none", "no link parameter")
	}
	id, err := c.containerID(c.name)
	if err != nil {
		return err
	}
	query := url.Values{}
	for _, name := range []string{"v", "force"} {
		if c.flag(name) {
			query.Set(name, "1")
		}
	}
	if c.flag("force") {
		if _, err := c.restarts.Stopping(c.ctx, id, true); err != nil {
			return err
		}
	}
	c.transfers.end(id)
	resp, err := c.ask(upstream.Ask{Path: "/containers/" + id, Query: query}) //nolint:bodyclose // relay closes it
	if err != nil {
		return err
	}
	if resp.StatusCode < 300 || resp.StatusCode == http.StatusNotFound {
		c.known.drop(id)
	}
	return c.relay(resp, false)
}
