package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/bermhq/berm/proxy/apitype"
	"github.com/bermhq/berm/proxy/client"
	"github.com/bermhq/berm/proxy/sandboxapi/openapitest"
	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/runtimetest/check"
)

// TestBox looks at what has come of a request on a real engine: what the kernel, the host
// and the next request see of it. Other tests hold the rest:
//
//	what is refused, overridden or clamped           policy TestSandbox…, TestHostPath…, TestEnv, TestWorkingDir, TestDiff
//	what the built-in profiles are                   policy TestProfilesTable; TestContract create/limits, read-only root, tmpfs, mounts
//	networks reach out, are apart, are internal      runtime/containerd TestNetworkReach; TestContract network/…
//	no device, privilege or namespace comes along    TestContract create/…
//	exit codes, streams                              TestContract exec/…; lifecycle TestExec…
//	trees that are killed, also at a timeout         TestContract exec/cancel kills/…, agent/process killed…; TestAttacks
//	a dead container that is made again              lifecycle TestDeadContainerIsMadeAgain; TestAttacks
//	calls without an engine                          sandboxapi's routes with each outcome; TestServeProcess, TestEngineAway
//	output that is cut                               lifecycle TestTruncation
//	sandboxes that idle out, and caps                lifecycle TestIdle…, TestCapacity, TestExecCap
//	processes: input, replay, take-over, terminals   TestContract agent/process…; lifecycle TestProcess…; sandboxapi TestAttach…
//	files and ports                                  TestDocs, TestAttacks; TestContract agent/files…
//	terminals and signals of the command line        TestCommandLineInside
//	an image that is pulled meanwhile                TestCreateThatPulls
//	an engine that goes away and comes back          TestEngineAway, TestSoakKillingTheEngine
//	sandboxes and processes after a restart          TestAgent, TestKillingTheServer
//	a thousand callers of one key                    lifecycle TestThousandCreatesOfOneKey
//	quotas                                           TestStorage; lifecycle TestQuota…
func TestBox(t *testing.T) {
	t.Run("docker", func(t *testing.T) { testBox(t, "docker", true) })
	t.Run("containerd", func(t *testing.T) { testBox(t, "containerd", false) })
}

// TestSoakBox has containerd keep the promises that don't depend on the engine, too.
func TestSoakBox(t *testing.T) { testBox(t, "containerd", true) }

func testBox(t *testing.T, kind string, all bool) {
	t.Parallel()
	b := newBox(t, kind)
	t.Run("cases", func(t *testing.T) {
		for i, c := range boxCases {
			if all || c.engine {
				t.Run(c.name, func(t *testing.T) {
					t.Parallel() // most of their time they wait
					ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
					defer cancel()
					c.test(&boxRow{T: t, box: b, boxSandbox: b.main.sandbox(ctx, t, fmt.Sprintf("box-%d", i))})
				})
			}
		}
	})
	b.main.stop()
	wantNothing(t, b.e, b.main.server)
}

// boxCase is a promise and its test.
type boxCase struct {
	name   string
	engine bool // it depends on the engine
	test   func(r *boxRow)
}

// boxRow is a test under way. It has a key of its own on the main server.
type boxRow struct {
	*testing.T
	*box
	boxSandbox
}

// box is an engine with a server on it.
type box struct {
	kind string
	e    *testEngine
	dir  string
	root string // what may be mounted
	main *boxServer
}

type boxServer struct {
	*server
	c    *client.Client
	rt   runtime.Runtime
	http *http.Client
}

const otherImage = "berm.local/other:1"

func newBox(t *testing.T, kind string) *box {
	t.Helper()
	e := commonEngine(t, kind)
	must(t, e.ImportBusybox(t.Context(), otherImage, "ENV WHICH=other"))
	b := &box{kind: kind, e: e, dir: e.dir(t)}
	b.root = makeDir(t, b.dir, "roots", "root")
	b.main = b.serve(t, "main", `
mounts: {allowed_roots: [`+b.root+`]}
networks: {lab: {engine_network: berm-box-`+filepath.Base(b.dir)+`, internal: true}}
images: {allow: ["berm.local/*"]}
env: {pin: {PINNED: by-policy}}
`)
	return b
}

// mark is what the test's processes have in their environment.
func (r *boxRow) mark() map[string]string { return map[string]string{attackMark: r.kind + r.key} }

// marked are the test's processes.
func (r *boxRow) marked() []seen { return marked(r.kind + r.key) }

// own makes a directory of the test's that may be mounted.
func (r *boxRow) own(path ...string) string {
	r.Helper()
	return makeDir(r, append([]string{r.root, r.key}, path...)...)
}

// serve starts a server. Settings are further ones, as in its environment.
func (b *box) serve(t *testing.T, name, policy string, settings ...string) *boxServer {
	t.Helper()
	server := newServer(t, b.e, makeDir(t, b.dir, name), testImage)
	server.env = append(server.env, settings...)
	server.policy(t, policy)
	server.start(t)
	s := &boxServer{server: server, rt: b.e.open(t, server)}
	s.http = &http.Client{Transport: openapitest.New(t).Transport(&http.Transport{MaxIdleConnsPerHost: 16})}
	c := check.Value(client.New(client.Options{BaseURL: s.url, Token: s.token, Retries: -1, HTTPClient: s.http}))(t)
	s.c = c
	return s
}

// boxSandbox is a key on a server.
type boxSandbox struct {
	t   testing.TB
	ctx context.Context
	s   *boxServer
	c   *client.Client
	key string
}

// sandbox gives a key, whose sandbox goes when the test ends.
func (s *boxServer) sandbox(ctx context.Context, t testing.TB, key string) boxSandbox {
	t.Cleanup(func() {
		if _, err := s.c.Delete(context.WithoutCancel(ctx), key); err != nil {
			t.Errorf("delete %s: %v", key, err)
		}
	})
	return boxSandbox{t, ctx, s, s.c, key}
}

// on gives another key of the test's on a server.
func (r *boxRow) on(s *boxServer, suffix string) boxSandbox {
	return s.sandbox(r.ctx, r.T, r.key+"-"+suffix)
}

func (x boxSandbox) create(req apitype.SandboxRequest) *apitype.Sandbox {
	x.t.Helper()
	return check.Value(x.c.Create(x.ctx, x.key, req))(x.t)
}

func (x boxSandbox) get() *apitype.Sandbox {
	x.t.Helper()
	return check.Value(x.c.Get(x.ctx, x.key))(x.t)
}

func (x boxSandbox) exec(req apitype.ExecRequest) *apitype.ExecResult {
	x.t.Helper()
	return check.Value(x.c.Exec(x.ctx, x.key, req))(x.t)
}

// sh runs a script that ends well, and gives what it prints, without space around it.
func (x boxSandbox) sh(script string) string {
	x.t.Helper()
	res := x.exec(apitype.ExecRequest{Command: shell(script)})
	if !res.OK {
		x.t.Fatalf("%s in %s: %+v", script, x.key, res)
	}
	return strings.TrimSpace(res.Stdout)
}

// fails runs a script that must not end well.
func (x boxSandbox) fails(script string) {
	x.t.Helper()
	if res := x.exec(apitype.ExecRequest{Command: shell(script)}); res.Status != "completed" || res.OK {
		x.t.Errorf("%s in %s: %+v", script, x.key, res)
	}
}

func shell(script string) apitype.Command { return apitype.Command{"sh", "-c", script} }

// wantNone checks that there is no sandbox.
func (x boxSandbox) wantNone() {
	x.t.Helper()
	_, err := x.c.Get(x.ctx, x.key)
	x.wantError(err, http.StatusNotFound, "not_found")
}

// wantError checks what an answer that says no has come to.
func (x boxSandbox) wantError(err error, status int, code string) apitype.Problem {
	x.t.Helper()
	e := refusal(err)
	if e.Status != status || e.Code != code || e.Problem.RequestID == "" || e.Problem.Detail == "" {
		x.t.Errorf("got %v, %+v, want %d %s", err, e.Problem, status, code)
	}
	return e.Problem
}

// raw makes a call with a body as it is, below the path of sandboxes.
func (x boxSandbox) raw(method, path, body string) (status int, answer map[string]any) {
	x.t.Helper()
	resp, text, err := exchange(x.ctx, x.s.http, method, x.s.url+"/api/v1/sandboxes/"+path, body, "Authorization", "Bearer "+x.s.token)
	must(x.t, err)
	if err := json.Unmarshal([]byte(text), &answer); err != nil {
		x.t.Fatalf("%s: %v", text, err)
	}
	return resp.StatusCode, answer
}

// refused makes a create that has to be denied by a rule of the policy.
func (x boxSandbox) refused(req apitype.SandboxRequest, rule string) apitype.Problem {
	x.t.Helper()
	_, err := x.c.Create(x.ctx, x.key, req)
	p := x.wantError(err, http.StatusForbidden, "policy_denied")
	if len(p.Reasons) != 1 || p.Reasons[0].Rule != rule {
		x.t.Errorf("%+v, want rule %s", p, rule)
	}
	return p
}

// pid is the main process' as the host sees it.
func (x boxSandbox) pid() int {
	x.t.Helper()
	c, err := x.s.rt.Inspect(x.ctx, x.get().ContainerID)
	if err != nil || c.Pid == 0 {
		x.t.Fatalf("inspect: %+v, %v", c, err)
	}
	return c.Pid
}

// proc is a file of the main process in the host's /proc.
func (x boxSandbox) proc(name string) string { return fmt.Sprintf("/proc/%d/%s", x.pid(), name) }

// inside is where the host sees a path of the sandbox.
func (x boxSandbox) inside(path string) string { return x.proc("root" + path) }

// wantMounted checks that a directory of the host is what the sandbox has at a path.
func (x boxSandbox) wantMounted(path, dir string) {
	x.t.Helper()
	want := check.Value(os.Stat(dir))(x.t)
	if got, err := os.Stat(x.inside(path)); err != nil || !os.SameFile(got, want) {
		x.t.Errorf("%s isn't %s: %v", path, dir, err)
	}
}

func readString(t testing.TB, path string) string {
	t.Helper()
	data := check.Value(os.ReadFile(path))(t)
	return strings.TrimSpace(string(data))
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}
