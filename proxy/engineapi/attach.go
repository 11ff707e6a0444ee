package engineapi

import (
	"encoding/base64"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strings"

	"github.com/bermhq/berm/proxy/engineapi/body"

	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/proxy/engineapi/upstream"
)

func attachRoutes() []route {
	const one = "/containers/{id}"
	streams := []string{"detachKeys", "logs", "stream", "stdin", "stdout", "stderr"}
	return []route{
		{method: http.MethodPost, template: one + "/attach", query: streams, change: true, serve: attachContainer},
		{method: http.MethodGet, template: one + "/attach/ws", query: streams, change: true, serve: attachWS},
		{method: http.MethodPost, template: one + "/resize", query: []string{"h", "w"}, serve: resizeContainer},
		{method: http.MethodGet, template: one + "/logs", query: []string{"follow", "stdout", "stderr", "since", "until", "timestamps", "tail", "details"}, serve: containerLogs},
		{method: http.MethodGet, template: one + "/stats", query: []string{"stream", "one-shot"}, serve: containerStats},
		{method: http.MethodGet, template: one + "/top", query: []string{"ps_args"}, serve: containerTop},
		{method: http.MethodGet, template: one + "/changes", serve: containerChanges},
		{method: http.MethodPost, template: one + "/wait", query: []string{"condition"}, serve: waitContainer},
	}
}

// attachAsked returns the container of an attach, and its parameters, written anew.
func attachAsked(c *call) (id string, query url.Values, err error) {
	query = url.Values{}
	for _, name := range []string{"logs", "stream", "stdin", "stdout", "stderr"} {
		if c.flag(name) {
			query.Set(name, "1")
		}
	}
	keys := c.query.Get("detachKeys")
	if keys != "" {
		query.Set("detachKeys", keys)
	}
	if err := detachKeys(keys); err != nil {
		return "", nil, err
	}
	if id, err = c.containerID(c.name); err != nil {
		return "", nil, err
	}
	return id, query, refuseUnconfined(c)
}

func attachContainer(c *call) error {
	id, query, err := attachAsked(c)
	if err != nil {
		return err
	}
	c.closeMessage = &closeMessage{}
	return c.hijack(upstream.Ask{Path: "/containers/" + id + "/attach", Query: query})
}

// attachWS passes a WebSocket's handshake on as one of its own; what follows is between
// the client and the engine.
func attachWS(c *call) error {
	h := c.r.Header
	key, err := base64.StdEncoding.DecodeString(h.Get("Sec-Websocket-Key"))
	if !strings.EqualFold(h.Get("Upgrade"), "websocket") || err != nil || len(key) != 16 || h.Get("Sec-Websocket-Version") != "13" {
		return proxy.Malformed("this is not the handshake of a WebSocket")
	}
	id, query, err := attachAsked(c)
	if err != nil {
		return err
	}
	return c.hijack(upstream.Ask{Path: "/containers/" + id + "/attach/ws", Query: query, Header: http.Header{
		"Connection": {"Upgrade"}, "Upgrade": {"websocket"}, "Sec-Websocket-Version": {"13"}, "Origin": {"http://docker"},
		"Sec-Websocket-Key": {base64.StdEncoding.EncodeToString(key)},
	}})
}

func resizeContainer(c *call) error {
	id, err := c.containerID(c.name)
	if err != nil {
		return err
	}
	query, err := consoleSize(c)
	if err != nil {
		return err
	}
	return c.forward(upstream.Ask{Path: "/containers/" + id + "/resize", Query: query}, false)
}

// instant is a time as the engine takes it: RFC 3339, or seconds with a fraction, or a
// duration before now.
var instant = regexp.MustCompile(`^[-+0-9A-Za-z:.]{1,64}$`)

func containerLogs(c *call) error {
	if c.flag("details") {
		return denied("endpoints.query", "details", "details of logs show environment variables", "no details")
	}
	query := url.Values{}
	for _, name := range []string{"follow", "stdout", "stderr", "timestamps"} {
		if c.flag(name) {
			query.Set(name, "1")
		}
	}
	for _, name := range []string{"since", "until", "tail"} {
		if v := c.query.Get(name); v != "" {
			if !instant.MatchString(v) {
				return proxy.Malformed("the query parameter " + name + " is neither a time nor a number")
			}
			query.Set(name, v)
		}
	}
	id, err := c.containerID(c.name)
	if err != nil {
		return err
	}
	if query.Has("follow") {
		defer c.untilDrain()()
	}
	c.closeMessage = &closeMessage{}
	return c.forward(upstream.Ask{Path: "/containers/" + id + "/logs", Query: query}, true)
}

func containerStats(c *call) error {
	id, err := c.containerID(c.name)
	if err != nil {
		return err
	}
	query := url.Values{"stream": {"1"}}
	if c.query.Has("stream") && !c.flag("stream") {
		query.Set("stream", "0")
	}
	if c.flag("one-shot") && c.version >= 41 {
		query.Set("one-shot", "1")
	}
	defer c.untilDrain()()
	return c.forward(upstream.Ask{Path: "/containers/" + id + "/stats", Query: query}, true)
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

// containerTop lists a container's processes. The engine gives the options to the host's ps.
func containerTop(c *call) error {
	query := url.Values{}
	if args := c.query.Get("ps_args"); args != "" {
		if !slices.Contains(psArgs, args) && !psColumns.MatchString(args) {
			return denied("endpoints.query", "ps_args", "these options of ps are not known to show processes only", strings.Join(psArgs, ", ")+", or -o with names of columns")
		}
		query.Set("ps_args", args)
	}
	id, err := c.containerID(c.name)
	if err != nil {
		return err
	}
	return c.forward(upstream.Ask{Path: "/containers/" + id + "/top", Query: query}, false)
}

func containerChanges(c *call) error {
	id, err := c.containerID(c.name)
	if err != nil {
		return err
	}
	return c.forward(upstream.Ask{Path: "/containers/" + id + "/changes"}, false)
}

// waitContainer answers when the container's state is what was asked for; its header comes at once.
func waitContainer(c *call) error {
	query := url.Values{}
	if condition := c.query.Get("condition"); condition != "" {
		if !slices.Contains([]string{"not-running", "next-exit", "removed"}, condition) {
			return proxy.Malformed("invalid condition: " + body.Shorten(condition))
		}
		if c.version >= 30 {
			query.Set("condition", condition)
		}
	}
	id, err := c.containerID(c.name)
	if err != nil {
		return err
	}
	c.closeMessage = &closeMessage{form: textLine} // which clients take for an error, as it isn't JSON
	return c.forward(upstream.Ask{Path: "/containers/" + id + "/wait", Query: query}, true)
}
