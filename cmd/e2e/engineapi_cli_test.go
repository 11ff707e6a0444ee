package e2e

import (
	"cmp"
	"errors"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/filters"
	"github.com/docker/docker/api/types/network"
	"github.com/docker/docker/api/types/volume"
	"github.com/docker/docker/client"
	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/runtime/runtimetest/check"
	"github.com/bermhq/berm/runtime/runtimetest/engine"
)

// clientFixture is a server with a socket for Docker's own clients.
type clientFixture struct {
	*child
	engine *testEngine
	dir    string
	owner  string   // the label of what the server's callers make
	args   []string // the server's
}

// newClientFixture starts a server on a private engine, whose callers may make networks and volumes,
// and have directories below work mounted. Settings are more sections of its configuration;
// without one it sweeps often.
func newClientFixture(t *testing.T, settings ...string) *clientFixture {
	t.Helper()
	b := &clientFixture{engine: commonEngine(t, "docker")}
	b.dir = b.engine.dir(t)
	b.owner = "fixture-" + filepath.Base(b.dir)
	work := makeDir(t, b.dir, "work")
	write(t, filepath.Join(b.dir, "policy.yaml"), `
version: 1
images: {allow: ["berm.local/*"]}
mounts: {allowed_roots: [`+work+`], hold: auto}
profiles:
  default:
    engine_api: {networks: own, volumes: own, docker_socket: "on", build: "on", tags: ["mine/*"], buildkit: {enabled: true, cgroup_parent: "/`+filepath.Base(b.engine.Dir())+`/builds"}}
`)
	write(t, filepath.Join(b.dir, "berm.yaml"), `
engine_api:
  archive_fixed: true # the test is of the client, whatever the engine
  audit_log: `+b.dir+`/audit.log
  listeners:
    - address: unix://`+b.dir+`/docker.sock
      callers: [{name: ci, tenant: ci}]
    - address: unix://`+b.dir+`/other.sock
      callers: [{name: other, tenant: other}]
    - address: unix://`+b.dir+`/audited.sock
      callers: [{name: audited, tenant: audited, mode: audit}]
engine: {address: "`+b.engine.config.Address+`", instance: `+b.owner+`}
`+cmp.Or(strings.Join(settings, ""), "sandbox: {cleanup_interval: 100ms}\n"))
	t.Cleanup(func() {
		(&server{dir: b.dir, instance: b.owner}).removeAll(t, b.engine)
	})
	b.args = []string{"--config", filepath.Join(b.dir, "berm.yaml"), "--policy", filepath.Join(b.dir, "policy.yaml")}
	b.start(t)
	return b
}

func (b *clientFixture) start(t *testing.T) {
	t.Helper()
	b.child = startChildWith(t, b.dir, b.engine, "engine_available", b.args...)
	t.Cleanup(func() {
		if t.Failed() {
			b.Kill()
			log, _ := os.ReadFile(filepath.Join(b.dir, "audit.log"))
			t.Logf("the server's log:\n%s\nthe audit log:\n%s", b.Log, log)
		}
	})
}

func (b *clientFixture) run(t *testing.T, program string, args ...string) (string, error) {
	t.Helper()
	return command(t.Context(), filepath.Join(b.dir, "work"), dockerEnv("unix://"+b.dir+"/docker.sock", b.dir), program, args...)
}

func (b *clientFixture) must(t *testing.T, program string, args ...string) string {
	t.Helper()
	return check.Value(b.run(t, program, args...))(t)
}

// made lists what the server's callers have made and is still in the engine. Other tests use the
// engine at the same time, so that what has no label of the server's isn't counted.
func (b *clientFixture) made(t *testing.T) (left []string) {
	t.Helper()
	direct := dockerClient(t, client.WithHost(b.engine.config.Address))
	labels := filters.NewArgs(filters.Arg("label", lifecycle.LabelOwner+"="+b.owner), filters.Arg("label", lifecycle.LabelDoor+"="+lifecycle.DoorEngine))
	containers := check.Value(direct.ContainerList(t.Context(), container.ListOptions{All: true, Filters: labels}))(t)
	for _, c := range containers {
		left = append(left, "container "+c.Names[0])
	}
	networks := check.Value(direct.NetworkList(t.Context(), network.ListOptions{Filters: labels}))(t)
	for _, n := range networks {
		left = append(left, "network "+n.Name)
	}
	volumes := check.Value(direct.VolumeList(t.Context(), volume.ListOptions{}))(t)
	for _, v := range volumes.Volumes {
		if v.Labels[lifecycle.LabelOwner] == b.owner {
			left = append(left, "volume "+v.Name)
		}
	}
	return left
}

// clis are the Docker clients that there are: the distribution's, and another one that may
// have been installed besides.
func clis(t *testing.T) (found []string) {
	t.Helper()
	for _, path := range []string{"/usr/bin/docker", "/usr/local/bin/docker"} {
		if _, err := os.Stat(path); err == nil {
			found = append(found, path)
		}
	}
	if len(found) == 0 {
		engine.Lacking(t, "docker", errors.New("there is no client of it"))
	}
	return found
}

// wantCompose skips the test where there is no Compose.
func wantCompose(t *testing.T) {
	t.Helper()
	if _, err := exec.LookPath("docker-compose"); err != nil {
		engine.Lacking(t, "compose", err)
	}
}

// What people do with a Docker client goes through the second door as it goes to the engine.
func TestDockerClient(t *testing.T) {
	t.Parallel()
	b := newClientFixture(t)
	work := filepath.Join(b.dir, "work")
	write(t, filepath.Join(work, "file"), "from the host\n")
	for _, cli := range clis(t) {
		docker := func(args ...string) string { t.Helper(); return b.must(t, cli, args...) }
		if got := docker("run", "--rm", testImage, "echo", "hello"); got != "hello" {
			t.Errorf("run: %q", got)
		}
		docker("network", "create", "net")
		docker("volume", "create", "data")
		id := docker("run", "-d", "--name", "cli-web", "--network", "net", "-v", "data:/data", "-v", work+":/work:ro", testImage, "sh", "-c", "echo up; cat /work/file; sleep 1000")
		if got := docker("ps", "-q", "--no-trunc"); got != id {
			t.Errorf("ps: %q, want %q", got, id)
		}
		until(t, "the log has what it printed", func() bool { return docker("logs", "cli-web") == "up\nfrom the host" })
		if got := docker("exec", "-e", "A=b", "cli-web", "sh", "-c", "echo $A > /data/x; cat /data/x"); got != "b" {
			t.Errorf("exec: %q", got)
		}
		docker("cp", "cli-web:/data/x", filepath.Join(work, "x"))
		docker("cp", filepath.Join(work, "file"), "cli-web:/data/file")
		if got, err := os.ReadFile(filepath.Join(work, "x")); err != nil || string(got) != "b\n" {
			t.Errorf("cp out: %q, %v", got, err)
		}
		if got := docker("exec", "cli-web", "cat", "/data/file"); got != "from the host" {
			t.Errorf("cp in: %q", got)
		}
		if got := docker("inspect", "-f", "{{.Name}} {{.HostConfig.Privileged}} {{.State.Running}}", "cli-web"); got != "/cli-web false true" {
			t.Errorf("inspect: %q", got)
		}
		for want, args := range map[string][]string{
			"path \"/etc\" is refused":   {"run", "--rm", "-v", "/etc:/x", testImage, "true"},
			"HostConfig.CapAdd":          {"run", "--rm", "--cap-add", "SYS_PTRACE", testImage, "true"},
			"No such container: cli-web": {"-H", "unix://" + b.dir + "/other.sock", "logs", "cli-web"}, // it is another tenant's
		} {
			if out, err := b.run(t, cli, args...); err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%q: %q, %v", args, out, err)
			}
		}
		docker("rm", "-f", "cli-web")
		docker("network", "rm", "net")
		docker("volume", "rm", "data")
		if left := b.made(t); len(left) != 0 {
			t.Errorf("after %s there are %v", cli, left)
		}
	}
	b.refusesBuildKit(t)
	learnt, stderr, code := berm(t, "", append([]string{"policy", "learn", filepath.Join(b.dir, "audit.log")}, b.args...)...)
	if code != 0 || !strings.Contains(learnt, "- CAP_SYS_PTRACE\n") || !strings.Contains(learnt, "# - mounts.always_refused: ") {
		t.Errorf("learnt with exit code %d, %s:\n%s", code, stderr, learnt)
	}
	// In mode audit everything goes through, and the log says what wouldn't have.
	out := b.must(t, clis(t)[0], "-H", "unix://"+b.dir+"/audited.sock", "run", "--rm", "--network", "bridge", "--cap-add", "SYS_PTRACE", testImage, "grep", "CapEff", "/proc/self/status")
	caps, err := strconv.ParseUint(strings.TrimSpace(strings.TrimPrefix(out, "CapEff:")), 16, 64)
	if err != nil || caps&(1<<unix.CAP_SYS_PTRACE) == 0 {
		t.Errorf("%q has no SYS_PTRACE: %v", out, err)
	}
	log, err := os.ReadFile(filepath.Join(b.dir, "audit.log"))
	if err != nil || !strings.Contains(string(log), `"verdict":"would_deny","rule":"containers.capabilities"`) {
		t.Errorf("%v, the audit log:\n%s", err, log)
	}
	if left := b.made(t); len(left) != 0 {
		t.Errorf("left: %v", left)
	}
}

// refusesBuildKit has an engine whose BuildKit ignores source policies. Newer ones are those
// of TestSoakBuildKitAttacks.
func (b *clientFixture) refusesBuildKit(t *testing.T) {
	t.Helper()
	v := check.Value(dockerClient(t, client.WithHost(b.engine.config.Address)).ServerVersion(t.Context()))(t)
	if !strings.HasPrefix(v.Version, "20.") {
		return
	}
	c := &http.Client{Transport: through(filepath.Join(b.dir, "docker.sock"))}
	defer c.CloseIdleConnections()
	for _, path := range []string{"/grpc", "/session"} {
		resp, said, err := exchange(t.Context(), c, http.MethodPost, "http://docker"+path, "", "Connection", "Upgrade", "Upgrade", "h2c", "X-Docker-Expose-Session-Uuid", "s")
		must(t, err)
		if resp.StatusCode != http.StatusForbidden || !strings.Contains(said, "this engine's BuildKit has no source policy") || !strings.Contains(said, "DOCKER_BUILDKIT=0, or a newer engine") {
			t.Errorf("%s: %d %s", path, resp.StatusCode, said)
		}
	}
	resp, _, err := exchange(t.Context(), c, http.MethodGet, "http://docker/_ping", "")
	must(t, err)
	if got := resp.Header.Get("Builder-Version"); got != "1" {
		t.Errorf("ping names builder %q", got)
	}
}

const composeFile = `
version: "2.4"
services:
  db:
    image: ` + testImage + `
    command: sh -c "echo ready > /data/state; nc -ll -p 7777 -e echo found"
    volumes: ["data:/data"]
    environment: {MODE: test}
    networks: [inner]
  app:
    image: ` + testImage + `
    command: sh -c "until nc -w 2 db 7777 | grep found; do sleep 0.1; done; sleep 1000"
    depends_on: [db]
    networks: [inner]
networks:
  inner: {}
volumes:
  data: {}
`

// A whole stack goes up, works and comes down.
func TestCompose(t *testing.T) {
	t.Parallel()
	wantCompose(t)
	b := newClientFixture(t)
	write(t, filepath.Join(b.dir, "work", "docker-compose.yml"), composeFile)
	compose := func(args ...string) string {
		t.Helper()
		return b.must(t, "docker-compose", append([]string{"-p", "stack"}, args...)...)
	}
	compose("up", "-d")
	until(t, "one service finds the other", func() bool { return strings.Contains(b.must(t, clis(t)[0], "logs", "stack_app_1"), "found") })
	if got := compose("logs", "--no-color", "app"); !strings.Contains(got, "found") {
		t.Errorf("logs: %q", got)
	}
	if got := compose("exec", "-T", "db", "sh", "-c", "cat /data/state; echo $MODE"); got != "ready\ntest" {
		t.Errorf("exec: %q", got)
	}
	compose("up", "-d") // of what is up
	compose("restart", "-t", "0", "app")
	compose("down", "-v", "-t", "0")
	if left := b.made(t); len(left) != 0 {
		t.Errorf("left: %v", left)
	}
}

// A container's socket in the engine's stead serves as its caller, and is mounted anew when
// the container restarts after the server did.
func TestDockerSocket(t *testing.T) {
	t.Parallel()
	b := newClientFixture(t)
	docker := func(args ...string) string { t.Helper(); return b.must(t, clis(t)[0], args...) }
	direct := dockerClient(t, client.WithHost(b.engine.config.Address))
	id := docker("run", "-d", "-v", "/var/run/docker.sock:/other.sock", "-v", b.dir+"/docker.sock:/var/run/docker.sock", testImage, "sleep", "1000")
	docker("-H", "unix://"+b.dir+"/other.sock", "create", testImage)
	inside := func() (string, error) {
		ct := check.Value(direct.ContainerInspect(t.Context(), id))(t)
		socket := "unix:///proc/" + strconv.Itoa(ct.State.Pid) + "/root/var/run/docker.sock"
		return b.run(t, clis(t)[0], "-H", socket, "ps", "-aq", "--no-trunc")
	}
	if got, err := inside(); got != id || err != nil {
		t.Errorf("inside: %q, %v", got, err)
	}
	b.Kill()
	b.start(t)
	if got, err := inside(); err == nil { // as docs/engine-proxy.md has it
		t.Errorf("of a server that was killed: %q", got)
	}
	docker("restart", "-t", "0", id)
	if got, err := inside(); got != id || err != nil {
		t.Errorf("after a restart: %q, %v", got, err)
	}
	docker("rm", "-f", id)
	b.removeAll(t)
	b.end(t, os.Interrupt)
	if left, err := os.ReadDir(filepath.Join(b.dir, "state", "sockets")); err == nil && len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

// What a killed server's callers made is collected at its end by the next one, which also
// restarts what ended meanwhile.
func TestSweepAfterKill(t *testing.T) {
	t.Parallel()
	const late, soon = "sandbox: {cleanup_interval: 1h}\n", "sandbox: {cleanup_interval: 100ms}\n"
	b := newClientFixture(t, late) // so that the killed one hasn't begun to
	docker := func(args ...string) string { t.Helper(); return b.must(t, clis(t)[0], args...) }
	const ttl = "berm.ttl=2s"
	docker("network", "create", "--label", ttl, "short")
	docker("volume", "create", "--label", ttl, "short")
	docker("run", "-d", "--label", ttl, "--name", "running", "--network", "short", "-v", "short:/v", testImage, "sleep", "1000")
	docker("create", "--label", ttl, "--name", "never-started", testImage)
	docker("volume", "create", "long")
	work := filepath.Join(b.dir, "work")
	docker("run", "-d", "--name", "living", "--restart", "always", "-v", work+":/d", testImage, "sh", "-c", "echo >> /d/runs; until [ -e /d/end ]; do sleep 0.1; done; rm /d/end")
	runs := func(n int) func() bool {
		return func() bool { b, _ := os.ReadFile(filepath.Join(work, "runs")); return len(b) == n }
	}
	write(t, filepath.Join(work, "end"), "")
	until(t, "it is restarted", runs(2))
	b.Kill()
	if left := b.made(t); len(left) != 6 {
		t.Errorf("before the end there are %v", left)
	}
	write(t, filepath.Join(work, "end"), "")
	time.Sleep(2 * time.Second)
	if !runs(2)() {
		t.Error("it was restarted without a server")
	}
	config := filepath.Join(b.dir, "berm.yaml")
	write(t, config, strings.Replace(readString(t, config), strings.TrimSpace(late), strings.TrimSpace(soon), 1))
	b.start(t)
	until(t, "it is restarted by the next server", runs(3))
	until(t, "all that has ended is gone", func() bool { return len(b.made(t)) == 2 })
	until(t, "/metrics counts it", func() bool { // a moment after each is gone
		_, body := b.get(t, "/metrics")
		return strings.Contains(body, `berm_engine_api_cleanups_total{kind="container",result="deleted"} 2`) &&
			strings.Contains(body, `berm_engine_api_cleanups_total{kind="network",result="deleted"} 1`) &&
			strings.Contains(body, `berm_engine_api_cleanups_total{kind="volume",result="deleted"} 1`)
	})
	b.end(t, os.Interrupt)
	if left := strings.Join(b.made(t), ", "); left != "container /living, volume long" {
		t.Errorf("left are %s", left)
	}
	b.removeAll(t)
}

// removeAll takes away what a test has left on purpose.
func (b *clientFixture) removeAll(t *testing.T) {
	t.Helper()
	direct := dockerClient(t, client.WithHost(b.engine.config.Address))
	for _, left := range b.made(t) {
		kind, name, _ := strings.Cut(left, " ")
		var err error
		if kind == "volume" {
			err = direct.VolumeRemove(t.Context(), name, true)
		} else {
			err = direct.ContainerRemove(t.Context(), name, container.RemoveOptions{Force: true, RemoveVolumes: true})
		}
		if err != nil {
			t.Error(err)
		}
	}
}
