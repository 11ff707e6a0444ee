package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/bermhq/berm/proxy/apitype"
	"github.com/bermhq/berm/runtime/runtimetest/check"
	"github.com/bermhq/berm/runtime/runtimetest/engine"
)

// The labels of Docker Compose, and Berm's value of one.
const (
	composeProject = "com.docker.compose.project"
	composeService = "com.docker.compose.service"
	sandboxService = "berm-sandbox"
)

const bermImage = "berm.local/berm:test"

var bermImageBuilt sync.Once

// buildBerm builds bermImage on the engine that tests share.
func buildBerm(t *testing.T, e *testEngine) {
	t.Helper()
	bermImageBuilt.Do(func() {
		must(t, engine.BuildBermImage(context.WithoutCancel(t.Context()), e.config.Address, bermImage, bin))
	})
}

// contained is a berm that runs in a container of the engine that it uses, in the project
// demo of Docker Compose, with a neighbour.
type contained struct {
	t      *testing.T
	engine *testEngine
	dir    string // work, which Berm has mounted as /work, and run, as /run/berm
	name   string // of the container and the project
	token  string
}

// docker runs the docker command, and answers what it says.
func (c *contained) docker(host string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(c.t.Context()), time.Minute)
	defer cancel()
	return command(ctx, "", dockerEnv(host, c.dir), "docker", args...)
}

// logs are what Berm has said.
func (c *contained) logs() string {
	cmd := exec.Command("docker", "logs", c.name)
	cmd.Env = append(os.Environ(), dockerEnv(c.engine.config.Address, c.dir)...)
	out, _ := cmd.CombinedOutput() // what there is of it
	return string(out)
}

func (c *contained) must(args ...string) string {
	c.t.Helper()
	return check.Value(c.docker(c.engine.config.Address, args...))(c.t)
}

// berm runs a command of berm's in its container.
func (c *contained) berm(args ...string) (string, error) {
	return c.docker(c.engine.config.Address, append([]string{"exec", "--env", "BERM_TOKEN=" + c.token, c.name, "/berm"}, args...)...)
}

// post has the neighbour call the API over the project's network.
func (c *contained) post(path, body string, out any) {
	c.t.Helper()
	answer := c.must("exec", c.name+"-neighbour", "wget", "-q", "-O-", "--header", "X-API-Token: "+c.token,
		"--header", "Content-Type: application/json", "--post-data", body, "http://"+c.name+":7070/api/v1"+path)
	if err := json.Unmarshal([]byte(answer), out); err != nil {
		c.t.Fatalf("%v: %s", err, answer)
	}
}

// start runs Berm with further options of docker run. Sandboxes have the same user as
// Berm, whose directories they write to.
func (c *contained) start(user string) {
	c.t.Helper()
	for _, name := range []string{"work", "run"} {
		dir := filepath.Join(c.dir, name)
		must(c.t, os.Mkdir(dir, 0o777))
		must(c.t, os.Chmod(dir, 0o777)) //nolint:gosec // Berm may run as any user
	}
	write(c.t, filepath.Join(c.dir, "policy.yaml"), `version: 1
mounts: {allowed_roots: [/work, /shared], trusted_roots: [/work, /shared/sub], hold: auto}
profiles: {default: {network: "on", host_path_mode: rw, user: "`+strings.Split(user, ":")[0]+`"}}
`)
	must(c.t, os.Chmod(filepath.Join(c.dir, "policy.yaml"), 0o644)) //nolint:gosec // likewise
	c.t.Cleanup(func() {
		if c.t.Failed() {
			c.t.Log(c.logs())
		}
		made := strings.Fields(c.must("ps", "--all", "--quiet", "--filter", "label="+composeProject+"="+c.name))
		c.must(append([]string{"rm", "--force", "--volumes"}, made...)...)
		c.must("network", "rm", c.name+"_default")
		c.must("volume", "rm", c.name+"-state", c.name+"-shared")
	})
	c.must("network", "create", "--label", composeProject+"="+c.name, c.name+"_default")
	project := []string{"--network", c.name + "_default", "--label", composeProject + "=" + c.name}
	neighbour := append([]string{"run", "--detach", "--name", c.name + "-neighbour", "--label", composeService + "=neighbour", "--label", "berm.owner=" + c.name,
		"--mount", "type=volume,source=" + c.name + "-shared,target=/shared"}, project...)
	c.must(append(neighbour, testImage, "sleep", "infinity")...)
	c.must("exec", c.name+"-neighbour", "mkdir", "-m", "777", "/shared/sub")
	args := append([]string{
		"run", "--detach", "--pid", "host", "--name", c.name, "--label", composeService + "=berm",
		"--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL", "--security-opt", "no-new-privileges",
		"--volume", c.engine.socket() + ":/var/run/docker.sock",
		"--volume", c.name + "-state:/var/lib/berm",
		"--volume", c.name + "-shared:/shared",
		"--volume", filepath.Join(c.dir, "work") + ":/work",
		"--volume", filepath.Join(c.dir, "run") + ":/run/berm",
		"--volume", filepath.Join(c.dir, "policy.yaml") + ":/etc/berm/policy.yaml:ro",
		"--user", user,
	}, project...)
	for name, value := range map[string]string{
		"HTTP_LISTEN": "0.0.0.0:7070", "HTTP_ALLOWED_HOSTS": c.name, "SECURITY_TOKENS": c.token, "POLICY_FILE": "/etc/berm/policy.yaml", "ENGINE_INSTANCE": c.name,
		"SANDBOX_IMAGE": testImage, "SANDBOX_NETWORK": "auto", "SANDBOX_CLEANUP_INTERVAL": "200ms",
		"SANDBOX_CHATS_ROOT": "/var/lib/berm/chats", "SANDBOX_CREATE_ROOTS": "true",
		"ENGINE_API_LISTENERS": "[{address: 'unix:///run/berm/docker.sock', socket_mode: '0666', callers: [{name: app, tenant: app}]}]",
	} {
		args = append(args, "--env", "BERM_"+name+"="+value)
	}
	c.must(append(args, bermImage)...)
	until(c.t, "it is ready", func() bool {
		_, err := c.berm("healthcheck")
		return err == nil
	})
}

// TestContained runs the image that users run: read-only, without capabilities, as root
// and as another user, and nothing said of where the engine's host has its directories.
func TestContained(t *testing.T) {
	t.Parallel()
	e := commonEngine(t, "docker")
	buildBerm(t, e)
	fi := check.Value(os.Stat(e.socket()))(t)
	group := fi.Sys().(*syscall.Stat_t).Gid
	for name, user := range map[string]string{"root": "0:0", "user": fmt.Sprintf("65532:%d", group)} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := &contained{t: t, engine: e, dir: t.TempDir(), name: "demo" + name, token: "token-of-" + name + "-container"}
			c.start(user)
			c.makesSandboxes()
			c.hidesItself()
			c.sparesOthers()
		})
	}
}

// makesSandboxes works in sandboxes with directories of Berm's own mounts.
func (c *contained) makesSandboxes() {
	t := c.t
	for _, dir := range []string{"/work", "/shared/sub"} {
		key := "of" + strings.ReplaceAll(dir, "/", "-")
		must(t, second(c.berm("sandbox", "create", key, "--host-path", dir)))
		var result apitype.ExecResult
		c.post("/sandboxes/"+key+"/exec", `{"command": "echo inside > /workspace/file && mkdir /chat/made"}`, &result)
		if !result.OK {
			t.Errorf("in a sandbox of %s: %+v", dir, result)
		}
	}
	if data, err := os.ReadFile(filepath.Join(c.dir, "work", "file")); err != nil || string(data) != "inside\n" {
		t.Errorf("on the host: %q, %v", data, err)
	}
	if got := c.must("exec", c.name+"-neighbour", "cat", "/shared/sub/file"); got != "inside" {
		t.Errorf("in the volume: %q", got)
	}
	// Nothing holds these, and the operator trusts nobody who writes there.
	for _, args := range [][]string{{"--host-path", "/shared"}, {"--host-path", "/shared", "--host-path-mode", "ro"}} {
		if out, err := c.berm(append([]string{"sandbox", "create", "unheld"}, args...)...); err == nil || !strings.Contains(err.Error(), "mounts.unheld") {
			t.Errorf("a sandbox with %s: %s, %v", args, out, err)
		}
	}
	for _, dir := range []string{"/var/lib/berm", "/var/lib/berm/agents", c.must("volume", "inspect", "--format", "{{.Mountpoint}}", c.name+"-state")} {
		if out, err := c.berm("sandbox", "create", "thief", "--host-path", dir); err == nil || !strings.Contains(err.Error(), "mounts.") {
			t.Errorf("a sandbox of %s: %s, %v", dir, out, err)
		}
	}
	made := c.must("ps", "--filter", "label="+composeProject+"="+c.name, "--filter", "label="+composeService+"="+sandboxService, "--format", "{{.Networks}}")
	if want := c.name + "_default\n" + c.name + "_default"; made != want {
		t.Errorf("the project's sandboxes are in the networks %q, want %q", made, want)
	}
}

// hidesItself calls the Docker Engine API of a Berm in a container.
func (c *contained) hidesItself() {
	t := c.t
	door := "unix://" + filepath.Join(c.dir, "run", "docker.sock")
	if out, err := c.docker(door, "ps", "--all", "--quiet"); err != nil || out != "" {
		t.Errorf("a caller sees %q, %v", out, err)
	}
	id := c.must("inspect", "--format", "{{.Id}}", c.name)
	for _, args := range [][]string{
		{"inspect", id}, {"inspect", c.name}, {"stop", id}, {"exec", id, "/berm", "version"}, {"kill", c.name + "-neighbour"},
		{"network", "inspect", c.name + "_default"}, {"volume", "inspect", c.name + "-state"},
		{"create", "--network", "container:" + id, testImage}, {"create", "--volumes-from", id, testImage},
		{"create", "--volume", c.name + "-state:/state", testImage},
		{"create", "--label", composeProject + "=" + c.name, testImage},
	} {
		if out, err := c.docker(door, args...); err == nil {
			t.Errorf("docker %q answers %q", args, out)
		}
	}
}

// sparesOthers ends what has had its time, and nothing else.
func (c *contained) sparesOthers() {
	for _, key := range []string{"of-work", "of-shared-sub"} {
		must(c.t, second(c.berm("sandbox", "renew", key, "--ttl", "1s")))
	}
	until(c.t, "the sandboxes are gone", func() bool {
		return c.must("ps", "--all", "--quiet", "--filter", "label="+composeService+"="+sandboxService, "--filter", "label="+composeProject+"="+c.name) == ""
	})
	left := c.must("ps", "--filter", "label="+composeProject+"="+c.name, "--format", "{{.Names}}")
	if left != c.name+"\n"+c.name+"-neighbour" {
		c.t.Errorf("what still runs: %q", left)
	}
}
