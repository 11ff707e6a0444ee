package e2e

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/bermhq/berm/cmd/e2e/program"
	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/lifecycle/store"
	"github.com/bermhq/berm/proxy/client"
	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/containerd"
	"github.com/bermhq/berm/runtime/docker"
	"github.com/bermhq/berm/runtime/runtimetest/check"
	"github.com/bermhq/berm/runtime/runtimetest/engine"
)

const (
	testImage = "berm.local/busybox:latest"
	testToken = "a-token-for-tests-only"
)

// bin is the program under test.
var bin string

func TestMain(m *testing.M) {
	if from, to, ok := strings.Cut(os.Getenv(plainProxyEnv), ":"); ok {
		fmt.Fprintln(os.Stderr, plainProxy(from, to))
		os.Exit(1)
	}
	var err error
	if bin, err = engine.Berm(); err == nil {
		err = engine.WatchTemporary()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	for _, variable := range os.Environ() { // no setting of the caller's
		if name, _, _ := strings.Cut(variable, "="); strings.HasPrefix(name, "BERM_") && name != "BERM_REQUIRE" && !strings.HasPrefix(name, "BERM_PROJECT_") {
			_ = os.Unsetenv(name)
		}
	}
	code := m.Run()
	for _, e := range shared {
		if err := e.end(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = max(code, 1)
		}
	}
	os.Exit(code)
}

// berm runs the program to its end.
func berm(t *testing.T, stdin string, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	var out, errs bytes.Buffer
	cmd := exec.CommandContext(t.Context(), bin, args...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(stdin), &out, &errs
	err := cmd.Run()
	if exit := new(exec.ExitError); err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	return out.String(), errs.String(), cmd.ProcessState.ExitCode()
}

// command runs a program with more in its environment, and returns what it prints. An error
// has what it says on standard error.
func command(ctx context.Context, dir string, env []string, program string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Dir, cmd.Env = dir, append(os.Environ(), env...)
	out, err := cmd.Output()
	if exit := new(exec.ExitError); errors.As(err, &exit) {
		err = fmt.Errorf("%s %s: %w: %s", filepath.Base(program), strings.Join(args, " "), err, bytes.TrimSpace(exit.Stderr))
	}
	return strings.TrimSpace(string(out)), err
}

// mustRun is command for a program that has to end well.
func mustRun(t testing.TB, dir string, env []string, program string, args ...string) string {
	t.Helper()
	return check.Value(command(t.Context(), dir, env, program, args...))(t)
}

// buildProgram builds a program of testdata that runs in any container.
func buildProgram(t testing.TB, file, source string) {
	t.Helper()
	mustRun(t, "", []string{"CGO_ENABLED=0"}, "go", "build", "-trimpath", "-buildvcs=false", "-ldflags", "-s -w", "-o", file, source)
}

// dockerEnv has Docker's clients call a host, and nothing else heed them.
func dockerEnv(host, configDir string) []string {
	return []string{"DOCKER_HOST=" + host, "DOCKER_CONTEXT=", "DOCKER_CONFIG=" + configDir, "COMPOSE_INTERACTIVE_NO_CLI=1"}
}

// engineConfig is the section engine of a server's configuration.
type engineConfig struct {
	Kind, Address, Namespace, CgroupParent, Netns, RegistryAuthFile string
	CallTimeout                                                     time.Duration
}

// env has a server use the engine.
func (c engineConfig) env() []string {
	var env []string
	for name, value := range map[string]string{
		"KIND": c.Kind, "ADDRESS": c.Address, "NAMESPACE": c.Namespace, "CGROUP_PARENT": c.CgroupParent, "NETNS": c.Netns,
		"REGISTRY_AUTH_FILE": c.RegistryAuthFile, "CALL_TIMEOUT": c.CallTimeout.String(),
	} {
		if value != "" {
			env = append(env, "BERM_ENGINE_"+name+"="+value)
		}
	}
	return env
}

// daemon is a private engine of any kind.
type daemon interface {
	Dir() string
	Pid() int
	Netns() string
	Kill()
	Start(ctx context.Context) error
	Close() error
	ImportBusybox(ctx context.Context, ref string, changes ...string) error
}

// testEngine is a private engine with an image of busybox.
type testEngine struct {
	daemon
	config     engineConfig       // leads to it
	containerd *engine.Containerd // nil of another kind
}

// onEachEngine runs a test on an engine of each kind.
func onEachEngine(t *testing.T, test func(t *testing.T, kind string)) {
	for _, kind := range []string{"docker", "containerd"} {
		t.Run(kind, func(t *testing.T) { test(t, kind) })
	}
}

// startEngine starts an engine for a test that harms it.
func startEngine(t testing.TB, kind string, opts engine.Options) *testEngine {
	t.Helper()
	engine.Require(t, kind)
	e, err := newEngine(kind, opts)
	if err != nil {
		engine.Lacking(t, kind, err)
	}
	t.Cleanup(func() {
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	})
	return e
}

func newEngine(kind string, opts engine.Options) (*testEngine, error) {
	ctx := context.Background()
	e := &testEngine{config: engineConfig{Kind: kind, CallTimeout: 2 * time.Minute}} // a busy machine is no hang
	if kind == "docker" {
		d, err := engine.StartDocker(ctx, opts)
		if err != nil {
			return nil, err
		}
		e.daemon, e.config.Address = d, d.Host()
	} else {
		d, err := engine.StartContainerd(ctx, opts)
		if err != nil {
			return nil, err
		}
		e.daemon, e.containerd = d, d
		e.config.Address, e.config.Namespace = d.Address(), d.Namespace()
		e.config.CgroupParent, e.config.Netns = d.CgroupParent(), d.Netns()
	}
	if err := e.ImportBusybox(ctx, testImage); err != nil {
		return nil, errors.Join(err, e.Close())
	}
	return e, nil
}

// socket is the path of the engine's socket.
func (e *testEngine) socket() string { return strings.TrimPrefix(e.config.Address, "unix://") }

// dir makes a directory for a server's files. Whatever stays mounted below it, should a
// test fail, goes with the engine.
func (e *testEngine) dir(t testing.TB) string {
	t.Helper()
	root := filepath.Join(e.Dir(), "root")
	must(t, os.MkdirAll(root, 0o711)) //nolint:gosec // containers' users reach their mounts
	dir := check.Value(os.MkdirTemp(root, ""))(t)
	must(t, os.Chmod(dir, 0o755)) //nolint:gosec // likewise
	return dir
}

// open makes a client of the engine that sees what a server's does.
func (e *testEngine) open(t testing.TB, s *server) runtime.Runtime {
	t.Helper()
	var rt runtime.Runtime
	var err error
	if e.containerd == nil {
		rt, err = docker.New(docker.Options{Host: e.config.Address, CallTimeout: time.Minute})
	} else {
		rt, err = containerd.New(containerd.Options{
			Address: e.config.Address, Namespace: e.config.Namespace, CgroupParent: e.config.CgroupParent,
			Netns: e.config.Netns, Root: filepath.Join(s.stateDir(), "containerd"), CallTimeout: time.Minute,
			Agent: []byte("the client makes no containers"),
		})
	}
	must(t, err)
	if c, ok := rt.(interface{ Close() error }); ok {
		t.Cleanup(func() { _ = c.Close() })
	}
	return rt
}

// containersOf counts the server's containers on the engine.
func containersOf(t testing.TB, e *testEngine, s *server) int {
	t.Helper()
	containers := check.Value(e.open(t, s).List(t.Context(), map[string]string{lifecycle.LabelOwner: s.instance}))(t)
	return len(containers)
}

// server is a berm serve in a process of its own, so that it can be killed.
type server struct {
	dir      string // holds all that it writes
	token    string
	instance string
	network  string
	env      []string      // its settings
	url      string        // once it is up
	patience time.Duration // for it to get ready; 0 is 30 s

	log            *program.Output // of all times that it ran
	*program.Child                 // nil before it is started
}

// newServer configures a server on an engine, which stops when the test ends. Without an
// image, the default image is its image.
func newServer(t testing.TB, e *testEngine, dir, image string) *server {
	id := strings.ToLower(rand.Text()[:8])
	s := &server{dir: dir, token: rand.Text(), instance: "test-" + id, network: "berm-test-" + id, log: program.NewOutput()}
	s.env = append(e.config.env(), "BERM_SECURITY_TOKENS="+s.token, "BERM_ENGINE_INSTANCE="+s.instance,
		"BERM_SANDBOX_NETWORK="+s.network, "BERM_SANDBOX_CLEANUP_INTERVAL=500ms")
	if image != "" {
		s.env = append(s.env, "BERM_SANDBOX_IMAGE="+image)
	}
	t.Cleanup(func() {
		s.stop()
		if t.Failed() {
			t.Logf("the server's log ends with:\n%s", s.logTail())
		}
		s.removeAll(t, e)
	})
	return s
}

// removeAll removes what a stopped server has left on the engine, so that other tests
// don't find it. Whether it should have left nothing is for wantNothing to say.
func (s *server) removeAll(t testing.TB, e *testEngine) {
	ctx, rt := context.WithoutCancel(t.Context()), e.open(t, s)
	containers, err := rt.List(ctx, map[string]string{lifecycle.LabelOwner: s.instance})
	for _, c := range containers {
		err = errors.Join(err, rt.Remove(ctx, c.ID))
	}
	_, lacking := exec.LookPath("iptables-save") // without it, there are no networks to sweep
	if e.Pid() != 0 && lacking == nil {
		err = errors.Join(err, rt.Sweep(ctx))
	}
	if s.network != "" && lacking == nil {
		err = errors.Join(err, rt.RemoveNetwork(ctx, s.network))
	}
	if err != nil {
		t.Errorf("remove what the server has left: %v", err)
	}
}

// policy gives the server a policy, in place of the one that it had.
func (s *server) policy(t testing.TB, text string) {
	t.Helper()
	file := filepath.Join(s.dir, "policy.yaml")
	write(t, file, "version: 1\n"+text)
	if setting := "BERM_POLICY_FILE=" + file; !slices.Contains(s.env, setting) {
		s.env = append(s.env, setting)
	}
}

func (s *server) stateDir() string { return filepath.Join(s.dir, "state") }

// start runs the server, for the first time or again, until it is ready to serve. It
// returns a client that calls again where that makes sense.
func (s *server) start(t testing.TB) *client.Client {
	t.Helper()
	if err := s.run(t.Context()); err != nil {
		t.Fatalf("%v\n%s", err, s.logTail())
	}
	return check.Value(client.New(client.Options{BaseURL: s.url, Token: s.token}))(t)
}

func (s *server) run(ctx context.Context) error {
	listen := "127.0.0.1:0"
	if s.url != "" { // started again: where it was
		listen = strings.TrimPrefix(s.url, "http://")
	}
	cmd := exec.Command(bin, "serve", "--listen", listen, "--state-dir", s.stateDir())
	cmd.Env = append(os.Environ(), s.env...)
	var err error
	if s.Child, err = program.Start(cmd, s.log); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, cmp.Or(s.patience, 30*time.Second))
	defer cancel()
	return s.Ready(ctx, func() bool {
		address, err := os.ReadFile(filepath.Join(s.stateDir(), "address"))
		if err != nil {
			return false
		}
		s.url = "http://" + strings.TrimSpace(string(address))
		return s.answers(ctx, "/readyz")
	})
}

func (s *server) answers(ctx context.Context, path string) bool {
	resp, _, err := exchange(ctx, http.DefaultClient, http.MethodGet, s.url+path, "")
	return err == nil && resp.StatusCode == http.StatusOK
}

// exchange makes a call, and returns the answer with its body read. A body is JSON unless
// the headers, names and values in turn, say another.
func exchange(ctx context.Context, c *http.Client, method, url, body string, headers ...string) (*http.Response, string, error) {
	req, err := http.NewRequestWithContext(ctx, method, url, strings.NewReader(body))
	if err != nil {
		return nil, "", err
	}
	if body != "" {
		req.Header.Set("Content-Type", "application/json")
	}
	for pair := range slices.Chunk(headers, 2) {
		req.Header.Set(pair[0], pair[1])
	}
	resp, err := c.Do(req)
	if err != nil {
		return nil, "", err
	}
	defer func() { _ = resp.Body.Close() }()
	answer, err := io.ReadAll(resp.Body)
	return resp, string(answer), err
}

// through is a transport that leads to a unix socket.
func through(socket string) *http.Transport {
	return &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", socket)
	}}
}

// client makes a client that makes each call once.
func (s *server) client(t testing.TB, transport http.RoundTripper) *client.Client {
	t.Helper()
	return check.Value(client.New(client.Options{BaseURL: s.url, Token: s.token, Retries: -1, HTTPClient: &http.Client{Transport: transport}}))(t)
}

// stop ends the server if it was started.
func (s *server) stop() {
	if s.Child != nil {
		_ = s.Stop()
	}
}

// logTail is the end of what the server logged.
func (s *server) logTail() string {
	lines := strings.Split(strings.TrimSpace(s.log.String()), "\n")
	return strings.Join(lines[max(0, len(lines)-20):], "\n")
}

// agentDirs are what is in the agents' directory but the program.
func agentDirs(stateDir string) []string {
	found, _ := filepath.Glob(filepath.Join(stateDir, "agents", "*")) // the error is of patterns
	return slices.DeleteFunc(found, func(path string) bool { return filepath.Base(path) == "bin" })
}

// wantNothing checks that a stopped server has left nothing: no container and no network
// on the engine, no record, and no mount.
func wantNothing(t testing.TB, e *testEngine, servers ...*server) {
	t.Helper()
	for _, s := range servers {
		rt, owned := e.open(t, s), map[string]string{lifecycle.LabelOwner: s.instance}
		containers, err := rt.List(t.Context(), owned)
		if err != nil || len(containers) > 0 {
			t.Errorf("containers are left: %v, %v", containers, err)
		}
		networks, err := rt.Networks(t.Context(), owned)
		if err != nil || len(networks) > 0 {
			t.Errorf("networks are left: %v, %v", networks, err)
		}
		db := check.Value(store.Open(t.Context(), store.Options{Path: filepath.Join(s.stateDir(), "berm.db")}))(t)
		if records, err := db.Records(t.Context()); err != nil || len(records) > 0 {
			t.Errorf("records are left: %v, %v", records, err)
		}
		_ = db.Close()
		wantEmptyDir(t, filepath.Join(s.stateDir(), "hold"))
		until(t, "nothing of sandboxes is left in "+s.dir, func() bool { return len(partsIn(s)) == 0 })
	}
}

// partsIn are the directories and mounts of sandboxes below the server's directory.
func partsIn(s *server) []string {
	left := agentDirs(s.stateDir())
	for _, pattern := range []string{"containers/*", "netns/*", "networks/*"} {
		found, _ := filepath.Glob(filepath.Join(s.stateDir(), "containerd", pattern)) // the pattern is good
		left = append(left, found...)
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return []string{err.Error()}
	}
	for line := range strings.Lines(string(mounts)) {
		if strings.Contains(line, s.dir+"/") {
			left = append(left, "mount "+line)
		}
	}
	return left
}

var (
	must         = check.Must // ends a test if a step of its own fails
	write        = check.Write
	wantEmptyDir = check.EmptyDir
)

// refusal is the answer of the server's that an error is; an empty one if it is none.
func refusal(err error) *client.Error {
	if e, ok := errors.AsType[*client.Error](err); ok {
		return e
	}
	return new(client.Error)
}

// makeDir makes a directory, and those above it.
func makeDir(t testing.TB, path ...string) string {
	t.Helper()
	dir := filepath.Join(path...)
	must(t, os.MkdirAll(dir, 0o755))
	return dir
}

// replace swaps a file for another as editors do.
func replace(t testing.TB, path, content string) {
	t.Helper()
	write(t, path+".new", content)
	must(t, os.Rename(path+".new", path))
}

// patience is how long any call may take that isn't meant to take longer: an order of
// magnitude more than each of the deadlines that stand behind it.
const patience = 90 * time.Second

// until asks again and again, more slowly by and by, for as long as patience lasts.
func until(t testing.TB, what string, f func() bool) {
	t.Helper()
	pause := 10 * time.Millisecond
	for deadline := time.Now().Add(patience); !f(); time.Sleep(pause) {
		if pause = min(2*pause, 200*time.Millisecond); time.Now().After(deadline) {
			t.Fatalf("it never came to be that %s", what)
		}
	}
}

// deadline returns a context that lasts as long as patience.
func deadline(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	return ctx
}
