package main

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/bermhq/berm/cmd/berm/config"
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
	return openRuntime(s.opts.engine, s.stateDir(), nil)
}

// closeRuntime lets go of a backend's connection, if it holds one.
func closeRuntime(rt runtime.Runtime) {
	if c, ok := rt.(io.Closer); ok {
		_ = c.Close()
	}
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
