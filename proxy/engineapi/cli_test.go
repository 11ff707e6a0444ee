package engineapi

import (
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/docker/docker/api/types/container"

	private "github.com/bermhq/berm/runtime/runtimetest/engine"
)

// dockerCLIs are Docker's clients: that of the distribution, and a newer one if it is here.
var dockerCLIs = func() map[string]string {
	clis := map[string]string{"distribution": "/usr/bin/docker"}
	if _, err := os.Stat("/usr/local/bin/docker"); err == nil {
		clis["newer"] = "/usr/local/bin/docker"
	}
	return clis
}()

func TestClientsRun(t *testing.T) {
	host, direct := testEngine(t)
	dir := workDir(t)
	for _, sub := range []string{"/a/inner", "/b"} {
		noError(t, os.MkdirAll(dir+sub, 0o755))
	}
	noError(t, os.Symlink("/etc", dir+"/link"))
	d := doorTo(t, host, workRules(dir))
	left := sweepOwn(t, direct, d)
	address := d.listen(Caller{Name: "cli", Tenant: "cli"})
	for name, binary := range dockerCLIs {
		t.Run(name, func(t *testing.T) {
			docker := func(args ...string) (string, string, error) { return dockerCLI(t, binary, address, args...) }
			must := mustDocker(t, binary, address)
			must("network", "create", "--internal", "cli-"+name)
			for what, tt := range map[string]struct {
				args []string
				want string
			}{
				"environment":   {[]string{"-e", "A=1", "-e", "B=2", testImage, "sh", "-c", "echo $A$B"}, "12"},
				"bind":          {[]string{"-v", dir + "/a:/a", testImage, "sh", "-c", "touch /a/x && echo ok"}, "ok"},
				"bind, ro":      {[]string{"-v", dir + "/a:/a:ro", testImage, "sh", "-c", "touch /a/y 2>/dev/null || echo ro"}, "ro"},
				"mount":         {[]string{"--mount", "type=bind,src=" + dir + "/b,dst=/b", testImage, "ls", "-d", "/b"}, "/b"},
				"volume":        {[]string{"-v", "cli-vol-" + name + ":/v", testImage, "sh", "-c", "touch /v/x && ls /v"}, "x"},
				"anonymous":     {[]string{"-v", "/v", testImage, "sh", "-c", "touch /v/x && ls /v"}, "x"},
				"tmpfs":         {[]string{"--tmpfs", "/t:size=64k", testImage, "sh", "-c", "df -k /t | tail -1 | awk '{print $2}'"}, "64"},
				"own network":   {[]string{"--network", "cli-" + name, "--network-alias", "me", testImage, "sh", "-c", "ip -o link | grep -c eth0"}, "1"},
				"no network":    {[]string{testImage, "sh", "-c", "ip -o link | grep -c eth0 || true"}, "0"},
				"memory":        {[]string{"--memory", "100m", "--cpus", "0.5", testImage, "echo", "ok"}, "ok"},
				"user":          {[]string{"-u", "1000:1000", testImage, "id", "-u"}, "1000"},
				"read-only":     {[]string{"--read-only", testImage, "sh", "-c", "touch /x 2>/dev/null || echo ro"}, "ro"},
				"init":          {[]string{"--init", "--hostname", "h", testImage, "hostname"}, "h"},
				"working place": {[]string{"-w", "/w", "--entrypoint", "pwd", testImage}, "/w"},
				"port":          {[]string{"-p", "127.0.0.1::80", testImage, "echo", "ok"}, "ok"},
				"limits":        {[]string{"--ulimit", "nofile=100:200", "--pids-limit", "50", testImage, "sh", "-c", "ulimit -n"}, "100"},
				"privileges":    {[]string{testImage, "sh", "-c", "grep -c '^NoNewPrivs:.1' /proc/self/status"}, "1"},
			} {
				t.Run(what, func(t *testing.T) {
					if out := must(append([]string{"run", "--rm"}, tt.args...)...); out != tt.want {
						t.Errorf("it said %q, want %q", out, tt.want)
					}
				})
			}
			t.Run("detached", func(t *testing.T) {
				id := must("run", "-d", "--name", "cli-"+name, testImage, "sh", "-c", "echo hello")
				if out, code := finished(t, direct, id); out != "hello\n" || code != 0 {
					t.Errorf("it said %q with %d", out, code)
				}
				if _, errs, err := docker("run", "--name", "cli-"+name, testImage); err == nil || !strings.Contains(errs, "already in use") || strings.Contains(errs, id[:12]) {
					t.Errorf("a taken name: %v, %q", err, errs)
				}
				must("rm", "cli-"+name)
			})
			t.Run("exit code", func(t *testing.T) {
				if _, _, err := docker("run", "--rm", testImage, "sh", "-c", "exit 7"); err == nil || !strings.Contains(err.Error(), "7") {
					t.Errorf("exit code: %v", err)
				}
			})
			must("network", "rm", "cli-"+name)
			must("volume", "rm", "cli-vol-"+name)
			for what, tt := range refusedRuns(dir) {
				t.Run("refused: "+what, func(t *testing.T) {
					out, errs, err := docker(append(append([]string{"run", "--rm"}, tt.args...), testImage, "true")...)
					line, rest, _ := strings.Cut(strings.TrimSpace(errs), "\n")
					if err == nil || !strings.Contains(line, "denied by policy: ") || !strings.Contains(line, "(rule "+tt.rule+")") || !strings.Contains(line, "llowed") || strings.Contains(rest, "denied") {
						t.Errorf("%v, %q, %q", err, out, errs)
					}
				})
			}
			if all := left(); len(all) != 0 {
				t.Errorf("left: %v", all)
			}
		})
	}
	if list, err := direct.ContainerList(t.Context(), container.ListOptions{All: true}); err != nil || len(list) != 0 {
		t.Logf("others' containers: %d, %v", len(list), err)
	}
}

type refusedRun struct {
	args []string
	rule string
}

// refusedRuns are some of what TestAttackCreate asks for, as users of the command line do.
func refusedRuns(dir string) map[string]refusedRun {
	return map[string]refusedRun{
		"a bind elsewhere": {[]string{"-v", "/etc:/x"}, "mounts.always_refused"},
		"a missing one":    {[]string{"-v", dir + "/missing:/x"}, "mounts.not_a_directory"},
		"volume driver":    {[]string{"--mount", "type=volume,src=v,dst=/x,volume-opt=type=none,volume-opt=o=bind,volume-opt=device=/"}, "mounts.options"},
		"privileged":       {[]string{"--privileged"}, "containers.privileged"},
		"capability":       {[]string{"--cap-add", "SYS_ADMIN"}, "containers.capabilities"},
		"another network":  {[]string{"--network", "nobodys"}, "networks.foreign"},
		"device":           {[]string{"--device", "/dev/null"}, "containers.devices"},
		"other image":      {[]string{"alpine"}, "images.allow"},
		"label":            {[]string{"--label", "berm.owner=x"}, "labels.reserved"},
		"port":             {[]string{"-p", "0.0.0.0:8080:80"}, "ports.address"},
		"host gateway":     {[]string{"--add-host", "h:host-gateway"}, "dns.syntax"},
		"secret":           {[]string{"-e", "SECRET_X=1"}, "env.deny"},
		"name like an ID":  {[]string{"--name", strings.Repeat("0123456789abcdef", 4)}, "request.name"},
		"seccomp":          {[]string{"--security-opt", "seccomp=unconfined"}, "containers.security_opt"},
		"new privileges":   {[]string{"--security-opt", "no-new-privileges:false"}, "containers.security_opt"},
		"pids":             {[]string{"--pid", "host"}, "containers.namespaces"},
		"host network":     {[]string{"--network", "host"}, "networks.host"},
		"sysctl":           {[]string{"--sysctl", "net.ipv4.ip_forward=1"}, "containers.sysctls"},
		"log driver":       {[]string{"--log-driver", "syslog"}, "logs.driver"},
		"runtime":          {[]string{"--runtime", "other"}, "containers.runtime"},
		"oom":              {[]string{"--oom-score-adj", "-500"}, "resources.oom"},
		"low port":         {[]string{"-p", "127.0.0.1:80:80"}, "ports.range"},
		"unlimited pids":   {[]string{"--pids-limit", "-1"}, "resources.over_max"},
	}
}

// TestClientsInteractive has a terminal, and input that ends.
func TestClientsInteractive(t *testing.T) {
	d, _ := engineDoor(t, "")
	address := d.listen(Caller{Name: "tty", Tenant: "tty"})
	for name, binary := range dockerCLIs {
		t.Run(name, func(t *testing.T) {
			if _, err := os.Stat(binary); err != nil {
				t.Skipf("%s isn't here", binary)
			}
			for what, tt := range map[string]struct{ line, in, want string }{
				"input":    {binary + " run --rm -i " + testImage + " wc -c", strings.Repeat("x", 100_000), "100000\n"},
				"terminal": {"script -qec '" + binary + " run --rm -it " + testImage + " sh -c \"tty; exit 3\"' /dev/null; echo code $?", "", "/dev/pts/0\r\ncode 3\n"},
			} {
				t.Run(what, func(t *testing.T) {
					cmd := exec.CommandContext(t.Context(), "sh", "-c", tt.line)
					cmd.Env = append(os.Environ(), "DOCKER_HOST="+address, "DOCKER_CONFIG="+t.TempDir(), "TERM=dumb")
					cmd.Stdin = strings.NewReader(tt.in)
					out, err := cmd.Output()
					if err != nil || !strings.HasSuffix(string(out), tt.want) { // a terminal echoes the end of its own input
						t.Errorf("%q, %v, want %q", out, err, tt.want)
					}
				})
			}
			if all := d.left(); len(all) != 0 {
				t.Errorf("left: %v", all)
			}
		})
	}
}

// pythonRuns is what users of the Python client do.
const pythonRuns = `
import docker, sys
c = docker.DockerClient(base_url=sys.argv[1], version="auto")
out = c.containers.run(IMAGE, ["sh", "-c", "echo $A; id -u"], environment={"A": "1"}, remove=True, user="1000", mem_limit="64m", tmpfs={"/t": "size=1m"},
    healthcheck={"test": ["CMD", "true"]}, ulimits=[docker.types.Ulimit(name="nofile", soft=100, hard=200)], labels=["x"], cap_drop=["ALL"], read_only=True,
    log_config=docker.types.LogConfig(type="json-file", config={"max-size": "1m"}), volumes={"py-vol": {"bind": "/v", "mode": "rw"}, DIR + "/a": {"bind": "/a", "mode": "ro"}})
assert out == b"1\n1000\n", out
n = c.networks.create("py-net", internal=True)
ct = c.containers.run(IMAGE, "sleep 600", detach=True, network="py-net", name="py-1", ports={"80/tcp": ("127.0.0.1", None)}, restart_policy={"Name": "on-failure", "MaximumRetryCount": 1},
    mounts=[docker.types.Mount("/m", "py-vol"), docker.types.Mount("/b", DIR + "/a", type="bind", read_only=True)], init=True, stdin_open=True, tty=True, working_dir="/", hostname="h")
ct.update(mem_limit="80m", memswap_limit="80m")
ct.restart(timeout=0)
ct.reload()
assert ct.attrs["HostConfig"]["Memory"] == 80 << 20
assert list(ct.attrs["NetworkSettings"]["Networks"]) == ["py-net"], ct.attrs["NetworkSettings"]
for wish in ({"privileged": True}, {"volumes": ["/etc:/x"]}, {"pid_mode": "host"}, {"network_mode": "host"}, {"devices": ["/dev/null"]}, {"links": {"py-1": "x"}}):
    try:
        c.containers.create(IMAGE, "true", **wish)
    except docker.errors.APIError as e:
        assert e.status_code == 403 and "denied by policy" in e.explanation, e
    else:
        raise AssertionError(wish)
try:
    c.containers.create("berm.local/missing")
except docker.errors.ImageNotFound:
    pass
ct.remove(force=True)
n.remove()
c.volumes.get("py-vol").remove()
print("done")
`

func TestClientsPython(t *testing.T) {
	if err := exec.CommandContext(t.Context(), "python3", "-c", "import docker").Run(); err != nil {
		private.Lacking(t, "python", err)
	}
	host, direct := testEngine(t)
	dir := workDir(t)
	noError(t, exec.CommandContext(t.Context(), "mkdir", dir+"/a").Run())
	d := doorTo(t, host, workRules(dir))
	left := sweepOwn(t, direct, d)
	address := d.listen(Caller{Name: "python", Tenant: "python"})
	script := "IMAGE = \"" + testImage + "\"\nDIR = \"" + dir + "\"\n" + pythonRuns
	out, err := exec.CommandContext(t.Context(), "python3", "-c", script, address).CombinedOutput()
	if err != nil || string(out) != "done\n" {
		t.Errorf("%v: %s", err, out)
	}
	if all := left(); err == nil && len(all) != 0 {
		t.Errorf("left: %v", all)
	}
}
