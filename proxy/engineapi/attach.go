package engineapi

import (
	"encoding/base64"
	"net/http"
	"regexp"
	"slices"
	"strings"

	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/proxy/engineapi/upstream"
)

func attachRoutes() []route {
	const one = "/containers/{id}"
	streams := params{"detachKeys": detachKeys, "logs": boolean, "stream": boolean, "stdin": boolean, "stdout": boolean, "stderr": boolean}
	return []route{
		{method: http.MethodPost, template: one + "/attach", query: streams, change: true, serve: inContainer(attachContainer)},
		{method: http.MethodGet, template: one + "/attach/ws", query: streams, change: true, serve: inContainer(attachWS)},
		{method: http.MethodPost, template: one + "/resize", query: consoleSize, serve: forwardContainer},
		{method: http.MethodGet, template: one + "/logs", query: params{
			"follow": boolean, "stdout": boolean, "stderr": boolean, "timestamps": boolean, "since": moment, "until": moment, "tail": moment, "details": noDetails,
		}, serve: onContainer(containerLogs)},
		{method: http.MethodGet, template: one + "/stats", query: params{"stream": boolean, "one-shot": boolean}, serve: onContainer(containerStats)},
		{method: http.MethodGet, template: one + "/top", query: params{"ps_args": psOptions}, serve: forwardContainer},
		{method: http.MethodGet, template: one + "/changes", serve: forwardContainer},
		{method: http.MethodPost, template: one + "/wait", query: params{"condition": like(waitCondition, "invalid condition")}, serve: onContainer(waitContainer)},
	}
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

// noDetails refuses the details of logs.
func noDetails(name, value string) (string, error) {
	if isTrue(value) {
		return "", denied("endpoints.query", name, "details of logs show environment variables", "no details")
	}
	return "", nil
}

func containerLogs(c *call, a upstream.Ask, _ string) error {
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
