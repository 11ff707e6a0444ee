package engineapi

import (
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"strings"

	"github.com/bermhq/berm/proxy/engineapi/body"

	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/proxy/engineapi/upstream"

	"github.com/bermhq/berm/lifecycle"
)

// limit passes on how many containers a list may have.
func limit(name, value string) (string, error) {
	n, err := strconv.ParseInt(value, 10, 64)
	switch {
	case err != nil || n < -1:
		return "", proxy.Malformed(fmt.Sprintf("the query parameter %q is not a number of containers", name))
	case n <= 0:
		return "", nil
	}
	return value, nil
}

// noImageID is no image's.
var noImageID = "sha256:" + strings.Repeat("0", 64)

// listContainers has the engine leave out what isn't the caller's.
func listContainers(c *call) error {
	for _, name := range []string{"before", "since"} {
		if ref := c.query.Get(name); ref != "" {
			c.filter[name] = append(c.filter[name], ref)
		}
		for i, ref := range c.filter[name] { // or it would tell whether somebody else's is there
			id, err := c.containerID(ref)
			if err != nil {
				return err
			}
			c.filter[name][i] = id
		}
	}
	if err := byAskedPath(c, c.filter); err != nil {
		return err
	}
	for i, ref := range c.filter["ancestor"] { // or it would tell what others' images are named, or their IDs
		img, err := seenImage(c, ref)
		switch {
		case err != nil:
			return err
		case img == nil:
			c.filter["ancestor"][i] = noImageID
		default:
			c.filter["ancestor"][i] = img.ID
		}
	}
	c.passed.Set("filters", c.onlyOwn(c.filter).String())
	return listOwn(c, lifecycle.ObjectContainer, c.passed)
}

// inspectContainer shows a container as it was asked for, without the values of variables
// that the policy keeps back.
func inspectContainer(c *call) error {
	if !c.engine.KnowsHost() {
		if _, err := c.engine.HostInfo(c.ctx, c.version); err != nil {
			c.log.DebugContext(c.ctx, "engine_api_info_failed", "error", err) // the profile is shown
		}
	}
	ct, raw, err := c.container(c.name)
	if err != nil {
		return err
	}
	if c.flag("size") {
		if err := c.engine.Get(c.ctx, c.version, "/containers/"+ct.ID+"/json", c.passed, &raw); err != nil {
			return err
		}
		raw = c.engine.WithoutProfile(raw)
	}
	values := restarted(c, ct.ID)
	if env, changed := redactEnv(c, ct.Config.Env); changed {
		values["Config"] = replacing{"Env": env}
	}
	if raw = shown(raw, ct.Config.Labels, ct.Mounts); len(values) > 0 {
		if raw, err = values.in(raw); err != nil {
			return err
		}
	}
	return answerShown(c, http.StatusOK, raw, "Config", "Labels")
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

func renameContainer(c *call, _ upstream.Ask, id string) error {
	name := strings.TrimPrefix(c.query.Get("name"), "/")
	if !objectName.MatchString(name) {
		return proxy.Malformed("Invalid container name (" + body.Shorten(name) + "), only [a-zA-Z0-9][a-zA-Z0-9_.-] are allowed")
	}
	if err := errors.Join(checkIDName(c, lifecycle.ObjectContainer, name), sharedName(name)); err != nil {
		return err
	}
	err := c.engine.Post(c.ctx, c.version, "/containers/"+id+"/rename", url.Values{"name": {name}}, nil, nil)
	if upstream.StatusOf(err) == http.StatusConflict {
		return nameTaken(name)
	}
	if err != nil {
		return err
	}
	return c.status(http.StatusNoContent)
}

// nameTaken doesn't say by whom, as the engine would.
func nameTaken(name string) error {
	return conflict(fmt.Sprintf("Conflict. The container name %q is already in use. You have to remove (or rename) that container to be able to reuse that name.", "/"+name))
}

// noLinks refuses to remove links between containers.
func noLinks(name, value string) (string, error) {
	if isTrue(value) {
		return "", denied("endpoints.query", name, "links between containers can't be removed, as there are none", "no link parameter")
	}
	return "", nil
}

func removeContainer(c *call, a upstream.Ask, id string) error {
	if c.flag("force") {
		if _, err := c.restarts.Stopping(c.ctx, id, true); err != nil {
			return err
		}
	}
	c.transfers.end(id)
	resp, err := c.ask(a) //nolint:bodyclose // relay closes it
	if err != nil {
		return err
	}
	if resp.StatusCode < 300 || resp.StatusCode == http.StatusNotFound {
		c.known.drop(id)
	}
	return c.relay(resp, false)
}
