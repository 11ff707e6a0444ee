package compose_test

import (
	"bytes"
	"context"
	"debug/buildinfo"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/compose-spec/compose-go/v2/types"

	"github.com/bermhq/berm/runtime/runtimetest/engine"
)

const (
	bermImage = "berm.local/berm:1"
	busybox   = "berm.local/busybox:1"
	clients   = "berm.local/clients:1" // busybox, and testdata/clients
)

// bench is what the tests of one engine share.
type bench struct {
	engine *engine.Docker
	env    []string
}

// command runs a program to its end, and answers what it printed.
func command(ctx context.Context, dir string, env []string, program string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Dir, cmd.Env = dir, append(os.Environ(), env...)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Run(); err != nil {
		return out.String(), fmt.Errorf("%s %v: %w\n%s%s", filepath.Base(program), args, err, &out, &errs)
	}
	return strings.TrimSpace(out.String()), nil
}

func must(t *testing.T, dir string, env []string, program string, args ...string) string {
	t.Helper()
	out, err := command(t.Context(), dir, env, program, args...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// berm is the path of the program under test.
var berm string

func TestMain(m *testing.M) {
	var err error
	if berm, err = engine.Berm(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(m.Run())
}

func write(t *testing.T, path, content string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
}

func newBench(t *testing.T) *bench {
	t.Helper()
	engine.Require(t, "docker")
	if _, err := exec.LookPath("docker-compose"); err != nil {
		engine.Lacking(t, "compose", err)
	}
	dir := t.TempDir()
	b := &bench{}
	var err error
	if b.engine, err = engine.StartDocker(t.Context(), engine.Options{}); err != nil {
		engine.Lacking(t, "docker", err)
	}
	t.Cleanup(func() {
		if err := b.engine.Close(); err != nil {
			t.Error(err)
		}
	})
	b.env = []string{"DOCKER_HOST=" + b.engine.Host(), "DOCKER_CONTEXT=", "DOCKER_CONFIG=" + dir, "DOCKER_BUILDKIT=0", "COMPOSE_INTERACTIVE_NO_CLI=1"}
	if err := b.engine.ImportBusybox(t.Context(), busybox); err != nil {
		t.Fatal(err)
	}
	if err := engine.BuildBermImage(t.Context(), b.engine.Host(), bermImage, berm); err != nil {
		t.Fatal(err)
	}
	small := filepath.Join(dir, "clients")
	write(t, filepath.Join(small, "Dockerfile"), "FROM "+busybox+"\nCOPY clients /bin/docker\nCOPY clients /bin/curl\n")
	must(t, ".", []string{"CGO_ENABLED=0"}, "go", "build", "-trimpath", "-ldflags", "-s -w", "-o", filepath.Join(small, "clients"), "./testdata/clients")
	b.docker(t, "build", "-q", "-t", clients, small)
	return b
}

func (b *bench) docker(t *testing.T, args ...string) string {
	t.Helper()
	return must(t, ".", b.env, "docker", args...)
}

// stack is one that `berm init compose` has written.
type stack struct {
	*bench
	name, dir string
	env       []string
}

// quick has a stack looked at more often than people need.
const quick = `
services:
  berm: {healthcheck: {interval: 1s}}
`

func (b *bench) init(t *testing.T, name string, settings []string, args ...string) *stack {
	t.Helper()
	s := &stack{bench: b, name: name, dir: filepath.Join(t.TempDir(), name)}
	must(t, ".", nil, berm, append([]string{"init", "compose", s.dir, "--stack", name, "--image", bermImage}, args...)...)
	files := []string{"compose.yaml"}
	if slices.Contains(args, "--with-docker-api") {
		files = append(files, "compose.override.yaml")
	}
	load(t, s.dir, settings, slices.Clone(files)...)
	write(t, filepath.Join(s.dir, "quick.yaml"), quick)
	socket := strings.TrimPrefix(b.engine.Host(), "unix://")
	s.env = append(slices.Clone(b.env), "COMPOSE_FILE="+strings.Join(append(files, "quick.yaml"), ":"), "DOCKER_SOCKET="+socket,
		"SANDBOX_IMAGE="+busybox, "APP_IMAGE="+clients, "CI_IMAGE="+clients)
	s.env = append(s.env, settings...)
	return s
}

// compose runs what the distribution has, which is older than the plug-in.
func (s *stack) compose(ctx context.Context, args ...string) (string, error) {
	return command(ctx, s.dir, s.env, "docker-compose", args...)
}

func (s *stack) must(t *testing.T, args ...string) string {
	t.Helper()
	out, err := s.compose(t.Context(), args...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// up starts the stack and waits until all of it is healthy. At the test's end it takes
// it down, and nothing of it may be left.
func (s *stack) up(t *testing.T) {
	t.Helper()
	project := "label=com.docker.compose.project=" + s.name
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if t.Failed() {
			log, err := s.compose(ctx, "logs", "--no-color")
			t.Logf("%s\n%v", log, err)
		}
		_, err := s.compose(ctx, "stop", "--timeout", "20")
		if err != nil {
			t.Error(err)
		}
		out, err := command(ctx, ".", s.env, "docker", "inspect", "--format", "{{.State.ExitCode}}", s.name+"_berm_1")
		if err != nil || out != "0" {
			t.Errorf("the server ended with %s, %v", out, err)
		}
		if _, err := s.compose(ctx, "down", "--volumes"); err != nil {
			t.Error(err)
		}
		for _, kind := range [][]string{{"ps", "--all"}, {"volume", "ls"}, {"network", "ls"}} {
			left, err := command(ctx, ".", s.env, "docker", append(kind, "--quiet", "--filter", project)...)
			if err != nil || left != "" {
				t.Errorf("%s has left, of %s: %s%v", s.name, kind[0], left, err)
			}
		}
	})
	s.start(t)
}

// start starts what isn't running, and waits until all is healthy.
func (s *stack) start(t *testing.T) {
	t.Helper()
	s.must(t, "up", "--detach")
	deadline := time.After(3 * time.Minute)
	for {
		states := strings.Split(s.docker(t, "ps", "--all", "--filter", "label=com.docker.compose.project="+s.name, "--format", "{{.Names}} {{.Status}}"), "\n")
		if !slices.ContainsFunc(states, func(state string) bool { return !strings.Contains(state, "(healthy)") }) {
			return
		}
		select {
		case <-deadline:
			t.Fatalf("not healthy: %s", states)
		case <-time.After(200 * time.Millisecond):
		}
	}
}

// sandbox runs `berm sandbox` beside the server.
func (s *stack) sandbox(t *testing.T, token string, args ...string) string {
	t.Helper()
	return s.must(t, append([]string{"exec", "-T", "berm", "/berm", "sandbox", "--token-file", token}, args...)...)
}

// job makes a sandbox, has it compute and removes it.
func (s *stack) job(t *testing.T, token string) {
	t.Helper()
	s.sandbox(t, token, "create", "demo")
	if got := s.sandbox(t, token, "exec", "demo", "--", "sh", "-c", "echo $((6 * 7)) $(id -u):$(id -g)"); got != "42 1000:1000" {
		t.Errorf("the job printed %q", got)
	}
	s.sandbox(t, token, "rm", "demo")
	if log := s.must(t, "logs", "--no-color", "berm"); strings.Contains(log, "agent_off") {
		t.Error("the agent is off")
	}
}

// The stacks come up, do their job and go down, as `berm init compose` writes them.
func TestUp(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	t.Run("minimal", func(t *testing.T) {
		t.Parallel()
		s := b.init(t, "minimal", nil, "--with-docker-api")
		s.up(t)
		s.job(t, "/run/secrets/token")
		s.must(t, "exec", "-T", "berm", "/berm", "doctor") // finds nothing bad
		file := filepath.Join(s.dir, "berm.db")
		shell := func(line string) string {
			t.Helper()
			// The older Compose closes no standard input unless it leaves that to docker.
			return must(t, s.dir, append(slices.Clone(s.env), "COMPOSE_INTERACTIVE_NO_CLI=0"), "sh", "-c", line)
		}
		shell("docker-compose exec -T berm /berm store backup - > " + file)
		for _, check := range []string{"store check", "store check - < " + file} {
			if got := shell("docker-compose exec -T berm /berm " + check); !strings.Contains(got, "sandboxes: 0") {
				t.Errorf("%s: %s", check, got)
			}
		}
		s.must(t, "stop", "berm")
		if got := shell("docker-compose run --rm -T berm store restore --force - < " + file); !strings.Contains(got, "restored") {
			t.Errorf("the restore: %s", got)
		}
		s.start(t)
		out := b.docker(t, "run", "--rm", "--network", "minimal_docker-api", "-e", "DOCKER_HOST=tcp://berm:2375", clients,
			"docker", "run", "--rm", busybox, "sh", "-c", "echo $((6 * 7))")
		if out != "42" {
			t.Errorf("through the second door came %q", out)
		}
	})
	t.Run("agent-app", func(t *testing.T) {
		t.Parallel()
		s := b.init(t, "agent-app", nil)
		s.up(t) // app and ci are healthy when their jobs were done
		if log := s.must(t, "logs", "--no-color", "app", "ci"); !strings.Contains(log, "the answer is 42") || !strings.Contains(log, "done in a container of its own") {
			t.Errorf("the applications say:\n%s", log)
		}
		if out, err := s.compose(t.Context(), "exec", "-T", "app", "curl", "--max-time", "5", "http://berm:2375/_ping"); err == nil {
			t.Errorf("app gets to the Docker Engine API: %s", out)
		}
		s.must(t, "stop", "-t", "1", "app", "ci")
		s.sandbox(t, "/run/secrets/token", "rm", "app-job")
	})
	t.Run("held", func(t *testing.T) {
		t.Parallel()
		b.heldMounts(t)
	})
	t.Run("containerd", func(t *testing.T) {
		t.Parallel()
		store := engine.ContainerdStore{Address: b.engine.Containerd(), Namespace: "berm"}
		if err := store.ImportBusybox(t.Context(), busybox); err != nil {
			t.Fatal(err)
		}
		run := t.TempDir()
		s := b.init(t, "containerd", []string{
			"CONTAINERD_SOCKET=" + b.engine.Containerd(), "CGROUP_PARENT=/" + filepath.Base(b.engine.Dir()),
			"STATE_DIR=" + filepath.Join(b.engine.Dir(), "berm"), "RUN_DIR=" + run,
		})
		s.up(t)
		token := filepath.Join(s.dir, "secrets", "token")
		s.job(t, token)
		s.must(t, "exec", "-T", "berm", "/berm", "doctor", "--enter-engine") // likewise
		s.sandbox(t, token, "create", "kept")
		state := filepath.Join(b.engine.Dir(), "berm")
		backup := b.docker(t, "run", "--rm", "--volume", state+":"+state, bermImage, "store", "backup", "-", "--state-dir", state)
		if !strings.HasPrefix(backup, "SQLite format 3\x00") {
			t.Errorf("the backup: %.100q", backup)
		}
		s.must(t, "kill", "berm") // the server in the engine's namespace ends with its container
		s.start(t)
		if got := s.sandbox(t, token, "exec", "kept", "--", "echo", "still here"); got != "still here" {
			t.Errorf("after a kill the sandbox says %q", got)
		}
		s.sandbox(t, token, "rm", "kept")
	})
}

// heldMounts runs the override that the guide has for Docker: such a Berm holds what it
// mounts, and the stack without it mounts only what the policy trusts.
func (b *bench) heldMounts(t *testing.T) {
	s := b.init(t, "minimal", nil)
	dir := filepath.Join(filepath.Dir(s.dir), "held")
	if err := os.Rename(s.dir, dir); err != nil {
		t.Fatal(err)
	}
	s.dir, s.name = dir, "held"
	guide, err := os.ReadFile("../../../docs/guide-compose.md")
	if err != nil {
		t.Fatal(err)
	}
	_, override, _ := strings.Cut(string(guide), "`compose.override.yaml`:\n\n```yaml\n")
	override, _, _ = strings.Cut(override, "```")
	state, work := filepath.Join(b.engine.Dir(), "held"), t.TempDir()
	for old, with := range map[string]string{
		"/var/run/docker.sock": strings.TrimPrefix(b.engine.Host(), "unix://"), "/var/lib/berm": state, "/etc/berm": dir,
	} {
		if !strings.Contains(override, old) {
			t.Fatalf("the guide's override lacks %s", old)
		}
		override = strings.ReplaceAll(override, old, with)
	}
	write(t, filepath.Join(dir, "compose.override.yaml"), override)
	policy := filepath.Join(dir, "policy", "minimal.yaml")
	text, err := os.ReadFile(policy)
	if err != nil {
		t.Fatal(err)
	}
	write(t, policy, strings.Replace(string(text), "# allowed_roots: [/srv/data]", "allowed_roots: ["+work+"]", 1))
	if err := os.Chown(work, 1000, 1000); err != nil {
		t.Fatal(err)
	}
	s.env = append(s.env, "COMPOSE_FILE=compose.yaml:compose.override.yaml:quick.yaml", "BERM_PORT=7071")
	s.up(t)
	token := filepath.Join(dir, "secrets", "token")
	if got := s.sandbox(t, token, "create", "demo", "--host-path", work, "--host-path-mode", "rw", "-o", "json"); !strings.Contains(got, `"mounts": "held"`) {
		t.Errorf("the sandbox: %s", got)
	}
	s.sandbox(t, token, "exec", "demo", "--", "sh", "-c", "echo done > /workspace/file")
	if data, err := os.ReadFile(filepath.Join(work, "file")); err != nil || string(data) != "done\n" {
		t.Errorf("on the host: %q, %v", data, err)
	}
	s.sandbox(t, token, "rm", "demo")
}

// What the server is told by each stack is a valid configuration, and what the older Compose
// is given a valid file.
func TestChecked(t *testing.T) {
	t.Parallel()
	for name, files := range stacks() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := filepath.Join(t.TempDir(), "stack")
			stack, with, _ := strings.Cut(name, " ")
			args := []string{"init", "compose", dir, "--stack", stack}
			if with != "" {
				args = append(args, "--with-docker-api")
				files = []string{"compose.yaml", "compose.override.yaml"}
			} else {
				files = []string{"compose.yaml"}
			}
			must(t, ".", nil, berm, args...)
			project := load(t, dir, nil, slices.Clone(files)...)
			mounts := map[string]string{} // in the container, on this host
			for _, v := range project.Services["berm"].Volumes {
				if v.Type == types.VolumeTypeBind {
					mounts[v.Target] = v.Source
				}
			}
			for name, secret := range project.Secrets {
				mounts["/run/secrets/"+name] = secret.File
			}
			var env []string
			for key, value := range project.Services["berm"].Environment {
				for target, source := range mounts {
					if rest, ok := strings.CutPrefix(*value+"/", target+"/"); ok {
						*value = filepath.Join(source, rest)
						break
					}
				}
				env = append(env, key+"="+*value)
			}
			must(t, dir, env, berm, "config", "check")
			if _, err := exec.LookPath("docker-compose"); err != nil {
				engine.Lacking(t, "compose", err)
			}
			must(t, dir, []string{"COMPOSE_FILE=" + strings.Join(files, ":")}, "docker-compose", "config", "--quiet")
		})
	}
	if _, err := command(t.Context(), ".", []string{"BERM_HTTP_LISTEN=nowhere"}, berm, "config", "check"); err == nil {
		t.Error("berm config check finds nothing wrong with anything")
	}
}

// What only tests import isn't in the program, whoever else brings it.
func TestLinked(t *testing.T) {
	t.Parallel()
	info, err := buildinfo.ReadFile(berm)
	if err != nil {
		t.Fatal(err)
	}
	for _, dep := range info.Deps {
		if slices.Contains([]string{"github.com/compose-spec/compose-go/v2", "github.com/google/go-cmp", "github.com/prometheus/prometheus"}, dep.Path) {
			t.Errorf("%s is in berm", dep.Path)
		}
	}
	if len(info.Deps) < 20 {
		t.Errorf("berm has %d modules in it", len(info.Deps))
	}
}
