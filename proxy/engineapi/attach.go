package engineapi

import (
	"encoding/base64"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strings"
)

func attachRoutes() []route {
	const one = "/containers/{id}"
	streams := []string{"detachKeys", "logs", "stream", "stdin", "stdout", "stderr"}
	return []route{
		{method: http.MethodPost, template: one + "/attach", query: streams, change: true, serve: (*call).attach},
		{method: http.MethodGet, template: one + "/attach/ws", query: streams, change: true, serve: (*call).attachWS},
		{method: http.MethodPost, template: one + "/resize", query: []string{"h", "w"}, serve: (*call).resizeContainer},
		{method: http.MethodGet, template: one + "/logs", query: []string{"follow", "stdout", "stderr", "since", "until", "timestamps", "tail", "details"}, serve: (*call).logs},
		{method: http.MethodGet, template: one + "/stats", query: []string{"stream", "one-shot"}, serve: (*call).stats},
		{method: http.MethodGet, template: one + "/top", query: []string{"ps_args"}, serve: (*call).top},
		{method: http.MethodGet, template: one + "/changes", serve: (*call).changes},
		{method: http.MethodPost, template: one + "/wait", query: []string{"condition"}, serve: (*call).wait},
	}
}

// streamsAsked are the parameters of an attach, written anew.
func (c *call) streamsAsked() (url.Values, error) {
	query := url.Values{}
	for _, name := range []string{"logs", "stream", "stdin", "stdout", "stderr"} {
		if c.flag(name) {
			query.Set(name, "1")
		}
	}
	keys := c.query.Get("detachKeys")
	if keys != "" {
		query.Set("detachKeys", keys)
	}
	return query, detachKeys(keys)
}

func (c *call) attach() error {
	query, err := c.streamsAsked()
	if err != nil {
		return err
	}
	id, err := c.containerID(c.name)
	if err != nil {
		return err
	}
	if err := c.confined(); err != nil {
		return err
	}
	c.closeMessage = &closeMessage{}
	return c.hijack(ask{path: "/containers/" + id + "/attach", query: query})
}

// attachWS passes a WebSocket's handshake on as one of its own; what follows is between
// the client and the engine.
func (c *call) attachWS() error {
	h := c.r.Header
	key, err := base64.StdEncoding.DecodeString(h.Get("Sec-Websocket-Key"))
	if !strings.EqualFold(h.Get("Upgrade"), "websocket") || err != nil || len(key) != 16 || h.Get("Sec-Websocket-Version") != "13" {
		return malformed("this is not the handshake of a WebSocket")
	}
	query, err := c.streamsAsked()
	if err != nil {
		return err
	}
	id, err := c.containerID(c.name)
	if err != nil {
		return err
	}
	if err := c.confined(); err != nil {
		return err
	}
	return c.hijack(ask{path: "/containers/" + id + "/attach/ws", query: query, header: http.Header{
		"Connection": {"Upgrade"}, "Upgrade": {"websocket"}, "Sec-Websocket-Version": {"13"}, "Origin": {"http://docker"},
		"Sec-Websocket-Key": {base64.StdEncoding.EncodeToString(key)},
	}})
}

func (c *call) resizeContainer() error {
	id, err := c.containerID(c.name)
	if err != nil {
		return err
	}
	query, err := c.size()
	if err != nil {
		return err
	}
	return c.forward(ask{path: "/containers/" + id + "/resize", query: query}, false)
}

// instant is a time as the engine takes it: RFC 3339, or seconds with a fraction, or a
// duration before now.
var instant = regexp.MustCompile(`^[-+0-9A-Za-z:.]{1,64}$`)

func (c *call) logs() error {
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
				return malformed("the query parameter " + name + " is neither a time nor a number")
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
	return c.forward(ask{path: "/containers/" + id + "/logs", query: query}, true)
}

func (c *call) stats() error {
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
	return c.forward(ask{path: "/containers/" + id + "/stats", query: query}, true)
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

// top lists a container's processes. The engine gives the options to the host's ps.
func (c *call) top() error {
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
	return c.forward(ask{path: "/containers/" + id + "/top", query: query}, false)
}

func (c *call) changes() error {
	id, err := c.containerID(c.name)
	if err != nil {
		return err
	}
	return c.forward(ask{path: "/containers/" + id + "/changes"}, false)
}

// wait answers when the container's state is what was asked for; its header comes at once.
func (c *call) wait() error {
	query := url.Values{}
	if condition := c.query.Get("condition"); condition != "" {
		if !slices.Contains([]string{"not-running", "next-exit", "removed"}, condition) {
			return malformed("invalid condition: " + shorten(condition))
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
	return c.forward(ask{path: "/containers/" + id + "/wait", query: query}, true)
}
