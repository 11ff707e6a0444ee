package engineapi

import (
	"cmp"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/distribution/reference"
	"golang.org/x/sync/semaphore"

	"github.com/bermhq/berm/proxy/engineapi/body"
	"github.com/bermhq/berm/proxy/engineapi/upstream"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/proxy"
)

const (
	maxContext   = 1 << 30 // of a build, in bytes
	maxBases     = 32      // images that a build reads
	maxBuildTags = 16
	maxBuilds    = 4  // of a tenant at once
	maxWaiting   = 32 // builds of a tenant that wait for their turn
	maxBuildTime = time.Hour
	lastWords    = 10 * time.Second // to tell a client that its build has run out of time

	tellsID upstream.Version = 30 // the first that reports the ID of a built image
)

// never refuses a parameter that has a value, unless the value means the default.
func never(name, value string) (string, error) {
	if name == "remote" && value == "client-session" {
		return "", noBuildKit(name)
	}
	if !slices.Contains([]string{"0", "false", "[]", "{}", "null", "default"}, value) {
		return "", denied("build.options", name, fmt.Sprintf("the parameter %q of a build is refused", name), "none")
	}
	return "", nil
}

// builder refuses all builders but the classic one.
func builder(name, value string) (string, error) {
	if value != "1" {
		return "", noBuildKit(name)
	}
	return value, nil
}

// buildTurn waits until the tenant may have one more build. The caller calls over when the build ends.
func buildTurn(c *call) (over func(), err error) {
	waiting, left := c.limits.enter("waiting builds "+c.caller.Tenant, 1)
	defer left()
	if waiting > maxWaiting {
		return nil, full("%d builds wait, which is the most that one tenant may have", maxWaiting)
	}
	turns, _ := c.builds.turns.LoadOrStore(c.caller.Tenant, semaphore.NewWeighted(maxBuilds))
	if err := turns.(*semaphore.Weighted).Acquire(c.ctx, 1); err != nil {
		return nil, err
	}
	return sync.OnceFunc(func() { turns.(*semaphore.Weighted).Release(1) }), nil
}

// buildImage builds an image of the caller's by the engine's classic builder, from files in the
// request. The image gets its names only once it is verified.
func buildImage(c *call) error {
	if err := c.untilEnd(buildTurn(c)); err != nil {
		return err
	}
	args, err := buildArgs(c)
	if err != nil {
		return err
	}
	query, names, err := buildQuery(c, args)
	if err != nil {
		return err
	}
	labels, err := buildLabels(c)
	if err != nil {
		return err
	}
	setJSON(query, "labels", labels)
	if err := c.untilEnd(c.room("images", 1)); err != nil {
		return err
	}
	defer buildBefore(c, labels)()
	lease := c.spooled.Lease(c.caller.Tenant)
	defer lease.Release()
	files, err := spool(c, args, lease)
	if err != nil {
		return err
	}
	defer func() { _ = files.Close() }()
	info, err := files.Stat()
	if err != nil {
		return err
	}
	resp, err := c.open(upstream.Ask{
		Path: "/build", Query: query, Header: http.Header{"Content-Type": {"application/x-tar"}}, Body: io.NewSectionReader(files, 0, info.Size()), Length: info.Size(),
		Version: max(c.version, tellsID),
	})
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }()
	c.head(resp)
	id := relayBuild(c, resp.Body)
	if id == "" {
		return nil // it failed, and the caller has been told why
	}
	img, err := lookUpImage(c, id)
	if err == nil {
		err = nameVerified(c, img, "verify.build", labels, names, func(name string) {
			if !c.flag("q") {
				c.tell(buildMessage{Stream: "Successfully tagged " + name + "\n"})
			}
		})
	}
	switch {
	case err != nil:
		c.tell(buildMessage{Error: proxyText(err)})
	case c.flag("q"):
		c.tell(buildMessage{Stream: id + "\n"})
	}
	return nil
}

// buildBefore ends the call after maxBuildTime, or when the image expires if that is earlier. It also
// bounds reads from the client and writes to it. The caller calls done at the end.
func buildBefore(c *call, labels map[string]string) (done func()) {
	until := time.Now().Add(maxBuildTime)
	if expires, err := time.Parse(time.RFC3339Nano, labels[lifecycle.LabelExpiresAt]); err == nil && expires.Before(until) {
		until = expires
	}
	client := c.ctx
	ctx, cancel := context.WithDeadline(client, until)
	c.ctx = ctx
	conn := http.NewResponseController(c.w)
	_ = conn.SetReadDeadline(until) // an in-process writer has none
	_ = conn.SetWriteDeadline(until.Add(lastWords))
	return func() {
		cancel()
		c.ctx = client
		_ = conn.SetWriteDeadline(time.Time{}) // net/http resets the read deadline, which bounds the rest of the body
	}
}

// buildQuery judges the parameters. It returns those for the engine, and the names of the image.
func buildQuery(c *call, args map[string]string) (url.Values, []reference.NamedTagged, error) {
	p, err := c.profile()
	if err != nil {
		return nil, nil, err
	}
	query := c.passed
	params := commandLimits(p)
	maps.Copy(params, map[string]string{
		"version": "1", "rm": "1", "forcerm": "1", "shmsize": strconv.FormatInt(p.EngineAPI.TmpfsMB<<20, 10), "dockerfile": builtFrom,
	})
	for name, value := range params {
		query.Set(name, value)
	}
	if len(args) > 0 {
		setJSON(query, "buildargs", args)
	}
	if err := cmp.Or(cacheFrom(c, query), buildLimits(c, query)); err != nil {
		return nil, nil, err
	}
	mode, err := buildNetwork(c, p)
	if err != nil {
		return nil, nil, err
	}
	query.Set("networkmode", mode)
	var names []reference.NamedTagged
	for _, t := range c.query["t"] {
		if t == "" {
			continue
		}
		name, err := judgedName(c, c.rules.TagRef, t)
		if err != nil {
			return nil, nil, err
		}
		names = append(names, name)
	}
	if len(names) > maxBuildTags {
		return nil, nil, proxy.Malformed(fmt.Sprintf("there are more than %d names", maxBuildTags))
	}
	return query, names, nil
}

// setJSON sets a parameter to texts and numbers as JSON.
func setJSON(query url.Values, name string, v any) {
	text, _ := json.Marshal(v) // such values can be encoded
	query.Set(name, string(text))
}

// buildArgs judges build arguments as a command's environment.
func buildArgs(c *call) (map[string]string, error) {
	text := c.query.Get("buildargs")
	if text == "" {
		return nil, nil
	}
	var args map[string]*string
	if err := proxy.DecodeJSON([]byte(text), &args); err != nil {
		return nil, proxy.Malformed("the build arguments are not one JSON object of texts")
	}
	asked := map[string]string{}
	for name, value := range args {
		if value != nil {
			asked[name] = *value
		}
	}
	return judgeArgs(c, asked)
}

// judgeArgs judges build arguments, and returns those that the policy allows.
func judgeArgs(c *call, asked map[string]string) (map[string]string, error) {
	env, _, err := c.rules.ExecEnv(asked)
	if err := c.judged(err); err != nil {
		return nil, err
	}
	maps.DeleteFunc(env, func(name, _ string) bool { _, ok := asked[name]; return !ok }) // not the policy's pinned ones
	return env, nil
}

// cacheFrom passes on the IDs of images whose layers a build may use as a cache. Like the engine,
// it leaves out missing images, if the policy allows their names.
func cacheFrom(c *call, query url.Values) error {
	var refs []string
	if text := c.query.Get("cachefrom"); text != "" && proxy.DecodeJSON([]byte(text), &refs) != nil || len(refs) > maxBases {
		return proxy.Malformed(fmt.Sprintf("the images to take layers from are not a JSON list of up to %d texts", maxBases))
	}
	ids := []string{}
	for _, ref := range refs {
		img, err := visibleImage(c, ref)
		if err == nil {
			ids = append(ids, img.ID)
			continue
		}
		if !isMissing(err) {
			return err
		}
		if _, err := c.rules.TagRef(c.caller.Profile, ref); err == nil {
			continue
		}
		if _, err := runRef(c, ref); err != nil {
			return err
		}
	}
	if len(ids) > 0 {
		setJSON(query, "cachefrom", ids)
	}
	return nil
}

// buildLimits judges the extra hosts and the limits of a build's commands.
func buildLimits(c *call, query url.Values) error {
	req := policy.ContainerRequest{}
	for _, host := range c.query["extrahosts"] {
		if !slices.Contains(emptyValues, host) {
			req.ExtraHosts = append(req.ExtraHosts, host)
		}
	}
	if text := c.query.Get("ulimits"); !slices.Contains(emptyValues, text) && proxy.DecodeJSON([]byte(text), &req.Ulimits) != nil {
		return proxy.Malformed("the limits are not a JSON list of Name, Soft and Hard")
	}
	if len(req.Ulimits) > body.MaxListed {
		return proxy.Malformed("the limits are more than anybody needs")
	}
	verdict := c.rules.BuildLimits(c.caller.Profile, req)
	if err := c.allow(verdict.Denials); err != nil {
		return err
	}
	if len(req.ExtraHosts) > 0 {
		query["extrahosts"] = verdict.Spec.ExtraHosts
	}
	if len(req.Ulimits) > 0 {
		setJSON(query, "ulimits", verdict.Spec.Ulimits)
	}
	return nil
}

// buildNetwork returns the network of the build's commands: the profile's, or none.
func buildNetwork(c *call, p policy.Profile) (string, error) {
	asked := c.query.Get("networkmode")
	if asked == "none" || p.Network == "off" && isDefaultNetwork(asked) {
		return "none", nil
	}
	if isDefaultNetwork(asked) {
		var err error
		if asked, err = defaultNetwork(c); err != nil || asked == "" {
			return "none", err
		}
	}
	n, err := resolveNetwork(c, asked, true)
	if err != nil {
		return "", err
	}
	n.Field = "networkmode"
	if err := c.judged(c.rules.NetworkJoin(c.caller.Profile, n)); err != nil {
		return "", err
	}
	if n.Mode != policy.NetNamed || n.ID == "" {
		return "", denied("networks.foreign", "networkmode", "a build can only have a network of the policy's or of the caller's own", "none, or such a network")
	}
	return n.ID, nil
}

// buildLabels returns the labels of the image.
func buildLabels(c *call) (map[string]string, error) {
	var own map[string]string
	if text := c.query.Get("labels"); text != "" && proxy.DecodeJSON([]byte(text), &own) != nil {
		return nil, proxy.Malformed("the labels are not one JSON object of texts")
	}
	return stampLabels(c, lifecycle.ObjectImage, own)
}

// judgeDockerfile judges the images in a Dockerfile. It returns the Dockerfile with the images'
// IDs in place of their names.
func judgeDockerfile(c *call, text []byte, args map[string]string, auth authOf) ([]byte, error) {
	refuse := func(err error) error {
		return denied("build.dockerfile", "Dockerfile", "the Dockerfile is refused: "+err.Error(), "see the documentation")
	}
	p, err := c.profile()
	if err != nil {
		return nil, err
	}
	d, err := readDockerfile(text, args, p.EngineAPI.BuildAddURL)
	if err != nil {
		return nil, refuse(err)
	}
	if len(d.images) > maxBases {
		return nil, refuse(fmt.Errorf("it is of more than %d images", maxBases))
	}
	ids := map[string]string{}
	for _, ref := range d.images {
		img, err := buildBase(c, ref, auth)
		if err != nil {
			return nil, err
		}
		for _, trigger := range img.Config.OnBuild {
			if err := checkTrigger(trigger, d.urls); err != nil {
				return nil, refuse(fmt.Errorf("image %s has %q for builds: %w", body.Shorten(ref), body.Shorten(trigger), err))
			}
		}
		ids[ref] = img.ID
	}
	out, err := d.encode(ids, imageOwner(c))
	if err != nil {
		return nil, refuse(err)
	}
	return out, nil
}

// authOf returns a caller's credentials for a registry, or nil if the caller sent none.
type authOf func(registry string) (json.RawMessage, error)

// buildBase returns an image that a build reads: one of the caller's own, or one that the policy
// allows. It pulls the latter if the engine lacks it, or if the caller asks for that.
func buildBase(c *call, ref string, auth authOf) (*imageInfo, error) {
	img, err := lookUpImage(c, ref)
	if err != nil || img != nil && ownImage(c, img.Config.Labels) {
		return img, err
	}
	_, _, err = c.rules.ImageRef(c.caller.Profile, ref)
	if err != nil && img != nil && othersImage(c, img.Config.Labels) {
		return nil, noImage(ref) // in mode audit as well
	}
	run, err := runRef(c, ref)
	if err != nil {
		return nil, err
	}
	if run != ref {
		if img, err = lookUpImage(c, run); err != nil {
			return nil, err
		}
	}
	if img == nil || c.flag("pull") {
		if err := fetchBase(c, run, auth); err != nil {
			return nil, err
		}
		if img, err = lookUpImage(c, run); err != nil {
			return nil, err
		}
	}
	if img == nil {
		return nil, noImage(run)
	}
	return img, nil
}

// fetchBase pulls a judged image without reporting progress.
func fetchBase(c *call, ref string, auth authOf) error {
	if err := c.operation(policy.OpPull); err != nil {
		return err
	}
	query, err := pullQuery(c, ref)
	if err != nil {
		return err
	}
	header := http.Header{}
	if config, err := auth(registryOf(ref)); err != nil {
		return err
	} else if config != nil {
		header.Set(authHeader, base64.URLEncoding.EncodeToString(config))
	}
	return eachMessage(c, upstream.Ask{Method: http.MethodPost, Path: "/images/create", Query: query, Header: header}, http.StatusNotFound, func(buildMessage) {})
}

// eachMessage sends a request, and calls each for every progress message in the answer. If a message has
// an error, eachMessage returns it as an *upstream.Error with the status failed.
func eachMessage(c *call, ask upstream.Ask, failed int, each func(buildMessage)) error {
	resp, err := c.open(ask)
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }()
	for dec := json.NewDecoder(io.LimitReader(resp.Body, upstream.MaxAnswer)); ; {
		var m buildMessage
		switch err := dec.Decode(&m); {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return c.engine.Unavailable(c.ctx, err)
		case m.Error != "":
			return &upstream.Error{Status: failed, Message: m.Error}
		}
		each(m)
	}
}

// builtFrom is the Dockerfile's name in the archive for the engine, whatever name the caller gave.
const builtFrom = "Dockerfile"

// buildMessage is one message of progress of a build.
type buildMessage struct {
	Stream      string `json:"stream,omitempty"`
	Status      string `json:"status,omitempty"`
	Error       string `json:"error,omitempty"`
	ErrorDetail *struct {
		Message string `json:"message,omitempty"`
	} `json:"errorDetail,omitempty"`
	Aux *struct{ ID string } `json:"aux,omitempty"`
}

var builtID = regexp.MustCompile(`^sha256:[0-9a-f]{64}$`)

// relayBuild relays the engine's messages, and returns the image's ID, or "" if the build failed.
// With the parameter q, it relays only errors.
func relayBuild(c *call, body io.Reader) (id string) {
	dec := json.NewDecoder(body)
	failed := false
	for {
		var raw json.RawMessage
		switch err := dec.Decode(&raw); {
		case errors.Is(err, io.EOF) && failed:
			return ""
		case errors.Is(err, io.EOF):
			return id
		case errors.Is(c.ctx.Err(), context.DeadlineExceeded):
			c.tell(buildMessage{Error: fmt.Sprintf("the build was ended: it may take %v, and no longer than what it makes is to live", maxBuildTime)})
			return ""
		case err != nil && proxy.GoingDown(c.ctx):
			c.tell(buildMessage{Error: farewell})
			return ""
		case err != nil:
			panic(http.ErrAbortHandler)
		}
		var m buildMessage
		if json.Unmarshal(raw, &m) == nil && m.Aux != nil && builtID.MatchString(m.Aux.ID) {
			id = m.Aux.ID // each stage has one; the last is the image's
		}
		failed = failed || m.Error != ""
		if c.flag("q") && m.Error == "" {
			continue
		}
		c.say(append(raw, '\r', '\n'))
	}
}

// proxyText returns an error's text for callers.
func proxyText(err error) string {
	f := proxy.FaultOf(err)
	return cmp.Or(denial(f.Reasons), f.Detail)
}

// tell sends a message to the build's client.
func (c *call) tell(m buildMessage) {
	if m.Error != "" {
		m.ErrorDetail = &struct {
			Message string `json:"message,omitempty"`
		}{m.Error}
	}
	line, err := json.Marshal(m)
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	_, _ = c.w.Write(append(line, '\r', '\n'))
	_ = http.NewResponseController(c.w).Flush()
}
