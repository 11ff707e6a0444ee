package sandboxapi_test

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/proxy/apitype"
	"github.com/bermhq/berm/proxy/sandboxapi"
	"github.com/bermhq/berm/proxy/sandboxapi/openapitest"
	"github.com/bermhq/berm/runtime"
)

const (
	master    = "token-of-the-master"
	powerless = "token-without-power"
	sessionID = "0c9f4a86-1f0b-4e53-9d3b-0f6f0a4f7c11"
)

// scripted is a manager whose every call comes to what the test says.
type scripted struct {
	err     error // of all calls
	panics  bool
	result  lifecycle.Result
	sandbox lifecycle.Sandbox
	exec    lifecycle.ExecResult
	execErr error
	more    string                               // of List
	logs    func(stdout, stderr io.Writer) error // nil prints nothing
	// followLogs has Logs go on until the tape or its context ends.
	followLogs bool
	delete     lifecycle.DeleteResult
	streams    *streams // commands and processes
	house      *house   // whose files and ports there are; nil: none

	created lifecycle.CreateRequest // of the last call, as are the others
	execed  lifecycle.ExecRequest
	listed  lifecycle.ListOptions
	logged  runtime.LogOptions
	renewed time.Duration
}

func (s *scripted) fail(err error) { s.err = err }

func (s *scripted) outcome() (lifecycle.Sandbox, error) {
	if s.panics {
		panic("boo")
	}
	return s.sandbox, s.err
}

func (s *scripted) Create(_ context.Context, req lifecycle.CreateRequest) (lifecycle.CreateResult, error) {
	s.created = req
	sb, err := s.outcome()
	return lifecycle.CreateResult{Sandbox: sb, Result: s.result}, err
}

func (s *scripted) Get(context.Context, string, string) (lifecycle.Sandbox, error) {
	return s.outcome()
}

func (s *scripted) List(_ context.Context, _ string, opts lifecycle.ListOptions) ([]lifecycle.Sandbox, string, error) {
	s.listed = opts
	sb, err := s.outcome()
	return []lifecycle.Sandbox{sb}, s.more, err
}

func (s *scripted) Delete(context.Context, string, string) (lifecycle.DeleteResult, error) {
	_, err := s.outcome()
	return s.delete, err
}

func (s *scripted) Renew(_ context.Context, _, _ string, ttl time.Duration) (lifecycle.Sandbox, error) {
	s.renewed = ttl
	return s.outcome()
}

func (s *scripted) Pause(context.Context, string, string) (lifecycle.Sandbox, error) {
	return s.outcome()
}

func (s *scripted) Resume(context.Context, string, string) (lifecycle.Sandbox, error) {
	return s.outcome()
}

func (s *scripted) Exec(_ context.Context, req lifecycle.ExecRequest) (lifecycle.ExecResult, error) {
	if s.execed = req; req.Keep == nil || req.Keep(1<<30) == nil {
		return lifecycle.ExecResult{}, errors.New("the output's memory isn't leased")
	}
	s.execed.Keep = nil
	_, err := s.outcome()
	return s.exec, errors.Join(err, s.execErr)
}

func (s *scripted) Logs(ctx context.Context, _, _ string, opts runtime.LogOptions, stdout, stderr io.Writer) error {
	s.logged = opts
	if _, err := s.outcome(); err != nil || s.logs == nil && !s.followLogs {
		return err
	}
	if s.followLogs {
		_, err := s.Wait(ctx, lifecycle.ProcessRef{})
		return err
	}
	return s.logs(stdout, stderr)
}

func (s *scripted) Stats(context.Context, string, string) (runtime.Stats, error) {
	_, err := s.outcome()
	return runtime.Stats{Time: time.Now()}, err
}

func (s *scripted) Ready(context.Context) error {
	_, err := s.outcome()
	return err
}

func (s *scripted) Status(context.Context, string) lifecycle.ServiceStatus {
	_, _ = s.outcome()
	return lifecycle.ServiceStatus{Backend: runtime.Info{Backend: "fake", Version: "1"}, Available: true}
}

// gatherer is a metrics registry that can be made to fail.
type gatherer struct{ fails bool }

func (g *gatherer) Gather() ([]*dto.MetricFamily, error) {
	if g.fails {
		return nil, errors.New("boo")
	}
	return prometheus.NewRegistry().Gather()
}

// door is the API on a scripted manager, every exchange with which is checked
// against the OpenAPI document.
type door struct {
	*openapitest.Checker
	caller
	opts    sandboxapi.Options
	handler http.Handler
	stop    func() // waits until all requests are answered
	manager *scripted
	metrics *gatherer
}

func newDoor(t *testing.T, change ...func(*sandboxapi.Options)) *door {
	t.Helper()
	pol, err := policy.Parse(nil, policy.Options{})
	must(t, err)
	tokens, err := proxy.ParseTokens([]byte(`tokens:
- {name: master, tenant: red, token: ` + master + `, max_sandboxes: 7}
- {name: powerless, tenant: red, token: ` + powerless + `, scopes: [sandboxes:exec]}
`))
	must(t, err)
	d := &door{Checker: openapitest.New(t), caller: caller{t: t}, manager: &scripted{}, metrics: &gatherer{}}
	d.client = &http.Client{Transport: d.Transport(nil)}
	d.opts = sandboxapi.Options{
		Manager: d.manager, Policy: func() *policy.Policy { return pol }, Gate: proxy.GateOptions{Tokens: tokens}, Gatherer: d.metrics, Version: "1.2.3",
	}
	d.calm()
	return d.rebuilt(change...)
}

// rebuilt is the door with other options. What it shows counts for both.
func (d *door) rebuilt(change ...func(*sandboxapi.Options)) *door {
	d.t.Helper()
	opts := d.opts
	for _, f := range change {
		f(&opts)
	}
	h, err := sandboxapi.New(opts)
	must(d.t, err)
	srv := httptest.NewServer(h)
	d.t.Cleanup(srv.Close)
	out := *d
	out.url, out.handler, out.stop = srv.URL, h, srv.Close
	return &out
}

// calm lets every call succeed again.
func (d *door) calm() {
	now := time.Now()
	code := 0
	*d.manager = scripted{
		result: lifecycle.ResultCreated,
		sandbox: lifecycle.Sandbox{
			Tenant: "red", Key: "k", SessionID: sessionID, ContainerID: "c0ffee", Status: lifecycle.StatusRunning,
			Spec: policy.Spec{
				Profile: "default", Image: "alpine", Network: "off", HostPathMode: "rw", MountPath: "/workspace", TTL: time.Hour,
				Env:         map[string]string{"B": "secret-b", "A": "secret-a"},
				ExtraMounts: []policy.Mount{{HostPath: "/srv/a", Source: "/resolved/a", Local: "/local/a", MountPath: "/a", Mode: "ro"}},
			},
			Overridden: []policy.Override{{Field: "cpus", Requested: 4, Effective: 2, Rule: "resources.over_max"}},
			Endpoint:   lifecycle.Endpoint{IP: "10.0.0.2", Port: 80}, Enforcement: lifecycle.Enforcement{Mounts: "held"},
			CreatedAt: now, ExpiresAt: now.Add(time.Hour), Deadline: now.Add(24 * time.Hour), LastUsedAt: now,
		},
		exec:    lifecycle.ExecResult{SessionID: sessionID, Backend: "fake", Status: lifecycle.ExecCompleted, ExitCode: &code, Timeout: 30 * time.Second},
		delete:  lifecycle.DeleteResult{Result: lifecycle.ResultDeleted, SessionID: sessionID, ContainerID: "c0ffee"},
		streams: newStreams(),
	}
	d.manager.streams.tape.finish(io.EOF)
	d.metrics.fails = false
}

type answer struct {
	*http.Response
	body string
}

// decode reads the body as JSON.
func (a answer) decode(t *testing.T, v any) {
	t.Helper()
	if err := json.Unmarshal([]byte(a.body), v); err != nil {
		t.Fatalf("%v: %s", err, a.body)
	}
}

func (a answer) problem(t *testing.T) apitype.Problem {
	t.Helper()
	var p apitype.Problem
	a.decode(t, &p)
	return p
}

// caller sends requests of the master's to a server.
type caller struct {
	t      *testing.T
	url    string
	client *http.Client
}

// request makes a request of the master's, but for what change does to it.
func (c *caller) request(method, path string, body io.Reader, change ...func(*http.Request)) *http.Request {
	c.t.Helper()
	r, err := http.NewRequest(method, c.url+path, body)
	must(c.t, err)
	r.Header.Set("X-API-Token", master)
	for _, f := range change {
		f(r)
	}
	return r
}

// do sends a request, and returns the answer as soon as it begins.
func (c *caller) do(ctx context.Context, method, path, body string, change ...func(*http.Request)) *http.Response {
	c.t.Helper()
	if body != "" {
		change = append([]func(*http.Request){withHeader("Content-Type", jsonType)}, change...)
	}
	resp, err := c.client.Do(c.request(method, path, strings.NewReader(body), change...).WithContext(ctx))
	if err != nil {
		c.t.Fatalf("%s %s: %v", method, path, err)
	}
	return resp
}

// send is do with the whole answer.
func (c *caller) send(method, path, body string, change ...func(*http.Request)) answer {
	c.t.Helper()
	resp := c.do(context.Background(), method, path, body, change...)
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode == http.StatusSwitchingProtocols {
		return answer{Response: resp} // what follows has no end
	}
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		c.t.Fatalf("%s %s: %v", method, path, err)
	}
	return answer{resp, string(b)}
}

// brokenOff reports whether an answer ends before it is whole.
func (c *caller) brokenOff(path string, change ...func(*http.Request)) bool {
	resp, err := http.DefaultClient.Do(c.request("GET", path, nil, change...))
	if err == nil {
		_, err = io.ReadAll(resp.Body)
		_ = resp.Body.Close()
	}
	return err != nil
}

// want sends a request and checks the answer's status and code.
func (c *caller) want(status int, code, method, path, body string, change ...func(*http.Request)) answer {
	c.t.Helper()
	a := c.send(method, path, body, change...)
	var got struct{ Code string }
	if code != "" {
		_ = json.Unmarshal([]byte(a.body), &got)
	}
	if a.StatusCode != status || got.Code != code {
		c.t.Errorf("%s %s: got %d %s, want %d %s\n%s", method, path, a.StatusCode, got.Code, status, code, a.body)
	}
	return a
}

func withToken(token string) func(*http.Request) {
	return func(r *http.Request) {
		r.Header.Del("X-API-Token")
		if token != "" {
			r.Header.Set("X-API-Token", token)
		}
	}
}

func withHeader(name, value string) func(*http.Request) {
	return func(r *http.Request) { r.Header.Set(name, value) }
}

// handshake makes a request one for a WebSocket.
func handshake(r *http.Request) {
	for name, v := range map[string]string{
		"Connection": "Upgrade", "Upgrade": "websocket", "Sec-Websocket-Version": "13", "Sec-Websocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
	} {
		r.Header.Set(name, v)
	}
}

func withHost(host string) func(*http.Request) { return func(r *http.Request) { r.Host = host } }

// operation is a call with a request that succeeds.
type operation struct {
	method, path, body string
	status             int
	open               bool // needs no token
	outcomes           []outcome
}

// operations are all that are documented, but for those of files, ports and storage.
var operations = []operation{
	{"PUT", "/api/v1/sandboxes/k", `{"image":"alpine"}`, 201, false, append(engine, denied, conflict, capacity, overQuota)},
	{"GET", "/api/v1/sandboxes/k", "", 200, false, append(engine, missing)},
	{"DELETE", "/api/v1/sandboxes/k", "", 200, false, append(engine, wrongState)},
	{"GET", "/api/v1/sandboxes", "", 200, false, engine},
	{"POST", "/api/v1/sandboxes/k/renew", `{"ttl":"1h"}`, 200, false, append(engine, missing, wrongState, capacity)},
	{"POST", "/api/v1/sandboxes/k/pause", "", 200, false, append(engine, missing, wrongState, cant, capacity)},
	{"POST", "/api/v1/sandboxes/k/resume", "", 200, false, append(engine, missing, wrongState, cant, capacity)},
	{"POST", "/api/v1/sandboxes/k/exec", `{"command":["true"]}`, 200, false, append(engine, missing, denied, conflict, wrongState, capacity, overQuota, cant)},
	{"POST", "/api/v1/sandboxes/k/execs", `{"command":["true"]}`, 201, false,
		append(engine, missing, denied, conflict, wrongState, capacity, overQuota, cant, processConflict)},
	{"GET", "/api/v1/sandboxes/k/execs", "", 200, false, append(engine, missing, wrongState, cant)},
	{"GET", "/api/v1/sandboxes/k/execs/job-1", "", 200, false, append(engine, processMissing, wrongState, cant)},
	{"DELETE", "/api/v1/sandboxes/k/execs/job-1", "", 200, false, append(engine, processMissing, wrongState, cant)},
	{"POST", "/api/v1/sandboxes/k/execs/job-1/signal", `{"signal":"TERM"}`, 200, false, append(engine, processMissing, processEnded, cant, capacity)},
	{"POST", "/api/v1/sandboxes/k/execs/job-1/resize", `{"rows":1,"cols":1000}`, 200, false, append(engine, processMissing, processEnded, cant, capacity)},
	{"POST", "/api/v1/sandboxes/k/execs/job-1/stdin", "", 200, false, append(engine, processMissing, processEnded, cant)},
	{"PUT", "/api/v1/sandboxes/k/execs/job-1/stdin", "", 200, false, append(engine, processMissing, processEnded, cant)},
	{"GET", "/api/v1/sandboxes/k/execs/job-1/stream", "", 200, false, append(engine, processMissing, wrongState, cant, gone)},
	{"GET", "/api/v1/sandboxes/k/execs/job-1/attach", "", 101, false, append(engine, processMissing, wrongState, cant, gone)},
	{"POST", "/api/v1/sandboxes/k/processes", `{"command":"a"}`, 201, false,
		append(engine, missing, denied, conflict, wrongState, capacity, overQuota, cant, processConflict)},
	{"GET", "/api/v1/sandboxes/k/processes", "", 200, false, append(engine, missing, wrongState, cant)},
	{"GET", "/api/v1/sandboxes/k/processes/tools", "", 200, false, append(engine, processMissing, wrongState, cant)},
	{"DELETE", "/api/v1/sandboxes/k/processes/tools", "", 200, false, append(engine, processMissing, wrongState, cant)},
	{"POST", "/api/v1/sandboxes/k/processes/tools/signal", `{"signal":15}`, 200, false, append(engine, processMissing, processEnded, cant, capacity)},
	{"POST", "/api/v1/sandboxes/k/processes/tools/resize", `{"rows":1,"cols":1000}`, 200, false, append(engine, processMissing, processEnded, cant, capacity)},
	{"POST", "/api/v1/sandboxes/k/processes/tools/wait", "", 200, false, append(engine, processMissing, wrongState, cant)},
	{"GET", "/api/v1/sandboxes/k/processes/tools/logs", "", 200, false, append(engine, processMissing, wrongState, cant, gone)},
	{"GET", "/api/v1/sandboxes/k/processes/tools/attach", "", 101, false, append(engine, processMissing, processConflict, cant, gone)},
	{"GET", "/api/v1/sandboxes/k/logs", "", 200, false, append(engine, missing, wrongState, cant)},
	{"GET", "/api/v1/sandboxes/k/stats", "", 200, false, append(engine, missing, wrongState, cant)},
	{"GET", "/api/v1/status", "", 200, false, nil},
	{"GET", "/api/v1/errors", "", 200, false, nil},
	{"GET", "/metrics", "", 200, false, nil},
	{"GET", "/api/v1/health", "", 200, true, nil},
	{"GET", "/healthz", "", 200, true, nil},
	{"GET", "/readyz", "", 200, true, []outcome{away}},
	{"GET", "/openapi.json", "", 200, true, nil},
	{"GET", "/docs", "", 200, true, nil},
}

const jsonType = "application/json"

// answers goes through the statuses that all operations have, and through its outcomes, which
// fail brings about. Kind is the type of its body, and stranger a token that lacks its scope,
// if there is one.
func (d *door) answers(op operation, kind, stranger string, fail func(error), change ...func(*http.Request)) {
	d.t.Helper()
	if kind != "" {
		change = append(change, withHeader("Content-Type", kind))
	}
	want := func(status int, code, path, body string, more ...func(*http.Request)) {
		d.t.Helper()
		if op.method == "HEAD" {
			code = ""
		}
		d.want(status, code, op.method, path, body, append(slices.Clone(change), more...)...)
	}
	want(op.status, "", op.path, op.body)
	want(421, "host_refused", op.path, op.body, withHost("evil.example"))
	want(403, "origin_refused", op.path, op.body, withHeader("Origin", "https://evil.example"))
	if op.open {
		want(op.status, "", op.path, op.body, withToken(""))
	} else {
		want(401, "unauthorized", op.path, op.body, withToken(""))
		if stranger != "" {
			want(403, "forbidden", op.path, op.body, withToken(stranger))
		}
		if op.path != "/metrics" {
			want(400, "malformed", op.path+map[bool]string{true: "&", false: "?"}[strings.Contains(op.path, "?")]+"colour=red", op.body)
		}
	}
	for _, o := range op.outcomes {
		fail(o.err)
		want(o.status, o.code, op.path, op.body)
	}
	fail(nil)
	if kind == jsonType {
		tooMuch := 1<<20 + 1
		if strings.HasSuffix(op.path, "/exec") || strings.HasSuffix(op.path, "/execs") {
			tooMuch = 24 << 20
		}
		want(413, "too_large", op.path, strings.Repeat(" ", tooMuch))
		want(415, "unsupported_media_type", op.path, "{}", withHeader("Content-Type", "text/plain"))
		want(400, "malformed", op.path, `{"colour":"red"}`)
	}
}

// outcome is an error of the manager's and what is answered to it.
type outcome struct {
	err    error
	status int
	code   string
}

var (
	away       = outcome{&lifecycle.UnavailableError{Err: errors.New("gone")}, 503, "backend_unavailable"}
	engine     = []outcome{away, {errors.New("boo"), 500, "internal"}, {&lifecycle.InvalidError{Field: "x", Message: "bad"}, 422, "validation"}}
	missing    = outcome{&lifecycle.NotFoundError{Key: "k"}, 404, "not_found"}
	wrongState = outcome{&lifecycle.StateError{Key: "k", Status: lifecycle.StatusPaused, Want: "running"}, 409, "wrong_state"}
	cant       = outcome{errdefs.ErrNotImplemented, 501, "not_supported"}
	capacity   = outcome{&lifecycle.CapacityError{Message: "full", RetryAfter: 5 * time.Second}, 429, "capacity"}
	overQuota  = outcome{&lifecycle.QuotaError{UsedBytes: 2, QuotaBytes: 1}, 507, "quota_exceeded"}
	denied     = outcome{&policy.DeniedError{Reasons: []policy.Reason{{
		Rule: "mounts.always_refused", Field: "host_path", Value: "/etc", Allowed: "below /srv", Message: "/etc is always refused",
	}}}, 403, "policy_denied"}
	gone            = outcome{&lifecycle.GoneError{Message: "gone", FirstSeq: 7}, 410, "output_gone"}
	processMissing  = outcome{&lifecycle.ProcessError{ID: "x", Class: errdefs.ErrNotFound, Message: "none"}, 404, "process_not_found"}
	processConflict = outcome{&lifecycle.ProcessError{ID: "x", Class: errdefs.ErrAlreadyExists, Message: "runs"}, 409, "process_conflict"}
	processEnded    = outcome{&lifecycle.ProcessError{ID: "x", Class: errdefs.ErrFailedPrecondition, Message: "ended"}, 409, "process_ended"}
	conflict        = outcome{&lifecycle.ConflictError{Key: "k", Differences: []policy.Difference{
		{Field: "memory_mb", Current: 256, Requested: 512},
	}}, 409, "sandbox_conflict"}
)

// TestEveryAnswer goes through every operation and every status that the document
// has, and fails for one that it didn't come by.
func TestEveryAnswer(t *testing.T) {
	d := newDoor(t)
	for _, op := range operations {
		d.calm()
		kind, stranger := "", powerless
		if (op.method == "PUT" || op.method == "POST") && !strings.HasSuffix(op.path, "/stdin") && !strings.HasSuffix(op.path, "/wait") {
			kind = jsonType
		}
		if strings.HasSuffix(op.path, "/exec") || strings.Contains(op.path, "/execs") || strings.Contains(op.path, "/processes") {
			stranger = ""
		}
		var change []func(*http.Request)
		if op.status == http.StatusSwitchingProtocols {
			d.want(426, "upgrade_required", op.method, op.path, op.body)
			change = append(change, handshake)
		}
		d.answers(op, kind, stranger, d.manager.fail, change...)
	}
	d.calm()
	d.manager.panics = true
	d.want(500, "internal", "GET", "/api/v1/status", "")
	d.calm()
	d.metrics.fails = true
	d.want(500, "internal", "GET", "/metrics", "")

	d.calm()
	d.manager.streams.execution.Existing = true
	d.want(200, "", "POST", "/api/v1/sandboxes/k/execs", `{"command":["a"]}`)
	for _, path := range []string{"/exec", "/execs", "/processes"} { // who may run commands may not make sandboxes
		d.want(403, "forbidden", "POST", "/api/v1/sandboxes/k"+path, `{"command":"a","sandbox":{}}`, withToken(powerless))
	}
	d.manager.result = lifecycle.ResultReused
	d.want(200, "", "PUT", "/api/v1/sandboxes/k", "")
	d.manager.err = &lifecycle.PullingError{Sandbox: d.manager.sandbox, RetryAfter: 1500 * time.Millisecond}
	if a := d.want(202, "", "PUT", "/api/v1/sandboxes/k", ""); a.Header.Get("Retry-After") != "2" {
		t.Errorf("Retry-After is %q", a.Header.Get("Retry-After"))
	}
	legacyAnswers(d)
	fileAnswers(d)
	portAnswers(d)
	storageAnswers(d)

	for _, unseen := range d.Unseen() {
		t.Errorf("documented, but it never came: %s", unseen)
	}
}

func TestOutsideOfTheDocument(t *testing.T) {
	d := newDoor(t)
	for _, tt := range []struct {
		status             int
		code, method, path string
	}{
		{404, "no_route", "GET", "/"},
		{404, "no_route", "GET", "/api/v1/sandboxes/"},
		{404, "no_route", "GET", "/api/v1/sandboxes/k/"},
		{404, "no_route", "GET", "/api/v1/sandboxes/k/logs/more"},
		{404, "no_route", "GET", "/api/v2/sandboxes"},
		{404, "no_route", "GET", "/API/v1/sandboxes"},
		{404, "no_route", "GET", "//api/v1/sandboxes"},
		{405, "method_not_allowed", "POST", "/api/v1/sandboxes/k"},
		{405, "method_not_allowed", "GET", "/api/v1/sandboxes/k/exec"},
		{405, "method_not_allowed", "OPTIONS", "/api/v1/sandboxes/k"},
		{405, "method_not_allowed", "BREW", "/api/v1/sandboxes"},
		{400, "malformed", "POST", "/api/v1/sandboxes/k%2Fexec"},
		{400, "malformed", "GET", "/api/v1/sandboxes/..%2f..%2fmetrics"},
		{200, "", "GET", "/api/v1/sandboxes/k%3Al"},
	} {
		d.want(tt.status, tt.code, tt.method, tt.path, "")
	}
	for _, key := range []string{"..", "-k", "_k", ".k", ":k", "k\x00", "k l", "k\nl", "é", "\u2028", "k?l", "k%l", strings.Repeat("k", 129)} {
		for _, method := range []string{"GET", "PUT"} {
			d.want(422, "validation", method, "/api/v1/sandboxes/"+url.PathEscape(key), "")
		}
	}
	a := d.send("PATCH", "/api/v1/sandboxes/k", "")
	if allow := a.Header.Get("Allow"); !strings.Contains(allow, "PUT") || !strings.Contains(allow, "DELETE") {
		t.Errorf("Allow is %q", allow)
	}
}

func TestNewRefuses(t *testing.T) {
	if _, err := sandboxapi.New(sandboxapi.Options{}); err == nil {
		t.Error("an API without a manager was made")
	}
	if _, err := sandboxapi.New(sandboxapi.Options{
		Manager: &scripted{}, Policy: func() *policy.Policy { return nil }, Gate: proxy.GateOptions{TokenHeader: "Authorization"},
	}); err == nil {
		t.Error("an impossible token header was taken")
	}
}
