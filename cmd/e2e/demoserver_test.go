package e2e

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/bermhq/berm/cmd/berm/config"
	"github.com/bermhq/berm/cmd/berm/serve"
	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/runtime"
)

// demoServer is a berm serve in a process of its own, so that it can be killed.
type demoServer struct {
	dir      string // holds all that it writes
	binary   string // empty: this program
	opts     demoOptions
	token    string
	instance string
	network  string
	env      []string      // the server's settings
	url      string        // once it is up
	patience time.Duration // for it to get ready; 0 is 30 s

	cmd  *exec.Cmd
	done chan struct{} // closed when cmd has ended
}

func newDemoServer(dir string, opts demoOptions) *demoServer {
	id := strings.ToLower(rand.Text()[:8])
	s := &demoServer{dir: dir, opts: opts, token: rand.Text(), instance: "demo-" + id, network: "berm-demo-" + id}
	s.env = []string{
		"BERM_SECURITY_TOKENS=" + s.token, "BERM_ENGINE_INSTANCE=" + s.instance,
		"BERM_SANDBOX_NETWORK=" + s.network, "BERM_SANDBOX_CLEANUP_INTERVAL=500ms",
	}
	s.env = append(s.env, engineEnv(opts.engine)...)
	if opts.image != "" {
		s.env = append(s.env, "BERM_SANDBOX_IMAGE="+opts.image)
	}
	return s
}

// engineEnv is what tells a server of an engine's settings.
func engineEnv(e config.Engine) []string {
	var env []string
	for _, f := range []struct{ name, value string }{
		{"KIND", e.Kind}, {"ADDRESS", e.Address}, {"CALL_TIMEOUT", e.CallTimeout.String()}, {"REGISTRY_AUTH_FILE", e.RegistryAuthFile},
		{"NAMESPACE", e.Namespace}, {"SNAPSHOTTER", e.Snapshotter}, {"CGROUP_PARENT", e.CgroupParent}, {"NETNS", e.Netns},
		{"SUBNETS", e.Subnets}, {"CNI_PLUGIN_DIRS", strings.Join(e.CNIPluginDirs, ",")}, {"AGENT_FILE", e.AgentFile},
		{"AGENT_DIR", e.AgentDir},
	} {
		env = append(env, "BERM_ENGINE_"+f.name+"="+f.value)
	}
	return env
}

func (s *demoServer) stateDir() string { return filepath.Join(s.dir, "state") }

// openRuntime makes a client of the server's engine that sees what the server's does.
func (s *demoServer) openRuntime() (runtime.Runtime, error) {
	return serve.OpenRuntime(s.opts.engine, s.stateDir(), nil)
}

func (s *demoServer) logPath() string { return filepath.Join(s.dir, "server.log") }

// start runs the server and returns when it is ready to serve.
func (s *demoServer) start(ctx context.Context) error {
	if s.binary == "" {
		var err error
		if s.binary, err = os.Executable(); err != nil {
			return err
		}
	}
	log, err := os.OpenFile(s.logPath(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer func() { _ = log.Close() }() // the child has its own
	state := s.stateDir()
	listen := s.opts.listen
	if s.url != "" { // started again: where it was
		listen = strings.TrimPrefix(s.url, "http://")
	}
	s.cmd = exec.Command(s.binary, "serve", "--listen", listen, "--state-dir", state)
	s.cmd.Stdout, s.cmd.Stderr = log, log
	for _, kv := range os.Environ() {
		if !strings.HasPrefix(kv, "BERM_") {
			s.cmd.Env = append(s.cmd.Env, kv)
		}
	}
	s.cmd.Env = append(s.cmd.Env, s.env...)
	// A group of its own, or Ctrl-C would end it before the demo has cleaned up.
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM}
	if err := s.cmd.Start(); err != nil {
		return fmt.Errorf("start the server: %w", err)
	}
	s.done = make(chan struct{})
	go func(cmd *exec.Cmd, done chan struct{}) {
		_ = cmd.Wait()
		close(done)
	}(s.cmd, s.done)
	return s.ready(ctx, filepath.Join(state, "address"))
}

// ready waits until the server has announced its address and says that it is ready.
func (s *demoServer) ready(ctx context.Context, announced string) error {
	ctx, cancel := context.WithTimeout(ctx, cmp.Or(s.patience, 30*time.Second))
	defer cancel()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		if address, err := os.ReadFile(announced); err == nil {
			s.url = "http://" + strings.TrimSpace(string(address))
			if s.answers(ctx, "/readyz") {
				return nil
			}
		}
		select {
		case <-tick.C:
		case <-s.done:
			return errors.New("the server ended while it started")
		case <-ctx.Done():
			return fmt.Errorf("the server didn't get ready: %w", ctx.Err())
		}
	}
}

func (s *demoServer) answers(ctx context.Context, path string) bool {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, s.url+path, nil)
	if err != nil {
		return false
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return false
	}
	_ = resp.Body.Close()
	return resp.StatusCode == http.StatusOK
}

// kill ends the server as a crash would.
func (s *demoServer) kill() error {
	if err := s.cmd.Process.Kill(); err != nil {
		return fmt.Errorf("kill the server: %w", err)
	}
	<-s.done
	return nil
}

// stop ends the server as an operator would, and kills it if that takes too long.
func (s *demoServer) stop() {
	if s.done == nil {
		return
	}
	_ = s.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-s.done:
	case <-time.After(15 * time.Second):
		_ = s.cmd.Process.Kill()
		<-s.done
	}
}

// logTail is the end of what the server logged.
func (s *demoServer) logTail() string {
	data, err := os.ReadFile(s.logPath())
	if err != nil {
		return err.Error()
	}
	lines := strings.Split(strings.TrimSpace(string(data)), "\n")
	return strings.Join(lines[max(0, len(lines)-20):], "\n")
}

type demoOptions struct {
	engine        config.Engine
	image, listen string
}

// clearStage stops the server and removes what it made, by label and without it.
func clearStage(ctx context.Context, srv *demoServer) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	srv.stop()
	rt, err := srv.openRuntime()
	if err != nil {
		return err
	}
	defer func() { serve.CloseRuntime(rt) }()
	cfg := srv.opts.engine
	if rt, err = serve.WithAgent(rt, cfg, srv.stateDir(), serve.EngineView(ctx, cfg), slog.New(slog.DiscardHandler)); err != nil {
		return err
	}
	owned := map[string]string{lifecycle.LabelOwner: srv.instance}
	containers, err := rt.List(ctx, owned)
	if err != nil {
		return fmt.Errorf("look for what the demo left: %w", err)
	}
	var errs []error
	for _, c := range containers {
		errs = append(errs, rt.Remove(ctx, c.ID))
	}
	if s, ok := rt.(runtime.Sweeper); ok {
		errs = append(errs, s.Sweep(ctx)) // a server that was killed may have left parts
	}
	if n, ok := rt.(runtime.Networker); ok {
		errs = append(errs, n.RemoveNetwork(ctx, srv.network))
	}
	for _, left := range agentDirs(srv.stateDir()) {
		errs = append(errs, fmt.Errorf("%s is left of a sandbox", left))
	}
	return errors.Join(errs...)
}

// agentDirs are what is in the agents' directory but the program.
func agentDirs(stateDir string) []string {
	found, _ := filepath.Glob(filepath.Join(stateDir, "agents", "*")) // the error is of patterns
	return slices.DeleteFunc(found, func(path string) bool { return filepath.Base(path) == "bin" })
}

// No setting may be forgotten on its way to the demo's server.
func TestEngineEnvIsComplete(t *testing.T) {
	text := strings.Join(engineEnv(config.Engine{}), "\n")
	for i := range reflect.TypeFor[config.Engine]().NumField() {
		name := "BERM_ENGINE_" + strings.ToUpper(reflect.TypeFor[config.Engine]().Field(i).Tag.Get("yaml"))
		if !strings.Contains(text, name+"=") && name != "BERM_ENGINE_INSTANCE" { // a demo has its own
			t.Errorf("%s isn't told", name)
		}
	}
}
