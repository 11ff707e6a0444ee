package engineapi

import (
	"encoding/base64"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/docker/docker/api/types/container"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/proxy/engineapi/body"
	"github.com/bermhq/berm/proxy/engineapi/upstream"
	"github.com/bermhq/berm/runtime"
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

// noImageID is an ID that no image has.
var noImageID = "sha256:" + strings.Repeat("0", 64)

// listContainers lists the caller's containers.
func listContainers(c *call) error {
	if err := roomForSizes(c); err != nil {
		return err
	}
	for _, name := range []string{"before", "since"} {
		if ref := c.query.Get(name); ref != "" {
			c.filter[name] = append(c.filter[name], ref)
		}
		for i, ref := range c.filter[name] { // the filter must not reveal another caller's container
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
	for i, ref := range c.filter["ancestor"] { // the filter must not reveal names or IDs of others' images
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

// roomForSizes bounds the calls that have the engine measure containers.
func roomForSizes(c *call) error {
	if !c.flag("size") {
		return nil
	}
	return c.untilEnd(c.enter("looks at sizes", maxSizes))
}

// inspectContainer shows a container with the bind paths that were asked for, and without the values of
// variables that the policy redacts.
func inspectContainer(c *call) error {
	if err := roomForSizes(c); err != nil {
		return err
	}
	if !c.engine.KnowsHost() {
		if _, err := c.engine.HostInfo(c.ctx, c.version); err != nil {
			c.log.DebugContext(c.ctx, "engine_api_info_failed", "error", err) // shows Berm's seccomp profile
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

// redacted replaces values that the caller may not see.
const redacted = "[redacted]"

// redactEnv returns an environment as the caller may see it, and whether any value is redacted.
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

// nameTaken returns the engine's error for a name in use, without the ID of the container that has it.
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

const (
	maxExecArgs = 4096 // of a command's words and variables, each
	maxExecs    = 256  // of a container that run, or were never started: the engine keeps those
)

// execBody is the body of an exec's creation, with every field that clients send.
type execBody struct {
	container.ExecOptions
	LowerKeys string `json:"detachKeys,omitempty"` // as the Python client spells it; becomes DetachKeys
	Container string `json:",omitempty"`           // some clients repeat the ID of the path; ignored
}

// createExec makes an exec in a container of the caller's. Its variables and user are
// judged as those of the container were.
func createExec(c *call, body *execBody) error {
	if len(body.Cmd) == 0 || len(body.Cmd) > maxExecArgs || len(body.Env) > maxExecArgs {
		return proxy.Malformed("No exec command specified, or too long a one")
	}
	if body.LowerKeys != "" {
		body.DetachKeys, body.LowerKeys = body.LowerKeys, ""
	}
	if _, err := detachKeys("", body.DetachKeys); err != nil {
		return err
	}
	if body.WorkingDir != "" && (body.WorkingDir[0] != '/' || len(body.WorkingDir) > 4096 || runtime.KernelPath(body.WorkingDir)) {
		return proxy.Malformed("the working directory is not an absolute path, or is in a file system of the kernel")
	}
	if c.version < 42 {
		body.ConsoleSize = nil
	}
	ct, leave, err := execRoom(c, c.name)
	if err := c.untilEnd(leave, err); err != nil {
		return err
	}
	id := ct.ID
	if err := refuseUnconfined(c); err != nil {
		return err
	}
	if body.Env, err = execEnv(c, body); err != nil {
		return err
	}
	body.Container = ""
	var made container.ExecCreateResponse
	if err := c.engine.Post(c.ctx, c.version, "/containers/"+id+"/exec", nil, body, &made); err != nil {
		return err
	}
	c.about(made.ID)
	c.execs.put(made.ID, id)
	return c.answer(http.StatusCreated, made)
}

// execEnv judges an exec's variables and user, and returns the variables for the engine.
func execEnv(c *call, body *execBody) ([]string, error) {
	asked, unset := map[string]string{}, map[string]bool{}
	for _, e := range body.Env {
		name, value, set := strings.Cut(e, "=") // a name alone unsets the container's variable
		asked[name], unset[name] = value, !set
	}
	env, _, err := c.rules.ContainerExec(c.caller.Profile, body.Privileged, body.User, asked)
	if err := c.judged(err); err != nil {
		return nil, err
	}
	if err != nil {
		env = asked // mode audit
	}
	list := make([]string, 0, len(env))
	for _, name := range slices.Sorted(maps.Keys(env)) {
		if unset[name] && env[name] == "" {
			list = append(list, name)
			continue
		}
		list = append(list, name+"="+env[name])
	}
	return list, nil
}

// execStartBody is the body of an exec's start.
type execStartBody struct {
	container.ExecStartOptions
	Hijack bool `json:"hijack,omitempty"` // the Node.js client sends Hijack and Stdin, which no engine reads
	Stdin  bool `json:"stdin,omitempty"`
}

// startExec starts an exec. Unless the exec is detached, the connection carries its streams.
func startExec(c *call, body *execStartBody) error {
	if c.version < 42 {
		body.ConsoleSize = nil
	}
	if err := ownExec(c, c.name); err != nil {
		return err
	}
	if err := refuseUnconfined(c); err != nil {
		return err
	}
	a := c.askFor(c.name)
	a.JSON = body.ExecStartOptions
	if body.Detach {
		return c.forward(a, false)
	}
	c.closeMessage = &closeMessage{form: framed}
	if body.Tty {
		c.closeMessage.form = terminal
	}
	return c.hijack(a)
}

// forwardExec forwards a call on an exec in a container of the caller's.
func forwardExec(c *call) error {
	if err := ownExec(c, c.name); err != nil {
		return err
	}
	return c.forward(c.askFor(c.name), false)
}

func attachContainer(c *call, a upstream.Ask, _ string) error {
	c.closeMessage = &closeMessage{}
	return c.hijack(a)
}

// attachWS sends the engine a new handshake with the client's key. After that, it copies the WebSocket's
// bytes in both directions.
func attachWS(c *call, a upstream.Ask, _ string) error {
	h := c.r.Header
	key, err := base64.StdEncoding.DecodeString(h.Get("Sec-Websocket-Key"))
	if !strings.EqualFold(h.Get("Upgrade"), "websocket") || err != nil || len(key) != 16 || h.Get("Sec-Websocket-Version") != "13" {
		return proxy.Malformed("this is not the handshake of a WebSocket")
	}
	a.Header = http.Header{
		"Connection": {"Upgrade"}, "Upgrade": {"websocket"}, "Sec-Websocket-Version": {"13"}, "Origin": {"http://docker"},
		"Sec-Websocket-Key": {base64.StdEncoding.EncodeToString(key)},
	}
	return c.hijack(a)
}

// checkDetails refuses the details of a log with variables, which the engine's configuration can add:
// they may be variables that the policy redacts.
func checkDetails(c *call, id string) error {
	ct, _, err := c.container(id)
	if err != nil {
		return err
	}
	for name := range ct.HostConfig.LogConfig.Config {
		if strings.HasPrefix(name, "env") {
			return denied("endpoints.query", "details", "details of this log show environment variables", "no details")
		}
	}
	return nil
}

func containerLogs(c *call, a upstream.Ask, id string) error {
	if a.Query.Has("details") {
		if err := c.judged(checkDetails(c, id)); err != nil {
			return err
		}
	}
	if a.Query.Has("follow") {
		defer c.untilDrain()()
	}
	c.closeMessage = &closeMessage{}
	return c.forward(a, true)
}

func containerStats(c *call, a upstream.Ask, _ string) error {
	switch {
	case !c.query.Has("stream"):
		a.Query.Set("stream", "1")
	case !c.flag("stream"):
		a.Query.Set("stream", "0")
	}
	if c.version < 41 {
		a.Query.Del("one-shot")
	}
	defer c.untilDrain()()
	return c.forward(a, true)
}

// psArgs are options of ps that don't show the environment; BSD's "e" does. ps reads options that it
// doesn't understand again as BSD options, so the list has whole texts and not letters.
var psArgs = []string{
	"-e", "-A", "-f", "-F", "-l", "-ef", "-eF", "-el", "-efl", "-elf", "-fe", "-efww",
	"aux", "auxw", "auxww", "axu", "faux", "auxf", "ax", "axf", "axjf", "axl", "-aux", "-ax", "u", "l",
}

const psColumn = `(pid|ppid|pgid|sid|uid|user|gid|group|comm|args|cmd|etime|time|stat|state|rss|vsz|pcpu|pmem|%cpu|%mem|nlwp|pri|ni|tty|start|stime)`

var psColumns = regexp.MustCompile(`^(-o|-eo|-Ao|-e -o|-A -o|axo|ax o|o) ?` + psColumn + `(,` + psColumn + `)*$`)

// psOptions checks the options of a list of processes, which the engine gives to the host's ps.
func psOptions(name, value string) (string, error) {
	if !slices.Contains(psArgs, value) && !psColumns.MatchString(value) {
		return "", denied("endpoints.query", name, "these options of ps are not known to show processes only", strings.Join(psArgs, ", ")+", or -o with names of columns")
	}
	return value, nil
}

var waitCondition = regexp.MustCompile(`^(not-running|next-exit|removed)$`)

// waitContainer answers once the container has the state that was asked for. It sends the header at once.
func waitContainer(c *call, a upstream.Ask, _ string) error {
	if c.version < 30 {
		a.Query.Del("condition")
	}
	c.closeMessage = &closeMessage{form: textLine} // which clients take for an error, as it isn't JSON
	return c.forward(a, true)
}
