package e2e

import (
	"context"
	"debug/buildinfo"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/compose-spec/compose-go/v2/types"

	"github.com/bermhq/berm/compose"
	"github.com/bermhq/berm/runtime/runtimetest/check"
	"github.com/bermhq/berm/runtime/runtimetest/engine"
)

// clientsImage is testImage with testdata/clients as its docker and curl.
const clientsImage = "berm.local/clients:1"

// buildClients builds it.
func buildClients(t *testing.T, e *testEngine) {
	t.Helper()
	dir := t.TempDir()
	write(t, filepath.Join(dir, "Dockerfile"), "FROM "+testImage+"\nCOPY clients /bin/docker\nCOPY clients /bin/curl\n")
	buildProgram(t, filepath.Join(dir, "clients"), "./testdata/clients")
	mustRun(t, "", append(dockerEnv(e.config.Address, dir), "DOCKER_BUILDKIT=0"), "docker", "build", "-q", "-t", clientsImage, dir)
}

// stack is one that `berm init compose` has written.
type stack struct {
	name, dir string
	env       []string
}

// quick has a stack looked at more often than people need, though not all the time.
const quick = `
services:
  berm: {healthcheck: {interval: 2s}}
`

func newStack(t *testing.T, e *testEngine, name string, settings []string, args ...string) *stack {
	t.Helper()
	s := &stack{name: name, dir: filepath.Join(t.TempDir(), name)}
	mustRun(t, ".", nil, bin, append([]string{"init", "compose", s.dir, "--stack", name, "--image", bermImage}, args...)...)
	files := []string{"compose.yaml"}
	if slices.Contains(args, "--with-docker-api") {
		files = append(files, "compose.override.yaml")
	}
	loadStack(t, s.dir, settings, slices.Clone(files)...)
	write(t, filepath.Join(s.dir, "quick.yaml"), quick)
	s.env = append(dockerEnv(e.config.Address, t.TempDir()), "COMPOSE_FILE="+strings.Join(append(files, "quick.yaml"), ":"), "DOCKER_SOCKET="+e.socket(),
		"SANDBOX_IMAGE="+testImage, "APP_IMAGE="+clientsImage, "CI_IMAGE="+clientsImage)
	s.env = append(s.env, settings...)
	return s
}

// compose runs what the distribution has, which is older than the plug-in, and slow to start.
func (s *stack) compose(t *testing.T, args ...string) string {
	t.Helper()
	return mustRun(t, s.dir, s.env, "docker-compose", args...)
}

func (s *stack) docker(t *testing.T, args ...string) string {
	t.Helper()
	return mustRun(t, s.dir, s.env, "docker", args...)
}

// berm runs a command of berm's beside the server.
func (s *stack) berm(t *testing.T, args ...string) string {
	t.Helper()
	return s.docker(t, append([]string{"exec", s.name + "_berm_1", "/berm"}, args...)...)
}

// up starts the stack and waits until all of it is healthy. At the test's end it takes
// it down, and nothing of it may be left.
func (s *stack) up(t *testing.T) {
	t.Helper()
	project := "label=com.docker.compose.project=" + s.name
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		run := func(want, program string, args ...string) {
			if out, err := command(ctx, s.dir, s.env, program, args...); err != nil || out != want {
				t.Errorf("%s %v: %q, %v", program, args, out, err)
			}
		}
		if t.Failed() {
			log, err := command(ctx, s.dir, s.env, "docker-compose", "logs", "--no-color")
			t.Logf("%s\n%v", log, err)
		}
		server := s.name + "_berm_1"
		run(server, "docker", "stop", "-t", "20", server)
		run("0", "docker", "inspect", "--format", "{{.State.ExitCode}}", server)
		run("", "docker-compose", "down", "--volumes")
		for _, kind := range []string{"ps --all", "volume ls", "network ls"} { // nothing is left
			run("", "docker", append(strings.Fields(kind), "--quiet", "--filter", project)...)
		}
	})
	s.compose(t, "up", "--detach")
	s.healthy(t)
}

// healthy waits until all of the stack is.
func (s *stack) healthy(t *testing.T) {
	t.Helper()
	until(t, "all of the stack is healthy", func() bool {
		states := s.docker(t, "ps", "--all", "--filter", "label=com.docker.compose.project="+s.name, "--format", "{{.Status}}")
		return !slices.ContainsFunc(strings.Split(states, "\n"), func(state string) bool { return !strings.Contains(state, "(healthy)") })
	})
}

// sandbox runs `berm sandbox` beside the server.
func (s *stack) sandbox(t *testing.T, token string, args ...string) string {
	t.Helper()
	return s.berm(t, append([]string{"sandbox", "--token-file", token}, args...)...)
}

// job makes a sandbox, has it compute and removes it.
func (s *stack) job(t *testing.T, token string) {
	t.Helper()
	s.sandbox(t, token, "create", "demo")
	if got := s.sandbox(t, token, "exec", "demo", "--", "sh", "-c", "echo $((6 * 7)) $(id -u):$(id -g)"); got != "42 1000:1000" {
		t.Errorf("the job printed %q", got)
	}
	s.sandbox(t, token, "rm", "demo")
	if log := s.logs(t, "berm"); strings.Contains(log, "agent_off") || !strings.Contains(log, "serving") {
		t.Errorf("the agent is off, or nothing is logged:\n%s", log)
	}
}

// logs are what a service has said.
func (s *stack) logs(t *testing.T, service string) string {
	t.Helper()
	return mustRun(t, s.dir, s.env, "sh", "-c", "docker logs "+s.name+"_"+service+"_1 2>&1")
}

// The stacks come up, do their job and go down, as `berm init compose` writes them.
func TestStacks(t *testing.T) {
	t.Parallel()
	wantCompose(t)
	e := commonEngine(t, "docker")
	buildBerm(t, e)
	buildClients(t, e)
	t.Run("minimal", func(t *testing.T) {
		t.Parallel()
		s := newStack(t, e, "minimal", nil, "--with-docker-api")
		s.up(t)
		s.job(t, "/run/secrets/token")
		s.berm(t, "doctor") // finds nothing bad
		file := filepath.Join(s.dir, "berm.db")
		shell := func(line string) string {
			t.Helper()
			// The older Compose closes no standard input unless it leaves that to docker.
			return mustRun(t, s.dir, append(slices.Clone(s.env), "COMPOSE_INTERACTIVE_NO_CLI=0"), "sh", "-c", line)
		}
		shell("docker-compose exec -T berm /berm store backup - > " + file)
		for _, got := range []string{s.berm(t, "store", "check"), shell("docker-compose exec -T berm /berm store check - < " + file)} {
			if !strings.Contains(got, "sandboxes: 0") {
				t.Errorf("the check: %s", got)
			}
		}
		s.docker(t, "stop", "minimal_berm_1")
		if got := shell("docker-compose run --rm -T berm store restore --force - < " + file); !strings.Contains(got, "restored") {
			t.Errorf("the restore: %s", got)
		}
		s.docker(t, "start", "minimal_berm_1")
		s.healthy(t)
		out := s.docker(t, "run", "--rm", "--network", "minimal_docker-api", "-e", "DOCKER_HOST=tcp://berm:2375", clientsImage,
			"docker", "run", "--rm", testImage, "sh", "-c", "echo $((6 * 7))")
		if out != "42" {
			t.Errorf("through the second door came %q", out)
		}
	})
	t.Run("agent-app", func(t *testing.T) {
		t.Parallel()
		s := newStack(t, e, "agent-app", nil)
		s.up(t) // app and ci are healthy when their jobs were done
		if app, ci := s.logs(t, "app"), s.logs(t, "ci"); !strings.Contains(app, "the answer is 42") || !strings.Contains(ci, "done in a container of its own") {
			t.Errorf("the applications say:\n%s\n%s", app, ci)
		}
		if out, err := command(t.Context(), s.dir, s.env, "docker", "exec", "agent-app_app_1", "curl", "--max-time", "5", "http://berm:2375/_ping"); err == nil {
			t.Errorf("app gets to the Docker Engine API: %s", out)
		}
		s.docker(t, "stop", "-t", "1", "agent-app_app_1", "agent-app_ci_1")
		s.sandbox(t, "/run/secrets/token", "rm", "app-job")
	})
	t.Run("held", func(t *testing.T) {
		t.Parallel()
		heldMounts(t, e)
	})
	t.Run("containerd", func(t *testing.T) {
		t.Parallel()
		socket, state := e.daemon.(*engine.Docker).Containerd(), filepath.Join(e.Dir(), "berm")
		must(t, engine.ContainerdStore{Address: socket, Namespace: "berm"}.ImportBusybox(t.Context(), testImage))
		s := newStack(t, e, "containerd", []string{
			"CONTAINERD_SOCKET=" + socket, "CGROUP_PARENT=/" + filepath.Base(e.Dir()), "STATE_DIR=" + state, "RUN_DIR=" + t.TempDir(),
		})
		s.up(t)
		token := filepath.Join(s.dir, "secrets", "token")
		s.job(t, token)
		s.berm(t, "doctor", "--enter-engine") // likewise
		s.sandbox(t, token, "create", "kept")
		backup := s.docker(t, "run", "--rm", "--volume", state+":"+state, bermImage, "store", "backup", "-", "--state-dir", state)
		if !strings.HasPrefix(backup, "SQLite format 3\x00") {
			t.Errorf("the backup: %.100q", backup)
		}
		s.docker(t, "kill", "containerd_berm_1") // the server in the engine's namespace ends with its container
		s.docker(t, "start", "containerd_berm_1")
		s.healthy(t)
		if got := s.sandbox(t, token, "exec", "kept", "--", "echo", "still here"); got != "still here" {
			t.Errorf("after a kill the sandbox says %q", got)
		}
		s.sandbox(t, token, "rm", "kept")
	})
}

// heldMounts runs the override that the guide has for Docker: such a Berm holds what it
// mounts, and the stack without it mounts only what the policy trusts.
func heldMounts(t *testing.T, e *testEngine) {
	s := newStack(t, e, "minimal", nil)
	dir := filepath.Join(filepath.Dir(s.dir), "held")
	must(t, os.Rename(s.dir, dir))
	s.dir, s.name = dir, "held"
	_, override, _ := strings.Cut(readString(t, "../../docs/guide-compose.md"), "`compose.override.yaml`:\n\n```yaml\n")
	override, _, _ = strings.Cut(override, "```")
	state, work := filepath.Join(e.Dir(), "held"), t.TempDir()
	for old, with := range map[string]string{
		"/var/run/docker.sock": e.socket(), "/var/lib/berm": state, "/etc/berm": dir,
	} {
		if !strings.Contains(override, old) {
			t.Fatalf("the guide's override lacks %s", old)
		}
		override = strings.ReplaceAll(override, old, with)
	}
	write(t, filepath.Join(dir, "compose.override.yaml"), override)
	policy := filepath.Join(dir, "policy", "minimal.yaml")
	write(t, policy, strings.Replace(readString(t, policy), "# allowed_roots: [/srv/data]", "allowed_roots: ["+work+"]", 1))
	must(t, os.Chown(work, 1000, 1000))
	s.env = append(s.env, "COMPOSE_FILE=compose.yaml:compose.override.yaml:quick.yaml", "BERM_PORT=7071")
	s.up(t)
	token := filepath.Join(dir, "secrets", "token")
	if got := s.sandbox(t, token, "create", "demo", "--host-path", work, "--host-path-mode", "rw", "-o", "json"); !strings.Contains(got, `"mounts": "held"`) {
		t.Errorf("the sandbox: %s", got)
	}
	s.sandbox(t, token, "exec", "demo", "--", "sh", "-c", "echo done > /workspace/file")
	if got := readString(t, filepath.Join(work, "file")); got != "done" {
		t.Errorf("on the host: %q", got)
	}
	s.sandbox(t, token, "rm", "demo")
}

// Each stack that init writes keeps the rules, mounts what is there, and tells the server a valid
// configuration. The older Compose takes its files.
func TestStacksChecked(t *testing.T) {
	t.Parallel()
	if files := check.Value(filepath.Glob(stackDir + "/*.yaml"))(t); len(files) != len(compose.Stacks)+1 {
		t.Fatalf("%v, want the stacks and docker-api.yaml", files)
	}
	for _, name := range append(slices.Clone(compose.Stacks), "minimal with-docker-api", "dind with-docker-api", "observability with-docker-api") {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := filepath.Join(t.TempDir(), "stack")
			stack, with, _ := strings.Cut(name, " ")
			args, files := []string{"init", "compose", dir, "--stack", stack}, []string{"compose.yaml"}
			if with != "" {
				args, files = append(args, "--"+with), append(files, "compose.override.yaml")
			}
			mustRun(t, ".", nil, bin, args...)
			project := loadStack(t, dir, nil, slices.Clone(files)...)
			if _, ok := project.Services["berm"]; !ok {
				t.Fatal("there is no service berm")
			}
			for name, s := range project.Services {
				for _, flaw := range flaws(s) {
					t.Errorf("%s %s", name, flaw)
				}
				for _, v := range s.Volumes {
					inside, err := filepath.Rel(project.WorkingDir, v.Source)
					if v.Type == types.VolumeTypeBind && err == nil && filepath.IsLocal(inside) && !exists(v.Source) {
						t.Errorf("%s mounts %s, which isn't there", name, inside)
					}
				}
			}
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
			mustRun(t, dir, env, bin, "config", "check")
			if with != "" { // of the others, the older Compose is given those that TestStacks brings up
				wantCompose(t)
				mustRun(t, dir, []string{"COMPOSE_FILE=" + strings.Join(files, ":")}, "docker-compose", "config", "--quiet")
			}
		})
	}
	if _, err := command(t.Context(), ".", []string{"BERM_HTTP_LISTEN=nowhere"}, bin, "config", "check"); err == nil {
		t.Error("berm config check finds nothing wrong with anything")
	}
}

// What only tests import isn't in the program, whoever else brings it.
func TestLinked(t *testing.T) {
	t.Parallel()
	info := check.Value(buildinfo.ReadFile(bin))(t)
	for _, dep := range info.Deps {
		if slices.Contains([]string{"github.com/compose-spec/compose-go/v2", "github.com/google/go-cmp", "github.com/prometheus/prometheus"}, dep.Path) {
			t.Errorf("%s is in berm", dep.Path)
		}
	}
	if len(info.Deps) < 20 {
		t.Errorf("berm has %d modules in it", len(info.Deps))
	}
}
