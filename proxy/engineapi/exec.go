package engineapi

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"github.com/bermhq/berm/proxy/engineapi/upstream"

	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/runtime"
)

func execRoutes() []route {
	return []route{
		{method: http.MethodPost, template: "/containers/{id}/exec", body: jsonBody, change: true, serve: createExec},
		{method: http.MethodPost, template: "/exec/{id}/start", body: jsonBody, change: true, serve: startExec},
		{method: http.MethodPost, template: "/exec/{id}/resize", query: []string{"h", "w"}, serve: resizeExec},
		{method: http.MethodGet, template: "/exec/{id}/json", serve: inspectExec},
	}
}

const (
	maxExecArgs = 4096 // of a command's words and variables, each
	maxExecs    = 256  // of a container that run, or were never started: the engine keeps those
)

// execBody is the body of an exec's creation, with every field that clients send.
type execBody struct {
	User         string   `json:"User"`
	Privileged   bool     `json:"Privileged"`
	Tty          bool     `json:"Tty"`
	ConsoleSize  *[2]uint `json:"ConsoleSize,omitempty"`
	AttachStdin  bool     `json:"AttachStdin"`
	AttachStderr bool     `json:"AttachStderr"`
	AttachStdout bool     `json:"AttachStdout"`
	Detach       bool     `json:"Detach"`
	DetachKeys   string   `json:"DetachKeys"`
	LowerKeys    string   `json:"detachKeys,omitempty"` // as the Python client spells it; becomes DetachKeys
	Env          []string `json:"Env"`
	WorkingDir   string   `json:"WorkingDir"`
	Cmd          []string `json:"Cmd"`
	Container    string   `json:"Container,omitempty"` // some clients repeat the path's; it isn't looked at
}

// createExec makes an exec in a container of the caller's. Its variables and user are
// judged as those of the container were.
func createExec(c *call) error {
	if err := c.operation(policy.OpExec); err != nil {
		return err
	}
	var body execBody
	if err := c.decode(&body); err != nil {
		return err
	}
	if len(body.Cmd) == 0 || len(body.Cmd) > maxExecArgs || len(body.Env) > maxExecArgs {
		return proxy.Malformed("No exec command specified, or too long a one")
	}
	if body.LowerKeys != "" {
		body.DetachKeys, body.LowerKeys = body.LowerKeys, ""
	}
	if err := detachKeys(body.DetachKeys); err != nil {
		return err
	}
	if body.WorkingDir != "" && (body.WorkingDir[0] != '/' || len(body.WorkingDir) > 4096 || runtime.KernelPath(body.WorkingDir)) {
		return proxy.Malformed("the working directory is not an absolute path, or is in a file system of the kernel")
	}
	if c.version < 42 {
		body.ConsoleSize = nil
	}
	ct, _, err := c.container(c.name)
	if err != nil {
		return err
	}
	leave, err := execRoom(c, ct)
	if err != nil {
		return err
	}
	defer leave()
	id := ct.ID
	if err := refuseUnconfined(c); err != nil {
		return err
	}
	if body.Env, err = execEnv(c, &body); err != nil {
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

// decode reads the call's body, one strict JSON object, in which null is what is left out.
func (c *call) decode(v any) error {
	return proxy.DecodeNulls(c.w, c.r, proxy.MaxBody, v)
}

// detachKeys checks a key sequence such as "ctrl-p,ctrl-q".
func detachKeys(keys string) error {
	if len(keys) > 64 || !printable(keys) {
		return proxy.Malformed("the detach keys are none")
	}
	return nil
}

// startExec runs an exec; unless it is to be detached, the connection becomes its streams.
func startExec(c *call) error {
	if err := c.operation(policy.OpExec); err != nil {
		return err
	}
	var body struct {
		Detach      bool     `json:"Detach"`
		Tty         bool     `json:"Tty"`
		ConsoleSize *[2]uint `json:"ConsoleSize,omitempty"`
	}
	if err := c.decode(&body); err != nil {
		return err
	}
	if c.version < 42 {
		body.ConsoleSize = nil
	}
	id, _, err := execID(c, c.name)
	if err != nil {
		return err
	}
	if err := refuseUnconfined(c); err != nil {
		return err
	}
	b, err := json.Marshal(body)
	if err != nil {
		return fmt.Errorf("encode the request: %w", err)
	}
	a := upstream.Ask{Path: "/exec/" + id + "/start", Body: bytes.NewReader(b), Length: int64(len(b)), Header: http.Header{"Content-Type": {"application/json"}}}
	if body.Detach {
		return c.forward(a, false)
	}
	c.closeMessage = &closeMessage{form: framed}
	if body.Tty {
		c.closeMessage.form = terminal
	}
	return c.hijack(a)
}

func resizeExec(c *call) error {
	id, _, err := execID(c, c.name)
	if err != nil {
		return err
	}
	query, err := consoleSize(c)
	if err != nil {
		return err
	}
	return c.forward(upstream.Ask{Path: "/exec/" + id + "/resize", Query: query}, false)
}

// consoleSize reads a terminal's height and width.
func consoleSize(c *call) (url.Values, error) {
	query := url.Values{}
	for _, name := range []string{"h", "w"} {
		n, err := c.number(name)
		if err != nil || n < 0 || n > math.MaxUint16 || !c.query.Has(name) {
			return nil, proxy.Malformed("a terminal's size is not a number of lines and one of columns")
		}
		query.Set(name, strconv.FormatInt(n, 10))
	}
	return query, nil
}

func inspectExec(c *call) error {
	id, _, err := execID(c, c.name)
	if err != nil {
		return err
	}
	return c.forward(upstream.Ask{Path: "/exec/" + id + "/json"}, false)
}
