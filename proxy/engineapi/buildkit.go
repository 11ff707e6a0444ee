package engineapi

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/distribution/reference"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/proxy/engineapi/body"
	"github.com/bermhq/berm/proxy/engineapi/buildkit"
	"github.com/bermhq/berm/proxy/engineapi/upstream"
)

// limitedSteps is the first release of the engine whose BuildKit limits a step's memory and
// CPU.
const limitedSteps = 29

// commandLimits returns the parameters that limit the memory and CPU of a build's commands, which
// both builders have.
func commandLimits(p policy.Profile) map[string]string {
	const period = 100_000
	memory := strconv.FormatInt(p.MemoryMB<<20, 10)
	return map[string]string{
		"memory": memory, "memswap": memory, "cpuperiod": strconv.Itoa(period), "cpuquota": strconv.FormatInt(int64(p.CPUs*period), 10),
	}
}

// stepLimits returns the attributes that limit a build's commands.
func stepLimits(c *call, p policy.Profile) (map[string]string, error) {
	if parent := p.EngineAPI.BuildKit.CgroupParent; parent != "" {
		return map[string]string{"cgroup-parent": parent}, nil
	}
	release, err := c.engine.Release(c.ctx)
	if err != nil {
		return nil, err
	}
	major, _, _ := strings.Cut(release, ".")
	if n, err := strconv.Atoi(major); err != nil || n < limitedSteps {
		return nil, denied("buildkit.limits", "", "this engine's BuildKit can't limit a build's commands", "DOCKER_BUILDKIT=0, an engine from release 29 on, or engine_api.buildkit.cgroup_parent")
	}
	return commandLimits(p), nil
}

// builds is what a Proxy knows of the engine's BuildKit.
type builds struct {
	server  *buildkit.Server
	turns   sync.Map // by tenant: *semaphore.Weighted of its builds
	checked sync.Map // releases of the engine that enforce source policies
}

func newBuilds(d *Proxy) (err error) {
	memory := proxy.NewBudget("memory for messages of builds", 96<<20, 48<<20)
	d.builds.server, err = buildkit.New(buildkit.Options{
		Dial: func(ctx context.Context, path string, header http.Header) (net.Conn, error) {
			conn, r, _, err := d.engine.Upgrade(ctx, upstream.Ask{Method: http.MethodPost, Path: path, Header: header})
			return readerConn{conn, r}, err
		},
		Status: buildStatus,
		Lease:  func(tenant string) buildkit.Lease { return memory.Lease(tenant) },
		// A function, as d.gate is set later.
		Panicked: func(ctx context.Context, v any) { d.gate.Panicked(ctx, v) },
	})
	return err
}

// buildStatus returns the gRPC status for an error of the proxy.
func buildStatus(err error) error {
	code, ok := map[int]codes.Code{
		http.StatusBadRequest: codes.InvalidArgument, http.StatusUnprocessableEntity: codes.InvalidArgument, http.StatusForbidden: codes.PermissionDenied,
		http.StatusNotFound: codes.NotFound, http.StatusConflict: codes.FailedPrecondition, http.StatusTooManyRequests: codes.ResourceExhausted,
		http.StatusServiceUnavailable: codes.Unavailable,
	}[proxy.FaultOf(err).Status]
	if !ok {
		code = codes.Unknown
	}
	return status.Error(code, proxyText(err))
}

// readerConn is a connection whose bytes come from r, which has some of them already.
type readerConn struct {
	net.Conn
	r io.Reader
}

func (c readerConn) Read(p []byte) (int, error) { return c.r.Read(p) }

// check fails unless the engine enforces source policies.
func (b *builds) check(c *call) error {
	release, err := c.engine.Release(c.ctx)
	if err != nil {
		return err
	}
	if _, ok := b.checked.Load(release); ok {
		return nil
	}
	if err := b.server.Check(c.ctx); errors.Is(err, buildkit.ErrNoPolicy) {
		return denied("buildkit.engine", "", "this engine's BuildKit has no source policy", "DOCKER_BUILDKIT=0, or a newer engine")
	} else if err != nil {
		return err
	}
	b.checked.Store(release, nil)
	return nil
}

// allowed returns what the policy allows of BuildKit, if that and the engine allow any.
func (b *builds) allowed(c *call) (policy.BuildKit, error) {
	p, err := c.profile()
	if err != nil {
		return policy.BuildKit{}, err
	}
	if !p.EngineAPI.BuildKit.Enabled {
		return policy.BuildKit{}, noBuildKit("")
	}
	if err := c.operation(policy.OpBuild); err != nil {
		return policy.BuildKit{}, err
	}
	if _, err := stepLimits(c, p); err != nil {
		return policy.BuildKit{}, err
	}
	return p.EngineAPI.BuildKit, b.check(c)
}

// oldClient matches a client that builds with BuildKit by POST /build alone, which Berm doesn't
// offer: Docker's before release 23.
var oldClient = regexp.MustCompile(`^Docker-Client/(1[89]|2[0-2])\.`)

// builderVersion returns the builder that clients use by default: "2" is BuildKit, "1" the classic one.
func builderVersion(c *call) string {
	asking := *c // so that a denial isn't logged as the ping's
	if _, err := c.builds.allowed(&asking); err != nil || oldClient.MatchString(c.r.UserAgent()) {
		return "1"
	}
	return "2"
}

// serveBuildKit serves BuildKit's API on the caller's connection.
func serveBuildKit(c *call) error {
	return takingOver(c, func(take func() (net.Conn, error)) error {
		conn, err := take()
		if err == nil {
			c.builds.server.Serve(c.ctx, buildCaller{c}, conn)
		}
		return err
	})
}

// prefaceRoute serves BuildKit's API on a connection that begins as HTTP/2, which no other
// endpoint does.
var prefaceRoute = &route{method: "PRI", template: "/grpc", change: true, serve: serveBuildKit}

const prefaceHead = "PRI * HTTP/2.0\r\n\r\n"

// isPreface reports whether a request is prefaceHead, which begins an HTTP/2 connection.
func isPreface(r *http.Request) bool {
	return r.Method == "PRI" && r.RequestURI == "*" && r.Proto == "HTTP/2.0" && len(r.Header) == 0
}

// serveSession serves a session, in which the engine uses what the client of a build offers.
func serveSession(c *call) error {
	return takingOver(c, func(take func() (net.Conn, error)) error {
		err := c.builds.server.Session(c.ctx, buildCaller{c}, c.r.Header, take)
		switch status.Code(err) {
		case codes.InvalidArgument:
			return proxy.Malformed(status.Convert(err).Message())
		case codes.ResourceExhausted:
			return full("%s", status.Convert(err).Message())
		}
		return err
	})
}

// takingOver serves a call for an upgrade to HTTP/2. Take answers, and returns the connection.
func takingOver(c *call, serve func(take func() (net.Conn, error)) error) error {
	if _, err := c.builds.allowed(c); err != nil {
		return err
	}
	if !isPreface(c.r) && c.r.Header.Get("Upgrade") != "h2c" {
		return proxy.Malformed("the request is no upgrade to h2c")
	}
	if err := c.untilEnd(c.enter("streams", maxStreams)); err != nil {
		return err
	}
	taken := false
	err := serve(func() (net.Conn, error) {
		conn, buffered, err := http.NewResponseController(c.w).Hijack()
		if err != nil {
			return nil, fmt.Errorf("take the caller's connection over: %w", err)
		}
		taken = true
		c.writeAudit(nil) // before the stream, which may go on for long
		rest := upstream.Behind(buffered.Reader, conn)
		head := "HTTP/1.1 101 UPGRADED\r\nConnection: Upgrade\r\nUpgrade: h2c\r\nApi-Version: " + c.version.String() + "\r\n\r\n"
		if isPreface(c.r) {
			rest, head = io.MultiReader(strings.NewReader(prefaceHead), rest), ""
		}
		_, err = io.WriteString(conn, head)
		if err = errors.Join(err, conn.SetDeadline(time.Time{})); err != nil {
			_ = conn.Close()
		}
		return readerConn{conn, rest}, err
	})
	if taken {
		return nil // the client can't get an error any more
	}
	return err
}

// buildCaller implements buildkit.Caller for the call of a connection.
type buildCaller struct{ *call }

// Tenant differs for each Berm, since names that are made from it are in the engine's own cache.
func (b buildCaller) Tenant() string { return b.opts.Owner + "/" + b.caller.Tenant }

// fresh returns a call of its own for a build, by the policy in force.
func (b buildCaller) fresh(ctx context.Context) *call {
	return &call{
		Proxy: b.Proxy, r: b.r, ctx: ctx, caller: b.caller, rules: b.opts.Policy(), route: solveRoute, version: b.version,
		query: url.Values{}, passed: url.Values{},
	}
}

// The audit log and metrics name parts of a connection like routes.
var (
	solveRoute  = &route{template: "/grpc Solve"}
	sourceRoute = &route{template: "/grpc source"}
)

func (b buildCaller) Rules(ctx context.Context) (policy.BuildKit, error) {
	return b.builds.allowed(b.fresh(ctx))
}

func (b buildCaller) Begin(ctx context.Context) (_ buildkit.Build, err error) {
	asking := b.fresh(ctx)
	over, err := buildTurn(asking)
	if err != nil {
		asking.writeAudit(err)
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, maxBuildTime)
	c := b.fresh(ctx)
	j := &buildJudge{call: c, leave: []func(){over, cancel}, labels: map[string]string{}}
	defer func() {
		if err != nil {
			j.End(err)
		}
	}()
	if j.rules, err = b.builds.allowed(c); err != nil {
		return nil, err
	}
	if !c.opts.Audit.ok() {
		return nil, errAudit
	}
	leave, err := c.room("images", 1)
	if err != nil {
		return nil, err
	}
	j.leave = append(j.leave, leave)
	return j, nil
}

// buildJudge is buildkit.Build. Its mutex guards the call and the labels.
type buildJudge struct {
	*call
	rules policy.BuildKit
	leave []func()

	mu     sync.Mutex
	labels map[string]string // Berm's, of the image; empty until they are made
}

func (j *buildJudge) Context() context.Context { return j.ctx }

func (j *buildJudge) Rules() policy.BuildKit { return j.rules }

func (j *buildJudge) URLs() []string {
	p, _ := j.profile()
	return p.EngineAPI.BuildAddURL
}

func (j *buildJudge) End(err error) {
	for _, leave := range slices.Backward(j.leave) {
		leave()
	}
	j.mu.Lock() // a frontend's call may go on for a moment
	defer j.mu.Unlock()
	j.writeAudit(err)
}

func (j *buildJudge) Args(asked map[string]string) (map[string]string, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	return judgeArgs(j.call, asked)
}

// Labels seals the owner's labels once for all parts of a build.
func (j *buildJudge) Labels(own map[string]string) (map[string]string, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	labels, err := stampLabels(j.call, lifecycle.ObjectImage, own)
	if err != nil {
		return nil, err
	}
	if len(j.labels) == 0 {
		maps.Copy(j.labels, labels)
		maps.DeleteFunc(j.labels, func(name, _ string) bool { return !lifecycle.IsOwnLabel(name) })
		if expires, err := time.Parse(time.RFC3339Nano, labels[lifecycle.LabelExpiresAt]); err == nil {
			ctx, cancel := context.WithDeadline(j.ctx, expires)
			j.ctx, j.leave = ctx, append(j.leave, cancel)
		}
	}
	maps.Copy(labels, j.labels)
	return labels, nil
}

func (j *buildJudge) Limits() (map[string]string, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	p, err := j.profile()
	if err != nil {
		return nil, err
	}
	limits, err := stepLimits(j.call, p)
	if err != nil {
		return nil, err
	}
	limits["shm-size"] = strconv.FormatInt(p.EngineAPI.TmpfsMB<<20, 10)
	if j.rules.Network != "bridge" || p.Network != "on" {
		limits["force-network-mode"] = "none"
	}
	return limits, nil
}

func (j *buildJudge) Target(name string) (string, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	full, err := judgedName(j.call, j.call.rules.TagRef, name)
	if err != nil {
		return "", err
	}
	return full.String(), nil
}

// Base writes a decision of its own into the audit log.
func (j *buildJudge) Base(ref string, pull bool, login buildkit.Login) (id string, err error) {
	c := buildCaller{j.call}.fresh(j.ctx)
	c.route = sourceRoute
	defer func() { c.writeAudit(err) }()
	c.query.Set("pull", strconv.FormatBool(pull))
	img, err := buildBase(c, ref, func(registry string) (json.RawMessage, error) {
		user, password, err := login(c.ctx, registry)
		if err != nil || user == "" && password == "" {
			return nil, nil // then the registry decides
		}
		auth := credentials{Username: user, Password: password, ServerAddress: registry}
		if user == "" {
			auth.Password, auth.IdentityToken = "", password
		}
		return json.Marshal(auth)
	})
	if err != nil {
		return "", err
	}
	// The engine removes an image with its last name, and so with the pin.
	if !slices.ContainsFunc(slices.Concat(img.RepoTags, img.RepoDigests), func(name string) bool { return !strings.HasPrefix(name, "<none>") }) {
		return "", denied("buildkit.sources", "", "image "+body.Shorten(ref)+" has no name", "images with a name")
	}
	c.about(img.ID)
	return img.ID, nil
}

func (j *buildJudge) Finish(ids, names []string) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	img, err := builtImage(j.call, ids, j.labels)
	if err != nil {
		return err
	}
	var tagged []reference.NamedTagged
	for _, name := range names {
		full, err := taggedName(name)
		if err != nil {
			return err
		}
		tagged = append(tagged, full)
	}
	return nameVerified(j.call, img, "verify.build", j.labels, tagged, func(string) {})
}

// builtImage returns a build's image: the first of the IDs that the engine knows, or the image
// with the build's labels, as the IDs may be those of another output. It returns nil if there
// is none.
func builtImage(c *call, ids []string, labels map[string]string) (*imageInfo, error) {
	for _, id := range ids {
		if img, err := lookUpImage(c, id); err != nil || img != nil {
			return img, err
		}
	}
	f := imageFilters(c)
	f["label"] = append(f["label"], lifecycle.LabelSessionID+"="+labels[lifecycle.LabelSessionID])
	var id string
	err := each(c.ctx, c.Proxy, c.version, lifecycle.ObjectImage, url.Values{"filters": {f.String()}}, func(img *labelled) { id = img.ID })
	if err != nil {
		return nil, err
	}
	return lookUpImage(c, id)
}
