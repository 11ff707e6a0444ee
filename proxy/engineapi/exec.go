package engineapi

import (
	"encoding/base64"
	"maps"
	"net/http"
	"regexp"
	"slices"
	"strings"

	"github.com/docker/docker/api/types/container"

	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/proxy/engineapi/upstream"
	"github.com/bermhq/berm/runtime"
)

const (
	maxExecArgs = 4096 // of a command's words and variables, each
	maxExecs    = 256  // of a container that run, or were never started: the engine keeps those
)

// execBody is the body of an exec's creation, with every field that clients send.
type execBody struct {
	container.ExecOptions
	LowerKeys string `json:"detachKeys,omitempty"` // as the Python client spells it; becomes DetachKeys
	Container string `json:",omitempty"`           // some clients repeat the path's; it isn't looked at
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
	var made struct {
		ID string `json:"Id"`
	}
	if err := c.engine.Post(c.ctx, c.version, "/containers/"+id+"/exec", nil, body, &made); err != nil {
		return err
	}
	c.about(made.ID)
	c.execs.put(made.ID, id)
	return c.answer(http.StatusCreated, made)
}

// execEnv judges an exec's variables and user, and gives the variables that it gets.
func execEnv(c *call, body *execBody) ([]string, error) {
	asked, unset := map[string]string{}, map[string]bool{}
	for _, e := range body.Env {
		name, value, set := strings.Cut(e, "=") // a name alone takes the container's variable away
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
	Hijack bool `json:"hijack,omitempty"` // options of the Node.js client, which no engine reads; so is the next
	Stdin  bool `json:"stdin,omitempty"`
}

// startExec runs an exec; unless it is to be detached, the connection becomes its streams.
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

// forwardExec asks the engine the same of an exec in a container of the caller's.
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

// attachWS passes a WebSocket's handshake on as one of its own; what follows is between
// the client and the engine.
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

// checkDetails refuses the details of a log that has variables by the engine's configuration:
// nothing tells whether the policy keeps them back.
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

// psArgs are options of ps that show no environment, as a BSD "e" does. What ps doesn't
// understand as it stands it reads again as BSD options, so that it's whole texts that
// are known, not letters.
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

// waitContainer answers when the container's state is what was asked for; its header comes at once.
func waitContainer(c *call, a upstream.Ask, _ string) error {
	if c.version < 30 {
		a.Query.Del("condition")
	}
	c.closeMessage = &closeMessage{form: textLine} // which clients take for an error, as it isn't JSON
	return c.forward(a, true)
}
